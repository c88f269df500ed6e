"""Uplinks that differ: the plan's shares, and a limit that a daemon was given, by the packets that leave the host."""

from __future__ import annotations

import time

import numpy as np
import pytest

from tests.wan.network import Wan
from tests.wan.test_delayline import patient
from tests.wan.test_plans_on_wan import ask
from tests.wan.uplinks import ENV, join_last, lose
from wancoll.chaos import Cluster, in_threads

pytestmark = [pytest.mark.wan, pytest.mark.check]

LIMIT = 20e6  # bits per second
COUNT = 1 << 20  # elements: 4 MiB


@patient
@pytest.mark.timeout(120)
def test_a_limit_holds_on_the_line_and_makes_shares_uneven() -> None:
    with (
        Wan(peers=4, delay=0.010, rate=100e6) as wan,
        Cluster(peers=4, network=wan, peer_env={3: {"WANCOLL_UPLINK_LIMIT": "20Mbit/s"}}) as cluster,
    ):
        comms = in_threads(lambda i: cluster.connect(i, start_world=4), 4)
        inputs = [np.random.default_rng(i).standard_normal(COUNT).astype(np.float32) for i in range(4)]
        order = [one.daemon for one in sorted(ask(wan, cluster).groups[0].members, key=lambda one: one.rank)]
        expected = inputs[int(order[0][-1])].copy()
        for daemon in order[1:]:
            expected += inputs[int(daemon[-1])]

        def reduce(i: int) -> None:
            result = np.empty_like(inputs[i])
            comms[i].all_reduce(inputs[i], out=result)
            assert np.array_equal(result, expected)

        def look() -> tuple[float, int]:
            return time.monotonic(), wan.counters().sent_bytes(3)

        in_threads(reduce, 4)
        began, before = look()
        for _ in range(2):
            in_threads(reduce, 4)
        ended, after = look()
        answer = ask(wan, cluster)
    [group] = answer.groups
    assert group.plan is not None
    shares = dict(zip(order, group.plan.plan.shares, strict=True))
    assert shares == {"peer-0": 1024, "peer-1": 1024, "peer-2": 1024, "peer-3": 0}
    told = [link.bandwidth for link in answer.links if link.source == "peer-3"]
    assert 0 < max(told) <= LIMIT / 8
    rate = 8 * (after - before) / (ended - began)
    assert rate < 1.03 * LIMIT  # with votes, and a few packets that are sent again
    assert rate > 0.6 * LIMIT


@patient
@pytest.mark.timeout(120)
def test_lanes_go_over_all_uplinks_and_over_the_others_when_one_is_gone() -> None:
    """The daemon that joins last dials. Each of its two uplinks carries 20 Mbit/s."""
    up = {"up": LIMIT}
    with (
        Wan(peers=2, delay=0.005, rate=200e6, second=[1], ports={1: up, 3: up}) as wan,
        Cluster(peers=2, network=wan, peer_env=ENV) as cluster,
    ):
        comms = join_last(cluster)

        def reduce(i: int) -> int:
            tensor = np.full(COUNT, i + 1.0, np.float32)
            attempts = comms[i].all_reduce(tensor).attempts
            assert np.array_equal(tensor, np.full(COUNT, 3.0, np.float32))
            return attempts

        in_threads(reduce, 2)
        began, before = time.monotonic(), [wan.counters().sent_bytes(host) for host in (1, 3)]
        in_threads(reduce, 2)
        took = time.monotonic() - began
        sent = [wan.counters().sent_bytes(host) - old for host, old in zip((1, 3), before, strict=True)]
        assert min(sent) > 0.35 * sum(sent) > COUNT
        assert 8 * sum(sent) / took > 1.3 * LIMIT

        lose(wan, 3, 1.0)
        assert in_threads(reduce, 2) == [1, 1]  # what was on its way there goes over the other one
        lose(wan, 3, 0.0)
        before = wan.counters().sent_bytes(3)
        while wan.counters().sent_bytes(3) < before + COUNT:
            in_threads(reduce, 2)
