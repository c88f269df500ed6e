"""Messages over the blocking unix socket to the daemon, such that a signal (Ctrl-C) can neither lose nor tear one.

Python runs signal handlers between bytecodes, never inside one call into C. `list.extend(map(recv, ...))` is one such
call: bytes that were taken from the socket are in the list before an exception can be raised.
"""

from __future__ import annotations

import contextlib
import select
import socket
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from wancoll.client.ring import CallRing
from wancoll.errors import PeerDaemonLost
from wancoll.wire import messages as m
from wancoll.wire.framing import HEADER_BYTES, body_length, decode_body

if TYPE_CHECKING:
    from wancoll.client.work import Work

_READ_BYTES = 64 * 1024


class Channel:
    """One connected, blocking socket, and the call ring beside it, owned from here on.

    One thread at a time may receive, one may send.
    """

    def __init__(self, sock: socket.socket, who: str, max_bytes: int, ring: CallRing) -> None:
        self.socket, self.who, self.ring = sock, who, ring
        self._poll = select.poll()
        for fd in (sock.fileno(), ring.socket.fileno()):
            self._poll.register(fd, select.POLLIN)
        self._max = max_bytes
        self._fd, self._recv, self._send = sock.fileno(), sock.recv, sock.send
        self._chunks: list[bytes] = []  # received, not handled yet

    def send(self, data: bytes, sent: list[int]) -> None:
        """Send a whole frame or nothing. *sent* has an item afterwards if it went out, whatever is raised.

        Raises:
            BlockingIOError: the socket is full.
            OSError: the connection is gone.
        """
        # A small frame fits into one socket buffer, which the kernel takes as a whole or refuses.
        sent.extend(map(self._send, (data,), (socket.MSG_DONTWAIT,)))

    def receive(self, handle: Callable[[Any], None], timeout: float | None, pending: Mapping[int, Work]) -> None:
        """Call *handle* with each message, until one was handled or the time is over (None: no limit; 0: no wait).

        *handle* may see a message a second time if it was interrupted by an exception. *pending*: the calls that wait
        for an answer, by number.

        Raises:
            PeerDaemonLost: the connection is gone.
            ProtocolError: the daemon sent something else than messages.
        """
        if self.ring.answers(handle, pending) or (self._chunks and self._handle(handle)):
            return
        # A recv that blocks is also woken when the daemon reads what was sent, for nothing: poll is not.
        ready = self._poll.poll(None if timeout is None else max(0.0, timeout) * 1000)
        if any(fd != self._fd for fd, _ in ready):
            self.ring.drain()
            if self.ring.answers(handle, pending):
                return
        try:
            self._chunks.extend(map(self._recv, (_READ_BYTES,), (socket.MSG_DONTWAIT,)))
        except BlockingIOError:
            return
        except OSError as bad:
            raise self._lost(str(bad)) from bad
        if not self._chunks[-1]:
            raise self._lost("it closed the connection")
        self.ring.answers(handle, pending)  # first: they were there before what the daemon says now
        self._handle(handle)

    def wait_ready(self, timeout: float | None) -> None:
        """Return when something can be sent or received, or the time is over."""
        poll = select.poll()
        poll.register(self.socket, select.POLLIN | select.POLLOUT)
        poll.register(self.ring.socket, select.POLLIN)
        poll.poll(None if timeout is None else max(0.0, timeout) * 1000)

    def shutdown(self) -> None:
        """Wake whoever receives."""
        with contextlib.suppress(OSError):  # not connected any more
            self.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the sockets. Nobody may be receiving."""
        self.socket.close()
        self.ring.close()

    def _handle(self, handle: Callable[[Any], None]) -> bool:
        chunks = self._chunks
        data = chunks[0] if len(chunks) == 1 else b"".join(chunks)
        at, size = 0, len(data)
        while size - at >= HEADER_BYTES:
            body = at + HEADER_BYTES
            end = body + body_length(data[at:body], self._max, who=self.who)
            if end > size:
                break
            message = decode_body(data[body:end], m.FromDaemon, who=self.who)
            handle(message)
            at = end
        chunks[:] = (data[at:],) if at < size else ()
        return at > 0

    def _lost(self, how: str) -> PeerDaemonLost:
        return PeerDaemonLost(
            "the connection to the peer daemon is gone",
            who=self.who,
            got=how,
            hint="see the daemon's log; start it again with `wancoll peer` and connect again to rejoin as a new member",
        )
