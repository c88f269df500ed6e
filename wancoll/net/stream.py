"""A connection on trio whose sends never wait: what the kernel does not take now goes into a bounded queue.

State machines run without an await between reading state and applying commands; so their sends must not wait either.
A connection that breaks, or whose other end does not read, is no error for who sends: its reader finds out, once.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import trio

from wancoll.net.threads import in_thread
from wancoll.net.tls import Tls, TlsFailed

_READ_BYTES = 64 * 1024
_CLOSED = "the connection was closed by the other end"
_KEPT_BYTES = 256  # of what came last, to be shown should it have done harm
LINGER = 1.0  # seconds for the other end to take what was sent before the connection closes


async def _first(others: trio.CancelScope, wait: Callable[[], Awaitable[None]]) -> None:
    await wait()
    others.cancel()


def round_trip(sock: Any) -> float:
    """Seconds over the path of a TCP socket, as the kernel has measured them; 0: not known."""
    with contextlib.suppress(OSError, struct.error):
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)
        return float(struct.unpack_from("=I", info, 68)[0]) * 1e-6  # linux/tcp.h: tcpi_rtt
    return 0.0


class Queues:
    """What waits in many streams for their other ends: beyond *max_bytes* the one with most is given up."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.bytes = 0
        self._of: dict[Stream, int] = {}  # those with any

    def holds(self, stream: Stream, queued: int) -> None:
        """Note that *queued* bytes wait in *stream* now."""
        self.bytes += queued - self._of.pop(stream, 0)
        if queued:
            self._of[stream] = queued
        while self.bytes > self._max_bytes:
            max(self._of, key=lambda one: self._of[one]).give_up()


