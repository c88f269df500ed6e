"""A training process: the same calls in the same order as every other one, some at a time, with values that tell."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from msgspec.structs import replace

from tests.sim.daemon import Daemon, Session
from wancoll.client.work import cut_off
from wancoll.collective import ROOTED, Descriptor, DType, Kind, ReduceOp
from wancoll.schedule.choose import BLOCKS_IN_INPUT
from wancoll.wire import messages as m
from wancoll.wire.islands import member_name

if TYPE_CHECKING:
    from tests.sim.world import World


def value(index: int, seq: int, place: int, target: int = 0, shard: int = 0) -> int:
    """What member *index* contributes: a digit of its own, of the call, the element and whose block it is in."""
    return int(10**index * (1 + (seq + place + 3 * target + 5 * shard) % 8))


def block(what: Descriptor, index: int) -> int:
    """Elements of member *index*'s block: of a call with *counts* they are uneven."""
    return (what.count + index) % 4 if what.counts else what.count


def index_of(name: str) -> int:
    """A client's index, which is its island's."""
    return int(name[1:].partition("/")[0])


def island_of(name: str) -> str:
    """The island of a member; its own name where it has one shard."""
    return name.partition("/")[0]


def shard_of(name: str) -> int:
    """The column of a member."""
    return int(name.partition("/")[2] or 0)


@dataclass(slots=True)
class Called:
    """A call that has not ended, *what* as the program says it: root 0 is the oldest member, 1 the newest.

    seq 0: a send or recv, with the other's name and its tag. *posted*: as the daemon is told it, with all blocks; one
    that is empty proves nothing, which *what* does not show.
    """

    seq: int
    what: Descriptor
    root: str
    input_buffer: list[int]
    before: tuple[int, ...]  # the input as it was
    result_buffer: list[int]
    at: float
    other: str = ""
    tag: int = 0
    posted: Descriptor | None = None


