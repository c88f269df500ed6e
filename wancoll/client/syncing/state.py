"""A state in the memory of this process or its devices: plain bytes, and the blocks that take what is missing of it.

Bytes with the name of a dtype, so that any element type can be synchronised.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from msgspec.structs import replace

from wancoll.client.cuda.origin import Origin
from wancoll.client.cuda.pinned import Pinned
from wancoll.client.cuda.staging import HostToDevice, Staging
from wancoll.client.memory.arena import Arena, Block, Lease
from wancoll.client.memory.tensors import (
    POPULATE_READ,
    POPULATE_WRITE,
    Region,
    check_numpy,
    check_torch,
    check_view,
    exported,
    is_torch,
    kind_of,
    local_part,
    name_of,
    spread_of,
    there,
    unknown_dtype,
)
from wancoll.collective import DType
from wancoll.errors import ConfigError, DeviceError
from wancoll.limits import MIB
from wancoll.native import ffi, lib
from wancoll.sync.manifest import STRIPE, Content, Entry, lengths, stripe_count
from wancoll.sync.verdict import Goal

_CALL = "sync_state"
_SLAB = 64 * MIB  # stripes that will be copied lie in blocks of this size
_ALIGN = 64
_ORDERED = (
    "bring a model to memory_format=torch.contiguous_format before its optimizer makes state of its own; "
    "of a tensor of your own pass x.contiguous(), and copy the result back"
)


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
        memory, dtype, shape = look(state[key], who)
        there(memory, who, POPULATE_WRITE if changing and memory.writable else POPULATE_READ)
        if changing and not memory.writable:
            raise ConfigError(
                "a read-only tensor cannot be brought up to date", who=who, expected="a writable tensor",
                got=f"{kind_of(state[key])} that is read-only", hint="pass a writable copy, or strategy='send-only'",
            )  # fmt: skip
        found.append(Tensor(memory, Entry(key, dtype, shape, memory.nbytes, spread=memory.spread)))
    return _shared(found)


def worthless(found: list[Tensor]) -> Content:
    """The content of tensors whose bytes nobody wants: no digest is zero, so every stripe is missing."""
    count = sum(stripe_count(tensor.entry.nbytes) for tensor in found if tensor.entry.shares < 0)
    return Content(tuple(tensor.entry for tensor in found), bytes(8 * count))


def content(found: list[Tensor], staging: Staging, deadline: float | None) -> Content:
    """What the tensors hold: one pass over their memory, outside Python's lock; from devices through one block.

    Raises:
        TimeoutError: a device had not handed its tensor over by *deadline*.
        DeviceError: a device failed.
        ArenaFull: no room for that block.
    """
    own = [tensor.memory for tensor in found if tensor.entry.shares < 0]
    most = max((memory.nbytes for memory in own if memory.device is not None), default=0)
    held = staging.take(min(most, STRIPE)) if most else None
    in_memory = iter(digests([part for memory in own if memory.device is None for part in _stripes(memory)]))
    found_digests: list[int] = []
    for memory in own:
        for address, nbytes in _stripes(memory):
            if memory.device is None or held is None:
                found_digests.append(next(in_memory))
                continue
            staging.read(memory.part(address - memory.address, nbytes), held.block.address, held, deadline)
            found_digests += digests([(held.block.address, nbytes)])
    return Content(tuple(tensor.entry for tensor in found), np.array(found_digests, "<u8").tobytes())


def _stripes(memory: Region) -> list[tuple[int, int]]:
    return [(memory.address + number * STRIPE, nbytes) for number, nbytes in enumerate(lengths(memory.nbytes))]


def digests(stripes: Sequence[tuple[int, int]]) -> list[int]:
    """Digests of stripes of this process's memory, (address, nbytes) each."""
    table = np.array([(*stripe, 0) for stripe in stripes], np.uint64).reshape(-1, 3)  # as wc_stripe has it
    if lib.wc_digest_stripes(ffi.cast("wc_stripe *", table.ctypes.data), len(stripes), 0):
        raise MemoryError("no memory for a digest")
    return [int(digest) for digest in table[:, 2]]


def look(x: Any, who: str) -> tuple[Region, str, tuple[int, ...]]:
    """Memory as bytes, name of the dtype, shape."""
    if isinstance(x, np.ndarray):
        return _array(x, x, None, who)
    if is_torch(x):
        return _torch(x, who)
    if (opened := exported(x, who)) is not None:
        found, writable, origin, _ = opened
        if not found.itemsize:
            raise ConfigError(
                "the dtype is unknown", who=who, expected="elements of whole bytes, without lanes",
                got=repr(found.dtype),
            )  # fmt: skip
        name = "bool" if found.dtype == "bool8" else found.dtype
        return _bytes(x, found, found.address, prod(found.shape) * found.itemsize, writable, origin), name, found.shape
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
    return _array(x, array, view, who)


def _what_instead(x: Any) -> str:
    if isinstance(x, Mapping):
        return "flatten it: one name for each tensor"
    if x is None:
        return "leave the name out on all members"
    return "pass numpy.asarray(x): an array of no dimensions takes a number"


def _array(owner: Any, array: np.ndarray[Any, Any], keep: Any, who: str) -> tuple[Region, str, tuple[int, ...]]:
    check_numpy(array, who)
    array = np.asarray(array)  # a subclass may say what it likes
    if array.dtype.hasobject:
        raise unknown_dtype(who, f"{array.dtype}, whose elements are Python objects", "pass an array of numbers")
    address = array.__array_interface__["data"][0]
    return _bytes(owner, keep, address, array.nbytes, array.flags.writeable), name_of(array.dtype), array.shape


