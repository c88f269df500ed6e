"""Codecs in the kinds other than all_reduce: whose bytes are encoded, once, and what everyone makes of them."""

from __future__ import annotations

from functools import reduce as fold
from itertools import accumulate

import numpy as np
import pytest

from tests.schedule import codec as codecs
from tests.schedule.numbers import average, reduce
from tests.schedule.schedules import call, everyone, inputs_of, run, sends, wire_bytes
from wancoll.collective import REDUCING, Codec, Descriptor, DType, Kind, ReduceOp
from wancoll.schedule.choose import ALGORITHMS, choose, sizes

KINDS = [
    kind for kind, names in ALGORITHMS.items() if "direct" in names and kind not in (Kind.all_reduce, Kind.barrier)
]
PAIRS = [(kind, algorithm) for kind in KINDS for algorithm in ALGORITHMS[kind]]
DTYPES = (DType.float32, DType.bfloat16, DType.float64)


def through(descriptor: Descriptor, x: np.ndarray) -> np.ndarray:
    return codecs.decode(
        descriptor.codec, descriptor.dtype, codecs.encode(descriptor.codec, descriptor.dtype, x), x.size
    )


def sums(descriptor: Descriptor, parts: list[np.ndarray]) -> np.ndarray:
    dtype, add = descriptor.dtype, lambda a, b: reduce(descriptor.dtype, ReduceOp.sum, a, b)
    if descriptor.op is ReduceOp.sum or len(parts) == 1:
        return fold(add, parts)
    return average(dtype, fold(add, parts[:-1]), parts[-1], len(parts))


def expected(descriptor: Descriptor, inputs: list[np.ndarray], rank: int) -> np.ndarray:
    """What *rank* gets where no sum is encoded."""
    world, kind = len(inputs), descriptor.kind
    cuts = [0, *accumulate(descriptor.block_counts(world))]

    def block(of: np.ndarray, number: int) -> np.ndarray:
        return through(descriptor, of[cuts[number] : cuts[number + 1]])

    at_root = rank == descriptor.root
    match kind:
        case Kind.reduce_scatter:
            return sums(descriptor, [block(x, rank) for x in inputs])
        case Kind.reduce:
            return sums(descriptor, [through(descriptor, x) for x in inputs]) if at_root else inputs[0][:0]
        case Kind.broadcast:
            return through(descriptor, inputs[descriptor.root])
        case Kind.scatter:
            return block(inputs[descriptor.root], rank)
        case Kind.all_to_all:
            return np.concatenate([block(x, rank) for x in inputs])
        case Kind.gather if not at_root:
            return inputs[0][:0]
        case _:
            return np.concatenate([through(descriptor, x) for x in inputs])


@pytest.mark.parametrize(("kind", "algorithm"), PAIRS)
@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_what_is_given_is_encoded_once_and_all_decode_the_same(kind: Kind, algorithm: str, world: int) -> None:
    for seed, count in enumerate((1, 50, 128, 1000, 5000)):
        codec, dtype = (Codec.int8, Codec.int4, Codec.fp8)[seed % 3], DTYPES[seed % 3]
        op = ReduceOp(seed % 2) if kind in REDUCING else ReduceOp.sum
        descriptor = call(kind, count, world, dtype=dtype, op=op, codec=codec)
        inputs, digests = inputs_of(descriptor, world, seed), list[int]()
        results = run(descriptor, algorithm, world, inputs, order=seed, cut=1 << 12, lanes=2, digests=digests)
        again = kind in REDUCING and algorithm != "direct" and world > 2  # encodes sums
        for rank, result in enumerate(results):
            wanted = expected(descriptor, inputs, rank)
            if again:
                assert np.allclose(result, wanted, atol=0.5 * world) or dtype is DType.bfloat16
            else:
                assert result.tobytes() == wanted.tobytes()
        if kind in (Kind.all_gather, Kind.broadcast):
            assert len(set(digests)) == 1


@pytest.mark.parametrize("algorithm", ["direct", "ring"])
@pytest.mark.parametrize("kind", [Kind.all_gather, Kind.reduce_scatter])
def test_blocks_of_any_size_begin_at_blocks_of_the_codec(kind: Kind, algorithm: str) -> None:
    for counts in ((0, 1, 300), (129, 0, 128), (70_001, 5, 33)):
        descriptor = Descriptor(kind, counts=counts, codec=Codec.int4)
        inputs = inputs_of(descriptor, 3, 7)
        results = run(descriptor, algorithm, 3, inputs, order=3, cut=1 << 14, lanes=3)
        for rank, result in enumerate(results if kind is Kind.all_gather or algorithm == "direct" else ()):
            assert result.tobytes() == expected(descriptor, inputs, rank).tobytes()


def test_a_quarter_of_the_bytes() -> None:
    for kind, algorithm in PAIRS:
        coded = call(kind, 1 << 14, 4, codec=Codec.int8)
        for one, other in zip(
            everyone(coded, algorithm, 4), everyone(call(kind, 1 << 14, 4), algorithm, 4), strict=True
        ):
            assert len(sends(one)) == len(sends(other))
            assert wire_bytes(one, Codec.int8) <= 0.26 * wire_bytes(other)
        assert sizes(coded, 0, 4) == sizes(call(kind, 1 << 14, 4), 0, 4)


def test_where_sums_are_encoded_the_plan_is_not_asked() -> None:
    for kind, planned in ((Kind.all_gather, "ring"), (Kind.broadcast, "tree"), (Kind.reduce_scatter, "direct")):
        assert choose(call(kind, 5000, 4, codec=Codec.int8), 4, {kind.name: [(0, planned)]}) == planned
    assert (
        choose(call(Kind.reduce_scatter, 5000, 4, codec=Codec.int8), 4, {"reduce_scatter": [(0, "ring")]}) == "direct"
    )
