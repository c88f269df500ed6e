"""What `wancoll perf` knows of each collective: its tensors, its bandwidth, the values that it must give."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from wancoll.client.codecs import NOMINAL_ERROR
from wancoll.collective import Codec, Kind, ReduceOp
from wancoll.metrics.core.operations import bus_factor
from wancoll.schedule.choose import ENCODE_ONCE

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]

NOISE_PERIOD = 4099  # a prime: no two blocks of a codec or of a lane hold the same
MOVED_PERIOD = 101  # a prime; the values fit into int8
OUTLIER = 6.0  # an element that is this many times further off than the error allows is wrong


@dataclass(frozen=True)
class Collective:
    """One row of nccl-tests' conventions (PERFORMANCE.md there), for n ranks."""

    name: str
    given: str  # "tensor", "blocks" (one for each rank), or "" for nothing
    gets: str  # the same of the result; "in place": it takes the place of what is given
    given_at_root: bool = False  # only the root gives
    gets_at_root: bool = False  # only the root gets
    reduces: bool = False  # it has a reduce op

    @property
    def rooted(self) -> bool:
        """Whether it has a root."""
        return self.given_at_root or self.gets_at_root

    @property
    def in_place(self) -> bool:
        """Whether the result takes the place of what is given."""
        return self.gets == "in place"

    def blocks(self, world_size: int) -> int:
        """How many times `count` elements the larger of the two tensors has: the size in nccl-tests' columns."""
        return world_size if "blocks" in (self.given, self.gets) else 1

    def busbw(self, size: int, seconds: float, world_size: int) -> float:
        """Bus bandwidth in GB/s (10^9 bytes): what the busiest member sends or receives, by the time it takes."""
        factor = bus_factor(Kind[self.name], world_size) if self.name in Kind.__members__ else 1.0
        return factor * size / seconds / 1e9


COLLECTIVES = {
    each.name: each
    for each in (
        Collective("all_reduce", "tensor", "in place", reduces=True),
        Collective("reduce_scatter", "blocks", "tensor", reduces=True),
        Collective("all_gather", "tensor", "blocks"),
        Collective("broadcast", "tensor", "in place", given_at_root=True),
        Collective("reduce", "tensor", "tensor", gets_at_root=True, reduces=True),
        Collective("gather", "tensor", "blocks", gets_at_root=True),
        Collective("scatter", "blocks", "tensor", given_at_root=True),
        Collective("all_to_all", "blocks", "blocks"),
        Collective("send_recv", "tensor", "tensor"),  # each rank sends to the next one
        Collective("barrier", "", ""),
    )
}


# ---- values that are exact -----------------------------------------------------------------------------


def known_values(op: str, rank: int, world_size: int) -> Array:
    """One period of what *rank* contributes: small whole numbers, whose reduction every dtype holds exactly.

    A contribution that is lost or comes twice, and for sums elements in the wrong place, change the result.
    """
    values: Array
    place = np.arange(21 * world_size)
    mine = place % world_size == rank
    match ReduceOp[op]:
        case ReduceOp.prod:
            values = np.where(mine, 2 + place % 3, 1)
        case ReduceOp.avg:
            values = place % 3 + world_size * mine
        case _:
            values = (place * (rank + 1) + rank) % 7
    return values


def reduced(op: str, contributions: list[Array]) -> Array:
    """The reduction of all ranks' known values, as Python's numbers would give it."""
    if op == "avg":
        return reduced("sum", contributions) // len(contributions)
    result: Array = getattr(np, op)(contributions, axis=0)  # numpy's names are ours
    return result


def moved(source: int, target: int) -> Array:
    """One period of the block that rank *source* has for rank *target*: 0 to 100, another for every other rank."""
    return (37 * np.arange(MOVED_PERIOD) + 11 * source + 29 * target) % MOVED_PERIOD


def given(collective: Collective, op: str, rank: int, world_size: int, root: int) -> list[Array]:
    """What *rank* gives: one period for each `count` elements of its tensor; nothing if it gives nothing."""
    everyone = range(world_size)
    if not collective.given or (collective.given_at_root and rank != root):
        return []
    if collective.reduces:
        values = known_values(op, rank, world_size)
        return [np.roll(values, -block) for block in (everyone if collective.given == "blocks" else (0,))]
    if collective.name == "send_recv":
        return [moved(rank, (rank + 1) % world_size)]
    return [moved(rank, target) for target in everyone] if collective.given == "blocks" else [moved(rank, 0)]


