"""Small worlds exhaustively: every order in which messages arrive, ops finish and things break, up to a depth.

The real master and members with FIFO queues between them and nothing drawn: actions() says all that may happen next,
and explore() tries it all, once for each state that it comes to. Links are up whenever an epoch has begun; an op can be
finished where all members of its epoch have started it, one that is rooted where the root and the member have, a
barrier of the ring where the left neighbour and the member have. Time stands still but for "time", which is the
master's clock. Where members commit, notes have queues of their own.
"""

from __future__ import annotations

import dataclasses
import pickle
import random
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import msgspec

from tests.sim.judge import Violation
from wancoll.collective import DATALESS, PROVING, ROOTED, Descriptor, DType, Kind, ReduceOp
from wancoll.limits import PROTOCOL_VERSION, Limits
from wancoll.peer.core import commands as cmd
from wancoll.peer.core import links
from wancoll.peer.core import member as core
from wancoll.peer.core.collectives import Collectives
from wancoll.peer.core.op import Op, OpState
from wancoll.wire import messages as m
from wancoll.wire.note import pack
from wancoll_master.core import membership
from wancoll_master.core.ready import Announce, Broadcast, Disconnected, Received, Send, Tick, Used
from wancoll_master.core.state import Closing
from wancoll_master.plan.planning import propose

Action = tuple[Any, ...]
LIMITS = Limits(ops_in_flight=2, rejoin_grace=1.0, link_settle=0.0, master_grace=1.0, heartbeat_timeout=1.0)
_pack = msgspec.msgpack.encode
END = "end of stream"
_TICKS = 20  # of the master's clock, in which all that waits has to end
_ASKS = 4  # for votes, before the master's clock goes on
_STAGES = {OpState.waiting: "links", OpState.matched: "links", OpState.running: "moving", OpState.done: "done"}


@dataclass
class Peer:
    """A daemon with one member and what its engine has. *up* goes to the master, *down* comes from it."""

    name: str
    core: core.Member
    conn: int = 0
    alive: bool = True
    connected: bool = False
    number: int = 0
    term: int = 0
    master: int = 0
    up: deque[Any] = field(default_factory=deque)
    down: deque[Any] = field(default_factory=deque)
    engine: dict[int, Op] = field(default_factory=dict)
    posted: bool = False
    first: int = 1  # of its calls: a newcomer begins where the others are
    told: dict[int, Any] = field(default_factory=dict)  # by the client's number
    decided: int = m.MOST + 1  # from here on nothing has happened: so says the master that put it out


