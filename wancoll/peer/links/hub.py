"""The links of this daemon's members: what core/links.py decides, carried out with sockets and the engine."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from math import inf
from typing import NamedTuple

import structlog
import trio
from msgspec.structs import replace

from wancoll.engine import Engine
from wancoll.errors import ConfigError, ProtocolError
from wancoll.limits import PROTOCOL_VERSION
from wancoll.net.contain import contained
from wancoll.net.dial import DialFailed, dial, read_frame
from wancoll.net.hot import Hot
from wancoll.net.listen import Handshakes
from wancoll.peer.config import PeerConfig
from wancoll.peer.core import links as core
from wancoll.peer.core.links import Link, Links, MemberLinks
from wancoll.peer.core.stalls import LaneLook, look_again
from wancoll.peer.core.tcpinfo import TcpInfo
from wancoll.peer.links.lanes import greet, kernel_view, tune
from wancoll.peer.links.probes import answer_probe
from wancoll.wire import messages as m
from wancoll.wire.framing import encode

log = structlog.get_logger("wancoll.links")

_REFUSALS = (ConfigError, MemoryError, OSError)


@dataclass(slots=True)
class _Answer:
    """To one that knocked."""

    command: core.Welcome | core.Refuse | None = None
    came: trio.Event = field(default_factory=trio.Event)


class WatchedLink(NamedTuple):
    """A link whose lanes are in the engine.

    Args:
        engine_id: never used again.
        daemon: at the other end.
        addresses: of that daemon.
        lanes: how many there are.
        pacing: the plan's pace of a lane, bytes per second; 0: none.
    """

    engine_id: int
    daemon: str
    addresses: list[str]
    lanes: int
    pacing: int = 0


class LinkHub:
    """All links of the daemon: one listener, one engine.

    Args:
        engine: moves the bytes.
        config: lanes, congestion control, limits.
        daemon: this daemon's id.
        nursery: owns the tasks that dial.
    """

    def __init__(self, engine: Engine, config: PeerConfig, daemon: str, nursery: trio.Nursery) -> None:
        self._engine, self._config, self._limits, self._daemon = engine, config, config.limits, daemon
        self._nursery = nursery
        self._core = Links(config.limits)
        self._tell: dict[MemberLinks, Callable[[core.Told], None]] = {}
        self._dials: dict[int, trio.CancelScope] = {}  # by the link's number
        self._watched: dict[int, dict[int, socket.socket]] = {}  # by number and lane: to look at what the engine owns
        self._looks: dict[int, dict[int, LaneLook]] = {}  # the newest ones
        self._handshakes = Handshakes(config.limits.pending_connections, config.limits.handshake_timeout)
        self._answers: dict[int, _Answer] = {}  # by knock
        self._knocks = count(1)
        self._due, self._earlier = inf, trio.Event()

    def member(self, tell: Callable[[core.Told], None]) -> MemberLinks:
        """Links for a new member, which is told by *tell*."""
        links = self._core.member()
        self._tell[links] = tell
        return links

    # ---- facts ---------------------------------------------------------------------------------------

    def _up(self) -> dict[int, Link]:
        return {number: link for number, link in self._core.open().items() if link.up}

    def open_links(self) -> list[WatchedLink]:
        """Those in the engine, for measurements."""
        return [
            WatchedLink(number, link.other.daemon, link.other.addresses, epoch.plan.lanes, epoch.plan.pacing)
            for number, link in self._up().items()
            if (epoch := link.owner.epoch) is not None
        ]

    def counts(self) -> dict[str, int]:
        """Links in the engine, their lanes (two descriptors each), and tasks that raise or accept some."""
        links = self._core.open().values()
        return {
            "links": len(links),
            "lanes": sum(len(link.attached) for link in links),
            "raising": len(self._dials),
            "handshakes": len(self._handshakes),
        }

    def looks(self) -> dict[int, dict[int, LaneLook]]:
        """The lanes of all links that are up, by number, as the engine and the kernel see them."""
        self._looks = {number: self._lane_looks(number, link) for number, link in self._up().items()}
        return self._looks

    def _lane_looks(self, number: int, link: Link) -> dict[int, LaneLook]:
        found, watched, before = {}, self._watched[number], self._looks.get(number, {})
        for lane in link.attached:
            counts = self._engine.statistics(number, lane)
            if counts is not None:
                moved = counts.bytes_received, counts.bytes_sent, counts.parked
                found[lane] = look_again(before.get(lane), *moved, partial(_view, watched.get(lane)))
        return found

    # ---- the core ------------------------------------------------------------------------------------

    def step(self, event: core.Event) -> None:
        """Let the core know, and do what it says, without waiting."""
        for command in self._core.step(event, trio.current_time()):
            self._carry_out(command)
        if isinstance(event, core.Leave):
            self._tell.pop(event.owner, None)
        if self._core.deadline() < self._due:
            self._earlier.set()

    async def keep_time(self) -> None:
        """Task: tell the core when its time has come."""
        while True:
            self._due, self._earlier = self._core.deadline(), trio.Event()
            with trio.move_on_at(self._due):
                await self._earlier.wait()
            self.step(core.Tick())

    def _carry_out(self, command: core.Command) -> None:
        match command:
            case core.OpenLink(number, epoch, plan):
                self._watched[number] = {}
                with self._or_broken(number):
                    self._engine.open_link(number, plan.lanes, epoch, plan.tracks)
                    if plan.pacing:
                        self._engine.pace_link(number, plan.pacing)
            case core.MoveLink(number, epoch, pacing):
                with self._or_broken(number):
                    self._engine.set_epoch(number, epoch)
                    if pacing is not None:
                        self._engine.pace_link(number, pacing)
            case core.CloseLink(number):
                if number in self._dials:
                    self._dials.pop(number).cancel()
                with contextlib.suppress(ConfigError):  # the engine had refused to open it
                    self._engine.close_link(number)
                for watched in self._watched.pop(number).values():
                    watched.close()
            case core.Dial():
                self._dials[command.number] = trio.CancelScope()
                self._nursery.start_soon(self._dial, command, self._dials[command.number])
            case core.Welcome(knock) | core.Refuse(knock):
                self._answers[knock].command = command
                self._answers[knock].came.set()
            case core.LinksUp() | core.P2PUp() | core.LinkLost() | core.LinkUnreachable():
                if not isinstance(command, core.LinksUp | core.P2PUp):
                    log.info(type(command).__name__, other=command.other.name, reason=command.reason)
                if tell := self._tell.get(command.owner):
                    tell(command)

    @contextlib.contextmanager
    def _or_broken(self, number: int) -> Iterator[None]:
        """What the engine refuses breaks the link, once the commands that are under way are carried out."""
        try:
            yield
        except _REFUSALS as bad:
            log.error("the engine refuses a link", reason=repr(bad))
            self._break_soon(number, f"the engine refuses it: {bad!r}")

    def _break_soon(self, number: int, reason: str) -> None:
        trio.lowlevel.current_trio_token().run_sync_soon(self.step, core.Broken(number, reason))

    # ---- notes ---------------------------------------------------------------------------------------

    def send_note(self, owner: MemberLinks, mid: int, note: bytes) -> None:
        """Send the note to member *mid*, unless the link to it is not up."""
        link = owner.links.get((mid, core.COLLECTIVES))
        if link is not None and link.up and not self._engine.send_note(link.number, note):
            self._break_soon(link.number, f"{link.other.name} takes no notes")

    async def watch_notes(self, hot: Hot) -> None:
        """Task: hand notes to the members that they are for."""
        hot.add(self._engine.notes_fd, self._take_notes)
        while True:
            await trio.lowlevel.wait_readable(self._engine.notes_fd)
            if self._take_notes():
                hot.stay()

    def _take_notes(self) -> bool:
        for one in self._engine.notes():
            link = self._core.open().get(one.link)
            if link is not None and (tell := self._tell.get(link.owner)):
                tell(core.Noted(link.owner, link.other.mid, one.note))
        return True

    def lane_down(self, number: int, lane: int, reason: str) -> None:
        """The engine lost a lane."""
        link = self._core.open().get(number)
        if link is not None:
            self.step(core.Broken(number, f"lane {lane} to {link.other.name}: {reason}"))

    def _hand_over(self, number: int, lane: int, stream: trio.SocketStream, checksums: bool) -> None:
        """Give the connection to the engine, if it is still of use; the socket is ours no more."""
        link = self._core.open().get(number)
        if link is None or link.owner.epoch is None or not self._core.awaits(number, lane):
            stream.socket.close()
            return
        try:
            tune(stream.socket, self._config.congestion_control, self._limits, link.owner.epoch.plan.congestion)
        except OSError as bad:  # it is broken already
            stream.socket.close()
            self.lane_down(number, lane, str(bad))
            return
        fd = stream.socket.detach()
        with contextlib.suppress(OSError):  # no descriptor left: the lane works, but is not watched
            self._watched[number][lane] = socket.socket(fileno=os.dup(fd))
        try:
            self._engine.attach_lane(number, lane, fd, checksums)
        except _REFUSALS as bad:
            self.lane_down(number, lane, f"the engine refuses it: {bad!r}")
        else:
            self.step(core.Attached(number, lane))

    # ---- dialling ------------------------------------------------------------------------------------

    async def _dial(self, what: core.Dial, scope: trio.CancelScope) -> None:
        broken = partial(core.Broken, what.number)
        with scope, contained("a dial", partial(str, what.other), lambda why: self.step(broken(why))):
            async with trio.open_nursery() as nursery:
                for hello in what.hellos:
                    nursery.start_soon(self._dial_lane, what, hello)
        self._dials.pop(what.number, None)

    async def _dial_lane(self, what: core.Dial, hello: m.LaneHello) -> None:
        other, limit = what.other, self._limits.connect_timeout
        try:
            with trio.fail_after(limit):
                stream = await dial(other.addresses, limit)
                hello = replace(hello, checksums=self._config.checksum)
                answer = await _greet_or_close(stream, hello, f"{other.name} at {other.addresses[0]}")
        except DialFailed as bad:
            self.step(core.Broken(what.number, str(bad)))
        except trio.TooSlowError:
            self.step(core.Broken(what.number, f"{other.addresses[0]}: no answer within {limit:.1f} s"))
        else:
            if answer.daemon == other.daemon:
                self._hand_over(what.number, hello.lane, stream, answer.checksums)
            else:
                stream.socket.close()
                reason = f"{other.addresses[0]}: expected daemon {other.daemon}, got {answer.daemon}"
                self.step(core.Broken(what.number, reason))

    # ---- accepting -----------------------------------------------------------------------------------

    async def accept(self, stream: trio.SocketStream) -> None:
        """Handler of the data port: whatever arrives, the daemon stays up."""
        try:
            who = str(stream.socket.getpeername()[0])
        except OSError:
            who = "somebody"
        try:
            known = DialFailed, ProtocolError, OSError, trio.BrokenResourceError, trio.ClosedResourceError
            with self._handshakes.one() as scope, contained("the data port", lambda: who, expected=known):
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
        elif isinstance(first, m.ProbeHello):
            await answer_probe(stream, first, self._daemon, who)
        else:
            await self._knock(stream, first, who)

    async def _knock(self, stream: trio.SocketStream, hello: m.LaneHello, who: str) -> None:
        knock = next(self._knocks)
        answer = self._answers[knock] = _Answer()
        try:
            self.step(core.Knock(knock, hello))
            await answer.came.wait()
            match answer.command:
                case core.Refuse(_, reason):
                    await stream.send_all(encode(m.LaneRefused(reason)))
                case core.Welcome(_, number, lane):
                    checksums = hello.checksums or self._config.checksum
                    await stream.send_all(encode(m.LaneWelcome(self._daemon, checksums)))
                    self._hand_over(number, lane, stream, checksums)
        except BaseException:
            if isinstance(answer.command, core.Welcome):  # nobody would notice: the engine has no lane to lose
                self.step(core.Broken(answer.command.number, f"{who} went away during the handshake"))
            raise
        finally:
            del self._answers[knock]
            self.step(core.Gone(knock))


def _view(sock: socket.socket | None) -> TcpInfo | None:
    return None if sock is None else kernel_view(sock)


async def _greet_or_close(stream: trio.SocketStream, hello: m.LaneHello, who: str) -> m.LaneWelcome:
    try:
        return await greet(stream, hello, who)
    except BaseException:
        stream.socket.close()
        raise
