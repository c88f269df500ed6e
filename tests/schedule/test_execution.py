"""The reference itself: its arithmetic, its digest, and that its executor refuses what an engine would get wrong."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash

from tests.schedule import numbers, reference
from tests.schedule.schedules import call, everyone
from wancoll.collective import Codec, Descriptor, DType, Kind, ReduceOp
from wancoll.schedule.build import Builder, Coding, result_at
from wancoll.schedule.steps import Action, Buffer, Direction, Place, Schedule, Step


def test_special_values():
    def f32(*bits: int) -> np.ndarray:
        return np.array(bits, np.uint32).view(np.float32)

    zero, minus, nan, payload, infinity = 0, 0x80000000, 0x7FC00000, 0xFFC12345, 0x7F800000
    a, b = f32(zero, minus, payload, infinity, 1), f32(minus, zero, zero, infinity | minus, 1)
    got = {op: numbers.reduce(DType.float32, op, a, b).view(np.uint32).tolist() for op in ReduceOp}
    assert got[ReduceOp.sum] == [zero, zero, nan, nan, 2]
    assert got[ReduceOp.min] == [minus, minus, nan, infinity | minus, 1]
    assert got[ReduceOp.max] == [zero, zero, nan, infinity, 1]
    assert got[ReduceOp.prod] == [minus, minus, nan, infinity | minus, zero]
    halves = np.array([0x7C01, 0xFE00], np.uint16).view(np.float16)
    assert numbers.reduce(DType.float16, ReduceOp.max, halves, halves).view(np.uint16).tolist() == [0x7E00] * 2
    brains = np.array([0x7F81, 0xFFC0], np.uint16)
    assert numbers.average(DType.bfloat16, brains, brains, 2).tolist() == [0x7FC0] * 2


@pytest.mark.parametrize("dtype", DType)
def test_every_op_is_commutative_to_the_bit(dtype):
    """Schedules rely on it: where a rank's own bytes are an operand they may be the left one."""
    rng = np.random.default_rng(6)
    bits = rng.integers(0, 256, (2, 4096 * dtype.itemsize), np.uint8)
    a, b = (row.view(numbers.storage(dtype)) for row in bits)
    specials = np.frombuffer(bytes(range(256)) * 8, numbers.storage(dtype))
    for x, y in ((a, b), (np.tile(specials, 2), np.repeat(specials, 2)), (a, np.zeros_like(a)), (a, -a)):
        for op in ReduceOp:
            assert numbers.reduce(dtype, op, x, y).tobytes() == numbers.reduce(dtype, op, y, x).tobytes()
        assert numbers.average(dtype, x, y, 3).tobytes() == numbers.average(dtype, y, x, 3).tobytes()


def test_integer_average_of_the_least_value():
    least = np.array([-(2**63), -7], np.int64)
    zero = np.zeros(2, np.int64)
    assert numbers.average(DType.int64, least, zero, 1).tolist() == [-(2**63), -7]
    assert numbers.average(DType.int64, least, zero, 2).tolist() == [-(2**62), -3]


def test_digest():
    data = np.random.default_rng(1).bytes(2 * 65536 + 5)
    blocks = (data[:65536], data[65536:131072], data[131072:])
    hashes = b"".join(xxhash.xxh3_64(block).digest()[::-1] for block in blocks)
    assert numbers.digest(data) == xxhash.xxh3_64(hashes).intdigest()
    assert numbers.digest(b"") == xxhash.xxh3_64(b"").intdigest() == 0x2D06800538D394C2


# ---- what the executor refuses -------------------------------------------------------------------------------


def execute(schedules, count=10, **how):
    inputs = [np.arange(count, dtype=np.float32) + rank for rank in range(len(schedules))]
    return reference.execute(schedules, inputs, DType.float32, ReduceOp.sum, **how)


def rings(n=3):
    return everyone(Descriptor(Kind.all_reduce, count=10), "ring", n)


def changed(schedule, index, **fields):
    steps = list(schedule.steps)
    steps[index] = steps[index]._replace(**fields)
    return schedule._replace(steps=tuple(steps))


def test_a_missing_step():
    schedules = rings()
    schedules[1] = schedules[1]._replace(steps=schedules[1].steps[:-1])
    with pytest.raises(ValueError, match="do not fit"):
        execute(schedules)
    schedules[1] = Schedule(())
    with pytest.raises(ValueError, match="do not fit"):
        execute(schedules)


@pytest.mark.parametrize("field", ["number", "start", "length"])
def test_ends_that_differ(field):
    schedules = rings()
    schedules[1] = changed(schedules[1], 0, **{field: getattr(schedules[1].steps[0], field) + 4})
    with pytest.raises(ValueError, match="do not fit"):
        execute(schedules)


def test_only_one_end_encodes():
    one, other = Builder(0, 2, Coding.of(Codec.bf16, DType.float32)), Builder(1, 2)
    one.send(1, one.mine(0, 40))
    other.recv(0, 0, 40, result=0)
    with pytest.raises(ValueError, match="do not fit"):
        execute([one.finish(), other.finish()], codec=Codec.bf16)


def test_steps_that_wait_for_each_other():
    """Each rank passes on what it will get from the other: both lanes are blocked."""
    builders = [Builder(0, 2), Builder(1, 2)]
    for builder in builders:
        other = 1 - builder.rank
        builder.send(other, builder.recv(other, 0, 40, result=0))
    with pytest.raises(ValueError, match="wait for each other"):
        execute([builder.finish() for builder in builders])


