"""The real master and real members (both pure), a scripted network between them, and hypothesis trying to break it.

Daemons have FIFO queues to and from the master that may break at any byte, the engine finishes ops when the script
says so, and time passes when it does. Checked all the while: what may commit, and what members hand to clients.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import msgspec
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.master.transcript import GROUP, Room
from wancoll.collective import ROOTED, SAME_RESULT, Descriptor, DType, Kind, ReduceOp
from wancoll.limits import Limits
from wancoll.peer.core import commands as cmd
from wancoll.peer.core import links
from wancoll.peer.core import member as core
from wancoll.peer.core.op import Op
from wancoll.wire import messages as m
from wancoll_master.core.ready import Announce, Broadcast, Disconnected, Ready, Received, Send

START, LEAST, DAEMONS = 3, 2, 5
P2P_IDS = 1_000_000  # the client's numbers of sends and recvs are above
INDEX = st.integers(0, 1000)


def program(seq: int, mids: tuple[int, ...] = (0,)) -> Descriptor:
    """What every member calls at *seq* if it knows the members *mids*.

    Every fourth call is update_membership, every third of the rest gives up; roots are the oldest or the newest member.
    """
    if seq % 4 == 0:
        return Descriptor(Kind.update_membership)
    on_failure = "raise" if seq % 3 == 0 else "retry"
    root = mids.index(min(mids) if seq % 8 < 4 else max(mids))
    match seq % 8:
        case 1 | 6:
            return Descriptor(Kind.broadcast, count=seq, root=root, on_failure=on_failure)
        case 2:
            return Descriptor(Kind.gather, count=seq, root=root, on_failure=on_failure)
        case 5:
            return Descriptor(Kind.reduce_scatter, count=seq, on_failure=on_failure)
    return Descriptor(Kind.all_reduce, DType.float32, ReduceOp.sum, seq, on_failure=on_failure)


@dataclass(eq=False)
class Client:
    """A client's member, and what its engine and links are at."""

    core: core.Member
    next_seq: int = 0  # of the next call; 0: the group has not begun for it
    engine: dict[int, Op] = field(default_factory=dict)
    dialling: int = 0  # epoch whose links are not up yet
    up: set[int] = field(default_factory=set)  # mids
    needs: set[int] = field(default_factory=set)  # mids
    knows: tuple[int, tuple[int, ...]] = (0, ())  # epoch and mids, as its client read them last
    roots: dict[int, int] = field(default_factory=dict)  # seq -> mid
    moving: dict[int, Op] = field(default_factory=dict)  # sends and recvs in the engine, by engine id
    p2p_up: set[int] = field(default_factory=set)  # mids
    p2p_needs: set[int] = field(default_factory=set)  # mids
    exchanges: int = 0  # called so far
    gone: bool = False
    failures: int = 0

    @property
    def in_update(self) -> bool:
        """The caller is blocked in update_membership."""
        return any(op.kind is Kind.update_membership for op in self.core.collectives.open.values())


@dataclass(eq=False)
class Daemon:
    """A daemon with its control connection's two directions."""

    name: str
    incarnation: int = 1
    conn: int = 0  # 0: none
    connections: int = 0
    up: deque[Any] = field(default_factory=deque)
    down: deque[Any] = field(default_factory=deque)
    clients: list[Client] = field(default_factory=list)
    connected: bool = False  # welcomed
    term: int = 0  # highest seen
    master: int = 0  # identity of the one that welcomed it last
    asleep: bool = False
    unreachable: bool = False  # probes of it and by it fail


