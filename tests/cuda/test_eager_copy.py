"""Results that go to a device before they are committed: what is final is copied, what is void is not used."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import wancoll
from tests.client.fake_daemon import FakeDaemon
from tests.client.tools import refused, until
from tests.cuda.test_order import array, numbers, same
from tests.faults.support import PEERS, Background, attempt, close_all, cluster_fixture, join, repair
from tests.later import later
from wancoll.chaos import Cluster
from wancoll.client.communicator import Communicator
from wancoll.client.cuda import eager_copy as rules
from wancoll.client.cuda.eager_copy import EagerCopy
from wancoll.client.cuda.staging import Staging
from wancoll.client.work import Work
from wancoll.errors import DeviceError, OutcomeUnknown, WorldTooSmall
from wancoll.limits import BLOCK, DEFAULT

BLOCKS = 10
COUNT = (BLOCKS * BLOCK - 400) // 4
STYLES = ("interface", "dlpack", "per thread")
SOON = (STYLES[0], *later(*STYLES[1:]))


@pytest.fixture(autouse=True)
def steps(small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wancoll.client.cuda.staging.LEAST", BLOCK)
    monkeypatch.setattr(rules, "STEP", 2 * BLOCK)


# ---- what is copied, by the words --------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(30))
def test_steps_are_final_when_all_their_blocks_are(seed: int) -> None:
    draw = random.Random(seed)
    start, nbytes = draw.choice((0, 1, BLOCK, 3 * BLOCK + 7)), draw.randint(1, 9 * BLOCK)
    early = EagerCopy(None, start, nbytes)  # type: ignore[arg-type]
    words = np.array([draw.choice((0, 1, 2, 2, 2)) for _ in range(-(-(start + nbytes) // BLOCK))], np.uint32)
    newest = max(words)
    wanted = []
    for number in range(-(-nbytes // rules.STEP)):
        begin = start + number * rules.STEP
        end = min(begin + rules.STEP, start + nbytes)
        if (
            newest
            and all(words[at // BLOCK] == newest for at in range(begin, end, 1000))
            and words[(end - 1) // BLOCK] == newest
        ):
            wanted.append(number)
    assert early.final(words) == (newest, wanted)


@pytest.mark.parametrize("seed", range(30))
def test_every_byte_of_the_result_is_copied_once_from_where_it_is(seed: int) -> None:
    draw = random.Random(seed)
    nbytes = draw.randint(1, 9 * BLOCK)
    early = EagerCopy(None, 0, nbytes)  # type: ignore[arg-type]
    early.memory = 1 << 40
    early._copied[:] = [draw.choice((0, 1, 2)) for _ in early._copied]
    early._copied = early._copied[: draw.randint(1, len(early._copied))]  # there was room for the beginning only
    size = draw.randint(1, nbytes)
    there = np.zeros(size, np.int64)
    for call, to, source, part in early.copies(1 << 50, 1 << 45, 2, size):
        at = to - (1 << 50)
        there[at : at + part] += 1
        for step in range(at // rules.STEP, -(-(at + part) // rules.STEP)):
            is_early = step < len(early._copied) and early._copied[step] == 2
            assert (call == "cuMemcpyDtoDAsync") == is_early
        assert source - at == (1 << 40 if call == "cuMemcpyDtoDAsync" else 1 << 45)
    assert (there == 1).all()


# ---- a daemon that is played -------------------------------------------------------------------------


def copied(work: Work) -> int:
    """Steps of the first target that are on their way, or there."""
    early = work.placement._early[0] if work.placement is not None else None
    return 0 if early is None or early.stream is None else int((early._copied > 0).sum())


def begun(work: Work, steps: int) -> None:
    """Look as somebody who waits does, until so many steps were queued."""
    until(lambda: not work.done() and copied(work) == steps)


def lent(comm: Communicator) -> int:
    """A stream of the first device on which nothing waits; it does not come back."""
    device = comm._connection.staging._devices[0]
    with device.current():
        return int(device.lend())


@pytest.mark.parametrize("style", SOON)
@pytest.mark.parametrize("into", ["in place", "out"])
def test_what_was_copied_early_is_in_the_result(
    gpu: Any, held: Communicator, manual: FakeDaemon, style: str, into: str
) -> None:
    """The tensor is as it was before the commit; afterwards it has the bytes that were final, once copied."""
    x = array(gpu, numbers(COUNT), style)
    out = array(gpu, numbers(COUNT, 7), style) if into == "out" else x
    work = held.all_reduce(x, None if out is x else out, async_op=True)
    post = manual.next_post()
    manual.input_buffer(post)
    result_buffer, wanted = manual.result_buffer(post), 2 * numbers(COUNT)
    result_buffer[:] = 0xEE
    result_buffer[: 4 * BLOCK] = wanted.view(np.uint8)[: 4 * BLOCK]
    manual.show(post, 1, 0, 5)  # the third step has but its first half
    begun(work, 2)
    same(out.get(), numbers(COUNT, 7) if into == "out" else numbers(COUNT))
    late = out.snapshot()  # a kernel before the commit
    gpu.lib.standin_drain()
    result_buffer[: 4 * BLOCK] = 0xDD  # to see that they are not copied again
    result_buffer[4 * BLOCK :] = wanted.view(np.uint8)[4 * BLOCK :]
    manual.show(post, 1)
    manual.commit(post)
    assert work.wait(60).out is out
    same(out.get(), wanted)
    same(out.seen(late), numbers(COUNT, 7) if into == "out" else numbers(COUNT))


@pytest.mark.parametrize("style", SOON)
def test_users_of_the_tensor_come_before_the_result(
    gpu: Any, held: Communicator, manual: FakeDaemon, style: str
) -> None:
    """A kernel that reads it was queued before the call, and runs long after the commit."""
    x, out = array(gpu, numbers(COUNT)), array(gpu, numbers(COUNT, 7), style)
    gpu.hold(out)
    seen = out.snapshot()
    work = held.all_reduce(x, out, async_op=True)
    post = manual.next_post()
    manual.compute(post)
    begun(work, 5)
    manual.commit(post)
    until(work.done)
    gpu.lib.standin_release()
    work.wait(60)
    same(out.seen(seen), numbers(COUNT, 7))
    same(out.get(), 2 * numbers(COUNT))


@pytest.mark.parametrize("style", SOON)
def test_another_attempt_voids_what_was_copied(gpu: Any, held: Communicator, manual: FakeDaemon, style: str) -> None:
    """Some blocks again by the new one, some not shown, some being written while they were copied."""
    x = array(gpu, numbers(COUNT), style)
    work = held.all_reduce(x, async_op=True)
    post = manual.next_post()
    manual.input_buffer(post)
    result_buffer, wanted = manual.result_buffer(post), (2 * numbers(COUNT)).view(np.uint8)
    result_buffer[:] = 0xEE
    manual.show(post, 1)
    begun(work, 5)
    result_buffer[: 6 * BLOCK] = wanted[: 6 * BLOCK]
    manual.show(post, 2, 2, 4)
    until(lambda: not work.done() and 2 in work.placement._early[0]._copied)
    result_buffer[6 * BLOCK :] = wanted[6 * BLOCK :]
    manual.show(post, 2, 0, 1)
    manual.commit(post, attempts=2)
    work.wait(60)
    same(x.get(), 2 * numbers(COUNT))


def test_an_abort_voids_what_was_copied(gpu: Any, held: Communicator, manual: FakeDaemon) -> None:
    """The tensor is as it was; its block and our memory are nobody else's until the copies have run."""
    x, y = array(gpu, numbers(COUNT)), array(gpu, numbers(COUNT, 50))
    before = gpu.counts()["memory"]
    work = held.all_reduce(x, async_op=True)
    first = manual.next_post()
    manual.input_buffer(first)
    manual.show(first, 1, 0, 4)
    begun(work, 2)
    stream = int(work.placement._early[0].stream)
    assert not gpu.lib.standin_hold(stream)  # a copy that does not get on
    manual.show(first, 1, 0, 8)
    begun(work, 4)
    manual.fail(first)
    with refused(error=WorldTooSmall):
        work.wait(60)
    work = held.all_reduce(y, async_op=True)
    post = manual.next_post()
    assert first.result_buffer not in (post.input_buffer, post.result_buffer)
    assert gpu.counts()["memory"] > before
    assert lent(held) != stream
    gpu.lib.standin_release()
    gpu.lib.standin_drain()
    assert gpu.counts()["memory"] == before + 1  # the pool
    manual.answer(post)
    work.wait(60)
    same(x.get(), numbers(COUNT))
    same(y.get(), 2 * numbers(COUNT, 50))


