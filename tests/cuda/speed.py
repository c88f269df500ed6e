"""How fast tensors of a device are: staging beside the bus alone, and all_reduce beside main memory, gloo and NCCL.

Each figure is the median of some runs. Members of an all_reduce are processes of their own on this machine.
"""

from __future__ import annotations

import importlib
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import wancoll
from tests.cuda.gpu import DeviceArray, Gpu, WithInterface
from wancoll.chaos import Cluster
from wancoll.client.cuda.staging import Staging
from wancoll.client.memory.arena import Arena
from wancoll.client.memory.tensors import region
from wancoll.errors import ConfigError
from wancoll.limits import MIB, format_size

Row = tuple[str, str, str, str]  # what, figure, beside what, PASS or MISS or nothing

LEAST_STAGING, LEAST_REDUCED, LEAST_CODED = 0.9, 0.9, 3.0
_RUNS = 5
_SECONDS = 300.0  # for all figures of a size


def verdict(value: float, least: float, judged: bool) -> str:
    """Of a figure on a device; on the stand-in nothing is judged."""
    return "" if not judged else "PASS" if value >= least else "MISS"


# ---- staging ---------------------------------------------------------------------------------------------


def bus(gpu: Gpu, nbytes: int) -> float:
    """Bytes a second, each way, of plain pinned copies both ways at once, and nothing else."""
    a, b = (DeviceArray(gpu, np.zeros(nbytes, np.uint8)) for _ in range(2))
    pinned = [int(gpu.on(0, "cuMemHostAlloc", nbytes, 1)) for _ in range(2)]

    def once() -> None:
        gpu.on(0, "cuMemcpyDtoHAsync", pinned[0], a.address, nbytes, a.stream)
        gpu.on(0, "cuMemcpyHtoDAsync", b.address, pinned[1], nbytes, b.stream)
        for x in (a, b):
            gpu.on(0, "cuStreamSynchronize", x.stream)

    seconds = median(once)
    for address in pinned:
        gpu.on(0, "cuMemFreeHost", address)
    gpu.free_all()
    return nbytes / seconds


def staged(gpu: Gpu, nbytes: int) -> float:
    """The same through wancoll's staging: a tensor to pinned blocks of an arena, and a result from there to another."""
    fd, size = os.memfd_create("gpu-check"), 4 * nbytes + 16 * MIB
    os.ftruncate(fd, size)
    staging = Staging(Arena([fd, os.eventfd(0)], size))
    source, target = (region(WithInterface(gpu, np.zeros(nbytes, np.uint8)), "x") for _ in range(2))
    staging.check((source, target))
    input_buffer, result_buffer = staging.take(nbytes), staging.take(nbytes)

    def both() -> None:
        (to_device,) = staging.write([target], result_buffer.block.address, nbytes, result_buffer)  # is on its way
        staging.read(source, input_buffer.block.address, input_buffer, time.monotonic() + _SECONDS)
        assert staging.landed(to_device, time.monotonic() + _SECONDS)

    seconds = median(both)
    staging.close()
    gpu.free_all()
    return nbytes / seconds


def staging(gpu: Gpu, sizes: Sequence[int]) -> Iterator[Row]:
    """Staging, beside what the bus gives."""
    for nbytes in sizes:
        alone, ours = bus(gpu, nbytes), staged(gpu, nbytes)
        yield (
            f"staging of {format_size(nbytes)}, both ways at once", f"{ours / 1e9:.2f} GB/s",
            f"{ours / alone:.2f} of plain copies ({alone / 1e9:.2f}); at least {LEAST_STAGING}",
            verdict(ours / alone, LEAST_STAGING, gpu.lib is None),
        )  # fmt: skip


def median(act: Callable[[], object]) -> float:
    """Seconds that it takes; the first run warms."""
    act()
    found = []
    for _ in range(_RUNS):
        begun = time.perf_counter()
        act()
        found.append(time.perf_counter() - begun)
    return statistics.median(found)


# ---- all_reduce between processes ------------------------------------------------------------------------


