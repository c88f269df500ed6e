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
