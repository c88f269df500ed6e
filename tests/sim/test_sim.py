"""Some thousand simulated worlds, and whether a seed says all: `make sim SEED=...` replays what fails here."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.sim import mistakes
from tests.sim.__main__ import attempt
from tests.sim.judge import Violation
from tests.sim.world import World
from wancoll.wire import messages as m
from wancoll.wire.note import pack

ROOT = Path(__file__).parents[2]
QUICK, SOME, MORE = 60, 160, 3000  # worlds of `make test`, of `make check` besides, of `make nightly` besides
HELD = 'import sys; from tests.sim.test_sim import trace; print(*map(trace, map(int, sys.argv[1:])), sep="\\n")'


def explore(first: int, stop: int, voters: int = 0, shards: int = 1) -> None:
    beside = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))  # that have tests of their own
    with ProcessPoolExecutor(max(1, (os.cpu_count() or 1) // beside)) as pool:
        found = [
            (seed, why)
            for seed, why, *_ in pool.map(
                partial(attempt, voters=voters, shards=shards), range(first, stop), chunksize=8
            )
            if why
        ]
    replay = f"replay with: python -m tests.sim --voters {voters} --shards {shards} --seed"
    told = "\n".join(f"seed {seed}: {why}\n  {replay} {seed}" for seed, why in found[:5])
    assert not found, f"{len(found)} of {stop - first} worlds failed\n{told}"


@pytest.mark.timeout(300)
def test_worlds() -> None:
    explore(0, QUICK)


@pytest.mark.check
@pytest.mark.timeout(600)
def test_more_worlds() -> None:
    explore(QUICK, SOME)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_many_worlds() -> None:
    explore(SOME, MORE)
    explore(100_000, 120_000)


@pytest.mark.timeout(300)
def test_worlds_where_members_commit() -> None:
    explore(0, 10, 32)


@pytest.mark.check
@pytest.mark.timeout(300)
def test_more_worlds_where_members_commit() -> None:
    explore(10, 40, 32)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_many_worlds_where_members_commit() -> None:
    explore(200_000, 220_000, 32)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("voters", [0, 32])
def test_worlds_of_islands(voters: int) -> None:
    explore(0, 8, voters, 2)


@pytest.mark.check
@pytest.mark.timeout(300)
@pytest.mark.parametrize("voters", [0, 32])
def test_more_worlds_of_islands(voters: int) -> None:
    explore(8, 30, voters, 2)
    explore(0, 20, voters, 3)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("voters", [0, 32])
def test_many_worlds_of_islands(voters: int) -> None:
    explore(300_000, 307_000, voters, 2)
    explore(310_000, 313_000, voters, 3)


@pytest.mark.check
@pytest.mark.timeout(300)
def test_members_pass_updates_while_the_master_is_away_or_unheard() -> None:
    """Those that are lost then, joiners, and masters that decide what nobody hears."""
    passed = 0
    for seed in range(20):
        world = World(seed, faults=("master_away", "unheard_master", "kill_daemon"), voters=32)
        world.run()
        passed += world.judge.alone
    assert passed > 2


def test_what_is_committed_is_judged_by_all_that_is_known() -> None:
    """A result corrupted in the one member that is left; one of which no note could tell, since no link was up."""
    assert attempt(5005)[1] == attempt(20710, 32)[1] == ""


def test_in_too_small_a_world_calls_behind_an_update_wait_for_who_is_admitted_at_it() -> None:
    """Joiners begin with the same calls. A master that is started again while they stand there holds them, too."""
    assert attempt(211)[1] == attempt(211, 32)[1] == attempt(298)[1] == attempt(113506, 32)[1] == ""


def test_shares_of_members_that_are_all_gone_are_none() -> None:
    """The members that are left owned nothing of a tensor."""
    assert attempt(20001, 32)[1] == ""


def test_members_whose_calls_are_void_one_after_the_other_may_go_on() -> None:
    """Past as many as they may have in flight."""
    assert attempt(6319)[1] == ""


def test_a_journal_that_is_lost_twice_from_nothing_gives_no_number_again() -> None:
    assert attempt(12000572)[1] == ""


def test_members_of_before_that_come_late_to_a_master_without_a_journal_hear_that_they_are_out() -> None:
    """Others run a group of their name, in an epoch with a lower number."""
    assert attempt(100368, 32)[1] == ""


def test_a_daemon_asks_the_next_master_soon_where_one_is_silent_and_is_back_in_time() -> None:
    """Its control connection broke, and nobody is evicted for that."""
    assert attempt(107680, 32)[1] == ""


def test_only_a_member_whose_calls_have_ended_may_speak_without_a_tally() -> None:
    """The engine may say a vote while the daemon takes out one operation after the other (R8)."""
    judge, vote = World(0).judge, pack(m.Vote("g", 1, 1, 1, 7, 9))
    member = SimpleNamespace(name="c0", group="g", mid=1, over=True, collectives=SimpleNamespace(tally=None))
    judge.notes(member, vote)
    assert judge.done == {("c0", 1, 1): (7, 9)}
    member.over = False
    with pytest.raises(Violation):
        judge.notes(member, vote)


# Which mistakes show, and in worlds of which faults (None: those of the seed). Others show in small ones: test_small.
LOST_JOURNALS = ("lose_journal", "full_disk", "kill_master", "kill_daemon", "join", "lose_site")


@pytest.mark.check
@pytest.mark.timeout(300)
@pytest.mark.parametrize("voters", [0, 32])
def test_lost_journals_and_full_disks(voters: int) -> None:
    """Where those come often; a daemon that never saw a master may come first."""
    for seed in range(60):
        World(seed, faults=LOST_JOURNALS, voters=voters).run()


SHOWS: dict[str, tuple[str, ...] | None] = {
    "reporting_without_freezing": None,
    "a_note_after_the_freeze": None,
    "freezing_before_the_engine_is_asked": None,
    "telling_the_evicted_at_once": ("pause_daemon",),
    "forgetting_what_is_done": None,
    "not_waiting_for_all": None,
    "rooted_kinds_included": ("kill_daemon", "join", "leave"),
    "a_window_of_the_master": ("flip", "differ"),
    "nobody_waits_where_all_were_lost": ("cut_members",),
    "admitting_beside_who_goes_on_alone": ("unheard_master",),
    "passing_on_ones_own": ("master_away",),
    "notes_without_room": None,
    "notes_behind_data": None,
    "notes_not_said_again": ("cut_pair", "break_lane"),
    "forming_at_once_where_nothing_is_known": LOST_JOURNALS,
    "giving_numbers_again_after_a_loss": LOST_JOURNALS,
    "doubt_about_what_is_decided": None,
    "the_last_word_first": None,
    "a_vote_missing": None,
    "a_vote_counted_for_another_member": None,
    "a_tally_that_does_not_freeze": None,
    "saying_before_it_is_written": None,
    "contributors_as_the_client_knew_them": None,
    "again_from_the_result": None,
    "a_joiner_in_the_middle": None,
    "a_close_that_drops_a_report": None,
    "a_void_counted_twice": None,
    "an_engine_that_counts_one_vote_too_few": None,
    "an_engine_that_goes_on_while_its_member_freezes": None,
    "lending_what_is_open": None,
    "taking_over_without_what_is_finished": None,
    "taking_over_in_another_order": None,
}


def test_every_mistake_can_be_planted_and_some_test_looks_for_it() -> None:
    """A rename may take away what a mistake replaces."""
    planted = {name for name, one in vars(mistakes).items() if getattr(one, "__module__", "") == mistakes.__name__}
    tests = (path.read_text() for path in ROOT.glob("tests/*/test_*.py"))
    assert planted <= {word for text in tests for word in re.findall(r"\w+", text)}
    for name in planted:
        with getattr(mistakes, name)():
            pass


# The same for islands of three shards.
SHOWS_IN_ISLANDS: dict[str, tuple[str, ...] | None] = {
    "a_commit_with_a_column_missing": None,
    "results_compared_between_columns": None,
    "results_compared_with_nobody": ("flip",),
    "columns_that_call_what_they_like": ("differ",),
    "half_an_island_admitted": None,
    "the_rest_of_an_island_goes_on": None,
    "the_rest_of_an_island_comes_back": ("kill_master", "kill_client"),
    "reports_counted_over_all_columns": ("kill_master",),
    "empty_shards_collected_by_the_master": None,
}


@pytest.mark.check
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", SHOWS_IN_ISLANDS)
def test_mistakes_of_islands_are_found(name: str) -> None:
    with getattr(mistakes, name)():
        assert any(_fails(seed, SHOWS_IN_ISLANDS[name], 3) for seed in range(100))


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", SHOWS)
def test_mistakes_where_members_commit_are_found(name: str) -> None:
    """In some of a thousand worlds."""
    with getattr(mistakes, name)():
        assert any(_fails(seed, SHOWS[name]) for seed in range(1000))


def _fails(seed: int, faults: tuple[str, ...] | None, shards: int = 1) -> bool:
    try:
        World(seed, faults=faults, voters=32, shards=shards).run()
    except (Violation, AssertionError):
        return True
    return False


@pytest.mark.timeout(180)
def test_nobody_is_put_out_where_all_connections_are_reset() -> None:
    for seed in range(15):
        World(seed, faults=("reset_all",)).run()


@pytest.mark.timeout(180)
def test_daemons_that_are_killed_together_cost_one_epoch() -> None:
    """Half of all at once, somewhere in the ring."""
    lost = 0
    for seed in range(25):
        world = World(seed, faults=())
        if world.odd.daemons < 4:
            continue
        world.begin()
        world.until(4.0)
        before = set(world.judge.epochs)
        for daemon in world.random.sample(world.daemons, world.odd.daemons // 2):
            world.kill_daemon(daemon, silent=False)
        world.until(world.clock.now + 1.5)
        reasons = [epoch.reason for key, epoch in world.judge.epochs.items() if key not in before]
        losses = [reason for reason in reasons if reason.startswith("lost")]
        assert len(losses) <= 1, f"seed {seed}: {losses}"
        lost += len(losses)
    assert lost > 4


def test_who_wakes_up_cut_off_commits_nothing_beside_a_group_that_has_formed_anew() -> None:
    """All members' daemons are stopped for longer than their name waits, and wake up without a way to the master."""
    formed = 0
    for seed in range(40):
        world = World(seed, faults=(), graces=(), voters=32)
        if world.odd.daemons < 3 or formed == 3:
            continue
        count = world.odd.daemons - 1
        world.odd = replace(world.odd, clients=count, start_world=count, min_world=1)
        world.begin()
        world.until(4.0)
        *members, free = world.daemons
        for daemon in members:
            world.blame(daemon.name)
            for master in world.master_hosts:
                world.network.block(daemon.host, master)
                world.network.block(master, daemon.host)
            daemon.sleep()
        world.odd = replace(world.odd, start_world=1)
        world.start_client(free)
        for _ in range(200):
            world.until(world.clock.now + 0.5)
            if max(world.judge.lives.values()) > 0:
                break
        formed += max(world.judge.lives.values()) > 0
        for daemon in members:
            daemon.wake()
        world.until(world.clock.now + 10.0)  # the judge looks at what they commit (C8)
    assert formed == 3


def trace(seed: int) -> str:
    """A digest of all that happens."""
    digest = hashlib.blake2b()
    World(seed, lambda line: digest.update(line.encode() + b"\n")).run()
    return digest.hexdigest()


def test_a_seed_says_all() -> None:
    """The same trace byte for byte, also where sets and dicts of strings are in another order."""
    seeds = [str(seed) for seed in range(12)]
    told = []
    for order in ("1", "2"):
        path = os.pathsep.join((str(ROOT), str(ROOT / "master")))
        env = {**os.environ, "PYTHONHASHSEED": order, "PYTHONPATH": path}
        run = subprocess.run(
            [sys.executable, "-c", HELD, *seeds], env=env, cwd=ROOT, capture_output=True, text=True, check=True
        )
        told.append(run.stdout.split())
    assert told[0] == told[1]
    assert len(set(told[0])) == len(seeds)
