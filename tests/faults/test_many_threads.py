"""Operations that several threads of each daemon share, as on a machine with many cores; members die in some."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from tests.faults.support import MIB, bits_of_sum, close_all, one_of_three_dies, ranked
from wancoll.chaos import Cluster

PEERS, WORKERS = 3, 6


@pytest.fixture(scope="module")
def threaded() -> Iterator[Cluster]:
    with Cluster(PEERS, fork=True, peer_args=[f"--workers={WORKERS}"]) as cluster:
        yield cluster


def groups_of_lanes(cluster: Cluster) -> set[int]:
    return {one.plan.plan.lane_groups for one in cluster.status().groups if one.plan is not None}


@pytest.mark.parametrize("count", [1, 1000, MIB // 4, MIB // 4 + 17, 4 * MIB])
def test_sums_have_the_bits_of_one_thread(threaded: Cluster, count: int) -> None:
    tensors = [np.random.default_rng(k).normal(size=count).astype(np.float32) for k in range(PEERS)]
    found = set[bytes]()
    with Cluster(PEERS, fork=True, peer_args=["--workers=1"]) as single:
        for cluster, groups in ((threaded, 2 * WORKERS // PEERS), (single, 1)):
            comms = ranked(cluster, range(PEERS))
            assert groups_of_lanes(cluster) == {groups}
            found |= bits_of_sum(comms, tensors)
            close_all(comms)
    assert len(found) == 1


@pytest.mark.parametrize("point", ["mid_op", "before_done", "half_done", "after_done"])
def test_a_daemon_that_dies_in_one_costs_nobody_the_sum(threaded: Cluster, point: str) -> None:
    one_of_three_dies(threaded, point, 4 * MIB)
