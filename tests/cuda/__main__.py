"""make gpu-check: tensors of CUDA devices on a real device: right, aborted, flat, and how fast.

A table, also in build/ with the date and the device's name; the last column says what was missed, and so does the exit.
`python -m tests.cuda --stand-in` runs the same without a device, on the stand-in: its speeds mean nothing.
"""

from __future__ import annotations

import os
import platform
import random
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from tests.bench.report import table
from tests.cuda.gpu import DeviceArray, Gpu, build
from tests.cuda.kernels import kernels
from tests.cuda.speed import Row, reduced, staging
from tests.cuda.test_matrix import Member
from tests.faults.support import attempt, close_all, contribution, join, total
from wancoll.chaos import Cluster, in_threads
from wancoll.client.cuda.driver import Driver, driver
from wancoll.client.cuda.staging import PIECE
from wancoll.collective import DType
from wancoll.errors import ConfigError
from wancoll.limits import MIB

Found = tuple[str, str, str]

_FLAT = 16 * MIB  # a driver may take so much for itself


def correct(cluster: Cluster, gpu: Gpu) -> Iterator[Found]:
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


def aborted(cluster: Cluster, gpu: Gpu, times: int) -> Iterator[Found]:
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


def flat(cluster: Cluster, gpu: Gpu) -> Iterator[Found]:
    (comm,) = join(cluster, range(1))
    x = DeviceArray(gpu, np.ones(MIB // 4, np.float32), "dlpack")
    free = []
    for number in range(1000):
        comm.all_reduce(x, timeout=30)
        x._kept.clear()
        if number in (100, 999):
            free.append(gpu.on(0, "cuMemGetInfo")[0] if gpu.lib is None else gpu.counts()["memory"])
    comm.close()
    yield (
        "1000 operations",
        "ok" if abs(free[0] - free[1]) <= _FLAT else "WRONG",
        f"device memory {free[0]}, then {free[1]} bytes",
    )


def codecs(gpu: Gpu) -> Iterator[Found]:
    if gpu.lib is not None:
        yield "codecs on the device", "not run", "on the stand-in test_encode.py runs them"
        return
    gpu("cuCtxPushCurrent", gpu.contexts[0])
    try:
        yield from kernels(Driver(gpu.driver), gpu("cuDeviceGet", 0))
    finally:
        gpu("cuCtxPopCurrent")


@contextmanager
def device() -> Iterator[tuple[Gpu, str]]:
    """What is checked, and its name."""
    if "--stand-in" in sys.argv:
        with tempfile.TemporaryDirectory() as folder:
            yield Gpu(build(Path(folder))), "stand-in"
        return
    try:
        name = driver("make gpu-check")("cuDeviceGetName", 64, 0)
    except ConfigError as bad:
        sys.exit(f"There is no GPU that can be checked here. {bad}")
    yield Gpu(None), name.rstrip(bytes(1)).decode()


def judged(row: tuple[str, ...]) -> Row:
    """With a verdict in the last column: some parts have only what was found."""
    return (*row[:3], row[3] if len(row) > 3 else {"ok": "PASS", "WRONG": "MISS"}.get(row[1], ""))


def main() -> None:
    with device() as (gpu, name), Cluster(4) as cluster:
        small = gpu.lib is not None
        sizes = [MIB] if small else [64 * MIB, 256 * MIB, 1024 * MIB]
        parts: list[Callable[[], Iterator[tuple[str, ...]]]] = [
            lambda: correct(cluster, gpu),
            lambda: aborted(cluster, gpu, 3 if small else 20),
            lambda: flat(cluster, gpu),
            lambda: codecs(gpu),
            lambda: staging(gpu, sizes),
            lambda: reduced(cluster, gpu, sizes),
        ]
        rows: list[Row] = []
        for part in parts:
            for row in part():
                rows.append(judged(row))
                print(*rows[-1], sep="  ", flush=True)
    missed = sum(row[-1] == "MISS" for row in rows)
    today = time.strftime("%Y-%m-%d")
    text = "\n".join((
        f"make gpu-check, {today}: {name}, wancoll {version('wancoll')}, {platform.platform()}, {os.cpu_count()} cores",
        "", table(("what", "result", "", "verdict"), rows), "",
        f"{missed} missed" + (", on the stand-in: its speeds mean nothing and are not judged" if small else ""), "",
    ))  # fmt: skip
    path = Path("build") / f"gpu-check-{today}-{re.sub('[^A-Za-z0-9]+', '-', name)}.txt"
    path.parent.mkdir(exist_ok=True)
    path.write_text(text, encoding="utf-8")
    print(f"\n{text}\n{path}")
    sys.exit(missed > 0)


if __name__ == "__main__":
    main()
