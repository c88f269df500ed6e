"""One client of this daemon: its unix connection, arena and member, and how the member's commands are carried out."""

from __future__ import annotations

import contextlib
import itertools
import socket
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import Protocol

import structlog
import trio

from wancoll.collective import DATALESS, Kind
from wancoll.engine import Done, Engine, Prepared
from wancoll.errors import ConfigError, ProtocolError
from wancoll.failpoints import Failpoints
from wancoll.limits import WORD, blocks
from wancoll.net.contain import contained
from wancoll.net.hot import Hot, glance
from wancoll.net.stream import Stream
from wancoll.peer.arena import Arena, Cover
from wancoll.peer.config import PeerConfig
from wancoll.peer.control import Control
from wancoll.peer.core import commands as cmd
from wancoll.peer.core import links
from wancoll.peer.core.calls import Call, Meaning, Seat, noise
from wancoll.peer.core.member import Member
from wancoll.peer.core.op import Op, OpState
from wancoll.peer.links.hub import LinkHub
from wancoll.peer.trainer import Trainer
from wancoll.wire import messages as m
from wancoll.wire.framing import Decoder, encode

log = structlog.get_logger("wancoll.session")

_SHAPES_KEPT = 256  # schedules ready for the engine
_ALIGN = 64  # of tables in the arena: a cache line


class Host(Protocol):
    """What a session needs of its daemon."""

    config: PeerConfig
    name: str
    arena_bytes: int
    engine: Engine
    links: LinkHub
    control: Control
    failpoints: Failpoints
    hot: Hot
    ending: m.Failure | None

    @property
    def clients(self) -> int:
        """How many are attached."""

    def has(self, group: str, name: str) -> bool:
        """Whether a client is attached as this member, and has not left."""

    def add(self, session: Session) -> None:
        """The session has attached: join its group."""

    def remove(self, session: Session) -> None:
        """The session is over."""

    def soon(self, task: Callable[[], Awaitable[None]]) -> None:
        """Run *task* beside all others; it may be cancelled at the daemon's end."""

    def started(self, engine_id: int, session: Session) -> None:
        """The session's op is in the engine: its events are the session's."""

    def watch_first_bytes(self, engine_links: Iterable[int]) -> None:
        """Fault injection: hit "mid_op" once one of these links receives something."""


