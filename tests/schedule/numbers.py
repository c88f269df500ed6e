"""What the numbers mean, in numpy: a reduction, the last step of avg, the digest of a result.

Arrays hold elements as in wancoll.schedule.numbers. The rules are in docs/numbers.md, "Numbers". The engine equals all
of this bit for bit.
"""

from __future__ import annotations

import numpy as np

from wancoll.collective import DType, ReduceOp
from wancoll.schedule.numbers import _BITS, _FLOATS, Array, narrowed, storage, widened

__all__ = ["Array", "average", "digest", "narrowed", "reduce", "storage", "widened"]

DIGEST_BLOCK = 65536  # bytes


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


def digest(result: bytes, block: int = DIGEST_BLOCK) -> int:
    """The digest of a result: XXH3-64 of the little-endian XXH3-64 hashes of its blocks."""
    import xxhash

    blocks = (result[start : start + block] for start in range(0, len(result), block))
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
