"""Which links stand still, and why: from looks at their lanes, by the engine's counters and the kernel's. Pure.

A sender knows best. What it sent and nobody acknowledges is on a path that is dead, in one direction or both: the
receiver's packets that still come say in which. What the kernel holds back, with nothing on the way, is what the other
end does not take: it may have reasons (its client has not called the operation yet), which it tells by the master.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

from wancoll.peer.core.paths.tcpinfo import TcpInfo

CALM = 4  # looks: from then on the kernel is asked of a calm lane at each so many
STILL = 0.5  # seconds without progress from which a lane counts as dead or blocked
NO_PROGRESS = "nothing that was sent on lane {lane} was acknowledged for {seconds:.1f} s, {backlog} bytes wait"
NO_LARGE = "; it seems that no large packet has passed on it: look at the path's MTU, and net.ipv4.tcp_mtu_probing"
LARGE = 1220  # bytes of a segment: a path has room for so many, and a lane that has moved data sends as many on average
NOT_TAKEN = "the other end took nothing from lane {lane} for {seconds:.1f} s, {backlog} bytes wait"


class LaneLook(NamedTuple):
    """A lane now."""

    received: int  # bytes that the engine took from it since it was made
    sent: int  # bytes that the engine gave to it
    parked: bool  # the engine leaves what came in the socket, since no operation here takes it yet
    info: TcpInfo | None  # the kernel's view; None: not known
    calm: int = 0  # looks in a row, up to this one, at which nothing had moved or come and nothing was under way

    @property
    def stale(self) -> bool:
        """Whether *info* is of an earlier look (see look_again)."""
        return self.calm >= CALM and self.calm % CALM > 0


def look_again(
    before: LaneLook | None, received: int, sent: int, parked: bool, view: Callable[[], TcpInfo | None]
) -> LaneLook:
    """A look at a lane after *before*, None at the first one.

    The kernel is asked by *view*, which costs most of a look, but not each time where a lane has been calm for some
    looks: it would tell no more than that an empty packet has come. Where this end sends, the counter says so at once.
    The counters are read before the kernel is asked.
    """
    if before is None:
        return LaneLook(received, sent, parked, view())
    calm = before.calm + 1 if (received, sent, parked) == before[:3] else 0
    look = LaneLook(received, sent, parked, before.info, calm)
    if look.stale:
        return look
    look = look._replace(info=view())
    return look._replace(calm=0) if _segments(look) != _segments(before) or _backlog(look) else look


class LinkView(NamedTuple):
    """A link as of the last look; fields as in LinkWait, *still*: seconds since a byte moved in either direction."""

    state: str
    since: float
    heard: float
    backlog: int
    still: float


class Stuck(NamedTuple):
    """A lane that has been dead (nothing is acknowledged) or blocked for too long. *alone*: others of its link move."""

    link: int
    lane: int
    alone: bool
    dead: bool
    reason: str


@dataclass(slots=True)
class _Lane:
    look: LaneLook
    progress_at: float  # when bytes were last acknowledged, or none waited, or the first of those that wait went
    viewed_at: float  # when the kernel was asked last
    parked_at: float = inf
    acked_at: float = -inf  # when bytes were last acknowledged

    @property
    def state(self) -> str:
        info = self.look.info
        if info is None or not (info.unacked or info.backlog):
            return ""
        return "dead" if info.unacked else "blocked"

    @property
    def passes_large(self) -> bool:
        """Whether large packets have passed on it, or none was sent."""
        info = self.look.info
        return info is None or info.bytes_acked >= LARGE / 2 * info.segments  # some were sent again


@dataclass(slots=True)
class _Link:
    lanes: dict[int, _Lane] = field(default_factory=dict)
    moved_at: float = 0.0
    heard_at: float = 0.0
    excused_at: float = -inf  # when the other end last said that it holds bytes back for good reason


def _acked(look: LaneLook) -> int:
    return look.info.bytes_acked if look.info is not None else 0


def _segments(look: LaneLook) -> int:
    return look.info.segments_in if look.info is not None else 0


def _backlog(look: LaneLook) -> int:
    return look.info.unacked + look.info.backlog if look.info is not None else 0


class Stalls:
    """All links of a daemon, by an id that is never used again."""

    def __init__(self) -> None:
        self._links: dict[int, _Link] = {}

    def look(self, now: float, looks: Mapping[int, Mapping[int, LaneLook]]) -> None:
        """Take in the lanes of all links that are up."""
        links = {}
        for number, lanes in looks.items():
            link = links[number] = self._links.get(number) or _Link(moved_at=now, heard_at=now)
            for index, look in lanes.items():
                self._take(link, index, look, now)
            for lost in link.lanes.keys() - lanes.keys():
                del link.lanes[lost]
        self._links = links

    def _take(self, link: _Link, index: int, look: LaneLook, now: float) -> None:
        lane = link.lanes.get(index)
        if lane is None:
            lane = link.lanes[index] = _Lane(look, now, now)
        before, state = lane.look, lane.state
        lane.look = look
        if look.stale:
            lane.progress_at = now
            return
        if (look.received, look.sent, _acked(look)) != (before.received, before.sent, _acked(before)):
            link.moved_at = now
        if _segments(look) != _segments(before):
            link.heard_at = max(link.heard_at, lane.viewed_at) if before.stale else now  # it came after that
        lane.viewed_at = now
        if _acked(look) != _acked(before):
            lane.acked_at = now
        # Once bytes of a blocked lane are on the way it has begun to move: to be acknowledged takes them a round trip.
        if _acked(look) != _acked(before) or not lane.state or (state, lane.state) == ("blocked", "dead"):
            lane.progress_at = now
        lane.parked_at = min(lane.parked_at, now) if look.parked else inf

    def excuse(self, link: int, now: float) -> None:
        """The other end of *link* holds bytes back for good reason."""
        if link in self._links:
            self._links[link].excused_at = now

    def view(self, number: int, now: float) -> LinkView:
        """The link as of the last look: its worst lane gives its name to the state."""
        link = self._links.get(number)
        if link is None:
            return LinkView("idle", 0.0, 0.0, 0, 0.0)
        state, since = "idle", now - link.moved_at
        for lane in link.lanes.values():
            still = now - lane.progress_at
            if lane.state and still >= STILL and (state != "dead" or lane.state == "dead"):
                state, since = lane.state, max(still, since if state == lane.state else 0.0)
        if state == "idle":
            parked_at = min((lane.parked_at for lane in link.lanes.values()), default=inf)
            if parked_at < inf:
                state, since = "parked", now - parked_at
            elif any(lane.state for lane in link.lanes.values()):
                state = "busy"
        backlog = sum(_backlog(lane.look) for lane in link.lanes.values())
        return LinkView(state, since, now - link.heard_at, backlog, now - link.moved_at)

    def stuck(self, now: float, timeout: float, settled: float, known_at: Mapping[int, float]) -> list[Stuck]:
        """Links that have to be made anew, and lanes: those that are dead while another lane of the link goes on.

        Args:
            now: seconds.
            timeout: of lanes, see Limits.lane_timeout.
            settled: seconds until the other end's word that it holds bytes back has come here by way of the master.
            known_at: by link: when the master last said whether its other end holds bytes back (see excuse). Without
                that, blocked lanes are let be: the master is away, or the other end may not know of the epoch.
        """
        found = []
        for number, link in self._links.items():
            for index, lane in link.lanes.items():
                dead = lane.state == "dead"
                since = lane.progress_at if dead else max(lane.progress_at, link.excused_at)
                told = dead or known_at.get(number, -inf) >= since + settled
                if lane.state and now - since >= timeout and told:
                    text = NO_PROGRESS if dead else NOT_TAKEN
                    words = text.format(lane=index, seconds=now - since, backlog=_backlog(lane.look))
                    if dead and not lane.passes_large:
                        words += NO_LARGE
                    # Where all paths of the link ended, all lanes ended within a round trip. Where one did, the others
                    # soon have nothing left to send: what follows waits for its bytes.
                    latest = max((other.acked_at for other in link.lanes.values() if other.passes_large), default=-inf)
                    alone = dead and lane.passes_large and latest >= since + STILL
                    found.append(Stuck(number, index, alone, dead, words))
                    if not alone:
                        break
        return found
