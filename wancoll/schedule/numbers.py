"""How numpy holds elements: as it has them; bfloat16, which it lacks, as uint16 with its bits."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

from wancoll.collective import DType

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]

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
