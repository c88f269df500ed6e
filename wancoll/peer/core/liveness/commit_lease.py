"""Commit lease: how long members may commit by themselves since a master last heard their daemon (C8). Pure.

The lease begins when a word that the master has answered was *sent*: the answer may have lain in the socket while the
daemon slept. It lasts heartbeat_timeout and master_grace; then the group may have formed anew without these members.
Times are of one clock, which goes on while the machine sleeps.
"""

from __future__ import annotations

from collections import deque


class CommitLease:
    """The lease of this daemon's members. Begins as if a master had answered at *now*, seconds."""

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
        """Whether the lease has ended: the group's name may belong to others."""
        return now >= self.ends(heartbeat_timeout, master_grace)

    def ends(self, heartbeat_timeout: float, master_grace: float) -> float:
        """When it ends, unless a master answers before."""
        return self._at + heartbeat_timeout + master_grace
