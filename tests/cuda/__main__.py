"""make gpu-check: tensors of CUDA devices on a real device: right, aborted, flat, and how fast; as a table.

`python -m tests.cuda --stand-in` runs the same without a device, on the stand-in: its speeds mean nothing.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from tests.bench.report import table
from tests.cuda.gpu import DeviceArray, Gpu, build
from tests.cuda.kernels import kernels
from tests.cuda.test_matrix import Member
from tests.faults.support import attempt, close_all, contribution, join, total
from wancoll.chaos import Cluster, in_threads
from wancoll.client.cuda.driver import Driver, driver
from wancoll.client.cuda.staging import PIECE
from wancoll.collective import DType
from wancoll.errors import ConfigError
from wancoll.limits import MIB, format_size

Row = tuple[str, str, str]


def correct(cluster: Cluster, gpu: Gpu) -> Iterator[Row]:
    counts = [0, 1, 1024, *([] if gpu.lib is not None else [PIECE + 1])]
    for world in (1, 2, 4):
        comms = sorted(join(cluster, range(world)), key=lambda comm: comm.rank)

        def run(where: Gpu | None, dtype: DType, count: int, comms: Any = comms) -> list[list[bytes]]:
            return in_threads(lambda rank: Member(comms[rank], where, dtype, rank).run(count), len(comms))

        for dtype in DType:
            for count in counts:
                if run(None, dtype, count) != run(gpu, dtype, count):
                    yield f"all collectives, {dtype.name} x {count}, world {world}", "WRONG", "differs from the host's"
                gpu.free_all()
        close_all(comms)
        yield f"all collectives, world {world}", "ok", f"{len(DType)} dtypes, {counts} elements, as in main memory"


def aborted(cluster: Cluster, gpu: Gpu, times: int) -> Iterator[Row]:
    for number in range(times):
        comms = join(cluster, range(4))
        tensors = [DeviceArray(gpu, contribution(k, 16 * MIB // 4), "dlpack") for k in range(4)]
        victim = random.randrange(1, 4)

        def member(k: int, comms: Any = comms, tensors: Any = tensors, victim: int = victim) -> Any:
            if k == victim:
                time.sleep(random.uniform(0, 0.1))  # the random moment is the check
                cluster.kill(victim)
            return attempt(lambda: comms[k].all_reduce(tensors[k], timeout=30)) if k != victim else None

        for k, outcome in enumerate(in_threads(member, 4)):
            wanted = 10**k if outcome is None or outcome.receipt is None else total(outcome.receipt.contributors)
            if not (tensors[k].get() == np.float32(wanted)).all():
                yield f"kill {number}, member {k}", "WRONG", f"neither the result nor untouched: {outcome}"
        close_all(comms)
        cluster.restart_peer(victim)
        gpu.free_all()
    yield f"{times} kills", "ok", "each tensor is the result of those named, or untouched"


def flat(cluster: Cluster, gpu: Gpu) -> Iterator[Row]:
    (comm,) = join(cluster, range(1))
    x = DeviceArray(gpu, np.ones(MIB // 4, np.float32), "dlpack")
    free = []
    for number in range(1000):
        comm.all_reduce(x, timeout=30)
        x._kept.clear()
        if number in (100, 999):
            free.append(gpu.on(0, "cuMemGetInfo")[0] if gpu.lib is None else gpu.counts()["memory"])
    comm.close()
    yield "1000 operations", "ok" if free[0] == free[1] else "WRONG", f"device memory {free[0]}, then {free[1]} bytes"


def fast(cluster: Cluster, gpu: Gpu, sizes: list[int]) -> Iterator[Row]:
    comms = join(cluster, range(2))
    for nbytes in sizes:
        values = np.ones(nbytes // 4, np.float32)
        tensors = [DeviceArray(gpu, values, "dlpack") for _ in range(2)]
        hosts = [comm.empty(values.shape) for comm in comms]

        def seconds(given: list[Any]) -> float:
            found = []
            for _ in range(5):
                begun = time.perf_counter()
                in_threads(lambda k: comms[k].all_reduce(given[k], op="max", timeout=60), 2)
                found.append(time.perf_counter() - begun)
            return sorted(found)[2]

        device, host = seconds(tensors), seconds(hosts)
        gpu.free_all()
        yield (
            f"all_reduce of {format_size(nbytes)}, 2 members", f"{nbytes / device / 1e9:.2f} GB/s",
            f"{host / device:.2f} of the same in the arena, {nbytes / host / 1e9:.2f} GB/s",
        )  # fmt: skip
    close_all(comms)


def copies(gpu: Gpu, nbytes: int) -> Iterator[Row]:
    """What the bus gives: pinned copies both ways at once, and nothing else."""
    values = np.zeros(nbytes, np.uint8)
    a, b = DeviceArray(gpu, values), DeviceArray(gpu, values)
    pinned = [int(gpu.on(0, "cuMemHostAlloc", nbytes, 1)) for _ in range(2)]
    begun = time.perf_counter()
    for _ in range(5):
        gpu.on(0, "cuMemcpyDtoHAsync", pinned[0], a.address, nbytes, a.stream)
        gpu.on(0, "cuMemcpyHtoDAsync", b.address, pinned[1], nbytes, b.stream)
    for x in (a, b):
        gpu.on(0, "cuStreamSynchronize", x.stream)
    spent = time.perf_counter() - begun
    for address in pinned:
        gpu.on(0, "cuMemFreeHost", address)
    gpu.free_all()
    yield f"pinned copies of {format_size(nbytes)}", f"{5 * nbytes / spent / 1e9:.2f} GB/s", "each way, both at once"


def codecs(gpu: Gpu) -> Iterator[Row]:
    if gpu.lib is not None:
        yield "codecs on the device", "not run", "on the stand-in test_encode.py runs them"
        return
    gpu("cuCtxPushCurrent", gpu.contexts[0])
    try:
        yield from kernels(Driver(gpu.driver), gpu("cuDeviceGet", 0))
    finally:
        gpu("cuCtxPopCurrent")


@contextmanager
def device() -> Iterator[Gpu]:
    if "--stand-in" in sys.argv:
        with tempfile.TemporaryDirectory() as folder:
            yield Gpu(build(Path(folder)))
        return
    try:
        name = driver("make gpu-check")("cuDeviceGetName", 64, 0)
    except ConfigError as bad:
        sys.exit(f"There is no GPU that can be checked here. {bad}")
    print(f"device: {name.rstrip(bytes(1)).decode()}")
    yield Gpu(None)


def main() -> None:
    with device() as gpu, Cluster(4) as cluster:
        small = gpu.lib is not None
        parts: list[Callable[[], Iterator[Row]]] = [
            lambda: correct(cluster, gpu),
            lambda: aborted(cluster, gpu, 3 if small else 20),
            lambda: flat(cluster, gpu),
            lambda: codecs(gpu),
            lambda: copies(gpu, 64 * MIB),
            lambda: fast(cluster, gpu, [MIB] if small else [MIB, 64 * MIB, 256 * MIB, 1024 * MIB]),
        ]
        rows = []
        for part in parts:
            for row in part():
                print(*row, sep="  ", flush=True)
                rows.append(row)
    print()
    print(table(("what", "result", ""), rows))
    sys.exit(any(result == "WRONG" for _, result, _ in rows))


if __name__ == "__main__":
    main()
