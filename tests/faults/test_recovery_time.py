"""How long a kill in mid-op costs the survivors, beyond the op itself."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.faults.support import AT_ONCE, MIB, PEERS, Outcome, check_agreed, close_all, join, sums
from wancoll.chaos import Cluster
from wancoll.errors import OutcomeUnknown

COUNT = 64 * MIB // 4


def one_kill(cluster: Cluster, rng: random.Random) -> tuple[float, float]:
    """Seconds from the kill to the survivors' last commit, and of a clean op before it."""
    for _ in range(10):
        comms = join(cluster, range(PEERS))
        tensors = [comm.empty(COUNT, "float32") for comm in comms]
        clean = [reduce(comms, tensors)[1] for _ in range(2)][-1]  # the first one touches pages and warms lanes
        victim = rng.randrange(PEERS)
        outcomes, killed = reduce(comms, tensors, lambda: kill_after(cluster, victim, rng.uniform(0.2, 0.8) * clean))
        survivors = [k for k in range(PEERS) if k != victim]
        agreed = check_agreed([outcomes[k] for k in survivors], [tensors[k] for k in survivors])
        close_all(comms)
        cluster.restart_peer(victim)
        if len(agreed) == PEERS - 1:  # else this op was quicker than the one before, and the kill came after it
            assert isinstance(outcomes[victim].error, OutcomeUnknown)
            return max(outcomes[k].ended for k in survivors) - killed, clean
    pytest.fail("no kill came before the commit")


def kill_after(cluster: Cluster, victim: int, seconds: float) -> float:
    """Kill at a moment of the op; returns when."""
    time.sleep(seconds)  # the moment in the op is the test
    killed = time.monotonic()
    cluster.kill(victim)
    return killed


def reduce(
    comms: list[Any], tensors: list[Any], meanwhile: Callable[[], float] | None = None
) -> tuple[list[Outcome], float]:
    """One op by all members; returns the outcomes, and what *meanwhile* returned or else how long the op took."""
    for k, tensor in enumerate(tensors):
        tensor[...] = 10**k
    running = sums(comms, tensors)
    broken = meanwhile() if meanwhile is not None else None
    outcomes = running.results()
    if broken is not None:
        return outcomes, broken
    check_agreed(outcomes, tensors)
    return outcomes, max(outcome.ended for outcome in outcomes) - running.started


def report(results: list[tuple[float, float]]) -> float:
    """Print the figures; returns the median of what the kill cost."""
    extra = [took - clean for took, clean in results]
    median = statistics.median(extra)
    print(
        f"{len(results)} kills in mid-op, {PEERS} peers, 64 MiB: from the kill to the survivors' commit, less a clean "
        f"op: median {median * 1e3:.0f} ms, worst {max(extra) * 1e3:.0f} ms; clean op "
        f"{statistics.median(clean for _, clean in results) * 1e3:.0f} ms"
    )
    return median


def test_recovery(cluster: Cluster, rng: random.Random) -> None:
    """A kill is noticed by its broken connections: silence would take longer than this bound alone."""
    took = [report([one_kill(cluster, rng)])]
    while took[-1] > AT_ONCE and len(took) < 3:  # on a busy machine
        took.append(report([one_kill(cluster, rng)]))
    assert took[-1] < AT_ONCE, took


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_recovery_median_of_30_kills(cluster: Cluster, rng: random.Random) -> None:
    assert report([one_kill(cluster, rng) for _ in range(30)]) < 0.3
