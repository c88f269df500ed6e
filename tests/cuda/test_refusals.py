"""What cannot be used of a device is refused by name, and nothing is sent; and what the product takes stays flat."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.client.fake_daemon import FakeDaemon
from tests.client.tools import refused
from tests.cuda.test_order import array, numbers, same
from wancoll.client.communicator import Communicator
from wancoll.client.cuda import driver as drivers
from wancoll.client.cuda import staging
from wancoll.client.memory.tensors import region
from wancoll.errors import ConfigError, DeviceError

PINNED_CALLS = 1000


def test_pointers(gpu: Any, comm: Communicator, daemon: FakeDaemon) -> None:
    good, freed = array(gpu, numbers(100)), array(gpu, numbers(100))
    gpu.frees.pop()()
    with refused("unknown to this process's CUDA driver", "it was freed, or belongs to another process"):
        comm.all_reduce(freed)
    with refused("unknown to this process's CUDA driver"):
        comm.all_reduce_many([good, freed], bucket_bytes=1)
    beyond = array(gpu, numbers(100))
    beyond.shape, beyond.nbytes = (101,), 404
    with refused("goes beyond the memory that it lies in", "at most 400 bytes", "404"):
        comm.all_reduce(beyond)
    with refused("out overlaps a part of the tensor"):
        inside = array(gpu, numbers(100))
        inside.address = good.address + 4
        comm.all_reduce(good, inside)
    assert daemon.seen == []
    same(good.get(), numbers(100))


def test_another_context(gpu: Any, comm: Communicator, daemon: FakeDaemon) -> None:
    gpu("cuCtxCreate", None, 0, 0)
    address = gpu("cuMemAlloc", 400)
    gpu("cuCtxPopCurrent")
    x = array(gpu, numbers(90))
    x.address = int(address)
    with refused("belongs to another CUDA context", "primary context of cuda:0"):
        comm.all_reduce(x)
    assert daemon.seen == []
    gpu.on(0, "cuMemFree", address)


class Interface:
    def __init__(self, **said: Any) -> None:
        self.__cuda_array_interface__ = {"shape": (4,), "typestr": "<f4", "data": (4096, False), "version": 3, **said}

    @property  # numpy and others look for it on the type
    def _(self) -> None: ...


class Has(Interface):
    __cuda_array_interface__: Any = None


@pytest.mark.parametrize(
    ("said", "text"),
    [
        ({"strides": (8,)}, "not C-contiguous"),
        ({"shape": (2, 2), "strides": (4, 8)}, "not C-contiguous"),
        ({"typestr": "<c8"}, "dtype is unknown"),
        ({"typestr": ">f4"}, "dtype is unknown"),
        ({"stream": 0}, "stream cannot be used"),
        ({"stream": -3}, "stream cannot be used"),
        ({"version": 2}, "version 2"),
        ({"mask": object()}, "with a mask"),
        ({"data": None}, "cannot be exported"),
    ],
)
def test_interfaces(said: dict[str, Any], text: str) -> None:
    with refused(text):
        region(Has(**said), "x")


def test_an_interface_is_read() -> None:
    found = region(Has(strides=(4,), stream=7), "x")
    assert (found.address, found.count, found.writable, found.device and found.device.stream) == (4096, 4, True, 7)
    assert not region(Has(data=(4096, True)), "x").writable
    assert region(Has(shape=(2, 2), strides=(8, 4)), "x").shape == (2, 2)


def test_fewer_blocks(gpu: Any, comm: Communicator, daemon: FakeDaemon) -> None:
    daemon.lost.add("other")
    x, out = array(gpu, numbers(100)), array(gpu, np.zeros((2, 100), np.float32))
    found = comm.all_gather(x, out).out
    assert found.__cuda_array_interface__["shape"] == (1, 100)
    assert found.__cuda_array_interface__["data"] == (out.address, False)
    same(out.get(), np.stack([numbers(100), np.zeros(100, np.float32)]))


def fake_torch(gpu: Any, x: Any, current: list[int]) -> Any:
    """As much of torch as is asked for a tensor on a device."""
    module = SimpleNamespace()

    class Tensor:
        dtype = "torch.float32"
        layout = "torch.strided"
        requires_grad = is_nested = is_quantized = False
        device = SimpleNamespace(type="cuda", index=x.device)
        shape = x.shape

        def __torch_dispatch__(self) -> None: ...

        def is_contiguous(self) -> bool:
            return True

        def is_conj(self) -> bool:
            return False

        is_neg = is_conj

        def stride(self) -> tuple[int, ...]:
            return tuple(step // 4 for step in np.empty(x.shape, np.float32).strides)

        def storage_offset(self) -> int:
            return 0

        def element_size(self) -> int:
            return 4

        def untyped_storage(self) -> Any:
            return SimpleNamespace(nbytes=lambda: 4 * self.numel())

        def data_ptr(self) -> int:
            return int(x.address)

        def numel(self) -> int:
            return int(np.prod(x.shape))

    module.Tensor = Tensor
    module.cuda = SimpleNamespace(current_stream=lambda device: SimpleNamespace(cuda_stream=current[0]))
    return module


def test_new_tensors_on_devices(comm: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    class OutOfMemoryError(RuntimeError): ...

    def empty(shape: Any, *, dtype: Any, device: Any) -> Any:
        if str(device) == "cuda:9":
            raise RuntimeError("invalid device ordinal")
        if 1 << 50 in shape:
            raise OutOfMemoryError("tried to allocate")
        made.append((shape, dtype, device))
        return np.ones(shape)

    monkeypatch.delitem(sys.modules, "torch", raising=False)
    with refused("torch is not imported", "empty(device='cuda:0')", "every collective takes its arrays"):
        comm.empty(3, device="cuda:0")
    names = {"float32": "f", "bfloat16": "b", "int8": "i"}
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(empty=empty, Tensor=type("T", (), {}), **names))
    assert comm.empty((2, 3), device="cuda:1").shape == (2, 3)
    assert not comm.zeros(4, "bfloat16", device="cuda").any()
    assert made == [((2, 3), "f", "cuda:1"), ((4,), "b", "cuda")]
    for device in ("cuda:9", "gpu", "meta", 0):
        with refused(f"empty(device='{device}')"):
            comm.empty(3, device=device)
    with refused("the dtype is unknown"):
        comm.empty(3, "complex64", device="cuda")
    with refused("no memory for it", error=DeviceError):
        comm.empty(1 << 50, device="cuda")
    for shape in (-1, "a", 1.5):
        with refused("empty(shape)"):
            comm.empty(shape)  # type: ignore[arg-type]
    assert isinstance(comm.empty(3, device="cpu"), np.ndarray)


@pytest.mark.check
def test_torch_without_cuda(comm: Communicator) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("it has a device")
    with refused("torch cannot use the device", "empty(device='cuda:0')"):
        comm.empty(3, torch.float32, device=torch.device("cuda:0"))


def test_torchs_current_stream(gpu: Any, comm: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one of the call comes first; the one of wait() comes after, too."""
    x = array(gpu, numbers(1000))
    current = [x.stream]
    module = fake_torch(gpu, x, current)
    monkeypatch.setitem(sys.modules, "torch", module)
    x.put(numbers(1000, 5))
    work = comm.all_reduce(module.Tensor(), async_op=True)
    x.stream = current[0] = gpu.stream()
    first = gpu.on(0, "cuStreamSynchronize", x.stream)
    assert first == []
    work.wait(60)
    same(x.get(), 2 * numbers(1000, 5))
    gpu.on(0, "cuStreamDestroy", x.stream)


