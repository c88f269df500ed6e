"""Which links stand still: looks at lanes in, states and stuck links out."""

from __future__ import annotations

import pytest

from wancoll.peer.core.grid import next_on_grid
from wancoll.peer.core.liveness.stalls import CALM, STILL, LaneLook, Stalls, look_again
from wancoll.peer.core.paths.tcpinfo import TcpInfo

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


@pytest.mark.parametrize(("acked", "segments", "large"), [(500, 4, True), (500_000, 400, False), (0, 0, False)])
def test_a_lane_that_passes_no_large_packet_says_where_to_look(acked: int, segments: int, large: bool) -> None:
    """By the mean of what was acknowledged: after a handshake and small operations it is small."""
    info = TcpInfo(0, 0, 0, False, acked, segments, 0, 0, 0, 9000)
    looks = Looks()
    looks.until(0.25 + TIMEOUT, LaneLook(0, acked + 9000, False, info))
    [stuck] = looks.stalls.stuck(looks.now, TIMEOUT, SETTLED, {})
    assert ("MTU" in stuck.reason) == ("net.ipv4.tcp_mtu_probing" in stuck.reason) == large


def test_one_stuck_lane_counts_though_others_move() -> None:
    looks = Looks()
    for step in range(12):
        looks.until(0.25 * (step + 1), lane(sent=9, unacked=9), lane(sent=step, acked=step, received=step))
    view = looks.stalls.view(LINK, looks.now)
    assert (view.state, view.still) == ("dead", 0.0)
    assert looks.stuck() == [(LINK, True)]


@pytest.mark.parametrize(("other", "acked_for", "alone"), [
    (lane(), 2.5, True),
    (lane(), 0.5, True),  # it has nothing left to send, since all waits for the dead one's bytes
    (lane(), 0.25, False),  # both stopped within a round trip: it is the link
    (LaneLook(0, 0, False, TcpInfo(0, 0, 0, False, 0, 100, 0, 0, 0)), 2.5, False),  # small packets alone prove nothing
])  # fmt: skip
def test_a_dead_lane_is_cut_alone_where_another_one_moves_on(other: LaneLook, acked_for: float, alone: bool) -> None:
    looks = Looks()
    for step in range(10):
        acked = min(step, int(acked_for / 0.25))
        moves = other._replace(info=other.info and other.info._replace(bytes_acked=acked))
        looks.until(0.25 * (step + 1), lane(sent=9, unacked=9), moves)
    [stuck] = looks.stalls.stuck(looks.now, TIMEOUT, SETTLED, {})
    assert (stuck.lane, stuck.dead, stuck.alone) == (0, True, alone)


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


def test_a_lane_that_was_blocked_has_begun_to_move_where_bytes_are_on_the_way() -> None:
    """The other end called late, and a look falls between the first bytes and their acknowledgement."""
    looks = Looks()
    while looks.now < 3 * TIMEOUT:
        looks.until(looks.now + 0.5, lane(backlog=50))
        looks.stalls.excuse(LINK, looks.now)
    looks.until(looks.now + TIMEOUT, lane(unacked=40, backlog=10))
    assert looks.stuck() == []
    looks.until(looks.now + 0.25, lane(unacked=40, backlog=10))
    assert looks.stuck() == [(LINK, True)]


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


class Kernel:
    """A lane whose kernel is asked only now and then, looked at four times a second beside one that it is asked of."""

    def __init__(self) -> None:
        self.lane, self.asked, self.now = lane(), 0, 0.0
        self.look: LaneLook | None = None
        self.stalls, self.always = Stalls(), Stalls()

    def view(self) -> TcpInfo | None:
        self.asked += 1
        return self.lane.info

    def looks(self, count: int, now: LaneLook) -> int:
        """How often the kernel is asked in *count* looks."""
        self.lane, before = now, self.asked
        for _ in range(count):
            self.now += 0.25
            self.look = look_again(self.look, *now[:3], self.view)
            self.stalls.look(self.now, {LINK: {0: self.look}})
            self.always.look(self.now, {LINK: {0: now}})
        return self.asked - before

    def check(self) -> None:
        """What follows is what follows where the kernel is asked each time."""
        view, exact = (stalls.view(LINK, self.now) for stalls in (self.stalls, self.always))
        assert view == exact._replace(heard=view.heard)
        assert exact.heard <= view.heard <= exact.heard + 0.25 * CALM
        known = {LINK: self.now}
        stuck = [one.stuck(self.now, TIMEOUT, SETTLED, known) for one in (self.stalls, self.always)]
        assert stuck[0] == stuck[1]


def test_of_a_calm_lane_the_kernel_is_asked_each_fourth_time() -> None:
    kernel = Kernel()
    assert kernel.looks(CALM + 1, lane(sent=9, acked=9)) == CALM + 1
    assert kernel.looks(10 * CALM, lane(sent=9, acked=9)) == 10
    kernel.check()


@pytest.mark.parametrize("calm", range(2 * CALM))
@pytest.mark.parametrize("look", [
    lane(sent=18, acked=9, unacked=9), lane(sent=18, acked=9, backlog=9), lane(sent=18, acked=18),
    lane(received=1, sent=9, acked=9, heard=1), lane(sent=9, acked=9, parked=True),
])  # fmt: skip
def test_a_lane_that_was_calm_is_seen_to_move_at_once(look: LaneLook, calm: int) -> None:
    """And a dead or blocked one as soon as ever."""
    kernel = Kernel()
    kernel.looks(CALM + calm, lane(sent=9, acked=9))
    assert kernel.looks(1, look) == 1
    kernel.check()
    for _ in range(int(4 * TIMEOUT) + 2):
        kernel.looks(1, look)
        kernel.check()


def test_of_a_lane_with_bytes_under_way_the_kernel_is_asked_each_time() -> None:
    kernel = Kernel()
    kernel.looks(3 * CALM, lane(sent=9, acked=9))
    assert kernel.looks(20, lane(sent=18, acked=9, unacked=9)) == 20
    assert kernel.looks(4, lane(sent=18, acked=18)) == 4
    kernel.check()


def test_packets_that_came_unnoticed_never_count_as_newer_than_they_are() -> None:
    """Whether packets still come says which direction is dead: from the first that is noticed on each one counts."""
    kernel = Kernel()
    kernel.looks(2 * CALM + 2, lane(sent=9, acked=9))
    at = kernel.now
    kernel.looks(1, lane(sent=9, acked=9, heard=1))
    assert kernel.stalls.view(LINK, kernel.now).heard > 1.0  # not noticed yet
    kernel.looks(2, lane(sent=9, acked=9, heard=1))
    heard = kernel.stalls.view(LINK, kernel.now).heard
    assert kernel.now - at <= heard <= 1.0
    for packets in range(2, 10):
        kernel.looks(2, lane(sent=9, acked=9, heard=packets))
        kernel.check()
        assert kernel.stalls.view(LINK, kernel.now).heard == 0.25


@pytest.mark.parametrize(("now", "every", "then"), [(0.0, 0.25, 0.25), (0.2499, 0.25, 0.25), (1e6, 0.5, 1e6 + 0.5)])
def test_what_is_done_now_and_then_is_done_together(now: float, every: float, then: float) -> None:
    assert next_on_grid(now, every) == then


@pytest.mark.parametrize("every", [0.1, 0.3, 1 / 3])
def test_the_grid_goes_on(every: float) -> None:
    now = 0.0
    for _ in range(1000):
        then = next_on_grid(now, every)
        assert now < then <= now + 1.001 * every
        now = then
