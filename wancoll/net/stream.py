"""A non-blocking socket on trio whose sends never wait: what the kernel does not take now goes into a bounded queue.

The daemon's state machines run without an await between reading state and applying commands; so their
sends must not wait either.
"""

from __future__ import annotations

import socket

import trio

from wancoll.errors import ProtocolError

_READ_BYTES = 16 * 1024


class NowaitStream:
    """One connected stream socket, owned from here on.

    Args:
        sock: connected; made non-blocking.
        max_queued: bytes that may wait for the other end; more raises ProtocolError.
        who: names the other end in errors.
    """

    def __init__(self, sock: socket.socket, max_queued: int, who: str) -> None:
        sock.setblocking(False)
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket, self.who = sock, who
        self._max_queued = max_queued
        self._queue = bytearray()
        self._wake = trio.Event()
        self._closed = False

    @property
    def queued(self) -> int:
        """Bytes that the kernel has not taken yet."""
        return len(self._queue)

    def send_nowait(self, data: bytes) -> None:
        """Send now what fits, queue the rest. A broken connection is not an error here: the reader finds out.

        Raises:
            ProtocolError: the other end does not read and the queue is full.
        """
        if self._closed:
            return
        if not self._queue:
            try:
                sent = self.socket.send(data)
            except BlockingIOError:
                sent = 0
            except OSError:
                return
            if sent == len(data):
                return
            data = data[sent:]
        if len(self._queue) + len(data) > self._max_queued:
            raise ProtocolError(
                "does not read what it is sent", who=self.who, expected=f"at most {self._max_queued} bytes waiting"
            )
        self._queue += data
        self._wake.set()

    async def flush_forever(self) -> None:
        """Task: push out the queue whenever there is one. Ends with the connection."""
        while not self._closed:
            await self._wake.wait()
            self._wake = trio.Event()
            await self.flush()

    async def flush(self) -> None:
        """Return once the queue is empty or the connection is gone."""
        while self._queue and not self._closed:
            try:
                await trio.lowlevel.wait_writable(self.socket)
                sent = self.socket.send(self._queue)
            except BlockingIOError:
                continue
            except (OSError, trio.ClosedResourceError):
                return
            del self._queue[:sent]

    async def receive(self) -> bytes:
        """Some bytes; b"" at the end of the stream, however it ended."""
        while True:
            try:
                await trio.lowlevel.wait_readable(self.socket)
                return self.socket.recv(_READ_BYTES)
            except BlockingIOError:
                continue
            except (OSError, trio.ClosedResourceError):
                return b""

    def close(self) -> None:
        """Close now; waiting receives return b"". Idempotent."""
        if not self._closed:
            self._closed = True
            self._wake.set()
            trio.lowlevel.notify_closing(self.socket)
            self.socket.close()
