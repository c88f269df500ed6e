"""Direct schedules: whoever has bytes sends them to whoever needs them, in one hop.

The all-reduce is the reduce-scatter and all-gather of Rabenseifner, 2004, "Optimization of collective reduction
operations", each by pairwise exchange: the fewest hops that the lowest bytes sent allow, over all N(N-1) links. Ranks
send to their right neighbour first, so that no one is everybody's first. Lengths and offsets are in bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from wancoll.schedule.build import Builder, Coding, back, spans
from wancoll.schedule.plan import Schedule


def all_reduce(rank: int, world_size: int, count: int, itemsize: int, coding: Coding | None = None) -> Schedule:
    """Two hops: every rank sends every owner its chunk, which reduces in rank order and sends the result to all.

    Chunk c belongs to rank c. With a codec contributions are encoded once, and the owner's own is not.

    Args:
        rank: whose schedule.
        world_size: ranks.
        count: elements of the tensor.
        itemsize: bytes of an element.
        coding: of what crosses the wire.
    """
    builder = Builder(rank, world_size, coding)
    if world_size == 1:
        builder.keep(builder.mine(0, count * itemsize), 0)
        return builder.finish()
    chunks = spans(count, itemsize, world_size, coding)
    for peer in after(rank, world_size):
        builder.send(peer, builder.mine(*chunks[peer]))
    own = builder.mine(*chunks[rank])
    value = builder.reduce_from(range(world_size), own, home=back(own.start), last=True)
    for peer in after(rank, world_size):
        value = builder.send(peer, value)
    for peer in before(rank, world_size):
        start, length = chunks[peer]
        builder.recv(peer, start, length, result=start)
    return builder.finish()


def reduce_scatter(rank: int, lengths: Sequence[int], blocks: Sequence[int]) -> Schedule:
    """Every rank sends every owner its block, which reduces in rank order.

    Args:
        rank: whose schedule.
        lengths: bytes of each rank's block.
        blocks: where each rank's block begins in front.
    """
    n = len(lengths)
    builder = Builder(rank, n)
    own = builder.mine(0, lengths[rank], blocks[rank])
    if n == 1:
        builder.keep(own, 0)
    for peer in after(rank, n):
        builder.send(peer, builder.mine(0, lengths[peer], blocks[peer]))
    builder.reduce_from(range(n), own, home=back(0), last=True)
    return builder.finish()


def all_gather(rank: int, lengths: Sequence[int]) -> Schedule:
    """Every rank sends its block to all.

    Args:
        rank: whose schedule.
        lengths: bytes of each rank's block.
    """
    n = len(lengths)
    builder = Builder(rank, n)
    starts = [0, *accumulate(lengths)]
    own = builder.mine(starts[rank], lengths[rank], 0)
    builder.keep(own, starts[rank])
    for peer in after(rank, n):
        builder.send(peer, own)
    for peer in before(rank, n):
        builder.recv(peer, starts[peer], lengths[peer], result=starts[peer])
    return builder.finish()


def broadcast(rank: int, world_size: int, root: int, length: int) -> Schedule:
    """The root sends to all.

    Args:
        rank: whose schedule.
        world_size: ranks.
        root: whose bytes.
        length: of the tensor, bytes.
    """
    builder = Builder(rank, world_size)
    if rank != root:
        builder.recv(root, 0, length, result=0)
        return builder.finish()
    own = builder.mine(0, length)
    builder.keep(own, 0)
    for peer in after(root, world_size):
        builder.send(peer, own)
    return builder.finish()


def reduce(rank: int, world_size: int, root: int, length: int) -> Schedule:
    """All send to the root, which reduces in rank order.

    Args:
        rank: whose schedule.
        world_size: ranks.
        root: who gets the result.
        length: of the tensor, bytes.
    """
    builder = Builder(rank, world_size)
    own = builder.mine(0, length)
    if rank != root:
        builder.send(root, own)
    elif world_size == 1:
        builder.keep(own, 0)
    else:
        builder.reduce_from(range(world_size), own, home=back(0), last=True)
    return builder.finish()


def gather(rank: int, world_size: int, root: int, length: int) -> Schedule:
    """All send their block to the root.

    Args:
        rank: whose schedule.
        world_size: ranks.
        root: who gets the blocks, in rank order.
        length: of a block, bytes.
    """
    builder = Builder(rank, world_size)
    own = builder.mine(rank * length, length, 0)
    if rank != root:
        builder.send(root, own)
        return builder.finish()
    builder.keep(own, own.start)
    for peer in after(root, world_size):
        builder.recv(peer, peer * length, length, result=peer * length)
    return builder.finish()


def scatter(rank: int, root: int, length: int, blocks: Sequence[int]) -> Schedule:
    """The root sends everyone a block.

    Args:
        rank: whose schedule.
        root: who has the blocks.
        length: of a block, bytes.
        blocks: where each rank's block begins in the root's front.
    """
    builder = Builder(rank, len(blocks))
    if rank != root:
        builder.recv(root, 0, length, result=0)
        return builder.finish()
    builder.keep(builder.mine(0, length, blocks[root]), 0)
    for peer in after(root, len(blocks)):
        builder.send(peer, builder.mine(0, length, blocks[peer]))
    return builder.finish()


def all_to_all(rank: int, length: int, blocks: Sequence[int]) -> Schedule:
    """Every rank sends every other one a block.

    Args:
        rank: whose schedule.
        length: of a block, bytes.
        blocks: where each rank's block begins in front; in back they are in the order of the ranks they came from.
    """
    n = len(blocks)
    builder = Builder(rank, n)
    builder.keep(builder.mine(rank * length, length, blocks[rank]), rank * length)
    for peer in after(rank, n):
        builder.send(peer, builder.mine(rank * length, length, blocks[peer]))
    for peer in before(rank, n):
        builder.recv(peer, peer * length, length, result=peer * length)
    return builder.finish()


def after(rank: int, world_size: int) -> list[int]:
    """The other ranks, the right neighbour first."""
    return [(rank + offset) % world_size for offset in range(1, world_size)]


def before(rank: int, world_size: int) -> list[int]:
    """The other ranks, the left neighbour first."""
    return [(rank - offset) % world_size for offset in range(1, world_size)]
