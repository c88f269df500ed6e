"""How long no master may have heard a daemon: since it *sent* the newest word that a master has answered (C8). Pure.

An answer may have lain in the socket while the daemon slept, so when it is read says nothing. Times are of one clock,
which goes on while the machine sleeps.
"""

from __future__ import annotations

from collections import deque


class Vouching:
    """How long no master may have heard this daemon. Begins as if a master had answered at *now*, seconds."""

    def __init__(self, now: float) -> None:
        self._at = now
        self._asked: deque[tuple[int, float]] = deque()  # heartbeats that are not answered, and when they were sent

    def said_hello(self, now: float) -> None:
        """On a new connection: what was said on an older one is never answered."""
        self._asked = deque([(0, now)])

    def said(self, number: int, now: float) -> None:
        """A heartbeat; numbers rise."""
        self._asked.append((number, now))

    def answered(self, number: int = 0) -> None:
        """The master has heard this heartbeat, and those before it; 0: the Hello."""
        while self._asked and self._asked[0][0] <= number:
            self._at = self._asked.popleft()[1]

    def unheard(self, now: float) -> float:
        """Seconds since the newest word was sent that a master has answered."""
        return now - self._at

    def is_over(self, now: float, heartbeat_timeout: float, master_grace: float) -> bool:
        """Whether a group may have formed anew under the name of members that commit by themselves."""
        return self.unheard(now) >= heartbeat_timeout + master_grace
