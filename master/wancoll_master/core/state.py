"""What the master knows, and one step of it: plain data, hardly any behaviour. Pure."""

from __future__ import annotations

import sys
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import inf

import msgspec

from wancoll.collective import Descriptor
from wancoll.commit.tally import Tally
from wancoll.limits import Limits, few
from wancoll.wire import messages as m
from wancoll.wire.islands import parted
from wancoll_master.core.ready import Broadcast, Close, Persist, Ready, Received, Record, Send, Used
from wancoll_master.plan.measures import Measures, Pairs
from wancoll_master.plan.planning import Planned, Planner
from wancoll_master.plan.topology import pair


@dataclass(slots=True)
class Flow:
    """What a daemon has sent to another one, up to when, and how fast and well at last."""

    sent: int  # bytes
    segments: int
    resent: int  # of these
    at: float
    known: bool = False  # there was a second word
    rate: float = 0.0  # bytes per second
    loss: float = 0.0  # share of segments that were sent again


@dataclass(slots=True, eq=False)
class Daemon:
    """A daemon that is here, or away (see presence.py). Times are on the shell's clock."""

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
    dial: int = 0  # of its connection
    heard: int = 0  # messages that were taken in, of those that it would say again
    away_since: float = inf  # its connection broke
    away_why: str = ""
    broken_since: float = inf  # a connection of it broke, and it has said nothing since but Hello
    round_trip: float = 0.0  # seconds, over the connection that broke last; 0: not known
    steady_since: float = -inf  # it has been heard without a gap since
    doubted: bool = False  # it is away, and witnesses were asked whether it has ended (see confirming.py)
    witnesses: set[Daemon] = field(default_factory=set)  # that have not answered
    answers: bool = False  # a witness has dialled it: it lives
    ended_at: float = inf  # when a witness first found that nobody listens there any more
    master_grace: float = 0.0  # for so long its members go on without a master
    stopping: bool = False  # it has said so
    version: str = ""  # of its package
    cores: int = 0  # that it may use; 0: not stated
    key: bytes = b""  # its public key; b"": in clear nobody has one
    synced: bool = False  # it has named all members that it has
    members: dict[int, Member] = field(default_factory=dict)  # by mid, joining ones too
    reported: set[int] = field(default_factory=set)  # mids of members of an earlier master, let in to a rebuild
    flows: dict[str, Flow] = field(default_factory=dict)  # by the other daemon's name, while somebody looks
    source: str = ""  # the address that its connection comes from, where it is looked at
    hints: list[str] = field(default_factory=list)  # local addresses behind a NAT, for others behind that one

    @property
    def groups(self) -> list[Group]:
        """Those of its members, each once."""
        return list(dict.fromkeys(member.group for member in self.members.values()))

    @property
    def away(self) -> bool:
        """Its connection broke, and it may take it up again."""
        return self.away_since < inf


@dataclass(slots=True)
class ProbePair:
    """Whether a joiner or *member*'s daemon has reached the other one, which is enough for a link, this *way*.

    A pair that is not *asked* waits at *deadline* for a silent daemon to be heard again or to be given up.
    """

    member: Member
    asked: bool = False
    deadline: float = inf
    ok: bool = False
    failed: dict[int, str] = field(default_factory=dict)  # by the prober's mid: why it reached nobody
    way: m.Way = m.Way.direct  # that is asked about
    before: str = ""  # why no way before it is one
    apart: str = ""  # why none is one; an island of the two has not arrived whole


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
    lost_at: float = -inf  # when the link for collectives was last lost


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
    launch: str = ""  # of its island
    done_upto: int = 0
    probes: dict[int, ProbePair] = field(default_factory=dict)  # of a joiner, by the member's mid
    called: tuple[int, int, float] = (0, 0, -inf)  # epoch, highest seq that its client has called, and when it said so
    told: Told | None = None
    behind: tuple[int, int, float] = (0, 0, inf)  # called[:2], and since when another member has called more
    gave_up: set[int] = field(default_factory=set)  # void seqs, for which it was the one

    described: int = field(init=False)  # bytes that it takes in an Epoch, at most

    def __post_init__(self) -> None:
        self.described = described(self.daemon, self.name)

    @property
    def island(self) -> str:
        """The name of its island."""
        return parted(self.name, self.group.shards)[0]

    @property
    def shard(self) -> int:
        """Its column."""
        return parted(self.name, self.group.shards)[1]

    @property
    def reachable(self) -> bool:
        """Whether every probe of a joiner was answered; islands that have not arrived whole do not count."""
        return all(found.ok or found.apart for found in self.probes.values())


