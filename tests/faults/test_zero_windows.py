"""An end that stops reading its lanes, one or all, while its control connection lives: noticed, and made anew."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.faults.proxy import Relay
from tests.faults.support import (
    MIB,
    Background,
    attempt,
    check_agreed,
    close_all,
    contribution,
    new_group,
    reduce_all,
    states,
    wait_until,
)
from wancoll.chaos import Cluster, in_threads

LANES, LANE, STALL = 4, 2.0, 4.0
BUSY = 8.0  # seconds more that it may take where the machine has other things to do
PEERS = 3


@contextmanager
def cluster_behind_a_relay() -> Iterator[tuple[Cluster, Relay]]:
    """Peer 0 is dialled through the relay: all lanes between it and the others are the relay's."""
    options = [f"--lane-timeout={LANE}", "--slow-after=0.5", "--link-timeout=5", "--no-measure"]
    with (
        Relay() as relay,
        Cluster(
            0,
            lanes=LANES,
            listen="127.0.0.{i}:0",
            peer_args=options,
            heartbeat_timeout=8.0,
            master_args=["--slow-after=0.5", f"--stall-timeout={STALL}"],
        ) as cluster,
    ):
        cluster.add_peer(f"--advertise={relay.address}")
        relay.target = cluster.peer_address(0)
        for _ in range(PEERS - 1):
            cluster.add_peer()
        yield cluster, relay


@pytest.mark.timeout(90)
@pytest.mark.parametrize(
    ("lanes", "count"),
    [
        pytest.param(1, 16 * MIB, id="one lane"),
        pytest.param(100, 16 * MIB, id="all lanes", marks=pytest.mark.chaos),
        pytest.param(100, 1000, id="all lanes, bytes that fit into buffers"),
    ],
)
def test_lanes_that_nobody_reads_are_made_anew(lanes: int, count: int) -> None:
    """Large: the sender sees that nothing is taken. Small: nobody can see it; the master ends the stall."""
    with cluster_behind_a_relay() as (cluster, relay):
        group = new_group()

        def connect(i: int):
            if i:  # peer 0 is the oldest: the others dial it
                wait_until(lambda: f"m{i - 1}" in states(cluster, group), 20, f"m{i - 1} is before m{i}")
            return cluster.connect(i, group=group, name=f"m{i}", start_world=PEERS, min_world=1)

        comms = in_threads(connect, PEERS, timeout=30)
        reduce_all(comms, range(PEERS))
        assert len(relay.connections) >= 2 * LANES
        tensors = [contribution(k, count) for k in range(PEERS)]
        frozen = relay.freeze(lanes)
        ops = Background(lambda k: attempt(lambda: comms[k].all_reduce(tensors[k], op="sum")), PEERS)
        expected = STALL if count == 1000 else LANE
        outcomes = ops.results(expected + 3 + BUSY)
        took = max(outcome.ended for outcome in outcomes) - ops.started
        assert sorted(check_agreed(outcomes, tensors)) == ["m0", "m1", "m2"]
        print(f"{frozen} frozen, ended after {took:.2f} s")
        assert took >= expected - 0.5  # else the fault was none
        status = cluster.status()
        told = [event.text for event in status.events if event.group == group and event.epoch > 1]
        told += [one.why for one in status.groups[0].pairs]
        assert any(("moved nothing" if count == 1000 else "took nothing") in text for text in told), told
        wait_until(lambda: not cluster.status().groups[0].waits, 5, "nothing waits any more")
        reduce_all(comms, range(PEERS))
        close_all(comms)
