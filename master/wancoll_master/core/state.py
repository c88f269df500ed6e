"""What the master knows, what can happen to it and what it can want done: plain data without behaviour. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from math import inf

from wancoll.limits import Limits
from wancoll.schedule.cost import LinkCost
from wancoll.wire import messages as m
from wancoll_master.plan.measures import Measures

# ---- events -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Received:
    """A message came over connection *conn* (a number that the shell never uses again)."""

    conn: int
    message: m.FromPeer


@dataclass(frozen=True, slots=True)
class Disconnected:
    """Connection *conn* is gone, and why."""

    conn: int
    reason: str


@dataclass(frozen=True, slots=True)
class Tick:
    """next_deadline() has come. A tick that comes late tells the master that it slept itself."""


Event = Received | Disconnected | Tick

# ---- commands ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Send:
    """Send *message* over *conn*."""

    conn: int
    message: m.FromMaster


@dataclass(frozen=True, slots=True)
class Broadcast:
    """Send the same bytes over all of *conns*."""

    conns: tuple[int, ...]
    message: m.FromMaster


@dataclass(frozen=True, slots=True)
class Announce:
    """Send *epoch* to each (conn, mid) of *to*, with Epoch.to set to the mid."""

    to: tuple[tuple[int, int], ...]
    epoch: m.Epoch


@dataclass(frozen=True, slots=True)
class SendStatus:
    """Send a Status over *conn*; report makes the parts that the state knows."""

    conn: int


@dataclass(frozen=True, slots=True)
class Close:
    """Say Bye with *reason* (if there is one), deliver what was sent before, close."""

    conn: int
    reason: str


@dataclass(frozen=True, slots=True)
class Used:
    """The newest epoch of a group, the mids of its members, and up to where all was committed when it began."""

    epoch: int
    mids: frozenset[int]
    base: int


@dataclass(frozen=True, slots=True)
class Persist:
    """Write the numbers, and a group's epoch, to the journal before anything that follows is sent."""

    epoch: int  # highest of any group
    next_mid: int
    group: str = ""  # that begins an epoch; "": none does
    used: Used | None = None


@dataclass(frozen=True, slots=True)
class Record:
    """One line for the event log."""

    group: str
    epoch: int
    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class StepDown:
    """Of an elected master: another one leads, or has led, with *term*. Lead no more; the next term is above it."""

    reason: str
    term: int


@dataclass(frozen=True, slots=True)
class Note:
    """One line for the log alone."""

    group: str
    epoch: int
    kind: str
    text: str


Command = Send | Broadcast | Announce | SendStatus | Close | Persist | Record | StepDown | Note

# ---- state ------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class Daemon:
    """A connected daemon. heard_at is on the shell's clock."""

    name: str
    conn: int
    incarnation: int
    addresses: list[str]
    lanes: int
    site: str
    heard_at: float
    max_lanes: int = 0
    congestion_controls: frozenset[str] = frozenset()
    measures: bool = False
    synced: bool = False  # it has named all members that it has
    members: dict[int, Member] = field(default_factory=dict)  # by mid, joining ones too


@dataclass(slots=True)
class ProbePair:
    """Whether a joiner and *member*'s daemon reach each other. None: not known yet.

    A pair that is not *asked* waits at *deadline* for a silent daemon to be heard again or to be given up.
    """

    member: Member
    asked: bool = False
    deadline: float = inf
    to_joiner: bool | None = None
    from_joiner: bool | None = None

    @property
    def ok(self) -> bool:
        """Both directions answered."""
        return self.to_joiner is True and self.from_joiner is True


@dataclass(frozen=True, slots=True)
class Told:
    """What a member said last of its slow operations."""

    message: m.Waits
    at: float


@dataclass(slots=True)
class Trouble:
    """A member's link to another was lost, or could not be made."""

    kind: str
    why: str
    since: float
    last: float
    times: int = 0
    done: str = ""  # what the master did about it


@dataclass(slots=True)
class Slow:
    """The operation of which the log says that it waits."""

    seq: int
    since: float


