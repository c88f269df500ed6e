"""Every kernel table that this CPU can run against the numpy reference, bit for bit."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from tests.schedule import numbers
from wancoll._native import ffi, lib
from wancoll.collective import DType, ReduceOp

TABLES = [name for name in ("generic", "avx2", "avx512", "neon") if lib.wc_kernels_named(name.encode()) != ffi.NULL]
DIVISORS = (1, 2, 3, 7, 64, 100, 255, 1024, 40000, 65536, 2**31, 2**32 - 1)

# Bits in hexadecimal: zero, denormals, edges of the exponents, infinity, NaNs (signalling, quiet, with payloads).
SPECIAL = {
    DType.float32: """0 1 7fffff 800000 ffffff 33800000 3f7fffff 3f800000 40400000 7f7fffff 7f800000 7f800001 7fc00000
        7fc12345 7fffffff""",
    DType.float64: """0 1 fffffffffffff 10000000000000 3ca0000000000000 3fefffffffffffff 3ff0000000000000
        7fefffffffffffff 7ff0000000000000 7ff0000000000001 7ff8000000000000 7ff8000012345678 7fffffffffffffff""",
    DType.float16: "0 1 2 3ff 400 3bff 3c00 3c01 4200 7bff 7c00 7c01 7e00 7e55 7fff",
    DType.bfloat16: "0 1 7f 80 3f7f 3f80 3f81 4040 7f7f 7f80 7f81 7fc0 7fc5 7fff",
}


def table(name: str):
    return lib.wc_kernels_named(name.encode())


def run(function, a: np.ndarray, b: np.ndarray, *more: int) -> np.ndarray:
    out = np.empty_like(a)
    saved = lib.wc_fpenv_enter()
    function(*(ffi.cast("void *", array.ctypes.data) for array in (out, a, b)), a.size, *more)
    lib.wc_fpenv_leave(saved)
    return out


def special_bits(dtype: DType) -> np.ndarray:
    """Bits that are hard for *dtype*, both signs."""
    top = 1 << (8 * dtype.itemsize - 1)
    values = [int(text, 16) for text in SPECIAL[dtype].split()] if dtype in SPECIAL else []
    values = values or [0, 1, 2, 3, top // 2, top - 2, top - 1, 0x55, 0x7F]
    unsigned = np.dtype(f"u{dtype.itemsize}")
    return np.array([v | sign for v in values for sign in (0, top)], unsigned)


def operands(dtype: DType) -> tuple[np.ndarray, np.ndarray]:
    """All pairs of special values, random bits, ordinary values; every half type's value against each special one."""
    rng = np.random.default_rng(int(dtype) + 1)
    special = special_bits(dtype)
    sides = [np.repeat(special, special.size)], [np.tile(special, special.size)]
    for side in sides:
        side.append(np.frombuffer(rng.bytes(30011 * dtype.itemsize), special.dtype))
        if dtype in (DType.float32, DType.float64):
            side.append(rng.normal(size=20011).astype(dtype.name).view(special.dtype))
        if dtype is DType.float16:
            side.append(rng.normal(size=20011).astype(np.float16).view(np.uint16))
        if dtype is DType.bfloat16:
            side.append((rng.normal(size=20011).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16))
    if dtype.itemsize == 2:
        sides[0].append(np.tile(np.arange(65536, dtype=np.uint16), special.size))
        sides[1].append(np.repeat(special, 65536))
    a, b = (np.concatenate(side).view(numbers.storage(dtype)) for side in sides)
    return a, b


@pytest.fixture(scope="module", params=list(DType), ids=lambda dtype: dtype.name)
def case(request):
    return request.param, *operands(request.param)


