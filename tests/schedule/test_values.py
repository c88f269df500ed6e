"""What schedules compute: every kind and algorithm on the reference executor, bit for bit in the documented order."""

from __future__ import annotations

import math
from functools import reduce as fold

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.later import at_night, later
from tests.schedule import codec as codecs
from tests.schedule import numbers
from tests.schedule.schedules import ALL_REDUCES, CODECS, PAIRS, call, inputs_of, mixed_ends, run, sites_of
from wancoll.collective import DATALESS, SAME_RESULT, Codec, Descriptor, DType, Kind, ReduceOp
from wancoll.schedule import choose
from wancoll.schedule.algorithms.hierarchical import members_by_site
from wancoll.schedule.build import takes
from wancoll.schedule.steps import chunk_bounds

WORLDS = range(1, 10)
by_worlds = pytest.mark.parametrize("worlds", [range(1, 6), *at_night(range(6, 10))], ids=["to 5", "to 9"])
COUNTS = (0, 1, 5, 333)

every_pair = pytest.mark.parametrize(("kind", "algorithm"), PAIRS, ids=[f"{k.name}-{a}" for k, a in PAIRS])


# ---- the documented order of each algorithm, as trees of ranks ---------------------------------------------


def in_rank_order(items):
    return fold(lambda left, right: (left, right), items)


def in_pairs(items):
    """((0 1) (2 3)) 4: neighbours meet, level by level; one without a neighbour waits."""
    items = list(items)
    while len(items) > 1:
        items = [(*items[i : i + 2],) if i + 1 < len(items) else items[i] for i in range(0, len(items), 2)]
    return items[0]


def in_places(n, half, root=0):
    """The in-order tree of the root and, below it, of the others: of the second half each is one place further."""
    ranks = [(root + distance) % n for distance in range(1, n)]
    places = [root, *ranks] if half == 0 else [root, *ranks[-1:], *ranks[:-1]]

    def below(first, stop):
        """Of places [first, stop): the one that most powers of two divide passes on what the others have."""
        if first == stop:
            return None
        top = max(range(first, stop), key=lambda place: place & -place)
        value = places[top]
        for other in (below(first, top), below(top + 1, stop)):
            value = value if other is None else (value, other)
        return value

    return places[0] if n == 1 else (places[0], below(1, n))


def chunks_of(algorithm, n):
    """Into how many chunks, of different orders, the tensor is cut."""
    return 2 if algorithm == "double_tree" else n


def order_of(algorithm, n, chunk, sites):
    """Which ranks' values are reduced with which, for chunk *chunk* of chunks_of."""
    match algorithm:
        case "ring":
            return in_rank_order([(chunk + i) % n for i in range(n)])
        case "direct" | "naive" | "full_exchange":
            return in_rank_order(range(n))
        case "tree":
            return in_pairs(range(n))
        case "double_tree":
            return in_places(n, chunk)
        case "halving_doubling":
            pairs = n - 2 ** int(math.log2(n))
            return in_pairs([*((2 * i, 2 * i + 1) for i in range(pairs)), *range(2 * pairs, n)])
        case "hierarchical":
            return in_rank_order([in_rank_order(group) for group in members_by_site(sites)])


def evaluate(order, values, descriptor, n):
    """The tree's value; avg divides at its root."""

    def at(node):
        if isinstance(node, int):
            return values[node]
        return numbers.reduce(descriptor.dtype, descriptor.op, *map(at, node))

    if isinstance(order, int):
        return values[order]
    if descriptor.op is ReduceOp.avg:
        return numbers.average(descriptor.dtype, *map(at, order), n)
    return at(order)


def same_bits(one, other):
    return one.dtype == other.dtype and one.tobytes() == other.tobytes()


def expected_all_reduce(descriptor, algorithm, inputs, sites, multiple=1):
    n, parts = len(inputs), []
    for chunk, (start, stop) in enumerate(chunk_bounds(descriptor.count, chunks_of(algorithm, n), multiple)):
        order = order_of(algorithm, n, chunk, sites)
        parts.append(evaluate(order, [x[start:stop] for x in inputs], descriptor, n))
    return np.concatenate(parts)


