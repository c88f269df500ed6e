"""Which links stand still: looks at lanes in, states and stuck links out."""

from __future__ import annotations

import pytest

from wancoll.peer.core.stalls import STILL, LaneLook, Stalls
from wancoll.peer.core.tcpinfo import TcpInfo

LINK = 7
TIMEOUT, SETTLED = 2.0, 1.0


def lane(
    *, received: int = 0, sent: int = 0, acked: int = 0, unacked: int = 0, backlog: int = 0, heard: int = 0,
    parked: bool = False,
) -> LaneLook:  # fmt: skip
    info = TcpInfo(0, 0, 0, False, acked, 0, 0, 0, backlog, unacked, heard)
    return LaneLook(received, sent, parked, info)


class Looks:
    """A link with two lanes, looked at four times a second."""

    def __init__(self) -> None:
        self.stalls, self.now = Stalls(), 0.0

    def until(self, end: float, first: LaneLook, second: LaneLook | None = None) -> None:
        while self.now < end:
            self.now += 0.25
            self.stalls.look(self.now, {LINK: {0: first, 1: second or lane()}})

    def stuck(self, known_at: float | None = None) -> list[tuple[int, bool]]:
        known = {LINK: self.now if known_at is None else known_at}
        return [(one.link, one.dead) for one in self.stalls.stuck(self.now, TIMEOUT, SETTLED, known)]


def test_an_idle_link_is_idle() -> None:
    looks = Looks()
    looks.until(60.0, lane(sent=10, acked=10))
    assert looks.stalls.view(LINK, looks.now).state == "idle"
    assert looks.stuck() == []


@pytest.mark.parametrize(("look", "state", "dead"), [
    (lane(sent=9, unacked=9), "dead", True),
    (lane(sent=9, unacked=9, backlog=50), "dead", True),
    (lane(sent=9, backlog=50), "blocked", False),
])  # fmt: skip
def test_a_lane_without_progress(look: LaneLook, state: str, dead: bool) -> None:
    looks = Looks()
    looks.until(STILL, look)
    assert looks.stalls.view(LINK, looks.now).state == "busy"
    looks.until(1.0, look)
    view = looks.stalls.view(LINK, looks.now)
    assert (view.state, view.since) == (state, 0.75)
    assert looks.stuck() == []
    looks.until(0.25 + TIMEOUT, look)
    assert looks.stuck() == [(LINK, dead)]
    reason = looks.stalls.stuck(looks.now, TIMEOUT, SETTLED, {LINK: looks.now})[0].reason
    assert "lane 0" in reason
    assert "2.0 s" in reason


def test_one_stuck_lane_counts_though_others_move() -> None:
    looks = Looks()
    for step in range(12):
        looks.until(0.25 * (step + 1), lane(sent=9, unacked=9), lane(sent=step, acked=step, received=step))
    view = looks.stalls.view(LINK, looks.now)
    assert (view.state, view.still) == ("dead", 0.0)
    assert looks.stuck() == [(LINK, True)]


def test_progress_starts_the_time_anew() -> None:
    looks = Looks()
    for step in range(10):
        looks.until(1.75 * (step + 1), lane(acked=step, unacked=9))
        assert looks.stuck() == []


def test_a_blocked_lane_waits_for_the_masters_word() -> None:
    """The master is away: who knows whether the other end has a reason."""
    looks = Looks()
    looks.until(0.25 + 3 * TIMEOUT, lane(backlog=50))
    assert looks.stuck(known_at=0.25 + SETTLED - 0.01) == []  # the first look was at 0.25
    assert looks.stuck(known_at=looks.now) == [(LINK, False)]


def test_a_blocked_lane_is_excused() -> None:
    looks = Looks()
    while looks.now < 10 * TIMEOUT:
        looks.until(looks.now + 0.5, lane(backlog=50))
        looks.stalls.excuse(LINK, looks.now)
        assert looks.stuck() == []
    looks.until(looks.now + TIMEOUT - 0.25, lane(backlog=50))
    assert looks.stuck() == []
    looks.until(looks.now + 0.25, lane(backlog=50))
    assert looks.stuck() == [(LINK, False)]


def test_a_dead_lane_is_not_excused() -> None:
    looks = Looks()
    looks.until(0.25 + TIMEOUT, lane(unacked=50))
    looks.stalls.excuse(LINK, looks.now)
    assert looks.stuck() == [(LINK, True)]


def test_parked_bytes_and_when_a_packet_came() -> None:
    looks = Looks()
    looks.until(1.0, lane(received=48, heard=3))
    looks.until(2.0, lane(received=48, heard=4, parked=True))
    looks.until(4.0, lane(received=48, heard=4, parked=True))
    view = looks.stalls.view(LINK, looks.now)
    assert (view.state, view.since, view.heard, view.still) == ("parked", 2.75, 2.75, 3.75)


def test_links_that_are_gone_are_forgotten() -> None:
    looks = Looks()
    looks.until(3.0, lane(unacked=50))
    looks.stalls.look(4.0, {})
    assert looks.stalls.stuck(5.0, TIMEOUT, SETTLED, {}) == []
    assert looks.stalls.view(LINK, 5.0).state == "idle"
    looks.stalls.excuse(LINK, 5.0)


def test_a_lane_that_the_kernel_says_nothing_of() -> None:
    looks = Looks()
    looks.until(30.0, LaneLook(0, 9, False, None))
    assert looks.stalls.view(LINK, looks.now).state == "idle"
    assert looks.stuck() == []
