"""The master as a thin shell around the real membership.step(), and the journal that outlives it.

Mirrors wancoll_master/server.py (apply, _carry_out, _tell, release, flush, keep_time, accept, _read, _hear), journal.py
(open, persist) and etcd_store.py (persist, write_forever): a store that fences takes its time for a write, and one that
is under way when its master dies may be carried out or not. Stores fail, too: a disk is full, a store that fences does
not answer (a write is tried again, and its master steps down after a while), or refuses a write.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from tests.sim.clock import Process, Timer
from tests.sim.network import End
from wancoll.wire import messages as m
from wancoll.wire.kept import Kept
from wancoll_master.core import membership
from wancoll_master.core.liveness import presence
from wancoll_master.core.ready import (
    Announce,
    Broadcast,
    Disconnected,
    Event,
    Held,
    Persist,
    Ready,
    Received,
    Returned,
    Send,
    Tick,
    Used,
    jumped,
    tellings,
)
from wancoll_master.plan.planning import propose

if TYPE_CHECKING:
    from tests.sim.world import World


_HELD_FRAMES = 65536
_AGAIN = 0.05  # seconds until a write is tried again


class Fenced(Exception):
    """Another master has taken over the journal."""


@dataclass
class Journal:
    """What the masters of a world share: sqlite's rows, or those of a store that fences."""

    term: int = 0
    epoch: int = 0
    next_mid: int = 1
    used: dict[str, Used] = field(default_factory=dict)
    full: bool = False  # of sqlite: what is written is lost, which the master logs and lives with
    missed: list[Persist] = field(default_factory=list)  # while it was full; the lock beside it is empty then
    lacks: bool = False  # what was told: the lock knows a newer term, or a daemon has told a leader of one
    away: bool = False  # of a store that fences: it answers nobody
    refuses: int = 0  # writes to come
    losses: int = 0  # of all that was in it: the key of who led then is gone, too, and its writes are refused

    def open(self, forgets: bool) -> bool:
        """Take the next term; whether it lacks what was told. *forgets*: else it was not full after all."""
        missed, self.missed = self.missed, []
        if not forgets:
            self.full = False
            for what in missed:
                self.persist(what)
        if lacks := self.lacks or (bool(missed) and forgets):
            self.lacks, self.used = False, {}
            self.term, self.epoch, self.next_mid = jumped(self.term, self.epoch, self.next_mid)
        self.term += 1
        return lacks

    def persist(self, what: Persist) -> None:
        if self.refuses or what.term < self.term:
            self.refuses = max(0, self.refuses - 1)
            raise Fenced
        if self.full:
            self.missed.append(what)
            return
        self.term = max(self.term, what.term)
        self.epoch, self.next_mid = max(self.epoch, what.epoch), max(self.next_mid, what.next_mid)
        self.used |= what.groups

    def mend(self) -> None:
        """What is written from now on stays."""
        self.full = self.away = False
        self.refuses = 0

    def lose(self, *, lock_too: bool) -> None:
        self.term, self.epoch, self.next_mid, self.used = 0 if lock_too else self.term, 0, 1, {}
        self.missed, self.lacks = [], not lock_too
        self.losses += 1