def test_who_looks_late_begins_nothing(gpu: Any, held: Communicator, manual: FakeDaemon) -> None:
    """Another thread has the call still in hand when it has ended."""
    x = array(gpu, numbers(COUNT))
    work = held.all_reduce(x, async_op=True)
    post, placement = manual.next_post(), work.placement
    manual.input_buffer(post)
    gpu.lib.standin_drain()
    manual.answer(post)
    until(work.done)
    placement.look()
    assert placement._early[0].stream is None
    work.wait(60)
    same(x.get(), 2 * numbers(COUNT))


def test_several_devices_and_the_host_in_one_result(gpu: Any, held: Communicator, manual: FakeDaemon) -> None:
    parts = [numbers(n, 10 * n) for n in (50_000, 300, 17_000, 5, 70_001)]
    tensors = [part.copy() if k == 2 else array(gpu, part, device=k % 2) for k, part in enumerate(parts)]
    works = held.all_reduce_many(tensors, async_op=True)
    post = manual.next_post()
    wanted = np.concatenate(parts)
    manual.input_buffer(post)
    result_buffer = manual.result_buffer(post)
    result_buffer[:] = (2 * wanted).view(np.uint8)
    work = works.works[0]
    for stop in range(1, -(-result_buffer.size // BLOCK)):
        manual.show(post, 1, 0, stop)
        work.done()
    until(lambda: not work.done() and copied(work) == 2)
    assert work.placement._early[4]._copied.tolist() == [1, 0, 0]
    gpu.lib.standin_drain()
    result_buffer[: 2 * BLOCK] = 0xDD
    manual.commit(post)
    works.wait(60)
    for tensor, part in zip(tensors, parts, strict=True):
        same(tensor if isinstance(tensor, np.ndarray) else tensor.get(), 2 * part)


@pytest.mark.parametrize("most", [0, 3 * BLOCK])
def test_without_memory_it_is_copied_after_the_commit(
    gpu: Any, held: Communicator, manual: FakeDaemon, most: int
) -> None:
    gpu.lib.standin_most_pooled(most)
    x = array(gpu, numbers(COUNT))
    work = held.all_reduce(x, async_op=True)
    post = manual.next_post()
    manual.compute(post)
    for _ in range(3):
        assert not work.done()
        assert not copied(work)
    manual.commit(post)
    work.wait(60)
    same(x.get(), 2 * numbers(COUNT))


def test_no_more_than_the_limit_is_under_way(
    gpu: Any, held: Communicator, manual: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two results the first gets a part of its own, the second one nothing before the first is through."""
    monkeypatch.setattr(rules, "DEFAULT", replace(DEFAULT, early_bytes=5 * BLOCK))
    x, y = array(gpu, numbers(COUNT)), array(gpu, numbers(COUNT, 9))
    works = [held.all_reduce(each, async_op=True) for each in (x, y)]
    manual.wait_for_posts(2)
    first, second = list(manual.posts)
    manual.compute(first)
    begun(works[0], 2)
    assert not works[0].placement._early[0].over
    stream = int(works[0].placement._early[0].stream)
    gpu.lib.standin_drain()
    gpu.hold(x)  # so that the first result does not get through
    manual.compute(second)
    assert not works[1].done()
    assert not copied(works[1])
    manual.commit(first)
    until(works[0].done)
    assert not works[1].done()
    assert not copied(works[1])
    assert lent(held) != stream  # which waits for the kernel
    gpu.lib.standin_release()
    gpu.lib.standin_drain()
    begun(works[1], 2)
    manual.commit(second)
    for work in works:
        work.wait(60)
    same(x.get(), 2 * numbers(COUNT))
    same(y.get(), 2 * numbers(COUNT, 9))


def test_a_stream_that_waits_finds_the_result(gpu: Any, held: Communicator, manual: FakeDaemon) -> None:
    x = array(gpu, numbers(COUNT))
    gpu.lib.standin_drain()
    work = held.all_reduce(x, async_op=True)
    post = manual.next_post()
    manual.input_buffer(post)
    work.wait_stream()
    late = x.snapshot()
    manual.result_buffer(post)[:] = (2 * numbers(COUNT)).view(np.uint8)
    manual.show(post, 1, 0, 7)
    begun(work, 3)
    manual.commit(post)
    same(x.seen(late), 2 * numbers(COUNT))
    work.wait(60)


def test_nothing_grows(gpu: Any, held: Communicator, manual: FakeDaemon) -> None:
    x = array(gpu, numbers(COUNT))
    seen, events = [], []
    for k in range(24):
        x.put(numbers(COUNT, k))
        work = held.all_reduce(x, async_op=True)
        post = manual.next_post()
        manual.input_buffer(post)
        manual.result_buffer(post)[:] = (2 * numbers(COUNT, k)).view(np.uint8)
        manual.show(post, 1, 0, 2 + k % 8)
        begun(work, 1 + k % 8 // 2)
        if k % 3:
            manual.commit(post)
            work.wait(60)
        else:
            manual.fail(post)
            with refused(error=WorldTooSmall):
                work.wait(60)
        same(x.get(), numbers(COUNT, k) * (2 if k % 3 else 1))
        gpu.lib.standin_drain()
        found = gpu.counts()
        seen.append((found["streams"], found["registered"], found["memory"] - len(x._owned) * x.nbytes))
        events.append(found["events"])
    assert seen[8:] == [seen[8]] * 16
    assert max(events) < 16


def test_the_end_waits_for_early_copies(gpu: Any, manual: FakeDaemon) -> None:
    x = array(gpu, numbers(COUNT))
    comm = wancoll.connect(socket=manual.path, timeout=10)
    work = comm.all_reduce(x, async_op=True)
    post = manual.next_post()
    manual.input_buffer(post)
    manual.show(post, 1, 0, 7)
    begun(work, 3)
    comm.close()
    with refused("closed", error=OutcomeUnknown):
        work.wait()
    same(x.get(), numbers(COUNT))


def test_any_call_of_the_driver_may_fail_before_the_commit(shared: Any, tmp_path: Path) -> None:
    """Each in turn, once, where the operation commits and where it does not: nobody is hurt who does not hear of it."""
    gpu, names = shared, set()
    for number in range(2, 400):
        commits = number % 2 == 0
        kept = gpu.counts()["memory"]
        x = array(gpu, numbers(COUNT))
        with FakeDaemon(str(tmp_path / f"{number}.sock"), manual=True) as daemon:
            comm = wancoll.connect(socket=daemon.path, timeout=10)
            work = comm.all_reduce(x, async_op=True)
            post = daemon.next_post()
            daemon.input_buffer(post)
            gpu.lib.standin_drain()
            until(lambda work=work: not work.done() and work.placement._to_host is None)
            daemon.result_buffer(post)[:] = (2 * numbers(COUNT)).view(np.uint8)
            daemon.show(post, 1, 0, 4)
            calls = gpu.lib.standin_calls()
            gpu.lib.standin_fail(number // 2, 719)
            for _ in range(3):
                assert not work.done()
            if commits:
                daemon.commit(post)
            else:
                daemon.fail(post)
            said = attempt(lambda work=work: work.wait(60)).error
            done = gpu.lib.standin_calls() - calls < number // 2
            gpu.lib.standin_fail(0, 0)
            comm.close()
        gpu.lib.standin_drain()
        name = gpu.lib.standin_failed_call().decode()
        names.add(name)
        if said is None:
            same(x.get(), 2 * numbers(COUNT))
        elif commits:
            assert isinstance(said, DeviceError)
            assert "undefined" in str(said)
        else:
            assert isinstance(said, WorldTooSmall)
            same(x.get(), numbers(COUNT))
        gpu.free_all()
        assert gpu.counts()["memory"] == kept or name == "cuMemPoolDestroy", name
        if done and not commits:
            break
    assert done
    assert {"cuMemPoolCreate", "cuMemPoolSetAttribute", "cuMemAllocFromPoolAsync", "cuMemFreeAsync"} <= names
    assert {"cuMemcpyHtoDAsync_v2", "cuMemcpyDtoDAsync_v2", "cuEventRecord", "cuStreamWaitEvent"} <= names


# ---- real daemons ------------------------------------------------------------------------------------


cluster = cluster_fixture(PEERS, after="standin")


@pytest.mark.parametrize("kind", ["in place", *later("out", "gathered")])
def test_results_of_real_daemons(gpu: Any, cluster: Cluster, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until something was copied early: the same bytes with and without."""
    began: list[int] = []
    begin = Staging.begin

    def watched(self: Staging, early: EagerCopy, words: Any, held: Any) -> bool:
        found = begin(self, early, words, held)
        began.extend([early.nbytes] * found)
        return found

    monkeypatch.setattr(Staging, "begin", watched)
    repair(cluster)
    comms = sorted(join(cluster, range(3)), key=lambda comm: comm.rank)
    values = [numbers(4 * COUNT, 3 * rank) for rank in range(3)]
    tensors = [array(gpu, values[rank], STYLES[rank], device=rank % 2) for rank in range(3)]
    if kind != "in place":
        outs = [array(gpu, np.zeros(4 * COUNT * (3 if kind == "gathered" else 1), np.float32)) for _ in range(3)]

    def member(rank: int) -> Any:
        comm, x = comms[rank], tensors[rank]
        if kind == "in place":
            x.put(values[rank])
            return comm.all_reduce(x, timeout=30).out
        if kind == "out":
            return comm.all_reduce(x, outs[rank], timeout=30).out
        return comm.all_gather(x, outs[rank], timeout=30).out

    wanted = np.concatenate(values) if kind == "gathered" else sum(values)
    for _ in range(40):
        for found in Background(member, 3).results():
            same(found.get(), wanted)
        if began:
            break
        gpu.lib.standin_drain()
    assert began
    close_all(comms)


@pytest.mark.nightly  # where all is moved before the daemon that is to die has looked, it is no loss
def test_a_loss_while_blocks_go_to_devices(gpu: Any, cluster: Cluster) -> None:
    """Words say the attempt that the receipt has; the result is that of who is left."""
    repair(cluster)
    comms = sorted(join(cluster, range(3)), key=lambda comm: int(comm.name[1:]))
    tensors = [array(gpu, np.full(4 * COUNT, 10**k, np.float32), STYLES[k], device=k % 2) for k in range(3)]
    cluster.failpoint(2, "mid_op", "kill")
    works = [comm.all_reduce(tensors[k], async_op=True) for k, comm in enumerate(comms)]
    words = [work.placement._words for work in works[:2]]
    placements = [work.placement for work in works]  # so that the words stay theirs
    outcomes = Background(lambda k: attempt(lambda: works[k].wait(30)), 3).results()
    assert isinstance(outcomes[2].error, OutcomeUnknown)
    assert (tensors[2].get() == 100).all()
    for k in range(2):
        receipt = outcomes[k].receipt
        assert sorted(receipt.contributors) == ["m0", "m1"]
        assert receipt.attempts >= 2  # one more where the links are found broken before the loss
        assert set(words[k].tolist()) == {receipt.attempts}
        assert (tensors[k].get() == 11).all()
    del placements
    close_all(comms)
