"""The stand-in for NVIDIA's driver under the real cuda-bindings, and tensors on its devices for tests.

A "kernel" is a copy on the device: it runs late, on the stream that it was given.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
import subprocess
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

SOURCE = Path(__file__).with_name("standin.c")
FLAGS = ("-std=c11", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-pthread")
NON_BLOCKING = 1

CODES = {"int": 0, "uint": 1, "float": 2, "bfloat": 4, "complex": 5, "bool": 6}  # DLPack's

Array = np.ndarray[Any, np.dtype[Any]]


def once(base: Path, name: str, compiles: Callable[[Path], Path]) -> Path:
    """What is compiled into a folder, once for all processes of pytest-xdist; *base*: pytest's temporary folder."""
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("a+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.seek(0)
        if not (found := lock.read()):
            found = str(compiles(folder))
            lock.write(found)
    return Path(found)


def build(folder: Path) -> Path:
    """Compile it; the name is the one that the loader looks for."""
    path = folder / "libcuda.so.1"
    compiler = shutil.which("cc") or "gcc"
    subprocess.run([compiler, *FLAGS, f"-Wl,-soname,{path.name}", "-o", path, SOURCE], check=True)
    return path


class Exported(ctypes.Structure):
    """DLManagedTensorVersioned of dlpack.h 1.0."""

    _fields_ = [
        ("major", ctypes.c_uint32), ("minor", ctypes.c_uint32), ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p), ("flags", ctypes.c_uint64), ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32), ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]  # fmt: skip


class Gpu:
    """Both devices of the stand-in at *path*, and what tests set of it; None: those of the real driver."""

    COUNTS = ("contexts", "streams", "events", "memory", "registered", "items")

    def __init__(self, path: Path | None) -> None:
        # Whoever loads libcuda.so.1 later in this process gets this one: the loader goes by the name in the file.
        self.lib: Any = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL) if path is not None else None
        if self.lib is not None:
            self._declare()
        from cuda.bindings import driver

        self.driver = driver
        self.frees: list[weakref.finalize[..., Any]] = []  # of tensors
        self("cuInit", 0)
        self.contexts = [self("cuDevicePrimaryCtxRetain", i) for i in range(min(2, self("cuDeviceGetCount")))]

    def _declare(self) -> None:
        for name in ("standin_seed", "standin_most_registered", "standin_most_pooled", "standin_hold"):
            getattr(self.lib, name).argtypes = [ctypes.c_uint64]
        self.lib.standin_fail.argtypes = [ctypes.c_uint64, ctypes.c_int]
        self.lib.standin_calls.restype = ctypes.c_uint64
        self.lib.standin_failed_call.restype = ctypes.c_char_p

    def __call__(self, name: str, *arguments: Any) -> Any:
        code, *values = getattr(self.driver, name)(*arguments)
        assert not int(code), (name, code)
        return values[0] if len(values) == 1 else values

    def on(self, device: int, name: str, *arguments: Any) -> Any:
        """The call, with a device's context."""
        self("cuCtxPushCurrent", self.contexts[device])
        try:
            return self(name, *arguments)
        finally:
            self.driver.cuCtxPopCurrent()

    def counts(self) -> dict[str, int]:
        found = (ctypes.c_uint64 * 6)()
        self.lib.standin_count(found)
        return dict(zip(self.COUNTS, found, strict=True))

    def free_all(self) -> None:
        """Free all tensors."""
        while self.frees:
            self.frees.pop()()

    def hold(self, array: Any) -> None:
        """A kernel on the tensor's stream that does not end before release()."""
        self.on(array.device, "cuStreamSynchronize", array.stream)
        self("cuCtxPushCurrent", self.contexts[array.device])
        assert not self.lib.standin_hold(array.stream)
        self("cuCtxPopCurrent")

    def waiting(self) -> int:
        """How many streams wait for memory now."""
        return int(self.lib.standin_waiting())

    def violations(self) -> str:
        text = ctypes.create_string_buffer(256)
        number = self.lib.standin_violations(text)
        return f"{number}: {text.value.decode()}" if number else ""

    def stream(self, device: int = 0) -> int:
        return int(self.on(device, "cuStreamCreate", NON_BLOCKING))