@pytest.mark.parametrize("algorithm", ALL_REDUCES)
@pytest.mark.parametrize("op", [ReduceOp.sum, ReduceOp.avg, ReduceOp.max])
def test_all_reduce_is_the_fold_in_the_documented_order(algorithm, op):
    for n in WORLDS:
        for count in COUNTS:
            descriptor = Descriptor(Kind.all_reduce, op=op, count=count)
            inputs = inputs_of(descriptor, n, seed=count)
            expected = expected_all_reduce(descriptor, algorithm, inputs, sites_of(n))
            assert all(same_bits(result, expected) for result in run(descriptor, algorithm, n, inputs))


def test_the_orders_differ_in_bits():
    """Else the test above would not tell them apart."""
    descriptor = Descriptor(Kind.all_reduce, count=5003)
    inputs = inputs_of(descriptor, 5, seed=1)
    expected = {
        name: expected_all_reduce(descriptor, name, inputs, sites_of(5)).tobytes()
        for name in ("ring", "direct", "tree", "double_tree", "halving_doubling", "hierarchical")
    }
    assert len(set(expected.values())) == 6


@pytest.mark.parametrize("algorithm", ALL_REDUCES)
@pytest.mark.parametrize("n", [12, *later(17, 32)])
def test_all_reduce_of_large_worlds(algorithm, n):
    descriptor = Descriptor(Kind.all_reduce, count=100)
    inputs = inputs_of(descriptor, n, seed=n)
    expected = expected_all_reduce(descriptor, algorithm, inputs, sites_of(n))
    assert all(same_bits(result, expected) for result in run(descriptor, algorithm, n, inputs))


@pytest.mark.parametrize("sites", ["ab", "aab", "abb", "aaabb", "aaaabbb", "aaaaabbc", "abcabcabd", "aaaabbbbcccc"])
def test_hierarchical_with_sites_of_any_sizes(sites):
    for count in (1, 10, 1003):
        for codec in (Codec.none, Codec.int8):
            descriptor = Descriptor(Kind.all_reduce, op=ReduceOp.avg, count=count, codec=codec)
            inputs = inputs_of(descriptor, len(sites), seed=count)
            results = run(descriptor, "hierarchical", len(sites), inputs, sites=sites)
            exact = expected_all_reduce(descriptor, "hierarchical", inputs, sites)
            assert len({result.tobytes() for result in results}) == 1
            if codec is Codec.none:
                assert same_bits(results[0], exact)
            else:
                assert np.linalg.norm(results[0] - exact) <= 0.02 * np.linalg.norm(exact)


@given(
    st.sampled_from([d for d in DType if "int" in d.name]),
    st.sampled_from(ReduceOp),
    st.sampled_from(ALL_REDUCES),
    st.integers(1, 9),
    st.integers(0, 200),
    st.integers(0, 2**32),
)
def test_integers_are_exact(dtype, op, algorithm, n, count, seed):
    descriptor = Descriptor(Kind.all_reduce, dtype, op, count)
    inputs = inputs_of(descriptor, n, seed)
    result = run(descriptor, algorithm, n, inputs)[0]
    modulus, columns = 2 ** (8 * dtype.itemsize), zip(*(array.tolist() for array in inputs), strict=True)
    assert result.dtype == dtype.name

    def wrapped(value: int) -> int:
        value %= modulus
        return value - modulus if dtype.name[0] == "i" and value >= modulus // 2 else value

    def truncated(value: int) -> int:
        return abs(value) // n * (1 if value >= 0 else -1)

    expected = {
        ReduceOp.sum: lambda column: wrapped(sum(column)),
        ReduceOp.avg: lambda column: truncated(wrapped(sum(column))),
        ReduceOp.min: min,
        ReduceOp.max: max,
        ReduceOp.prod: lambda column: wrapped(math.prod(column)),
    }[op]
    assert result.tolist() == [expected(column) for column in columns]


