"""Full exchange all-reduce: one hop, for tensors so small that only the number of hops counts."""

from __future__ import annotations

from dataclasses import replace

from wancoll.schedule.build import Builder, Coding, back
from wancoll.schedule.direct import after
from wancoll.schedule.plan import Schedule


def all_reduce(rank: int, world_size: int, count: int, itemsize: int, coding: Coding | None = None) -> Schedule:
    """Every rank sends its tensor to all, and each reduces all of them in rank order.

    With a codec contributions are encoded once, a rank's own included: all ranks reduce the same decoded bytes, and the
    result is not encoded. Every rank needs scratch memory for N-2 tensors.

    Args:
        rank: whose schedule.
        world_size: ranks.
        count: elements of the tensor.
        itemsize: bytes of an element.
        coding: of what crosses the wire.
    """
    builder = Builder(rank, world_size, coding)
    own = builder.mine(0, count * itemsize)
    if world_size == 1:
        builder.keep(own, 0)
        return builder.finish()
    if coding is not None:
        own = replace(builder.encoded(own, measured=True), raw=None)
    for peer in after(rank, world_size):
        builder.send(peer, own)
    builder.reduce_from(range(world_size), own, home=back(0), last=True, alike=True)
    return builder.finish()
