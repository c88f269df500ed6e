"""`python -m tests.bench.lanes`: what many connections carry on a path where the window limits each of them (root)."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Annotated

from cyclopts import App, Parameter

from tests.bench.__main__ import machine
from tests.bench.contenders import WancollMember
from tests.bench.ranks import Ranks
from tests.bench.report import Bar, bar_table, table
from tests.wan.network import Wan, why_not
from tests.wan.units import SECONDS, parse
from wancoll.chaos import Cluster

KIB, MIB = 1 << 10, 1 << 20
LEAST = 12.0  # times from the fewest to the most
SMALLEST = 4096  # the system's least buffer of a socket

app = App(name="python -m tests.bench.lanes", help=__doc__)


@dataclass(frozen=True)
class Point:
    """With this many lanes: bytes per second of payload that each rank sends, and wrong values."""

    lanes: int
    rate: float
    wrong: int


@app.default
def bench_lanes(
    *,
    lanes: Annotated[tuple[int, ...], Parameter(negative=(), consume_multiple=True)] = (1, 2, 4, 8, 16, 32, 64, 128),
    delay: str = "40ms",
    buffer: int = 32 * KIB,
    each: int = MIB,
    iterations: int = 2,
    plot: str = "",
) -> int:
    """Measure an all-reduce of two ranks with each number of lanes. Exit code 1 if a value was wrong.

    Args:
        lanes: connections between the two, as in --lanes 1 4 16.
        delay: one way. The link itself has no limit.
        buffer: bytes of each socket's buffers, which bound what is on its way.
        each: bytes of the tensor for each lane, so that every point takes about as long.
        iterations: timed operations; the median counts.
        plot: also draw it into this file (PNG, SVG); needs matplotlib.
    """
    if reason := why_not():
        print(f"no WAN here: {reason}", file=sys.stderr)
        return 2
    print(machine(), flush=True)
    seconds = parse(delay, SECONDS)
    points = []
    for count in lanes:
        points.append(point := measure(count, seconds, buffer, each, iterations))
        print(f"{point.lanes} lanes: {point.rate * 8 / 1e6:.1f} Mbit/s", flush=True)
    one = points[0].rate
    rows = [[str(p.lanes), f"{p.rate * 8 / 1e6:.1f}", f"{p.rate / one:.1f}", str(p.wrong)] for p in points]
    print(f"\n{table(['lanes', 'Mbit/s', f'times {points[0].lanes}', 'wrong'], rows)}")
    what = f"{points[-1].lanes} lanes, times the speed of {points[0].lanes}"
    print(f"\n{bar_table([Bar(what, points[-1].rate / one, least=LEAST)])}")
    if plot:
        draw(points, f"{delay} one way, buffers of {buffer // KIB} KiB", plot)
    return 1 if any(p.wrong for p in points) else 0


def measure(lanes: int, delay: float, buffer: int, each: int, iterations: int) -> Point:
    """Two hosts, each with a daemon that keeps to this many lanes."""
    size = f"{min(buffer, SMALLEST)} {buffer} {buffer}"
    windows = {"net.ipv4.tcp_rmem": size, "net.ipv4.tcp_wmem": size}
    with (
        Wan(2, delay=delay, sysctls=windows) as wan,
        Cluster(2, lanes=lanes, network=wan, peer_args=["--max-lanes=0"]) as cluster,
    ):
        group = Ranks("wancoll", WancollMember, [(cluster.socket(i),) for i in range(2)])
        try:
            sample = group.measure("arena", each * lanes, iterations)
        finally:
            group.close()
    return Point(lanes, each * lanes / sample.seconds, sample.wrong)


def draw(points: list[Point], title: str, path: str) -> None:
    """Speed against lanes, both logarithmic."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4))
    axes.loglog([p.lanes for p in points], [p.rate * 8 / 1e6 for p in points], "o-", base=2)
    axes.set(xlabel="lanes", ylabel="payload, Mbit/s", title=title)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.grid(visible=True, which="both", alpha=0.3)
    figure.savefig(path, dpi=120, bbox_inches="tight")


if __name__ == "__main__":
    sys.exit(app(result_action="return_value"))
