"""Who waits for whom: with a stand-in for the driver whose streams run late, a missing wait shows as wrong bytes."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import wancoll
from tests.client.fake_daemon import FakeDaemon, made
from tests.client.tools import in_thread, refused, until
from wancoll.client.communicator import Communicator
from wancoll.client.cuda.driver import Driver
from wancoll.client.cuda.staging import PIECE
from wancoll.errors import ConfigError, DeviceError, OutcomeUnknown, TimeoutError, WorldTooSmall

STYLES = ("interface", "no stream", "per thread", "legacy", "dlpack", "managed")
UNKNOWN = ("no stream", "per thread", "dlpack", "managed")  # the stream is not known when the commit comes


def numbers(count: int, start: int = 1) -> Any:
    return np.arange(start, start + count, dtype=np.float32)


def array(gpu: Any, values: Any, style: str = "interface", **where: int) -> Any:
    from tests.cuda.gpu import DeviceArray, WithInterface

    return (DeviceArray if style in ("dlpack", "managed", "pinned") else WithInterface)(gpu, values, style, **where)


def same(a: Any, b: Any) -> None:
    assert a.shape == b.shape
    wrong = np.flatnonzero(a.reshape(-1) != b.reshape(-1))
    assert not wrong.size, f"{wrong.size} of {a.size} differ, at {wrong[0]}: {a.flat[wrong[0]]}, not {b.flat[wrong[0]]}"


@pytest.mark.parametrize("style", STYLES)
def test_in_place_between_kernels(gpu: Any, comm: Communicator, style: str) -> None:
    """What was queued before the call is in it, what is queued after it finds the result: nobody synchronises."""
    x = array(gpu, numbers(1000, 5), style)
    for start in (10, 20, 30):
        if style != "no stream":  # of which we are told that nobody need be waited for
            x.put(numbers(1000, start))
        before = x.get() if style == "no stream" else numbers(1000, start)
        early = x.snapshot()
        receipt = comm.all_reduce(x)
        assert receipt.out is x
        late = x.snapshot()
        same(x.seen(late), 2 * before)
        if style != "no stream":
            same(x.seen(early), before)


@pytest.mark.parametrize(("style", "most"), [("interface", 12), ("per thread", 10), ("dlpack", 6)])
def test_a_small_call_makes_few_calls_of_the_driver(
    gpu: Any, comm: Communicator, monkeypatch: pytest.MonkeyPatch, style: str, most: int
) -> None:
    """Looks at marks, whose number is chance, are counted apart; so is the context, which is changed for each half."""
    monkeypatch.setattr("wancoll.client.cuda.staging.LEAST", 4 << 20)
    x, names, code = array(gpu, numbers(1024), style), [], Driver.code
    comm.all_reduce(x)
    comm.all_reduce(x)

    def counted(self: Any, name: str, *arguments: Any) -> Any:
        names.append(name)
        return code(self, name, *arguments)

    monkeypatch.setattr(Driver, "code", counted)
    comm.all_reduce(x)
    monkeypatch.undo()
    contexts = [names.count(name) for name in ("cuCtxPushCurrent", "cuCtxPopCurrent")]
    looks = names.count("cuEventQuery")
    assert contexts == [2, 2]
    assert len(names) - looks - sum(contexts) <= most, names
    same(x.get(), 8 * numbers(1024))


@pytest.mark.parametrize("style", STYLES[2:])
@pytest.mark.parametrize("count", [1000, (PIECE + 4) // 4])
def test_out_that_is_in_use(gpu: Any, comm: Communicator, style: str, count: int) -> None:
    """Kernels that use out and were queued before the call come first; x is left alone."""
    x, out = array(gpu, numbers(count), style), array(gpu, numbers(count, 7), style)
    x.put(numbers(count, 3))
    out.put(numbers(count, 9))
    early = out.snapshot()
    assert comm.all_reduce(x, out).out is out
    same(out.get(), 2 * numbers(count, 3))
    same(out.seen(early), numbers(count, 9))
    same(x.get(), numbers(count, 3))


@pytest.mark.parametrize("style", STYLES[2:])
def test_recv_and_broadcast_and_send(gpu: Any, comm: Communicator, daemon: FakeDaemon, style: str) -> None:
    x = array(gpu, numbers(100), style)
    x.put(numbers(100, 3))
    comm.recv(x, 1, tag=5)
    same(x.get(), made(400, 6).view(np.float32))
    x.put(numbers(100, 4))
    comm.broadcast(x, root=1)
    same(x.get(), made(400, 1).view(np.float32))
    x.put(numbers(100, 6))
    comm.send(x, 1, tag=9)
    assert daemon.sent[1, 9] == [numbers(100, 6).tobytes()]
    comm.broadcast(x, root=0)
    same(x.get(), numbers(100, 6))


@pytest.mark.parametrize("style", STYLES)
def test_results_that_nobody_gave_memory_for(gpu: Any, comm: Communicator, style: str) -> None:
    """They are in device memory of ours, on the tensor's stream or there, for whoever reads the array interface."""
    before = gpu.counts()
    x = array(gpu, numbers(1000), style, device=1)
    if style != "no stream":
        x.put(numbers(1000, 3))
    values = numbers(1000) if style == "no stream" else numbers(1000, 3)
    out = comm.all_gather(x).out
    said = out.__cuda_array_interface__
    assert (out.shape, said["shape"], said["typestr"], said["data"][1]) == ((2, 1000), (2, 1000), "<f4", False)
    assert said["stream"] == (x.stream if style in ("interface", "legacy") else None)
    shifted = (values.view(np.uint8).astype(np.int64) + 16).astype(np.uint8).view(np.float32)
    seen = x.look_at(said["data"][0], (2, 1000))
    same(seen, np.stack((values, shifted)))
    again = comm.all_reduce(out).out  # as any other tensor
    assert again is out
    same(x.look_at(said["data"][0], (2, 1000)), 2 * seen)
    fewer = comm.reduce_scatter(x).out
    same(x.look_at(fewer.__cuda_array_interface__["data"][0], (500,)), 2 * values[:500])
    del out, again, fewer
    gc.collect()
    gpu.free_all()
    assert gpu.counts()["memory"] <= before["memory"] + 1  # a pool of early results