class Master(Process):
    """See the module. *fuse* counts steps until it dies in the middle of one; -1: it does not."""

    def __init__(self, world: World, name: str, host: str, journal: Journal) -> None:
        super().__init__(world.clock, name, host)
        self.world, self._journal = world, journal
        self._held = Held(_HELD_FRAMES)
        self._asked = self._written = 0
        self._writes: deque[Persist] = deque()  # asked for and not written yet
        self._lead()
        self.address = f"{host}:7400"
        self.fuse = -1
        self.trap: type | None = None  # it dies while it tells the next one of this kind
        self._trapped = False
        self._connections: dict[int, End] = {}
        self._kept: dict[int, Kept[m.FromMaster]] = {}
        self._slept_at = 0.0
        self._next_conn = 1
        self._batches: dict[int, list[Any]] = {}
        self._tick: Timer | None = None
        self._tick_at = float("inf")
        world.network.listen(self.address, self, self._accept)

    def _lead(self) -> None:
        journal, world = self._journal, self.world
        self._held.clear()
        self._kept = {}
        self._writes = deque()  # what is on its way to the store answers to the one of before
        self._asked = self._written = 0
        self._closing = set()
        lacks = journal.open(world.nobody_is_out_unheard())
        if lacks:
            world.judge.forgets(all_of_it=False)
        self.opened, self.led_at = journal.term, world.clock.now
        self.holds = lacks or (not journal.epoch and world.masters_started > 0)  # the first one is told so
        world.masters_started += 1
        self.state = membership.new_state(
            world.limits_of_master(),
            b"secret of %d %d" % (world.seed, world.masters_started),
            term=self.opened,
            floor=journal.epoch,
            next_mid=journal.next_mid,
            used=dict(journal.used),
            now=world.clock.now,
            elected=world.odd.elected,
            holds=self.holds,
            lost_journal=lacks,
            own_relay=bool(world.network.walls),
        )

    def sleep(self) -> None:
        super().sleep()
        self._slept_at = self.clock.now

    def wake(self) -> None:
        """Mirrors _overslept and _start_over; that of two masters the elder does not lead any more is the world's."""
        limits, slept = self.world.limits, self.asleep and self.alive
        most = max(limits.heartbeat_timeout / 2, limits.heartbeat_timeout - 2 * limits.heartbeat_interval)
        if slept and self.clock.now - self._slept_at > most and self is self.world.master:
            self.world.note(self.name, "stood still and starts over")
            connections, self._connections = self._connections, {}
            for end in connections.values():
                end.send(m.Bye("it stood still"))
                end.close("the master leads no more")
            if self._journal.full:  # it cannot take a term
                self.world.kill_master(self)
                return
            self._lead()
            self._arm()
        super().wake()

    # ---- stepping ------------------------------------------------------------------------------------

    def apply(self, event: Event) -> None:
        if not self.alive or (isinstance(event, Received) and event.conn in self._closing):
            return
        if isinstance(event, Received) and isinstance(event.message, m.Hello) and self._goes_on_with(event):
            return
        if isinstance(event, Received) and isinstance(event.message, m.Heartbeat) and event.conn in self._kept:
            self._kept[event.conn].confirmed(event.message.heard)
        self._step(event)

    def _goes_on_with(self, event: Received) -> bool:
        conn = presence.returning(self.state, event.message)
        again = self._kept[conn].again(event.message.heard) if conn in self._kept else None
        if conn is None or again is None:
            return False
        broken, end = self._connections.pop(conn, None), self._connections.pop(event.conn)
        if broken is not None:
            broken.close("another connection goes on with this one")
        self._connections[conn] = end
        end.on_message = lambda message: self._got(conn, message, end)
        end.on_close = lambda reason: self._lost(conn, reason, end)
        self._step(Returned(conn, event.message), again)
        return True

    def _step(self, event: Event, again: list[Any] | None = None) -> None:
        ready = membership.step(self.state, self.clock.now, event, propose)
        if again is not None:
            self._batches[event.conn] = [ready.answers.pop().message, *again]
        cut = self._cut_short(ready)
        try:
            self._carry_out(ready)
        except Fenced:
            self._fenced()
            return
        self._flush_or_die(cut)
        if self.alive:
            self._arm()

    def _cut_short(self, ready: Ready) -> bool:
        """Whether it dies in this step; *ready* becomes what it still does."""
        if self.fuse < 0:
            return False
        self.fuse -= 1
        if self.fuse >= 0:
            return False
        told = self.world.random.randint(-1, len(ready.messages))
        del ready.messages[max(0, told) :], ready.closes[:]
        if told < 0:
            ready.persist = None
        return True

    def _flush_or_die(self, cut: bool) -> None:
        """Where it dies, of those to whom something was to be said some have heard it."""
        if not cut and not self._trapped:
            self.flush()
            return
        conns = list(self._batches)
        told = self.world.random.randint(0, len(conns))
        names = [end.other.process.name if (end := self._connections.get(conn)) else "" for conn in conns]
        for conn in conns[told:]:
            del self._batches[conn]
        self.flush()
        self.world.kill_master(self)
        self.world.alone_with_the_news(list(filter(None, names[:told])), list(filter(None, names[told:])))

    def _fenced(self) -> None:
        self.world.note(self.name, "is fenced and stops")
        self.world.kill_master(self)

    def _carry_out(self, ready: Ready) -> None:
        if ready.step_down is not None:
            self._journal.term = max(self._journal.term, ready.step_down.term)
            self._journal.lacks = True
            raise Fenced
        for answer in ready.answers:
            assert isinstance(answer, Send), "nobody asks for a status here"
            self._add(answer.conn, answer.message)
        for one in ready.log:
            self.world.note(self.name, f"[{one.kind}] {one.text}")
        if ready.persist is not None:
            self._persist(ready.persist)
        self._closing.update(close.conn for close in ready.closes)
        if self._written == self._asked:
            self._tell(ready)
        else:
            self._held.add(ready, self._asked)

    def _tell(self, ready: Ready) -> None:
        """All that it rests on is written."""
        for message in ready.messages:
            match message:
                case Broadcast(conns, said):
                    for conn in conns:
                        self._keep(conn, said)
                case Send(conn, m.Welcome() as said):
                    self._kept[conn] = Kept()
                    self._add(conn, said)
                case Send(conn, said):
                    self._keep(conn, said)
                case Announce():
                    for told, to in tellings(message):
                        for conn, mid in to:
                            self._keep(conn, msgspec.structs.replace(told, to=mid))
            self.world.judge.decides(self.name, message)
            if self.trap is not None:
                said = message.message if isinstance(message, Send) else message
                self._trapped |= isinstance(said, self.trap)
        for close in ready.closes:
            if close.reason:
                self._add(close.conn, m.Bye(close.reason, close.final))
            self.flush()
            self._closing.discard(close.conn)
            self._kept.pop(close.conn, None)
            end = self._connections.pop(close.conn, None)
            if end is not None:
                end.close("the master closed the connection")

    def _persist(self, what: Persist) -> None:
        if not self.world.odd.elected:
            self._journal.persist(what)
            return
        self._asked += 1
        self._writes.append(what)
        if len(self._writes) == 1:
            self._write_next()

    def _write_next(self) -> None:
        """One write at a time, there and back: it is carried out at the store even if this master dies meanwhile."""
        writes, what, journal = self._writes, self._writes[0], self._journal
        losses = journal.losses
        until = self.clock.now + self.world.limits.heartbeat_timeout

        def write() -> None:
            self.clock.after(self.world.write_delay(), arrives)

        def arrives() -> None:
            answer = answered
            if journal.away and self.world.store_loses():
                answer = unanswered
            else:
                try:
                    if losses != journal.losses:
                        raise Fenced
                    journal.persist(what)
                except Fenced:
                    answer = refused
                answer = unanswered if journal.away else answer
            self.after(self.world.write_delay(), answer)

        def unanswered() -> None:
            if writes is not self._writes:
                return  # of the time before it started over
            if self.clock.now > until:
                refused()
            else:
                self.after(_AGAIN, write)

        def refused() -> None:
            if writes is self._writes:
                self._fenced()

        def answered() -> None:
            if writes is not self._writes:
                return
            writes.popleft()
            self._written += 1
            for ready in self._held.release(self._written):
                self._tell(ready)
            self._flush_or_die(cut=False)
            if writes:
                self._write_next()

        write()

    def _keep(self, conn: int, message: m.FromMaster) -> None:
        if conn in self._kept:
            self._kept[conn].add(message, 0)
        self._add(conn, message)

    def _add(self, conn: int, message: m.FromMaster) -> None:
        if conn in self._connections:
            self._batches.setdefault(conn, []).append(message)

    def flush(self) -> None:
        batches, self._batches = self._batches, {}
        for conn, batch in batches.items():
            end = self._connections.get(conn)
            if end is not None:
                for message in batch:
                    self.world.said(self.name, end.other.process.name, message)
                    end.send(self.world.wire(message, m.FromMaster))

    def _arm(self) -> None:
        at = self.state.deadline
        if at < self._tick_at or self._tick is None:
            if self._tick is not None:
                self._tick.cancel()
            self._tick, self._tick_at = None, at
            if at < float("inf"):
                self._tick = self.after(max(0.0, at - self.clock.now), self._ticked)

    def _ticked(self) -> None:
        self._tick, self._tick_at = None, float("inf")
        self.apply(Tick())
        late = self.state.deadline
        assert not self.alive or late > self.clock.now, "a tick left something undone"

    # ---- connections ---------------------------------------------------------------------------------

    def _accept(self, end: End) -> None:
        number, self._next_conn = self._next_conn, self._next_conn + 1
        self._connections[number] = end
        end.on_message = lambda message: self._got(number, message, end)
        end.on_close = lambda reason: self._lost(number, reason, end)

    def _got(self, number: int, message: m.FromPeer, end: End) -> None:
        if self._connections.get(number) is end:
            self.world.heard(self.name, end.other.process.name, message)
            self.apply(Received(number, self.world.wire(message, m.FromPeer)))

    def _lost(self, number: int, reason: str, end: End) -> None:
        if self._connections.get(number) is end:
            del self._connections[number]
            self._closing.discard(number)
            self.world.note(self.name, f"connection {number} is lost: {reason}")
            self.apply(Disconnected(number, reason, lasting=False))
            if number not in self.state.connections:
                self._kept.pop(number, None)

    def sizes(self) -> dict[str, int]:
        """How much it remembers."""
        state = self.state
        groups = state.groups.values()
        return {
            "connections": len(state.connections),
            "members": len(state.members),
            "asked": len(state.asked),
            "pending": sum(len(group.current.tally.open) for group in groups),
            "voids": sum(len(group.voids) for group in groups),
            "digest_failures": sum(len(group.digest_failures) for group in groups),
            "p2p": sum(len(group.current.p2p.waiting) + len(group.current.p2p.running) for group in groups),
            "joining": sum(len(group.joining) for group in groups),
            "rebuild": sum(group.rebuild is not None for group in groups),
        }
