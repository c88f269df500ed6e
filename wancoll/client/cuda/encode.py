"""Codecs on CUDA devices: kernels that NVRTC compiles at run time from the text that the CPU's are compiled from.

A tensor encoded on its device crosses the bus in the wire's bytes, the same bytes as the engine's. `Codecs` queues
kernels; whoever calls it orders streams. The text is native/kernels/cuda.cu, kept in the extension.
"""

from __future__ import annotations

import ctypes
import importlib
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from wancoll.client.cuda.driver import Driver
from wancoll.collective import Codec, DType
from wancoll.errors import ConfigError, DeviceError
from wancoll.native import ffi, lib

CODECS = (Codec.bf16, Codec.int8, Codec.fp8)  # those that have kernels

_NAMES = {DType.float32: "f32", DType.float64: "f64", DType.float16: "f16", DType.bfloat16: "bf16"}
_THREADS = 256  # of a thread block
_LINE, _LINE_THREADS, _WARP = 64, 16, 32  # as in cuda.cu
# One rounding for each operation, as on the CPU.
_EXACT = (b"--fmad=false", b"--ftz=false", b"--prec-div=true", b"--std=c++17")


@dataclass(frozen=True)
class Launch:
    """A kernel of cuda.cu, and how many thread blocks of how many threads run it."""

    kernel: str
    blocks: int
    threads: int = _THREADS


