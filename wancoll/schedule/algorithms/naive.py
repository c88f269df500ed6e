"""Naive all-reduce: gather at rank 0, broadcast. What others are compared with."""

from __future__ import annotations

from wancoll.schedule.build import Builder, Shape


def all_reduce(builder: Builder, shape: Shape) -> None:
    """All send to rank 0, which reduces in rank order and sends the result to all.

    Rank 0 needs scratch memory for N-2 tensors.
    """
    own = builder.mine(0, shape.nbytes)
    if builder.rank != 0:
        builder.send(0, own)
        builder.recv(0, 0, shape.nbytes, result=0)
        return
    value = builder.reduce_from(range(builder.world_size), own, to=builder.making(0, shape.nbytes), last=True)
    for peer in builder.rightwards:
        value = builder.send(peer, value)
