"""Whose turn it is in the thread for handshakes."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator

import pytest
import trio
import trio.testing

from wancoll.net.turns import _DEAR, Turns


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


async def test_of_dear_addresses_that_is_next_which_has_cost_least(held: Held) -> None:
    held.turns._charge("", 0.0, trio.current_time())
    held.turns._cost = {"dear": 2 * _DEAR, "dearer": 3 * _DEAR, "first": 9 * _DEAR}
    await held.hold()
    await held.come("dearer", "dear", "dearer", "dear")
    assert await held.let_go(4) == ["dear", "dear", "dearer", "dearer"]


async def test_dear_addresses_keep_nobody_else_waiting(held: Held) -> None:
    """Those of which somebody waited before it was known that they are dear leave the line, too."""
    held.turns._charge("", 0.0, trio.current_time())
    held.turns._cost = {"dear": 2 * _DEAR}
    async with trio.open_nursery() as nursery:
        ends = threading.Event()
        nursery.start_soon(held.turns.run, "dear", ends.wait, 60)  # in the one thread
        await held.hold()  # in the other
        await held.come("new", "dear", "a", "new", "b")
        held.turns._cost["new"] = 2 * _DEAR
        assert await held.let_go(2) == ["a", "b"]
        ends.set()
        assert sorted(await held.let_go(3)) == ["a", "b", "dear", "new", "new"]
    assert (held.turns._waiting, held.turns._busy) == ({}, set())


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
            turns._give_on(False)  # its turn, and it has not heard yet that it is cancelled
    assert gone.cancelled_caught
    assert (order, turns._waiting, turns._busy) == (["b"], {}, set())


async def test_where_no_thread_can_be_started_it_fails_and_the_next_one_may_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def none_left(*_: object, **__: object) -> None:
        raise RuntimeError("can't start new thread")

    turns, order = Turns(), list[str]()
    with monkeypatch.context() as machine:
        machine.setattr(trio.to_thread, "run_sync", none_left)
        with pytest.raises(OSError, match="no thread can be started"):
            await turns.run("a", order.append, "a")
    await turns.run("b", order.append, "b")
    assert (order, turns._busy) == (["b"], set())


async def test_a_step_that_fails_gives_its_turn_on(held: Held) -> None:
    with pytest.raises(ZeroDivisionError):
        await held.turns.run("a", lambda: 1 // 0)
    await held.turns.run("b", held.order.append, "b")
    assert held.order == ["b"]
