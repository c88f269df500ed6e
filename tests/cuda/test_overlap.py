"""Inputs of devices are on their way while the call runs: what is told to be there is there, in the order of need."""

from __future__ import annotations

import gc
import os
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.client.fake_daemon import FakeDaemon
from tests.client.tools import refused, until
from tests.cuda.test_order import array, numbers, same
from tests.faults.support import Background, attempt, close_all, cluster_fixture, members_fixture, wait_until
from wancoll._native import ffi
from wancoll.chaos import Cluster
from wancoll.client.communicator import Communicator
from wancoll.client.cuda.staging import PIECE, Piece, ordered, pieces, told_by
from wancoll.collective import Descriptor, Kind
from wancoll.errors import DeviceError, Evicted, OutcomeUnknown, TimeoutError, WorldTooSmall
from wancoll.limits import BLOCK
from wancoll.schedule.choose import make
from wancoll.schedule.steps import Buffer


def cut(nbytes: int, most: int) -> list[Piece]:
    return [Piece(start, size, start, None) for start, size in pieces(nbytes, most)]  # type: ignore[arg-type]


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_a_ring_gets_first_what_it_reads_first(world: int) -> None:
    """Where pieces are as fine as shares: in the very order of the schedule; coarser ones cover a share's begin."""
    count = world * 1000
    for rank in range(world):
        steps = make(Descriptor(Kind.all_reduce, count=count), "ring", rank, world).steps
        places = [place for step in steps for place in (step.left, step.right) if place is not None]
        needed = list(dict.fromkeys(place.offset for place in places if place.buffer is Buffer.input))
        assert [piece.start for piece in ordered(cut(4 * count, 4000), 4 * count, (rank, world))] == needed
        first = ordered(cut(4 * count, 3000), 4 * count, (rank, world))[0]
        assert first.start <= needed[0] < first.start + first.nbytes


