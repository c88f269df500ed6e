"""The numpy reference: what a reduction means, and an executor of schedules that the engine must equal bit for bit.

Arrays hold elements as numpy has them; bfloat16, which numpy lacks, is uint16 with its bits. The rules are in
ARCHITECTURE.md, "Numbers".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from wancoll.collective import Codec, DType, ReduceOp
from wancoll.schedule.plan import Schedule

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]

DIGEST_BLOCK = 65536  # bytes

_BITS = {2: np.uint16, 4: np.uint32, 8: np.uint64}
_CANONICAL_NAN = {
    DType.float32: 0x7FC00000,
    DType.float64: 0x7FF8000000000000,
    DType.float16: 0x7E00,
    DType.bfloat16: 0x7FC0,
}
_FLOATS = tuple(_CANONICAL_NAN)


def storage(dtype: DType) -> np.dtype[Any]:
    """The numpy dtype of arrays that hold *dtype*."""
    return np.dtype(np.uint16 if dtype is DType.bfloat16 else dtype.name)


def reduce(dtype: DType, op: ReduceOp, a: Array, b: Array) -> Array:
    """Element by element, a op b; for avg the sum, which `average` divides at the last step.

    Args:
        dtype: what the elements are.
        op: the reduce op.
        a: left operand, of dtype storage(dtype), any shape.
        b: right operand, alike.

    Returns:
        A new array of the same dtype and shape.
    """
    with np.errstate(all="ignore"):
        return narrowed(dtype, _apply(op, widened(dtype, a), widened(dtype, b)))


def average(dtype: DType, a: Array, b: Array, n: int) -> Array:
    """The last step of avg: (a + b) / n, in the arithmetic of *dtype*; integers truncate toward zero. See `reduce`."""
    with np.errstate(all="ignore"):
        total = widened(dtype, a) + widened(dtype, b)
        if dtype in _FLOATS:
            return narrowed(dtype, total / total.dtype.type(n))
        magnitude = (
            np.abs(total).view(f"u{dtype.itemsize}").astype(np.uint64)
        )  # unsigned holds that of the least integer
        quotient = magnitude // np.uint64(n)
        signed: Array = np.where(total < 0, 0 - quotient, quotient).astype(total.dtype)
        return signed


def execute(
    schedules: Sequence[Schedule],
    inputs: Sequence[Array],
    dtype: DType,
    op: ReduceOp,
    *,
    codec: Codec = Codec.none,
    back_bytes: Sequence[int] | None = None,
    noise: Sequence[tuple[int, int]] | None = None,
    order: int | None = None,
    cut: int = 0,
    lanes: int = 1,
) -> list[Array]:
    """Runs the schedules of all ranks as the engine does and returns every rank's result.

    Args:
        schedules: one for each rank.
        inputs: each rank's front: a one-dimensional array of dtype storage(dtype). They are not changed.
        dtype: what the elements are.
        op: the reduce op.
        codec: of what the schedules encode.
        back_bytes: size of each rank's result; None: that of its input.
        noise: two keys for each rank, of stochastic rounding: for measured encodes, and for all others. None: nearest.
        order: seed of a random order of all that may happen next; None: one rank after the other, as far as it comes.
        cut: steps are done in parts, cut at multiples of that many bytes of the whole; 0: in one piece.
        lanes: of every pair of ranks; part p of a step is on lane p % lanes. On a lane sends and receives are in order.

    Returns:
        Arrays of dtype storage(dtype).

    Raises:
        ValueError: the schedules do not fit together, a step reads what its bounds did not write, or a result is not
            written exactly once.
    """
    from wancoll.schedule.execution import Run

    sizes = [front.nbytes for front in inputs] if back_bytes is None else back_bytes
    run = Run(schedules, inputs, dtype, op, codec, sizes, noise, cut, lanes)
    return run.results(order)


def digest(result: bytes) -> int:
    """The digest of a result: XXH3-64 of the little-endian XXH3-64 hashes of its blocks."""
    import xxhash

    blocks = (result[start : start + DIGEST_BLOCK] for start in range(0, len(result), DIGEST_BLOCK))
    return xxhash.xxh3_64_intdigest(b"".join(xxhash.xxh3_64_intdigest(b).to_bytes(8, "little") for b in blocks))


def _apply(op: ReduceOp, a: Array, b: Array) -> Array:
    if op in (ReduceOp.sum, ReduceOp.avg):
        return a + b
    if op is ReduceOp.prod:
        return a * b
    if a.dtype.kind != "f":
        return np.minimum(a, b) if op is ReduceOp.min else np.maximum(a, b)
    bits = _BITS[a.itemsize]
    if op is ReduceOp.min:  # equal operands differ only in the sign of zero: either sign wins
        equal = a.view(bits) | b.view(bits)
        result = np.where(a < b, a, np.where(a > b, b, equal.view(a.dtype)))
    else:
        equal = a.view(bits) & b.view(bits)
        result = np.where(a > b, a, np.where(a < b, b, equal.view(a.dtype)))
    return np.where(np.isnan(a) | np.isnan(b), a.dtype.type(np.nan), result)


def widened(dtype: DType, a: Array) -> Array:
    """Half types as float32, which holds all their values."""
    if dtype is DType.bfloat16:
        return (a.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return a.astype(np.float32) if dtype is DType.float16 else a


def narrowed(dtype: DType, result: Array) -> Array:
    """Results as elements of *dtype*, rounded once to nearest even, NaNs made canonical."""
    if dtype not in _FLOATS:
        return result
    bits = _BITS[dtype.itemsize]
    if dtype is DType.bfloat16:
        wide = result.view(np.uint32)
        narrow = (wide + np.uint32(0x7FFF) + (wide >> 16 & 1)) >> 16
    else:
        narrow = result.astype(storage(dtype)).view(bits)
    return np.where(np.isnan(result), _CANONICAL_NAN[dtype], narrow).astype(bits).view(storage(dtype))
