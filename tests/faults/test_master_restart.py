"""The master is killed and started again: nobody is evicted, running ops finish, each has one outcome everywhere."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.faults.support import (
    BUSY,
    HEARTBEAT_TIMEOUT,
    MIB,
    Background,
    Steady,
    all_finished,
    attempt,
    by_master,
    check_agreed,
    check_first_attempt,
    close_all,
    contribution,
    join,
    members_fixture,
    new_group,
    reduce_all,
    stands_still,
    sums,
    wait_joining,
    wait_until,
)
from tests.later import later
from wancoll.chaos import Cluster
from wancoll.errors import Evicted, OutcomeUnknown

PEERS = 3
GRACE = 3.0  # --rejoin-grace
TIMES = 3  # how often each phase is tried


OPTIONS: dict[str, Any] = {
    "fork": True,
    "heartbeat_timeout": HEARTBEAT_TIMEOUT,
    "listen": "127.0.0.{i}:0",
    "peer_args": ["--master-grace=20"],
}


@pytest.fixture(scope="module")
def shared() -> Iterator[Cluster]:
    with Cluster(PEERS, master_args=[f"--rejoin-grace={GRACE}"], **OPTIONS) as cluster:
        yield cluster


@pytest.fixture
def cluster(shared: Cluster) -> Iterator[Cluster]:
    """Three daemons and a master, all up at the start of each test."""
    for i in range(PEERS):
        if not shared.running(i):
            shared.restart_peer(i)
        shared.resume(i)
    yield shared
    for i in range(PEERS):
        if shared.running(i):
            shared.resume(i)


comms = members_fixture(PEERS)


def restart(cluster: Cluster, **how: Any) -> None:
    cluster.kill_master()
    cluster.start_master(**how)


def test_between_two_operations(cluster: Cluster, comms: list[Any]) -> None:
    first = reduce_all(comms, range(PEERS))
    restart(cluster)
    second = reduce_all(comms, range(PEERS))
    assert first[0].receipt is not None
    assert second[0].receipt is not None
    assert first[0].receipt.epoch == second[0].receipt.epoch
    back = lambda: any(event.kind == "resumed" for event in cluster.status().events)  # noqa: E731
    wait_until(back, 10, "the master has taken the group up again")


@pytest.mark.parametrize("times", [TIMES, pytest.param(20, marks=pytest.mark.nightly)])
@pytest.mark.parametrize(
    "point", ["mid_op", "after_done", *later("on_post", "before_done", "before_commit", "after_commit")]
)
def test_in_each_phase_of_an_operation(cluster: Cluster, comms: list[Any], point: str, times: int) -> None:
    """A member stands still at the failpoint while the master dies and comes back."""
    for i in range(times):
        count = 4 * MIB if point == "mid_op" or i % 2 else 1000  # a small one may be over before it is seen
        tensors = [contribution(k, count) for k in range(PEERS)]
        cluster.failpoint(1, point, "pause")
        running = sums(comms, tensors)
        wait_until(lambda: stands_still(cluster.pid(1)), 10, f"peer 1 stands at {point}")
        restart(cluster)
        cluster.resume(1)
        check_first_attempt(running.results(), tensors)
    reduce_all(comms, range(PEERS))


def test_when_an_epoch_begins(cluster: Cluster) -> None:
    """One member has heard of the group's first epoch, perhaps, and another one has not."""
    cluster.failpoint(1, "on_epoch", "pause")
    group = new_group()
    forming = Background(
        lambda k: cluster.connect(k, group=group, name=f"m{k}", start_world=PEERS, min_world=PEERS), PEERS
    )
    wait_until(lambda: stands_still(cluster.pid(1)), 10, "peer 1 enters the first epoch")
    restart(cluster)
    cluster.resume(1)
    comms = forming.results()
    reduce_all(comms, range(PEERS))
    close_all(comms)


