"""One client of this daemon: its unix connection, arena and member, and how the member's commands are carried out."""

from __future__ import annotations

import socket
from collections.abc import Iterable
from typing import Protocol

import structlog
import trio

from wancoll.collective import Descriptor, DType, Kind, ReduceOp
from wancoll.engine import Engine, Prepared
from wancoll.errors import ProtocolError
from wancoll.peer import member as core
from wancoll.peer import ops
from wancoll.peer.arena import Arena
from wancoll.peer.config import PeerConfig
from wancoll.peer.control import Control
from wancoll.peer.failpoints import Failpoints
from wancoll.peer.links import LinkHub
from wancoll.peer.stream import NowaitStream
from wancoll.schedule.plan import chunk_bounds
from wancoll.schedule.ring import membership_token, ring_all_reduce
from wancoll.wire import messages as m
from wancoll.wire.framing import Decoder, encode

log = structlog.get_logger("wancoll.session")

_SHAPES_KEPT = 256  # descriptors, and schedules ready for the engine


class Host(Protocol):
    """What a session needs of its daemon."""

    config: PeerConfig
    name: str
    arena_bytes: int
    engine: Engine
    links: LinkHub
    control: Control
    failpoints: Failpoints
    stopping: bool

    def add(self, session: Session) -> None:
        """The session has attached: join its group."""

    def remove(self, session: Session) -> None:
        """The session is over."""

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

    def __init__(self, daemon: Host, stream: NowaitStream, attach: m.Attach, first_engine_id: int) -> None:
        self._daemon, self._stream = daemon, stream
        self.attached_at = trio.current_time()
        self.pid = attach.pid
        self.arena = Arena(daemon.arena_bytes)
        self.member = core.Member(
            attach.group, attach.member, attach.start_world, attach.min_world, first_engine_id, daemon.config.limits
        )
        self.links = daemon.links.member(
            self._links_ready,
            lambda mid, reason: self.run(self.member.link_lost(mid, reason)),
            lambda mid, reason: self.run(self.member.link_unreachable(mid, reason)),
        )
        self._described: dict[tuple[int | str, ...], tuple[Descriptor, int]] = {}  # by the fields of Post
        self._prepared: dict[int, Prepared] = {}  # by fingerprint
        self._in_engine: set[int] = set()
        self._room = trio.Event()  # set when an op left; wakes a reader held back by ops_in_flight
        self._idle = trio.Event()

    # ---- the client's connection ---------------------------------------------------------------------

    async def serve(self, decoder: Decoder[m.FromClient], first: list[m.FromClient]) -> None:
        """Serve the client until it goes; *first* are messages that came with the attach."""
        attached = encode(m.Attached(self._daemon.name, self.arena.nbytes))
        try:
            socket.send_fds(self._stream.socket, [attached], [self.arena.fd])
        except OSError:  # the client has gone already
            self.links.close()
            self.arena.close()
            return
        self._daemon.add(self)
        reason = "the client closed the connection"
        try:
            if await self._take(first):
                while data := await self._stream.receive():
                    if not await self._take(decoder.feed(data)):
                        break
        except ProtocolError as bad:
            reason = str(bad)
            log.warning("client sent nonsense", member=self.member.name, reason=reason)
            self.tell(ops.failure(0, "ProtocolError", bad.what, who=bad.who, expected=bad.expected, got=bad.got))
        finally:
            self.run(self.member.leave(reason))
            self.links.close()
            with trio.move_on_after(self._daemon.config.limits.drain_timeout, shield=True):
                await self._engine_idle()
                await self._stream.flush()
            self._daemon.remove(self)
            self._stream.close()
            if not self._in_engine:
                self.arena.close()
            else:
                log.error("the engine still holds an op; its arena is kept mapped", member=self.member.name)

    async def _take(self, messages: list[m.FromClient]) -> bool:
        for message in messages:
            if self._daemon.stopping and not isinstance(message, m.Detach):
                await trio.sleep_forever()  # no new ops while draining; the daemon cancels this when it leaves
            while len(self.member.ops) >= self._daemon.config.limits.ops_in_flight and not self.member.over:
                self._room = trio.Event()
                await self._room.wait()
            if isinstance(message, m.Detach):
                return False
            if not isinstance(message, m.Post):
                raise ProtocolError(
                    "sent a message out of place", who=self.member.name, expected="Post or Detach", got=str(message)
                )
            self._post(message)
        return True

    def _post(self, post: m.Post) -> None:
        descriptor, fingerprint = self._describe(post)
        for region in (post.front, post.back):
            if not self.arena.holds(region, descriptor.nbytes):
                raise ProtocolError(
                    "an operation's region lies outside the arena",
                    who=f"{self.member.name}, {descriptor}",
                    expected=f"within {self.arena.nbytes} bytes",
                    got=f"{descriptor.nbytes} bytes at {region}",
                )
        if post.front < post.back + descriptor.nbytes and post.back < post.front + descriptor.nbytes:
            raise ProtocolError("front and back overlap", who=f"{self.member.name}, {descriptor}")
        self._hit("on_post")
        self.run(self.member.post(post, descriptor, fingerprint, trio.current_time()))

    def _describe(self, post: m.Post) -> tuple[Descriptor, int]:
        """What is called, and its fingerprint; kept, since training repeats its calls."""
        key = (post.kind, post.dtype, post.op, post.count, post.codec, post.algorithm, post.on_failure)
        known = self._described.get(key)
        if known is None:
            descriptor = Descriptor(Kind(post.kind), DType(post.dtype), ReduceOp(post.op), *key[3:])
            if len(self._described) >= _SHAPES_KEPT:
                self._described.pop(next(iter(self._described)))
            known = self._described[key] = descriptor, descriptor.fingerprint()
        return known

    def tell(self, message: m.FromDaemon) -> None:
        """Send to the client; one that does not read is cut off."""
        try:
            self._stream.send_nowait(encode(message))
        except ProtocolError as bad:
            log.warning("client does not read", member=self.member.name, reason=str(bad))
            self._stream.close()

    # ---- commands ------------------------------------------------------------------------------------

    def run(self, commands: list[ops.Command]) -> None:
        """Carry out the member's commands, in order and without waiting."""
        for command in commands:
            match command:
                case ops.ToMaster(message):
                    self._to_master(message)
                case ops.ToClient(message):
                    self._to_client(message)
                case ops.StartOp(op):
                    self._start(op)
                case ops.CancelOp(engine_id):
                    self._daemon.engine.cancel(engine_id)
                case ops.EnterEpoch(epoch, rank):
                    self._hit("on_epoch")
                    self.links.enter(epoch, self._neighbours(epoch, rank))
                case ops.Over():
                    self.links.close()

    def _links_ready(self, epoch: int) -> None:
        self._prepared.clear()  # a link that was dialled anew has another number, also within one epoch
        self.run(self.member.links_ready(epoch))

    def _to_master(self, message: m.FromPeer) -> None:
        if isinstance(message, m.Done):
            self._hit("before_done")
            self._daemon.control.send(message)
            self._hit("after_done")
        else:
            self._daemon.control.send(message)

    def _to_client(self, message: m.FromDaemon) -> None:
        if isinstance(message, m.Result):
            self._hit("before_commit")
            self.tell(message)
            self._hit("after_commit")
        else:
            self.tell(message)
        self._room.set()

    def _neighbours(self, epoch: m.Epoch, rank: int) -> set[int]:
        world = len(epoch.members)
        return {epoch.members[line.peer].mid for line in ring_all_reduce(rank, world)}

    def _start(self, op: ops.Op) -> None:
        self._in_engine.add(op.engine_id)
        self._daemon.started(op.engine_id, self)
        base = self.arena.address
        self._daemon.engine.post(
            self._prepare(op.descriptor, op.fingerprint),
            op.engine_id,
            self.member.epoch_number,
            op.seq,
            op.fingerprint,
            base + op.front,
            base + op.back,
        )
        if self._daemon.failpoints.armed:
            self._daemon.watch_first_bytes(self.links.engine_ids().values())

    def _prepare(self, descriptor: Descriptor, fingerprint: int) -> Prepared:
        """The op's schedule in the engine's terms; kept, since training repeats its shapes."""
        ready = self._prepared.get(fingerprint)
        if ready is None:
            member = self.member
            assert member.epoch is not None
            data = descriptor.kind is Kind.all_reduce
            make = ring_all_reduce if data else membership_token
            if len(self._prepared) >= _SHAPES_KEPT:
                self._prepared.pop(next(iter(self._prepared)))
            ready = self._prepared[fingerprint] = self._daemon.engine.prepare(
                make(member.rank, member.world_size),
                self.links.engine_ids(),
                chunk_bounds(descriptor.count, member.world_size),
                dtype=descriptor.dtype,
                op=descriptor.op,
                count=descriptor.count,
                world_size=member.world_size,
                lanes=member.epoch.lanes,
                stripe=member.epoch.stripe,
                turns=member.epoch.turns,
                digest=data,
            )
        return ready

    # ---- events from the engine ----------------------------------------------------------------------

    def op_finished(self, engine_id: int, digest: int, bytes_sent: int) -> None:
        """The engine's Done."""
        self._released(engine_id)
        self.run(self.member.op_finished(engine_id, digest, bytes_sent))

    def op_cancelled(self, engine_id: int) -> None:
        """The engine's Cancelled."""
        self._released(engine_id)
        self.run(self.member.op_cancelled(engine_id))

    def _released(self, engine_id: int) -> None:
        self._in_engine.discard(engine_id)
        if not self._in_engine:
            self._idle.set()

    async def _engine_idle(self) -> None:
        while self._in_engine:
            self._idle = trio.Event()
            await self._idle.wait()

    def _hit(self, name: str) -> None:
        if self._daemon.failpoints.armed:
            self._daemon.failpoints.hit(name)
