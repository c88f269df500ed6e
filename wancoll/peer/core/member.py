"""One member's state, pure: what the client, the master, the links and the engine say, and what has to happen next.

Every method takes what happened and returns the commands that the shell must carry out, in order. The
rules are those of docs/protocol.md: a result goes to the client only after its commit, and every
retry happens in a new epoch. The states of operations are in operations.py.
"""

from __future__ import annotations

from collections.abc import Collection

from wancoll.collective import Kind
from wancoll.peer.core import endings, rejoin
from wancoll.peer.core.calls import Call, World
from wancoll.peer.core.operations import Operations
from wancoll.peer.core.ops import Command, EnterEpoch, Op, OpState, ToClient, ToMaster, failure
from wancoll.wire import messages as m


class Member(Operations):
    """See the module, and Operations for the arguments."""

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
        return self.p2p.post(post, self._book.world(post.epoch), now)

    def leave(self, reason: str) -> list[Command]:
        """The client detached or died, or the daemon stops. Ends everything."""
        if self.over:
            return []
        commands: list[Command] = [ToMaster(m.Leave(self.group, self.name))]
        return commands + self._finish_all(endings.left(self.name, reason))

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
        return [ToMaster(message) for message in messages + self._said] + self.p2p.tell_again()

    def _known(self) -> None:
        """The master that this member has reported to knows it now."""
        if self.reporting:
            self.reporting, self.master = False, self._reported_to

    def refused(self, reason: str) -> list[Command]:
        """The master does not let this member in."""
        return self._finish_all(endings.refused(self.name, reason))

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
        commands += self.p2p.cancel()
        commands.append(EnterEpoch(epoch, self._neighbours, self._spares))
        return commands + self.p2p.enter(epoch, self.mid)

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
        return [] if self.over else self.p2p.matched(matched)

    def settled(self, settled: m.Settled, now: float) -> list[Command]:
        """A send or recv has ended on both sides."""
        return [] if self.over else self.p2p.settled(settled, now)

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
        exchanges = {op.post.id for op in self.p2p.open.values()}
        behind = [op for op in self.ops.values() if op.seq <= committed_upto]  # a report came too late (R7)
        elsewhere = {op.client_id for op in behind if op.state in (OpState.waiting, OpState.running)}
        return commands + self._finish_all(endings.evicted(self.name, reason, unknown, exchanges, elsewhere))

    def forgotten(self, cause: str) -> list[Command]:
        """The control connection was lost, and the master that answers now does not know this member any more."""
        return [] if self.over else self._finish_all(endings.forgotten(self.name, cause))

    def master_unreachable(self, address: str, waited: float, cause: str) -> list[Command]:
        """No master within master_grace. Ops that are finished here may or may not have committed (R8)."""
        return [] if self.over else self._finish_all(endings.master_unreachable(self.name, address, waited, cause))

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

    def p2p_links(self, up: Collection[int]) -> list[Command]:
        """The links for sends and recvs that are up are those to *up* (mids)."""
        return [] if self.over else self.p2p.links_up(up)

    def p2p_link_lost(self, other: int, reason: str) -> list[Command]:
        """The link for sends and recvs to member *other* broke."""
        if self.over or self.epoch is None:
            return []
        if not self.p2p.link_lost(other):
            return self.p2p.wanted(other)
        return [self._complain(other, "lost", reason)]

    def link_unreachable(self, other: int, reason: str) -> list[Command]:
        """The link could not be made within its deadline; said once in an epoch."""
        if self.over or self.epoch is None or other in self._suspects:
            return []
        self._suspects.add(other)
        return [self._complain(other, "unreachable", reason)]

    def mismatch(self, seq: int) -> list[Command]:
        """A neighbour's frame says that it called something else at *seq*."""
        op = self.ops.get(seq)
        return [] if self.over or op is None else [self._answer(op)]
