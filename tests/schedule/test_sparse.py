"""Sparse codecs in schedules: what is sent, what all get, and which sums stay with whom."""

from __future__ import annotations

from functools import reduce as fold

import numpy as np
import pytest

from tests.schedule import codec as codecs
from tests.schedule.numbers import average, reduce
from tests.schedule.schedules import SPARSE, inputs_of, mixed_ends, run, wire_bytes
from wancoll.collective import Codec, Descriptor, DType, Kind, ReduceOp
from wancoll.errors import ConfigError
from wancoll.schedule.build import SPARSE as ALGORITHMS
from wancoll.schedule.build import fits_sparse
from wancoll.schedule.choose import choose, make
from wancoll.schedule.steps import Ends, chunk_bounds

COUNTS = (1, 50, 4096, 4097, 5 * 4096 + 7)


def through(codec: Codec, dtype: DType, x: np.ndarray) -> np.ndarray:
    return codecs.decode(codec, dtype, codecs.encode(codec, dtype, x), x.size)


def sums_of(descriptor: Descriptor, inputs: list[np.ndarray]) -> np.ndarray:
    """What the members' encoded tensors add up to, in rank order."""
    dtype = descriptor.dtype
    parts = [through(descriptor.codec, dtype, x) for x in inputs]
    if descriptor.op is ReduceOp.sum or len(parts) == 1:
        return fold(lambda a, b: reduce(dtype, ReduceOp.sum, a, b), parts)
    return average(dtype, fold(lambda a, b: reduce(dtype, ReduceOp.sum, a, b), parts[:-1]), parts[-1], len(parts))


@pytest.mark.parametrize("codec", SPARSE, ids=lambda codec: codec.name)
@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_all_get_the_sum_of_what_was_sent_in_rank_order(codec: Codec, world: int) -> None:
    for seed, count in enumerate(COUNTS):
        dtype = (DType.float32, DType.bfloat16, DType.float64)[seed % 3]
        descriptor = Descriptor(Kind.all_reduce, dtype, ReduceOp(seed % 2), count, codec=codec)
        inputs = inputs_of(descriptor, world, seed)
        expected = sums = sums_of(descriptor, inputs)
        if codec.of_result and world > 1:
            expected = through(codec, dtype, sums)
        twice = codec.of_result
        for algorithm in ALGORITHMS[twice]:
            digests: list[int] = []
            for ends in ([Ends()] * world, [Ends(kept=twice)] * world, _ends(world, seed, twice)):
                kept: list[np.ndarray] = []
                how = {"order": seed, "cut": 1 << 15, "lanes": 2, "digests": digests, "kept": kept, "ends": ends}
                for result in run(descriptor, algorithm, world, inputs, **how):
                    assert result.tobytes() == expected.tobytes()
                bounds = chunk_bounds(count, world, 4096)
                for one, end, (start, stop) in zip(kept, ends, bounds, strict=True):
                    assert one.tobytes() == (sums[start:stop] if end.kept and world > 1 else sums[:0]).tobytes()
            assert len(set(digests)) == 1


def _ends(world: int, seed: int, twice: bool) -> list[Ends]:
    """Some ranks have their input encoded; where the result is, some take it so, and others keep sums."""
    mixed = mixed_ends(world, 0b1001_1100_0110 >> seed)
    return [Ends(end.input, end.result and twice, twice and not end.result) for end in mixed]


def test_a_hundred_and_two_hundred_times_fewer_bytes_than_a_ring_of_floats() -> None:
    count, world = 1 << 24, 4
    raw = wire_bytes(make(Descriptor(Kind.all_reduce, count=count), "ring", 0, world))
    for name, least in (("top1.5%", 101), ("top1.5%/top1.5%", 202)):
        codec = Codec.named(name)
        assert codec is not None
        descriptor = Descriptor(Kind.all_reduce, count=count, codec=codec)
        algorithm = choose(descriptor, world, {"all_reduce": [(0, "tree")]})
        assert algorithm == ALGORITHMS[codec.of_result][0]
        for rank in range(world):
            assert raw / wire_bytes(make(descriptor, algorithm, rank, world), codec) > least


def test_what_fits() -> None:
    once, twice = SPARSE[0], SPARSE[2]
    assert fits_sparse(once, ReduceOp.sum, "auto")
    assert fits_sparse(twice, ReduceOp.avg, "direct")
    assert not fits_sparse(twice, ReduceOp.avg, "full_exchange")
    assert not fits_sparse(once, ReduceOp.max, "auto")
    assert not fits_sparse(once, ReduceOp.sum, "tree")
    with pytest.raises(ConfigError):
        codecs.encode(once, DType.int32, np.zeros(3, np.int32))


def test_where_a_link_is_missing_it_goes_around_the_ring() -> None:
    for codec in SPARSE:
        descriptor = Descriptor(Kind.all_reduce, count=1 << 16, codec=codec)
        assert choose(descriptor, 5, {}, avoid={(0, 2)}) == "ring"