@dataclass(slots=True)
class StragglerDeadline:
    """An operation that does not wait for ever for who has not called it (R20)."""

    since: float
    calls: dict[int, Descriptor] = field(default_factory=dict)  # by mid
    counts: Counter[Descriptor] = field(default_factory=Counter)  # how many say it
    over: bool = False  # those who have not called it have been told

    def called(self, mid: int, call: Descriptor) -> None:
        """The member says that it has called this; its newest word counts."""
        before = self.calls.get(mid)
        self.calls[mid] = call
        self.counts[call] += 1
        if before is not None:
            self.counts[before] -= 1
            if not self.counts[before]:
                del self.counts[before]

    @property
    def call(self) -> Descriptor:
        """What most say, so that one who lies is alone with it; of equals what was said first."""
        return max(self.counts, key=self.counts.__getitem__)

    @property
    def until(self) -> float:
        """Then the daemons of the others take part for them, if nothing below it is open."""
        return self.since + self.call.grace


@dataclass(slots=True)
class Asking:
    """The epoch is aborted; members are telling what they call at *seq*."""

    seq: int
    deadline: float
    calls: dict[int, str] = field(default_factory=dict)  # by mid
    fingerprints: dict[int, int] = field(default_factory=dict)  # of those calls


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
class P2PCalls:
    """Sends and recvs of the current epoch."""

    # (sender, receiver, tag, sends) -> calls in order; of sends and recvs both only where they do not fit (ahead)
    waiting: dict[tuple[int, int, int, bool], deque[Half]] = field(default_factory=dict)
    running: dict[int, Match] = field(default_factory=dict)  # by order
    newest: dict[int, int] = field(default_factory=dict)  # mid -> number of its newest call
    open: dict[int, int] = field(default_factory=dict)  # mid -> calls that are not settled
    # mid -> by the other's mid, how many of these wait for their other half
    alone: dict[int, dict[int, int]] = field(default_factory=dict)


@dataclass(slots=True)
class Complaint:
    """A member's word that its link to another is down; *sends*: the one for sends and recvs."""

    who: Member
    whom: Member
    sends: bool
    kind: str  # "lost" or "unreachable"
    reason: str
    at: float
    committed: int  # of the group, then
    matched: int  # orders of sends and recvs that had been given, then

    @property
    def pair(self) -> tuple[int, int]:
        """Mids of the two ends, the lower first."""
        return pair(self.who.mid, self.whom.mid)


@dataclass(frozen=True, slots=True)
class Out:
    """A member that is out of an epoch that has not ended yet: the others' finished operations decide its fate (C5)."""

    mid: int
    why: str
    daemon: Daemon | None  # None: it did not come back after a restart, and is told if it does
    tell: bool = False  # it may still be listening
    column: int = 0
    committed: int = 0  # up to here one of its own island had committed


