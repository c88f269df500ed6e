"""A world that is made anew in the same processes: without one of them, of one alone, of all again, after a death."""

from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ErrorType

from tests.torch.ranks import Ranks, run
from wancoll import ConfigError, OperationAborted, TimeoutError


def anew(uuid, handles, seconds=50.0):
    """What torch 2.14's dist._reconfigure() calls; 2.13 has none."""
    options = SimpleNamespace(uuid=uuid, handles=handles, timeout=timedelta(seconds=seconds), hints={})
    return dist.group.WORLD.reconfigure(options).wait()


def gathered(store, rank, size, text, key):
    store.set(f"{key}/{rank}", text)
    return [store.get(f"{key}/{each}").decode() for each in range(size)]


def total():
    x = torch.full((4,), dist.get_rank() + 1.0)
    dist.all_reduce(x)
    return x.tolist()


def worlds(rank, size):
    dist.init_process_group("wancoll", timeout=timedelta(seconds=50))
    world = dist.group.WORLD
    store = world.get_group_store()
    assert world.supports_reconfigure
    assert world.get_error() is ErrorType.SUCCESS
    handles = gathered(store, rank, size, world.get_reconfigure_handle(), "handles")

    # The list's order is the rank order.
    assert anew(1, handles[::-1])
    assert (dist.get_rank(), dist.get_world_size()) == (size - 1 - rank, size)
    assert total() == [sum(range(1, size + 1))] * 4
    half = dist.new_group([0, 1])
    if dist.get_rank() < 2:
        x = torch.ones(1)
        dist.all_reduce(x, group=half)
        assert x.item() == 2
        with pytest.raises(ConfigError, match="new_group"):
            half.get_reconfigure_handle()

    # Each alone, then a set: the same order everywhere. Who made more groups meanwhile makes new ones with the others.
    anew(10 + rank, [handles[rank]])
    assert (dist.get_rank(), dist.get_world_size(), total()) == (0, 1, [1.0] * 4)
    for _ in range(rank):
        dist.new_group([0])
    anew(20, set(handles))
    assert dist.get_process_group_ranks(None) == list(range(size))
    everyone = dist.new_group()
    x = torch.ones(1)
    dist.all_reduce(x, group=everyone)
    assert x.item() == size
    assert dist.get_rank() == sorted(handles).index(handles[rank])
    assert total() == [sum(range(1, size + 1))] * 4

    # What cannot be leaves the world as it is.
    for uuid, wrong, text in (
        (20, handles, "uuid 20 was already used"),
        (21, [*handles, handles[0]], "each once"),
        (22, [each for each in handles if each != handles[rank]], "this process's 0 times"),
        (23, [handles[rank], "gloo:0:5:0:"], "no handle of wancoll"),
    ):
        with pytest.raises(ConfigError, match=text):
            anew(uuid, wrong)
    assert total() == [sum(range(1, size + 1))] * 4

    # abort() refuses what follows, until the next world.
    told = []
    world.register_abort_hook(1, lambda: told.append(1))
    world.register_abort_hook(2, lambda: told.append(2))
    world.unregister_abort_hook(2)
    world.abort()
    assert told == [1]
    assert world.get_error() is ErrorType.SUCCESS
    with pytest.raises(OperationAborted, match="the group was aborted"):
        total()
    anew(30, handles)
    assert total() == [sum(range(1, size + 1))] * 4
    dist.destroy_process_group()


@pytest.mark.check
@pytest.mark.timeout(200)
@pytest.mark.parametrize("private", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_shrinks_and_grows(sockets, private):
    """Over daemons that run already, or with daemons and masters of each world's own."""
    run(3, worlds, env={} if private else sockets, timeout=150)


def survive(rank, size):
    """One dies; its world ends with an error, and what is left makes another one. The first process is the dead one."""
    dist.init_process_group("wancoll", timeout=timedelta(seconds=50))
    world = dist.group.WORLD
    everyone = [None] * size
    dist.all_gather_object(everyone, world.get_reconfigure_handle())
    told = []
    world.register_abort_hook(0, lambda: told.append(True))
    yield "ready"
    with pytest.raises(OperationAborted, match="rank-0"):
        for _ in iter(total, None):
            pass
    assert told == [True]
    assert world.get_error() is ErrorType.COMM_ERROR
    with pytest.raises(TimeoutError):
        anew(5, everyone, seconds=1.5)  # with the dead one
    with pytest.raises(TimeoutError):
        total()
    anew(6, everyone[1:])
    assert (dist.get_rank(), dist.get_world_size(), world.get_error()) == (rank - 1, size - 1, ErrorType.SUCCESS)
    result = total()
    pair = dist.new_group([0, 1])  # torch's first store was the dead one's
    x = torch.ones(1)
    dist.all_reduce(x, group=pair)
    assert x.item() == 2
    dist.destroy_process_group()
    return result


@pytest.mark.check
@pytest.mark.timeout(200)
def test_survivors_of_a_death():
    with Ranks(3, survive) as ranks:
        for rank in range(3):
            assert ranks.next(rank) == "ready"
        ranks.kill(0)
        assert [ranks.result(rank, 150) for rank in (1, 2)] == [[3.0] * 4] * 2


def before_the_first(rank, size):
    """As init_process_group(enable_reconfigure=True) makes it."""
    from wancoll.torch.backend.process_group import WancollProcessGroup

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    group = WancollProcessGroup(store, 0, 1, 20.0, "later", None, True)
    with pytest.raises(ConfigError, match="no world yet"):
        group.allreduce([torch.ones(1)])
    with pytest.raises(ConfigError, match="no world yet"):
        WancollProcessGroup(store, 0, 1, 20.0, "of it", group)
    group.set_timeout(timedelta(seconds=30))
    group.reconfigure(SimpleNamespace(uuid=1, handles=[group.get_reconfigure_handle()], timeout=None)).wait()
    x = torch.ones(1)
    group.allreduce([x]).wait()
    group.shutdown()
    with pytest.raises(OperationAborted, match="shut down"):
        group.allreduce([x])
    with pytest.raises(OperationAborted, match="shut down"):
        WancollProcessGroup(store, 0, 1, 20.0, "of it", group)


@pytest.mark.check
@pytest.mark.timeout(200)
def test_no_world_before_the_first():
    run(1, before_the_first)
