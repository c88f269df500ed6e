"""`python -m tests.bench.diloco`: what outer steps cost of the tokens per second, between hosts that are far apart.

The inner steps are played: a process sleeps as if an accelerator computed, so that daemons and training do not fight
for this machine's processors. Parameters, differences, codec, network and outer optimizer are real.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import Annotated, Any

from cyclopts import App, Parameter

from tests.bench.__main__ import machine
from tests.bench.report import table
from tests.wan.network import Wan, why_not
from tests.wan.units import BITS, SECONDS, parse
from wancoll.chaos import Cluster

TOKENS = 1000  # of an inner step
PARTS = 16  # parameters of the model

app = App(name="python -m tests.bench.diloco", help=__doc__)


@app.default
def bench_diloco(
    *,
    peers: int = 4,
    delay: str = "40ms",
    rate: str = "200Mbit",
    millions: float = 8.0,
    step: float = 0.1,
    every: int = 50,
    rounds: int = 4,
    codecs: Annotated[tuple[str, ...], Parameter(negative=())] = ("int8", "none"),
) -> int:
    """Train with outer steps, in fragments under way and plain, and print tokens per second beside compute alone.

    Args:
        peers: each on a host of its own; the master is on another one, as far away.
        delay: one way.
        rate: of each host's uplink and downlink.
        millions: of parameters, float32.
        step: seconds that an inner step computes.
        every: inner steps of a round.
        rounds: that are measured, after one to warm up.
        codecs: of the differences.
    """
    if reason := why_not():
        print(f"no WAN here: {reason}", file=sys.stderr)
        return 2
    print(machine())
    print(
        f"{peers} peers, {delay} one way, {rate} each; {millions:g} M parameters, {every} steps of {step:g} s a round\n"
    )
    alone = 0.0  # tokens a second of compute alone, measured here and now
    ways = {"4 fragments, under way for 10 steps": (4, min(10, every // 4)), "plain": (1, 0)}
    rows = []
    with Wan(peers, delay=parse(delay, SECONDS), rate=parse(rate, BITS)) as wan, Cluster(peers, network=wan) as cluster:
        clients = [cluster.client(i, computing, rounds * every, step) for i in range(peers)]
        alone = TOKENS * peers * rounds * every / max(client.next(600) for client in clients)
        rows.append(["", "compute alone", f"{alone:.0f}", "100%", ""])
        for codec in codecs:
            for way, (fragments, under_way) in ways.items():
                options = {"every": every, "fragments": fragments, "delay": under_way, "codec": codec}
                group = f"{codec}-{fragments}"
                arguments = group, peers, int(millions * 1e6), step, rounds, options
                clients = [cluster.client(i, member, *arguments) for i in range(peers)]
                seconds, sent, outer = zip(*(client.next(600) for client in clients), strict=True)
                assert len(set(outer)) == 1, "members have different outer parameters"
                speed = TOKENS * peers * rounds * every / max(seconds)
                rows.append([codec, way, f"{speed:.0f}", f"{speed / alone:.1%}", f"{max(sent) / rounds / 1e6:.1f}"])
                for client in clients:
                    client.close()
    print(table(["codec", "outer steps", "tokens/s", "of compute alone", "MB sent a round"], rows))
    return 0


def computing(socket: str, steps: int, step: float) -> Iterator[float]:
    """Yields the seconds that the inner steps take alone."""
    began = time.monotonic()
    for _ in range(steps):
        time.sleep(step)
    yield time.monotonic() - began


def member(
    socket: str, group: str, world: int, count: int, step: float, rounds: int, options: dict[str, Any]
) -> Iterator[tuple[float, int, int]]:
    """Yields the seconds that the measured rounds took, the bytes sent in them, and a hash of the outer parameters."""
    import torch
    import xxhash

    import wancoll
    from wancoll.torch import DiLoCo

    torch.set_num_threads(1)
    parameters = [torch.nn.Parameter(torch.randn(count // PARTS)) for _ in range(PARTS)]
    diloco = DiLoCo(parameters, mixing=0.5 if options["delay"] else 0.0, **options)
    every, sent = options["every"], 0
    with wancoll.connect(socket=socket, group=group, start_world=world) as comm:
        diloco.join(comm)
        began = 0.0
        while diloco.steps < (rounds + 1) * every:
            if diloco.steps == every:
                comm.barrier()
                began, sent = time.monotonic(), 0
            time.sleep(step)
            sent += sum(record.receipt.bytes_sent for record in diloco.step(TOKENS))
        seconds = time.monotonic() - began
        told = xxhash.xxh3_64()
        for outer in diloco.outer:
            told.update(outer.numpy().tobytes())
        comm.barrier()
    yield seconds, sent, told.intdigest()


if __name__ == "__main__":
    sys.exit(app(result_action="return_value"))
