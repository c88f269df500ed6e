"""Kernels of codecs for devices: what NVRTC makes of them, and their text on the host, bit for bit as the CPU's."""

from __future__ import annotations

import ctypes
import importlib
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.cuda import kernels as checks
from tests.cuda.gpu import once
from tests.cuda.kernels import differences, kernels, read, stream_of
from tests.engine.test_codec import elements, hard, same
from tests.later import at_night, later
from tests.schedule import codec as reference
from wancoll.client.cuda import encode as device
from wancoll.client.cuda.driver import Driver
from wancoll.collective import Codec, DType
from wancoll.errors import ConfigError, DeviceError
from wancoll.schedule.build import takes
from wancoll.schedule.numbers import storage

HERE = Path(__file__).parent
KERNELS = HERE.parents[1] / "native" / "kernels"
FLAGS = ("-std=gnu11", "-O1", "-ffp-contract=off", "-fno-strict-aliasing", "-Wall", "-Wextra", "-Werror")
PAIRS = [(codec, dtype) for codec in device.CODECS for dtype in DType if takes(codec, dtype)]
NIGHTLY = at_night(*range(1, 50))
GUARD = 0x5A

Array = np.ndarray[Any, np.dtype[Any]]

pairs = pytest.mark.parametrize(("codec", "dtype"), PAIRS, ids=[f"{codec.name}-{dtype.name}" for codec, dtype in PAIRS])


class Host:
    """The kernels on the host, launched as the product launches them; nothing may change beside the results."""

    def __init__(self, path: Path) -> None:
        self.launch = ctypes.CDLL(str(path)).launch
        whole, place = ctypes.c_uint64, ctypes.c_void_p
        self.launch.argtypes = (
            ctypes.c_char_p, ctypes.c_uint, ctypes.c_uint, place, place, whole, place,
        )  # fmt: skip

    def _run(self, launch: device.Launch, out: Array, given: Array, n: int) -> Array:
        room = np.full(out.nbytes + 64, GUARD, np.uint8)
        inside = room[32 : 32 + out.nbytes]
        violations = self.launch(
            launch.kernel.encode(), launch.blocks, launch.threads, inside.ctypes.data, given.ctypes.data, n, None
        )
        assert violations == 0
        assert (room[:32] == GUARD).all()
        assert (room[32 + out.nbytes :] == GUARD).all()
        return inside.view(out.dtype)

    def encode(self, codec: Codec, dtype: DType, x: Array) -> Array:
        launch = device.encode_launch(codec, dtype, x.size)
        return self._run(launch, np.zeros(reference.coded_bytes(codec, x.size), np.uint8), x, x.size)

    def decode(self, codec: Codec, dtype: DType, coded: Array, n: int) -> Array:
        return self._run(device.decode_launch(codec, dtype, n), np.zeros(n, storage(dtype)), coded, n)


@pytest.fixture(scope="session")
def host(tmp_path_factory: pytest.TempPathFactory) -> Host:
    return Host(once(tmp_path_factory.getbasetemp(), "warps", build))


def build(folder: Path) -> Path:
    path = folder / "warps.so"
    compiler = shutil.which("cc") or "gcc"
    subprocess.run([compiler, *FLAGS, "-shared", "-fPIC", f"-I{KERNELS}", "-o", path, HERE / "warps.c"], check=True)
    return path


# ---- on the host ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("codec", "dtype"), [(c, d) if d is DType.float32 else later((c, d))[0] for c, d in PAIRS])
def test_hard_values(host: Host, codec: Codec, dtype: DType) -> None:
    """Random bits, all sizes, infinities and NaNs, ties, denormals, zeros, the greatest floats; tails of blocks."""
    x = hard(dtype)
    x = x[: x.size - 77]
    coded = reference.encode(codec, dtype, x)
    same(host.encode(codec, dtype, x), coded)
    same(host.decode(codec, dtype, coded, x.size), reference.decode(codec, dtype, coded, x.size))


@pairs
@pytest.mark.parametrize("seed", [0, *NIGHTLY])
def test_random_values(host: Host, codec: Codec, dtype: DType, seed: int) -> None:
    """Any bits; numbers of like size, with few specials; any part of a tensor; any length."""
    rng = np.random.default_rng(seed)
    for _ in range(4):
        n = int(rng.integers(0, 1500))
        bits = np.frombuffer(rng.bytes(n * dtype.itemsize), storage(dtype)).copy()
        plain = elements(dtype, rng.normal(size=n) * 2.0 ** rng.integers(-140, 127))
        if n:
            plain[rng.integers(0, n, 2)] = elements(dtype, [rng.choice([np.inf, -np.inf, np.nan, 0.0, -0.0]), 1e38])
        for x in (bits, plain):
            coded = reference.encode(codec, dtype, x)
            same(host.encode(codec, dtype, x), coded)
            same(host.decode(codec, dtype, coded, n), reference.decode(codec, dtype, coded, n))
        wire = np.frombuffer(rng.bytes(reference.coded_bytes(codec, n)), np.uint8)
        same(host.decode(codec, dtype, wire, n), reference.decode(codec, dtype, wire, n))


