"""The peer daemon: one engine, one data port, one control connection, many clients. A trio shell."""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import secrets
import socket
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import structlog
import trio
from msgspec.structs import replace

from wancoll import resources
from wancoll.errors import ConfigError, ProtocolError
from wancoll.failpoints import Failpoints
from wancoll.limits import THREADS, keep_newest
from wancoll.local import default_socket, default_state, join_address, split_addresses
from wancoll.metrics.core.operations import Operations
from wancoll.metrics.guard import listeners_for
from wancoll.native.calls import Caller
from wancoll.native.engine import Calls, Cancelled, Done, Engine, LaneDown, Mismatch, kernel_name
from wancoll.native.seal import check_possible
from wancoll.net import clock
from wancoll.net.contain import contained
from wancoll.net.dial import DialFailed
from wancoll.net.listen import claim_socket, open_listeners, serve_connections
from wancoll.net.wallet import Wallet
from wancoll.peer import process_lock
from wancoll.peer.arena import Arena, RingMemory
from wancoll.peer.config import PeerConfig
from wancoll.peer.control import Control
from wancoll.peer.core import outcomes
from wancoll.peer.core.member import STOPPING
from wancoll.peer.core.tracing import Recorder
from wancoll.peer.daemon_metrics import DaemonMetrics
from wancoll.peer.door import FrontDoor
from wancoll.peer.links.beside import is_own, listeners_beside
from wancoll.peer.links.hub import LinkHub
from wancoll.peer.links.lanes import check_congestion_control, check_interface
from wancoll.peer.links.probes import probe
from wancoll.peer.links.relays import Relays
from wancoll.peer.links.traffic import Traffic
from wancoll.peer.session import Session
from wancoll.peer.watch.measure import Measurer
from wancoll.peer.watch.watcher import Watcher
from wancoll.trust.folder import MASTER_KEY
from wancoll.trust.token import parse
from wancoll.wire import messages as m

if TYPE_CHECKING:
    from wancoll.metrics.port import MetricsPort

log = structlog.get_logger("wancoll.peer")

MOST_CALLED = 1024  # members of which a heartbeat tells
MOST_MOVED = 64  # links that are looked at for one
_MOST_NEARBY = 1024  # daemons behind the same NAT
_MOST_ENDED = 1024  # members that are gone, of which each new master is told
_MASTER_POLL = 0.1  # seconds between looks at master_grace, only while there is no master


@dataclass(frozen=True, slots=True)
class Started:
    """What the daemon is bound to; *answered* is set once a master has taken it in."""

    name: str
    socket: str
    data: list[str]
    master: str
    answered: trio.Event