@pytest.mark.parametrize("seed", range(20))
def test_a_block_is_told_with_the_last_piece_of_it(seed: int) -> None:
    draw = random.Random(seed)
    found, at = [], 0
    for _ in range(draw.randint(1, 12)):
        size = draw.choice((1, 100, BLOCK, BLOCK + 1, 5 * BLOCK - 7))
        found.append(Piece(at, size, 0, None))  # type: ignore[arg-type]
        at += size
    draw.shuffle(found)
    there, told = np.zeros(at, bool), np.zeros(-(-at // BLOCK), bool)
    for piece, (first, stop) in zip(found, told_by(found), strict=True):
        there[piece.start : piece.start + piece.nbytes] = True
        told[first:stop] = True
        whole = [there[block * BLOCK : (block + 1) * BLOCK].all() for block in range(len(told))]
        assert told.tolist() == whole  # neither early nor late
    assert told.all()


def watch(daemon: FakeDaemon, post: Any, whole: bytes) -> None:
    """Looks on while the input is filled: what is said to be there is."""
    size = len(whole)
    wanted = np.frombuffer(whole, np.uint8)
    input_buffer = daemon.bytes[post.input_buffer : post.input_buffer + size]
    deadline = time.monotonic() + 20
    while True:
        table = daemon.bytes[post.filled : post.filled + -(-size // BLOCK)].copy()
        for block in np.flatnonzero(table):
            part = slice(int(block) * BLOCK, (int(block) + 1) * BLOCK)
            assert np.array_equal(input_buffer[part], wanted[part]), f"block {block} is not there"
        if table.all():
            return
        assert time.monotonic() < deadline, "the input did not come"
        time.sleep(0.001)


@pytest.mark.parametrize("style", ["interface", "dlpack", "managed"])
def test_what_is_told_is_there(gpu: Any, held: Communicator, manual: FakeDaemon, style: str) -> None:
    """The call returns before the tensor's kernels have run; its blocks come, each whole."""
    count = (2 * PIECE + BLOCK + 4) // 4
    x = array(gpu, numbers(count), style)
    gpu.hold(x)
    x.put(numbers(count, 3))
    work = held.all_reduce(x, async_op=True)
    post = manual.next_post()
    assert not manual.bytes[post.filled : post.filled + count * 4 // BLOCK].any()
    before = bell(held)
    gpu.lib.standin_release()
    watch(manual, post, numbers(count, 3).tobytes())
    until(lambda: bell(held) - before == 3)  # once for each piece, since nobody waited for all
    manual.answer(post)
    work.wait(60)
    same(x.get(), 2 * numbers(count, 3))


def bell(comm: Communicator) -> int:
    """How often it was rung; nobody else reads it."""
    lines = Path(f"/proc/self/fdinfo/{comm._connection.arena.bell}").read_text().split()
    return int(lines[lines.index("eventfd-count:") + 1], 16)


def test_several_devices_and_the_host_in_one_input(gpu: Any, held: Communicator, manual: FakeDaemon) -> None:
    """Tensors that share blocks: a block is told when the last of them is there, on whatever device it lies."""
    parts = [numbers(n, 10 * n) for n in (20_000, 300, 17_000, 5, 40_001)]
    tensors = [
        parts[2].copy() if k == 2 else array(gpu, np.zeros_like(part), device=k % 2) for k, part in enumerate(parts)
    ]
    for k in (0, 1, 3, 4):
        gpu.hold(tensors[k])
        tensors[k].put(parts[k])
    works = held.all_reduce_many(tensors, async_op=True)
    post = manual.next_post()
    gpu.lib.standin_release()
    watch(manual, post, b"".join(part.tobytes() for part in parts))
    manual.answer(post)
    works.wait(60)
    for tensor, part in zip(tensors, parts, strict=True):
        same(tensor if isinstance(tensor, np.ndarray) else tensor.get(), 2 * part)


def test_what_a_failed_call_left_behind_opens_no_other_gate(gpu: Any, held: Communicator, manual: FakeDaemon) -> None:
    """Its calls come when its device gets on, long after: the table that they write to is nobody else's."""
    x, y = array(gpu, numbers(1000)), array(gpu, numbers(1000, 50))
    gpu.hold(x)
    work = held.all_reduce(x, async_op=True)
    first = manual.next_post()
    manual.fail(first)
    with refused(error=WorldTooSmall):
        work.wait(60)
    gc.collect()  # of what the error holds
    work = held.all_reduce(y, async_op=True)
    post = manual.next_post()
    assert post.filled != first.filled
    assert first.input_buffer not in (post.input_buffer, post.result_buffer)
    gpu.lib.standin_release()
    watch(manual, post, numbers(1000, 50).tobytes())
    manual.answer(post)
    work.wait(60)
    same(y.get(), 2 * numbers(1000, 50))


def test_a_tensor_that_is_read_may_not_be_a_target(gpu: Any, held: Communicator, manual: FakeDaemon) -> None:
    x, out = array(gpu, numbers(10)), array(gpu, numbers(10))
    gpu.hold(x)
    work = held.all_reduce(x, out, async_op=True)
    with refused("in use by a call that is not finished"):
        held.recv(x, 1)
    gpu.lib.standin_release()
    manual.answer(manual.next_post())
    work.wait(60)
    same(out.get(), 2 * numbers(10))


@pytest.mark.parametrize("waits", [True, False])
def test_a_device_that_breaks_before_its_input_is_there(
    gpu: Any, held: Communicator, manual: FakeDaemon, waits: bool
) -> None:
    """The member leaves, by name: the others would wait for ever."""
    x = array(gpu, numbers(1000))
    gpu.hold(x)
    work = held.all_reduce(x, async_op=True)
    manual.next_post()
    gpu.lib.standin_break(719)
    try:
        with refused("719", "an operation was under way, so this member has left", error=OutcomeUnknown) as caught:
            if waits:
                work.wait(60)
            else:
                wait_until(work.done, 5, "it is found out")
                work.wait(0)
        assert isinstance(caught.value.__cause__, DeviceError)  # others may have had it whole
        with refused("719", error=DeviceError):
            held.barrier()
    finally:
        gpu.lib.standin_break(0)
        gpu.lib.standin_release()
    assert np.array_equal(x.get(), numbers(1000))


# ---- real daemons -----------------------------------------------------------------------------------------


SOON = ["--slow-after=0.3"]
cluster = cluster_fixture(3, after="standin", master_args=SOON, peer_args=SOON)
comms = members_fixture(3)


def test_sums_while_streams_run_late(gpu: Any, comms: list[Any]) -> None:
    """Nobody waits for anybody but by events: queue, call, queue the next, wait at the end."""
    count = (PIECE + 3 * BLOCK) // 4

    def member(i: int) -> list[Any]:
        x = [array(gpu, np.zeros(count, np.float32), device=i % 2) for _ in range(3)]
        out = array(gpu, np.zeros(count, np.float32), "dlpack", device=i % 2)
        works = []
        for k, each in enumerate(x):
            each.put(np.full(count, 10**i * (k + 1), np.float32))
            works.append(comms[i].all_reduce(each, *([out] if k == 2 else []), async_op=True))
        for work in works:
            work.wait(30)
        found = [each.get() for each in (x[0], x[1], out, x[2])]
        return [[each.min(), each.max()] for each in found]

    for i, found in enumerate(Background(member, 3).results()):
        assert found == [[111] * 2, [222] * 2, [333] * 2, [3 * 10**i] * 2]


def test_a_device_that_does_not_get_on_is_named(gpu: Any, comms: list[Any]) -> None:
    tensors = [array(gpu, np.full(5000, 10**k, np.float32)) for k in range(3)]
    gpu.hold(tensors[1])
    works = [comm.all_reduce(tensors[k], async_op=True) for k, comm in enumerate(comms)]
    wanted = f"waits for m1 (rank {comms[1].rank}): its client has not filled its input"

    def said() -> bool:
        with pytest.raises(TimeoutError) as caught:
            works[0].wait(0.05)
        return wanted in str(caught.value)

    wait_until(said, 20, "the others are told whom they wait for")
    gpu.lib.standin_release()
    for work, tensor in zip(works, tensors, strict=True):
        assert work.wait(30).attempts == 1
        assert (tensor.get() == 111).all()


def test_what_was_filled_stays_filled_until_the_end(gpu: Any, comms: list[Any]) -> None:
    """Each attempt reads the table anew: until the operation has ended it is nobody else's."""
    x, y = ([array(gpu, np.full(5000, 10**k, np.float32)) for k in range(3)] for _ in range(2))
    first = [comms[k].all_reduce(x[k], async_op=True) for k in (0, 1)]
    for work in first:
        wait_until(lambda work=work: not work.done() and work.placement._to_host is None, 10, "it is there")
    second = [comms[k].all_reduce(y[k], async_op=True) for k in (0, 1)]
    taken = [comms[k]._connection.arena.take(1) for k in (0, 1) for _ in range(8)]  # what a next call may get
    for lease in taken:
        ffi.memmove(ffi.cast("char *", lease.block.address), bytes(lease.block.nbytes), lease.block.nbytes)
    comms[2].close()
    for works, tensors in ((first, x), (second, y)):
        for k in (0, 1):
            assert set(works[k].wait(10).contributors) == {"m0", "m1"}
            assert (tensors[k].get() == 11).all()


@pytest.mark.parametrize("late", [False, True])
def test_a_member_whose_gate_stays_shut_is_lost_like_any_other(gpu: Any, cluster: Cluster, late: bool) -> None:
    """It closes, or is evicted by call_timeout: the others commit without it, and its tensor is as it was."""
    options = {"call_timeout": 2.5} if late else {}
    group = f"shut-{os.getpid()}-{late}"
    comms = Background(lambda k: cluster.connect(k, group=group, name=f"m{k}", start_world=3, **options), 3).results()
    tensors = [array(gpu, np.full(5000, 10**k, np.float32)) for k in range(3)]
    gpu.hold(tensors[2])
    works = [comm.all_reduce(tensors[k], async_op=True) for k, comm in enumerate(comms)]
    if not late:
        closing = Background(lambda _: comms[2].close(), 1)
    else:
        lost = attempt(lambda: works[2].wait(20))
        assert isinstance(lost.error, Evicted)
        assert "has not filled its input" in str(lost.error)
    for k in (0, 1):
        gathered = works[k].wait(20)
        assert sorted(gathered.contributors) == ["m0", "m1"]
        assert (tensors[k].get() == 11).all()
    gpu.lib.standin_release()
    if not late:
        closing.results()
    assert (tensors[2].get() == 100).all()
    close_all(comms)
