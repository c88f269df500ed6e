"""What is cheap to send in a handshake of TLS 1.3, and dear to read; and how long trio's loop was busy with it."""

from __future__ import annotations

import base64
import contextlib
import socket
import ssl
import time
from math import inf

import trio

from wancoll.trust.folder import in_memory
from wancoll.trust.keys import Key

# 638 bytes, 0.1 s: its key is of a curve over a prime k * 2**600 + 1, and its points are compressed, so a square root
# costs as many steps as that has twos, squared. Its signature is junk.
_ONE = base64.b64decode(
    "MIICejCCAl8CAwCkrzAKBggqhkjOPQQDAjAAMB4XDTI1MDEwMTAwMDAwMFoXDTM1MDEwMTAwMDAwMFowADCCAiYwggHLBgcqhkjO"
    "PQIBMIIBvgIBATBeBgcqhkjOPQEBAlMPlqwU8Tup7w"
    + "A" * 99
    + "TCBqgRT"
    + "A" * 111
    + "EUw7u8IDA92e5UJQLNEI/7JanmOknaqdZDkD4oh66dpYaLjSViNMHXBJPlBFJ7UUPGjk9WsNrXkhRRf9qd4pfpzDd9OsmQv4rDXx"
    "T+sThpCBCawNmBFQC"
    + "A" * 110
    + "ECUw+WrBTxO6nu"
    + "/" * 88
    + "+pQ4odKc8AABAgEBA1UAAg"
    + "A" * 109
    + "CMAoGCCqGSM49BAMCAwkAMAYCAQUCAQU="
)  # fmt: skip


class Dear:
    """An acceptor who shows its own key, and certificates that are dear.

    Attributes:
        cost: seconds of a processor for who reads them: as many as it took here.
    """

    def __init__(self, count: int = 2) -> None:
        key = Key.new()
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        with in_memory(key.certificate() + ssl.DER_cert_to_PEM_cert(_ONE).encode() * count + key.pem) as file:
            began = time.thread_time()
            self._context.load_cert_chain(file)
            self.cost = time.thread_time() - began

    async def answer(self, sock: socket.socket) -> None:
        """Shake hands, until the other end has ended it."""
        await trio.to_thread.run_sync(self._answer, sock)

    def _answer(self, sock: socket.socket) -> None:
        sock.settimeout(50)
        with contextlib.suppress(OSError), self._context.wrap_socket(sock, server_side=True) as sealed:
            sealed.recv(1)


class LongestStep(trio.abc.Instrument):
    """Of this loop's tasks, in seconds of its thread on a processor: machines that stand still do not count.

    Attributes:
        seconds: of the longest.
    """

    def __init__(self) -> None:
        self.seconds, self._began = 0.0, inf

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        """It begins."""
        self._began = time.thread_time()

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        """It is over."""
        self.seconds = max(self.seconds, time.thread_time() - self._began)