@dataclass(slots=True)
class Closing:
    """The epoch is over for its members: they finish nothing in it any more, and say what they have (C2)."""

    since: float
    until: float  # then it is looked for those who do not
    columns: dict[int, int]  # by mid, of all who may report
    reports: dict[int, m.EpochReport] = field(default_factory=dict)  # by mid
    claimed: int = 0  # the most that members said is committed whose reports count no more
    sure: int = 0  # up to here all is committed, as these reports had it when some of them still counted
    results: list[tuple[int, int, int, int]] = field(default_factory=list)  # of that, as in EpochOutcome
    of: dict[int, str] = field(default_factory=dict)  # the daemons of those
    held: Counter[str] = field(default_factory=Counter)  # bytes of memory that were reported, by daemon
    restarted: bool = False  # an earlier master may have committed what is told as done
    told: bool = False  # a restarted master has all reports: nobody is asked to stop, and nobody passes an update
    doubted: bool = False  # and the journal is lost: members that are not here may know more
    update: int = 0  # the update_membership that it ends, unless the members have passed it by themselves (C11)
    able: list[Member] = field(default_factory=list)  # who can join there
    passed: bool = False  # they have; so it ends in this epoch

    def drop(self, mid: int) -> None:
        """The member's report counts no more; what it said is committed is still known."""
        self.claimed = max(self.claimed, self.reports.pop(mid).committed)
        del self.of[mid]


@dataclass(slots=True)
class Current:
    """What belongs to a group's current epoch and ends with it (R2, R12): the next epoch begins with a new one."""

    reason: str = ""  # why it began
    votes: bool = False  # members commit among themselves; the master knows what it is told of that
    ends: list[str] = field(default_factory=list)  # why it has to end
    voids: dict[int, m.Void] = field(default_factory=dict)  # by seq: what the next epoch voids if it has not happened
    closing: Closing | None = None  # where members commit: they were told to stop
    out: list[Out] = field(default_factory=list)  # then: who is out, and is not told yet what became of its calls
    conns: tuple[int, ...] = ()  # of the members' daemons, each once
    claim: tuple[int, float] = (0, inf)  # said at a restart to be committed; until when all are to say so
    tally: Tally = field(default_factory=lambda: Tally((), 0, (), 0))  # of the votes that the master was told
    p2p: P2PCalls = field(default_factory=P2PCalls)
    asking: Asking | None = None
    complaints: dict[tuple[int, int, bool], Complaint] = field(default_factory=dict)  # who, whom, of which link
    complained_at: float = inf  # since when there are any
    settle_at: float = inf  # when they are acted upon
    hold_until: float = inf  # an update_membership waits for probes until then
    waited: bool = False  # it has waited long enough
    called: int = 0  # highest seq that any member's client has called
    straggler_deadlines: dict[int, StragglerDeadline] = field(default_factory=dict)  # by seq
    grace_until: float = inf  # of the first that is open
    waits: tuple[float, list[m.WaitStatus]] | None = None  # when found, what
    parks: dict[int, dict[int, Member]] = field(default_factory=dict)  # by mid: who holds its bytes back, by mid
    recovery: float = 0.0  # seconds until all went on without whom the epoch lost, as far as they have told


@dataclass(slots=True)
class Asked:
    """A daemon was asked to measure its path to another one."""

    until: float = -inf  # the round trip is not asked for again before
    burst_at: float = -inf  # when its bandwidth was asked for


@dataclass(frozen=True, slots=True)
class Reported:
    """An epoch as all its members report it alike, with what looks up its members."""

    report: m.Report  # the first of them, without what is the member's own
    daemons: dict[int, str]  # by mid
    finished: dict[tuple[int, int], m.EpochReport] = field(default_factory=dict)  # by what is committed, how much it is
    goodbyes: set[int] = field(default_factory=set)  # mids of those who have reported, and left


@dataclass(slots=True)
class Rebuild:
    """Members of a group that an earlier master knew are reporting."""

    deadline: float
    reports: dict[int, tuple[Daemon, m.Report]] = field(default_factory=dict)  # by mid
    lost: dict[int, m.Report] = field(default_factory=dict)  # of members that are lost since, by mid
    epochs: dict[int, Reported] = field(default_factory=dict)  # that these are of, by number
    here: int = 0  # how many members of the newest one, by rank, need not be waited for
    held: Counter[str] = field(default_factory=Counter)  # as in Closing


