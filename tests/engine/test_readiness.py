"""Inputs that are filled while the op runs, and results whose blocks are shown as they become final."""

import os
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from tests.engine.engines import KIB, Mesh, mesh_of, random_bits, same, statistics, wait_for, wait_until
from tests.later import later
from tests.schedule import codec, numbers, reference
from wancoll.collective import REDUCING, ROOTED, Codec, Descriptor, DType, Kind, ReduceOp
from wancoll.limits import BLOCK as DIGEST_BLOCK
from wancoll.native.engine import Cancelled, Done, Engine
from wancoll.schedule.choose import ALGORITHMS, make, sizes
from wancoll.schedule.steps import RAW_ENDS, Ends

PAIRS = [(kind, algorithm) for kind, names in ALGORITHMS.items() for algorithm in names]
ATTEMPT = 7
SITES = ("a", "a", "b", "a", "a", "b")


@contextmanager
def bell_of(engine: Engine) -> Iterator[int]:
    fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
    engine.add_bell(fd)
    try:
        yield fd
    finally:
        with suppress(RuntimeError):  # the engine is closed
            engine.remove_bell(fd)
        os.close(fd)


@contextmanager
def bells_of(mesh: Mesh) -> Iterator[list[int]]:
    fds = [os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) for _ in mesh.engines]
    for engine, fd in zip(mesh.engines, fds, strict=True):
        engine.add_bell(fd)
    yield fds
    for engine, fd in zip(mesh.engines, fds, strict=True):
        engine.remove_bell(fd)
        os.close(fd)


