"""Who commits: where members do, the master hears nothing of their operations, and need not be there."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from wancoll.chaos import Cluster, in_threads
from wancoll.wire import messages as m

GROUPS = itertools.count(1)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(3, fork=True, master_args=["--commit=members"], peer_args=["--master-grace=20"]) as cluster:
        yield cluster


def join(cluster: Cluster, world: int) -> tuple[str, list[Any]]:
    group = f"commit-{next(GROUPS)}"
    return group, in_threads(lambda i: cluster.connect(i, group=group, name=f"m{i}", start_world=world), world, 30)


def sums(comms: list[Any], times: int) -> list[Any]:
    """Of each member the receipt of its last sum."""

    def member(k: int) -> Any:
        for i in range(times):
            tensor = np.full(1000, (k + 1) * (i + 1), np.int32)
            receipt = comms[k].all_reduce(tensor, op="sum")
            assert (tensor == (i + 1) * len(comms) * (len(comms) + 1) // 2).all()
        return receipt

    return in_threads(member, len(comms), 30)


def seen(cluster: Cluster, group: str) -> m.GroupStatus:
    """What the master knows of the group."""
    return next(found for found in cluster.status().groups if found.name == group)


@pytest.mark.parametrize("world", [2, 3])
def test_the_master_hears_nothing_of_sums_and_says_nothing(cluster: Cluster, world: int) -> None:
    group, comms = join(cluster, world)
    cluster.master_failpoint("before_commit", "kill")
    receipts = sums(comms, 50)
    assert [(one.seq, one.attempts, one.world_size) for one in receipts] == [(50, 1, world)] * world
    assert len({one.digest for one in receipts}) == 1
    known = seen(cluster, group)
    assert known.plan is not None
    assert known.plan.plan.commit == "members"
    assert (known.committed_upto, [one.done_upto for one in known.members]) == (0, [0] * world)
    cluster.master_failpoint("before_commit", "clear")
    tensors = [np.full(10, comm.rank, np.float32) for comm in comms]
    in_threads(lambda k: comms[k].broadcast(tensors[k], root=1), world, 30)  # that is the master's to commit
    assert all((tensor == 1).all() for tensor in tensors)
    known = seen(cluster, group)
    assert (known.committed_upto, [one.done_upto for one in known.members]) == (51, [51] * world)
    sums(comms, 2)
    for comm in comms:
        comm.close()


def test_sums_are_committed_while_there_is_no_master(cluster: Cluster) -> None:
    _, comms = join(cluster, 3)
    sums(comms, 2)
    cluster.kill_master()
    assert sums(comms, 50)[0].attempts == 1
    cluster.start_master()
    sums(comms, 2)
    in_threads(lambda k: comms[k].update_membership(), 3, 30)  # by the master: it has taken the group up again
    for comm in comms:
        comm.close()
