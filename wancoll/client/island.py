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

from wancoll.errors import WancollError

log = logging.getLogger("wancoll")


class Watch:
    """Calls *hook* with why the connection over *sock* is over, once it is.

    *ended*, a method of what has that connection, says why; None: this process has closed it.
    """

    def __init__(
        self, sock: socket.socket, ended: Callable[[], WancollError | None], hook: Callable[[WancollError], object]
    ) -> None:
        self._socket, self._hook, self._pid = sock.dup(), hook, os.getpid()
        self._wake, self._woken = socket.socketpair()
        of = weakref.WeakMethod(ended, lambda _: self.close())  # whoever drops it leaves
        threading.Thread(target=self._run, args=(of,), name="wancoll island", daemon=True).start()

    def _run(self, of: weakref.WeakMethod[Callable[[], WancollError | None]]) -> None:
        poll = select.poll()
        poll.register(self._socket, select.POLLRDHUP)
        poll.register(self._woken, select.POLLIN)
        with self._socket, self._woken, self._wake:
            over = any(fd == self._socket.fileno() for fd, _ in poll.poll())
        ended = of()
        if ended is None or not over or (why := ended()) is None:
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