def test_pinned_memory_of_the_caller(gpu: Any, comm: Communicator) -> None:
    """Its kernels write to it, and read it, before the host does."""
    x, out = array(gpu, numbers(1000), "pinned"), array(gpu, numbers(1000, 7), "pinned")
    for start in (3, 9):
        x.put(numbers(1000, start))
        out.put(numbers(1000, 5))
        early = out.snapshot()
        assert comm.all_reduce(x, out).out is out
        same(out.get(), 2 * numbers(1000, start))
        same(out.seen(early), numbers(1000, 5))
        comm.all_reduce(x)
        same(x.get(), 2 * numbers(1000, start))
    comm.all_reduce(x, async_op=True).wait(60)
    same(x.get(), 4 * numbers(1000, 9))


def test_pinned_memory_that_is_never_handed_over(gpu: Any, comm: Communicator, daemon: FakeDaemon) -> None:
    x = array(gpu, numbers(1000), "pinned")
    gpu.hold(x)
    with refused("did not hand the tensor over in time; nothing was sent", error=TimeoutError):
        comm.all_reduce(x, timeout=0.1)
    assert daemon.seen == []
    gpu.lib.standin_release()
    comm.all_reduce(x)
    same(x.get(), 2 * numbers(1000))


def test_pinned_memory_without_streams(gpu: Any, comm: Communicator) -> None:
    """Its library takes no stream for it."""
    x = array(gpu, numbers(1000), "pinned")
    x.takes_streams = False
    comm.all_reduce(x)
    same(x.get(), 2 * numbers(1000))


def test_several_devices_and_the_host(gpu: Any, comm: Communicator) -> None:
    a, b = array(gpu, numbers(300), device=0), array(gpu, numbers(300), "dlpack", device=1)
    host = numbers(50, 70)
    a.put(numbers(300, 2))
    b.put(numbers(300, 4))
    comm.all_reduce(a, b)
    same(b.get(), 2 * numbers(300, 2))
    same(a.get(), numbers(300, 2))
    a.put(numbers(300, 5))
    b.put(numbers(300, 6))
    comm.all_reduce_many([a, host, b])
    same(a.get(), 2 * numbers(300, 5))
    same(b.get(), 2 * numbers(300, 6))
    same(host, 2 * numbers(50, 70))
    result = np.zeros(300, np.float32)
    comm.all_reduce(a, result)
    same(result, 4 * numbers(300, 5))


