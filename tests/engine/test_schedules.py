"""Every collective and algorithm in real engines over TCP, bit for bit as the reference executor has it."""

import errno
from typing import Any

import numpy as np
import pytest

from tests.engine.engines import Mesh, mesh_of, same, wait_for
from tests.later import at_night, later
from tests.schedule import codec, numbers, reference
from tests.schedule.schedules import SPARSE, mixed_ends
from wancoll.collective import REDUCING, ROOTED, SAME_RESULT, Codec, Descriptor, DType, Kind, ReduceOp
from wancoll.native.engine import Done, LaneDown
from wancoll.schedule.build import SPARSE as LEAST
from wancoll.schedule.choose import ALGORITHMS, make, sizes
from wancoll.schedule.steps import RAW_ENDS, Ends

COUNTS = (0, 1, 5, 1025, 70_001)
UNEVEN = {Kind.all_gather, Kind.reduce_scatter}
PAIRS = [(kind, algorithm) for kind, names in ALGORITHMS.items() for algorithm in names]
RESULT_KEY = 0x1234_5678_9ABC_DEF0  # of stochastic rounding


def elements(dtype: DType, nbytes: int, seed: int) -> Any:
    """Numbers of very different size; no NaN, since a NaN in a digest tells little."""
    count = nbytes // dtype.itemsize
    rng = np.random.default_rng(seed)
    if dtype is DType.float32:
        return (rng.standard_normal(count) * 10.0 ** rng.integers(-3, 4, count)).astype(np.float32)
    return rng.integers(-1000, 1000, count).astype(numbers.storage(dtype))


def sites_of(world: int) -> tuple[str, ...]:
    return tuple("ab"[rank % 3 == 2] for rank in range(world))


