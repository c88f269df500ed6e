"""A thousand of the real Member cores at the real core of the master: what they do, in messages and bytes, not in time.

Links and engines are played: whatever is asked of them is so at once. Each message is encoded and decoded, and comes in
the order in which it was said. Every result that a client is told has to be the one that all others are told.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from wancoll.collective import Descriptor, Kind
from wancoll.limits import PROTOCOL_VERSION, Limits
from wancoll.peer.core import commands as cmd
from wancoll.peer.core import links
from wancoll.peer.core import member as core
from wancoll.wire import messages as m
from wancoll.wire.framing import encode
from wancoll_master.core import membership
from wancoll_master.core.ready import Disconnected, Event, Received, Send, Tick, Used, frames
from wancoll_master.plan.planning import propose

_IDS = 1 << 20  # engine ids of each member


class Peer:
    """A daemon with one member, whose client calls what it is told to."""

    def __init__(self, crowd: Crowd, number: int, group: str, world: int) -> None:
        self._crowd, self.number = crowd, number
        self.member = core.Member(group, f"c{number}", world, 1, number * _IDS, crowd.limits)
        self.conn = self._connections = self.term = self.master = self._calls = 0
        self.failures: list[m.Failure] = []

    @property
    def name(self) -> str:
        """The daemon's."""
        return f"d{self.number}"

    def call(self, kind: Kind) -> None:
        self._calls += 1
        post = m.Post(self._calls, Descriptor(kind), 0, 4096, self.member.epoch_number)
        self._carry_out(self.member.post(post, self.member.call(post), self._crowd.now))

    def hear(self, message: Any) -> None:
        """The master says this."""
        member, crowd = self.member, self._crowd
        match message:
            case m.Welcome(term=term, master=master):
                self._connections += 1
                self.term, self.master = term, master
                self._carry_out(member.reconnected(self._connections, master))
                self.say(m.Heartbeat(0))
            case m.Probe(group, joiner, prober, target):
                self.say(m.ProbeResult(group, joiner, prober, target, ok=True, reason=""))
            case m.Pong():
                pass
            case _ if member.addressed(message):
                self._carry_out(member.hear(message, crowd.now, self._connections, self.master))

    def say(self, message: Any) -> None:
        """To the master."""
        conn, body = self.conn, encode(message)[4:]
        self._crowd.soon(lambda: self._crowd.heard(conn, msgspec.msgpack.decode(body, type=m.FromPeer)))

    def _carry_out(self, commands: list[cmd.Command]) -> None:
        crowd, member = self._crowd, self.member
        for command in commands:
            match command:
                case cmd.ToMaster(message):
                    self.say(message)
                case cmd.ToClient(m.Result() as told):
                    crowd.ends(self, told)
                case cmd.ToClient(m.Failure() as told):
                    self.failures.append(told)
                case links.Enter(epoch):
                    self._up(epoch.epoch)
                case links.Need():
                    self._up(member.epoch_number)
                case cmd.StartOp(op):
                    seen = repr((op.seq, member.member_names)).encode()
                    self._soon(lambda number, seen: member.op_finished(number, zlib.crc32(seen), 0), op.engine_id, seen)
                case cmd.CancelOp(engine_id):
                    self._soon(member.op_cancelled, engine_id)

    def _up(self, epoch: int) -> None:
        """All links are up."""
        mids = {one.mid for one in self.member.epoch.members}
        self._soon(self.member.links_ready, epoch, mids)

    def _soon(self, call: Callable[..., list[cmd.Command]], *args: Any) -> None:
        self._crowd.soon(lambda: self._carry_out(call(*args)))