@pytest.mark.parametrize("down_for", [0.5, *later(0.0)])
def test_in_mid_operation(cluster: Cluster, comms: list[Any], down_for: float) -> None:
    """Four large sums run on while there is no master, and commit when it is back."""
    for _ in range(TIMES):
        tensors = [[contribution(k, 4 * MIB) for _ in range(4)] for k in range(PEERS)]
        works = [[comms[k].all_reduce(x, op="sum", async_op=True) for x in tensors[k]] for k in range(PEERS)]
        cluster.kill_master()
        time.sleep(down_for)  # how long the master is away is what this is about
        cluster.start_master()
        waiting = Background(lambda k, w=works: [attempt(lambda x=x: x.wait(timeout=20)) for x in w[k]], PEERS)
        outcomes = waiting.results(40)
        for op in range(4):
            check_first_attempt([mine[op] for mine in outcomes], [mine[op] for mine in tensors])


def test_finished_everywhere_and_never_told(cluster: Cluster, comms: list[Any]) -> None:
    """The master stands still while the members finish, and is killed before it can read a vote."""
    tensors = [contribution(k, 1000) for k in range(PEERS)]
    cluster.pause_master()
    running = by_master(comms, tensors)
    wait_until(lambda: all_finished(cluster, range(PEERS)), 10, "all members have finished")
    restart(cluster)
    check_first_attempt(running.results(), tensors)


@pytest.mark.check
def test_again_and_again(cluster: Cluster, comms: list[Any]) -> None:
    """Small sums without a pause, sends and receives among them, while the master is killed six times."""

    def exchange(k: int, number: int) -> None:
        note, got = np.full(10, number, np.float32), np.zeros(10, np.float32)
        if k == 0:
            comms[0].send(note, dest=comms[1].rank)
        elif k == 1:
            comms[1].recv(got, source=comms[0].rank)
            assert (got == note).all()

    running = Steady(comms, exchange)
    for _ in range(6):
        restart(cluster)
        wait_until(lambda: len(cluster.status().groups) == 1, 10, "the group is back")
        time.sleep(0.2)  # some operations go through
    running.stop()
    assert running.count[0] > 6


def test_a_member_dies_while_the_master_is_away(cluster: Cluster, comms: list[Any]) -> None:
    """The others go on without it once it had the time to report."""
    tensors = [contribution(k, 4 * MIB) for k in range(PEERS)]
    cluster.failpoint(2, "mid_op", "pause")
    running = sums(comms, tensors)
    wait_until(lambda: stands_still(cluster.pid(2)), 10, "peer 2 stands still")
    cluster.kill_master()
    cluster.kill(2)
    cluster.start_master()
    back = time.monotonic()
    outcomes = running.results()
    assert sorted(check_agreed(outcomes[:2], tensors[:2])) == ["m0", "m1"]
    assert max(outcome.ended for outcome in outcomes[:2]) - back < GRACE + BUSY
    reduce_all(comms[:2], range(2))


def test_a_daemon_that_is_back_without_its_members_is_not_waited_for() -> None:
    with Cluster(PEERS, master_args=[f"--rejoin-grace={2 * BUSY}"], **OPTIONS) as cluster:
        comms = join(cluster, range(PEERS))
        reduce_all(comms, range(PEERS))
        cluster.kill_master()
        cluster.kill(2)
        cluster.start_master()
        cluster.restart_peer(2)
        back = time.monotonic()
        reduce_all(comms[:2], range(2))
        assert time.monotonic() - back < BUSY
        close_all(comms)


def test_the_journal_is_lost_too(cluster: Cluster, comms: list[Any]) -> None:
    """The reports tell what the journal would have: nothing is numbered twice."""
    first = reduce_all(comms, range(PEERS))
    tensors = [contribution(k, MIB) for k in range(PEERS)]
    cluster.failpoint(1, "before_done", "pause")
    running = sums(comms, tensors)
    wait_until(lambda: stands_still(cluster.pid(1)), 10, "peer 1 stands still")
    restart(cluster, lose_journal=True)
    cluster.resume(1)
    outcomes = running.results()
    check_first_attempt(outcomes, tensors)
    assert outcomes[0].receipt.epoch == first[0].receipt.epoch
    cluster.kill(2)
    after = reduce_all(comms[:2], range(2))
    assert after[0].receipt is not None
    assert after[0].receipt.epoch > outcomes[0].receipt.epoch


