"""The links of a daemon's members, pure: who dials, when a link is up, lost or out of reach, and who is let in.

A link joins two members; this is one end of it. It has as many lanes (connections) as the plan says, and another one
after them, for notes. One end dials them all, as one set; the link is up when all of a set are here. Where a lane's
connection is lost later, and the engine says that its bytes can be sent again, the link stays up, and that end dials
the lane again, the first time at once. So does the other end when its patience is over (see below): the first may not
have noticed, or not get through. Both know each connection of a lane by a number: odd ones are dialled by the end that
made the set, even ones by the other. The lane for notes loses what was said over it, too. The link is lost with a lane
that did not come up again for link_timeout, and with one of which the engine says that its bytes are lost; then another
set is made. Each set has a *number* of its own here, the engine's name of the link: what still comes for an older one
finds nothing and is dropped. The dialler counts its sets (*generation*); the highest wins, so lanes of two dials are
never mixed, however late they come.

Who dials: links between ring neighbours, spare ones (which a ring without a neighbour needs) and those for sends and
recvs (another channel of the pair, which only the two know of) are *agreed*: both ends learn at the same time that they
want them. The younger member dials, the elder waits, and dials itself once its *patience* is over (link_timeout / 4):
there may be a way in one direction only. Other links are raised for the first operation that needs them, which one end
may reach long before the other: it dials, whichever it is. Where both dial, the younger's set stays, unless none of it
has come through while the elder was patient, or it has been up for longer: then the elder has lost it unheard.

    state       set     until                 what comes next
    idle        none                          wanted: dialling, or awaited where it is the other end's turn
    dialling    ours    the shell's answers   all lanes attached: up; one failed: pausing
    pausing     none    redial_interval, x 2  dialling
    awaited     none    patience              dialling
    accepting   theirs  patience              all lanes attached: up; one lost: awaited, or dialling
    up          either                        lost as above, let go of, cut: LinkLost, then as from idle

In any state a set that the other end dials anew makes it accepting, unless this is the younger and its own set stays.
A link that nobody wants any more comes to rest at its next turn; one that is up stays, warm, for later epochs. One that
breaks as soon as it is up is dialled as seldom as one that cannot be dialled.

The member is told LinksUp when all its neighbours' links are up, and again when another one is; P2PUp, alike;
NotesLost of one that is up over which nothing can be said, until LinksUp says that it can; LinkBroken of one that has
lost all its lanes; LinkLost of one that was up; LinkUnreachable of one that is needed and was not up for link_timeout,
by the end that can know.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from math import inf

from msgspec import Struct

from wancoll.limits import PROTOCOL_VERSION, Limits
from wancoll.wire import messages as m
from wancoll.wire.note import ROUND_BITS

COLLECTIVES, P2P = 0, 1  # channels
LONGEST_PAUSE = 1.0  # seconds between dials
_LEAP = 1 << 10  # connections of a lane: above all that the other end may have dialled in vain


class State(Enum):
    """See the table above."""

    idle = auto()
    dialling = auto()
    pausing = auto()
    awaited = auto()
    accepting = auto()
    up = auto()


@dataclass(slots=True, eq=False)
class MemberLinks:
    """The links of one member of this daemon."""

    mid: int = 0
    epoch: m.Epoch | None = None
    links: dict[tuple[int, int], Link] = field(default_factory=dict)  # by the other's mid and the channel
    neighbours: frozenset[int] = frozenset()
    spares: frozenset[int] = frozenset()
    needed: set[tuple[int, int]] = field(default_factory=set)  # further links that this epoch's ops need
    ways: dict[int, tuple[bool, m.Way]] = field(default_factory=dict)  # see Plan.ways: is it ours to dial, and how
    dialled: int = 0  # sets dialled so far, over all links: a link that is forgotten and made again goes on counting
    round: int = 0  # of the epoch (C12)

    def raised(self, channel: int) -> frozenset[int]:
        """Mids of those whose links are up."""
        return frozenset(mid for (mid, of), link in self.links.items() if link.up and of == channel)

    def up(self, channel: int) -> frozenset[int]:
        """Mids of those whose links are up, and, for collectives, take notes."""
        links = (self.links[mid, channel] for mid in self.raised(channel))
        return frozenset(link.other.mid for link in links if channel == P2P or link.notes not in link.lost)

    def stamp(self, channel: int) -> int:
        """What the frames of the *channel* carry: the epoch and its round. The engine compares it and no more.

        Where it overflows a link that outlives the epoch refuses the lesser number, and is made anew.
        """
        assert self.epoch is not None
        number = self.epoch.epoch << ROUND_BITS | (self.round if channel == COLLECTIVES else 0)
        return number & (1 << 64) - 1

    def numbers(self, channel: int) -> dict[int, int]:
        """Map rank to the engine's number, for the *channel*'s links that are up."""
        assert self.epoch is not None
        members, shards = self.epoch.members, self.epoch.shards
        at = next(at for at, member in enumerate(members) if member.mid == self.mid)
        ranks = {member.mid: rank for rank, member in enumerate(members[at % shards :: shards])}  # of its column
        up = (link for link in self.links.values() if link.up and link.channel == channel)
        return {ranks[link.other.mid]: link.number for link in up if link.other.mid in ranks}


@dataclass(slots=True, eq=False)
class Link:
    """One end: *owner*'s, of the link to *other*."""

    owner: MemberLinks
    other: m.MemberInfo
    channel: int
    changed_at: float  # since when it is up, or not
    state: State = State.idle
    number: int = 0  # of the set that is open, 0: none
    ours: bool = False  # that set was dialled from here
    accepted: int = 0  # the newest set dialled from there, by its count
    dialled_at: float = 0.0  # when a set was last dialled from here
    generation: int = 0  # then: its number
    way: m.Way = m.Way.direct  # and how
    welcomed: set[int] = field(default_factory=set)  # lanes of their set that were let in
    attached: set[int] = field(default_factory=set)
    connections: dict[int, int] = field(default_factory=dict)  # by lane, of those that had more than one: the newest
    came: dict[int, int] = field(default_factory=dict)  # by lane: the newest that came through, from either end
    redialled_at: float = -inf  # when lanes that were lost were last dialled again
    dialled_again: set[int] = field(default_factory=set)  # lanes, by either end, which the shell has not answered
    lost: dict[int, float] = field(default_factory=dict)  # lanes, and since when
    restored: dict[int, tuple[float, float]] = field(default_factory=dict)  # lanes: since when lost, when up again
    raised_at: float | None = None  # since when it is on its way up, or was last said to be out of reach
    pause: float = 0.0  # after the next dial that fails
    failures: int = 0  # dials that have failed in a row: each other one goes through a relay, unless one end can dial
    rests_until: float = -inf  # it broke as soon as it was up
    due: float = inf  # when its state is looked at again
    reason: str = ""  # why it is not up

    @property
    def planned(self) -> m.Way | None:
        """How the plan has it raised; None: it does not say."""
        return self.owner.ways.get(self.other.mid, (False, None))[1]

    @property
    def relayed(self) -> bool:
        """Whether the plan says that it goes through a relay."""
        return self.planned is m.Way.relayed

    @property
    def up(self) -> bool:
        """Whether all its lanes have come into the engine; some may be lost, and dialled again."""
        return self.state is State.up

    @property
    def notes(self) -> int:
        """The number of the lane for notes."""
        assert self.owner.epoch is not None
        return lanes_of(self.owner.epoch.plan) - 1

    @property
    def leads(self) -> bool:
        """Whether this end dials where the link is agreed: the younger, unless only the elder can reach the other."""
        dials, _ = self.owner.ways.get(self.other.mid, (self.owner.mid > self.other.mid, None))
        return dials

    @property
    def one_way(self) -> bool:
        """Whether only the end that leads can reach the other."""
        return self.planned is m.Way.direct

    @property
    def neighbour(self) -> bool:
        """Whether the epoch cannot begin without it."""
        return self.channel == COLLECTIVES and self.other.mid in self.owner.neighbours

    @property
    def spare(self) -> bool:
        """Whether it is kept up for after a loss."""
        return self.channel == COLLECTIVES and self.other.mid in self.owner.spares

    @property
    def needed(self) -> bool:
        """Whether something waits for it or would be lost with it."""
        return self.neighbour or (self.other.mid, self.channel) in self.owner.needed

    @property
    def wanted(self) -> bool:
        """Whether it is to be up."""
        return self.needed or self.spare

    @property
    def agreed(self) -> bool:
        """Whether both ends learn at the same time that they want it."""
        return self.neighbour or self.spare or self.channel == P2P