class SmallWorld:
    """See the module.

    Args:
        members: how many.
        calls: kinds of what each calls, in order.
        faults: how often each may happen: "crash", "drop", "master", "time", "wrong", "join", "raise" (a member gives
            up what it has called), "alone" (who has no master goes on without it), and of notes "cut" (a link breaks,
            what is on its way is lost, and it is up again).
            See LyingWorld for "lie".
        voters: as in Limits; 0: the master collects all votes.
        least: min_world.
    """

    def __init__(
        self, members: int, calls: tuple[Kind, ...], faults: dict[str, int], voters: int = 0, least: int = 1
    ) -> None:
        self.calls, self.faults, self._least = calls, dict(faults), least
        self.limits = dataclasses.replace(LIMITS, voters=voters)
        self.now = 100.0
        self.journal: tuple[int, int, int, dict[str, Used]] = (0, 0, 1, {})  # term, epoch, next mid, used
        self._conns = 0
        self.started: dict[tuple[int, int, int], frozenset[str]] = {}  # (epoch, round, seq) -> members
        self.lost: set[tuple[int, int, int]] = set()  # of them, those whose frames a link took along
        self._only_cuts = voters and set(faults) == {"cut"}
        self.epochs: dict[int, tuple[str, ...]] = {}
        self.committed = 0
        self.finished: dict[tuple[int, int], dict[str, int]] = {}  # (epoch, seq) -> digests by member
        self.notes: dict[tuple[str, str], deque[bytes]] = {}  # by sender and receiver
        self.outcomes: dict[int, tuple[Any, ...]] = {}
        self.updates: dict[int, int] = {}  # update_memberships -> the epoch in which they have ended
        self._beats = 0.0  # seconds that have passed for members alone
        self._begin_master()
        head = members, least
        self.peers: list[Peer] = []
        for _ in range(members):
            self._add(*head)
        while 1 not in self.epochs:
            for peer in self.peers:
                if peer.up:
                    self._up(peer)
                elif peer.down:
                    self._down(peer)

    def _add(self, start_world: int, min_world: int) -> None:
        number = len(self.peers)
        member = core.Member("g", f"m{number}", start_world, min_world, 1000 * (number + 1), self.limits)
        self.peers.append(Peer(f"d{number}", member))
        self._connect(self.peers[-1])

    def _begin_master(self) -> None:
        term, epoch, mid, used = self.journal
        self.journal = (term + 1, epoch, mid, used)
        secret = b"secret %d" % term
        facts = {"term": term + 1, "floor": epoch, "next_mid": mid, "used": used}
        self.state = membership.new_state(self.limits, secret, now=self.now, **facts)

    # ---- what may happen -----------------------------------------------------------------------------

    def actions(self) -> list[Action]:
        found: list[Action] = []
        left = self.faults
        for i, peer in enumerate(self.peers):
            if peer.up:
                found.append(("up", i))
            if peer.down:
                found.append(("down", i))
            for op in peer.engine.values():
                if self._all_started(op, peer):
                    found.append(("finish", i))
                    if left.get("wrong"):
                        found.append(("finish wrong", i))
                break
            if peer.alive and left.get("crash") and sum(one.alive for one in self.peers) > 1:
                found.append(("crash", i))
            if peer.alive and peer.connected and left.get("drop"):
                found += [("drop", i), ("drop unnoticed", i)]
            if peer.alive and left.get("raise") and peer.core.view is not None and peer.core.collectives.open:
                found.append(("raise", i))
            if peer.alive and left.get("alone") and not peer.connected and peer.core.view is not None:
                found.append(("alone", i))
            for j, other in enumerate(self.peers):
                if self.notes.get((peer.core.name, other.core.name)):
                    found.append(("note", i, j))
                both = peer.core.view is not None and other.core.view is not None  # who has no epoch yet has no links
                if i < j and left.get("cut") and peer.alive and other.alive and both:
                    found.append(("cut", i, j))
        if left.get("join"):
            found.append(("join",))
        if left.get("master"):
            found += [("master",), ("master, nothing arrives",)]
        if left.get("time") and self.state.deadline < 1e9:
            found.append(("time",))
        return found

    def _all_started(self, op: Op, peer: Peer) -> bool:
        epoch = peer.core.epoch_number
        names = self.epochs[epoch]
        me = peer.core.name
        needed = {names[0], me} if op.kind in ROOTED else set(names)
        assert op.resolved is not None
        if op.kind is Kind.barrier and op.resolved.algorithm == "ring":
            needed = {names[names.index(me) - 1], me}
        run = epoch, peer.core.collectives.round, op.seq
        return run not in self.lost and self.started.get(run, frozenset()) >= needed

    def do(self, action: Action) -> None:
        what, *where = action
        peer = self.peers[where[0]] if where else self.peers[0]
        match what:
            case "up":
                self._up(peer)
            case "down":
                self._down(peer)
            case "finish" | "finish wrong":
                engine_id, op = next(iter(peer.engine.items()))
                del peer.engine[engine_id]
                wrong = what != "finish"
                self.faults["wrong"] = self.faults.get("wrong", 0) - wrong
                epoch = peer.core.epoch_number
                digest = 100 * epoch + op.seq + 7 * wrong * (1 + where[0])
                if op.state is OpState.running:  # else it is for others' sake
                    self.finished.setdefault((epoch, op.seq), {})[peer.core.name] = digest
                self._run(peer, peer.core.op_finished(engine_id, digest, 0))
            case "crash":
                self.faults["crash"] -= 1
                peer.alive = peer.connected = False
                peer.down.clear()
                peer.engine.clear()
                peer.up.append(END)
                for ends in [ends for ends in self.notes if ends[1] == peer.core.name]:
                    del self.notes[ends]
            case "note":
                sender, receiver = peer.core, self.peers[where[1]]
                note = self.notes[sender.name, receiver.core.name].popleft()
                if receiver.core.view is not None:
                    self._run(receiver, receiver.core.noted(sender.mid, note))
            case "cut":
                self.faults["cut"] -= 1
                self._cut(peer, self.peers[where[1]])
            case "join":
                self.faults["join"] -= 1
                self._add(peer.core.start_world, peer.core.min_world)
            case "raise":
                self.faults["raise"] -= 1
                table = peer.core.collectives
                op = next(iter(table.open.values()))
                self._run(peer, table.refuse(op, "no memory") if op.state.name in ("waiting", "running") else [])
            case "alone":
                self.faults["alone"] -= 1
                self._run(peer, peer.core.without_master(self.now))
            case "drop" | "drop unnoticed":  # by the master, until the daemon is there again
                self.faults["drop"] -= 1
                conn = peer.conn
                peer.up.clear()
                peer.down.clear()
                peer.connected = False
                if what == "drop":
                    self._step(Disconnected(conn, "reset"))
                self._connect(peer)
            case "master" | "master, nothing arrives":
                self.faults["master"] -= 1
                for one in self.peers:
                    one.up.clear()
                    if what != "master":
                        one.down.clear()
                    if one.alive and END not in one.down:
                        one.down.append(END)
                self._begin_master()
            case "time":
                self.faults["time"] -= 1
                self._pass_time()

    def _cut(self, one: Peer, other: Peer) -> None:
        """The link breaks, and is up again when both ends have found out."""
        for here, there in ((one, other), (other, one)):
            self.notes.pop((here.core.name, there.core.name), None)
            at = here.core.epoch_number, here.core.collectives.round
            self.lost |= {run for run, names in self.started.items() if run[:2] == at and here.core.name in names}
        for here, there in ((one, other), (other, one)):
            core = here.core
            if core.view is not None and not core.over and there.core.mid in core.view.world.mids:
                self._run(here, core.collectives.link_lost(there.core.mid, "cut"))
                self._run(here, core.links_ready(core.epoch_number, set(core.view.world.mids) - {core.mid}))

    def _pass_time(self) -> None:
        self.now = max(self.now, self.state.deadline)
        for peer in self.peers:
            if peer.alive and peer.conn in self.state.connections:
                self.state.connections[peer.conn].heard_at = self.now
        self._step(Tick())

    # ---- the master's side ---------------------------------------------------------------------------

    def _step(self, event: Any) -> None:
        by_conn = {peer.conn: peer for peer in self.peers if peer.alive}

        def add(conn: int, message: Any) -> None:
            if conn in by_conn and not (isinstance(message, m.Pong) and message.number):
                by_conn[conn].down.append(message)

        ready = membership.step(self.state, self.now, event, propose)
        if ready.persist is not None:
            term, *_, known = self.journal
            self.journal = (term, ready.persist.epoch, ready.persist.next_mid, {**known, **ready.persist.groups})
        for answer in ready.answers:
            if isinstance(answer, Send):
                add(answer.conn, answer.message)
        for one in ready.messages:
            match one:
                case Send(conn, message):
                    add(conn, message)
                case Broadcast(conns, message):
                    if isinstance(message, m.Commit):
                        self.committed = max(self.committed, message.upto)
                    for conn in conns:
                        add(conn, message)
                case Announce(to, epoch, _):
                    names = tuple(member.name for member in epoch.members)
                    if self.epochs.setdefault(epoch.epoch, names) != names:
                        raise Violation(f"epoch {epoch.epoch} of {self.epochs[epoch.epoch]} is used again for {names}")
                    self.committed = max(self.committed, epoch.committed_upto)
                    for conn, mid in to:
                        add(conn, msgspec.structs.replace(epoch, to=mid))
        for close in ready.closes:
            add(close.conn, END)

    def _up(self, peer: Peer) -> None:
        message = peer.up.popleft()
        if message == END:
            self._step(Disconnected(peer.conn, "closed"))
        elif peer.conn in self.state.connections or isinstance(message, m.Hello):
            self._step(Received(peer.conn, message))

    # ---- the daemons' side ---------------------------------------------------------------------------

    def _connect(self, peer: Peer) -> None:
        self._conns += 1
        peer.conn, peer.connected = self._conns, False
        peer.up.clear()
        peer.down.clear()
        head = (PROTOCOL_VERSION, peer.name, 1, [f"{peer.name}:1"], 1, "", "1")
        peer.up.append(m.Hello(*head, term=peer.term, master=peer.master))

    def _down(self, peer: Peer) -> None:
        message, member = peer.down.popleft(), peer.core
        if message == END or isinstance(message, m.Bye):
            self._connect(peer)
            return
        match message:
            case m.Welcome():
                peer.connected, peer.term, peer.master = True, message.term, message.master
                peer.number += 1
                self._run(peer, member.reconnected(peer.number, peer.master))
                if member.over and member.mid:
                    peer.up.append(m.Ended([(member.group, member.mid)]))
                member.master_is_back()
                peer.up.append(m.Heartbeat(0))
            case m.Pong():
                if member.epoch is not None and member.master_session.connection != peer.number:
                    self._run(peer, member.forgotten("lost"))
            case m.Probe():
                peer.up.append(m.ProbeResult("g", message.joiner, message.prober, message.target, True, ""))
            case _:
                if isinstance(message, m.Evicted) and member.addressed(message):
                    peer.decided = max(message.committed_upto, message.unknown_upto) + 1
                self._run(peer, member.hear(message, self.now, peer.number, peer.master))
                if isinstance(message, m.Evicted) and not member.addressed(message):
                    peer.up.append(m.Ended([(message.group, message.mid)]))

    def _run(self, peer: Peer, commands: list[cmd.Command]) -> None:
        member = peer.core
        for command in commands:
            match command:
                case cmd.ToMaster(message):
                    if peer.connected and (
                        not member.master_session.reporting or isinstance(message, m.Report | m.Leave)
                    ):
                        peer.up.append(message)
                case cmd.ToClient(m.Result() | m.Failure() as told):
                    self._told(peer, told)
                case cmd.StartOp(op):
                    peer.engine[op.engine_id] = op
                    key = member.epoch_number, member.collectives.round, op.seq
                    self.started[key] = self.started.get(key, frozenset()) | {member.name}
                case cmd.SendNote(mids, note):
                    assert member.view is not None
                    names = dict(zip(member.view.world.mids, member.view.world.names, strict=True))
                    living = {one.core.name for one in self.peers if one.alive}
                    for name in [names[mid] for mid in mids if names[mid] in living]:
                        self.notes.setdefault((member.name, name), deque()).append(note)
                case cmd.CancelOp(engine_id):
                    if peer.engine.pop(engine_id, None) is not None:
                        self._run(peer, member.op_cancelled(engine_id))
                case links.Enter(epoch):
                    self._run(
                        peer,
                        member.links_ready(epoch.epoch, [one.mid for one in epoch.members if one.mid != member.mid]),
                    )
        if member.epoch is not None and not peer.posted:
            peer.posted, peer.first = True, member.collectives.called + 1
            for number, kind in list(enumerate(self.calls, 1))[peer.first - 1 :]:
                count, root = 0 if kind in DATALESS else 4, 0 if kind in ROOTED else -1
                what = Descriptor(kind, DType.float32, ReduceOp.sum, count, root=root)
                post = m.Post(number, what, 0, 4096, member.epoch_number)
                self._run(peer, member.post(post, member.call(post), self.now))

    # ---- what must be true ---------------------------------------------------------------------------

    def _told(self, peer: Peer, told: m.Result | m.Failure) -> None:
        if not told.id:
            return
        name, seq = peer.core.name, told.id
        if seq in peer.told:
            raise Violation(f"{name} is told twice of op {seq}: {peer.told[seq]}, {told}")
        peer.told[seq] = told
        if isinstance(told, m.Failure) and told.error == "OutcomeUnknown" and seq >= peer.decided:
            raise Violation(f"{name} is left in doubt about op {seq}, which the master has decided (R8)")
        if isinstance(told, m.Result):
            if self.calls[seq - 1] is Kind.update_membership:
                if self.updates.setdefault(seq, told.epoch) != told.epoch:
                    raise Violation(f"op {seq} has ended in epoch {self.updates[seq]}, and in {told.epoch} for {name}")
                return
            if seq > self.committed and not self._all_finished(told.epoch, seq):
                raise Violation(f"{name} has a result of op {seq} before its commit")
            outcome = (told.epoch, tuple(told.contributors), told.digest)
            if self.outcomes.setdefault(seq, outcome) != outcome:
                raise Violation(f"op {seq} has two outcomes: {self.outcomes[seq]}, and {outcome} for {name}")
        for seq, (_, contributors, _) in self.outcomes.items():
            for other in self.peers:
                ends = other.told.get(seq)
                if other.core.name in contributors and isinstance(ends, m.Failure) and ends.error != "OutcomeUnknown":
                    raise Violation(f"op {seq} is committed with {other.core.name}, who was told {ends.error}")

    def _all_finished(self, epoch: int, seq: int) -> bool:
        """C1: all members of the epoch have, equally. Who is alone meets nobody at a barrier: no engine runs it."""
        done, kind = self.finished.get((epoch, seq), {}), self.calls[seq - 1]
        proves = self.limits.voters and kind in {*PROVING, Kind.barrier}
        alone = kind is Kind.barrier and len(self.epochs[epoch]) == 1
        return proves and (alone or (done.keys() == set(self.epochs[epoch]) and len(set(done.values())) == 1))

    def settle(self) -> None:
        """From here on nothing breaks: everything comes to its end."""
        self.faults = {}
        if self._only_cuts and all(peer.posted and not peer.core.collectives.aborted for peer in self.peers):
            self._go_on_alone()
        ticks, asks = _TICKS, 0
        for _ in range(400):
            pending = [action for action in self.actions() if action[0] in ("up", "down", "finish", "note")]
            for action in pending:
                if action in self.actions():
                    self.do(action)
            if not pending and asks < _ASKS and self._ask():
                asks += 1
                continue
            if not pending:
                if self.state.rejoin_until <= self.now and not any(
                    g.rebuild or g.current.hold_until < 1e9 for g in self.state.groups.values()
                ):
                    if self._lacks_joiners():
                        self._add(self.peers[0].core.start_world, self._least)
                    elif not self._wait() or not ticks:
                        break
                    else:
                        ticks -= 1  # the master may look at something yet
                        self._complain()
                asks = 0
                self._pass_time()
        self._all_are_told()

    def _wait(self) -> list[str]:
        """Members that were not told of all their calls, and of which."""
        told = []
        for peer in self._believed():
            if peer.alive and peer.posted:
                missing = [seq for seq in range(peer.first, len(self.calls) + 1) if seq not in peer.told]
                if missing or peer.core.in_flight:
                    told.append(f"{peer.core.name} is never told of {missing}: {peer.core.waiting_for()}")
        return told

    def _complain(self) -> None:
        """Members say what stands still, where that may be."""

    def _believed(self) -> list[Peer]:
        """Those to whom the promise is made."""
        return self.peers

    def _all_are_told(self) -> None:
        if told := self._wait():
            raise Violation("; ".join(told))

    def _ask(self) -> bool:
        """Two heartbeat intervals pass for the members: whether somebody asks for votes."""
        for peer in self.peers * 2:
            self._beats += LIMITS.heartbeat_interval / len(self.peers)
            if peer.alive and not peer.core.over:
                self._run(peer, peer.core.ask(self.now + self._beats))
        return any(self.notes.values())

    def _go_on_alone(self) -> None:
        """What members commit needs no master, whatever links broke (C12)."""
        while pending := [action for action in self.actions() if action[0] in ("finish", "note")]:
            self.do(pending[0])
        first = next((seq for seq, kind in enumerate(self.calls, 1) if kind not in PROVING), len(self.calls) + 1)
        for peer in self.peers:
            missing = [seq for seq in range(1, first) if peer.posted and seq not in peer.told]
            if missing:
                raise Violation(f"{peer.core.name} waits for a master in {missing}: {peer.core.waiting_for()}")

    def _lacks_joiners(self) -> bool:
        living = [peer.core for peer in self.peers if peer.alive and not peer.core.over]
        return len(living) < self._least and any(one.view is not None for one in living)

    def key(self) -> bytes:
        """Equal where nothing that matters is different."""
        master = self.state
        groups = [
            (
                group.epoch, group.used, group.committed, [(one.mid, one.done_upto) for one in group.members],
                [(one.mid, one.name, one.was) for one in group.joining],
                [(seq, sorted(one.votes.items())) for seq, one in sorted(group.current.tally.open.items())],
                sorted((void.seq, void.error) for void in group.voids.values()), sorted(group.digest_failures.items()),
                (group.current.asking.seq, sorted(group.current.asking.calls)) if group.current.asking else None,
                [group.rebuild.reports[mid][1] for mid in sorted(group.rebuild.reports)] if group.rebuild else None,
                group.current.votes, sorted(group.current.tally.claims.items()),
                [(one.mid, one.daemon and one.daemon.conn) for one in group.current.out],
                sorted((key, one.kind, one.committed) for key, one in group.current.complaints.items()),
                group.current.settle_at - self.now, group.current.closing and _closing(group.current.closing),
                group.current.ends, sorted(group.current.voids),
            )
            for group in master.groups.values()
        ]  # fmt: skip
        facts = (
            master.term, master.next_mid, master.floor, master.lost_journal, sorted(master.missing),
            sorted((one.name, one.synced, sorted(one.members)) for one in master.daemons.values()),
            [sorted(one, key=repr) for _, one in sorted(master.gone.items())], master.deadline - self.now,
            master.rejoin_until - self.now,
            sorted((name, until - self.now) for name, until in master.alone.items()),
            sorted((name, sorted(one.former)) for name, one in master.used.items()),
        )  # fmt: skip
        peers = [
            (
                peer.alive, peer.connected, peer.master, list(peer.up), list(peer.down), sorted(peer.engine),
                peer.conn in master.connections, _member(peer.core), sorted(peer.told), peer.posted,
            )
            for peer in self.peers
        ]  # fmt: skip
        started = sorted((*key, sorted(names)) for key, names in self.started.items())
        notes = sorted((ends, list(queue)) for ends, queue in self.notes.items() if queue)
        done = sorted((*key, sorted(names.items())) for key, names in self.finished.items())
        told = self.committed, sorted(self.outcomes), sorted(self.updates.items())
        rest = (sorted(self.faults.items()), self.journal[:3], *told, started, sorted(self.lost), notes, done)
        return _pack((groups, facts, peers, rest), enc_hook=repr)


