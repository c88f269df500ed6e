"""What the caller passed, as memory: address, count, dtype, shape, and whether it may be written.

numpy arrays, CPU torch tensors (torch is never imported here), anything with DLPack, anything with the buffer protocol.
"""

from __future__ import annotations

import sys
from math import prod
from typing import Any

import numpy as np

from wancoll._native import ffi
from wancoll.client import dlpack
from wancoll.collective import DType
from wancoll.errors import ConfigError

_NATIVE = {np.dtype(d.name): d for d in DType if d is not DType.bfloat16}
_BY_DTYPE: dict[Any, DType] = dict(_NATIVE)  # and ml_dtypes' bfloat16, once seen
_BY_TORCH_NAME = {f"torch.{d.name}": d for d in DType}
_BY_FORMAT = {
    **{code: _NATIVE[np.dtype(code)] for code in "efdbhilqBn"},
    **{"=" + code: _NATIVE[np.dtype("=" + code)] for code in "efdbhilqB"},
    **({"<" + code: _NATIVE[np.dtype("<" + code)] for code in "efdbhilqB"} if sys.byteorder == "little" else {}),
}
_KNOWN = ", ".join(d.name for d in DType)
_IMMUTABLE_MODULES = ("jax", "jaxlib", "tensorflow")  # their DLPack does not always say that it is read-only

_from_buffer, _cast = ffi.from_buffer, ffi.cast


class Region:
    """A C-contiguous tensor in this process's memory.

    Attributes:
        owner: the caller's object.
        keep: what else must live as long as the address is used.
        address: of the first byte; 0 where there is none.
        count: elements.
        nbytes: count times the item size.
        dtype: element type.
        shape: of the caller's object.
        writable: whether a result may be written into it.
    """

    __slots__ = ("address", "count", "dtype", "keep", "nbytes", "owner", "shape", "writable")

    def __init__(
        self, owner: Any, keep: Any, address: int, count: int, dtype: DType, shape: tuple[int, ...], writable: bool
    ) -> None:
        self.owner, self.keep, self.dtype, self.shape, self.writable = owner, keep, dtype, shape, writable
        self.count = count
        self.nbytes = count * dtype.itemsize
        self.address = address if count else 0

    def __str__(self) -> str:
        return f"{self.dtype.name}{list(self.shape)}"


def region(x: Any, who: str) -> Region:
    """Look at *x* without copying it.

    Args:
        x: the caller's tensor.
        who: names it in errors, for example "all_reduce(out=...)".

    Raises:
        ConfigError: not a tensor that can be used: dtype, layout, device.
    """
    if isinstance(x, np.ndarray):
        return _numpy(x, who)
    torch = sys.modules.get("torch")
    tensor_type = getattr(torch, "Tensor", None)
    if tensor_type is not None and isinstance(x, tensor_type):
        return _torch(x, who)
    if hasattr(type(x), "__dlpack__"):
        return _dlpack(x, who)
    return _buffer(x, who)


def numpy_dtype(dtype: Any) -> np.dtype[Any]:
    """The numpy dtype that *dtype* means, if it is one of DType's.

    Raises:
        ConfigError: unknown, or bfloat16 without the package ml_dtypes.
    """
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
    """Refuse an *out* that is not like *x*, or overlaps it in part.

    Raises:
        ConfigError: they differ in dtype or shape, or overlap in part.
    """
    if out.shape != x.shape and out.dtype is x.dtype:
        raise ConfigError(
            "out has another shape than the tensor",
            who=f"{call}(out=...)",
            expected=str(x.shape),
            got=str(out.shape),
        )
    check_out(x, out, x.count, call)


def check_out(x: Region, out: Region, count: int, call: str) -> None:
    """Refuse an *out* that cannot take a result of *count* elements of x's dtype, or overlaps *x* in part.

    Raises:
        ConfigError: so it is.
    """
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
            "out overlaps a part of the tensor",
            who=who,
            expected="the same memory or none of it",
            got=f"{abs(out.address - x.address)} bytes apart, {sizes} bytes long",
        )


def require_writable(x: Region, who: str) -> None:
    """Refuse to write into *x*.

    Raises:
        ConfigError: it is read-only.
    """
    if not x.writable:
        raise ConfigError(
            "the result cannot be written into a read-only tensor",
            who=who,
            expected="a writable tensor",
            got=f"{kind_of(x.owner)} that is read-only",
            hint="pass out=, an array that takes the result",
        )


def _numpy(x: np.ndarray[Any, Any], who: str) -> Region:
    dtype = _BY_DTYPE.get(x.dtype)
    if dtype is None:
        dtype = _numpy_dtype(x, who)
    check_numpy(x, who)
    if dtype is DType.bfloat16:  # no buffer protocol
        address = x.__array_interface__["data"][0]
    else:
        address = int(_cast("uintptr_t", _from_buffer(x)))
    return Region(x, None, address, x.size, dtype, x.shape, x.flags.writeable)


