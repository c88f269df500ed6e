"""What `wancoll status` asks a master, and the answer."""

from __future__ import annotations

from wancoll.wire.epoch import Plan
from wancoll.wire.fields import Message


class StatusRequest(Message, frozen=True):
    """From `wancoll status`: may be the first and only message of a connection."""

    protocol: int


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
    """Whom an operation waits for. With *other* it is the link from *member* to there, in that direction."""

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
    kind: str  # "lost" or "unreachable"
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


class LinkStatus(Message, frozen=True):
    """What is known of the path from one daemon to another: LinkMeasure's fields."""

    source: str
    target: str
    rtt: float
    bandwidth: float
    lanes: int
    loss: float


class EventRecord(Message, frozen=True):
    """One line of the event log. time is seconds since 1970."""

    time: float
    group: str
    epoch: int
    kind: str
    text: str


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
