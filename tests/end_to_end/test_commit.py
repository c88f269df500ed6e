"""Who commits: where members do, the master hears nothing of their operations, and need not be there."""

from __future__ import annotations

import itertools
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import wancoll
from tests.faults.support import cluster_fixture, wait_until
from wancoll.chaos import Cluster, in_threads
from wancoll.cli import main
from wancoll.wire import messages as m

GROUPS = itertools.count(1)
cluster = cluster_fixture(3, master_args=["--voters=32"], peer_args=["--master-grace=20"])


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


def done(cluster: Cluster, group: str) -> list[int]:
    """Up to where the master knows each member to have come."""
    return [one.done_upto for one in seen(cluster, group).members]


@pytest.mark.parametrize("world", [2, 3])
def test_the_master_hears_nothing_of_sums_and_says_nothing(cluster: Cluster, world: int) -> None:
    group, comms = join(cluster, world)
    cluster.master_failpoint("before_commit", "kill")
    receipts = sums(comms, 50)
    assert [(one.seq, one.attempts, one.world_size) for one in receipts] == [(50, 1, world)] * world
    assert len({one.digest for one in receipts}) == 1
    known = seen(cluster, group)
    assert known.plan is not None
    assert known.plan.plan.collectors == "members"
    # Heartbeats tell what is committed: no Vote came.
    wait_until(lambda: done(cluster, group) == [50] * world, 10, "the members' heartbeats")
    cluster.master_failpoint("before_commit", "clear")
    tensors = [np.full(10, comm.rank, np.float32) for comm in comms]
    in_threads(lambda k: comms[k].broadcast(tensors[k], root=1), world, 30)  # that is the master's to commit
    assert all((tensor == 1).all() for tensor in tensors)
    assert (seen(cluster, group).committed_upto, done(cluster, group)) == (51, [51] * world)
    sums(comms, 2)
    for comm in comms:
        comm.close()


def test_sums_are_committed_while_there_is_no_master(cluster: Cluster) -> None:
    _, comms = join(cluster, 3)
    sums(comms, 2)
    cluster.kill_master()
    assert sums(comms, 50)[0].attempts == 1
    left, came = barrier(comms, late=0.3)
    assert min(left) >= came
    cluster.start_master()
    sums(comms, 2)
    in_threads(lambda k: comms[k].update_membership(), 3, 30)  # by the master: it has taken the group up again
    for comm in comms:
        comm.close()


def barrier(comms: list[Any], late: float) -> tuple[list[float], float]:
    """When each member left it, and when the last one, *late* seconds after the others, came."""
    came = time.monotonic() + late

    def member(k: int) -> float:
        if k == len(comms) - 1:
            time.sleep(late)
        assert comms[k].barrier(timeout=10).world_size == len(comms)
        return time.monotonic()

    return in_threads(member, len(comms), 30), came


def updates(comms: list[Any]) -> list[Any]:
    return in_threads(lambda k: comms[k].update_membership(), len(comms), 30)


@pytest.mark.check
def test_members_go_on_without_a_master_and_a_joiner_waits_for_it(cluster: Cluster) -> None:
    """All sum and call update_membership, which says that it admits nobody; a joiner comes in with the next master."""
    group, comms = join(cluster, 2)
    assert [one.asked_master for one in updates(comms)] == [True, True]
    cluster.kill_master()
    started = time.monotonic()
    first = updates(comms)
    assert time.monotonic() - started < 20  # a heartbeat_timeout
    assert [(one.asked_master, one.world_size, one.epoch) for one in first] == [(False, 2, comms[0].epoch)] * 2
    started = time.monotonic()
    for _ in range(20):
        sums(comms, 5)
        assert [one.asked_master for one in updates(comms)] == [False, False]
    assert time.monotonic() - started < 30  # not a heartbeat_timeout each
    with ThreadPoolExecutor(1) as pool:
        joiner = pool.submit(cluster.connect, 2, group=group, name="late", start_world=2)
        sums(comms, 5)
        assert not joiner.done()
        cluster.start_master()
        deadline = time.monotonic() + 60
        while (found := updates(comms))[0].world_size < 3:  # hundreds, until the daemons have found the master again
            assert time.monotonic() < deadline, cluster.master_logs()
        comms.append(joiner.result(30))
    assert (found[0].asked_master, found[0].contributors[-1]) == (True, "late")
    assert comms[0].members == comms[2].members
    sums(comms, 2)
    for comm in comms:
        comm.close()