@pytest.mark.parametrize("style", STYLES)
def test_a_call_after_one_that_nobody_waited_for(gpu: Any, comm: Communicator, style: str) -> None:
    x = array(gpu, numbers(1000), style)
    gpu.lib.standin_drain()
    first = comm.all_reduce(x, async_op=True)
    until(first.done)
    comm.all_reduce(x)
    same(x.get(), 4 * numbers(1000))
    assert first.wait().out is x


@pytest.mark.parametrize("style", STYLES)
def test_blocks_are_used_again_only_when_the_device_has_read_them(gpu: Any, comm: Communicator, style: str) -> None:
    arrays = [array(gpu, numbers(1000, 10 * k), style) for k in range(6)]
    gpu.lib.standin_drain()
    works = []
    for x in arrays:
        works.append(comm.all_reduce(x, async_op=True))
        until(works[-1].done)
    for k, (x, work) in enumerate(zip(arrays, works, strict=True)):
        work.wait()
        same(x.get(), 2 * numbers(1000, 10 * k))


@pytest.mark.parametrize("style", ["interface", "dlpack"])
def test_a_device_that_does_not_get_on(gpu: Any, held: Communicator, manual: FakeDaemon, style: str) -> None:
    """A deadline ends the wait, not the call; what a call that failed left in the streams harms nobody."""
    x = array(gpu, numbers(1000), style)
    others = [array(gpu, numbers(1000, 5), style) for _ in range(3)]
    comm = held
    gpu.hold(x)
    with refused("still pending", error=TimeoutError) as caught:
        comm.all_reduce(x, timeout=0.1)
    manual.fail(manual.next_post())
    with refused(error=WorldTooSmall):
        caught.value.work.wait(60)
    # Their blocks are not the one that the copy that was left behind goes to.
    gc.collect()  # of what the error holds
    works = [comm.recv(z, 1, tag=k, async_op=True) for k, z in enumerate(others)]
    manual.wait_for_posts(3)
    posts = list(manual.posts)
    for post in posts:
        manual.compute(post)
    gpu.lib.standin_release()
    gpu.lib.standin_drain()
    for post in posts:
        manual.commit(post)
    for k, (work, z) in enumerate(zip(works, others, strict=True)):
        work.wait(60)
        same(z.get(), made(4000, 1 + k).view(np.float32))
    same(x.get(), numbers(1000))
    work = comm.all_reduce(x, async_op=True)
    manual.answer(manual.next_post())
    work.wait(60)
    same(x.get(), 2 * numbers(1000))


def test_a_result_leaves_its_block_before_another_one_comes(gpu: Any, held: Communicator, manual: FakeDaemon) -> None:
    """The copy out waits for a kernel; meanwhile results for tensors that nobody has to read are built."""
    x, others = array(gpu, numbers(1000)), [array(gpu, numbers(1000, 5)) for _ in range(3)]
    work = held.all_reduce(x, async_op=True)
    gpu.hold(x)
    manual.answer(manual.next_post())
    until(work.done)
    works = [held.recv(z, 1, tag=k, async_op=True) for k, z in enumerate(others)]
    manual.answer_all(3)
    until(lambda: all(each.done() for each in works))
    gpu.lib.standin_release()
    same(x.get(), 2 * numbers(1000))
    for k, z in enumerate(others):
        works[k].wait(60)
        same(z.get(), made(4000, 1 + k).view(np.float32))
    work.wait(60)


@pytest.mark.parametrize("style", UNKNOWN[1:])
def test_the_wait_for_the_last_copy_has_a_deadline(gpu: Any, comm: Communicator, style: str) -> None:
    x, out = array(gpu, numbers(10), "interface"), array(gpu, numbers(10), style)
    gpu.hold(out)
    work = comm.all_reduce(x, out, async_op=True)
    with refused("committed, and still on its way to the device", error=TimeoutError) as caught:
        work.wait(0.2)
    assert caught.value.work is work
    gpu.lib.standin_release()
    assert work.wait(60).out is out
    same(out.get(), 2 * numbers(10))


def test_an_abort_leaves_the_tensor(gpu: Any, held: Communicator, manual: FakeDaemon) -> None:
    x = array(gpu, numbers(1000))
    x.put(numbers(1000, 4))
    work = held.all_reduce(x, async_op=True)
    manual.fail(manual.next_post())
    with refused(error=WorldTooSmall):
        work.wait(60)
    same(x.get(), numbers(1000, 4))
    work = held.all_reduce(x, async_op=True)
    manual.next_post()
    manual.hang_up()
    with pytest.raises(Exception, match="daemon"):
        work.wait(60)
    same(x.get(), numbers(1000, 4))


