"""What has caught other backends under torch, each once. Several checks in one world; a failure says which."""

import contextlib
import os
import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import wancoll
from tests.torch.programs import model, same_everywhere
from tests.torch.ranks import free_port, run


def a_work_ends_without_a_wait(world, rank):
    """is_completed() turns true by itself, and the result is there then."""
    x = torch.full((5,), float(rank))
    work = dist.all_reduce(x, async_op=True)
    while not work.is_completed():
        pass
    assert x.tolist() == [1.0] * 5
    assert work.is_success()


def the_group_is_its_own_backend(world, rank):
    """Pipelining, async checkpoints and DTensor ask for these."""
    assert isinstance(world, dist.ProcessGroup)
    assert world._get_backend(torch.device("cpu")) is world
    assert world.supports_coalescing is False
    assert torch.device("cpu") in world._device_types
    assert dist.get_backend_config(world) == "cpu:wancoll,cuda:wancoll"


def older_names(world, rank):
    """What torch's C++ and older Python callers call."""
    x, y = torch.full((2,), float(rank)), torch.zeros(4)
    world._allgather_base(y, x).wait()
    assert y.tolist() == [0, 0, 1, 1]
    out = torch.zeros(2)
    world._reduce_scatter_base(out, torch.arange(4.0)).wait()
    assert out.tolist() == [4.0 * rank, 4.0 * rank + 2]
    both = [torch.zeros(4), torch.zeros(2)]
    world.allgather_into_tensor_coalesced(both, [x, x[:1]]).wait()
    assert [each.tolist() for each in both] == [[0, 0, 1, 1], [0, 1]]
    outs = [torch.zeros(2), torch.zeros(1)]
    world.reduce_scatter_tensor_coalesced(outs, [torch.arange(4.0), torch.ones(2)]).wait()
    assert [each.tolist() for each in outs] == [[4.0 * rank, 4.0 * rank + 2], [2.0]]


def an_unset_timeout_is_no_timeout(world, rank):
    """torch says -1 ms, in options, and 0 in wait()."""
    opts = dist.AllreduceOptions()
    assert opts.timeout == timedelta(milliseconds=-1)
    x = torch.ones(1)
    assert world.allreduce([x], opts).wait(timedelta(0))
    assert x.item() == 2


def a_wait_lets_other_threads_run(world, rank):
    """It holds no GIL: what another thread does here ends it."""
    x = torch.zeros(1)
    if rank == 0:
        ticks = []
        stop = threading.Event()

        def tick():
            while not stop.is_set():
                ticks.append(1)
                if len(ticks) == 1000:
                    world.get_group_store().set("ticks", "1")

        thread = threading.Thread(target=tick)
        thread.start()
        dist.recv(x, 1)
        stop.set()
        thread.join()
    else:
        world.get_group_store().wait(["ticks"])
        dist.send(x, 0)


def nested_calls_in_another_order(world, rank):
    """Callbacks run in threads of their own, so ranks may call in another order: that is a mismatch, not a hang."""
    sizes = (2, 3) if rank == 0 else (3, 2)
    futures = []
    for size in sizes:

        def nested(done, size=size):
            dist.all_reduce(torch.ones(size))

        futures.append(dist.all_reduce(torch.ones(1), async_op=True).get_future().then(nested))
        with pytest.raises(RuntimeError, match="different collectives"):
            futures[-1].wait()
    dist.all_reduce(torch.ones(1))


def each_operation_has_its_range(world, rank):
    """What torch's profiler shows."""
    x, blocks = torch.ones(4), [torch.ones(4), torch.ones(4)]
    calls = {
        "all_reduce": lambda: dist.all_reduce(x),
        "broadcast": lambda: dist.broadcast(x, 0),
        "barrier": dist.barrier,
        "all_gather": lambda: dist.all_gather(blocks, x),
        "all_gather_single": lambda: dist.all_gather_single(torch.ones(8), x),
        "reduce_scatter": lambda: dist.reduce_scatter(x, blocks),
        "reduce_scatter_single": lambda: dist.reduce_scatter_single(x, torch.ones(8)),
        "reduce": lambda: dist.reduce(x, 0),
        "gather": lambda: dist.gather(x, blocks if rank == 0 else None, dst=0),
        "scatter": lambda: dist.scatter(x, blocks if rank == 0 else None, src=0),
        "all_to_all": lambda: dist.all_to_all([torch.ones(4), torch.ones(4)], blocks),
        "all_to_all_single": lambda: dist.all_to_all_single(torch.ones(4), x),
        "send" if rank == 0 else "recv": lambda: dist.send(x, 1) if rank == 0 else dist.recv(x, 0),
        "send " if rank == 1 else "recv_anysource": lambda: dist.send(x, 0) if rank == 1 else dist.recv(x),
    }
    with torch.profiler.profile(record_shapes=True) as profile:
        for call in calls.values():
            call()
    seen = {event.name: event.input_shapes for event in profile.events() if event.name.startswith("wancoll:")}
    assert set(seen) == {f"wancoll:{name.strip()}" for name in calls}
    assert seen["wancoll:all_reduce"] == [[4]]


CHECKS = (
    a_work_ends_without_a_wait,
    the_group_is_its_own_backend,
    older_names,
    an_unset_timeout_is_no_timeout,
    a_wait_lets_other_threads_run,
    nested_calls_in_another_order,
    each_operation_has_its_range,
)


@contextlib.contextmanager
def named(name, rank):
    try:
        yield
    except Exception as bad:
        raise AssertionError(f"{name}, rank {rank}: {type(bad).__name__}: {bad}") from bad


def pitfalls(rank, size, port):
    for backend in ("cpu:wancoll,cuda:nccl", "cpu:gloo,cuda:wancoll"):
        with named(backend, rank), pytest.raises(wancoll.ConfigError, match=r"another backend.*new_group") as caught:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        assert backend in str(caught.value)
    dist.init_process_group("wancoll", timeout=timedelta(seconds=40))
    for check in CHECKS:
        with named(check.__name__, rank):
            check(dist.group.WORLD, rank)
    dist.destroy_process_group()
    # Every call is checked by torch then, over gloo, where a group wraps others; ours stays what it is.
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    os.environ["MASTER_PORT"] = str(port)  # rank 0's first store may still be there
    dist.init_process_group("wancoll", timeout=timedelta(seconds=40))
    with named("DETAIL", rank):
        x = torch.ones(3)
        dist.all_reduce(x)
        assert x.tolist() == [2.0] * 3
        net = DistributedDataParallel(model(seed=rank))
        net(torch.ones(1, 16)).sum().backward()
        same_everywhere(net)
    dist.destroy_process_group()


@pytest.mark.check
@pytest.mark.timeout(150)
def test_pitfalls(sockets):
    run(2, pitfalls, free_port(), env=sockets, timeout=120)