@dataclass(slots=True, eq=False)
class Group:
    """Members that reduce together. Without *members* it is forming."""

    name: str
    start_world: int
    min_world: int
    key: bytes
    epoch: int  # the current one; before the first: those up to here are used up
    used: int = 0  # epochs up to here may have been used, beside the current one
    members: list[Member] = field(default_factory=list)  # in rank order
    joining: list[Member] = field(default_factory=list)  # by mid
    call_timeout: float = 0.0  # as its members state it
    shards: int = 1  # members of an island, as they state it
    rebuild: Rebuild | None = None  # without members: what an earlier master's members report
    current: Current = field(default_factory=Current)
    # Before the first epoch, and joiners: what is still to be measured. By daemons: until when, whether the bandwidth.
    awaited: dict[tuple[str, str], tuple[float, bool]] = field(default_factory=dict)
    told: m.Epoch | None = None  # the newest epoch that this master has begun: its members know it
    goodbyes: list[str] = field(default_factory=list)  # names of its members that have left in peace since
    committed: int = 0
    voids: dict[int, m.Void] = field(default_factory=dict)  # by seq, all above committed
    digest_failures: dict[int, int] = field(default_factory=dict)  # seq -> epochs in which members came apart there
    p2p_count: int = 0
    bad_pairs: dict[tuple[int, int], float] = field(default_factory=dict)  # pair of mids -> until when
    # pair of mids, of the link for sends -> times that it was lost with something on it, and nothing ended in between
    losses: dict[tuple[int, int, bool], int] = field(default_factory=dict)
    troubles: dict[tuple[str, str], Trouble] = field(default_factory=dict)  # by names: who, with whom; newest last
    slow: Slow | None = None
    slow_at: float = -inf  # when the log last said that an operation waits
    stalls: dict[int, int] = field(default_factory=dict)  # seq -> times that nothing moved
    planned: Planned | None = None

    @property
    def small(self) -> bool:
        """Members fail their ops themselves here; only update_membership goes on."""
        return len(self.members) // self.shards < self.min_world

    def whole(self, members: Iterable[Member]) -> list[Member]:
        """The *members* of islands that are all among them, island by island."""
        if self.shards == 1:
            return list(members)
        found: dict[str, list[Member]] = {}
        for member in members:
            found.setdefault(member.island, []).append(member)
        whole = (sorted(one, key=lambda member: member.shard) for one in found.values() if len(one) == self.shards)
        return [member for one in whole for member in one]

    def begin(self, reason: str, *, votes: bool, window: int) -> None:
        """The members have another epoch: nothing of the last one counts any more."""
        conns = tuple(dict.fromkeys(member.daemon.conn for member in self.members))
        self.current = Current(clip(reason), votes, conns=conns)
        columns = self.columns()
        self.current.tally = Tally(columns, self.committed, self.voids, window, columns)

    def mates(self, member: Member) -> list[Member]:
        """The other members of its island."""
        return [one for one in self.members if one.island == member.island and one is not member]

    def firsts(self) -> dict[int, int]:
        """By mid of a member: that of the first of its island."""
        members = self.members
        return {member.mid: members[at - at % self.shards].mid for at, member in enumerate(members)}

    def apart(self, now: float = -inf) -> dict[tuple[int, int], list[tuple[int, int]]]:
        """Pairs of a column that cannot reach each other, by the first of their islands: who are not to be neighbours.

        Between columns only votes go.
        """
        found: dict[tuple[int, int], list[tuple[int, int]]] = {}
        firsts, columns = (self.firsts(), self.columns()) if self.bad_pairs else ({}, {})
        for ends, until in self.bad_pairs.items():
            one, other = ends
            if until > now and one in firsts and other in firsts and columns[one] == columns[other]:
                found.setdefault(pair(firsts[one], firsts[other]), []).append(ends)
        return found

    def columns(self) -> dict[int, int]:
        """The column of each member, by mid."""
        return {member.mid: member.shard for member in self.members}

    @property
    def stopped(self) -> bool:
        """Nothing commits any more in the epoch: another one follows."""
        current = self.current
        return bool(current.ends) or current.asking is not None or current.closing is not None

    @property
    def first_open(self) -> int:
        """The lowest seq that is neither committed nor void."""
        return self._open_above(self.committed)

    @property
    def heard(self) -> int:
        """Up to where all is committed, or, where members commit, one of them says so."""
        return max(self.committed, self.current.tally.claimed)

    @property
    def first_unheard(self) -> int:
        """The lowest seq that is not void, and not committed by anybody's word."""
        return self._open_above(self.heard)

    def _open_above(self, seq: int) -> int:
        seq += 1
        while seq in self.voids:
            seq += 1
        return seq

    def afresh(self) -> Group:
        """The group without its members, and all that they had done: those who wait to join may form it anew."""
        group = Group(self.name, self.start_world, self.min_world, self.key, self.epoch, self.used)
        group.call_timeout, group.shards = self.call_timeout, self.shards
        group.joining, group.planned, group.troubles = self.joining, self.planned, self.troubles
        group.awaited = self.awaited
        for joiner in group.joining:
            joiner.group = group
            joiner.probes.clear()
        return group


