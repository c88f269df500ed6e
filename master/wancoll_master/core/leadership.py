"""Which master leads: until when one with a lease may (R10), and who waits where nobody does. Pure.

The lease's keeper counts from when it hears of a renewal, the leader from when it sent for it: whatever the network
does, the leader stops first. Both clocks must run equally fast but for SAFETY.
"""

from __future__ import annotations

from math import inf

from wancoll.wire import messages as m
from wancoll_master.core.paths import announced
from wancoll_master.core.ready import Received

SAFETY = 0.1  # share of the lease that is not used
RENEWALS_PER_TTL = 3


class Leadership:
    """One lease of one leader, asked for at *sent_at*; a renewal holds *ttl* seconds, as the keeper granted it."""

    def __init__(self, ttl: float, sent_at: float) -> None:
        self.ttl = ttl
        self.until = sent_at + ttl * (1 - SAFETY)
        self._sent_at = sent_at

    def renewed(self, ttl: float, sent_at: float) -> None:
        """The renewal that was sent for at *sent_at* was granted. A late answer counts for little."""
        self.ttl = ttl
        self.until = max(self.until, sent_at + ttl * (1 - SAFETY))
        self._sent_at = max(self._sent_at, sent_at)

    def over(self) -> None:
        """It is lost, or given back."""
        self.until = -inf

    def holds(self, now: float) -> bool:
        """Whether it may lead *now*."""
        return now < self.until

    @property
    def renew_at(self) -> float:
        """When to renew next, if nothing has failed."""
        return self._sent_at + self.ttl / RENEWALS_PER_TTL


class StandbyResponder:
    """First messages that come while a master stands by: it says who leads, or keeps daemons until somebody does.

    There is *room* for so many; others are sent away, and come again.
    """

    def __init__(self, room: int) -> None:
        self._room = room
        self._open = False
        self._waiting: dict[int, Received] = {}
        self.answer = m.StandsBy("", 0)

    def leader_is(self, answer: m.StandsBy, *, wait: bool) -> list[int]:
        """Take in who leads ("": nobody) and whether that will be known soon; returns connections to send away."""
        self.answer = answer
        self._open = wait and not answer.leader
        return [] if self._open else [event.conn for event in self.empty()]

    def keeps(self, event: Received) -> bool:
        """Whether the one who said this waits; else the answer is for it."""
        known = self._waiting.pop(event.conn, None) is not None
        if known or not self._open or len(self._waiting) >= self._room or not isinstance(event.message, m.Hello):
            return False
        if any(map(announced.is_name, event.message.addresses)):  # a name is looked up for those who are known alone
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
