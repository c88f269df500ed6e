"""The master dies at named points: before, between and after it tells the members of a commit or an epoch."""

from __future__ import annotations

from typing import Any

import pytest

from tests.faults.support import (
    by_master,
    check_agreed,
    cluster_fixture,
    contribution,
    members_fixture,
    reduce_all,
    wait_until,
)
from wancoll.chaos import Cluster
from wancoll.errors import ConfigError
from wancoll.failpoints import MASTER

PEERS = 3
cluster = cluster_fixture(PEERS, listen="127.0.0.{i}:0", peer_args=["--master-grace=20"])
comms = members_fixture(PEERS)


def master_ends(cluster: Cluster) -> bool:
    try:
        _ = cluster.master_pid
    except ConfigError:
        return True
    return False


@pytest.mark.parametrize("point", [point for point in MASTER if point.endswith("commit")])
def test_killed_around_a_commit(cluster: Cluster, comms: list[Any], point: str) -> None:
    """Nobody is evicted, the operation runs once, and all have the same outcome."""
    tensors = [contribution(k, 5000) for k in range(PEERS)]
    cluster.master_failpoint(point, "kill")
    running = by_master(comms, tensors)
    wait_until(lambda: master_ends(cluster), 10, f"the master dies at {point}")
    cluster.start_master()
    outcomes = running.results()
    assert sorted(check_agreed(outcomes, tensors)) == ["m0", "m1", "m2"]
    assert [outcome.receipt.attempts for outcome in outcomes] == [1] * PEERS
    reduce_all(comms, range(PEERS))


@pytest.mark.parametrize("point", [point for point in MASTER if not point.endswith(("commit", "rotation"))])
def test_killed_around_an_epoch(cluster: Cluster, comms: list[Any], point: str) -> None:
    """A member leaves; the master dies while it tells the others of the epoch without it."""
    cluster.master_failpoint(point, "kill")
    comms[2].close()
    wait_until(lambda: master_ends(cluster), 10, f"the master dies at {point}")
    cluster.start_master()
    reduce_all(comms[:2], range(2))


def test_other_names_are_refused(cluster: Cluster) -> None:
    with pytest.raises(ConfigError, match="before_commit"):
        cluster.master_failpoint("never", "kill")
