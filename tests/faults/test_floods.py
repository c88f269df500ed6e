"""Floods of hostile handshakes at the master's port and at a data port, slow ones among them: the cluster goes on."""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import threading
import time

import pytest

from tests.faults.support import BUSY, PEERS, close_all, join, reduce_all, until_stopped, wait_until
from tests.faults.test_hostile_bytes import all_up, open_files
from wancoll.chaos import Cluster
from wancoll.limits import DEFAULT

SLOW = 300  # connections kept open, of each address: more than a listener has room for
FLOOD = 1500
LONG_FLOOD = 500_000  # of each of two attackers
LONGEST = 1500.0  # seconds
PAUSE = 0.5  # seconds in which a long flood has the machine for itself
ADDRESSES = ("127.0.1.2", "127.0.1.3")  # of those who mean harm; of the cluster no process has them
SAID = [
    b"",
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(100),  # the beginning of TLS
    struct.pack("!I", 200) + b"\x98",  # a frame that never ends
    struct.pack("!I", 1 << 31),
    bytes(4096),
]


class Flood:
    """Two attackers, each with an address of its own, one for the master's port and one for a data port.

    Args:
        targets: where to.
        most: handshakes of each.
        seed: of what they say.
    """

    def __init__(self, targets: list[tuple[str, int]], most: int, seed: int) -> None:
        self.made = [0] * len(targets)
        self._stop = threading.Event()
        self._most = most
        self._threads = [
            threading.Thread(target=self._attack, args=(i, target, random.Random(seed + i)), daemon=True)
            for i, target in enumerate(targets)
        ]

    def _attack(self, i: int, target: tuple[str, int], chance: random.Random) -> None:
        slow: list[socket.socket] = []
        while not self._stop.is_set() and self.made[i] < self._most:
            with contextlib.suppress(OSError):
                one = socket.create_connection(target, 5, source_address=(ADDRESSES[i], 0))
                one.settimeout(5)
                slow.append(one)
                one.sendall(chance.choice(SAID))
                if len(slow) > SLOW:
                    old = slow.pop(chance.randrange(len(slow)))
                    with contextlib.suppress(OSError):
                        old.send(b"\0")  # one byte more, late
                    old.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    old.close()
            self.made[i] += 1
        for one in slow:
            one.close()

    def running(self) -> contextlib.AbstractContextManager[None]:
        return until_stopped(self._threads, self._stop)

    @property
    def over(self) -> bool:
        return min(self.made) >= self._most


def commits_under(cluster: Cluster, most: int, longest: float, seed: int, pause: float = 0.0) -> None:
    """Joins and commits meanwhile, of all members always: nobody is evicted. *pause*: seconds between those."""
    close_all(join(cluster, range(PEERS)))
    pids = [cluster.master_pid, *(cluster.pid(i) for i in range(PEERS))]
    wait_until(lambda: not cluster.status().groups, BUSY, "the groups so far are gone")
    files, began, rounds = open_files(pids), time.monotonic(), 0
    again = 0
    comms = join(cluster, range(PEERS))
    flood = Flood([cluster.master_address, cluster.peer_address(0)], most, seed)
    with flood.running():
        while not flood.over and time.monotonic() - began < longest:
            newcomers = join(cluster, range(PEERS))
            for group in (comms, newcomers):
                outcomes = reduce_all(group, range(PEERS), 1000)
                again += max(outcome.receipt.attempts for outcome in outcomes if outcome.receipt is not None) - 1
            close_all(newcomers)
            rounds += 1
            time.sleep(pause)
    took = time.monotonic() - began
    print(f"{sum(flood.made)} hostile handshakes in {took:.1f} s, {rounds} groups joined and reduced, {again} again")
    assert rounds > 0
    assert all_up(cluster, pids)
    close_all(comms)
    wait_until(
        lambda: all(now <= before for now, before in zip(open_files(pids), files, strict=True)),
        DEFAULT.handshake_timeout + BUSY,
        f"open files as before, {files}",
    )
    held = cluster.status().resources
    assert held["strangers"] <= 1  # who asks
    assert held["strangers_refused"] > 0


@pytest.mark.check
def test_a_flood_of_hostile_handshakes(cluster: Cluster, rng: random.Random) -> None:
    commits_under(cluster, FLOOD, 30, rng.getrandbits(32))


@pytest.mark.nightly
@pytest.mark.timeout(1750)
def test_a_million_hostile_handshakes(cluster: Cluster, rng: random.Random) -> None:
    """Or as many as come in 25 minutes."""
    commits_under(cluster, LONG_FLOOD, LONGEST, rng.getrandbits(32), PAUSE)
