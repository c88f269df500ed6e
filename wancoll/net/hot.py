"""Descriptors that are looked at without a round of trio, while one thing follows another within a millisecond.

A short operation wakes its daemon several times: the client calls, the engine is done, notes come, the client calls
again. A round of trio takes longer than what has to be done each time. So who was woken and expects more looks by
itself for a moment, at all descriptors that are in here. Nothing spins: it sleeps until something comes or the moment
is over. All else that trio runs waits for as long, hence the bound.
"""

from __future__ import annotations

import select
import time
from collections.abc import Callable
from typing import Any

from wancoll.errors import ProtocolError
from wancoll.net.stream import Stream
from wancoll.wire.framing import HEADER_BYTES, Decoder, decode_body

_MOMENT = 0.001  # seconds without anything until trio goes on
_LONGEST = 0.01  # seconds in a row, whatever comes


class Hot:
    """Descriptors that are polled without trio. A task woken for one serves it, and calls stay() if it expects more."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._serve: dict[int, Callable[[], bool]] = {}

    def add(self, fd: int, serve: Callable[[], bool]) -> None:
        """*serve* takes what there is to take from *fd*, without waiting, and says whether more is expected soon.

        Where it leaves something it says False: that is for the task that waits for the descriptor.
        """
        self._serve[fd] = serve
        self._epoll.register(fd, select.EPOLLIN)

    def remove(self, fd: int) -> None:
        """Nobody looks at it any more. Before it is closed."""
        if self._serve.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def stay(self) -> None:
        """Serve what comes soon."""
        until, more = time.monotonic() + _LONGEST, True
        while more and (ready := self._epoll.poll(_MOMENT)):
            for fd, _ in ready:
                serve = self._serve.get(fd)  # one that was served before it may have removed it
                more = serve is not None and serve() and more
            more = more and time.monotonic() < until

    def close(self) -> None:
        """Forget all."""
        self._serve.clear()
        self._epoll.close()


def glance(stream: Stream, decoder: Decoder[Any], kinds: Any) -> Any:
    """The message that is there, if it is one of these *kinds* and nothing else: all other is left to who receives.

    That task waits in receive(), and all that its *decoder* was fed is taken in.
    """
    data = stream.look()
    if decoder.is_one(data):
        try:
            return decode_body(data[HEADER_BYTES:], kinds)
        except ProtocolError:  # who receives finds out what it is
            pass
    if data:
        stream.unread(data)
    return None
