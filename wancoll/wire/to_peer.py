"""What the master says to a peer."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from wancoll.wire.epoch import Epoch
from wancoll.wire.fields import U64, Addresses, Count, Message, Name, Text
from wancoll.wire.local import Ok
from wancoll.wire.status import Status


class Welcome(Message, frozen=True):
    """Answer to Hello. *term* grows with each master; times are seconds."""

    protocol: int
    term: U64
    heartbeat_interval: float
    heartbeat_timeout: float
    master: U64 = 0  # random, fresh at each start of a master


class Pong(Message, frozen=True):
    """Answer to Heartbeat."""

    number: U64
    term: U64


class Joined(Message, frozen=True):
    """The Join is noted; *mid* names the member from now on. *reason* says what it waits for."""

    group: Name
    member: Name
    mid: U64
    reason: Text


class Refused(Message, frozen=True):
    """The Join is refused, for good."""

    group: Name
    member: Name
    reason: Text


class Commit(Message, frozen=True):
    """All ops of *epoch* up to *upto* are committed."""

    group: Name
    epoch: U64
    upto: U64
    term: U64


class Resumed(Message, frozen=True):
    """Answer to Report: all have reported, *epoch* goes on. Whatever of it is not settled is said (again) now."""

    group: Name
    to: U64
    epoch: U64
    term: U64


class Abort(Message, frozen=True):
    """Stop the ops of *epoch*; the next Epoch follows. With *ask* > 0: answer with Mismatch for seq *ask*."""

    group: Name
    epoch: U64
    ask: U64
    reason: Text


class Matched(Message, frozen=True):
    """The exchange *number* of member *to* has found its other half. Exchanges of a pair run in their *order*."""

    group: Name
    to: U64
    epoch: U64
    number: U64
    order: U64  # counts the group's exchanges


class Settled(Message, frozen=True):
    """The exchange *number* of member *to* is committed, or failed with *error*, a class of wancoll.errors."""

    group: Name
    to: U64
    epoch: U64
    number: U64
    digest: U64  # of the bytes, as the receiver has them
    error: Annotated[str, Meta(max_length=128)]
    text: Text
    calls: dict[str, str]
    other: U64 = 0  # number of the other half


class Evicted(Message, frozen=True):
    """Member *mid* is out. Ops up to *committed_upto* had committed."""

    group: Name
    mid: U64
    reason: Text
    committed_upto: U64
    unknown: bool = False  # nobody knows whether others had


class Waited(Message, frozen=True):
    """Answer to Waits: what the group's oldest slow operation waits for, in words; "": not known."""

    group: Name
    to: U64
    epoch: U64
    seq: U64  # of that operation; 0: none
    text: Text
    parked: Annotated[list[U64], Meta(max_length=1024)]  # mids that hold the member's bytes back for good reason


class Redial(Message, frozen=True):
    """Member *to* shall make its links to *others* (empty: all) anew that are up for longer than *older* seconds.

    What is on them is lost: the other end has let go of them, or nothing moves and nobody knows why.
    """

    group: Name
    to: U64
    epoch: U64
    others: Annotated[list[U64], Meta(max_length=1024)]
    older: float
    reason: Text


class Probe(Message, frozen=True):
    """Member *prober* of your daemon: say whether a data port answers at *addresses* (those of *target*)."""

    group: Name
    joiner: U64
    prober: U64
    target: U64
    daemon: Name  # who should answer there
    addresses: Addresses


class MeasureLink(Message, frozen=True):
    """Measure the path to *daemon* at *addresses* with about *nbytes* of data, when nothing else is under way."""

    daemon: Name
    addresses: Addresses
    nbytes: Count


class StandsBy(Message, frozen=True):
    """Instead of Welcome or Status: this master does not lead, *leader* does ("host:port"; "": nobody is known to)."""

    leader: Annotated[str, Meta(max_length=300)]
    term: U64  # of the leader; 0: not known


class Bye(Message, frozen=True):
    """The master closes this connection, and why."""

    reason: Text


FromMaster = (
    Welcome
    | Pong
    | Joined
    | Refused
    | Epoch
    | Commit
    | Resumed
    | Abort
    | Matched
    | Settled
    | Evicted
    | Waited
    | Redial
    | Probe
    | MeasureLink
    | Status
    | StandsBy
    | Bye
    | Ok
)
