"""How fast a link's lanes may send: from the plan's pace upwards, while operations reach it and nothing is lost. Pure.

The plan's pace comes from probes, which find too little where a machine is busy, where packets are lost, or where a
path holds more than their buffers, and changes with an epoch only. Operations that reach a pace say no more of the path
than that it carries so much. So each end raises the pace of its own links bit by bit as long as it is what limits them:
round trips show that nothing queues, and few packets are lost. Where a queue or losses follow it goes back to what
was carried, and waits before the next try, longer each time; it never goes below the plan's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from wancoll.peer.core.paths.tcpinfo import TcpInfo, window

STEP = 1.25  # times
REACHED = 0.88  # share of the pace from which it may be what limits a link: the last round trip takes a part of it
MOST = 8.0  # times the plan's
LOSS = 0.02  # share of packets, beyond what was lost at the proven pace
MOST_LOSS = 0.04  # share of packets, from which a path counts as full: some lose a hundredth whatever the pace is
QUEUES = 1.2  # times the least round trip: from here on the path is the limit, and not the pace
QUEUE = 1.5  # times, from which a pace above the proven one is too high
ENOUGH_BUSY = 0.2  # seconds that a link was busy, for its bytes to say something, and
ENOUGH_ROUNDS = 4  # round trips: what is lost is known a round trip later
ENOUGH_SEGMENTS = 1000  # packets: of 100, three are often lost where one is usual
FIRST_WAIT, LONGEST_WAIT = 10.0, 300.0  # seconds, after a pace at which packets were lost


@dataclass(slots=True)
class _Link:
    planned: int  # bytes per second of a lane, as below
    pace: int
    proven: int  # the newest pace that operations have reached without a queue and losses, or what they carried since
    before: dict[Lane, TcpInfo]
    told: set[Lane] = field(default_factory=set)  # those that have this pace; the others have the plan's
    loss: float = 0.0  # at the proven pace
    drains: bool = False  # it was lowered: what is seen next comes from the pace of before
    tries_at: float = 0.0
    wait: float = FIRST_WAIT


# A link's number, never used again, and the addresses at both ends of some of its lanes: those over one uplink.
Way = tuple[int, tuple[str, str] | None]
Lane = tuple[int, int]  # its number, and which of its connections it is


class Pacer:
    """All ways of a daemon. Lanes over another uplink have a pace of their own: uplinks differ."""

    def __init__(self) -> None:
        self._links: dict[Way, _Link] = {}

    def look(self, now: float, looks: Mapping[Way, tuple[int, Mapping[Lane, TcpInfo]]]) -> dict[Way, int]:
        """Take in all links that are up, and return ways whose lanes need a pace, with it in bytes per second.

        *looks* has for each the plan's pace of a lane in bytes per second (0: none), and its lanes. A lane that was
        dialled again begins at the plan's.
        """
        changed = {}
        self._links = {way: link for way, link in self._links.items() if way in looks}
        for way, (planned, lanes) in looks.items():
            link = self._links.get(way)
            if link is None or link.planned != planned:  # whoever brings it into an epoch sets the plan's pace
                self._links[way] = _Link(planned, planned, planned, dict(lanes))
                continue
            if planned and (self._judge(link, lanes, now) or (link.pace != planned and lanes.keys() - link.told)):
                changed[way] = link.pace
                link.told = set(lanes)
        return changed

    def _judge(self, link: _Link, lanes: Mapping[Lane, TcpInfo], now: float) -> bool:
        """Whether the pace changes."""
        seen = window(link.before, lanes)
        if not lanes:
            return False
        rtt = min(info.min_rtt for info in lanes.values())
        if seen.busy < max(ENOUGH_BUSY, ENOUGH_ROUNDS * rtt) or seen.segments < ENOUGH_SEGMENTS:
            return False  # the bytes wait for the next look
        link.before = dict(lanes)
        if link.drains:
            link.drains = False
            return False
        lost, pace = seen.retransmitted / seen.segments, link.pace
        carried = max(seen.acked / seen.busy, seen.peak)  # the time of short operations is mostly the last round trip
        queue = sum(info.rtt for info in lanes.values()) / len(lanes) / rtt if rtt else 0.0
        if pace == link.proven:
            link.loss = max(lost, (3 * link.loss + lost) / 4)
        if pace > link.proven and (lost > link.loss + LOSS or queue > QUEUE):
            link.pace = link.proven = max(link.proven, min(pace, int(carried / len(lanes))))
            link.drains = True
            link.tries_at, link.wait = now + link.wait, min(2 * link.wait, LONGEST_WAIT)
        elif pace > link.planned and lost > MOST_LOSS:
            link.pace = link.proven = max(link.planned, int(pace / STEP))
        elif lost <= MOST_LOSS and queue <= QUEUES and now >= link.tries_at and carried >= REACHED * pace * len(lanes):
            link.pace, link.proven = min(int(STEP * pace), int(MOST * link.planned)), pace
        return link.pace != pace
