"""What all_reduce accepts, what it sees in it, and every refusal's words."""

from __future__ import annotations

import array
import ctypes
import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.client.tools import refused
from wancoll.client.communicator import Communicator
from wancoll.client.memory.tensors import (
    Exported,
    _pointer,
    _Versioned,
    check_out,
    check_pair,
    numpy_dtype,
    region,
    require_writable,
)
from wancoll.client.syncing.state import tensors_of
from wancoll.collective import DType
from wancoll.errors import ConfigError

NUMPY = [d for d in DType if d is not DType.bfloat16]


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch")


def refusal(x: Any, who: str = "all_reduce(x)") -> str:
    with pytest.raises(ConfigError) as caught:
        region(x, who)
    assert caught.value.who == who
    assert caught.value.expected
    assert caught.value.got
    return str(caught.value)


def peek(found: Any) -> bytes:
    return ctypes.string_at(found.address, found.nbytes) if found.nbytes else b""


# ---- numpy ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", NUMPY)
@pytest.mark.parametrize("shape", [(), (0,), (1,), (7,), (3, 5), (2, 0, 3), (2, 3, 4)])
def test_numpy_arrays(dtype: DType, shape: tuple[int, ...]) -> None:
    x = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype.name)
    found = region(x, "x")
    assert (found.dtype, found.shape, found.count, found.nbytes) == (dtype, shape, x.size, x.nbytes)
    assert found.address == (x.ctypes.data if x.size else 0)
    assert found.writable
    assert found.owner is x
    assert peek(found) == x.tobytes()


def test_equal_numpy_types_of_other_names() -> None:
    for name, dtype in (
        ("longlong", DType.int64),
        ("intp", DType.int64),
        ("intc", DType.int32),
        ("=f4", DType.float32),
    ):
        assert region(np.ones(3, name), "x").dtype is dtype


def test_ml_dtypes_bfloat16() -> None:
    x = np.arange(6, dtype=np.float32).astype(ml_dtypes.bfloat16).reshape(2, 3)
    found = region(x, "x")
    assert (found.dtype, found.shape, found.nbytes, found.address) == (DType.bfloat16, (2, 3), 12, x.ctypes.data)
    assert region(x[:0], "x").address == 0


@pytest.mark.parametrize(
    "dtype",
    [bool, "complex64", "complex128", object, "uint16", "uint32", "uint64", "longdouble", "S4", "M8[s]", "f4,i4",
     ml_dtypes.float8_e4m3fn],
)  # fmt: skip
def test_unknown_numpy_dtypes(dtype: Any) -> None:
    text = refusal(np.zeros(3, dtype))
    assert "the dtype is unknown" in text
    assert "one of float32, float64, float16, bfloat16, int8, int16, int32, int64, uint8" in text
    assert np.dtype(dtype).str in text


def test_foreign_byte_order() -> None:
    text = refusal(np.zeros(3, ">f4"))
    assert ">f4" in text
    assert "x.astype(x.dtype.newbyteorder('='))" in text


def test_numpy_layouts() -> None:
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    text = refusal(x[:, ::2])
    assert "not C-contiguous" in text
    assert "strides (16, 8)" in text
    assert "ascontiguousarray" in text
    text = refusal(x.T)
    assert "x.T, which shares the memory" in text
    refusal(np.broadcast_to(np.float32(1), (4,)))
    refusal(x[0][::-1])
    assert region(x[1], "x").address == x.ctypes.data + 16
    assert region(np.asfortranarray(np.ones((5, 1))), "x").count == 5  # in both orders at once


def test_read_only_numpy() -> None:
    x = np.ones(3, np.float32)
    x.flags.writeable = False
    found = region(x, "x")
    assert not found.writable
    with pytest.raises(ConfigError) as caught:
        require_writable(found, "all_reduce(x)")
    assert "read-only" in str(caught.value)
    assert caught.value.who == "all_reduce(x)"
    assert "numpy.ndarray" in caught.value.got
    assert "pass out=" in caught.value.hint
    require_writable(region(np.ones(3), "x"), "x")


