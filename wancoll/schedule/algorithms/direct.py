"""Direct schedules: whoever has bytes sends them to whoever needs them, in one hop.

The all-reduce is the reduce-scatter and all-gather of Rabenseifner, 2004, "Optimization of collective reduction
operations", each by pairwise exchange: the fewest hops that the lowest bytes sent allow, over all N(N-1) links. Ranks
send to their right neighbour first, so that no one is everybody's first.
"""

from __future__ import annotations

from itertools import accumulate

from wancoll.schedule.build import Builder, Shape, result_at, spans


def all_reduce(builder: Builder, shape: Shape) -> None:
    """Two hops: every rank sends every owner its chunk, which reduces in rank order and sends the result to all.

    Chunk c belongs to rank c. Whoever owns it, it is reduced in rank order: shares change no bit.
    """
    chunks = spans(shape, builder.world_size, builder.coding, shape.shares)
    for peer in builder.rightwards:
        builder.send(peer, builder.mine(*chunks[peer]))
    own = builder.mine(*chunks[builder.rank])
    to = builder.making(own.start, own.length)
    value = builder.reduce_from(range(builder.world_size), own, to=to, last=True)
    for peer in builder.rightwards:
        value = builder.send(peer, value)
    for peer in builder.leftwards:
        start, length = chunks[peer]
        builder.recv(peer, start, length, result=start)


def reduce_scatter(builder: Builder, shape: Shape) -> None:
    """Every rank sends every owner its block, which reduces in rank order."""
    own = builder.mine(0, shape.lengths[builder.rank], shape.starts[builder.rank])
    for peer in builder.rightwards:
        builder.send(peer, builder.mine(0, shape.lengths[peer], shape.starts[peer]))
    builder.reduce_from(range(builder.world_size), own, to=result_at(0), last=True)


def all_gather(builder: Builder, shape: Shape) -> None:
    """Every rank sends its block to all."""
    starts = [0, *accumulate(shape.lengths)]
    own = builder.mine(builder.range_at(starts[builder.rank]), shape.lengths[builder.rank], 0)
    builder.keep(own, starts[builder.rank])
    for peer in builder.rightwards:
        builder.send(peer, own)
    for peer in builder.leftwards:
        builder.recv(peer, builder.range_at(starts[peer]), shape.lengths[peer], result=starts[peer])


def broadcast(builder: Builder, shape: Shape) -> None:
    """The root sends to all."""
    if builder.rank != shape.root:
        builder.recv(shape.root, 0, shape.nbytes, result=0)
        return
    own = builder.mine(0, shape.nbytes)
    builder.keep(own, 0)
    for peer in builder.rightwards:
        builder.send(peer, own)


def reduce(builder: Builder, shape: Shape) -> None:
    """All send to the root, which reduces in rank order."""
    own = builder.mine(0, shape.nbytes)
    if builder.rank != shape.root:
        builder.send(shape.root, own)
    else:
        builder.reduce_from(range(builder.world_size), own, to=result_at(0), last=True)


def gather(builder: Builder, shape: Shape) -> None:
    """All send their block to the root."""
    length = shape.nbytes
    own = builder.mine(builder.range_at(builder.rank * length), length, 0)
    if builder.rank != shape.root:
        builder.send(shape.root, own)
        return
    builder.keep(own, builder.rank * length)
    for peer in builder.rightwards:
        builder.recv(peer, builder.range_at(peer * length), length, result=peer * length)


def scatter(builder: Builder, shape: Shape) -> None:
    """The root sends everyone a block."""
    if builder.rank != shape.root:
        builder.recv(shape.root, 0, shape.nbytes, result=0)
        return
    builder.keep(builder.mine(0, shape.nbytes, shape.starts[shape.root]), 0)
    for peer in builder.rightwards:
        builder.send(peer, builder.mine(0, shape.nbytes, shape.starts[peer]))


def barrier(builder: Builder, shape: Shape) -> None:
    """Every rank tells every other one that it is there: one hop, and who has heard all knows that all have called."""
    for peer in builder.rightwards:
        builder.send_nothing(peer)
    for peer in builder.leftwards:
        builder.recv_nothing(peer)


def all_to_all(builder: Builder, shape: Shape) -> None:
    """Every rank sends every other one a block."""
    rank, length = builder.rank, shape.nbytes
    at = builder.range_at(rank * length)
    builder.keep(builder.mine(at, length, shape.starts[rank]), rank * length)
    for peer in builder.rightwards:
        builder.send(peer, builder.mine(at, length, shape.starts[peer]))
    for peer in builder.leftwards:
        builder.recv(peer, builder.range_at(peer * length), length, result=peer * length)