@dataclass(slots=True)
class State:
    """Everything."""

    limits: Limits
    secret: bytes  # random; groups' keys are derived from it
    term: int
    believable: int  # numbers up to this one can be true that peers say of earlier masters (R19)
    floor: int = 0  # epochs up to this one are used up, by groups of earlier terms or forgotten ones
    next_mid: int = 1  # the next mid to give out
    highest_epoch: int = 0
    identity: int = 0  # random; tells this master from the one before
    used: dict[str, Used] = field(default_factory=dict)  # by group: from the journal, and of this term
    inherited: set[str] = field(default_factory=set)  # groups of earlier masters without an epoch under this one
    rejoin_until: float = -inf  # until then these form not anew: members may report
    holds: bool = False  # nor does any other group: the journal may not know all that run
    # Groups of which all were lost, or of earlier masters: until then their members, who are in used, may go on (C8).
    alone: dict[str, float] = field(default_factory=dict)
    elected: bool = False  # it leads by a lease; its term is not its own to raise
    elected_by: str = ""  # Welcome's
    lost_journal: bool = False  # it lacks what an earlier master told
    # By group, mid: who did not report in time, oldest first.
    missing: dict[tuple[str, int], m.Evicted] = field(default_factory=dict)
    announce: tuple[str, ...] = ()  # networks of which daemons may announce any address (see announced.py)
    refused: Counter[str] = field(default_factory=Counter)  # by message: how often somebody said it who may not
    deadline: float = inf  # when the shell must call step() with a Tick; only earlier, between ticks
    connections: dict[int, Daemon] = field(default_factory=dict)
    daemons: dict[str, Daemon] = field(default_factory=dict)
    groups: dict[str, Group] = field(default_factory=dict)
    members: dict[int, Member] = field(default_factory=dict)
    # By daemon and incarnation, oldest first: what it has to be told of evicted members, should it not have heard it.
    gone: dict[tuple[str, int], list[m.Evicted]] = field(default_factory=dict)
    twins: dict[str, Received] = field(default_factory=dict)  # by name: the Hello of another daemon that waits for it
    postponed: dict[Daemon, list[tuple[Daemon, m.Join]]] = field(default_factory=dict)  # by the silent one: who waits
    watched_until: float = -inf  # until then daemons are told that somebody looks at the page
    deaf_until: float = -inf  # until then nobody is evicted for silence: it is the master that hears nobody
    measures: Measures = field(default_factory=Measures)
    asked: Pairs[Asked] = field(default_factory=Pairs)  # who, about the path to whom
    reached: Pairs[m.Way] = field(default_factory=Pairs)  # how who reaches whom, as probes have found
    failed: Pairs[dict[m.Way, str]] = field(default_factory=Pairs)  # how who does not, and why
    relays: dict[Daemon, None] = field(default_factory=dict)  # those of the daemons that are relays
    own_relay: bool = False  # this master is one, too
    # By group ("": a daemon) and name, oldest first: whether who was last asked to leave has left in order since.
    leaves: dict[tuple[str, str], bool] = field(default_factory=dict)

    def has_left(self, group: str, name: str) -> None:
        """In order; kept if an operator has asked for it."""
        if (group, name) in self.leaves:
            self.leaves[group, name] = True

    def forget_twin(self, conn: int) -> None:
        """Nobody waits for a name over this connection any more."""
        for name in [name for name, twin in self.twins.items() if twin.conn == conn]:
            del self.twins[name]


