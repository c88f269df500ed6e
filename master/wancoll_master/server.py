"""The master's trio shell: listeners, connections, the clock and the store around membership.step().

A server leads, or stands by: then it tells whoever asks who leads. What a step has to say after a Persist is held until
the store has written it; the state machine steps on meanwhile.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import socket
import sqlite3
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Protocol

import structlog
import trio
from msgspec.structs import replace

from wancoll.errors import ConfigError, ProtocolError
from wancoll.failpoints import MASTER, STORE, Failpoints
from wancoll.limits import PROTOCOL_VERSION
from wancoll.local import join_address, split_address
from wancoll.metrics.core import families as f
from wancoll.net import clock
from wancoll.net.contain import contained, shown, trace
from wancoll.net.listen import Handshakes, Sparing, is_loopback, whose, why_ended
from wancoll.net.proof import NONCE_BYTES, check_first
from wancoll.net.stream import LINGER, Stream, round_trip
from wancoll.net.tls import Tls, TlsFailed
from wancoll.relay.switch import MAGIC, Switch
from wancoll.trust.identity import Identity
from wancoll.trust.registry import NotNow
from wancoll.units import parse_rate
from wancoll.wire import messages as m
from wancoll.wire.framing import Decoder, begins_tls, encode
from wancoll_master.config import MasterConfig
from wancoll_master.control_connections import Connections
from wancoll_master.core import membership
from wancoll_master.core.leadership import StandbyResponder
from wancoll_master.core.liveness import presence
from wancoll_master.core.may import EVERYTHING, may
from wancoll_master.core.paths import announced
from wancoll_master.core.ready import (
    WATCHED,
    Announce,
    Close,
    Disconnected,
    Event,
    Held,
    Message,
    Ready,
    Received,
    Record,
    Returned,
    Send,
    SentAway,
    Tick,
    Watched,
    frames,
)
from wancoll_master.core.state import State
from wancoll_master.core.views import page
from wancoll_master.plan.planning import propose
from wancoll_master.statuses import Statuses
from wancoll_master.store.facts import Store
from wancoll_master.store.journal import Journal

if TYPE_CHECKING:
    from wancoll_master.gate import Gate

log = structlog.get_logger("wancoll.master")

# Kinds of events that somebody looks into.
_WARNINGS = {"client died", "daemon died", "evicted", "away", "deaf", "waits", "stall", "digest", "refused"}
_LINES_AT_ONCE = 1000  # of one kind of events: a crowd that comes, or is lost, is written down whole; a flood is not
_HELD_FRAMES = 65536  # that may wait for the store
_START_SECURE = "start the master with --secure (the default beyond loopback, without --insecure), or leave --join out"
_NO_TLS = f"speaks TLS, and this master does not; {_START_SECURE}"
_OTHER_VERSION = (
    f"speaks another version of the protocol than this master, whose is {PROTOCOL_VERSION}: run the same wancoll "
    "version everywhere, and start this one with a new token"
)
_ONLY_TLS = "this master speaks TLS only; give --join or WANCOLL_JOIN a token: `wancoll token create` makes one"
_LOOKUPS = 256  # of names at once, one of each daemon: a name server may be slow
_TURN = 0.01  # seconds for which one connection's messages are taken in before others have their turn


class LeadershipTerm(Protocol):
    """One time as the leader among several masters."""

    def may_lead(self) -> bool:
        """Looked at before anything is taken in or sent."""

    def end(self, reason: str, heard: int = 0) -> None:
        """It leads no more, and has heard of terms up to *heard*."""


class Server:
    """Leads or stands by; apply() is the one place that steps the state machine, and it never waits.

    The *journal* is open, and keeps the event log. Without a *gate* everybody is let in, in clear.
    """

    def __init__(self, config: MasterConfig, journal: Journal, gate: Gate | None = None) -> None:
        self._limits, self._gate = config.limits, gate
        self._relays, rate = bool(config.relay), parse_rate(config.relay, "--relay") if config.relay else 0.0
        self._switch = Switch(config.limits, rate, splices=self._relays, introduces=True)
        self._journal, self._announce, self._first = journal, config.announce, config.first
        self._elected = True  # until it leads by the journal alone
        self._unwritable = Sparing()
        self._failpoints = journal.failpoints = Failpoints(config.failpoint_token)
        self._telling: set[str] = set()  # fault injection: what the next flush tells, "commit" or "epoch"
        self._store: Store = journal
        self.state: State | None = None  # None: stands by
        self._standby = StandbyResponder(config.limits.pending_connections)
        self._leadership_term: LeadershipTerm | None = None
        self._held = Held(_HELD_FRAMES)
        self._connections = Connections(config.limits)
        self._identities: dict[int, Identity] = {}  # by connection as it came: who has proved its key
        self._unknown: dict[int, m.Signed] = {}  # the same, while this master knows no tokens
        self._trust_asked = 0  # the write that gate.settle() waits for
        self._numbers = itertools.count(1)
        limits = config.limits
        self._greeting = Handshakes.of_port(limits, sealed=gate is not None)
        self._lookups: dict[str, trio.CapacityLimiter] = {}  # by daemon: a thread may outlive who waits for it
        self._leaving = Handshakes(limits.pending_connections, LINGER)  # strangers that have yet to read their answer
        self._strangers: set[int] = set()  # connections on which no daemon has introduced itself
        self._of_strangers = Sparing()
        self._of_kinds: defaultdict[str, Sparing] = defaultdict(partial(Sparing, _LINES_AT_ONCE))  # of events
        self._alarm = trio.CancelScope()
        self._awake_at = clock.awake_or_asleep()
        self._statuses = Statuses(journal, self._counted, lambda: gate is not None and len(gate.keys) > 1)

    # ---- leading and standing by ---------------------------------------------------------------------

    def lead(self, store: Store, leadership_term: LeadershipTerm | None = None, *, lost_facts: bool = False) -> None:
        """Begin to lead, with what the store knows, while *leadership_term* lasts; None: this is the only master.

        *lost_facts*: the store has lost what earlier masters had written.
        """
        facts = store.facts
        self._store, self._leadership_term, self._elected = store, leadership_term, store is not self._journal
        self._statuses.forget()
        self.state = membership.new_state(
            self._limits,
            secrets.token_bytes(32),
            term=facts.term,
            floor=facts.highest_epoch,
            next_mid=facts.next_mid,
            used=facts.used,
            now=trio.current_time(),
            elected=self._elected,
            elected_by=facts.elected_by,
            holds=not facts.highest_epoch and not (self._first and facts.term == 1),
            lost_journal=lost_facts or facts.lost,
            announce=self._announce,
            own_relay=self._relays,
        )
        self._first = False
        for event in self._standby.empty():
            self.apply(self._known_by_now(event))
        self.flush()

    def _known_by_now(self, event: Event) -> Event:
        """*event*, which came while this master stood by, with the identity of whoever said it."""
        if not isinstance(event, Received) or (first := self._unknown.pop(event.conn, None)) is None:
            return event
        connection = self._connections.get(event.conn)
        try:
            if connection is not None:
                self._identify(event.conn, connection, first)
        except ProtocolError:
            assert connection is not None
            connection.end()
        return replace(event, identity=self._identities.get(event.conn))

    def stand_by(self, answer: m.StandsBy, *, wait: bool) -> None:
        """Tell those who ask who leads; where nobody does daemons may *wait* for who will."""
        self._first = self._first and not answer.leader
        for conn in self._standby.leader_is(answer, wait=wait):
            self._connections.close(conn, encode(self._standby.answer))

    def step_down(self, reason: str, heard: int = 0) -> None:
        """Lead no more: what was not sent is dropped, and everybody is sent away."""
        if self.state is None:
            return
        self.state = None
        if self._gate is not None:
            self._gate.stand_by()
        self._held.clear()
        self.stand_by(m.StandsBy("", 0), wait=False)
        self._connections.close_all(encode(m.Bye(f"this master leads no more: {reason}"[:1000])))
        if self._leadership_term is not None:
            self._leadership_term.end(reason, heard)

    def _overslept(self) -> str:
        """Why this master judges nobody: it stood still for so long that daemons have given it up (R11); else ""."""
        limits, slept = self._limits, clock.awake_or_asleep() - self._awake_at
        most = max(limits.heartbeat_timeout / 2, limits.heartbeat_timeout - 2 * limits.heartbeat_interval)
        return f"it stood still for {slept:.1f} s" if self.state is not None and slept > most else ""

    def _start_over(self, why: str) -> None:
        """Begin anew, as a master that was started again does: members report, and their epochs go on."""
        log.warning("the master starts over", why=why)
        self._awake_at = clock.awake_or_asleep()
        self.step_down(why)
        self._lead_again()

    def _lead_again(self) -> None:
        """Where no other master can lead: under the next term, as soon as that is written (R9)."""
        if self._elected:
            return
        try:
            self._journal.begin_term()
        except sqlite3.Error as bad:
            self._cannot_write(bad)
        else:
            self.lead(self._journal)

    async def keep_awake(self) -> None:
        """Task: notice when the process stood still."""
        while True:
            if why := self._overslept():
                self._start_over(why)
            elif self.state is None:
                self._lead_again()
            self._awake_at = clock.awake_or_asleep()
            await trio.sleep(self._limits.heartbeat_interval / 2)

    def _leading(self) -> State | None:
        """The state, if this master may lead at this moment."""
        if self.state is not None and self._leadership_term is not None and not self._leadership_term.may_lead():
            self.step_down("its lease ran out")
        return self.state

    # ---- stepping ------------------------------------------------------------------------------------

    def apply(self, event: Event) -> None:
        """Step, and do what has to be done but for flush()."""
        if why := self._overslept():
            self._start_over(why)
            return  # what came is of a connection that is no more
        state = self._leading()
        if state is None:
            self._decline(event)
            return
        if isinstance(event, Received):
            if event.conn in self._connections.closing or event.conn not in self._connections:
                return
            if isinstance(event.message, m.Heartbeat):
                self._connections.confirmed(event.conn, event.message.heard)
        try:
            if not self._goes_on(state, event):
                self._carry_out(state, membership.step(state, trio.current_time(), event, propose))
        except Exception as bug:
            # Nothing of the step may be believed, and nobody has been told: as if it had died here.
            log.error("a bug: a step of the master failed", of=shown(event), trace=trace(bug))
            if isinstance(event, Received):
                self._connections.close(event.conn, encode(m.Bye(f"this made the master fail: {shown(event.message)}")))
            self._start_over(f"a step failed with {type(bug).__name__}, which is a bug")
            return
        if state.deadline < self._alarm.deadline:
            self._alarm.deadline = state.deadline

    def _goes_on(self, state: State, event: Event) -> bool:
        """Whether this is a daemon that takes up its broken connection; then its task serves that one."""
        if not isinstance(event, Received) or not isinstance(event.message, m.Hello):
            return False
        number, hello = event.conn, event.message
        if number in state.connections or may(event.identity, hello) is not None:
            return False  # it introduces itself twice, or may not
        conn = presence.returning(state, hello)
        if conn is not None and event.identity is not None and state.connections[conn].key != event.identity.key:
            conn = None
        again = self._connections.take_up(number, conn, hello.heard) if conn is not None else None
        if conn is None or again is None:
            return False
        ready = membership.step(state, trio.current_time(), Returned(conn, hello), propose)
        answers, ready.answers = ready.answers, []
        self._carry_out(state, Ready(answers=answers))
        self._put_admitted(number)
        for frame in again:
            self._connections.put(conn, frame)
        self._carry_out(state, ready)
        return True

    def _decline(self, event: Event) -> None:
        """While this master stands by: what came, and who is gone."""
        if isinstance(event, Received):
            if not self._standby.keeps(event):
                self._connections.close(event.conn, encode(self._standby.answer))
        elif isinstance(event, Disconnected):
            self._standby.gone(event.conn)

    def _carry_out(self, state: State, ready: Ready) -> None:
        """In the order that Ready says. What a slow store has to write first is held."""
        if ready.step_down is not None:
            self.step_down(ready.step_down.reason, ready.step_down.term)
            return
        for answer in ready.answers:
            said = encode(answer.message) if isinstance(answer, Send) else self._statuses.frame(state, answer)
            self._connections.put(answer.conn, said)
        for one in ready.log:
            self._statuses.counts.count(one)
            say = log.warning if one.kind in _WARNINGS else log.info
            written = self._of_kinds[one.kind].say(say, one.kind, group=one.group, epoch=one.epoch, text=one.text)
            if written and one.kept:
                event = m.EventRecord(time.time(), one.group, one.epoch, one.kind, one.text)
                self._statuses.timeline.note(event)
                self._write(partial(self._journal.add, event))
        if ready.persist is not None:
            self._failpoints.hit("before_persist")
            try:
                self._write(partial(self._store.persist, ready.persist))
            except OSError as bad:
                self.step_down(f"the journal can be neither written nor marked as one that missed a write: {bad}")
                return
        self._connections.closing.update(close.conn for close in ready.closes)
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
            once = not isinstance(message, Announce) and isinstance(message.message, m.AnswersOfTrust)
            for conn, frame in frames(message):
                if welcome:
                    self._connections.keep_from_now(conn)
                elif not once:
                    self._connections.keep(conn, frame)
                self._connections.put(conn, frame)
                if welcome:
                    self._put_admitted(conn)
        for close in ready.closes:
            if close.reason:
                self._of_strangers.say(log.info, "connection ended", reason=close.reason)
            self._connections.close(close.conn, encode(m.Bye(close.reason, close.final)) if close.reason else b"")

    def release(self) -> None:
        """The store has written more: send what was held for it."""
        for ready in self._held.release(self._store.written):
            self._tell(ready)
        self._settle_trust()
        self.flush()

    def _put_admitted(self, number: int) -> None:
        """Send a daemon its receipt and the keys to expect: it may have missed a change."""
        who, conn = self._identities.get(number), self._connections.conn_of(number)
        if self._gate is None or who is None or not self._introduced(number):
            return
        if (told := self._gate.admitted(who)) is not None:
            self._connections.put(conn, encode(told))

    def flush(self) -> None:
        """Send what the steps since the last flush had to say, one send for each connection."""
        for connection in self._connections.unsent():
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

    def _arm(self, arm: m.Arm, identity: Identity | None, source: str) -> m.Ok | m.Bye:
        """Fault injection, for whoever may, and shows the token; in clear only from this machine."""
        text = "fault injection is asked for"
        self._of_strangers.say(log.warning, text, who=source, name=arm.name, action=arm.action)
        try:
            self._check_may(identity, arm)
        except ProtocolError as refused:
            return m.Bye(str(refused)[:1000])
        if identity is EVERYTHING and not is_loopback(source):
            return m.Bye("fault injection is not allowed here: expected a token of role chaos, or loopback")
        if not self._failpoints.allows(arm.token):
            return m.Bye("fault injection is not allowed here: expected the token of WANCOLL_FAILPOINTS")
        actions = ("kill", "pause", "clear", "fail") if arm.name in STORE else ("kill", "pause", "clear")
        if arm.name not in MASTER or arm.action not in actions:
            return m.Bye(f"unknown: {arm.action} at {arm.name}; expected kill, pause or clear at {', '.join(MASTER)}")
        self._failpoints.arm(arm.name, arm.action)
        return m.Ok()

    def _check_may(self, who: Identity | None, message: m.FromPeer) -> None:
        """For what the state machine does not look at. Raises ProtocolError: *who* may not say it."""
        if (refusal := may(who, message)) is not None:
            if self.state is not None:
                self.state.refused[type(message).__name__] += 1
            raise refusal.error()

    def _write(self, write: Callable[[], None]) -> None:
        """Write to the journal: a full disk is no reason to stop the training that runs."""
        try:
            write()
        except sqlite3.Error as bad:
            self._cannot_write(bad)

    def _cannot_write(self, bad: sqlite3.Error) -> None:
        leads = "the next master takes it for lost" if self.state is not None else "this master leads again once it can"
        self._unwritable.say(log.error, f"the journal cannot be written; {leads}", reason=str(bad))

    # ---- for those who look --------------------------------------------------------------------------

    def _counted(self) -> dict[str, int]:
        return {
            "tasks": trio.lowlevel.current_statistics().tasks_living,
            "connections": len(self._connections),
            "strangers": len(self._strangers),
            "strangers_refused": self._of_strangers.count,
        }

    def families(self) -> Iterator[f.Family | None]:
        """Its metrics; None is a pause."""
        yield f.Family(f.LEADS, [((), int(self.state is not None))])
        yield f.Family(f.CONNECTIONS, [((), len(self._connections))])
        yield f.Family(f.HANDSHAKES, [(("control",), len(self._greeting))])
        yield f.Family(f.REFUSED, [(("control",), self._of_strangers.count)])
        yield f.Family(f.MASTER_QUEUED, [((), self._connections.queues.bytes)])
        yield f.Family(f.HELD, [((), self._held.frames)])
        yield from self._statuses.families(self.state)

    def look(self) -> Iterator[page.Section | None]:
        """What its page shows; None is a pause. Daemons are asked to tell more for a while."""
        self.apply(Watched(trio.current_time() + WATCHED))
        return self._statuses.look(self._leading(), self._standby.answer)

    async def keep_time(self) -> None:
        """Task: a Tick at every deadline."""
        while True:
            deadline = self.state.deadline if self.state is not None else inf
            with trio.CancelScope(deadline=deadline) as self._alarm:
                await trio.sleep_forever()
            self.apply(Tick())
            self.flush()

    # ---- connections ---------------------------------------------------------------------------------

    def lets_in(self, sock: socket.socket) -> bool:
        """Whether a connection is worth a handshake."""
        return self._greeting.lets_in(whose(sock))

    async def accept(self, stream: trio.SocketStream) -> None:
        """Handler of the listeners: whatever arrives, the master stays up."""
        limits = self._limits
        number, who = next(self._numbers), whose(stream.socket)
        try:
            sock = socket.socket(fileno=stream.socket.detach())
            tls = None if self._gate is None else Tls(self._gate.listening)
            most = 16 * limits.message_bytes, limits.send_queue_messages
            connection = Stream(sock, "this connection", *most, tls, self._connections.queues, MAGIC[:1])
        except OSError:
            return  # gone already
        self._connections.add(number, connection)
        self._strangers.add(number)
        reason = "it met a bug"
        try:
            with contained("a port of the master", lambda: connection.newest):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(connection.write_queue)
                    reason = await self._read(number, connection, who)
                    nursery.cancel_scope.cancel()
            if self._connections.end(number, connection):
                conn = self._connections.conn_of(number)
                lasting = not connection.ended or connection.overflow or self._connections.is_lost(conn)
                self.apply(Disconnected(conn, reason, lasting, round_trip(connection.socket)))
                if not self._introduced(conn):
                    self._connections.forget_kept(conn)
                self.flush()
        finally:
            if self._connections.end(number, connection):  # serve() was cancelled
                connection.send(encode(m.Bye("the master is stopping")))
                connection.end()
            self._connections.forget(number)
            self._identities.pop(number, None)
            self._unknown.pop(number, None)
            stranger = number in self._strangers
            self._strangers.discard(number)
            if not connection.ending or connection.overflow:
                connection.close()
            elif stranger:
                with self._leaving.one(who):
                    await connection.close_delivered(shield=False)
            else:
                await connection.close_delivered()

    def _introduced(self, number: int) -> bool:
        """Whether a daemon of this leader is at the other end."""
        return self.state is not None and self._connections.conn_of(number) in self.state.connections

    async def _read(self, number: int, connection: Stream, who: str) -> str:
        """Feed the state machine until the connection ends; returns why it did."""
        limits = self._limits
        decoder: Decoder[m.SaidToMaster] = Decoder(m.SaidToMaster, min(limits.message_bytes, limits.handshake_bytes))
        try:
            messages: list[m.SaidToMaster] = []
            with self._greeting.one(who) as greeting:
                nonce, ticket = await self._shake_hands(connection), None
                while not messages and (data := await connection.receive()):
                    messages = decoder.feed(data)
                if connection.is_foreign:
                    ticket = await self._switch.shown(trio.socket.from_stdlib_socket(connection.socket))
            # Outside, nothing ends it for being late: what came in time may be read late, where we stood still.
            if greeting.cancelled_caught:
                raise ProtocolError(f"did not introduce itself, it {why_ended(greeting)}", expected="Hello first")
            if ticket is not None:
                self._strangers.discard(number)
                with contextlib.suppress(OSError), connection.hand_over() as sock:
                    await self._switch.carry(ticket, sock, who)
                return "two daemons have met"
            if not messages:
                reason = connection.ended if connection.ending else ""
                self._of_strangers.say(log.info, "connection ended", who=who, reason=reason or "said nothing")
                return connection.ended or "the master ended it"
            messages[0] = self._introduce(number, connection, messages[0], nonce)
            if isinstance(messages[0], m.AtRelay):
                return await self._at_relay(number, connection, messages[0], who)
            await self._hear(number, connection, messages)
            if self._introduced(number):
                self._strangers.discard(number)
                self._greeting.know(who)
            while data := await connection.receive():
                if number not in self._unknown:
                    decoder.allow(limits.message_bytes)  # a Report may be as large as an Epoch
                await self._hear(number, connection, decoder.feed(data))
            return connection.ended or "the master ended it"
        except TlsFailed as failed:
            self._of_strangers.say(log.info, "connection ended", who=who, reason=str(failed))
            if connection.tls is not None and connection.tls.plain:
                connection.tls = None  # it may as well read why
                connection.send(encode(m.Bye(_ONLY_TLS, True)))
            connection.end()
            return str(failed)
        except ProtocolError as nonsense:
            reason = _NO_TLS if begins_tls(connection.newest) and self._gate is None else str(nonsense)
            if not self._introduced(number):
                self._of_strangers.say(log.info, "connection ended", who=who, reason=reason)
            connection.send(encode(m.Bye(f"this connection {reason}"[:1000])))
            connection.end()
            return reason

    async def _at_relay(self, number: int, connection: Stream, first: m.AtRelay, who: str) -> str:
        """A daemon is to be met at this master. Raises ProtocolError: it may not be."""
        m.check_protocol(first)
        self._check_may(self._identity(number), first)
        self._strangers.discard(number)
        if self._gate is not None:
            self._greeting.know(who)
        await self._switch.serve(first.daemon, connection)
        return connection.ended

    async def _shake_hands(self, connection: Stream) -> bytes:
        """Over TLS: the challenge that was sent, which is to be answered first; in clear, or with a ticket, b"".

        Raises:
            TlsFailed: it does not come through.
            ProtocolError: the other end is of another version.
        """
        if connection.tls is None:
            return b""
        await connection.shake_hands()
        if connection.is_foreign:
            return b""
        if not connection.tls.speaks:
            connection.send(encode(m.Bye(_OTHER_VERSION)))  # a running daemon is there again once both are alike
            raise ProtocolError(_OTHER_VERSION)
        nonce = os.urandom(NONCE_BYTES)
        connection.send(encode(m.Challenge(nonce)))
        return nonce

    def _introduce(self, number: int, connection: Stream, first: m.SaidToMaster, nonce: bytes) -> m.SaidToMaster:
        """The first message of a connection, without the proof around it; whoever has signed it is known from now on.

        Raises:
            ProtocolError: it is not signed, or the key is not let in.
        """
        if self._gate is None or connection.tls is None:
            return first
        if not isinstance(first, m.Signed):
            raise ProtocolError(f"may not begin with {type(first).__name__} over TLS", expected="Signed")
        message: m.FromPeer = check_first(first, connection.tls.key, nonce, m.FromPeer)
        if self.state is None and self._gate.shares:
            self._unknown[number] = first  # until this master leads
        else:
            self._identify(number, connection, first)
        return message

    def _identify(self, number: int, connection: Stream, first: m.Signed) -> None:
        assert self._gate is not None
        try:
            self._identities[number] = self._gate.identify(first, self.state.daemons if self.state is not None else ())
        except ConfigError as refused:
            connection.send(encode(m.Bye(str(refused)[:1000], not isinstance(refused, NotNow))))
            raise ProtocolError(str(refused)) from refused

    def _at_the_gate(self, number: int, connection: Stream, message: m.FromPeer) -> bool:
        """Whether it is about trust, and the gate has dealt with it. Raises ProtocolError: it may not be said."""
        if not isinstance(message, m.AboutTrust):
            return False
        if self._gate is None:
            raise ProtocolError("asks for tokens or keys of a master without TLS", hint=_START_SECURE)
        state, conn = self._leading(), self._connections.conn_of(number)
        if state is None:
            self._connections.close(conn, encode(self._standby.answer))  # it knows no tokens
            return True
        who = self._identities.get(number)
        self._check_may(who, message)
        if isinstance(message, m.RotateKey):
            self._failpoints.hit("before_rotation")
        settled = self._gate.settled
        answer = self._gate.answer(message, who)
        if isinstance(message, m.RotateKey):
            self._failpoints.hit("after_rotation")
        if settled:
            self._trust_asked = self._store.asked
        self._carry_out(state, Ready(messages=[Send(conn, answer)], closes=[Close(conn, "")]))  # once it is written
        self._settle_trust()
        return True

    def _settle_trust(self) -> None:
        """What the gate had written counts as soon as it is: who has no right any more is sent away."""
        gate = self._gate
        if gate is None or gate.settled or self._store.written < self._trust_asked:
            return
        before = gate.keys
        done = gate.settle()
        if done is not None and self.state is not None:
            self._carry_out(self.state, Ready(log=[Record("", 0, *done)]))
        self._send_away()
        if gate.keys != before:
            for number in list(self._identities):
                self._put_admitted(number)
        self.flush()

    def _send_away(self) -> None:
        """Those whose token or key was revoked, or who are not known any more."""
        reasons: dict[int, str] = {}
        for number, who in self._identities.items():
            conn, connection = self._connections.conn_of(number), self._connections.get(number)
            if self._gate is None or connection is None:
                continue
            try:
                self._gate.check(who)
            except ConfigError as refused:
                connection.send(encode(m.Bye(str(refused)[:1000], True)))
                connection.end()
                self._connections.closing.add(conn)  # nor is heard what it has said before
                reasons[conn] = f"{'it' if refused.who == who.name else refused.who} {refused.what}"
        if reasons:
            self.apply(SentAway(reasons))

    async def _looked_up(self, hello: m.Hello, source: str) -> m.Hello:
        """With addresses in place of names: what a name server says to each member could differ.

        Raises:
            ProtocolError: a name is not found in time, or leads elsewhere; what was found is nobody's to know.
        """
        found: list[str] = []
        bad = OSError, ValueError, RuntimeError, ProtocolError
        with trio.move_on_after(self._limits.handshake_timeout), contextlib.suppress(*bad):
            for address in hello.addresses:
                if not announced.is_name(address):
                    found.append(address)
                    continue
                self._lookups = {name: one for name, one in self._lookups.items() if one.borrowed_tokens}
                place = self._lookups.setdefault(hello.daemon, trio.CapacityLimiter(len(self._lookups) < _LOOKUPS))
                look = partial(socket.getaddrinfo, *split_address(address), type=socket.SOCK_STREAM)
                answers = await trio.to_thread.run_sync(look, abandon_on_cancel=True, limiter=place)
                new = sorted({join_address(str(where[0]), int(where[1])) for *_, where in answers})
                announced.check(new, source, self._announce)
                found += new
            return replace(hello, addresses=found[:8])
        raise ProtocolError(
            "announces a name that this master cannot look up, or that leads elsewhere than to it",
            expected=f"a name of {source or 'its own'}, or an address",
            got=", ".join(hello.addresses), hint="give its daemon --advertise with an address",
        )  # fmt: skip

    def _identity(self, number: int) -> Identity | None:
        """The identity at the other end of connection *number*; see Received."""
        return EVERYTHING if self._gate is None else self._identities.get(number)

    async def _hear(self, number: int, connection: Stream, messages: list[m.SaidToMaster]) -> None:
        turn = trio.current_time() + _TURN
        for message in messages:
            if trio.current_time() > turn:
                self.flush()
                await trio.lowlevel.checkpoint()
                turn = trio.current_time() + _TURN
            if isinstance(message, m.Signed):
                raise ProtocolError("signs a message that is not its first, or in clear")
            source = ""
            if isinstance(message, m.Hello):
                source = _source(connection) if self._gate is not None else ""
                message = announced.settled(message, source, self._announce)
                if may(self._identity(number), message) is None:
                    message = await self._looked_up(message, source)
            if connection.ending or self._connections.conn_of(number) in self._connections.closing:
                break
            if self._at_the_gate(number, connection, message):
                continue
            if isinstance(message, m.Arm) and not self._introduced(number):
                connection.send(encode(self._arm(message, self._identity(number), whose(connection.socket))))
                connection.end()
            else:
                self.apply(Received(self._connections.conn_of(number), message, self._identity(number), source))
        self.flush()


def _source(connection: Stream) -> str:
    """The address that a connection comes from."""
    with contextlib.suppress(OSError):
        return str(connection.socket.getpeername()[0]).removeprefix("::ffff:")
    return "nowhere"  # it is gone
