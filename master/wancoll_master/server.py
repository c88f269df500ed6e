"""The master's trio shell: listeners, connections, the clock and the journal around membership.step()."""

from __future__ import annotations

import errno
import itertools
import secrets
import socket
import sqlite3
import time
from collections.abc import Callable
from importlib import metadata

import msgspec
import structlog
import trio

from wancoll import resources
from wancoll.errors import ConfigError, ProtocolError
from wancoll.failpoints import MASTER, Failpoints
from wancoll.local import join_address, split_address
from wancoll.wire import messages as m
from wancoll.wire.framing import HEADER_BYTES, Decoder, encode
from wancoll_master import membership, report
from wancoll_master.config import MasterConfig
from wancoll_master.connection import Connection
from wancoll_master.journal import Journal
from wancoll_master.state import (
    Announce,
    Broadcast,
    Close,
    Command,
    Disconnected,
    Event,
    Persist,
    Received,
    Record,
    Send,
    SendStatus,
    Tick,
)

__all__ = ["MasterConfig", "serve"]

log = structlog.get_logger("wancoll.master")

FIRST_MESSAGE_BYTES = 64 * 1024  # far above the largest Hello
STATUS_EVENTS = 50
_BACKLOG = 1024


async def serve(config: MasterConfig, *, task_status: trio.TaskStatus[list[str]] = trio.TASK_STATUS_IGNORED) -> None:
    """Run a master until cancelled; then every peer is told Bye. Started value: the bound "host:port"s.

    Raises:
        ConfigError: the address or the journal cannot be used.
    """
    journal = Journal(config.journal)
    try:
        listeners = open_listeners(config.listen)
        try:
            server = Server(config, journal)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(server.keep_time)
                task_status.started([join_address(*one.getsockname()[:2]) for one in listeners])
                sockets = [trio.SocketListener(trio.socket.from_stdlib_socket(one)) for one in listeners]
                await trio.serve_listeners(server.accept, sockets)
        finally:
            for one in listeners:
                one.close()
    finally:
        journal.close()


def open_listeners(listen: str) -> list[socket.socket]:
    """Listening TCP sockets, one for each address of the host; host "" or "*" takes IPv6 and IPv4 on one port.

    Raises:
        ConfigError: the address cannot be read or bound.
    """
    host, port = split_address(listen, what="listen address")
    sockets: list[socket.socket] = []
    refusals: list[OSError] = []
    try:
        if host in ("", "*"):
            both = socket.has_dualstack_ipv6()
            family = socket.AF_INET6 if both else socket.AF_INET
            return [socket.create_server(("", port), family=family, dualstack_ipv6=both, backlog=_BACKLOG)]
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, where in dict.fromkeys((family, str(address[0])) for family, *_, address in found):
            bound = sockets[0].getsockname()[1] if sockets else port
            try:
                sockets.append(socket.create_server((where, bound), family=family, backlog=_BACKLOG))
            except OSError as bad:
                if bad.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                    raise
                refusals.append(bad)  # "localhost" means ::1 too, also where there is no IPv6
        if not sockets:
            raise refusals[0]
        return sockets
    except OSError as bad:
        for one in sockets:
            one.close()
        raise ConfigError(
            "cannot listen there",
            who=listen,
            expected="an address of this machine and a free port",
            got=str(bad),
            hint="port 0 picks a free one; '*' takes all interfaces",
        ) from bad


