"""What happens when ranks die, are late or end, and what is left then."""

import gc
import os
import select
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import wancoll
from tests.client.tools import until
from tests.torch.ranks import Ranks, free_port, run
from wancoll.client.connection import Connection
from wancoll.testing import Cluster


def futures(rank, size):
    """Futures: after the result, in callbacks that call collectives themselves, and with errors."""
    dist.init_process_group("wancoll", timeout=timedelta(seconds=50))
    world = dist.group.WORLD

    x = torch.full((1 << 20,), float(rank))
    seen = []
    future = dist.all_reduce(x, async_op=True).get_future()
    chained = future.then(lambda done: seen.append(done.value()[0][-1].item()))
    chained.wait()
    assert seen == [sum(range(size))]
    assert future.done()

    def again(done):
        y = done.value()[0].clone()
        dist.all_reduce(y)  # blocks in the thread that completes futures
        inner = dist.all_reduce(y, async_op=True).get_future()
        inner.wait()  # which needs another one
        return y

    # One after the other: nested calls in one order on all ranks.
    for _ in range(3):
        y = dist.all_reduce(torch.ones(1), async_op=True).get_future().then(again).wait()
        assert y.item() == size**3
    works = [dist.all_reduce(torch.full((100,), float(i)), async_op=True) for i in range(20)]
    values = torch.futures.wait_all([work.get_future() for work in works])
    assert [each[0][0].item() for each in values] == [float(size * i) for i in range(20)]

    # One rank calls something else: all get the error, from wait() and from the future, and go on.
    x = torch.ones(3 + rank)
    work = dist.all_reduce(x, async_op=True)
    future = work.get_future()
    with pytest.raises(RuntimeError, match="all_reduce"):
        future.wait()
    with pytest.raises(wancoll.CollectiveMismatch, match="all_reduce"):
        work.wait()
    assert isinstance(work.exception(), RuntimeError)
    assert not work.is_success()
    assert x.tolist() == [1.0] * (3 + rank)

    # Late: the call goes on.
    if rank == 0:
        work = world.recv([x], 1, 0)
        with pytest.raises(wancoll.TimeoutError, match="recv"):
            work.wait(timedelta(milliseconds=50))
        opts = dist.AllreduceOptions()
        opts.timeout = timedelta(milliseconds=100)
        late = world.allreduce([torch.ones(2)], opts)
        with pytest.raises(RuntimeError, match="pending"):
            late.get_future().wait()
        world.get_group_store().set("late", "1")
    else:
        world.get_group_store().wait(["late"])
        dist.send(torch.zeros(3), 0)
    if rank == 0:
        assert work.wait()
        assert late.wait(timedelta(seconds=30))
    else:
        dist.all_reduce(torch.ones(2))
    dist.destroy_process_group()


def test_futures(sockets):
    run(2, futures, env=sockets)


def loses_one(rank, size, port):
    dist.init_process_group("wancoll", timeout=timedelta(seconds=50))
    group = dist.new_group([0, 1])
    x = torch.ones(4)
    dist.all_reduce(x)
    yield "ready"
    if rank == 2:
        time.sleep(100)
    began = time.monotonic()
    y = torch.ones(4)
    with pytest.raises(wancoll.OperationAborted, match=r"all_reduce.*rank-2") as caught:
        dist.all_reduce(y)
    took = time.monotonic() - began
    assert isinstance(caught.value, RuntimeError)
    assert y.tolist() == [1.0] * 4
    for call in (lambda: dist.broadcast(y, 0), dist.barrier, lambda: dist.send(y, 1 - rank)):
        with pytest.raises(wancoll.OperationAborted, match=r"rank-2"):
            call()
    dist.all_reduce(y, group=group)
    assert y.tolist() == [2.0] * 4
    dist.destroy_process_group()
    os.environ.update(MASTER_PORT=str(port), WORLD_SIZE="2")
    dist.init_process_group("wancoll")
    y = torch.ones(4)
    dist.all_reduce(y)
    dist.destroy_process_group()
    return y.tolist(), took


