"""First messages that come while a master stands by: it says who leads, or keeps daemons until somebody does. Pure."""

from __future__ import annotations

from wancoll.wire import messages as m
from wancoll_master.core.ready import Received


class Lobby:
    """Who waits.

    Args:
        room: for so many; others are sent away, and come again.
    """

    def __init__(self, room: int) -> None:
        self._room = room
        self._open = False
        self._waiting: dict[int, Received] = {}
        self.answer = m.StandsBy("", 0)

    def leader_is(self, leader: str, term: int, *, wait: bool) -> list[int]:
        """Take in who leads ("": nobody) and whether that will be known soon; returns connections to send away."""
        self.answer = m.StandsBy(leader, term)
        self._open = wait and not leader
        return [] if self._open else [event.conn for event in self.empty()]

    def keeps(self, event: Received) -> bool:
        """Whether the one who said this waits; else the answer is for it."""
        known = self._waiting.pop(event.conn, None) is not None
        if known or not self._open or len(self._waiting) >= self._room or not isinstance(event.message, m.Hello):
            return False
        self._waiting[event.conn] = event
        return True

    def gone(self, conn: int) -> None:
        """The connection is over."""
        self._waiting.pop(conn, None)

    def empty(self) -> list[Received]:
        """What was said by those who wait, oldest first; nobody does any more."""
        waiting, self._waiting = list(self._waiting.values()), {}
        return waiting
