"""`python -m tests.bench.diloco`: what outer steps cost of the tokens per second, between hosts that are far apart.

The inner steps are played: a process sleeps as if an accelerator computed, so that daemons and training do not fight
for this machine's processors, and then changes some of its parameters. Parameters, differences, codec, network and
outer optimizer are real. Compute alone is the same loop in the same processes, without outer steps, before and after.
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
    codecs: Annotated[tuple[str, ...], Parameter(negative=(), consume_multiple=True)] = ("int8", "none"),
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
    print(f"{peers} peers, {delay} one way, {rate} each; {millions:g} M parameters, {every} steps a round")
    print(f"a step is played: {step:g} s of sleep, then a change of {100 / PARTS:g} % of the parameters")
    print("alone: the same loop without outer steps, in the same processes, before and after\n")
    most = min(10, every // 4)
    ways = {f"4 fragments, under way for {most} steps": (4, most), "plain": (1, 0)}
    rows = []
    with Wan(peers, delay=parse(delay, SECONDS), rate=parse(rate, BITS)) as wan, Cluster(peers, network=wan) as cluster:
        for codec in codecs:
            for way, (fragments, under_way) in ways.items():
                options = {"every": every, "fragments": fragments, "delay": under_way, "codec": codec}
                group = f"{codec}-{fragments}"
                arguments = group, peers, int(millions * 1e6), step, rounds, options
                clients = [cluster.client(i, member, *arguments) for i in range(peers)]
                seconds, alone, sent, outer = zip(*(client.next(600) for client in clients), strict=True)
                assert len(set(outer)) == 1, "members have different outer parameters"
                tokens = TOKENS * peers * rounds * every
                rows.append(
                    [
                        codec, way, f"{tokens / max(seconds):.0f}", f"{tokens / max(alone):.0f}",
                        f"{max(alone) / max(seconds):.1%}", f"{max(sent) / rounds / 1e6:.1f}",
                    ]
                )  # fmt: skip
                for client in clients:
                    client.close()
    print(table(["codec", "outer steps", "tokens/s", "alone", "of it", "MB sent a round"], rows))
    return 0


def member(
    socket: str, group: str, world: int, count: int, step: float, rounds: int, options: dict[str, Any]
) -> Iterator[tuple[float, float, int, int]]:
    """Yields seconds with outer steps and without, bytes sent, of the measured rounds, and the outer parameters' hash.

    The rounds begin with a fragment under way, and end with one: what is left of a round's work is work of the next.
    """
    import torch
    import xxhash

    import wancoll
    from wancoll.torch import DiLoCo

    torch.set_num_threads(1)
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(count // PARTS)) for _ in range(PARTS)]
    diloco = DiLoCo(parameters, mixing=0.5 if options["delay"] else 0.0, **options)
    every = options["every"]

    def compute(number: int) -> None:
        with torch.no_grad():
            parameters[number % PARTS].mul_(0.999)
        time.sleep(step)

    def alone(comm: wancoll.Communicator) -> float:
        """Seconds of half as many steps."""
        comm.barrier()
        began = time.monotonic()
        for number in range(rounds * every // 2):
            compute(number)
        return time.monotonic() - began

    def train(last: int) -> int:
        """Bytes sent up to that step."""
        sent = 0
        while diloco.steps < last:
            compute(diloco.steps)
            sent += sum(record.receipt.bytes_sent for record in diloco.step(TOKENS))
        return sent

    with wancoll.connect(socket=socket, group=group, start_world=world) as comm:
        diloco.join(comm)
        before = alone(comm)
        train(every)  # to warm up; a barrier here would be waited for where members join
        began = time.monotonic()
        sent = train((rounds + 1) * every)
        seconds = time.monotonic() - began
        train((rounds + 1) * every + options["delay"])  # until nothing is under way
        told = xxhash.xxh3_64()
        for outer in diloco.outer:
            told.update(outer.numpy().tobytes())
        after = alone(comm)
        comm.barrier()
    yield seconds, before + after, sent, told.intdigest()


if __name__ == "__main__":
    sys.exit(app(result_action="return_value"))
