"""A member's links: which it has, which its epoch and ops need, and what to tell the member of them."""

from __future__ import annotations

import socket
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import trio

from wancoll.wire import messages as m

if TYPE_CHECKING:
    from wancoll.peer.links.hub import LinkHub

COLLECTIVES, P2P = 0, 1  # channels


@dataclass(slots=True, eq=False)
class Link:
    """One pair of members, seen from the member *owner* on this daemon.

    Args:
        owner: the links of the member here.
        other: the member there.
        channel: what it is for.
    """

    owner: MemberLinks
    other: m.MemberInfo
    channel: int
    engine_id: int = 0  # 0: nothing open in the engine
    mine: bool = False  # the open connections were dialled from here
    dialled: int = 0  # sets of connections dialled from here so far
    accepted: int = 0  # the newest set dialled from there, by its count
    attached: set[int] = field(default_factory=set)
    up: bool = False
    closed: bool = False
    scope: trio.CancelScope | None = None  # of the task that raises it
    changed: trio.Event = field(default_factory=trio.Event)
    sockets: dict[int, socket.socket] = field(default_factory=dict)  # to look at lanes that the engine owns
    changed_at: float = field(default_factory=trio.current_time)  # since when it is up, or not
    reason: str = ""  # why it is not up

    @property
    def dials(self) -> bool:
        """Whether this is the younger member."""
        return self.owner.mid > self.other.mid

    @property
    def accepting(self) -> bool:
        """Whether the other end's connections are coming in."""
        return self.engine_id != 0 and not self.mine and not self.up

    @property
    def key(self) -> tuple[int, int]:
        """Its name among the owner's links."""
        return self.other.mid, self.channel

    @property
    def wanted(self) -> bool:
        """Whether it is to be up."""
        return not self.closed and (self.needed or self.spare)

    @property
    def needed(self) -> bool:
        """Whether something waits for it or would be lost with it."""
        return self.neighbour or self.key in self.owner.needed

    @property
    def neighbour(self) -> bool:
        """Whether both ends know from the epoch alone that they need it."""
        return self.channel == COLLECTIVES and self.other.mid in self.owner.neighbours

    @property
    def spare(self) -> bool:
        """Whether it is kept up for after a loss."""
        return self.channel == COLLECTIVES and self.other.mid in self.owner.spares

    @property
    def agreed(self) -> bool:
        """Whether both ends learn at the same time that they want it: then the younger dials and the other waits."""
        return self.neighbour or self.spare or self.channel == P2P


class MemberLinks:
    """The links of one member of this daemon.

    Args:
        hub: the daemon's links.
        on_ready: called with the epoch and the mids whose links are up, once all neighbours' are, and again when
            another one comes up.
        on_p2p: called with the mids whose links for sends and recvs are up when one has come up.
        on_lost: called with (mid, channel, reason) when a link broke.
        on_unreachable: called with (mid, reason) when one could not be raised within link_timeout.
    """

    def __init__(
        self,
        hub: LinkHub,
        on_ready: Callable[[int, set[int]], None],
        on_p2p: Callable[[set[int]], None],
        on_lost: Callable[[int, int, str], None],
        on_unreachable: Callable[[int, str], None],
    ) -> None:
        self._hub = hub
        self.on_ready, self.on_p2p = on_ready, on_p2p
        self.on_lost, self.on_unreachable = on_lost, on_unreachable
        self.mid = 0
        self.epoch: m.Epoch | None = None
        self.links: dict[tuple[int, int], Link] = {}  # by the other's mid and the channel
        self.neighbours: frozenset[int] = frozenset()
        self.spares: frozenset[int] = frozenset()
        self.needed: set[tuple[int, int]] = set()  # further links that this epoch's ops need
        self._present: dict[int, m.MemberInfo] = {}

    def enter(self, epoch: m.Epoch, neighbours: frozenset[int], spares: frozenset[int] = frozenset()) -> None:
        """Go to *epoch*: drop former members' links, tell the engine, raise those to *neighbours*, *spares* (mids)."""
        rebuild = self.epoch is not None and wire_plan(self.epoch) != wire_plan(epoch)
        paced = self.epoch is not None and self.epoch.plan.pacing != epoch.plan.pacing
        self.mid, self.epoch, self.neighbours, self.spares = epoch.to, epoch, neighbours, spares
        self.needed.clear()
        self._present = {member.mid: member for member in epoch.members}
        for link in list(self.links.values()):
            if link.other.mid not in self._present or rebuild:
                self._hub.close(link)
            elif link.engine_id:
                self._hub.engine.set_epoch(link.engine_id, epoch.epoch)
                if paced:
                    self._hub.engine.pace_link(link.engine_id, epoch.plan.pacing)
        for mid in sorted(neighbours) + sorted(spares):
            self._hub.raise_link(self.link(mid, COLLECTIVES))
        self._hub.note_change()
        self.check_ready()

    def need(self, mids: Iterable[int], channel: int = COLLECTIVES) -> None:
        """Raise the links to *mids*, which an op needs."""
        for mid in sorted(mids):
            self.needed.add((mid, channel))
            self._hub.raise_link(self.link(mid, channel))
        if channel == P2P:  # some may be up already: by the other end, or since an older epoch
            self.check_p2p()

    def link(self, mid: int, channel: int) -> Link:
        """The link to *mid*, made now if there was none."""
        key = mid, channel
        if key not in self.links:
            self.links[key] = Link(self, self._present[mid], channel)
        return self.links[key]

    def check_ready(self) -> None:
        """Tell the member which links are up, if every neighbour's is."""
        up = {mid for (mid, channel), link in self.links.items() if link.up and channel == COLLECTIVES}
        if self.epoch is not None and self.neighbours <= up:
            self.on_ready(self.epoch.epoch, up)

    def check_p2p(self) -> None:
        """Tell the member which links for sends and recvs are up."""
        up = {mid for (mid, channel), link in self.links.items() if link.up and channel == P2P}
        if self.epoch is not None and up:
            self.on_p2p(up)

    def engine_ids(self) -> dict[int, int]:
        """Map rank to engine link id, for the collectives' links that are up."""
        assert self.epoch is not None
        ranks = {member.mid: rank for rank, member in enumerate(self.epoch.members)}
        links = (link for link in self.links.values() if link.up and link.channel == COLLECTIVES)
        return {ranks[link.other.mid]: link.engine_id for link in links}

    def close(self) -> None:
        """Close all links; nothing is called back any more."""
        self.epoch, self.neighbours, self.spares = None, frozenset(), frozenset()
        self.needed.clear()
        for link in list(self.links.values()):
            self._hub.close(link)
        self._hub.forget(self)


def wire_plan(epoch: m.Epoch) -> int:
    """Stands for what connections are made with; they are made anew where it changes."""
    plan = epoch.plan
    return zlib.crc32(repr((plan.lanes, plan.tracks, plan.congestion)).encode())
