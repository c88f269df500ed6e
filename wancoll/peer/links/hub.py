"""Links of this daemon's members: dialled or accepted, kept over epochs, redialled when they break.

Both ends of a ring edge know from the epoch that they need a link: the younger member dials. Other links are raised for
the first op that needs them, which one end may reach long before the other: it dials, whichever it is. Where both dial
at once the younger's connections stay.

Sends and recvs have links of their own, another channel of the pair, since only those two members know of them.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Collection

import structlog
import trio

from wancoll.engine import Engine
from wancoll.errors import ProtocolError
from wancoll.limits import PROTOCOL_VERSION
from wancoll.net.dial import DialFailed, dial, read_frame
from wancoll.net.listen import Handshakes
from wancoll.peer.config import PeerConfig
from wancoll.peer.core.stalls import LaneLook
from wancoll.peer.links.lanes import greet, tune
from wancoll.peer.links.member_links import COLLECTIVES, Link, MemberLinks, wire_plan
from wancoll.peer.watch.measure import OpenLink, answer_probe, kernel_view
from wancoll.wire import messages as m
from wancoll.wire.framing import encode

log = structlog.get_logger("wancoll.links")


class LinkHub:
    """All links of the daemon: one listener, one engine.

    Args:
        engine: moves the bytes.
        config: lanes, congestion control, limits.
        daemon: this daemon's id.
        nursery: owns the tasks that raise links.
    """

    def __init__(self, engine: Engine, config: PeerConfig, daemon: str, nursery: trio.Nursery) -> None:
        self.engine, self._config, self._limits, self._daemon = engine, config, config.limits, daemon
        self._nursery = nursery
        self._members: list[MemberLinks] = []
        self._by_engine_id: dict[int, Link] = {}
        self._next_engine_id = 1
        self._handshakes = Handshakes(config.limits.pending_connections, config.limits.handshake_timeout)
        self._cut: set[str] = set()  # daemons cut off by fault injection
        self._change = trio.Event()

    def member(
        self,
        on_ready: Callable[[int, set[int]], None],
        on_p2p: Callable[[set[int]], None],
        on_lost: Callable[[int, int, str], None],
        on_unreachable: Callable[[int, str], None],
    ) -> MemberLinks:
        """Links for a new member."""
        links = MemberLinks(self, on_ready, on_p2p, on_lost, on_unreachable)
        self._members.append(links)
        return links

    def forget(self, links: MemberLinks) -> None:
        """The member is gone."""
        if links in self._members:
            self._members.remove(links)

    def note_change(self) -> None:
        """Wake handshakes that wait for an epoch."""
        self._change.set()
        self._change = trio.Event()

    def open_links(self) -> list[OpenLink]:
        """Those in the engine, for measurements."""
        return [
            OpenLink(number, link.other.daemon, link.other.addresses, link.owner.epoch.plan.lanes)
            for number, link in self._by_engine_id.items()
            if link.up and link.owner.epoch is not None
        ]

    def counts(self) -> dict[str, int]:
        """Links in the engine, their lanes (two descriptors each), and tasks that raise or accept some."""
        links = self._by_engine_id.values()
        raising = sum(link.scope is not None for owner in self._members for link in owner.links.values())
        return {
            "links": len(links),
            "lanes": sum(len(link.attached) for link in links),
            "raising": raising,
            "handshakes": len(self._handshakes),
        }

    def looks(self) -> dict[int, dict[int, LaneLook]]:
        """The lanes of all links that are up, by engine id, as the engine and the kernel see them."""
        return {number: self._lane_looks(number, link) for number, link in self._by_engine_id.items() if link.up}

    def _lane_looks(self, number: int, link: Link) -> dict[int, LaneLook]:
        found = {}
        for lane in link.attached:
            counts = self.engine.statistics(number, lane)
            if counts is not None:
                info = kernel_view(link.sockets[lane]) if lane in link.sockets else None
                found[lane] = LaneLook(counts.bytes_received, counts.bytes_sent, counts.parked, info)
        return found

    # ---- state of a link -----------------------------------------------------------------------------

    def raise_link(self, link: Link) -> None:
        """See that the link comes up; a task does it, if none does yet."""
        if not link.up and not link.closed and link.scope is None:
            link.scope = trio.CancelScope()
            self._nursery.start_soon(self._raise, link, link.scope)

    def close(self, link: Link) -> None:
        """Take the link down for good."""
        link.closed = True
        if link.scope is not None:
            link.scope.cancel()
        self._drop_connections(link)
        link.owner.links.pop(link.key, None)

    def _drop_connections(self, link: Link) -> None:
        if link.engine_id:
            self._by_engine_id.pop(link.engine_id, None)
            self.engine.close_link(link.engine_id)
        if link.up:
            link.changed_at = trio.current_time()
        link.engine_id, link.up = 0, False
        link.attached.clear()
        for watched in link.sockets.values():
            watched.close()
        link.sockets.clear()
        link.changed.set()
        link.changed = trio.Event()

    def lane_down(self, engine_id: int, lane: int, reason: str) -> None:
        """The engine lost a lane: the whole link starts anew, since what was on the lane is lost."""
        link = self._by_engine_id.get(engine_id)
        if link is not None:
            self._lose(link, f"lane {lane} to {link.other.name}: {reason}")

    def lose(self, engine_id: int, reason: str) -> None:
        """The link is of no use any more, though the kernel may not know it: make it anew."""
        link = self._by_engine_id.get(engine_id)
        if link is not None:
            self._lose(link, reason)

    def redial(self, links: MemberLinks, others: Collection[int], older: float, reason: str) -> None:
        """Make the member's links to *others* (mids; empty: all) anew that are up for longer than *older* seconds."""
        for link in list(links.links.values()):
            known = not others or link.other.mid in others
            if link.up and known and trio.current_time() - link.changed_at > older:
                self._lose(link, f"{link.other.name} has let go of it: {reason}")

    def _lose(self, link: Link, reason: str) -> None:
        was_up = link.up
        self._drop_connections(link)
        link.reason = reason
        log.info("link lost", other=link.other.name, reason=reason, was_up=was_up)
        if was_up and not link.closed:
            link.owner.needed.discard(link.key)  # an op that still needs it says so
            link.owner.on_lost(link.other.mid, link.channel, reason)
        if link.wanted:
            self.raise_link(link)

    def _open(self, link: Link, *, mine: bool) -> None:
        assert link.owner.epoch is not None
        self._drop_connections(link)
        link.engine_id, self._next_engine_id = self._next_engine_id, self._next_engine_id + 1
        link.mine = mine
        self._by_engine_id[link.engine_id] = link
        plan = link.owner.epoch.plan
        self.engine.open_link(link.engine_id, plan.lanes, link.owner.epoch.epoch, plan.tracks)
        if plan.pacing:
            self.engine.pace_link(link.engine_id, plan.pacing)

    def _attach(self, link: Link, lane: int, stream: trio.SocketStream) -> None:
        assert link.owner.epoch is not None
        plan = link.owner.epoch.plan
        tune(stream.socket, self._config.congestion_control, self._limits, plan.congestion)
        fd = stream.socket.detach()
        with contextlib.suppress(OSError):  # no descriptor left: the lane works, but is not watched
            link.sockets[lane] = socket.socket(fileno=os.dup(fd))
        self.engine.attach_lane(link.engine_id, lane, fd)
        link.attached.add(lane)
        if len(link.attached) == plan.lanes:
            link.up, link.changed_at = True, trio.current_time()
            link.changed.set()
            link.changed = trio.Event()
            if link.channel == COLLECTIVES:
                link.owner.check_ready()
            else:
                link.owner.check_p2p()

    # ---- dialling ------------------------------------------------------------------------------------

    async def _raise(self, link: Link, scope: trio.CancelScope) -> None:
        limits = self._limits
        since = trio.current_time()
        pause = limits.redial_interval
        with scope:
            while not link.up and link.wanted:
                dials = (link.dials or not link.agreed) and not link.accepting
                reason = await (self._dial(link) if dials else self._await_dial(link))
                if not reason:
                    break
                link.reason = reason
                late = trio.current_time() - since >= limits.link_timeout and link.needed
                if late and (link.dials or link.agreed):  # else the younger end may succeed where this one does not
                    log.warning("link unreachable", other=link.other.name, reason=reason)
                    link.owner.on_unreachable(link.other.mid, reason)
                    since = trio.current_time()
                if dials:
                    await trio.sleep(pause)
                    pause = min(2 * pause, 1.0)
        if link.scope is scope:
            link.scope = None
        if not link.up and link.wanted:
            self.raise_link(link)  # lost again while this task was ending

    async def _await_dial(self, link: Link) -> str:
        with trio.move_on_after(self._limits.link_timeout / 4):
            await link.changed.wait()
        return "" if link.up else f"{link.other.name}, whose turn it is, has not dialled yet"

    async def _dial(self, link: Link) -> str:
        """One try to bring up all lanes; returns why it failed."""
        epoch = link.owner.epoch
        assert epoch is not None
        if link.other.daemon in self._cut:
            return "cut by fault injection"
        self._open(link, mine=True)
        link.dialled += 1
        engine_id = link.engine_id
        reasons: list[str] = []
        async with trio.open_nursery() as nursery:
            for lane in range(epoch.plan.lanes):
                ends = link.owner.mid, link.other.mid
                what = link.channel, wire_plan(epoch)
                hello = m.LaneHello(PROTOCOL_VERSION, epoch.group, epoch.key, *ends, *what, lane, link.dialled)
                nursery.start_soon(self._dial_lane, link, engine_id, hello, reasons)
        if link.up:
            return ""
        if link.engine_id == engine_id:
            self._drop_connections(link)
        return reasons[0] if reasons else "the link broke while it was being made"

    async def _dial_lane(self, link: Link, engine_id: int, hello: m.LaneHello, reasons: list[str]) -> None:
        try:
            with trio.fail_after(self._limits.connect_timeout):
                stream = await dial(link.other.addresses, self._limits.connect_timeout)
                found = await self._greet_or_close(stream, hello, f"{link.other.name} at {link.other.addresses[0]}")
        except DialFailed as bad:
            reasons.append(str(bad))
        except trio.TooSlowError:
            reasons.append(f"{link.other.addresses[0]}: no answer within {self._limits.connect_timeout:.1f} s")
        else:
            if found != link.other.daemon:
                stream.socket.close()
                reasons.append(f"{link.other.addresses[0]}: expected daemon {link.other.daemon}, got {found}")
            elif link.engine_id != engine_id or link.closed:
                stream.socket.close()
            else:
                self._attach(link, hello.lane, stream)

    async def _greet_or_close(self, stream: trio.SocketStream, hello: m.LaneHello, who: str) -> str:
        try:
            return await greet(stream, hello, who)
        except BaseException:
            stream.socket.close()
            raise

    # ---- accepting -----------------------------------------------------------------------------------

    async def accept(self, stream: trio.SocketStream) -> None:
        """Handler of the data port: whatever arrives, the daemon stays up."""
        try:
            who = str(stream.socket.getpeername()[0])
        except OSError:
            who = "somebody"
        try:
            with self._handshakes.one() as scope:
                await self._handshake(stream, who)
            if scope.cancelled_caught:
                log.info("lane handshake timed out", who=who)
        except (ProtocolError, DialFailed, OSError, trio.BrokenResourceError, trio.ClosedResourceError) as bad:
            log.info("lane handshake failed", who=who, reason=str(bad))
        finally:
            stream.socket.close()  # a no-op where the engine took it

    async def _handshake(self, stream: trio.SocketStream, who: str) -> None:
        first = await read_frame(stream.socket, m.LaneFirst, who=who)
        if first.protocol != PROTOCOL_VERSION:
            reason = f"protocol {first.protocol} here is {PROTOCOL_VERSION}: run the same wancoll version everywhere"
            await stream.send_all(encode(m.LaneRefused(reason)))
            return
        if isinstance(first, m.ProbeHello):
            await answer_probe(stream, first, self._daemon, who)
            return
        refusal = "the member or epoch is not known here"
        owner = None
        with trio.move_on_after(self._limits.handshake_timeout / 2):
            while True:  # the dialler may have learnt of the epoch before this daemon
                changed = self._change
                owner = self._owner(first)
                if owner is not None:
                    break
                await changed.wait()
        if owner is not None:
            refusal = self._admit(owner, first)
        if owner is None or refusal:
            await stream.send_all(encode(m.LaneRefused(refusal)))
            return
        link = owner.links[first.sender, first.channel]
        engine_id = link.engine_id
        await stream.send_all(encode(m.LaneWelcome(self._daemon)))
        if link.engine_id == engine_id and not link.closed:
            self._attach(link, first.lane, stream)

    def _owner(self, hello: m.LaneHello) -> MemberLinks | None:
        for links in self._members:
            epoch = links.epoch
            if epoch is None or (links.mid, epoch.group, epoch.key) != (hello.receiver, hello.group, hello.key):
                continue
            if hello.plan == wire_plan(epoch) and any(member.mid == hello.sender for member in epoch.members):
                return links
        return None

    def _admit(self, owner: MemberLinks, hello: m.LaneHello) -> str:
        """Make the link ready for this lane; returns why not."""
        epoch = owner.epoch
        assert epoch is not None
        other = next(member for member in epoch.members if member.mid == hello.sender)
        if other.daemon in self._cut:
            return "cut by fault injection"
        if hello.lane >= epoch.plan.lanes:
            return f"lane {hello.lane} of {epoch.plan.lanes}"
        link = owner.link(other.mid, hello.channel)
        if link.dials and link.mine and link.engine_id:
            return "both ends dial: the younger's connections stay"
        awaited = link.accepting and hello.generation == link.accepted and hello.lane not in link.attached
        if hello.generation <= link.accepted and not awaited:
            return f"generation {hello.generation} is over, {link.accepted} is the latest"
        if not awaited:
            if link.up:
                self._lose(link, f"{other.name} dialled anew")
            self._open(link, mine=False)
            link.accepted = hello.generation
        return ""

    # ---- fault injection -----------------------------------------------------------------------------

    def cut(self, daemon: str) -> None:
        """Break every link to *daemon* and keep them down until heal()."""
        self._cut.add(daemon)
        for link in list(self._by_engine_id.values()):
            if link.other.daemon == daemon:
                self._lose(link, "cut by fault injection")

    def heal(self, daemon: str) -> None:
        """Let the links to *daemon* come back."""
        self._cut.discard(daemon)
