"""What is known of the paths between daemons: round trips, bandwidth, loss, smoothed and bounded. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from math import inf
from typing import TypeVar

from wancoll.errors import ProtocolError
from wancoll.wire import messages as m

RTT_WINDOW = 120.0  # seconds after which a smallest round trip is forgotten, if no report repeats it
DOWN = 0.25  # weight of a report below what is known: one bad second does not make a path slow
MOST_RTT = 1e4  # seconds that a report may name
MOST_BANDWIDTH = 1e13  # bytes per second, likewise
MAX_PATHS = 1 << 16  # of all daemons together
MAX_LANE_COUNTS = 16  # different numbers of lanes per daemon


T = TypeVar("T")


class Pairs(dict[tuple[str, str], T]):
    """What is known of pairs of daemons, by their names: (from, to). Found by either name, too."""

    def __init__(self) -> None:
        super().__init__()
        self._of: dict[str, dict[tuple[str, str], None]] = {}

    def add(self, ends: tuple[str, str], value: T) -> T:
        """Keep the value of a pair that is not known yet; returns what is kept of it."""
        if ends in self:
            return self[ends]
        self[ends] = value
        for name in ends:
            self._of.setdefault(name, {})[ends] = None
        return value

    def forget(self, names: Iterable[str]) -> None:
        """Drop all pairs with one of *names*."""
        for name in names:
            for ends in self._of.pop(name, ()):
                del self[ends]
                one, other = ends
                del self._of[other if one == name else one][ends]

    def among(self, names: Collection[str]) -> Iterator[tuple[tuple[str, str], T]]:
        """The pairs from one of *names* to another one, with their values."""
        for name in names:
            for ends in self._of.get(name, ()):
                if ends[0] == name and ends[1] in names:
                    yield ends, self[ends]

    def of(self, source: str) -> Iterator[T]:
        """The values of the pairs from *source*."""
        return (self[ends] for ends in self._of.get(source, ()) if ends[0] == source)


@dataclass(slots=True)
class Path:
    """From one daemon to another. 0: not known."""

    carried: float = 0.0  # bytes per second, of operations
    lanes: int = 0  # that were busy then
    probed: float = 0.0  # bytes per second, of the newest probe
    loss: float = 0.0
    # Bytes per second: the more of what operations and the newest probe saw. Operations send no more than their slowest
    # link, pace or processor lets them: a path may be better, never worse.
    bandwidth: float = 0.0
    rtt: float = 0.0  # smallest round trip of the last one to two windows
    _newer: float = 0.0  # smallest of this window
    _window: float = 0.0  # when it began
    _earlier: float = 0.0  # smallest of the window before

    def take(self, seen: m.LinkMeasure, now: float) -> None:
        """Take in a report."""
        if seen.rtt > 0:
            if now - self._window >= RTT_WINDOW:
                self._earlier, self._newer, self._window = self._newer, seen.rtt, now
            else:
                self._newer = min(self._newer or inf, seen.rtt)
            self.rtt = min(self._newer, self._earlier or inf)
        if seen.bandwidth > 0 and seen.lanes:
            self.carried, self.lanes = _smooth(self.carried, seen.bandwidth), seen.lanes
        elif seen.bandwidth > 0:
            self.probed = seen.bandwidth
        self.bandwidth = max(self.carried, self.probed)
        if seen.lanes:
            self.loss = seen.loss


def _smooth(known: float, seen: float) -> float:
    return seen if seen >= known else known + DOWN * (seen - known)


@dataclass(slots=True)
class Measures:
    """The matrix, by daemons' names. Paths are directed; a round trip is the same from both ends."""

    version: int = 0  # grows with every change
    paths: Pairs[Path] = field(default_factory=Pairs)
    uplinks: dict[str, dict[int, float]] = field(default_factory=dict)  # by daemon, by lanes per link

    def take(self, source: str, report: m.LinkReport, known: Collection[str], now: float) -> None:
        """Take in the report of *source*, one of the *known* daemons. Raises ProtocolError: a number cannot be."""
        speeds = [report.uplink, *(seen.bandwidth for seen in report.links)]
        possible = all(speed == 0 or 1 <= speed <= MOST_BANDWIDTH for speed in speeds) and all(
            0 <= seen.rtt <= MOST_RTT and 0 <= seen.loss <= 1 for seen in report.links
        )
        if not possible:  # NaN, too
            raise ProtocolError(
                "reports impossible measurements",
                expected=f"up to {MOST_BANDWIDTH:g} bytes and {MOST_RTT:g} s, a share from 0 to 1, none below 0",
            )
        for seen in report.links:
            ends = (source, seen.daemon)
            if seen.daemon in known and seen.daemon != source and (ends in self.paths or len(self.paths) < MAX_PATHS):
                self.paths.add(ends, Path()).take(seen, now)
        if report.uplink > 0 and report.lanes:
            by_lanes = self.uplinks.setdefault(source, {})
            if report.lanes in by_lanes or len(by_lanes) < MAX_LANE_COUNTS:
                by_lanes[report.lanes] = _smooth(by_lanes.get(report.lanes, 0.0), report.uplink)
        self.version += 1

    def forget(self, gone: Collection[str]) -> None:
        """These daemons are gone."""
        for daemon in gone:
            self.uplinks.pop(daemon, None)
        self.paths.forget(gone)

    def rtt(self, one: str, other: str) -> float:
        """Seconds there and back; 0: not known."""
        there, back = self.paths.get((one, other)), self.paths.get((other, one))
        if there is None or not there.rtt:
            return back.rtt if back is not None else 0.0
        return min(there.rtt, back.rtt) if back is not None and back.rtt else there.rtt

    def bandwidth(self, source: str, target: str) -> float:
        """Bytes per second from *source* to *target*; 0: not known."""
        path = self.paths.get((source, target))
        return path.bandwidth if path is not None else 0.0

    def probed(self, source: str) -> float:
        """Bytes per second of the fastest path from *source* that was probed; 0: none was."""
        return max((path.probed for path in self.paths.of(source)), default=0.0)

    def uplink(self, daemon: str, lanes: int = 0) -> float:
        """Bytes per second that leave *daemon* with *lanes* busy ones per link (0: with any number); 0: not known."""
        by_lanes = self.uplinks.get(daemon, {})
        return by_lanes.get(lanes, 0.0) if lanes else max(by_lanes.values(), default=0.0)