@pytest.mark.check
def test_an_operator_puts_a_member_out(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    group, comms = join(cluster, 3)
    sums(comms, 2)
    master = ["--group", group, "--master", cluster.master_option]
    for member, said in (("m2", "the disk is full"), ("nobody", "one of")):
        with pytest.raises(SystemExit) as ended:
            main.run(["evict", member, *master, "--reason", "the disk is full"])
        told = capsys.readouterr()
        assert ended.value.code == (0 if member == "m2" else 2)
        assert said in told.out + told.err
    with pytest.raises(wancoll.Evicted, match="the disk is full"):
        comms[2].barrier()
    assert sums(comms[:2], 2)[0].world_size == 2
    for comm in comms:
        comm.close()


@pytest.mark.check
def test_a_job_that_was_killed_whole_starts_again_at_once() -> None:
    """Though its members might have gone on for ten minutes, for all that the master can know."""
    options = {"master_args": ["--voters=32", "--rejoin-grace=1"]}
    with Cluster(3, fork=True, **options) as cluster:
        for master_too in (False, True):
            killed_whole(cluster, master_too=master_too)
            for i in range(2):
                cluster.restart_peer(i)
        killed_whole(cluster, master_too=False)
        cluster.restart_peer(0)
        told = "m1 of before were lost without a word.*free it at once: `wancoll evict --group g --all`"
        with pytest.raises(wancoll.WancollError, match=told):
            cluster.connect(0, group="g", name="m0", start_world=1, timeout=10)


def killed_whole(cluster: Cluster, *, master_too: bool) -> None:
    """A job of two that has begun."""
    comms = in_threads(lambda i: cluster.connect(i, group="g", name=f"m{i}", start_world=2), 2, 30)
    sums(comms, 2)
    if master_too:
        cluster.kill_master()
    for i in range(2):
        cluster.kill(i)
    for comm in comms:
        comm.close()
    if master_too:
        cluster.start_master()


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_ten_thousand_sums_in_a_minute_without_a_master_and_a_loss_that_waits_for_one() -> None:
    options = {"master_args": ["--voters=32"], "peer_args": ["--master-grace=inf"]}
    with Cluster(3, fork=True, **options) as cluster:
        _, comms = join(cluster, 3)
        sums(comms, 2)
        cluster.kill_master()
        started, count = time.monotonic(), 0
        while count < 10_000 or time.monotonic() - started < 60:
            last = in_threads(lambda k: repeated(comms[k], 1000), 3, 300)
            assert len({(one.seq, one.digest, one.attempts) for one in last}) == 1
            assert [one.asked_master for one in updates(comms)] == [False] * 3
            count += 1000
        tensors = [np.full(1000, k + 1, np.int32) for k in range(2)]
        cluster.kill(2)
        works = [comms[k].all_reduce(tensors[k], op="sum", async_op=True) for k in range(2)]
        for k in range(2):
            with pytest.raises(TimeoutError):
                works[k].wait(timeout=5.0)
            assert (tensors[k] == k + 1).all()
        cluster.start_master()
        receipts = in_threads(lambda k: works[k].wait(timeout=60), 2, 90)
        assert [one.world_size for one in receipts] == [2, 2]
        assert all((tensor == 3).all() for tensor in tensors)
        sums(comms[:2], 10)


def repeated(comm: Any, times: int) -> Any:
    """The receipt of the last of so many sums."""
    tensor = np.zeros(256, np.float32)
    for _ in range(times):
        receipt = comm.all_reduce(tensor, op="avg")
    return receipt
