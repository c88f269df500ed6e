"""A thousand members at the real core: what it costs, in work and in bytes (tests/bench/crowd.py plays them)."""

from __future__ import annotations

import pytest

from tests.bench import crowd
from tests.bench.crowd import Crowd
from wancoll_master.core.ready import Tick

MANY = 200


@pytest.fixture
def far() -> Crowd:
    played = Crowd(far=True)
    played.form(MANY)
    played.measured()
    return played


def test_a_loss_of_few_keeps_what_was_chosen_and_a_site_finds_it_anew(far: Crowd) -> None:
    before = far.group.planned
    assert before is not None
    assert before.plan.choices, "round trips are known"
    far.lose(7)
    assert far.measured().nbytes < MANY * 300
    kept = far.group.planned
    assert kept is not None
    assert (kept.plan.choices, kept.cost, kept.shape) == (before.plan.choices, before.cost, (MANY, 8))
    for number in range(8, MANY, 8):  # all of one site but one
        far.lose(number)
    anew = far.group.planned
    assert anew is not None
    assert anew.shape == (anew.shape[0], 8)
    assert anew.shape[0] < MANY


def test_a_site_that_falls_silent_is_one_epoch(far: Crowd) -> None:
    stay = [number for number in far.conns if number % 2]
    epoch = far.group.epoch
    far.beat()
    far.now += 0.3  # half of the site is heard a little later than the other half
    far.beat(number for number in far.conns if number % 4 == 0)
    for _ in range(9):
        far.now += far.limits.heartbeat_interval
        far.beat(stay)
        if far.now >= far.state.deadline:
            far.step(Tick())
    assert (far.group.epoch, len(far.group.members)) == (epoch + 1, MANY // 2)


def test_an_epoch_of_the_most_members_fits_into_a_message() -> None:
    most = Crowd()
    most.form(most.limits.group_members)
    told = most.measured()
    assert told.nbytes / most.limits.group_members < most.limits.message_bytes / 4


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_a_thousand_members_are_told_little_and_lose_a_site_in_one_epoch() -> None:
    """The times are the benchmark's to judge: a busy machine has others."""
    bars = [bar for bar in crowd.main() if "MB told" in bar.what or "epochs" in bar.what]
    assert len(bars) >= 6
    assert [bar.row() for bar in bars if bar.verdict != "reached"] == []