@dataclass(slots=True, eq=False)
class Member:
    """One client's place in a group: joining, then (in_epoch) a member; gone ones are forgotten."""

    mid: int
    name: str
    daemon: Daemon
    group: Group
    in_epoch: bool = False
    was: int = 0  # of a joiner: the mid that an earlier master gave it
    done_upto: int = 0
    probes: dict[int, ProbePair] = field(default_factory=dict)  # of a joiner, by the member's mid
    called: tuple[int, int, float] = (0, 0, -inf)  # epoch, highest seq that its client has called, and when it said so
    told: Told | None = None

    @property
    def reachable(self) -> bool:
        """Of a joiner: every probe was answered."""
        return all(found.ok for found in self.probes.values())


@dataclass(slots=True)
class Pending:
    """An op of the current epoch that some members are done with (or, for *update*, have posted)."""

    since: float
    update: bool
    digest: int
    fingerprint: int
    done: dict[int, int] = field(default_factory=dict)  # mid -> digest
    differs: bool = False  # not all digests are equal


@dataclass(slots=True)
class Asking:
    """The epoch is aborted; members are telling what they call at *seq*."""

    seq: int
    deadline: float
    calls: dict[int, str] = field(default_factory=dict)  # by mid


@dataclass(frozen=True, slots=True)
class Half:
    """A send or a recv."""

    member: Member
    call: m.P2PCall


@dataclass(slots=True)
class Match:
    """A send and the recv that takes its bytes."""

    send: Half
    recv: Half
    sent: bool = False
    received: bool = False
    digest: int = 0


@dataclass(slots=True)
class P2PBook:
    """Sends and recvs of the current epoch."""

    # (sender, receiver, tag) -> calls in order, all of them sends or all recvs
    waiting: dict[tuple[int, int, int], deque[Half]] = field(default_factory=dict)
    running: dict[int, Match] = field(default_factory=dict)  # by order
    newest: dict[int, int] = field(default_factory=dict)  # mid -> number of its newest call
    open: dict[int, int] = field(default_factory=dict)  # mid -> calls that are not settled


@dataclass(slots=True)
class Complaint:
    """A member's word that its link to another is down."""

    kind: str  # "lost" or "unreachable"
    reason: str
    at: float
    committed: int  # of the group, then


@dataclass(frozen=True, slots=True)
class Planned:
    """A group's plan, and what it was made from."""

    plan: m.Plan
    cost: LinkCost | None = None  # None: nothing was known
    tried: dict[int, float] = field(default_factory=dict)  # lanes -> bytes per second of the slowest uplink
    settled: bool = False  # more lanes gain nothing
    looks: int = 0  # for a better plan, since these lanes are in use
    raised: float = (
        0.0  # bytes per second of the slowest uplink when the pace was raised to see whether it is the limit
    )


@dataclass(slots=True)
class Asked:
    """A daemon was asked to measure its path to another one."""

    deadline: float = -inf  # until then the round trip is waited for
    burst_deadline: float = -inf  # and until then its bandwidth
    burst_at: float = -inf  # when that was asked for


@dataclass(slots=True)
class Rebuild:
    """Members of a group that an earlier master knew are reporting."""

    deadline: float
    reports: dict[int, tuple[Daemon, m.Report]] = field(default_factory=dict)  # by mid


