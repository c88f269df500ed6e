"""One member, pure: what the client, the master, the links and the engine say, and what has to happen next.

Every method takes what happened and returns the commands that the shell must carry out, in order. A member is made of
its view of the epoch (EpochView), its session with the master, its collectives and its sends and recvs; each has a file
of its own with its rules. This one holds what concerns them all: entering an epoch, and the end.

    a member is      from                                        until
    asking           join()                                      Joined -> noted, or Refused -> over
    noted            Joined: it has a mid                        its first Epoch -> in an epoch
    in an epoch      Epoch                                       the next Epoch; Evicted, forgotten, leave() -> over
    over             it left, was evicted, or lost its master    the client connects again, as another member

    what is said     by          what it may change                                                    rules
    post, leave      the client  a new op begins; all ends                                             R14, R15
    Epoch            the master  all: ops commit, end or go back to waiting, links change              R2, R4, R6
    Commit, Settled  the master  ops that are done here end: the client is told only now               R1, R3, R16
    Abort            the master  ops leave the engine and wait; the next Epoch follows                 R14
    Evicted          the master  all ends, with what had committed                                     R8
    links up, lost   the links   ops start; a loss that concerns an op goes to the master, who alone   R15, R17
                                 ends the epoch
    finished, gone   the engine  ops are done, or their memory is free                                 R3, R13

Races that this survives (docs/protocol.md has them all). A Vote crosses the next Epoch: the op is back at waiting and
runs again from the input, which nobody has written (race 2, 6). A Commit crosses a loss: control streams are in order,
so the commit, or the Epoch's committed_upto, comes first, and what is done here ends in the epoch that it was done in
(race 1). The master dies after telling one member of two: the Report says what is known here (race 3). The engine's
word of an attempt comes after the epoch that cancelled it: it only frees the memory (race 6). A seq is voided before
the client has called it: it fails when it does (race 8).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping

from wancoll.commit.begun import Begun
from wancoll.errors import ProtocolError
from wancoll.limits import DEFAULT, Limits
from wancoll.peer.core import commands as cmd
from wancoll.peer.core import links, outcomes
from wancoll.peer.core.calls import Call, EpochView, RepeatedCalls, ResolvedCall, check_epoch
from wancoll.peer.core.collectives import Collectives
from wancoll.peer.core.liveness.master_session import MasterSession
from wancoll.peer.core.op import Op, OpState
from wancoll.peer.core.op_table import Attempts
from wancoll.peer.core.p2p import P2P
from wancoll.wire import messages as m
from wancoll.wire.epochs import applied
from wancoll.wire.note import unpack

# Before one of these is heard the engine says no note any more, and what it has finished is taken in: whoever freezes
# reports all that it has ever said (C2).
STOPPING = m.Abort | m.Epoch | m.EpochChange | m.Evicted | m.Updated


class Member:
    """One member of a group, without sockets, clock or engine.

    *start_world* members start the group, and ops run in it while it has *min_world*. Engine ids count up from
    *first_engine_id*: the shell keeps the ranges of its members apart. After *call_timeout* seconds the group evicts
    who is late with a call; 0: not stated. With several *shards* it is one of an island: then *start_world* and
    *min_world* count islands.
    """

    def __init__(
        self,
        group: str,
        name: str,
        start_world: int,
        min_world: int,
        first_engine_id: int,
        limits: Limits = DEFAULT,
        call_timeout: float = 0.0,
        shards: int = 1,
        launch: str = "",
    ) -> None:
        self.group, self.name = group, name
        self.start_world, self.min_world, self.call_timeout, self.shards = start_world, min_world, call_timeout, shards
        self.launch = launch
        self.mid = 0
        self.view: EpochView | None = None
        self.over = False
        self.master_session = MasterSession()
        self.attempts = Attempts(first_engine_id)
        self.collectives = Collectives(self.attempts, self.master_session, limits)
        self.p2p = P2P(self.attempts, self.master_session, limits)
        self._calls = RepeatedCalls(name)
        self._last: m.Failure | None = None  # of the connection as a whole, which waits for the outcomes of calls

    # ---- facts ---------------------------------------------------------------------------------------

    @property
    def epoch(self) -> m.Epoch | None:
        """The current epoch, None before the first."""
        return self.view.epoch if self.view is not None else None

    @property
    def epoch_number(self) -> int:
        """The current epoch, 0 before the first."""
        return self.view.epoch.epoch if self.view is not None else 0

    @property
    def rank(self) -> int:
        """In the current epoch; -1 before the first."""
        return self.view.rank if self.view is not None else -1

    @property
    def member_names(self) -> list[str]:
        """Names in rank order."""
        return list(self.view.world.names) if self.view is not None else []

    @property
    def in_flight(self) -> int:
        """Calls that have not ended."""
        return self.collectives.in_flight + len(self.p2p.open)

    @property
    def oldest_call(self) -> int:
        """The client's number of its oldest call that has not ended; 0: none."""
        tables = (self.collectives, self.p2p)
        return min((op.client_id for table in tables for op in table.open.values() if op.client_id), default=0)

    def waiting_for(self) -> str:
        """One phrase for status: what the oldest op waits for."""
        for op in (*self.collectives.open.values(), *self.p2p.open.values()):
            what = str(op) if op.p2p else f"op {op.seq}"
            match op.state:
                case OpState.waiting if op.p2p:
                    return f"{what} waits for the call of {op.other_name}"
                case OpState.waiting | OpState.matched:
                    return f"{what} waits for " + ("its link" if op.p2p else f"the links of epoch {self.epoch_number}")
                case OpState.running:
                    return f"{what} is moving data"
                case OpState.done:
                    whom = op.other_name if op.p2p else "the others' commit"
                    return f"{what} is finished here and waits for {whom}"
            return f"{what} is being given up"
        return ""

    def resolved(self, op: Op) -> ResolvedCall:
        """What *op* means in the current epoch."""
        return self._book(op).resolved(op)

    # ---- from the client -----------------------------------------------------------------------------

    def join(self) -> list[cmd.Command]:
        """Ask for membership; again after each reconnect until the first epoch."""
        was, self.mid = self.mid, 0
        numbers = self.start_world, self.min_world
        island = self.shards, self.launch
        return [cmd.ToMaster(m.Join(self.group, self.name, *numbers, was, self.call_timeout, *island))]

    def call(self, post: m.Post) -> Call:
        """What *post* calls. Raises ProtocolError: nothing that can be called."""
        return self._calls.call(post, self.mid)

    def post(self, post: m.Post, call: Call, now: float) -> list[cmd.Command]:
        """The client calls *call*."""
        self._at(now)
        if self.over:
            return [cmd.ToClient(outcomes.over(post.id, self.name))]
        return (self.p2p if call.p2p else self.collectives).post(post, call, now)

    def leave(self, reason: str, *, died: bool = False, ending: outcomes.Ending | None = None) -> list[cmd.Command]:
        """The client detached or *died*, or the daemon stops. Ends everything; *ending* says what is told of that."""
        committed = self.collectives.settled if self.shards > 1 else 0
        leave = m.Leave(self.group, self.name, f"its client died: {reason}"[:1024] if died else "", died, committed)
        return self._finish(ending or outcomes.left(self.name, reason), cmd.ToMaster(leave))

    def lost(self, reason: str) -> list[cmd.Command]:
        """Its daemon goes down in the middle of what it does: the others lose it, and its client has not died."""
        leave = m.Leave(self.group, self.name, reason[:1024])
        return self._finish(outcomes.left(self.name, reason), cmd.ToMaster(leave))

    # ---- from the master -----------------------------------------------------------------------------

    def addressed(self, message: m.ToMember) -> bool:
        """Whether *message* is for this member. Nothing is for one that is over."""
        if self.over or message.group != self.group:
            return False
        match message:
            case m.Commit() | m.Abort():  # for the whole group
                return True
            case m.Joined() | m.Refused():  # names are of those who join: in an epoch mids tell members apart
                return message.member == self.name and self.view is None
            case m.Evicted():
                return message.mid == self.mid
        return message.to == self.mid

    def hear(self, message: m.ToMember, now: float, connection: int, master: int) -> list[cmd.Command]:
        """The *master* says this to a member of this daemon, on the *connection*-th control connection."""
        if not self.addressed(message):
            return []
        self._at(now)
        match message:
            case m.Joined():
                return self.joined(message.mid, connection, master)
            case m.Refused():
                return self._finish(outcomes.refused(self.name, message.reason, evicted=message.evicted))
            case m.Epoch():
                return self.enter_epoch(message, now)
            case m.EpochChange():
                return self.change_epoch(message, now)
            case m.Commit() if message.epoch == self.epoch_number:
                return self.collectives.commit(message.upto, now)
            case m.Resumed():
                return self.resumed(message)
            case m.Abort() if message.epoch == self.epoch_number:
                self.master_session.known()  # a new master that was reported to wants the epoch to end
                return self.collectives.abort(message.ask)
            case m.Matched() if self.view is not None:
                return self.p2p.matched(message)
            case m.Settled() if self.view is not None:
                return self.p2p.settled(message, now)
            case m.Evicted():
                return self.evicted(message, now)
            case m.ContributeZeros() if self.view is not None and message.epoch == self.epoch_number:
                return self.collectives.contribute_zeros(message, now)
            case m.Updated() if self.view is not None:
                return self.collectives.update_ended(message.outcome, now)
            case m.Redial() if message.epoch == self.epoch_number:
                channel = None if message.sends is None else links.P2P if message.sends else links.COLLECTIVES
                return [links.Redial(tuple(message.others), message.older, message.reason, channel)]
        return []  # Waited changes nothing: it is for the watcher

    def joined(self, mid: int, connection: int, master: int = 0) -> list[cmd.Command]:
        """The *master* knows this member as *mid*, on the *connection*-th control connection."""
        self.mid = mid
        self.master_session.joined(connection, master)
        return []

    def reconnected(self, connection: int, master: int) -> list[cmd.Command]:
        """The *connection*-th control connection is up. To another master than before: report (R7)."""
        if self.over:
            return []
        if self.view is None:
            return self.join()
        if master == self.master_session.master:
            return []  # it has dropped this member with the connection, and says so
        self.master_session.reported(connection, master)
        return [cmd.ToMaster(self._report(self.view))]

    def _report(self, view: EpochView) -> m.Report:
        epoch, collectives, p2p = view.epoch, self.collectives, self.p2p
        return m.Report(
            *view.head,
            members=[(one.mid, one.name, one.daemon) for one in epoch.members],
            plan=epoch.plan,
            key=epoch.key,
            start_world=self.start_world,
            min_world=epoch.min_world,
            reason=epoch.reason,
            base=epoch.committed_upto,
            voids=list(epoch.voids),
            aborted=collectives.aborted,
            finished=collectives.report(),
            p2p=p2p.reported(),
            heard=p2p.heard,
            settled=list(p2p.settlements.items()),
            failed=list(p2p.failed),
            call_timeout=self.call_timeout,
            updated=collectives.updated,
            shards=epoch.shards,
        )

    def resumed(self, resumed: m.Resumed) -> list[cmd.Command]:
        """All members have reported to the new master, and the epoch goes on: say again what it needs to know."""
        if not self.master_session.reporting or resumed.epoch != self.epoch_number:
            return []
        self.master_session.known()
        self.collectives.master_away = False
        again = [*self.collectives.told(), *self.collectives.calls_with_grace(), *self.master_session.said.values()]
        return [cmd.ToMaster(message) for message in again] + self.p2p.tell_again()

    def enter_epoch(self, epoch: m.Epoch, now: float) -> list[cmd.Command]:
        """A new epoch: commit what it says is committed, drop what it voids, run the rest again (R2, R4).

        Raises:
            ProtocolError: it contradicts itself; nothing has changed.
        """
        if epoch.epoch <= self.epoch_number or (self.epoch and epoch.term < self.epoch.term):
            return []
        check_epoch(epoch, self.mid)
        if self.view is None:
            self.collectives.called = epoch.committed_upto
        commands = self.collectives.leave_epoch(epoch.committed_upto, now, passed=epoch.passed)
        self.master_session.known()
        self.master_session.said.clear()
        self.view = view = EpochView.of(epoch, self.mid)
        self._calls.enter(epoch.epoch, view.world)
        place = m.EpochInfo(epoch.epoch, view.rank, self.name, self.member_names, epoch.reason, epoch.goodbyes)
        commands.append(cmd.ToClient(place))
        commands += self.collectives.enter(view, now)
        commands += self.p2p.cancel()
        commands.append(links.Enter(epoch, view.neighbours, view.spares, self.collectives.round))
        return commands + self.p2p.enter(view)

    def change_epoch(self, told: m.EpochChange, now: float) -> list[cmd.Command]:
        """A new epoch, told by what changed since the one that this member is in.

        Raises:
            ProtocolError: it is about another base, or cannot be.
        """
        if self.view is None or told.epoch <= self.epoch_number or told.term < self.view.epoch.term:
            return []
        return self.enter_epoch(applied(self.view.epoch, told), now)

    def evicted(self, evicted: m.Evicted, now: float) -> list[cmd.Command]:
        """The master put this member out; what had committed until then still counts (R8)."""
        commands = self.collectives.commit(evicted.committed_upto, now, out=True)
        if evicted.epoch == self.epoch_number:
            commands += self.collectives.commit_equal(evicted.digests, now)
        return commands + self._finish(outcomes.evicted(self.name, evicted))

    def forgotten(self, cause: str) -> list[cmd.Command]:
        """The control connection was lost, and the master that answers now does not know this member any more."""
        votes = self.view is not None and self.view.votes
        return self._finish(outcomes.forgotten(self.name, cause, votes=votes))

    def without_master(self, now: float) -> list[cmd.Command]:
        """No master for heartbeat_timeout, or still none: members go on without it where they can (C11)."""
        self._at(now)
        return self.collectives.without_master()

    def ask(self, now: float) -> list[cmd.Command]:
        """At each heartbeat interval, whether a master is there or not: ask for votes that it lacks (C10)."""
        self._at(now)
        return self.collectives.ask()

    @property
    def votes(self) -> bool:
        """Whether it commits by itself, with the others of its epoch."""
        return self.collectives.tally is not None

    def master_is_back(self) -> None:
        """A master is connected. One that does not know the member yet has to answer its report first."""
        if not self.master_session.reporting:
            self.collectives.master_away = False

    def master_unreachable(self, address: str, waited: float, cause: str) -> list[cmd.Command]:
        """No master within master_grace. What the client has called may or may not have committed (R8)."""
        ending = outcomes.master_unreachable(self.name, address, waited, cause)
        why = f"its daemon had no master for {waited:.1f} s"
        leave = cmd.ToMaster(m.Leave(self.group, self.name, why))  # for a master that still takes the daemon back
        return self._finish(ending, leave)

    def sent_away(self, daemon: str, reason: str) -> list[cmd.Command]:
        """The master has sent the daemon away for good."""
        return self._finish(outcomes.sent_away(daemon, reason))

    def _finish(self, ending: outcomes.Ending, *first: cmd.Command) -> list[cmd.Command]:
        """This member is out, unless it was already; *first* is said before all that follows."""
        if self.over:
            return []
        self.over, self._last = True, ending.last
        commands = self.collectives.end_all(ending.of) + self.p2p.end_all(ending.of)
        self.collectives.tally = None  # its votes count no more, and it asks for none
        return [*first, *commands, *self._last_word(), links.Leave()]

    def _last_word(self) -> list[cmd.Command]:
        """The end of the connection, once all has been said of its calls: these may still wait for the engine (R8)."""
        if self._last is None or self.in_flight:
            return []
        last, self._last = self._last, None
        return [cmd.ToClient(last)]

    # ---- from the links and the engine ---------------------------------------------------------------

    def links_say(self, told: links.Told, now: float = 0.0) -> list[cmd.Command]:
        """The daemon's links tell this member."""
        if self.over or self.view is None:
            return []
        self._at(now)
        match told:
            case links.Noted(_, mid, note):
                return self.noted(mid, note)
            case links.LinksUp(owner, epoch):
                up = owner.up(links.COLLECTIVES)
                return self.master_session.links_up(self.view, up) + self.links_ready(epoch, up)
            case links.P2PUp(owner):
                return self.p2p.links_up(owner.up(links.P2P))
            case links.NotesLost(_, other):
                return self.collectives.notes_lost(other.mid)
            case links.LinkBroken(_, other, channel, reason):
                sends = channel == links.P2P
                used = self.p2p.uses(other.mid) if sends else self.collectives.relies_on(other.mid)
                down = m.LinkDown(*self.view.head, other.mid, "broken", reason[:4000], sends)
                return [cmd.ToMaster(down)] if used else []
            case links.LinkLost(_, other, channel, reason):
                return (self.collectives if channel == links.COLLECTIVES else self.p2p).link_lost(other.mid, reason)
            case links.LinkUnreachable(_, other, links.COLLECTIVES, reason):
                return [self.master_session.link_down(self.view, other.mid, "unreachable", reason)]
            case links.LinkUnreachable(_, other, _, reason):
                return self.p2p.link_unreachable(other.mid, reason)

    def noted(self, mid: int, data: bytes) -> list[cmd.Command]:
        """Member *mid* says what it knows of who has finished what."""
        try:
            return self.collectives.hear(mid, unpack(data, self.group, mid))
        except ProtocolError as bad:
            return [links.Redial((mid,), 0.0, str(bad), links.COLLECTIVES)]

    def _at(self, now: float) -> None:
        """What commits in this step does so now."""
        self.collectives.now = max(self.collectives.now, now)

    @property
    def at_rest(self) -> bool:
        """Whether the engine may take the client's calls by itself (C13)."""
        return not self.over and not self.master_session.reporting and self.collectives.at_rest

    def take_over(
        self, begun: Iterable[Begun], calls: Callable[[int], Call], claims: Mapping[int, int], next_id: int,
        now: float, *, decide: bool,
    ) -> list[cmd.Command]:  # fmt: skip
        """The engine has *begun* these calls by itself; its next attempt would have had *next_id*.

        *calls*, *claims*, *decide*: see Collectives.
        """
        self._at(now)
        self.attempts.next = max(self.attempts.next, next_id)
        return self.collectives.take_over(begun, calls, claims, decide=decide)

    def links_ready(self, epoch: int, up: Collection[int]) -> list[cmd.Command]:
        """The neighbours' links are up, and in all those to *up* (mids)."""
        return [] if epoch != self.epoch_number else self.collectives.links_up(up)

    def mismatch(self, seq: int) -> list[cmd.Command]:
        """A neighbour's frame says that it called something else at *seq*."""
        return [] if self.over else self.collectives.mismatch(seq)

    def written(self, op: Op) -> list[cmd.Command]:
        """The client has written to the input of *op*, which runs again."""
        return [] if self.over else self._book(op).written(op)

    def op_refused(self, engine_id: int, reason: str) -> list[cmd.Command]:
        """The engine does not take the op: it ends, with this *reason*, on all members that it concerns (R14)."""
        op = self.attempts.ops.pop(engine_id)
        op.live.discard(engine_id)
        return self._book(op).refuse(op, f"the engine refuses it: {reason}"[:1000])

    def op_finished(
        self,
        engine_id: int,
        digest: int,
        bytes_sent: int,
        bytes_saved: int = 0,
        codec_error: float = 0.0,
        bytes_in_memory: int = 0,
        now: float = 0.0,
        *,
        voted: bool = False,
    ) -> list[cmd.Command]:
        """The engine has moved the last byte of an attempt; *voted*: and sent its vote to op.hearers."""
        self._at(now)
        op = self.attempts.ops.get(engine_id)
        if op is not None and engine_id == op.engine_id and op.state is OpState.running:
            op.finished, op.digest, op.bytes_sent = True, digest, bytes_sent
            op.bytes_saved, op.codec_error, op.bytes_in_memory = bytes_saved, codec_error, bytes_in_memory
            op.voted_to = op.hearers if voted else ()
        else:
            assert not voted or self.over, "the engine sent a vote of an attempt that was stopped before"
        return self.op_cancelled(engine_id)

    def op_cancelled(self, engine_id: int, now: float = 0.0) -> list[cmd.Command]:
        """The engine has let go of an attempt's memory."""
        self._at(now)
        op = self.attempts.ops.pop(engine_id, None)
        if op is None:
            return []
        op.live.discard(engine_id)
        return self._book(op).settle(op) + self._last_word()

    def _book(self, op: Op) -> Collectives | P2P:
        return self.p2p if op.p2p else self.collectives