def test_subclasses_of_ndarray(tmp_path: Any) -> None:
    mapped = np.memmap(tmp_path / "m", np.int32, "w+", shape=(4,))
    assert region(mapped, "x").dtype is DType.int32
    text = refusal(np.ma.masked_array([1.0, 2.0], [True, False]))
    assert "mask" in text
    assert "x.filled(0)" in text


# ---- buffers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "dtype"),
    [("f", DType.float32), ("d", DType.float64), ("b", DType.int8), ("B", DType.uint8), ("h", DType.int16),
     ("i", DType.int32), ("l", DType.int64), ("q", DType.int64)],
)  # fmt: skip
def test_array_module(code: str, dtype: DType) -> None:
    x = array.array(code, [1, 2, 3])
    found = region(x, "x")
    assert (found.dtype, found.shape, found.address) == (dtype, (3,), x.buffer_info()[0])
    assert found.writable


def test_array_module_unsigned_is_unknown() -> None:
    assert "buffer format 'H'" in refusal(array.array("H", [1]))


def test_bytes_like() -> None:
    found = region(bytearray(b"abc"), "x")
    assert (found.dtype, found.count, found.writable) == (DType.uint8, 3, True)
    assert peek(found) == b"abc"
    found = region(b"abc", "x")
    assert not found.writable
    assert peek(found) == b"abc"
    with pytest.raises(ConfigError, match="got bytes that is read-only"):
        require_writable(found, "x")


def test_a_bytearray_in_use_cannot_be_resized() -> None:
    x = bytearray(8)
    found = region(x, "x")
    with pytest.raises(BufferError):
        x.append(1)
    del found
    x.append(1)


def test_memoryviews() -> None:
    x = memoryview(array.array("f", range(6))).cast("B").cast("f", (2, 3))
    found = region(x, "x")
    assert (found.dtype, found.shape) == (DType.float32, (2, 3))
    assert "not C-contiguous" in refusal(memoryview(bytearray(8))[::2])
    assert "buffer format '?'" in refusal(memoryview(bytearray(8)).cast("?"))
    assert region(memoryview(np.ones(2, np.float16)), "x").dtype is DType.float16
    assert region(np.float32(3), "x").shape == ()


def test_ctypes_arrays() -> None:
    x = (ctypes.c_float * 3)(1, 2, 3)
    found = region(x, "x")
    assert (found.dtype, found.count, found.address) == (DType.float32, 3, ctypes.addressof(x))
    big = (ctypes.c_int32.__ctype_be__ * 3)(1, 2, 3)  # type: ignore[attr-defined]
    assert "buffer format '>i'" in refusal(big)


# ---- torch ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DType)
def test_torch_tensors(torch: Any, dtype: DType) -> None:
    for shape in ((), (0,), (5,), (2, 3)):
        x = torch.zeros(shape, dtype=getattr(torch, dtype.name))
        found = region(x, "x")
        assert (found.dtype, found.shape, found.count, found.owner) == (dtype, shape, x.numel(), x)
        assert found.address == (x.data_ptr() if x.numel() else 0)
        assert found.writable


def test_torch_refusals(torch: Any) -> None:
    text = refusal(torch.zeros(3, requires_grad=True))
    assert "requires grad" in text
    assert ".detach()" in text
    assert region(torch.zeros(3, requires_grad=True).detach(), "x").count == 3
    assert "torch.complex64" in refusal(torch.zeros(3, dtype=torch.complex64))
    assert "torch.bool" in refusal(torch.zeros(3, dtype=torch.bool))
    assert "not C-contiguous" in refusal(torch.zeros(3, 4).T)
    assert "torch.sparse_coo" in refusal(torch.zeros(3, 4).to_sparse())
    assert "to_empty(device='cpu')" in refusal(torch.zeros(3, device="meta"))
    assert "meta" in refusal(torch.zeros(3, device="meta"))