def run(
    mesh: Mesh, call: Descriptor, algorithm: str, seed: int, shares: tuple[int, ...] = (), stripe: int = 65536,
    keeps: bool = False,
) -> list[int]:  # fmt: skip
    """One op on all engines; results, digests, which are returned, and untouched inputs."""
    world = mesh.world
    mesh.seq += 1
    wanted = [sizes(call, rank, world, ()) for rank in range(world)]
    input_buffers = [
        elements(call.dtype, input_buffer, seed * 100 + rank) for rank, (input_buffer, _) in enumerate(wanted)
    ]
    result_buffers = [
        np.full(result_buffer // call.dtype.itemsize, 85, numbers.storage(call.dtype)) for _, result_buffer in wanted
    ]
    ends = mixed_ends(world, seed) if call.codec and call.kind is Kind.all_reduce else [RAW_ENDS] * world
    if call.codec.sparse:
        ends = [Ends(end.input, end.result and not keeps and call.codec.of_result, keeps) for end in ends]
    schedules = [
        make(call, algorithm, rank, world, sites=sites_of(world), ends=ends[rank], shares=shares)
        for rank in range(world)
    ]
    digests: list[int] = []
    kept: list[Any] = []
    keys = [(RESULT_KEY, 77 + rank, 99 + rank) for rank in range(world)]
    noise = keys if call.rounding == "stochastic" else None
    expected = reference.execute(
        schedules,
        input_buffers,
        call.dtype,
        call.op,
        codec=call.codec,
        result_bytes=[result_buffer for _, result_buffer in wanted],
        noise=noise,
        digests=digests,
        kept=kept,
    )
    elements_of = [x.size for x in result_buffers]
    for rank, (coded_input, coded_result, sums) in enumerate(ends):
        if sums:
            result_buffers[rank] = np.tile(result_buffers[rank], 2)
        if coded_input:
            key = keys[rank][1] if noise else None
            input_buffers[rank] = codec.encode(call.codec, call.dtype, input_buffers[rank], key=key)
        if coded_result:
            result_buffers[rank] = np.full(codec.coded_bytes(call.codec, call.count), 85, np.uint8)
    untouched = [input_buffer.copy() for input_buffer in input_buffers]
    for rank in range(world):
        mesh.run(
            rank,
            mesh.seq,
            call,
            algorithm,
            input_buffers[rank],
            result_buffers[rank],
            sites=sites_of(world),
            noise=keys[rank],
            ends=ends[rank],
            shares=shares,
            stripe=stripe,
        )
    done = [wait_for(engine, Done) for engine in mesh.engines]
    for rank in range(world):
        if ends[rank].result:
            result_buffers[rank] = codec.decode(call.codec, call.dtype, result_buffers[rank], elements_of[rank])
        assert same(result_buffers[rank][: elements_of[rank]], expected[rank]), (str(call), algorithm, rank)
        start, stop = schedules[rank].kept
        assert same(result_buffers[rank][elements_of[rank] :][start:stop], kept[rank])
        assert same(input_buffers[rank], untouched[rank])
        assert done[rank].digest == digests[rank]
    if call.kind in SAME_RESULT:
        assert len({d.digest for d in done}) == 1
    return [d.digest for d in done]


@pytest.mark.parametrize("each", SPARSE, ids=lambda each: each.name)
def test_sparse_codecs_whatever_lanes_workers_and_stripe(each: Codec) -> None:
    digests: dict[tuple[int, DType], set[int]] = {}
    for world, lanes, workers, stripe in ((3, 1, 1, 4096), (3, 3, 2, 65536), (2, 8, 2, 8192), (3, 8, 1, 4096)):
        with mesh_of(world, lanes, workers=workers) as mesh:
            for algorithm in LEAST[each.of_result]:
                for count, dtype, op in (
                    (1, DType.float32, ReduceOp.sum),
                    (4097, DType.bfloat16, ReduceOp.avg),
                    (550_001, DType.float32, ReduceOp.avg),
                    (40_000, DType.float64, ReduceOp.sum),
                ):
                    call = Descriptor(Kind.all_reduce, dtype, op, count, codec=each)
                    for keeps in {False, each.of_result}:
                        found = run(mesh, call, algorithm, count, stripe=stripe, keeps=keeps)
                        digests.setdefault((count, world), set()).update(found)
    assert all(len(found) == 1 for found in digests.values())


def test_a_sparse_block_that_nobody_encodes_costs_the_link() -> None:
    codec_ = SPARSE[0]
    call = Descriptor(Kind.all_reduce, count=3 * 4096, codec=codec_)
    inputs = [codec.encode(codec_, DType.float32, elements(DType.float32, call.nbytes, rank)) for rank in range(2)]
    inputs[1][81 + 40] ^= 1  # a field, with a place's low bits or a code: still a block
    inputs[1][2 * 81 + 70] ^= 0xFF  # the row of high bits
    assert [codec.valid(codec_, inputs[1][at : at + 81], 4096) for at in (0, 81, 162)] == [True, True, False]
    with mesh_of(2, lanes=1) as mesh:
        for rank in range(2):
            result = np.zeros(call.count, np.float32)
            mesh.run(rank, 1, call, "full_exchange", inputs[rank], result, ends=Ends(True))
        down = wait_for(mesh.engines[0], LaneDown)
        assert (down.error, "a block of the codec that nobody encodes" in down.text) == (errno.EPROTO, True)


@pytest.mark.parametrize("world", [*range(1, 5), *later(5, 8), *at_night(6, 7, 9)])
def test_every_collective_and_algorithm(world: int) -> None:
    with mesh_of(world, lanes=2, workers=1 + world % 2) as mesh:
        for kind, algorithm in PAIRS:
            for number, count in enumerate(COUNTS):
                dtype = DType.float32 if number % 2 else DType.int32
                op = (ReduceOp.sum, ReduceOp.avg, ReduceOp.min)[number % 3] if kind in REDUCING else ReduceOp.sum
                root = count % world if kind in ROOTED else -1
                run(mesh, Descriptor(kind, dtype, op, count, root=root), algorithm, seed=number)
            if kind in UNEVEN:
                counts = tuple((rank * 7919) % 5000 for rank in range(world))
                run(mesh, Descriptor(kind, DType.float32, counts=counts), algorithm, seed=9)


@pytest.mark.parametrize("shares", [(1024, 0, 1024), (0, 0, 7, 0), (3, 0, 1024, 512, 1)])
def test_shares_of_direct_all_reduces(shares: tuple[int, ...]) -> None:
    with mesh_of(len(shares), lanes=2) as mesh:
        for number, count in enumerate(COUNTS):
            for codec in (Codec.none, Codec.int8):
                call = Descriptor(Kind.all_reduce, op=ReduceOp.avg, count=count, codec=codec)
                run(mesh, call, "direct", number, shares)


@pytest.mark.parametrize("world", [1, 2, *at_night(3, 5, 8)])
@pytest.mark.parametrize("each", [each for each in Codec if each is not Codec.none])
def test_every_codec_in_every_algorithm(each: Codec, world: int) -> None:
    with mesh_of(world, lanes=3) as mesh:
        for algorithm in ALGORITHMS[Kind.all_reduce]:
            for count, op, rounding in (
                (1, ReduceOp.sum, "nearest"),
                (4097, ReduceOp.avg, "nearest"),
                (150_001, ReduceOp.sum, "stochastic"),
                (33_000, ReduceOp.max, "nearest"),
            ):
                call = Descriptor(Kind.all_reduce, DType.float32, op, count, codec=each, rounding=rounding)
                run(mesh, call, algorithm, seed=count)


def test_codecs_in_every_other_collective() -> None:
    digests: dict[tuple[Kind, str, int], set[tuple[int, ...]]] = {}
    for lanes, workers, stripe in ((1, 1, 4096), (3, 2, 65536)):
        with mesh_of(3, lanes, workers=workers) as mesh:
            for kind, algorithm in PAIRS:
                for each, count in ((Codec.int8, 1), (Codec.int4, 4097), (Codec.bf16, 50_001), (Codec.fp8, 0)):
                    if kind in {Kind.all_reduce, Kind.barrier, Kind.update_membership}:
                        continue
                    counts = (count, 300 * min(1, count), 0) if kind in UNEVEN else ()
                    root = count % 3 if kind in ROOTED else -1
                    op = ReduceOp.avg if kind in REDUCING else ReduceOp.sum
                    call = Descriptor(
                        kind, DType.float32, op, 0 if counts else count, counts=counts, root=root, codec=each
                    )
                    found = run(mesh, call, algorithm, count, stripe=stripe)
                    digests.setdefault((kind, algorithm, count), set()).add(tuple(found))
    assert all(len(found) == 1 for found in digests.values())


@pytest.mark.parametrize("algorithm", ALGORITHMS[Kind.all_reduce])
def test_quantized_bits_do_not_depend_on_lanes_workers_or_stripe(algorithm: str) -> None:
    world, count = 4, 300_001
    call = Descriptor(Kind.all_reduce, DType.float32, ReduceOp.avg, count, codec=Codec.int8)
    input_buffers = [elements(DType.float32, count * 4, rank) for rank in range(world)]
    results = set()
    for lanes, workers, stripe in ((1, 1, 4096), (3, 2, 65536), (8, 2, 8192)):
        with mesh_of(world, lanes, workers=workers) as mesh:
            result_buffers = [np.zeros_like(input_buffer) for input_buffer in input_buffers]
            for rank in range(world):
                mesh.run(
                    rank,
                    1,
                    call,
                    algorithm,
                    input_buffers[rank],
                    result_buffers[rank],
                    sites=sites_of(world),
                    stripe=stripe,
                )
            done = [wait_for(engine, Done) for engine in mesh.engines]
            results |= {
                (result_buffer.tobytes(), d.digest) for result_buffer, d in zip(result_buffers, done, strict=True)
            }
    assert len(results) == 1


def test_the_codec_error_and_the_bytes_saved_are_reported() -> None:
    world, count = 4, 400_000
    rng = np.random.default_rng(5)
    input_buffers = [rng.standard_normal(count).astype(np.float32) for _ in range(world)]
    exact = sum(input_buffer.astype(np.float64) for input_buffer in input_buffers)
    with mesh_of(world, lanes=2) as mesh:
        for each, bar in ((Codec.bf16, 0.004), (Codec.int8, 0.01), (Codec.int4, 0.15), (Codec.fp8, 0.04)):
            mesh.seq += 1
            call = Descriptor(Kind.all_reduce, DType.float32, count=count, codec=each)
            result_buffers = [np.zeros_like(input_buffer) for input_buffer in input_buffers]
            for rank in range(world):
                mesh.run(rank, mesh.seq, call, "direct", input_buffers[rank], result_buffers[rank])
            for rank, engine in enumerate(mesh.engines):
                done = wait_for(engine, Done)
                error = np.linalg.norm(result_buffers[rank] - exact) / np.linalg.norm(exact)
                assert 0 < done.codec_error < error < bar
                raw = 2 * (world - 1) / world * count * 4
                assert raw * 0.999 < done.bytes_saved + done.bytes_sent < raw * 1.01
