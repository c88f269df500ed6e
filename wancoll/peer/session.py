"""One client of this daemon: its unix connection, arena and member, and how the member's commands are carried out."""

from __future__ import annotations

import contextlib
import itertools
import math
import socket
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import Protocol

import structlog
import trio
from msgspec.structs import replace

from wancoll.collective import DATALESS, SAME_RESULT, Kind
from wancoll.commit.tally import UPDATE
from wancoll.errors import ConfigError, ProtocolError
from wancoll.failpoints import Failpoints
from wancoll.limits import WORD, blocks, keep_newest
from wancoll.metrics.core.operations import Operations, Recovery
from wancoll.native.calls import PREPARED, VOTERS, Caller, Known
from wancoll.native.engine import Done, Engine, Hearers, Prepared, hash_at
from wancoll.net.contain import contained, met_a_bug
from wancoll.net.stream import Stream
from wancoll.peer.arena import Arena, RingMemory, ZeroContribution
from wancoll.peer.config import PeerConfig
from wancoll.peer.control import Control
from wancoll.peer.core import commands as cmd
from wancoll.peer.core import links, outcomes
from wancoll.peer.core.calls import EPOCHS_SPOKEN_OF, Call, EpochView, ResolvedCall, noise
from wancoll.peer.core.member import Member
from wancoll.peer.core.op import Op, OpState
from wancoll.peer.core.tracing import Recorder
from wancoll.peer.links.hub import LinkHub
from wancoll.peer.trainer import Trainer
from wancoll.wire import messages as m
from wancoll.wire.framing import Decoder, encode
from wancoll.wire.note import DIGEST_AT, pack

log = structlog.get_logger("wancoll.session")

_SHAPES_KEPT = 256  # schedules ready for the engine
_ALIGN = 64  # of tables in the arena: a cache line
_LOOK_AT_ONCE = 8 << 20  # bytes of an input, about a millisecond


class Host(Protocol):
    """What a session needs of its daemon."""

    config: PeerConfig
    name: str
    arena_bytes: int
    engine: Engine
    links: LinkHub
    control: Control
    failpoints: Failpoints
    sessions: list[Session]  # of those who are attached
    now: Callable[[], float]  # seconds
    ending: m.Failure | None  # it stops: what clients are told
    leaving: m.Failure | None  # it will, once its members have left: the same
    askers: int  # operators on the unix socket who will be told that they have
    operations: Operations | None  # what is counted for metrics; None: they are not told
    recorder: Recorder | None  # while somebody traces
    touched: set[Session]  # that are to settle once what has come is taken in
    measuring: bool  # how fast a path is: nothing shall begin unseen

    def status(self) -> dict[str, object]:
        """The daemon's own view, for LocalStatusRequest."""

    def master_away(self) -> str:
        """Which, and for how long; "": it is here."""

    def settle(self) -> None:
        """All that has come is taken in, for now."""

    def caller(self, number: int, ring: RingMemory, arena: Arena) -> Caller:
        """Let the engine know a client."""

    def lease_is_over(self) -> bool:
        """Whether members may not commit by themselves any more (C8)."""

    def allow_commits(self) -> None:
        """Tell the engine until when it may commit by itself (C8)."""

    def has(self, group: str, name: str) -> bool:
        """Whether a client is attached as this member, and has not left."""

    def add(self, session: Session) -> None:
        """The session has attached: join its group."""

    def remove(self, session: Session) -> None:
        """The session is over."""

    def soon(self, task: Callable[[], Awaitable[None]]) -> None:
        """Run *task* beside all others; it may be cancelled at the daemon's end."""

    def stop_unheard(self) -> None:
        """Before anything that may commit: see Daemon."""

    def started(self, engine_id: int, session: Session) -> None:
        """The session's op is in the engine: its events are the session's."""

    def ask_to_leave(self, ask: m.AskToLeave) -> list[Session]:
        """Let members, or all and then the daemon, leave in order; returns those that will."""

    async def trace(self, seconds: float) -> tuple[list[dict[str, object]], m.Clock | None]:
        """What operations do in the next so many seconds, and what the master's clock is to this machine's."""

    def watch_first_bytes(self, engine_links: Iterable[int]) -> None:
        """Fault injection: hit "mid_op" once one of these links receives something."""