class DeviceArray:
    """A tensor on a device, used on a stream of its own.

    Args:
        values: what it has at first.
        style: how it shows itself: "interface", "no stream", "per thread", "legacy", "dlpack", "managed"; "pinned": it
            is memory of the host.
        skip: elements of its memory before it.
    """

    def __init__(self, gpu: Gpu, values: Array, style: str = "interface", device: int = 0, skip: int = 1) -> None:
        device %= len(gpu.contexts)
        self.gpu, self.device, self.style, self.shape = gpu, device, style, values.shape
        self.dtype, self.nbytes = values.dtype, values.nbytes
        self.stream = {"per thread": 2, "legacy": 1, "no stream": 1}.get(style) or gpu.stream(device)
        self.takes_streams = True
        self._owned = [self._memory(self.nbytes + skip * self.dtype.itemsize, style)]
        self.address = self._owned[0] + skip * self.dtype.itemsize
        self.event = gpu.on(device, "cuEventCreate", 2)
        self._kept: list[Any] = []  # of exports
        self.orders: list[int] = []  # streams that the consumer gave
        gpu.frees.append(
            weakref.finalize(
                self, _free, gpu, device, self._owned, 0 if self.stream <= 2 else self.stream, self.event,
                style == "pinned",
            )
        )  # fmt: skip
        self._write(self.address, values)

    def _memory(self, nbytes: int, style: str = "") -> int:
        nbytes = max(1, nbytes)
        if style == "managed":
            return int(self.gpu.on(self.device, "cuMemAllocManaged", nbytes, 1))
        if style == "pinned":
            return int(self.gpu.on(self.device, "cuMemHostAlloc", nbytes, 0))
        return int(self.gpu.on(self.device, "cuMemAlloc", nbytes))

    def _write(self, address: int, values: Array) -> None:
        data = np.ascontiguousarray(values).view(np.uint8).reshape(-1)
        if data.size:
            self.gpu.on(self.device, "cuMemcpyHtoD", address, data.ctypes.data, data.size)

    def _read(self, address: int) -> Array:
        data = np.empty(self.nbytes, np.uint8)
        if data.size:
            self.gpu.on(self.device, "cuMemcpyDtoH", data.ctypes.data, address, data.size)
        return data.view(self.dtype).reshape(self.shape)

    # ---- kernels -------------------------------------------------------------------------------------

    def put(self, values: Array) -> None:
        """A kernel that writes the values; it runs when it runs."""
        assert values.nbytes == self.nbytes
        if self.nbytes:
            self._owned.append(self._memory(self.nbytes))
            self._write(self._owned[-1], values)
            self.gpu.on(self.device, "cuMemcpyDtoDAsync", self.address, self._owned[-1], self.nbytes, self.stream)

    def snapshot(self) -> int:
        """A kernel that reads it, for seen()."""
        self._owned.append(self._memory(self.nbytes))
        if self.nbytes:
            self.gpu.on(self.device, "cuMemcpyDtoDAsync", self._owned[-1], self.address, self.nbytes, self.stream)
        return self._owned[-1]

    def seen(self, snapshot: int) -> Array:
        """What that kernel saw."""
        self.gpu.on(self.device, "cuStreamSynchronize", self.stream)
        return self._read(snapshot)

    def look_at(self, address: int, shape: tuple[int, ...]) -> Array:
        """What a kernel sees there that is queued now on its stream."""
        data = np.empty(shape, self.dtype)
        copy = self._memory(data.nbytes)
        self.gpu.on(self.device, "cuMemcpyDtoDAsync", copy, address, data.nbytes, self.stream)
        self.gpu.on(self.device, "cuStreamSynchronize", self.stream)
        self.gpu.on(self.device, "cuMemcpyDtoH", data.ctypes.data, copy, data.nbytes)
        self.gpu.on(self.device, "cuMemFree", copy)
        return data

    def get(self) -> Array:
        """What a kernel sees that is queued now."""
        return self.seen(self.snapshot())

    # ---- exports -------------------------------------------------------------------------------------

    def __dlpack_device__(self) -> tuple[int, int]:
        return {"managed": 13, "pinned": 3}.get(self.style, 2), self.device

    def __dlpack__(self, *, stream: int | None = None, max_version: tuple[int, int] | None = None) -> Any:
        if stream is not None and not self.takes_streams:
            raise ValueError("no stream is needed for memory of the host")
        if stream != -1 and (stream is not None or self.style != "pinned"):  # the consumer's stream waits for ours
            assert stream is not None
            self.orders.append(stream)
            self.gpu.on(self.device, "cuEventRecord", self.event, self.stream)
            self.gpu.on(self.device, "cuStreamWaitEvent", stream, self.event, 0)
        found = tensor = Exported(major=1, minor=0)
        shape = (ctypes.c_int64 * len(self.shape))(*self.shape)
        name = "bfloat" if self.dtype == ml_dtypes.bfloat16 else self.dtype.name.rstrip("0123456789")
        tensor.data, tensor.ndim, tensor.lanes = self.address - 8, len(self.shape), 1
        tensor.byte_offset = 8
        tensor.device_type, tensor.device_id = self.__dlpack_device__()
        tensor.code = CODES[name]
        tensor.bits, tensor.shape = 8 * self.dtype.itemsize, shape
        self._kept += [found, shape]
        make = ctypes.pythonapi.PyCapsule_New
        make.restype, make.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
        return make(ctypes.addressof(found), b"dltensor_versioned", None)


class WithInterface(DeviceArray):
    """As CuPy's, which have both."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "data": (self.address if self.nbytes else 0, False), "shape": self.shape, "typestr": self.dtype.str,
            "strides": None, "version": 3, "stream": None if self.style == "no stream" else self.stream,
        }  # fmt: skip


def _free(gpu: Gpu, device: int, owned: list[int], stream: int, event: Any, pinned: bool) -> None:
    gpu.on(device, "cuEventDestroy", event)
    for number, address in enumerate(owned):
        gpu.on(device, "cuMemFreeHost" if pinned and not number else "cuMemFree", address)
    if stream:
        gpu.on(device, "cuStreamDestroy", stream)
