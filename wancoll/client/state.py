"""A state in this process's memory: its tensors as plain bytes, and the blocks that take what is missing of them.

Bytes with the name of a dtype, so that any element type can be synchronised.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from wancoll._native import ffi, lib
from wancoll.client.arena import Arena, Block, Lease
from wancoll.client.tensors import (
    Region,
    check_not_cuda,
    check_numpy,
    check_torch,
    check_view,
    is_torch,
    kind_of,
    open_dlpack,
    unknown_dtype,
)
from wancoll.collective import DType
from wancoll.errors import ConfigError
from wancoll.limits import MIB
from wancoll.sync.manifest import STRIPE, Content, Entry, lengths
from wancoll.sync.verdict import Goal

_CALL = "sync_state"
_SLAB = 64 * MIB  # stripes that will be copied lie in blocks of this size
_ALIGN = 64
_PIECE = 4 * MIB


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of the state: its memory as bytes, and what it is."""

    memory: Region
    entry: Entry


def tensors_of(state: Any, *, changing: bool) -> list[Tensor]:
    """Look at a state without copying it; ascending by key. Tensors that are *changing* have to be writable."""
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
    if isinstance(x, np.ndarray):
        return _array(x, x, None, x.flags.writeable, who)
    if is_torch(x):
        return _torch(x, who)
    if hasattr(type(x), "__dlpack__"):
        found, writable = open_dlpack(x, who)
        itemsize = _dlpack_itemsize(found.dtype, who)
        name = "bool" if found.dtype == "bool8" else found.dtype
        return _bytes(x, found, found.address, prod(found.shape) * itemsize, writable), name, found.shape
    check_not_cuda(x, who)
    try:
        view = memoryview(x)
        array = np.asarray(view)
    except (TypeError, ValueError) as bad:
        raise ConfigError(
            "this cannot be synchronised", who=who,
            expected="a numpy array, a torch tensor, or an object with __dlpack__ or the buffer protocol",
            got=kind_of(x), hint=_what_instead(x),
        ) from bad  # fmt: skip
    check_view(x, view, who)
    return _array(x, array, view, not view.readonly, who)


def _what_instead(x: Any) -> str:
    if isinstance(x, Mapping):
        return "flatten it: one name for each tensor"
    if x is None:
        return "leave the name out on all members"
    return "pass numpy.asarray(x): an array of no dimensions takes a number"


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


class Incoming:
    """Arena memory for the stripes that a member lacks, and how they get to their tensors: all of them, or none.

    A tensor that lacks all of its stripes and is a whole block of the arena gets its pages swapped in the end; the
    others are copied. The memory is held as long as this and the thread that touches it live. Raises ArenaFull.
    """

    def __init__(self, arena: Arena, goal: Goal, missing: frozenset[int], tensors: Sequence[Tensor]) -> None:
        self._arena = arena
        self._leases: list[Lease] = []
        self._swaps: list[tuple[Block, Block, int, int, int]] = []  # target, taken, its offset; address and size
        self._copies: list[tuple[int, int, int]] = []  # to, from, bytes
        self._addresses: dict[int, int] = {}  # address of each stripe
        of_tensor: dict[int, list[int]] = {}
        for number in sorted(missing):
            of_tensor.setdefault(goal.stripes[number].entry, []).append(number)
        loose: list[int] = []
        for entry, numbers in of_tensor.items():
            memory, nbytes = tensors[entry].memory, goal.entries[entry].nbytes
            block = arena.swappable(memory.address, nbytes) if goal.nbytes(numbers) == nbytes else None
            if block is None:
                loose += numbers
                continue
            lease = arena.take(nbytes, block.nbytes)
            self._leases.append(lease)
            self._swaps.append((block, lease.block, lease.block.offset, block.address, nbytes))
            for number in numbers:
                self._addresses[number] = lease.block.address + goal.stripes[number].offset
        self._lay(goal, loose, tensors)
        # Beside the deliveries: the daemon, which writes there first, is busy enough with the bytes.
        self._toucher = threading.Thread(
            target=_touch, args=(arena, tuple(self._leases)), name="wancoll-incoming", daemon=True
        )
        self._toucher.start()

    @property
    def nbytes(self) -> int:
        """Size of the memory."""
        return sum(lease.block.nbytes for lease in self._leases)

    def address(self, stripe: int) -> int | None:
        """Where a stripe is received; None: it was not missing."""
        return self._addresses.get(stripe)

    def install(self) -> None:
        """Put everything in place. An interruption shows when it is done."""
        try:
            self._install()
        except BaseException:
            self._install()  # doing it again is harmless
            raise

    def _install(self) -> None:
        self._toucher.join()
        for target, taken, offset, address, nbytes in self._swaps:
            if not self._arena.swap(target, taken, offset):
                lib.wc_pages_copy(address, taken.address, nbytes)
        for to, source, nbytes in self._copies:
            lib.wc_pages_copy(to, source, nbytes)

    def _lay(self, goal: Goal, numbers: list[int], tensors: Sequence[Tensor]) -> None:
        """Give each of these stripes an address in a slab."""
        slab: list[int] = []
        used = 0
        for number in numbers:
            nbytes = goal.stripes[number].nbytes
            if slab and used + nbytes > _SLAB:
                self._fill(goal, slab, used, tensors)
                slab, used = [], 0
            slab.append(number)
            used += nbytes + -nbytes % _ALIGN
        if slab:
            self._fill(goal, slab, used, tensors)

    def _fill(self, goal: Goal, slab: list[int], used: int, tensors: Sequence[Tensor]) -> None:
        lease = self._arena.take(used)
        self._leases.append(lease)
        at = lease.block.address
        for number in slab:
            stripe = goal.stripes[number]
            self._addresses[number] = at
            self._copies.append((tensors[stripe.entry].memory.address + stripe.offset, at, stripe.nbytes))
            at += stripe.nbytes + -stripe.nbytes % _ALIGN


def _touch(arena: Arena, leases: Sequence[Lease]) -> None:
    """Get memory for these blocks, in pieces, so that the system's locks on the file are short."""
    with contextlib.suppress(OSError):  # then the first write finds out
        for lease in leases:
            for start in range(0, lease.block.used, _PIECE):
                arena.touch(lease.block, start, min(_PIECE, lease.block.used - start))
