"""Tensors as memory: what the caller passed, and new ones in the arena, of the same kind, for results.

numpy arrays, torch tensors (torch is never imported here), anything with DLPack, CUDA's array interface or the buffer
protocol; in host memory or on CUDA devices. What cannot be used is refused with a ConfigError: dtype, layout, device.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from operator import index
from typing import Any, TypeAlias

import numpy as np

from wancoll.client.cuda.origin import NO_SYNC, Origin, of_dlpack, of_interface, of_torch
from wancoll.client.memory.arena import Arena, ArrayMemory
from wancoll.collective import DType, shortened
from wancoll.errors import ConfigError, DeviceError
from wancoll.native import ffi

_NATIVE = {np.dtype(d.name): d for d in DType if d is not DType.bfloat16}
_BY_DTYPE: dict[Any, DType] = dict(_NATIVE)  # and ml_dtypes' bfloat16, once seen
_BY_TORCH_NAME = {f"torch.{d.name}": d for d in DType}
_BY_FORMAT = {
    **{code: _NATIVE[np.dtype(code)] for code in "efdbhilqBn"},
    **{"=" + code: _NATIVE[np.dtype("=" + code)] for code in "efdbhilqB"},
    **({"<" + code: _NATIVE[np.dtype("<" + code)] for code in "efdbhilqB"} if sys.byteorder == "little" else {}),
}
_KNOWN = ", ".join(d.name for d in DType)
_COPY = "pass a contiguous copy (numpy.ascontiguousarray(x), x.contiguous()), and copy the result back if needed"
_NO_VALUES = "its memory was freed, its file cut short, or it never had any: pass a tensor that holds its values"
_IMMUTABLE_MODULES = ("jax", "jaxlib", "tensorflow")  # their DLPack does not always say that it is read-only

_CUDA_DEVICES = (2, 13)  # kDLCUDA, kDLCUDAManaged
_TO_HOST = "copy it to the host first: x.get() (CuPy), x.copy_to_host() (Numba), jax.device_get(x)"

_from_buffer, _cast = ffi.from_buffer, ffi.cast
_libc = ctypes.PyDLL(None)  # short calls: Python's lock is kept
_msync, _madvise, _syscall = _libc.msync, _libc.madvise, ctypes.PyDLL(None, use_errno=True).syscall
_msync.argtypes = _madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
_MS_ASYNC = 1  # of Linux: it only looks whether all pages are mapped
POPULATE_READ, POPULATE_WRITE = 22, 23  # of Linux 5.14: touch pages without a signal where they cannot be
_FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine(), 0)
_COMPARE, _OR_ZERO = (132, 0), (133, 2 << 28)  # futex operations that read a word, or write what is there, atomically
_syscall.argtypes = ctypes.c_long, ctypes.c_void_p, *3 * (ctypes.c_long,), ctypes.c_void_p, ctypes.c_long
_PAGES = 4  # up to so many are touched as one


class Region:
    """A C-contiguous tensor in this process's memory, or in that of a CUDA device."""

    __slots__ = (
        "address", "count", "device", "dtype", "keep", "nbytes", "on", "owner", "pinned", "shape", "spread", "writable",
    )  # fmt: skip

    def __init__(
        self, owner: Any, keep: Any, address: int, count: int, dtype: DType, shape: tuple[int, ...], writable: bool,
        device: Origin | None = None,
    ) -> None:  # fmt: skip
        self.owner, self.keep = owner, keep  # the caller's object, and what else must live while the address is used
        self.address = address if count else 0  # of the first byte
        self.count, self.nbytes, self.dtype = count, count * dtype.itemsize, dtype
        self.shape = shape  # of the caller's object
        self.spread = ""  # of a DTensor: see spread_of
        self.writable = writable  # whether a result may be written into it
        self.device = device  # how its users on a CUDA device are ordered; None: it is in host memory
        self.on = -1  # the device's ordinal, once the driver was asked
        self.pinned: Origin | None = None  # how a stream comes behind a device's users of memory of the host, if any

    def __str__(self) -> str:
        return f"{self.dtype.name}{list(self.shape)}"

    def part(self, start: int, nbytes: int) -> Region:
        """Some of its bytes, as bytes."""
        found = Region(
            self.owner, self.keep, self.address + start, nbytes, DType.uint8, (nbytes,), self.writable, self.device
        )
        found.on = self.on
        return found


