"""The master as a thin shell around the real membership.step(), and the journal that outlives it.

Mirrors wancoll_master/server.py (apply, _carry_out, _add, flush, keep_time, accept, _read, _feed) and journal.py
(open, persist).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from tests.sim.clock import Process, Timer
from tests.sim.network import End
from wancoll.wire import messages as m
from wancoll_master.core import membership
from wancoll_master.core.state import (
    Announce,
    Broadcast,
    Close,
    Disconnected,
    Event,
    Persist,
    Received,
    Record,
    Send,
    SendStatus,
    StepDown,
    Tick,
    Used,
)

if TYPE_CHECKING:
    from tests.sim.world import World


class Fenced(Exception):
    """Another master has taken over the journal."""


@dataclass
class Journal:
    """What the masters of a world share: sqlite's rows, or those of a store that fences."""

    term: int = 0
    epoch: int = 0
    next_mid: int = 1
    used: dict[str, Used] = field(default_factory=dict)

    def open(self) -> int:
        self.term += 1
        return self.term

    def persist(self, term: int, command: Persist) -> None:
        if term < self.term:
            raise Fenced
        self.epoch, self.next_mid = max(self.epoch, command.epoch), max(self.next_mid, command.next_mid)
        if command.used is not None:
            self.used[command.group] = command.used

    def lose(self) -> None:
        self.term, self.epoch, self.next_mid, self.used = 0, 0, 1, {}


class Master(Process):
    """See the module. *fuse* counts steps until it dies in the middle of one; -1: it does not."""

    def __init__(self, world: World, name: str, host: str, journal: Journal) -> None:
        super().__init__(world.clock, name, host)
        self.world, self._journal = world, journal
        self._lead()
        self.address = f"{host}:7400"
        self.fuse = -1
        self.trap: type | None = None  # it dies while it tells the next command of this kind
        self._connections: dict[int, End] = {}
        self._slept_at = 0.0
        self._next_conn = 1
        self._batches: dict[int, list[Any]] = {}
        self._tick: Timer | None = None
        self._tick_at = float("inf")
        world.network.listen(self.address, self, self._accept)

    def _lead(self) -> None:
        journal, world = self._journal, self.world
        self.opened = journal.open()
        world.masters_started += 1
        self.state = membership.new_state(
            world.limits,
            b"secret of %d %d" % (world.seed, world.masters_started),
            term=self.opened,
            floor=journal.epoch,
            next_mid=journal.next_mid,
            used=dict(journal.used),
            now=world.clock.now,
            elected=world.odd.elected,
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
            self._lead()
            self._arm()
        super().wake()

    # ---- stepping ------------------------------------------------------------------------------------

    def apply(self, event: Event) -> None:
        if not self.alive:
            return
        commands = membership.step(self.state, self.clock.now, event)
        stop = len(commands) + 1
        if self.fuse >= 0:
            self.fuse -= 1
            if self.fuse < 0:
                stop = self.world.random.randint(0, len(commands))
        elif self.trap is not None and any(isinstance(command, self.trap) for command in commands):
            stop = len(commands)
        try:
            for command in commands[:stop]:
                self._carry_out(command)
                self.world.judge.decides(self.name, command)
        except Fenced:
            self.world.note(self.name, "is fenced and stops")
            self.world.kill_master(self)
            return
        if stop <= len(commands):
            conns = list(self._batches)
            told = self.world.random.randint(0, len(conns))
            ends = [self._connections.get(conn) for conn in conns[:told]]
            for conn in conns[told:]:
                del self._batches[conn]
            self.flush()
            self.world.kill_master(self)
            self.world.alone_with_the_news([end.other.process.name for end in ends if end is not None])
            return
        self.flush()
        self._arm()

    def _carry_out(self, command: Any) -> None:
        match command:
            case Broadcast(conns, message):
                for conn in conns:
                    self._add(conn, message)
            case Send(conn, message):
                self._add(conn, message)
            case Announce(to, epoch):
                for conn, mid in to:
                    self._add(conn, msgspec.structs.replace(epoch, to=mid))
            case Close(conn, reason):
                if reason:
                    self._add(conn, m.Bye(reason))
                self.flush()
                end = self._connections.pop(conn, None)
                if end is not None:
                    end.close("the master closed the connection")
            case Persist():
                self._journal.persist(self.opened, command)
            case Record(_, epoch, kind, text):
                self.world.note(self.name, f"[{kind}] {text}")
            case StepDown(reason, term):
                self._journal.term = max(self._journal.term, term)
                raise Fenced(reason)
            case SendStatus():
                raise AssertionError("nobody asks for a status here")

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
        at = membership.next_deadline(self.state)
        if at < self._tick_at or self._tick is None:
            if self._tick is not None:
                self._tick.cancel()
            self._tick, self._tick_at = None, at
            if at < float("inf"):
                self._tick = self.after(max(0.0, at - self.clock.now), self._ticked)

    def _ticked(self) -> None:
        self._tick, self._tick_at = None, float("inf")
        self.apply(Tick())
        late = membership.next_deadline(self.state)
        assert not self.alive or late > self.clock.now, "a tick left something undone"

    # ---- connections ---------------------------------------------------------------------------------

    def _accept(self, end: End) -> None:
        number, self._next_conn = self._next_conn, self._next_conn + 1
        self._connections[number] = end
        end.on_message = lambda message: self._got(number, message)
        end.on_close = lambda reason: self._lost(number, reason)

    def _got(self, number: int, message: m.FromPeer) -> None:
        if number in self._connections:
            end = self._connections[number]
            self.world.heard(self.name, end.other.process.name, message)
            self.apply(Received(number, self.world.wire(message, m.FromPeer)))

    def _lost(self, number: int, reason: str) -> None:
        if self._connections.pop(number, None) is not None:
            self.world.note(self.name, f"connection {number} is lost: {reason}")
            self.apply(Disconnected(number, reason))

    def sizes(self) -> dict[str, int]:
        """How much it remembers."""
        state = self.state
        groups = state.groups.values()
        return {
            "connections": len(state.connections),
            "members": len(state.members),
            "asked": len(state.asked),
            "pending": sum(len(group.pending) for group in groups),
            "voids": sum(len(group.voids) for group in groups),
            "digest_failures": sum(len(group.digest_failures) for group in groups),
            "p2p": sum(len(group.p2p.waiting) + len(group.p2p.running) for group in groups),
            "joining": sum(len(group.joining) for group in groups),
            "rebuild": sum(group.rebuild is not None for group in groups),
        }