class Stream:
    """One connected stream socket, owned from here on, to *who*.

    With more than *max_bytes*, or *max_messages* (0: not bounded), that wait for the other end it is given up; *queues*
    bounds it together with others'. *tls* seals what is sent and opens what comes, once shake_hands() has returned;
    None: all is in clear. What begins with the byte *foreign* is not for here: it is left unread, as if all had ended.
    """

    def __init__(
        self,
        sock: socket.socket,
        who: str,
        max_bytes: int,
        max_messages: int = 0,
        tls: Tls | None = None,
        queues: Queues | None = None,
        foreign: bytes = b"",
    ) -> None:
        sock.setblocking(False)
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket, self.who, self.tls = sock, who, tls
        self._fd = sock.fileno()
        self._max_bytes, self._max_messages = max_bytes, max_messages
        self._batch: list[bytes] = []
        self._batch_bytes = 0
        self._queue = bytearray()  # what the kernel did not take
        self._queued_messages = 0
        self._queues = queues
        self._wake = trio.Event()
        self._writing: trio.Event | None = None  # set when the task that writes has stopped
        self._closed = False
        self._foreign = foreign  # b"" from the first byte on
        self.is_foreign = False
        self.ending = False  # nothing is read any more
        self.overflow = False  # the other end did not read
        self.ended = ""  # why nothing is read any more, "" if it was ended here
        self.newest = b""  # the beginning of what was read last
        self._early = b""  # what came right behind the handshake

    @property
    def queued(self) -> int:
        """Bytes that the kernel has not taken yet."""
        return len(self._queue)

    # ---- sending -------------------------------------------------------------------------------------

    def send(self, frame: bytes) -> None:
        """Send now what fits, queue the rest."""
        if self._batch or self.tls is not None:
            self.add(frame)
            self.flush_batch()
        else:
            self._send(frame, 1)

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
        self._send(data if self.tls is None else self.tls.seal(data), len(frames))

    def _send(self, data: bytes, frames: int = 0) -> None:
        """To the kernel, or into the queue."""
        if not data or self._closed or self.overflow:
            return
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
        self._queued_messages += frames
        if len(self._queue) > self._max_bytes or 0 < self._max_messages < self._queued_messages:
            self.give_up()
        self._count()
        self._wake.set()

    def give_up(self) -> None:
        """It is sent nothing any more: what waits for it is too much."""
        self.overflow, self.ended = True, "it does not read what it is sent"
        self._queue.clear()
        self._count()
        self.end()

    def _count(self) -> None:
        if self._queues is not None:
            self._queues.holds(self, len(self._queue))

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
                self._count()
                self._unheard(bad)
                return
            del self._queue[:sent]
            self._count()

    def _unheard(self, why: OSError) -> None:
        """The other end takes nothing any more, though it may not have said so: what it has sent is the last of it."""
        self.ended = self.ended or str(why)
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RD)

    async def shake_hands(self) -> None:
        """TLS's handshake, before anything else is sent or received.

        A dialler reads a certificate, which may take long: in a thread. What has begun there ends there, also for who
        is cancelled.

        Raises:
            TlsFailed: the other end is not who it should be, or does not let this one in, or went away.
        """
        tls = self.tls
        if tls is None:
            return
        if not tls.listens:  # who dials begins
            tls.shake(b"")
            self._send(tls.outgoing())
        while not self._gone():
            data = await self._read()
            if data == b"":
                break
            if data is None:
                continue
            try:
                if tls.listens:
                    tls.shake(data)
                else:
                    await in_thread(tls.shake, data)
            except OSError as bad:
                raise TlsFailed(str(bad)) from bad
            finally:
                self._send(tls.outgoing())  # an alert, too
            if tls.done:
                self._early = self._opened(b"")
                return
        if self.is_foreign:
            return
        raise TlsFailed(f"{self.ended or 'it ended here'}, in the middle of TLS's handshake")

    # ---- receiving -----------------------------------------------------------------------------------

    async def receive(self) -> bytes:
        """Some bytes; b"" at the end of the stream, however it came, and after end(): then *ended* says why."""
        while not self._gone():
            if self._early:
                early, self._early = self._early, b""
                return early
            if self.tls is not None and self.tls.over:  # what comes after a goodbye is not read
                self.ended = self.ended or _CLOSED
                return b""
            if self.tls is not None and self.tls.more:
                await trio.lowlevel.checkpoint()  # the others' turn
                came: bytes | None = b""
            elif (came := await self._read()) == b"":
                self.newest = b""
                return b""
            if came is None or self._gone():
                continue
            if data := self._opened(came):
                self.newest = data[:_KEPT_BYTES]
                return data
        return b""

    def _gone(self) -> bool:
        return self.ending or self._closed or self.is_foreign

    async def _read(self) -> bytes | None:
        """What is in the socket, b"" at its end; None: look again."""
        try:
            await trio.lowlevel.wait_readable(self._fd)
            if self._foreign:
                self.is_foreign, self._foreign = self.socket.recv(1, socket.MSG_PEEK) == self._foreign, b""
            data = b"" if self.is_foreign else self.socket.recv(_READ_BYTES)
        except (BlockingIOError, trio.ClosedResourceError):  # the latter by end() or close()
            return None
        except OSError as bad:
            self.ended = self.ended or str(bad)
            return b""
        if not data:
            self.ended = self.ended or _CLOSED
        return data

    def _opened(self, data: bytes) -> bytes:
        """What sealed *data* holds; what cannot be opened ends it all."""
        if self.tls is None:
            return data
        try:
            return self.tls.open(data)
        except TlsFailed as bad:
            self.ended = self.ended or str(bad)
            self.end()
            return b""
        finally:
            self._send(self.tls.outgoing())

    async def unless_hung_up(self, wait: Callable[[], Awaitable[None]]) -> bool:
        """Wait, without reading. False: the other end has gone first; what it had sent is still unread."""
        if self._gone():
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
            self._count()
            self._wake.set()
            self._wake_all()
            self.socket.close()

    def _wake_all(self) -> None:
        """Wake all tasks that wait for the socket: cheaper than a cancel scope for each receive."""
        trio.lowlevel.notify_closing(self._fd)

    def hand_over(self) -> Any:
        """Its socket for trio, of which nothing was opened yet, by a descriptor of its own; this one is closed.

        Raises OSError: there is none left.
        """
        sock = trio.socket.from_stdlib_socket(socket.socket(fileno=os.dup(self._fd)))
        self.ending = True
        self.close()
        return sock

    async def close_delivered(self, *, shield: bool = True) -> None:
        """Close when the other end has read what was sent, which a reset would destroy, or after a second.

        *shield*: not even who cancels it hurries it.
        """
        try:
            with trio.move_on_after(LINGER, shield=shield), contextlib.suppress(OSError, trio.ClosedResourceError):
                if self.tls is not None:
                    self._send(self.tls.goodbye())
                await self.drain()
                self.socket.shutdown(socket.SHUT_WR)
                while True:
                    await trio.lowlevel.wait_readable(self.socket)
                    if not self.socket.recv(_READ_BYTES):
                        break
        finally:
            self.close()
