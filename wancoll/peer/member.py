"""One member's state, pure: what it was told, which ops are where, and what has to happen next.

Every method takes what happened and returns the commands that the shell must carry out, in order. The
rules are those of protocol.md's R1 to R8: a result goes to the client only after its commit, and every
retry happens in a new epoch.

    op state    entered when                                  left when
    waiting     posted; an epoch ended                        the links that it needs are up -> running
    running     handed to the engine                          engine finished it -> done
    done        Done was sent to the master                   Commit -> result; a new epoch -> waiting
    given_up    GiveUp was sent                               the master voids it -> failure
    ended       its outcome is known                          the engine let go of its memory -> client is told

Ops start in seq order: one that waits for a link holds back those behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from wancoll.collective import DATALESS, Kind
from wancoll.limits import DEFAULT, Limits
from wancoll.peer import outcomes, rejoin
from wancoll.peer.calls import Call, CallBook, Meaning, World
from wancoll.peer.ops import (
    CancelOp,
    Command,
    EnterEpoch,
    NeedLinks,
    Op,
    OpState,
    Over,
    StartOp,
    ToClient,
    ToMaster,
    failure,
)
from wancoll.peer.p2p import Exchanges
from wancoll.wire import messages as m

_SAID_KEPT = 1024
_UNKNOWN = "the operation was finished here and its commit cannot be learnt; input and result are kept"


class Member:
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
        self.exchanges = Exchanges(group, name, self._take_engine_id)
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
        return len(self.ops) + len(self.exchanges.open)

    @property
    def called(self) -> int:
        """The highest seq that the client has called."""
        return self._next_seq - 1

    @property
    def oldest_call(self) -> int:
        """The client's number of its oldest call that has not ended; 0: none."""
        collectives = (op.client_id for op in self.ops.values())
        exchanges = (op.post.id for op in self.exchanges.open.values())
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
        return self.exchanges.waiting_for()

    # ---- from the client -----------------------------------------------------------------------------

    def join(self) -> list[Command]:
        """Ask for membership; again after each reconnect until the first epoch."""
        was, self.mid = self.mid, 0
        return [ToMaster(m.Join(self.group, self.name, self.start_world, self.min_world, was))]

    def call(self, post: m.Post) -> Call:
        """What *post* calls; kept, since training repeats its calls.

        Raises:
            ProtocolError: nothing that can be called.
        """
        return self._book.call(post)

    def meaning(self, call: Call) -> Meaning:
        """What *call* means in the current epoch."""
        assert self.epoch is not None
        return call.in_epoch(self.epoch, self._world, self.rank, self.limits)

    def post(self, post: m.Post, call: Call, now: float) -> list[Command]:
        """The client calls *call*. It takes the next seq, whatever comes of it."""
        op = Op(self._next_seq, post.id, call, post.front, post.back, posted_at=now)
        self._next_seq += 1
        if self.over:
            return [ToClient(failure(post.id, "Evicted", "this member is no longer in the group", who=self.name))]
        self.ops[op.seq] = op
        commands: list[Command] = []
        if self._asked == op.seq:
            commands.append(self._answer(op))
        void = self._voids.pop(op.seq, None)
        if void is not None:
            return commands + self._end(op, self._void_failure(op, void))
        if self.too_small and call.posted.kind is not Kind.update_membership:
            return commands + self._end(op, self._small_failure(op))
        if self._ready and not self._held:
            commands += self._start(op)
        return commands

    def exchange(self, post: m.Post, now: float) -> list[Command]:
        """The client calls send or recv.

        Raises:
            ProtocolError: nothing that can be called.
        """
        if self.over:
            return [ToClient(failure(post.id, "Evicted", "this member is no longer in the group", who=self.name))]
        return self.exchanges.post(post, self._book.world(post.epoch), now)

    def leave(self, reason: str) -> list[Command]:
        """The client detached or died, or the daemon stops. Ends everything."""
        if self.over:
            return []
        commands: list[Command] = [ToMaster(m.Leave(self.group, self.name))]
        return commands + self._finish_all(lambda call, _: failure(call, "PeerDaemonLost", reason, who=self.name))

    # ---- from the master -----------------------------------------------------------------------------

    def joined(self, mid: int, connection: int, master: int = 0) -> list[Command]:
        """The *master* knows this member as *mid*, on the *connection*-th control connection."""
        self.mid, self.joined_connection, self.master = mid, connection, master
        return []

    def reconnected(self, connection: int, master: int) -> list[Command]:
        """The *connection*-th control connection is up. To another master than before: report."""
        if self.over:
            return []
        if self.epoch is None:
            return self.join()
        if master == self.master:
            return []  # it has dropped this member with the connection, and says so
        self.reporting, self.joined_connection, self._reported_to = True, connection, master
        return [ToMaster(rejoin.report(self, self.epoch))]

    def resumed(self, resumed: m.Resumed) -> list[Command]:
        """All members have reported to the new master, and the epoch goes on: say again what it needs to know."""
        if self.over or not self.reporting or resumed.epoch != self.epoch_number:
            return []
        self._known()
        messages: list[m.FromPeer] = [rejoin.done(self, op) for op in rejoin.finished(self)]
        return [ToMaster(message) for message in messages + self._said] + self.exchanges.tell_again()

    def _known(self) -> None:
        """The master that this member has reported to knows it now."""
        if self.reporting:
            self.reporting, self.master = False, self._reported_to

    def refused(self, reason: str) -> list[Command]:
        """The master does not let this member in."""
        what = f"the master refused the join: {reason}"
        return self._finish_all(
            lambda call, _: failure(call, "ConfigError", what, who=self.name),
            failure(0, "ConfigError", what, who=self.name),
        )

    def enter_epoch(self, epoch: m.Epoch, now: float) -> list[Command]:
        """A new epoch: commit what it says is committed, drop what it voids, run the rest again (R2, R4)."""
        if self.over or epoch.epoch <= self.epoch_number or (self.epoch and epoch.term < self.epoch.term):
            return []
        first = self.epoch is None
        commands: list[Command] = []
        if first:
            self._next_seq = epoch.committed_upto + 1
        self._stop_engine(commands)
        for op in list(self.ops.values()):
            committed = op.state is OpState.done and op.seq <= epoch.committed_upto
            if committed and op.kind is not Kind.update_membership:
                commands += self._end(op, self._result(op, now))  # in the old epoch
        self._known()
        self.epoch, self.min_world = epoch, epoch.min_world
        self.committed, self.aborted = epoch.committed_upto, False
        self._enter_world(epoch)
        self._suspects.clear()
        self._said.clear()
        self._asked = 0
        names = self.member_names
        commands.append(ToClient(m.EpochInfo(epoch.epoch, self.rank, self.name, names)))
        voids = {void.seq: void for void in epoch.voids}
        for op in list(self.ops.values()):
            if op.state is OpState.ended:
                continue
            if op.seq in voids:
                commands += self._end(op, self._void_failure(op, voids[op.seq]))
            elif op.seq <= epoch.committed_upto:  # update_membership: admitted with this epoch
                commands += self._end(op, self._result(op, now))
            elif self.too_small and op.kind is not Kind.update_membership:
                commands += self._end(op, self._small_failure(op))
            else:
                op.state = OpState.waiting
        self._voids.update({seq: void for seq, void in voids.items() if seq >= self._next_seq})
        self._give_up(commands, self._refused())
        commands += self.exchanges.cancel()
        commands.append(EnterEpoch(epoch, self._neighbours, self._spares))
        return commands + self.exchanges.enter(epoch, self.mid)

    def _enter_world(self, epoch: m.Epoch) -> None:
        self._world = World.of(epoch)
        mids, size = self._world.mids, self.world_size
        self.rank = mids.index(self.mid)
        self._neighbours = frozenset((mids[self.rank - 1], mids[(self.rank + 1) % size])) - {self.mid}
        self._spares = frozenset()
        if epoch.plan.spares:
            apart = {other for pair in epoch.plan.avoid if self.mid in pair for other in pair}
            next_but_one = {mids[(self.rank + places) % size] for places in (-2, 2)}
            self._spares = frozenset(next_but_one - self._neighbours - apart - {self.mid})
        self._book.enter(epoch.epoch, self._world)

    def commit(self, commit: m.Commit, now: float) -> list[Command]:
        """All ops of the epoch up to commit.upto are committed (R1, R3)."""
        if self.over or commit.epoch != self.epoch_number:
            return []
        self.committed = max(self.committed, commit.upto)
        commands: list[Command] = []
        for op in list(self.ops.values()):
            if op.seq > commit.upto:
                break
            if op.state is OpState.done:
                commands += self._end(op, self._result(op, now))
        return commands

    def matched(self, matched: m.Matched) -> list[Command]:
        """A send or recv has found its other half."""
        return [] if self.over else self.exchanges.matched(matched)

    def settled(self, settled: m.Settled, now: float) -> list[Command]:
        """A send or recv has ended on both sides."""
        return [] if self.over else self.exchanges.settled(settled, now)

    def abort(self, abort: m.Abort) -> list[Command]:
        """Stop the epoch's ops; the master is about to send the next epoch."""
        if self.over or abort.epoch != self.epoch_number:
            return []
        self.aborted = True
        commands: list[Command] = []
        self._stop_engine(commands)
        for op in self.ops.values():
            if op.state in (OpState.running, OpState.done):
                op.state = OpState.waiting
        if abort.ask:
            self._asked = abort.ask
            asked = self.ops.get(abort.ask)
            if asked is not None:
                commands.append(self._answer(asked))
        return commands

    def evicted(self, reason: str, committed_upto: int, now: float, unknown: bool = False) -> list[Command]:
        """The master put this member out; what had committed until then still counts (R8).

        With *unknown* nobody can say whether what is finished here above *committed_upto* had.
        """
        if self.over:
            return []
        commands: list[Command] = []
        for op in list(self.ops.values()):
            if op.state is OpState.done and op.seq <= committed_upto:
                commands += self._end(op, self._result(op, now))
        hint = "connect again to rejoin as a new member"

        def end(call: int, done: bool) -> m.Failure:
            if done and (unknown or call in exchanges):  # committed_upto does not speak of them
                return failure(call, "OutcomeUnknown", _UNKNOWN, who=self.name, got=reason, hint=hint)
            return failure(call, "Evicted", reason, who=self.name, hint=hint)

        exchanges = {op.post.id for op in self.exchanges.open.values()}
        return commands + self._finish_all(end, failure(0, "Evicted", reason, who=self.name, hint=hint))

    def forgotten(self, cause: str) -> list[Command]:
        """The control connection was lost, and the master that answers now does not know this member any more."""
        if self.over:
            return []
        text: dict[str, Any] = {
            "who": self.name,
            "got": f"the control connection was lost: {cause}",
            "hint": "connect again to rejoin as a new member",
        }

        def end(call: int, done: bool) -> m.Failure:
            if done:
                return failure(call, "OutcomeUnknown", _UNKNOWN, **text)
            return failure(call, "Evicted", "out of the group; tensors are untouched", **text)

        return self._finish_all(end, failure(0, "Evicted", "out of the group", **text))

    def master_unreachable(self, address: str, waited: float, cause: str) -> list[Command]:
        """No master within master_grace. Ops that are finished here may or may not have committed (R8)."""
        if self.over:
            return []
        text: dict[str, Any] = {
            "who": self.name,
            "expected": f"the master at {address} to answer within {waited:.1f} s",
            "got": cause,
            "hint": "start the master, or check the address and the network, then connect again",
        }

        def end(call: int, done: bool) -> m.Failure:
            if done:
                return failure(call, "OutcomeUnknown", _UNKNOWN, **text)
            return failure(call, "MasterUnreachable", "lost the master; tensors are untouched", **text)

        return self._finish_all(end, failure(0, "MasterUnreachable", "lost the master", **text))

    # ---- from the links and the engine ---------------------------------------------------------------

    def links_ready(self, epoch: int, up: Collection[int]) -> list[Command]:
        """The neighbours' links are up, and in all those to *up* (mids): start what waits, in seq order."""
        if self.over or epoch != self.epoch_number:
            return []
        self._up = set(up)
        if self._ready and not self._held:
            return []
        self._ready = True
        return self._start_waiting()

    def link_lost(self, other: int, reason: str) -> list[Command]:
        """The link to member *other* broke: what was on it is lost, so the epoch cannot finish the ops that use it.

        An op that is done here may still have bytes on the way; one that is committed has none.
        """
        if self.over or self.epoch is None:
            return []
        self._up.discard(other)
        if other not in self._neighbours and not any(op.uses(other) for op in self.ops.values()):
            return self._start_waiting() if self._ready and self._held else []
        self._ready = False
        return [self._complain(other, "lost", reason)]

    def exchange_links(self, up: Collection[int]) -> list[Command]:
        """The links for sends and recvs that are up are those to *up* (mids)."""
        return [] if self.over else self.exchanges.links_up(up)

    def exchange_link_lost(self, other: int, reason: str) -> list[Command]:
        """The link for sends and recvs to member *other* broke."""
        if self.over or self.epoch is None:
            return []
        if not self.exchanges.link_lost(other):
            return self.exchanges.wanted(other)
        return [self._complain(other, "lost", reason)]

    def link_unreachable(self, other: int, reason: str) -> list[Command]:
        """The link could not be made within its deadline; said once in an epoch."""
        if self.over or self.epoch is None or other in self._suspects:
            return []
        self._suspects.add(other)
        return [self._complain(other, "unreachable", reason)]

    def op_finished(
        self, engine_id: int, digest: int, bytes_sent: int, bytes_saved: int = 0, codec_error: float = 0.0
    ) -> list[Command]:
        """The engine has moved the last byte of an attempt."""
        self._orphans.discard(engine_id)
        op = self._by_engine_id.pop(engine_id, None)
        if op is None:
            return self.exchanges.finished(engine_id, digest, bytes_sent)
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
            return self.exchanges.cancelled(engine_id)
        op.live.discard(engine_id)
        return self._settle(op)

    def mismatch(self, seq: int) -> list[Command]:
        """A neighbour's frame says that it called something else at *seq*."""
        op = self.ops.get(seq)
        return [] if self.over or op is None else [self._answer(op)]

    # ---- inside --------------------------------------------------------------------------------------

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

    def _give_up(self, commands: list[Command], found: dict[str, list[Op]]) -> None:
        for reason, refused in found.items():
            for op in refused:
                op.state = OpState.given_up
            seqs = [op.seq for op in refused]
            commands.append(self._say(m.GiveUp(self.group, self.mid, self.epoch_number, seqs, reason[:1000])))

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

    def _finish_all(self, end: Callable[[int, bool], m.Failure], last: m.Failure | None = None) -> list[Command]:
        """This member is out: *end* says what is told of a call, by its number and whether it was done here."""
        commands: list[Command] = []
        self._stop_engine(commands)
        self.over = True
        for op in list(self.ops.values()):
            if op.state is not OpState.ended:
                done = op.state is OpState.done and op.kind is not Kind.update_membership
                commands += self._end(op, end(op.client_id, done))
        commands += self.exchanges.end_all(end)
        if last is not None:
            commands.append(ToClient(last))
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