def region(x: Any, who: str) -> Region:
    """Look at *x* without copying it; *who* names it in errors, for example "all_reduce(out=...)"."""
    if isinstance(x, np.ndarray):
        found = _numpy(x, who)
    elif is_torch(x):
        found = _torch(x, who)
    elif (opened := exported(x, who)) is None:
        found = _buffer(x, who)
    else:
        tensor, writable, origin, pinned = opened
        dtype = DType.__members__.get(tensor.dtype)
        if dtype is None:
            raise unknown_dtype(who, tensor.dtype)
        found = Region(x, tensor, tensor.address, prod(tensor.shape), dtype, tensor.shape, writable, origin)
        found.pinned = pinned
    return there(found, who)


def there(found: Region, who: str, advice: int = POPULATE_READ) -> Region:
    """*found*, unless its elements lie at address 0 or in host memory that cannot be used: touching it is a signal."""
    if found.nbytes and (
        not found.address
        or (found.address + found.nbytes) >> 64
        or (found.device is None and not _usable(found, advice))
    ):
        may = "read" if advice == POPULATE_READ else "write"
        raise ConfigError(
            "the tensor's memory is not there", who=who, expected=f"{found.nbytes} bytes that this process may {may}",
            got=f"{kind_of(found.owner)} at address {found.address:#x}", hint=_NO_VALUES,
        )  # fmt: skip
    return found


def _usable(found: Region, advice: int) -> bool:
    """Whether all of it is mapped, and its first and last page can be read, or written."""
    start, end = found.address & -mmap.PAGESIZE, found.address + found.nbytes
    small, last = end - start <= _PAGES * mmap.PAGESIZE, (end - 1) & -mmap.PAGESIZE
    if small and not _madvise(start, end - start, advice):
        return True
    if _msync(start, end - start, _MS_ASYNC):
        return False
    if not (small or _madvise(start, mmap.PAGESIZE, advice) or _madvise(last, mmap.PAGESIZE, advice)):
        return True
    # Forbidden there, or memory of a driver, or an older kernel: have the kernel reach a word of each of the two.
    kind, how = _COMPARE if advice == POPULATE_READ else _OR_ZERO
    for at in (found.address & -4, (end - 1) & -4) if _FUTEX else ():
        if _syscall(_FUTEX, at, kind, 0, 0, at, how) < 0 and ctypes.get_errno() == errno.EFAULT:
            return False
    return True


def numpy_dtype(dtype: Any) -> np.dtype[Any]:
    """The numpy dtype that *dtype*, numpy's or torch's, means, if it is one of DType's."""
    if type(dtype).__module__ == "torch":
        dtype = str(dtype).removeprefix("torch.")
    if dtype == "bfloat16":
        try:
            import ml_dtypes
        except ImportError:
            raise ConfigError(
                "numpy has no bfloat16 of its own", who="empty(dtype='bfloat16')", expected="the package ml_dtypes",
                got="it is not installed", hint="pip install ml_dtypes, or take 'int16' and view it as your bfloat16",
            ) from None  # fmt: skip
        dtype = ml_dtypes.bfloat16
    try:
        found: np.dtype[Any] = np.dtype(dtype)
    except TypeError as bad:
        raise unknown_dtype("empty(dtype=...)", repr(dtype)) from bad
    if found not in _NATIVE and not (found.name == "bfloat16" and found.isnative):
        raise unknown_dtype("empty(dtype=...)", f"{found} ({found.str})")
    return found


def check_pair(x: Region, out: Region, call: str = "all_reduce") -> None:
    """Refuse an *out* that is not like *x*, or overlaps it in part."""
    if out.shape != x.shape and out.dtype is x.dtype:
        raise ConfigError(
            "out has another shape than the tensor", who=f"{call}(out=...)", expected=str(x.shape), got=str(out.shape)
        )
    check_out(x, out, x.count, call)


