"""The handshake on a data connection, from daemon to daemon."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from wancoll.wire.messages.fields import Bits, First, Message, Name, Number, Text
from wancoll.wire.messages.relay_messages import AtRelay


class LaneHello(First, frozen=True):
    """First frame on a data connection. After LaneWelcome only engine frames follow."""

    group: Name
    key: Annotated[bytes, Meta(min_length=16, max_length=16)]
    sender: Number  # mid of the dialler
    receiver: Number
    channel: Annotated[int, Meta(ge=0, le=1)]  # 0: collectives, 1: send and recv
    plan: Bits  # stands for what the epoch's plan says of lanes; an end that knows another plan waits for the epoch
    lane: Annotated[int, Meta(ge=0, le=256)]  # the one after those of the plan is for notes
    generation: Number  # grows with every dial of a set of lanes; the highest wins
    checksums: bool = True  # whether the dialler wants payloads to carry one
    connection: Annotated[int, Meta(ge=1, le=1 << 62)] = 1  # of this lane; the highest wins. Even: of the receiver's


class ProbeHello(First, frozen=True):
    """First frame of a connection that only asks who listens here, and how far away.

    After it come *nbytes* of anything; LaneWelcome answers when they have arrived. More ProbeHello may follow. *fill*:
    bytes that the answer shall have, at least: whether so large a packet comes back.
    """

    daemon: Name
    nbytes: Annotated[int, Meta(ge=0, le=1 << 26)] = 0
    fill: Annotated[int, Meta(ge=0, le=1 << 16)] = 0


class LaneWelcome(Message, frozen=True):
    """The lane is open. Its payloads carry *checksums*, both ways, if either end wants it."""

    daemon: Name
    checksums: bool = True
    filler: bytes = b""


class LaneRefused(Message, frozen=True):
    """The lane is not opened; the dialler may try again, but not for this set of lanes where that is *over*."""

    reason: Text
    filler: bytes = b""
    over: bool = False


LaneFirst = LaneHello | ProbeHello | AtRelay
LaneAnswer = LaneWelcome | LaneRefused