class Server:
    """See the module. apply() is the one place that steps the state machine; it never waits.

    Args:
        config: settings.
        journal: open.
    """

    def __init__(self, config: MasterConfig, journal: Journal) -> None:
        self._limits = config.limits
        self._journal = journal
        self._failpoints = Failpoints(config.failpoint_token)
        self._telling: set[str] = set()  # fault injection: what the next flush tells, "commit" or "epoch"
        facts = journal.facts
        self.state = membership.new_state(
            config.limits,
            secrets.token_bytes(32),
            term=facts.term,
            floor=facts.highest_epoch,
            next_mid=facts.next_mid,
            used=facts.used,
            now=trio.current_time(),
        )
        self._connections: dict[int, Connection] = {}
        self._numbers = itertools.count(1)
        self._greeting: dict[int, trio.CancelScope] = {}  # connections without a first message, oldest first
        self._dirty: dict[int, Connection] = {}  # with an unsent batch
        self._alarm = trio.CancelScope()
        self._started_at = trio.current_time()

    # ---- stepping ------------------------------------------------------------------------------------

    def apply(self, event: Event) -> None:
        """Step, and carry out the commands but for flush()."""
        for command in membership.step(self.state, trio.current_time(), event):
            self._carry_out(command)
        if self.state.deadline < self._alarm.deadline:
            self._alarm.deadline = self.state.deadline

    def _carry_out(self, command: Command) -> None:
        match command:
            case Broadcast(conns, message):
                if self._failpoints.armed and isinstance(message, m.Commit):
                    self._before_telling("commit")
                frame = encode(message)
                for conn in conns:
                    self._add(conn, frame)
            case Send(conn, message):
                self._add(conn, encode(message))
            case Announce(to, epoch):
                if self._failpoints.armed:
                    self._before_telling("epoch")
                for (conn, _), frame in zip(to, encode_epochs(epoch, [mid for _, mid in to]), strict=True):
                    self._add(conn, frame)
            case SendStatus(conn):
                self._add(conn, encode(self._status()))
            case Close(conn, reason):
                if reason:
                    self._add(conn, encode(m.Bye(reason)))
                    log.info("connection ended", reason=reason)
                self.flush()
                connection = self._connections.pop(conn, None)
                if connection is not None:
                    connection.end()
            case Persist(highest_epoch, next_mid, group, used):
                self._failpoints.hit("before_persist")
                self._write(lambda: self._journal.persist(highest_epoch, next_mid, group, used))
            case Record(group, epoch, kind, text):
                log.info(kind, group=group, epoch=epoch, text=text)
                event = m.EventRecord(time.time(), group, epoch, kind, text)
                self._write(lambda: self._journal.add(event))

    def _add(self, conn: int, frame: bytes) -> None:
        connection = self._connections.get(conn)
        if connection is not None:
            connection.add(frame)
            self._dirty[conn] = connection

    def flush(self) -> None:
        """Send what the steps since the last flush had to say, one send for each connection."""
        if self._dirty:
            dirty, self._dirty = self._dirty, {}
            for connection in dirty.values():
                connection.flush_batch()
                for what in self._telling:
                    self._failpoints.hit(f"half_{what}")
            for what in self._telling:
                self._failpoints.hit(f"after_{what}")
            self._telling.clear()

    def _before_telling(self, what: str) -> None:
        self._failpoints.hit(f"before_{what}")
        self._telling.add(what)

    def _arm(self, arm: m.Arm) -> m.Ok | m.Bye:
        """Fault injection, for whoever shows the token."""
        if not self._failpoints.allows(arm.token):
            return m.Bye("fault injection is not allowed here: expected the token of WANCOLL_FAILPOINTS")
        if arm.name not in MASTER or arm.action not in ("kill", "pause", "clear"):
            return m.Bye(f"unknown: {arm.action} at {arm.name}; expected kill, pause or clear at {', '.join(MASTER)}")
        self._failpoints.arm(arm.name, arm.action)
        return m.Ok()

    def _write(self, write: Callable[[], None]) -> None:
        """Write to the journal: a full disk is no reason to stop the training that runs."""
        try:
            write()
        except sqlite3.Error as bad:
            log.error("the journal cannot be written; a restart of the master may forget", reason=str(bad))

    def _status(self) -> m.Status:
        now = trio.current_time()
        return m.Status(
            term=self.state.term,
            uptime=now - self._started_at,
            version=_version(),
            daemons=sorted(self.state.daemons),
            groups=report.groups(self.state, now),
            events=self._journal.events(STATUS_EVENTS),
            links=report.links(self.state),
            resources={
                **resources.of_process(),
                "tasks": trio.lowlevel.current_statistics().tasks_living,
                "connections": len(self._connections),
            },
        )

    async def keep_time(self) -> None:
        """Task: a Tick at every deadline."""
        while True:
            with trio.CancelScope(deadline=membership.next_deadline(self.state)) as self._alarm:
                await trio.sleep_forever()
            self.apply(Tick())
            self.flush()

    # ---- connections ---------------------------------------------------------------------------------

    async def accept(self, stream: trio.SocketStream) -> None:
        """Handler of the listeners: whatever arrives, the master stays up."""
        if len(self._greeting) >= self._limits.pending_connections:
            oldest = next(iter(self._greeting))  # gives way, so that idle connections block nobody
            self._greeting.pop(oldest).cancel()
        limits = self._limits
        number = next(self._numbers)
        try:
            connection = Connection(
                number,
                socket.socket(fileno=stream.socket.detach()),
                limits.send_queue_messages,
                16 * limits.message_bytes,
            )
        except OSError:
            return  # gone already
        self._connections[number] = connection
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(connection.write_queue)
                reason = await self._read(connection)
                nursery.cancel_scope.cancel()
            if self._connections.pop(number, None) is not None:
                self.apply(Disconnected(number, reason))
                self.flush()
        finally:
            if self._connections.pop(number, None) is not None:  # serve() was cancelled
                connection.add(encode(m.Bye("the master is stopping")))
                connection.flush_batch()
                connection.end()
            await connection.close(deliver=connection.ending and not connection.overflow)

    async def _read(self, connection: Connection) -> str:
        """Feed the state machine until the connection ends; returns why it did."""
        number = connection.number
        try:
            with trio.move_on_after(self._limits.handshake_timeout) as greeting:
                self._greeting[number] = greeting
                await self._feed(connection, greeting)
                return "it does not read what it is sent" if connection.overflow else "the master ended it"
            raise ProtocolError("did not introduce itself in time", expected="Hello first")
        except OSError as bad:
            return str(bad)
        except ProtocolError as nonsense:
            if connection.number not in self.state.connections:
                log.info("connection ended", reason=str(nonsense))
            connection.add(encode(m.Bye(f"this connection {nonsense}"[:1000])))
            connection.flush_batch()
            connection.end()
            return str(nonsense)
        finally:
            self._greeting.pop(number, None)

    async def _feed(self, connection: Connection, greeting: trio.CancelScope) -> None:
        size = min(self._limits.message_bytes, FIRST_MESSAGE_BYTES)
        decoder: Decoder[m.FromPeer] = Decoder(m.FromPeer, size)
        number = connection.number
        while data := await connection.receive():
            for message in decoder.feed(data):
                if self._greeting.pop(number, None) is not None:
                    greeting.deadline = float("inf")
                    decoder.allow(self._limits.message_bytes)  # a Report may be as large as an Epoch
                if isinstance(message, m.Arm) and number not in self.state.connections:
                    connection.add(encode(self._arm(message)))
                    connection.flush_batch()
                    connection.end()
                else:
                    self.apply(Received(number, message))
                if connection.ending:
                    break
            self.flush()


def _version() -> str:
    try:
        return metadata.version("wancoll")
    except metadata.PackageNotFoundError:
        return "unknown"  # runs from a source tree that is not installed


def encode_epochs(epoch: m.Epoch, mids: list[int]) -> list[bytes]:
    """The frames of *epoch* for each of *mids*: all but Epoch.to is encoded once, since worlds may be large."""
    pack = msgspec.msgpack.encode
    whole = pack(msgspec.structs.replace(epoch, to=0))
    at = 1 + len(pack(type(epoch).__name__)) + len(pack(epoch.group))  # an array's first byte, tag, group; then the 0
    head, tail = whole[:at], whole[at + 1 :]
    bodies = (head + pack(mid) + tail for mid in mids)
    return [len(body).to_bytes(HEADER_BYTES, "big") + body for body in bodies]