def check_out(x: Region, out: Region, count: int, call: str) -> None:
    """Refuse an *out* that cannot take a result of *count* elements of x's dtype, or overlaps *x* in part."""
    who = f"{call}(out=...)"
    if out.dtype is not x.dtype:
        raise ConfigError("out has another dtype than the tensor", who=who, expected=x.dtype.name, got=out.dtype.name)
    if out.count != count:
        raise ConfigError(
            "out has another size than the result", who=who, expected=f"{count} elements",
            got=f"{out.count}, of shape {out.shape}",
        )  # fmt: skip
    same = x.address == out.address and x.nbytes == out.nbytes
    if not same and x.address < out.address + out.nbytes and out.address < x.address + x.nbytes:
        sizes = f"{x.nbytes}" if x.nbytes == out.nbytes else f"{x.nbytes} and {out.nbytes}"
        raise ConfigError(
            "out overlaps a part of the tensor", who=who, expected="the same memory or none of it",
            got=f"{abs(out.address - x.address)} bytes apart, {sizes} bytes long",
        )  # fmt: skip


def require_writable(x: Region, who: str) -> None:
    """Refuse to write into *x*."""
    if not x.writable:
        raise ConfigError(
            "the result cannot be written into a read-only tensor", who=who, expected="a writable tensor",
            got=f"{kind_of(x.owner)} that is read-only", hint="pass out=, an array that takes the result",
        )  # fmt: skip
    there(x, who, POPULATE_WRITE)


def _numpy(x: np.ndarray[Any, Any], who: str) -> Region:
    dtype = _BY_DTYPE.get(x.dtype)
    if dtype is None:
        dtype = _numpy_dtype(x, who)
    check_numpy(x, who)
    x, owner = np.asarray(x), x  # a subclass may say what it likes
    if dtype is DType.bfloat16:  # no buffer protocol
        address = x.__array_interface__["data"][0]
    else:
        address = int(_cast("uintptr_t", _from_buffer(x)))
    return Region(owner, None, address, x.size, dtype, x.shape, x.flags.writeable)


def check_numpy(x: np.ndarray[Any, Any], who: str) -> None:
    """Refuse an array whose elements are not all there is to it, one after the other."""
    flags = np.asarray(x).flags
    if not flags.c_contiguous:
        raise not_contiguous(
            who, f"a numpy array with shape {x.shape} and strides {x.strides} in bytes", flags.f_contiguous
        )
    if type(x) is not np.ndarray and isinstance(x, np.ma.MaskedArray):
        raise ConfigError(
            "a masked array's mask cannot be reduced", who=who, expected="a plain array", got="numpy.ma.MaskedArray",
            hint="pass x.filled(0), or x.data if the mask does not matter",
        )  # fmt: skip


def _numpy_dtype(x: np.ndarray[Any, Any], who: str) -> DType:
    if x.dtype.name == "bfloat16" and x.dtype.itemsize == 2 and x.dtype.isnative:
        _BY_DTYPE[x.dtype] = DType.bfloat16
        return DType.bfloat16
    hint = ""
    if not x.dtype.isnative:
        hint = "its bytes are in foreign order: pass x.astype(x.dtype.newbyteorder('='))"
    raise unknown_dtype(who, f"{x.dtype} ({x.dtype.str})", hint)


def _torch(x: Any, who: str) -> Region:
    x, owner = local_part(x), x
    origin = check_torch(x, who)
    dtype = _BY_TORCH_NAME.get(str(x.dtype))
    if dtype is None:
        raise unknown_dtype(who, str(x.dtype))
    found = Region(owner, None, x.data_ptr(), x.numel(), dtype, tuple(x.shape), True, origin)
    found.spread = spread_of(owner)
    return found


def local_part(x: Any) -> Any:
    """This rank's part of a DTensor, which shares its memory; anything else as it is, also a sum that is pending."""
    if not hasattr(x, "to_local") or any(each.is_partial() for each in getattr(x, "placements", ())):
        return x
    return x.to_local()


