"""An epoch as the master announces it: members, plan, what was given up."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from wancoll.wire.fields import U64, Addresses, Count, Message, Name, Site, Text, World


class MemberInfo(Message, frozen=True):
    """One member of an epoch."""

    mid: U64
    name: Name
    daemon: Name
    addresses: Addresses
    site: Site


class Plan(Message, frozen=True):
    """What the master decided for an epoch, so that the same call gives the same schedule everywhere."""

    lanes: Annotated[int, Meta(ge=1, le=256)]
    stripe: Annotated[int, Meta(ge=1, le=1 << 31)]  # bytes; transfers are not cut into smaller parts
    turns: bool  # whether ops take turns on the lanes, or all start at lane 0
    # By kind (its name): (up to this many bytes of the larger tensor, algorithm), ascending; the last bound is 0, no
    # limit. A kind that is missing takes its default.
    choices: dict[str, list[tuple[Count, Name]]]
    avoid: Annotated[list[tuple[U64, U64]], Meta(max_length=4096)]  # pairs of mids that cannot reach each other
    pacing: Count  # bytes per second of one lane; 0: no limit
    congestion: Annotated[str, Meta(max_length=32)]  # congestion control of the lanes; "": each daemon's setting
    spares: bool = False  # whether links to the members two places away are kept up, who are next to us after a loss
    tracks: Annotated[int, Meta(ge=1, le=256)] = 1  # lanes with the same number modulo this share what is to be sent


class Void(Message, frozen=True):
    """Op *seq* was given up for every member. *error* names a class of wancoll.errors; *calls*: who called what."""

    seq: U64
    error: Name
    text: Text
    calls: dict[str, str]


class Epoch(Message, frozen=True):
    """A new epoch for member *to*. What lies above *committed_upto* is void and runs again, but for *voids*."""

    group: Name
    to: U64
    term: U64
    epoch: U64
    members: list[MemberInfo]  # in rank order
    plan: Plan
    key: Annotated[bytes, Meta(min_length=16, max_length=16)]  # proves that a lane's dialler is of this group
    min_world: World
    committed_upto: U64
    voids: list[Void]
    reason: Text
