"""Ring schedules: every rank receives from its left neighbour and sends to its right one.

Patarasuk and Yuan, 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations". Lengths and offsets
are in bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from wancoll.schedule.build import Builder, Coding, back, spans
from wancoll.schedule.plan import Schedule


def all_reduce(rank: int, world_size: int, count: int, itemsize: int, coding: Coding | None = None) -> Schedule:
    """Reduce-scatter, then all-gather: 2(N-1) steps of a chunk each.

    Chunk c starts at rank c with that rank's own bytes, is reduced at ranks c+1, c+2, ... (own op received) and is
    final at rank c-1; the all-gather then passes it on around the ring. With a codec every hop of the first half
    encodes anew.

    Args:
        rank: whose schedule.
        world_size: ranks.
        count: elements of the tensor.
        itemsize: bytes of an element.
        coding: of what crosses the wire.
    """
    builder, n = Builder(rank, world_size, coding), world_size
    if n == 1:
        builder.keep(builder.mine(0, count * itemsize), 0)
        return builder.finish()
    chunks = spans(count, itemsize, n, coding)
    right, left = (rank + 1) % n, (rank - 1) % n
    value = builder.mine(*chunks[rank])
    for step in range(1, n):
        builder.send(right, value)
        start, length = chunks[(rank - step) % n]
        value = builder.recv_reduced(left, builder.mine(start, length), home=back(start), last=step == n - 1)
    for step in range(n - 1):
        builder.send(right, value)
        start, length = chunks[(rank - step) % n]
        value = builder.recv(left, start, length, result=start)
    return builder.finish()


def reduce_scatter(rank: int, lengths: Sequence[int], blocks: Sequence[int]) -> Schedule:
    """N-1 steps: block b starts at rank b+1, is reduced at b+2, b+3, ... (own op received) and is final at rank b.

    Args:
        rank: whose schedule.
        lengths: bytes of each rank's block.
        blocks: where each rank's block begins in front.
    """
    n = len(lengths)
    builder = Builder(rank, n)
    right, left = (rank + 1) % n, (rank - 1) % n
    if n == 1:
        builder.keep(builder.mine(0, lengths[0], blocks[0]), 0)
        return builder.finish()
    value = builder.mine(0, lengths[left], blocks[left])
    for step in range(2, n + 1):
        builder.send(right, value)
        block = (rank - step) % n
        last = step == n
        own = builder.mine(0, lengths[block], blocks[block])
        value = builder.recv_reduced(left, own, home=back(0) if last else None, last=last)
    return builder.finish()


def all_gather(rank: int, lengths: Sequence[int]) -> Schedule:
    """N-1 steps: each rank passes on what it received in the step before, its own block first.

    Args:
        rank: whose schedule.
        lengths: bytes of each rank's block.
    """
    n = len(lengths)
    builder = Builder(rank, n)
    starts = [0, *accumulate(lengths)]
    value = builder.mine(starts[rank], lengths[rank], 0)
    builder.keep(value, starts[rank])
    for step in range(1, n):
        builder.send((rank + 1) % n, value)
        block = (rank - step) % n
        value = builder.recv((rank - 1) % n, starts[block], lengths[block], result=starts[block])
    return builder.finish()


def broadcast(rank: int, world_size: int, root: int, length: int) -> Schedule:
    """A chain from the root around the ring; every rank passes bytes on while the rest of them arrives.

    Args:
        rank: whose schedule.
        world_size: ranks.
        root: whose bytes.
        length: of the tensor, bytes.
    """
    builder, n = Builder(rank, world_size), world_size
    if rank == root:
        value = builder.mine(0, length)
        builder.keep(value, 0)
    else:
        value = builder.recv((rank - 1) % n, 0, length, result=0)
    if (rank + 1) % n != root:
        builder.send((rank + 1) % n, value)
    return builder.finish()


def reduce(rank: int, world_size: int, root: int, length: int) -> Schedule:
    """A chain that ends at the root: own op received, from rank root+1 on around the ring.

    Args:
        rank: whose schedule.
        world_size: ranks.
        root: who gets the result.
        length: of the tensor, bytes.
    """
    builder, n = Builder(rank, world_size), world_size
    value = builder.mine(0, length)
    if n == 1:
        builder.keep(value, 0)
        return builder.finish()
    if (rank - 1) % n != root:
        home = back(0) if rank == root else None
        value = builder.recv_reduced((rank - 1) % n, value, home=home, last=rank == root)
    if rank != root:
        builder.send((rank + 1) % n, value)
    return builder.finish()


def gather(rank: int, world_size: int, root: int, length: int) -> Schedule:
    """A chain that ends at the root, where every rank sends its block and then what comes from its left neighbour.

    Args:
        rank: whose schedule.
        world_size: ranks.
        root: who gets the blocks, in rank order.
        length: of a block, bytes.
    """
    builder, n = Builder(rank, world_size), world_size
    value = builder.mine(rank * length, length, 0)
    if rank == root:
        builder.keep(value, value.start)
    else:
        builder.send((rank + 1) % n, value)
    for distance in range(1, 1 + (rank - root - 1) % n):
        start = (rank - distance) % n * length
        value = builder.recv((rank - 1) % n, start, length, result=start if rank == root else None)
        if rank != root:
            builder.send((rank + 1) % n, value)
    return builder.finish()


def scatter(rank: int, root: int, length: int, blocks: Sequence[int]) -> Schedule:
    """A chain from the root, which sends the block first that has the longest way.

    Args:
        rank: whose schedule.
        root: who has the blocks.
        length: of a block, bytes.
        blocks: where each rank's block begins in the root's front.
    """
    n = len(blocks)
    builder = Builder(rank, n)
    if rank == root:
        builder.keep(builder.mine(0, length, blocks[root]), 0)
    here = (rank - root) % n
    for distance in range(n - 1, here, -1):
        if rank == root:
            value = builder.mine(0, length, blocks[(root + distance) % n])
        else:
            value = builder.recv((rank - 1) % n, 0, length)
        builder.send((rank + 1) % n, value)
    if rank != root:
        builder.recv((rank - 1) % n, 0, length, result=0)
    return builder.finish()


def all_to_all(rank: int, length: int, blocks: Sequence[int]) -> Schedule:
    """N-1 rounds: in each, a rank passes on what its left neighbour sent but for the last block, which is its own.

    A block travels as far as it must, so that links carry N(N-1)/2 blocks each: this is for worlds where not all ranks
    can reach each other.

    Args:
        rank: whose schedule.
        length: of a block, bytes.
        blocks: where each rank's block begins in front; in back they are in the order of the ranks they came from.
    """
    n = len(blocks)
    builder = Builder(rank, n)
    right, left = (rank + 1) % n, (rank - 1) % n
    builder.keep(builder.mine(rank * length, length, blocks[rank]), rank * length)
    for distance in range(n - 1, 0, -1):
        builder.send(right, builder.mine(rank * length, length, blocks[(rank + distance) % n]))
    for hop in range(1, n):
        start = (rank - hop) % n * length
        for _ in range(n - 1 - hop):
            builder.send(right, builder.recv(left, start, length))
        builder.recv(left, start, length, result=start)
    return builder.finish()
