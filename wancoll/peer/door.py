"""The daemon's front door: the unix socket for clients, and for status, traces, leaves and faults."""

from __future__ import annotations

import json
import socket
from functools import partial

import structlog
import trio
from msgspec.structs import replace

from wancoll.errors import ConfigError, ProtocolError
from wancoll.failpoints import PEER
from wancoll.net.contain import contained
from wancoll.net.listen import Handshakes, Sparing, whose
from wancoll.net.stream import Stream
from wancoll.peer.core import links
from wancoll.peer.session import Host, Session
from wancoll.wire import messages as m
from wancoll.wire.framing import Decoder, encode

log = structlog.get_logger("wancoll.door")

_LONGEST_TRACE = 600.0  # seconds
_ROWS_AT_ONCE = 512


class FrontDoor:
    """Serves the unix socket."""

    def __init__(self, daemon: Host) -> None:
        self._daemon = daemon
        limits = daemon.config.limits
        self._greeting = Handshakes(limits.pending_connections, limits.local_handshake_timeout)
        self._strangers = Sparing()
        self._next_range = 1  # of engine op ids; one for each client that ever attached

    @property
    def counts(self) -> tuple[int, int]:
        """Handshakes that are pending, and how many were refused."""
        return len(self._greeting), self._strangers.count

    async def accept(self, stream: trio.SocketStream) -> None:
        """Handler of the unix socket: one client, or one question."""
        limits = self._daemon.config.limits
        who = whose(stream.socket)
        client = Stream(socket.socket(fileno=stream.socket.detach()), "client", limits.message_bytes * 4)
        decoder: Decoder[m.FromClient] = Decoder(m.FromClient, limits.message_bytes, "client")
        try:
            messages: list[m.FromClient] = []
            said = b""
            with self._greeting.one(who.partition(",")[0]):
                while not messages and (data := await client.receive()):
                    said, messages = data, decoder.feed(data)
            broke = partial(m.Failure, 0, "PeerDaemonLost")
            with contained(
                "the client socket",
                lambda: client.newest,
                lambda why: client.send(encode(broke(why))),
                expected=(ProtocolError, OSError),
            ):
                if messages:
                    await self._first_message(client, decoder, messages, who)
                elif said:
                    raise ProtocolError("ended before it had said who it is", who="client", expected="Attach first")
        except ProtocolError as bad:
            self._strangers.say(log.warning, "client sent nonsense", who=who, reason=str(bad))
            client.send(
                encode(m.Failure(0, "ProtocolError", bad.what, who=bad.who, expected=bad.expected, got=bad.got))
            )
        except (OSError, MemoryError) as bad:  # no descriptor or memory left for one more
            self._strangers.say(log.warning, "client cannot be served", who=who, reason=str(bad))
            client.send(encode(m.Failure(0, "PeerDaemonLost", "has no room for one more client", got=str(bad))))
        finally:
            client.close()

    async def _first_message(
        self, client: Stream, decoder: Decoder[m.FromClient], messages: list[m.FromClient], who: str
    ) -> None:
        first, limits = messages[0], self._daemon.config.limits
        if isinstance(first, m.LocalStatusRequest):
            client.send(encode(m.LocalStatus(json.dumps(self._daemon.status()))))
        elif isinstance(first, m.Arm):
            log.warning("fault injection is asked for", who=who, name=first.name, action=first.action)
            client.send(encode(self._arm(first)))
        elif isinstance(first, m.TraceRequest):
            await self._trace(client, first)
        elif isinstance(first, m.AskToLeave):
            await self._leave(client, first)
        elif isinstance(first, m.Attach):
            m.check_protocol(first, "client")
            if (over := self._daemon.ending or self._daemon.leaving) is not None:
                client.send(encode(over))
                return
            if not first.member:
                first = replace(first, member=f"{self._daemon.name[:100]}-{self._next_range}")
            if len(self._daemon.sessions) >= limits.clients:
                head = (0, "PeerDaemonLost", "has no room for one more client", self._daemon.name)
                expected = f"at most {limits.clients} clients of one daemon; its limit on open files may allow more"
                client.send(encode(m.Failure(*head, expected)))
                return
            if self._daemon.has(first.group, first.member):  # its Leave, which names it, would be taken for the other's
                taken = f"group {first.group} has {first.member} here already, and names are unique in a group"
                client.send(encode(m.Failure(0, "ConfigError", taken, who=first.member, hint="choose another name")))
                return
            session = Session(self._daemon, client, first, self._next_range << 40)
            self._next_range += 1
            log.info("client attached", who=who, group=first.group, member=first.member)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(client.write_queue)
                await session.serve(decoder, messages[1:])
                nursery.cancel_scope.cancel()
        else:
            raise ProtocolError(
                "sent a message out of place", who="client", expected="Attach first", got=str(first)[:100]
            )
        with trio.move_on_after(1):
            await client.drain()

    async def _trace(self, client: Stream, ask: m.TraceRequest) -> None:
        """Trace, unless the one who asks hangs up."""
        rows: list[dict[str, object]] = []
        clock: m.Clock | None = None
        refused: ConfigError | None = None

        async def trace() -> None:
            nonlocal rows, clock, refused
            try:
                rows, clock = await self._daemon.trace(min(ask.seconds, _LONGEST_TRACE))
            except ConfigError as bad:
                refused = bad

        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.write_queue)
            there = await client.unless_hung_up(trace)
            if refused is not None:
                client.send(encode(m.Failure(0, "ConfigError", refused.what, who=refused.who, hint=refused.hint)))
            elif there:
                for at in range(0, max(1, len(rows)), _ROWS_AT_ONCE):
                    part = json.dumps(rows[at : at + _ROWS_AT_ONCE])
                    last = at + _ROWS_AT_ONCE >= len(rows)
                    client.send(encode(m.Traced(self._daemon.name, part, last, clock)))
                    await client.drain()
            with trio.move_on_after(1):
                await client.drain()
            nursery.cancel_scope.cancel()

    async def _leave(self, client: Stream, ask: m.AskToLeave) -> None:
        """Let them leave, say Ok when they have; the connection of who asked for the daemon's end ends with that."""
        m.check_protocol(ask, "client")
        asked = self._daemon.ask_to_leave(ask)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.write_queue)
            self._daemon.askers += 1
            try:
                while any(not one.member.over for one in asked):  # noqa: ASYNC110 - seldom, and not for long
                    await trio.sleep(0.01)
                client.send(encode(m.Ok()))
                with trio.move_on_after(1):
                    await client.drain()
            finally:
                self._daemon.askers -= 1
            if not ask.group:
                await trio.sleep_forever()
            nursery.cancel_scope.cancel()

    def _arm(self, arm: m.Arm) -> m.Ok | m.Failure:
        if not self._daemon.failpoints.allows(arm.token):
            return m.Failure(
                0,
                "ConfigError",
                "fault injection is not allowed here",
                who=self._daemon.name,
                expected="the token that the daemon was started with",
                hint="start the daemon with WANCOLL_FAILPOINTS=<token>",
            )
        if arm.action == "cut":
            self._daemon.links.step(links.Cut(arm.name))
        elif arm.action == "heal":
            self._daemon.links.step(links.Heal(arm.name))
        elif arm.name in PEER and arm.action in ("kill", "pause", "clear"):
            for session in self._daemon.sessions:
                session.hold()  # the engine's own part of a call has no such places
            self._daemon.failpoints.arm(arm.name, arm.action)
        else:
            return m.Failure(
                0,
                "ConfigError",
                "unknown failpoint or action",
                who=self._daemon.name,
                expected=f"kill, pause or clear at {', '.join(PEER)}; cut or heal",
                got=f"{arm.action} at {arm.name}",
            )
        return m.Ok()