# ---- what happens ------------------------------------------------------------------------------------


class Enter(Struct, frozen=True):
    """The member goes to *epoch*, which needs links to *neighbours* and wants those to *spares* (mids)."""

    epoch: m.Epoch
    neighbours: frozenset[int]
    spares: frozenset[int] = frozenset()
    round: int = 0


class Round(Struct, frozen=True):
    """The member goes to this round of its epoch: what was sent on its links for collectives counts no more."""

    number: int


class Need(Struct, frozen=True):
    """An op needs the links to *mids*."""

    mids: frozenset[int]
    channel: int = COLLECTIVES


class LetGo(Struct, frozen=True):
    """No send or recv waits any more for the link to *mid*."""

    mid: int


class Redial(Struct, frozen=True):
    """Make the links to *others* (mids; empty: all) anew that are up for longer than *older* seconds, on a channel."""

    others: tuple[int, ...]
    older: float
    reason: str
    channel: int | None = None  # None: on both


class Leave(Struct, frozen=True):
    """The member has left the group: close its links and tell it nothing any more."""


class Knock(Struct, frozen=True):
    """Somebody dialled; answered by Welcome or Refuse, at once or when the epoch is known here.

    *key*: public, of the daemon, proved; None: lanes are in clear, and nobody proves anything.
    """

    knock: int
    hello: m.LaneHello
    key: bytes | None = None


