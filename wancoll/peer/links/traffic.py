"""What went over the links to each daemon, also over those that are closed: totals for metrics, which never fall."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from wancoll.limits import keep_newest
from wancoll.native.engine import LaneStatistics
from wancoll.peer.core.paths.tcpinfo import TcpInfo

MOST = 2048  # daemons: twice those of the largest group


class Counts(NamedTuple):
    """Counts of a link's lanes together, or of all links to a daemon that there ever were."""

    sent: int = 0  # bytes
    received: int = 0
    segments: int = 0  # of TCP, with data
    resent: int = 0
    corrupt: int = 0  # frames


class Now(NamedTuple):
    """State of the links that are open. *round_trip*: seconds, of the best lane; 0: not known."""

    lanes: int = 0
    round_trip: float = 0.0


Lane = tuple[LaneStatistics | None, TcpInfo | None]  # what the engine and the kernel say of it


class Traffic:
    """Totals of what went over the links to each daemon."""

    def __init__(self) -> None:
        self.totals: dict[str, Counts] = {}  # by daemon; who was looked at last is last
        self._last: dict[int, Counts] = {}  # of links that are open, by number

    def look(self, number: int, daemon: str, lanes: Iterable[Lane]) -> Now:
        """A look at link *number* to *daemon*, at any time while it is open."""
        total, count, best = [0] * len(Counts._fields), 0, 0.0
        for engine, kernel in lanes:
            if engine is not None:
                count += 1
                total[0] += engine.bytes_sent
                total[1] += engine.bytes_received
                total[4] += engine.checksum_failures
            if kernel is not None:
                total[2] += kernel.segments
                total[3] += kernel.retransmitted
                best = min(filter(None, (best, kernel.min_rtt or kernel.rtt)), default=0.0)
        before, self._last[number] = self._last.get(number, Counts()), Counts(*total)
        grown = (max(0, new - old) for new, old in zip(total, before, strict=True))
        known = self.totals.get(daemon, Counts())
        keep_newest(self.totals, daemon, Counts(*map(sum, zip(known, grown, strict=True))), MOST)
        return Now(count, best)

    def closed(self, number: int) -> None:
        """The link is, after a last look."""
        self._last.pop(number, None)
