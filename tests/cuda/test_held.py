"""Streams that wait for a result while the host goes on: they find it, and whatever happens none of them waits on."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import wancoll
from tests.client.fake_daemon import FakeDaemon, made
from tests.client.tools import in_thread, refused, until
from tests.cuda.test_order import array, numbers, same
from tests.cuda.test_refusals import fake_torch
from wancoll.client.communicator import Communicator
from wancoll.client.cuda.staging import Staging
from wancoll.errors import ConfigError, DeviceError, OutcomeUnknown, TimeoutError, WancollError, WorldTooSmall

KNOWN = ("interface", "legacy", "per thread")  # the tensor says which stream it is used on


def nobody_attends() -> bool:
    return all(thread.name != "wancoll-stream" for thread in threading.enumerate())


def own(x: Any) -> int | None:
    """What to pass as stream."""
    return None if x.style in KNOWN else x.stream


@pytest.mark.parametrize("style", [*KNOWN, "dlpack", "managed"])
def test_kernels_find_the_result(gpu: Any, held: Communicator, manual: FakeDaemon, style: str) -> None:
    x = array(gpu, numbers(2000), style)
    x.put(numbers(2000, 5))
    work = held.all_reduce(x, async_op=True)
    early = x.snapshot()
    work.wait_stream(own(x))
    late = x.snapshot()
    until(lambda: gpu.waiting() == 1)
    manual.answer(manual.next_post())
    same(x.seen(late), 2 * numbers(2000, 5))
    same(x.seen(early), numbers(2000, 5))
    assert work.wait(60).out is x
    work.wait_stream(own(x))  # it is there: nothing to wait for
    assert gpu.waiting() == 0


def test_into_out_on_another_device(gpu: Any, held: Communicator, manual: FakeDaemon) -> None:
    x, out = array(gpu, numbers(50)), array(gpu, numbers(50, 9), "legacy", device=1)
    out.put(numbers(50, 7))
    work = held.all_reduce(x, out, async_op=True)
    early = out.snapshot()
    work.wait_stream()
    late = out.snapshot()
    same(x.get(), numbers(50))  # its own stream does not wait
    manual.answer(manual.next_post())
    until(nobody_attends)  # so nothing has hurried the kernel that reads what was there before
    same(out.seen(late), 2 * numbers(50))
    same(out.seen(early), numbers(50, 7))
    work.wait(60)


def test_an_abort_lets_go(gpu: Any, held: Communicator, manual: FakeDaemon) -> None:
    """Kernels read the old bytes; the next call says so, once, and sends nothing."""
    x = array(gpu, numbers(100))
    work = held.all_reduce(x, async_op=True)
    work.wait_stream()
    late = x.snapshot()
    manual.fail(manual.next_post())
    same(x.seen(late), numbers(100))
    until(lambda: bool(held._connection.regrets))
    seen = len(manual.seen)
    with refused("kernels read the old bytes", error=WorldTooSmall):
        held.barrier(timeout=1)
    assert len(manual.seen) == seen
    with refused(error=WorldTooSmall):
        work.wait(1)
    with refused(error=WorldTooSmall):
        work.wait_stream()
    work = held.all_reduce(x, async_op=True)
    manual.answer(manual.next_post())
    work.wait(60)
    same(x.get(), 2 * numbers(100))


def test_who_was_told_is_not_told_again(gpu: Any, held: Communicator, manual: FakeDaemon) -> None:
    x = array(gpu, numbers(100))
    work = held.all_reduce(x, async_op=True)
    work.wait_stream()
    manual.fail(manual.next_post())
    with refused(error=WorldTooSmall):
        work.wait(60)
    until(nobody_attends)
    assert not held._connection.regrets


@pytest.mark.parametrize("seed", [0], indirect=True)
@pytest.mark.parametrize("many", [False, True])
def test_a_task_that_was_cancelled_has_not_been_told(
    gpu: Any, held: Communicator, manual: FakeDaemon, many: bool
) -> None:
    """The failure is for the next call: kernels have read the old bytes."""
    x = array(gpu, numbers(100))
    work = held.all_reduce_many([x], async_op=True) if many else held.all_reduce(x, async_op=True)
    work.wait_stream()

    async def in_asyncio() -> None:
        task = asyncio.ensure_future(work)
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(in_asyncio())
    manual.fail(manual.next_post())
    until(lambda: not any(each.name in ("wancoll-stream", "wancoll-await") for each in threading.enumerate()))
    with refused("kernels read the old bytes", error=WorldTooSmall):
        held.all_reduce(np.ones(3), timeout=1)


def test_the_tensors_own_stream_comes_first_too(gpu: Any, held: Communicator, manual: FakeDaemon) -> None:
    """Where another stream waits: kernels on the tensor's own one that were queued before still read the old bytes."""
    x, side = array(gpu, numbers(100)), gpu.stream()
    gpu.lib.standin_drain()
    work = held.all_reduce(x, async_op=True)
    gpu.hold(x)
    early = x.snapshot()
    work.wait_stream(side)
    manual.answer(manual.next_post())
    until(work.done)
    time.sleep(0.05)  # a copy that does not wait has run by now
    gpu.lib.standin_release()
    same(x.seen(early), numbers(100))
    same(x.get(), 2 * numbers(100))
    work.wait(60)
    until(nobody_attends)
    gpu.on(0, "cuStreamDestroy", side)


