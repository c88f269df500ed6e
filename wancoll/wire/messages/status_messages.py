"""Messages of those who look at a master or evict: `wancoll status`, `top`, `events`, `evict`."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from wancoll.wire.messages.epoch_messages import Plan
from wancoll.wire.messages.fields import Bits, First, Message, Name


class StatusRequest(First, frozen=True):
    """From `wancoll status`: may be the first and only message of a connection."""


class MemberStatus(Message, frozen=True):
    """A member as `wancoll status` shows it. state: "joining" or "member"."""

    name: str
    mid: int
    daemon: str
    state: str
    rank: int
    addresses: list[str]
    done_upto: int
    silent_for: float


class PlanStatus(Message, frozen=True):
    """What the master decided for a group's epoch, and from what; 0: not known."""

    plan: Plan
    bottleneck: float  # bytes per second of the ring's slowest edge
    round: float  # seconds once around the ring
    alpha: float  # seconds of a message, that the choices were made with
    beta: float  # seconds of a byte


class WaitCause(Message, frozen=True):
    """A member, or a link, that an operation waits for. With *other*: the link from *member* to *other*."""

    member: str
    rank: int
    other: str
    other_rank: int  # -1: it is the member, not a link
    why: str
    seconds: float  # that it has been so


class WaitStatus(Message, frozen=True):
    """An operation that has been waiting for longer than Limits.slow_after."""

    op: str  # "group/seq", or what was called of a send or recv
    seq: int  # 0: a send or recv
    epoch: int
    what: str  # "": no member has told yet
    nbytes: int
    seconds: float  # since the first member called it, as far as is known
    done: int  # members that are done with it
    causes: list[WaitCause]  # the first of many; empty: bytes move, or nobody stands out


class PairStatus(Message, frozen=True):
    """One member could not reach another, or lost the link to it. Kept for a while after it is over."""

    source: str
    target: str
    kind: str  # as in LinkDown
    why: str
    seconds: float  # since it began
    last: float  # seconds since it was last told of
    times: int
    done: str  # what the master did about it, last


class GroupStatus(Message, frozen=True):
    """A group as `wancoll status` shows it."""

    name: str
    phase: str
    epoch: int
    start_world: int
    min_world: int
    lanes: int
    committed_upto: int
    members: list[MemberStatus]
    waiting_for: str
    plan: PlanStatus | None = None  # None: forming
    waits: list[WaitStatus] = []  # oldest first
    pairs: list[PairStatus] = []  # newest first
    # Pairs of members, the first of many: bytes per second (0: not known), why not a better way ("": not known).
    punched: list[tuple[str, str, float, str]] = []  # both dial at once
    relayed: list[tuple[str, str, float, str]] = []  # they need a relay


class LinkStatus(Message, frozen=True):
    """What is known of the path from one daemon to another: LinkMeasure's fields, and what its links were given."""

    source: str
    target: str
    rtt: float
    bandwidth: float
    lanes: int
    loss: float
    sent: int = 0  # bytes; 0: not known, since nobody has looked for long


class EventRecord(Message, frozen=True):
    """One line of the event log. time is seconds since 1970."""

    time: float
    group: str
    epoch: int
    kind: str
    text: str


class Evict(First, frozen=True):
    """From `wancoll evict`: the first and only message of a connection. *everyone*: all of the group, no *member*."""

    group: Name
    member: Annotated[str, Meta(max_length=128)]
    everyone: bool
    reason: Annotated[str, Meta(max_length=500)]


class EvictAnswer(Message, frozen=True):
    """What came of it, or of an AskToLeave. Not *done*: *what* is wrong, in the words of an error."""

    done: bool
    what: str
    expected: str = ""
    got: str = ""
    hint: str = ""
    master: Bits = 0  # Welcome.master of the one that passed an AskToLeave on


class DaemonStatus(Message, frozen=True):
    """A daemon that is here: where its lanes are dialled, and its version."""

    name: str
    addresses: list[str]
    version: str


class Status(Message, frozen=True):
    """Answer to StatusRequest."""

    term: int
    uptime: float
    version: str
    daemons: list[str]
    groups: list[GroupStatus]
    events: list[EventRecord]  # newest last
    links: list[LinkStatus] = []  # that were measured, by source and target; the first of many
    resources: dict[str, int] = {}  # what the master holds: fds, threads, tasks, connections, memory, ...
    hosts: list[DaemonStatus] = []  # the daemons, by name; the first of many
    clock: float = 0.0  # the master's: seconds since 1970
    master: Bits = 0  # Welcome.master
    rotating: bool = False  # two keys of the master are good
    left: list[tuple[str, str]] = []  # group ("": a daemon) and name of who was asked to leave, and has in order
    gone: list[tuple[str, int, str]] = []  # groups of which nobody is here: members, and who did not say that it stops
    elected_by: str = ""  # Welcome's
    relays: list[str] = []  # that are here, in the order in which they are tried
