"""Properties of schedules, for every rank and world size, and the reference executor against plain numpy."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import reduce as fold
from itertools import pairwise

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from wancoll.collective import DType, ReduceOp
from wancoll.schedule import reference
from wancoll.schedule.plan import Action, Direction, chunk_bounds
from wancoll.schedule.ring import membership_token, ring_all_reduce

worlds = st.integers(1, 64)
RECEIVES = (Action.copy, Action.reduce, Action.final)
SOURCES = (Action.front, Action.back)


def everyone(world_size: int):
    return [ring_all_reduce(rank, world_size) for rank in range(world_size)]


def messages(schedules, direction):
    """(from, to, step, chunk) of all transfers in one direction, in no order."""
    found = []
    for rank, schedule in enumerate(schedules):
        for line in schedule:
            if line.direction is direction:
                ends = (rank, line.peer) if direction is Direction.send else (line.peer, rank)
                found.append((*ends, line.step, line.chunk))
    return sorted(found)


@given(st.integers(0, 10**13), st.integers(1, 1024))
def test_chunks_cover_everything_once_and_differ_by_at_most_one(count, world_size):
    bounds = chunk_bounds(count, world_size)
    assert len(bounds) == world_size
    assert bounds[0][0] == 0
    assert bounds[-1][1] == count
    assert all(before[1] == after[0] for before, after in pairwise(bounds))
    sizes = [stop - start for start, stop in bounds]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1


@given(worlds)
def test_my_send_is_my_neighbours_receive(world_size):
    for schedules in (everyone(world_size), [membership_token(rank, world_size) for rank in range(world_size)]):
        sent = messages(schedules, Direction.send)
        assert sent == messages(schedules, Direction.recv)
        assert len(set(sent)) == len(sent)
        assert all(0 <= sender < world_size and sender != receiver for sender, receiver, _, _ in sent)


@given(worlds)
def test_actions_fit_directions(world_size):
    for schedule in everyone(world_size):
        for line in schedule:
            assert line.action in (SOURCES if line.direction is Direction.send else RECEIVES)
            assert 0 <= line.chunk < world_size


@given(worlds)
def test_after_is_an_earlier_receive_of_the_same_chunk(world_size):
    for schedule in everyone(world_size):
        for index, line in enumerate(schedule):
            if line.direction is Direction.recv or line.action is Action.front:
                assert line.after == -1
            else:
                assert 0 <= line.after < index
                source = schedule[line.after]
                assert source.direction is Direction.recv
                assert source.chunk == line.chunk


@given(worlds)
def test_every_chunk_is_reduced_once_per_rank_in_rank_order(world_size):
    """Follows whose data is in what travels: chunk c gathers ranks c, c+1, ... around the ring."""
    schedules = everyone(world_size)
    held: dict[tuple[int, int], tuple[int, ...]] = {}
    finals = dict.fromkeys(range(world_size), 0)
    wire: dict[tuple[int, int, int], tuple[int, ...]] = {}
    for step in range(2 * (world_size - 1)):
        for direction in (Direction.send, Direction.recv):
            for rank, schedule in enumerate(schedules):
                for line in schedule:
                    if line.step != step or line.direction is not direction:
                        continue
                    if direction is Direction.send:
                        source = (rank,) if line.action is Action.front else held[rank, line.chunk]
                        wire[line.peer, step, line.chunk] = source
                    elif line.action is Action.copy:
                        held[rank, line.chunk] = wire[rank, step, line.chunk]
                    else:
                        assert (rank, line.chunk) not in held
                        held[rank, line.chunk] = (*wire[rank, step, line.chunk], rank)
                        finals[line.chunk] += line.action is Action.final
    if world_size > 1:
        for chunk in range(world_size):
            order = tuple((chunk + i) % world_size for i in range(world_size))
            assert [held[rank, chunk] for rank in range(world_size)] == [order] * world_size
            assert finals[chunk] == 1


@given(worlds, st.integers(0, 10**7))
def test_bytes_sent(world_size, count):
    """2(N-1)/N of the tensor, but for chunks that are one element longer."""
    sizes = [stop - start for start, stop in chunk_bounds(count, world_size)]
    total = 0
    for schedule in everyone(world_size):
        sent = sum(sizes[line.chunk] for line in schedule if line.direction is Direction.send)
        assert abs(sent - 2 * (world_size - 1) * count / world_size) <= 2
        total += sent
    assert total == 2 * (world_size - 1) * count


def test_world_of_one_moves_nothing():
    assert ring_all_reduce(0, 1) == membership_token(0, 1) == ()


def inputs(dtype: DType, op: ReduceOp, world_size: int, count: int, seed: int) -> list[np.ndarray]:
    """Random elements. Those to be multiplied lie between 1/2 and 2, so that no product is too small for a half."""
    rng = np.random.default_rng(seed)
    if dtype.name.startswith(("int", "uint")):
        return [np.frombuffer(rng.bytes(count * dtype.itemsize), dtype.name) for _ in range(world_size)]
    values = rng.normal(size=(world_size, count))
    if op is ReduceOp.prod:
        values = np.sign(values) * np.exp2(rng.uniform(-1, 1, size=values.shape))
    if dtype is DType.bfloat16:
        return list((values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16))
    return list(values.astype(dtype.name))


def run(dtype: DType, op: ReduceOp, world_size: int, count: int, seed: int = 0):
    given_ = inputs(dtype, op, world_size, count, seed)
    kept = [array.copy() for array in given_]
    results = reference.execute(everyone(world_size), given_, dtype, op)
    for before, after in zip(kept, given_, strict=True):
        assert before.tobytes() == after.tobytes()
    assert {result.tobytes() for result in results} == {results[0].tobytes()}
    return given_, results[0]


@given(
    st.sampled_from([d for d in DType if "int" in d.name]),
    st.sampled_from(ReduceOp),
    st.integers(1, 9),
    st.integers(0, 200),
    st.integers(0, 2**32),
)
def test_integers_are_exact(dtype, op, world_size, count, seed):
    given_, result = run(dtype, op, world_size, count, seed)
    modulus, columns = 2 ** (8 * dtype.itemsize), zip(*(array.tolist() for array in given_), strict=True)
    assert result.dtype == dtype.name

    def wrapped(value: int) -> int:
        value %= modulus
        return value - modulus if dtype.name[0] == "i" and value >= modulus // 2 else value

    def truncated(value: int) -> int:
        return abs(value) // world_size * (1 if value >= 0 else -1)

    expected = {
        ReduceOp.sum: lambda column: wrapped(sum(column)),
        ReduceOp.avg: lambda column: truncated(wrapped(sum(column))),
        ReduceOp.min: min,
        ReduceOp.max: max,
        ReduceOp.prod: lambda column: wrapped(math.prod(column)),
    }[op]
    assert result.tolist() == [expected(column) for column in columns]


@given(
    st.sampled_from([DType.float32, DType.float64, DType.float16, DType.bfloat16]),
    st.sampled_from(ReduceOp),
    st.integers(1, 9),
    st.integers(0, 200),
    st.integers(0, 2**32),
)
def test_floats_are_close(dtype, op, world_size, count, seed):
    given_, result = run(dtype, op, world_size, count, seed)

    def exact(array):
        if dtype is DType.bfloat16:
            array = (array.astype(np.uint32) << 16).view(np.float32)
        return array.astype(np.float64)

    values = np.stack([exact(array) for array in given_])
    want = {
        ReduceOp.sum: values.sum(0),
        ReduceOp.avg: values.mean(0),
        ReduceOp.min: values.min(0),
        ReduceOp.max: values.max(0),
        ReduceOp.prod: values.prod(0),
    }[op]
    if op in (ReduceOp.min, ReduceOp.max):
        np.testing.assert_array_equal(exact(result), want)
        return
    # Every hop rounds once: half a unit in the last place of what is gathered so far, which the sizes bound.
    unit = {DType.float32: 2**-24, DType.float64: 2**-52, DType.float16: 2**-11, DType.bfloat16: 2**-8}[dtype]
    size = 2 * np.abs(want) if op is ReduceOp.prod else np.abs(values).sum(0)
    assert (np.abs(exact(result) - want) <= world_size * unit * size).all()


def test_floats_are_reduced_in_rank_order():
    """Chunk c is reduced as ((x[c] + x[c+1]) + x[c+2]) + ...: that order and no other gives these bits."""
    given_, result = run(DType.float32, ReduceOp.sum, 5, 5003)
    for chunk, (start, stop) in enumerate(chunk_bounds(5003, 5)):
        order = [given_[(chunk + i) % 5][start:stop] for i in range(5)]
        assert result[start:stop].tobytes() == fold(np.add, order).tobytes()


def test_avg_divides_once_at_the_end_before_rounding():
    """1 + 1 + 1.0078125 (next to 1 in bfloat16) by hand: 3 is rounded away, the last sum is not."""
    one, next_one = 0x3F80, 0x3F81
    given_ = [np.array([one], np.uint16), np.array([one], np.uint16), np.array([next_one], np.uint16)]
    result = reference.execute(everyone(3), given_, DType.bfloat16, ReduceOp.avg)[0]
    want = np.float32(np.float32(2) + np.float32(1.0078125)) / np.float32(3)  # 1.0026042: nearer to 1
    assert result[0] == one
    assert abs(want - 1) < abs(want - 1.0078125)


def test_special_values():
    def f32(*bits: int) -> np.ndarray:
        return np.array(bits, np.uint32).view(np.float32)

    zero, minus, nan, payload, infinity = 0, 0x80000000, 0x7FC00000, 0xFFC12345, 0x7F800000
    a, b = f32(zero, minus, payload, infinity, 1), f32(minus, zero, zero, infinity | minus, 1)
    got = {op: reference.reduce(DType.float32, op, a, b).view(np.uint32).tolist() for op in ReduceOp}
    assert got[ReduceOp.sum] == [zero, zero, nan, nan, 2]
    assert got[ReduceOp.min] == [minus, minus, nan, infinity | minus, 1]
    assert got[ReduceOp.max] == [zero, zero, nan, infinity, 1]
    assert got[ReduceOp.prod] == [minus, minus, nan, infinity | minus, zero]
    halves = np.array([0x7C01, 0xFE00], np.uint16).view(np.float16)
    assert reference.reduce(DType.float16, ReduceOp.max, halves, halves).view(np.uint16).tolist() == [0x7E00] * 2
    brains = np.array([0x7F81, 0xFFC0], np.uint16)
    assert reference.average(DType.bfloat16, brains, brains, 2).tolist() == [0x7FC0] * 2


def test_integer_average_of_the_least_value():
    least = np.array([-(2**63), -7], np.int64)
    zero = np.zeros(2, np.int64)
    assert reference.average(DType.int64, least, zero, 1).tolist() == [-(2**63), -7]
    assert reference.average(DType.int64, least, zero, 2).tolist() == [-(2**62), -3]


def test_the_executor_refuses_schedules_that_do_not_fit():
    schedules = everyone(3)
    schedules[1] = schedules[1][:-1]
    with pytest.raises(ValueError, match="do not fit"):
        reference.execute(schedules, inputs(DType.float32, ReduceOp.sum, 3, 10, 0), DType.float32, ReduceOp.sum)
    schedules = everyone(3)
    schedules[1] = (replace(schedules[1][0], step=7), *schedules[1][1:])
    with pytest.raises(ValueError, match="do not fit"):
        reference.execute(schedules, inputs(DType.float32, ReduceOp.sum, 3, 10, 0), DType.float32, ReduceOp.sum)


def test_digest():
    data = np.random.default_rng(1).bytes(2 * 65536 + 5)
    blocks = (data[:65536], data[65536:131072], data[131072:])
    hashes = b"".join(xxhash.xxh3_64(block).digest()[::-1] for block in blocks)
    assert reference.digest(data) == xxhash.xxh3_64(hashes).intdigest()
    assert reference.digest(b"") == xxhash.xxh3_64(b"").intdigest() == 0x2D06800538D394C2
