"""Of make gpu-check: the kernels of codecs on a device, bit for bit as the CPU's, and how fast."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from tests.engine.test_codec import hard
from tests.schedule.codec import coded_bytes
from wancoll._native import ffi, lib
from wancoll.client.codecs import ErrorFeedback, Feed
from wancoll.client.cuda.driver import Driver
from wancoll.client.cuda.encode import CODECS, Codecs
from wancoll.collective import Codec, DType
from wancoll.errors import ConfigError
from wancoll.limits import MIB, format_size
from wancoll.schedule.build import takes

Array = np.ndarray[Any, np.dtype[Any]]
Row = tuple[str, str, str]

ROUNDS = 5


def kernels(
    driver: Driver, number: Any, nbytes: int = 256 * MIB, values: Callable[[DType], Array] = hard
) -> Iterator[Row]:
    """Rows for the table: every codec and dtype on device *number*, whose context is the thread's.

    Args:
        driver: of the device.
        number: its CUdevice.
        nbytes: of the float32 tensors that are timed.
        values: what is encoded, for each dtype.
    """
    try:
        codecs = Codecs(driver, number)
    except ConfigError as bad:
        yield "codecs on the device", "not run", str(bad)
        return
    with stream_of(driver) as stream:
        for codec in CODECS:
            for dtype in [each for each in DType if takes(codec, each)]:
                wrong = differences(driver, codecs, stream, codec, dtype, values(dtype))
                wrong += fed(driver, codecs, stream, codec, dtype, values(dtype))
                name = f"{codec.name} of {dtype.name} on the device"
                yield name, "WRONG" if wrong else "ok", ", ".join(wrong) or "encoded and decoded, the CPU's bits"
        for codec in CODECS:
            seconds = timed(driver, codecs, stream, codec, nbytes)
            yield (
                f"{codec.name} encodes {format_size(nbytes)} of float32", f"{nbytes / seconds / 1e9:.2f} GB/s",
                "on the device",
            )  # fmt: skip
    codecs.close()


def differences(driver: Driver, codecs: Codecs, stream: Any, codec: Codec, dtype: DType, x: Array) -> list[str]:
    """What the device does otherwise than the CPU, in words."""
    found = []
    for part in (x[:0], x[:1], x[:129], x[:-77], x):
        n = part.size
        coded = on_the_cpu("encode", codec, dtype, part, n)
        with memory(driver, part) as source, memory(driver, np.zeros_like(coded)) as target:
            codecs.encode(stream, codec, dtype, target, source, n)
            if read(driver, stream, target, coded).tobytes() != coded.tobytes():
                found.append(f"encode of {n} elements")
        decoded = on_the_cpu("decode", codec, dtype, coded, n)
        with memory(driver, coded) as source, memory(driver, np.zeros_like(decoded)) as target:
            codecs.decode(stream, codec, dtype, target, source, n)
            if read(driver, stream, target, decoded).tobytes() != decoded.tobytes():
                found.append(f"decode of {n} elements")
    return found


def fed(driver: Driver, codecs: Codecs, stream: Any, codec: Codec, dtype: DType, x: Array) -> list[str]:
    """What error feedback does otherwise on the device than on the CPU."""
    kind = DType.float64 if dtype is DType.float64 else DType.float32
    n, residual = x.size, np.random.default_rng(1).standard_normal(x.size).astype(kind.name)
    feedback = ErrorFeedback()
    feedback.load_state_dict({"x": residual})
    feed = Feed("gpu-check", feedback, "x", dtype, n, codec, late=True)
    sent = np.zeros(feed.nbytes, np.uint8)
    sent[: x.nbytes] = x.view(np.uint8)
    feed.add(sent.ctypes.data)
    coded, wanted, found = sent[: coded_bytes(codec, n)], [], []
    for counted in (True, False):
        feed.commit(counted, [])
        wanted.append(feedback.residual("x"))
    with (
        memory(driver, x) as source, memory(driver, residual) as before, memory(driver, residual) as whole,
        memory(driver, residual) as lost, memory(driver, coded) as target,
    ):  # fmt: skip
        codecs.feed(stream, dtype, whole, source, n, before)
        codecs.encode(stream, codec, kind, target, whole, n)
        codecs.lost(stream, codec, dtype, lost, whole, n, target)
        codecs.lost(stream, codec, dtype, whole, whole, n, 0)
        for name, at, right in (("sent", target, coded), ("lost", lost, wanted[0]), ("too late", whole, wanted[1])):
            if read(driver, stream, at, right).tobytes() != right.tobytes():
                found.append(f"feedback: what is {name}")
    return found


def on_the_cpu(verb: str, codec: Codec, dtype: DType, given: Array, n: int) -> Array:
    """What the engine's kernels make of it, of *n* elements."""
    table, place = lib.wc_kernels_default(), ffi.cast("void *", given.ctypes.data)
    entered = lib.wc_fpenv_enter()
    try:
        if verb == "encode":
            out = np.zeros(coded_bytes(codec, n), np.uint8)
            table.encode[codec][dtype](ffi.cast("void *", out.ctypes.data), place, n, ffi.NULL)
            return out
        out = np.zeros(n * dtype.itemsize, np.uint8)
        table.decode[codec][dtype](ffi.cast("void *", out.ctypes.data), place, n)
        return out
    finally:
        lib.wc_fpenv_leave(entered)


def timed(driver: Driver, codecs: Codecs, stream: Any, codec: Codec, nbytes: int) -> float:
    """Seconds for one encode of that many bytes of float32, the mean of some."""
    n = nbytes // 4
    x = np.random.default_rng(1).normal(size=n).astype(np.float32)
    with memory(driver, x) as source, memory(driver, np.zeros(coded_bytes(codec, n), np.uint8)) as target:
        begun = 0.0
        for round_ in range(ROUNDS + 1):  # the first one only warms up
            codecs.encode(stream, codec, DType.float32, target, source, n)
            if round_ == 0:
                driver("cuStreamSynchronize", stream)
                begun = time.perf_counter()
        driver("cuStreamSynchronize", stream)
        return (time.perf_counter() - begun) / ROUNDS


@contextmanager
def stream_of(driver: Driver) -> Iterator[Any]:
    stream = driver("cuStreamCreate", driver.api.CUstream_flags.CU_STREAM_NON_BLOCKING)
    try:
        yield stream
    finally:
        driver("cuStreamDestroy", stream)


@contextmanager
def memory(driver: Driver, values: Array) -> Iterator[int]:
    """An address on the device that holds them."""
    data = np.ascontiguousarray(values).view(np.uint8).reshape(-1)
    address = int(driver("cuMemAlloc", max(1, data.size)))
    try:
        if data.size:
            driver("cuMemcpyHtoD", address, data.ctypes.data, data.size)
        yield address
    finally:
        driver("cuMemFree", address)


def read(driver: Driver, stream: Any, address: int, like: Array) -> Array:
    """What lies there after all that is queued."""
    driver("cuStreamSynchronize", stream)
    found = np.empty_like(like)
    if found.size:
        driver("cuMemcpyDtoH", found.ctypes.data, address, found.nbytes)
    return found
