"""An end that stops reading its lanes, one or all, while its control connection lives: noticed, and made anew."""

from __future__ import annotations

from itertools import permutations

import pytest

from tests.faults.support import (
    BUSY,
    MIB,
    check_agreed,
    close_all,
    contribution,
    join,
    new_group,
    reduce_all,
    sums,
    wait_until,
)
from wancoll.testing.proxy import proxied_cluster

LANES, LANE, STALL = 4, 2.0, 4.0
PEERS = 3


@pytest.mark.timeout(90)
@pytest.mark.parametrize(
    ("lane", "count"),
    [
        pytest.param(0, 16 * MIB, id="one lane"),
        pytest.param(-1, 16 * MIB, id="all lanes", marks=pytest.mark.nightly),
        pytest.param(-1, 1000, id="all lanes, bytes that fit into buffers", marks=pytest.mark.check),
    ],
)
def test_lanes_that_nobody_reads_are_made_anew(lane: int, count: int) -> None:
    """Large: the sender sees that nothing is taken. Small: nobody can see it; the master ends the stall."""
    options = [f"--lane-timeout={LANE}", "--slow-after=0.5", "--link-timeout=5", "--no-measure"]
    with proxied_cluster(
        PEERS,
        lanes=LANES,
        peer_args=options,
        heartbeat_timeout=8.0,
        master_args=["--slow-after=0.5", f"--stall-timeout={STALL}"],
        fork=True,
    ) as (cluster, proxies):
        group = new_group()
        comms = join(cluster, range(PEERS), group=group)
        reduce_all(comms, range(PEERS))
        tensors = [contribution(k, count) for k in range(PEERS)]
        pairs = [(0, 1), (1, 0)] if lane == 0 else [ends for ends in permutations(range(PEERS), 2) if 0 in ends]
        rules = [proxies.add("freeze", *ends, lane=lane) for ends in pairs]
        ops = sums(comms, tensors)
        expected = STALL if count == 1000 else LANE
        outcomes = ops.results(expected + 3 + BUSY)
        took = max(outcome.ended for outcome in outcomes) - ops.started
        assert sorted(check_agreed(outcomes, tensors)) == ["m0", "m1", "m2"]
        print(f"{sum(proxies.fired(rule, 0) for rule in rules)} frozen, ended after {took:.2f} s")
        assert took >= expected - 0.5  # else the fault was none
        status = cluster.status()
        told = [event.text for event in status.events if event.group == group and event.epoch > 1]
        told += [one.why for one in status.groups[0].pairs]
        assert any(("moved nothing" if count == 1000 else "took nothing") in text for text in told), told
        wait_until(lambda: not cluster.status().groups[0].waits, 10, "nothing waits any more")
        reduce_all(comms, range(PEERS))
        close_all(comms)
