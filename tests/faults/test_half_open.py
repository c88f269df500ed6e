"""Strangers that open connections and say no more: whoever is known comes in at once, and nobody is evicted."""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator

import pytest

from tests.faults.support import BUSY, close_all, join, reduce_all, wait_until
from tests.faults.wire import Wire
from wancoll.chaos import Cluster
from wancoll.limits import DEFAULT
from wancoll.net.tls import Tls, to_dial

RATE = 1000  # connections a second, each from an address of its own
ENOUGH = 0.6  # of the rate, that a busy machine has to manage
HELD = 3000  # that a stranger keeps open
SOON = 1.0  # seconds for whoever is known
TRIES, MORE_TRIES = 10, 40
STRANGER, KNOWN = "127.9.9.9", "127.0.0.1"


def begun() -> bytes:
    """The first bytes of a handshake, as a daemon sends them."""
    tls = Tls(expects=[bytes(32)])
    tls.shake(b"")
    return tls.outgoing()


@contextlib.contextmanager
def strangers(port: int, said: bytes, rate: int = RATE) -> Iterator[None]:
    """A process of theirs, which has the room full when this begins."""
    with subprocess.Popen(
        [sys.executable, "-m", __name__, str(port), str(rate), said.hex()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "full\n"
            yield
        finally:
            process.stdin.close()
            made = float(process.stdout.readline())
    print(f"{made:.0f} connections a second")
    assert made > ENOUGH * rate


def come_in(port: int, source: str) -> float:
    """Seconds until the master answers a handshake from this address with its challenge; raises OSError."""
    began = time.monotonic()
    with (
        socket.create_connection((KNOWN, port), BUSY, source_address=(source, 0)) as sock,
        to_dial().wrap_socket(sock, server_hostname="x.wancoll") as sealed,
    ):
        if not sealed.recv(100):
            raise ConnectionError("put out")
    return time.monotonic() - began


def took(call: Callable[[], object]) -> float:
    began = time.monotonic()
    call()
    return time.monotonic() - began


@pytest.mark.nightly  # alone: the strangers need a core of their own, and the master another
@pytest.mark.parametrize("silent", [True, False])
def test_known_daemons_and_newcomers_come_in_beside_half_open_connections(silent: bool) -> None:
    with Cluster(2, secure=True) as cluster:
        comms = join(cluster, range(2))
        port = cluster.master_address[1]
        with strangers(port, b"" if silent else begun()):
            known = [came for _ in range(TRIES) for came in (took(cluster.status), come_in(port, KNOWN))]
            newcomers = []
            for _ in range(MORE_TRIES):
                with contextlib.suppress(OSError, ssl.SSLError):
                    newcomers.append(come_in(port, STRANGER))
            outcomes = reduce_all(comms, range(2), 1000)
            print(
                f"known {max(known):.3f} s at most; {len(newcomers)} of {MORE_TRIES} newcomers, {max(newcomers):.3f} s"
            )
            assert max(known) < SOON
            assert newcomers  # each tries again where it was put out
            assert max(newcomers) < SOON
            assert [outcome.receipt and outcome.receipt.epoch for outcome in outcomes] == [1, 1]
        close_all(comms)
        wait_until(lambda: cluster.status().resources["strangers"] <= 1, BUSY, "the strangers are gone")


@pytest.mark.nightly
@pytest.mark.parametrize("rate", [2000, 4000])
def test_a_daemon_whose_connection_breaks_is_back_in_time(rate: int) -> None:
    with Cluster(2, secure=True) as cluster, Wire(cluster.master_address) as wire:
        third = cluster.add_peer(f"--master={wire.address}")
        comms = join(cluster, [0, 1, third])
        reduce_all(comms, range(3))
        with strangers(cluster.master_address[1], begun(), rate):
            for _ in range(5):
                before = wire.accepted
                wire.reset()
                wait_until(lambda before=before: wire.accepted > before, BUSY, "it dials again")
                outcomes = reduce_all(comms, range(3), 1000)
                assert [outcome.receipt and outcome.receipt.world_size for outcome in outcomes] == [3] * 3
                time.sleep(DEFAULT.return_grace + 0.5)  # evicted it would be by then
            assert len(cluster.status().groups[0].members) == 3
        close_all(comms)


@pytest.mark.nightly
def test_a_link_that_breaks_is_up_again_beside_strangers_at_both_ends() -> None:
    with Cluster(2, secure=True, peer_args=["--no-shared-memory"]) as cluster:
        comms = join(cluster, range(2))
        reduce_all(comms, range(2))
        with contextlib.ExitStack() as stack:
            for i in range(2):
                stack.enter_context(strangers(cluster.peer_address(i)[1], begun(), RATE // 2))
            for _ in range(5):
                cluster.cut(0, 1)
                cluster.heal(0, 1)
                began = time.monotonic()
                outcomes = reduce_all(comms, range(2), 1000)
                print(f"up again after {time.monotonic() - began:.2f} s")
                assert [outcome.receipt and outcome.receipt.world_size for outcome in outcomes] == [2, 2]
                assert time.monotonic() - began < DEFAULT.link_timeout
        close_all(comms)


def _be_strangers(port: int, rate: int, said: bytes) -> None:
    held: deque[socket.socket] = deque()
    made, began = 0, time.monotonic()
    while not select.select([sys.stdin], [], [], max(0.0, began + made / rate - time.monotonic()))[0]:
        sock = socket.socket()
        sock.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            sock.bind((f"127.1.{made // 250 % 250}.{made % 250 + 1}", 0))
            sock.connect((KNOWN, port))
        held.append(sock)
        made += 1
        if len(held) > 20 and said:
            with contextlib.suppress(OSError):
                held[-20].send(said)  # it is connected by now
        if len(held) > HELD:
            old = held.popleft()
            old.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            old.close()
        if made == rate:
            print("full", flush=True)
    print(made / (time.monotonic() - began), flush=True)


if __name__ == "__main__":
    _be_strangers(int(sys.argv[1]), int(sys.argv[2]), bytes.fromhex(sys.argv[3]))
