"""What the numbers mean, in numpy: a reduction, the last step of avg, the digest of a result.

Arrays hold elements as numpy has them; bfloat16, which numpy lacks, is uint16 with its bits. The rules are in
docs/numbers.md, "Numbers". The engine equals all of this bit for bit.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

from wancoll.collective import DType, ReduceOp

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
