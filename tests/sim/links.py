"""A daemon's links as a model: who dials whom, when links count as lost or unreachable, with one lane to a link.

Mirrors wancoll/peer/links.py (LinkHub: _raise, _await_dial, _dial, accept, _handshake, _owner, _admit, _lose, _open,
_attach) and member_links.py (MemberLinks: enter, need, check_ready, check_p2p) as timers and calls.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from tests.sim.clock import Process, Timer
from tests.sim.engine import Engine
from tests.sim.network import End, Network
from wancoll.limits import Limits
from wancoll.wire import messages as m

COLLECTIVES, P2P = 0, 1


def wire_plan(epoch: m.Epoch) -> int:
    return zlib.crc32(repr((epoch.plan.lanes, epoch.plan.congestion)).encode())


@dataclass(slots=True, eq=False)
class Link:
    """Mirrors member_links.Link. *raising*: there is a task; *waits*: its timer; *since*, *pause*: its variables."""

    owner: MemberLinks
    other: m.MemberInfo
    channel: int
    engine_id: int = 0
    mine: bool = False
    dialled: int = 0
    accepted: int = 0
    attached: bool = False
    up: bool = False
    closed: bool = False
    raising: bool = False
    task: int = 0  # counts tasks
    waits: Timer | None = None
    since: float = 0.0
    pause: float = 0.0
    changed_at: float = 0.0

    @property
    def dials(self) -> bool:
        return self.owner.mid > self.other.mid

    @property
    def accepting(self) -> bool:
        return self.engine_id != 0 and not self.mine and not self.up

    @property
    def key(self) -> tuple[int, int]:
        return self.other.mid, self.channel

    @property
    def neighbour(self) -> bool:
        return self.channel == COLLECTIVES and self.other.mid in self.owner.neighbours

    @property
    def wanted(self) -> bool:
        return not self.closed and (self.needed or self.spare)

    @property
    def needed(self) -> bool:
        return self.neighbour or self.key in self.owner.needed

    @property
    def spare(self) -> bool:
        return self.channel == COLLECTIVES and self.other.mid in self.owner.spares

    @property
    def agreed(self) -> bool:
        return self.neighbour or self.spare or self.channel == P2P


class MemberLinks:
    """Mirrors member_links.MemberLinks."""

    def __init__(
        self,
        hub: LinkHub,
        on_ready: Callable[[int, set[int]], None],
        on_p2p: Callable[[set[int]], None],
        on_lost: Callable[[int, int, str], None],
        on_unreachable: Callable[[int, str], None],
    ) -> None:
        self._hub = hub
        self.on_ready, self.on_p2p = on_ready, on_p2p
        self.on_lost, self.on_unreachable = on_lost, on_unreachable
        self.mid = 0
        self.epoch: m.Epoch | None = None
        self.links: dict[tuple[int, int], Link] = {}
        self.neighbours: frozenset[int] = frozenset()
        self.spares: frozenset[int] = frozenset()
        self.needed: set[tuple[int, int]] = set()
        self._present: dict[int, m.MemberInfo] = {}

    def enter(self, epoch: m.Epoch, neighbours: frozenset[int], spares: frozenset[int]) -> None:
        rebuild = self.epoch is not None and wire_plan(self.epoch) != wire_plan(epoch)
        self.mid, self.epoch, self.neighbours, self.spares = epoch.to, epoch, neighbours, spares
        self.needed.clear()
        self._present = {member.mid: member for member in epoch.members}
        for link in list(self.links.values()):
            if link.other.mid not in self._present or rebuild:
                self._hub.close(link)
            elif link.engine_id:
                self._hub.engine.set_epoch(link.engine_id, epoch.epoch)
        for mid in sorted(neighbours) + sorted(spares):
            self._hub.raise_link(self.link(mid, COLLECTIVES))
        self._hub.note_change()
        self.check_ready()

    def need(self, mids: Iterable[int], channel: int) -> None:
        for mid in sorted(mids):
            self.needed.add((mid, channel))
            self._hub.raise_link(self.link(mid, channel))
        if channel == P2P:
            self.check_p2p()

    def link(self, mid: int, channel: int) -> Link:
        key = mid, channel
        if key not in self.links:
            self.links[key] = Link(self, self._present[mid], channel)
        return self.links[key]

    def _up(self, channel: int) -> set[int]:
        return {mid for (mid, other), link in self.links.items() if link.up and other == channel}

    def check_ready(self) -> None:
        if self.epoch is not None and self.neighbours <= (up := self._up(COLLECTIVES)):
            self.on_ready(self.epoch.epoch, up)

    def check_p2p(self) -> None:
        if self.epoch is not None and (up := self._up(P2P)):
            self.on_p2p(up)

    def engine_ids(self) -> dict[int, int]:
        """By rank."""
        assert self.epoch is not None
        ranks = {member.mid: rank for rank, member in enumerate(self.epoch.members)}
        links = [link for link in self.links.values() if link.up and link.channel == COLLECTIVES]
        return {ranks[link.other.mid]: link.engine_id for link in links}

    def close(self) -> None:
        self.epoch, self.neighbours, self.spares = None, frozenset(), frozenset()
        self.needed.clear()
        for link in list(self.links.values()):
            self._hub.close(link)
        self._hub.forget(self)


class LinkHub:
    """Mirrors links.LinkHub."""

    def __init__(self, network: Network, process: Process, engine: Engine, limits: Limits) -> None:
        self._network, self._process, self.engine, self._limits = network, process, engine, limits
        self._members: list[MemberLinks] = []
        self._by_engine_id: dict[int, Link] = {}
        self._next_engine_id = 1
        self._knocking: dict[End, tuple[m.LaneHello, Timer]] = {}  # whose epoch is not known here yet

    def member(
        self,
        on_ready: Callable[[int, set[int]], None],
        on_p2p: Callable[[set[int]], None],
        on_lost: Callable[[int, int, str], None],
        on_unreachable: Callable[[int, str], None],
    ) -> MemberLinks:
        links = MemberLinks(self, on_ready, on_p2p, on_lost, on_unreachable)
        self._members.append(links)
        return links

    def forget(self, links: MemberLinks) -> None:
        if links in self._members:
            self._members.remove(links)

    def note_change(self) -> None:
        for end, (hello, timer) in list(self._knocking.items()):
            owner = self._owner(hello)
            if owner is not None:
                timer.cancel()
                del self._knocking[end]
                self._process.after(0.0, lambda end=end, hello=hello: self._let_in(end, hello))

    # ---- state of a link -----------------------------------------------------------------------------

    def raise_link(self, link: Link) -> None:
        if not link.up and not link.closed and not link.raising:
            link.raising, link.since, link.task = True, self._process.clock.now, link.task + 1
            link.pause = self._limits.redial_interval
            link.waits = self._process.after(0.0, lambda: self._raise(link))

    def close(self, link: Link) -> None:
        link.closed = True
        self._stop_raising(link)
        self._drop_connections(link)
        link.owner.links.pop(link.key, None)

    def _stop_raising(self, link: Link) -> None:
        link.raising = False
        if link.waits is not None:
            link.waits.cancel()

    def _drop_connections(self, link: Link) -> None:
        if link.engine_id:
            self._by_engine_id.pop(link.engine_id, None)
            self.engine.close_link(link.engine_id)
        link.engine_id, link.up, link.attached = 0, False, False

    def lane_down(self, engine_id: int, reason: str) -> None:
        link = self._by_engine_id.get(engine_id)
        if link is not None:
            self._lose(link, reason)

    def redial(self, links: MemberLinks, others: list[int], older: float, reason: str) -> None:
        for link in list(links.links.values()):
            known = not others or link.other.mid in others
            if link.up and known and self._process.clock.now - link.changed_at > older:
                self._lose(link, reason)

    def _lose(self, link: Link, reason: str) -> None:
        was_up = link.up
        self._drop_connections(link)
        if was_up and not link.closed:
            link.owner.needed.discard(link.key)
            link.owner.on_lost(link.other.mid, link.channel, reason)
        if link.wanted:
            self.raise_link(link)

    def _open(self, link: Link, *, mine: bool) -> None:
        assert link.owner.epoch is not None
        self._drop_connections(link)
        link.engine_id, self._next_engine_id = self._next_engine_id, self._next_engine_id + 1
        link.mine = mine
        self._by_engine_id[link.engine_id] = link
        self.engine.open_link(link.engine_id, link.owner.epoch.epoch)

    def _attach(self, link: Link, end: End) -> None:
        self.engine.attach(link.engine_id, end)
        link.attached = link.up = True
        link.changed_at = self._process.clock.now
        self._stop_raising(link)
        if link.channel == COLLECTIVES:
            link.owner.check_ready()
        else:
            link.owner.check_p2p()

    # ---- dialling ------------------------------------------------------------------------------------

    def _raise(self, link: Link) -> None:
        """One turn of the task."""
        if link.up or not link.wanted:
            link.raising = False
        elif (link.dials or not link.agreed) and not link.accepting:
            self._dial(link)
        else:
            reason = f"{link.other.name} has not dialled yet"
            link.waits = self._process.after(
                self._limits.link_timeout / 4, lambda: self._tried(link, link.task, reason, 0.0)
            )

    def _tried(self, link: Link, task: int, reason: str, pause: float) -> None:
        if not link.raising or link.up or link.task != task:
            return
        now = self._process.clock.now
        if now - link.since >= self._limits.link_timeout and link.needed and (link.dials or link.agreed):
            link.since = now
            link.owner.on_unreachable(link.other.mid, reason)
        if pause:
            link.pause = min(2 * link.pause, 1.0)
        if link.raising:
            link.waits = self._process.after(pause, lambda: self._raise(link))

    def _dial(self, link: Link) -> None:
        assert link.owner.epoch is not None
        self._open(link, mine=True)
        link.dialled += 1
        engine_id, epoch, task = link.engine_id, link.owner.epoch, link.task
        ends = link.owner.mid, link.other.mid
        hello = m.LaneHello(2, epoch.group, epoch.key, *ends, link.channel, wire_plan(epoch), 0, link.dialled)
        opened: list[End] = []

        def failed(reason: str) -> None:
            timeout.cancel()
            for end in opened:
                end.on_message = end.on_close = lambda message: None
                end.close("gave up")
            if link.engine_id == engine_id:
                self._drop_connections(link)
            self._tried(link, task, reason, link.pause)

        def connected(end: End | None) -> None:
            if timeout.call is None:  # it came too late
                if end is not None:
                    end.close("too late")
            elif end is None:
                failed("connection refused")
            else:
                opened.append(end)
                end.on_message, end.on_close = lambda answer: greeted(end, answer), failed
                end.send(hello)

        def greeted(end: End, answer: m.LaneWelcome | m.LaneRefused) -> None:
            if isinstance(answer, m.LaneRefused):
                failed(answer.reason)
            elif answer.daemon != link.other.daemon:
                failed(f"expected daemon {link.other.daemon}, got {answer.daemon}")
            elif link.engine_id != engine_id or link.closed:
                failed("the link broke while it was being made")
            else:
                timeout.cancel()
                self._attach(link, end)

        timeout = self._process.after(self._limits.connect_timeout, lambda: failed("no answer"))
        link.waits = None
        self._network.connect(self._process, link.other.addresses[0], "lane", self._limits.lane_timeout, connected)

    # ---- accepting -----------------------------------------------------------------------------------

    def accept(self, end: End, hello: m.LaneHello) -> None:
        end.on_message = lambda message: None
        end.on_close = lambda reason: self._gone(end)
        if self._owner(hello) is not None:
            self._let_in(end, hello)
        else:
            refuse = self._process.after(self._limits.handshake_timeout / 2, lambda: self._refuse(end))
            self._knocking[end] = hello, refuse

    def _gone(self, end: End) -> None:
        knocking = self._knocking.pop(end, None)
        if knocking is not None:
            knocking[1].cancel()

    def _refuse(self, end: End, reason: str = "the member or epoch is not known here") -> None:
        self._knocking.pop(end, None)
        end.send(m.LaneRefused(reason))
        end.close("refused")

    def _let_in(self, end: End, hello: m.LaneHello) -> None:
        owner = self._owner(hello)
        if owner is None or not end.open:
            self._refuse(end)
            return
        refusal = self._admit(owner, hello)
        if refusal:
            self._refuse(end, refusal)
            return
        link = owner.links[hello.sender, hello.channel]
        end.send(m.LaneWelcome(self._process.name))
        self._attach(link, end)

    def _owner(self, hello: m.LaneHello) -> MemberLinks | None:
        for links in self._members:
            epoch = links.epoch
            if epoch is None or (links.mid, epoch.group, epoch.key) != (hello.receiver, hello.group, hello.key):
                continue
            if hello.plan == wire_plan(epoch) and any(member.mid == hello.sender for member in epoch.members):
                return links
        return None

    def _admit(self, owner: MemberLinks, hello: m.LaneHello) -> str:
        assert owner.epoch is not None
        other = next(member for member in owner.epoch.members if member.mid == hello.sender)
        link = owner.link(other.mid, hello.channel)
        if link.dials and link.mine and link.engine_id:
            return "both ends dial: the younger's connections stay"
        if hello.generation <= link.accepted:
            return f"generation {hello.generation} is over, {link.accepted} is the latest"
        if link.up:
            self._lose(link, f"{other.name} dialled anew")
        self._open(link, mine=False)
        link.accepted = hello.generation
        return ""
