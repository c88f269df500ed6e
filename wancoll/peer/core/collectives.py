"""A member's collectives: numbered by program order, started in that order, committed by the master or here. Pure.

The states are in op.py. Who changes them: the links' coming up starts what waits, in seq order, and one op that waits
for a link holds back those behind it (R15); the engine makes it done; a Commit ends it (R1); an Abort or a new epoch
takes it out of the engine and back to waiting (R2, R4), or ends it, where the master has voided its seq (R14), which
may be one that the client has not called yet.

update_membership is an op, too (R5): the master is told when the member has reached it, and it is done from there on.
The token that it sends to the right neighbour only finds out members whose call differs; it has no memory, so the
outcome does not wait for it. Where members commit, and the master is away, they pass it by themselves (C11): each
says so in a note, and when all have it ends like a barrier, and admits nobody.

Where the plan says so members commit among themselves (own_tally.py): of what proves that everyone took part each tells
all others its vote, and it ends here when all votes are equal. The vote goes to the engine with the op, which may send
it itself when it has finished; op.voted_to: the members to whom it did. A member keeps the results of what it
has committed of late: others may lack its votes, and a master that ends the epoch compares them (C3). So it is where
the master commits, for the one after it (R7). Other kinds are told to the master
once all below them is committed here, and their vote says so. An Abort then freezes the member: what is done stays
done, is reported, and nothing else is finished in this epoch.

A call with a grace time is told to the master when the client has made it and its input is there, in each epoch again
(R20). If the master says that the client is late, the daemon takes part for it (Op.zeros): the op stands in the table
like any other, its seq is above those that the client has called, and nobody is told its outcome before the client
makes the call. Then it gets that outcome, whatever its own tensor was.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from math import inf

from msgspec.structs import replace

from wancoll.collective import DATALESS, PROVING, SAME_RESULT, Kind
from wancoll.commit.begun import Begun
from wancoll.commit.own_tally import OwnTally
from wancoll.errors import ProtocolError
from wancoll.limits import WINDOW_FACTOR, Limits
from wancoll.peer.core import commands as cmd
from wancoll.peer.core import links, outcomes
from wancoll.peer.core.calls import Call, EpochView, ResolvedCall, call_of_zeros
from wancoll.peer.core.liveness.master_session import MasterSession
from wancoll.peer.core.op import Op, OpState
from wancoll.peer.core.op_table import Attempts, OpTable
from wancoll.wire import messages as m
from wancoll.wire.islands import member_name, parted
from wancoll.wire.note import ROUNDS, Ask, NewRound, pack


class Collectives(OpTable):
    """A member's collectives."""

    def __init__(self, attempts: Attempts, master_session: MasterSession, limits: Limits) -> None:
        super().__init__(attempts, master_session, limits)
        self.called = 0  # the highest seq that the client has called
        self.committed = 0  # the highest seq that is known to be committed
        self.aborted = False  # the epoch's ops were stopped; the next epoch follows
        self.updated: m.UpdateOutcome | None = None  # what the client was told of its newest update_membership
        self._early: list[cmd.Command] = []  # its result, if that is of an epoch that this member is yet to hear of
        self._voids: dict[int, m.Void] = {}  # of seqs that the client has not called yet
        self._ready = False  # the neighbours' links are up and nothing stops ops from starting
        self._up: set[int] = set()  # members whose links are up, once ready
        self._held = False  # the oldest op that waits does so for a link, or for a larger world
        self._late: dict[int, Op] = {}  # of zeros: ended or not, which the client has not called; open, which differ
        self._asked = 0  # the master wants to know what this member calls at this seq
        # Of what was committed: seq, digest, fingerprint. No other member can lack more of it.
        self._kept: deque[tuple[int, int, int]] = deque(maxlen=limits.ops_in_flight + limits.zero_contributions)
        self.tally: OwnTally | None = None  # where members commit
        self._behind = -1  # up to where it had committed when it was found at last that another says more
        self._answered: dict[int, float] = {}  # when another member that asked for votes was told them at last
        self.now = 0.0  # of the newest step
        self._said: set[int] = set()  # then: seqs of this epoch that the master was told as done
        self._complained: set[int] = set()  # and those of which it was told that results differ
        self.master_away = False  # so an update_membership does not wait for it, where members commit
        self._alone: set[int] = set()  # seqs of those of this epoch that this one passes if all others do, too
        self.round = 0  # of the epoch (C12)
        # By mid: what was said of an epoch that this member has not heard of yet; other columns do not wait for it.
        self._ahead: dict[int, deque[m.Vote | NewRound]] = {}
        self._leaving: set[int] = set()  # seqs of what ran in an older round and is still in the engine

    def done(self, op: Op) -> m.Vote:
        """The member's vote for *op*, which it has finished, or at which it stands."""
        assert op.resolved is not None
        return m.Vote(*self.view.head, op.seq, self._digest(op), op.resolved.fingerprint, self.settled)

    def _digest(self, op: Op) -> int:
        """Digest of a result that is the same on all members; 0 for other kinds."""
        return op.digest if op.kind in SAME_RESULT else 0

    def _keep(self, op: Op) -> None:
        """It is committed, with this result."""
        assert op.resolved is not None
        self._kept.append((op.seq, self._digest(op), op.resolved.fingerprint))

    @property
    def settled(self) -> int:
        """What the master is told with each word: where members commit, up to where they have."""
        return self.committed if self.tally is not None else 0

    def finished(self) -> list[m.Vote]:
        """What is done here and not known to be committed, in the order of its seqs."""
        return [self.done(op) for op in self.open.values() if op.state is OpState.done]

    def results(self) -> list[tuple[int, int, int]]:
        """What has been committed here of late, and what is done."""
        return [*self._kept, *((one.seq, one.digest, one.fingerprint) for one in self.finished())]

    def told(self) -> list[m.Vote]:
        """The part of finished() that was already reported to the master."""
        return [done for done in self.finished() if self.tally is None or done.seq in self._said]

    @property
    def in_flight(self) -> int:
        """The client's calls that have not ended."""
        return len(self.open) - (sum(seq in self.open for seq in self._late) if self._late else 0)

    # ---- from the client -----------------------------------------------------------------------------

    def post(self, post: m.Post, call: Call, now: float) -> list[cmd.Command]:
        """The client calls *call*. It takes the next seq, whatever comes of it."""
        late = self._post_late(post, call)
        if late is not None:
            return late
        self.called = seq = self.called + 1
        op = self.open[seq] = Op(
            seq, post.id, call, post.input_buffer, post.result_buffer, 0, now, seq, post.filled, shown=post.shown
        )
        commands = [self._answer(op)] if self._asked == seq else []
        void = self._voids.pop(seq, None)
        if void is not None:
            return commands + self.end(op, self._voided(op, void))
        if self.view.too_small and op.kind is not Kind.update_membership and not self._undecided():
            return commands + self.end(op, self._small(op))
        if self._ready and not self._held:
            commands += self._start(op)
        return [*commands, *map(cmd.ToMaster, self._call_with_grace(op))]

    def _undecided(self) -> bool:
        """Whether in this small world calls wait for the next one: an update_membership is open, or all has stopped.

        Who is admitted begins behind the update_membership, with calls that must not have failed here (R4).
        """
        updates = (op.kind is Kind.update_membership and op.outcome is None for op in self.open.values())
        return self.aborted or any(updates)

    def _post_late(self, post: m.Post, call: Call) -> list[cmd.Command] | None:
        """The client calls the seq in which its daemon has taken part for it; None: it has not.

        It is told how that has ended, or will be. A call that differs has not happened, for this client alone.
        """
        op = self._late.get(self.called + 1)
        if op is None:
            return None
        self.called += 1
        self._voids.pop(self.called, None)  # then that is the outcome
        same, ended = call.posted == op.call.posted, op.number not in self.open
        if same or ended:
            del self._late[op.number]
        if not same:
            name = self.view.world.names[self.view.rank]
            return [cmd.ToClient(outcomes.differs(op, post.id, str(call.posted), name))]
        op.client_id, op.input_buffer, op.result_buffer = post.id, post.input_buffer, post.result_buffer
        op.handed = call.memory[1]
        return self.tell(op, op.outcome) if ended and op.outcome is not None else []

    # ---- from the master -----------------------------------------------------------------------------

    def commit(self, upto: int, now: float, *, out: bool = False) -> list[cmd.Command]:
        """Ops of the epoch up to *upto* are committed, as the master says (R1, R3).

        *out*: while this member was evicted. An update_membership may have ended in an epoch that it has not heard of.
        """
        return self._commit(upto, now, out=out) + ([] if out else self._decide_all())

    def _commit(self, upto: int, now: float, *, out: bool = False, alone: bool = False) -> list[cmd.Command]:
        """See commit(); *alone*: by the members' word."""
        self.committed = max(self.committed, upto)
        commands: list[cmd.Command] = []
        for op in list(self.open.values()):
            if op.seq > upto:
                break
            if op.state is OpState.done and not (out and op.kind is Kind.update_membership):
                self._keep(op)
                commands += self._end_beside(op) + self.end(op, self._result(op, now, alone=alone))
        if self.tally is None or out:
            return commands
        self.tally.advance(upto)
        self._said = {seq for seq in self._said if seq > upto}
        # C10, C12: some may lack a vote, or the master's word, and wait in what nobody else repeats: they are to ask.
        if not self.tally.frozen and (any(seq <= upto for seq in self._alone) or (self.round and not alone)):
            to = tuple(sorted(self.tally.others & self._up))
            commands.append(cmd.SendNote(to, pack(self.tally.committed_so_far())))
        self._alone = {seq for seq in self._alone if seq > upto}
        first = self._first_open(self.tally)
        if first is None or first.state is OpState.done or self.tally.frozen:
            return commands
        # What is said again of calls with a grace time says how far this one has committed (R20).
        return [*commands, *map(cmd.ToMaster, self._call_with_grace(first))]

    def commit_equal(self, digests: Collection[tuple[int, int, int]], now: float) -> list[cmd.Command]:
        """Ops of the epoch that others have committed: those that are done here with the same digest."""
        commands: list[cmd.Command] = []
        for seq, digest, fingerprint in digests:
            op = self.open.get(seq)
            if op is not None and op.state is OpState.done:
                done = self.done(op)
                if (done.digest, done.fingerprint) == (digest, fingerprint):
                    commands += self._end_beside(op) + self.end(op, self._result(op, now))
        return commands

    def _end_beside(self, op: Op) -> list[cmd.Command]:
        """What ran for others' sake is committed: nobody needs it any more."""
        runs = op.engine_id in op.live and op.kind is not Kind.update_membership
        return [cmd.CancelOp(op.engine_id)] if runs else []

    def update_ended(self, outcome: m.UpdateOutcome, now: float) -> list[cmd.Command]:
        """Others were told this *outcome* of an update_membership; all up to it is committed.

        If it has ended in a later epoch nothing above it has happened in this one.
        """
        op = self.open.get(outcome.seq)
        if op is None or op.state is not OpState.done or op.kind is not Kind.update_membership:
            return []
        self._keep(op)
        later = outcome.epoch > self.view.epoch.epoch
        stopped = self._stop() if self.tally is not None and later else []
        self.aborted |= later
        shard, shards = self.view.columns[self.view.mid], self.view.epoch.shards
        names = [member_name(island, shard, shards) for island in outcome.members]
        ended = self.end(op, outcomes.result(op, outcome.epoch, names, op.digest, now))
        return stopped + self.commit(outcome.seq, now) + ended

    def abort(self, ask: int) -> list[cmd.Command]:
        """Stop the epoch's ops. With *ask*: tell what is called at that seq, now or when it is called.

        Where members commit this one freezes and reports: others may have committed what is done here.
        """
        commands = self._stop()
        self._asked = ask or self._asked
        if self.tally is not None:
            commands.append(cmd.ToMaster(m.Frozen(*self.view.head, self._stopped(self.tally))))
        return commands + (self.mismatch(ask) if ask else [])

    def _stop(self) -> list[cmd.Command]:
        """From now on nothing is finished in this epoch."""
        self.aborted = True
        commands = self.cancel()
        self._leaving.clear()
        for op in self.open.values():
            if op.state is OpState.running or (op.state is OpState.done and self.tally is None):
                op.state = OpState.waiting
        if self.tally is not None:
            self.tally.freeze()
        return commands

    def _stopped(self, tally: OwnTally) -> m.EpochReport:
        """What the others, or a master, have heard that is finished here."""
        told = {op.seq for op in self.open.values() if self._votes(op)} | self._said
        done = [one for one in self.results() if one[0] <= self.committed or one[0] in told]
        collected = [seq for seq, _, _ in done if seq in self._said and seq not in self._alone]
        return m.EpochReport(self.committed, done, collected, tally.divergent)

    def report(self) -> m.EpochReport:
        """All that is finished here: a new master may count it, whoever was told."""
        return m.EpochReport(self.committed, self.results(), [], [])

    def leave_epoch(self, upto: int, now: float, *, passed: bool = False) -> list[cmd.Command]:
        """The epoch is over: stop, but what it committed up to *upto* ends in it (R2).

        So does an update_membership where it was *passed* by the members (C11); else the next epoch ends it.
        """
        commands = self.cancel()
        self._leaving.clear()
        for op in list(self.open.values()):
            if op.state is OpState.done and op.seq <= upto and (passed or op.kind is not Kind.update_membership):
                commands += self.end(op, self._result(op, now, alone=True))
        return commands

    def enter(self, view: EpochView, now: float) -> list[cmd.Command]:
        """A new epoch: end what it voids and what it admits, run the rest again (R4)."""
        epoch, self.view = view.epoch, view
        self.committed, self.aborted, self._asked = epoch.committed_upto, False, 0
        voids = {void.seq: void for void in epoch.voids}
        self._open_tally(view, voids)
        ahead, self._ahead = self._ahead, {}
        said = [(mid, note) for mid, notes in ahead.items() if mid in view.columns for note in notes]
        rounds = [note.number for _, note in said if isinstance(note, NewRound) and note.epoch == epoch.epoch]
        self.round = max(rounds, default=0) if self.tally else 0
        for mid, note in said:
            if note.epoch > epoch.epoch:
                self._keep_ahead(mid, note)
            elif isinstance(note, m.Vote) and note.epoch == epoch.epoch and self.tally is not None:
                with suppress(ProtocolError):  # its links are made anew where it says so again
                    self.tally.hear(mid, note)
        commands, self._early = self._early, []
        behind = False  # an update_membership that is open
        refused: dict[str, list[Op]] = {}  # by reason: what cannot or shall not run in this epoch
        for op in list(self.open.values()):
            if op.state is OpState.ended:
                continue
            op.ran = False
            if op.seq in voids:
                commands += self.end(op, self._voided(op, voids[op.seq]))
            elif op.seq <= epoch.committed_upto:  # update_membership: admitted with this epoch
                commands += self.end(op, self._result(op, now))
            elif view.too_small:
                op.state = OpState.waiting
                behind = behind or op.kind is Kind.update_membership
                if not behind:
                    commands += self.end(op, self._small(op))
            else:
                again, op.state = op.state is OpState.given_up, OpState.waiting
                if reason := self.resolved(op).refusal:
                    asked = op.call.posted.on_failure == "raise" and not again
                    refused.setdefault("" if asked else reason, []).append(op)  # the epoch's own says more
        for seq, void in voids.items():
            if seq > self.called:
                self._voids.setdefault(seq, void)  # the first telling says most
        commands += [self._give_up(reason, ops) for reason, ops in refused.items()]
        commands += [cmd.ToMaster(message) for message in self.calls_with_grace()]
        return commands

    def _open_tally(self, view: EpochView, voids: Collection[int]) -> None:
        self._kept.clear()
        self._answered.clear()
        self._behind = -1
        self._said.clear()
        self._alone.clear()
        self._complained.clear()
        self.tally, self.master_away = None, False
        if view.votes:
            window = WINDOW_FACTOR * self._limits.ops_in_flight + self._limits.zero_contributions
            others = frozenset(view.columns) - {view.mid}
            self.tally = OwnTally(view.head, others, view.epoch.committed_upto, voids, window, view.columns)

    def contribute_zeros(self, asked: m.ContributeZeros, now: float) -> list[cmd.Command]:
        """The client is late with a call: take part in it with zeros, unless it has called it (R20).

        What lies below has been called, is void, or is taken part in, too.
        """
        seq, known = asked.seq, self._late.keys() | self._voids.keys()
        between = range(self.called + 1, seq)
        if self.aborted or self.view.too_small or seq <= max(self.called, self.committed) or seq in known:
            return []
        if len(between) > len(known) or not all(each in known for each in between):
            return []
        call = call_of_zeros(asked, self.view)
        if call is None:
            return []  # no client can call this: now the others wait for this one, as without a grace time
        held = [op.call for op in self._late.values() if not isinstance(op.outcome, m.Failure) or op.live]
        nbytes = sum(sum(each.memory) for each in (*held, call))
        if len(self._late) >= self._limits.zero_contributions or nbytes > self._limits.zero_contribution_bytes:
            return []  # its results have to be kept: now the others wait for the client
        op = self.open[seq] = self._late[seq] = Op(seq, 0, call, 0, 0, 0, now, seq, zeros=True)
        return self._start(op) if self._ready and not self._held else []

    def input_there(self, op: Op) -> list[cmd.Command]:
        """The client has filled the input of *op*, for which it was not waited before."""
        op.there = True
        return [cmd.ToMaster(message) for message in self._call_with_grace(op)]

    def calls_with_grace(self) -> list[m.CalledWithGrace]:
        """What the client has called and is not to wait for ever for the others."""
        return [said for op in self.open.values() for said in self._call_with_grace(op)]

    def _call_with_grace(self, op: Op) -> list[m.CalledWithGrace]:
        called = op.client_id and op.there and op.state is not OpState.ended and len(self.view.world.mids) > 1
        call = op.call.posted
        return [m.CalledWithGrace(*self.view.head, op.seq, call, self.settled)] if called and call.grace else []

    # ---- where members commit ------------------------------------------------------------------------

    def say_done(self, op: Op) -> list[cmd.Command]:
        """See OpTable. Where members commit the others are told, or the master once all below is committed."""
        if self.tally is None:
            return super().say_done(op)
        said = self._vote(self.tally, op, told=op.voted_to) if self._votes(op) else []
        return said + self._decide_all()

    def hear(self, sender: int, note: m.Vote | NewRound | Ask) -> list[cmd.Command]:
        """Member *sender* says what it knows. Of another epoch nothing counts (C10).

        Raises:
            ProtocolError: what no member can know; nothing has changed.
        """
        if isinstance(note, NewRound):
            return self._hear_round(sender, note)
        if isinstance(note, m.Vote) and note.epoch > self.view.epoch.epoch and self.view.epoch.shards > 1:
            self._keep_ahead(sender, note)
        if self.tally is None or note.epoch != self.tally.epoch:
            return []
        if isinstance(note, Ask):
            return self._say_again(self.tally, sender, note)
        self.tally.hear(sender, note)
        return self._differ(note.seq) + self._decide_all()

    def _keep_ahead(self, sender: int, note: m.Vote | NewRound) -> None:
        """Member *sender* is in an epoch that is yet to come here; there it can have so many votes that are open."""
        most = self._limits.ops_in_flight + self._limits.zero_contributions
        if sender in self.view.columns or len(self._ahead) < self._limits.group_members:
            self._ahead.setdefault(sender, deque(maxlen=most)).append(note)

    def start(self, op: Op, resolved: ResolvedCall) -> cmd.Command:
        """See OpTable. What members commit the engine may say to those who can be told now."""
        command, tally = super().start(op, resolved), self.tally
        op.hearers = op.voted_to = ()
        if tally is not None and not tally.frozen and self._votes(op):
            op.hearers = tuple(sorted(tally.others & self._up))
            op.vote = pack(m.Vote(*self.view.head, op.seq, 0, resolved.fingerprint, tally.committed))
        return command

    def _votes(self, op: Op) -> bool:
        """Whether members commit it. In all columns or in none: shards of one call may be empty in some."""
        anywhere = self.view.epoch.shards > 1 and op.kind in PROVING
        return op.resolved is not None and (op.resolved.proves_all or anywhere)

    def unheard(self, seq: int) -> frozenset[int] | None:
        """The members that have not said that *seq* is finished there; None: the master commits it."""
        op, tally = self.open.get(seq), self.tally
        if op is None or tally is None or not (seq in self._alone or self._votes(op)):
            return None
        return tally.unheard(seq)

    def _decide_all(self) -> list[cmd.Command]:
        """Do what follows from what is known, one decision at a time, until nothing follows."""
        commands: list[cmd.Command] = []
        while (decided := self._decide()) is not None:
            commands += decided
        return commands

    def _decide(self) -> list[cmd.Command] | None:
        """Commit what all have finished; of the first op that is open tell the master, if it commits that; or pass it.

        None: there is nothing to decide.
        """
        tally = self.tally
        if tally is None or tally.frozen:
            return None
        if (upto := tally.prefix()) > tally.committed:
            return self._commit(upto, self.now, alone=True)
        op = self._first_open(tally)
        if op is None or op.state is not OpState.done or self._votes(op):
            return None
        if op.seq not in self._said:
            self._said.add(op.seq)
            tally.told_master(op.seq, relayed=op.kind is not Kind.update_membership)
            return [cmd.ToMaster(self.done(op)), *self._differ(op.seq)]
        if op.kind is not Kind.update_membership or op.seq in self._alone or not self.master_away:
            return None
        self._alone.add(op.seq)
        return self._vote(tally, op)

    def _first_open(self, tally: OwnTally) -> Op | None:
        """The first op that is not known to be committed or void."""
        for op in self.open.values():
            if op.seq > tally.committed and op.seq not in tally.voids and op.state is not OpState.ended:
                return op
        return None

    def ask(self) -> list[cmd.Command]:
        """At each heartbeat interval: ask all others for votes, where one says more is committed than is here (C10).

        Not for what came since the last look: their votes are on their way.
        """
        tally = self.tally
        if tally is None or tally.frozen or tally.claimed <= tally.committed:
            return []
        asks, self._behind = self._behind == tally.committed, tally.committed
        to = tuple(sorted(tally.others & self._up))
        return [cmd.SendNote(to, pack(Ask(tally.epoch, tally.committed)), again=True)] if asks else []

    def _say_again(self, tally: OwnTally, mid: int, ask: Ask) -> list[cmd.Command]:
        """Member *mid* lacks votes: tell it this one's, not more often than it may ask."""
        tally.hear(mid, m.Vote(self.view.epoch.group, mid, ask.epoch, committed=ask.committed))
        soon = self._answered.get(mid, -inf) + self._limits.heartbeat_interval / 2
        if tally.frozen or self.now < soon:
            return []
        self._answered[mid] = self.now
        return [cmd.SendNote((mid,), pack(note), again=True) for note in tally.again(mid, self._kept)]

    def without_master(self) -> list[cmd.Command]:
        """There was none for a while: what waits at an update_membership goes on without it, if all others do (C11).

        Again: that is said again to those who were late with the epoch. So is how far this one has committed: the
        master's last word may have come here alone, and who lacks a vote is to ask for it.
        """
        self.master_away, tally = True, self.tally
        if tally is None or tally.frozen:
            return []
        passes = [note for note in tally.votes() if note.seq in self._alone]
        to = tuple(sorted(tally.others & self._up))
        said = [cmd.SendNote(to, pack(note), again=True) for note in passes or [tally.committed_so_far()]]
        return [*said, *self._decide_all()]

    def _vote(self, tally: OwnTally, op: Op, told: tuple[int, ...] = ()) -> list[cmd.Command]:
        """Tell all others that *op* is finished here, but those who were *told*."""
        assert op.resolved is not None
        vote = tally.finish(op.seq, (self._digest(op), op.resolved.fingerprint))
        to = (tally.others & self._up).difference(told)
        said = [cmd.SendNote(tuple(sorted(to)), pack(vote))] if to or not told else []
        return [*said, *self._need_links(), *self._differ(op.seq)]

    def _differ(self, seq: int) -> list[cmd.Command]:
        """Somebody has another result than this member, or calls something else: the master ends the epoch."""
        op = self.open.get(seq)
        if self.tally is None or op is None or op.state is not OpState.done or seq in self._complained:
            return []
        done = self.done(op)
        differing = self.tally.differing(seq, (done.digest, done.fingerprint))
        if not differing:
            return []
        self._complained.add(seq)
        other, (digest, fingerprint) = differing[0]
        if fingerprint != done.fingerprint:
            return [self._answer(op)]
        return [self._master_session.say(m.Differs(*self.view.head, seq, done.digest, other, digest))]

    def _need_links(self) -> list[cmd.Command]:
        """Somebody has to hear of what is finished here, and cannot."""
        tally = self.tally
        missing = tally.others - self._up if tally is not None else frozenset[int]()
        return [links.Need(missing)] if missing and tally is not None and tally.waits else []

    # ---- from the links and the engine ---------------------------------------------------------------

    def links_up(self, up: Collection[int]) -> list[cmd.Command]:
        """The neighbours' links are up, and in all those to *up* (mids): start what waits, in seq order."""
        new, self._up = sorted(set(up) - self._up), set(up)
        said: list[cmd.Command] = []
        tally = self.tally
        if tally is not None and not tally.frozen:
            for mid in new:
                said += [cmd.SendNote((mid,), pack(note), again=True) for note in tally.again(mid, self._kept)]
                if self.round + 1 < ROUNDS:  # none follows the last round
                    self._master_session.said.pop(
                        (mid, "lost", False), None
                    )  # a new master need not end the epoch for that
            if new and self.round:
                said.append(cmd.SendNote(tuple(new), pack(NewRound(self.view.epoch.epoch, self.round)), again=True))
        if self.aborted or (self._ready and not self._held):
            return said  # stopped: the next epoch follows
        self._ready = True
        return said + self._start_waiting()

    def notes_lost(self, other: int) -> list[cmd.Command]:
        """Member *other* hears no notes, and perhaps not the last ones: links_up says when it does (C10)."""
        self._up.discard(other)
        for op in self.open.values():  # it hears then what it was not told by now
            op.hearers = tuple(mid for mid in op.hearers if mid != other)
        return self._need_links()

    def relies_on(self, other: int) -> bool:
        """Whether the epoch cannot go on without the link to member *other*."""
        return other in self.view.neighbours or self.uses(other)

    def link_lost(self, other: int, reason: str) -> list[cmd.Command]:
        """The link to member *other* broke: what was on it is lost, so the epoch cannot finish the ops that use it.

        An op that is done here may still have bytes on the way; one that is committed has none. Where members commit
        they go on in another round as soon as the link is up again, unless the master ends the epoch (C12).
        """
        missing = self.notes_lost(other)
        if not self.relies_on(other):
            return (self._start_waiting() if self._ready and self._held else []) + missing
        self._ready = False
        commands = [self._master_session.link_down(self.view, other, "lost", reason)]
        if self.tally is not None and not self.tally.frozen:
            commands.append(links.Need(frozenset({other})))  # links_up says when it is there
            if self._ran_with(other) and self.round + 1 < ROUNDS:
                commands += self._begin_round(self.tally, self.round + 1)
        return commands

    # ---- calls that the engine takes by itself -------------------------------------------------------

    @property
    def at_rest(self) -> bool:
        """Whether nothing is open, and the next call would start at once: then the engine may take calls (C13)."""
        tally = self.tally
        if tally is None or tally.frozen or self.aborted or self.open or self._late or self._voids or self._leaving:
            return False
        if self.view.epoch.shards > 1:
            return False  # the engine takes all votes for those of one column
        ready = self._ready and not self._held and tally.others <= self._up and not self.view.too_small
        return ready and not self._asked and not tally.open and tally.committed == self.called

    def take_over(
        self, begun: Iterable[Begun], calls: Callable[[int], Call], claims: Mapping[int, int], *, decide: bool
    ) -> list[cmd.Command]:
        """Go on with what the engine has *begun* by itself since the tally was at rest, in the order of its seqs.

        *calls*: what the number of a prepared call means. *claims*: by mid, up to where each has said that all is
        committed. *decide*: False where the lease is over.
        """
        tally, commands = self.tally, list[cmd.Command]()
        assert tally is not None
        for one in begun:
            slot, call = one.call, calls(one.call.prepared)
            filled = slot.filled if call.input_bytes else -1
            op = Op(
                one.seq, slot.number, call, slot.input_buffer, slot.result_buffer, 0, one.posted_at, one.seq, filled,
                shown=slot.shown,
            )  # fmt: skip
            op.resolved, op.round, op.engine_id = self.resolved(op), self.round, one.engine_id
            op.ran, op.attempts, op.hearers, self.called = True, 1, tuple(sorted(tally.others)), one.seq
            op.vote = pack(m.Vote(*self.view.head, op.seq, 0, op.resolved.fingerprint, tally.committed))
            op.digest, op.bytes_sent, op.bytes_saved = one.digest, one.bytes_sent, one.bytes_saved
            op.codec_error, op.bytes_in_memory, op.finished = one.codec_error, one.bytes_in_memory, one.done
            fingerprint = op.resolved.fingerprint
            if one.done:
                op.state, op.voted_to, op.there = OpState.done, op.hearers, True
                tally.finish(op.seq, (self._digest(op), fingerprint))
            if one.committed:
                self._keep(op)
                self.committed = op.seq
                tally.advance(op.seq)
                commands.append(cmd.Committed(self._result(op, one.posted_at + one.seconds), op))
                continue
            self.open[op.seq] = op
            if not one.done:
                op.state = OpState.running
                op.live.add(op.engine_id)
                self._attempts.ops[op.engine_id] = op
            for mid in one.heard:
                tally.vote(mid, op.seq, (one.heard_digest, fingerprint))
        for mid, upto in claims.items():
            tally.claim(mid, upto)
        for seq in self.open:
            commands += self._differ(seq)
        return commands + (self._decide_all() if decide else [])

    # ---- another round of the epoch (C12) ------------------------------------------------------------

    def _ran_with(self, other: int) -> bool:
        """Whether bytes of this round to or from member *other* may be lost with their link."""
        ran = (op for op in self.open.values() if op.round == self.round and op.ran and op.seq not in self._leaving)
        return any(op.resolved is not None and other in op.resolved.needs for op in ran if op.outcome is None)

    def _hear_round(self, sender: int, begun: NewRound) -> list[cmd.Command]:
        """Member *sender* has begun another round, perhaps of an epoch that this member is yet to hear of."""
        if begun.epoch > self.view.epoch.epoch:
            self._keep_ahead(sender, begun)
            return []
        tally = self.tally
        if tally is None or tally.frozen or begun.epoch != tally.epoch or begun.number <= self.round:
            return []
        return self._begin_round(tally, begun.number)

    def _begin_round(self, tally: OwnTally, number: int) -> list[cmd.Command]:
        """Frames of older ones count no more: what all have not finished runs again, from the input.

        What is cut short may finish all the same, until the engine has let go of it.
        """
        ready, self.round = self._ready, number
        self._leaving |= {op.seq for op in self.open.values() if op.state is OpState.running}
        to = tuple(sorted(tally.others & self._up))
        said = NewRound(tally.epoch, number), tally.committed_so_far()  # nobody repeats what it has committed
        commands = [*self.cancel(), links.Round(number)]
        commands += [cmd.SendNote(to, pack(note), again=True) for note in said]
        self._ready = ready
        return commands + (self._start_waiting() if ready else [])

    def settle(self, op: Op) -> list[cmd.Command]:
        """See OpTable. Nothing begins in a new round before the engine has let go of all that ran in older ones."""
        commands = super().settle(op)
        if op.seq in self._leaving and not op.live:
            self._leaving.discard(op.seq)
            if op.state is OpState.running:  # it was cut short
                op.state = OpState.waiting
            if not self._leaving and self._ready:
                commands += self._start_waiting()
        return commands

    def _lacked(self, op: Op) -> bool:
        """Whether *op*, which is finished here, runs again in this round: somebody else may not have finished it."""
        unheard = self.unheard(op.seq) if op.kind is not Kind.update_membership else None
        lacked = unheard is None or not unheard.isdisjoint(self.view.world.mids)
        return op.state is OpState.done and op.round < self.round and lacked

    def mismatch(self, seq: int) -> list[cmd.Command]:
        """Tell the master what this member calls at *seq*, if it has called it."""
        op = self.open.get(seq)
        return [self._answer(op)] if op is not None else []

    def refuse(self, op: Op, reason: str) -> list[cmd.Command]:
        """The engine does not take *op*: it cannot run in this epoch. An update_membership does without its token.

        What is finished here should run again for others (C12): a master is to end the epoch, as for a lost link.
        """
        if op.kind is Kind.update_membership:
            return []
        if op.state is OpState.done:
            assert op.resolved is not None
            other = min(self.unheard(op.seq) or op.resolved.needs)
            lost = m.LinkDown(*self.view.head, other, "lost", f"not again for others' sake: {reason}"[:4000], False)
            return [self._master_session.say(lost, ("beside", op.seq))]
        return [self._give_up(f"{self.view.world.names[self.view.rank]}: {reason}", [op])]

    # ---- start and end -------------------------------------------------------------------------------

    def _start_waiting(self) -> list[cmd.Command]:
        self._held = False
        commands: list[cmd.Command] = []
        for op in list(self.open.values()):
            if op.state is OpState.waiting or self._lacked(op):
                commands += self._start(op)
                if self._held:
                    break
        return commands

    def _start(self, op: Op) -> list[cmd.Command]:
        if self._leaving or (self.view.too_small and op.kind is not Kind.update_membership):
            self._held = True  # with all behind it, until these are gone, or the next epoch
            return []
        resolved = self.resolved(op)
        if resolved.refusal:
            return [self._give_up(resolved.refusal, [op])]
        if not resolved.needs <= self._up:
            self._held = True
            return [links.Need(resolved.needs - self._up)]
        if op.kind in DATALESS and len(self.view.world.mids) == 1:
            op.state, op.ran, op.finished, op.resolved = OpState.done, True, True, resolved  # there is nothing to move
            op.attempts, op.voted_to = op.attempts + 1, ()
            return self.say_done(op)  # an older token that is still in the engine holds nothing up
        op.round = self.round
        if op.state is OpState.done:
            return [self.hand_over(op, beside=True)]
        start = self.start(op, resolved)
        if op.kind is not Kind.update_membership:
            return [start]
        op.state = OpState.done
        said = self.say_done(op)
        return [*said, start] if op.outcome is None else said  # it may have been the last word that was missing

    def cancel(self) -> list[cmd.Command]:
        """Take every attempt out of the engine, and let none start."""
        self._ready = self._held = False
        return super().cancel()

    def tell(self, op: Op, outcome: m.Result | m.Failure) -> list[cmd.Command]:
        """See OpTable. A client that is late hears it when it makes the call; one that calls another thing, never."""
        if isinstance(outcome, m.Result) and outcome.epoch > self.view.epoch.epoch:  # rank and members come first
            self._early += super().tell(op, outcome)
            return []
        if not op.zeros:
            return super().tell(op, outcome)
        if not op.client_id:
            if op.number <= self.called:
                del self._late[op.number]
            if isinstance(outcome, m.Failure):
                op.memory = None  # nothing of it will be handed over
            return []
        handed = [cmd.HandOver(op)] if isinstance(outcome, m.Result) else []
        return [*handed, cmd.ToClient(replace(outcome, id=op.client_id), op)]

    def end(self, op: Op, outcome: m.Result | m.Failure) -> list[cmd.Command]:
        """See OpTable. An update_membership's token has no memory: nothing to wait for. Nobody needs it any more."""
        tokens: list[cmd.Command] = []
        if op.kind is Kind.update_membership:
            if isinstance(outcome, m.Result):
                islands = [parted(name, self.view.epoch.shards)[0] for name in outcome.contributors]
                self.updated = m.UpdateOutcome(op.seq, outcome.epoch, islands)
            for engine_id in sorted(op.live):
                del self._attempts.ops[engine_id]
                tokens.append(cmd.CancelOp(engine_id))
            op.live.clear()
        return tokens + super().end(op, outcome)

    def end_all(self, outcome: Callable[[Op], m.Failure]) -> list[cmd.Command]:
        """See OpTable. What was taken part in will not be handed over any more."""
        commands = self._early + super().end_all(outcome)
        for op in self._late.values():
            if not op.live:
                op.memory = None
        return commands

    def _give_up(self, reason: str, ops: list[Op]) -> cmd.Command:
        for op in ops:
            op.state = OpState.given_up
        return self._master_session.say(m.GiveUp(*self.view.head, [op.seq for op in ops], reason[:1000]))

    def _answer(self, op: Op) -> cmd.Command:
        resolved = self.resolved(op)
        call = resolved.descriptor.told(self.view.world.names)[:4000]
        return self._master_session.say(m.Mismatch(*self.view.head, op.seq, call, resolved.fingerprint))

    def _result(self, op: Op, now: float, *, alone: bool = False) -> m.Result:
        result = outcomes.result(op, self.view.epoch.epoch, list(self.view.world.names), op.digest, now)
        return replace(result, asked_master=False) if alone and op.seq in self._alone else result

    def _voided(self, op: Op, void: m.Void) -> m.Failure:
        here = self.resolved(op).descriptor.told(self.view.world.names)
        return outcomes.voided(op, void, self.view.epoch.group, here)

    def _small(self, op: Op) -> m.Failure:
        return outcomes.too_small(op, self.view.world.names[self.view.rank], self.view.epoch)