class Gone(Struct, frozen=True):
    """Whoever knocked does not wait for the answer any more."""

    knock: int


class Attached(Struct, frozen=True):
    """The engine has the lane; only if `awaits` said so just now."""

    number: int
    lane: int


class Broken(Struct, frozen=True):
    """A lane of this set failed to come or broke, or the whole set is of no use."""

    number: int
    reason: str


class LaneLost(Struct, frozen=True):
    """A lane of a link that is up lost this connection, and what was on that goes over others."""

    number: int
    lane: int
    connection: int
    reason: str


class NotAttached(Struct, frozen=True):
    """This connection of this lane, dialled or welcomed, did not come through."""

    number: int
    lane: int
    reason: str
    connection: int = 1


class Cut(Struct, frozen=True):
    """Fault injection: break all links to *daemon* and keep them down until Heal."""

    daemon: str


class Heal(Struct, frozen=True):
    """See Cut."""

    daemon: str


class Tick(Struct, frozen=True):
    """deadline() has come."""


Wish = Enter | Round | Need | LetGo | Redial | Leave  # of a member
Event = Knock | Gone | Attached | Broken | LaneLost | NotAttached | Cut | Heal | Tick


# ---- what has to be done -----------------------------------------------------------------------------


class OpenLink(Struct, frozen=True):
    """Open a link without lanes in the engine."""

    number: int
    stamp: int
    plan: m.Plan


class MoveLink(Struct, frozen=True):
    """Bring the engine's link to this epoch and round, and to the epoch's pace where that changed."""

    number: int
    stamp: int
    pacing: int | None


class CloseLink(Struct, frozen=True):
    """Take it out of the engine, and stop dialling for it."""

    number: int


class Dial(Struct, frozen=True):
    """Dial one lane for each of *hellos*; say NotAttached of each that fails, and attach those that come through."""

    number: int
    other: m.MemberInfo
    hellos: tuple[m.LaneHello, ...]
    way: m.Way = m.Way.direct
    instead: m.Way = m.Way.direct  # of a relay, where none is known


class Welcome(Struct, frozen=True):
    """Answer the knock and attach its lane; say NotAttached if that fails."""

    knock: int
    number: int
    lane: int


class Refuse(Struct, frozen=True):
    """Answer the knock and close its connection. *over*: the whole set is of no use any more."""

    knock: int
    reason: str
    over: bool = False


class LinksUp(Struct, frozen=True):
    """All neighbours' links are up in this epoch, perhaps others: see owner.up, which is never out of date."""

    owner: MemberLinks
    epoch: int


class P2PUp(Struct, frozen=True):
    """Links for sends and recvs are up: see owner.up."""

    owner: MemberLinks


class NotesLost(Struct, frozen=True):
    """The lane for notes of a link for collectives broke, perhaps with some on it; what else is on the link goes on."""

    owner: MemberLinks
    other: m.MemberInfo


class LinkBroken(Struct, frozen=True):
    """A link that is up has lost all its lanes: perhaps its other end is gone; else they come up again."""

    owner: MemberLinks
    other: m.MemberInfo
    channel: int
    reason: str


