"""Tells a process that its island is lost while it may sit in a call of another library: a thread that waits for it.

There is one only where a hook was set and the island has several shards. The daemon closes the connection of a member
that is out; the thread waits for that without reading, takes in why, and calls the hook.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

from wancoll.errors import WancollError

if TYPE_CHECKING:
    from wancoll.client.connection import Connection

log = logging.getLogger("wancoll")


class Watch:
    """Calls *hook* with the error, once, when *connection* is over for another reason than close()."""

    def __init__(self, connection: Connection, sock: socket.socket, hook: Callable[[WancollError], object]) -> None:
        self._socket, self._hook, self._pid = sock.dup(), hook, os.getpid()
        self._wake, self._woken = socket.socketpair()
        weakref.finalize(connection, self.close)
        of = weakref.ref(connection)
        threading.Thread(target=self._run, args=(of,), name="wancoll island", daemon=True).start()

    def _run(self, of: weakref.ref[Connection]) -> None:
        poll = select.poll()
        poll.register(self._socket, select.POLLRDHUP)
        poll.register(self._woken, select.POLLIN)
        with self._socket, self._woken:
            over = any(fd == self._socket.fileno() for fd, _ in poll.poll())
        connection = of()
        if connection is None or not over or (why := connection.ended()) is None:
            return
        try:
            self._hook(why)
        except Exception:
            log.exception("the hook for the loss of an island failed")

    def close(self) -> None:
        """End the thread; in a forked child, which has none, let go of the connection."""
        with contextlib.suppress(OSError):
            self._wake.close()
            if os.getpid() != self._pid:
                self._socket.close()
                self._woken.close()
