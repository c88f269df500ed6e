"""Two masters on etcd: the leader is killed or stopped, the standby takes over, and the stopped one wakes up fenced."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import wancoll
from tests.faults.support import (
    BUSY,
    FAILPOINTS,
    MEMBERS_COMMIT,
    MIB,
    Background,
    Outcome,
    Steady,
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
from tests.later import at_night, later
from wancoll.chaos import Cluster, Etcd
from wancoll.errors import ConfigError, Evicted, OutcomeUnknown
from wancoll.wire import messages as m

PEERS = 3
TAKEOVER = 5.0  # seconds from the leader's end to the next commit, as a rule
PATIENCE = 60.0  # for what takes a moment; where other programs leave no time to etcd, leaders change more often
OPTIONS: dict[str, Any] = {
    "masters": 2,
    "listen": "127.0.0.{i}:0",
    "master_args": ["--rejoin-grace=4"],
    "peer_args": ["--master-grace=20"],
}
PHASES = [point for point in FAILPOINTS if point != "on_epoch"]
QUICK = {("kill", "after_done"), ("pause", "mid_op")}  # of the quick suite


@pytest.fixture(scope="module")
def shared(etcd: Etcd) -> Iterator[Cluster]:
    with Cluster(PEERS, fork=True, etcd=etcd.url, **OPTIONS) as cluster:
        yield cluster


@pytest.fixture
def cluster(shared: Cluster) -> Iterator[Cluster]:
    """Three daemons and two masters, all up at the start of each test."""
    heal(shared)
    yield shared
    heal(shared)


comms = members_fixture(PEERS, min_world=PEERS)


def heal(cluster: Cluster) -> None:
    for i in range(PEERS):
        if not cluster.running(i):
            cluster.restart_peer(i)
        cluster.resume(i)
        for point in FAILPOINTS:
            cluster.failpoint(i, point, "clear")
    for k in range(2):
        if cluster.master_running(k):
            cluster.resume_master(k)
        else:
            cluster.start_master(k)
    wait_until(lambda: len(leading(cluster)[1].daemons) == PEERS, PATIENCE, "all daemons are at the leader")


def leading(cluster: Cluster) -> tuple[int, m.Status]:
    """The master that leads, once one does, and what it says."""
    deadline = time.monotonic() + PATIENCE
    while True:
        for k in range(2):
            answer = answers(cluster, k)
            if isinstance(answer, m.Status):
                return k, answer
        assert time.monotonic() < deadline, told(cluster)
        time.sleep(0.01)


def answers(cluster: Cluster, k: int) -> m.Status | m.StandsBy | None:
    """None: it is killed or stopped."""
    if not cluster.master_running(k) or stands_still(cluster.master_pids[k]):
        return None
    try:
        return cluster.ask_master(k)
    except ConfigError:
        return None


def end_leader(cluster: Cluster, how: str) -> int:
    """Kill or stop the leader; returns which one it was."""
    k, _ = leading(cluster)
    cluster.kill_master(k) if how == "kill" else cluster.pause_master(k)
    return k


def wake(cluster: Cluster, how: str, k: int) -> None:
    """The former leader comes back, and finds that it does not lead."""
    other, before = leading(cluster)
    assert other != k
    cluster.start_master(k) if how == "kill" else cluster.resume_master(k)
    found: list[m.Status | m.StandsBy | None] = []
    wait_until(
        lambda: found.append(answers(cluster, k)) or found[-1] is not None, PATIENCE, "the former leader answers"
    )
    assert isinstance(found[-1], m.StandsBy) or found[-1].term > before.term, told(cluster)
    _, after = leading(cluster)
    assert after.term >= before.term
    epochs = [{group.name: group.epoch for group in each.groups} for each in (before, after)]
    assert epochs[1].items() <= epochs[0].items(), told(cluster)


def told(cluster: Cluster) -> str:
    """What all have to say, for a failure."""
    masters = [f"master {k}:\n{cluster.master_logs(20, k)}" for k in range(2)]
    return "\n".join([*masters, *(f"peer {i}:\n{cluster.logs(i, 20)}" for i in range(PEERS))])


def reduce_by_master(comms: list[Any]) -> list[Outcome]:
    """What the leader commits, by all members."""
    tensors = [contribution(k, 1000) for k in range(PEERS)]
    outcomes = by_master(comms, tensors).results()
    check_agreed(outcomes, tensors)
    return outcomes


def check_nobody_lost(cluster: Cluster, since: float) -> None:
    """*since*: seconds since 1970."""
    events = [(one.kind, one.text) for one in leading(cluster)[1].events if one.time > since]
    assert not [one for one in events if one[0] in ("client died", "daemon died", "evicted", "left", "refused")], events


@pytest.mark.parametrize("how", ["kill", "pause"])
def test_between_two_operations(cluster: Cluster, comms: list[Any], how: str) -> None:
    first = reduce_all(comms, range(PEERS))
    since, (_, before) = time.time(), leading(cluster)
    k = end_leader(cluster, how)
    ended = time.monotonic()
    second = reduce_by_master(comms)
    took = max(outcome.ended for outcome in second) - ended
    print(f"the next commit came after {took:.2f} s")
    assert took < TAKEOVER + BUSY, told(cluster)
    assert second[0].receipt.epoch == first[0].receipt.epoch
    assert leading(cluster)[1].term > before.term
    check_nobody_lost(cluster, since)
    wake(cluster, how, k)
    reduce_all(comms, range(PEERS))


@pytest.mark.parametrize("times", [1, pytest.param(20, marks=[pytest.mark.nightly, pytest.mark.timeout(600)])])
@pytest.mark.parametrize(
    ("how", "point"),
    [
        pytest.param(how, point, marks=[] if (how, point) in QUICK else [pytest.mark.nightly])
        for how, point in itertools.product(["kill", "pause"], PHASES)
    ],
)
def test_in_each_phase_of_an_operation(cluster: Cluster, how: str, point: str, times: int) -> None:
    """A member stands still at the failpoint while the leader goes."""
    took = []
    for i in range(times):
        comms = join(cluster, range(PEERS), min_world=PEERS)
        reduce_all(comms, range(PEERS))
        count = 4 * MIB if point == "mid_op" or i % 2 else 1000  # a small one may be over before it is seen
        tensors = [contribution(k, count) for k in range(PEERS)]
        since = time.time()
        cluster.failpoint(1, point, "pause")
        running = sums(comms, tensors)
        wait_until(lambda: stands_still(cluster.pid(1)), 10, f"peer 1 stands at {point}")
        gone = end_leader(cluster, how)
        ended = time.monotonic()
        cluster.resume(1)
        check_first_attempt(running.results(), tensors)
        took.append(max(outcome.ended for outcome in reduce_by_master(comms)) - ended)
        check_nobody_lost(cluster, since)
        wake(cluster, how, gone)
        close_all(comms)
    print(f"{how} {point}: n={times}, median {np.median(took):.2f} s, max {max(took):.2f} s")
    assert np.median(took) < TAKEOVER or times == 1, told(cluster)


@pytest.mark.parametrize("point", ["half_commit", pytest.param("before_commit", marks=pytest.mark.nightly)])
def test_the_leader_stops_while_it_commits(cluster: Cluster, comms: list[Any], point: str) -> None:
    """One member may know, the others do not; what the new leader decides is the same."""
    k, _ = leading(cluster)
    cluster.master_failpoint(point, "pause", k)
    tensors = [contribution(i, 1000) for i in range(PEERS)]
    running = by_master(comms, tensors)
    check_first_attempt(running.results(), tensors)
    wake(cluster, "pause", k)
    reduce_all(comms, range(PEERS))


@pytest.mark.parametrize(
    "point",
    [*later("before_epoch"), *at_night("before_persist", "half_epoch")],
)
def test_the_leader_stops_while_it_begins_an_epoch(cluster: Cluster, point: str) -> None:
    """It has decided who goes on, and wakes up when another one has decided too."""
    comms = join(cluster, range(PEERS))
    reduce_all(comms, range(PEERS))
    k, _ = leading(cluster)
    cluster.master_failpoint(point, "pause", k)
    cluster.kill(2)
    tensors = [contribution(i, 1000) for i in range(2)]
    outcomes = sums(comms[:2], tensors).results()
    assert sorted(check_agreed(outcomes, tensors)) == ["m0", "m1"]
    wake(cluster, "pause", k)
    after = reduce_all(comms[:2], range(2))
    assert after[0].receipt.epoch == outcomes[0].receipt.epoch
    close_all(comms)


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_again_and_again(cluster: Cluster, comms: list[Any]) -> None:
    """Small sums without a pause while leaders are killed and stopped in turn, each for as long as chance has it."""
    running = Steady(comms)
    rng = np.random.default_rng(7)
    for how in ["kill", "pause"] * 5:
        k = end_leader(cluster, how)
        time.sleep(rng.uniform(0.0, 4.0))  # a stopped one may wake up while it leads, while nobody does, or too late
        cluster.start_master(k) if how == "kill" else cluster.resume_master(k)
        wait_until(lambda: len(leading(cluster)[1].groups) == 1, PATIENCE, "the group is back")
        time.sleep(rng.uniform(0.0, 1.0))  # some operations go through
    running.stop()
    assert running.count[0] > 10


def test_a_joiner_comes_while_nobody_leads(cluster: Cluster) -> None:
    group = new_group()
    comms = join(cluster, range(2), group=group)
    reduce_all(comms, range(2))
    k = end_leader(cluster, "kill")
    late = Background(lambda _: cluster.connect(2, group=group, name="m2", start_world=2), 1)
    leading(cluster)
    wait_joining(cluster, group, "m2")

    def update_until_it_is_in(i: int) -> Outcome:
        """Where members commit they may pass one before their daemons are at the new leader."""
        while (outcome := attempt(comms[i].update_membership)).error is None and comms[i].world_size == 2:
            assert MEMBERS_COMMIT
        return outcome

    updates = Background(update_until_it_is_in, 2)
    assert all(outcome.error is None for outcome in updates.results())
    comms += late.results()
    reduce_all(comms, range(PEERS))
    wake(cluster, "kill", k)
    close_all(comms)


def test_a_private_daemon_finds_the_leader(cluster: Cluster) -> None:
    """The standby stands first."""
    addresses = cluster.master_option.split(",")
    masters = ",".join(addresses if leading(cluster)[0] else reversed(addresses))
    with wancoll.connect(new_group(), name="m0", master=masters, timeout=20) as comm:
        reduce_all([comm], [0])


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_only_members_that_were_put_out_come_back(etcd: Etcd) -> None:
    """No journal is left, and nobody has told them; but etcd knows that the group went on without them."""
    with Cluster(PEERS, fork=True, etcd=etcd.url, **OPTIONS) as cluster:
        comms = join(cluster, range(PEERS))
        reduce_all(comms, range(PEERS))
        cluster.pause(2)
        end_leader(cluster, "kill")
        reduce_all(comms[:2], range(2))  # under the standby, which member m2 never meets
        for k in range(2):
            if cluster.master_running(k):
                cluster.kill_master(k)
        for i in range(2):
            cluster.kill(i)
        for k in range(2):
            cluster.start_master(k, lose_journal=True)
        cluster.resume(2)
        outcome = attempt(lambda: comms[2].all_reduce(contribution(2, 1000), op="sum"))
        assert isinstance(outcome.error, Evicted | OutcomeUnknown), repr(outcome)[-500:]


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_both_masters_die(cluster: Cluster, comms: list[Any]) -> None:
    first = reduce_all(comms, range(PEERS))
    _, before = leading(cluster)
    for k in range(2):
        cluster.kill_master(k)
    for k in range(2):
        cluster.start_master(k, lose_journal=True)
    second = reduce_all(comms, range(PEERS))
    assert second[0].receipt.epoch == first[0].receipt.epoch
    assert leading(cluster)[1].term > before.term


@pytest.mark.check
def test_etcd_stands_still_for_less_than_the_lease(etcd: Etcd) -> None:
    """Nothing happens: the same leader, the same epoch."""
    with Etcd() as own, Cluster(PEERS, fork=True, etcd=own.url, **(OPTIONS | lease(15))) as cluster:
        comms = join(cluster, range(PEERS), min_world=PEERS)
        first = reduce_all(comms, range(PEERS))
        before = cluster.status()
        own.pause()
        for _ in range(20):
            reduce_all(comms, range(PEERS))
            time.sleep(0.1)  # how long etcd is away is what this is about
        own.resume()
        time.sleep(0.5)  # for the standby to make a mistake
        last = reduce_all(comms, range(PEERS))
        after = cluster.status()
        assert last[0].receipt.epoch == first[0].receipt.epoch
        assert after.term == before.term
        assert after.uptime > before.uptime
        close_all(comms)


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_etcd_dies_and_comes_back(etcd: Etcd) -> None:
    """The leader steps down when its lease is over; ops wait, and commit when somebody leads again."""
    with Etcd() as own, Cluster(PEERS, fork=True, etcd=own.url, **OPTIONS) as cluster:
        comms = join(cluster, range(PEERS), min_world=PEERS)
        first = reduce_all(comms, range(PEERS))
        _, before = leading(cluster)
        own.kill()
        wait_until(
            lambda: all(isinstance(answers(cluster, k), m.StandsBy) for k in range(2)),
            PATIENCE,
            "the leader steps down",
        )
        tensors = [contribution(i, 1000) for i in range(PEERS)]
        running = sums(comms, tensors)
        own.start()
        outcomes = running.results()
        check_first_attempt(outcomes, tensors)
        assert outcomes[0].receipt.epoch == first[0].receipt.epoch
        assert leading(cluster)[1].term > before.term
        close_all(comms)


def lease(ttl: int) -> dict[str, Any]:
    return {"master_args": [*OPTIONS["master_args"], f"--lease-ttl={ttl}"]}
