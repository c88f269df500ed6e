"""What the tests of schedules share: every kind and algorithm, inputs, and runs on the reference executor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tests.schedule import reference
from wancoll.collective import BLOCKS, DATALESS, ROOTED, Codec, Descriptor, DType, Kind, ReduceOp
from wancoll.schedule import choose
from wancoll.schedule.steps import RAW_ENDS, Direction, Ends, Schedule, Step

ALL_REDUCES = choose.ALGORITHMS[Kind.all_reduce]
PAIRS = [(kind, name) for kind, names in choose.ALGORITHMS.items() for name in names]
SPARSE = tuple(Codec.named(name) for name in ("top1.5%", "top5%-int8", "top1.5%/top1.5%"))
CODECS = tuple(BLOCKS)
SITES = ("a", "b", "", "a", "b", "a", "b", "b")  # sites of uneven sizes, mixed up


def sites_of(world_size: int) -> tuple[str, ...]:
    return tuple(SITES[rank % len(SITES)] for rank in range(world_size))


def call(kind: Kind, count: int, world_size: int, **fields: Any) -> Descriptor:
    """A descriptor with a root that is not 0, where the kind has one."""
    root = (world_size * 2 // 3) if kind in ROOTED else -1
    return Descriptor(kind, count=0 if kind in DATALESS else count, root=root, **fields)


def everyone(
    descriptor: Descriptor,
    algorithm: str,
    world_size: int,
    blocks: Sequence[int] = (),
    sites: Sequence[str] = (),
    ends: Sequence[Ends] = (),
    shares: Sequence[int] = (),
) -> list[Schedule]:
    sites, ends = sites or sites_of(world_size), ends or [RAW_ENDS] * world_size
    return [
        choose.make(descriptor, algorithm, rank, world_size, blocks=blocks, sites=sites, ends=ends[rank], shares=shares)
        for rank in range(world_size)
    ]


def numbers(dtype: DType, op: ReduceOp, count: int, rng: np.random.Generator) -> np.ndarray:
    """Random elements. Those to be multiplied lie between 1/2 and 2, so that no product is too small for a half."""
    if dtype.name.startswith(("int", "uint")):
        return np.frombuffer(rng.bytes(count * dtype.itemsize), dtype.name)
    values = rng.normal(size=count)
    if op is ReduceOp.prod:
        values = np.sign(values) * np.exp2(rng.uniform(-1, 1, size=count))
    if dtype is DType.bfloat16:
        return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return values.astype(dtype.name)


def inputs_of(descriptor: Descriptor, world_size: int, seed: int, blocks: Sequence[int] = ()) -> list[np.ndarray]:
    """Every rank's input; empty where it has none."""
    rng = np.random.default_rng(seed)
    sizes = [choose.sizes(descriptor, rank, world_size, blocks)[0] for rank in range(world_size)]
    return [numbers(descriptor.dtype, descriptor.op, size // descriptor.dtype.itemsize, rng) for size in sizes]


def run(
    descriptor: Descriptor,
    algorithm: str,
    world_size: int,
    inputs: Sequence[np.ndarray],
    blocks: Sequence[int] = (),
    sites: Sequence[str] = (),
    ends: Sequence[Ends] = (),
    shares: Sequence[int] = (),
    **how: Any,
) -> list[np.ndarray]:
    """Every rank's result; inputs are checked to stay what they are."""
    kept = [array.copy() for array in inputs]
    results = reference.execute(
        everyone(descriptor, algorithm, world_size, blocks, sites, ends, shares),
        inputs,
        descriptor.dtype,
        descriptor.op,
        codec=descriptor.codec,
        result_bytes=[choose.sizes(descriptor, rank, world_size, blocks)[1] for rank in range(world_size)],
        **how,
    )
    assert [array.tobytes() for array in kept] == [array.tobytes() for array in inputs]
    return results


def mixed_ends(world_size: int, seed: int) -> list[Ends]:
    """Some ranks have their buffers encoded, and some have not."""
    return [Ends(bool(seed >> 2 * rank & 1), bool(seed >> 2 * rank & 2)) for rank in range(world_size)]


def sends(schedule: Schedule) -> list[Step]:
    return [step for step in schedule.steps if step.direction is Direction.send]


def wire_bytes(schedule: Schedule, codec: Codec = Codec.none, itemsize: int = 4) -> int:
    """Payload that a rank sends."""
    total = 0
    for step in sends(schedule):
        assert step.left is not None
        total += coded(step.length, codec, itemsize) if step.left.encoded else step.length
    return total


def coded(nbytes: int, codec: Codec, itemsize: int = 4) -> int:
    elements, size = codec.block
    return -(-nbytes // (elements * itemsize)) * size
