"""Buckets of DistributedDataParallel lie in the arena: what moves, what does not, and what becomes of it."""

import gc
import os
import signal
import sys
import time
from datetime import timedelta
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import wancoll
from tests.torch.programs import same_everywhere
from tests.torch.ranks import Ranks, free_port, run
from tests.torch.test_backend_faults import children
from wancoll.client.memory.arena import Arena
from wancoll.client.memory.placement import Placement
from wancoll.client.memory.tensors import region
from wancoll.torch.backend.buckets import _EXCHANGE, handed_over, move

COUNT = 1 << 19  # 2 MiB of float32
moves = pytest.mark.skipif(not hasattr(torch.UntypedStorage, _EXCHANGE), reason="this torch exchanges no storages")


@pytest.fixture
def connection():
    """All that move() asks of one."""
    file = os.memfd_create("arena")
    os.ftruncate(file, 1 << 26)
    arena = Arena([file, os.eventfd(0)], 1 << 26)
    yield SimpleNamespace(arena=arena, pending=[])
    arena.close()


def held(arena):
    arena.take(1)  # takes back what died
    return arena.leased_bytes - arena.take(1).block.nbytes


@moves
def test_a_storage_keeps_its_views_and_gives_its_block_back(connection):
    arena = connection.arena
    x = torch.arange(COUNT, dtype=torch.float32)
    part = x[1000:].view(-1, 8)[3:5]
    assert move(x, connection)
    block = arena.find(x.data_ptr(), x.nbytes)
    assert arena.swappable(x.data_ptr(), x.nbytes) is block
    assert part.data_ptr() == block.address + 4 * 1024
    part[0, 0] = -1.0
    assert x[1024] == -1.0
    x[1024] = 1024.0
    assert torch.equal(x, torch.arange(COUNT, dtype=torch.float32))
    assert not move(x, connection), "it is there already"
    del x
    assert held(arena) == block.nbytes, "a view holds it"
    del part
    gc.collect()
    assert held(arena) == 0


@moves
def test_a_storage_that_is_shared_takes_memory_of_its_own(connection):
    x = torch.arange(COUNT, dtype=torch.float32)
    assert move(x, connection)
    x.share_memory_()
    assert connection.arena.find(x.data_ptr(), 1) is None
    assert held(connection.arena) == 0
    assert torch.equal(x, torch.arange(COUNT, dtype=torch.float32))
    assert not move(x, connection)


def test_what_others_may_point_to_stays(connection):
    whole = torch.zeros(COUNT)
    stays = {
        "a part": whole[1:],
        "numpy's": torch.from_numpy(np.zeros(COUNT, np.float32)),
        "shared": torch.zeros(COUNT).share_memory_(),
        "small": torch.zeros(COUNT // 4),
        "too large": torch.zeros(1 << 25),
    }
    for name, x in stays.items():
        before = x.data_ptr()
        assert not move(x, connection), name
        assert x.data_ptr() == before, name
    assert held(connection.arena) == 0


@moves
def test_what_cannot_move_has_room(connection):
    """Buckets of one model after another: at most a quarter of the arena is theirs."""
    arena = connection.arena
    buckets = [torch.zeros(COUNT) for _ in range(12)]
    assert sum(move(each, connection) for each in buckets) == 8
    assert arena.leased_bytes == arena.nbytes // 4
    largest = 3 * arena.nbytes // 8
    _input, _result = arena.take(largest), arena.take(largest)


def test_torch_without_the_exchange(connection, monkeypatch):
    """Its name is torch's own, and may change."""
    monkeypatch.setattr("wancoll.torch.backend.buckets._EXCHANGE", "_another_name")
    assert not move(torch.zeros(COUNT), connection)
    assert held(connection.arena) == 0


@moves
def test_what_a_pending_call_writes_stays(connection):
    x = torch.zeros(COUNT)
    of = region(x, "x")
    connection.pending.append(SimpleNamespace(placement=Placement(connection.arena, (of,), (of,))))
    assert not move(x, connection)
    pending, connection.pending = connection.pending, []
    assert not move(x, connection, [SimpleNamespace(pending=pending)])
    assert move(x, connection)


def test_the_environment_forbids_it(connection, monkeypatch):
    monkeypatch.setenv("WANCOLL_MOVE_BUCKETS", "0")
    assert not move(torch.zeros(COUNT), connection)


@moves
def test_a_fork_has_the_bytes_and_writes_its_own(connection):
    x = torch.full((COUNT,), 3.0)
    assert move(x, connection)
    seen = x.numpy()
    child = os.fork()
    if not child:
        connection.arena.disown()  # as of every connection that is open
        right = bool((seen == 3.0).all())
        seen[:] = 4.0
        os._exit(int(right and bool((seen == 4.0).all())))  # torch's threads are not there
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    assert (seen == 3.0).all()


def test_only_the_reducer_hands_over():
    seen = []
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda _grad: seen.append(handed_over(sys._getframe())))
    x.sum().backward()
    assert seen == [False]


