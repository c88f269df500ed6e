"""Daemons whose connection to the master breaks, a master that hears nobody, two daemons with one name (R11, R18)."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.faults.support import (
    BUSY,
    PEERS,
    Steady,
    close_all,
    in_threads,
    join,
    reduce_all,
    wait_until,
)
from tests.faults.wire import Wire
from wancoll.chaos import Cluster

HEARD = 0.6  # s: a heartbeat is said every 0.5 s


@contextmanager
def wired(**options: Any) -> Iterator[tuple[Cluster, Wire]]:
    """Daemons that reach their master over one wire."""
    with Cluster(0, fork=True, **options) as cluster, Wire(cluster.master_address) as wire:
        for i in range(PEERS):
            cluster.add_peer(f"--master={wire.address}", name=f"peer-{i}")
        yield cluster, wire


def epochs(cluster: Cluster) -> set[int]:
    return {group.epoch for group in cluster.status().groups}


def all_heard(cluster: Cluster) -> bool:
    """Whether a heartbeat of each has come since the cut: members commit without the master, so a sum does not tell."""
    return all(one.silent_for < HEARD for group in cluster.status().groups for one in group.members)


def test_daemons_that_are_killed_together_cost_one_epoch(cluster: Cluster) -> None:
    victims, survivors, cost = [1, 2], [0, 3], 0
    for _ in range(3):  # again where the machine stood still between the two
        comms = join(cluster, range(PEERS))
        reduce_all(comms, range(PEERS))
        before = comms[0].epoch
        in_threads(lambda k: cluster.kill(victims[k]), len(victims))
        reduce_all([comms[k] for k in survivors], survivors)
        cost = comms[0].epoch - before
        close_all(comms)
        for k in victims:
            cluster.restart_peer(k)
        if cost == 1:
            break
    assert cost == 1, cluster.master_logs()


@pytest.mark.check
@pytest.mark.timeout(300)
def test_reset_control_connections_cost_nothing() -> None:
    for _ in range(3):  # again where the machine stood still for return_grace, a second
        if not (lost := lost_by_resets()):
            return
    pytest.fail(lost)


def all_back(cluster: Cluster, times: int) -> bool:
    logs = cluster.master_logs(1_000_000)
    return all(logs.count(f"daemon peer-{k} is back") >= times for k in range(PEERS))


def lost_by_resets() -> str:
    """What the master says, if a sum was not that of all."""
    with wired() as (cluster, wire):
        comms = join(cluster, range(PEERS))
        running = Steady(comms)
        for again in range(10):
            # Not when all have connected: who is cut off again and again before it is welcome waits longer each time.
            wait_until(lambda again=again: running.failed or all_back(cluster, again), 10 + BUSY, "all are back")
            before = running.count[0]
            assert wire.reset() >= 1
            wait_until(lambda before=before: running.failed or running.count[0] > before + 20, 20 + BUSY, "sums go on")
            if running.failed:
                return cluster.master_logs()
        running.stop()
        found = epochs(cluster)
        close_all(comms)
        return "" if found == {1} else cluster.master_logs()


def cut_again_and_again(seconds: float, seed: int) -> None:
    """The master's network is down for 0.5 to 5 s, again and again: nobody is evicted, and sums commit in between."""
    rng = random.Random(seed)
    with wired() as (cluster, wire):
        comms = join(cluster, range(PEERS))
        running = Steady(comms)
        until, cuts = time.monotonic() + seconds, 0
        while time.monotonic() < until:
            wire.cut()
            time.sleep(rng.choice((0.5, 2.0, 3.2, 5.0)) if cuts < 4 else rng.uniform(0.5, 5.0))  # the cut itself
            before = running.count[0]
            wire.mend()
            cuts += 1
            wait_until(lambda: all_heard(cluster), 10, "the master hears all")
            wait_until(lambda before=before: running.failed or running.count[0] > before, 10, "a sum after the cut")
            assert not running.failed, cluster.master_logs()
        running.stop()
        print(f"{cuts} cuts, {running.count[0]} sums; epoch {epochs(cluster)}")
        assert epochs(cluster) == {1}, cluster.master_logs()
        close_all(comms)


@pytest.mark.check
@pytest.mark.timeout(120)
def test_a_master_whose_network_is_cut_puts_nobody_out() -> None:
    cut_again_and_again(8.0, 1)


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_five_minutes_of_a_master_whose_network_is_cut() -> None:
    cut_again_and_again(300.0, 2)


def test_a_second_daemon_with_the_name_is_sent_away(cluster: Cluster, comms: list[Any]) -> None:
    before = comms[0].epoch
    with Cluster(0, fork=True) as other:
        twin = other.add_peer("--master={}:{}".format(*cluster.master_address), name=cluster.name(1))
        assert other.wait(twin, BUSY) == 2
        assert "another daemon is named" in other.logs(twin)
    reduce_all(comms, range(PEERS))
    # One that stood still for long starts over, and knows no group for a moment.
    wait_until(lambda: epochs(cluster) == {comms[0].epoch}, BUSY, "the master has the group")
    assert comms[0].epoch == before