@dataclass(slots=True, eq=False)
class Group:
    """Members that reduce together. Without *members* it is forming."""

    name: str
    start_world: int
    min_world: int
    key: bytes
    epoch: int  # the current one; before the first: those up to here are used up
    used: int = 0  # epochs up to here may have been used, beside the current one
    reason: str = ""  # why the current epoch began
    members: list[Member] = field(default_factory=list)  # in rank order
    joining: list[Member] = field(default_factory=list)  # by mid
    rebuild: Rebuild | None = None  # without members: what an earlier master's members report
    conns: tuple[int, ...] = ()  # of the members' daemons, each once
    committed: int = 0
    pending: dict[int, Pending] = field(default_factory=dict)  # by seq
    voids: dict[int, m.Void] = field(default_factory=dict)  # by seq, all above committed
    digest_failures: dict[int, int] = field(default_factory=dict)  # seq -> epochs in which digests differed
    p2p: P2PBook = field(default_factory=P2PBook)
    p2p_count: int = 0
    asking: Asking | None = None
    complaints: dict[tuple[int, int], Complaint] = field(default_factory=dict)  # (who, about whom), this epoch
    settle_at: float = inf  # when complaints are acted upon
    bad_pairs: dict[tuple[int, int], float] = field(default_factory=dict)  # pair of mids -> until when
    troubles: dict[tuple[str, str], Trouble] = field(default_factory=dict)  # by names: who, with whom; newest last
    waits: tuple[int, float, list[m.WaitStatus]] | None = None  # epoch, when found, what
    slow: Slow | None = None
    slow_at: float = -inf  # when the log last said that an operation waits
    stalls: dict[int, int] = field(default_factory=dict)  # seq -> times that nothing moved
    hold_until: float = inf  # an update_membership waits for probes until then
    waited: bool = False  # it has waited long enough
    planned: Planned | None = None
    seen_version: int = -1  # of State.measures, when a better plan was last looked for
    seen_at: float = -inf
    replans: int = 0  # better plans found while operations ran

    @property
    def small(self) -> bool:
        """Members fail their ops themselves here; only update_membership goes on."""
        return len(self.members) < self.min_world


@dataclass(slots=True)
class Gone:
    """What a daemon has to be told about members that it lost with its last connection."""

    incarnation: int
    evicted: list[m.Evicted] = field(default_factory=list)


@dataclass(slots=True)
class State:
    """Everything.

    Args:
        limits: bounds.
        secret: random bytes; groups' keys are derived from it.
        term: of this master.
        floor: epochs up to this one are used up, by groups of earlier terms or forgotten ones.
        next_mid: the first mid to give out.
        identity: random; tells this master from the one before.
        used: by group: from the journal, and of this term.
        elected: it leads by a lease; its term is not its own to raise.
        inherited: groups of earlier masters that have not begun an epoch under this one.
        rejoin_until: until then such a group, or any if the journal was lost, does not form anew: its members may be
            about to report.
    """

    limits: Limits
    secret: bytes
    term: int
    floor: int = 0
    next_mid: int = 1
    highest_epoch: int = 0
    identity: int = 0
    used: dict[str, Used] = field(default_factory=dict)
    inherited: set[str] = field(default_factory=set)
    rejoin_until: float = -inf
    elected: bool = False
    lost_journal: bool = False  # daemons knew a master that the journal does not
    missing: dict[int, m.Evicted] = field(default_factory=dict)  # by mid: who did not report in time, oldest first
    now: float = 0.0
    deadline: float = inf
    out: list[Command] = field(default_factory=list)
    connections: dict[int, Daemon] = field(default_factory=dict)
    daemons: dict[str, Daemon] = field(default_factory=dict)
    groups: dict[str, Group] = field(default_factory=dict)
    members: dict[int, Member] = field(default_factory=dict)
    gone: dict[str, Gone] = field(default_factory=dict)  # by daemon, oldest first
    measures: Measures = field(default_factory=Measures)
    asked: dict[tuple[str, str], Asked] = field(default_factory=dict)  # by daemons: who, about the path to whom

    def alarm(self, at: float) -> None:
        """See that a tick comes at *at*."""
        self.deadline = min(self.deadline, at)

    def record(self, group: Group | None, kind: str, text: str) -> None:
        """Add a line to the event log."""
        self.out.append(Record(group.name if group else "", group.epoch if group else 0, kind, text))


def clip(text: str, chars: int = 1000) -> str:
    """*text*, shortened so that it fits every message it goes into."""
    return text if len(text) <= chars else text[: chars - 3] + "..."


def names(members: list[Member]) -> str:
    """The members' names for a reader, the first few of many."""
    shown = ", ".join(member.name for member in members[:16])
    return shown if len(members) <= 16 else f"{shown} and {len(members) - 16} more"
