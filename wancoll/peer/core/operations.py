"""The life of a member's operations, pure: how they start, run in the engine, settle, and what the client is told.

    op state    entered when                                  left when
    waiting     posted; an epoch ended                        the links that it needs are up -> running
    running     handed to the engine                          engine finished it -> done
    done        Done was sent to the master                   Commit -> result; a new epoch -> waiting
    given_up    GiveUp was sent                               the master voids it -> failure
    ended       its outcome is known                          the engine let go of its memory -> client is told

Ops start in seq order: one that waits for a link holds back those behind it. What happens to them is in member.py.
"""

from __future__ import annotations

from wancoll.collective import DATALESS, Kind
from wancoll.limits import DEFAULT, Limits
from wancoll.peer.core import outcomes, rejoin
from wancoll.peer.core.calls import Call, CallBook, Meaning, World
from wancoll.peer.core.endings import Ending
from wancoll.peer.core.ops import CancelOp, Command, NeedLinks, Op, OpState, Over, StartOp, ToClient, ToMaster
from wancoll.peer.core.p2p import Exchanges
from wancoll.wire import messages as m

_SAID_KEPT = 1024


class Operations:
    """See the module.

    Args:
        group: name of the group.
        name: this member's name.
        start_world: world size that starts the group.
        min_world: smallest world size in which ops run.
        first_engine_id: engine ids count up from here; the shell keeps the ranges of its members apart.
        limits: bounds.
    """

    def __init__(
        self, group: str, name: str, start_world: int, min_world: int, first_engine_id: int, limits: Limits = DEFAULT
    ) -> None:
        self.group, self.name = group, name
        self.start_world, self.min_world = start_world, min_world
        self.limits = limits
        self.mid = 0
        self.joined_connection = 0
        self.master = 0  # identity of the master that knows this member
        self._reported_to = 0
        self.reporting = False  # it has told a new master what it knows and waits for what comes of it
        self.aborted = False  # the epoch's ops were stopped; the next epoch follows
        self.committed = 0  # highest seq that is known to be committed
        self.rank = -1
        self.epoch: m.Epoch | None = None
        self.over = False
        self.ops: dict[int, Op] = {}  # by seq, in program order
        self._by_engine_id: dict[int, Op] = {}
        self._orphans: set[int] = set()  # tokens of committed update_memberships that are still under way
        self._next_engine_id = first_engine_id
        self.p2p = Exchanges(group, name, self._take_engine_id)
        self._next_seq = 1
        self._voids: dict[int, m.Void] = {}
        self._world = World((), (), ())
        self._book = CallBook(name)
        self._ready = False  # the neighbours' links are up and nothing stops ops from starting
        self._up: set[int] = set()  # members whose links are up, once ready
        self._neighbours: frozenset[int] = frozenset()
        self._spares: frozenset[int] = frozenset()  # neighbours after a loss
        self._held = False  # the oldest op that waits does so for a link
        self._asked: int = 0  # the master wants to know what this member calls at this seq
        self._suspects: set[int] = set()  # members reported unreachable in this epoch
        self._said: list[m.FromPeer] = []  # in this epoch, of what stops it; told a new master again

    # ---- facts ---------------------------------------------------------------------------------------

    @property
    def epoch_number(self) -> int:
        """The current epoch, 0 before the first."""
        return self.epoch.epoch if self.epoch else 0

    @property
    def world_size(self) -> int:
        """Members of the current epoch."""
        return len(self.epoch.members) if self.epoch else 0

    @property
    def member_names(self) -> list[str]:
        """Names in rank order."""
        return [member.name for member in self.epoch.members] if self.epoch else []

    @property
    def too_small(self) -> bool:
        """Whether the epoch has fewer than min_world members."""
        return self.world_size < self.min_world

    @property
    def in_flight(self) -> int:
        """Calls that have not ended."""
        return len(self.ops) + len(self.p2p.open)

    @property
    def called(self) -> int:
        """The highest seq that the client has called."""
        return self._next_seq - 1

    @property
    def oldest_call(self) -> int:
        """The client's number of its oldest call that has not ended; 0: none."""
        collectives = (op.client_id for op in self.ops.values())
        exchanges = (op.post.id for op in self.p2p.open.values())
        return min((*collectives, *exchanges), default=0)

    def waiting_for(self) -> str:
        """One phrase for status: what the oldest op waits for."""
        for op in self.ops.values():
            if op.state is OpState.waiting:
                return f"op {op.seq} waits for the links of epoch {self.epoch_number}"
            if op.state is OpState.running:
                return f"op {op.seq} is moving data"
            if op.state is OpState.done:
                return f"op {op.seq} is finished here and waits for the others' commit"
            return f"op {op.seq} is being given up"
        return self.p2p.waiting_for()

    def meaning(self, call: Call) -> Meaning:
        """What *call* means in the current epoch."""
        assert self.epoch is not None
        return call.in_epoch(self.epoch, self._world, self.rank, self.limits)

    # ---- what is told --------------------------------------------------------------------------------

    def _say(self, message: m.FromPeer) -> Command:
        """Tell the master something that stops the epoch; a new master is told, too."""
        if len(self._said) < _SAID_KEPT:
            self._said.append(message)
        return ToMaster(message)

    def _complain(self, other: int, kind: str, reason: str) -> Command:
        return self._say(m.LinkDown(self.group, self.mid, self.epoch_number, other, kind, reason[:4000]))

    def _answer(self, op: Op) -> Command:
        call = str(self.meaning(op.call).descriptor)
        return self._say(m.Mismatch(self.group, self.mid, self.epoch_number, op.seq, call))

    def _give_up(self, commands: list[Command], found: dict[str, list[Op]]) -> None:
        for reason, refused in found.items():
            for op in refused:
                op.state = OpState.given_up
            seqs = [op.seq for op in refused]
            commands.append(self._say(m.GiveUp(self.group, self.mid, self.epoch_number, seqs, reason[:1000])))

    # ---- start and run -------------------------------------------------------------------------------

    def _start_waiting(self) -> list[Command]:
        self._held = False
        commands: list[Command] = []
        for op in list(self.ops.values()):
            if op.state is OpState.waiting:
                commands += self._start(op)
                if self._held:
                    break
        return commands

    def _start(self, op: Op) -> list[Command]:
        meaning = self.meaning(op.call)
        if meaning.refusal:
            commands: list[Command] = []
            self._give_up(commands, {meaning.refusal: [op]})
            return commands
        if not meaning.needs <= self._up:
            self._held = True
            return [NeedLinks(meaning.needs - self._up)]
        op.state, op.finished, op.meaning = OpState.running, False, meaning
        op.attempts += 1
        commands = []
        if op.kind is Kind.update_membership:
            commands.append(ToMaster(rejoin.done(self, op)))
            op.state = OpState.done  # it has no result of its own to wait for
        if op.kind in DATALESS and self.world_size == 1:
            op.finished = True
            return commands + self._settle(op)
        op.engine_id = self._take_engine_id()
        op.live.add(op.engine_id)
        self._by_engine_id[op.engine_id] = op
        commands.append(StartOp(op, meaning))
        return commands

    def _take_engine_id(self) -> int:
        self._next_engine_id += 1
        return self._next_engine_id - 1

    def _stop_engine(self, commands: list[Command]) -> None:
        """Cancel every attempt that is under way and let none start."""
        self._ready = self._held = False
        for op in self.ops.values():
            if op.state is OpState.ended:
                continue
            commands += [CancelOp(engine_id) for engine_id in sorted(op.live) if engine_id == op.engine_id]
        commands += [CancelOp(engine_id) for engine_id in sorted(self._orphans)]
        self._orphans.clear()

    def _refused(self) -> dict[str, list[Op]]:
        """Ops that cannot or shall not run in the epoch that begins, by reason."""
        found: dict[str, list[Op]] = {}
        for op in self.ops.values():
            if op.state is OpState.waiting and not self.too_small:
                raises = op.call.posted.on_failure == "raise"
                reason = "" if raises else self.meaning(op.call).refusal
                if raises or reason:
                    found.setdefault(reason, []).append(op)
        return found

    # ---- from the engine -----------------------------------------------------------------------------

    def op_finished(
        self, engine_id: int, digest: int, bytes_sent: int, bytes_saved: int = 0, codec_error: float = 0.0
    ) -> list[Command]:
        """The engine has moved the last byte of an attempt."""
        self._orphans.discard(engine_id)
        op = self._by_engine_id.pop(engine_id, None)
        if op is None:
            return self.p2p.finished(engine_id, digest, bytes_sent)
        op.live.discard(engine_id)
        if engine_id == op.engine_id and op.state is OpState.running:
            op.finished, op.digest, op.bytes_sent = True, digest, bytes_sent
            op.bytes_saved, op.codec_error = bytes_saved, codec_error
        return self._settle(op)

    def op_cancelled(self, engine_id: int) -> list[Command]:
        """The engine has let go of an attempt's memory."""
        self._orphans.discard(engine_id)
        op = self._by_engine_id.pop(engine_id, None)
        if op is None:
            return self.p2p.cancelled(engine_id)
        op.live.discard(engine_id)
        return self._settle(op)

    def _settle(self, op: Op) -> list[Command]:
        """After the engine let go of something: report Done, or tell the client an outcome that waited for that."""
        if op.live:
            return []
        if op.outcome is not None:
            return self._tell(op)
        if op.state is OpState.running and op.finished:
            op.state = OpState.done
            return [ToMaster(rejoin.done(self, op))]
        return []

    # ---- the end -------------------------------------------------------------------------------------

    def _end(self, op: Op, outcome: m.Result | m.Failure) -> list[Command]:
        """Fix an op's outcome; the client hears of it once the engine has let go of the op's memory."""
        if op.kind is Kind.update_membership:  # its token has no memory: nothing to wait for
            self._orphans |= op.live
            for engine_id in op.live:
                self._by_engine_id.pop(engine_id, None)
            op.live.clear()
        op.state, op.outcome = OpState.ended, outcome
        return [] if op.live else self._tell(op)

    def _tell(self, op: Op) -> list[Command]:
        assert op.outcome is not None
        del self.ops[op.seq]
        return [ToClient(op.outcome)]

    def _finish_all(self, ending: Ending) -> list[Command]:
        """This member is out."""
        commands: list[Command] = []
        self._stop_engine(commands)
        self.over = True
        for op in list(self.ops.values()):
            if op.state is not OpState.ended:
                done = op.state is OpState.done and op.kind is not Kind.update_membership
                commands += self._end(op, ending.call(op.client_id, done))
        commands += self.p2p.end_all(ending.call)
        if ending.last is not None:
            commands.append(ToClient(ending.last))
        commands.append(Over())
        return commands

    def _result(self, op: Op, now: float) -> m.Result:
        assert self.epoch is not None
        return outcomes.result(op, self.epoch, now)

    def _void_failure(self, op: Op, void: m.Void) -> m.Failure:
        assert self.epoch is not None
        return outcomes.voided(op, void, self.epoch, str(self.meaning(op.call).descriptor))

    def _small_failure(self, op: Op) -> m.Failure:
        assert self.epoch is not None
        return outcomes.too_small(op.client_id, self.name, self.epoch)