def shrunk(x: Any, nbytes: int) -> Any:
    """*x*, whose storage has *nbytes* left, as FSDP frees it."""
    x.untyped_storage().resize_(nbytes)
    return x


def fake(torch: Any) -> Any:
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        return torch.ones(4)


NOT_ITS_OWN: dict[str, tuple[Callable[[Any], Any], str]] = {  # all of them say that they have elements
    "fake": (fake, "FakeTensor, a subclass that stands for other tensors"),
    "masked": (lambda torch: torch.masked.masked_tensor(torch.ones(3), torch.ones(3) > 0), "MaskedTensor, a subclass"),
    "functional": (lambda torch: torch._to_functional_tensor(torch.ones(4)), "with 0 of 16 bytes"),
    "zero": (lambda torch: torch._efficientzerotensor(4), "with 0 of 16 bytes"),
    "freed": (lambda torch: shrunk(torch.ones(4), 0), "with 0 of 16 bytes; its memory was freed"),
    "shorter": (lambda torch: shrunk(torch.ones(4), 12), "with 12 of 16 bytes"),
    "a part of what is shorter": (lambda torch: shrunk(torch.ones(8)[4:], 28), "with 28 of 32 bytes"),
    "nested": (lambda torch: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "x.unbind()"),
    "jagged": (
        lambda torch: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged), "x.unbind()",
    ),
    "quantized": (lambda torch: torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8), "x.dequantize()"),
    "lazy": (lambda torch: torch.nn.parameter.UninitializedBuffer(), "UninitializedBuffer"),
    "negated": (lambda torch: torch.ones(4)._neg_view(), "x.resolve_conj().resolve_neg()"),
}  # fmt: skip


@pytest.mark.parametrize("which", NOT_ITS_OWN)
def test_torch_tensors_without_memory_of_their_own(torch: Any, which: str) -> None:
    make, words = NOT_ITS_OWN[which]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nested and quantized tensors are a prototype, masked ones too
        x = make(torch)
    for look in (lambda: region(x, "all_reduce(x)"), lambda: tensors_of({"w": x, "v": x}, changing=True)):
        with refused("the tensor's values do not lie in its own memory", words):
            look()


def test_torch_tensors_that_are_mapped_over(torch: Any) -> None:
    seen: list[str] = []

    def reduce(x: Any) -> Any:
        seen.append(refusal(x))
        return x

    torch.vmap(reduce)(torch.ones(2, 3))
    assert "Cannot access data pointer" in seen[0]


def test_memory_that_is_not_mapped() -> None:
    for nowhere in (0, 4096):  # nothing is ever mapped there
        x = (ctypes.c_byte * 40).from_address(nowhere)
        assert f"at address {nowhere:#x}; its memory was freed" in refusal(x)
    with refused("sync_state(state['w'])", "memory is not there"):
        tensors_of({"w": x}, changing=False)
    assert "memory is not there" in refusal(np.lib.stride_tricks.as_strided(np.ones(1), (1 << 40,), (8,)))
    assert region((ctypes.c_byte * 0).from_address(0), "x").count == 0


