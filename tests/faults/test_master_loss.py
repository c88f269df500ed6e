"""The master dies or stops: callers are told within master_grace, and their tensors are untouched."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.faults.support import (
    BUSY,
    HEARTBEAT_TIMEOUT,
    MEMBERS_COMMIT,
    MIB,
    Outcome,
    all_finished,
    attempt,
    by_master,
    check_agreed,
    close_all,
    cluster_fixture,
    contribution,
    in_threads,
    join,
    members_fixture,
    reduce_all,
    sums,
    untouched,
    wait_until,
)
from wancoll.chaos import Cluster
from wancoll.errors import MasterUnreachable, OutcomeUnknown

GRACE = 1.0
MARGIN = BUSY  # seconds: to notice, to redial, to tell
cluster = cluster_fixture(
    3, scope="function", heartbeat_timeout=HEARTBEAT_TIMEOUT, peer_args=[f"--master-grace={GRACE}"]
)
comms = members_fixture(3)


def reduce_until_told(comms: list[Any]) -> list[Outcome]:
    """Sums that go on for as long as they do: where members commit, until the first has no master for master_grace.

    Returns how the one ended that failed. Before it all have all.
    """
    while True:
        tensors = [contribution(k, 1000) for k in range(3)]
        outcomes = sums(comms, tensors).results(20)
        if any(outcome.error is not None for outcome in outcomes):
            break
        assert MEMBERS_COMMIT, "nobody commits"
        check_agreed(outcomes, tensors)
    for k, (outcome, tensor) in enumerate(zip(outcomes, tensors, strict=True)):
        if outcome.error is None:  # the others were told of what they could not know
            assert MEMBERS_COMMIT
            check_agreed([outcome], [tensor])
        else:
            assert isinstance(outcome.error, MasterUnreachable | OutcomeUnknown), repr(outcome)
            assert untouched(tensor, k)
    return outcomes


def test_master_killed_between_ops(cluster: Cluster, comms: list[Any]) -> None:
    cluster.kill_master()
    killed = time.monotonic()
    assert max(outcome.ended for outcome in reduce_until_told(comms)) - killed < GRACE + MARGIN
    for k, comm in enumerate(comms):  # and again, without a hang
        asked, tensor = time.monotonic(), contribution(k, 1000)
        with pytest.raises(MasterUnreachable):
            comm.all_reduce(tensor)
        assert time.monotonic() - asked < GRACE + MARGIN
        assert untouched(tensor, k)
    assert all(cluster.running(i) for i in range(3))
    cluster.start_master()  # the daemons find it again, and new groups work
    comms = join(cluster, range(3))
    reduce_all(comms, range(3))
    close_all(comms)


def test_master_killed_in_mid_op(cluster: Cluster, comms: list[Any]) -> None:
    tensors = [[contribution(k, 4 * MIB) for _ in range(4)] for k in range(3)]
    works = [[comms[k].all_reduce(x, op="sum", async_op=True) for x in tensors[k]] for k in range(3)]
    cluster.kill_master()
    killed = time.monotonic()
    outcomes = in_threads(lambda k: [attempt(lambda w=work: w.wait(timeout=20)) for work in works[k]], 3, 30)
    for k, mine in enumerate(outcomes):
        assert MEMBERS_COMMIT or mine[-1].error is not None
        for op, outcome in enumerate(mine):
            if outcome.error is None:
                assert (tensors[k][op] == 111).all()
                continue
            assert isinstance(outcome.error, MasterUnreachable | OutcomeUnknown), repr(outcome)
            assert outcome.ended - killed < GRACE + MARGIN
            assert untouched(tensors[k][op], k)


def test_master_killed_when_the_op_is_done_but_not_committed(cluster: Cluster, comms: list[Any]) -> None:
    """The master stands still while the members finish, and is killed before it can read a vote."""
    tensors = [contribution(k, 1000) for k in range(3)]
    cluster.pause_master()
    running = by_master(comms, tensors)
    gave = [tensor.copy() for tensor in tensors]
    wait_until(lambda: all_finished(cluster, range(3)), HEARTBEAT_TIMEOUT, "the members finish: that needs no master")
    assert not any(running.finished)
    cluster.kill_master()
    killed = time.monotonic()
    for k, outcome in enumerate(running.results(20)):
        assert isinstance(outcome.error, OutcomeUnknown), repr(outcome)
        assert outcome.ended - killed < GRACE + MARGIN
        assert (tensors[k] == gave[k]).all()


def test_stopped_master_is_noticed(cluster: Cluster, comms: list[Any]) -> None:
    cluster.pause_master()
    stopped = time.monotonic()
    # A stopped master's port still accepts: a redial ends with the handshake's deadline, 5 s.
    bound = HEARTBEAT_TIMEOUT + GRACE + 5.0 + MARGIN
    assert max(outcome.ended for outcome in reduce_until_told(comms)) - stopped < bound


def test_connect_without_a_master(cluster: Cluster) -> None:
    cluster.kill_master()
    started = time.monotonic()
    with pytest.raises(MasterUnreachable):
        cluster.connect(0, group="nobody", start_world=1)
    assert time.monotonic() - started < GRACE + MARGIN
