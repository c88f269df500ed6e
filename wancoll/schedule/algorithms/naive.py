"""Naive all-reduce: gather at rank 0, broadcast. What others are compared with."""

from __future__ import annotations

from wancoll.schedule.build import Builder, Shape, result_at


def all_reduce(builder: Builder, shape: Shape) -> None:
    """All send to rank 0, which reduces in rank order and sends the result to all.

    With a codec contributions are encoded once, and rank 0's own is not. Rank 0 needs scratch memory for N-2 tensors.
    """
    own = builder.mine(0, shape.nbytes)
    if builder.rank != 0:
        builder.send(0, own)
        builder.recv(0, 0, shape.nbytes, result=0)
        return
    value = builder.reduce_from(range(builder.world_size), own, to=result_at(0), last=True)
    for peer in builder.rightwards:
        value = builder.send(peer, value)