def test_a_page_that_streams_may_look_at_is_kept(
    gpu: Any, manual: FakeDaemon, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """close() comes while the stream has not reached its wait: freed memory would be looked at."""
    monkeypatch.setattr("wancoll.client.cuda.staging._CLOSE_SECONDS", 0.2)
    x, y = array(gpu, numbers(100)), array(gpu, numbers(100))
    gpu.lib.standin_drain()
    with wancoll.connect(socket=manual.path, timeout=10) as comm:
        work = comm.all_reduce(x, y, async_op=True)
        gpu.hold(y)
        work.wait_stream()
    assert "a page of pinned memory is kept" in caplog.text
    gpu.lib.standin_release()
    same(y.get(), numbers(100))


@pytest.mark.check
@pytest.mark.parametrize("seed", [0], indirect=True)
def test_nor_is_it_freed_where_a_call_failed(shared: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call of the driver in turn, while the stream has not come to its wait."""
    gpu = shared
    monkeypatch.setattr("wancoll.client.cuda.staging._CLOSE_SECONDS", 0.1)
    y = array(gpu, numbers(100))
    for number in range(1, 14):
        gpu.lib.standin_drain()
        with FakeDaemon(str(tmp_path / f"{number}.sock"), ("me", "other"), manual=True) as daemon:
            with wancoll.connect(socket=daemon.path, timeout=10) as comm:
                work = comm.all_reduce(y, async_op=True)
                gpu.hold(y)
                gpu.lib.standin_fail(number, 719)
                attempt(work.wait_stream)
                gpu.lib.standin_fail(0, 0)
            gpu.lib.standin_release()


def test_time_lets_go(gpu: Any, held: Communicator, manual: FakeDaemon) -> None:
    """The result comes later: behind the kernels that ran meanwhile; wait() first says what went wrong."""
    x = array(gpu, numbers(100))
    work = held.all_reduce(x, async_op=True)
    post = manual.next_post()
    began = time.monotonic()
    work.wait_stream(timeout=0.2)
    late = x.snapshot()
    same(x.seen(late), numbers(100))
    assert time.monotonic() - began >= 0.2
    until(lambda: bool(held._connection.regrets))
    later = x.snapshot()
    manual.answer(post)
    with refused("still pending", "kernels read the old bytes", error=TimeoutError) as caught:
        work.wait(60)
    assert caught.value.work is work
    assert work.wait(60).out is x
    same(x.seen(later), numbers(100))
    same(x.get(), 2 * numbers(100))


def test_a_lost_daemon_and_the_end_let_go(gpu: Any, path: str) -> None:
    x = array(gpu, numbers(100))
    for close in (False, True):
        with FakeDaemon(path, ("me", "other"), manual=True) as daemon:
            comm = wancoll.connect(socket=path, timeout=10)
            work = comm.all_reduce(x, async_op=True)
            daemon.next_post()
            work.wait_stream()
            late = x.snapshot()
            if close:
                comm.close()
            else:
                daemon.hang_up()
            same(x.seen(late), numbers(100))
            with refused(error=OutcomeUnknown):
                work.wait(60)
            comm.close()
        os.path.exists(path) and os.unlink(path)


def test_who_is_interrupted_leaves_no_stream_behind(gpu: Any, held: Communicator, manual: FakeDaemon) -> None:
    """Ctrl-C ends the host's wait; the stream's goes on, and gets the result."""
    x = array(gpu, numbers(100))
    work = held.all_reduce(x, async_op=True)
    post = manual.next_post()
    work.wait_stream()
    late = x.snapshot()
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        work.wait(20)
    timer.join()
    manual.answer(post)
    same(x.seen(late), 2 * numbers(100))
    work.wait(60)


def test_results_that_come_in_another_order(gpu: Any, held: Communicator, manual: FakeDaemon) -> None:
    """Two streams' waits on one stream, and a third result that nobody waits for: the later call ends first."""
    stream = gpu.stream()
    tensors = [array(gpu, numbers(100, k)) for k in range(3)]
    for x in tensors:
        gpu.on(0, "cuStreamSynchronize", x.stream)
        x.stream = stream
    works = [held.recv(x, 1, tag=k, async_op=True) for k, x in enumerate(tensors)]
    manual.wait_for_posts(3)
    posts = list(manual.posts)
    works[0].wait_stream()
    first = tensors[0].snapshot()
    works[1].wait_stream()
    second = tensors[1].snapshot()
    for k in (2, 1, 0):
        manual.answer(posts[k])
        until(works[k].done)
    same(tensors[0].seen(first), made(400, 1).view(np.float32))
    same(tensors[1].seen(second), made(400, 2).view(np.float32))
    same(tensors[2].get(), made(400, 3).view(np.float32))
    for work in works:
        work.wait(60)
    gpu.on(0, "cuStreamDestroy", stream)


def test_a_call_while_a_stream_waits(gpu: Any, held: Communicator, manual: FakeDaemon) -> None:
    """A tensor whose stream waits can be given to the next call: it is read behind the result."""
    x = array(gpu, numbers(100))
    work = held.all_reduce(x, async_op=True)
    post = manual.next_post()
    work.wait_stream()
    y = array(gpu, numbers(100, 3))
    gpu.on(0, "cuStreamSynchronize", y.stream)
    y.stream = x.stream
    y.put(numbers(100, 8))  # behind the result
    after = in_thread(lambda: held.all_reduce(y, timeout=20))
    manual.answer(post)
    manual.answer(manual.next_post())
    assert after().out is y
    same(y.get(), 2 * numbers(100, 8))
    same(x.get(), 2 * numbers(100))


@pytest.mark.parametrize("count", [1, 2])
def test_a_result_that_is_still_on_its_way_is_waited_for(
    gpu: Any, held: Communicator, manual: FakeDaemon, count: int
) -> None:
    """By who reads the tensor again, on whichever stream, also where another result came after it."""
    x, y, side = (array(gpu, numbers(100, k), "dlpack") for k in (1, 2, 3))
    gpu.lib.standin_drain()
    gpu.hold(side)
    works = [held.all_reduce(each, async_op=True) for each in (x, y)[:count]]
    works[0].wait_stream(side.stream)
    manual.answer_all(count)
    until(lambda: all(work.done() for work in works))
    with refused("still pending", error=TimeoutError) as caught:
        held.all_reduce(x, timeout=0.2)
    post = manual.next_post()
    assert not manual.bytes[post.filled]  # it has not been read
    gpu.lib.standin_release()
    works[0].wait(60)
    manual.answer(post)
    caught.value.work.wait(60)
    same(x.get(), 4 * numbers(100, 1))


def test_torchs_streams(gpu: Any, held: Communicator, manual: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stream that is current waits, and then the tensor's own waits for that one: no circle."""
    x = array(gpu, numbers(100))
    current = [x.stream]
    module = fake_torch(gpu, x, current)
    monkeypatch.setitem(sys.modules, "torch", module)
    x.put(numbers(100, 5))
    work = held.all_reduce(module.Tensor(), async_op=True)
    early = x.snapshot()
    current[0] = side = gpu.stream()
    work.wait_stream()
    event = gpu.on(0, "cuEventCreate", 2)
    gpu.on(0, "cuEventRecord", event, side)
    gpu.on(0, "cuStreamWaitEvent", x.stream, event, 0)
    late = x.snapshot()
    manual.answer(manual.next_post())
    same(x.seen(late), 2 * numbers(100, 5))
    same(x.seen(early), numbers(100, 5))
    work.wait(60)
    gpu.on(0, "cuEventDestroy", event)
    gpu.on(0, "cuStreamDestroy", side)


def test_many_tensors(gpu: Any, held: Communicator, manual: FakeDaemon) -> None:
    tensors = [array(gpu, numbers(100, k), KNOWN[k % 3], device=k % 2) for k in range(6)]
    work = held.all_reduce_many(tensors, bucket_bytes=800, async_op=True)
    work.wait_stream()
    late = [x.snapshot() for x in tensors]
    manual.answer_all(3)
    for k, x in enumerate(tensors):
        same(x.seen(late[k]), 2 * numbers(100, k))
    work.wait(60)


def test_what_cannot_wait(gpu: Any, held: Communicator, manual: FakeDaemon) -> None:
    x, y = array(gpu, numbers(100)), array(gpu, numbers(100), "dlpack")
    host = numbers(100)
    works = [held.all_reduce(each, async_op=True) for each in (x, y, host)]
    sent = held.send(array(gpu, numbers(100)), 1, async_op=True)
    sent.wait_stream()  # there is no result here
    for timeout in (None, inf, -1, "a"):
        with refused("wait_stream(timeout=...)"):
            works[0].wait_stream(timeout=timeout)  # type: ignore[arg-type]
    with refused("does not say which stream", "stream="):
        works[1].wait_stream()
    with refused("no stream has to wait for", "use wait()"):
        works[2].wait_stream()
    gpu.lib.standin_no_words(1)
    with refused("cannot wait on memory", "CUDA_ERROR_NOT_SUPPORTED", "use wait()"):
        works[0].wait_stream()
    gpu.lib.standin_no_words(0)
    with pytest.raises((ConfigError, DeviceError)):
        works[0].wait_stream(stream=12345)  # there is none
    assert gpu.waiting() == 0
    manual.answer_all(4)
    for work in works:
        work.wait(60)
    until(nobody_attends)
    gpu.lib.standin_most_registered(gpu.counts()["registered"])
    z = array(gpu, numbers(5000))
    work = held.all_reduce(z, async_op=True)
    with refused("no memory could be pinned", "use wait()"):
        work.wait_stream()
    manual.answer(manual.next_post())
    work.wait(60)
    same(z.get(), 2 * numbers(5000))


def attempt(call: Any, *arguments: Any) -> str:
    """What went wrong."""
    try:
        call(*arguments)
    except WancollError as bad:
        return str(bad)
    return ""


def test_any_call_of_the_driver_may_fail(shared: Any, tmp_path: Path) -> None:
    """Each in turn: no stream waits afterwards, and the tensor is the result or as it was."""
    gpu = shared
    x = array(gpu, numbers(100))
    gpu.lib.standin_drain()
    for number in range(1, 200):
        before = x.get()
        with FakeDaemon(str(tmp_path / f"{number}.sock"), ("me", "other"), manual=True) as daemon:
            comm = wancoll.connect(socket=daemon.path, timeout=10)
            try:
                work = comm.all_reduce(x, async_op=True)
                post = daemon.next_post()
                calls = gpu.lib.standin_calls()
                gpu.lib.standin_fail(number, 719)
                said = attempt(work.wait_stream, None, 20)
                with suppress(BrokenPipeError):  # a device that fails before its input is there ends the connection
                    daemon.answer(post)
                said += attempt(work.wait, 10)
                assert not said or "719" in said
                until(lambda: gpu.waiting() == 0)
            finally:
                comm.close()
            done = gpu.lib.standin_calls() - calls < number
            gpu.lib.standin_fail(0, 0)
        gpu.lib.standin_drain()
        after = x.get()
        assert any(np.array_equal(after, wanted) for wanted in (before, 2 * before)), number
        x.put(numbers(100))
        if done:
            break
    assert done


@pytest.mark.check
def test_a_thousand_waits_are_flat(gpu: Any, comm: Communicator) -> None:
    x = array(gpu, np.zeros(100, np.float32))
    before: dict[str, int] = {}
    for number in range(1000):
        work = comm.all_reduce(x, async_op=True)
        work.wait_stream()
        if number % 2:
            work.wait(10)
        else:
            x.get()
            until(work.done)
        if number == 500:  # by then as many results were under way at once as ever
            before = gpu.counts()
    until(nobody_attends)
    x.get()
    after = gpu.counts()
    assert after["events"] <= before["events"] + 4
    assert after["streams"] <= before["streams"] + 2
    assert after["contexts"] == before["contexts"]
    assert after["registered"] <= before["registered"] + 16 * 4096  # a page each would be 499


AT_EXIT = """
import atexit, sys, pathlib, signal
from tests.cuda.gpu import Gpu
gpu = Gpu(pathlib.Path(sys.argv[1]))
seen = []
def look():
    signal.alarm(20)
    gpu.on(0, "cuStreamSynchronize", seen[0].stream)
    print("went on", seen[0].get()[:3].tolist(), flush=True)
import numpy as np, wancoll
from tests.cuda.test_order import array
comm = wancoll.connect(socket=sys.argv[2], timeout=10)
seen.append(array(gpu, np.ones(100, np.float32)))
work = comm.all_reduce(seen[0], async_op=True)
atexit.register(look)
work.wait_stream()
print("waits", flush=True)
"""


def test_the_end_of_the_process_lets_go(standin: Any, manual: FakeDaemon) -> None:
    """Also without close(), before the threads are gone; whoever synchronises the device at exit gets through."""
    done = subprocess.run(
        [sys.executable, "-c", AT_EXIT, standin.lib._name, manual.path], capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip
    assert done.stdout == "waits\nwent on [1.0, 1.0, 1.0]\n", done.stderr


def test_a_stream_that_begins_to_wait_while_the_result_is_written(
    gpu: Any, held: Communicator, manual: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread writes it: were the wait not seen, the copy would wait for the stream that waits for it."""
    x = array(gpu, numbers(100))
    work = held.all_reduce(x, async_op=True)
    real = Staging.write

    def write(self: Staging, *args: Any) -> Any:
        in_thread(lambda: work.wait_stream(timeout=3.0))()
        return real(self, *args)

    monkeypatch.setattr(Staging, "write", write)
    manual.answer(manual.next_post())
    assert work.wait(20).out is x
    same(x.get(), 2 * numbers(100))
    assert not held._connection.regrets