def exact_values(dtype, array):
    if dtype is DType.bfloat16:
        array = (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float64)


@given(
    st.sampled_from([DType.float32, DType.float64, DType.float16, DType.bfloat16]),
    st.sampled_from(ReduceOp),
    st.sampled_from(ALL_REDUCES),
    st.integers(1, 9),
    st.integers(0, 200),
    st.integers(0, 2**32),
)
def test_floats_are_close(dtype, op, algorithm, n, count, seed):
    descriptor = Descriptor(Kind.all_reduce, dtype, op, count)
    inputs = inputs_of(descriptor, n, seed)
    result = exact_values(dtype, run(descriptor, algorithm, n, inputs)[0])
    values = np.stack([exact_values(dtype, array) for array in inputs])
    want = {
        ReduceOp.sum: values.sum(0),
        ReduceOp.avg: values.mean(0),
        ReduceOp.min: values.min(0),
        ReduceOp.max: values.max(0),
        ReduceOp.prod: values.prod(0),
    }[op]
    if op in (ReduceOp.min, ReduceOp.max):
        np.testing.assert_array_equal(result, want)
        return
    # Every hop rounds once: half a unit in the last place of what is gathered so far, which the sizes bound.
    unit = {DType.float32: 2**-24, DType.float64: 2**-52, DType.float16: 2**-11, DType.bfloat16: 2**-8}[dtype]
    size = 2 * np.abs(want) if op is ReduceOp.prod else np.abs(values).sum(0)
    assert (np.abs(result - want) <= n * unit * size).all()


def test_avg_divides_once_at_the_end_before_rounding():
    """1 + 1 + 1.0078125 (next to 1 in bfloat16) by hand: 3 is rounded away, the last sum is not."""
    one, next_one = 0x3F80, 0x3F81
    inputs = [np.array([one], np.uint16), np.array([one], np.uint16), np.array([next_one], np.uint16)]
    result = run(Descriptor(Kind.all_reduce, DType.bfloat16, ReduceOp.avg, 1), "ring", 3, inputs)[0]
    want = np.float32(np.float32(2) + np.float32(1.0078125)) / np.float32(3)  # 1.0026042: nearer to 1
    assert result[0] == one
    assert abs(want - 1) < abs(want - 1.0078125)


# ---- the other kinds -----------------------------------------------------------------------------------------


def expected_results(descriptor, algorithm, inputs, n):
    """Every rank's result; None where it has none."""
    kind, root, counts = descriptor.kind, descriptor.root, descriptor.block_counts(n)
    starts = np.cumsum([0, *counts])

    def block(x, rank):
        return x[starts[rank] : starts[rank + 1]]

    def at_root(result):
        return [result if rank == root else result[:0] for rank in range(n)]

    match kind:
        case Kind.broadcast:
            return [inputs[root]] * n
        case Kind.gather:
            return at_root(np.concatenate(inputs))
        case Kind.all_gather:
            return [np.concatenate(inputs)] * n
        case Kind.scatter:
            return [block(inputs[root], rank) for rank in range(n)]
        case Kind.all_to_all:
            return [np.concatenate([block(x, rank) for x in inputs]) for rank in range(n)]
        case Kind.reduce:
            orders = {
                "ring": [in_rank_order([(root + 1 + i) % n for i in range(n)])],
                "tree": [in_pairs([(root + i) % n for i in range(n)])],
                "double_tree": [in_places(n, half, root) for half in range(2)],
                "direct": [in_rank_order(range(n))],
            }[algorithm]
            parts = zip(orders, chunk_bounds(descriptor.count, len(orders)), strict=True)
            return at_root(
                np.concatenate(
                    [evaluate(order, [x[start:stop] for x in inputs], descriptor, n) for order, (start, stop) in parts]
                )
            )
        case Kind.reduce_scatter:
            orders = [[(rank + 1 + i) % n for i in range(n)] if algorithm == "ring" else range(n) for rank in range(n)]
            return [
                evaluate(in_rank_order(orders[rank]), [block(x, rank) for x in inputs], descriptor, n)
                for rank in range(n)
            ]
        case Kind.all_reduce:
            return [expected_all_reduce(descriptor, algorithm, inputs, sites_of(n))] * n
    return [np.empty(0, np.float32)] * n