_MAPPED = """
import ctypes, mmap, os, sys, tempfile
import numpy as np
from wancoll.client.memory import tensors
from wancoll.client.syncing.state import tensors_of
from wancoll.errors import ConfigError

pages, forbid, kind = int(sys.argv[1]), *sys.argv[2:]
if kind == "an older kernel's":
    tensors._madvise = lambda *_: -1
libc = ctypes.CDLL(None)
libc.mprotect.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
size = pages * mmap.PAGESIZE
file = tempfile.TemporaryFile()
file.truncate(size)
memory = mmap.mmap(file.fileno(), size) if forbid == "cut" else mmap.mmap(-1, size)
start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
x = np.frombuffer(memory, np.uint8)[1 : size - 1]
if forbid == "cut":
    file.truncate(size - mmap.PAGESIZE)
else:
    which, how = {"none": (start, 0), "last": (start + size - mmap.PAGESIZE, 0), "write": (start, 1)}[forbid]
    assert not libc.mprotect(which, mmap.PAGESIZE, how)

def use():
    if kind == "a state's":
        ctypes.memset(tensors_of({"w": x}, changing=True)[0].memory.address, 1, size - 2)
        return
    found = tensors.region(x, "all_reduce(x)")
    ctypes.string_at(found.address, found.nbytes)
    tensors.require_writable(found, "all_reduce(x)")
    ctypes.memset(found.address, 1, found.nbytes)

try:
    use()
    sys.exit("nothing was wrong")
except ConfigError as refused:
    print(refused)
libc.mprotect(start, size, 3)
if forbid != "cut":
    x[:] = 0
    use()
"""


