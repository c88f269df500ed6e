"""One accepted control connection: sends that never wait, a bounded queue, and an end that delivers what was sent."""

from __future__ import annotations

import socket

import trio

_READ_BYTES = 64 * 1024
_LINGER = 1.0  # seconds for the other end to take what was sent before the connection closes


class Connection:
    """A stream socket, owned from here on.

    Args:
        number: names the connection in membership's events; never used again.
        sock: connected; made non-blocking.
        max_messages: unsent messages before the connection is given up.
        max_bytes: the same in bytes.
    """

    def __init__(self, number: int, sock: socket.socket, max_messages: int, max_bytes: int) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.number = number
        self._socket = sock
        self._max_messages, self._max_bytes = max_messages, max_bytes
        self._queue = bytearray()  # what the kernel did not take
        self._queued_messages = 0
        self._batch: list[bytes] = []
        self._wake = trio.Event()
        self._reading = trio.CancelScope()
        self.ending = False  # nothing is read any more
        self.overflow = False

    def add(self, frame: bytes) -> None:
        """Put a frame into the batch that flush_batch() sends."""
        self._batch.append(frame)

    def drop_batch(self) -> None:
        """Forget what add() was given since the last flush_batch()."""
        self._batch.clear()

    def flush_batch(self) -> None:
        """Send the batch: now what fits, the rest from the writer's task. A broken connection shows in receive()."""
        frames, self._batch = self._batch, []
        if not frames:
            return
        data = frames[0] if len(frames) == 1 else b"".join(frames)
        if not self._queue:
            try:
                sent = self._socket.send(data)
            except BlockingIOError:
                sent = 0
            except OSError:
                return
            if sent == len(data):
                return
            data = data[sent:]
        self._queue += data
        self._queued_messages += len(frames)
        if self._queued_messages > self._max_messages or len(self._queue) > self._max_bytes:
            self.overflow = True
            self._queue.clear()
            self.end()
        self._wake.set()

    def end(self) -> None:
        """Stop reading; run() of the server then finishes the connection."""
        self.ending = True
        self._reading.cancel()

    async def receive(self) -> bytes:
        """Some bytes; b"" after end().

        Raises:
            OSError: the connection broke; with no text where it was closed in order.
        """
        with trio.CancelScope() as self._reading:
            while not self.ending:
                await trio.lowlevel.wait_readable(self._socket)
                try:
                    data = self._socket.recv(_READ_BYTES)
                except BlockingIOError:
                    continue
                if not data:
                    raise ConnectionError("the connection was closed by the other end")
                return data
        return b""

    async def write_queue(self) -> None:
        """Task: send what is queued, whenever something is."""
        while True:
            await self._wake.wait()
            self._wake = trio.Event()
            await self._drain()

    async def _drain(self) -> None:
        while self._queue:
            await trio.lowlevel.wait_writable(self._socket)
            try:
                sent = self._socket.send(self._queue)
            except BlockingIOError:
                continue
            except OSError:
                self._queue.clear()
                return
            del self._queue[:sent]
        self._queued_messages = 0

    async def close(self, *, deliver: bool) -> None:
        """Close; with *deliver* the other end has a bounded time to read what was sent (a reset would destroy it)."""
        try:
            if deliver:
                with trio.move_on_after(_LINGER, shield=True):
                    await self._drain()
                    self._socket.shutdown(socket.SHUT_WR)
                    while True:
                        await trio.lowlevel.wait_readable(self._socket)
                        if not self._socket.recv(_READ_BYTES):
                            break
        except OSError:
            pass
        finally:
            trio.lowlevel.notify_closing(self._socket)
            self._socket.close()
