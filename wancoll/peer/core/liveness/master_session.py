"""Master session: which master knows a member, and what another one is told. Pure.

the master that answers                     the member
is the one that knew it, and goes on with   says nothing again
the connection
is the one that knew it, and has dropped    is told so: it is out
it with the connection
is another one (its identity is drawn at    sends a Report (R7), and until Resumed, Epoch or Evicted comes nothing
each start, Welcome.master)                 else of its epoch (R12). After Resumed it says again all that the old
                                            master may not have passed on
"""

from __future__ import annotations

from collections.abc import Collection

from wancoll.peer.core import commands as cmd
from wancoll.peer.core.calls import EpochView
from wancoll.wire import messages as m

_SAID_KEPT = 1024


class MasterSession:
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

    def link_down(self, view: EpochView, other: int, kind: str, reason: str, *, sends: bool = False) -> cmd.Command:
        """Tell the master of a link that is "lost" or "unreachable"."""
        return self.say(m.LinkDown(*view.head, other, kind, reason[:4000], sends), (other, kind, sends))

    def links_up(self, view: EpochView, up: Collection[int]) -> list[cmd.Command]:
        """Take back that links for collectives were "unreachable" which are up."""
        mended = [other for other in up if self.said.pop((other, "unreachable", False), None) is not None]
        return [cmd.ToMaster(m.LinkDown(*view.head, other, "up", "")) for other in mended]