class Session:
    """One client of this daemon: its connection, arena and member.

    *attach* is what it asked for. The member's engine op ids begin at *first_engine_id*.
    """

    def __init__(self, daemon: Host, stream: Stream, attach: m.Attach, first_engine_id: int) -> None:
        self._daemon, self._stream, self.number = daemon, stream, first_engine_id
        self.attached_at = trio.current_time()
        self.pid = attach.pid
        self.arena = Arena(daemon.arena_bytes)  # first: it may be refused, and then nothing else is held
        try:
            daemon.engine.add_bell(self.arena.bell)
            self._ring = RingMemory()
            try:
                self._caller = daemon.caller(first_engine_id, self._ring, self.arena)
            except BaseException:
                self._ring.close()
                daemon.engine.remove_bell(self.arena.bell)
                raise
        except BaseException:
            self.arena.close()
            raise
        self.trainer = Trainer(stream.socket)
        self.peek = Member(
            attach.group,
            attach.member,
            attach.start_world,
            attach.min_world,
            first_engine_id,
            daemon.config.limits,
            attach.call_timeout,
            attach.shards,
            attach.launch,
        )
        if self.trainer.unseen:
            why = self.trainer.unseen
            log.info("nobody will see whether this client is stopped", member=attach.member, reason=why)
        self.links = daemon.links.member(self._links_say)
        self._where = f"member {attach.member}"
        self._prepared: dict[ResolvedCall, Prepared] = {}
        self._hearers: dict[tuple[int, ...], Hearers] = {}  # by mids
        self._in_engine: set[int] = set()
        # By attempt: what has finished there and is kept, in case bytes get lost, with what else it reads.
        self._kept: dict[int, tuple[Op, object]] = {}
        self._lent = False  # the engine takes the client's calls, and has the member's state (C13)
        self._offered: dict[Call, int] = {}  # calls of this epoch that the client may repeat through the ring
        self._by_number: dict[int, tuple[int, Call]] = {}  # those, and of epochs before: epoch and call
        self._numbers = itertools.count(1)
        self._unprepared: set[int] = set()  # of those that are offered: the engine does not know them now
        self._hushed = False  # the member is about to hear that it stops
        self._behind: deque[Op | m.FromDaemon] = deque()  # what is handed over, and what the client is told after it
        self._room = trio.Event()  # set when an op left; wakes a reader that is held back
        self._looks = 0  # at inputs, under way in threads
        self._idle = trio.Event()
        self._recovery, self._world = Recovery(), frozenset[str]()  # for those who watch; names of the epoch's members
        self.recovered: tuple[int, float] | None = None  # the last time: the epoch, how many seconds it took
        self._taking = True  # what has come is taken by the task
        self._bad: ProtocolError | None = None  # what was wrong with a call that was taken beside the task
        self._broken = False
        self._goodbye = False  # the client has said it
        self._taken = 0  # the client's number of the last call that has reached the member
        self._called = 0  # the highest seq that the engine has begun by itself, at the last look
        self._asked: outcomes.Ending | None = None  # an operator wants it to leave: what the client will be told
        self._leave_by = math.inf  # then: until then it waits for the client's next update_membership
        self._stands = False  # at that: the client has called it, and it is not posted
        self._left = trio.Event()

    def alone(self, of: object, *expected: type[Exception]) -> contextlib.AbstractContextManager[None]:
        """What goes wrong inside, while *of* is taken in, ends this member only; what is *expected* the caller gets."""
        return contained(self._where, lambda: of, self._broke, expected=expected)

    def met_a_bug(self, bug: Exception, of: object) -> None:
        """The same, where a context manager for each event would take too long."""
        self._broke(met_a_bug(self._where, of, bug))

    def _broke(self, why: str) -> None:
        """A bug: what is known of the member may be half changed, so it is out, without asking it."""
        if self._broken:
            return
        self._broken = True
        self.hold()
        leave = m.Leave(self.member.group, self.member.name, f"a bug of its daemon: {why}"[:1024])
        if not self.member.over:  # else it is out, and another one may have its name
            self._daemon.control.send(leave)
        self.member.over = True
        hint = "this is a bug of the daemon, its log says more; connect again to rejoin as a new member"
        self.tell(m.Failure(0, "PeerDaemonLost", why, who=self.member.name, hint=hint))
        for engine_id in self._in_engine:
            self._daemon.engine.cancel(engine_id)
        self._stream.end()
        self._daemon.links.ask(self.links, links.Leave())

    # ---- the client's connection ---------------------------------------------------------------------

    async def serve(self, decoder: Decoder[m.FromClient], first: list[m.FromClient]) -> None:
        """Serve the client until it goes; *first* are messages that came with the attach."""
        attached = encode(m.Attached(self._daemon.name, self.arena.nbytes))
        try:
            shared = [self.arena.fd, self.arena.bell, self._ring.fd, self._ring.theirs]
            socket.send_fds(self._stream.socket, [attached], shared)
        except OSError:  # the client has gone already
            self._daemon.links.ask(self.links, links.Leave())
            self._close()
            return
        finally:
            self._ring.handed_over()
        self._daemon.add(self)
        reason, daemon_died, ending = "its connection closed without a goodbye", False, None
        try:
            if await self._take(first):
                while data := await self._stream.receive():
                    if not await self._take(decoder.feed(data)):
                        break
            if self._bad is not None:
                raise self._bad
            if self._stream.overflow:
                reason = f"the client: {self._stream.ended}"
                log.warning("client does not read", member=self.member.name)
        except ProtocolError as bad:
            reason, ending = str(bad), outcomes.nonsense(bad)
            log.warning("client sent nonsense", member=self.member.name, reason=reason)
        except BaseException as bad:  # cancelled, alone or with a task: what ends in order has left its group by then
            daemon_died = not isinstance(bad, Exception)
            raise
        finally:
            with self.alone("its end"):
                died = not self._goodbye and not self.member.over
                if died and daemon_died:
                    self.run(self.member.lost("its daemon goes down"))
                else:
                    if died:
                        log.warning("client died", member=self.member.name, pid=self.pid, reason=reason)
                    self.run(self.member.leave(reason, died=died, ending=ending))
            with self.alone("its memory"):
                self._leave_memory()
            with trio.move_on_after(self._daemon.config.limits.drain_timeout, shield=True):
                await self.wait_idle()
                await self._stream.drain()
            self._daemon.remove(self)
            self._stream.close()
            self._close()

    def _leave_memory(self) -> None:
        """See that the engine reads no more what has finished here."""
        for engine_id in self._kept:
            self._daemon.engine.release(engine_id)
        self._daemon.engine.fence()  # others were released by the engine itself
        self._kept.clear()

    def _close(self) -> None:
        self.trainer.close()
        self._caller.close()
        self._daemon.touched.discard(self)
        self._daemon.engine.remove_bell(self.arena.bell)
        if self.idle:
            self._ring.close()
            self.arena.close()
        else:
            log.error("an op still uses the arena, which is kept mapped", member=self.peek.name)

    # ---- calls that the engine takes by itself -------------------------------------------------------

    @property
    def member(self) -> Member:
        """The member, whose state is the daemon's from here on; *peek* is enough for what the engine never changes."""
        self.hold()
        return self.peek

    def hold(self) -> None:
        """Take the member's state over from the engine, and give it back when all that has come is taken in."""
        self._daemon.touched.add(self)
        if self._lent:
            self._lent = False
            known = self._caller.hold(self._ahead())
            assert known is not None
            self._take_over(known)

    def settle(self) -> None:
        """Take the calls that wait in the ring; let the engine take those that follow, if nothing stands in its way."""
        if not self._lent:
            self._caller.hold()  # what comes into the ring from here on is told again
        while self._takes_calls() and not self._is_full() and self._take_from_ring():
            pass
        member = self.peek
        if self._lent or not self._offered or not self._may_lend() or not member.at_rest:
            return
        view, tally = member.view, member.collectives.tally
        assert view is not None
        assert tally is not None
        for number in sorted(self._unprepared):
            self._prepare_call(number, view)
        self._unprepared.clear()
        ends = {mid: self.links.links[mid, links.COLLECTIVES].number for mid in sorted(tally.others)}
        voters = {mid: (link, tally.claims[mid]) for mid, link in ends.items()}
        self._daemon.allow_commits()
        self._lent = True
        self._caller.lend(view.epoch.epoch, tally.committed, self._taken + 1, member.attempts.next, voters)

    def _takes_calls(self) -> bool:
        leaves = self._stands or (self._asked is not None and trio.current_time() >= self._leave_by)
        return not (self._lent or self._taking or self._daemon.ending or leaves)

    def _may_lend(self) -> bool:
        daemon = self._daemon
        watched = daemon.recorder is not None or daemon.measuring or daemon.failpoints.armed
        out = self._broken or self._stream.overflow or daemon.ending or self._asked or self._taking
        busy = self._in_engine or self._behind or self._looks or self._recovery.since is not None
        return not (watched or out or busy or self._hushed)

    def _take_from_ring(self) -> bool:
        """Post the next call if it waits in the ring."""
        found = self._caller.next(self._taken + 1)
        if found is None:
            return False
        epoch, call = self._by_number.get(found.prepared, (0, None))
        if call is None:
            raise ProtocolError("posted a call that was not prepared", who=self.peek.name, got=str(found.prepared))
        regions = found.input_buffer, found.result_buffer
        self._post(m.Post(found.number, call.posted, *regions, epoch, filled=found.filled, shown=found.shown))
        return True

    def nonsense(self, bad: ProtocolError) -> None:
        """The client has posted what cannot be: the task that serves it ends."""
        self._bad = bad
        self._stream.end()

    def _offer(self, op: Op) -> int:
        """The number under which the client may repeat the call that *op* was; 0: it may not.

        Held back: what the members do not commit, what the master is told of each time, and what rounds by its seq.
        """
        view, call, resolved = self.peek.view, op.call, op.resolved
        if op.p2p or view is None or resolved is None or not view.votes or view.epoch.shards > 1:
            return 0
        if call.world is not view.world:
            return 0
        odd = call.posted.grace or call.posted.rounding == "stochastic" or any(call.ends)
        if odd or op.zeros or not resolved.proves_all or not 2 <= len(view.columns) <= VOTERS + 1:
            return 0
        number = self._offered.get(call, 0)
        if not number and len(self._offered) < PREPARED:
            number = self._offered[call] = next(self._numbers)
            epoch = view.epoch.epoch
            for old in [one for one, (of, _) in self._by_number.items() if of < epoch - EPOCHS_SPOKEN_OF]:
                del self._by_number[old]
            self._by_number[number] = epoch, call
            self._unprepared.add(number)
        return number

    def _prepare_call(self, number: int, view: EpochView) -> None:
        call = self._prepared_call(number)
        resolved = call.resolved(view, self._daemon.config.limits)
        prepared = self._prepared.get(resolved) or self._prepare(resolved, view, links.COLLECTIVES)
        vote = pack(m.Vote(*view.head, 0, 0, resolved.fingerprint, 0))
        others = tuple(sorted(mid for mid in view.world.mids if mid != view.mid))
        self._caller.prepare(
            number, prepared, self.links.stamp(links.COLLECTIVES), resolved.fingerprint, vote,
            DIGEST_AT if call.posted.kind in SAME_RESULT else 0, self._hearers_of(others),
            (call.input_bytes, call.result_bytes),
        )  # fmt: skip

    def _forget_prepared(self) -> None:
        """Links have other numbers, or the epoch another round: what is offered is prepared anew."""
        self._prepared.clear()
        self._hearers.clear()
        self._caller.clear()
        self._unprepared = set(self._offered.values())

    def _take_over(self, known: Known) -> None:
        """Let the member know what the engine has done by itself."""
        self._taken = known.number - 1
        for one in known.begun:
            if not one.done:
                self._in_engine.add(one.engine_id)
                self._daemon.started(one.engine_id, self)
        late = self._daemon.lease_is_over()  # then nothing is committed any more, by whatever has come before (C8)
        told = known.begun, self._prepared_call, known.claims, known.engine_id, self._daemon.now()
        commands = self.peek.take_over(*told, decide=not late)
        for one in (each for each in known.begun if each.done):
            op = self.peek.collectives.open.get(one.seq)
            if op is not None:
                self._kept[one.engine_id] = op, None
            else:  # committed, by the engine or just now
                self._daemon.engine.release(one.engine_id)
        self.run(commands)
        if late:
            self._daemon.stop_unheard()

    def _prepared_call(self, number: int) -> Call:
        return self._by_number[number][1]

    def _ahead(self) -> float:
        """Seconds that the shell's clock is ahead of CLOCK_MONOTONIC."""
        return self._daemon.now() - time.monotonic()

    async def _take(self, messages: list[m.FromClient]) -> bool:
        self._taking = True
        for message in messages:
            self.hold()
            if self._daemon.ending and not isinstance(message, m.Detach):
                await trio.sleep_forever()  # no new ops while draining; the daemon cancels this when it leaves
            if isinstance(message, m.Post):
                self._take_before(message.id)
            if self._leaves_at(message):
                self._stands = True
                if not await self._stream.unless_hung_up(self._left.wait):
                    return False
            while not isinstance(message, m.Detach) and self._is_full():
                self._room = trio.Event()
                if not await self._stream.unless_hung_up(self._room.wait):
                    return False
            if isinstance(message, m.Detach):
                self._goodbye = True
                return False
            if not isinstance(message, m.Post):
                raise ProtocolError(
                    "sent a message out of place", who=self.member.name, expected="Post or Detach", got=str(message)
                )
            self._post(message)
        self._taking = False
        self._daemon.settle()
        return True

    def ask_to_leave(self, why: outcomes.Ending, by: float) -> None:
        """Leave in order: at the client's next update_membership, where nobody has anything open; at time *by* at last.

        A second call can only bring that forward.
        """
        again = self._asked is not None
        self._asked, self._leave_by = why, min(self._leave_by, by)
        if not again and not self.member.over:
            self._daemon.soon(self._leave)

    def _leaves_at(self, message: m.FromClient) -> bool:
        """Whether the member leaves before this call."""
        if self._asked is None or self.member.over or not isinstance(message, m.Post):
            return False
        return message.call.kind is Kind.update_membership or trio.current_time() >= self._leave_by

    async def _leave(self) -> None:
        """Task: leave when it is time."""
        assert self._asked is not None
        while not self.member.over and not self._may_leave():  # noqa: ASYNC110 - once, at the end
            await trio.sleep(0.01)
        with self.alone("an operator's wish"):
            self.run(self.member.leave("", ending=self._asked))
        self._left.set()

    def _may_leave(self) -> bool:
        if self.member.epoch is None:
            return True
        late = trio.current_time() - self._leave_by
        if self.member.in_flight or not self.idle:
            return late >= self._daemon.config.limits.drain_timeout
        return self._stands or late >= 0

    def _is_full(self) -> bool:
        """Whether the next call has to wait."""
        full = self.peek.in_flight >= self._daemon.config.limits.ops_in_flight and not self.peek.over
        return full or bool(self._behind)

    def _take_before(self, number: int) -> None:
        """Post the calls in the ring that the client has made before call *number*, which came over the socket."""
        while self._taken + 1 < number and self._take_from_ring():
            pass

    def _post(self, post: m.Post) -> None:
        self._daemon.stop_unheard()
        call = self.member.call(post)
        self._check_regions(post, call)
        if self._daemon.failpoints.armed:
            self._daemon.failpoints.hit("on_post")
        self._taken = post.id
        self.run(self.member.post(post, call, self._daemon.now()))

    def _check_regions(self, post: m.Post, call: Call) -> None:
        """Refuse what does not lie in the arena, or not apart: the engine reads and writes there."""
        read, written = call.memory
        regions = [("input", post.input_buffer, read), ("result", post.result_buffer, written)]
        if post.filled >= 0:
            regions.append(("filled", post.filled, blocks(call.input_bytes)))
        if post.shown >= 0:
            regions.append(("shown", post.shown, WORD * blocks(call.result_bytes)))
        what, expected, got = self._misplaced([region for region in regions if region[2]])
        if what:
            raise ProtocolError(what, who=f"{self.member.name}, {call.posted}", expected=expected, got=got)

    def _misplaced(self, regions: list[tuple[str, int, int]]) -> tuple[str, str, str]:
        """What is wrong with them, what is expected, and what came; "": nothing."""
        for name, at, nbytes in regions:
            if name in ("filled", "shown") and at % _ALIGN:
                return f"an operation's table of what is {name} is not aligned", f"a multiple of {_ALIGN}", str(at)
            if not self.arena.holds(at, nbytes):
                within = f"within {self.arena.nbytes} bytes"
                return "an operation's region lies outside the arena", within, f"{nbytes} bytes at {at}"
        for (one, at, nbytes), (other, start, size) in itertools.combinations(regions, 2):
            if at < start + size and start < at + nbytes:
                return f"{one} and {other} overlap", "", ""
        return "", "", ""

    def tell(self, message: m.FromDaemon) -> None:
        """Send to the client, after what is handed over to it; one that does not read is cut off."""
        if isinstance(message, m.Failure) and not message.id:
            message = replace(message, taken=self._taken)
        if self._behind:
            self._behind.append(message)
        else:
            self._stream.send(encode(message))
        if isinstance(message, m.Failure) and not message.id and self.peek.shards > 1:
            self._stream.end()  # its client may wait for that (wancoll/client/island.py)

    async def _hand_over(self) -> None:
        """Task: copy results of ops that this daemon took part in to where the client wants them, then tell it.

        Not in the event loop: they may be GiB. Until it is told, the client uses neither the input nor the result.
        """
        try:
            with self.alone("what its daemon took part in"):
                while self._behind:
                    first = self._behind[0]
                    if isinstance(first, Op):
                        assert isinstance(first.memory, ZeroContribution)
                        for copy in first.memory.pieces(self.arena.address + first.result_buffer, first.handed):
                            await trio.to_thread.run_sync(copy)
                    else:
                        self._stream.send(encode(first))
                    self._behind.popleft()
        finally:
            self._behind.clear()
            self._room.set()
            self._idle.set()

    # ---- commands ------------------------------------------------------------------------------------

    def run(self, commands: list[cmd.Command]) -> None:
        """Carry out the member's commands, in order and without waiting. One that met a bug has none to give."""
        if self._broken:
            return
        for command in commands:
            match command:
                case cmd.ToMaster(message):
                    self._to_master(message)
                case cmd.ToClient(message, op):
                    if isinstance(message, m.Result) and op is not None:
                        message = replace(message, prepared=self._offer(op))
                    if op is not None and op.engine_id in self._kept:
                        self._let_go(op.engine_id)  # first: the client may write there from here on (R3)
                    self._to_client(message)
                    if isinstance(message, m.EpochInfo) or self._recovery.since is not None:
                        self._look_for_recovery(message)
                    if self._daemon.recorder is not None and op is not None:
                        self._record(self._daemon.recorder, message, op)
                    if self._daemon.operations is not None:
                        self._count(self._daemon.operations, message, op)
                case cmd.StartOp(op, beside):
                    self._start(op, beside=beside)
                case cmd.Committed(result, op):
                    if self._daemon.operations is not None:
                        self._count(self._daemon.operations, result, op)
                case cmd.HandOver(op):
                    if not self._behind:
                        self._daemon.soon(self._hand_over)
                    self._behind.append(op)
                case cmd.CancelOp(engine_id):
                    self._daemon.engine.cancel(engine_id)
                case cmd.SendNote(mids, note, again):
                    self._say(mids, note, again=again)
                case _:
                    if isinstance(command, links.Enter | links.Round):
                        self._forget_prepared()
                    if isinstance(command, links.Enter):
                        self._offered.clear()
                        self._unprepared.clear()
                        self._daemon.failpoints.hit("on_epoch")
                    self._daemon.links.ask(self.links, command)
        for engine_id, (op, _) in list(self._kept.items()):
            if op.outcome is not None or op.engine_id != engine_id:
                self._let_go(engine_id)

    def _let_go(self, engine_id: int) -> None:
        """Nobody needs any more what this attempt has sent: its op has an outcome, or runs in another one."""
        if self._daemon.engine.release(engine_id):
            self._daemon.engine.fence()
        del self._kept[engine_id]  # and the memory

    def _links_say(self, told: links.Told) -> None:
        if isinstance(told, links.LinksUp | links.P2PUp):
            self.hold()
            self._forget_prepared()  # a link that was dialled anew has another number, also within one epoch
        if isinstance(told, links.LinkBroken | links.LinkLost):
            self._recovery.noticed(trio.current_time())
        try:
            self.run(self.member.links_say(told, self._daemon.now()))
        except Exception as bug:
            self.met_a_bug(bug, told)

    def _to_master(self, message: m.FromPeer) -> None:
        if self.member.master_session.reporting and not isinstance(message, m.Report | m.Leave):
            return  # said when the master knows the member
        finished = isinstance(message, m.Vote) and message.fingerprint != UPDATE[1]
        if finished or isinstance(message, m.P2PDone):
            self._daemon.failpoints.hit("before_done")
            self._daemon.control.send(message)
            self._daemon.failpoints.hit("after_done")
        else:
            self._daemon.control.send(message)

    def _say(self, mids: tuple[int, ...], note: bytes, *, again: bool) -> None:
        """Tell other members what this one has finished."""
        points = self._daemon.failpoints if not again else Failpoints("")
        points.hit("before_done")
        for told, mid in enumerate(mids):
            if told:
                points.hit("half_done")
            self._daemon.links.send_note(self.links, mid, note)
        points.hit("after_done")

    def _to_client(self, message: m.FromDaemon) -> None:
        commits = self._daemon.failpoints.armed and isinstance(message, m.Result)
        if commits:
            self._daemon.failpoints.hit("before_commit")
        self.tell(message)
        if commits:
            self._daemon.failpoints.hit("after_commit")
        self._room.set()

    def _start(self, op: Op, *, beside: bool) -> None:
        resolved, view, base = op.resolved, self.member.view, self.arena.address
        assert resolved is not None
        assert view is not None
        channel = links.P2P if op.p2p else links.COLLECTIVES
        input_buffer, result_buffer, rounding = (
            base + op.input_buffer,
            base + op.result_buffer,
            noise(resolved.descriptor, op.seq, view.mid),
        )
        try:
            if op.zeros:
                if op.memory is None:
                    op.memory = ZeroContribution(*op.call.memory)
                assert isinstance(op.memory, ZeroContribution)
                input_buffer, result_buffer = op.memory.input_buffer, op.memory.result_buffer
            if beside:
                op.beside = op.beside or ZeroContribution(0, op.call.memory[1])
                assert isinstance(op.beside, ZeroContribution)
                result_buffer = op.beside.result_buffer
            if op.attempts > 1 and not op.zeros and resolved.input_bytes and not self._may_write(op):
                self._look(op, input_buffer)
            prepared = self._prepared.get(resolved) or self._prepare(resolved, view, channel)
            filled = base + op.filled if op.filled >= 0 and op.call.input_bytes else 0
            shown = base + op.shown if op.shown >= 0 and not beside else 0
            self._daemon.engine.post(
                prepared, op.engine_id, self.links.stamp(channel), op.seq, resolved.fingerprint,
                input_buffer, result_buffer, rounding,
                filled_address=filled, shown_address=shown, attempt=op.attempts,
                vote=op.vote, vote_digest=DIGEST_AT if op.kind in SAME_RESULT else 0,
                hearers=None if beside else self._who_hear(op),
            )  # fmt: skip
        except (ConfigError, MemoryError, OverflowError, OSError) as bad:
            reason = str(bad) or type(bad).__name__
            log.error("the engine refuses an operation", member=self.member.name, op=str(op), reason=reason)
            self.run(self.member.op_refused(op.engine_id, reason))
            return
        self._in_engine.add(op.engine_id)
        if self._daemon.recorder is not None:
            now = trio.current_time()
            self._daemon.recorder.started(op, self.member.group, self.member.name, self.member.epoch_number, now)
        self._daemon.started(op.engine_id, self)
        if self._daemon.failpoints.armed:
            self._daemon.watch_first_bytes(self.links.numbers(channel).values())

    def _look(self, op: Op, address: int) -> None:
        """An op runs again: see whether its client writes to its input. Two looks must find the same bytes (R13).

        And blocks of the codec: the other members refuse what is none.
        """
        call, nbytes = op.call.posted, op.call.memory[0]  # what any epoch reads: this one may read less
        coded = (call.codec, call.count) if op.call.ends.input else ()
        look = partial(hash_at, address, nbytes, *coded)
        if nbytes <= _LOOK_AT_ONCE:  # before anybody can find the results of this attempt to differ
            self._looked(op, look())
        else:
            self._looks += 1
            self._daemon.soon(partial(self._look_long, op, look))

    async def _look_long(self, op: Op, look: Callable[[], int]) -> None:
        """Task: the same in a thread."""
        try:
            found = await trio.to_thread.run_sync(look)
        finally:
            self._looks -= 1
            self._idle.set()
        if not self._may_write(op):  # not by now, either
            with self.alone("what its client has written"):
                self._looked(op, found)

    def _looked(self, op: Op, found: int) -> None:
        before, op.input_hash = op.input_hash, found
        if found < 0 or before not in (None, found):
            self.run(self.member.written(op))

    def _may_write(self, op: Op) -> bool:
        """Whether the client may write to the op's input: it has not filled it, or may know how the op has ended."""
        return op.outcome is not None or self.member.over or not (op.there or not self._has_gaps(op))

    def _who_hear(self, op: Op) -> Hearers | None:
        """To whom the engine says the op's note by itself."""
        points = self._daemon.failpoints
        if not op.hearers or self._hushed or (points.armed and points.between_notes):
            return None
        return self._hearers_of(op.hearers)

    def _hearers_of(self, mids: tuple[int, ...]) -> Hearers:
        found = self._hearers.get(mids)
        if found is None:
            ends = (self.links.links[mid, links.COLLECTIVES] for mid in mids)
            found = self._hearers[mids] = Hearers([link.number for link in ends])
        return found

    def _record(self, recorder: Recorder, message: m.FromDaemon, op: Op) -> None:
        """For a trace: what the client is told."""
        own = op, self.member.group, self.member.name, self.member.epoch_number
        if isinstance(message, m.Result):
            recorder.told(*own, len(message.contributors), "", trio.current_time())
        elif isinstance(message, m.Failure):
            recorder.told(*own, 0, message.error, trio.current_time())

    def record_open(self, tell: Callable[[Op, str, str, int, float], None]) -> None:
        """For a trace that begins, or is over: what is under way."""
        own = self.member.group, self.member.name, self.member.epoch_number, trio.current_time()
        for table in (self.member.collectives, self.member.p2p):
            for op in table.open.values():
                tell(op, *own)

    def _count(self, operations: Operations, message: m.FromDaemon, op: Op | None) -> None:
        """For metrics: what the client is told."""
        group = self.member.group
        if isinstance(message, m.Result) and op is not None:  # first: most are
            call = op.call
            operations.committed(
                group, op.kind, call.posted.codec, max(call.input_bytes, call.result_bytes), len(message.contributors),
                message.algorithm, message.seconds, message.attempts, message.bytes_sent, message.bytes_saved, op.tag,
            )  # fmt: skip
            return
        match message:
            case m.Failure(0, error):
                operations.ended.add((group, error))
            case m.Failure(_, error) if op is not None:
                operations.failed(group, op.kind, error)
            case m.EpochInfo():
                operations.epochs.add((group,))

    def _look_for_recovery(self, message: m.FromDaemon) -> None:
        """Whether what the client is told ends a recovery, or that of an epoch begins one."""
        now, operations, took = trio.current_time(), self._daemon.operations, None
        if isinstance(message, m.EpochInfo):
            before, self._world = self._world, frozenset(message.members)
            lost = before - self._world - frozenset(message.goodbyes)
            if operations is not None:
                operations.lost.add((self.member.group,), len(lost))
            took = self._recovery.entered(now, lost=bool(lost), waits=self.member.in_flight > 0)
        elif isinstance(message, m.Result):
            took = self._recovery.committed(now)
        if took is not None:
            self.recovered = self.member.epoch_number, took
            if operations is not None:
                operations.recovered(self.member.group, took)

    def notice_loss(self) -> None:
        """For those who watch: the master ends the epoch."""
        self._recovery.noticed(trio.current_time())

    def waits_since(self, now: float) -> float:
        """For how many seconds the oldest call has been open; 0: none is."""
        tables = self.member.collectives, self.member.p2p
        return max((now - op.posted_at for table in tables for op in table.open.values()), default=0.0)

    @property
    def queued(self) -> int:
        """Bytes that wait for the client to read them."""
        return self._stream.queued

    def hush(self) -> None:
        """The engine says no note of this member's ops any more, nor of those that begin before unhush()."""
        self.hold()
        self._hushed = True
        for engine_id in self._in_engine:
            self._daemon.engine.withhold_vote(engine_id)

    def unhush(self) -> None:
        """The member hears now why: what begins from here on may be said again."""
        self._hushed = False

    def lacks_input(self, op: Op) -> bool:
        """Whether the op waits for its own client, which still fills its input."""
        if op.there or op.state in (OpState.done, OpState.ended):
            return False
        if op.state is OpState.running:
            return self._daemon.engine.lacks_input(op.engine_id)
        return self._has_gaps(op)  # the engine has not seen it yet

    @property
    def busy(self) -> bool:
        """Whether a call is under way of which only the engine knows."""
        known = self._caller.look(self._ahead()) if self._lent else None
        if known is not None:
            self._take_over(known)
        return known is not None and known.oldest > 0

    def look(self) -> None:
        """At each heartbeat: which of the inputs that were being filled are there, and which votes are not.

        What the engine has committed by itself is taken in; what it does not end within a heartbeat is taken over.
        """
        if self._lent:
            known = self._caller.look(self._ahead())
            assert known is not None
            self._take_over(known)
            late = known.oldest and self._daemon.now() - known.oldest >= self._daemon.config.limits.heartbeat_interval
            if not late and max(known.claims.values()) <= known.committed:
                self._called = known.committed  # what has begun is young, and may lack its input
                return
            self.hold()
        self.run(self.member.ask(trio.current_time()))
        for op in list(self.member.collectives.open.values()):
            if not op.there and not self._has_gaps(op):
                self.run(self.member.collectives.input_there(op))

    def _has_gaps(self, op: Op) -> bool:
        return self.arena.has_zeros(op.filled, blocks(op.call.input_bytes))

    @property
    def called(self) -> int:
        """The highest seq that the client has called; a call counts when its input is there, and so do those after."""
        if self._lent:
            return self._called  # at the last look: what has not ended since is young
        table = self.peek.collectives
        lacking = (seq for seq, op in table.open.items() if self.lacks_input(op))
        return min(lacking, default=table.called + 1) - 1

    def _prepare(self, resolved: ResolvedCall, view: EpochView, channel: int) -> Prepared:
        """The op's schedule in the engine's terms; kept, since training repeats its shapes."""
        plan, call = view.epoch.plan, resolved.descriptor
        ready = self._daemon.engine.prepare(
            resolved.schedule,
            self.links.numbers(channel),
            dtype=call.dtype,
            op=call.op,
            input_bytes=resolved.input_bytes,
            result_bytes=resolved.result_bytes,
            world_size=len(view.world.mids),
            lanes=plan.lanes,
            lane_groups=plan.lane_groups,
            stripe=plan.stripe,
            turns=plan.turns,
            digest=call.kind not in DATALESS and call.kind is not Kind.send,
            codec=call.codec,
            stochastic=call.rounding == "stochastic",
        )
        keep_newest(self._prepared, resolved, ready, _SHAPES_KEPT)
        return ready

    # ---- events from the engine ----------------------------------------------------------------------

    def op_finished(self, done: Done) -> None:
        """The engine's Done. For this and the next: what goes wrong inside is for the caller to contain."""
        self._released(done.op)
        if done.voted and self._daemon.failpoints.armed:
            self._daemon.failpoints.hit("after_done")
        op = self.member.attempts.ops.get(done.op)
        if op is not None:
            self._kept[done.op] = op, (op.memory, op.beside)
        told = done.op, done.digest, done.bytes_sent, done.bytes_saved, done.codec_error, done.bytes_in_memory
        self.run(self.member.op_finished(*told, self._daemon.now(), voted=done.voted))

    def op_cancelled(self, engine_id: int) -> None:
        """The engine's Cancelled."""
        self._released(engine_id)
        self.run(self.member.op_cancelled(engine_id, self._daemon.now()))

    def _released(self, engine_id: int) -> None:
        self._in_engine.discard(engine_id)
        if not self._in_engine:
            self._idle.set()

    @property
    def idle(self) -> bool:
        """Whether nothing touches the arena for this member: no op in the engine, no hand-over, no look at an input."""
        return not self._in_engine and not self._behind and not self._looks

    async def wait_idle(self) -> None:
        """Return once it is idle."""
        while not self.idle:
            if self._idle.is_set():  # else others wait for it, too
                self._idle = trio.Event()
            await self._idle.wait()