def test_the_end_waits_for_copies(gpu: Any, daemon: FakeDaemon) -> None:
    x = array(gpu, numbers(1000))
    comm = wancoll.connect(socket=daemon.path, timeout=10)
    work = comm.all_reduce(x, async_op=True)
    until(work.done)
    comm.close()
    assert work.wait().out is x
    same(x.get(), 2 * numbers(1000))


def test_memory_that_cannot_be_pinned(gpu: Any, comm: Communicator, caplog: pytest.LogCaptureFixture) -> None:
    gpu.lib.standin_most_registered(0)
    for style in STYLES[2:]:
        x, out = array(gpu, numbers(1000), style), array(gpu, numbers(1000), style)
        for start in (3, 4):
            x.put(numbers(1000, start))
            out.put(numbers(1000, 9))
            early = out.snapshot()
            comm.all_reduce(x, out)
            same(out.get(), 2 * numbers(1000, start))
            same(out.seen(early), numbers(1000, 9))
            comm.all_reduce(x)
            same(x.get(), 2 * numbers(1000, start))
    assert [record.message.split(":")[0] for record in caplog.records].count(
        "3.91 KiB cannot be pinned (2"  # CUDA_ERROR_OUT_OF_MEMORY
    ) == 1


def test_any_call_of_the_driver_may_fail(shared: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Each in turn, once: a named error or success; the tensor is the result or as it was.

    Nothing is kept, but where the end itself fails: then the log says so.
    """
    gpu = shared
    x, out = array(gpu, numbers(1000)), array(gpu, numbers(1000, 8), "dlpack")
    failed, said = 0, []
    for number in range(1, 400):
        before = x.get()
        held = gpu.counts()
        with FakeDaemon(str(tmp_path / f"{number}.sock")) as daemon:
            comm = wancoll.connect(socket=daemon.path, timeout=10)
            calls = gpu.lib.standin_calls()
            gpu.lib.standin_fail(number, 719)
            for tensors in ((x, None), (x, out)):
                try:
                    comm.all_reduce(*tensors, timeout=20)
                except (
                    ConfigError,
                    DeviceError,
                    OutcomeUnknown,
                    AssertionError,
                ) as bad:  # no driver; a device; the exporter
                    failed += 1
                    said.append(str(bad))
            comm.close()
            done = gpu.lib.standin_calls() - calls < number
            gpu.lib.standin_fail(0, 0)
        gpu.lib.standin_drain()
        name = gpu.lib.standin_failed_call().decode()
        given_up = "pinned memory is kept" in caplog.text or any(word in name for word in ("Destroy", "Release"))
        caplog.clear()
        if done or not given_up:
            assert {**gpu.counts(), "items": 0} == {**held, "items": 0}, (number, name)
        after = x.get()
        assert any(np.array_equal(after, wanted) for wanted in (before, 2 * before)), (number, after[:4], before[:4])
        x.put(numbers(1000))
        if done:
            break
    assert done, "more calls than this test lets fail"
    assert failed > 20
    assert all("719" in text for text in said), said


def test_a_device_that_breaks_ends_in_named_errors(gpu: Any, held: Communicator, manual: FakeDaemon) -> None:
    x = array(gpu, numbers(1000))
    gpu.lib.standin_drain()
    work = held.all_reduce(x, async_op=True)
    post = manual.next_post()
    gpu.lib.standin_break(719)
    try:
        manual.answer(post)
        with refused("719", "committed; this member's tensor has undefined contents", error=DeviceError):
            work.wait(60)
        with refused("719", error=DeviceError):
            held.all_reduce(x)
        host = numbers(5)
        work = held.all_reduce(host, async_op=True)
        manual.answer(manual.next_post())
        work.wait(60)
        same(host, 2 * numbers(5))
    finally:
        gpu.lib.standin_break(0)


def test_many_threads(gpu: Any, comm: Communicator) -> None:
    arrays = [array(gpu, numbers(500, 10 * k), STYLES[2:][k % 4], device=k % 2) for k in range(8)]

    def one(k: int) -> None:
        for _ in range(3):
            comm.all_reduce(arrays[k])

    for join in [in_thread(lambda k=k: one(k)) for k in range(8)]:
        assert join() is None
    for k, x in enumerate(arrays):
        same(x.get(), 8 * numbers(500, 10 * k))
