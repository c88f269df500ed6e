"""`python -m tests.bench.relay`: how much of its own link a relay carries between two members that need it.

Two hosts cannot reach each other, only the master's, which is a relay. What either sends goes over the relay's uplink,
and its downlink: an all-reduce of n bytes is to take 2 n / rate.
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import Annotated

import numpy as np
from cyclopts import App, Parameter

from tests.bench.__main__ import machine
from tests.wan.network import Wan
from tests.wan.units import BITS, SECONDS, parse
from wancoll.chaos import Cluster, in_threads

MIB = 1 << 20
BAR = 0.9  # of what the relay's link carries

app = App(name="python -m tests.bench.relay", help=__doc__)


@app.default
def bench(
    *,
    rate: Annotated[str, Parameter(help="Of the relay's uplink and downlink.")] = "200Mbit",
    delay: Annotated[str, Parameter(help="Seconds one way between two hosts.")] = "10ms",
    size: Annotated[int, Parameter(help="MiB of a tensor.")] = 64,
    rounds: int = 7,
) -> int:
    """Measure, and print the median; exit code 1 if a value was wrong."""
    bits, one_way = parse(rate, BITS), parse(delay, SECONDS)
    print(machine(), flush=True)
    with Wan(peers=2, delay=one_way) as wan:  # the relay's link alone is slow
        wan.change_port("master", up=bits, down=bits)
        for ends in ((0, 1), (1, 0)):
            wan.change_path(*ends, loss=1.0)
        with Cluster(peers=2, network=wan, master_args=["--relay=100Gbit/s"]) as cluster:
            comms = in_threads(lambda i: cluster.connect(i, start_world=2, min_world=2), 2)
            tensors = [np.ones(size * MIB // 4, np.float32) for _ in range(2)]
            seconds = []
            for k in range(rounds + 2):  # the first two are warming up
                began = time.monotonic()
                in_threads(lambda i: comms[i].all_reduce(tensors[i]), 2)
                if k > 1:
                    seconds.append(time.monotonic() - began)
                wrong = [float(tensor[0]) for tensor in tensors if not (tensor == 2.0 ** (k + 1)).all()]
                if wrong:
                    print(f"wrong: {wrong}")
                    return 1
    ideal = 2 * size * MIB * 8 / bits
    share = ideal / statistics.median(seconds)
    took = ", ".join(f"{one:.2f}" for one in sorted(seconds))
    print(f"{size} MiB over {rate}, {delay} one way: {took} s; {share:.1%} of the relay's link (bar {BAR:.0%})")
    return 0


if __name__ == "__main__":
    sys.exit(app())
