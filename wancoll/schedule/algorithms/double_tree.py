"""Two binary trees, each for one half of the tensor: who passes bytes on in the one is a leaf of the other.

Sanders, Speck and Träff, 2009, "Two-tree algorithms for full bandwidth broadcast, reduction and scan". A single tree
leaves half of its ranks' uplinks idle, and its inner ranks send the tensor twice; here both trees together load all
links alike, both ways. Bytes are passed on as they arrive, as in every schedule, so that halves need no cutting.

Ranks are known by their distance from the root, around the ring. The first tree has every rank at the place of its
distance; the second has the root at the same place, 0, and all others one further, the last one at place 1. Places
are in order: below a place are those just before it and just after it, as many as its lowest set bit says.
"""

from __future__ import annotations

from typing import NamedTuple

from wancoll.schedule.build import Builder, Shape, Value, result_at, spans
from wancoll.schedule.steps import Place


class _Half(NamedTuple):
    """Bytes [start, start + length), the rank to send them up to, -1 at the root, and those to send them down to."""

    start: int
    length: int
    parent: int
    children: list[int]


def all_reduce(builder: Builder, shape: Shape) -> None:
    """Up to rank 0 and down again, ceil(log2 N) hops each: 2 tensors sent and received by the busiest ranks.

    The order of the operands is that of the places: what is below and before a rank, the rank's own, what is below and
    behind it. With a codec every level encodes anew on the way up; the result is encoded once, by rank 0.
    """
    halves = _halves(builder, shape, 0)
    values = [_up(builder, half, builder.making(half.start, half.length)) for half in halves]
    for half, value in zip(halves, values, strict=True):
        result = value
        if half.parent >= 0:
            result = builder.recv(half.parent, half.start, half.length, result=half.start)
        _down(builder, half, result)


def broadcast(builder: Builder, shape: Shape) -> None:
    """Down from the root: no rank sends more than the tensor once."""
    for half in _halves(builder, shape, shape.root):
        if half.parent < 0:
            value = builder.mine(half.start, half.length)
            builder.keep(value, half.start)
        else:
            value = builder.recv(half.parent, half.start, half.length, result=half.start)
        _down(builder, half, value)


def reduce(builder: Builder, shape: Shape) -> None:
    """Up to the root, in the order of the places: see all_reduce. No rank receives more than the tensor once."""
    for half in _halves(builder, shape, shape.root):
        _up(builder, half, result_at(half.start) if half.parent < 0 else None)


def parent(distance: int, tree: int, world_size: int) -> int:
    """Distance from the root of the parent, in one of the trees (0, 1), of the rank at *distance*, which is not 0."""
    above = _above(_turned(distance, tree, world_size), world_size)
    return above and _turned(above, -tree, world_size)


def _turned(place: int, by: int, places: int) -> int:
    """*place* after those from 1 on were moved on *by*, around."""
    return (place - 1 + by) % (places - 1) + 1


def _above(place: int, places: int) -> int:
    lowest = place & -place
    above = place - lowest | 2 * lowest
    return above if above < places else place - lowest


def _halves(builder: Builder, shape: Shape, root: int) -> list[_Half]:
    n = builder.world_size
    me = (builder.rank - root) % n
    halves = []
    for tree, (start, length) in enumerate(spans(shape, 2, builder.coding)):
        others = [_turned(place, -tree, n) for place in range(1, n)]
        below = [(other + root) % n for other in others if parent(other, tree, n) == me]
        halves.append(_Half(start, length, (parent(me, tree, n) + root) % n if me else -1, below))
    return halves


def _up(builder: Builder, half: _Half, to: Place | None) -> Value:
    """Reduce what the children send at *to* (None: scratch), and send it to the parent."""
    value = builder.mine(half.start, half.length)
    if half.children and to is None:
        to = builder.room(half.length)
    for child in half.children:  # the root has one
        value = builder.recv_reduced(child, value, to=to, last=half.parent < 0)
    return value if half.parent < 0 else builder.send(half.parent, value)


def _down(builder: Builder, half: _Half, value: Value) -> None:
    for child in half.children:
        value = builder.send(child, value)
