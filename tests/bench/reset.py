"""`python -m tests.bench.reset`: all-reduces over a long path, in turns with and without resets of single lanes."""

from __future__ import annotations

import random
import re
import statistics
import subprocess
import threading
import time
from typing import Annotated, Any

import numpy as np
from cyclopts import App, Parameter

from tests.bench.__main__ import machine
from tests.faults.support import Background, close_all, join, new_group
from tests.wan.network import Wan
from tests.wan.units import BITS, SECONDS, parse
from wancoll.chaos import Cluster

MIB = 1 << 20
BUSY = 100_000  # bytes that a connection has carried, if it is a lane for data

app = App(name="python -m tests.bench.reset", help=__doc__)


def lanes_of(wan: Wan) -> list[tuple[str, str]]:
    """Ports of the lanes for data from the first host to the second one, here and there."""
    command = ["ss", "-tinH", "state", "established"]
    lines = wan.popen(0, command, stdout=subprocess.PIPE, text=True).communicate()[0].splitlines()
    found = []
    for head, more in zip(lines[::2], lines[1::2], strict=True):
        _, _, here, there = head.split()[:4]
        acked = re.search(r"bytes_acked:(\d+)", more)
        if there.startswith(wan.address(1)) and acked and int(acked[1]) > BUSY:
            found.append((here.rsplit(":", 1)[1], there.rsplit(":", 1)[1]))
    return found


def reset_one(wan: Wan) -> bool:
    """Let the kernel reset one of them, at both ends. Returns whether there was one."""
    lanes = lanes_of(wan)
    if lanes:
        here, there = random.choice(lanes)
        kill = ["ss", "-K", "sport", "=", here, "dport", "=", there]
        wan.popen(0, kill, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).wait()
    return bool(lanes)


@app.default
def measure(
    *,
    size: int = 64,
    rounds: int = 6,
    every: float = 1.0,
    delay: Annotated[float, Parameter(converter=lambda _, tokens: parse(tokens[0].value, SECONDS))] = 0.04,
    rate: Annotated[float, Parameter(converter=lambda _, tokens: parse(tokens[0].value, BITS))] = 200e6,
) -> None:
    """Two hosts, 8 lanes.

    Args:
        size: MiB of float32.
        rounds: operations of each kind.
        every: seconds between two resets.
        delay: one way.
        rate: of each host's uplink.
    """
    print(machine())
    with Wan(2, delay=delay, rate=rate) as wan, Cluster(2, lanes=8, network=wan) as cluster:
        comms = join(cluster, range(2), group=new_group())
        tensors = [np.ones(size * MIB // 4, np.float32) for _ in comms]

        def seconds() -> float:
            began = time.monotonic()
            running: Any = Background(lambda i: comms[i].all_reduce(tensors[i], op="max"), 2)
            receipts = running.results(300)
            assert all(receipt.attempts == 1 and receipt.epoch == 1 for receipt in receipts), (
                "it cost a round or an epoch"
            )
            return time.monotonic() - began

        calm, broken, resets = [], [], 0
        for _ in range(3):
            seconds()
        for _ in range(rounds):
            calm.append(seconds())
            ended, count = threading.Event(), [0]

            def reset(ended: threading.Event = ended, count: list[int] = count) -> None:
                while not ended.wait(every):
                    count[0] += reset_one(wan)

            thread = threading.Thread(target=reset)
            thread.start()
            try:
                broken.append(seconds())
            finally:
                ended.set()
                thread.join()
            resets += count[0]
        close_all(comms)
    quiet, torn = statistics.median(calm), statistics.median(broken)
    torn_by = f"{torn:.2f} s with {resets} resets in {rounds} operations"
    print(f"{quiet:.2f} s without, {torn_by}: {quiet / torn:.3f} of the speed")


if __name__ == "__main__":
    app()
