"""A running group over TLS beside certificates that are dear to read, and new keys without end: nobody waits for it."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

import pytest
import trio

from tests.dear import Dear
from tests.faults.support import BUSY, close_all, join, new_group, reduce_all, until_stopped, wait_until
from tests.faults.test_sealed_lanes import Rogue
from tests.records import HANDSHAKE, NEW_KEYS, ByHand
from wancoll.chaos import Cluster
from wancoll.net.tls import to_dial

PEERS = 2
LATER = 0.5  # seconds that honest members may take longer than without
ROUNDS = 5


class Strangers:
    """Threads that do the same again and again.

    Attributes:
        count: by name, how often.
    """

    def __init__(self) -> None:
        self.count: dict[str, int] = {}
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []

    def does(self, name: str, what: Callable[[], None]) -> None:
        """Begin."""
        self.count[name] = 0

        def again() -> None:
            while not self._stop.is_set():
                with contextlib.suppress(OSError):
                    what()
                    self.count[name] += 1

        self._threads.append(threading.Thread(target=again, daemon=True))

    def running(self) -> contextlib.AbstractContextManager[None]:
        return until_stopped(self._threads, self._stop)


def show(listener: socket.socket, dear: Dear) -> None:
    """Answer one that dials with certificates that are dear."""
    listener.settimeout(0.2)
    sock, _ = listener.accept()
    with sock:
        trio.run(dear.answer, sock)


def send_new_keys(where: tuple[str, int], folder: Path) -> None:
    """A handshake, then new keys until the other end has had enough."""
    folder.mkdir(exist_ok=True)
    hand = ByHand(to_dial(), folder)
    with socket.create_connection(where, 5) as sock:
        sock.sendall(hand.shake())
        while not hand.done:
            if not (data := sock.recv(65536)):
                return
            sock.sendall(hand.shake(data))
        with contextlib.suppress(OSError):
            while True:
                sock.sendall(b"".join(hand.record(NEW_KEYS, HANDSHAKE) for _ in range(20)))


def rounds(cluster: Cluster) -> list[float]:
    """Seconds of a group that joins, reduces and leaves."""
    took = []
    for _ in range(ROUNDS):
        began = time.monotonic()
        comms = join(cluster, range(PEERS))
        reduce_all(comms, range(PEERS), 1000)
        took.append(time.monotonic() - began)
        close_all(comms)
    return took


@pytest.mark.check
def test_honest_members_beside_dear_certificates_and_new_keys_without_end(tmp_path: Path) -> None:
    with Cluster(PEERS, fork=True, secure=True, peer_args=["--connect-timeout=2"]) as cluster:
        group = new_group()
        comms = join(cluster, range(PEERS), group=group)
        quiet = rounds(cluster)
        rogue, strangers = Rogue(cluster, tmp_path / "rogue", group, PEERS), Strangers()
        strangers.does("dear", partial(show, rogue.listener, Dear(1)))
        for name, where in (("master", cluster.master_address), ("peer", cluster.peer_address(0))):
            strangers.does(name, partial(send_new_keys, where, tmp_path / name))
        with contextlib.closing(rogue), strangers.running():
            wait_until(lambda: strangers.count["dear"] > 0, BUSY, "the members dial the stranger")
            beside = rounds(cluster)
            outcomes = reduce_all(comms, range(PEERS), 1000)
        print(f"{median(quiet):.3f} s before, {median(beside):.3f} s beside {strangers.count}")
        assert min(strangers.count.values()) > 0
        assert sorted(outcomes[0].receipt.contributors) == ["m0", "m1"]
        assert [outcome.receipt.attempts for outcome in outcomes] == [1] * PEERS
        assert median(beside) < median(quiet) + LATER
        close_all(comms)