class Client:
    """See the module.

    Args:
        world: it lives in.
        index: its own for ever.
        daemon: its peer.
        shard: its column.
    """

    def __init__(self, world: World, index: int, daemon: Daemon, shard: int = 0) -> None:
        self.world, self.index, self.daemon, self.shard = world, index, daemon, shard
        self.name = member_name(f"c{index}", shard, world.shards)
        self.alive = True
        self.slow = 1.0
        self.late_until = 0.0
        self.next_seq = 0  # 0: the group has not begun for it
        self.members: list[str] = []
        self.epoch = 0
        self.open: dict[int, Called] = {}
        self.ended = 0
        self.over = ""  # why its communicator is of no use any more
        self._calls = 0
        self._thinking = False
        self._inbox: deque[tuple[m.FromDaemon, int]] = deque()
        self._outbox: deque[m.FromClient] = deque()
        odd = world.odd
        self.session = Session(daemon, self, odd.start_world, odd.min_world)

    @property
    def member(self) -> bool:
        """It has a rank."""
        return self.alive and self.next_seq > 0 and not self.over

    @property
    def idle(self) -> bool:
        """Nothing that it called is open, and there is nothing more to call."""
        return not self.open and self.next_seq > self.world.last_seq

    @property
    def answered(self) -> set[int]:
        """Calls whose outcome is on its way from there."""
        return {message.id for message, _ in self._inbox if isinstance(message, m.Result | m.Failure)}

    # ---- what it is told -----------------------------------------------------------------------------

    def hear(self, message: m.FromDaemon, next_seq: int) -> None:
        """The daemon sends; *next_seq* is that of the next call."""
        self._inbox.append((message, next_seq))
        self.world.clock.after(self.world.local_delay(), self._read)

    def _read(self) -> None:
        message, next_seq = self._inbox.popleft()
        if not self.alive:
            return
        match message:
            case m.EpochInfo():
                if not self.next_seq:
                    self.next_seq = next_seq
                self.epoch, self.members = message.epoch, message.members
                self.kick()
            case m.Result() | m.Failure() if message.id:
                called = self.open.pop(message.id)
                self.ended += 1
                self.world.judge.ends(self, called, message)
                self.kick()
            case m.Failure():
                self.world.judge.out(self, message)
                self._end(message)

    def _end(self, why: m.Failure) -> None:
        """The connection is over; mirrors Connection._end."""
        self.over = why.error
        while self.open:
            number, called = next(iter(self.open.items()))
            del self.open[number]
            self.world.judge.ends(self, called, cut_off(why, number, called.what.kind))
        self.world.client_over(self, self.over)

    def lose_daemon(self) -> None:
        """The connection to the daemon broke."""
        if self.alive:
            self._end(m.Failure(0, "PeerDaemonLost", "the connection to the peer daemon is gone"))

    # ---- what it calls -------------------------------------------------------------------------------

    def kick(self) -> None:
        """See what to call next, after some thought."""
        if not self._thinking and self.alive:
            self._thinking = True
            self.world.clock.after(self.world.think() * self.slow, self._think)

    def _think(self) -> None:
        self._thinking = False
        if self.world.clock.now < self.late_until:
            self._thinking = True
            self.world.clock.at(self.late_until, self._think)
            return
        if not self.member or self.over or self.next_seq > self.world.last_seq:
            return
        collectives = [called for called in self.open.values() if called.seq]
        updates = any(called.what.kind is Kind.update_membership for called in collectives)
        blocked = updates and not self.world.behind
        if not blocked and len(collectives) < self.world.odd.pipeline:
            self._call_next()
            self.kick()

    def _call_next(self) -> None:
        seq = self.next_seq
        self.next_seq += 1
        what = self.world.program(seq, self)
        root = ""
        told = what
        if what.kind in ROOTED:
            by_age = sorted(self.members, key=index_of)
            root = by_age[0] if what.root == 0 else by_age[-1]
            told = replace(what, root=self.members.index(root))
        elif what.counts:
            told = replace(what, count=0, counts=tuple(block(what, index_of(name)) for name in self.members))
        if what.kind in BLOCKS_IN_INPUT:
            targets = [index_of(name) for name in self.members]
            places = [(one, place) for one in targets for place in range(block(what, one))]
            input_buffer = [value(self.index, seq, place, one, self.shard) for one, place in places]
        else:
            input_buffer = [value(self.index, seq, place, 0, self.shard) for place in range(block(what, self.index))]
        self._post(Called(seq, what, root, input_buffer, tuple(input_buffer), [], self.world.clock.now), -1, told)

    def exchange(self, other: str, tag: int, *, sends: bool, count: int) -> None:
        """Call send to *other*, or recv from it."""
        kind = Kind.send if sends else Kind.recv
        input_buffer = [value(self.index, tag, place) for place in range(count)] if sends else []
        what = Descriptor(kind, DType.int64, count=count)
        called = Called(0, what, "", input_buffer, tuple(input_buffer), [], self.world.clock.now, other, tag)
        self._post(called, self.members.index(other))

    def _post(self, called: Called, peer: int, told: Descriptor | None = None) -> None:
        self._calls += 1
        self.open[self._calls] = called
        self.world.judge.calls(self, called)
        self.session.arena[self._calls] = called.input_buffer, called.result_buffer
        called.posted = told or called.what
        self._outbox.append(m.Post(self._calls, called.posted, 0, 0, self.epoch, peer, called.tag))
        self.world.clock.after(self.world.local_delay(), self._send)

    def _send(self) -> None:
        post = self._outbox.popleft()
        self.daemon.run(lambda: self.session.take(post))

    def die(self) -> None:
        """The process is killed."""
        self.alive = False
        self.daemon.run(lambda: self.session.end("the client closed the connection"))


def sum_op(count: int, algorithm: str, on_failure: str) -> Descriptor:
    """An all-reduce of integers."""
    return Descriptor(
        Kind.all_reduce, DType.int64, ReduceOp.sum, count, algorithm=algorithm, on_failure=on_failure
    )  # fmt: skip