def encode_launch(codec: Codec, dtype: DType, n: int) -> Launch:
    """What encodes *n* elements of a tensor, from a block's begin on."""
    if codec is Codec.bf16:
        threads = -(-n // _LINE) * _LINE_THREADS
    else:
        threads = -(-n // codec.block[0]) * _WARP
    return _launch(f"encode_{codec.name}", dtype, threads)


def decode_launch(codec: Codec, dtype: DType, n: int) -> Launch:
    """What decodes *n* elements, from a block's begin on."""
    return _launch(f"decode_{codec.name}", dtype, n)


def feed_launch(dtype: DType, n: int) -> Launch:
    """What adds a residual to *n* elements."""
    return _launch("feed", dtype, n)


def lost_launch(codec: Codec, dtype: DType, n: int) -> Launch:
    """What finds what the codec loses of *n* elements."""
    return _launch(f"lost_{codec.name}", dtype, n)


def _launch(verb: str, dtype: DType, threads: int) -> Launch:
    return Launch(f"{verb}_{_NAMES[dtype]}", -(-threads // _THREADS))


# ---- compiling ------------------------------------------------------------------------------------------


def source() -> tuple[bytes, bytes]:
    """cuda.cu, and arithmetic.h, which it includes, as the extension was built from them."""
    return ffi.string(lib.wc_cuda_text), ffi.string(lib.wc_arithmetic_text)


@lru_cache(maxsize=8)
def compiled(major: int, minor: int) -> bytes:
    """The kernels for devices of a compute capability: machine code, or PTX for a device newer than NVRTC.

    Takes some seconds, once in a process for each capability.

    Raises:
        ConfigError: NVRTC is not there, or knows no device as old.
        DeviceError: it does not compile.
    """
    nvrtc = _nvrtc()
    known = _checked(nvrtc, nvrtc.nvrtcGetSupportedArchs())
    number = 10 * major + minor
    older = [each for each in known if each <= number]
    if not older:
        raise ConfigError(
            "the device is too old for the kernels of codecs", who=f"compute capability {major}.{minor}",
            expected=f"{min(known) // 10}.{min(known) % 10} or newer, for this NVRTC", got=f"{major}.{minor}",
            hint="encode on the host",
        )  # fmt: skip
    return build(f"sm_{number}" if number in known else f"compute_{max(older)}")


def build(architecture: str) -> bytes:
    """The kernels for *architecture*: machine code for sm_..., PTX for compute_....

    Raises:
        ConfigError: NVRTC is not there.
        DeviceError: it does not compile.
    """
    nvrtc = _nvrtc()
    text, header = source()
    program = _checked(nvrtc, nvrtc.nvrtcCreateProgram(text, b"cuda.cu", 1, [header], [b"arithmetic.h"]))
    try:
        options = [f"--gpu-architecture={architecture}".encode(), *_EXACT]
        code, *_ = nvrtc.nvrtcCompileProgram(program, len(options), options)
        if int(code):
            said = _text(nvrtc, "ProgramLog", program).rstrip(b"\0").decode(errors="replace")
            raise DeviceError("the kernels of codecs do not compile", who=f"NVRTC, {architecture}", got=said)
        return _text(nvrtc, "CUBIN" if architecture.startswith("sm_") else "PTX", program)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _nvrtc() -> Any:
    try:
        nvrtc = importlib.import_module("cuda.bindings.nvrtc")
        nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError) as bad:  # the bindings, or the library
        raise ConfigError(
            "encoding on a device needs NVRTC, which compiles its kernels", who="codecs on a device",
            expected="cuda-bindings and nvidia-cuda-nvrtc, 13", got=str(bad),
            hint="run, in the source folder, pip install '.[cuda]', or encode on the host",
        ) from bad  # fmt: skip
    return nvrtc


def _text(nvrtc: Any, what: str, program: Any) -> bytes:
    text = bytes(_checked(nvrtc, getattr(nvrtc, f"nvrtcGet{what}Size")(program)))
    _checked(nvrtc, getattr(nvrtc, f"nvrtcGet{what}")(program, text))  # which writes into it
    return text


def _checked(nvrtc: Any, returned: Any) -> Any:
    code, *values = returned
    if int(code):
        raise DeviceError("NVRTC failed", got=str(nvrtc.nvrtcGetErrorString(code)[1]))
    return values[0] if values else None


# ---- running --------------------------------------------------------------------------------------------


class Codecs:
    """The kernels on one device, whose context is the thread's in all calls.

    Raises:
        ConfigError: NVRTC is not there, or the device is too old.
        DeviceError: the driver refuses.
    """

    def __init__(self, driver: Driver, number: Any) -> None:
        self._driver = driver
        attribute = driver.api.CUdevice_attribute
        major, minor = (
            driver("cuDeviceGetAttribute", each, number)
            for each in (
                attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
                attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
            )
        )
        self._module = driver("cuModuleLoadData", compiled(int(major), int(minor)))
        self._functions: dict[str, Any] = {}

    def encode(self, stream: Any, codec: Codec, dtype: DType, coded: int, source: int, n: int) -> None:
        """Queue on *stream*: the *n* elements of *dtype* at *source* become coded_bytes(codec, n) bytes at *coded*.

        Rounded to nearest. Addresses are the device's: that of elements a multiple of the dtype's size, *coded* of bf16
        of 2.

        Raises:
            DeviceError: the driver refuses.
        """
        self._run(stream, encode_launch(codec, dtype, n), coded, source, n)

    def decode(self, stream: Any, codec: Codec, dtype: DType, out: int, coded: int, n: int) -> None:
        """Queue on *stream*: the bytes at *coded* become *n* elements at *out*; see encode."""
        self._run(stream, decode_launch(codec, dtype, n), out, coded, n)

    def feed(self, stream: Any, dtype: DType, out: int, source: int, n: int, residual: int) -> None:
        """Queue: *n* elements of *dtype* and of the *residual* (0: there is none) are added, at *out*, in its dtype."""
        self._run(stream, feed_launch(dtype, n), out, source, n, residual)

    def lost(self, stream: Any, codec: Codec, dtype: DType, out: int, source: int, n: int, coded: int) -> None:
        """Queue: what feed() has made, at *source*, less what is left of it *coded*, is at *out*; that may be *source*.

        Without *coded* (0) it is all of it. What is not finite becomes 0.
        """
        self._run(stream, lost_launch(codec, dtype, n), out, source, n, coded)

    def close(self) -> None:
        """Unload the kernels; only when none of them runs."""
        self._driver.code("cuModuleUnload", self._module)

    def _run(self, stream: Any, launch: Launch, *values: int) -> None:
        if not launch.blocks:
            return
        function = self._functions.get(launch.kernel)
        if function is None:
            function = self._driver("cuModuleGetFunction", self._module, launch.kernel.encode())
            self._functions[launch.kernel] = function
        given = values, (ctypes.c_uint64,) * len(values)
        self._driver("cuLaunchKernel", function, launch.blocks, 1, 1, launch.threads, 1, 1, 0, stream, given, 0)
