"""How a member stands with the master: who knows it, and what a master that was started anew is told. Pure.

A master's identity is drawn at each start (Welcome.master). To the one that it knew a member has nothing to say after
a reconnect: that one has dropped it with the connection, and says so. Another one gets a Report (R7), and until it
answers with Resumed, Epoch or Evicted the member says nothing else of its epoch (R12): the answer tells whether the
epoch goes on. If it does, all is said again that the old master may have taken to its grave.
"""

from __future__ import annotations

from wancoll.peer.core import commands as cmd
from wancoll.peer.core.calls import Seat
from wancoll.wire import messages as m

_SAID_KEPT = 1024


class Standing:
    """What the master knows of this member, and what is to be reported again."""

    def __init__(self) -> None:
        self.connection = 0  # the control connection on which a master took the member in, or was reported to
        self.master = 0  # identity of the master that knows this member
        self.reporting = False  # a new master was told what is known here; its answer is still to come
        self.said: dict[object, m.FromPeer] = {}  # in this epoch, of what stops it; by what it is about
        self._reported_to = 0

    def joined(self, connection: int, master: int) -> None:
        """The *master* has taken the member in, on the *connection*-th control connection."""
        self.connection, self.master = connection, master

    def reported(self, connection: int, master: int) -> None:
        """A *master* that does not know the member gets a Report."""
        self.reporting, self.connection, self._reported_to = True, connection, master

    def known(self) -> None:
        """The master that was reported to has answered."""
        if self.reporting:
            self.reporting, self.master = False, self._reported_to

    def say(self, message: m.FromPeer, about: object = None) -> cmd.Command:
        """Tell the master something that stops the epoch; a new master is told, too, the newest *about* anything."""
        about = len(self.said) if about is None else about
        if about in self.said or len(self.said) < _SAID_KEPT:
            self.said[about] = message
        return cmd.ToMaster(message)

    def link_down(self, seat: Seat, other: int, kind: str, reason: str, *, sends: bool = False) -> cmd.Command:
        """Tell the master of a link that is "lost" or "unreachable"."""
        return self.say(m.LinkDown(*seat.head, other, kind, reason[:4000], sends), (other, kind, sends))
