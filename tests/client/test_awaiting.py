"""`await work`, in asyncio and in trio."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import trio

import wancoll
from tests.client.fake_daemon import FakeDaemon
from tests.client.tools import until
from wancoll.client.communicator import Communicator
from wancoll.errors import WorldTooSmall


async def both(comm: Communicator, manual: FakeDaemon) -> list[Any]:
    """Two calls under way, the later one answered first; and all buckets of many tensors."""
    x, y = np.ones(5), np.ones(7)
    works = [comm.all_reduce(each, async_op=True) for each in (x, y)]
    manual.wait_for_posts(2)
    manual.answer(manual.posts[1])
    second = await works[1]
    manual.answer(manual.posts[0])
    first = await works[0]
    assert await works[0] == first  # again is fine
    assert (first.out is x, second.out is y) == (True, True)
    many = comm.all_reduce_many([np.ones(3), np.ones(4, np.float32)], async_op=True)
    manual.answer_all(2)
    return [first.seq, second.seq, len((await many).receipts), x.sum(), y.sum()]


async def failing(comm: Communicator, manual: FakeDaemon) -> None:
    work = comm.all_reduce(np.ones(3), async_op=True)
    manual.fail(manual.next_post())
    await work


@pytest.mark.parametrize("run", [lambda call, *given: asyncio.run(call(*given)), trio.run], ids=["asyncio", "trio"])
def test_works_are_awaited(held: Communicator, manual: FakeDaemon, run: Any) -> None:
    assert run(both, held, manual) == [1, 2, 2, 10, 14]
    with pytest.raises(WorldTooSmall):
        run(failing, held, manual)


def test_other_tasks_run_meanwhile_and_one_may_give_up(held: Communicator, manual: FakeDaemon) -> None:
    """The call goes on then."""
    x = np.ones(5)

    async def in_asyncio() -> wancoll.Work:
        work = held.all_reduce(x, async_op=True)
        waiting = asyncio.ensure_future(work)
        await asyncio.sleep(0.01)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        return work

    async def in_trio() -> wancoll.Work:
        work = held.all_reduce(x, async_op=True)
        with trio.move_on_after(0.01):
            await work
        return work

    for number in (1, 2):
        work = asyncio.run(in_asyncio()) if number == 1 else trio.run(in_trio)
        assert not work.done()
        manual.answer(manual.next_post())
        until(work.done)
        assert work.wait(0).seq == number
        assert (x == 2**number).all()


def test_without_a_loop(held: Communicator) -> None:
    work = held.all_reduce(np.ones(3), async_op=True)
    with pytest.raises(RuntimeError, match="no running event loop"):
        work.__await__().send(None)