class LyingWorld(SmallWorld):
    """The first member lies, as often as "lie" says: to a member in notes, and to the master in reports.

    It begins when all have called. What the others hold must agree, of those who go on. Who is out, and is told that
    something has not happened, must not be a contributor of it for one who goes on.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        while pending := [action for action in super().actions() if action[0] in ("up", "down", "note")]:
            self.do(pending[0])

    def actions(self) -> list[Action]:
        found, liar = super().actions(), self.peers[0]
        tally = liar.core.collectives.tally
        if not self.faults.get("lie") or not liar.alive:
            return found
        for j, other in enumerate(self.peers[1:], 1):
            same = tally is not None and other.core.epoch_number == liar.core.epoch_number
            if same and other.core.collectives.tally is not None and other.alive:
                found += [("say committed", j), ("vote alike", j)]
                if self.notes.get((liar.core.name, other.core.name)):
                    found.append(("withhold", j))
        if any(isinstance(message, m.Frozen | m.Report) for message in liar.up):
            found += [("report nothing",), *(("report as", j) for j in range(1, len(self.peers)))]
        return found

    def do(self, action: Action) -> None:
        what, *where = action
        liar, other = self.peers[0], self.peers[where[0]] if where else self.peers[0]
        if what not in ("say committed", "vote alike", "withhold", "report nothing", "report as"):
            super().do(action)
            return
        self.faults["lie"] -= 1
        theirs, queue = other.core.collectives, self.notes.setdefault((liar.core.name, other.core.name), deque())
        votes = theirs.tally.votes() if theirs.tally is not None and other is not liar else []
        match what:
            case "say committed":
                upto = max((vote.seq for vote in votes), default=0)
                queue.append(pack(m.Vote("g", 0, other.core.epoch_number, committed=upto)))
            case "vote alike":
                queue += [pack(msgspec.structs.replace(vote, committed=0)) for vote in votes]
            case "withhold":
                queue.clear()
            case _:
                told = theirs.results() if what == "report as" else []
                for i, message in enumerate(liar.up):
                    if isinstance(message, m.Frozen | m.Report):
                        base = message.base if isinstance(message, m.Report) else 0
                        upto = max((seq for seq, _, _ in told), default=base)
                        liar.up[i] = msgspec.structs.replace(message, finished=m.EpochReport(upto, told, [], []))

    def _told(self, peer: Peer, told: m.Result | m.Failure) -> None:
        if told.id and peer is not self.peers[0]:
            assert told.id not in peer.told
            peer.told[told.id] = told

    def _complain(self) -> None:
        """A vote that the liar keeps to itself is a stall."""
        for peer in self.peers:
            table, head = peer.core.collectives, (peer.core.group, peer.core.mid, peer.core.epoch_number)
            if peer.connected and not peer.core.over and peer.core.view is not None:
                still = [op for op in table.open.values() if op.outcome is None and op.seq > table.committed]
                waits = [m.OpWait(op.seq, op.kind.name, 4, _STAGES[op.state], 1e3, 1e3) for op in still]
                peer.up.append(m.Heartbeat(1, [(peer.core.mid, head[2], table.called, table.committed)]))
                peer.up.append(m.Waits(*head, waits, []))

    def _believed(self) -> list[Peer]:
        return self.peers[1:]

    def _all_are_told(self) -> None:
        super()._all_are_told()
        honest = [peer for peer in self._believed() if peer.alive]
        for one in (peer for peer in honest if not peer.core.over):
            for seq, told in one.told.items():
                if isinstance(told, m.Result) and self.calls[seq - 1] is not Kind.update_membership:
                    for other in honest:
                        self._agree(one, told, other, other.told.get(seq))

    def _agree(self, one: Peer, told: m.Result, other: Peer, theirs: m.Result | m.Failure | None) -> None:
        if isinstance(theirs, m.Failure):
            if other.core.name in told.contributors and theirs.error != "OutcomeUnknown":
                raise Violation(f"{one.core.name} has {told}; {other.core.name} is told {theirs}")
        elif theirs is not None and not other.core.over:
            both = [(each.epoch, each.contributors, each.digest) for each in (told, theirs)]
            if both[0] != both[1]:
                raise Violation(f"{one.core.name} has {told}; {other.core.name} has {theirs}")


def _member(member: core.Member) -> tuple[Any, ...]:
    table, session = member.collectives, member.master_session
    facts = (
        member.mid, session.connection, session.master, session.reporting, table.aborted, table.committed,
        member.over, member.epoch_number, table._asked, session.said, sorted(table._voids),
    )  # fmt: skip
    calls = [(op.seq, op.state.name, op.attempts, len(op.live), op.finished, op.digest) for op in table.open.values()]
    return facts, calls, _tally(table)


def _tally(table: Collectives) -> tuple[Any, ...] | None:
    tally = table.tally
    if tally is None:
        return None
    votes = [(seq, sorted(one.votes.items())) for seq, one in sorted(tally.open.items())]
    known = tally.committed, tally.frozen, sorted(tally.claims.items()), sorted(tally._collected), tally.divergent
    here = votes, sorted(table._said), sorted(table._complained), sorted(table._up), list(table._kept), table._behind
    rounds = table.round, sorted(table._ahead.items()), sorted(table._leaving), [op.round for op in table.open.values()]
    return *known, *here, table.master_away, sorted(table._alone), rounds


def _closing(closing: Closing) -> tuple[Any, ...]:
    reports = [report for _, report in sorted(closing.reports.items())]
    return reports, closing.restarted, closing.doubted


def explore(world: SmallWorld, depth: int, seconds: float) -> tuple[int, int, bool]:
    """Try everything, nearest states first, up to *depth* actions from here.

    Returns:
        States, ends that were looked at, and whether that is all of them: *seconds* were enough.

    Raises:
        Violation: with the actions that lead to it.
    """
    until = time.process_time() + seconds
    seen = {world.key()}
    layer: list[tuple[bytes, tuple[Action, ...]]] = [(pickle.dumps(world, -1), ())]
    ends = 0
    for level in range(depth):
        following: list[tuple[bytes, tuple[Action, ...]]] = []
        for image, path in layer:
            actions: list[Action] = pickle.loads(image).actions()
            for action in actions:
                if time.process_time() > until:
                    return len(seen), ends, False
                here: SmallWorld = pickle.loads(image)
                try:
                    here.do(action)
                    key = here.key()
                    if key in seen:
                        continue
                    seen.add(key)
                    following.append((pickle.dumps(here, -1), (*path, action)))
                    if level % 4 == 3 or level == depth - 1:
                        ends += 1
                        here.settle()
                except (Violation, AssertionError) as bad:
                    raise Violation(f"{bad}\nafter {[*path, action]}") from bad
        layer = following
        if not layer:
            return len(seen), ends, True
    return len(seen), ends, True


def wander(world: SmallWorld, walks: int, steps: int, seed: int = 0) -> None:
    """Take so many walks of so many steps at random, each kind of step as often, and let all come to its end.

    Raises:
        Violation: with the actions that lead to it.
    """
    image, chance = pickle.dumps(world, -1), random.Random(seed)
    for _ in range(walks):
        here: SmallWorld = pickle.loads(image)
        path: list[Action] = []
        try:
            while len(path) < steps and (actions := here.actions()):
                kind = chance.choice(sorted({what for what, *_ in actions}))
                path.append(chance.choice([action for action in actions if action[0] == kind]))
                here.do(path[-1])
            here.settle()
        except (Violation, AssertionError) as bad:
            raise Violation(f"{bad}\nafter {path}") from bad
