"""Messages over the blocking unix socket to the daemon, such that a signal (Ctrl-C) can neither lose nor tear one.

Python runs signal handlers between bytecodes, never inside one call into C. `list.extend(map(recv, ...))` is one such
call: bytes that were taken from the socket are in the list before an exception can be raised.
"""

from __future__ import annotations

import contextlib
import select
import socket
from collections.abc import Callable
from typing import Any

from wancoll.errors import PeerDaemonLost
from wancoll.wire import messages as m
from wancoll.wire.framing import HEADER_BYTES, body_length, decode_body

_READ_BYTES = 64 * 1024


class Channel:
    """One connected, blocking socket, owned from here on. One thread at a time may receive, one may send."""

    def __init__(self, sock: socket.socket, who: str, max_bytes: int) -> None:
        self.socket, self.who = sock, who
        self._max = max_bytes
        self._recv, self._send = sock.recv, sock.send
        self._chunks: list[bytes] = []  # received, not handled yet

    def send(self, data: bytes, sent: list[int]) -> None:
        """Send a whole frame or nothing. *sent* has an item afterwards if it went out, whatever is raised.

        Raises:
            BlockingIOError: the socket is full.
            OSError: the connection is gone.
        """
        # A small frame fits into one socket buffer, which the kernel takes as a whole or refuses.
        sent.extend(map(self._send, (data,), (socket.MSG_DONTWAIT,)))

    def receive(self, handle: Callable[[Any], None], timeout: float | None) -> None:
        """Call *handle* with each message, until one was handled or the time is over (None: no limit; 0: no wait).

        *handle* may see a message a second time if it was interrupted by an exception.

        Raises:
            PeerDaemonLost: the connection is gone.
            ProtocolError: the daemon sent something else than messages.
        """
        if self._chunks and self._handle(handle):
            return
        if timeout is None or timeout > 0:
            # A recv that blocks is also woken when the daemon reads what was sent, for nothing: poll is not.
            self._wait(select.POLLIN, timeout)
        try:
            self._chunks.extend(map(self._recv, (_READ_BYTES,), (socket.MSG_DONTWAIT,)))
        except BlockingIOError:
            return
        except OSError as bad:
            raise self._lost(str(bad)) from bad
        if not self._chunks[-1]:
            raise self._lost("it closed the connection")
        self._handle(handle)

    def wait_ready(self, timeout: float | None) -> None:
        """Return when something can be sent or received, or the time is over."""
        self._wait(select.POLLIN | select.POLLOUT, timeout)

    def _wait(self, events: int, timeout: float | None) -> None:
        poll = select.poll()
        poll.register(self.socket, events)
        poll.poll(None if timeout is None else max(0.0, timeout) * 1000)

    def shutdown(self) -> None:
        """Wake whoever receives."""
        with contextlib.suppress(OSError):  # not connected any more
            self.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket. Nobody may be receiving."""
        self.socket.close()

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
