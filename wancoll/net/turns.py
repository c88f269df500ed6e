"""Fair queue for steps of handshakes, which run in threads: an address that cost much CPU of late waits for others."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TypeVar

import trio

from wancoll.net.threads import in_thread

T = TypeVar("T")

_HALF = 10.0  # seconds after which half of what an address has cost is forgotten
_LOOK = 1.0  # seconds between such looks
_LEAST = 0.001  # seconds; less is nothing
_DEAR = 1.0  # seconds that no honest address costs: hundreds of handshakes


class Turns:
    """Fair queue for steps of handshakes.

    A stranger can make one step last a second, and come again at once. In plain order of arrival a few strangers would
    keep out everybody else. Hence two threads: one serves addresses that have cost little, in order of arrival; the
    other serves costly addresses, the one that has cost least first.
    """

    def __init__(self) -> None:
        self._threads = trio.CapacityLimiter(2)
        self._busy: set[bool] = set()  # whether the thread for dear ones is, and that for the others
        self._waiting: dict[str, deque[_Turn]] = {}  # by address, that of who came first before others
        self._cost: dict[str, float] = {}  # seconds, by address
        self._looked = 0.0

    async def run(self, address: str, step: Callable[..., T], *arguments: object) -> T:
        """`step(*arguments)` in a thread, when it is *address*'s turn.

        What has begun there ends there, also for who is cancelled.

        Raises:
            OSError: no thread can be started now.
        """
        dear = await self._turn(address)
        began = trio.current_time()
        try:
            return await in_thread(step, *arguments, limiter=self._threads)
        finally:
            self._charge(address, began, trio.current_time())
            self._give_on(dear)

    async def _turn(self, address: str) -> bool:
        """Wait; in which thread it is then."""
        dear = self._is_dear(address)
        if dear not in self._busy:
            self._busy.add(dear)
            return dear
        mine = _Turn()
        self._waiting.setdefault(address, deque()).append(mine)
        try:
            await mine.has_come.wait()
        except trio.Cancelled:
            if mine.has_come.is_set():  # between the cancellation and now
                self._give_on(mine.dear)
            else:
                self._remove(address, mine)
            raise
        return mine.dear

    def _give_on(self, done: bool) -> None:
        self._busy.discard(done)
        for dear in {False, True} - self._busy:  # who waits may have become dear meanwhile, or cheap
            found = [one for one in self._waiting if self._is_dear(one) is dear]
            if found:
                address = min(found, key=lambda one: self._cost[one]) if dear else found[0]
                first = self._waiting[address][0]
                self._remove(address, first)
                self._busy.add(dear)
                first.dear = dear
                first.has_come.set()

    def _is_dear(self, address: str) -> bool:
        return self._cost.get(address, 0.0) >= _DEAR

    def _remove(self, address: str, one: _Turn) -> None:
        self._waiting[address].remove(one)
        if not self._waiting[address]:
            del self._waiting[address]

    def _charge(self, address: str, began: float, now: float) -> None:
        self._cost[address] = self._cost.get(address, 0.0) + now - began
        if now - self._looked >= _LOOK:
            left = 0.5 ** ((now - self._looked) / _HALF)
            self._cost = {one: cost * left for one, cost in self._cost.items() if cost * left > _LEAST}
            self._looked = now


class _Turn:
    """A place in the queue."""

    def __init__(self) -> None:
        self.has_come, self.dear = trio.Event(), False
