"""What the caller gets: new tensors in the arena, of the kind that the call's tensor has, and parts of results."""

from __future__ import annotations

import sys
from math import prod
from typing import Any

import numpy as np

from wancoll.client.memory import Arena, ArrayMemory
from wancoll.client.tensors import Region, numpy_dtype
from wancoll.collective import DType


def new_array(arena: Arena, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """A numpy array in the arena, contents undefined.

    Raises:
        ConfigError: the arena is full.
    """
    nbytes = prod(shape, start=dtype.itemsize)
    if not nbytes:
        return np.empty(shape, dtype)
    return np.asarray(ArrayMemory(arena.take(nbytes), nbytes)).view(dtype).reshape(shape)


def new_result(arena: Arena, shape: tuple[int, ...], like: Region) -> Region:
    """A tensor in the arena, of like's dtype: torch's where like's owner is torch's, else numpy's.

    Raises:
        ConfigError: the arena is full, or numpy lacks the dtype.
    """
    if _is_torch(like.owner):
        torch = sys.modules["torch"]
        dtype = getattr(torch, like.dtype.name)
        if not prod(shape):
            return Region(torch.empty(shape, dtype=dtype), None, 0, 0, like.dtype, shape, True)
        flat = new_array(arena, (prod(shape) * like.dtype.itemsize,), np.dtype(np.uint8))
        tensor = torch.from_numpy(flat).view(dtype).view(shape)
        return Region(tensor, None, flat.ctypes.data, prod(shape), like.dtype, shape, True)
    array = new_array(arena, shape, numpy_dtype(like.dtype.name))
    return Region(array, None, array.__array_interface__["data"][0], array.size, like.dtype, shape, True)


def leading(out: Region, blocks: int, of: int, count: int) -> Any:
    """The first *blocks* of a result's *of* equal blocks: a view that has fewer rows where the shape allows it.

    Args:
        out: the tensor with the result.
        blocks: how many are there.
        of: how many fit; 0: they are not equal.
        count: elements of the part.

    Returns:
        A view of the caller's tensor; for what is neither numpy's nor torch's a numpy array over its memory.
    """
    tensor = out.owner
    if not isinstance(tensor, np.ndarray) and not _is_torch(tensor):
        tensor = np.asarray(_Memory(out)).view(_viewed(out.dtype)).reshape(out.shape)
    if of and out.shape and out.shape[0] % of == 0:
        return tensor[: out.shape[0] // of * blocks]
    return tensor.reshape(-1)[:count]


class _Memory:
    """Lets numpy look at a region; keeps it alive."""

    def __init__(self, region: Region) -> None:
        self._region = region
        self.__array_interface__: dict[str, Any] = {
            "data": (region.address, not region.writable),
            "shape": (region.nbytes,),
            "typestr": "|u1",
            "version": 3,
        }


def _viewed(dtype: DType) -> np.dtype[Any]:
    if dtype is DType.bfloat16 and "ml_dtypes" not in sys.modules:
        return np.dtype(np.uint16)
    return numpy_dtype(dtype.name)


def _is_torch(x: Any) -> bool:
    tensor_type = getattr(sys.modules.get("torch"), "Tensor", None)
    return tensor_type is not None and isinstance(x, tensor_type)