@every_pair
def test_every_kind_gives_what_it_says(kind, algorithm):
    for n in WORLDS:
        for count in COUNTS:
            descriptor = call(kind, count, n)
            inputs = inputs_of(descriptor, n, seed=n)
            expected = expected_results(descriptor, algorithm, inputs, n)
            for result, wanted in zip(run(descriptor, algorithm, n, inputs), expected, strict=True):
                assert same_bits(result, wanted), (n, count)


FLOATS = (DType.float32, DType.bfloat16)  # the ones that people train with


def shares_of(n, seed):
    """Shares of *n* ranks, some of which own nothing."""
    rng = np.random.default_rng(seed)
    shares = (rng.integers(0, 1025, n) * rng.integers(0, 2, n)).tolist()
    return shares if any(shares) else [0] * (n - 1) + [1]


@by_worlds
@pytest.mark.parametrize("dtype", [*FLOATS, *at_night(*(dtype for dtype in DType if dtype not in FLOATS))])
def test_shares_change_no_bit(dtype, worlds):
    """Results and digests are those of even shares, of every op and codec, and in any order of steps."""
    for n in worlds:
        for seed, count in enumerate((0, 1, n, 700)):
            shares = shares_of(n, 10 * n + seed)
            for op in ReduceOp if count == 700 else (ReduceOp.sum,):
                descriptor = Descriptor(Kind.all_reduce, dtype, op, count)
                inputs = inputs_of(descriptor, n, seed)
                expected = [x.tobytes() for x in run(descriptor, "direct", n, inputs)]
                got = run(descriptor, "direct", n, inputs, shares=shares, order=seed, cut=512, lanes=2)
                assert [x.tobytes() for x in got] == expected, (n, count, op, shares)
            for codec in (codec for codec in CODECS if takes(codec, dtype)):
                descriptor = Descriptor(Kind.all_reduce, dtype, ReduceOp.avg, count, codec=codec, rounding="stochastic")
                inputs, digests = inputs_of(descriptor, n, seed), []
                how = {"noise": [(1, 10 + rank, 100 + rank) for rank in range(n)], "digests": digests}
                expected = [x.tobytes() for x in run(descriptor, "direct", n, inputs, **how)]
                got = run(descriptor, "direct", n, inputs, shares=shares, ends=mixed_ends(n, seed), order=seed, **how)
                assert [x.tobytes() for x in got] == expected, (n, count, codec, shares)
                assert len(set(digests)) == 1


@pytest.mark.parametrize("algorithm", ["ring", "direct"])
@pytest.mark.parametrize("kind", [Kind.all_gather, Kind.reduce_scatter])
def test_uneven_blocks(kind, algorithm):
    for counts in ((3,), (0, 0), (5, 0, 12, 1), (0, 7, 0), tuple(range(100, 109)), (0,) * 8 + (1000,)):
        descriptor = Descriptor(kind, op=ReduceOp.avg if kind is Kind.reduce_scatter else ReduceOp.sum, counts=counts)
        inputs = inputs_of(descriptor, len(counts), seed=2)
        expected = expected_results(descriptor, algorithm, inputs, len(counts))
        for result, wanted in zip(run(descriptor, algorithm, len(counts), inputs), expected, strict=True):
            assert same_bits(result, wanted), counts


