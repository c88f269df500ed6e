"""What the master learns of a real wide area network, and what it plans from it."""

from __future__ import annotations

import time

import pytest

from tests.wan.network import Wan
from tests.wan.test_delayline import patient
from wancoll.chaos import Cluster, in_threads
from wancoll.cli.asking import Asking, fetch
from wancoll.local import join_address
from wancoll.wire.messages import Status

pytestmark = pytest.mark.wan

DELAY, RATE = 0.020, 100e6
PAYLOAD = RATE / 8 * 1448 / 1500  # bytes per second that TCP carries at most


def ask(wan: Wan, cluster: Cluster) -> Status:
    with wan.inside("master"):
        return fetch(join_address(*cluster.master_address), Asking(timeout=10))


@patient
def test_round_trips_and_uplinks_are_known_when_the_group_starts() -> None:
    with Wan(peers=3, delay=DELAY, rate=RATE) as wan, Cluster(peers=3, network=wan) as cluster:
        comms = in_threads(lambda i: cluster.connect(i, start_world=3), 3)
        assert [comm.epoch for comm in comms] == [1, 1, 1]
        answer = ask(wan, cluster)
    [group] = answer.groups
    assert group.epoch == 1
    assert group.plan is not None
    plan = group.plan.plan
    trips = {frozenset({link.source, link.target}): link.rtt for link in answer.links if link.rtt}
    assert len(trips) == 3
    assert all(2 * DELAY <= trip < 2 * DELAY + 0.02 for trip in trips.values())
    probed = [link.bandwidth for link in answer.links if link.bandwidth]
    assert len(probed) >= 3
    assert all(0.4 * PAYLOAD < speed < 1.5 * PAYLOAD for speed in probed)  # a busy machine's clock is coarse
    assert plan.stripe == 8192
    assert plan.pacing * plan.lanes >= 0.4 * PAYLOAD
    assert [name for _, name in plan.choices["all_reduce"]] == ["full_exchange", "direct", "ring"]


@pytest.mark.timeout(150)  # a path whose burst operations have interrupted five times is measured again after 60 s
def test_the_ring_leaves_a_slow_path_out() -> None:
    """One of six paths carries a tenth: a ring of three can go the other way around."""
    slow = {(0, 1): {"rate": RATE / 10}}
    with Wan(peers=3, delay=DELAY, rate=RATE, paths=slow) as wan, Cluster(peers=3, network=wan) as cluster:
        comms = in_threads(lambda i: cluster.connect(i, start_world=3), 3)
        deadline = time.monotonic() + 120
        while True:
            in_threads(lambda i: comms[i].update_membership(), 3)
            answer = ask(wan, cluster)
            [group] = answer.groups
            order = [member.daemon for member in sorted(group.members, key=lambda member: member.rank)]
            measured = sum(1 for link in answer.links if link.bandwidth)
            neighbours = list(zip(order, order[1:] + order[:1], strict=True))
            if measured == 6 and ("peer-0", "peer-1") not in neighbours:
                break
            assert time.monotonic() < deadline, (order, answer.links, answer.events)
            time.sleep(2.0)  # an operation interrupts the bursts
    assert group.plan is not None
    # More than the slow path carries: on a busy machine a burst may find a fraction of what a fast one does.
    assert group.plan.bottleneck > 1.5 * PAYLOAD / 10