@pytest.mark.parametrize("kind", ["a call's", "an older kernel's", "a state's"])
@pytest.mark.parametrize(
    ("pages", "forbid"),
    [(1, "none"), (1, "write"), (1, "cut"), (3, "last"), (3, "cut"), (9, "write"), (9, "last"), (9, "cut")],
)
def test_mapped_memory_that_cannot_be_used(pages: int, forbid: str, kind: str) -> None:
    child = [sys.executable, "-c", _MAPPED, str(pages), forbid, kind]
    done = subprocess.run(child, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, (done.returncode, done.stderr)
    assert "the tensor's memory is not there" in done.stdout
    reads = forbid != "write" and kind != "a state's"
    assert f"bytes that this process may {'read' if reads else 'write'}" in done.stdout


def test_torch_is_never_imported() -> None:
    code = (
        "import sys, numpy; from wancoll.client.memory.tensors import region;"
        "region(numpy.ones(3), 'x'); region(bytearray(3), 'x');"
        "sys.exit('torch' in sys.modules or 'trio' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_package_imports_lightly() -> None:
    code = (
        "import sys, wancoll; wancoll.WancollError;"
        "heavy = {'numpy', 'trio', 'torch', 'wancoll._native'} & set(sys.modules); assert not heavy, heavy;"
        "wancoll.connect; wancoll.Work; wancoll.Communicator; wancoll.Receipt;"
        "assert set(wancoll.__all__) <= set(dir(wancoll)); assert 'trio' not in sys.modules"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# ---- DLPack -----------------------------------------------------------------------------------------


class Exporter:
    """Only DLPack, as some other library's tensor."""

    def __init__(self, inner: Any, versioned: bool = True, device: tuple[int, int] = (1, 0)) -> None:
        self.inner, self.versioned, self.device = inner, versioned, device

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    def __dlpack__(self, **options: Any) -> Any:
        if not self.versioned and options:
            raise TypeError("unexpected keyword argument 'max_version'")
        return self.inner.__dlpack__(**options)


@pytest.mark.parametrize("versioned", [True, False])
@pytest.mark.parametrize("dtype", NUMPY)
def test_dlpack(dtype: DType, versioned: bool) -> None:
    x = np.arange(6).astype(dtype.name).reshape(2, 3)
    found = region(Exporter(x, versioned), "x")
    assert (found.dtype, found.shape, found.address, found.count) == (dtype, (2, 3), x.ctypes.data, 6)
    assert found.writable
    assert region(Exporter(x[1], versioned), "x").address == x.ctypes.data + 3 * x.itemsize
    assert region(Exporter(np.ones(()), versioned), "x").shape == ()


def test_dlpack_bfloat16(torch: Any) -> None:
    x = torch.ones(4, dtype=torch.bfloat16)
    for versioned in (True, False):
        found = region(Exporter(x, versioned), "x")
        assert (found.dtype, found.address) == (DType.bfloat16, x.data_ptr())


def test_dlpack_says_read_only() -> None:
    x = np.ones(3)
    x.flags.writeable = False
    assert not region(Exporter(x), "x").writable


def test_dlpack_of_immutable_libraries() -> None:
    jax_like = type("Array", (Exporter,), {"__module__": "jaxlib._jax"})
    found = region(jax_like(np.ones(3)), "x")
    assert not found.writable
    with pytest.raises(ConfigError, match=r"jaxlib\._jax\.Array that is read-only.*pass out="):
        require_writable(found, "x")


def test_dlpack_refusals() -> None:
    assert "not C-contiguous" in refusal(Exporter(np.ones((3, 4))[:, ::2]))
    text = refusal(Exporter(np.ones(3, np.complex64)))
    assert "got complex64" in text
    with refused("not in host memory", "on metal:1", "copy it to the host"):
        tensors_of({"w": Exporter(np.ones(3), device=(8, 1))}, changing=False)
    assert "device type 99:0" in refusal(Exporter(np.ones(3), device=(99, 0)))
    assert region(Exporter(np.ones(3), device=(3, 0)), "x").count == 3  # pinned host memory
    text = refusal(Exporter(object()))
    assert "AttributeError" in text
    not_a_capsule = type("T", (), {"__dlpack__": lambda self, **o: 3, "__dlpack_device__": lambda self: (1, 0)})
    assert "not a DLPack capsule" in refusal(not_a_capsule())


def _raises(*_: Any) -> Any:
    raise KeyError("of its own")


@pytest.mark.parametrize(
    "says", [lambda _: 1, lambda _: (1,), lambda _: (1, 2, 3), lambda _: ("cpu", 0), _raises, None]
)
def test_dlpack_devices_that_are_no_pair(says: Any) -> None:
    x = type("T", (Exporter,), {"__dlpack_device__": says})(np.ones(3))
    with refused("the tensor cannot be exported", "expected a __dlpack_device__ that returns two numbers"):
        region(x, "x")
    with refused("the tensor cannot be exported"):
        tensors_of({"w": x}, changing=False)


def test_dlpack_that_raises() -> None:
    x = type("T", (Exporter,), {"__dlpack__": _raises})(np.ones(3))
    assert "a tensor whose __dlpack__ works" in refusal(x)
    assert "KeyError: 'of its own'" in refusal(x)


def test_an_array_of_a_subclass_that_lies() -> None:
    lies = {"size": 99, "shape": (99,), "__array_interface__": {"data": (8, False), "shape": (99,)}, "flags": None}
    x = np.ones(3, np.float32).view(type("Liar", (np.ndarray,), lies))
    found = region(x, "x")
    assert (found.count, found.shape, found.owner is x, peek(found)) == (
        3,
        (3,),
        True,
        np.ones(3, np.float32).tobytes(),
    )
    same = tensors_of({"w": x}, changing=False)[0]
    assert (same.memory.address, same.memory.nbytes) == (found.address, 12)


def test_a_view_that_was_released() -> None:
    view = memoryview(bytearray(8))
    view.release()
    assert "this cannot be reduced" in refusal(view)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("data", None, "at address 0x0"),
        ("ndim", -1, "-1 dimensions"),
        ("ndim", 1000, "1000 dimensions"),
        ("shape", ctypes.POINTER(ctypes.c_int64)(), "1 dimensions without sizes"),
        ("shape", ctypes.pointer(ctypes.c_int64(-3)), "shape (-3,)"),
        ("shape", ctypes.pointer(ctypes.c_int64(1 << 44)), "memory is not there"),
        ("shape", ctypes.pointer(ctypes.c_int64(1 << 62)), "memory is not there"),
        ("byte_offset", 1 << 62, "memory is not there"),
        ("device_type", 2, "gives memory of device type 2, __dlpack_device__ says 1"),
    ],
)
def test_dlpack_that_lies(field: str, value: Any, words: str) -> None:
    class Liar(Exporter):
        def __dlpack__(self, **options: Any) -> Any:
            capsule = super().__dlpack__(**options)
            described = _Versioned.from_address(_pointer(capsule, b"dltensor_versioned")).tensor
            setattr(described, field, value)
            return capsule

    assert words in refusal(Liar(np.ones(3)))
    with refused(words):
        tensors_of({"w": Liar(np.ones(3))}, changing=False)


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"data": (0, False)}, "at address 0x0"),
        ({"data": (None, False)}, "at address 0x0"),
        ({"shape": (-3,)}, "shape (-3,)"),
        ({"shape": ("three",)}, "TypeError"),
        ({"strides": (4, 4)}, "strides (4, 4)"),
        ({"strides": ("four",)}, "TypeError"),
        ({"strides": 4}, "TypeError"),
        ({"data": 4096}, "TypeError"),
        ({"version": "3"}, "TypeError"),
        ({"version": None}, "TypeError"),
        ({"typestr": None}, "typestr 'None'"),
        ({"typestr": 5}, "typestr '5'"),
        ({"typestr": "U99999999999999"}, "typestr"),
        ({"stream": "one"}, "the tensor's stream cannot be used"),
    ],
)
def test_array_interfaces_that_lie(said: dict[str, Any], words: str) -> None:
    liar = type("Liar", (), {"__cuda_array_interface__": {**OnDevice.__cuda_array_interface__, **said}})()
    assert words in refusal(liar)
    with refused(words):
        tensors_of({"w": liar}, changing=False)