@pytest.mark.parametrize(
    ("kind", "algorithm"),
    [(kind, name) for kind, name in PAIRS if kind in (Kind.reduce_scatter, Kind.scatter, Kind.all_to_all)],
)
def test_blocks_of_lost_ranks_are_left_out(kind, algorithm):
    """Five ranks called, the second and the last are lost: the input still has their blocks."""
    left, count = (0, 2, 3), 11
    blocks = [rank * count for rank in left]
    descriptor = Descriptor(kind, count=count, root=1 if kind is Kind.scatter else -1)
    rng = np.random.default_rng(3)
    input_buffers = [rng.normal(size=5 * count).astype(np.float32) for _ in left]
    if kind is Kind.scatter:
        input_buffers = [
            input_buffer if rank == 1 else input_buffer[:0] for rank, input_buffer in enumerate(input_buffers)
        ]
    without = [
        np.concatenate([input_buffer[b : b + count] for b in blocks]) if input_buffer.size else input_buffer
        for input_buffer in input_buffers
    ]
    got = run(descriptor, algorithm, 3, input_buffers, blocks=blocks)
    for result, wanted in zip(got, expected_results(descriptor, algorithm, without, 3), strict=True):
        assert same_bits(result, wanted)


# ---- any order of events ---------------------------------------------------------------------------------------


@by_worlds
@every_pair
def test_no_order_of_events_changes_a_bit(kind, algorithm, worlds):
    """Slow ranks, slow directions, cuts and lanes: no deadlock, and nothing is overwritten before it is read."""
    for n in worlds:
        for codec in (Codec.none, Codec.int4) if kind is Kind.all_reduce else (Codec.none,):
            descriptor = call(kind, 700, n, codec=codec)
            inputs = inputs_of(descriptor, n, seed=5)
            expected = run(descriptor, algorithm, n, inputs)
            for seed in range(4):
                got = run(descriptor, algorithm, n, inputs, order=seed, cut=(512, 1024)[seed % 2], lanes=1 + seed % 3)
                assert [x.tobytes() for x in got] == [x.tobytes() for x in expected]
            if kind in SAME_RESULT:
                assert len({x.tobytes() for x in expected}) == 1


@settings(max_examples=60)
@given(
    st.sampled_from([pair for pair in PAIRS if pair[0] not in DATALESS]),
    st.integers(2, 12),
    st.integers(0, 2000),
    st.sampled_from(list(Codec)),
    st.integers(0, 2**32),
    st.sampled_from([512, 1536, 4096]),
    st.integers(1, 4),
)
def test_any_order_of_anything(pair, n, count, codec, seed, cut, lanes):
    kind, algorithm = pair
    descriptor = call(kind, count, n, codec=codec if kind is Kind.all_reduce else Codec.none)
    inputs = inputs_of(descriptor, n, seed)
    expected = run(descriptor, algorithm, n, inputs)
    got = run(descriptor, algorithm, n, inputs, order=seed, cut=cut, lanes=lanes)
    assert [x.tobytes() for x in got] == [x.tobytes() for x in expected]


# ---- codecs ------------------------------------------------------------------------------------------------------


def through(codec, x, dtype=DType.float32):
    return codecs.decode(codec, dtype, codecs.encode(codec, dtype, x), x.size)


@by_worlds
@pytest.mark.parametrize("algorithm", ALL_REDUCES)
@pytest.mark.parametrize("codec", CODECS)
def test_codecs_give_the_same_bytes_everywhere(algorithm, codec, worlds):
    for n in worlds:
        for count in (0, 1, 100, 3001):
            descriptor = Descriptor(Kind.all_reduce, op=ReduceOp.avg, count=count, codec=codec)
            inputs = inputs_of(descriptor, n, seed=count)
            results = run(descriptor, algorithm, n, inputs)
            assert len({result.tobytes() for result in results}) == 1
            if n == 1:
                assert same_bits(results[0], through(codec, inputs[0]))
            else:
                assert np.linalg.norm(results[0] - np.mean(inputs, axis=0, dtype=np.float64)) <= {
                    Codec.bf16: 0.005,
                    Codec.fp16: 0.001,
                    Codec.int8: 0.02,
                    Codec.int4: 0.3,
                    Codec.fp8: 0.07,
                }[codec] * math.sqrt(count)


