"""`python -m tests.sim`: worlds by the thousand, or one of them with its trace."""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from functools import lru_cache, partial
from unittest.mock import patch

from tests.sim.world import World
from wancoll.schedule import choose, cost

# Pure functions whose answers are the same in world after world.
_make, _choices = lru_cache(1 << 14)(choose.make), lru_cache(1 << 12)(cost._choices)


def attempt(seed: int, voters: int = 0, shards: int = 1) -> tuple[int, str, int, list[str]]:
    """Run one world: (seed, why it failed, events, faults)."""
    world = World(seed, voters=voters, shards=shards)
    try:
        with patch.object(choose, "make", _make), patch.object(cost, "_choices", _choices):
            world.run()
    except Exception as bad:  # whatever it is, the seed has found it
        last = traceback.extract_tb(bad.__traceback__)[-1]
        where = f"{last.filename.rsplit('/', 1)[-1]}:{last.lineno}"
        why = f"{type(bad).__name__} at {where}: {bad}"[:600]
        return seed, why, world.clock.events, world.inflicted
    return seed, "", world.clock.events, world.inflicted


def run_many(first: int, stop: int, jobs: int, most: int, voters: int, shards: int) -> int:
    began = time.perf_counter()
    failed: list[tuple[int, str]] = []
    faults: Counter[str] = Counter()
    events = 0
    with ProcessPoolExecutor(jobs) as pool:
        for seed, why, count, inflicted in pool.map(
            partial(attempt, voters=voters, shards=shards), range(first, stop), chunksize=16
        ):
            events += count
            faults.update(inflicted)
            if why:
                failed.append((seed, why))
                print(f"seed {seed}: {why}", flush=True)
                if len(failed) >= most:
                    pool.shutdown(cancel_futures=True)
                    break
    seconds = time.perf_counter() - began
    print(f"{stop - first} worlds, {events} events, {seconds:.1f} s, {len(failed)} failed")
    print("faults: " + ", ".join(f"{kind} {count}" for kind, count in sorted(faults.items())))
    if failed:
        print(f"replay with: python -m tests.sim --voters {voters} --shards {shards} --seed {failed[0][0]} --trace")
    return 1 if failed else 0


def run_one(seed: int, trace: bool, voters: int, shards: int) -> int:
    world = World(seed, print if trace else None, voters=voters, shards=shards)
    try:
        world.run()
    except Exception:
        traceback.print_exc(file=sys.stdout)
        again = f"make sim VOTERS={voters} SHARDS={shards} SEED={seed}"
        print(f"seed {seed} failed at {world.clock.now:.4f} s; replay with: {again}")
        return 1
    print(f"seed {seed}: {world.clock.events} events, {world.clock.now:.1f} s, {world.judge.results} results")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("--seeds", default="0:2000", help="first:stop (default %(default)s)")
    parser.add_argument("--seed", type=int, help="only this one")
    parser.add_argument("--trace", action="store_true", help="with --seed: write what happens")
    parser.add_argument("--jobs", type=int, default=2, help="processes (default %(default)s)")
    parser.add_argument("--most", type=int, default=20, help="stop after so many failures (default %(default)s)")
    parser.add_argument("--voters", type=int, default=0, help="as in Limits; 0: the master collects all votes")
    parser.add_argument("--shards", type=int, default=1, help="of each island (default %(default)s)")
    given = parser.parse_args()
    if given.seed is not None:
        return run_one(given.seed, given.trace, given.voters, given.shards)
    first, stop = map(int, given.seeds.split(":"))
    return run_many(first, stop, given.jobs, given.most, given.voters, given.shards)


if __name__ == "__main__":
    sys.exit(main())
