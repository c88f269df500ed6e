"""`python -m tests.bench.uplinks`: an all-reduce over two uplinks that differ, beside plain TCP streams over both.

Host 1 has an uplink of 300 and one of 200 Mbit/s, each way; host 0 has more than both. Streams and all-reduces take
turns. Then the second uplink is cut in mid-operation, and given back. Needs root: see tests/wan.
"""

from __future__ import annotations

import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import numpy as np
from cyclopts import App

from tests.bench.__main__ import machine
from tests.wan.network import DEVICE, SECOND, Host, Wan, why_not
from tests.wan.speed import RECEIVE, SEND
from tests.wan.uplinks import ENV, join_last, lose
from wancoll.chaos import Cluster, in_threads
from wancoll.peer.links.connections import kernel_view

RATES = 300e6, 200e6  # bits per second
PORTS = 1, 3  # of host 1 and its second device, to Wan
STREAMS = 4  # each way over each uplink
COUNT = 16 << 20  # elements of float32: 64 MiB
IN_FLIGHT = 8

app = App(name="python -m tests.bench.uplinks", help=__doc__)


@app.default
def uplinks(*, rounds: int = 5, seconds: float = 4.0, delay: float = 0.010) -> int:
    """Print the medians and their ratio. Exit code 1: a value was wrong.

    Args:
        rounds: in each, streams and all-reduces take turns.
        seconds: of streams in each round.
        delay: seconds one way.
    """
    if reason := why_not():
        print(f"no WAN here: {reason}", file=sys.stderr)
        return 2
    print(machine())
    ports: dict[Host, dict[str, float]] = {
        port: {"up": rate, "down": rate} for port, rate in zip(PORTS, RATES, strict=True)
    }
    with (
        Wan(peers=2, delay=delay, rate=1e9, second=[1], ports=ports) as wan,
        Cluster(peers=2, network=wan, peer_env=ENV) as cluster,
    ):
        comms = join_last(cluster)
        tensors = [[np.full(COUNT, i + 1.0, np.float32) for _ in range(IN_FLIGHT)] for i in range(2)]

        def reduce(i: int) -> tuple[float, int]:
            """Seconds, and the most attempts that one took."""
            for tensor in tensors[i]:
                tensor[:] = i + 1.0
            began = time.monotonic()
            handles = [comms[i].all_reduce(tensor, async_op=True) for tensor in tensors[i]]
            attempts = max(handle.wait().attempts for handle in handles)
            took = time.monotonic() - began
            assert all(np.array_equal(tensor, np.full(COUNT, 3.0, np.float32)) for tensor in tensors[i])
            return took, attempts

        in_threads(reduce, 2)
        plain, ours = [], []
        for _ in range(rounds):
            plain.append(_streams(wan, seconds))
            ours.append(IN_FLIGHT * COUNT * 4 * 8 / max(in_threads(reduce, 2))[0])
        low, high = statistics.median(plain), statistics.median(ours)
        print(f"plain streams {low / 1e6:.0f} Mbit/s each way, all-reduce {high / 1e6:.0f}: {high / low:.3f}")

        with ThreadPoolExecutor(1) as pool:
            cut = pool.submit(in_threads, reduce, 2)
            time.sleep(0.5)  # in the midst of what takes over two seconds
            lose(wan, PORTS[1], 1.0)
            print(f"the second one cut in mid-operation: {_told(cut.result())} for {IN_FLIGHT} of 64 MiB")
        print(f"over the first alone: {_told(in_threads(reduce, 2))}")
        lose(wan, PORTS[1], 0.0)
        back, before = time.monotonic(), wan.counters().sent_bytes(PORTS[1])
        with ThreadPoolExecutor(1) as pool:
            again = pool.submit(in_threads, lambda i: [reduce(i) for _ in range(3)], 2)
            while wan.counters().sent_bytes(PORTS[1]) - before < 1 << 20 and not again.done():
                time.sleep(0.01)
            print(f"a megabyte over the second one again after {time.monotonic() - back:.2f} s")
            print("then " + ", ".join(_told(pair) for pair in zip(*again.result(), strict=True)))
    return 0


def _told(results: Iterable[tuple[float, int]]) -> str:
    seconds, attempts = max(results)
    return f"{seconds:.1f} s" + (f", {attempts} attempts" if attempts > 1 else "")


def _streams(wan: Wan, seconds: float) -> float:
    """Bits per second of payload, each way, of the slower way: STREAMS over each uplink.

    Each end is a process of its own. The first quarter, in which TCP finds its rate, is not counted.
    """
    senders: tuple[list[socket.socket], ...] = [], []

    def arrived() -> list[int]:
        return [sum(info.bytes_acked for info in map(kernel_view, way) if info is not None) for way in senders]

    with ExitStack() as stack:
        with wan.inside(0):
            listener = stack.enter_context(socket.create_server((wan.address(0), 0)))
        for port, device in zip(PORTS, (DEVICE, SECOND), strict=True):
            for i in range(2 * STREAMS):
                with wan.inside(1):
                    near = socket.socket()
                near.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, device.encode())
                near.bind((wan.address(port), 0))
                near.connect(listener.getsockname())
                far, _ = listener.accept()
                for end, code in zip((near, far), (SEND, RECEIVE) if i % 2 else (RECEIVE, SEND), strict=True):
                    command = [sys.executable, "-c", code, str(end.fileno()), str(2 * seconds)]
                    process = subprocess.Popen(command, pass_fds=[end.fileno()])
                    stack.callback(process.wait)
                    stack.callback(process.kill)
                    stack.enter_context(end)
                senders[i % 2].append(near if i % 2 else far)
        time.sleep(seconds / 4)
        before, began = arrived(), time.monotonic()
        time.sleep(seconds * 3 / 4)
        after, took = arrived(), time.monotonic() - began
    return min(8 * (now - then) / took for now, then in zip(after, before, strict=True))


if __name__ == "__main__":
    sys.exit(app())