@pytest.mark.parametrize("said", [None, 3, [1, 2], "shape", property(_raises)])
def test_array_interfaces_that_are_no_dict(said: Any) -> None:
    liar = type("Liar", (), {"__cuda_array_interface__": said})()
    assert "a __cuda_array_interface__ that can be read" in refusal(liar)
    with refused("the tensor cannot be exported"):
        tensors_of({"w": liar}, changing=False)


def test_dlpack_memory_is_kept_and_then_freed() -> None:
    x = np.ones(1000)
    before = sys.getrefcount(x)
    found = region(Exporter(x), "x")
    assert sys.getrefcount(x) > before
    del found
    assert sys.getrefcount(x) == before


def test_dlpack_contiguity() -> None:
    def exported(shape: tuple[int, ...], strides: tuple[int, ...] | None) -> bool:
        return Exported(None, 0, "float32", shape, strides, False).contiguous

    assert exported((2, 3), None)
    assert exported((2, 3), (3, 1))
    assert exported((2, 1, 3), (3, 99, 1))
    assert exported((0, 3), (7, 7))
    assert exported((), ())
    assert not exported((2, 3), (1, 2))
    assert not exported((2, 3), (4, 1))


# ---- out= and empty() -------------------------------------------------------------------------------


def test_pairs() -> None:
    x = np.zeros(8, np.float32)
    check_pair(region(x, "x"), region(x.view(), "out"))
    check_pair(region(x, "x"), region(x.copy(), "out"))
    check_pair(region(x[:4], "x"), region(x[4:], "out"))
    check_pair(region(x[:0], "x"), region(x[:0].copy(), "out"))
    for out, words in (
        (np.zeros(8, np.int32), ("another dtype", "expected float32", "got int32")),
        (np.zeros(7, np.float32), ("another shape", "expected (8,)", "got (7,)")),
        (np.zeros((8, 1), np.float32), ("another shape", "expected (8,)", "got (8, 1)")),
    ):
        with pytest.raises(ConfigError) as caught:
            check_pair(region(x, "x"), region(out, "out"))
        assert caught.value.who == "all_reduce(out=...)"
        assert all(word in str(caught.value) for word in words)
    with pytest.raises(ConfigError, match=r"overlaps a part of the tensor.*4 bytes apart, 28 bytes long"):
        check_pair(region(x[:7], "x"), region(x[1:], "out"))
    with pytest.raises(ConfigError, match="overlaps"):
        check_pair(region(x[1:], "x"), region(x[:7], "out"))
    with pytest.raises(ConfigError, match=r"overlaps a part of the tensor.*0 bytes apart, 32 and 16 bytes long"):
        check_out(region(x, "x"), region(x[:4], "out"), 4, "reduce_scatter")
    with pytest.raises(
        ConfigError, match=r"reduce_scatter\(out=...\): out has another size.*expected 5 elem.*got 4, of"
    ):
        check_out(region(x, "x"), region(x[:4], "out"), 5, "reduce_scatter")