def test_what_is_launched() -> None:
    assert device.encode_launch(Codec.int8, DType.float32, 129) == device.Launch("encode_int8_f32", 1, 256)
    assert device.encode_launch(Codec.fp8, DType.bfloat16, 8 * 128 + 1).blocks == 2
    assert device.encode_launch(Codec.int8, DType.float32, 0).blocks == 0
    assert device.encode_launch(Codec.bf16, DType.float64, 1025).blocks == 2
    assert device.decode_launch(Codec.bf16, DType.float64, 257) == device.Launch("decode_bf16_f64", 2, 256)


def test_the_text_is_the_one_that_was_compiled() -> None:
    assert device.source() == ((KERNELS / "cuda.cu").read_bytes(), (KERNELS / "arithmetic.h").read_bytes())


# ---- launched -------------------------------------------------------------------------------------------


@pytest.fixture
def driver(gpu: Any, kernels: Any) -> Iterator[Driver]:
    """The real bindings over the stand-in, whose streams run the kernels on the host; a context is current."""
    gpu("cuCtxPushCurrent", gpu.contexts[0])
    yield Driver(gpu.driver)
    gpu.driver.cuCtxPopCurrent()


def test_the_rows_of_gpu_check(driver: Driver) -> None:
    """Each codec and dtype is right, as late as the order of the stream allows."""
    rows = list(kernels(driver, 0, nbytes=1 << 14, values=lambda dtype: np.ascontiguousarray(hard(dtype)[::199])))
    assert [(what, result) for what, result, _ in rows[:-3]] == [
        (f"{codec.name} of {dtype.name} on the device", "ok") for codec, dtype in PAIRS
    ]
    assert [what for what, _, _ in rows[-3:]] == [f"{c.name} encodes 16 KiB of float32" for c in device.CODECS]


def test_one_wrong_bit_is_seen(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    def one_bit_off(*arguments: Any) -> Array:
        found = read(*arguments)
        found.view(np.uint8)[-1:] ^= 1
        return found

    monkeypatch.setattr(checks, "read", one_bit_off)
    with stream_of(driver) as stream:
        codecs = device.Codecs(driver, 0)
        wrong = differences(driver, codecs, stream, Codec.fp8, DType.float16, hard(DType.float16)[:300])
        codecs.close()
    assert len(wrong) == 2 * 4  # all but those of no elements


def test_a_device_whose_driver_takes_no_code(gpu: Any, driver: Driver) -> None:
    gpu.lib.standin_kernels(None)
    with pytest.raises(DeviceError, match="cuModuleLoadData"):
        device.Codecs(driver, 0)


# ---- NVRTC ----------------------------------------------------------------------------------------------


def apart(said: str) -> bytes:
    """What an expression of encode.py gives, in a process without the stand-in, which NVRTC would call."""
    code = f"import sys; from wancoll.client.cuda import encode; sys.stdout.buffer.write({said})"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    if b"encoding on a device needs NVRTC" in ran.stderr:
        pytest.skip("cuda-bindings or nvidia-cuda-nvrtc is not installed")
    assert ran.returncode == 0, ran.stderr.decode()
    return ran.stdout


def test_nvrtc_rounds_each_operation_once() -> None:
    """PTX without contraction, flushing or guesses; every kernel that may be launched is in it."""
    ptx = apart("encode.build('compute_80')").decode()
    assert re.search(r"\.target sm_80\b", ptx)
    operations = set(re.findall(r"\b((?:add|sub|mul|div|rcp|fma|mad|sqrt|rsqrt|ex2)\.[a-z0-9.]*f(?:32|64))\b", ptx))
    assert {"add.rn.f32", "sub.rn.f32", "mul.rn.f32", "div.rn.f32"} <= operations
    residuals = {"add.rn.f64", "sub.rn.f64"}  # of float64
    assert operations - residuals <= {"add.rn.f32", "sub.rn.f32", "mul.rn.f32", "div.rn.f32", "rcp.rn.f32"}
    assert not re.search(r"\.(ftz|approx|full)\b", ptx)
    entries = set(re.findall(r"\.entry (\w+)\(", ptx))
    each = (device.encode_launch, device.decode_launch, device.lost_launch)
    launches = {f(codec, dtype, 1).kernel for f in each for codec, dtype in PAIRS}
    assert entries == launches | {device.feed_launch(dtype, 1).kernel for _, dtype in PAIRS}


@pytest.mark.parametrize(
    ("major", "minor"),
    [*later((9, 0)), *(pytest.param(*each, marks=pytest.mark.nightly) for each in ((7, 5), (8, 0), (12, 1)))],
)
def test_nvrtc_compiles_for_devices(major: int, minor: int) -> None:
    """Machine code, an ELF file."""
    assert apart(f"encode.compiled({major}, {minor})")[:4] == b"\x7fELF"


def test_which_code_a_device_gets(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(device, "build", lambda name: asked.append(name) or b"")
    monkeypatch.setattr(device, "_nvrtc", lambda: SimpleNamespace(nvrtcGetSupportedArchs=lambda: (0, [75, 80, 90])))
    for major, minor in ((9, 0), (8, 6), (12, 1)):
        device.compiled.__wrapped__(major, minor)
    assert asked == ["sm_90", "compute_80", "compute_90"]
    with pytest.raises(ConfigError, match=r"too old .*7\.0"):
        device.compiled.__wrapped__(7, 0)


def test_without_nvrtc(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(ConfigError, match=r"pip install '.\[cuda\]'"):
        device.build("compute_80")
