"""What the kernel tells of its connections (struct tcp_info), and the state of paths that follows from it. Pure."""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import inf
from typing import NamedTuple, TypeVar

from wancoll.limits import KIB
from wancoll.wire import messages as m

K = TypeVar("K")  # what names a lane
TCP_INFO_BYTES = 256  # room for the structure; kernels fill in as much as they know
# linux/tcp.h: eight bytes, 24 numbers from rto to total_retrans, pacing_rate to bytes_received, segs_out to
# data_segs_out, delivery_rate to sndbuf_limited. All of it since Linux 4.10.
_LAYOUT = struct.Struct("=8B24I4Q6I4Q")
_APP_LIMITED = 0x01
_USEC = 1e-6

BUSY = 0.05  # seconds that a connection has to be busy for its bytes to say something about the path
BACKLOG = 16 * KIB  # bytes waiting in a socket from which its connection counts as held up by the path
_WINDOWS = 8  # of the past that count
_ENOUGH = 3  # of them
_SPREAD = 0.5  # lanes that were busy for less than this share of the busiest one's time do not count
_STEADY = 3  # stretches in which a burst that grows no more has not grown
_GROWTH = 1.07  # times, below which it grew no more
_ASLEEP = 0.25  # seconds between two looks at a burst, of one who stood still: he cannot tell the path from himself
_MATERIAL = 0.05  # a change below this share of what was reported last is not worth a message


class TcpInfo(NamedTuple):
    """TCP's facts of one connection. Seconds, bytes, bytes per second; counts are since it was made."""

    rtt: float  # smoothed
    min_rtt: float  # of the last minutes; 0: not known
    delivery_rate: float
    app_limited: bool  # delivery_rate is what the sender offered: the path may carry more
    bytes_acked: int  # and arrived, those behind a gap included
    segments: int  # with data, sent again ones included
    retransmitted: int
    busy: float  # seconds with data under way
    backlog: int  # bytes that wait in the socket to be sent for the first time
    unacked: int = 0  # bytes on the way, about
    segments_in: int = 0  # packets that came, those without data included


def parse_tcp_info(raw: bytes) -> TcpInfo | None:
    """What getsockopt(IPPROTO_TCP, TCP_INFO) gave; None if the kernel is too old to say enough."""
    if len(raw) < _LAYOUT.size:
        return None
    found = _LAYOUT.unpack_from(raw)
    numbers, sizes, counts, rates = found[8:32], found[32:36], found[36:42], found[42:46]
    min_rtt = counts[3]
    return TcpInfo(
        rtt=numbers[15] * _USEC,
        min_rtt=min_rtt * _USEC if min_rtt != 0xFFFFFFFF else 0.0,
        delivery_rate=float(rates[0]),
        app_limited=bool(found[7] & _APP_LIMITED),
        bytes_acked=sizes[2] + numbers[5] * numbers[2],
        segments=counts[5],
        retransmitted=numbers[23],
        busy=rates[1] * _USEC,
        backlog=counts[2],
        unacked=numbers[4] * numbers[2],
        segments_in=counts[1],
    )


class Window(NamedTuple):
    """What a link's lanes did between two looks at them."""

    acked: int  # bytes
    busy: float  # seconds of the busiest lane
    lanes: int  # all of them if half were busy for about as long as the busiest, else those that were
    segments: int
    retransmitted: int
    peak: float  # bytes per second, what the kernel saw the lanes deliver together; 0: not known
    full: bool  # more was waiting to be sent on every lane, so that the path was the limit


def _since(old: TcpInfo | None, new: TcpInfo) -> TcpInfo:
    """The look from which *new* counts: *old*, if it is not of another connection."""
    nothing = TcpInfo(0, 0, 0, False, 0, 0, 0, 0, 0)
    if old is None:
        return nothing
    fell = new.bytes_acked < old.bytes_acked or new.segments < old.segments or new.busy < old.busy
    return nothing if fell or new.retransmitted < old.retransmitted else old


def window(before: Mapping[K, TcpInfo], after: Mapping[K, TcpInfo]) -> Window:
    """The difference of two looks at a link, by lane. A connection that was made in between counts from nothing."""
    lanes = [(_since(before.get(lane), info), info) for lane, info in after.items()]
    busiest = max((new.busy - old.busy for old, new in lanes), default=0.0)
    used = [(old, new) for old, new in lanes if new.busy - old.busy >= _SPREAD * busiest > 0]
    return Window(
        acked=sum(new.bytes_acked - old.bytes_acked for old, new in lanes),
        busy=busiest,
        lanes=len(lanes) if 2 * len(used) >= len(lanes) else len(used),
        segments=sum(new.segments - old.segments for old, new in lanes),
        retransmitted=sum(new.retransmitted - old.retransmitted for old, new in lanes),
        peak=0.0 if any(new.app_limited for _, new in used) else sum(new.delivery_rate for _, new in used),
        full=bool(used) and all(new.backlog >= BACKLOG for _, new in used),
    )


_NOTHING = m.LinkMeasure("-", 0.0, 0.0, 0, 0.0)


