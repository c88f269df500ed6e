"""Any number of threads may call: what two threads of a client reach, with switches where they hurt, and very many."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import wancoll
from tests.client.fake_daemon import FakeDaemon
from tests.client.tools import in_thread, refused
from wancoll.client.codecs import Coding, feed
from wancoll.client.communicator import Communicator
from wancoll.client.connection import Connection
from wancoll.client.many import ManyWork
from wancoll.client.memory import arena as arena_module
from wancoll.client.memory.arena import Arena
from wancoll.client.memory.placement import Placement
from wancoll.client.memory.tensors import region
from wancoll.collective import Codec, DType, ReduceOp
from wancoll.errors import ConfigError, PeerDaemonLost
from wancoll.wire import messages as m

MIB = 1 << 20


@pytest.fixture
def switching() -> Iterator[None]:
    """Threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.fixture
def arena(monkeypatch: pytest.MonkeyPatch) -> Iterator[Arena]:
    """It keeps nothing warm: what is given back is unbound by the next take()."""
    monkeypatch.setattr(arena_module, "IDLE_BYTES", 0)
    fd = os.memfd_create("arena", os.MFD_CLOEXEC)
    os.ftruncate(fd, 1 << 30)
    arena = Arena([fd, os.eventfd(0)], 1 << 30)
    yield arena
    arena.close()


def meanwhile(f: Callable[[], Any]) -> None:
    """Another thread does it now, as far as it gets within a tenth of a second."""
    thread = threading.Thread(target=f, daemon=True)
    thread.start()
    thread.join(0.1)


# ---- the arena --------------------------------------------------------------------------------------


