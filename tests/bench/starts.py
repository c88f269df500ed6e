"""`python -m tests.bench.starts`: how long it takes from nothing to a first result, where two of three are behind NATs.

A master and three daemons start by the line that is pasted, in network namespaces (root), the same number of times for
each of two groups: NATs that are punched, and a symmetric one, which needs the relay.
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any

import numpy as np
from cyclopts import App

from tests.bench.__main__ import machine
from tests.relay.nat import Nats
from wancoll.chaos import Cluster, in_threads

BAR = 15.0  # seconds
HOSTS = {"punched": ["open", "restricted", "restricted"], "relayed": ["open", "restricted", "symmetric"]}

app = App(name="python -m tests.bench.starts", help=__doc__)


@app.default
def bench(*, runs: int = 30) -> int:
    """Print medians and maxima, in brackets of connect and all_reduce alone; exit code 1 if one start was late."""
    print(machine(), flush=True)
    late = 0
    for what, kinds in HOSTS.items():
        took = [_start(kinds) for _ in range(runs)]
        whole, joined = ([one[i] for one in took] for i in range(2))
        middle, most = (f"{fold(whole):.1f} s ({fold(joined):.1f} s)" for fold in (statistics.median, max))
        print(f"{what}, {runs} starts: first result after {middle} in the median, {most} at most", flush=True)
        late += sum(one > BAR for one in whole)
    return 1 if late else 0


def _start(kinds: list[str]) -> tuple[float, float]:
    """Seconds from the start of the master to the first result of all, and from where all daemons are ready."""
    with Nats(kinds) as nats:
        began = time.monotonic()
        with Cluster(peers=3, network=nats, secure=True, master_args=["--relay=1Gbit/s"]) as cluster:
            ready = time.monotonic()
            tensors = [np.full(1000, i + 1.0, np.float32) for i in range(3)]

            def client(i: int) -> Any:
                comm = cluster.connect(i, start_world=3, min_world=3)
                return comm.all_reduce(tensors[i])

            in_threads(client, 3)
            now = time.monotonic()
            if not all((tensor == 6.0).all() for tensor in tensors):
                raise SystemExit("a value is wrong")
    return now - began, now - ready


if __name__ == "__main__":
    sys.exit(app())
