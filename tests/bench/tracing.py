"""`python -m tests.bench.tracing`: what `wancoll trace` costs while it runs, in turns with and without it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Annotated

from cyclopts import App, Parameter

from tests.bench.__main__ import machine
from tests.bench.contenders import wancoll_ranks
from tests.bench.cost import cpu_seconds
from wancoll.chaos import Cluster
from wancoll.net.unix import connect_local
from wancoll.wire.framing import encode
from wancoll.wire.messages import TraceRequest

RANKS = 2
SIZE = 4096

app = App(name="python -m tests.bench.tracing", help=__doc__)


@contextmanager
def traced(cluster: Cluster) -> Iterator[None]:
    """All daemons are, while the block runs; who asked then hangs up, and nothing is written."""
    with ExitStack() as stack:
        for k in range(RANKS):
            connection = stack.enter_context(connect_local(cluster.socket(k), 60))
            connection.sendall(encode(TraceRequest(600.0)))
        _until(cluster, True)
        yield
    _until(cluster, False)


def _until(cluster: Cluster, wanted: bool) -> None:
    while any(cluster.peer_status(k)["traced"] is not wanted for k in range(RANKS)):
        time.sleep(0.01)


@app.default
def bench(
    turns: Annotated[int, Parameter(help="Of each kind.")] = 20,
    iterations: Annotated[int, Parameter(help="Operations of a turn.")] = 1000,
) -> None:
    """Print medians over the turns: seconds of an all-reduce of 4 KiB, and of the processor for it in a daemon."""
    print(machine())
    took: dict[bool, list[float]] = {False: [], True: []}
    cpu: dict[bool, list[float]] = {False: [], True: []}
    with Cluster(RANKS) as cluster:
        ranks = wancoll_ranks(cluster, "wancoll", RANKS)
        try:
            ranks.measure("arena", SIZE, iterations)
            for turn in range(2 * turns):
                on = turn % 4 in (1, 2)  # off, on, on, off: a drift hits both
                with traced(cluster) if on else ExitStack():
                    before = sum(cpu_seconds(cluster.pid(k)) for k in range(RANKS))
                    sample = ranks.measure("arena", SIZE, iterations)
                    after = sum(cpu_seconds(cluster.pid(k)) for k in range(RANKS))
                assert not sample.wrong
                took[on].append(sample.seconds)
                cpu[on].append((after - before) / RANKS / iterations)
        finally:
            ranks.close()
    for what, found in (("an operation", took), ("processor time of a daemon for one", cpu)):
        off, on = (statistics.median(found[each]) for each in (False, True))
        pairs = statistics.median(b / a for a, b in zip(found[False], found[True], strict=True))
        print(f"{what}: {1e6 * off:.0f} us, traced {1e6 * on:.0f} us; median of the turns' ratios {pairs:.3f}")


if __name__ == "__main__":
    app()