def spread_of(x: Any) -> str:
    """How a DTensor lies on which mesh, and its whole shape, which all members' calls have in common; "" of others."""
    if not hasattr(x, "device_mesh"):
        return ""
    mesh = x.device_mesh
    ranks = (mesh.mesh - mesh.mesh.min()).tolist()  # islands have other ones
    return f"{' '.join(map(str, x.placements))} of {list(x.shape)} on {shortened(str(ranks))}"


def most_of(x: Any) -> int:
    """Elements of a torch tensor here; of a DTensor at any rank: alike in an island, whose ranks cut buckets alike."""
    mesh = getattr(x, "device_mesh", None)
    return int(x.numel()) if mesh is None else -(-int(x.numel()) // int(mesh.size()))


def made_like(x: Any, part: Any) -> Any:
    """*part* as this rank's part of a tensor like *x*; as it is where *x* is no DTensor."""
    if not hasattr(x, "to_local"):
        return part
    make = type(x.detach()).from_local
    return make(part, x.device_mesh, x.placements, run_check=False, shape=x.shape, stride=x.stride())


def check_torch(x: Any, who: str, instead: str = _COPY) -> Origin | None:
    """Refuse a tensor whose memory cannot be used; *instead* of one that is not contiguous do that.

    Returns:
        Of a tensor on a CUDA device how its users are ordered.
    """
    check_plain(x, who)
    if x.requires_grad:
        raise ConfigError(
            "the tensor requires grad: autograd would not see the result", who=who,
            expected="a tensor without requires_grad", hint="pass x.detach(), which shares the memory",
            got=f"a torch tensor of shape {tuple(x.shape)} with requires_grad=True",
        )  # fmt: skip
    if not x.is_contiguous():
        raise not_contiguous(who, f"a torch tensor with shape {tuple(x.shape)} and strides {x.stride()}", hint=instead)
    if x.is_conj() or x.is_neg():
        raise _not_plain(who, "a conjugated or negated view", "pass x.resolve_conj().resolve_neg()")
    return of_torch(x, sys.modules["torch"]) if x.device.type == "cuda" else None


def check_plain(x: Any, who: str) -> None:
    """Refuse a torch tensor whose elements do not lie in memory of its own, on a CPU or a CUDA device."""
    kind = type(x)
    if x.is_nested:
        raise _not_plain(who, "a nested tensor", "pass the tensors of x.unbind()")
    if kind.__torch_dispatch__ is not sys.modules["torch"].Tensor.__torch_dispatch__:
        hint = "redistribute it to Shard or Replicate first" if hasattr(x, "to_local") else "pass a plain tensor"
        raise _not_plain(who, f"{kind_of(x)}, a subclass that stands for other tensors", hint)
    if x.device.type not in ("cpu", "cuda"):
        hint = "it has no values: module.to_empty(device='cpu') gives it memory" if x.is_meta else "pass x.cpu()"
        raise not_on_cpu(who, f"a torch tensor on {x.device}", hint)
    if str(x.layout) != "torch.strided":
        raise _not_plain(who, str(x.layout), "pass x.to_dense()")
    if x.is_quantized:
        raise _not_plain(who, "a quantized tensor", "pass x.int_repr(), or x.dequantize()")
    try:
        last = sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
        needed = (x.storage_offset() + last + 1) * x.element_size() if x.numel() else 0
        has = x.untyped_storage().nbytes() if needed and x.data_ptr() else 0
        got = f"a torch tensor of shape {tuple(x.shape)} with {has} of {needed} bytes"
    except (RuntimeError, ValueError) as bad:  # under torch.vmap; lazy parameters before the first forward
        has, needed, got = 0, 1, f"{kind_of(x)}: {bad}"
    if has < needed:
        raise _not_plain(who, got, _NO_VALUES)


def _not_plain(who: str, got: str, hint: str) -> ConfigError:
    return ConfigError(
        "the tensor's values do not lie in its own memory", who=who, expected="a plain tensor", got=got, hint=hint
    )


def _unreadable(x: Any, who: str, expected: str, bad: Exception) -> ConfigError:
    """The refusal of an exporter that raises, or says what cannot be: it is the caller's tensor."""
    got = f"{kind_of(x)}: {type(bad).__name__}: {bad}"
    return ConfigError("the tensor cannot be exported", who=who, expected=expected, got=got)


Opened: TypeAlias = "tuple[Exported, bool, Origin | None, Origin | None]"


def exported(x: Any, who: str) -> Opened | None:
    """What *x* exports, and whether it may be written; None: nothing, by neither protocol.

    And the order of its users where it lies on a CUDA device, which is not waited for, or in memory that is pinned.
    """
    if hasattr(type(x), "__cuda_array_interface__") and (opened := _interface(x, who)) is not None:
        return opened
    return _dlpack(x, who) if hasattr(type(x), "__dlpack__") else None


def _dlpack(x: Any, who: str) -> Opened:
    try:
        kind, number = map(index, x.__dlpack_device__())
    except Exception as bad:
        raise _unreadable(x, who, "a __dlpack_device__ that returns two numbers", bad) from bad
    origin = of_dlpack(x, number) if kind in _CUDA_DEVICES else None
    if origin is None and kind not in _HOST_DEVICES:
        name = _DEVICE_NAMES.get(kind, f"device type {kind}")
        raise not_on_cpu(who, f"{kind_of(x)} on {name}:{number}", _TO_HOST)
    try:
        found = _open_capsule(x, {} if origin is None else {"stream": NO_SYNC}, kind)
    except Exception as bad:
        raise _unreadable(x, who, "a tensor whose __dlpack__ works", bad) from bad
    if not found.contiguous:
        raise not_contiguous(who, f"{kind_of(x)} with shape {found.shape} and strides {found.strides}")
    return found, _is_writable(x, found), origin, of_dlpack(x, number) if kind == _CUDA_HOST else None


def _is_writable(x: Any, found: Exported) -> bool:
    return not found.read_only and type(x).__module__.split(".")[0] not in _IMMUTABLE_MODULES


def _interface(x: Any, who: str) -> Opened | None:
    """By CUDA's array interface. None: ask DLPack, which *x* has, too."""
    has_other = hasattr(type(x), "__dlpack__")
    try:
        said = x.__cuda_array_interface__
        (address, read_only), strides = said["data"], said.get("strides")
        code, version, mask = str(said["typestr"]), index(said["version"]), said.get("mask")
        steps = None if strides is None else tuple(map(index, strides))
        found = Exported(None, index(address or 0), code, tuple(map(index, said["shape"])), steps, bool(read_only))
    except Exception as bad:  # torch and CuPy raise an AttributeError for what is not on a device
        if has_other:
            return None
        raise _unreadable(x, who, "a __cuda_array_interface__ that can be read", bad) from bad
    try:
        dtype = np.dtype(code)
    except Exception:  # numpy has several for what it cannot read
        dtype = np.dtype("V")
    if (dtype.kind == "V" or version < 3) and has_other:
        return None  # bfloat16 has no code there; before version 3 there was no stream
    if not dtype.itemsize:
        raise unknown_dtype(who, f"typestr {code!r}")
    if version < 3 or mask is not None:
        raise ConfigError(
            "the tensor's array interface cannot be used", who=who, expected="version 3 or newer, without a mask",
            got=f"version {version}" + (", with a mask" if mask is not None else ""),
        )  # fmt: skip
    by_element = None if steps is None else tuple(step / dtype.itemsize for step in steps)
    found = replace(found, dtype=name_of(dtype), strides=by_element, itemsize=dtype.itemsize)
    if not found.contiguous:
        raise not_contiguous(who, f"{kind_of(x)} with shape {found.shape} and strides {strides} in bytes")
    return found, _is_writable(x, found), of_interface(said, who), None


def name_of(dtype: np.dtype[Any]) -> str:
    """What numpy calls a dtype; where that does not say all, what describes it."""
    return dtype.name if dtype.isnative and dtype.fields is None else str(dtype)


def _buffer(x: Any, who: str) -> Region:
    try:
        view = memoryview(x)
    except Exception:
        raise ConfigError(
            "this cannot be reduced", who=who, got=kind_of(x), hint=what_instead(x),
            expected="a numpy array, a torch tensor, or an object with __dlpack__ or the buffer protocol",
        ) from None  # fmt: skip
    dtype = _BY_FORMAT.get(view.format)
    if dtype is None:
        raise unknown_dtype(who, f"buffer format {view.format!r}")
    shape = view.shape or ()
    check_view(x, view, who)
    address = int(_cast("uintptr_t", _from_buffer(view)))
    return Region(x, view, address, view.nbytes // dtype.itemsize, dtype, shape, not view.readonly)


def check_view(x: Any, view: memoryview, who: str) -> None:
    """Refuse the buffer *view* of *x* if its elements do not lie one after the other."""
    if not view.c_contiguous:
        raise not_contiguous(
            who, f"{kind_of(x)} with shape {view.shape or ()} and strides {view.strides} in bytes", view.f_contiguous
        )


def kind_of(x: Any) -> str:
    """The type's name, with its module."""
    return f"{type(x).__module__}.{type(x).__qualname__}".removeprefix("builtins.")


def what_instead(x: Any) -> str:
    """What the caller of a call that cannot use *x* can do: it depends on what was meant."""
    if x is None:
        return "None has no elements: pass zeros where there is nothing to give, since all members must call"
    if isinstance(x, Mapping):
        return "pass its tensors: all_reduce_many(list(x.values())), or sync_state(x, ...)"
    if isinstance(x, list | tuple):
        return "all_reduce_many takes a list of tensors; of numbers pass numpy.array(x)"
    if isinstance(x, int | float | complex):
        return "pass numpy.array(x), whose element takes the result"
    return "pass numpy.asarray(x)"


def unknown_dtype(who: str, got: str, hint: str = "") -> ConfigError:
    """The refusal of a dtype that DType does not have."""
    return ConfigError("the dtype is unknown", who=who, expected=f"one of {_KNOWN}", got=got, hint=hint)


def not_on_cpu(who: str, got: str, hint: str) -> ConfigError:
    """The refusal of memory of a device."""
    return ConfigError("the tensor is not in host memory", who=who, expected="a CPU tensor", got=got, hint=hint)


def not_contiguous(who: str, got: str, fortran: bool = False, hint: str = _COPY) -> ConfigError:
    """The refusal of elements that do not lie one after the other."""
    if fortran:
        hint = "its order is Fortran's: pass x.T, which shares the memory"
    return ConfigError("the tensor is not C-contiguous", who=who, expected="C-contiguous elements", got=got, hint=hint)


def is_torch(x: Any) -> bool:
    """Whether *x* is a torch tensor; without torch nothing is."""
    tensor_type = getattr(sys.modules.get("torch"), "Tensor", None)
    return tensor_type is not None and isinstance(x, tensor_type)


# ---- DLPack ---------------------------------------------------------------------------------------------


# Capsules, versioned (1.x) and older, are read without copying. The layout is that of dlpack.h 1.0.
_CUDA_HOST = 3  # kDLCUDAHost
_HOST_DEVICES = (1, _CUDA_HOST, 11)  # kDLCPU, kDLROCMHost: all plain host memory
_DEVICE_NAMES = {2: "cuda", 4: "opencl", 7: "vulkan", 8: "metal", 10: "rocm", 13: "cuda-managed", 14: "oneapi"}
_CODES = {0: "int", 1: "uint", 2: "float", 3: "opaque", 4: "bfloat", 5: "complex", 6: "bool"}
_READ_ONLY, _IS_COPIED = 1, 2
_VERSION = (1, 0)
_MOST_DIMENSIONS = 64  # as numpy has


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _Versioned(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    ]


_is_valid = ctypes.pythonapi.PyCapsule_IsValid
_is_valid.argtypes, _is_valid.restype = (ctypes.py_object, ctypes.c_char_p), ctypes.c_int
_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.argtypes, _pointer.restype = (ctypes.py_object, ctypes.c_char_p), ctypes.c_void_p


@dataclass(frozen=True, slots=True)
class Exported:
    """A tensor as its capsule describes it. The memory is valid while this object lives."""

    capsule: Any  # never consumed; its destructor hands the memory back to the exporter
    address: int  # of the first element
    dtype: str  # numpy's name for it ("bfloat16" too), or a description
    shape: tuple[int, ...]  # in elements
    strides: tuple[float, ...] | None  # in elements; None where the exporter says C-contiguous
    read_only: bool  # the exporter forbids writing, or what it exported is a copy
    itemsize: int = 0  # bytes of an element; 0: it has not whole ones, or is several

    def __post_init__(self) -> None:
        if min(self.shape, default=0) < 0 or (self.strides is not None and len(self.strides) != len(self.shape)):
            raise ValueError(f"shape {self.shape} with strides {self.strides}")

    @property
    def contiguous(self) -> bool:
        """Whether the elements are C-contiguous."""
        if self.strides is None or 0 in self.shape:
            return True
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return True


def _open_capsule(x: Any, stream: dict[str, int], kind: int) -> Exported:
    """Call x.__dlpack__ and read what it returns, memory of that *kind*; raises whatever the exporter raises."""
    try:
        capsule = x.__dlpack__(max_version=_VERSION, **stream)
    except TypeError:
        capsule = x.__dlpack__(**stream)  # an exporter from before 1.0
    if _is_valid(capsule, b"dltensor_versioned"):
        versioned = _Versioned.from_address(_pointer(capsule, b"dltensor_versioned"))
        if versioned.major != _VERSION[0]:
            raise ValueError(f"DLPack {versioned.major}.{versioned.minor} is not known, only {_VERSION[0]}.x")
        return _read(capsule, versioned.tensor, bool(versioned.flags & (_READ_ONLY | _IS_COPIED)), kind)
    if _is_valid(capsule, b"dltensor"):
        return _read(capsule, _Tensor.from_address(_pointer(capsule, b"dltensor")), False, kind)
    raise TypeError(f"__dlpack__ returned {type(capsule).__name__}, not a DLPack capsule")


def _read(capsule: Any, tensor: _Tensor, read_only: bool, kind: int) -> Exported:
    if (tensor.device_type in _HOST_DEVICES) != (kind in _HOST_DEVICES):
        raise ValueError(f"__dlpack__ gives memory of device type {tensor.device_type}, __dlpack_device__ says {kind}")
    if not 0 <= tensor.ndim <= _MOST_DIMENSIONS or (tensor.ndim and not tensor.shape):
        raise ValueError(f"{tensor.ndim} dimensions" + (" without sizes" if not tensor.shape else ""))
    shape = tuple(tensor.shape[: tensor.ndim])
    strides = tuple(tensor.strides[: tensor.ndim]) if tensor.strides else None
    name = f"{_CODES.get(tensor.code, f'code {tensor.code}')}{tensor.bits}"
    size = 0 if tensor.bits % 8 else tensor.bits // 8
    if tensor.lanes != 1:
        name, size = f"{name}x{tensor.lanes}", 0
    return Exported(capsule, (tensor.data or 0) + tensor.byte_offset, name, shape, strides, read_only, size)


# ---- results --------------------------------------------------------------------------------------------


def new_array(arena: Arena, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """A numpy array in the arena, contents undefined."""
    nbytes = prod(shape, start=dtype.itemsize)
    if not nbytes:
        return np.empty(shape, dtype)
    lease = arena.take(nbytes)
    arena.fill(lease.block, 0, nbytes)  # else who writes first, caller or daemon, does so in small pages
    return np.asarray(ArrayMemory(lease, lease.block.address, nbytes)).view(dtype).reshape(shape)


def new_on_device(shape: tuple[int, ...], dtype: Any, device: Any) -> Any:
    """A torch tensor on a CUDA device, contents undefined.

    Raises:
        ConfigError: torch is not there, or cannot use the device.
        DeviceError: the device has no memory for it.
    """
    who = f"empty(device={str(device)!r})"
    torch = sys.modules.get("torch")
    name = str(device)
    if name.partition(":")[0] != "cuda":
        raise ConfigError(
            "the device is unknown", who=who, expected="'cuda', 'cuda:0', 'cuda:1', ...", got=repr(device)
        )
    if torch is None:
        raise ConfigError(
            "arrays on CUDA devices are torch's, and torch is not imported", who=who, expected="`import torch` before",
            got="no torch", hint="allocate with your own library: every collective takes its arrays",
        )  # fmt: skip
    kind = str(dtype).removeprefix("torch.")
    if kind not in DType.__members__:
        kind = numpy_dtype(dtype).name
    try:
        return torch.empty(shape, dtype=getattr(torch, kind), device=device)
    except Exception as bad:  # torch has many
        if type(bad).__name__ == "OutOfMemoryError":
            raise DeviceError("the device has no memory for it", who=who, got=str(bad)) from bad
        raise ConfigError(
            "torch cannot use the device", who=who, expected="a device that torch.cuda.device_count() counts",
            got=f"{type(bad).__name__}: {bad}",
        ) from bad  # fmt: skip


def new_result(arena: Arena, shape: tuple[int, ...], like: Region) -> Region:
    """A tensor of like's dtype in the arena, torch's where like's owner is, else numpy's; or torch's on its device."""
    if is_torch(like.owner):
        torch = sys.modules["torch"]
        dtype = getattr(torch, like.dtype.name)
        if like.device is not None:
            return _torch(torch.empty(shape, dtype=dtype, device=like.owner.device), "a new tensor")
        if not prod(shape):
            return Region(torch.empty(shape, dtype=dtype), None, 0, 0, like.dtype, shape, True)
        flat = new_array(arena, (prod(shape) * like.dtype.itemsize,), np.dtype(np.uint8))
        tensor = torch.from_numpy(flat).view(dtype).view(shape)
        return Region(tensor, None, flat.ctypes.data, prod(shape), like.dtype, shape, True)
    array = new_array(arena, shape, numpy_dtype(like.dtype.name))
    return Region(array, None, array.__array_interface__["data"][0], array.size, like.dtype, shape, True)


def leading(out: Region, blocks: int, of: int, count: int) -> Any:
    """The first *blocks* of a result's *of* equal blocks (0: they are not equal), *count* elements.

    A view of the caller's tensor, with fewer rows where the shape allows it; for what is neither numpy's nor torch's a
    numpy array over its memory, or on a device an object with __cuda_array_interface__.
    """
    tensor = out.owner
    if out.device is not None and not is_torch(tensor):
        whole = of and out.shape and out.shape[0] % of == 0
        shape = (out.shape[0] // of * blocks, *out.shape[1:]) if whole else (count,)
        return DeviceView(out, out.address, shape, out.dtype, out.device.stream, out.writable)
    if not isinstance(tensor, np.ndarray) and not is_torch(tensor):
        memory = ArrayMemory(out, out.address, out.nbytes, writable=out.writable)
        tensor = np.asarray(memory).view(_viewed(out.dtype)).reshape(out.shape)
    if of and out.shape and out.shape[0] % of == 0:
        return tensor[: out.shape[0] // of * blocks]
    return tensor.reshape(-1)[:count]


class DeviceView:
    """A tensor of a device for whoever reads __cuda_array_interface__: CuPy, Numba, torch, JAX, and this library.

    Its elements lie one after the other from *address* on, and *keep* holds the memory. A dtype of bfloat16 shows
    itself as int16, since the interface has no name for it. It is used on *stream*; None: it is there.
    """

    def __init__(
        self, keep: Any, address: int, shape: tuple[int, ...], dtype: DType, stream: int | None, writable: bool = True
    ) -> None:
        self._keep, self.shape = keep, shape
        self._said: dict[str, Any] = {
            "data": (address, not writable),
            "shape": shape,
            "typestr": "<i2" if dtype is DType.bfloat16 else np.dtype(dtype.name).str,
            "strides": None,
            "stream": stream,
            "version": 3,
        }

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return dict(self._said)


def _viewed(dtype: DType) -> np.dtype[Any]:
    if dtype is DType.bfloat16 and "ml_dtypes" not in sys.modules:
        return np.dtype(np.uint16)
    return numpy_dtype(dtype.name)
