"""How fast a link's lanes may send: from the plan's pace upwards, while operations reach it and nothing is lost. Pure.

The plan's pace comes from probes, which find too little where a machine is busy, and changes with an epoch only.
Operations that reach a pace say no more of the path than that it carries so much. So each end raises the pace of its
own links bit by bit as long as it is what limits them. Where packets are lost at the higher pace it goes back, and
waits before the next try, longer each time; it never goes below the plan's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from wancoll.peer.core.paths.tcpinfo import TcpInfo, window

STEP = 1.25  # times
REACHED = 0.8  # share of the pace from which it may be what limits a link: headers and pauses take a part of it
MOST = 8.0  # times the plan's
LOSS = 0.01  # share of packets, beyond what was lost at the plan's pace
ENOUGH_BUSY = 0.5  # seconds that a link was busy, for its bytes to say something
ENOUGH_SEGMENTS = 100
FIRST_WAIT, LONGEST_WAIT = 10.0, 300.0  # seconds, after a pace at which packets were lost


@dataclass(slots=True)
class _Link:
    planned: int  # bytes per second of a lane, as below
    pace: int
    before: dict[int, TcpInfo] = field(default_factory=dict)  # by lane
    loss: float = 0.0  # at the plan's pace
    tries_at: float = 0.0
    wait: float = FIRST_WAIT


class Pacer:
    """The links of a daemon, by numbers that are never used again."""

    def __init__(self) -> None:
        self._links: dict[int, _Link] = {}

    def look(self, now: float, looks: Mapping[int, tuple[int, Mapping[int, TcpInfo]]]) -> dict[int, int]:
        """Take in all links that are up, and return those whose lanes' pace changes, with it in bytes per second.

        *looks* has for each the plan's pace of a lane in bytes per second (0: none), and its lanes.
        """
        changed = {}
        self._links = {number: link for number, link in self._links.items() if number in looks}
        for number, (planned, lanes) in looks.items():
            link = self._links.get(number)
            if link is None or link.planned != planned:  # whoever brings it into an epoch sets the plan's pace
                self._links[number] = _Link(planned, planned, dict(lanes))
            elif planned and self._judge(link, lanes, now):
                changed[number] = link.pace
        return changed

    def _judge(self, link: _Link, lanes: Mapping[int, TcpInfo], now: float) -> bool:
        """Whether the pace changes."""
        seen = window(link.before, lanes)
        if seen.busy < ENOUGH_BUSY or seen.segments < ENOUGH_SEGMENTS:
            return False  # the bytes wait for the next look
        link.before = dict(lanes)
        lost, pace = seen.retransmitted / seen.segments, link.pace
        if pace == link.planned:
            link.loss = max(lost, (3 * link.loss + lost) / 4)
        if pace > link.planned and lost > link.loss + LOSS:
            link.pace = max(link.planned, int(pace / STEP))
            link.tries_at, link.wait = now + link.wait, min(2 * link.wait, LONGEST_WAIT)
        elif lost <= LOSS and now >= link.tries_at and seen.acked >= REACHED * pace * len(lanes) * seen.busy:
            link.pace = min(int(STEP * pace), int(MOST * link.planned))
        return link.pace != pace