def _torch(x: Any, who: str) -> tuple[Region, str, tuple[int, ...]]:
    x, owner = local_part(x), x
    origin = check_torch(x, who, _ORDERED)
    found = _bytes(owner, None, x.data_ptr(), x.numel() * x.element_size(), True, origin)
    found.spread = spread_of(owner)
    return found, str(x.dtype).removeprefix("torch."), tuple(x.shape)


def _bytes(
    owner: Any, keep: Any, address: int, nbytes: int, writable: bool, device: Origin | None = None
) -> Region:  # fmt: skip
    return Region(owner, keep, address, nbytes, DType.uint8, (nbytes,), writable, device)


def _shared(found: list[Tensor]) -> list[Tensor]:
    """Tensors with the very same memory are one, as tied weights are; others must not overlap."""
    first: dict[tuple[int, int], int] = {}
    result: list[Tensor] = []
    for number, tensor in enumerate(found):
        memory, entry = tensor.memory, tensor.entry
        shares = first.setdefault((memory.address, memory.nbytes), number) if memory.nbytes else number
        if shares != number:
            entry = replace(entry, shares=shares)
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
    others are copied, to devices from pinned memory. The memory is held as long as this lives. Raises ArenaFull.
    """

    def __init__(
        self, arena: Arena, staging: Staging, goal: Goal, missing: frozenset[int], tensors: Sequence[Tensor]
    ) -> None:
        self._arena, self._staging = arena, staging
        self._leases: list[Lease] = []
        self._swaps: list[tuple[Block, Block, int, int, int]] = []  # target, taken, its offset; address and size
        self._copies: list[tuple[Region, int, Lease | Pinned]] = []  # to, from, in this block
        self._addresses: dict[int, int] = {}  # address of each stripe
        self._parts: dict[int, tuple[Lease, int, int]] = {}  # by stripe: the part of a block that it is in: from, size
        self._filled: set[tuple[Lease, int, int]] = set()  # of them those that memory was got for
        self.to_devices: list[HostToDevice] = []  # copies that install() has sent on their way
        of_tensor: dict[int, list[int]] = {}
        for number in sorted(missing):
            of_tensor.setdefault(goal.stripes[number].entry, []).append(number)
        loose: dict[bool, list[int]] = {True: [], False: []}  # of tensors on devices, and in host memory
        for entry, numbers in of_tensor.items():
            memory, nbytes = tensors[entry].memory, goal.entries[entry].nbytes
            block = arena.swappable(memory.address, nbytes) if goal.nbytes(numbers) == nbytes else None
            if block is None:
                loose[memory.device is not None] += numbers
                continue
            lease = arena.take(nbytes, block.nbytes)
            self._leases.append(lease)
            self._swaps.append((block, lease.block, lease.block.offset, block.address, nbytes))
            for number in numbers:
                stripe = goal.stripes[number]
                self._addresses[number] = lease.block.address + stripe.offset
                self._parts[number] = lease, stripe.offset, stripe.nbytes
        for on_device, numbers in loose.items():
            self._lay(goal, numbers, tensors, on_device)

    @property
    def nbytes(self) -> int:
        """Size of the memory, without what stays pinned."""
        return sum(lease.block.nbytes for lease in self._leases)

    def address(self, stripe: int) -> int | None:
        """Where a stripe is received; None: it was not missing."""
        return self._addresses.get(stripe)

    def fill(self, stripes: Sequence[int]) -> None:
        """Get memory for these, which are about to be received: the daemon, which writes there, is busy enough."""
        for part in {self._parts[number] for number in stripes if number in self._parts} - self._filled:
            self._filled.add(part)
            lease, start, nbytes = part
            self._arena.fill(lease.block, start, nbytes)

    def install(self) -> None:
        """Put everything in place, or on its way to devices. An interruption shows when it is done.

        Raises:
            DeviceError: a device failed: the tensors' contents are undefined.
        """
        try:
            self._install()
        except DeviceError:
            raise
        except BaseException:
            self._install()  # doing it again is harmless
            raise

    def _install(self) -> None:
        self.to_devices = []
        for target, at, held in self._copies:
            if target.device is None:
                lib.wc_pages_copy(target.address, at, target.nbytes, 0)
            else:
                self.to_devices += self._staging.write([target], at, target.nbytes, held)
        for block, taken, offset, address, nbytes in self._swaps:
            if not self._arena.swap(block, taken, offset):
                lib.wc_pages_copy(address, taken.address, nbytes, 0)

    def _lay(self, goal: Goal, numbers: list[int], tensors: Sequence[Tensor], on_device: bool) -> None:
        """Give each of these stripes an address in a slab."""
        slab: list[int] = []
        used = 0
        for number in numbers:
            nbytes = goal.stripes[number].nbytes
            if slab and used + nbytes > _SLAB:
                self._fill(goal, slab, used, tensors, on_device)
                slab, used = [], 0
            slab.append(number)
            used += nbytes + -nbytes % _ALIGN
        if slab:
            self._fill(goal, slab, used, tensors, on_device)

    def _fill(self, goal: Goal, slab: list[int], used: int, tensors: Sequence[Tensor], on_device: bool) -> None:
        held = self._staging.take(used) if on_device else self._arena.take(used)
        if isinstance(held, Lease):
            self._leases.append(held)
            self._parts |= dict.fromkeys(slab, (held, 0, used))
        at = held.block.address
        for number in slab:
            stripe = goal.stripes[number]
            self._addresses[number] = at
            self._copies.append((tensors[stripe.entry].memory.part(stripe.offset, stripe.nbytes), at, held))
            at += stripe.nbytes + -stripe.nbytes % _ALIGN