class Daemon:
    """The peer daemon. Made by serve().

    *nursery* owns all its tasks, and *stop* is set where it shall end. *data_socket* is its first listener for lanes.
    Control says what *incarnation*, *ended* and *wallet* are.
    """

    def __init__(
        self,
        config: PeerConfig,
        name: str,
        incarnation: int,
        ended: list[int],
        engine: Engine,
        data_socket: socket.socket,
        nursery: trio.Nursery,
        stop: trio.Event,
        wallet: Wallet | None = None,
    ) -> None:
        self.config, self.name, self.engine = config, name, engine
        self.arena_bytes = config.arena_bytes or resources.total_memory()
        self.failpoints = Failpoints(config.failpoint_token)
        self._wallet = wallet
        self.links = LinkHub(engine, config, name, nursery, wallet)
        self.control = Control(
            config,
            name,
            incarnation,
            ended,
            data_socket,
            self._master_says,
            self._master_connected,
            self._master_lost,
            self._master_synced,
            self._beat,
            wallet,
        )
        self.relays = self.links.connector.relays = Relays(
            name, wallet, config.limits, nursery, lambda: self.control.master_address, self.links.accept,
            near_only=config.near_only,
        )  # fmt: skip
        self.measurer = Measurer(self, self._is_busy)
        self.watcher = Watcher(self)
        self._nursery = nursery
        self.sessions: list[Session] = []  # of those who are attached
        self._by_engine_id: dict[int, Session] = {}
        self._by_caller: dict[int, Session] = {}
        self.touched: set[Session] = set()  # see Host
        self.measuring = False
        self.now = trio.lowlevel.current_clock().current_time  # as trio.current_time() does, by two calls less
        self._no_master_since = self.now()
        self._no_master_reason = "no connection yet"
        self._probes = 0  # under way
        self._relays_told = False  # by the master that is connected
        self._ended: dict[int, str] = {}  # members that are out: groups by mid, oldest first
        self.answered = trio.Event()  # once a master has taken it in
        self.ending: m.Failure | None = None  # it ends: what clients are told
        self.leaving: m.Failure | None = None  # it will, once its members have left: the same
        self.askers = 0  # operators on the unix socket who will be told that they have
        self._stop = stop
        self.operations: Operations | None = None  # what is counted for metrics, where they are told
        self.recorder: Recorder | None = None  # while somebody traces

    # ---- sessions ------------------------------------------------------------------------------------

    def _is_busy(self) -> bool:
        """Whether an operation is under way."""
        return bool(self._by_engine_id) or any(session.busy for session in self.sessions)

    def settle(self) -> None:
        """All that has come is taken in: let the engine take calls by itself again where nothing stands in its way."""
        touched, self.touched = self.touched, set()
        for session in touched:
            try:
                session.settle()
            except ProtocolError as bad:
                session.nonsense(bad)
            except Exception as bug:
                session.met_a_bug(bug, "its calls")

    def caller(self, number: int, ring: RingMemory, arena: Arena) -> Caller:
        """See Host."""
        return Caller(self.engine, number, ring.map, (arena.address, arena.nbytes), ring.wake)

    def allow_commits(self) -> None:
        """See Host."""
        limits, lease = self.config.limits, self.control.commit_lease
        self.engine.lease(lease.ends(self.control.heartbeat_timeout, limits.master_grace))

    def has(self, group: str, name: str) -> bool:
        """Whether a client is attached as this member, and has not left."""
        members = (session.peek for session in self.sessions)
        return any((one.group, one.name) == (group, name) and not one.over for one in members)

    def add(self, session: Session) -> None:
        """A client has attached."""
        self.sessions.append(session)
        self._by_caller[session.number] = session
        if self.control.open:
            session.run(session.member.join())
        else:
            self._say_who_is_missing(session)

    def remove(self, session: Session) -> None:
        """A client is gone and the engine has let go of its ops."""
        if session in self.sessions:
            self.sessions.remove(session)
            del self._by_caller[session.number]
            self._remember(session)

    def started(self, engine_id: int, session: Session) -> None:
        """An op of *session* is in the engine."""
        self._by_engine_id[engine_id] = session
        self.measurer.op_started()

    def ask_to_leave(self, ask: m.AskToLeave) -> list[Session]:
        """See Host."""
        log.warning("an operator asks for a leave", group=ask.group, name=ask.name, reason=ask.reason)
        by = trio.current_time() + ask.within
        chosen = [
            one
            for one in self.sessions
            if not one.member.over and (not ask.group or (one.member.group, one.member.name) == (ask.group, ask.name))
        ]
        for session in chosen:
            session.ask_to_leave(outcomes.asked_to_leave(session.member.name, ask.reason, daemon=not ask.group), by)
        if not ask.group and self.leaving is None:
            self.leaving = outcomes.asked_to_leave(self.name, ask.reason, daemon=True).last
            self._nursery.start_soon(self._end_when_left)
        return chosen

    async def _end_when_left(self) -> None:
        """Task: end when all who are attached have left."""
        while any(not one.member.over for one in self.sessions):  # noqa: ASYNC110 - once, at the end
            await trio.sleep(0.01)
        with trio.move_on_after(1):
            while self.askers:  # noqa: ASYNC110 - the same
                await trio.sleep(0.01)
        self.ending = self.ending or self.leaving
        self._stop.set()

    def soon(self, task: Callable[[], Awaitable[None]]) -> None:
        """See Host."""
        self._nursery.start_soon(task)

    def watch_first_bytes(self, engine_links: Iterable[int]) -> None:
        """Fault injection: hit "mid_op" as soon as one of these links has received more than now."""
        lanes = [(link, lane) for link in engine_links for lane in range(self.config.lanes)]

        def received() -> int:
            found = (self.engine.statistics(link, lane) for link, lane in lanes)
            return sum(one.bytes_received for one in found if one is not None)

        self._nursery.start_soon(self._mid_op, received, received())

    async def _mid_op(self, received: Callable[[], int], before: int) -> None:
        with trio.move_on_after(5):
            while received() == before:  # noqa: ASYNC110 - the engine has no event for this
                await trio.sleep(0.0002)
            self.failpoints.hit("mid_op")

    def _beat(self, number: int) -> m.Heartbeat:
        """The heartbeat: how far the clients are in their programs, and whose process stands still."""
        now, called, still, recovered = trio.current_time(), [], [], []
        self.allow_commits()
        for session in self.sessions:
            member = session.peek
            if member.over or not member.mid:
                continue
            if member.epoch is not None:
                with session.alone("its inputs"):
                    session.look()
                called.append((member.mid, member.epoch_number, session.called, member.collectives.settled))
                if session.recovered is not None:
                    recovered.append((member.mid, *session.recovered))
            state, seconds = session.trainer.look(now)
            if state:
                still.append((member.mid, seconds, state))
        self.settle()
        beat = m.Heartbeat(number, called[:MOST_CALLED], still[:MOST_CALLED])
        if not self.control.watched:
            return beat
        return replace(beat, moved=self._moved(), recovered=recovered[:MOST_CALLED])

    def _moved(self) -> list[tuple[str, int, int, int]]:
        """What went to each daemon over the links that are open, the first of many."""
        traffic = self.links.traffic = self.links.traffic or Traffic()
        looks = [self.links.look_at(number) for number in self.links.numbers()[:MOST_MOVED]]
        totals = ((name, traffic.totals[name]) for name in dict.fromkeys(look[0] for look in looks if look is not None))
        return [(name, one.sent, one.segments, one.resent) for name, one in totals]

    def unready(self) -> str:
        """Why no training process should count on it now; "": one may."""
        if self.ending is not None or self.leaving is not None:
            return "it is stopping"
        return "" if self.control.connected else "no master answers"

    def status(self) -> dict[str, object]:
        """The daemon's own view, for LocalStatusRequest."""
        return {
            "name": self.name,
            "master": self.config.master,
            "state": self._wallet.folder if self._wallet is not None else "",
            "connected": self.control.connected,
            "addresses": self.control.addresses,
            "kernels": kernel_name(),
            "traced": self.recorder is not None,
            "resources": self._resources(),
            "members": [
                {
                    "group": session.member.group,
                    "name": session.member.name,
                    "pid": session.pid,
                    "process": session.trainer.state or "runs",
                    "rank": session.member.rank,
                    "epoch": session.member.epoch_number,
                    "members": session.member.member_names,
                    "ops": session.member.in_flight,
                    "waiting_for": self._waiting_for(session),
                    "waits": self.watcher.status(session),
                }
                for session in self.sessions
            ],
        }

    def _waiting_for(self, session: Session) -> str:
        waits, away = session.member.waiting_for(), self.master_away()
        return f"{waits}; not there: {away}" if waits and away else waits

    def _resources(self) -> dict[str, int]:
        """What is held, so that leaks can be counted: all of it follows from sessions, links and running ops."""
        return {
            **resources.of_this_process(),
            "tasks": trio.lowlevel.current_statistics().tasks_living,
            "sessions": len(self.sessions),
            "ops": len(self._by_engine_id),
            **self.links.counts(),
        }

    # ---- the master ----------------------------------------------------------------------------------

    def _master_says(self, message: m.FromMaster) -> None:
        if isinstance(message, m.ToMember):
            self._members_hear(message)
        elif isinstance(message, m.Probe):
            if self._probes < self.config.limits.pending_connections:
                self._nursery.start_soon(self._probe, message)
        elif isinstance(message, m.MeasureLink):
            self.measurer.measure(message)
        elif isinstance(message, m.AskToLeave):
            self.ask_to_leave(message)
        elif isinstance(message, m.Relays):
            self._relays_told = True
            self.relays.told(message.relays)
        elif isinstance(message, m.Nearby):
            keep_newest(self.links.connector.nearby, message.daemon, message.addresses, _MOST_NEARBY)
        else:
            log.warning("unexpected message from the master", message=str(message)[:200])

    def _members_hear(self, message: m.ToMember) -> None:
        now, number, master = trio.current_time(), self.control.number, self.control.master
        addressed = [one for one in self.sessions if one.peek.addressed(message)]
        if isinstance(message, STOPPING):
            for session in addressed:
                session.hush()
        self.take_events()
        for session in addressed:
            match message:
                case m.Epoch() | m.EpochChange():
                    log.info("epoch", group=message.group, epoch=message.epoch, reason=message.reason)
                case m.Resumed():
                    log.info("the master is back", group=message.group, epoch=message.epoch, term=message.term)
                case m.Evicted():
                    log.warning("evicted", member=session.member.name, reason=message.reason)
                case m.Joined():
                    session.tell(m.Slow(0, message.reason))
                case m.Abort():
                    session.notice_loss()
                case m.Waited():
                    self.watcher.waited(session, message)
            session.unhush()
            with session.alone(message, ProtocolError):
                session.run(session.member.hear(message, now, number, master))
            if isinstance(message, m.Refused):
                break  # it answers one Join; another one by this name has its own answer
        if isinstance(message, m.Evicted) and not any(one.peek.addressed(message) for one in self.sessions):
            self.control.send(m.Ended([(message.group, message.mid)]))
        self.settle()

    async def _probe(self, ask: m.Probe) -> None:
        self._probes += 1
        failed: DialFailed | None = None

        def met(bug: str) -> None:
            nonlocal failed
            failed = DialFailed(bug)

        with contained("a probe", lambda: ask, met):
            where = ask.addresses, ask.daemon, ask.key
            failed = await probe(self.links.connector, *where, self.config.limits, ask.way)
        self._probes -= 1
        about = ask.group, ask.joiner, ask.prober, ask.target
        refused = failed is not None and failed.refused
        self.control.send(m.ProbeResult(*about, failed is None, str(failed or "")[:4000], refused, ask.way))

    def _master_connected(self) -> None:
        log.info("connected to the master", master=self.control.master_address)
        self.answered.set()
        self.measurer.retell()
        self._relays_told = False
        for session in list(self.sessions):
            with session.alone("the master's return"):
                session.run(session.member.reconnected(self.control.number, self.control.master))
            self._remember(session)
        if self._ended:  # their Leave may have gone to nobody
            self.control.send(m.Ended([(group, mid) for mid, group in self._ended.items()]))

    def _remember(self, session: Session) -> None:
        """The session's member may be over."""
        if session.peek.over and session.peek.mid:
            keep_newest(self._ended, session.peek.mid, session.peek.group, _MOST_ENDED)

    def _master_lost(self, reason: str, *, live: bool) -> None:
        """No connection, or no longer (*live*); ops go on until master_grace is over."""
        self._no_master_reason = reason
        if live:
            self._no_master_since = trio.current_time()
        for session in self.sessions:
            if session.member.epoch is None:
                self._say_who_is_missing(session)

    def master_away(self) -> str:
        """Which, and for how long; "": it is here."""
        if self.control.connected:
            return ""
        return f"the master at {self.config.master}, away for {trio.current_time() - self._no_master_since:.1f} s"

    def _say_who_is_missing(self, session: Session) -> None:
        session.tell(m.Slow(0, f"for the master at {self.config.master}: {self._no_master_reason}"[:4000]))

    def _master_synced(self) -> None:
        """The master has told all it knows: members of the connection before are unknown to it, and so are relays."""
        if not self._relays_told:
            self.relays.told([])
        for session in list(self.sessions):
            if session.member.epoch is not None and session.member.master_session.connection != self.control.number:
                with session.alone("being forgotten"):
                    session.run(session.member.forgotten(self._no_master_reason))

    async def talk_to_master(self) -> None:
        """Task: the control connection. The daemon ends if it must not come back: its members are out by then."""
        await self.control.run()
        reason = self.control.refused
        log.error("no master takes this daemon", reason=reason)
        for session in list(self.sessions):
            with session.alone("the daemon's dismissal"):
                session.run(session.member.sent_away(self.name, reason))
        self.ending = outcomes.sent_away(self.name, reason).last
        self._stop.set()

    async def watch_master(self) -> None:
        """Task: members go on without a master that is silent; whose master stays away for master_grace are told."""
        said_at = -math.inf  # when members were last told that there is none
        while True:
            await self.control.lost.wait()
            while not self.control.connected:
                self.stop_unheard()
                now, limits = trio.current_time(), self.config.limits
                again = now >= said_at + limits.heartbeat_interval
                said_at = now if again else said_at
                for session in list(self.sessions):
                    waited = now - max(self._no_master_since, session.attached_at)
                    if again:
                        with session.alone("a look at it"):
                            session.look()
                    if self.control.heartbeat_timeout <= waited < limits.master_grace and again:
                        with session.alone("the master's silence"):
                            session.run(session.member.without_master(now))
                    if waited >= limits.master_grace:
                        out = self.config.master, waited, self._no_master_reason
                        with session.alone("the master's silence"):
                            session.run(session.member.master_unreachable(*out))
                await trio.sleep(_MASTER_POLL)
            for session in self.sessions:
                session.member.master_is_back()
            self.settle()

    def lease_is_over(self) -> bool:
        """See Host."""
        limits, lease = self.config.limits, self.control.commit_lease
        return lease.is_over(clock.awake_or_asleep(), self.control.heartbeat_timeout, limits.master_grace)

    def stop_unheard(self) -> None:
        """Before anything that may commit: members that do so by themselves end where a group may have formed anew.

        The master waits from when it heard this daemon last, which may have slept since (C8).
        """
        if not self.lease_is_over():
            return
        waited = self.control.commit_lease.unheard(clock.awake_or_asleep())
        cause = "no answer while this daemon slept" if self.control.connected else self._no_master_reason
        for session in list(self.sessions):
            if session.peek.votes:
                with session.alone("the master's silence"):
                    session.run(session.member.master_unreachable(self.config.master, waited, cause))

    # ---- the engine ----------------------------------------------------------------------------------

    async def watch_engine(self) -> None:
        """Task: hand the engine's events to the members."""
        while True:
            await trio.lowlevel.wait_readable(self.engine.fd)
            self.take_events()
            self.settle()

    def take_events(self) -> None:
        """Hand them over."""
        self.stop_unheard()
        for event in self.engine.events():
            if isinstance(event, LaneDown):
                with contained("the lanes", partial(str, event)):
                    self.links.lane_down(event)
            elif isinstance(event, Calls):
                if (session := self._by_caller.get(event.caller)) is not None:
                    with session.alone(event):
                        session.hold()
            elif (session := self._whose(event.op)) is not None:
                try:
                    self._engine_says(session, event)
                except Exception as bug:
                    session.met_a_bug(bug, event)

    def _whose(self, engine_id: int) -> Session | None:
        """The session of an attempt, which it may have to take over from the engine first."""
        if engine_id not in self._by_engine_id:
            for session in self.sessions:
                session.hold()
        return self._by_engine_id.get(engine_id)

    def _engine_says(self, session: Session, event: Done | Cancelled | Mismatch) -> None:
        if isinstance(event, Mismatch):
            session.run(session.member.mismatch(event.seq))
            return
        del self._by_engine_id[event.op]
        if self.recorder is not None:
            self._trace(self.recorder, event)
        if isinstance(event, Done):
            session.op_finished(event)
        else:
            session.op_cancelled(event.op)

    # ---- tracing -------------------------------------------------------------------------------------

    async def trace(self, seconds: float) -> tuple[list[dict[str, object]], m.Clock | None]:
        """See Host. One at a time: another one that comes meanwhile is refused.

        Raises:
            ConfigError: somebody traces already.
        """
        if self.recorder is not None:
            raise ConfigError("is being traced already", who=self.name, hint="wait until that is over")
        self.recorder = recorder = Recorder()
        for session in self.sessions:
            session.hold()  # and from here on none of them lets the engine take calls unseen
        self.engine.trace(True)
        for session in self.sessions:
            session.record_open(recorder.found)
        try:
            await trio.sleep(seconds)
        finally:
            self.engine.trace(False)
            self.recorder = None
        for session in self.sessions:
            session.record_open(recorder.over)
        ahead = time.time() - trio.current_time()
        for row in recorder.rows:
            at = row["at"]
            assert isinstance(at, dict)
            row["at"] = {phase: seconds + ahead for phase, seconds in at.items()}
        return list(recorder.rows), min(self.control.clocks, key=lambda one: one.uncertain, default=None)

    @staticmethod
    def _trace(recorder: Recorder, event: Done | Cancelled) -> None:
        now, ahead = trio.current_time(), trio.current_time() - time.monotonic()
        first, last = (1e-9 * one + ahead if one else 0.0 for one in (event.first, event.last))
        recorder.finished(event.op, first, last, now, cancelled=isinstance(event, Cancelled))

    # ---- stopping ------------------------------------------------------------------------------------

    async def drain(self) -> None:
        """Let running ops finish for at most drain_timeout, then leave the groups. None run where it was sent away."""
        hint = "start the daemon again and reconnect"
        stopping = m.Failure(0, "PeerDaemonLost", "the peer daemon is stopping", who=self.name, hint=hint)
        self.ending = self.ending or stopping
        with trio.move_on_after(self.config.limits.drain_timeout):
            while any(one.member.in_flight or not one.idle for one in self.sessions):  # noqa: ASYNC110 - once, at the end
                await trio.sleep(0.01)
        for session in list(self.sessions):
            with session.alone("the daemon's end"):
                ending = outcomes.left(session.member.name, stopping.what, self.ending)
                session.run(session.member.leave("", ending=ending))
        self.control.send(m.Stopping())
        with trio.move_on_after(1):
            await self.control.flush()
        with trio.move_on_after(1):  # while the engine's events are still read
            for session in list(self.sessions):
                await session.wait_idle()


