"""Full exchange all-reduce: one hop, for tensors so small that only the number of hops counts."""

from __future__ import annotations

from wancoll.schedule.build import Builder, Shape, result_at


def all_reduce(builder: Builder, shape: Shape) -> None:
    """Every rank sends its tensor to all, and each reduces all of them in rank order.

    With a codec contributions are encoded once, a rank's own included: all ranks reduce the same decoded bytes, and the
    result is not encoded. Every rank needs scratch memory for N-2 tensors.
    """
    own = builder.mine(0, shape.nbytes)
    if builder.coding is not None:
        own = builder.encoded(own, measured=True)._replace(raw=None)
    for peer in builder.rightwards:
        builder.send(peer, own)
    builder.reduce_from(range(builder.world_size), own, to=result_at(0), last=True, alike=True)
