"""Binomial trees: ceil(log2 N) hops of the whole tensor up, down, or both.

Thakur, Rabenseifner and Gropp, 2005, "Optimization of collective communication operations in MPICH". Ranks are known
by their distance from the root, around the ring: that of rank root + d is d. The parent is at d without its lowest set
bit.
"""

from __future__ import annotations

from wancoll.schedule.build import Builder, Shape, Value, result_at
from wancoll.schedule.steps import Place


def all_reduce(builder: Builder, shape: Shape) -> None:
    """Up to rank 0, which reduces in the order ((x0 op x1) op (x2 op x3)) op ..., and down again.

    With a codec every level encodes anew on the way up; the result is encoded once, by the root.
    """
    value = _up(builder, 0, builder.mine(0, shape.nbytes), builder.making(0, shape.nbytes))
    if builder.rank != 0:
        value = builder.recv(_parent(builder, 0), 0, shape.nbytes, result=0)
    _down(builder, 0, value)


def broadcast(builder: Builder, shape: Shape) -> None:
    """Down from the root, to the largest subtree first."""
    if builder.rank == shape.root:
        value = builder.mine(0, shape.nbytes)
        builder.keep(value, 0)
    else:
        value = builder.recv(_parent(builder, shape.root), 0, shape.nbytes, result=0)
    _down(builder, shape.root, value)


def reduce(builder: Builder, shape: Shape) -> None:
    """Up to the root, in the order ((y0 op y1) op (y2 op y3)) op ..., where yd is what distance d has."""
    _up(builder, shape.root, builder.mine(0, shape.nbytes), result_at(0) if builder.rank == shape.root else None)


def _up(builder: Builder, root: int, value: Value, to: Place | None) -> Value:
    """Reduce what the children send, nearest first, at *to* (None: scratch), and send it to the parent."""
    children = _children(builder, root)
    if children and to is None:
        to = builder.room(value.length)
    for child in children:
        last = builder.rank == root and child == children[-1]
        value = builder.recv_reduced(child, value, to=to, last=last)
    if builder.rank != root:
        value = builder.send(_parent(builder, root), value)
    return value


def _down(builder: Builder, root: int, value: Value) -> None:
    for child in reversed(_children(builder, root)):
        value = builder.send(child, value)


def _parent(builder: Builder, root: int) -> int:
    distance = (builder.rank - root) % builder.world_size
    return ((distance & (distance - 1)) + root) % builder.world_size


def _children(builder: Builder, root: int) -> list[int]:
    """The smallest subtree first: its bytes are there first."""
    n = builder.world_size
    distance = (builder.rank - root) % n
    below = distance & -distance or n
    masks = [1 << level for level in range(n.bit_length())]
    return [(distance + mask + root) % n for mask in masks if mask < below and distance + mask < n]