def test_a_loss_fails_all_calls_until_the_world_is_made_again(sockets):
    with Ranks(3, loses_one, free_port(), env=sockets) as ranks:
        for rank in range(3):
            assert ranks.next(rank) == "ready"
        ranks.kill(2)
        for rank in range(2):
            result, took = ranks.result(rank)
            assert result == [2.0] * 4
            assert took < 20


def told_later(monkeypatch, connection, store, rank):
    """A call through *connection* is posted when its daemon knows that rank 2 is lost and this process does not."""
    post = connection.post

    def later(work, deadline=None):
        store.set(f"posts/{rank}", "1")
        assert select.select([connection._channel.socket], [], [], 30)[0]
        post(work, deadline)

    monkeypatch.setattr(connection, "post", later)


def wait_for_both(store, rank):
    """Return when ranks 0 and 1 are here; rank 0, whose process serves the store, after rank 1."""
    store.set(f"done/{rank}", "1")
    store.wait([f"done/{each}" for each in range(2)])
    if rank == 1:
        store.set("heard", "1")
    else:
        store.wait(["heard"])


def loses_one_between_look_and_post(rank, size):
    dist.init_process_group("wancoll", timeout=timedelta(seconds=50))
    world = dist.group.WORLD
    store = world.get_group_store()
    one, other = dist.new_group(), dist.new_group()
    if rank == 2:
        store.wait(["posts/0", "posts/1"])
        os.kill(os.getpid(), signal.SIGKILL)
    monkeypatch = pytest.MonkeyPatch()

    # Both have looked before the loss: no result without rank 2, and no tensor is touched.
    told_later(monkeypatch, one._connection, store, rank)
    x = torch.full((3,), rank + 1.0)
    with pytest.raises(wancoll.OperationAborted, match="lost rank-2"):
        dist.all_reduce(x, group=one)
    assert x.tolist() == [rank + 1.0] * 3
    monkeypatch.undo()

    # One has, and the other never calls.
    if rank == 0:
        monkeypatch.setattr(other._connection, "wait_any", lambda *_: False)
        work = dist.all_reduce(x, group=other, async_op=True)
        monkeypatch.undo()
        with pytest.raises(wancoll.OperationAborted, match="lost rank-2"):
            work.wait(timedelta(seconds=20))
        assert x.tolist() == [1.0] * 3
        store.set("raised", "1")
    else:
        store.wait(["raised"])

    # A group with the dead: nobody waits for it. Who leaves then is not called lost.
    began = time.monotonic()
    with pytest.raises(wancoll.OperationAborted, match=r"new_group.*lost rank-2"):
        dist.new_group()
    assert time.monotonic() - began < 20
    dist.destroy_process_group(other) if rank == 0 else None
    if rank == 1:
        while "rank-0" in other._connection.place.members:
            other._connection.wait_any([], 0.1)
        with pytest.raises(wancoll.OperationAborted, match=r"lost rank-2.*; rank-0 left"):
            dist.all_reduce(x, group=other)
    wait_for_both(store, rank)
    dist.destroy_process_group()


def waits_for_the_dead(rank, size):
    """new_group() while it waits for a rank that dies then."""
    dist.init_process_group("wancoll", timeout=timedelta(seconds=100))
    store = dist.group.WORLD.get_group_store()
    if rank == 2:
        store.wait(["waits/0", "waits/1"])
        os.kill(os.getpid(), signal.SIGKILL)
    wait = Connection.await_place

    def seen(self, *arguments):
        store.set(f"waits/{rank}", "1")
        wait(self, *arguments)

    Connection.await_place = seen
    with pytest.raises(wancoll.OperationAborted, match=r"new_group.*lost rank-2"):
        dist.new_group()
    Connection.await_place = wait
    wait_for_both(store, rank)
    dist.destroy_process_group()


