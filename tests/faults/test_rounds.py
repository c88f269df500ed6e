"""Links that are reset in mid transfer while no master lives: sums of members that commit go on (C12)."""

from __future__ import annotations

import random
import time

import pytest

from tests.faults.support import MIB, check_agreed, contribution, join, reduce_all, sums
from wancoll.chaos import Cluster

PEERS = 3


def resets(cluster: Cluster, rng: random.Random, times: int) -> list[int]:
    """Sums beside which a link is reset, once the master is dead; returns how many tries each took."""
    comms = join(cluster, range(PEERS))
    reduce_all(comms, range(PEERS))
    cluster.kill_master()
    epoch, attempts = comms[0].epoch, []
    for _ in range(times):
        tensors = [contribution(k, 4 * MIB) for k in range(PEERS)]
        running = sums(comms, tensors)
        time.sleep(rng.uniform(0.0, 0.06))  # the moment is the test
        i, j = rng.sample(range(PEERS), 2)
        cluster.cut(i, j)
        cluster.heal(i, j)
        outcomes = running.results()
        assert len(check_agreed(outcomes, tensors)) == PEERS
        assert all(outcome.receipt.epoch == epoch for outcome in outcomes)
        attempts.append(max(outcome.receipt.attempts for outcome in outcomes))
    reduce_all(comms, range(PEERS))
    for comm in comms:
        comm.close()
    return attempts


@pytest.mark.parametrize(
    "times", [pytest.param(6, marks=pytest.mark.check), pytest.param(30, marks=pytest.mark.nightly)]
)
@pytest.mark.timeout(300)
def test_links_that_are_reset_without_a_master_cost_a_try(rng: random.Random, times: int) -> None:
    options = {"master_args": ["--voters=32"], "peer_args": ["--master-grace=120"]}
    with Cluster(PEERS, fork=True, listen="127.0.0.{i}:0", **options) as cluster:
        attempts = resets(cluster, rng, times)
    print(f"attempts: {attempts}")
    assert any(most > 1 for most in attempts), "no reset came before the commit"
