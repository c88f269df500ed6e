"""Some thousand simulated worlds, and whether a seed says all: `make sim SEED=...` replays what fails here."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from tests.sim.__main__ import attempt
from tests.sim.world import World

ROOT = Path(__file__).parents[2]
QUICK = 200  # worlds
HELD = 'import sys; from tests.sim.test_sim import trace; print(*map(trace, map(int, sys.argv[1:])), sep="\\n")'


def explore(first: int, stop: int) -> None:
    beside = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))  # that have tests of their own
    with ProcessPoolExecutor(max(1, (os.cpu_count() or 1) // beside)) as pool:
        found = [(seed, why) for seed, why, *_ in pool.map(attempt, range(first, stop), chunksize=8) if why]
    told = "\n".join(f"seed {seed}: {why}\n  replay with: make sim SEED={seed}" for seed, why in found[:5])
    assert not found, f"{len(found)} of {stop - first} worlds failed\n{told}"


@pytest.mark.timeout(300)
def test_worlds() -> None:
    explore(0, QUICK)


@pytest.mark.check
@pytest.mark.timeout(600)
def test_more_worlds() -> None:
    explore(QUICK, 3000)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_many_worlds() -> None:
    explore(100_000, 120_000)


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
