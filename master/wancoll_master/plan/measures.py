"""What is known of the paths between daemons: round trips, bandwidth, loss, smoothed and bounded. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field

from wancoll.errors import ProtocolError
from wancoll.wire import messages as m

RTT_WINDOW = 120.0  # seconds after which a smallest round trip is forgotten, if no report repeats it
DOWN = 0.25  # weight of a report below what is known: one bad second does not make a path slow
MOST_RTT = 1e4  # seconds that a report may name
MOST_BANDWIDTH = 1e13  # bytes per second, likewise
MAX_PATHS = 1 << 16  # of all daemons together
MAX_LANE_COUNTS = 16  # different numbers of lanes per daemon


@dataclass(slots=True)
class Path:
    """From one daemon to another. 0: not known."""

    carried: float = 0.0  # bytes per second, of operations
    lanes: int = 0  # that were busy then
    probed: float = 0.0  # bytes per second, of the newest probe
    loss: float = 0.0
    _rtt: float = 0.0
    _window: float = 0.0  # when it began
    _earlier: float = 0.0  # smallest of the window before

    @property
    def rtt(self) -> float:
        """Smallest round trip of the last one to two windows."""
        return min(filter(None, (self._rtt, self._earlier)), default=0.0)

    @property
    def bandwidth(self) -> float:
        """Bytes per second: the more of what operations and the newest probe saw.

        Operations send no more than their slowest link, pace or processor lets them: a path may be better, never worse.
        """
        return max(self.carried, self.probed)

    def take(self, seen: m.LinkMeasure, now: float) -> None:
        """Take in a report."""
        if seen.rtt > 0:
            if now - self._window >= RTT_WINDOW:
                self._earlier, self._rtt, self._window = self._rtt, seen.rtt, now
            else:
                self._rtt = min(self._rtt, seen.rtt) if self._rtt else seen.rtt
        if seen.bandwidth > 0 and seen.lanes:
            self.carried, self.lanes = _smooth(self.carried, seen.bandwidth), seen.lanes
        elif seen.bandwidth > 0:
            self.probed = seen.bandwidth
        if seen.lanes:
            self.loss = seen.loss


def _smooth(known: float, seen: float) -> float:
    return seen if seen >= known else known + DOWN * (seen - known)


@dataclass(slots=True)
class Measures:
    """The matrix, by daemons' names. Paths are directed; a round trip is the same from both ends."""

    version: int = 0  # grows with every change
    paths: dict[tuple[str, str], Path] = field(default_factory=dict)  # (from, to)
    uplinks: dict[str, dict[int, float]] = field(default_factory=dict)  # by daemon, by lanes per link
    _ends: dict[str, dict[tuple[str, str], None]] = field(default_factory=dict)  # of the paths, by either daemon

    def take(self, source: str, report: m.LinkReport, known: Collection[str], now: float) -> None:
        """Take in the report of daemon *source*; *known* are the daemons that are connected.

        Raises:
            ProtocolError: a number that cannot be.
        """
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
                if ends not in self.paths:
                    self.paths[ends] = Path()
                    for daemon in ends:
                        self._ends.setdefault(daemon, {})[ends] = None
                self.paths[ends].take(seen, now)
        if report.uplink > 0 and report.lanes:
            by_lanes = self.uplinks.setdefault(source, {})
            if report.lanes in by_lanes or len(by_lanes) < MAX_LANE_COUNTS:
                by_lanes[report.lanes] = _smooth(by_lanes.get(report.lanes, 0.0), report.uplink)
        self.version += 1

    def forget(self, gone: Iterable[str]) -> None:
        """These daemons are gone."""
        for daemon in gone:
            self.uplinks.pop(daemon, None)
            for ends in self._ends.pop(daemon, ()):
                del self.paths[ends]
                other = ends[1] if ends[0] == daemon else ends[0]
                self._ends[other].pop(ends)

    def among(self, daemons: Collection[str]) -> Iterator[tuple[str, str, Path]]:
        """The known paths from one of *daemons* to another: (from, to, path)."""
        for daemon in daemons:
            for ends in self._ends.get(daemon, ()):
                if ends[0] == daemon and ends[1] in daemons:
                    yield *ends, self.paths[ends]

    def rtt(self, one: str, other: str) -> float:
        """Seconds there and back; 0: not known."""
        ends = (self.paths.get((one, other)), self.paths.get((other, one)))
        return min((path.rtt for path in ends if path is not None and path.rtt > 0), default=0.0)

    def bandwidth(self, source: str, target: str) -> float:
        """Bytes per second from *source* to *target*; 0: not known."""
        path = self.paths.get((source, target))
        return path.bandwidth if path is not None else 0.0

    def probed(self, source: str) -> float:
        """Bytes per second of the fastest path from *source* that was probed; 0: none was."""
        ends = self._ends.get(source, ())
        return max((self.paths[each].probed for each in ends if each[0] == source), default=0.0)

    def uplink(self, daemon: str, lanes: int = 0) -> float:
        """Bytes per second that leave *daemon* with *lanes* busy ones per link (0: with any number); 0: not known."""
        by_lanes = self.uplinks.get(daemon, {})
        return by_lanes.get(lanes, 0.0) if lanes else max(by_lanes.values(), default=0.0)
