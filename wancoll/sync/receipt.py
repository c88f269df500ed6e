"""What sync_state hands back. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SyncReceipt:
    """What a sync_state came to.

    Attributes:
        revision: of the state that won, which all contributors have now.
        holders: names of the members that voted and had that state before, in rank order.
        tensors: names of the tensors that were changed here, ascending.
        bytes_received: payload that came here and was right; each stripe counts once.
        bytes_sent: payload that this member sent and that arrived.
        bytes_repeated: payload of deliveries here that a loss interrupted, and that were or are made again: at most
            what was under way at that moment.
        tensors_moved: how many tensors were changed, over all contributors.
        bytes_moved: their stripes that differed, in bytes, over all contributors.
        contributors: names of the members that have the state now, in rank order.
        epoch: the epoch that agreed on it.
        rounds: how often stripes were shared out: 0 if all had the same state, 1 if nobody was lost.
        seconds: from the call to its end.
    """

    revision: int
    holders: tuple[str, ...]
    tensors: tuple[str, ...]
    bytes_received: int
    bytes_sent: int
    bytes_repeated: int
    tensors_moved: int
    bytes_moved: int
    contributors: tuple[str, ...]
    epoch: int
    rounds: int
    seconds: float
