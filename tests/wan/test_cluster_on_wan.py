"""A cluster whose daemons are 40 ms apart: right values, and the time that distance takes."""

from __future__ import annotations

import time

import numpy as np
import pytest

from tests.faults.support import MEMBERS_COMMIT
from tests.wan.network import Wan
from wancoll.chaos import Cluster, in_threads

pytestmark = pytest.mark.wan

DELAY = 0.040


def test_all_reduce_across_a_wan() -> None:
    with Wan(peers=2, delay=DELAY) as wan, Cluster(peers=2, lanes=2, network=wan) as cluster:
        assert cluster.master_address[0] == wan.address("master")
        assert cluster.peer_address(1)[0] == wan.address(1)
        comms = in_threads(lambda i: cluster.connect(i, start_world=2, min_world=2), 2)

        def reduce(rank: int) -> list[float]:
            x = np.full(1000, 10.0**rank, np.float32)
            comms[rank].all_reduce(x)
            took = []
            for _ in range(15):  # the best counts: a machine may stand still beside some
                begin = time.monotonic()
                receipt = comms[rank].all_reduce(x, out=np.empty_like(x))
                took.append(time.monotonic() - begin)
                assert np.array_equal(receipt.out, np.full(1000, 22.0, np.float32))
            return took

        for took in in_threads(reduce, 2):
            # At least one way for the data, and one to tell each other, or a round trip to the master.
            assert (2 if MEMBERS_COMMIT else 3) * DELAY - 0.001 < min(took) < 12 * DELAY
        assert wan.counters().overflow == wan.counters().failed == 0


def test_a_cut_path_loses_the_link_and_not_the_group() -> None:
    with Wan(peers=2, delay=0.002) as wan, Cluster(peers=2, lanes=2, network=wan) as cluster:
        comms = in_threads(lambda i: cluster.connect(i, start_world=2, min_world=1), 2)
        assert in_threads(lambda i: comms[i].all_reduce(np.ones(4)).world_size, 2) == [2, 2]
        for pair in (("master", 1), (1, "master")):
            wan.change_path(*pair, loss=1.0)  # the master hears nothing of peer 1 any more
        receipt = comms[0].all_reduce(np.ones(4))
        assert receipt.contributors == (comms[0].name,)
