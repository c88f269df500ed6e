"""An epoch as the master announces it: members, plan, voids, and what changed since the last."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from wancoll.wire.messages.fields import Addresses, Calls, Goodbyes, Message, Name, Number, Rank, Site, Text, World
from wancoll.wire.messages.relay_messages import Way
from wancoll.wire.messages.trust_messages import KeyInEpoch


class MemberInfo(Message, frozen=True):
    """One member of an epoch."""

    mid: Number
    name: Name
    daemon: Name
    addresses: Addresses
    site: Site
    key: KeyInEpoch = b""  # the daemon's public key


class Plan(Message, frozen=True):
    """What the master decided for an epoch, so that the same call gives the same schedule everywhere."""

    lanes: Annotated[int, Meta(ge=1, le=256)]
    stripe: Annotated[int, Meta(ge=1, le=1 << 31)]  # bytes; steps are not cut into smaller parts
    turns: bool  # whether ops take turns on the lanes, or all start at lane 0
    # By kind (its name): (up to this many bytes of the larger tensor, algorithm), ascending; the last bound is 0, no
    # limit. A kind that is missing takes its default.
    choices: Annotated[dict[Name, Annotated[list[tuple[Number, Name]], Meta(max_length=64)]], Meta(max_length=64)]
    avoid: Annotated[list[tuple[Number, Number]], Meta(max_length=4096)]  # pairs of mids that cannot reach each other
    pacing: Number  # bytes per second of one lane; 0: no limit
    congestion: Annotated[str, Meta(max_length=32)]  # congestion control of the lanes; "": each daemon's setting
    spares: bool = False  # whether links to the members two places away are kept up, who are next to us after a loss
    lane_groups: Annotated[int, Meta(ge=1, le=256)] = 1  # lanes of one number modulo this share what is to be sent
    collectors: Name = "master"  # of votes that prove that all took part: the master, or the "members", each of all
    # How much of a tensor each rank owns in a direct all_reduce, as whole numbers to compare; []: all alike.
    shares: Annotated[list[Annotated[int, Meta(ge=0, le=1 << 16)]], Meta(max_length=1024)] = []
    # Pairs of mids that do not dial each other as others do. Of a pair whose way is direct the one that is named first
    # dials, else the younger.
    ways: Annotated[list[tuple[Number, Number, Way]], Meta(max_length=4096)] = []


class Void(Message, frozen=True):
    """Op *seq* was given up for every member. *error* names a class of wancoll.errors; *calls*: who called what."""

    seq: Number
    error: Name
    text: Text
    calls: Calls


class Epoch(Message, frozen=True):
    """A new epoch for member *to*. What lies above *committed_upto* has not happened and runs again, but *voids*."""

    group: Name
    to: Number
    term: Number
    epoch: Number
    members: Annotated[list[MemberInfo], Meta(min_length=1, max_length=1024)]  # in rank order, shards side by side
    plan: Plan
    key: Annotated[bytes, Meta(min_length=16, max_length=16)]  # proves that a lane's dialler is of this group
    min_world: World
    committed_upto: Number
    voids: Annotated[list[Void], Meta(max_length=8192)]
    reason: Text
    passed: bool = False  # update_memberships up to committed_upto have ended in the epoch before, with its members
    goodbyes: Goodbyes = []
    shards: World = 1  # members of an island, all of one rank


class EpochChange(Message, frozen=True):
    """A new epoch for member *to*, told by what changed since the epoch *base*, which the member was told last.

    wancoll.wire.epochs makes it and puts it together again: what is not here is as it was.
    """

    group: Name
    to: Number
    term: Number
    epoch: Number
    base: Number
    left: Annotated[list[Number], Meta(max_length=1024)]  # mids
    joined: Annotated[list[MemberInfo], Meta(max_length=1024)]  # also who is told of otherwise than before
    order: Annotated[list[Rank], Meta(max_length=1024)]  # by rank: place among who stayed, then joined; []: as they are
    plan: Plan | None
    committed_upto: Number
    voids: Annotated[list[Void], Meta(max_length=8192)]  # beside those of base that are above committed_upto
    reason: Text
    passed: bool = False
    goodbyes: Goodbyes = []
