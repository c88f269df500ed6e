"""`make bench-wan`: all-reduce between hosts that are far apart: wancoll, gloo and the bare C ring in turn."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Parameter

from tests.bench.__main__ import machine
from tests.bench.contenders import CRing, GlooMember, WancollMember, compile_ring
from tests.bench.ranks import Ranks, Sample
from tests.bench.report import size_name, table
from tests.wan.__main__ import PORT_UNITS, override
from tests.wan.network import DEVICE, Host, Wan, why_not
from tests.wan.units import BITS, RATIO, SECONDS, parse
from wancoll.chaos import Cluster
from wancoll_master.plan.shares import busiest, share_out

KIB, MIB = 1 << 10, 1 << 20
SIZES = {64 * KIB: 5, 64 * MIB: 2}  # bytes -> timed operations a round
LANES = 8
WANCOLL, GLOO = "wancoll", "gloo"
RINGS = {"C ring, 1 connection": 1, f"C ring, {LANES} connections": LANES}
PERF_TIMEOUT = 300.0

app = App(name="python -m tests.bench.wan", help=__doc__)
Measure = Callable[[int, int], Sample]


@dataclass(frozen=True)
class Setting:
    """A network: seconds one way, bits per second of each host's uplink and downlink, ratio of lost packets."""

    ranks: int
    delay: float
    rate: float
    loss: float
    congestion_control: str
    ports: tuple[str, ...] = ()  # what is different at a host, as in `python -m tests.wan up --port`

    def __str__(self) -> str:
        chosen = self.congestion_control or Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()
        return (
            f"{self.ranks} ranks, {self.delay * 1e3:g} ms one way, {self.rate / 1e6:g} Mbit/s each, "
            f"loss {self.loss:.4%}, {chosen} by default{''.join(f'; host {port}' for port in self.ports)}"
        )

    def different(self) -> dict[Host, dict[str, float]]:
        """The ports, by host."""
        return {host: settings for (host,), settings in (override(port, 1, PORT_UNITS) for port in self.ports)}

    def speeds(self) -> list[float]:
        """Bits per second of each host, of the slower direction."""
        ports = self.different()
        return [min(ports.get(i, {}).get(way, self.rate) for way in ("up", "down")) for i in range(self.ranks)]


@dataclass
class Result:
    """One median a round: contender -> size -> seconds, and packets sent beyond those that the data needs (ratio)."""

    setting: Setting
    seconds: dict[str, dict[int, list[float]]] = field(default_factory=dict)
    sent: dict[str, dict[int, list[float]]] = field(default_factory=dict)
    wrong: dict[str, int] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    late: float = 0.0  # seconds that the network's deliveries came later than asked, on average
    late_max: float = 0.0
    in_flight: int = 0
    together: float = 0.0  # seconds for one of the largest operations with so many in flight

    def median(self, name: str, size: int) -> float | None:
        """Seconds; None where it has failed."""
        values = self.seconds.get(name, {}).get(size)
        return statistics.median(values) if values else None

    def filled(self, name: str, size: int) -> float | None:
        """How much of the link its median fills."""
        seconds = self.median(name, size)
        return None if seconds is None else self.share(size, seconds)

    def share(self, size: int, seconds: float) -> float:
        """The least time that the hosts' rates allow, as a ratio of what it took (TCP's best is 0.965)."""
        return size * 8 * least(self.setting.speeds()) / seconds


def payload(size: int, ranks: int) -> float:
    """Bytes that each rank sends at least."""
    return 2 * (ranks - 1) / ranks * size


def least(speeds: list[float]) -> float:
    """Seconds for each bit of the tensor that an all-reduce takes: see wancoll_master.plan.shares."""
    return busiest(share_out(speeds, gain=1.0), speeds)