@pytest.mark.check
@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.parametrize("how", ["lost", "missed an epoch"])
def test_the_journal_lacks_the_epoch_and_a_daemon_that_never_saw_a_master_comes_first(how: str, secure: bool) -> None:
    """No second group beside the one that runs: its name waits for reports. No number is given twice."""
    group, options = new_group(), OPTIONS | {"master_args": [f"--rejoin-grace={2 * BUSY}"]}
    with Cluster(PEERS, secure=secure, **options) as cluster:
        comms = join(cluster, range(PEERS), group=group)
        reduce_all(comms, range(PEERS))
        if how != "lost":
            cluster.master_failpoint("store_write", "fail")
        comms.pop().close()
        cluster.kill(2)
        before = reduce_all(comms, range(2))
        cluster.kill_master()
        for i in range(2):
            cluster.pause(i)  # their way to the master is a longer one
        cluster.start_master(lose_journal=how == "lost")
        fresh = cluster.add_peer()
        late = Background(lambda _: cluster.connect(fresh, group=group, name="m2", start_world=PEERS), 1)
        wait_joining(cluster, group, "m2")
        [waits] = [found.waiting_for for found in cluster.status().groups if found.name == group]
        assert "waits for members of an earlier one" in waits
        assert " more members to start: " in waits.partition(";")[0], "so `is forming, and waits for ...` reads well"
        for i in range(2):
            cluster.resume(i)
        after = reduce_all(comms, range(2))
        assert before[0].receipt is not None
        assert after[0].receipt is not None
        assert after[0].receipt.epoch == before[0].receipt.epoch
        updates = Background(lambda k: attempt(comms[k].update_membership), 2)
        assert all(outcome.error is None for outcome in updates.results())
        comms += late.results()
        now = reduce_all(comms, range(PEERS))
        assert now[0].receipt is not None
        assert now[0].receipt.epoch > before[0].receipt.epoch + 1000  # above all that the journal may have missed
        close_all(comms)


def test_a_joiner_that_waits_is_not_forgotten(cluster: Cluster) -> None:
    group = new_group()
    comms = join(cluster, range(2), group=group)
    reduce_all(comms, range(2))
    late = Background(lambda _: cluster.connect(2, group=group, name="m2", start_world=2), 1)
    wait_joining(cluster, group, "m2")
    restart(cluster)
    # Not before the members have reported: an update that they made meanwhile passes, and joiners wait for the next.
    resumed = lambda: any(event.kind == "resumed" and event.group == group for event in cluster.status().events)  # noqa: E731
    wait_until(resumed, BUSY, "the group goes on")
    wait_joining(cluster, group, "m2")
    updates = Background(lambda k: attempt(comms[k].update_membership), 2)
    assert all(outcome.error is None for outcome in updates.results())
    comms += late.results()
    reduce_all(comms, range(PEERS))
    close_all(comms)


def test_a_member_that_comes_too_late(cluster: Cluster, comms: list[Any]) -> None:
    """It stood still for longer than the grace time, with a finished sum: committed for it, or unknown; never wrong."""
    tensors = [contribution(k, 1000) for k in range(PEERS)]
    cluster.failpoint(2, "after_done", "pause")
    running = sums(comms, tensors)
    wait_until(lambda: stands_still(cluster.pid(2)), 10, "peer 2 stands still")
    restart(cluster)
    wait_until(lambda: sum(running.finished) == 2, GRACE + BUSY, "the others go on")
    cluster.resume(2)
    outcomes = running.results()
    contributors = check_agreed(outcomes[:2], tensors[:2])
    if outcomes[2].error is None:
        check_agreed(outcomes, tensors)
    else:
        expected = OutcomeUnknown if "m2" in contributors else (Evicted, OutcomeUnknown)
        assert isinstance(outcomes[2].error, expected), repr(outcomes[2])