# ---- in DistributedDataParallel --------------------------------------------------------------------------


def net():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(512, 512) for _ in range(5)))  # 1 MiB each


def train(model, rank, size, steps=4):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(steps):
        x = torch.randn(4, 512, generator=torch.Generator().manual_seed(step)).chunk(size)[rank]
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


def replicas(rank, size):
    """The same training with buckets that move and that do not, on views and not: the same bits, as one process."""
    dist.init_process_group("wancoll")
    arena = dist.group.WORLD._connection.arena
    alone = net()
    train(alone, 0, 1)
    ends = []
    for moves in ("0", "1"):
        for views in (False, True):
            os.environ["WANCOLL_MOVE_BUCKETS"] = moves
            model = DistributedDataParallel(net(), bucket_cap_mb=2.5, gradient_as_bucket_view=views)
            train(model, rank, size)
            same_everywhere(model)
            moved = held(arena)
            assert moved >= 5 << 20 if moves == "1" else not moved, moved
            if views and moves == "1":
                assert any(arena.find(each.grad.data_ptr(), 1) for each in model.parameters())
            ends.append(torch.cat([each.detach().reshape(-1) for each in model.parameters()]))
            model = None
            gc.collect()
            assert held(arena) == 0
    assert all(torch.equal(each, ends[0]) for each in ends)
    mine = torch.cat([each.detach().reshape(-1) for each in alone.parameters()])
    torch.testing.assert_close(ends[0], mine, rtol=1e-4, atol=1e-6)

    # What a user reduces stays where it is, from a hook, too.
    grads = []

    def reduce(x):
        before = x.grad.data_ptr()
        dist.all_reduce(x.grad)
        grads.append(x.grad.data_ptr() == before)

    x = torch.ones(COUNT, requires_grad=True)
    x.register_post_accumulate_grad_hook(reduce)
    x.sum().backward()
    assert grads == [True]
    assert float(x.grad.sum()) == size * COUNT
    dist.destroy_process_group()


def losses(rank, size, port):
    """A loss leaves a bucket as it was; it stays readable without its daemon, and moves to the next world's arena."""
    dist.init_process_group("wancoll", timeout=timedelta(seconds=50))
    world = dist.group.WORLD
    model = DistributedDataParallel(net(), bucket_cap_mb=2.5)
    train(model, rank, size, 2)
    x = torch.full((COUNT,), 1.0 + rank)
    assert move(x, world._connection)
    dist.all_reduce(x)
    assert x.unique().tolist() == [3.0]
    yield "ready"
    if rank == 1:
        time.sleep(100)  # until it is killed
    with pytest.raises(wancoll.OperationAborted, match=r"all_reduce.*rank-1"):
        dist.all_reduce(x)
    with pytest.raises(RuntimeError, match=r"all_reduce.*rank-1"):
        model(torch.ones(1, 512)).sum().backward()
    assert x.unique().tolist() == [3.0]
    for pid in children():
        os.kill(pid, signal.SIGKILL)
    x += 1.0
    dist.destroy_process_group()
    os.environ.update(MASTER_PORT=str(port), WORLD_SIZE="1")
    dist.init_process_group("wancoll")
    train(DistributedDataParallel(net(), bucket_cap_mb=2.5), 0, 1, 2)
    assert x.unique().tolist() == [4.0]
    assert move(x, dist.group.WORLD._connection)
    dist.all_reduce(x)
    assert x.unique().tolist() == [4.0]
    dist.destroy_process_group()
    yield "done"


@pytest.mark.check
def test_replicas(sockets):
    run(2, replicas, env=sockets, timeout=150)


@pytest.mark.check
def test_losses():
    with Ranks(2, losses, free_port()) as ranks:
        assert [ranks.next(rank) for rank in range(2)] == ["ready"] * 2
        ranks.kill(1)
        assert ranks.next(0) == "done"