@app.default
def bench_wan(
    *,
    ranks: Annotated[
        tuple[int, ...], Parameter(help="Numbers of ranks, as in --ranks 2 4 8.", negative=(), consume_multiple=True)
    ] = (2, 4),
    losses: Annotated[tuple[str, ...], Parameter(name="--loss", negative=())] = ("0", "0.1%"),
    delay: str = "40ms",
    rate: str = "500Mbit",
    port: Annotated[tuple[str, ...], Parameter(negative=())] = (),
    congestion_control: str = "",
    rounds: int = 3,
    contenders: Annotated[tuple[str, ...], Parameter(negative=(), consume_multiple=True)] = (WANCOLL, GLOO, *RINGS),
    perf: bool = True,
    in_flight: int = 4,
    as_json: Annotated[str, Parameter(name="--json")] = "",
) -> int:
    """Measure on each network, print tables. Exit code 1 if a value was wrong.

    Args:
        ranks: numbers of ranks, each on a host of its own; wancoll's master is on another one, as far away.
        losses: ratios of lost packets, such as 0.1%.
        delay: one way.
        rate: of each host's uplink and downlink.
        port: what is different at a host: --port 0,up=110Mbit --port 1,up=40Mbit
        congestion_control: of TCP where a program does not choose; by default this machine's.
        rounds: in each, all contenders take turns.
        contenders: which.
        perf: run `wancoll perf` on each network, too.
        in_flight: also measure wancoll with so many of the largest operations at a time; 0: don't.
        as_json: also write all numbers to this file.
    """
    if reason := why_not():
        print(f"no WAN here: {reason}", file=sys.stderr)
        return 2
    begin = time.monotonic()
    print(machine(), flush=True)
    results = []
    for count in ranks:
        for loss in losses:
            setting = Setting(
                count, parse(delay, SECONDS), parse(rate, BITS), parse(loss, RATIO), congestion_control, port
            )
            print(f"\n{setting}", flush=True)
            results.append(result := measure(setting, rounds, contenders, perf, in_flight))
            print(tables(result), flush=True)
    print(f"\n{time.monotonic() - begin:.0f} s")
    if as_json:
        Path(as_json).write_text(json.dumps([asdict(result) for result in results], indent=2))
    return 1 if any(sum(result.wrong.values()) for result in results) else 0


def measure(setting: Setting, rounds: int, names: tuple[str, ...], perf: bool, in_flight: int) -> Result:
    """All contenders in turn on one network; each lives throughout and sleeps while another is measured."""
    result = Result(setting)
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="wancoll-bench-"))
        wan = stack.enter_context(
            Wan(
                setting.ranks,
                delay=setting.delay,
                rate=setting.rate,
                loss=setting.loss,
                ports=setting.different(),
                congestion_control=setting.congestion_control,
            )
        )
        cluster = stack.enter_context(Cluster(setting.ranks, lanes=LANES, network=wan))
        contenders = dict(_start(stack, wan, cluster, folder, names))
        for turn in range(rounds):
            for size, iterations in SIZES.items():
                order = list(contenders)
                for name in order[turn % len(order) :] + order[: turn % len(order)]:
                    if name not in result.failed:
                        _one(result, wan, name, contenders[name], size, iterations)
        if perf:
            print(_perf(wan, cluster, SIZES), flush=True)
        if in_flight:
            result.in_flight, result.together = in_flight, _in_flight(wan, cluster, in_flight)
        counters = wan.counters()
        result.late, result.late_max = counters.late / max(1, counters.deliveries), counters.late_max
    return result


def _one(result: Result, wan: Wan, name: str, run: Measure, size: int, iterations: int) -> None:
    hosts = range(result.setting.ranks)
    before = sum(wan.counters().sent_bytes(host) for host in hosts)
    try:
        sample = run(size, iterations)
    except (TimeoutError, RuntimeError) as bad:
        result.failed[name] = str(bad).strip().splitlines()[-1]
        return
    sent = sum(wan.counters().sent_bytes(host) for host in hosts) - before
    first = size not in result.seconds.get(name, {})
    operations = iterations + (2 if first or name in RINGS else 1)  # a checked one, and one to warm up
    needed = operations * len(hosts) * payload(size, len(hosts))
    result.seconds.setdefault(name, {}).setdefault(size, []).append(sample.seconds)
    result.sent.setdefault(name, {}).setdefault(size, []).append(sent / needed)
    result.wrong[name] = result.wrong.get(name, 0) + sample.wrong


