"""Ring schedules: every rank receives from its left neighbour and sends to its right one.

Patarasuk and Yuan, 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations".
"""

from __future__ import annotations

from itertools import accumulate

from wancoll.schedule.build import Builder, Shape, result_at, spans


def all_reduce(builder: Builder, shape: Shape) -> None:
    """Reduce-scatter, then all-gather: 2(N-1) hops of a chunk each.

    Chunk c starts at rank c with that rank's own bytes, is reduced at ranks c+1, c+2, ... (own op received) and is
    final at rank c-1; the all-gather then passes it on around the ring. With a codec every hop of the first half
    encodes anew, unless sums stay raw.
    """
    n, rank = builder.world_size, builder.rank
    chunks = spans(shape, n, builder.coding)
    value = builder.mine(*chunks[rank])
    for hop in range(1, n):
        builder.send(builder.right, value, raw=builder.raw_sums)
        start, length = chunks[(rank - hop) % n]
        own, to = builder.mine(start, length), builder.making(start, length)
        value = builder.recv_reduced(builder.left, own, to=to, last=hop == n - 1, raw=builder.raw_sums)
    for hop in range(n - 1):
        builder.send(builder.right, value)
        start, length = chunks[(rank - hop) % n]
        value = builder.recv(builder.left, start, length, result=start)


def all_reduce_sparse(builder: Builder, shape: Shape) -> None:
    """N-1 hops: each rank passes on what every other one gives, encoded, and reduces all of it in rank order.

    That is less than sums would be, in worlds that sparse codecs are of use in.
    """
    n, rank = builder.world_size, builder.rank
    own = value = builder.mine(0, shape.nbytes)
    received = {rank: own}
    for hop in range(1, n):
        builder.send(builder.right, value)
        value = received[(rank - hop) % n] = builder.recv(builder.left, 0, shape.nbytes)
    to, total = builder.making(0, shape.nbytes), received[0]
    for other in range(1, n):
        total = builder.reduce(total, received[other], to=to, last=other == n - 1)


def reduce_scatter(builder: Builder, shape: Shape) -> None:
    """N-1 hops: block b starts at rank b+1, is reduced at b+2, b+3, ... (own op received) and is final at rank b."""
    n = builder.world_size
    value = builder.mine(0, shape.lengths[builder.left], shape.starts[builder.left])
    for hop in range(2, n + 1):
        builder.send(builder.right, value)
        block = (builder.rank - hop) % n
        last = hop == n
        own = builder.mine(0, shape.lengths[block], shape.starts[block])
        value = builder.recv_reduced(builder.left, own, to=result_at(0) if last else None, last=last)


def all_gather(builder: Builder, shape: Shape) -> None:
    """N-1 hops: each rank passes on what it received last, its own block first."""
    n, rank = builder.world_size, builder.rank
    starts = [0, *accumulate(shape.lengths)]
    value = builder.mine(builder.range_at(starts[rank]), shape.lengths[rank], 0)
    builder.keep(value, starts[rank])
    for hop in range(1, n):
        builder.send(builder.right, value)
        block = (rank - hop) % n
        at = builder.range_at(starts[block])
        value = builder.recv(builder.left, at, shape.lengths[block], result=starts[block])


def broadcast(builder: Builder, shape: Shape) -> None:
    """A chain from the root around the ring; every rank passes bytes on while the rest of them arrives."""
    if builder.rank == shape.root:
        value = builder.mine(0, shape.nbytes)
        builder.keep(value, 0)
    else:
        value = builder.recv(builder.left, 0, shape.nbytes, result=0)
    if builder.right != shape.root:
        builder.send(builder.right, value)


def reduce(builder: Builder, shape: Shape) -> None:
    """A chain that ends at the root: own op received, from rank root+1 on around the ring."""
    at_root = builder.rank == shape.root
    value = builder.mine(0, shape.nbytes)
    if builder.left != shape.root:
        value = builder.recv_reduced(builder.left, value, to=result_at(0) if at_root else None, last=at_root)
    if not at_root:
        builder.send(builder.right, value)


def gather(builder: Builder, shape: Shape) -> None:
    """A chain that ends at the root, where every rank sends its block and then what comes from its left neighbour."""
    n, rank, root, length = builder.world_size, builder.rank, shape.root, shape.nbytes
    value = builder.mine(builder.range_at(rank * length), length, 0)
    if rank == root:
        builder.keep(value, rank * length)
    else:
        builder.send(builder.right, value)
    for distance in range(1, 1 + (rank - root - 1) % n):
        start = (rank - distance) % n * length
        value = builder.recv(builder.left, builder.range_at(start), length, result=start if rank == root else None)
        if rank != root:
            builder.send(builder.right, value)


def scatter(builder: Builder, shape: Shape) -> None:
    """A chain from the root, which sends the block first that has the longest way."""
    n, rank, root, length = builder.world_size, builder.rank, shape.root, shape.nbytes
    if rank == root:
        builder.keep(builder.mine(0, length, shape.starts[root]), 0)
    here = (rank - root) % n
    for distance in range(n - 1, here, -1):
        if rank == root:
            value = builder.mine(0, length, shape.starts[(root + distance) % n])
        else:
            value = builder.recv(builder.left, 0, length)
        builder.send(builder.right, value)
    if rank != root:
        builder.recv(builder.left, 0, length, result=0)


def all_to_all(builder: Builder, shape: Shape) -> None:
    """N-1 rounds: in each, a rank passes on what its left neighbour sent but for the last block, which is its own.

    A block travels as far as it must, so that links carry N(N-1)/2 blocks each: this is for worlds where not all ranks
    can reach each other.
    """
    n, rank, length = builder.world_size, builder.rank, shape.nbytes
    at = builder.range_at(rank * length)
    builder.keep(builder.mine(at, length, shape.starts[rank]), rank * length)
    for distance in range(n - 1, 0, -1):
        builder.send(builder.right, builder.mine(at, length, shape.starts[(rank + distance) % n]))
    for hop in range(1, n):
        start = (rank - hop) % n * length
        at = builder.range_at(start)
        for _ in range(n - 1 - hop):
            builder.send(builder.right, builder.recv(builder.left, at, length))
        builder.recv(builder.left, at, length, result=start)
