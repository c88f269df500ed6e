"""Naive all-reduce: gather at rank 0, broadcast. What others are compared with."""

from __future__ import annotations

from wancoll.schedule.build import Builder, Coding, back
from wancoll.schedule.plan import Schedule


def all_reduce(rank: int, world_size: int, count: int, itemsize: int, coding: Coding | None = None) -> Schedule:
    """All send to rank 0, which reduces in rank order and sends the result to all.

    With a codec contributions are encoded once, and rank 0's own is not. Rank 0 needs scratch memory for N-2 tensors.

    Args:
        rank: whose schedule.
        world_size: ranks.
        count: elements of the tensor.
        itemsize: bytes of an element.
        coding: of what crosses the wire.
    """
    builder, length = Builder(rank, world_size, coding), count * itemsize
    own = builder.mine(0, length)
    if world_size == 1:
        builder.keep(own, 0)
    elif rank != 0:
        builder.send(0, own)
        builder.recv(0, 0, length, result=0)
    else:
        value = builder.reduce_from(range(world_size), own, home=back(0), last=True)
        for peer in range(1, world_size):
            value = builder.send(peer, value)
    return builder.finish()