class Session:
    """See the module.

    Args:
        daemon: the daemon that serves it.
        stream: the client's connection.
        attach: what the client asked for.
        first_engine_id: start of this member's range of engine op ids.
    """

    def __init__(self, daemon: Host, stream: Stream, attach: m.Attach, first_engine_id: int) -> None:
        self._daemon, self._stream = daemon, stream
        self.attached_at = trio.current_time()
        self.pid = attach.pid
        self.arena = Arena(daemon.arena_bytes)  # first: it may be refused, and then nothing else is held
        try:
            daemon.engine.add_bell(self.arena.bell)
        except BaseException:
            self.arena.close()
            raise
        self.trainer = Trainer(stream.socket)
        self.member = Member(
            attach.group,
            attach.member,
            attach.start_world,
            attach.min_world,
            first_engine_id,
            daemon.config.limits,
            attach.call_timeout,
        )
        if self.trainer.unseen:
            why = self.trainer.unseen
            log.info("nobody will see whether this client is stopped", member=attach.member, reason=why)
        self.links = daemon.links.member(self._links_say)
        self._prepared: dict[Meaning, Prepared] = {}
        self._in_engine: set[int] = set()
        self._behind: deque[Op | m.FromDaemon] = deque()  # what is handed over, and what the client is told after it
        self._room = trio.Event()  # set when an op left; wakes a reader that is held back
        self._idle = trio.Event()
        self._taking = True  # what has come is taken by the task
        self._bad: ProtocolError | None = None  # what was wrong with a call that was taken beside the task
        self._broken = False
        self._goodbye = False  # the client has said it

    def alone(self, of: object = "") -> contextlib.AbstractContextManager[None]:
        """What goes wrong inside, while *of* is taken in, ends this member and nothing else."""
        return contained(f"member {self.member.name}", lambda: of, self._broke, expected=(ProtocolError,))

    def _broke(self, why: str) -> None:
        """A bug: what is known of the member may be half changed, so it is out, without asking it."""
        if self._broken:
            return
        leave = m.Leave(self.member.group, self.member.name, f"a bug of its daemon: {why}"[:1024])
        if not self.member.over:  # else it is out, and another one may have its name
            self._daemon.control.send(leave)
        self._broken = self.member.over = True
        hint = "this is a bug of the daemon, its log says more; connect again to rejoin as a new member"
        self.tell(m.Failure(0, "PeerDaemonLost", why, who=self.member.name, hint=hint))
        for engine_id in self._in_engine:
            self._daemon.engine.cancel(engine_id)
        self._stream.end()
        self._daemon.links.step(links.Leave(self.links))

    # ---- the client's connection ---------------------------------------------------------------------

    async def serve(self, decoder: Decoder[m.FromClient], first: list[m.FromClient]) -> None:
        """Serve the client until it goes; *first* are messages that came with the attach."""
        attached = encode(m.Attached(self._daemon.name, self.arena.nbytes))
        try:
            socket.send_fds(self._stream.socket, [attached], [self.arena.fd, self.arena.bell])
        except OSError:  # the client has gone already
            self._daemon.links.step(links.Leave(self.links))
            self.trainer.close()
            self._daemon.engine.remove_bell(self.arena.bell)
            self.arena.close()
            return
        self._daemon.add(self)
        hot, fd = self._daemon.hot, self._stream.socket.fileno()
        hot.add(fd, partial(self._take_one, decoder))
        reason = "its connection closed without a goodbye"
        try:
            if await self._take(first):
                while data := await self._stream.receive():
                    if not await self._take(decoder.feed(data)):
                        break
                    hot.stay()
            if self._bad is not None:
                raise self._bad
            if self._stream.overflow:
                reason = f"the client: {self._stream.ended}"
                log.warning("client does not read", member=self.member.name)
        except ProtocolError as bad:
            reason = str(bad)
            log.warning("client sent nonsense", member=self.member.name, reason=reason)
            self.tell(m.Failure(0, "ProtocolError", bad.what, who=bad.who, expected=bad.expected, got=bad.got))
        finally:
            hot.remove(fd)
            with self.alone("its end"):
                died = not self._goodbye and not self.member.over
                if died:
                    log.warning("client died", member=self.member.name, pid=self.pid, reason=reason)
                self.run(self.member.leave(reason, died=died))
            with trio.move_on_after(self._daemon.config.limits.drain_timeout, shield=True):
                await self.wait_idle()
                await self._stream.drain()
            self._daemon.remove(self)
            self.trainer.close()
            self._daemon.engine.remove_bell(self.arena.bell)
            self._stream.close()
            if self.idle:
                self.arena.close()
            else:
                log.error("an op still uses the arena, which is kept mapped", member=self.member.name)

    def _take_one(self, decoder: Decoder[m.FromClient]) -> bool:
        """Take a call that is there, if nothing stands in its way; all else is left to the task. See Hot."""
        if self._taking or self._is_full() or self._daemon.ending:
            return False
        post = glance(self._stream, decoder, m.Post)
        if post is None:
            return False
        try:
            with self.alone(post):
                self._post(post)
        except ProtocolError as bad:
            self._bad = bad
            self._stream.end()
        return True

    async def _take(self, messages: list[m.FromClient]) -> bool:
        self._taking = True
        for message in messages:
            if self._daemon.ending and not isinstance(message, m.Detach):
                await trio.sleep_forever()  # no new ops while draining; the daemon cancels this when it leaves
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
        return True

    def _is_full(self) -> bool:
        """Whether the next call has to wait."""
        full = self.member.in_flight >= self._daemon.config.limits.ops_in_flight and not self.member.over
        return full or bool(self._behind)

    def _post(self, post: m.Post) -> None:
        call = self.member.call(post)
        self._check_regions(post, call)
        self._daemon.failpoints.hit("on_post")
        self.run(self.member.post(post, call, trio.current_time()))

    def _check_regions(self, post: m.Post, call: Call) -> None:
        """Refuse what does not lie in the arena, or not apart: the engine reads and writes there."""
        who = f"{self.member.name}, {call.posted}"
        regions = [("front", post.front, call.front_bytes), ("back", post.back, call.back_bytes)]
        tables = (
            ("filled", post.filled, blocks(call.front_bytes)), ("shown", post.shown, WORD * blocks(call.back_bytes))
        )  # fmt: skip
        for name, at, nbytes in tables:
            if at < 0:
                continue
            regions.append((name, at, nbytes))
            if at % _ALIGN:
                raise ProtocolError(
                    f"an operation's table of what is {name} is not aligned", who=who,
                    expected=f"a multiple of {_ALIGN}", got=str(at),
                )  # fmt: skip
        regions = [region for region in regions if region[2]]
        for _, at, nbytes in regions:
            if not self.arena.holds(at, nbytes):
                raise ProtocolError(
                    "an operation's region lies outside the arena", who=who,
                    expected=f"within {self.arena.nbytes} bytes", got=f"{nbytes} bytes at {at}",
                )  # fmt: skip
        for (one, at, nbytes), (other, start, size) in itertools.combinations(regions, 2):
            if at < start + size and start < at + nbytes:
                raise ProtocolError(f"{one} and {other} overlap", who=who)

    def tell(self, message: m.FromDaemon) -> None:
        """Send to the client, after what is handed over to it; one that does not read is cut off."""
        if self._behind:
            self._behind.append(message)
        else:
            self._stream.send(encode(message))

    async def _hand_over(self) -> None:
        """Task: copy results of ops that this daemon took part in to where the client wants them, then tell it.

        Not in the event loop: they may be GiB. Until it is told, the client uses neither front nor back.
        """
        try:
            with self.alone("what its daemon took part in"):
                while self._behind:
                    first = self._behind[0]
                    if isinstance(first, Op):
                        assert isinstance(first.memory, Cover)
                        for copy in first.memory.pieces(self.arena.address + first.back):
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
        """Carry out the member's commands, in order and without waiting."""
        for command in commands:
            match command:
                case cmd.ToMaster(message):
                    self._to_master(message)
                case cmd.ToClient(message):
                    self._to_client(message)
                case cmd.StartOp(op):
                    self._start(op)
                case cmd.HandOver(op):
                    if not self._behind:
                        self._daemon.soon(self._hand_over)
                    self._behind.append(op)
                case cmd.CancelOp(engine_id):
                    self._daemon.engine.cancel(engine_id)
                case cmd.EnterEpoch(epoch, neighbours, spares):
                    self._daemon.failpoints.hit("on_epoch")
                    self._daemon.links.step(links.Enter(self.links, epoch, neighbours, spares))
                case cmd.NeedLinks(mids, p2p):
                    self._daemon.links.step(links.Need(self.links, mids, links.P2P if p2p else links.COLLECTIVES))
                case cmd.LetGo(mid):
                    self._daemon.links.step(links.LetGo(self.links, mid))
                case cmd.Redial(others, older, reason, sends):
                    channel = None if sends is None else links.P2P if sends else links.COLLECTIVES
                    self._daemon.links.step(links.Redial(self.links, others, older, reason, channel))
                case cmd.SendNote(mids, note, again):
                    self._say(mids, note, again=again)
                case cmd.Over():
                    self._daemon.links.step(links.Leave(self.links))

    def _links_say(self, told: links.Told) -> None:
        if isinstance(told, links.LinksUp | links.P2PUp):
            self._prepared.clear()  # a link that was dialled anew has another number, also within one epoch
        with self.alone(told):
            self.run(self.member.links_say(told, trio.current_time()))

    def _to_master(self, message: m.FromPeer) -> None:
        if self.member.standing.reporting and not isinstance(message, m.Report | m.Leave):
            return  # said when the master knows the member
        if isinstance(message, m.Done | m.P2PDone):
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
        if isinstance(message, m.Result):
            self._daemon.failpoints.hit("before_commit")
            self.tell(message)
            self._daemon.failpoints.hit("after_commit")
        else:
            self.tell(message)
        self._room.set()

    def _start(self, op: Op) -> None:
        meaning, seat, base = op.meaning, self.member.seat, self.arena.address
        assert meaning is not None
        assert seat is not None
        channel = links.P2P if op.p2p else links.COLLECTIVES
        front, back, rounding = base + op.front, base + op.back, noise(meaning.descriptor, op.seq, seat.mid)
        try:
            if op.covers:
                if op.memory is None:
                    op.memory = Cover(meaning.front_bytes, meaning.back_bytes)
                assert isinstance(op.memory, Cover)
                front, back = op.memory.front, op.memory.back
            prepared = self._prepared.get(meaning) or self._prepare(meaning, seat, channel)
            filled = base + op.filled if op.filled >= 0 and op.call.front_bytes else 0
            shown = base + op.shown if op.shown >= 0 else 0
            self._daemon.engine.post(
                prepared, op.engine_id, seat.epoch.epoch, op.seq, meaning.fingerprint, front, back, rounding,
                filled_address=filled, shown_address=shown, attempt=op.attempts,
            )  # fmt: skip
        except (ConfigError, MemoryError, OverflowError, OSError) as bad:
            reason = str(bad) or type(bad).__name__
            log.error("the engine refuses an operation", member=self.member.name, op=str(op), reason=reason)
            self.run(self.member.op_refused(op.engine_id, reason))
            return
        self._in_engine.add(op.engine_id)
        self._daemon.started(op.engine_id, self)
        if self._daemon.failpoints.armed:
            self._daemon.watch_first_bytes(self.links.numbers(channel).values())

    def lacks_input(self, op: Op) -> bool:
        """Whether the op waits for its own client, which still fills its input."""
        if op.there or op.state in (OpState.done, OpState.ended):
            return False
        if op.state is OpState.running:
            return self._daemon.engine.lacks_input(op.engine_id)
        return self._has_gaps(op)  # the engine has not seen it yet

    def look_at_inputs(self) -> None:
        """Now and then: which of the inputs that were being filled are there."""
        for op in list(self.member.collectives.open.values()):
            if not op.there and not self._has_gaps(op):
                self.run(self.member.input_there(op))

    def _has_gaps(self, op: Op) -> bool:
        return self.arena.has_zeros(op.filled, blocks(op.call.front_bytes))

    @property
    def called(self) -> int:
        """The highest seq that the client has called; a call counts when its input is there, and so do those after."""
        book = self.member.collectives
        lacking = (seq for seq, op in book.open.items() if self.lacks_input(op))
        return min(lacking, default=book.called + 1) - 1

    def _prepare(self, meaning: Meaning, seat: Seat, channel: int) -> Prepared:
        """The op's schedule in the engine's terms; kept, since training repeats its shapes."""
        plan, call = seat.epoch.plan, meaning.descriptor
        if len(self._prepared) >= _SHAPES_KEPT:
            self._prepared.pop(next(iter(self._prepared)))
        ready = self._prepared[meaning] = self._daemon.engine.prepare(
            meaning.schedule,
            self.links.numbers(channel),
            dtype=call.dtype,
            op=call.op,
            front_bytes=meaning.front_bytes,
            back_bytes=meaning.back_bytes,
            world_size=len(seat.world.mids),
            lanes=plan.lanes,
            tracks=plan.tracks,
            stripe=plan.stripe,
            turns=plan.turns,
            digest=call.kind not in DATALESS and call.kind is not Kind.send,
            codec=call.codec,
            stochastic=call.rounding == "stochastic",
        )
        return ready

    # ---- events from the engine ----------------------------------------------------------------------

    def op_finished(self, done: Done) -> None:
        """The engine's Done."""
        self._released(done.op)
        with self.alone(done):
            told = done.op, done.digest, done.bytes_sent, done.bytes_saved, done.codec_error
            self.run(self.member.op_finished(*told, trio.current_time()))

    def op_cancelled(self, engine_id: int) -> None:
        """The engine's Cancelled."""
        self._released(engine_id)
        with self.alone():
            self.run(self.member.op_cancelled(engine_id, trio.current_time()))

    def _released(self, engine_id: int) -> None:
        self._in_engine.discard(engine_id)
        if not self._in_engine:
            self._idle.set()

    @property
    def idle(self) -> bool:
        """Whether nothing touches the arena for this member: the engine holds no op, and nothing is handed over."""
        return not self._in_engine and not self._behind

    async def wait_idle(self) -> None:
        """Return once it is idle."""
        while not self.idle:
            if self._idle.is_set():  # else others wait for it, too
                self._idle = trio.Event()
            await self._idle.wait()
