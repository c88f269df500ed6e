"""Reads DLPack capsules, versioned (1.x) and older, without copying. The layout is that of dlpack.h 1.0."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

HOST_DEVICES = (1, 3, 11)  # kDLCPU, kDLCUDAHost, kDLROCMHost: all plain host memory
DEVICE_NAMES = {2: "cuda", 4: "opencl", 7: "vulkan", 8: "metal", 10: "rocm", 13: "cuda-managed", 14: "oneapi"}
_CODES = {0: "int", 1: "uint", 2: "float", 3: "opaque", 4: "bfloat", 5: "complex", 6: "bool"}
_READ_ONLY, _IS_COPIED = 1, 2
_VERSION = (1, 0)


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
    """A tensor as its capsule describes it. The memory is valid while this object lives.

    Attributes:
        capsule: never consumed; its destructor hands the memory back to the exporter.
        address: of the first element.
        dtype: numpy's name for it ("bfloat16" too), or a description.
        shape: in elements.
        strides: in elements; None where the exporter says C-contiguous.
        read_only: the exporter forbids writing, or what it exported is a copy.
    """

    capsule: Any
    address: int
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    read_only: bool

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


def open_capsule(x: Any) -> Exported:
    """Call x.__dlpack__ and read what it returns.

    Raises:
        TypeError: not a capsule.
        ValueError: of a major version that is not known here.
        Exception: whatever the exporter raises.
    """
    try:
        capsule = x.__dlpack__(max_version=_VERSION)
    except TypeError:
        capsule = x.__dlpack__()  # an exporter from before 1.0
    if _is_valid(capsule, b"dltensor_versioned"):
        versioned = _Versioned.from_address(_pointer(capsule, b"dltensor_versioned"))
        if versioned.major != _VERSION[0]:
            raise ValueError(f"DLPack {versioned.major}.{versioned.minor} is not known, only {_VERSION[0]}.x")
        return _read(capsule, versioned.tensor, bool(versioned.flags & (_READ_ONLY | _IS_COPIED)))
    if _is_valid(capsule, b"dltensor"):
        return _read(capsule, _Tensor.from_address(_pointer(capsule, b"dltensor")), False)
    raise TypeError(f"__dlpack__ returned {type(capsule).__name__}, not a DLPack capsule")


def _read(capsule: Any, tensor: _Tensor, read_only: bool) -> Exported:
    shape = tuple(tensor.shape[: tensor.ndim])
    strides = tuple(tensor.strides[: tensor.ndim]) if tensor.strides else None
    name = f"{_CODES.get(tensor.code, f'code {tensor.code}')}{tensor.bits}"
    if tensor.lanes != 1:
        name += f"x{tensor.lanes}"
    return Exported(capsule, (tensor.data or 0) + tensor.byte_offset, name, shape, strides, read_only)
