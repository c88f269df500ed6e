"""The handshake on a data connection: daemon to daemon."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from wancoll.wire.fields import U64, Message, Name, Text


class LaneHello(Message, frozen=True):
    """First frame on a data connection. After LaneWelcome only engine frames follow."""

    protocol: int
    group: Name
    key: Annotated[bytes, Meta(min_length=16, max_length=16)]
    sender: U64  # mid of the dialler
    receiver: U64
    channel: Annotated[int, Meta(ge=0, le=1)]  # 0: collectives, 1: send and recv
    plan: U64  # stands for what the epoch's plan says of lanes; an end that knows another plan waits for the epoch
    lane: Annotated[int, Meta(ge=0, le=255)]
    generation: U64  # grows with every dial of the link; the highest wins


class ProbeHello(Message, frozen=True):
    """First frame of a connection that only asks who listens here, and how far away.

    After it come *nbytes* of anything; LaneWelcome answers when they have arrived. More ProbeHello may follow.
    """

    protocol: int
    daemon: Name
    nbytes: Annotated[int, Meta(ge=0, le=1 << 26)] = 0


class LaneWelcome(Message, frozen=True):
    """The lane is open."""

    daemon: Name


class LaneRefused(Message, frozen=True):
    """The lane is not opened; the dialler may try again."""

    reason: Text


LaneFirst = LaneHello | ProbeHello


LaneAnswer = LaneWelcome | LaneRefused