def test_a_send_that_blocks_the_ones_behind_it():
    """Sent in the other order this would pass: on a lane nothing overtakes."""
    one, other = Builder(0, 2), Builder(1, 2)
    back_again = one.recv(1, 0, 40, result=0)
    one.send(1, back_again)
    one.send(1, one.mine(0, 40))
    first, second = other.recv(0, 0, 40), other.recv(0, 0, 40, result=0)
    other.send(0, second)
    assert first.raw != second.raw
    with pytest.raises(ValueError, match="wait for each other"):
        execute([one.finish(), other.finish()])


def test_a_read_without_a_bound():
    schedules = rings()
    index = next(i for i, step in enumerate(schedules[2].steps) if step.after)
    schedules[2] = changed(schedules[2], index, after=())
    for order in range(5):
        with pytest.raises(ValueError, match="which does not bound it"):
            execute(schedules, order=order)


def test_a_bound_of_another_range():
    schedules = rings()
    sends = [i for i, step in enumerate(schedules[0].steps) if step.direction is Direction.send and step.after]
    bound = schedules[0].steps[sends[1]].after
    schedules[0] = changed(schedules[0], sends[1], after=(bound[0] - 2,))
    with pytest.raises(ValueError, match="must not be bound by"):
        execute(schedules)


def hasty():
    """Rank 0 collects at the start of the result what it passes on, and does not wait for that before it receives
    more."""
    one, other = Builder(0, 2), Builder(1, 2)
    value = one.recv_reduced(1, one.mine(0, 40), to=result_at(0))
    one.send(1, value)
    one.recv(1, 0, 40, result=0)
    other.send(0, other.mine(0, 40))
    other.send(0, other.mine(0, 40))
    other.recv(0, 0, 40, result=0)
    return [one.finish(), other.finish()]


def test_bytes_that_are_overwritten_before_they_are_sent():
    """Some orders only would show it in the bytes; that nothing forbids it shows in all."""
    for order in (None, *range(5)):
        with pytest.raises(ValueError, match=r"rank 0, step 2 .* can come before rank 0, step 1 .*, which bounds it"):
            execute(hasty(), order=order)


def test_a_write_without_a_bound():
    """The all-gather's bytes go where the reduce-scatter's partial sums are sent from."""
    schedules = rings()
    index = next(i for i, step in enumerate(schedules[1].steps) if step.direction is Direction.recv and step.after)
    schedules[1] = changed(schedules[1], index, after=())
    with pytest.raises(ValueError, match="which does not bound it"):
        execute(schedules)


def only(*steps, scratch=64):
    return [Schedule(steps, scratch)]


def local(action, to, left, right=None, after=(), result=False, length=40):
    return Step(Direction.local, action, 0, length, to=to, left=left, right=right, after=after, result=result)


INPUT, RESULT, SCRATCH = (Place(buffer, 0) for buffer in Buffer)


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ([], "never gets 40 bytes of its result, from 0 on"),
        ([local(Action.copy, RESULT, INPUT, result=True, length=36)], "never gets 4 bytes of its result, from 36 on"),
        ([local(Action.copy, RESULT, INPUT)], "never gets 40 bytes"),
        ([local(Action.copy, RESULT, INPUT, result=True)] * 2, "writes over a result"),
        ([local(Action.copy, RESULT, SCRATCH, result=True)], "what step -1 wrote"),
        ([local(Action.reduce, RESULT, INPUT, SCRATCH, result=True)], "what step -1 wrote"),
        ([local(Action.copy, INPUT, INPUT)], "writes the caller's bytes"),
        ([local(Action.copy, Place(Buffer.result, 4), INPUT)], "writes beyond the end of result"),
        ([local(Action.copy, RESULT, Place(Buffer.input, 4))], "reads beyond the end of input"),
        ([local(Action.encode, Place(Buffer.scratch, 60, True), INPUT)], "writes beyond the end of scratch"),
    ],
)
def test_memory_is_watched(steps, message):
    with pytest.raises(ValueError, match=message):
        execute(only(*steps), codec=Codec.bf16)


def test_the_executor_runs_every_action_on_one_rank():
    coded = Place(Buffer.scratch, 0, True)
    steps = [
        local(Action.encode, coded, INPUT),
        local(Action.reduce, RESULT, INPUT, coded, after=(0,)),
        local(Action.decode, Place(Buffer.scratch, 64), coded, after=(0,)),
        local(Action.final, RESULT, RESULT, Place(Buffer.scratch, 64), after=(1, 2), result=True),
    ]
    (result,) = execute(only(*steps, scratch=128), codec=Codec.bf16)
    assert result.tolist() == [3.0 * i for i in range(10)]


def test_an_encoded_range_begins_at_a_block():
    step = Step(Direction.local, Action.encode, 4, 36, to=Place(Buffer.scratch, 0, True), left=INPUT)
    with pytest.raises(ValueError, match="does not begin at a block"):
        execute(only(step, scratch=256), codec=Codec.int8)


def test_cuts_are_at_multiples_of_the_whole():
    """So both ends cut alike; the order of parts on several lanes is free, and results do not change."""
    descriptor = call(Kind.all_reduce, 1000, 3)
    schedules, results = everyone(descriptor, "ring", 3), set()
    for cut, lanes in ((0, 1), (4, 1), (12, 3), (1000, 2), (10**6, 4)):
        results |= {x.tobytes() for x in execute(schedules, 1000, order=cut, cut=cut, lanes=lanes)}
    assert len(results) == 1
