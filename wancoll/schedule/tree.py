"""Binomial trees: ceil(log2 N) steps of the whole tensor up, down, or both.

Thakur, Rabenseifner and Gropp, 2005, "Optimization of collective communication operations in MPICH". Places count from
the root, around the ring: place p is rank root + p. Place p's parent is p without its lowest set bit. Lengths are in
bytes.
"""

from __future__ import annotations

from wancoll.schedule.build import Builder, Coding, Value, back
from wancoll.schedule.plan import Place, Schedule


def all_reduce(rank: int, world_size: int, count: int, itemsize: int, coding: Coding | None = None) -> Schedule:
    """Up to rank 0, which reduces in the order ((x0 op x1) op (x2 op x3)) op ..., and down again.

    With a codec every level encodes anew on the way up; the result is encoded once, by the root.

    Args:
        rank: whose schedule.
        world_size: ranks.
        count: elements of the tensor.
        itemsize: bytes of an element.
        coding: of what crosses the wire.
    """
    builder, length = Builder(rank, world_size, coding), count * itemsize
    if world_size == 1:
        builder.keep(builder.mine(0, length), 0)
        return builder.finish()
    value = _up(builder, 0, builder.mine(0, length), back(0))
    if rank != 0:
        value = builder.recv(_parent(rank, world_size, 0), 0, length, result=0)
    _down(builder, 0, value)
    return builder.finish()


def broadcast(rank: int, world_size: int, root: int, length: int) -> Schedule:
    """Down from the root, to the largest subtree first.

    Args:
        rank: whose schedule.
        world_size: ranks.
        root: whose bytes.
        length: of the tensor, bytes.
    """
    builder = Builder(rank, world_size)
    if rank == root:
        value = builder.mine(0, length)
        builder.keep(value, 0)
    else:
        value = builder.recv(_parent(rank, world_size, root), 0, length, result=0)
    _down(builder, root, value)
    return builder.finish()


def reduce(rank: int, world_size: int, root: int, length: int) -> Schedule:
    """Up to the root, in the order ((y0 op y1) op (y2 op y3)) op ..., where y is what the places have.

    Args:
        rank: whose schedule.
        world_size: ranks.
        root: who gets the result.
        length: of the tensor, bytes.
    """
    builder = Builder(rank, world_size)
    own = builder.mine(0, length)
    if world_size == 1:
        builder.keep(own, 0)
    else:
        _up(builder, root, own, back(0) if rank == root else None)
    return builder.finish()


def _up(builder: Builder, root: int, value: Value, home: Place | None) -> Value:
    """Reduce what the children send, nearest first, at *home* (None: scratch), and send it to the parent."""
    n = builder.world_size
    children = _children(builder.rank, n, root)
    if children and home is None:
        home = builder.room(value.length)
    for child in children:
        last = builder.rank == root and child == children[-1]
        value = builder.recv_reduced(child, value, home=home, last=last)
    if builder.rank != root:
        value = builder.send(_parent(builder.rank, n, root), value)
    return value


def _down(builder: Builder, root: int, value: Value) -> None:
    for child in reversed(_children(builder.rank, builder.world_size, root)):
        value = builder.send(child, value)


def _parent(rank: int, world_size: int, root: int) -> int:
    place = (rank - root) % world_size
    return ((place & (place - 1)) + root) % world_size


def _children(rank: int, world_size: int, root: int) -> list[int]:
    """The smallest subtree first: its bytes are there first."""
    place = (rank - root) % world_size
    below = place & -place or world_size
    masks = [1 << level for level in range(world_size.bit_length())]
    return [(place + mask + root) % world_size for mask in masks if mask < below and place + mask < world_size]