@pytest.mark.check
def test_a_thousand_calls_are_flat(gpu: Any, comm: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of results that are copied after the commit; for others see test_early."""
    monkeypatch.setattr("wancoll.client.cuda.staging.LEAST", 1 << 60)
    tensors = [array(gpu, numbers(100), "dlpack"), array(gpu, numbers(3000))]
    pinned = gpu.counts()["registered"]
    before: dict[str, int] = {}
    for number in range(PINNED_CALLS):
        comm.all_reduce(tensors[number % 2])
        if number == 50:
            for x in tensors:
                x._kept.clear()
                x.get()
            gpu.lib.standin_drain()
            before = {**gpu.counts(), "arena": comm._connection.arena.leased_bytes}
    gpu.lib.standin_drain()
    after = {**gpu.counts(), "arena": comm._connection.arena.leased_bytes}
    assert after["events"] <= before["events"] + 4  # one for each copy that may be under way
    assert {**after, "items": 0, "events": 0} == {**before, "items": 0, "events": 0}
    assert after["registered"] - pinned <= 4 * (4096 + 16384)


def test_the_pool_is_bounded(gpu: Any, comm: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = SimpleNamespace(pinned_bytes=1 << 16)
    monkeypatch.setattr(staging, "DEFAULT", limits)
    most = gpu.counts()["registered"] + (1 << 16)
    for count in (100, 2000, 4000, 100, 8000, 1):
        x = array(gpu, numbers(count))
        comm.all_reduce(x)
        same(x.get(), 2 * numbers(count))
        assert gpu.counts()["registered"] <= most
    x = array(gpu, numbers(20000))  # more than may be pinned
    comm.all_reduce(x)
    same(x.get(), 2 * numbers(20000))
    assert gpu.counts()["registered"] <= most


# ---- without a package, a driver, or in a child ------------------------------------------------------


def test_without_the_package(comm: Communicator, gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drivers, "_driver", None)
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    for style in ("interface", "pinned"):
        with refused("and pinned memory, need a package that is not installed", "pip install '.[cuda]'"):
            comm.all_reduce(array(gpu, numbers(3), style))


def test_without_a_driver(standin: Any) -> None:
    code = (
        "from wancoll.client.cuda.driver import driver\n"
        "try: driver('x')\nexcept Exception as bad: print(type(bad).__name__, bad)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50, check=True)
    if "there is no CUDA driver" not in done.stdout:
        pytest.skip("there is one")
    assert done.stdout.startswith("ConfigError x: there is no CUDA driver that can be used")
    assert "install NVIDIA's driver" in done.stdout


def test_the_loader_finds_the_stand_in_by_its_path(standin: Any, tmp_path: Path) -> None:
    from tests.cuda.gpu import build

    build(tmp_path)
    code = "from wancoll.client.cuda.driver import driver\nprint(driver('x')('cuDeviceGetName', 20, 1))"
    environment = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=50, check=True, env=environment
    )
    assert "stand-in 1" in done.stdout


def in_a_child(work: Any) -> str:
    """What *work* says in a forked child."""
    ours, theirs = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.write(theirs, str(work()).encode())
        finally:
            os._exit(0)
    os.close(theirs)
    os.waitpid(child, 0)
    with os.fdopen(ours) as file:
        return file.read()


@pytest.mark.parametrize("seed", [1], indirect=True)
@pytest.mark.filterwarnings("ignore:This process")
def test_after_a_fork(comm: Communicator, gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    x = array(gpu, numbers(10))
    comm.all_reduce(x)

    def why() -> str:
        try:
            drivers.driver("x")
        except ConfigError as bad:
            return str(bad)
        return "nothing"

    assert "forked after its parent had begun to" in in_a_child(why)
    monkeypatch.setattr(drivers, "_driver", None)  # the parent did it through another library
    assert "forked after its parent had begun to" in in_a_child(why)
    monkeypatch.undo()
    comm.all_reduce(x)
    same(x.get(), 4 * numbers(10))


def test_the_host_cannot_touch_a_device(standin: Any) -> None:
    """Else the stand-in would prove little."""
    code = (
        "import sys, ctypes, pathlib; from tests.cuda.gpu import Gpu; g = Gpu(pathlib.Path(sys.argv[1]));"
        "a = int(g.on(0, 'cuMemAlloc', 100)); print('allocated', flush=True); ctypes.string_at(a, 1)"
    )
    command = [sys.executable, "-c", code, standin.lib._name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert done.stdout == "allocated\n"
    assert done.returncode == -11