class LinkLost(Struct, frozen=True):
    """A link broke that was up."""

    owner: MemberLinks
    other: m.MemberInfo
    channel: int
    reason: str


class LinkUnreachable(Struct, frozen=True):
    """A link that is needed could not be raised within link_timeout; said again after each further one.

    One for sends and recvs is not needed any more from then on, unless Need says so again: the master may end what
    waits for it without another epoch.
    """

    owner: MemberLinks
    other: m.MemberInfo
    channel: int
    reason: str


class Noted(Struct, frozen=True):
    """Member *mid* sent this note. It may come before this end of the link to it is up."""

    owner: MemberLinks
    mid: int
    note: bytes


Told = LinksUp | P2PUp | NotesLost | LinkBroken | LinkLost | LinkUnreachable | Noted
Command = OpenLink | MoveLink | CloseLink | Dial | Welcome | Refuse | Told


def lanes_of(plan: m.Plan) -> int:
    """Connections of a set: as many as the plan says carry data, and the last one is for notes."""
    return plan.lanes + 1


def ways_of(epoch: m.Epoch) -> dict[int, tuple[bool, m.Way]]:
    """The plan's ways of the epoch's member, by the other's mid: whether it is its turn to dial, and how."""
    found = {}
    for one, other, way in epoch.plan.ways:
        if epoch.to in (one, other):
            there = other if epoch.to == one else one
            found[there] = (epoch.to == one if way is m.Way.direct else epoch.to > there), way
    return found


def wire_plan(epoch: m.Epoch) -> int:
    """Stands for what connections are made with; they are made anew where it changes."""
    plan = epoch.plan
    return zlib.crc32(repr((plan.lanes, plan.lane_groups, plan.congestion)).encode())


