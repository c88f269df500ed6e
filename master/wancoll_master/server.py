"""The master's trio shell: listeners, connections, the clock and the store around membership.step().

A server leads, or stands by: then it tells whoever asks who leads. What a step has to say after a Persist is held until
the store has written it; the state machine steps on meanwhile.
"""

from __future__ import annotations

import itertools
import secrets
import socket
import sqlite3
import time
from collections.abc import Callable
from functools import partial
from math import inf
from typing import Protocol

import structlog
import trio

from wancoll import resources
from wancoll.errors import ProtocolError
from wancoll.failpoints import MASTER, Failpoints
from wancoll.net.contain import contained, shown, trace
from wancoll.net.listen import Handshakes
from wancoll.net.stream import Stream
from wancoll.wire import messages as m
from wancoll.wire.framing import Decoder, encode
from wancoll.wire.kept import Kept
from wancoll_master.config import MasterConfig
from wancoll_master.core import membership, presence, report
from wancoll_master.core.leadership import Lobby
from wancoll_master.core.ready import (
    Announce,
    Disconnected,
    Event,
    Held,
    Message,
    Ready,
    Received,
    Returned,
    Send,
    Tick,
    frames,
)
from wancoll_master.core.state import State
from wancoll_master.plan.planning import propose
from wancoll_master.store.facts import Store
from wancoll_master.store.journal import Journal

log = structlog.get_logger("wancoll.master")

FIRST_MESSAGE_BYTES = 64 * 1024  # far above the largest Hello
STATUS_EVENTS = 50
# Kinds of events that somebody looks into.
_WARNINGS = {"client died", "daemon died", "evicted", "away", "deaf", "waits", "stall", "digest", "refused"}
_HELD_FRAMES = 65536  # that may wait for the store
_LEAST_KEPT_BYTES = 128 * 1024  # of a connection that breaks among very many: more than an Epoch of a thousand members
_TURN = 0.01  # seconds for which one connection's messages are taken in before others have their turn
_STATUS_SHARE = 0.1  # of the time, that may go into making Status


class Reign(Protocol):
    """One time as the leader among several masters."""

    def may_lead(self) -> bool:
        """Looked at before anything is taken in or sent."""

    def end(self, reason: str, heard: int = 0) -> None:
        """It leads no more, and has heard of terms up to *heard*."""


