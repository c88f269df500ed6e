"""The links of this daemon's members: what core/links.py decides, carried out with sockets and the engine."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from math import inf
from typing import NamedTuple

import structlog
import trio
from msgspec.structs import replace

from wancoll.errors import ConfigError, ProtocolError
from wancoll.limits import PROTOCOL_VERSION
from wancoll.local import hosts_of
from wancoll.native.engine import Engine, LaneDown, LaneStatistics
from wancoll.net.contain import contained
from wancoll.net.dial import DialFailed
from wancoll.net.listen import Handshakes, Sparing, whose, why_ended
from wancoll.net.wallet import Wallet
from wancoll.peer.config import PeerConfig
from wancoll.peer.core import links as core
from wancoll.peer.core.links import Link, Links, MemberLinks
from wancoll.peer.core.liveness.stalls import LaneLook, look_again
from wancoll.peer.core.paths.tcpinfo import TcpInfo
from wancoll.peer.links.beside import Memory, half_of
from wancoll.peer.links.connections import Connection, Connector, Queued, Watched, WatchedSocket
from wancoll.peer.links.lanes import SetIsOver, greet, tune
from wancoll.peer.links.probes import answer_probe
from wancoll.peer.links.traffic import Now, Traffic
from wancoll.peer.links.uplinks import Dialled, bring_home
from wancoll.relay.switch import Switch
from wancoll.wire import messages as m

log = structlog.get_logger("wancoll.links")

_REFUSALS = (ConfigError, MemoryError, OSError)


@dataclass(slots=True)
class _Answer:
    """To one that knocked."""

    admit: Callable[[], None]  # to be called once it is welcome, when strangers put it out no more
    command: core.Welcome | core.Refuse | None = None
    came: trio.Event = field(default_factory=trio.Event)


class WatchedLink(NamedTuple):
    """A link whose lanes are in the engine."""

    engine_id: int  # never used again
    daemon: str  # at the other end
    addresses: list[str]  # of that daemon
    lanes: int
    pacing: int = 0  # the plan's pace of a lane, bytes per second; 0: none
    relayed: bool = False  # by the plan: its lanes' round trips are those to a relay


class LinkHub:
    """All links of the daemon: one listener, one engine. *nursery* owns the tasks that dial.

    *wallet*: what the daemon proves itself with; None: lanes are in clear.
    """

    def __init__(
        self,
        engine: Engine,
        config: PeerConfig,
        daemon: str,
        nursery: trio.Nursery,
        wallet: Wallet | None = None,
    ) -> None:
        self._engine, self._config, self._limits, self._daemon = engine, config, config.limits, daemon
        self._nursery, self.connector = nursery, Connector(wallet, near_only=config.near_only, uplinks=config.uplink)
        self._core = Links(config.limits)
        self._tell: dict[MemberLinks, Callable[[core.Told], None]] = {}
        self._dials: dict[int, set[trio.CancelScope]] = {}  # by the link's number
        self._watched: dict[int, dict[int, Watched]] = {}  # by number and lane: to look at what the engine owns
        self._looks: dict[int, dict[int, LaneLook]] = {}  # the newest ones
        limits = config.limits
        self._handshakes = Handshakes.of_port(limits, sealed=wallet is not None)
        self._strangers = Sparing()
        self._answers: dict[int, _Answer] = {}  # by knock
        self._knocks = count(1)
        self._due, self._earlier = inf, trio.Event()
        self.switch = Switch(limits, config.carries) if config.relay else None
        self.traffic: Traffic | None = None  # for metrics, where they are told
        self._leads_to: dict[int, str] = {}  # by number: the daemon at the other end

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
            WatchedLink(
                number, link.other.daemon, link.other.addresses, epoch.plan.lanes, epoch.plan.pacing, link.relayed
            )
            for number, link in self._up().items()
            if (epoch := link.owner.epoch) is not None
        ]

    def counts(self) -> dict[str, int]:
        """Links in the engine, their lanes (two descriptors each), those through memory; tasks that raise or accept."""
        links = self._core.open().values()
        watched = [one for lanes in self._watched.values() for one in lanes.values()]
        return {
            "links": len(links),
            "lanes": sum(len(link.attached) for link in links),
            "lanes_in_memory": sum(isinstance(one, Memory) for one in watched),
            "raising": len(self._dials),
            "handshakes": len(self._handshakes),
            "strangers_refused": self._strangers.count,
        }

    def numbers(self) -> list[int]:
        """Numbers of all links that are open."""
        return list(self._watched)

    def look_at(self, number: int) -> tuple[str, Now] | None:
        """For metrics: the daemon that link *number* leads to, and how it is now; None: it is closed."""
        daemon, watched = self._leads_to.get(number), self._watched.get(number)
        if self.traffic is None or daemon is None or watched is None:
            return None
        counts = {lane: self._engine.statistics(number, lane) for lane in watched}
        lanes = ((found, _seen(watched[lane], found)) for lane, found in counts.items())
        return daemon, self.traffic.look(number, daemon, lanes)

    def ends_of(self, number: int, lane: int) -> tuple[tuple[str, str] | None, int]:
        """The addresses at both ends of a lane over TCP, and which of its connections this is; None, 0: it is none."""
        found = self._socket(number, lane)
        return (found.ends, found.nth) if found is not None else (None, 0)

    def pace(self, number: int, lane: int, rate: int) -> None:
        """Let this lane send at most *rate* bytes per second, until it is dialled again or the plan changes."""
        if (found := self._socket(number, lane)) is not None:
            found.pace(rate)

    def _socket(self, number: int, lane: int) -> WatchedSocket | None:
        found = self._watched.get(number, {}).get(lane)
        return found if isinstance(found, WatchedSocket) else None

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
                found[lane] = look_again(before.get(lane), *moved, partial(_seen, watched.get(lane), counts))
        return found

    # ---- the core ------------------------------------------------------------------------------------

    def step(self, event: core.Event) -> None:
        """Let the core know, and do what it says, without waiting."""
        self._run(self._core.step(event, trio.current_time()))

    def ask(self, owner: core.MemberLinks, wish: core.Wish) -> None:
        """Do for a member what the core says to its *wish*, without waiting."""
        self._run(self._core.ask(owner, wish, trio.current_time()))
        if isinstance(wish, core.Leave):
            self._tell.pop(owner, None)

    def _run(self, commands: list[core.Command]) -> None:
        for command in commands:
            self._carry_out(command)
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
            case core.OpenLink(number, stamp, plan):
                self._watched[number] = {}
                if (link := self._core.open().get(number)) is not None:
                    self._leads_to[number] = link.other.daemon
                with self._or_broken(number):
                    self._engine.open_link(number, plan.lanes, stamp, plan.lane_groups)
                    if plan.pacing:
                        self._engine.pace_link(number, plan.pacing)
            case core.MoveLink(number, stamp, pacing):
                with self._or_broken(number):
                    self._engine.set_epoch(number, stamp)
                    if pacing is not None:
                        self._engine.pace_link(number, pacing)
            case core.CloseLink(number):
                for scope in self._dials.pop(number, ()):
                    scope.cancel()
                if self.look_at(number) is not None and self.traffic is not None:
                    self.traffic.closed(number)
                self._leads_to.pop(number, None)
                with contextlib.suppress(ConfigError):  # the engine had refused to open it
                    self._engine.close_link(number)
                for watched in self._watched.pop(number).values():
                    watched.close()
            case core.Dial():
                scope = trio.CancelScope()
                self._dials.setdefault(command.number, set()).add(scope)
                self._nursery.start_soon(self._dial, command, scope)
            case core.Welcome(knock) | core.Refuse(knock):
                self._answers[knock].command = command
                if isinstance(command, core.Welcome):
                    self._answers[knock].admit()
                self._answers[knock].came.set()
            case told:
                if isinstance(told, core.LinkBroken | core.LinkLost | core.LinkUnreachable):
                    log.info(type(told).__name__, other=told.other.name, reason=told.reason)
                if tell := self._tell.get(told.owner):
                    tell(told)

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

    async def keep_uplinks(self) -> None:
        """Task: see uplinks.bring_home."""

        def dialled() -> Iterator[Dialled]:
            for number, link in self._up().items():
                for lane, watched in self._watched[number].items():
                    if link.ours and isinstance(watched, WatchedSocket):
                        theirs = link.connections.get(lane, 1) % 2 == 0
                        yield number, link.other.addresses, lane, watched, theirs

        if len(self._config.uplink) > 1:
            await bring_home(self.connector, dialled)

    # ---- notes ---------------------------------------------------------------------------------------

    def send_note(self, owner: MemberLinks, mid: int, note: bytes) -> None:
        """Send the note to member *mid*, unless the link to it is not up."""
        link = owner.links.get((mid, core.COLLECTIVES))
        if link is not None and link.up and not self._engine.send_note(link.number, note):
            self._break_soon(link.number, f"{link.other.name} takes no notes")

    async def watch_notes(self, take_events: Callable[[], object], settle: Callable[[], None]) -> None:
        """Task: hand notes to the members that they are for; *take_events* does so with the engine's events.

        *settle* is called when all that came is handed over.
        """
        while True:
            await trio.lowlevel.wait_readable(self._engine.notes_fd)
            notes = self._engine.notes()
            take_events()  # first: what is finished here and said by the engine may be committed by what comes back
            for one in notes:
                link = self._core.open().get(one.link)
                if link is None or link.channel != core.COLLECTIVES:
                    continue  # what those for sends and recvs say is the engine's own
                if tell := self._tell.get(link.owner):
                    tell(core.Noted(link.owner, link.other.mid, one.note))
            settle()

    def lane_down(self, event: LaneDown) -> None:
        """The engine lost a lane."""
        link = self._core.open().get(event.link)
        if link is None:
            return
        reason = f"lane {event.lane} to {link.other.name}: {event.text}"
        if not event.goes_on:
            self.step(core.Broken(event.link, reason))
            return
        log.info("LaneLost", other=link.other.name, reason=reason)
        if event.connection == link.connections.get(event.lane, 1):
            self._watch(event.link, event.lane, None)
        self.step(core.LaneLost(event.link, event.lane, event.connection, reason))

    def cut_lane(self, number: int, lane: int, reason: str) -> bool:
        """End this lane's connection: it is dialled again (R17). False: it is none over TCP."""
        found = self._socket(number, lane)
        if found is not None:
            log.info("lane is cut", lane=lane, reason=reason)
            found.cut()
        return found is not None

    def _watch(self, number: int, lane: int, watched: Watched | None) -> None:
        before = self._watched[number].pop(lane, None)
        if before is not None:
            before.close()
        if watched is not None:
            self._watched[number][lane] = watched

    def _hand_over(self, number: int, hello: m.LaneHello, connection: Connection, checksums: bool) -> None:
        """Give the connection to the engine, if it is still of use; the socket is ours no more."""
        lane, nth = hello.lane, hello.connection
        link = self._core.open().get(number)
        if link is None or link.owner.epoch is None or not self._core.awaits(number, lane, nth):
            connection.close()
            return
        try:
            tune(connection.socket, self._config.congestion_control, self._limits, link.owner.epoch.plan.congestion)
        except OSError as bad:  # it is broken already
            connection.close()
            self.step(core.NotAttached(number, lane, f"lane {lane} to {link.other.name}: {bad}", nth))
            return
        try:
            watched = connection.attach(self._engine, number, lane, nth, checksums)
        except _REFUSALS as bad:
            reason = f"lane {lane} to {link.other.name}: the engine refuses it: {bad!r}"
            self.step(core.NotAttached(number, lane, reason, nth))
        else:
            self._watch(number, lane, watched)  # None: no descriptor was left: the lane works, but is not watched
            self.step(core.Attached(number, lane))

    # ---- on one machine ------------------------------------------------------------------------------

    def _is_near(self, number: int) -> bool:
        """Whether the link leads to a host of this daemon's own addresses, and may go through memory."""
        link = self._core.open().get(number)
        if link is None or link.owner.epoch is None or not self._config.shared_memory:
            return False
        own = next(member for member in link.owner.epoch.members if member.mid == link.owner.mid)
        return not hosts_of(own.addresses).isdisjoint(hosts_of(link.other.addresses))

    def _half(self, number: int, lane: int) -> int:
        """Bytes that the ends of a lane share each way, if they share memory; 0: it is for notes."""
        link = self._core.open().get(number)
        if link is None or link.owner.epoch is None:
            return 0
        epoch = link.owner.epoch
        return half_of(epoch.plan.lanes, len(epoch.members)) if lane < epoch.plan.lanes else 0

    # ---- dialling ------------------------------------------------------------------------------------

    async def _dial(self, what: core.Dial, scope: trio.CancelScope) -> None:
        broken = partial(core.Broken, what.number)
        # The scope within: what is left of a group in which a lane was cancelled, too, is a bug of its own.
        with contained("a dial", partial(str, what.other), lambda why: self.step(broken(why))), scope:
            async with trio.open_nursery() as nursery:
                for hello in what.hellos:
                    nursery.start_soon(self._dial_lane, what, hello)
        if (others := self._dials.get(what.number)) is not None:
            others.discard(scope)
            if not others:
                del self._dials[what.number]

    async def _dial_lane(self, what: core.Dial, hello: m.LaneHello) -> None:
        other, limit = what.other, self._limits.connect_timeout
        try:
            with trio.fail_after(limit):
                connection, answer = await self._reach(what, hello)
        except SetIsOver as bad:
            self.step(core.Broken(what.number, str(bad)))
        except DialFailed as bad:
            self.step(core.NotAttached(what.number, hello.lane, str(bad), hello.connection))
        except trio.TooSlowError:
            late = f"{other.addresses[0]}: no answer within {limit:.1f} s"
            self.step(core.NotAttached(what.number, hello.lane, late, hello.connection))
        else:
            self._hand_over(what.number, hello, connection, answer.checksums)

    async def _reach(self, what: core.Dial, hello: m.LaneHello) -> tuple[Connection, m.LaneWelcome]:
        """A lane to the other daemon, and its answer: beside its port where it may be on this machine, else over TCP.

        Raises:
            DialFailed: it did not come through.
        """
        if self._is_near(what.number):
            try:
                return await self._greet(what, hello, near=True)
            except SetIsOver:
                raise
            except DialFailed as bad:
                log.debug("not on this machine", other=what.other.name, reason=str(bad))
        return await self._greet(what, hello, near=False)

    async def _greet(self, what: core.Dial, hello: m.LaneHello, *, near: bool) -> tuple[Connection, m.LaneWelcome]:
        other, who = what.other, f"{what.other.name} at {what.other.addresses[0]}"
        way = what.way if what.way is not m.Way.relayed or self.connector.relays else what.instead
        connection = await self.connector.dial(
            other.addresses, other.key, self._limits.connect_timeout,
            daemon=other.daemon, near=near, way=way, lane=hello.lane,
        )  # fmt: skip
        try:
            hello = replace(hello, checksums=self._config.checksum and not connection.checks)
            answer = await greet(connection, hello, who)
            if answer.daemon != other.daemon:
                raise DialFailed(f"{other.addresses[0]}: expected daemon {other.daemon}, got {answer.daemon}")
            await connection.share(self._half(what.number, hello.lane))
        except OSError as bad:
            connection.close()
            raise DialFailed(f"{who}: {bad}") from bad
        except BaseException:
            connection.close()
            raise
        return connection, answer

    # ---- accepting -----------------------------------------------------------------------------------

    def lets_in(self, sock: socket.socket) -> bool:
        """Whether a connection to the data port is worth a handshake."""
        return self._handshakes.lets_in(whose(sock))

    async def accept(self, stream: trio.SocketStream) -> None:
        """Handler of the data port: whatever arrives, the daemon stays up."""
        who = whose(stream.socket)
        known = DialFailed, ConfigError, ProtocolError, OSError, trio.BrokenResourceError, trio.ClosedResourceError
        goes_on: Callable[[], Awaitable[None]] | None = None  # for a daemon at this relay
        try:
            with contained("the data port", lambda: who, expected=known):
                with self._handshakes.one(who) as scope:
                    admit = partial(self._handshakes.leave, scope)
                    if self.switch is not None and (ticket := await self.switch.shown(stream.socket)) is not None:
                        goes_on = partial(self.switch.carry, ticket, stream.socket, who)
                    else:
                        connection, first = await self.connector.accept(stream, who)
                        if connection.sealed:
                            self._handshakes.know(who)
                        if self.switch is not None and isinstance(first, m.AtRelay):
                            m.check_protocol(first, who)
                            goes_on = partial(self._at_relay, self.switch, connection, first.daemon, who)
                        else:
                            await self._handshake(connection, first, who, admit)
                if scope.cancelled_caught:
                    self._strangers.say(log.info, "lane handshake failed", who=who, reason=why_ended(scope))
                elif goes_on is not None:
                    await goes_on()
        except known as bad:
            self._strangers.say(log.info, "lane handshake failed", who=who, reason=str(bad))
        finally:
            stream.socket.close()  # a no-op where the engine took it

    async def _at_relay(self, switch: Switch, connection: Connection, daemon: str, who: str) -> None:
        """Serve a daemon that is to be reached through this one."""
        with contextlib.closing(connection):
            async with trio.open_nursery() as nursery:
                queued = Queued(connection, who, nursery.cancel_scope.cancel)
                nursery.start_soon(queued.write)
                try:
                    await switch.serve(daemon, queued)
                except ProtocolError as bad:
                    self._strangers.say(log.info, "connection ended", who=who, reason=str(bad))
                nursery.cancel_scope.cancel()

    async def _handshake(self, connection: Connection, first: m.LaneFirst, who: str, admit: Callable[[], None]) -> None:
        if first.protocol != PROTOCOL_VERSION:
            reason = f"protocol {first.protocol} here is {PROTOCOL_VERSION}: run the same wancoll version everywhere"
            await connection.say(m.LaneRefused(reason))
        elif isinstance(first, m.AtRelay):
            await connection.say(m.Bye("this daemon is no relay"))
        elif isinstance(first, m.ProbeHello):
            await answer_probe(connection, first, self._daemon, who)
        else:
            await self._knock(connection, first, who, admit)

    async def _knock(self, connection: Connection, hello: m.LaneHello, who: str, admit: Callable[[], None]) -> None:
        knock = next(self._knocks)
        answer = self._answers[knock] = _Answer(admit)
        try:
            self.step(core.Knock(knock, hello, connection.key))
            await answer.came.wait()
            match answer.command:
                case core.Refuse(_, reason, over):
                    await connection.say(m.LaneRefused(reason, over=over))
                case core.Welcome(_, number, lane):
                    checksums = (hello.checksums or self._config.checksum) and not connection.checks
                    await connection.say(m.LaneWelcome(self._daemon, checksums))
                    await connection.take_share(who, wanted=self._half(number, lane) > 0)
                    self._hand_over(number, hello, connection, checksums)
        except BaseException:
            if isinstance(answer.command, core.Welcome):  # nobody would notice: the engine has no lane to lose
                gone = f"{who} went away during the handshake"
                self.step(core.NotAttached(answer.command.number, hello.lane, gone, hello.connection))
            raise
        finally:
            del self._answers[knock]
            self.step(core.Gone(knock))


def _seen(watched: Watched | None, counts: LaneStatistics | None) -> TcpInfo | None:
    """What is seen of a lane besides the engine's *counts*; None: no descriptor was left for it."""
    if watched is None or counts is None:
        return None
    return watched.view(counts.bytes_sent, counts.bytes_received)