def test_a_block_is_found_while_another_thread_gives_back_those_below(
    arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the two looks that find() takes at the arena's tables."""
    low = [arena.take(4 * MIB) for _ in range(8)]
    held, *above = (arena.take(4 * MIB) for _ in range(4))
    real = arena_module.bisect_right

    def switch(starts: list[int], address: int) -> int:
        at = real(starts, address)
        low.clear()
        meanwhile(lambda: arena.take(8 * MIB))
        return at

    monkeypatch.setattr(arena_module, "bisect_right", switch)
    assert arena.find(held.block.address, 4 * MIB) is held.block
    assert above


@pytest.mark.usefixtures("switching")
def test_a_block_is_found_while_other_threads_come_and_go(arena: Arena) -> None:
    low = [arena.take(4 * MIB) for _ in range(8)]
    held, *above = (arena.take(4 * MIB) for _ in range(5))
    wrong, stop = [], threading.Event()

    def look() -> None:
        while not stop.is_set():
            found = arena.find(held.block.address, 4 * MIB)
            if found is not held.block:
                wrong.append(found)

    threads = [threading.Thread(target=look) for _ in range(2)]
    for thread in threads:
        thread.start()
    end = time.monotonic() + 0.5
    while time.monotonic() < end and not wrong:
        low.clear()
        arena.take(8 * MIB)
        low = [arena.take(4 * MIB) for _ in range(8)]
    stop.set()
    for thread in threads:
        thread.join(20)
    assert not wrong
    assert above


# ---- pending calls ----------------------------------------------------------------------------------


def test_pending_calls_are_listed_while_another_thread_ends_one(held: Communicator, manual: FakeDaemon) -> None:
    """Collected memory runs code of others in the middle, and that lets other threads run."""
    works = [held.all_reduce(np.ones(3), async_op=True) for _ in range(50)]
    manual.wait_for_posts(50)
    pending, posts = held._connection._pending, list(manual.posts)

    def end_one(phase: str, _: Any) -> None:
        if phase == "stop" and len(pending) > 40:
            pending.pop(next(reversed(pending)))

    before = gc.get_threshold()
    gc.callbacks.append(end_one)
    gc.set_threshold(1)
    try:
        for _ in range(200):
            found = held.pending
            assert list(found) == works[: len(found)]
    finally:
        gc.set_threshold(*before)
        gc.callbacks.remove(end_one)
    assert len(pending) <= 40
    for post in posts:
        manual.answer(post)
    for work in works[: len(pending)]:
        work.wait(20)


def test_the_connection_ends_while_another_thread_posts(held: Communicator, manual: FakeDaemon) -> None:
    connection = held._connection

    def full(*_: Any) -> None:
        connection._end(m.Failure(0, "PeerDaemonLost", "gone"))
        raise BlockingIOError

    connection._channel.send = full  # type: ignore[method-assign]
    with refused("gone", error=PeerDaemonLost):
        held.all_reduce(np.ones(3))
    assert held.pending == ()
    assert not manual.seen


@pytest.mark.usefixtures("switching")
def test_threads_post_wait_and_look_while_memberships_change(comm: Communicator, daemon: FakeDaemon) -> None:
    feedback = wancoll.ErrorFeedback()

    def work(mark: int) -> int:
        wrong = 0
        for i in range(30):
            x = comm.zeros(2 * MIB if i % 10 == 0 else 50)
            x[:] = mark
            many = comm.all_reduce_many([np.full(9, mark), np.full(5, mark, np.float32)], async_op=True)
            assert isinstance(many, ManyWork)
            comm.all_reduce(x, feedback=feedback, name=f"{mark}/{i}", codec="bf16", timeout=20)
            wrong += int((x != 2 * mark).any()) + sum(int((y != 2 * mark).any()) for y in many.wait(20).out)
        return wrong

    def look() -> None:
        for number in range(2, 30):
            daemon.epoch(number, ("me", "other"))
            assert all((residual == 0).all() for residual in feedback.state_dict().values())
            assert repr(comm)
            assert feedback.nbytes >= 0

    joins = [in_thread(lambda mark=mark: work(mark)) for mark in range(1, 5)]  # type: ignore[misc]
    looks = in_thread(look)
    assert [join() for join in joins] == [0, 0, 0, 0]
    assert looks() is None
    assert len(feedback) == 120


# ---- works ------------------------------------------------------------------------------------------


def test_two_threads_that_wait_for_many_post_each_bucket_once(
    comm: Communicator, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both have found that a bucket is not posted, as a cancelled `await` and a wait() behind it do."""
    tensors = [np.full(10, i, np.float32) for i in range(4)]
    with monkeypatch.context() as late:
        late.setattr(ManyWork, "post", lambda *_: None)
        work = comm.all_reduce_many(tensors, bucket_bytes=40, async_op=True)
    assert isinstance(work, ManyWork)
    real, both = Connection.post, threading.Barrier(2)

    def post(self: Connection, *args: Any) -> None:
        both.wait(10)
        real(self, *args)

    monkeypatch.setattr(Connection, "post", post)
    joins = [in_thread(lambda: work.wait(20)) for _ in range(2)]
    assert [len(join().receipts) for join in joins] == [4, 4]
    assert len(daemon.seen) == 4
    assert all((x == 2 * i).all() for i, x in enumerate(tensors))


def test_what_is_on_its_way_from_a_device_is_looked_at_by_several_threads(arena: Arena) -> None:
    """One of them finds that it has come, while another one looks."""

    class Switched(Placement):
        @property
        def _to_host(self) -> Any:  # type: ignore[override]
            return self.looks.pop(0) if self.looks else None

        @_to_host.setter
        def _to_host(self, value: Any) -> None:
            self.looks = [] if value is None else [value]

    to_host, seen = SimpleNamespace(), list[Any]()
    placement = Switched(arena, (region(np.ones(10), "x"),), ())
    staging: Any = SimpleNamespace(filled=seen.append)
    placement._staging, placement._to_host = staging, to_host
    placement.look()
    assert seen == [to_host]


# ---- feedback ---------------------------------------------------------------------------------------


def test_residuals_are_copied_while_a_call_of_another_thread_ends() -> None:
    feedback = wancoll.ErrorFeedback()

    class Switched(np.ndarray):
        def copy(self, *_: Any) -> Any:
            feedback._residuals[f"new {len(feedback)}"] = np.zeros(1, np.float32)
            return np.array(self)

    for name in "ab":
        feedback._residuals[name] = np.full(3, ord(name), np.float32).view(Switched)
    assert {name: one.tolist() for name, one in feedback.state_dict().items()} == {"a": [97.0] * 3, "b": [98.0] * 3}
    assert len(feedback) == 4


def test_a_residual_that_another_threads_call_left_is_not_added_to_another_tensor() -> None:
    """It was not there when the call began."""
    feedback = wancoll.ErrorFeedback()
    coding = Coding(Codec.bf16)
    first, second = (feed("all_reduce", feedback, "x", DType.float32, n, ReduceOp.sum, coding) for n in (1, 4))
    assert first is not None
    assert second is not None
    x, y = np.full(1, 1.001, np.float32), np.ones(4, np.float32)
    first.add(x.ctypes.data)
    first.commit(True, [])
    with refused("belongs to another tensor", "expected 1 elements", "got 4 of float32", error=ConfigError):
        second.add(y.ctypes.data)
    assert (y == 1).all()