class Links:
    """All links of a daemon.

    Args:
        limits: timeouts.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.members: list[MemberLinks] = []
        self._open: dict[int, Link] = {}  # by number
        self._next_number = 1
        self._knocks: dict[int, tuple[Knock, float]] = {}  # of epochs that are not known here, and until when
        self._cut: set[str] = set()  # daemons

    def member(self) -> MemberLinks:
        """Links for a new member."""
        self.members.append(MemberLinks())
        return self.members[-1]

    # ---- facts ---------------------------------------------------------------------------------------

    def open(self) -> dict[int, Link]:
        """The links that have a set, by number."""
        return self._open

    def awaits(self, number: int, lane: int, connection: int = 1) -> bool:
        """Whether this connection of this lane of this set is still to come."""
        link = self._open.get(number)
        return link is not None and lane not in link.attached and connection == link.connections.get(lane, 1)

    def deadline(self) -> float:
        """When to step with Tick."""
        return min((*(link.due for link in self._all()), *(until for _, until in self._knocks.values())), default=inf)

    def _all(self) -> Iterator[Link]:
        return (link for owner in self.members for link in owner.links.values())

    # ---- steps ---------------------------------------------------------------------------------------

    def step(self, event: Event, now: float) -> list[Command]:
        """What has to be done, in order: first to the engine and the network, then what members are told.

        A member that is told something may take another step at once: by then all that this one decided is done.
        """
        out: list[Command] = []
        match event:
            case Knock(knock, hello):
                known = self._owner(hello)
                if known is not None:
                    out.append(self._admit(event, known, now, out))
                elif len(self._knocks) < self._limits.pending_connections:
                    self._knocks[knock] = event, now + self._limits.handshake_timeout / 2
                else:
                    out.append(Refuse(knock, "too many wait already for epochs that are not known here"))
            case Gone(knock):
                self._knocks.pop(knock, None)
            case Attached(number, lane):
                self._attached(self._open[number], lane, now, out)
            case Broken(number, reason):
                if number in self._open:
                    self._lose(self._open[number], reason, now, out)
            case LaneLost(number, lane, connection, reason):
                link = self._open.get(number)
                if link is not None and connection == link.connections.get(lane, 1):
                    self._lose_lane(link, lane, reason, now, out)
                    if link.up and not link.attached:
                        out.append(LinkBroken(link.owner, link.other, link.channel, reason))
            case NotAttached(number, lane, reason, connection):
                link = self._open.get(number)
                if link is not None and connection == link.connections.get(lane, 1):  # else a newer one is on its way
                    self._not_attached(link, lane, reason, now, out)
            case Cut(daemon):
                self._cut.add(daemon)
                for link in list(self._open.values()):
                    if link.other.daemon == daemon:
                        self._lose(link, "cut by fault injection", now, out)
            case Heal(daemon):
                self._cut.discard(daemon)
            case Tick():
                self._tick(now, out)
        return _in_order(out)

    def ask(self, owner: MemberLinks, wish: Wish, now: float) -> list[Command]:
        """What has to be done for a member; see step()."""
        out: list[Command] = []
        match wish:
            case Enter():
                self._enter(owner, wish, now, out)
            case Round(number):
                owner.round = number
                open_links = (link for link in owner.links.values() if link.number and link.channel == COLLECTIVES)
                out += [MoveLink(link.number, owner.stamp(COLLECTIVES), None) for link in open_links]
            case Need(mids, channel):
                for mid in sorted(mids):
                    link = self._link(owner, mid, channel, now)
                    if link.raised_at is not None and not link.needed:
                        link.raised_at = now  # what needs it now has link_timeout of its own
                    owner.needed.add((mid, channel))
                    self._raise(link, now, out)
                if channel == P2P:  # some may be up already: by the other end, or since an older epoch
                    _tell_up(owner, channel, out)
            case LetGo(mid):
                owner.needed.discard((mid, P2P))
            case Redial(others, older, reason, channel):
                for link in list(owner.links.values()):
                    meant = (not others or link.other.mid in others) and channel in (None, link.channel)
                    if link.up and meant and now - link.changed_at > older:
                        self._lose(link, f"{link.other.name} has let go of it: {reason}", now, out)
            case Leave():
                self._leave(owner, out)
        return _in_order(out)

    def _enter(self, owner: MemberLinks, event: Enter, now: float, out: list[Command]) -> None:
        before, epoch = owner.epoch, event.epoch
        rebuild = before is not None and wire_plan(before) != wire_plan(epoch)
        paced = before is not None and before.plan.pacing != epoch.plan.pacing
        owner.mid, owner.epoch, owner.neighbours, owner.spares = epoch.to, epoch, event.neighbours, event.spares
        owner.round, owner.ways = event.round, ways_of(epoch)
        owner.needed.clear()
        present = {member.mid for member in epoch.members}
        for link in list(owner.links.values()):
            if link.other.mid not in present or rebuild:
                self._forget(link, out)
                if link.other.mid in present:  # its sets of before are over, however late they knock
                    self._link(owner, link.other.mid, link.channel, now).accepted = link.accepted
            elif link.number:
                out.append(MoveLink(link.number, owner.stamp(link.channel), epoch.plan.pacing if paced else None))
        for mid in sorted(owner.neighbours) + sorted(owner.spares):
            self._raise(self._link(owner, mid, COLLECTIVES, now), now, out)
        self._let_in(now, out)
        _tell_up(owner, COLLECTIVES, out)

    def _leave(self, owner: MemberLinks, out: list[Command]) -> None:
        owner.epoch = None
        for link in list(owner.links.values()):
            self._forget(link, out)
        if owner in self.members:
            self.members.remove(owner)

    def _tick(self, now: float, out: list[Command]) -> None:
        for link in list(self._all()):
            if link.due > now:
                continue
            if link.up:
                self._restore(link, now, out)
            elif link.state is State.pausing:
                self._try(link, now, out)
            else:
                self._failed(link, f"{link.other.name}, whose turn it is, has not dialled yet", now, out)
        for knock, (_, until) in list(self._knocks.items()):
            if until <= now:
                del self._knocks[knock]
                out.append(Refuse(knock, "the member or epoch is not known here"))

    # ---- up and down ---------------------------------------------------------------------------------

    def _link(self, owner: MemberLinks, mid: int, channel: int, now: float) -> Link:
        """The link to *mid*, made now if there was none."""
        link = owner.links.get((mid, channel))
        if link is None:
            assert owner.epoch is not None
            other = next(member for member in owner.epoch.members if member.mid == mid)
            link = owner.links[mid, channel] = Link(owner, other, channel, now)
        return link

    def _forget(self, link: Link, out: list[Command]) -> None:
        self._close(link, out)
        del link.owner.links[link.other.mid, link.channel]

    def _close(self, link: Link, out: list[Command]) -> None:
        """Let go of the set that is open, if there is one."""
        if link.number:
            del self._open[link.number]
            out.append(CloseLink(link.number))
        link.number, link.state, link.due = 0, State.idle, inf
        by_lane = link.connections, link.came, link.lost, link.restored
        for lanes in (link.attached, link.welcomed, link.dialled_again, *by_lane):
            lanes.clear()

    def _begin(self, link: Link, state: State, out: list[Command]) -> m.Epoch:
        """Open a set, *dialling* or *accepting*."""
        assert link.owner.epoch is not None
        self._close(link, out)
        link.number, self._next_number = self._next_number, self._next_number + 1
        link.state, link.ours, link.due = state, state is State.dialling, inf
        self._open[link.number] = link
        out.append(OpenLink(link.number, link.owner.stamp(link.channel), link.owner.epoch.plan))
        return link.owner.epoch

    def _attached(self, link: Link, lane: int, now: float, out: list[Command]) -> None:
        assert link.owner.epoch is not None
        link.attached.add(lane)
        if link.up:
            link.came[lane] = link.connections.get(lane, 1)
            link.dialled_again.discard(lane)
            link.restored[lane] = link.lost.pop(lane, now), now
            if lane == link.notes and link.channel == COLLECTIVES:
                _tell_up(link.owner, COLLECTIVES, out)
            self._plan_restore(link, now)
        elif len(link.attached) == lanes_of(link.owner.epoch.plan):
            link.state, link.changed_at, link.failures = State.up, now, 0
            link.raised_at, link.due = None, inf
            _tell_up(link.owner, link.channel, out)

    # ---- one lane of a link that is up ---------------------------------------------------------------

    def _lose_lane(self, link: Link, lane: int, reason: str, now: float, out: list[Command]) -> None:
        if not link.up:
            self._lose(link, reason, now, out)
            return
        link.reason = reason
        link.attached.discard(lane)
        since, up = link.restored.get(lane, (now, -inf))
        calm = now - up >= LONGEST_PAUSE / 2  # else it comes up and breaks again and again, and was not had again
        link.lost.setdefault(lane, now if calm else since)
        if lane == link.notes and link.channel == COLLECTIVES:
            out.append(NotesLost(link.owner, link.other))
        if calm:
            link.pause, link.failures = self._limits.redial_interval, 0
        self._plan_restore(link, now if calm else self._again_at(link, now))

    def _not_attached(self, link: Link, lane: int, reason: str, now: float, out: list[Command]) -> None:
        link.dialled_again.discard(lane)
        if link.up:
            link.reason = reason
            self._plan_restore(link, self._again_at(link, now))
        else:
            self._lose(link, reason, now, out)

    def _again_at(self, link: Link, now: float) -> float:
        """When to dial again what has just failed: with the others that failed just now."""
        if now < link.due < self._too_late(link):
            return link.due
        link.failures += 1
        return now + self._pause(link)

    def _way_again(self, link: Link) -> m.Way:
        """How to dial lanes of a link that is up: as it came up; each other time through a relay, or through none."""
        before, planned = link.way, link.planned or m.Way.direct
        if not link.ours:
            before = planned
        other = planned if before is m.Way.relayed else m.Way.relayed
        return other if link.failures % 2 == 1 and not link.one_way else before

    def _plan_restore(self, link: Link, at: float) -> None:
        """See that lanes that are lost are dialled again, *at* then, by the end whose turn it is."""
        since = min(link.lost.values(), default=inf)
        turn = -inf if link.ours else inf if link.one_way else self._patience(since)
        dials = link.lost.keys() - link.dialled_again
        link.due = min(max(at, turn) if dials else inf, self._too_late(link))

    def _too_late(self, link: Link) -> float:
        """When a lane has been lost for so long that the link is."""
        return min(link.lost.values(), default=inf) + self._limits.link_timeout

    def _restore(self, link: Link, now: float, out: list[Command]) -> None:
        if now >= self._too_late(link):
            if link.ours and not link.attached:  # it was dialled in vain all the time
                link.raised_at = min(link.lost.values())
            self._lose(link, f"a lane to {link.other.name} cannot be had again: {link.reason}", now, out)
        elif link.other.daemon in self._cut:
            self._plan_restore(link, now + self._pause(link))
        else:
            lanes = sorted(link.lost.keys() - link.dialled_again)
            for lane in lanes:
                newest = max(link.connections.get(lane, 1), link.came.get(lane, 1))
                link.connections[lane] = newest + 1 + newest % 2 if link.ours else (newest | 1) + _LEAP - 1
            link.dialled_again.update(lanes)
            link.redialled_at = now
            self._plan_restore(link, now)
            way = self._way_again(link)  # if by a relay, one may come back
            out.append(Dial(link.number, link.other, self._hellos(link, lanes), way, way))

    def _lose(self, link: Link, reason: str, now: float, out: list[Command]) -> None:
        """The set is of no use any more: another one is made, if the link is wanted."""
        self._down(link, reason, now, out)
        if link.raised_at is not None:
            self._failed(link, reason, now, out)
        else:
            self._raise(link, now, out)

    def _down(self, link: Link, reason: str, now: float, out: list[Command]) -> None:
        if link.up:
            if now - link.changed_at < LONGEST_PAUSE:
                link.rests_until = now + self._pause(link)
            link.changed_at = now
            link.owner.needed.discard((link.other.mid, link.channel))  # an op that still needs it says so
            out.append(LinkLost(link.owner, link.other, link.channel, reason))
        link.reason = reason
        self._close(link, out)

    # ---- raising -------------------------------------------------------------------------------------

    def _raise(self, link: Link, now: float, out: list[Command]) -> None:
        """See that it comes up, unless it is on its way already."""
        if link.wanted and not link.up and link.raised_at is None:
            link.raised_at = now
            if now >= link.rests_until:
                link.pause = self._limits.redial_interval
            self._try(link, now, out)

    def _pause(self, link: Link) -> float:
        """How long to wait before the next dial; longer each time."""
        pause = link.pause or self._limits.redial_interval
        link.pause = min(2 * pause, LONGEST_PAUSE)
        return pause

    def _patience(self, since: float) -> float:
        """Until when the elder leaves it to the younger."""
        return since + self._limits.link_timeout / 4

    def _try(self, link: Link, now: float, out: list[Command]) -> None:
        link.due = inf
        if not link.wanted:
            link.raised_at = None
            link.state = link.state if link.number else State.idle
            return
        assert link.raised_at is not None
        if link.state is State.accepting:
            link.due = self._patience(now)
        elif (link.agreed or link.one_way) and not link.leads and now < self._patience(link.raised_at):
            link.state, link.due = State.awaited, self._patience(link.raised_at)
        elif now < link.rests_until:
            link.state, link.due = State.pausing, link.rests_until
        elif link.other.daemon in self._cut:
            self._tell_late(link, "cut by fault injection", now, out)
            link.state, link.due = State.pausing, now + self._pause(link)
        else:
            self._dial(link, now, out)

    def _dial(self, link: Link, now: float, out: list[Command]) -> None:
        epoch = self._begin(link, State.dialling, out)
        link.owner.dialled += 1
        link.generation, link.dialled_at = link.owner.dialled, now
        by_relay = link.failures % 2 == 1 and not link.one_way
        link.way = m.Way.relayed if by_relay else link.planned or m.Way.direct
        instead = m.Way.punched if link.planned is m.Way.punched else m.Way.direct
        hellos = self._hellos(link, range(lanes_of(epoch.plan)))
        out.append(Dial(link.number, link.other, hellos, link.way, instead))

    def _hellos(self, link: Link, lanes: Iterable[int]) -> tuple[m.LaneHello, ...]:
        epoch = link.owner.epoch
        assert epoch is not None
        what = epoch.group, epoch.key, link.owner.mid, link.other.mid, link.channel, wire_plan(epoch)
        generation = link.generation if link.ours else link.accepted
        return tuple(
            m.LaneHello(PROTOCOL_VERSION, *what, lane, generation, connection=link.connections.get(lane, 1))
            for lane in lanes
        )

    def _failed(self, link: Link, reason: str, now: float, out: list[Command]) -> None:
        """A try to raise it, by either end, has come to nothing."""
        self._tell_late(link, reason, now, out)
        if link.state in (State.accepting, State.awaited):
            self._try(link, now, out)
        else:
            link.failures += link.ours
            link.state, link.due = State.pausing, now + self._pause(link)

    def _tell_late(self, link: Link, reason: str, now: float, out: list[Command]) -> None:
        """Say that the link is out of reach, once that has taken link_timeout."""
        assert link.raised_at is not None
        link.reason = reason
        late = now - link.raised_at >= self._limits.link_timeout and link.needed
        if late and (link.leads or link.agreed):  # else the younger end may succeed where this one does not
            out.append(LinkUnreachable(link.owner, link.other, link.channel, reason))
            link.raised_at = now
            if link.channel == P2P:
                link.owner.needed.discard((link.other.mid, P2P))

    # ---- letting in ----------------------------------------------------------------------------------

    def _let_in(self, now: float, out: list[Command]) -> None:
        """Answer those whose epoch is known here; others may have learnt of theirs before this daemon."""
        for number, (knock, _) in list(self._knocks.items()):
            owner = self._owner(knock.hello)
            if owner is not None:
                del self._knocks[number]
                out.append(self._admit(knock, owner, now, out))

    def _owner(self, hello: m.LaneHello) -> MemberLinks | None:
        for owner in self.members:
            epoch = owner.epoch
            if epoch is None or (owner.mid, epoch.group, epoch.key) != (hello.receiver, hello.group, hello.key):
                continue
            if hello.plan == wire_plan(epoch) and any(member.mid == hello.sender for member in epoch.members):
                return owner
        return None

    def _admit(self, event: Knock, owner: MemberLinks, now: float, out: list[Command]) -> Command:
        assert owner.epoch is not None
        knock, hello = event.knock, event.hello
        link = self._link(owner, hello.sender, hello.channel, now)
        if event.key not in (None, link.other.key):
            theirs = f"{link.other.daemon}, whose key is {link.other.key.hex() or 'not known'}"
            return Refuse(knock, f"{link.other.name} is a member of {theirs}; yours is {event.key.hex()}")
        if link.other.daemon in self._cut:
            return Refuse(knock, "cut by fault injection")
        lanes = lanes_of(owner.epoch.plan)
        if hello.lane >= lanes:
            return Refuse(knock, f"lane {hello.lane} of {lanes}")
        here = hello.connection % 2 == 0  # whether this end has made the set that it is of
        newest = link.generation if here else link.accepted
        known = link.number > 0 and link.ours == here and hello.generation == newest
        # Either may dial in vain, so what came through counts alone. Where both dial at once that of who began stays.
        stays = link.ours and hello.lane in link.dialled_again and now < self._patience(link.redialled_at)
        if known and link.up and not stays and hello.connection > link.came.get(hello.lane, 1):
            link.connections[hello.lane] = link.came[hello.lane] = hello.connection
            link.dialled_again.add(hello.lane)
            self._lose_lane(link, hello.lane, "it was dialled again", now, out)
            return Welcome(knock, link.number, hello.lane)
        if hello.connection != 1:
            reason = f"connection {hello.connection} of lane {hello.lane} of a set that is not up here"
            return Refuse(knock, reason, over=not known)
        if self._stays(link, now):
            return Refuse(knock, "both ends dial: the younger's connections stay")
        more = link.state is State.accepting and hello.generation == link.accepted and hello.lane not in link.welcomed
        if hello.generation <= link.accepted and not more:
            return Refuse(knock, f"generation {hello.generation} is over, {link.accepted} is the latest")
        if not more:
            self._down(link, f"{link.other.name} dialled anew", now, out)
            self._begin(link, State.accepting, out)
            link.accepted = hello.generation
            if link.raised_at is None:
                self._raise(link, now, out)
            else:
                link.due = self._patience(now)
        link.welcomed.add(hello.lane)
        return Welcome(knock, link.number, hello.lane)

    def _stays(self, link: Link, now: float) -> bool:
        """Whether a set that was dialled from here goes before the one that the other end dials now.

        The younger's does, but not for ever: an elder that dials has no link. So one that has been up here for a while
        is lost at the other end, and one of which nothing has come through for as long may never do.
        """
        if not (link.number and link.ours and link.leads):
            return False
        since = link.changed_at if link.up else link.dialled_at
        return now < self._patience(since) or (bool(link.attached) and not link.up)


def _in_order(commands: list[Command]) -> list[Command]:
    """First what the engine and the network do, then what members are told: each may take another step at once."""
    return sorted(commands, key=lambda command: isinstance(command, Told))


def _tell_up(owner: MemberLinks, channel: int, out: list[Command]) -> None:
    """Tell the member that links are up, where it can begin something with them."""
    assert owner.epoch is not None
    up = owner.up(channel)
    if channel == P2P and up:
        out.append(P2PUp(owner))
    elif channel == COLLECTIVES and owner.neighbours <= owner.raised(channel):
        out.append(LinksUp(owner, owner.epoch.epoch))
