"""Whose turn it is in the thread for handshakes."""

from __future__ import annotations

import threading
import time
from collections.abc import AsyncIterator

import pytest
import trio
import trio.testing

from wancoll.net.turns import Turns


class Held:
    """Turns of which somebody else has the first, until it is let go; who comes later waits in the order of come()."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self.turns, self.order = Turns(), list[str]()
        self._nursery, self._ends, self._had = nursery, threading.Event(), trio.Semaphore(0)

    async def hold(self) -> None:
        """Begin."""
        self._nursery.start_soon(self.turns.run, "first", self._ends.wait, 60)
        await trio.testing.wait_all_tasks_blocked()

    async def come(self, *addresses: str) -> None:
        """One after the other."""
        for address in addresses:
            self._nursery.start_soon(self._one, address)
            await trio.testing.wait_all_tasks_blocked()

    async def _one(self, address: str) -> None:
        await self.turns.run(address, self.order.append, address)
        self._had.release()

    async def let_go(self, count: int) -> list[str]:
        """The order in which those that waited had their turn."""
        self._ends.set()
        for _ in range(count):
            await self._had.acquire()
        return self.order


@pytest.fixture
async def held() -> AsyncIterator[Held]:
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            made = Held(nursery)
            yield made
            made._ends.set()


async def test_who_came_first_is_first_among_equals(held: Held) -> None:
    await held.hold()
    await held.come("a", "b", "c")
    assert await held.let_go(3) == ["a", "b", "c"]


async def test_an_address_that_has_cost_much_waits_for_others(held: Held) -> None:
    for _ in range(2):
        await held.turns.run("dear", time.sleep, 0.05)
    await held.turns.run("cheap", time.sleep, 0.001)
    await held.hold()
    await held.come("dear", "dear", "dear", "cheap", "new")
    assert await held.let_go(5) == ["new", "cheap", "dear", "dear", "dear"]


async def test_what_an_address_has_cost_is_forgotten() -> None:
    turns = Turns()
    turns._charge("first of all", 0.0, 1000.0)
    turns._charge("dear", 990.5, 1000.5)
    turns._charge("cheap", 1000.0, 1000.5)
    assert turns._cost == {"dear": 10.0, "cheap": 0.5}
    turns._charge("other", 1020.0 - 0.0001, 1020.0)
    assert turns._cost == pytest.approx({"dear": 2.5, "cheap": 0.125}, rel=0.1)  # what is nothing is not kept


async def test_who_is_cancelled_is_left_out(held: Held) -> None:
    await held.hold()
    with trio.move_on_after(0.05) as scope:
        await held.turns.run("gone", held.order.append, "gone")
    assert scope.cancelled_caught
    await held.come("a", "b")
    assert await held.let_go(2) == ["a", "b"]
    await held.turns.run("c", held.order.append, "c")
    assert (held.order, held.turns._waiting) == (["a", "b", "c"], {})


async def test_who_is_cancelled_just_before_its_turn_gives_it_on() -> None:
    turns, order, gone = Turns(), list[str](), trio.CancelScope()

    async def who_is_cancelled() -> None:
        with gone:
            await turns.run("gone", order.append, "gone")

    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            await turns._turn("held")
            nursery.start_soon(who_is_cancelled)
            await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(turns.run, "b", order.append, "b")
            await trio.testing.wait_all_tasks_blocked()
            gone.cancel()
            turns._next()  # its turn, and it has not heard yet that it is cancelled
    assert gone.cancelled_caught
    assert (order, turns._waiting, turns._busy) == (["b"], {}, False)


async def test_a_step_that_fails_gives_its_turn_on(held: Held) -> None:
    with pytest.raises(ZeroDivisionError):
        await held.turns.run("a", lambda: 1 // 0)
    await held.turns.run("b", held.order.append, "b")
    assert held.order == ["b"]
