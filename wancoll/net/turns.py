"""Whose turn it is: steps of handshakes run in one thread, and whose address has cost much of late waits for others."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TypeVar

import trio

T = TypeVar("T")

_HALF = 10.0  # seconds after which half of what an address has cost is forgotten
_LOOK = 1.0  # seconds between such looks
_LEAST = 0.001  # seconds; less is nothing


class Turns:
    """See the module.

    A stranger can make one step as long as a second, and come again at once. Were who came first always the next one,
    a few of them would keep out everybody else.
    """

    def __init__(self) -> None:
        self._thread = trio.CapacityLimiter(1)
        self._busy = False
        self._waiting: dict[str, deque[trio.Event]] = {}  # by address, that of who came first before others
        self._cost: dict[str, float] = {}  # seconds, by address
        self._looked = 0.0

    async def run(self, address: str, step: Callable[..., T], *arguments: object) -> T:
        """`step(*arguments)` in the thread, when it is *address*'s turn.

        What has begun there ends there, also for who is cancelled.
        """
        await self._turn(address)
        began = trio.current_time()
        try:
            return await trio.to_thread.run_sync(step, *arguments, limiter=self._thread)
        finally:
            self._charge(address, began, trio.current_time())
            self._next()

    async def _turn(self, address: str) -> None:
        if not self._busy:
            self._busy = True
            return
        mine = trio.Event()
        self._waiting.setdefault(address, deque()).append(mine)
        try:
            await mine.wait()
        except trio.Cancelled:
            if mine.is_set():  # it was this task's turn between the cancellation and now
                self._next()
            else:
                self._remove(address, mine)
            raise

    def _next(self) -> None:
        self._busy = bool(self._waiting)
        if self._busy:
            address = min(self._waiting, key=lambda one: self._cost.get(one, 0.0))
            first = self._waiting[address][0]
            self._remove(address, first)
            first.set()

    def _remove(self, address: str, one: trio.Event) -> None:
        self._waiting[address].remove(one)
        if not self._waiting[address]:
            del self._waiting[address]

    def _charge(self, address: str, began: float, now: float) -> None:
        self._cost[address] = self._cost.get(address, 0.0) + now - began
        if now - self._looked >= _LOOK:
            left = 0.5 ** ((now - self._looked) / _HALF)
            self._cost = {one: cost * left for one, cost in self._cost.items() if cost * left > _LEAST}
            self._looked = now
