"""Every collective through a real cluster, bit for bit as the reference executor; codecs, feedback, many tensors."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

import wancoll
from tests.client.tools import joined_worlds
from tests.later import later
from tests.schedule import codec as codecs
from tests.schedule.numbers import storage
from tests.schedule.reference import execute
from wancoll.chaos import Cluster, in_threads
from wancoll.collective import Codec, Descriptor, DType, Kind, ReduceOp
from wancoll.schedule import choose
from wancoll.schedule.build import takes

WORLD = 4
COUNTS = (0, 1, 7, 1025, 20011)
SITES = ("east", "east", "west", "west")
NAMES = itertools.count(1)

Array = np.ndarray[Any, np.dtype[Any]]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(0, fork=True) as cluster:
        for site in SITES:
            cluster.add_peer(f"--site={site}")
        yield cluster
        for i in range(len(cluster)):
            assert cluster.running(i), cluster.logs(i)


@pytest.fixture(scope="module")
def worlds(cluster: Cluster) -> Iterator[dict[int, list[Any]]]:
    with joined_worlds(cluster, WORLD) as groups:
        yield groups


def numbers(dtype: DType, count: int, rank: int) -> Array:
    rng = np.random.default_rng((int(dtype), count, rank))
    if dtype in (DType.float32, DType.float64, DType.float16):
        return (rng.standard_normal(count) * 10.0 ** rng.integers(-3, 3, count)).astype(storage(dtype))
    info = np.iinfo(storage(dtype))
    return rng.integers(info.min, info.max, count, storage(dtype), endpoint=True)


def expected(
    comms: list[Any], descriptor: Descriptor, algorithm: str, input_buffers: Sequence[Array], digests: list[int]
) -> list[Array]:
    world = len(comms)
    sites = [SITES[int(name.removeprefix("m"))] for name in comms[0].members]
    ranks = range(world)
    return execute(
        [choose.make(descriptor, algorithm, rank, world, sites=sites) for rank in ranks],
        input_buffers,
        descriptor.dtype,
        descriptor.op,
        codec=descriptor.codec,
        result_bytes=[choose.sizes(descriptor, rank, world)[1] for rank in ranks],
        digests=digests,
    )


def call(comm: Any, d: Descriptor, input_buffer: Array, fresh: bool) -> Any:
    """The call that *d* describes, asynchronous; into new tensors if *fresh*."""
    options = {"algorithm": d.algorithm, "async_op": True}
    at_root = comm.rank == d.root
    out = None
    if not fresh:
        out = comm.zeros(choose.sizes(d, comm.rank, comm.world_size)[1] // d.dtype.itemsize, storage(d.dtype))
    match d.kind:
        case Kind.all_reduce:
            codec = {"codec": d.codec.name, "rounding": d.rounding, "seed": d.seed}
            return comm.all_reduce(
                input_buffer.copy() if fresh else input_buffer, out, op=d.op.name, **codec, **options
            )
        case Kind.reduce_scatter:
            return comm.reduce_scatter(input_buffer, out, op=d.op.name, counts=d.counts or None, **options)
        case Kind.all_gather:
            return comm.all_gather(input_buffer, out, counts=d.counts or None, **options)
        case Kind.broadcast:
            return comm.broadcast(
                input_buffer if at_root else np.zeros(d.count, input_buffer.dtype), d.root, out=out, **options
            )
        case Kind.reduce:
            return comm.reduce(input_buffer, out, d.root, op=d.op.name, **options)
        case Kind.gather:
            return comm.gather(input_buffer, out, d.root, **options)
        case Kind.scatter:
            if not at_root and out is None:
                out = np.zeros(d.count, input_buffer.dtype)
            return comm.scatter(input_buffer if at_root else None, out, d.root, **options)
        case Kind.all_to_all:
            return comm.all_to_all(input_buffer, out, **options)
    raise AssertionError(d)


def check(comms: list[Any], descriptors: Sequence[Descriptor]) -> list[list[Any]]:
    """All calls at once, each once into new tensors; returns the receipts of the last of each rank's calls."""
    world = len(comms)
    input_buffers = []
    for d in descriptors:
        sizes = [choose.sizes(d, rank, world)[0] // d.dtype.itemsize for rank in range(world)]
        input_buffers.append([numbers(d.dtype, size, rank) for rank, size in enumerate(sizes)])

    def member(rank: int) -> list[Any]:
        comm = comms[rank]
        works = [
            call(comm, d, input_buffer[rank], (number + i) % 2 == 0)
            for i, (d, input_buffer) in enumerate(zip(descriptors, input_buffers, strict=True))
            for number in range(2)
        ]
        return [work.wait(60) for work in works]

    found = in_threads(member, world, 120)
    for i, (d, input_buffer) in enumerate(zip(descriptors, input_buffers, strict=True)):
        algorithm = found[0][2 * i].algorithm
        assert algorithm == d.algorithm or world == 1 or d.algorithm in ("auto", "hierarchical")
        digests: list[int] = []
        results = expected(comms, d, algorithm, input_buffer, digests)
        for rank in range(world):
            for receipt in found[rank][2 * i : 2 * i + 2]:
                where = f"{d}, rank {rank} of {world}: {receipt}"
                wanted = results[rank].tobytes()
                assert receipt.attempts == 1, where
                assert receipt.algorithm == algorithm, where
                assert receipt.contributors == comms[rank].members, where
                assert np.asarray(receipt.out if wanted else []).tobytes() == wanted, where
                if receipt.out is None:
                    assert d.kind in (Kind.reduce, Kind.gather), where
                    assert rank != d.root, where
                assert receipt.digest == f"{digests[rank]:016x}", where
    return found


MOVING = [Kind.reduce_scatter, Kind.all_gather, Kind.broadcast, Kind.reduce, Kind.gather, Kind.scatter, Kind.all_to_all]


@pytest.mark.parametrize("kind", MOVING)
@pytest.mark.parametrize("world", range(1, WORLD + 1))
def test_values(worlds: dict[int, list[Any]], world: int, kind: Kind) -> None:
    rooted = kind in (Kind.broadcast, Kind.reduce, Kind.gather, Kind.scatter)
    ops = itertools.cycle(ReduceOp if kind in (Kind.reduce_scatter, Kind.reduce) else [ReduceOp.sum])
    roots = itertools.cycle(range(world) if rooted else [-1])
    check(
        worlds[world],
        [
            Descriptor(kind, dtype, next(ops), count, root=next(roots), algorithm=algorithm)
            for algorithm in ("auto", *choose.ALGORITHMS[kind])
            for dtype in (DType.float32, DType.int16)
            for count in COUNTS
        ],
    )


@pytest.mark.parametrize("world", range(1, WORLD + 1))
def test_all_reduce(worlds: dict[int, list[Any]], world: int) -> None:
    ops = itertools.cycle(ReduceOp)
    check(
        worlds[world],
        [
            Descriptor(Kind.all_reduce, DType.float32, next(ops), count, algorithm=algorithm)
            for algorithm in ("auto", *choose.ALGORITHMS[Kind.all_reduce])
            for count in COUNTS
        ],
    )


@pytest.mark.parametrize("world", range(1, WORLD + 1))
def test_uneven_counts(worlds: dict[int, list[Any]], world: int) -> None:
    check(
        worlds[world],
        [
            Descriptor(kind, DType.float32, counts=counts[:world], algorithm=algorithm)
            for kind in (Kind.all_gather, Kind.reduce_scatter)
            for algorithm in choose.ALGORITHMS[kind]
            for counts in ((3, 0, 1025, 1), (0, 20011, 0, 5), (0, 0, 0, 0), (7, 7, 7, 7), (1, 2, 3, 4))
        ],
    )


@pytest.mark.parametrize(
    ("world", "codec"),
    [
        (WORLD, Codec.bf16), (WORLD, Codec.int8), *later((WORLD, Codec.fp16), (WORLD, Codec.int4), (WORLD, Codec.fp8)),
        *later(*((world, codec) for world in range(1, WORLD) for codec in Codec if codec is not Codec.none)),
    ],
)  # fmt: skip
def test_codecs(worlds: dict[int, list[Any]], world: int, codec: Codec) -> None:
    descriptors = [
        Descriptor(Kind.all_reduce, dtype, op, count, codec=codec, algorithm=algorithm)
        for algorithm in ("auto", *choose.ALGORITHMS[Kind.all_reduce])
        for dtype, op in ((DType.float32, ReduceOp.avg), (DType.float16, ReduceOp.sum), (DType.float64, ReduceOp.max))
        for count in (0, 1, 1025, 20011)
        if takes(codec, dtype)
    ]
    found = check(worlds[world], descriptors)
    for receipts in found:
        for d, receipt in zip(descriptors, receipts[1::2], strict=True):
            assert receipt.codec == codec.name
            if world == 1:
                assert (receipt.bytes_saved, receipt.codec_error) == (0, 0.0)
            elif d.count > 10000:
                assert receipt.bytes_saved > 0, receipt
                assert 0 <= receipt.codec_error < 0.2, receipt


@pytest.mark.parametrize("codec", ["bf16", "fp16", "int8", "int4", "fp8"])
def test_stochastic_rounding(worlds: dict[int, list[Any]], codec: str) -> None:
    """The same bytes everywhere, other ones than to the nearest and with another seed, and about as good."""
    comms = worlds[3]
    input_buffers = [numbers(DType.float32, 20011, rank) for rank in range(3)]
    exact = sum(input_buffers)

    def reduced(**options: Any) -> Array:
        results = in_threads(lambda r: comms[r].all_reduce(input_buffers[r].copy(), codec=codec, **options), 3)
        assert len({receipt.digest for receipt in results}) == 1
        assert len({receipt.out.tobytes() for receipt in results}) == 1
        return np.asarray(results[0].out)

    nearest = reduced()
    one, other = (reduced(rounding="stochastic", seed=seed) for seed in (1, 2))
    assert len({each.tobytes() for each in (nearest, one, other)}) == 3
    error = [np.linalg.norm(each - exact) for each in (nearest, one, other)]
    assert error[0] < error[1] < 3 * error[0]
    assert error[0] < error[2] < 3 * error[0]


def test_error_feedback(worlds: dict[int, list[Any]]) -> None:
    """What is sent adds up to what was given: over many calls only what results lose is left."""
    comms, steps, count = worlds[3], 40, 3001
    given = [[numbers(DType.float32, count, 100 * rank + step) for step in range(steps)] for rank in range(3)]
    exact = np.sum(np.array(given, np.float64), axis=(0, 1))
    residuals, through = np.zeros((3, count), np.float32), np.zeros(count)
    for step in range(steps):
        sent = [residuals[rank] + given[rank][step] for rank in range(3)]
        kept = [decoded(x) for x in sent]
        residuals = np.array([x - y for x, y in zip(sent, kept, strict=True)])
        through += decoded(kept[0] + kept[1] + kept[2])

    def member(rank: int, feedback: wancoll.ErrorFeedback | None) -> Array:
        total = np.zeros(count)
        for x in given[rank]:
            named = {"feedback": feedback, "name": "w"} if feedback is not None else {}
            total += comms[rank].all_reduce(x.copy(), codec="int4", algorithm="full_exchange", **named).out
        return total

    without = in_threads(lambda rank: member(rank, None), 3)
    feedbacks = [wancoll.ErrorFeedback() for _ in range(3)]
    with_it = in_threads(lambda rank: member(rank, feedbacks[rank]), 3)
    assert with_it[0].tobytes() == with_it[1].tobytes() == with_it[2].tobytes()
    for rank, feedback in enumerate(feedbacks):
        assert feedback.residual("w").tobytes() == residuals[rank].tobytes()
    assert with_it[0].tobytes() == through.tobytes()
    assert np.linalg.norm(with_it[0] - exact) < 0.9 * np.linalg.norm(without[0] - exact)


def decoded(x: Array) -> Array:
    return codecs.decode(Codec.int4, DType.float32, codecs.encode(Codec.int4, DType.float32, x), x.size)


def test_many(worlds: dict[int, list[Any]]) -> None:
    comms = worlds[4]
    shapes = [(3, 5), (), (1000,), (0,), (200, 30), (7,)] * 3

    def member(rank: int) -> list[Any]:
        dtypes = itertools.cycle([np.float32, np.int64])
        tensors = [np.full(shape, 10**rank, next(dtypes)) for shape in shapes]
        receipt = comms[rank].all_reduce_many(tensors, bucket_bytes=5000, timeout=30)
        assert all((x == 1111).all() for x in tensors)
        assert all(one.attempts == 1 for one in receipt.receipts)
        return [one.digest for one in receipt.receipts]

    found = in_threads(member, 4)
    assert len(found[0]) > 5
    assert found == [found[0]] * 4


def test_barrier(worlds: dict[int, list[Any]]) -> None:
    comms = worlds[4]
    for last in range(4):
        arrived = [threading.Event() for _ in range(4)]
        begin = threading.Event()

        def member(rank: int, last: int = last, arrived: Any = arrived, begin: Any = begin) -> None:
            if rank == last:
                assert begin.wait(30)
            elif rank == (last + 1) % 4:
                begin.set()
            arrived[rank].set()
            receipt = comms[rank].barrier(timeout=30)
            assert all(each.is_set() for each in arrived)
            assert receipt.out is None
            assert len(receipt.contributors) == 4

        in_threads(member, 4)