def check_numpy(x: np.ndarray[Any, Any], who: str) -> None:
    """Refuse an array whose elements are not all there is to it, one after the other.

    Raises:
        ConfigError: so it is.
    """
    flags = x.flags
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
    check_torch(x, who)
    dtype = _BY_TORCH_NAME.get(str(x.dtype))
    if dtype is None:
        raise unknown_dtype(who, str(x.dtype))
    return Region(x, None, x.data_ptr(), x.numel(), dtype, tuple(x.shape), True)


def check_torch(x: Any, who: str) -> None:
    """Refuse a tensor whose memory cannot be used.

    Raises:
        ConfigError: so it is.
    """
    if x.device.type != "cpu":
        raise not_on_cpu(who, f"a torch tensor on {x.device}", "pass x.cpu()")
    if x.requires_grad:
        raise ConfigError(
            "the tensor requires grad: autograd would not see the result",
            who=who,
            expected="a tensor without requires_grad",
            got=f"a torch tensor of shape {tuple(x.shape)} with requires_grad=True",
            hint="pass x.detach(), which shares the memory",
        )
    if str(x.layout) != "torch.strided":
        raise ConfigError(
            "the tensor has no plain layout",
            who=who,
            expected="torch.strided",
            got=str(x.layout),
            hint="pass x.to_dense()",
        )
    if not x.is_contiguous():
        raise not_contiguous(who, f"a torch tensor with shape {tuple(x.shape)} and strides {x.stride()}")


def _dlpack(x: Any, who: str) -> Region:
    found, writable = open_dlpack(x, who)
    dtype = DType.__members__.get(found.dtype)
    if dtype is None:
        raise unknown_dtype(who, found.dtype)
    return Region(x, found, found.address, prod(found.shape), dtype, found.shape, writable)


def open_dlpack(x: Any, who: str) -> tuple[dlpack.Exported, bool]:
    """What *x* exports, and whether it may be written.

    Raises:
        ConfigError: its memory cannot be used.
    """
    device, number = x.__dlpack_device__()
    if int(device) not in dlpack.HOST_DEVICES:
        name = dlpack.DEVICE_NAMES.get(int(device), f"device type {int(device)}")
        raise not_on_cpu(who, f"{kind_of(x)} on {name}:{number}", "copy it to the host first")
    try:
        found = dlpack.open_capsule(x)
    except Exception as bad:  # whatever the exporter finds wrong with it: it is the caller's tensor
        raise ConfigError(
            "the tensor cannot be exported", who=who, expected="a tensor whose __dlpack__ works",
            got=f"{kind_of(x)}: {type(bad).__name__}: {bad}",
        ) from bad  # fmt: skip
    if not found.contiguous:
        raise not_contiguous(who, f"{kind_of(x)} with shape {found.shape} and strides {found.strides}")
    immutable = type(x).__module__.split(".")[0] in _IMMUTABLE_MODULES
    return found, not found.read_only and not immutable


def _buffer(x: Any, who: str) -> Region:
    try:
        view = memoryview(x)
    except TypeError:
        raise ConfigError(
            "this cannot be reduced",
            who=who,
            expected="a numpy array, a torch tensor, or an object with __dlpack__ or the buffer protocol",
            got=f"{kind_of(x)}",
            hint="pass numpy.asarray(x)",
        ) from None
    dtype = _BY_FORMAT.get(view.format)
    if dtype is None:
        raise unknown_dtype(who, f"buffer format {view.format!r}")
    shape = view.shape or ()
    check_view(x, view, who)
    address = int(_cast("uintptr_t", _from_buffer(view)))
    return Region(x, view, address, view.nbytes // dtype.itemsize, dtype, shape, not view.readonly)


def check_view(x: Any, view: memoryview, who: str) -> None:
    """Refuse the buffer *view* of *x* if its elements do not lie one after the other.

    Raises:
        ConfigError: so it is.
    """
    if not view.c_contiguous:
        raise not_contiguous(
            who, f"{kind_of(x)} with shape {view.shape or ()} and strides {view.strides} in bytes", view.f_contiguous
        )


def kind_of(x: Any) -> str:
    """The type's name, with its module."""
    return f"{type(x).__module__}.{type(x).__qualname__}".removeprefix("builtins.")


def unknown_dtype(who: str, got: str, hint: str = "") -> ConfigError:
    """The refusal of a dtype that DType does not have."""
    return ConfigError("the dtype is unknown", who=who, expected=f"one of {_KNOWN}", got=got, hint=hint)


def not_on_cpu(who: str, got: str, hint: str) -> ConfigError:
    """The refusal of memory of a device."""
    return ConfigError("the tensor is not in host memory", who=who, expected="a CPU tensor", got=got, hint=hint)


def not_contiguous(who: str, got: str, fortran: bool = False) -> ConfigError:
    """The refusal of elements that do not lie one after the other."""
    hint = "pass a contiguous copy (numpy.ascontiguousarray(x), x.contiguous()), and copy the result back if needed"
    if fortran:
        hint = "its order is Fortran's: pass x.T, which shares the memory"
    return ConfigError("the tensor is not C-contiguous", who=who, expected="C-contiguous elements", got=got, hint=hint)