class Server:
    """See the module. apply() is the one place that steps the state machine; it never waits.

    Args:
        config: settings.
        journal: open; keeps the event log.
    """

    def __init__(self, config: MasterConfig, journal: Journal) -> None:
        self._limits = config.limits
        self._journal = journal
        self._failpoints = Failpoints(config.failpoint_token)
        self._telling: set[str] = set()  # fault injection: what the next flush tells, "commit" or "epoch"
        self._store: Store = journal
        self.state: State | None = None  # None: stands by
        self._lobby = Lobby(config.limits.pending_connections)
        self._reign: Reign | None = None
        self._held = Held(_HELD_FRAMES)
        self._closing: set[int] = set()  # connections that end once what is held for them has left
        self._connections: dict[int, Stream] = {}
        self._kept: dict[int, Kept[bytes]] = {}  # what daemons were told and have not confirmed
        self._takes_up: dict[int, int] = {}  # connection -> the broken one that it goes on with
        self._numbers = itertools.count(1)
        self._greeting = Handshakes(config.limits.pending_connections, config.limits.handshake_timeout)
        self._dirty: dict[int, Stream] = {}  # with an unsent batch
        self._status_frame, self._status_until = b"", -inf  # the newest one, and until when it is new enough
        self._alarm = trio.CancelScope()
        self._awake_at = trio.current_time()
        self._started_at = trio.current_time()

    # ---- leading and standing by ---------------------------------------------------------------------

    def lead(self, store: Store, reign: Reign | None = None, *, lost_facts: bool = False) -> None:
        """Begin to lead, with what the store knows, for as long as the *reign*; None: this is the only master.

        *lost_facts*: the store has lost what earlier masters had written.
        """
        facts = store.facts
        self._store, self._reign, self._status_until = store, reign, -inf
        self.state = membership.new_state(
            self._limits,
            secrets.token_bytes(32),
            term=facts.term,
            floor=facts.highest_epoch,
            next_mid=facts.next_mid,
            used=facts.used,
            now=trio.current_time(),
            elected=store is not self._journal,
            lost_journal=lost_facts,
        )
        for event in self._lobby.empty():
            self.apply(event)
        self.flush()

    def stand_by(self, leader: str, term: int, *, wait: bool) -> None:
        """Tell those who ask that *leader* leads, with *term*; "": nobody does, and daemons may *wait* for who will."""
        for conn in self._lobby.leader_is(leader, term, wait=wait):
            self._close(conn, encode(self._lobby.answer))

    def step_down(self, reason: str, heard: int = 0) -> None:
        """Lead no more: what was not sent is dropped, and everybody is sent away."""
        if self.state is None:
            return
        self.state = None
        self._held.clear()
        self._closing.clear()
        self._dirty.clear()
        self._kept.clear()
        self.stand_by("", 0, wait=False)
        goodbye = encode(m.Bye(f"this master leads no more: {reason}"[:1000]))
        connections, self._connections = self._connections, {}
        for connection in connections.values():
            connection.drop_batch()
            connection.add(goodbye)
            connection.flush_batch()
            connection.end()
        if self._reign is not None:
            self._reign.end(reason, heard)

    def _overslept(self) -> bool:
        """Whether this process stood still for so long that daemons have given it up: it judges nobody then (R11)."""
        limits = self._limits
        most = max(limits.heartbeat_timeout / 2, limits.heartbeat_timeout - 2 * limits.heartbeat_interval)
        return self.state is not None and trio.current_time() - self._awake_at > most

    def _start_over(self, why: str) -> None:
        """Begin anew, as a master that was started again does: members report, and their epochs go on."""
        log.warning("the master starts over", why=why)
        self._awake_at = trio.current_time()
        self.step_down(why)
        if self._store is self._journal:
            self._write(self._journal.begin_term)
            self.lead(self._journal)

    def _stood_still(self) -> str:
        return f"it stood still for {trio.current_time() - self._awake_at:.1f} s"

    async def keep_awake(self) -> None:
        """Task: notice when the process stood still."""
        while True:
            if self._overslept():
                self._start_over(self._stood_still())
            self._awake_at = trio.current_time()
            await trio.sleep(self._limits.heartbeat_interval / 2)

    def _leading(self) -> State | None:
        """The state, if this master may lead at this moment."""
        if self.state is not None and self._reign is not None and not self._reign.may_lead():
            self.step_down("its lease ran out")
        return self.state

    # ---- stepping ------------------------------------------------------------------------------------

    def apply(self, event: Event) -> None:
        """Step, and do what has to be done but for flush()."""
        if self._overslept():
            self._start_over(self._stood_still())
            return  # what came is of a connection that is no more
        state = self._leading()
        if state is None:
            self._decline(event)
            return
        if isinstance(event, Received):
            if event.conn in self._closing or event.conn not in self._connections:
                return
            if isinstance(event.message, m.Heartbeat) and event.conn in self._kept:
                self._kept[event.conn].confirmed(event.message.heard)
        try:
            if not self._goes_on(state, event):
                self._carry_out(state, membership.step(state, trio.current_time(), event, propose))
        except Exception as bug:
            # Nothing of the step may be believed, and nobody has been told: as if it had died here.
            log.error("a bug: a step of the master failed", of=shown(event), trace=trace(bug))
            if isinstance(event, Received):
                self._close(event.conn, encode(m.Bye(f"this made the master fail: {shown(event.message)}")))
            self._start_over(f"a step failed with {type(bug).__name__}, which is a bug")
            return
        if state.deadline < self._alarm.deadline:
            self._alarm.deadline = state.deadline

    def _goes_on(self, state: State, event: Event) -> bool:
        """Whether this is a daemon that takes up its broken connection; then its task serves that one."""
        if not isinstance(event, Received) or not isinstance(event.message, m.Hello):
            return False
        number, hello = event.conn, event.message
        if number in state.connections:
            return False  # it introduces itself twice
        conn = presence.returning(state, hello)
        again = self._kept[conn].again(hello.heard) if conn in self._kept else None
        if conn is None or again is None or number not in self._connections:
            return False
        broken, stream = self._connections.pop(conn, None), self._connections.pop(number)
        if broken is not None:
            broken.drop_batch()
            broken.end()
        self._dirty.pop(number, None)
        self._connections[conn], self._takes_up[number] = stream, conn
        ready = membership.step(state, trio.current_time(), Returned(conn, hello), propose)
        answers, ready.answers = ready.answers, []
        self._carry_out(state, Ready(answers=answers))
        for frame in again:
            self._put(conn, frame)
        self._carry_out(state, ready)
        return True

    def _decline(self, event: Event) -> None:
        """While this master stands by: what came, and who is gone."""
        if isinstance(event, Received):
            if not self._lobby.keeps(event):
                self._close(event.conn, encode(self._lobby.answer))
        elif isinstance(event, Disconnected):
            self._lobby.gone(event.conn)

    def _carry_out(self, state: State, ready: Ready) -> None:
        """In the order that Ready says. What a slow store has to write first is held."""
        if ready.step_down is not None:
            self.step_down(ready.step_down.reason, ready.step_down.term)
            return
        for answer in ready.answers:
            said = encode(answer.message) if isinstance(answer, Send) else self._status_now(state, answer.conn)
            self._put(answer.conn, said)
        for one in ready.log:
            say = log.warning if one.kind in _WARNINGS else log.info
            say(one.kind, group=one.group, epoch=one.epoch, text=one.text)
            if one.kept:
                event = m.EventRecord(time.time(), one.group, one.epoch, one.kind, one.text)
                self._write(partial(self._journal.add, event))
        if ready.persist is not None:
            self._failpoints.hit("before_persist")
            self._write(partial(self._store.persist, ready.persist))
        self._closing.update(close.conn for close in ready.closes)
        if self._store.written == self._store.asked:
            self._tell(ready)
            return
        self._held.add(ready, self._store.asked)
        if self._held.too_many:
            self.step_down("the store does not write, and too much waits for it")

    def _tell(self, ready: Ready) -> None:
        """All that it rests on is written."""
        for message in ready.messages:
            if self._failpoints.armed:
                self._before_telling(message)
            welcome = isinstance(message, Send) and isinstance(message.message, m.Welcome)
            for conn, frame in frames(message):
                if welcome and conn in self._connections:  # else it was held for the store, and is never heard
                    self._kept[conn] = Kept()
                elif conn in self._kept:
                    room = max(self._limits.unconfirmed_bytes // len(self._kept), _LEAST_KEPT_BYTES)
                    self._kept[conn].add(frame, len(frame), room)
                self._put(conn, frame)
        for close in ready.closes:
            if close.reason:
                log.info("connection ended", reason=close.reason)
            self._close(close.conn, encode(m.Bye(close.reason, close.final)) if close.reason else b"")

    def release(self) -> None:
        """The store has written more: send what was held for it."""
        for ready in self._held.release(self._store.written):
            self._tell(ready)
        self.flush()

    def _put(self, conn: int, frame: bytes) -> None:
        connection = self._connections.get(conn)
        if connection is not None:
            connection.add(frame)
            self._dirty[conn] = connection

    def _close(self, conn: int, last: bytes) -> None:
        """Send what may be sent, and *last*."""
        connection = self._connections.pop(conn, None)
        self._closing.discard(conn)
        self._kept.pop(conn, None)
        if connection is not None:
            self._dirty.pop(conn, None)
            connection.send(last)
            connection.end()

    def flush(self) -> None:
        """Send what the steps since the last flush had to say, one send for each connection."""
        if self._dirty:
            dirty, self._dirty = self._dirty, {}
            for connection in dirty.values():
                if self._leading() is None:
                    return
                connection.flush_batch()
                for what in self._telling:
                    self._failpoints.hit(f"half_{what}")
            for what in self._telling:
                self._failpoints.hit(f"after_{what}")
            self._telling.clear()

    def _before_telling(self, message: Message) -> None:
        """Fault injection."""
        what = "epoch" if isinstance(message, Announce) else "commit" if isinstance(message.message, m.Commit) else ""
        if what:
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

    def _status_now(self, state: State, conn: int) -> bytes:
        """The frame for whoever asks. Who stays connected and asks again and again gets the same: it takes little time.

        Who asks once is told what is so now, also what it has just brought about.
        """
        began = trio.current_time()
        if began >= self._status_until or conn not in state.connections:
            self._status_frame = encode(self._status(state))
            self._status_until = began + (trio.current_time() - began) / _STATUS_SHARE
        return self._status_frame

    def _status(self, state: State) -> m.Status:
        now = trio.current_time()
        return m.Status(
            term=state.term,
            uptime=now - self._started_at,
            version=report.version(),
            daemons=sorted(state.daemons),
            groups=report.groups(state, now),
            events=self._journal.events(STATUS_EVENTS),
            links=report.links(state),
            resources={
                **resources.of_this_process(),
                "tasks": trio.lowlevel.current_statistics().tasks_living,
                "connections": len(self._connections),
            },
        )

    async def keep_time(self) -> None:
        """Task: a Tick at every deadline."""
        while True:
            deadline = membership.next_deadline(self.state) if self.state is not None else inf
            with trio.CancelScope(deadline=deadline) as self._alarm:
                await trio.sleep_forever()
            self.apply(Tick())
            self.flush()

    # ---- connections ---------------------------------------------------------------------------------

    async def accept(self, stream: trio.SocketStream) -> None:
        """Handler of the listeners: whatever arrives, the master stays up."""
        limits = self._limits
        number = next(self._numbers)
        try:
            sock = socket.socket(fileno=stream.socket.detach())
            connection = Stream(sock, "this connection", 16 * limits.message_bytes, limits.send_queue_messages)
        except OSError:
            return  # gone already
        self._connections[number] = connection
        reason = "it met a bug"
        try:
            with contained("a port of the master", lambda: connection.newest):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(connection.write_queue)
                    reason = await self._read(number, connection)
                    nursery.cancel_scope.cancel()
            if self._is_over(number, connection):
                conn = self._takes_up.get(number, number)
                self._closing.discard(conn)
                kept = self._kept.get(conn)
                lasting = not connection.ended or connection.overflow or kept is None or kept.lost
                self.apply(Disconnected(conn, reason, lasting))
                if not self._introduced(conn):
                    self._kept.pop(conn, None)
                self.flush()
        finally:
            if self._is_over(number, connection):  # serve() was cancelled
                connection.send(encode(m.Bye("the master is stopping")))
                connection.end()
            self._takes_up.pop(number, None)
            if connection.ending and not connection.overflow:
                await connection.close_delivered()
            else:
                connection.close()

    def _is_over(self, number: int, connection: Stream) -> bool:
        """Forget the connection that came as *number*; False: it is forgotten, or another one goes on with it."""
        conn = self._takes_up.get(number, number)
        if self._connections.get(conn) is not connection:
            return False
        del self._connections[conn]
        return True

    def _introduced(self, number: int) -> bool:
        """Whether a daemon of this leader is at the other end."""
        return self.state is not None and self._takes_up.get(number, number) in self.state.connections

    async def _read(self, number: int, connection: Stream) -> str:
        """Feed the state machine until the connection ends; returns why it did."""
        decoder: Decoder[m.FromPeer] = Decoder(m.FromPeer, min(self._limits.message_bytes, FIRST_MESSAGE_BYTES))
        try:
            messages: list[m.FromPeer] = []
            with self._greeting.one() as greeting:
                while not messages and (data := await connection.receive()):
                    messages = decoder.feed(data)
            # Outside, nothing ends it for being late: what came in time may be read late, where we stood still.
            if greeting.cancelled_caught:
                raise ProtocolError("did not introduce itself in time", expected="Hello first")
            decoder.allow(self._limits.message_bytes)  # a Report may be as large as an Epoch
            await self._hear(number, connection, messages)
            while data := await connection.receive():
                await self._hear(number, connection, decoder.feed(data))
            return connection.ended or "the master ended it"
        except ProtocolError as nonsense:
            if not self._introduced(number):
                log.info("connection ended", reason=str(nonsense))
            connection.send(encode(m.Bye(f"this connection {nonsense}"[:1000])))
            connection.end()
            return str(nonsense)

    async def _hear(self, number: int, connection: Stream, messages: list[m.FromPeer]) -> None:
        turn = trio.current_time() + _TURN
        for message in messages:
            if trio.current_time() > turn:
                self.flush()
                await trio.lowlevel.checkpoint()
                turn = trio.current_time() + _TURN
            if connection.ending:
                break
            if isinstance(message, m.Arm) and not self._introduced(number):
                connection.send(encode(self._arm(message)))
                connection.end()
            else:
                self.apply(Received(self._takes_up.get(number, number), message))
        self.flush()