def test_numpy_dtype() -> None:
    for dtype in NUMPY:
        assert numpy_dtype(dtype.name) == np.dtype(dtype.name)
    assert numpy_dtype("bfloat16") == ml_dtypes.bfloat16
    assert numpy_dtype(ml_dtypes.bfloat16) == ml_dtypes.bfloat16
    assert numpy_dtype(float) == np.float64
    for bad in ("complex64", ">f4", bool, "nonsense", object()):
        with pytest.raises(ConfigError, match=r"the dtype is unknown.*one of float32") as caught:
            numpy_dtype(bad)
        assert caught.value.who == "empty(dtype=...)"


def test_bfloat16_without_ml_dtypes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    with pytest.raises(ConfigError, match=r"numpy has no bfloat16.*not installed.*pip install ml_dtypes"):
        numpy_dtype("bfloat16")


class OnDevice:
    """As a Numba array: it has CUDA's interface, and neither DLPack nor the buffer protocol."""

    __cuda_array_interface__ = {"shape": (3,), "typestr": "<f4", "data": (4096, False), "version": 3}


@pytest.mark.parametrize(
    ("x", "reduced", "synchronised"),
    [
        (None, "pass zeros where there is nothing to give", "leave the name out on all members"),
        ({"w": np.ones(3)}, "all_reduce_many(list(x.values())), or sync_state(x, ...)", "one name for each tensor"),
        ([np.ones(3)], "all_reduce_many takes a list of tensors", "numpy.asarray(x)"),
        (3.5, "pass numpy.array(x)", "an array of no dimensions takes a number"),
        (object(), "pass numpy.asarray(x)", "numpy.asarray(x)"),
    ],
    ids=["None", "dict", "list", "number", "object"],
)
def test_hints_fit_what_was_passed(x: Any, reduced: str, synchronised: str) -> None:
    with refused(reduced):
        region(x, "all_reduce(x)")
    with refused(synchronised):
        tensors_of({"w": x}, changing=False)


def test_sync_state_looks_at_tensors_of_devices() -> None:
    (found,) = tensors_of({"w": OnDevice()}, changing=True)
    assert (found.entry.dtype, found.entry.shape, found.entry.nbytes) == ("float32", (3,), 12)
    assert (found.memory.address, found.memory.device is not None) == (4096, True)


class dtype:
    """As torch's, which numpy does not know."""

    __module__ = "torch"

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"torch.{self.name}"


def test_torch_dtypes_are_understood_without_torch() -> None:
    assert numpy_dtype(dtype("float32")) == np.float32
    assert numpy_dtype(dtype("int64")) == np.int64
    assert numpy_dtype(dtype("bfloat16")) == ml_dtypes.bfloat16
    with refused("the dtype is unknown", "complex64"):
        numpy_dtype(dtype("complex64"))
    with refused("the dtype is unknown", "'quint8'"):
        numpy_dtype(dtype("quint8"))


def test_torchs_own_dtypes(comm: Communicator) -> None:
    torch = pytest.importorskip("torch")
    for each in ("float32", "bfloat16", "int8"):
        assert comm.empty(3, getattr(torch, each)).dtype == numpy_dtype(each)
