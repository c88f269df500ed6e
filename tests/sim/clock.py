"""Virtual time: what is to happen next, and processes that may be stopped, woken up and killed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from heapq import heappop, heappush
from math import inf
from random import Random

Call = Callable[[], None]


class Timer:
    """A call to come; cancel() forgets it."""

    __slots__ = ("call",)

    def __init__(self, call: Call) -> None:
        self.call: Call | None = call

    def cancel(self) -> None:
        self.call = None

    def fire(self) -> None:
        call, self.call = self.call, None
        if call is not None:
            call()


class Clock:
    """See the module.

    Args:
        random: of the seed; breaks ties where *shuffled*, else what was asked for first happens first.
        shuffled: whether the order of what happens at the same time is drawn.
    """

    def __init__(self, random: Random, *, shuffled: bool) -> None:
        self.now = 0.0
        self.events = 0
        self._random, self._shuffled = random, shuffled
        self._heap: list[tuple[float, float, int, Call]] = []
        self._count = 0

    def after(self, delay: float, call: Call) -> None:
        self.at(self.now + delay, call)

    def at(self, when: float, call: Call) -> None:
        self._count += 1
        tie = self._random.random() if self._shuffled else 0.0
        heappush(self._heap, (max(self.now, when), tie, self._count, call))

    def step(self, until: float) -> bool:
        """Let the next thing happen, if it does so by *until*."""
        heap = self._heap
        if not heap or heap[0][0] > until:
            return False
        self.now, _, _, call = heappop(heap)
        self.events += 1
        call()
        return True


class Process:
    """Something that runs on a host. While it is *asleep* (stopped) all that happens to it waits."""

    def __init__(self, clock: Clock, name: str, host: str) -> None:
        self.clock, self.name, self.host = clock, name, host
        self.alive, self.asleep = True, False
        self._backlog: deque[Call] = deque()

    def run(self, call: Call) -> None:
        """Let *call* happen here, now or when the process wakes up; not if it is dead by then."""
        if self.asleep:
            self._backlog.append(call)
        elif self.alive:
            call()

    def after(self, delay: float, call: Call) -> Timer:
        """A timer of this process."""
        timer = Timer(call)
        self.clock.after(delay, partial(self.run, timer.fire))
        return timer

    def at(self, when: float, call: Call) -> Timer | None:
        """The same, at a time; None: that is never."""
        if when == inf:
            return None
        timer = Timer(call)
        self.clock.at(when, partial(self.run, timer.fire))
        return timer

    def sleep(self) -> None:
        self.asleep = True

    def wake(self) -> None:
        self.asleep = False
        while self._backlog and not self.asleep:
            call = self._backlog.popleft()
            if self.alive:
                call()