@pytest.mark.check
@pytest.mark.parametrize("target", [loses_one_between_look_and_post, waits_for_the_dead])
def test_a_loss_is_told_to_who_has_not_heard_of_it(sockets, target):
    with Ranks(3, target, env=sockets) as ranks:
        for rank in range(2):
            ranks.result(rank, 100)


def loses_one_while_another_leaves(rank, size, path):
    dist.init_process_group("wancoll", timeout=timedelta(seconds=50))
    connection = dist.group.WORLD._connection
    yield "ready"
    if rank == 1:
        while not os.path.exists(path):
            time.sleep(0.01)
        dist.destroy_process_group()
        yield "left"
        return
    while len(connection.place.members) > 1:
        connection.wait_any([], 0.1)
    with pytest.raises(wancoll.OperationAborted, match=r"new_group.*rank-1 left; lost rank-2"):
        dist.new_group()
    dist.destroy_process_group()


@pytest.mark.check
def test_who_is_lost_in_the_epoch_in_which_another_leaves_is_lost(tmp_path):
    with Cluster(peers=3, lanes=1, heartbeat_timeout=30.0, fork=True, master_args=["--voters=32"]) as three:
        sockets = [{"WANCOLL_SOCKET": three.socket(i)} for i in range(3)]
        with Ranks(3, loses_one_while_another_leaves, str(tmp_path / "leave"), env=sockets) as ranks:
            assert [ranks.next(rank) for rank in range(3)] == ["ready"] * 3
            three.pause(0)  # so its member says nothing, and the epoch does not end before both are gone
            (tmp_path / "leave").touch()
            assert ranks.next(1) == "left"
            ranks.kill(2)
            while not any("lost rank-2" in event.text for event in three.status().events):
                time.sleep(0.05)
            three.resume(0)
            ranks.result(0, 60)


def outlives_the_store(rank, size, path):
    """What torch prints goes to *path* while the group is destroyed."""
    dist.init_process_group("wancoll", timeout=timedelta(seconds=50))
    yield "ready"
    if rank == 0:
        time.sleep(100)
    with pytest.raises(wancoll.OperationAborted, match="lost rank-0"):
        dist.all_reduce(torch.ones(4))
    os.dup2(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600), 2)
    dist.destroy_process_group()
    yield "done"


@pytest.mark.check
def test_who_outlives_the_store_does_not_ask_it(tmp_path):
    with Ranks(2, outlives_the_store, str(tmp_path / "said")) as ranks:
        assert [ranks.next(rank) for rank in range(2)] == ["ready"] * 2
        ranks.kill(0)
        assert ranks.next(1) == "done"
    assert (tmp_path / "said").read_text() == ""


def children():
    mine = str(os.getpid())
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/stat") as stat:
                fields = stat.read().rpartition(")")[2].split()
        except OSError:
            continue
        if fields[1] == mine and fields[0] != "Z":
            found.append(int(pid))
    return found


def private(rank, size):
    counts = []
    for _ in range(2):  # the same store, and the same names
        dist.init_process_group("wancoll")
        x = torch.ones(4)
        dist.all_reduce(x)
        assert x.tolist() == [size] * 4
        dist.all_reduce(x, group=dist.new_group([0, 1]))
        assert len(children()) == 1 + (rank == 0)  # its daemon, and the master
        dist.destroy_process_group()
        assert children() == []
        gc.collect()
        counts.append(len(os.listdir("/proc/self/fd")))
    assert counts[0] == counts[1], counts
    os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)
    dist.init_process_group("wancoll", init_method=f"file://{os.environ['RANKS_FILE']}", rank=rank, world_size=size)
    dist.barrier()
    yield children()
    time.sleep(100)


@pytest.mark.check
@pytest.mark.timeout(200)
def test_private_daemons_end_with_their_ranks(tmp_path):
    with Ranks(2, private, env={"RANKS_FILE": str(tmp_path / "store")}) as ranks:
        services = [pid for rank in range(2) for pid in ranks.next(rank, 150)]
        assert len(services) == 3
        for rank in range(2):
            ranks.kill(rank, signal.SIGKILL)
        until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in services), 20)