def expected(collective: Collective, op: str, rank: int, world_size: int, root: int) -> list[Array]:
    """What *rank* must get, as *given* says what it gives."""
    everyone = range(world_size)
    if not collective.gets or (collective.gets_at_root and rank != root):
        return []
    if collective.reduces:
        result = reduced(op, [known_values(op, each, world_size) for each in everyone])
        return [np.roll(result, -rank) if collective.given == "blocks" else result]
    match collective.name:
        case "all_to_all":
            return [moved(source, rank) for source in everyone]
        case "all_gather" | "gather":
            return [moved(source, 0) for source in everyone]
        case "broadcast":
            return [moved(root, 0)]
        case "scatter":
            return [moved(root, rank)]
        case _:
            return [moved((rank - 1) % world_size, rank)]


def fill(tensor: Array, periods: list[Array]) -> None:
    """Write equal blocks into *tensor*, shape (blocks * count,): each repeats its period."""
    for block, period in zip(np.split(tensor, len(periods)), periods, strict=True):
        block[...] = np.resize(period.astype(tensor.dtype), block.shape)


def wrong_elements(tensor: Array, periods: list[Array]) -> int:
    """How many elements are not as `fill` would have written them."""
    blocks = zip(np.split(tensor, len(periods)), periods, strict=True)
    return sum(
        int(np.count_nonzero(block != np.resize(period.astype(tensor.dtype), block.shape))) for block, period in blocks
    )


# ---- values for codecs ---------------------------------------------------------------------------------


def noise(rank: int) -> Array:
    """One period of what *rank* contributes where elements are rounded: Gaussian, independent, float64."""
    return np.random.default_rng(rank).standard_normal(NOISE_PERIOD)


def allowed_error(codec: Codec, algorithm: str, world_size: int, count: int) -> float:
    """The largest relative L2 error that an all-reduce of `noise` may make.

    The codec's nominal one is for contributions that are encoded once, and the result once. Algorithms that encode
    sums again on their way lose a part of each: the variances of at most N (N-1) / 2 of them add up, and that of the
    result's, where N is *world_size*. Three standard deviations are allowed for what few elements scatter.
    """
    growth = 1.0 if algorithm in ENCODE_ONCE else math.sqrt(max(1.0, (world_size + 2) / 4))
    return dict(NOMINAL_ERROR)[codec] * growth * (1 + 3 / math.sqrt(count))


def rounding_error(tensor: Array, op: str, world_size: int, allowed: float) -> tuple[int, float]:
    """Compare a result, shape (count,), of sum, avg, min or max with the exact reduction of the ranks' noise.

    Returns:
        (wrong elements, relative L2 error). The error is relative to what the result's norm is expected to be from the
        contributions' squares: the elements of short tensors may cancel out. If it is too large, at least one is wrong.
        NaN and infinity are wrong, and left out of the error.
    """
    parts = [noise(rank).astype(tensor.dtype).astype(np.float64) for rank in range(world_size)]
    exact = np.mean(parts, axis=0) if op == "avg" else reduced(op, parts)
    squares = np.square(parts)
    energy = np.max(squares, axis=0) if op in ("min", "max") else np.sum(squares, axis=0)
    energy = energy / world_size**2 if op == "avg" else energy
    square = total = 0.0
    wrong = 0
    limit = OUTLIER * allowed * math.sqrt(float(np.mean(energy)))
    for begin in range(0, tensor.size, NOISE_PERIOD):
        piece = tensor[begin : begin + NOISE_PERIOD].astype(np.float64)
        off = np.abs(piece - exact[: piece.size])
        square += float(np.sum(np.square(off[np.isfinite(off)])))
        total += float(np.sum(energy[: piece.size]))
        wrong += int(np.count_nonzero(~(off <= limit)))
    error = math.sqrt(square / total) if total else 0.0
    return (wrong if error <= allowed else max(1, wrong)), error