class Crowd:
    """A master and *size* members in each of *groups*, which are started by form()."""

    def __init__(self, size: int, groups: int = 1) -> None:
        self.limits = Limits(voters=0)
        self.now = 100.0
        self.steps = self.nbytes = 0  # of the master: events that it took in, and bytes that it said
        self.outcomes: dict[tuple[str, int], tuple[int, tuple[str, ...]]] = {}  # (group, seq) -> epoch, contributors
        self.told: dict[tuple[str, int], int] = {}  # how many were told it
        self._todo: deque[Callable[[], None]] = deque()
        self._journal: dict[str, Used] = {}
        self._epoch, self._next_mid, self._term = 0, 1, 0
        self._conns: dict[int, Peer] = {}
        self._next_conn = 1
        self._start()
        self.peers = [Peer(self, number, f"g{number // size}", size) for number in range(size * groups)]

    # ---- what happens --------------------------------------------------------------------------------

    def form(self) -> None:
        for peer in self.peers:
            self._connect(peer)
        self.run()

    def join(self, group: str, world: int) -> Peer:
        peer = Peer(self, len(self.peers), group, world)
        self.peers.append(peer)
        self._connect(peer)
        self.run()
        return peer

    def call(self, kind: Kind, peers: Iterable[Peer] | None = None) -> None:
        """All of them, or these."""
        for peer in self.peers if peers is None else peers:
            peer.call(kind)
        self.run()

    def kill(self, peers: list[Peer]) -> None:
        """Their connections break at the same time."""
        for peer in peers:
            del self._conns[peer.conn]
            self.peers.remove(peer)
            self._step(Disconnected(peer.conn, "connection reset", lasting=False))
        self.beat(self.limits.return_grace + 0.1)

    def silence(self, peers: list[Peer]) -> None:
        """Nothing is heard of them any more."""
        for peer in peers:
            del self._conns[peer.conn]
            self.peers.remove(peer)
        self.beat(self.limits.heartbeat_timeout + 2 * self.limits.heartbeat_interval)

    def restart(self) -> None:
        """Another master follows, which has the journal of the one before."""
        self._todo.clear()  # what was on its way is lost
        self._conns.clear()
        self._start()
        for peer in self.peers:
            self._connect(peer)
        self.run()

    def beat(self, seconds: float) -> None:
        """Time passes, and who is here says so."""
        until = self.now + seconds
        while self.now < until:
            self.now += self.limits.heartbeat_interval / 2
            for peer in self._conns.values():
                peer.say(m.Heartbeat(1))
            self.run()
            while self._state.deadline <= self.now:
                self._step(Tick())
                self.run()

    def counted(self) -> tuple[int, int]:
        """Steps and bytes since the last look."""
        found, self.steps, self.nbytes = (self.steps, self.nbytes), 0, 0
        return found

    def epochs(self) -> set[int]:
        """That members are in."""
        return {peer.member.epoch_number for peer in self.peers}

    # ---- the master ----------------------------------------------------------------------------------

    def _start(self) -> None:
        self._term += 1
        self._state = membership.new_state(
            self.limits,
            b"secret %d" % self._term,
            term=self._term,
            floor=self._epoch,
            next_mid=self._next_mid,
            used=dict(self._journal),
            now=self.now,
        )

    def _connect(self, peer: Peer) -> None:
        peer.conn, self._next_conn = self._next_conn, self._next_conn + 1
        self._conns[peer.conn] = peer
        head = (PROTOCOL_VERSION, peer.name, 1, [f"host-{peer.number}:7401"], 4, "", "0.1.0")
        peer.say(m.Hello(*head, term=peer.term, master=peer.master))

    def heard(self, conn: int, message: Any) -> None:
        if conn in self._conns:
            self._step(Received(conn, message))

    def _step(self, event: Event) -> None:
        self.steps += 1
        ready = membership.step(self._state, self.now, event, propose)
        assert not [one for one in ready.closes if one.conn in self._conns], ready.closes
        if ready.persist is not None:
            self._journal |= ready.persist.groups
            self._epoch = max(self._epoch, ready.persist.epoch)
            self._next_mid = max(self._next_mid, ready.persist.next_mid)
        for answer in ready.answers:
            assert isinstance(answer, Send)
            self._say(answer.conn, encode(answer.message))
        for message in ready.messages:
            for conn, frame in frames(message):
                self._say(conn, frame)

    def _say(self, conn: int, frame: bytes) -> None:
        self.nbytes += len(frame)
        peer = self._conns.get(conn)
        if peer is not None:
            self.soon(lambda: peer.hear(msgspec.msgpack.decode(frame[4:], type=m.FromMaster)))

    # ---- what comes of it ----------------------------------------------------------------------------

    def soon(self, call: Callable[[], None]) -> None:
        self._todo.append(call)

    def run(self) -> None:
        """Until nobody has anything to do."""
        while self._todo:
            self._todo.popleft()()

    def ends(self, peer: Peer, told: m.Result) -> None:
        key, outcome = (peer.member.group, told.seq), (told.epoch, tuple(told.contributors))
        assert peer.member.name in outcome[1], f"{peer.member.name} has a result of op {told.seq} without itself"
        known = self.outcomes.setdefault(key, outcome)
        assert known == outcome, f"op {key} has two outcomes"
        self.told[key] = self.told.get(key, 0) + 1
