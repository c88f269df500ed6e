"""Hundreds of real daemons on this machine form one group, commit, lose ten at once, and go on."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import wancoll
from wancoll.chaos import Cluster

DAEMON_BYTES = 40 << 20  # that one daemon takes, about half of it its own
MOST, LOST = 300, 10


def _daemons() -> int:
    """As many as half of the free memory holds; MANY_DAEMONS says otherwise."""
    free = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemAvailable"))
    fit = int(free.split()[1]) * 1024 // 2 // DAEMON_BYTES
    return int(os.environ.get("MANY_DAEMONS", min(MOST, fit)))


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_hundreds_of_daemons_lose_ten_at_once_and_go_on() -> None:
    count = _daemons()
    assert count > 3 * LOST, "too little memory for this test"
    options = ["--arena-bytes=1048576", "--workers=1"]
    with (
        Cluster(
            peers=count, lanes=1, heartbeat_timeout=20, fork=True, peer_args=options, startup_timeout=300
        ) as cluster,
        ThreadPoolExecutor(count) as threads,
    ):

        def join(i: int) -> None:
            comms[i] = cluster.connect(i, group="many", start_world=count, min_world=count - LOST)

        def add(i: int) -> tuple[float, int]:
            tensor = np.ones(1000, np.float32)
            receipt = comms[i].all_reduce(tensor)
            assert (tensor == tensor[0]).all()
            return float(tensor[0]), receipt.world_size

        comms: dict[int, wancoll.Communicator] = {}
        list(threads.map(join, range(count)))
        assert set(threads.map(add, range(count))) == {(count, count)}
        dead = range(0, 3 * LOST, 3)
        for i in dead:
            os.kill(cluster.pid(i), signal.SIGKILL)
        left = [i for i in range(count) if i not in dead]
        for _ in range(2):
            assert set(threads.map(add, left)) == {(count - LOST, count - LOST)}