async def _watch_stdin(daemon: Daemon, stop: trio.Event) -> None:
    """Stop when the parent goes: our standard input closes with it, and its clients' connections do."""
    while True:
        await trio.lowlevel.wait_readable(0)
        if not os.read(0, 4096):
            break
    with trio.move_on_after(1):
        while daemon.sessions:  # noqa: ASYNC110 - once, at the very end; each ends as a client that left or died
            await trio.sleep(0.01)
    stop.set()


def _wallet(config: PeerConfig, path: str) -> Wallet | None:
    """The daemon's key, and what it is good for; None: it has none, and nothing is encrypted."""
    if not config.join:
        return None
    machine = f"{socket.gethostname()}:{os.path.abspath(path)}"  # machines may share a home
    number = hashlib.sha256(machine.encode()).hexdigest()[:12]
    folder = os.path.abspath(config.state or default_state(f"peer-{number}"))
    if os.path.exists(os.path.join(folder, MASTER_KEY)):
        raise ConfigError(
            "is a master's", who=f"--state {folder}", expected="a folder for this daemon alone",
            got=f"one with {MASTER_KEY}", hint="is it WANCOLL_STATE, for both? Give each its own, or none",
        )  # fmt: skip
    return Wallet(folder, parse(config.join))


def _port(daemon: Daemon, door: FrontDoor, metrics: list[socket.socket]) -> MetricsPort:
    """Where metrics are told; from now on what they need is counted."""
    from wancoll.metrics.port import MetricsPort, Source

    daemon.operations, daemon.links.traffic = Operations(), Traffic()
    daemon_metrics = DaemonMetrics(daemon, daemon.operations, door)
    return MetricsPort(
        Source("peer", kernel_name(), daemon_metrics.families, daemon.unready), metrics, daemon.config.metrics_token
    )


