"""Daemons whose connections break, one or many at once, of which some are killed: only those are evicted (R18).

Everyone tells what is true, early or late: links that are lost, and whom they find when they dial.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from random import Random

import pytest

from tests.master.transcript import GROUP, Room
from wancoll.limits import Limits
from wancoll.wire import messages as m

LONGEST = 0.99  # seconds until one that lives is back: less than return_grace


class Story:
    """See the module."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)
        self.room = Room()
        count = self._random.choice((2, 3, 4, 6, 8))
        self.room.form(count)
        self._names = [f"d{i}" for i in range(count)]
        self._back: dict[str, float] = {}  # those that live and are away, and when they return
        self._killed: dict[str, float] = {}
        self._later: list[tuple[float, Callable[[], None]]] = []
        self._dials = 0

    def play(self) -> None:
        for _ in range(self._random.randint(1, 6)):
            here = self._here()
            if not here:
                break
            what, some = self._random.random(), self._random.sample(here, self._random.randint(1, len(here)))
            if what < 0.5:
                self._reset(some, links=what < 0.35)
            elif what < 0.75 and len(here) > 1:
                self._kill(some[: max(1, (len(here) - 1) // 2)])
            self._until(self.room.now + self._random.choice((0.0, 0.03, 0.1, 0.3, 1.0, 3.0)))
        self._until(self.room.now + 16)
        assert set(self.room.conns) == set(self._names) - set(self._killed)

    def _here(self) -> list[str]:
        return [d for d in self._names if d not in self._killed and d not in self._back]

    def _at(self, wait: float, call: Callable[[], None]) -> None:
        self._later.append((self.room.now + wait, call))

    # ---- what happens --------------------------------------------------------------------------------

    def _reset(self, some: list[str], *, links: bool) -> None:
        """Their control connections break, and perhaps their links."""
        for daemon in some:
            self.room.breaks(daemon)
            self._dials += 1
            wait = self._random.choice((0.05, 0.08, 0.15, 0.3, LONGEST))
            self._back[daemon] = self.room.now + wait
            self._at(wait, lambda daemon=daemon, dial=self._dials: self._returns(daemon, dial))
            if links:
                self._lose_links(daemon)

    def _returns(self, daemon: str, dial: int) -> None:
        if daemon in self._back:
            del self._back[daemon]
            conn = self.room.conns[daemon]
            self.room.returns(daemon, dial=dial)
            assert self.room.conns[daemon] == conn, f"{daemon} could not go on"

    def _kill(self, some: list[str]) -> None:
        for daemon in some:
            self._killed[daemon] = self.room.now
            self.room.asleep.add(daemon)
            self._at(self._random.choice((0.0, 0.02)), lambda daemon=daemon: self.room.breaks(daemon))
            self._lose_links(daemon)

    def _lose_links(self, daemon: str) -> None:
        """Its ring neighbours notice, and tell when they are connected."""
        ring = self.room.group.members
        at = next(at for at, member in enumerate(ring) if member.daemon.name == daemon)
        for other in dict.fromkeys((ring[at - 1], ring[(at + 1) % len(ring)])):
            if other is not ring[at]:
                kind = self._random.choice(("broken", "lost"))
                told = m.LinkDown(GROUP, other.mid, self.room.epoch, ring[at].mid, kind, "reset")
                self._at(self._random.choice((0.0, 0.01, 0.06)), lambda of=other.daemon.name, t=told: self._tell(of, t))

    def _tell(self, daemon: str, told: m.FromPeer) -> None:
        if daemon in self._back:
            self._at(self._back[daemon] - self.room.now + 0.001, lambda: self._tell(daemon, told))
        elif daemon not in self._killed:
            self.room.say(daemon, told)

    def _dial(self, daemon: str, ask: m.Probe) -> None:
        how = "refused" if ask.daemon in self._killed else self._random.choice(("answers", "answers", "fails"))
        ends = ask.prober, ask.target
        found = m.ProbeResult(GROUP, 0, *ends, how == "answers", how, how == "refused")
        self._at(self._random.choice((0.001, 0.05, 0.15, 0.3)), lambda: self._tell(daemon, found))

    # ---- time ----------------------------------------------------------------------------------------

    def _until(self, when: float) -> None:
        while True:
            at = min([when, *(due for due, _ in self._later)])
            if at > self.room.now:
                self.room.sleep(at - self.room.now)
            due = [call for at, call in self._later if at <= self.room.now]
            self._later = [(at, call) for at, call in self._later if at > self.room.now]
            for call in due:
                call()
            for daemon in self._here():
                for ask in self.room.take(daemon, m.Probe):
                    self._dial(daemon, ask)
            self._check()
            if self.room.now >= when and not due:
                return

    def _check(self) -> None:
        for daemon in self._names:
            assert daemon in self.room.conns or daemon in self._killed, (
                f"{daemon} lives, and is out: {self.room.closed}"
            )
        for one in self.room.state.daemons.values():
            assert one.away or (one.doubted, one.witnesses, one.answers, one.ended_at) == (False, set(), False, inf)


@pytest.mark.parametrize("first", range(0, 200, 50))
def test_who_lives_stays_and_who_was_killed_goes(first: int) -> None:
    for seed in range(first, first + 50):
        try:
            Story(seed).play()
        except AssertionError as wrong:
            raise AssertionError(f"seed {seed}: {wrong}") from wrong


def test_who_is_away_is_not_asked_about_without_end() -> None:
    """A witness is away itself; those who are asked in its place are asked once, though they find out nothing."""
    room = Room()
    room.form(4)
    for gone in ("d2", "d3"):
        room.breaks(gone)
        room.link_down("m1", "m" + gone[1:])
    room.breaks("d0")
    room.dials("d1", "m2", "refused")
    asked = 0
    for _ in range(20):
        told = [probe for probe in room.take("d1", m.Probe) if probe.target == room.mid("m3")]
        asked += len(told)
        for _ in told:
            room.dials("d1", "m3", "fails")
            room.sleep(0.001)
    assert asked == 2


@pytest.mark.parametrize(("round_trip", "seconds"), [(0.0, 1.0), (0.19, 2.52), (9.0, 3.0)])
def test_who_comes_a_long_way_has_time_for_three_dials(round_trip: float, seconds: float) -> None:
    """Two break before they are known to be its: that takes 3 x 2.5 round trips. But heartbeat_timeout at most."""
    room = Room(Limits(heartbeat_timeout=3.0))
    room.form(3)
    room.breaks("d2", round_trip=round_trip)
    room.sleep(seconds - 0.01)
    assert "d2" in room.conns
    room.sleep(0.02)
    assert "d2" not in room.conns


@pytest.mark.parametrize("speaks", [True, False])
def test_who_comes_back_again_and_again_has_to_say_a_word(*, speaks: bool) -> None:
    """Else its group would wait for it for ever."""
    room = Room(Limits(heartbeat_timeout=3.0))
    room.form(3)
    for dial in range(1, 12):
        room.breaks("d2")
        room.sleep(0.5)
        if "d2" not in room.conns:
            break
        room.returns("d2", dial=dial)
        if speaks:
            room.say("d2", m.Heartbeat(dial))
    assert (dial, "d2" in room.conns) == ((11, True) if speaks else (7, False))