@dataclass(slots=True)
class Step:
    """One event's step: what is known, when it is, and what the step wants done. All that takes part is handed it."""

    state: State
    now: float  # seconds on the shell's clock
    planner: Planner
    ready: Ready = field(default_factory=Ready)
    touched: dict[str, None] = field(default_factory=dict)  # names of groups about which facts were recorded

    @property
    def limits(self) -> Limits:
        """The master's bounds."""
        return self.state.limits

    def send(self, conn: int, message: m.FromMaster) -> None:
        """Say it over one connection."""
        self.ready.messages.append(Send(conn, message))

    def broadcast(self, group: Group, message: m.FromMaster) -> None:
        """Say it to all members' daemons."""
        self.ready.messages.append(Broadcast(group.current.conns, message))

    def close(self, conn: int, reason: str, *, final: bool = False) -> None:
        """End a connection once all is said. *final*: its daemon must not come back."""
        self.ready.closes.append(Close(conn, clip(reason), final))
        self.state.forget_twin(conn)

    def persist(self, next_mid: int = 0) -> Persist:
        """This step's one write, which knows the newest numbers."""
        state, write = self.state, self.ready.persist
        if write is None:
            write = self.ready.persist = Persist(state.highest_epoch, state.next_mid)
        write.term = state.term
        write.epoch = max(write.epoch, state.highest_epoch)
        write.next_mid = max(write.next_mid, state.next_mid, next_mid)
        return write

    def touch(self, group: Group) -> None:
        """Facts about the group were recorded: settle() is to look at it."""
        self.touched[group.name] = None

    def alarm(self, at: float) -> None:
        """See that a tick comes at *at*."""
        self.state.deadline = min(self.state.deadline, at)

    def record(
        self,
        group: Group | None,
        kind: str,
        text: str,
        *,
        kept: bool = True,
        cause: str = "",
        lost: int = 0,
        once: str = "",
    ) -> None:
        """Tell people: a line in the log and, where it is *kept*, in the event log. *once*: of a group that is gone."""
        name, epoch = (group.name, group.epoch) if group is not None else (once, 0)
        self.ready.log.append(Record(name, epoch, kind, clip(text), kept, cause, lost))


def described(daemon: Daemon, name: str) -> int:
    """Bytes that the member *name* of *daemon* takes in an Epoch, at most."""
    return 64 + 4 * (len(name) + len(daemon.name) + len(daemon.site) + sum(map(len, daemon.addresses)))


def weight(value: object) -> int:
    """Bytes of memory that a message's field takes, about. What a list has is of one type, and may be much."""
    size = sys.getsizeof(value)
    if isinstance(value, msgspec.Struct | dict):
        value = [*value.items()] if isinstance(value, dict) else msgspec.structs.astuple(value)
    if not isinstance(value, list | tuple) or not value:
        return size
    first = value[0] if isinstance(value[0], tuple) else value[:1]
    if isinstance(value, list) and all(isinstance(one, int) for one in first):
        return size + len(value) * (48 * len(first) + (sys.getsizeof(first) if first is value[0] else 0))
    return size + sum(map(weight, value))


def clip(text: str, chars: int = 1000) -> str:
    """*text*, shortened so that it fits every message it goes into."""
    return text if len(text) <= chars else text[: chars - 3] + "..."


def names(members: list[Member]) -> str:
    """The members' names for a reader, the first few of many."""
    return few([member.name for member in members], 16)


def several(texts: Iterable[str]) -> str:
    """The different ones of *texts* for a reader, the first few of many."""
    found = list(dict.fromkeys(texts))
    return "; ".join(found[:3]) + (f"; and {len(found) - 3} more" if len(found) > 3 else "")
