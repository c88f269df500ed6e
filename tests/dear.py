"""What is cheap to send in a handshake of TLS 1.3, and dear to read; and how long trio's loop was busy with it."""

from __future__ import annotations

import base64
import socket
import ssl
import time
from math import inf
from pathlib import Path

import trio

from wancoll.trust.authority import Authority, Request, new_key, request
from wancoll.trust.identity import Identity

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
    """A stranger who shows its own certificate, and some that are dear.

    Attributes:
        cost: seconds of a processor for who reads them: as many as it took here.
    """

    def __init__(self, folder: Path, count: int = 4) -> None:
        now, key = time.time(), new_key()
        own = Authority.make(now).sign(Request.read(request(key)), Identity("d", "peer"), now, 3600)
        pem = ssl.DER_cert_to_PEM_cert(_ONE).encode()
        (folder / "dear.pem").write_bytes(own + pem * count)
        (folder / "dear.key").write_bytes(key)
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self._context.check_hostname, self._context.verify_mode = False, ssl.CERT_NONE
        began = time.thread_time()
        self._context.load_cert_chain(folder / "dear.pem", folder / "dear.key")
        self.cost = time.thread_time() - began

    async def call(self, sock: socket.socket) -> None:
        """Shake hands, until the other end has ended it."""
        await trio.to_thread.run_sync(self._call, sock)

    def _call(self, sock: socket.socket) -> None:
        sock.settimeout(50)
        try:
            with self._context.wrap_socket(sock) as sealed:
                sealed.recv(1)
        except ssl.SSLError:
            pass


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
