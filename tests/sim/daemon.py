"""The peer daemon as a thin shell around the real Member: control connection, sessions, engine, links.

Mirrors wancoll/peer/control.py (run, _serve_once, _read, _heartbeat), daemon.py (_members_hear, _master_connected,
_master_synced, watch_master, stop_unheard, watch_engine, add, remove) and session.py (serve, _take, _post, run,
_to_master, _start, op_finished, op_cancelled). The watcher of slow operations (watch/watcher.py) is left out.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from tests.sim.clock import Process, Timer
from tests.sim.engine import ITEM, Engine
from tests.sim.lent import Lent
from tests.sim.links import LinkHub
from tests.sim.network import End
from wancoll.collective import DATALESS, SAME_RESULT, Kind
from wancoll.limits import PROTOCOL_VERSION
from wancoll.peer.core import commands as cmd
from wancoll.peer.core import links
from wancoll.peer.core import member as core
from wancoll.peer.core.calls import ResolvedCall
from wancoll.peer.core.liveness.commit_lease import CommitLease
from wancoll.peer.core.liveness.masters import FIRST_PATIENCE
from wancoll.peer.core.op import Op
from wancoll.wire import messages as m
from wancoll.wire.kept import Kept, counts

if TYPE_CHECKING:
    from tests.sim.client import Client
    from tests.sim.world import World


_PLAIN = 8  # every so manieth op is said by the daemon


class Daemon(Process):
    """See the module."""

    def __init__(self, world: World, name: str, host: str, incarnation: int, ended: list[int]) -> None:
        super().__init__(world.clock, name, host)
        self.world, self.incarnation, self._killed_before = world, incarnation, ended
        self.limits = world.limits_of_daemon()
        self.address = f"{host}:7000"
        self.sessions: list[Session] = []
        self.engine = Engine(
            self,
            world.engine_delay,
            self._done,
            self._cancelled,
            self._mismatch,
            self._down,
            self._noted,
            self._saying,
            world.copies,
            self._finished,
            self._told,
        )
        self.links = LinkHub(world, self, self.engine)
        self.by_engine_id: dict[int, Session] = {}
        self._ended: dict[int, str] = {}
        self._next_range = 1
        # The control connection.
        self.end: End | None = None
        self.connected = False
        self.number = self.term = self.master = 0
        self._session = self._heard = 0
        self._kept: Kept[m.FromPeer] = Kept()
        self._heard_at = self._welcomed_at = 0.0
        self._commit_lease = CommitLease(world.clock.now)
        self._interval, self._timeout = world.limits.heartbeat_interval, world.limits.heartbeat_timeout
        self._pause = 0.05
        self._nonsense = False
        self._try = 0  # counts connections, made or not
        self._failed, self._tried = 0, ""  # tries since there was a master; the address of the last one
        self._no_master_since = world.clock.now
        self._no_master_reason = "no connection yet"
        self._grace: Timer | None = None
        world.network.listen(self.address, self, self._accept)
        self.after(0.0, self._connect)
        self._watch_master()

    # ---- control.py ----------------------------------------------------------------------------------

    @property
    def open(self) -> bool:
        return self.connected or (self._session > 0 and not self._kept.lost)

    def send(self, message: m.FromPeer) -> None:
        if self.open and counts(message):
            self._kept.add(message, 0)
        if self.connected and self.end is not None:
            self.world.said(self.name, "master", message)
            self.end.send(message)

    def _connect(self) -> None:
        self._try += 1
        this, self._nonsense = self._try, False
        patience = FIRST_PATIENCE * 1.5 ** min(self._failed // 2, 16)  # see Masters.patience
        timeout = self.after(min(self.limits.connect_timeout, patience), lambda: self._over(this, "no answer"))

        def connected(end: End | None) -> None:
            if self._try != this or timeout.call is None:
                if end is not None:
                    end.close("too late")
                return
            timeout.cancel()
            if end is None:
                self._over(this, "connection refused")
                return
            self.end = end
            end.on_message = lambda message: self._read(this, message)
            end.on_close = lambda reason: self._over(this, reason)
            addresses, world = [self.address], self.world
            head = (
                PROTOCOL_VERSION,
                self.name,
                self.incarnation,
                addresses,
                world.odd.lanes,
                world.site(self.host),
                "1",
            )
            session = {"session": self._session if self.open else 0, "heard": self._heard, "dial": this}
            session["master_grace"], session["ended"] = self.limits.master_grace, self._killed_before
            self._commit_lease.said_hello(self.clock.now)
            end.send(m.Hello(*head, measures=world.odd.measures, term=self.term, master=self.master, **session))
            welcome = min(self.limits.handshake_timeout, patience)
            self.after(welcome, lambda: self.connected or self._over(this, "no welcome"))
            self.after(self._interval, lambda: self._heartbeat(this, 1))
            self._heard_at = self.clock.now

        self._tried = self.world.master_address(self._tried)
        self.world.network.connect(self, self._tried, "control", 60.0, connected)

    def _over(self, this: int, reason: str) -> None:
        """The try or the connection is over; the next one follows."""
        if self._try != this:
            return
        self._try += 1
        if self.end is not None:
            self.end.close(reason)
            self.end = None
        was, self.connected = self.connected, False
        self._failed += 1
        if was:
            self._pause, self._failed = 0.05, 0
        self._no_master_reason = reason
        if was and (not self._nonsense or self.clock.now - self._welcomed_at >= self._timeout):
            self._no_master_since = self.clock.now
        self._watch_master()
        self.after(self._pause, self._connect)
        self._pause = min(2 * self._pause, 0.5)

    def _read(self, this: int, message: m.FromMaster) -> None:
        if self._try != this:
            return
        self.world.heard(self.name, "master", message)
        if isinstance(message, m.Bye):
            self._session, self._nonsense = 0, True
            self._over(this, f"the master said: {message.reason}")
            if message.final:
                self.world.turned_away(self)
            return
        self._heard_at = self.clock.now
        self._heard += counts(message)
        if isinstance(message, m.Welcome):
            if message.term < self.term:
                self._over(this, "an old master answers")
                return
            self.term, self.master, self._welcomed_at = message.term, message.master, self.clock.now
            self._interval, self._timeout = message.heartbeat_interval, message.heartbeat_timeout
            self.connected = True
            self._commit_lease.answered()
            for session in self.sessions:
                session.member.master_is_back()
            if message.resumed:
                again = self._kept.again(message.heard)
                self.world.judge.check(again is not None, f"{self.name} and the master count differently")
                for one in again or ():
                    self.world.said(self.name, "master", one)
                    self.end.send(one)
                return
            self._session, self._heard, self._kept = message.session, 0, Kept()
            self.number += 1
            for session in list(self.sessions):
                session.run(session.member.reconnected(self.number, self.master))
                self._remember(session)
            if self._ended:
                self.send(m.Ended([(group, mid) for mid, group in self._ended.items()]))
            self.send(m.Heartbeat(0))
        elif isinstance(message, m.Pong):
            if message.number == 0:
                self._synced()
            else:
                self._commit_lease.answered(message.number)
                self._kept.confirmed(message.heard)
        elif self.connected:
            self._master_says(message)

    def _heartbeat(self, this: int, number: int) -> None:
        if self._try != this:
            return
        if self.connected:
            if self.clock.now - self._heard_at > max(self._timeout, 2 * self._interval):
                self._over(this, "the master is silent")
                return
            self._commit_lease.said(number, self.clock.now)
            self._look()
            self.send(m.Heartbeat(number, self._called(), heard=self._heard))
            number += 1
        self.after(self._interval, lambda: self._heartbeat(this, number))

    def _called(self) -> list[tuple[int, int, int, int]]:
        told = ((one.peek, one.called) for one in self.sessions if one.peek.epoch and not one.peek.over)
        return [(one.mid, one.epoch_number, called, one.collectives.settled) for one, called in told]

    # ---- daemon.py -----------------------------------------------------------------------------------

    def _look(self) -> None:
        for session in list(self.sessions):
            if not session.engine.lent or not session.engine.look():
                session.run(session.member.ask(self.clock.now))

    def add(self, session: Session) -> None:
        self.sessions.append(session)
        if self.open:
            session.run(session.member.join())

    def remove(self, session: Session) -> None:
        if session in self.sessions:
            self.sessions.remove(session)
            self._remember(session)

    def _remember(self, session: Session) -> None:
        if session.peek.over and session.peek.mid:
            self._ended[session.peek.mid] = session.peek.group

    def next_engine_id(self) -> int:
        self._next_range += 1
        return (self._next_range - 1) << 40

    def _master_says(self, message: Any) -> None:
        now = self.clock.now
        if isinstance(message, m.Probe):
            self._probe(message)
            return
        if isinstance(message, m.Relays):
            return  # where daemons meet the network knows
        if isinstance(message, m.MeasureLink):
            rtt, bandwidth = self.world.measured(self.name, message.daemon, message.nbytes)
            report = m.LinkReport([m.LinkMeasure(message.daemon, rtt, bandwidth, 0, 0.0)])
            self.after(0.1, lambda: self.send(report))
            return
        addressed = [one for one in self.sessions if one.peek.addressed(message)]
        if isinstance(message, core.STOPPING):
            for session in addressed:
                session.hush()
        self.engine.take_events()
        for session in addressed:
            if isinstance(message, m.Evicted):
                self.world.judge.evicts(session.member, message)
            session.unhush()
            commands = session.member.hear(message, now, self.number, self.master)
            if isinstance(message, m.ContributeZeros):
                op = session.member.collectives.open.get(message.seq)
                if op is not None and op.zeros:
                    self.world.judge.contributes_zeros(session.member.name, op.seq, message.call.grace)
            session.run(commands)
            if isinstance(message, m.Refused):
                break
        if isinstance(message, m.Evicted) and not any(one.peek.addressed(message) for one in self.sessions):
            self.send(m.Ended([(message.group, message.mid)]))

    def _probe(self, ask: m.Probe) -> None:
        """Mirrors lanes.probe."""
        timeout = ask.way.probed_within(self.limits)

        def answer(ok: bool, reason: str, refused: bool = False) -> None:
            if expired.call is not None:
                expired.cancel()
                self.send(m.ProbeResult(ask.group, ask.joiner, ask.prober, ask.target, ok, reason, refused, ask.way))

        expired = self.after(timeout, lambda: None)
        late = f"no answer within {timeout} s"
        expired.call = lambda: self.send(
            m.ProbeResult(ask.group, ask.joiner, ask.prober, ask.target, False, late, way=ask.way)
        )

        def connected(end: End | None) -> None:
            if end is None:
                answer(False, "connection refused", True)
                return
            end.on_message = lambda told: (
                answer(told.daemon == ask.daemon, f"daemon {told.daemon}"),
                end.close("done"),
            )
            end.on_close = lambda reason: answer(False, reason)
            end.send(m.ProbeHello(PROTOCOL_VERSION, self.name))

        self.world.network.connect(self, ask.addresses[0], "probe", self.limits.lane_timeout, connected, ask.way)

    def _accept(self, end: End) -> None:
        """The data port: a lane or a probe."""

        def first(message: m.LaneHello | m.ProbeHello) -> None:
            if isinstance(message, m.ProbeHello):
                end.send(m.LaneWelcome(self.name))
            else:
                self.links.accept(end, message)

        end.on_message = first

    def _synced(self) -> None:
        for session in list(self.sessions):
            member = session.member
            if member.epoch is not None and member.master_session.connection != self.number:
                session.run(member.forgotten(self._no_master_reason))

    def _watch_master(self) -> None:
        """Members whose master stays away for master_grace are told; mirrors watch_master without its polls."""
        if self._grace is not None:
            self._grace.cancel()
        if self.connected or not self.alive:
            return
        self.stop_unheard()
        self._look()
        now, grace, silent = self.clock.now, self.limits.master_grace, self._timeout
        due = []
        for session in list(self.sessions):
            waited = now - max(self._no_master_since, session.attached_at)
            if waited >= grace - 1e-9:
                session.run(session.member.master_unreachable("master", waited, self._no_master_reason))
                continue
            if waited >= silent - 1e-9:
                session.run(session.member.without_master(now))
                due.append(min(self.limits.heartbeat_interval, grace - waited))
            else:
                due.append(min(silent, grace) - waited)
        self._grace = self.after(min(due, default=grace) + 0.01, self._watch_master)

    def stop_unheard(self) -> None:
        waited = self._commit_lease.unheard(self.clock.now)
        if self.leaseless:
            for session in [one for one in self.sessions if one.peek.votes]:
                session.run(session.member.master_unreachable("master", waited, self._no_master_reason))

    # ---- the engine's events -------------------------------------------------------------------------

    def _done(self, engine_id: int, digest: int, sent: int, voted: bool) -> None:
        self.stop_unheard()
        session = self.by_engine_id.pop(engine_id, None)
        if session is not None:
            session.released(engine_id)
            if engine_id in self.engine.flipped:
                self.world.judge.flipped.add((session.member.name, *self.engine.flipped[engine_id]))
            session.run(session.member.op_finished(engine_id, digest, sent, now=self.clock.now, voted=voted))

    def _cancelled(self, engine_id: int) -> None:
        session = self.by_engine_id.pop(engine_id, None)
        if session is not None:
            session.released(engine_id)
            session.run(session.member.op_cancelled(engine_id, now=self.clock.now))

    @property
    def leaseless(self) -> bool:
        """Whether the commit lease is over."""
        return self._commit_lease.is_over(self.clock.now, self._timeout, self.limits.master_grace)

    def _finished(self, engine_id: int, digest: int, sent: int, compared: bool) -> bool | None:
        session = self.by_engine_id[engine_id]
        taken = session.engine.finished(engine_id, digest, sent, compared)
        if taken and engine_id in self.engine.flipped:
            self.world.judge.flipped.add((session.peek.name, *self.engine.flipped[engine_id]))
        return taken

    def _told(self, engine_id: int) -> None:
        if (session := self.by_engine_id.get(engine_id)) is not None:
            session.engine.commit()

    def _mismatch(self, engine_id: int, seq: int) -> None:
        session = self.by_engine_id.get(engine_id)
        if session is not None:
            session.run(session.member.mismatch(seq))

    def _noted(self, link: int, note: bytes) -> None:
        self.stop_unheard()
        self.links.noted(link, note)

    def _saying(self, engine_id: int, note: bytes) -> None:
        self.world.judge.notes(self.by_engine_id[engine_id].peek, note)

    def _down(self, *what: Any) -> None:
        self.after(0.0, lambda: self.links.lane_down(*what))


class Session:
    """A client's connection and member."""

    def __init__(self, daemon: Daemon, client: Client, start_world: int, min_world: int) -> None:
        self.daemon, self.client, self.world = daemon, client, daemon.world
        self.attached_at = daemon.clock.now
        first = daemon.next_engine_id()
        head = (self.world.group, client.name, start_world, min_world, first, daemon.limits)
        self.peek = core.Member(*head, shards=self.world.shards)
        self.links = daemon.links.member(self._links_say)
        self.arena: dict[int, tuple[list[int], list[int]]] = {}  # by the client's number: input, result
        self._needed: dict[int, set[int]] = {}  # by channel: members to whom this epoch's links are
        self._in_engine: set[int] = set()
        self._hushed = False
        self._queue: deque[m.FromClient] = deque()
        self._closed = False
        self._taken = 0
        self.engine = Lent(self)
        daemon.add(self)

    @property
    def member(self) -> core.Member:
        """Its state is the daemon's from here on; *peek* is enough for what the engine never changes."""
        self.engine.hold()
        return self.peek

    @property
    def at_rest(self) -> bool:
        """Whether the shell has nothing under way."""
        return not (self._in_engine or self._hushed or self._closed or self._queue)

    @property
    def called(self) -> int:
        """The highest seq that the client has called."""
        return self.engine.called if self.engine.lent else self.peek.collectives.called

    # ---- the client's connection ---------------------------------------------------------------------

    def take(self, message: m.FromClient) -> None:
        self._queue.append(message)
        self._room()
        self.engine.lend()

    def _room(self) -> None:
        while self._queue and not self._closed:
            if self.peek.in_flight >= self.daemon.limits.ops_in_flight and not self.peek.over:
                return
            message = self._queue.popleft()
            if isinstance(message, m.Post) and self.engine.take(message):
                self._taken = message.id
                continue
            if isinstance(message, m.Detach):
                self.end("detached")
                return
            assert isinstance(message, m.Post)
            self.daemon.stop_unheard()
            call = self.member.call(message)
            self._taken = message.id
            input_buffer, result_buffer = self.arena[message.id]
            assert len(input_buffer) * ITEM >= call.input_bytes
            result_buffer[:] = [-1] * (call.result_bytes // ITEM)
            self.run(self.member.post(message, call, self.daemon.clock.now))

    @property
    def untold(self) -> list[int]:
        """The client's numbers of calls that were taken, and of which it was told nothing."""
        return sorted(number for number in self.client.open.keys() - self.client.answered if number <= self._taken)

    def end(self, reason: str) -> None:
        """The client has gone."""
        if not self._closed:
            self._closed = True
            self.run(self.member.leave(reason, died=reason != "detached"))
            if not self._in_engine:
                self.daemon.remove(self)

    # ---- commands ------------------------------------------------------------------------------------

    def run(self, commands: list[cmd.Command]) -> None:
        for command in commands:
            if isinstance(command, cmd.SendNote):
                self.world.judge.notes(self.peek, command.note)
        self.world.judge.counts(self.peek)
        if self.world.lends:
            self.daemon.after(0.0, self.engine.lend)
        for command in commands:
            match command:
                case cmd.ToMaster(message):
                    if not self.peek.master_session.reporting or isinstance(message, m.Report | m.Leave):
                        self.world.judge.says(self.peek, message)
                        self.daemon.send(message)
                case cmd.ToClient(message):
                    if isinstance(message, m.Failure) and not message.id:
                        message = replace(message, taken=self._taken)
                    self.world.told(self, message)
                    self.daemon.after(0.0, self._room)
                case cmd.SendNote(mids, note):
                    for mid in mids:
                        self.daemon.links.send_note(self.links, mid, note)
                case cmd.StartOp(op, beside):
                    self._start(op, beside=beside)
                case cmd.Committed():
                    pass
                case cmd.HandOver(op):
                    self.arena[op.client_id][1][:] = op.memory[1]
                case cmd.CancelOp(engine_id):
                    self.daemon.engine.cancel(engine_id)
                case _:
                    if isinstance(command, links.Enter):
                        self.world.judge.enters(self.peek.name, command.epoch)
                        self._needed = {links.COLLECTIVES: set(command.neighbours), links.P2P: set()}
                    elif isinstance(command, links.Need):
                        self._needed[command.channel] |= command.mids
                    self.daemon.links.ask(self.links, command)

    def _links_say(self, told: links.Told) -> None:
        if isinstance(told, links.LinkUnreachable):
            wanted = told.other.mid in self._needed[told.channel]
            self.world.judge.check(wanted, f"{self.peek.name} blames its link to {told.other.name} without need")
        if not isinstance(told, links.Noted) or not self.engine.hear(told.mid, told.note):
            self.run(self.member.links_say(told, self.daemon.clock.now))

    def _start(self, op: Op, *, beside: bool) -> None:
        self._in_engine.add(op.engine_id)
        self.daemon.by_engine_id[op.engine_id] = self
        resolved = op.resolved
        assert resolved is not None
        self.world.judge.begins(self.peek, op.seq)
        if op.zeros:
            op.memory = op.memory or ([0] * (resolved.input_bytes // ITEM), [])
        input_buffer, result_buffer = op.memory if op.zeros else self.arena[op.client_id]
        channel = links.P2P if op.p2p else links.COLLECTIVES
        head = (op.engine_id, self.links.stamp(channel), op.seq, resolved.fingerprint, resolved.schedule)
        if beside:
            result_buffer = [-1] * (resolved.result_bytes // ITEM)
        else:
            result_buffer[:] = [-1] * (resolved.result_bytes // ITEM)
        digests = op.kind not in DATALESS and op.kind is not Kind.send
        numbers = self.links.numbers(channel)
        hearers: tuple[int, ...] = ()
        if op.engine_id % _PLAIN and not beside and not self._hushed:
            hearers = tuple(self.links.links[mid, links.COLLECTIVES].number for mid in op.hearers)
        said = (op.vote, hearers) if hearers else (b"", ())
        self.daemon.engine.post(*head, numbers, input_buffer, result_buffer, digests, op.kind in SAME_RESULT, *said)

    def start_lent(
        self, engine_id: int, seq: int, number: int, resolved: ResolvedCall, compared: bool, vote: bytes, to: list[int]
    ) -> None:
        """The engine starts a call by itself."""
        self._in_engine.add(engine_id)
        self.daemon.by_engine_id[engine_id] = self
        self.world.judge.begins(self.peek, seq)
        input_buffer, result_buffer = self.arena[number]
        result_buffer[:] = [-1] * (resolved.result_bytes // ITEM)
        hearers = tuple(self.links.links[mid, links.COLLECTIVES].number for mid in to)
        head = (engine_id, self.links.stamp(links.COLLECTIVES), seq, resolved.fingerprint, resolved.schedule)
        numbers = self.links.numbers(links.COLLECTIVES)
        self.daemon.engine.post(*head, numbers, input_buffer, result_buffer, True, compared, vote, hearers)

    def ended_lent(self, engine_id: int) -> None:
        """Nothing of it is in the engine any more."""
        self._in_engine.discard(engine_id)
        self.daemon.by_engine_id.pop(engine_id, None)

    def hush(self) -> None:
        """The engine says no note of this member any more, nor of what begins before unhush()."""
        self.engine.hold()
        self._hushed = True
        for engine_id in self._in_engine:
            self.daemon.engine.withhold(engine_id)

    def unhush(self) -> None:
        self._hushed = False

    def released(self, engine_id: int) -> None:
        self._in_engine.discard(engine_id)
        if self._closed and not self._in_engine:
            self.daemon.remove(self)