def _start(
    stack: ExitStack, wan: Wan, cluster: Cluster, folder: str, names: tuple[str, ...]
) -> Iterator[tuple[str, Measure]]:
    hosts = range(wan.peers)

    def of(group: Any, mode: str = "") -> Measure:
        stack.callback(group.close)
        return lambda nbytes, iterations: group.measure(mode, nbytes, iterations)

    if WANCOLL in names:
        yield WANCOLL, of(Ranks(WANCOLL, WancollMember, [(cluster.socket(i),) for i in hosts]), "arena")
    if GLOO in names and find_spec("torch"):
        places = [wan.inside(i) for i in hosts]
        yield GLOO, of(Ranks(GLOO, GlooMember, [(folder, DEVICE)] * wan.peers, places))
    binary = compile_ring(folder)
    at = [f"--host={wan.address(i)}@{wan.namespace(i)}" for i in hosts]
    for name, connections in RINGS.items():
        if name in names:
            yield name, of(CRing(wan.peers, binary, f"--connections={connections}", *at))


def _in_flight(wan: Wan, cluster: Cluster, count: int) -> float:
    """Seconds for one of the largest operations, where *count* of them are under way at a time."""
    said = _perf(wan, cluster, [max(SIZES)], f"--async={count}", "--json")
    try:
        return float(json.loads(said)["rows"][0]["time"])
    except ValueError:
        raise RuntimeError(f"wancoll perf failed:\n{said}") from None


def _perf(wan: Wan, cluster: Cluster, sizes: Collection[int], *more: str) -> str:
    """What `wancoll perf` prints, as one rank on each host."""
    span = [f"--min-bytes={min(sizes)}", f"--max-bytes={max(sizes)}", f"--factor={max(2, max(sizes) // min(sizes))}"]
    options = [f"--peers={wan.peers}", "--iters=2", "--warmup=1", f"--timeout={PERF_TIMEOUT}", *more]
    perf = [sys.executable, "-m", "wancoll", "perf", "all_reduce", *span, *options]
    processes = [
        wan.popen(
            i, [*perf, f"--socket={cluster.socket(i)}"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for i in range(wan.peers)
    ]
    outputs = [process.communicate()[0] for process in processes]
    return outputs[0]


def tables(result: Result) -> str:
    """A table for each size."""
    parts = []
    rings = [name for name in RINGS if name in result.seconds]
    for size in SIZES:
        best = min(rings, key=lambda name: result.median(name, size) or float("inf"), default="")
        rows = []
        for name in result.seconds:
            seconds, filled = result.median(name, size), result.filled(name, size)
            if seconds is None or filled is None:
                continue
            values = result.seconds[name][size]
            rows.append(
                [
                    name,
                    f"{seconds:.3f}",
                    f"{min(values):.3f} .. {max(values):.3f}",
                    f"{seconds / result.setting.delay:.1f}",
                    f"{filled:.1%}",
                    f"{statistics.median(result.sent[name][size]):.3f}",
                    *(_ratio(result.median(other, size), seconds) for other in (GLOO, best)),
                    str(result.wrong[name]),
                ]
            )
        head = [size_name(size), "s", "of the rounds", "one-way delays", "link filled", "sent / payload"]
        parts.append(table([*head, "x gloo", "x best ring", "wrong"], rows))
    if result.in_flight:
        size = max(SIZES)
        each = f"{result.together:.3f} s each, link filled {result.share(size, result.together):.1%}"
        parts.append(f"{WANCOLL}, {result.in_flight} of {size_name(size)} in flight: {each}")
    parts += [f"{name} failed: {why}" for name, why in result.failed.items()]
    parts.append(
        f"deliveries were late by {result.late * 1e6:.0f} us on average, {result.late_max * 1e3:.1f} ms at most"
    )
    return "\n\n".join(parts)


def _ratio(other: float | None, mine: float) -> str:
    return "-" if other is None else f"{other / mine:.2f}"


if __name__ == "__main__":
    sys.exit(app(result_action="return_value"))