class Cluster(RuleBasedStateMachine):
    """See the module."""

    def __init__(self) -> None:
        super().__init__()
        self.room = Room(Limits(commit="master", rejoin_grace=1.0))
        self.room.watch = self.check
        self.daemons = [Daemon(f"d{i}") for i in range(DAEMONS)]
        self.names = 0
        # What the script knows for certain:
        self.told_done: dict[tuple[int, int, int], int] = {}  # (mid, epoch, seq) -> digest, as the master received it
        self.told_update: set[tuple[int, int, int]] = set()
        self.epochs: dict[int, m.Epoch] = {}
        self.highest = 0  # epoch that was ever announced
        self.restarted = False  # since the newest epoch began or went on
        self.lives: dict[int, int] = {0: 0}  # epoch -> in which life of the group; it begins anew when nobody is left
        self.voids: set[tuple[int, int]] = set()  # (life, seq)
        self.committed = 0  # highest that the master has told
        self.committed_in: dict[int, int] = {}  # the same for each epoch
        self.aborted: set[int] = set()  # epochs
        self.payloads: dict[tuple[int, int], int] = {}  # (epoch, order) -> what the sender sent
        self.exchanged: dict[int, set[tuple[int, int]]] = {}  # order -> (epoch, digest) as told to either side
        self.results: dict[
            tuple[int, int], tuple[int, tuple[str, ...], int, int]
        ] = {}  # (life, seq) -> what it came to

    # ---- the master's side ---------------------------------------------------------------------------

    def step(self, event: Any) -> None:
        self.room.now += 1e-6
        self.room.step(event)
        self.collect()

    def check(self, ready: Ready) -> None:
        for command in ready.messages:
            if isinstance(command, Announce):
                self.check_epoch(command.epoch)
            elif isinstance(command, Broadcast) and isinstance(command.message, m.Commit):
                self.check_commit(command.message)
            elif isinstance(command, Send) and isinstance(command.message, m.Resumed):
                self.check_resumed(command.message)
            elif isinstance(command, Broadcast) and isinstance(command.message, m.Abort):
                self.aborted.add(command.message.epoch)
            elif isinstance(command, Send) and isinstance(command.message, m.Evicted):
                told = command.message
                last = max(e for e, epoch in self.epochs.items() if told.mid in {one.mid for one in epoch.members})
                if not self.room.starts > 1:
                    assert told.committed_upto == self.committed_in[last], "R8"
                elif told.unknown_upto <= told.committed_upto:
                    # What members had finished may have been committed since, for good.
                    assert (
                        self.committed_in[last] <= told.committed_upto <= max(self.committed, self.committed_in[last])
                    )

    def collect(self) -> None:
        """Take what the master has sent to the daemons' queues."""
        by_conn = {daemon.conn: daemon for daemon in self.daemons if daemon.conn}
        for conn, messages in self.room.inbox.items():
            if conn in by_conn:
                by_conn[conn].down.extend(messages)
        self.room.inbox.clear()
        for conn in self.room.closed:
            if conn in by_conn:
                by_conn[conn].down.append(None)  # end of stream
        self.room.closed.clear()

    @property
    def last(self) -> int:
        """The newest epoch."""
        return max(self.lives)

    def check_epoch(self, epoch: m.Epoch) -> None:
        last = self.last
        assert epoch.epoch > self.highest, "epochs grow"
        self.highest = epoch.epoch
        old = {member.mid for member in self.epochs[last].members} if last else set()
        self.lives[epoch.epoch] = self.lives[last]
        self.epochs[epoch.epoch] = epoch
        if old.isdisjoint(member.mid for member in epoch.members):
            self.lives[epoch.epoch] += 1
            self.committed = 0
            assert epoch.committed_upto == 0
        assert epoch.committed_upto >= self.committed, "what is committed stays so"
        if self.restarted:
            self.restarted = False
            self.check_reported(epoch)
        elif epoch.committed_upto > self.committed and not epoch.voids:  # voids: members strayed in a small world
            self.check_admission(self.epochs[last], epoch.committed_upto)
        self.committed = self.committed_in[epoch.epoch] = epoch.committed_upto
        for void in epoch.voids:
            assert void.seq > epoch.committed_upto
            self.voids.add((self.lives[epoch.epoch], void.seq))

    def check_admission(self, last: m.Epoch, upto: int) -> None:
        for member in last.members:
            assert (member.mid, last.epoch, upto) in self.told_update, "admitted before all stood at update_membership"
        if len(last.members) >= last.min_world:
            self.check_done(last, self.committed, upto)

    def check_reported(self, epoch: m.Epoch) -> None:
        """R7: a restarted master commits what all who are here have finished alike in the epoch before."""
        mids = {member.mid for member in epoch.members}
        for seq in range(self.committed + 1, epoch.committed_upto + 1):
            if (self.lives[epoch.epoch], seq) in self.voids:
                continue
            told = {key[1]: key for key in self.told_done if key[2] == seq and key[0] in mids}
            updated = [key for key in self.told_update if key[2] == seq and key[0] in mids]
            assert told or updated, f"op {seq} was committed and nobody was done with it"
            if told:
                newest = max(told)
                digests = {self.told_done.get((mid, newest, seq)) for mid in mids}
                assert len(digests) == 1, f"op {seq} committed with digests {digests}"
                assert None not in digests

    def check_resumed(self, resumed: m.Resumed) -> None:
        """The epoch goes on. Later ones that the old master may have begun are not known to anybody."""
        self.restarted = False
        for number in [number for number in self.epochs if number > resumed.epoch]:
            del self.epochs[number], self.lives[number]
        assert resumed.epoch == self.last
        for _, client in self.live():
            assert client.core.epoch_number <= resumed.epoch
            assert not (client.core.collectives.aborted and client.core.epoch_number == resumed.epoch)
        told = [c.core.collectives.committed for _, c in self.live() if c.core.epoch_number == resumed.epoch]
        if told:  # what was said and not heard is void
            self.committed = self.committed_in[resumed.epoch] = max(told)

    def check_commit(self, commit: m.Commit) -> None:
        epoch = self.epochs[commit.epoch]
        assert commit.epoch == self.last
        assert commit.epoch not in self.aborted, "members have stopped"
        assert commit.upto > self.committed or self.room.starts > 1  # laggards are told after a restart
        assert commit.upto >= self.committed
        assert len(epoch.members) >= epoch.min_world
        self.check_done(epoch, self.committed, commit.upto)
        self.committed = self.committed_in[commit.epoch] = commit.upto

    def check_done(self, epoch: m.Epoch, above: int, upto: int) -> None:
        for seq in range(above + 1, upto + 1):
            if (self.lives[epoch.epoch], seq) in self.voids:
                continue
            if program(seq).kind is Kind.update_membership:
                assert all((member.mid, epoch.epoch, seq) in self.told_update for member in epoch.members)
            else:
                digests = {self.told_done.get((member.mid, epoch.epoch, seq)) for member in epoch.members}
                assert len(digests) == 1, f"op {seq} committed with digests {digests}"
                assert None not in digests

    # ---- the daemons' side ---------------------------------------------------------------------------

    def run(self, daemon: Daemon, client: Client, commands: list[cmd.Command]) -> None:
        for command in commands:
            match command:
                case cmd.ToMaster(message):
                    silent = client.core.standing.reporting and not isinstance(message, m.Report | m.Leave)
                    if daemon.conn and daemon.connected and not silent:
                        daemon.up.append(message)
                case cmd.ToClient(message):
                    self.tell(client, message)
                case cmd.StartOp(op) if op.p2p:
                    assert op.other in client.p2p_up, "started without its link"
                    same = [other.seq for other in client.moving.values() if other.other == op.other]
                    assert op.seq > max(same, default=0), "out of order"
                    client.moving[op.engine_id] = op
                    if op.kind is Kind.send:
                        payload = 1000 * client.core.mid + op.number
                        self.payloads[client.core.epoch_number, op.seq] = payload
                case cmd.StartOp(op):
                    meaning = op.meaning
                    assert all(op.seq > other.seq for other in client.engine.values()), "out of order"
                    assert meaning.needs <= client.up, "started without its links"
                    if op.kind in ROOTED:
                        root = self.epochs[client.core.epoch_number].members[meaning.descriptor.root]
                        assert root.mid == client.roots[op.seq], "another root than was called"
                    client.engine[op.engine_id] = op
                case links.Need(mids, links.COLLECTIVES):
                    assert mids.isdisjoint(client.up)
                    client.needs |= mids
                case links.Need(mids, links.P2P):
                    client.p2p_needs |= mids
                case cmd.CancelOp(engine_id):
                    known = client.engine.pop(engine_id, None) or client.moving.pop(engine_id, None)
                    if known is not None:
                        self.run(daemon, client, client.core.op_cancelled(engine_id))
                case links.Enter(epoch):
                    client.dialling = epoch.epoch
                    client.needs.clear()
                    client.p2p_needs.clear()
                    client.p2p_up &= {member.mid for member in epoch.members}
                    client.up &= {member.mid for member in epoch.members}
                    if not client.next_seq:
                        client.next_seq = epoch.committed_upto + 1
                case links.Leave():
                    client.gone = True
        if client.gone and client in daemon.clients:
            daemon.clients.remove(client)

    def tell(self, client: Client, message: Any) -> None:
        if isinstance(message, m.Failure):
            client.failures += 1
        elif isinstance(message, m.Result) and message.id > P2P_IDS:
            told = self.exchanged.setdefault(message.seq, set())
            told.add((message.epoch, message.digest))
            assert told == {(message.epoch, self.payloads[message.epoch, message.seq])}, "other bytes than were sent"
            assert client.core.name in message.contributors
        elif isinstance(message, m.Result) and program(message.seq).kind is not Kind.update_membership:
            place = (self.lives[message.epoch], message.seq)
            assert place not in self.voids, "a void op has a result"
            assert client.core.name in message.contributors
            assert [one.name for one in self.epochs[message.epoch].members] == list(message.contributors)
            mids = {one.name: one.mid for one in self.epochs[message.epoch].members}
            root = client.roots.pop(message.seq, 0)
            assert not root or root in mids.values(), "the root's data is not in the result"
            same = message.digest if program(message.seq).kind in SAME_RESULT else 0
            result = (message.epoch, tuple(message.contributors), same, root)
            known = self.results.setdefault(place, result)
            assert known == result, f"op {message.seq} has two outcomes: {known} and {result}"

    def connect(self, daemon: Daemon) -> None:
        if daemon.conn:
            return
        daemon.up.clear()
        daemon.down.clear()
        daemon.connected = False
        daemon.connections += 1
        daemon.conn = self.room._next_conn
        self.room.hello(daemon.name, incarnation=daemon.incarnation, term=daemon.term, master=daemon.master)
        self.collect()

    def disconnect(self, daemon: Daemon, arrives: int) -> int:
        """The connection breaks; the first *arrives* of the messages under way still get through.

        Returns:
            Its number; the master is still to notice.
        """
        for _ in range(arrives):
            self.deliver_up(daemon)
        conn, daemon.conn, daemon.connected = daemon.conn, 0, False
        daemon.up.clear()
        if conn in self.room.conns.values():
            self.room.conns = {name: other for name, other in self.room.conns.items() if other != conn}
        return conn

    def deliver_up(self, daemon: Daemon) -> None:
        if not daemon.up or not daemon.conn:
            return
        message = daemon.up.popleft()
        if daemon.conn not in self.room.state.connections:
            return  # the master has closed it
        live = self.room.state.members.get(getattr(message, "mid", 0))
        current = live is not None and live.in_epoch and live.group.epoch == getattr(message, "epoch", 0)
        if current and isinstance(message, m.Done):
            self.told_done.setdefault((message.mid, message.epoch, message.seq), message.digest)
        elif current and isinstance(message, m.UpdateMembership):
            self.told_update.add((message.mid, message.epoch, message.seq))
        elif isinstance(message, m.Report):
            for seq, digest, _ in message.done:
                self.told_done.setdefault((message.mid, message.epoch, seq), digest)
            self.told_update |= {(message.mid, message.epoch, seq) for seq in message.updates}
        self.step(Received(daemon.conn, message))

    def deliver_down(self, daemon: Daemon) -> None:
        if not daemon.down or daemon.asleep:
            return
        message = daemon.down.popleft()
        match message:
            case None:
                daemon.conn = 0
                self.connect(daemon)
            case m.Welcome():
                assert message.term >= daemon.term, "R6"
                daemon.connected, daemon.term, daemon.master = True, message.term, message.master
                for client in list(daemon.clients):
                    self.run(daemon, client, client.core.reconnected(daemon.connections, daemon.master))
                daemon.up.append(m.Heartbeat(0))
            case m.Pong(number=0):
                for client in list(daemon.clients):
                    if client.core.epoch is not None and client.core.standing.connection != daemon.connections:
                        self.run(daemon, client, client.core.forgotten("lost"))
            case m.Probe():
                bad = daemon.unreachable or any(
                    other.unreachable for other in self.daemons if other.name == message.daemon
                )
                daemon.up.append(
                    m.ProbeResult(message.group, message.joiner, message.prober, message.target, not bad, "")
                )
            case _ if isinstance(message, m.ToMember):
                for client in list(daemon.clients):
                    says = client.core.hear(message, self.room.now, daemon.connections, daemon.master)
                    self.run(daemon, client, says)

    def post(self, daemon: Daemon, client: Client, *, reads: bool = True) -> None:
        if client.gone or not client.next_seq or client.in_update or len(client.core.collectives.open) >= 4:
            return
        seq = client.next_seq
        client.next_seq += 1
        epoch = client.core.epoch
        assert epoch is not None
        if reads or not client.knows[0] or program(seq - 1).kind is Kind.update_membership:  # which waits for its end
            client.knows = epoch.epoch, tuple(member.mid for member in epoch.members)
        number, mids = client.knows
        what = program(seq, mids)
        if what.kind in ROOTED:
            client.roots[seq] = mids[what.root]
        call = m.Post(seq, what, 0, 0, number)
        self.run(daemon, client, client.core.post(call, client.core.call(call), self.room.now))

    def finish(self, daemon: Daemon, client: Client, wrong: bool = False) -> None:
        if client.engine:
            engine_id, op = next(iter(client.engine.items()))
            del client.engine[engine_id]
            same = op.kind in SAME_RESULT
            digest = 1000 * client.core.epoch_number + op.seq + (10**9 if wrong else 0 if same else client.core.mid)
            self.run(daemon, client, client.core.op_finished(engine_id, digest, 0))

    def exchange(self, daemon: Daemon, client: Client, other: int, sends: bool, tag: int) -> None:
        """The client sends to member *other* (mid) or receives from it."""
        epoch = client.core.epoch
        assert epoch is not None
        mids = [member.mid for member in epoch.members]
        if client.knows[0]:
            client.knows = epoch.epoch, tuple(mids)  # it has read it, for its next call, too
        client.exchanges += 1
        number = P2P_IDS + client.exchanges
        what = Descriptor(Kind.send if sends else Kind.recv, count=4)
        call = m.Post(number, what, 0, 0, epoch.epoch, mids.index(other), tag)
        self.run(daemon, client, client.core.post(call, client.core.call(call), self.room.now))

    def move(self, daemon: Daemon, client: Client) -> None:
        """The engine finishes a send or recv; a recv only if the other end has begun to send."""
        for engine_id, op in list(client.moving.items()):
            payload = self.payloads.get((client.core.epoch_number, op.seq))
            if payload is not None:
                del client.moving[engine_id]
                digest = 0 if op.kind is Kind.send else payload
                self.run(daemon, client, client.core.op_finished(engine_id, digest, 0))
                return

    def ready(self, daemon: Daemon, client: Client) -> None:
        if client.p2p_needs:
            client.p2p_up.add(client.p2p_needs.pop())
            self.run(daemon, client, client.core.p2p_links(set(client.p2p_up)))
        if client.dialling:
            epoch, client.dialling = client.dialling, 0
            client.up |= client.core.seat.neighbours
        elif client.needs:
            client.up.add(client.needs.pop())
            epoch = client.core.epoch_number
        else:
            return
        self.run(daemon, client, client.core.links_ready(epoch, client.up))

    def live(self) -> list[tuple[Daemon, Client]]:
        return [(daemon, client) for daemon in self.daemons for client in daemon.clients]

    def pick(self, index: int) -> tuple[Daemon, Client] | None:
        found = [(d, c) for d, c in self.live() if not d.asleep]
        return found[index % len(found)] if found else None

    # ---- rules ---------------------------------------------------------------------------------------

    @initialize(placed=st.lists(st.integers(0, DAEMONS - 1), min_size=START, max_size=START))
    def begin(self, placed: list[int]) -> None:
        for index in placed:
            self.join(index)
        self.settle(2)
        for daemon, client in self.live():
            self.ready(daemon, client)

    @rule(index=st.integers(0, DAEMONS - 1))
    def join(self, index: int) -> None:
        daemon = self.daemons[index]
        if daemon.asleep or len(self.live()) >= 6:
            return
        self.names += 1
        first = 1_000_000 * self.names
        client = Client(core.Member(GROUP, f"m{self.names}", START, LEAST, first))
        daemon.clients.append(client)
        if not daemon.conn:
            self.connect(daemon)
        elif daemon.connected:
            self.run(daemon, client, client.core.join())

    @rule(index=st.integers(0, DAEMONS - 1), count=st.integers(1, 8))
    def up(self, index: int, count: int) -> None:
        for _ in range(count):
            self.deliver_up(self.daemons[index])

    @rule(index=st.integers(0, DAEMONS - 1), count=st.integers(1, 8))
    def down(self, index: int, count: int) -> None:
        for _ in range(count):
            self.deliver_down(self.daemons[index])

    @rule(index=INDEX, count=st.integers(1, 4), reads=st.booleans())
    def call(self, index: int, count: int, reads: bool) -> None:
        for _ in range(count):
            if picked := self.pick(index):
                self.post(*picked, reads=reads)

    @rule(index=INDEX, count=st.integers(1, 4), wrong=st.integers(0, 3))
    def engine_finishes(self, index: int, count: int, wrong: int) -> None:
        for _ in range(count):
            if picked := self.pick(index):
                self.finish(*picked, wrong=wrong == 1)

    @rule(index=INDEX, other=INDEX, tag=st.integers(0, 1), both=st.booleans(), sends=st.booleans())
    def send_and_receive(self, index: int, other: int, tag: int, both: bool, sends: bool) -> None:
        one, two = self.pick(index), self.pick(other)
        if one and two and one[1].core.epoch_number == two[1].core.epoch_number > 0:
            mids = one[1].core.mid, two[1].core.mid
            if mids[0] != mids[1] and one[1].core.in_flight < 6 > two[1].core.in_flight:
                self.exchange(*one, mids[1], sends, tag)
                if both:
                    self.exchange(*two, mids[0], not sends, tag)

    @rule(index=INDEX, other=INDEX)
    def p2p_link_breaks(self, index: int, other: int) -> None:
        picked = self.pick(index)
        if picked and picked[1].p2p_up:
            client = picked[1]
            whom = sorted(client.p2p_up)[other % len(client.p2p_up)]
            client.p2p_up.discard(whom)
            self.run(*picked, client.core.p2p_link_lost(whom, "timed out"))

    @rule(index=INDEX)
    def bytes_move(self, index: int) -> None:
        if picked := self.pick(index):
            self.move(*picked)

    @rule()
    def everybody_works(self) -> None:
        for _ in range(3):
            for daemon, client in self.live():
                if not daemon.asleep:
                    self.post(daemon, client)
                    self.finish(daemon, client)
                    self.ready(daemon, client)
                    self.move(daemon, client)

    @rule()
    def network_is_quick(self) -> None:
        for daemon in self.daemons:
            for _ in range(len(daemon.up) + len(daemon.down)):
                self.deliver_up(daemon)
                self.deliver_down(daemon)
        for daemon, client in self.live():
            if not daemon.asleep:
                self.ready(daemon, client)

    @rule(index=INDEX)
    def links_are_up(self, index: int) -> None:
        if picked := self.pick(index):
            self.ready(*picked)

    @rule(index=INDEX, other=INDEX, unreachable=st.booleans())
    def link_breaks(self, index: int, other: int, unreachable: bool) -> None:
        if (picked := self.pick(index)) and picked[1].core.epoch is not None:
            daemon, client = picked
            others = [one.mid for one in client.core.epoch.members if one.mid != client.core.mid]
            if others:
                complain = client.core.link_unreachable if unreachable else client.core.link_lost
                whom = others[other % len(others)]
                near = whom in client.core.seat.neighbours
                if not unreachable:
                    client.up.discard(whom)
                    client.needs.discard(whom)
                if near or not unreachable or whom in client.needs:
                    self.run(daemon, client, complain(whom, "timed out"))
                if near and not unreachable:
                    client.dialling = client.core.epoch_number

    @rule(index=INDEX)
    def frames_disagree(self, index: int) -> None:
        picked = self.pick(index)
        if picked and picked[1].engine:
            self.run(*picked, picked[1].core.mismatch(next(iter(picked[1].engine.values())).seq))

    @rule(index=INDEX)
    def leave(self, index: int) -> None:
        if picked := self.pick(index):
            self.run(*picked, picked[1].core.leave("detached"))
            picked[0].clients[:] = [client for client in picked[0].clients if client is not picked[1]]

    @rule(index=st.integers(0, DAEMONS - 1), arrives=st.integers(0, 6))
    def daemon_dies(self, index: int, arrives: int) -> None:
        daemon = self.daemons[index]
        if daemon.conn:
            self.step(Disconnected(self.disconnect(daemon, arrives), "connection reset"))
        self.daemons[index] = Daemon(daemon.name, daemon.incarnation + 1)

    @rule(index=st.integers(0, DAEMONS - 1), arrives=st.integers(0, 6), read=st.integers(0, 6), noticed=st.booleans())
    def connection_breaks(self, index: int, arrives: int, read: int, noticed: bool) -> None:
        """The daemon connects again, before or after the master has *noticed*."""
        daemon = self.daemons[index]
        if daemon.conn and not daemon.asleep:
            conn = self.disconnect(daemon, arrives)
            if noticed:
                self.step(Disconnected(conn, "connection reset"))
            for _ in range(min(read, len(daemon.down))):
                if daemon.down[0] is not None:
                    self.deliver_down(daemon)
            self.connect(daemon)
            if not noticed:
                self.step(Disconnected(conn, "connection reset"))

    @rule(arrives=st.lists(st.integers(0, 6), min_size=DAEMONS, max_size=DAEMONS), cut=st.lists(st.integers(0, 6)))
    def master_dies_and_returns(self, arrives: list[int], cut: list[int]) -> None:
        """Some of what was on its way to it, and from it, still arrives. Daemons notice when they come to read it."""
        for daemon, count in zip(self.daemons, arrives, strict=True):
            for _ in range(count if daemon.conn else 0):
                self.deliver_up(daemon)
        for daemon, count in zip(self.daemons, [*cut, *[0] * DAEMONS], strict=False):
            while count and daemon.down:
                daemon.down.pop()
                count -= 1
        for daemon in self.daemons:
            if daemon.conn:
                daemon.up.clear()
                if not daemon.down or daemon.down[-1] is not None:
                    daemon.down.append(None)
        self.room.restart()
        self.aborted.clear()
        self.restarted = True

    @rule(index=st.integers(0, DAEMONS - 1), asleep=st.booleans())
    def pause(self, index: int, asleep: bool) -> None:
        self.daemons[index].asleep = asleep

    @rule(index=st.integers(0, DAEMONS - 1), unreachable=st.booleans())
    def firewall(self, index: int, unreachable: bool) -> None:
        self.daemons[index].unreachable = unreachable

    @rule(seconds=st.sampled_from([0.05, 0.2, 1.1, 3.5]))
    def time_passes(self, seconds: float) -> None:
        until = self.room.now + seconds
        while self.room.now < until:
            self.room.asleep = {daemon.name for daemon in self.daemons if daemon.asleep}
            self.room.sleep(min(0.05, until - self.room.now))
            self.collect()

    # ---- checks --------------------------------------------------------------------------------------

    @invariant()
    def members_never_run_ahead_of_the_master(self) -> None:
        for _, client in self.live():
            assert client.core.epoch_number <= self.last

    def settle(self, rounds: int) -> None:
        for _ in range(rounds):
            for daemon in self.daemons:
                while daemon.up or daemon.down:
                    self.deliver_up(daemon)
                    self.deliver_down(daemon)

    def call_missing_halves(self) -> None:
        """Whoever is waited for in a send or recv calls it."""
        by_mid = {client.core.mid: (daemon, client) for daemon, client in self.live() if client.core.epoch is not None}
        group = self.room.state.groups.get(GROUP)
        for sender, receiver, tag, sends in list(group.current.p2p.waiting) if group else ():
            one, two = (receiver, sender) if sends else (sender, receiver)
            if one in by_mid and two in by_mid and by_mid[one][1].core.epoch_number == group.epoch:
                self.exchange(*by_mid[one], two, not sends, tag)
        self.settle(2)

    def fill_up(self) -> None:
        """Enough members to start a group."""
        while len(self.live()) < START:
            self.join(len(self.live()) % DAEMONS)

    def teardown(self) -> None:
        """Once nothing fails any more, everything that was called ends (promise 4)."""
        for daemon in self.daemons:
            daemon.asleep = daemon.unreachable = False
        self.settle(2)
        self.fill_up()
        target = max((client.next_seq for _, client in self.live()), default=0) + 8
        for _ in range(150):
            self.fill_up()  # a master that has come back may put members out after its grace
            self.settle(2)
            for daemon, client in self.live():
                for _ in range(4):
                    self.ready(daemon, client)
                if client.next_seq < target:
                    self.post(daemon, client)
                while client.engine:
                    self.finish(daemon, client)
                for _ in range(len(client.moving)):
                    self.move(daemon, client)
            self.settle(2)
            self.call_missing_halves()
            self.time_passes(0.05)
        for daemon, client in self.live():
            assert not client.core.in_flight, (
                daemon.name,
                client.core.name,
                client.core.waiting_for(),
                self.room.state.groups,
            )
            assert client.next_seq >= target, (client.core.name, client.next_seq, target)
        assert sum(client.core.epoch is not None for _, client in self.live()) >= LEAST


TestCluster = Cluster.TestCase
TestCluster.settings = settings(
    stateful_step_count=60, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much]
)


def test_epochs_survive_the_wire() -> None:
    """The check in Room._deliver relies on it."""
    void = m.Void(1, "OperationAborted", "x", {"a": "b"})
    info = m.MemberInfo(1, "a", "b", ["c:1"], "here")
    plan = m.Plan(1, 1, True, {"all_reduce": [(9, "direct"), (0, "ring")]}, [(1, 2)], 0, "bbr")
    epoch = m.Epoch("g", 1, 1, 1, [info], plan, b"k" * 16, 1, 0, [void], "r")
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(epoch), type=m.FromMaster) == epoch