def member(socket: str, library: str | None, group: str, nbytes: int) -> tuple[float, float, float]:
    """One member, in a process of its own: seconds for a tensor on the device, for one in the arena, and with int8."""
    gpu = Gpu(None if library is None else Path(library))
    with wancoll.connect(socket=socket, group=group, start_world=2, timeout=60) as comm:
        x = WithInterface(gpu, np.ones(nbytes // 4, np.float32))
        host = comm.zeros(nbytes // 4)

        def device(**how: Any) -> None:
            comm.all_reduce(x, op="max", timeout=_SECONDS, **how)
            gpu.on(0, "cuStreamSynchronize", x.stream)

        plain, main = median(device), median(lambda: comm.all_reduce(host, op="max", timeout=_SECONDS))
        return plain, main, median(lambda: device(codec="int8"))


def torch_member(_: str, backend: str, kind: str, rank: int, store: str, sizes: Sequence[int]) -> list[float]:
    """As member(), with torch's own backends; kind is torch's device type."""
    torch = importlib.import_module("torch")
    distributed = importlib.import_module("torch.distributed")
    device = torch.device(kind, rank % torch.cuda.device_count()) if kind == "cuda" else torch.device("cpu")
    distributed.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=2)
    found = []
    for nbytes in sizes:
        x = torch.ones(nbytes // 4, device=device)

        def once(x: Any = x) -> None:
            distributed.all_reduce(x, op=distributed.ReduceOp.MAX)
            if kind == "cuda":
                torch.cuda.synchronize(device)

        found.append(median(once))
    distributed.destroy_process_group()
    return found


def reduced(cluster: Cluster, gpu: Gpu, sizes: Sequence[int]) -> Iterator[Row]:
    """All_reduce of two processes: a device's tensor, beside main memory; then gloo and NCCL."""
    library = None if gpu.lib is None else str(gpu.lib._name)
    for nbytes in sizes:
        clients = [cluster.client(k, member, library, f"speed-{nbytes}", nbytes) for k in range(2)]
        device, host, coded = (max(each) for each in zip(*(client.result(_SECONDS) for client in clients), strict=True))
        yield (
            f"all_reduce of {format_size(nbytes)} on the device, 2 processes", f"{nbytes / device / 1e9:.2f} GB/s",
            f"{host / device:.2f} of main memory ({nbytes / host / 1e9:.2f}); at least {LEAST_REDUCED}",
            verdict(host / device, LEAST_REDUCED, gpu.lib is None),
        )  # fmt: skip
        yield (
            f"all_reduce of {format_size(nbytes)} on the device, int8", f"{nbytes / coded / 1e9:.2f} GB/s",
            f"{device / coded:.2f} of no codec; at least {LEAST_CODED}",
            verdict(device / coded, LEAST_CODED, gpu.lib is None),
        )  # fmt: skip
    for backend, kind in (("gloo", "cpu"), ("gloo", "cuda"), ("nccl", "cuda")):
        yield from others(cluster, backend, kind, sizes)


def others(cluster: Cluster, backend: str, kind: str, sizes: Sequence[int]) -> Iterator[Row]:
    """A backend of torch's on the same sizes, or why it is left out."""
    name = f"{backend} on {'the device' if kind == 'cuda' else 'main memory'}"
    try:
        torch = importlib.import_module("torch")
    except ImportError as bad:
        yield name, "left out", str(bad), ""
        return
    devices = torch.cuda.device_count()
    if kind == "cuda" and devices < (wanted := 2 if backend == "nccl" else 1):
        yield name, "left out", f"torch {torch.__version__} sees {devices} devices; it takes {wanted}", ""
        return
    with tempfile.TemporaryDirectory() as folder:
        store = f"{folder}/store"
        clients = [cluster.client(k, torch_member, backend, kind, k, store, list(sizes)) for k in range(2)]
        try:
            found = [max(pair) for pair in zip(*(client.result(_SECONDS) for client in clients), strict=True)]
        except ConfigError as bad:
            yield name, "left out", str(bad).splitlines()[0][:100], ""
            return
    for nbytes, seconds in zip(sizes, found, strict=True):
        yield f"all_reduce of {format_size(nbytes)}, {name}", f"{nbytes / seconds / 1e9:.2f} GB/s", "side by side", ""