class _Rates:
    """The last rates with one number of lanes."""

    def __init__(self) -> None:
        self.lanes = 0
        self._rates: deque[float] = deque(maxlen=_WINDOWS)

    def add(self, lanes: int, rate: float) -> None:
        if lanes != self.lanes:
            self.lanes = lanes
            self._rates.clear()
        self._rates.append(rate)

    @property
    def usual(self) -> float:
        """The lower bound of the fastest quarter, since an operation begins slowly; 0 while there are too few."""
        count = len(self._rates)
        return sorted(self._rates)[count - 1 - count // 4] if count >= _ENOUGH else 0.0


class _Path:
    """All that was seen on the way to one daemon."""

    def __init__(self) -> None:
        self.rtt = 0.0
        self.rates = _Rates()
        self.segments, self.retransmitted = 0.0, 0.0
        self.reported = _NOTHING

    def measure(self, daemon: str) -> m.LinkMeasure:
        loss = min(1.0, self.retransmitted / self.segments) if self.segments >= 100 else 0.0
        return m.LinkMeasure(daemon, self.rtt, self.rates.usual, self.rates.lanes, loss)


class Observer:
    """Turns looks at the lanes into reports for the master.

    A link that was busy alone, with more to send than went, tells its path's bandwidth. One that shared the uplink with
    others, or had no more to send, tells a lower bound, which counts if it is above what was known. All links together
    tell the uplink. Nothing is told to be faster than *most*, a limit of this daemon.
    """

    def __init__(self, most: float = inf) -> None:
        self._most = most
        self._before: dict[int, dict[int, TcpInfo]] = {}  # by link
        self._paths: dict[str, _Path] = {}  # by daemon
        self._uplink = _Rates()
        self._reported_uplink = (0.0, 0)

    def look(self, links: Mapping[int, tuple[str, Mapping[int, TcpInfo]]]) -> None:
        """Take in the lanes' state. *links*: by an id that is never used again, (daemon at the other end, by lane)."""
        daemons = {daemon for daemon, _ in links.values()}
        self._paths = {daemon: self._paths.get(daemon) or _Path() for daemon in daemons}
        self._before = {link: lanes for link, lanes in self._before.items() if link in links}
        windows = []
        for link, (daemon, lanes) in links.items():
            rtts = [info.min_rtt for info in lanes.values() if info.min_rtt > 0]
            if rtts:
                self._paths[daemon].rtt = min(rtts)
            if link not in self._before:
                self._before[link] = dict(lanes)
                continue
            windows.append((link, daemon, window(self._before[link], lanes)))
        busiest = max((seen.busy for *_, seen in windows), default=0.0)
        if busiest < BUSY:
            return  # the bytes wait for the next look
        for link, *_ in windows:
            self._before[link] = dict(links[link][1])
        busy = [(daemon, seen) for _, daemon, seen in windows if seen.busy >= _SPREAD * busiest]
        for daemon, seen in busy:
            path, rate = self._paths[daemon], min(self._most, max(seen.acked / seen.busy, seen.peak))
            if (len(busy) == 1 and seen.full) or rate > path.rates.usual > 0:
                path.rates.add(seen.lanes, rate)
            path.segments = path.segments / 2 + seen.segments
            path.retransmitted = path.retransmitted / 2 + seen.retransmitted
        if all(seen.full for _, seen in busy):
            rate = min(self._most, sum(seen.acked for _, seen in busy) / busiest)
            self._uplink.add(min(seen.lanes for _, seen in busy), rate)

    def retell(self) -> None:
        """Report all that is known again, to a master that has not heard it."""
        for path in self._paths.values():
            path.reported = _NOTHING
        self._reported_uplink = (0.0, 0)

    def report(self) -> m.LinkReport | None:
        """What is materially different from the last report, if anything is."""
        changed: list[m.LinkMeasure] = []
        for daemon, path in self._paths.items():
            now, told = path.measure(daemon), path.reported
            if (
                _differs(now.rtt, told.rtt)
                or _differs(now.bandwidth, told.bandwidth)
                or (now.bandwidth > 0 and now.lanes != told.lanes)
                or abs(now.loss - told.loss) > max(1e-4, told.loss / 2)
            ):
                path.reported = now
                changed.append(now)
        uplink, lanes = self._uplink.usual, self._uplink.lanes
        told_uplink, told_lanes = self._reported_uplink
        if not changed and not (uplink > 0 and (_differs(uplink, told_uplink) or lanes != told_lanes)):
            return None
        self._reported_uplink = (uplink, lanes)
        return m.LinkReport(changed[:1024], uplink, lanes if uplink > 0 else 0)


def _differs(now: float, told: float) -> bool:
    return now > 0 and abs(now - told) > _MATERIAL * told


def burst_rate(samples: Sequence[tuple[float, int]], stretch: float) -> float:
    """The most bytes per second that were acknowledged over two stretches, or over all of a burst that was shorter.

    0: nothing is known, since too little was seen, or whoever looked stood still meanwhile.

    Args:
        samples: (when, bytes acknowledged by then), in order.
        stretch: at least a round trip, so that heaps of acknowledgements, and the pauses between, count little.
    """
    if any(later - earlier > _ASLEEP for (earlier, _), (later, _) in pairwise(samples)):
        return 0.0
    rates = [rate for _, rate in _rates(samples, 2 * stretch)]
    if not rates and len(samples) > 1:
        return (samples[-1][1] - samples[0][1]) / (samples[-1][0] - samples[0][0])
    return max(rates, default=0.0)


def saturated(samples: Sequence[tuple[float, int]], stretch: float) -> bool:
    """Whether the speed has stopped to grow, for some stretches."""
    if not samples:
        return False
    when = samples[-1][0]
    rates = _rates(samples, stretch)
    now = [rate for at, rate in rates if at > when - stretch]
    earlier = [rate for at, rate in rates if at <= when - _STEADY * stretch]
    return bool(now) and bool(earlier) and now[-1] < _GROWTH * max(earlier)


def _rates(samples: Sequence[tuple[float, int]], stretch: float) -> list[tuple[float, float]]:
    """(when, bytes per second over the stretch that ends then)."""
    found, start = [], 0
    for when, acked in samples:
        while start + 1 < len(samples) and samples[start + 1][0] <= when - stretch:
            start += 1
        began, before = samples[start]
        if when - began >= stretch:
            found.append((when, (acked - before) / (when - began)))
    return found
