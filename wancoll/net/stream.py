"""A connection on trio whose sends never wait: what the kernel does not take now goes into a bounded queue.

State machines run without an await between reading state and applying commands; so their sends must not wait either.
A connection that breaks, or whose other end does not read, is no error for who sends: its reader finds out, once.
"""

from __future__ import annotations

import contextlib
import select
import socket
from collections.abc import Awaitable, Callable
from functools import partial

import trio

_READ_BYTES = 64 * 1024
_KEPT_BYTES = 256  # of what came last, to be shown should it have done harm
_LINGER = 1.0  # seconds for the other end to take what was sent before the connection closes


async def _first(others: trio.CancelScope, wait: Callable[[], Awaitable[None]]) -> None:
    await wait()
    others.cancel()


class Stream:
    """One connected stream socket, owned from here on.

    Args:
        sock: connected; made non-blocking.
        who: names the other end.
        max_bytes: that may wait for the other end; with more the connection is given up.
        max_messages: the same in messages; 0: not bounded.
    """

    def __init__(self, sock: socket.socket, who: str, max_bytes: int, max_messages: int = 0) -> None:
        sock.setblocking(False)
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket, self.who = sock, who
        self._fd = sock.fileno()
        self._max_bytes, self._max_messages = max_bytes, max_messages
        self._batch: list[bytes] = []
        self._batch_bytes = 0
        self._queue = bytearray()  # what the kernel did not take
        self._queued_messages = 0
        self._wake = trio.Event()
        self._writing: trio.Event | None = None  # set when the task that writes has stopped
        self._closed = False
        self.ending = False  # nothing is read any more
        self.overflow = False  # the other end did not read
        self.ended = ""  # why nothing is read any more, "" if it was ended here
        self.newest = b""  # the beginning of what was read last
        self._unread: list[bytes] = []  # what was looked at and left

    @property
    def queued(self) -> int:
        """Bytes that the kernel has not taken yet."""
        return len(self._queue)

    # ---- sending -------------------------------------------------------------------------------------

    def send(self, frame: bytes) -> None:
        """Send now what fits, queue the rest."""
        self.add(frame)
        self.flush_batch()

    def add(self, frame: bytes) -> None:
        """Put a frame into the batch that flush_batch() sends."""
        self._batch.append(frame)
        self._batch_bytes += len(frame)
        if self._batch_bytes > self._max_bytes:  # it is given up at once, or the kernel takes some of it
            self.flush_batch()

    def drop_batch(self) -> None:
        """Forget what add() was given since the last flush_batch()."""
        self._batch.clear()
        self._batch_bytes = 0

    def flush_batch(self) -> None:
        """Send the batch: now what fits, the rest from write_queue()."""
        frames, self._batch, self._batch_bytes = self._batch, [], 0
        if not frames or self._closed or self.overflow:
            return
        data = frames[0] if len(frames) == 1 else b"".join(frames)
        if not self._queue:
            try:
                sent = self.socket.send(data)
            except BlockingIOError:
                sent = 0
            except OSError as bad:
                self._unheard(bad)
                return
            if sent == len(data):
                return
            data = data[sent:]
        self._queue += data
        self._queued_messages += len(frames)
        if len(self._queue) > self._max_bytes or 0 < self._max_messages < self._queued_messages:
            self.overflow, self.ended = True, "it does not read what it is sent"
            self._queue.clear()
            self.end()
        self._wake.set()

    async def write_queue(self) -> None:
        """Task: send what is queued, whenever something is. Ends with close()."""
        while not self._closed:
            await self._wake.wait()
            self._wake = trio.Event()
            await self.drain()

    async def drain(self) -> None:
        """Return once the queue is empty or the connection is gone."""
        while self._queue and not self._closed:
            if self._writing is not None:  # by another task: only one may wait for a socket
                await self._writing.wait()
                continue
            self._writing = trio.Event()
            try:
                await self._write()
            finally:
                self._writing.set()
                self._writing = None
        self._queued_messages = 0

    async def _write(self) -> None:
        while self._queue and not self._closed:
            try:
                await trio.lowlevel.wait_writable(self._fd)
                sent = self.socket.send(self._queue)
            except (BlockingIOError, trio.ClosedResourceError):  # the latter by end() or close()
                continue
            except OSError as bad:
                self._queue.clear()
                self._unheard(bad)
                return
            del self._queue[:sent]

    def _unheard(self, why: OSError) -> None:
        """The other end takes nothing any more, though it may not have said so: what it has sent is the last of it."""
        self.ended = self.ended or str(why)
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RD)

    # ---- receiving -----------------------------------------------------------------------------------

    async def receive(self) -> bytes:
        """Some bytes; b"" at the end of the stream, however it came, and after end(): then *ended* says why."""
        while not self.ending and not self._closed:
            if self._unread:
                return self._unread.pop()
            try:
                await trio.lowlevel.wait_readable(self._fd)
                if self._unread:  # it comes first
                    continue
                data = self.socket.recv(_READ_BYTES)
            except (BlockingIOError, trio.ClosedResourceError):  # the latter by end() or close()
                continue
            except OSError as bad:
                self.ended = self.ended or str(bad)
                break
            if not data:
                self.ended = self.ended or "the connection was closed by the other end"
            self.newest = data[:_KEPT_BYTES]
            return data
        return b""

    def look(self) -> bytes:
        """What is there, without waiting; b"" also at the end, of which receive() tells."""
        if self.ending or self._closed or self._unread:
            return b""
        try:
            data = self.socket.recv(_READ_BYTES)
        except OSError:  # nothing, or an end
            return b""
        self.newest = data[:_KEPT_BYTES]
        return data

    def unread(self, data: bytes) -> None:
        """Who looked leaves it to who receives."""
        self._unread.append(data)
        self._wake_all()

    async def unless_hung_up(self, wait: Callable[[], Awaitable[None]]) -> bool:
        """Wait, without reading. False: the other end has gone first; what it had sent is still unread."""
        if self._closed or self.ending:
            return False
        with contextlib.closing(select.epoll()) as gone:
            gone.register(self.socket, select.EPOLLRDHUP)
            came = False
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_first, nursery.cancel_scope, partial(trio.lowlevel.wait_readable, gone.fileno()))
                await wait()
                came = True
                nursery.cancel_scope.cancel()
            return came

    # ---- the end -------------------------------------------------------------------------------------

    def end(self) -> None:
        """Read no more; what was sent may still be delivered by close_delivered()."""
        if not self.ending:
            self.ending = True
            self._wake_all()

    def close(self) -> None:
        """Close now; waiting receives return b"". Idempotent."""
        if not self._closed:
            self._closed = True
            self._queue.clear()
            self._wake.set()
            self._wake_all()
            self.socket.close()

    def _wake_all(self) -> None:
        """Who waits for the socket looks again: cheaper than a cancel scope for each receive."""
        trio.lowlevel.notify_closing(self._fd)

    async def close_delivered(self) -> None:
        """Close when the other end has read what was sent, which a reset would destroy, or after a second."""
        try:
            with trio.move_on_after(_LINGER, shield=True), contextlib.suppress(OSError, trio.ClosedResourceError):
                await self.drain()
                self.socket.shutdown(socket.SHUT_WR)
                while True:
                    await trio.lowlevel.wait_readable(self.socket)
                    if not self.socket.recv(_READ_BYTES):
                        break
        finally:
            self.close()
