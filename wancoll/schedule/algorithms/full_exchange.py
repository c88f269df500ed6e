"""Full exchange all-reduce: one hop, for tensors so small that only the number of hops counts."""

from __future__ import annotations

from wancoll.schedule.build import Builder, Shape


def all_reduce(builder: Builder, shape: Shape) -> None:
    """Every rank sends its tensor to all, and each reduces all of them in rank order.

    With a codec every rank encodes the result for itself, all alike. It needs scratch memory for N-2 tensors.
    """
    own = builder.mine(0, shape.nbytes)
    for peer in builder.rightwards:
        builder.send(peer, own)
    builder.reduce_from(range(builder.world_size), own, to=builder.making(0, shape.nbytes), last=True)
