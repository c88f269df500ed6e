"""Connections in memory: FIFO both ways with delays, that stall where the network is cut or clogged, and break."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import inf
from random import Random
from typing import Any

from tests.sim.clock import Clock, Process
from wancoll.wire.messages import Way


@dataclass(frozen=True, slots=True)
class Closed:
    """The last thing in a direction: the other end is closed."""

    reason: str


class End:
    """One end of a connection; *flight* is what is under way to it."""

    def __init__(self, network: Network, process: Process, kind: str, timeout: float) -> None:
        self.network, self.process, self.kind = network, process, kind
        self.other: End = self
        self.open = True
        self.dead = False  # its host is gone without a word
        self.clogged = 0
        self.on_message: Callable[[Any], None] = lambda message: None
        self.on_close: Callable[[str], None] = lambda reason: None
        self.flight: deque[Any] = deque()
        self._timeout = timeout  # of unacknowledged data
        self._newest = 0.0
        self._waiting = 0  # arrivals that came while the direction was stalled
        self._stalled_at = -1.0
        self._unheard = False  # it is closed, and the other end does not know
        self.relay: Process | None = None  # through which it goes

    def send(self, message: Any) -> None:
        if self.open:
            self.other._add(message)

    def close(self, reason: str) -> None:
        """Close this end; what was sent still arrives, then the other end learns of it."""
        if self.open:
            self.open = False
            self.other._add(Closed(reason))
            self.network.forget(self)

    def reset(self, reason: str) -> None:
        """Close this end; some of the newest bytes that it sent are lost."""
        if self.open:
            lost = self.network.random.randint(0, len(self.other.flight))
            for _ in range(lost):
                self.other.flight.pop()
            self.close(reason)

    def broken(self, reason: str) -> None:
        """This end finds the connection broken."""
        if self.open:
            self.reset(reason)
            self.on_close(reason)

    def broken_unheard(self, reason: str) -> None:
        """This end finds the connection broken; the other one hears nothing of it before it sends something."""
        if self.open:
            self.open, self._unheard = False, True
            self.network.forget(self)
            self.on_close(reason)

    # ---- what comes in -------------------------------------------------------------------------------

    def _add(self, message: Any) -> None:
        if self._unheard:
            back = self.network.delay(self.process.host, self.other.process.host)
            other = self.other
            self.network.clock.after(back, lambda: other.process.run(lambda: other.broken("connection reset by peer")))
            return
        network = self.network
        there = network.clock.now + network.delay(self.other.process.host, self.process.host)
        if there > self._newest:
            self._newest = there
        self.flight.append(message)
        network.clock.at(self._newest, self._arrive)

    def _arrive(self) -> None:
        if not self.flight:
            return  # lost with a reset
        process, here, there = self.process, self.process.host, self.other.process.host
        if self._waiting or self.clogged or self.dead or self.network.blocked(there, here):
            self._waiting += 1
            if self._stalled_at < 0:
                self._stalled_at = self.network.clock.now
                self._watch_acknowledgement()
            return
        if self.network.blocked(here, there):
            self._watch_acknowledgement()
        message = self.flight.popleft()
        if process.asleep:
            process.run(partial(self._got, message))
        elif process.alive:
            self._got(message)

    def _got(self, message: Any) -> None:
        if not self.open:
            return
        if isinstance(message, Closed):
            self.open = False
            self.network.forget(self)
            self.on_close(message.reason)
        else:
            self.on_message(message)

    def kick(self) -> None:
        """The network is open again: what waited comes now."""
        if self._waiting and not (
            self.clogged or self.dead or self.network.blocked(self.other.process.host, self.process.host)
        ):
            waiting, self._waiting, self._stalled_at = self._waiting, 0, -1.0
            for _ in range(waiting):
                self.network.clock.after(0.0, self._arrive)

    def _watch_acknowledgement(self) -> None:
        """The sender gives up if its data is not acknowledged in time."""
        here, there = self.process.host, self.other.process.host
        stalled, blocked = self._stalled_at, self.network.blocked_at(here, there)

        def check() -> None:
            still = (stalled >= 0 and self._stalled_at == stalled) or (
                blocked >= 0 and self.network.blocked_at(here, there) == blocked
            )
            if still:
                self.other.process.run(lambda: self.other.broken("timed out"))

        if self._timeout < inf:
            self.network.clock.after(self._timeout, check)


class Network:
    """Hosts, named by strings; every pair reaches each other but for what is blocked, in one direction at a time.

    Args:
        clock: the world's.
        random: of the seed.
        delays: (lowest, highest) seconds of one way.
        spikes: share of messages that take three times as long.
    """

    def __init__(self, clock: Clock, random: Random, delays: tuple[float, float], spikes: float) -> None:
        self.clock, self.random = clock, random
        self._delays, self._spikes = delays, spikes
        self._blocked: dict[tuple[str, str], list[float]] = {}  # since when, once for each fault
        self._listeners: dict[str, tuple[Process, Callable[[End], None]]] = {}
        self.ends: dict[End, None] = {}  # open ones
        self.late: Callable[[End], None] | None = None  # is given the accepting end of each new lane
        self._filtered: dict[tuple[str, str, int], bool] = {}  # lanes of a channel, by who dials whom; True: no answer
        self.walls: dict[tuple[str, str], Way] = {}  # the best way through, where it is not a dial from host to host
        self.relay: Callable[[], Process | None] = lambda: None  # where two daemons can meet now

    def delay(self, source: str, target: str) -> float:
        if source == target:
            return 0.0
        low, high = self._delays
        found = low + (high - low) * self.random.random() if high > low else low
        return found * 3 if self._spikes and self.random.random() < self._spikes else found

    # ---- faults --------------------------------------------------------------------------------------

    def blocked(self, source: str, target: str) -> bool:
        return (source, target) in self._blocked

    def blocked_at(self, source: str, target: str) -> float:
        return self._blocked.get((source, target), [-1.0])[0]

    def block(self, source: str, target: str) -> None:
        if source != target:
            self._blocked.setdefault((source, target), []).append(self.clock.now)

    def unblock(self, source: str, target: str) -> None:
        since = self._blocked.get((source, target))
        if since:
            since.pop()
            if not since:
                del self._blocked[source, target]
                self._kick()

    def filter(self, source: str, target: str, channel: int, *, silent: bool) -> None:
        """Lanes of this channel do not come through when *source* dials: refused, or without an answer."""
        self._filtered[source, target, channel] = silent

    def unfilter(self, channel: int) -> None:
        self._filtered = {key: silent for key, silent in self._filtered.items() if key[2] != channel}

    def filtered(self, source: str, target: str, channel: int) -> bool | None:
        """Whether such a lane is left without an answer (True) or refused (False); None: it comes through."""
        return self._filtered.get((source, target, channel))

    def heal(self) -> None:
        """All that stalls goes on."""
        self._blocked.clear()
        self.late = None
        for end in self.ends:
            end.clogged = 0
        self._kick()

    def _kick(self) -> None:
        for end in list(self.ends):
            end.kick()

    def forget(self, end: End) -> None:
        self.ends.pop(end, None)

    def vanish(self, process: Process) -> None:
        """The process' host loses power: nobody is told."""
        for end in list(self.ends):
            if end.process is process:
                end.open, end.dead = False, True
                self.forget(end)

    def crash(self, process: Process) -> None:
        """The process dies: its connections are closed by its host."""
        for end in list(self.ends):
            if end.process is process:
                end.reset("connection reset by peer")
            elif end.relay is process:
                end.process.run(lambda end=end: end.broken("the relay is gone"))

    def revive(self, host: str) -> None:
        """The host is back and knows no connection of before."""
        for end in list(self.ends):
            if end.other.dead and end.other.process.host == host:
                end.process.run(lambda end=end: end.broken("connection reset by peer"))

    # ---- connections ---------------------------------------------------------------------------------

    def listen(self, address: str, process: Process, accept: Callable[[End], None]) -> None:
        self._listeners[address] = process, accept

    def connect(
        self,
        process: Process,
        address: str,
        kind: str,
        timeout: float,
        done: Callable[[End | None], None],
        way: Way = Way.direct,
    ) -> None:
        """Dial *address*; done(end), or done(None) if nobody listens there. Not called where the network is cut."""
        listener = self._listeners.get(address)
        there = listener[0].host if listener is not None else address

        def arrive() -> None:
            relay = self.relay() if way else None
            if self.blocked(process.host, there) or self.blocked(there, process.host):
                return
            if way < self.walls.get((process.host, there), Way.direct) or (way and relay is None):
                return
            found = self._listeners.get(address)
            back = self.delay(there, process.host)
            if found is None or not found[0].alive:
                self.clock.after(back, lambda: process.run(lambda: done(None)))
                return
            accepting, accept = found
            ours, theirs = End(self, process, kind, timeout), End(self, accepting, kind, timeout)
            ours.other, theirs.other = theirs, ours
            ours.relay = theirs.relay = relay if way is Way.relayed else None
            self.ends[ours] = self.ends[theirs] = None
            accepting.run(lambda: accept(theirs))
            if kind == "lane" and self.late is not None:
                self.late(theirs)

            def answered() -> None:
                done(ours)
                if not ours.open:  # it broke before its dialler knew of it
                    ours.on_close("connection reset by peer")

            self.clock.after(back, lambda: process.run(answered) if process.alive else ours.close("gone"))

        self.clock.after(self.delay(process.host, there), arrive)
