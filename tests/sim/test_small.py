"""All that can happen to two or three members and their master in one or two calls, as far as the time allows."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tests.later import at_night, later
from tests.sim import mistakes
from tests.sim.judge import Violation
from tests.sim.small import LyingWorld, SmallWorld, explore, wander
from wancoll.collective import Kind
from wancoll.peer.core import member as core

pytestmark = pytest.mark.timeout(300)  # of busy machines: what counts is processor time

REDUCE, UPDATE, BROADCAST, BARRIER = Kind.all_reduce, Kind.update_membership, Kind.broadcast, Kind.barrier
WORLDS = [
    (2, (REDUCE,), {"master": 1}),
    (2, (REDUCE,), {"master": 1, "crash": 1, "time": 1}),
    (2, (REDUCE, REDUCE), {"drop": 1, "master": 1, "time": 1}),
    (2, (REDUCE, UPDATE), {"crash": 1, "drop": 1, "time": 1}),
    (2, (REDUCE,), {"wrong": 3, "master": 1}),
    (3, (REDUCE,), {"master": 2, "crash": 1, "time": 2}),
]


# Where members commit.
VOTES = [
    (2, (REDUCE,), {"master": 1, "drop": 1, "time": 1}, 32),
    (2, (REDUCE, REDUCE), {"cut": 1, "drop": 1, "wrong": 1}, 32),
    (2, (REDUCE, UPDATE, REDUCE), {"join": 1, "drop": 1}, 32),
    (2, (BROADCAST, REDUCE), {"raise": 1, "drop": 1, "master": 1, "time": 1}, 32),
    (3, (BARRIER,), {"crash": 1, "drop": 1}, 32),
    (3, (REDUCE,), {"crash": 1, "drop": 1}, 32),
    (3, (REDUCE,), {"drop": 2, "cut": 1}, 32),
]
# Below min_world after a loss: calls behind an update_membership wait for who is admitted at it.
TOO_SMALL = [
    (2, (REDUCE, UPDATE, REDUCE), {"crash": 1}, 0, 2),
    (2, (UPDATE, REDUCE), {"crash": 1}, 32, 2),
]
# Where members pass an update_membership without a master.
ALONE = [
    (2, (UPDATE,), {"master": 1, "alone": 2}, 32),
    (2, (REDUCE, UPDATE), {"master": 1, "alone": 2, "crash": 1, "time": 1}, 32),
    (3, (UPDATE, REDUCE), {"master": 1, "alone": 3, "join": 1}, 32),
]
# Where links break: another round of the epoch.
ROUNDS = [
    (2, (REDUCE, REDUCE), {"cut": 3}, 32),
    (2, (REDUCE, BROADCAST, REDUCE), {"cut": 2}, 32),
    (3, (REDUCE, REDUCE), {"cut": 2}, 32),
]
# One of them lies: to others, and to a master that ends the epoch, or is started again.
LIARS = [
    (3, (REDUCE,), {"lie": 3, "wrong": 1, "raise": 1}, 32),
    (4, (REDUCE,), {"lie": 3, "wrong": 1, "drop": 1}, 32),
    (3, (REDUCE, REDUCE), {"lie": 3, "wrong": 1, "cut": 1, "raise": 1}, 32),
    (3, (REDUCE,), {"lie": 3, "wrong": 1, "master": 1, "raise": 1}, 32),
    (3, (REDUCE,), {"lie": 2, "wrong": 1, "master": 1, "time": 1}, 0),
]
# Mistakes of mistakes.py, and the world in which each is found.
PLANTED: dict[str, tuple[Any, ...]] = {
    "telling_the_evicted_at_once": (2, (REDUCE,), {"drop": 1}),
    "forgetting_what_is_done": (2, (REDUCE,), {"drop": 1}),
    "rooted_kinds_included": (3, (BROADCAST,), {"drop": 1, "crash": 1}),
    "barriers_of_one_frame": (3, (BARRIER,), {"drop": 1, "crash": 1}),
    "reporting_without_freezing": (2, (REDUCE,), {"drop": 1}),
    "no_digest_for_the_evicted": (2, (REDUCE,), {"drop": 1, "wrong": 1}),
    "definite_with_nobody_left": (2, (REDUCE,), {"drop": 2}),
    "not_telling_those_who_came_late": (2, (UPDATE,), {"master": 1, "alone": 2}),
    "no_round_after_a_loss": (2, (REDUCE,), {"cut": 1}),
    "undoing_what_was_said": (2, (REDUCE,), {"cut": 1}),
    "not_running_again_what_is_finished": (2, (REDUCE,), {"cut": 1}),
    "doubt_about_what_is_decided": (2, (REDUCE,), {"drop": 1}),
}
DEEP = ("reporting_", "no_digest_", "definite_", "doubt_")  # mistakes to which walks at random come sooner


@pytest.mark.nightly
def test_every_way_in_which_a_master_can_die() -> None:
    """Two members, one op: nothing is left out."""
    states, ends, complete = explore(SmallWorld(*WORLDS[0]), 100, 100.0)
    assert complete
    assert states > 2000
    assert ends > 500


@pytest.mark.parametrize("seconds", [1.2, *at_night(2.5)])
@pytest.mark.parametrize("world", WORLDS, ids=str)
def test_small_worlds(world: tuple[Any, ...], seconds: float) -> None:
    states, ends, _ = explore(SmallWorld(*world), 100, seconds)
    assert states > 300
    assert ends > 50


@pytest.mark.parametrize("world", VOTES + ALONE + ROUNDS, ids=str)
def test_small_worlds_where_members_commit(world: tuple[Any, ...]) -> None:
    states, _, _ = explore(SmallWorld(*world), 100, 0.4)
    assert states > 50


@pytest.mark.parametrize("world", TOO_SMALL, ids=str)
def test_small_worlds_below_min_world(world: tuple[Any, ...]) -> None:
    states, ends, _ = explore(SmallWorld(*world), 100, 0.4)
    assert states > 50
    assert ends > 10


@pytest.mark.parametrize("world", LIARS, ids=str)
def test_small_worlds_with_a_member_that_lies(world: tuple[Any, ...]) -> None:
    wander(LyingWorld(*world), 100, 14)


@pytest.mark.check
def test_passing_an_update_on_ones_own_shows() -> None:
    """In walks at random: what one passes alone others may bear, and end alike."""
    world = 2, (REDUCE, UPDATE), {"master": 1, "alone": 1, "drop": 1}, 32
    with mistakes.passing_on_ones_own(), pytest.raises((Violation, AssertionError)):
        wander(SmallWorld(*world), 3000, 18)


def test_a_lie_that_is_believed_shows() -> None:
    with mistakes.believing_another_members_word(), pytest.raises(Violation, match="m1 has Result"):
        wander(LyingWorld(3, (REDUCE,), {"lie": 2, "wrong": 1, "drop": 1}, 32), 5000, 12)


def test_a_lie_that_holds_others_up_for_ever_shows() -> None:
    with mistakes.no_look_at_what_stands_still(), pytest.raises(Violation, match="m1 is never told of"):
        wander(LyingWorld(*LIARS[0]), 1000, 14)


SLOW = ("not_telling_those_who_came_late",)
LATER = [name for name in [*PLANTED][4:] if name not in SLOW]


def hunt(name: str) -> None:
    world = SmallWorld(*PLANTED[name], 32)
    if name.startswith(DEEP):
        wander(world, 1200, 14)
    explore(world, 100, 60.0)


@pytest.mark.parametrize("name", [*PLANTED][:4] + later(*LATER) + at_night(*SLOW))
def test_mistakes_where_members_commit_are_found(name: str) -> None:
    with getattr(mistakes, name)(), pytest.raises((Violation, AssertionError)):
        hunt(name)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("world", WORLDS[1:] + VOTES + ALONE + ROUNDS + TOO_SMALL, ids=str)
def test_small_worlds_for_long(world: tuple[Any, ...]) -> None:
    states, _, complete = explore(SmallWorld(*world), 100, 300.0)
    assert complete or states > 20_000


def test_it_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """Members that take nothing for committed when an epoch begins."""
    real = core.Member.enter_epoch

    def forgetful(self: core.Member, epoch: Any, now: float) -> Any:
        return real(self, msgspec.structs.replace(epoch, committed_upto=0), now)

    monkeypatch.setattr(core.Member, "enter_epoch", forgetful)
    with pytest.raises(Violation, match="op 1"):
        explore(SmallWorld(*WORLDS[1]), 100, 60.0)
