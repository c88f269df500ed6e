"""Named places where a fault test can kill or stop a daemon or master. Off unless WANCOLL_FAILPOINTS gave a token."""

from __future__ import annotations

import hmac
import os
import signal
import sqlite3

# half: one member has been told and the others have not
PEER = ("on_post", "mid_op", "before_done", "half_done", "after_done", "before_commit", "after_commit", "on_epoch")
MASTER = (
    "before_commit",
    "half_commit",
    "after_commit",
    "before_epoch",
    "half_epoch",
    "after_epoch",
    "before_persist",
    "before_rotation",
    "after_rotation",
    "store_write",  # of the journal's numbers: nothing of it is there
    "store_sync",  # the same: it may be there
)
STORE = ("store_write", "store_sync")  # where "fail" is possible


class Failpoints:
    """Armed failpoints; each fires once, but for those that "fail".

    A client must show *token* to arm anything; empty: nothing can be armed.
    """

    def __init__(self, token: str) -> None:
        self._token = token
        self.armed: dict[str, str] = {}  # action by name; empty: a hot path skips hit()

    def allows(self, token: str) -> bool:
        """Whether *token* may arm."""
        return bool(self._token) and hmac.compare_digest(token.encode(), self._token.encode())

    def arm(self, name: str, action: str) -> None:
        """At the next hit of *name*: "kill" (SIGKILL) or "pause" (SIGSTOP) this process; "clear" disarms.

        "fail": raise the error of a full disk, at each hit until it is cleared.
        """
        if action == "clear":
            self.armed.pop(name, None)
        else:
            self.armed[name] = action

    @property
    def between_notes(self) -> bool:
        """Whether one is armed that strikes before or between notes: the daemon says them then, not its engine."""
        return not self.armed.keys().isdisjoint(("before_done", "half_done"))

    def hit(self, name: str) -> None:
        """The code is at *name*. Raises sqlite3.OperationalError: it is to fail."""
        action = self.armed.get(name)
        if action == "fail":
            raise sqlite3.OperationalError("database or disk is full, as a fault test wants it")
        self.armed.pop(name, None)
        if action is not None:
            os.kill(os.getpid(), signal.SIGKILL if action == "kill" else signal.SIGSTOP)
