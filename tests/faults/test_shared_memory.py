"""Lanes within a machine, through memory: the same bits as over TCP; neighbours that die, stand still, come back."""

from __future__ import annotations

import contextlib
import mmap
import os
import random
import signal
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from tests.faults.support import (
    BUSY,
    MIB,
    bits_of_sum,
    check_agreed,
    close_all,
    contribution,
    join,
    one_of_three_dies,
    ranked,
    reduce_all,
    stands_still,
    sums,
    until_stopped,
    wait_until,
)
from wancoll.chaos import Cluster
from wancoll.native.engine import PIPE_HEAD

PEERS = 3

pytestmark = pytest.mark.check


@pytest.fixture(scope="module", params=["in clear", "sealed"])
def near(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    with Cluster(PEERS, fork=True, secure=request.param == "sealed") as cluster:
        yield cluster


def lanes(cluster: Cluster, i: int) -> tuple[int, int]:
    """How many lanes daemon i has for data, and how many of these go through memory."""
    held = cluster.peer_status(i)["resources"]
    return held["lanes"] - held["links"], held["lanes_in_memory"]


def all_in_memory(cluster: Cluster) -> bool:
    found = [lanes(cluster, i) for i in range(PEERS)]
    return all(of_data == in_memory > 0 for of_data, in_memory in found)


@pytest.mark.parametrize("count", [1, 1000, MIB // 4 + 17, 4 * MIB])
def test_sums_have_the_bits_of_tcp(near: Cluster, count: int) -> None:
    tensors = [np.random.default_rng(k).normal(size=count).astype(np.float32) for k in range(PEERS)]
    found = set[bytes]()
    with Cluster(PEERS, fork=True, peer_args=["--no-shared-memory"]) as far:
        for cluster in (near, far):
            comms = ranked(cluster, range(PEERS))
            found |= bits_of_sum(comms, tensors)
            assert all_in_memory(cluster) == (cluster is near)
            assert cluster is near or lanes(cluster, 0)[1] == 0
            for outcome in reduce_all(comms, range(PEERS), count):
                receipt = outcome.receipt
                assert receipt is not None
                assert receipt.bytes_in_memory == (receipt.bytes_sent if cluster is near else 0)
                assert receipt.bytes_sent > 0
            close_all(comms)
    assert len(found) == 1


@pytest.mark.parametrize("point", ["mid_op", "half_done", "after_done"])
def test_a_neighbour_that_dies_costs_nobody_the_sum(near: Cluster, point: str) -> None:
    one_of_three_dies(near, point, 4 * MIB, lambda: all_in_memory(near))


def test_a_neighbour_that_stands_still_costs_no_attempt(near: Cluster) -> None:
    comms = join(near, range(PEERS))
    reduce_all(comms, range(PEERS), MIB)
    pid = near.pid(1)
    for _ in range(5):
        tensors = [contribution(k, 4 * MIB) for k in range(PEERS)]
        os.kill(pid, signal.SIGSTOP)
        try:
            running = sums(comms, tensors)
            wait_until(lambda: stands_still(pid), BUSY, "it is stopped")
        finally:
            os.kill(pid, signal.SIGCONT)
        outcomes = running.results()
        check_agreed(outcomes, tensors)
        assert {outcome.receipt.attempts for outcome in outcomes if outcome.receipt is not None} == {1}
    close_all(comms)


def test_daemons_of_other_hosts_have_none(near: Cluster) -> None:
    """Hosts are told apart by their addresses alone."""
    with Cluster(2, fork=True, listen="127.0.0.{i}:0") as far:
        comms = join(far, range(2))
        reduce_all(comms, range(2), 1000)
        assert lanes(far, 0)[0] > 0
        assert lanes(far, 0)[1] == 0
        close_all(comms)


def change_bytes(pid: int, rng: random.Random, stop: threading.Event) -> None:
    """Flip bits in the memory of a daemon's lanes."""
    while not stop.is_set():
        with open(f"/proc/{pid}/maps") as file:
            ranges = [line.split()[0] for line in file if "wancoll-lane" in line]
        for at in ranges:
            begin, end = (int(part, 16) for part in at.split("-"))
            with contextlib.suppress(OSError), open(f"/proc/{pid}/map_files/{at}", "r+b", buffering=0) as memory:
                for _ in range(20 if end - begin > PIPE_HEAD else 0):
                    with mmap.mmap(memory.fileno(), end - begin) as bytes_:
                        bytes_[rng.randrange(PIPE_HEAD, end - begin)] ^= 1 << rng.randrange(8)
                    stop.wait(0.0005)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may change another process's memory")
def test_a_changed_byte_is_never_in_a_sum(near: Cluster, rng: random.Random) -> None:
    """Nothing seals what is in memory: payloads have their checksums, also where keys were proved over TLS."""
    for _ in range(2):
        comms = join(near, range(PEERS), min_world=1)
        reduce_all(comms, range(PEERS), 1000)
        tensors, stop = [contribution(k, 4 * MIB) for k in range(PEERS)], threading.Event()
        before = [tensor.copy() for tensor in tensors]
        with until_stopped([threading.Thread(target=change_bytes, args=(near.pid(1), rng, stop))], stop):
            outcomes = sums(comms, tensors).results()
        for k, outcome in enumerate(outcomes):
            if outcome.error is None:
                check_agreed([outcome], [tensors[k]])
            else:  # links that break again and again part them
                assert (tensors[k] == before[k]).all()
        close_all(comms)


def test_links_that_are_cut_come_back(near: Cluster) -> None:
    comms = join(near, range(PEERS))
    for _ in range(5):
        reduce_all(comms, range(PEERS), MIB)
        near.cut(0, 1)
        near.heal(0, 1)
    reduce_all(comms, range(PEERS), MIB)
    wait_until(lambda: all_in_memory(near), BUSY, "lanes through memory again")
    close_all(comms)
    wait_until(lambda: lanes(near, 0) == (0, 0), BUSY, "no lanes")