async def serve(
    config: PeerConfig, *, stop: trio.Event, task_status: trio.TaskStatus[Started] = trio.TASK_STATUS_IGNORED
) -> bool:
    """Run a daemon until *stop* is set, then drain and leave; returns whether an operator asked it to leave.

    Started value: Started.

    Raises:
        ConfigError: a setting cannot be used.
    """
    split_addresses(config.master, what="--master")  # before anything is started
    if config.congestion_control:
        check_congestion_control(config.congestion_control)
    uplink = int(config.most_sent) if config.uplink_limit else 0
    for each in config.uplink:
        check_interface(each)
    path = config.socket or (default_socket() if config.clients else "")
    wallet = _wallet(config, path)
    if wallet is not None:
        check_possible()
    workers = config.workers or max(1, min(THREADS, resources.cores() // 2))
    metrics = listeners_for("metrics", config.metrics, config.metrics_token, "wancoll.metrics.port")
    data_sockets = open_listeners(config.listen)
    local_sockets = [claim_socket(path)] if config.clients else []
    incarnation, beside = secrets.randbits(63), list[socket.socket]()
    life, ended = process_lock.begin(incarnation, config.limits.master_grace)
    try:
        holding = contextlib.nullcontext() if wallet is None else wallet.held(f"at {path}, process {os.getpid()}")
        with holding, Engine(workers=workers, uplink=uplink) as engine:
            name = config.name or (wallet.name if wallet is not None else "")
            name = name or f"{socket.gethostname()[:60]}-{secrets.token_hex(3)}"
            beside = listeners_beside(name, data_sockets) if config.shared_memory else []
            async with trio.open_nursery() as nursery:
                daemon = Daemon(config, name, incarnation, ended, engine, data_sockets[0], nursery, stop, wallet)
                nursery.start_soon(daemon.watch_engine)
                nursery.start_soon(daemon.talk_to_master)
                nursery.start_soon(daemon.watch_master)
                nursery.start_soon(daemon.links.keep_time)
                nursery.start_soon(daemon.links.keep_uplinks)
                nursery.start_soon(daemon.links.watch_notes, daemon.take_events, daemon.settle)
                nursery.start_soon(daemon.watcher.run)
                if config.measure:
                    nursery.start_soon(daemon.measurer.watch)
                    nursery.start_soon(daemon.measurer.probe)
                nursery.start_soon(serve_connections, data_sockets, daemon.links.accept, daemon.links.lets_in)
                nursery.start_soon(serve_connections, beside, daemon.links.accept, is_own)
                door = FrontDoor(daemon)
                nursery.start_soon(serve_connections, local_sockets, door.accept)
                if metrics:
                    nursery.start_soon(_port(daemon, door, metrics).serve)
                if config.watch_stdin:
                    nursery.start_soon(_watch_stdin, daemon, stop)
                data = [join_address(*one.getsockname()[:2]) for one in data_sockets]
                task_status.started(Started(name, path, data, config.master, daemon.answered))
                await stop.wait()
                await daemon.drain()
                nursery.cancel_scope.cancel()
        if daemon.control.refused:
            raise ConfigError("no master takes this daemon", who=daemon.name, got=daemon.control.refused)
        return daemon.leaving is not None
    finally:
        for one in (*data_sockets, *beside, *metrics, *local_sockets):
            one.close()
        if life is not None:
            os.close(life)
        if config.clients:
            with contextlib.suppress(OSError):
                os.unlink(path)