@by_worlds
@pytest.mark.parametrize("algorithm", ALL_REDUCES)
@pytest.mark.parametrize("codec", [Codec.int8, *at_night(Codec.bf16, Codec.int4)])
def test_who_has_its_buffers_encoded_changes_no_bit(algorithm, codec, worlds):
    """Results and digests have the same bits in whatever order events come; also where sums stay raw."""
    for n in worlds:
        for seed, count, bounded in (
            (0b11, 700, False),
            (0b1101_1000_1001, 3001, True),
            (0b0111_0010_0110, 3001, False),
        ):
            descriptor = Descriptor(Kind.all_reduce, op=ReduceOp.avg, count=count, codec=codec, bounded=bounded)
            inputs, digests = inputs_of(descriptor, n, seed), []
            expected = run(descriptor, algorithm, n, inputs, digests=digests)
            for ends in (mixed_ends(n, seed), mixed_ends(n, -1)):
                how = {"order": seed, "cut": 1024, "lanes": 2, "digests": digests, "ends": ends}
                got = run(descriptor, algorithm, n, inputs, **how)
                assert [x.tobytes() for x in got] == [x.tobytes() for x in expected]
            assert len(set(digests)) == 1


@pytest.mark.parametrize("codec", CODECS)
def test_sums_that_stay_raw_are_encoded_as_results_only(codec):
    descriptor = Descriptor(Kind.all_reduce, count=2000, codec=codec, bounded=True)
    inputs = inputs_of(descriptor, 5, seed=1)
    parts = [through(codec, x) for x in inputs]
    expected = through(codec, expected_all_reduce(descriptor, "ring", parts, (), codec.block[0]))
    assert all(same_bits(result, expected) for result in run(descriptor, "ring", 5, inputs))


@pytest.mark.parametrize("codec", CODECS)
def test_direct_encodes_contributions_and_results_once(codec):
    n, count = 5, 2000
    descriptor = Descriptor(Kind.all_reduce, count=count, codec=codec)
    inputs = inputs_of(descriptor, n, seed=1)
    result = run(descriptor, "direct", n, inputs)[0]
    for start, stop in chunk_bounds(count, n, codec.block[0]):
        parts = [through(codec, x[start:stop]) for x in inputs]
        assert same_bits(result[start:stop], through(codec, fold(np.add, parts)))


@pytest.mark.parametrize("codec", CODECS)
def test_full_exchange_reduces_what_all_have(codec):
    descriptor = Descriptor(Kind.all_reduce, count=300, codec=codec)
    inputs = inputs_of(descriptor, 4, seed=1)
    expected = through(codec, fold(np.add, [through(codec, x) for x in inputs]))
    assert all(same_bits(result, expected) for result in run(descriptor, "full_exchange", 4, inputs))


@pytest.mark.parametrize("algorithm", ["direct", "full_exchange", "naive", "hierarchical"])
def test_int8_of_eight_stays_near_one_percent(algorithm):
    descriptor = Descriptor(Kind.all_reduce, count=40_000, codec=Codec.int8)
    inputs = inputs_of(descriptor, 8, seed=8)
    exact = np.sum(inputs, axis=0, dtype=np.float64)
    result = run(descriptor, algorithm, 8, inputs)[0]
    most = 0.011 if algorithm == "hierarchical" else 0.01  # the sums of sites are encoded between them, too
    assert np.linalg.norm(result - exact) <= most * np.linalg.norm(exact)


@pytest.mark.parametrize("algorithm", ALL_REDUCES)
def test_stochastic_rounding_depends_on_its_keys_only(algorithm):
    n = 5
    descriptor = Descriptor(Kind.all_reduce, count=1500, codec=Codec.int8, rounding="stochastic")
    inputs = inputs_of(descriptor, n, seed=4)

    def results(result_key, input_key, sum_key=100, **how):
        noise = [(result_key, input_key + rank, sum_key + rank) for rank in range(n)]
        got = {x.tobytes() for x in run(descriptor, algorithm, n, inputs, noise=noise, **how)}
        assert len(got) == 1
        return got

    one = results(1, 10)
    assert one == results(1, 10, order=3, cut=512, lanes=2)
    assert one != results(20, 10)
    assert one != results(1, 20)
    assert (one == results(1, 10, 200)) == (algorithm in choose.ENCODE_ONCE)