def assert_same_bits(got: np.ndarray, want: np.ndarray, a: np.ndarray, b: np.ndarray) -> None:
    assert got.dtype == want.dtype
    unsigned = f"u{got.itemsize}"
    wrong = np.flatnonzero(got.view(unsigned) != want.view(unsigned))
    shown = [[f"{int(x.view(unsigned)[i]):#x}" for x in (a, b, got, want)] for i in wrong[:8]]
    assert not wrong.size, f"{wrong.size} differ; a, b, got, want: {shown}"


@pytest.mark.parametrize("op", list(ReduceOp), ids=lambda op: op.name)
def test_reduce_equals_the_reference(case, op):
    dtype, a, b = case
    want = numbers.reduce(dtype, op, a, b)
    for name in TABLES:
        assert_same_bits(run(table(name).reduce[dtype][op], a, b), want, a, b)


def test_average_equals_the_reference(case):
    dtype, a, b = case
    a, b = a[:80000], b[:80000]
    for n in DIVISORS:
        want = numbers.average(dtype, a, b, n)
        for name in TABLES:
            assert_same_bits(run(table(name).average[dtype], a, b, n), want, a, b)


def test_half_sums_equal_ml_dtypes():
    """An implementation by others: ml_dtypes computes in float32 and rounds once, too (its NaNs are its own)."""
    import ml_dtypes

    a, b = operands(DType.bfloat16)
    with np.errstate(all="ignore"):
        want = (a.view(ml_dtypes.bfloat16) + b.view(ml_dtypes.bfloat16)).view(np.uint16)
    number = (want & 0x7FFF) <= 0x7F80
    got = run(table("generic").reduce[DType.bfloat16][ReduceOp.sum], a, b)
    np.testing.assert_array_equal(got[number], want[number])
    assert set(got[~number]) == {0x7FC0}


@pytest.mark.parametrize("name", TABLES)
def test_flush_to_zero_of_the_thread_does_not_matter(name):
    """The kernels' control word: a library may have set flush-to-zero, and gets it back afterwards."""
    smallest = np.full(64, 1, np.uint32).view(np.float32)
    flushing = 0x9FC0 if "neon" not in TABLES else 1 << 24
    outer = lib.wc_fpenv_enter()
    lib.wc_fpenv_leave(flushing)
    try:
        got = run(table(name).reduce[DType.float32][ReduceOp.sum], smallest, smallest)
        restored = lib.wc_fpenv_enter()
    finally:
        lib.wc_fpenv_leave(outer)
    assert set(got.view(np.uint32)) == {2}
    assert restored == flushing


@given(st.binary(max_size=300), st.integers(0, 40), st.floats(0, 1), st.integers(0, 7))
def test_hash_of_a_whole_and_of_pieces(seed, repeat, split, offset):
    data = (bytes(offset) + seed * (repeat * repeat + 1))[offset:]
    cut = int(split * len(data))
    state = ffi.new("wc_hash_state *")
    for name in TABLES:
        of = table(name)
        of.hash_begin(state)
        of.hash_add(state, data[:cut], cut)
        of.hash_add(state, data[cut:], len(data) - cut)
        assert of.hash64(data, len(data)) == of.hash_end(state) == xxhash.xxh3_64_intdigest(data)


def default_table(cpu: str) -> str:
    code = (
        "from wancoll._native import ffi, lib\nt = lib.wc_kernels_default()\n"
        "print('' if t == ffi.NULL else ffi.string(t.name).decode())"
    )
    environment = {**os.environ, "WANCOLL_CPU": cpu}
    command = [sys.executable, "-c", code]
    return subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, text=True, timeout=30, check=True
    ).stdout.strip()


def test_wancoll_cpu_chooses_the_table():
    assert [default_table(name) for name in TABLES] == TABLES
    assert default_table("") == TABLES[-1]
    assert default_table("abacus") == ""


def test_dtype_sizes():
    assert [lib.wc_dtype_size(dtype) for dtype in DType] == [dtype.itemsize for dtype in DType]
    assert lib.wc_dtype_size(-1) == lib.wc_dtype_size(len(DType)) == 0