@dataclass
class Input:
    """One rank's input, which is there in pieces only. What is not holds other bytes."""

    whole: Any  # with a codec what the elements are in it
    bell: int
    nbytes: int = 0  # of the elements; 0: the whole's
    block: int = DIGEST_BLOCK  # what a block of the elements takes in it

    def __post_init__(self) -> None:
        self.input_buffer = np.full(self.whole.nbytes, 0xA7, np.uint8)
        self.filled = np.zeros(-(-(self.nbytes or self.whole.nbytes) // DIGEST_BLOCK) + 1, np.uint8)
        self.missing = list(range(len(self.filled) - 1))

    def fill(self, *blocks: int) -> None:
        """These blocks are there; then the bell rings once."""
        bytes_ = self.whole.view(np.uint8)
        for block in blocks:
            part = slice(block * self.block, (block + 1) * self.block)
            self.input_buffer[part] = bytes_[part]
            self.filled[block] = 1
            self.missing.remove(block)
        os.eventfd_write(self.bell, 1)


def feed(inputs: list[Input], seed: int) -> None:
    """Fill all of them, by turns, a few blocks at a time, in any order."""
    draw = random.Random(seed)
    while any(one.missing for one in inputs):
        one = draw.choice([one for one in inputs if one.missing])
        one.fill(*draw.sample(one.missing, min(len(one.missing), draw.randint(1, 3))))
        if draw.random() < 0.2:
            time.sleep(0.0005)


def words_of(nbytes: int) -> Any:
    return np.zeros(-(-nbytes // DIGEST_BLOCK) + 1, np.uint32)


def run(mesh: Mesh, bells: list[int], call: Descriptor, algorithm: str, seed: int) -> None:
    """One op whose inputs come late and in odd pieces: the bits are the reference's."""
    world = mesh.world
    mesh.seq += 1
    wanted = [sizes(call, rank, world, ()) for rank in range(world)]
    rng = np.random.default_rng(seed)
    input_buffers = [
        rng.integers(-999, 999, input_buffer // 4).astype(numbers.storage(call.dtype)) for input_buffer, _ in wanted
    ]
    result_buffers = [np.full(result_buffer // 4, 85, numbers.storage(call.dtype)) for _, result_buffer in wanted]
    ends = [Ends(rank != 1, rank != 2) for rank in range(world)] if call.codec else [RAW_ENDS] * world
    schedules = [make(call, algorithm, rank, world, sites=SITES[:world], ends=ends[rank]) for rank in range(world)]
    digests: list[int] = []
    result_bytes = [result_buffer for _, result_buffer in wanted]
    expected = reference.execute(
        schedules, input_buffers, call.dtype, call.op, codec=call.codec, result_bytes=result_bytes, digests=digests
    )
    inputs = [Input(whole, bell) for whole, bell in zip(input_buffers, bells, strict=True)]
    for rank, (coded_input, coded_result, *_) in enumerate(ends):
        if coded_input:
            coded, block = codec.encode(call.codec, call.dtype, input_buffers[rank]), DIGEST_BLOCK // 4
            inputs[rank] = Input(coded, bells[rank], 4 * call.count, codec.coded_bytes(call.codec, block))
        if coded_result:
            result_buffers[rank] = np.full(codec.coded_bytes(call.codec, call.count), 85, np.uint8)
    shown = [words_of(result_buffer) for result_buffer in result_bytes]
    for rank, one in enumerate(inputs):
        mesh.run(
            rank, mesh.seq, call, algorithm, one.input_buffer, result_buffers[rank], sites=SITES[:world],
            filled=one.filled, shown=shown[rank], attempt=ATTEMPT, ends=ends[rank],
        )  # fmt: skip
    feed(inputs, seed)
    done = [wait_for(engine, Done) for engine in mesh.engines]
    for rank in range(world):
        if ends[rank].result:
            result_buffers[rank] = codec.decode(call.codec, call.dtype, result_buffers[rank], call.count)
        assert same(result_buffers[rank], expected[rank]), (str(call), algorithm, rank)
        assert done[rank].digest == digests[rank]
        assert shown[rank].tolist() == [ATTEMPT] * (len(shown[rank]) - 1) + [0]


@pytest.mark.parametrize("world", [1, 2, 3, *later(4, 5, 6)])
def test_every_collective_waits_for_the_bytes_that_it_reads(world: int) -> None:
    stripe = (64, 1024)[world % 2] * KIB  # parts of one block, and of many
    with mesh_of(world, lanes=2, workers=1 + world % 2, stripe=stripe) as mesh, bells_of(mesh) as bells:
        for number, (kind, algorithm) in enumerate(PAIRS):
            for count in (5, 70_001):
                dtype = DType.float32 if number % 2 else DType.int32
                op = (ReduceOp.sum, ReduceOp.avg, ReduceOp.min)[number % 3] if kind in REDUCING else ReduceOp.sum
                root = count % world if kind in ROOTED else -1
                run(mesh, bells, Descriptor(kind, dtype, op, count, root=root), algorithm, seed=number)


@pytest.mark.parametrize("each", [Codec.bf16, Codec.int8, Codec.int4, Codec.fp8])
def test_what_is_encoded_waits_too(each: Codec) -> None:
    with mesh_of(3, lanes=3) as mesh, bells_of(mesh) as bells:
        for algorithm in ALGORITHMS[Kind.all_reduce]:
            call = Descriptor(Kind.all_reduce, DType.float32, ReduceOp.sum, 150_001, codec=each)
            run(mesh, bells, call, algorithm, seed=int(each))


def test_a_step_starts_with_its_first_bytes() -> None:
    """Own bytes of the first chunk alone are enough for the neighbour to get them."""
    with mesh_of(2, lanes=1) as mesh, bells_of(mesh) as bells:
        inputs = [Input(random_bits(DType.int32, 256 * KIB, rank), bell) for rank, bell in enumerate(bells)]
        result_buffers = [np.zeros_like(one.whole) for one in inputs]
        call = Descriptor(Kind.all_reduce, DType.int32, count=256 * KIB)
        for rank, one in enumerate(inputs):
            mesh.run(rank, 1, call, "ring", one.input_buffer, result_buffers[rank], filled=one.filled)
        assert statistics(mesh.engines[0], 101).bytes_sent == 0
        inputs[0].fill(0)
        wait_until(lambda: statistics(mesh.engines[0], 101).bytes_sent >= DIGEST_BLOCK)
        assert statistics(mesh.engines[0], 101).bytes_sent < 2 * DIGEST_BLOCK
        # The other end has its own bytes of that chunk to add, which are not there: the frame waits in the socket.
        wait_until(lambda: statistics(mesh.engines[1], 100).parked)
        assert not result_buffers[1].any()
        feed(inputs, 1)
        for engine, result_buffer in zip(mesh.engines, result_buffers, strict=True):
            wait_for(engine, Done)
            assert same(result_buffer, inputs[0].whole + inputs[1].whole)


def test_what_was_there_once_stays_there() -> None:
    """Bytes of the table that are taken back keep nobody waiting; and who lacks input, the engine says."""
    with mesh_of(2, lanes=1) as mesh, bells_of(mesh) as bells:
        inputs = [Input(random_bits(DType.int32, 64 * KIB, rank), bell) for rank, bell in enumerate(bells)]
        result_buffers = [np.zeros_like(one.whole) for one in inputs]
        call = Descriptor(Kind.all_reduce, DType.int32, count=64 * KIB)
        assert not mesh.engines[0].lacks_input(1)  # it knows no such op
        mesh.run(0, 1, call, "ring", inputs[0].input_buffer, result_buffers[0], filled=inputs[0].filled, op_id=1)
        assert mesh.engines[0].lacks_input(1)
        inputs[0].fill(0, 1, 2)
        assert mesh.engines[0].lacks_input(1)
        inputs[0].fill(3)
        wait_until(lambda: not mesh.engines[0].lacks_input(1))
        inputs[0].filled[:] = 0
        os.eventfd_write(bells[0], 1)
        inputs[1].fill(0, 1, 2, 3)
        mesh.run(1, 1, call, "ring", inputs[1].input_buffer, result_buffers[1], filled=inputs[1].filled, op_id=1)
        for engine, result_buffer in zip(mesh.engines, result_buffers, strict=True):
            wait_for(engine, Done)
            assert same(result_buffer, inputs[0].whole + inputs[1].whole)
            assert not engine.lacks_input(1)


def test_what_is_filled_before_the_post_needs_no_bell() -> None:
    with mesh_of(2, lanes=1) as mesh, bells_of(mesh) as bells:
        inputs = [Input(random_bits(DType.int32, 64 * KIB, rank), bell) for rank, bell in enumerate(bells)]
        call = Descriptor(Kind.all_reduce, DType.int32, count=64 * KIB)
        inputs[0].fill(0, 1, 2, 3)
        mesh.run(
            0, 1, call, "ring", inputs[0].input_buffer, np.zeros_like(inputs[0].whole), filled=inputs[0].filled, op_id=1
        )
        wait_until(lambda: not mesh.engines[0].lacks_input(1))


@pytest.mark.parametrize("world", [1, 2])
def test_a_missing_input_costs_no_processor_time(world: int) -> None:
    with mesh_of(world, lanes=1, stripe=4096 * KIB) as mesh, bells_of(mesh) as bells:
        inputs = [Input(random_bits(DType.int32, 300_000, rank), bell) for rank, bell in enumerate(bells)]
        call = Descriptor(Kind.all_reduce, DType.int32, count=300_000)
        for rank, one in enumerate(inputs):
            mesh.run(rank, 1, call, "ring", one.input_buffer, np.zeros_like(one.whole), filled=one.filled)
            one.fill(0, 3)
        before = time.process_time()
        with pytest.raises(TimeoutError):
            wait_for(mesh.engines[0], Done, 0.3)
        assert time.process_time() - before < 0.15
        feed(inputs, 2)
        for engine in mesh.engines:
            wait_for(engine, Done)


@pytest.mark.parametrize("seed", range(6))
def test_an_attempt_given_up_before_all_is_there(seed: int) -> None:
    """The next epoch's attempt waits for the same input, and goes on where it stands."""
    draw = random.Random(seed)
    with mesh_of(3, lanes=2) as mesh, bells_of(mesh) as bells:
        input_buffers = [random_bits(DType.int32, 400_001, rank) for rank in range(3)]
        inputs = [Input(input_buffer, bell) for input_buffer, bell in zip(input_buffers, bells, strict=True)]
        call = Descriptor(Kind.all_reduce, DType.int32, count=400_001)
        result_buffers = [np.zeros_like(input_buffer) for input_buffer in input_buffers]
        shown = [words_of(input_buffer.nbytes) for input_buffer in input_buffers]

        def post(attempt: int, members: list[int]) -> None:
            for rank in members:
                mesh.run(
                    rank, 9, call, "ring", inputs[rank].input_buffer, result_buffers[rank], members=members,
                    filled=inputs[rank].filled, shown=shown[rank], attempt=attempt, op_id=attempt,
                )  # fmt: skip

        post(1, [0, 1, 2])
        for one in inputs:
            one.fill(*draw.sample(one.missing, draw.randint(0, len(one.missing) - 1)))
        time.sleep(draw.random() * 0.01)
        mesh.epoch = 2
        for rank in (0, 1):
            for other in {0, 1, 2} - {rank}:
                mesh.engines[rank].set_epoch(100 + other, 2)
            mesh.engines[rank].cancel(1)
        post(2, [0, 1])
        feeder = threading.Thread(target=feed, args=(inputs, seed))
        feeder.start()
        for rank in (0, 1):
            told: list[Any] = []
            wait_until(lambda engine=mesh.engines[rank], told=told: told.extend(engine.events()) or len(told) == 2)
            assert Cancelled(1) in told
            assert [event.op for event in told if isinstance(event, Done)] == [2]
            assert same(result_buffers[rank], input_buffers[0] + input_buffers[1])
            assert set(shown[rank][:-1]) == {2}
        feeder.join()
        mesh.engines[2].cancel(1)
        wait_for(mesh.engines[2], Cancelled)


def test_bells_that_say_nothing() -> None:
    """Rung without need, by two at once, while an op waits and when none does; an input that is unfilled again."""
    with mesh_of(2, lanes=2) as mesh, bells_of(mesh) as bells, bell_of(mesh.engines[0]) as other:
        for fd in (*bells, other):
            for _ in range(100):
                os.eventfd_write(fd, 1)
        inputs = [Input(random_bits(DType.int32, 300_000, rank), bell) for rank, bell in enumerate(bells)]
        result_buffers = [np.zeros_like(one.whole) for one in inputs]
        call = Descriptor(Kind.all_reduce, DType.int32, count=300_000)
        for rank, one in enumerate(inputs):
            mesh.run(rank, 1, call, "ring", one.input_buffer, result_buffers[rank], filled=one.filled)
        for _ in range(1000):
            os.eventfd_write(bells[0], 1)
            inputs[0].filled[1] ^= 1  # takes back what it said: that is its own harm, and nobody else's
        inputs[0].filled[:] = 0
        feed(inputs, 3)
        for engine in mesh.engines:
            wait_for(engine, Done)
        assert same(result_buffers[0], result_buffers[1])


def test_what_is_shown_is_final() -> None:
    """Whoever copies a block when it is shown has the bytes of the result."""
    world, count = 3, 2_000_000
    with mesh_of(world, lanes=2) as mesh:
        for attempt in range(1, 4):
            mesh.seq += 1
            input_buffers = [random_bits(DType.int32, count, 10 * attempt + rank) for rank in range(world)]
            result_buffers = [np.zeros_like(input_buffer) for input_buffer in input_buffers]
            shown = [words_of(input_buffer.nbytes) for input_buffer in input_buffers]
            call = Descriptor(Kind.all_reduce, DType.int32, count=count)
            copies: dict[int, bytes] = {}
            for rank in range(world):
                mesh.run(
                    rank,
                    mesh.seq,
                    call,
                    "ring",
                    input_buffers[rank],
                    result_buffers[rank],
                    shown=shown[rank],
                    attempt=attempt,
                )
            bytes_ = result_buffers[0].view(np.uint8)

            def look(words: Any = shown[0], bytes_: Any = bytes_, wanted: int = attempt, to: Any = copies) -> bool:
                for block in np.flatnonzero(words == wanted):
                    if int(block) not in to:
                        to[int(block)] = bytes_[block * DIGEST_BLOCK : (block + 1) * DIGEST_BLOCK].tobytes()
                return len(to) == len(words) - 1

            wait_until(look)
            for engine in mesh.engines:
                wait_for(engine, Done)
            assert b"".join(copies[block] for block in sorted(copies)) == sum(input_buffers).tobytes()
