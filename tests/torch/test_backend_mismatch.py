"""Ranks that call different things: a named error on all of them, and the next call goes through."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

import wancoll
from tests.torch.ranks import run
from wancoll.client.connection import Connection
from wancoll.torch.backend.torch_tensors import shortened


def both_fail(first, second):
    """Rank 0 makes one call and rank 1 the other, and both hear of it."""
    with pytest.raises(wancoll.CollectiveMismatch):
        (second if dist.get_rank() else first)()
    x = torch.ones(1)
    dist.all_reduce(x)
    assert x.item() == 2


def whole():
    return torch.tensor([1, 3], dtype=torch.int32)


def two(dtype):
    return torch.ones(2).to(dtype)


def gathered(x):
    dist.all_gather([torch.empty_like(x) for _ in range(2)], x)


def scattered(cuts):
    blocks = [torch.ones(n, dtype=torch.int32) for n in cuts]
    dist.reduce_scatter(torch.empty_like(blocks[dist.get_rank()]), blocks, op=ReduceOp.BOR)


def exchanged(splits):
    rank, y = dist.get_rank(), torch.zeros(2)
    dist.all_to_all_single(y, torch.arange(2.0) + 10 * rank, *splits)
    assert y.tolist() == [rank, 10 + rank]


def calls(rank, size):
    dist.init_process_group("wancoll", timeout=timedelta(seconds=50))
    both_fail(lambda: dist.all_reduce(whole(), ReduceOp.BAND), lambda: dist.all_reduce(whole(), ReduceOp.BOR))
    both_fail(lambda: dist.all_reduce(whole(), ReduceOp.BOR), lambda: gathered(whole()))
    both_fail(lambda: dist.reduce(whole(), 0, ReduceOp.BOR), lambda: dist.gather(whole(), None, dst=0))
    both_fail(lambda: scattered([1, 3]), lambda: scattered([2, 2]))
    scaled = dist._make_nccl_premul_sum(0.5)
    both_fail(lambda: dist.all_reduce(two(torch.float32), scaled), lambda: dist.all_reduce(two(torch.float32)))
    both_fail(
        lambda: dist.all_reduce(two(torch.bool), ReduceOp.MAX), lambda: dist.all_reduce(two(torch.uint8), ReduceOp.MAX)
    )
    both_fail(lambda: dist.broadcast(two(torch.bool), 0), lambda: dist.broadcast(two(torch.uint8), 0))
    both_fail(lambda: gathered(two(torch.float8_e4m3fn)), lambda: gathered(two(torch.float8_e5m2)))
    both_fail(lambda: dist.send(two(torch.bool), 1), lambda: dist.recv(two(torch.uint8), 0))
    # all_to_all: with and without sizes is one call; what does not fit leaves nothing behind.
    for splits in ((), ([1, 1], [1, 1]), (None, [1, 1])):
        exchanged(splits if rank else ())
    both_fail(lambda: exchanged(()), lambda: dist.all_reduce(torch.ones(1)))
    exchanged(())
    blocks = [torch.zeros(2 - rank), torch.zeros(1 + rank)]
    given = [torch.zeros(2), torch.ones(0)] if rank == 0 else [torch.ones(1), torch.zeros(2)]
    with pytest.raises(wancoll.CollectiveMismatch):
        dist.all_to_all(blocks, given)
    exchanged(())
    for splits in ((), ([1, 1], [1, 1])):
        y = torch.arange(2.0) + 10 * rank
        dist.all_to_all_single(y, y, *splits)
        assert y.tolist() == [rank, 10 + rank]
    y = torch.arange(8.0)
    dist.all_reduce(y[::2])
    assert y.tolist() == [0, 1, 4, 3, 8, 5, 12, 7]
    # Lists that do not fit are refused where they are.
    one, three = torch.ones(1), torch.ones(3)
    for call in (
        lambda: dist.scatter(torch.zeros(2), [one, three], src=rank),
        lambda: dist.gather(torch.zeros(2), [one, three], dst=rank),
        lambda: dist.all_to_all([three, three], [one, one]),
    ):
        with pytest.raises(wancoll.ConfigError, match="do not fit"):
            call()
    exchanged(())
    refused(rank)
    dist.destroy_process_group()


def refused(rank):
    """A call of several parts, of which one rank cannot post one: none is posted, or all ranks hear of it."""
    world, store = dist.group.WORLD, dist.group.WORLD.get_group_store()
    x, y = torch.full((2,), rank + 1.0), torch.full((3,), 5.0)
    if rank == 1:
        work = dist.irecv(y, 0)
        for tensors in ([x, y], [x, x]):
            with pytest.raises(wancoll.ConfigError, match=r"all_reduce_coalesced.*(in use|share memory)"):
                world.allreduce_coalesced(tensors)
        store.set("refused", "1")
        work.wait()
    else:
        work = world.allreduce_coalesced([x, y])
        store.wait(["refused"])
        dist.send(torch.ones(3), 1)
    work = world.allreduce_coalesced([x, y]) if rank == 1 else work
    work.wait()
    assert (x.tolist(), y.tolist()) == ([3.0] * 2, [6.0] * 3)

    post, posted = Connection.post, []

    def full(self, work, deadline=None):
        posted.append(work)
        if len(posted) == 2:
            raise wancoll.ArenaFull("the arena has no room")
        post(self, work, deadline)

    blocks = [[torch.zeros(2), torch.zeros(3)] for _ in range(2)]
    for call in (
        lambda: dist.group.WORLD.allgather_coalesced(blocks, [x, y]).wait(),
        lambda: exchanged(()),
    ):
        posted.clear()
        Connection.post = full if rank == 1 else post
        with pytest.raises(wancoll.WancollError, match=r"the arena has no room") as caught:
            call()
        Connection.post = post
        assert type(caught.value).__name__ == ("ArenaFull" if rank else "CollectiveMismatch")
        z = torch.ones(1)
        dist.all_reduce(z)
        assert z.item() == 2
    exchanged(())


def test_what_the_wire_does_not_say_by_itself_is_compared_too(sockets):
    run(2, calls, env=sockets)


def test_a_long_label_keeps_what_tells_it_from_others():
    one, other = (shortened("reduce_scatter BOR of torch.int32, cut to " + str([*range(100), n])) for n in (1, 2))
    assert one != other
    assert len(one) <= 128
    assert shortened("BOR") == "BOR"
