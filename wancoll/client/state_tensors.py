"""The tensors of a state as plain bytes with the name of a dtype, so that any element type can be synchronised."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from wancoll._native import ffi, lib
from wancoll.client.tensors import (
    Region,
    check_numpy,
    check_torch,
    check_view,
    kind_of,
    open_dlpack,
    unknown_dtype,
)
from wancoll.collective import DType
from wancoll.errors import ConfigError
from wancoll.sync.manifest import STRIPE, Content, Entry, lengths

_CALL = "sync_state"


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of the state: its memory as bytes, and what it is."""

    memory: Region
    entry: Entry


def tensors(state: Any, *, changing: bool) -> list[Tensor]:
    """Look at a state without copying it; ascending by key.

    Args:
        state: the caller's, key -> tensor.
        changing: whether the tensors may be changed, and so have to be writable.

    Raises:
        ConfigError: no mapping of names to tensors that can be used.
    """
    if not isinstance(state, Mapping):
        raise ConfigError(
            "state is no mapping", who=f"{_CALL}(state)", expected="a dict, name -> tensor", got=kind_of(state)
        )
    found: list[Tensor] = []
    for key in state:
        if not isinstance(key, str):
            raise ConfigError("a key is no string", who=f"{_CALL}(state)", expected="names", got=repr(key)[:200])
    for key in sorted(state):
        who = f"{_CALL}(state[{key!r}])"
        memory, dtype, shape = _look(state[key], who)
        if changing and not memory.writable:
            raise ConfigError(
                "a read-only tensor cannot be brought up to date", who=who, expected="a writable tensor",
                got=f"{kind_of(state[key])} that is read-only",
                hint="pass a writable copy, or strategy='send-only'",
            )  # fmt: skip
        found.append(Tensor(memory, Entry(key, dtype, shape, memory.nbytes)))
    return _shared(found)


def content(found: list[Tensor]) -> Content:
    """What the tensors hold: one pass over their memory, outside Python's lock."""
    digests = b"".join(
        digest_stripes(tensor.memory.address, tensor.memory.nbytes) for tensor in found if tensor.entry.shares < 0
    )
    return Content(tuple(tensor.entry for tensor in found), digests)


def digest_stripes(address: int, nbytes: int) -> bytes:
    """Digests of the stripes of these bytes, 8 each, little endian."""
    out = np.zeros(len(lengths(nbytes)), np.uint64)
    if nbytes and lib.wc_digest_stripes(address, nbytes, STRIPE, ffi.cast("uint64_t *", out.ctypes.data)):
        raise MemoryError("no memory for a digest")
    return out.astype("<u8", copy=False).tobytes()


def _look(x: Any, who: str) -> tuple[Region, str, tuple[int, ...]]:
    """Memory as bytes, name of the dtype, shape."""
    tensor_type = getattr(sys.modules.get("torch"), "Tensor", None)
    if isinstance(x, np.ndarray):
        return _array(x, x, None, x.flags.writeable, who)
    if tensor_type is not None and isinstance(x, tensor_type):
        return _torch(x, who)
    if hasattr(type(x), "__dlpack__"):
        found, writable = open_dlpack(x, who)
        itemsize = _dlpack_itemsize(found.dtype, who)
        name = "bool" if found.dtype == "bool8" else found.dtype
        return _bytes(x, found, found.address, prod(found.shape) * itemsize, writable), name, found.shape
    try:
        view = memoryview(x)
        array = np.asarray(view)
    except (TypeError, ValueError) as bad:
        raise ConfigError(
            "this cannot be synchronised", who=who,
            expected="a numpy array, a torch tensor, or an object with __dlpack__ or the buffer protocol",
            got=kind_of(x), hint="pass numpy.asarray(x): an array of no dimensions takes a number",
        ) from bad  # fmt: skip
    check_view(x, view, who)
    return _array(x, array, view, not view.readonly, who)


def _array(
    owner: Any, array: np.ndarray[Any, Any], keep: Any, writable: bool, who: str
) -> tuple[Region, str, tuple[int, ...]]:
    if array.dtype.hasobject:
        raise unknown_dtype(who, f"{array.dtype}, whose elements are Python objects", "pass an array of numbers")
    check_numpy(array, who)
    plain = array.dtype.isnative and array.dtype.fields is None
    name = array.dtype.name if plain else str(array.dtype)
    address = array.__array_interface__["data"][0]
    return _bytes(owner, keep, address, array.nbytes, writable), name, array.shape


def _torch(x: Any, who: str) -> tuple[Region, str, tuple[int, ...]]:
    check_torch(x, who)
    if x.is_quantized or x.is_conj() or x.is_neg():
        raise ConfigError(
            "the tensor's bytes are not all there is to it", who=who, expected="a plain tensor",
            got="a quantized tensor" if x.is_quantized else "a conjugated or negated view",
            hint="pass x.resolve_conj().resolve_neg(), or the parts of a quantized tensor",
        )  # fmt: skip
    nbytes = x.numel() * x.element_size()
    return _bytes(x, None, x.data_ptr(), nbytes, True), str(x.dtype).removeprefix("torch."), tuple(x.shape)


def _bytes(owner: Any, keep: Any, address: int, nbytes: int, writable: bool) -> Region:
    return Region(owner, keep, address, nbytes, DType.uint8, (nbytes,), writable)


def _dlpack_itemsize(dtype: str, who: str) -> int:
    digits = dtype[len(dtype.rstrip("0123456789")) :]
    if not digits or int(digits) % 8 or "x" in dtype.removeprefix("complex"):
        raise ConfigError(
            "the dtype is unknown", who=who, expected="elements of whole bytes, without lanes", got=repr(dtype)
        )
    return int(digits) // 8


def _shared(found: list[Tensor]) -> list[Tensor]:
    """Tensors with the very same memory are one, as tied weights are; others must not overlap."""
    first: dict[tuple[int, int], int] = {}
    result: list[Tensor] = []
    for number, tensor in enumerate(found):
        memory, entry = tensor.memory, tensor.entry
        shares = first.setdefault((memory.address, memory.nbytes), number) if memory.nbytes else number
        if shares != number:
            entry = Entry(entry.key, entry.dtype, entry.shape, entry.nbytes, shares)
        result.append(Tensor(memory, entry))
    laid = sorted((found[number].memory.address, number) for number in first.values())
    for (start, one), (then, other) in itertools.pairwise(laid):
        if start + found[one].memory.nbytes > then:
            raise ConfigError(
                "two tensors share a part of their memory", who=f"{_CALL}(state)",
                expected="tensors that do not overlap, or are the same memory",
                got=f"{found[one].entry.key!r} and {found[other].entry.key!r}", hint="leave one of them out",
            )  # fmt: skip
    return result
