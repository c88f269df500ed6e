"""All-reduce speed: every contender in turn, round after round, so that all meet the same disturbances."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

from tests.bench.contenders import CRing, EngineMember, GlooMember, OpenMpi, compile_ring, wancoll_ranks
from tests.bench.ranks import Ranks, Sample
from tests.bench.report import Bar, size_name, table
from wancoll.chaos import Cluster
from wancoll.cli.perf.values import COLLECTIVES
from wancoll.limits import DEFAULT

KIB, MIB = 1 << 10, 1 << 20
SIZES = {4 * KIB: 100, 1 * MIB: 20, 64 * MIB: 3}  # bytes -> timed operations a round
LARGE = 64 * MIB

GLOO, WANCOLL, OUTSIDE, NO_CHECKSUM = "gloo", "wancoll", "wancoll, array outside the arena", "wancoll, no checksum"
OPEN_MPI = "Open MPI, tcp, ranks that never sleep"
RING, RING_SYSTEM = "C ring", "C ring, the system's congestion control"
ENGINE, ENGINE_CHECKSUM, ENGINE_DIGEST, ENGINE_BOTH = (
    "engine alone, no checksum, no digest",
    "engine alone, checksum",
    "engine alone, digest",
    "engine alone, checksum and digest",
)
LARGE_ONLY = (ENGINE, ENGINE_CHECKSUM, ENGINE_DIGEST)
# Set before connecting: what wancoll's daemon sets on lanes within one machine.
RING_OPTIONS = ("--congestion=reno",)

Measure = Callable[[int, int], Sample]


@dataclass
class Result:
    """Seconds per operation: contender -> size -> one median a round."""

    ranks: int
    seconds: dict[str, dict[int, list[float]]] = field(default_factory=dict)
    wrong: dict[str, int] = field(default_factory=dict)
    bytes_sent: dict[int, int] = field(default_factory=dict)  # size -> of wancoll, the busiest member

    def median(self, name: str, size: int) -> float:
        """Seconds."""
        return statistics.median(self.seconds[name][size])

    def speed(self, name: str, against: str, size: int) -> float | None:
        """How many times as fast: the median of the rounds' ratios; None where one of the two was not measured."""
        mine, theirs = (self.seconds.get(each, {}).get(size) for each in (name, against))
        if not mine or not theirs:
            return None
        return statistics.median(b / a for a, b in zip(mine, theirs, strict=True))


def run(
    ranks: int, rounds: int, folder: str, sizes: dict[int, int] = SIZES, voters: int = DEFAULT.voters, mpi: str = ""
) -> Result:
    """Measure all contenders with *ranks* ranks. Every group lives throughout and sleeps while another is measured.

    Args:
        ranks: how many.
        rounds: each measures every contender once.
        folder: for files.
        sizes: bytes of tensors -> timed operations a round.
        voters: as in `wancoll master`.
        mpi: folder of mpirun and of a Python with mpi4py; "": Open MPI is not measured.
    """
    result = Result(ranks)
    with ExitStack() as stack:
        contenders = _start(stack, ranks, folder, [f"--voters={voters}"], mpi)
        for turn in range(rounds):
            for size, iterations in sizes.items():
                names = [name for name in contenders if size == LARGE or name not in LARGE_ONLY]
                first = turn % len(names)
                for name in names[first:] + names[:first]:
                    sample = contenders[name](size, iterations)
                    result.seconds.setdefault(name, {}).setdefault(size, []).append(sample.seconds)
                    result.wrong[name] = result.wrong.get(name, 0) + sample.wrong
                    if name == WANCOLL:
                        result.bytes_sent[size] = sample.bytes_sent
    return result


def _start(stack: ExitStack, ranks: int, folder: str, master_args: list[str], mpi: str) -> dict[str, Measure]:
    def of(group: Any, mode: str = "") -> Measure:
        return lambda nbytes, iterations: group.measure(mode, nbytes, iterations)

    def started(group: Any) -> Any:
        stack.callback(group.close)
        return group

    binary = compile_ring(folder)
    contenders: dict[str, Measure] = {}
    if find_spec("torch"):
        contenders[GLOO] = of(started(Ranks("gloo", GlooMember, [(folder,)] * ranks)))
    if mpi:
        contenders[OPEN_MPI] = of(OpenMpi(ranks, mpi))
    wancoll = started(
        wancoll_ranks(stack.enter_context(Cluster(peers=ranks, master_args=master_args)), "wancoll", ranks)
    )
    contenders[WANCOLL] = of(wancoll, "arena")
    contenders[RING] = of(started(CRing(ranks, binary, *RING_OPTIONS)))
    contenders[OUTSIDE] = of(wancoll, "outside")
    plain = stack.enter_context(Cluster(peers=ranks, master_args=master_args, peer_args=["--no-checksum"]))
    contenders[NO_CHECKSUM] = of(started(wancoll_ranks(plain, "wancoll without checksum", ranks)), "arena")
    contenders[RING_SYSTEM] = of(started(CRing(ranks, binary)))
    engine = started(Ranks("engine", EngineMember, [(f"{folder}/engine-{ranks}",)] * ranks))
    for name, mode in (
        (ENGINE, "plain"),
        (ENGINE_CHECKSUM, "checksum"),
        (ENGINE_DIGEST, "digest"),
        (ENGINE_BOTH, "checksum+digest"),
    ):
        contenders[name] = of(engine, mode)
    return contenders


def tables(result: Result) -> str:
    """A table for each size."""
    parts = []
    for size in SIZES:
        rows = []
        for name, by_size in result.seconds.items():
            if size not in by_size:
                continue
            middle, low, high = result.median(name, size), min(by_size[size]), max(by_size[size])
            rows.append(
                [
                    name,
                    f"{middle * 1e6:.0f}",
                    f"{low * 1e6:.0f} .. {high * 1e6:.0f}",
                    f"{COLLECTIVES['all_reduce'].busbw(size, middle, result.ranks):.3f}",
                    *(_ratio(result.speed(name, against, size)) for against in (GLOO, RING)),
                    str(result.wrong[name]),
                ]
            )
        head = [
            f"{size_name(size)}, {result.ranks} ranks",
            "us",
            "of the rounds",
            "busbw GB/s",
            "x gloo",
            "x C ring",
            "wrong",
        ]
        parts.append(table(head, rows))
    return "\n\n".join(parts)


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def bars(result: Result) -> list[Bar]:
    """The bars that this number of ranks has to reach."""
    n = result.ranks
    wanted = [(WANCOLL, RING, LARGE, 0.85), (OUTSIDE, WANCOLL, LARGE, 0.75)]
    against_gloo = {
        2: [(LARGE, 1.3), (4 * KIB, 1.0)],
        4: [(LARGE, 1.1), (1 * MIB, 2.0), (4 * KIB, 5.0)],
    }
    wanted += [(WANCOLL, GLOO, size, least) for size, least in against_gloo.get(n, [])]
    found = [
        Bar(
            f"{size_name(size)}, {n} ranks: {name}, times the speed of {against}",
            result.speed(name, against, size),
            least=least,
        )
        for name, against, size, least in wanted
    ]
    digest = result.speed(ENGINE_CHECKSUM, ENGINE_BOTH, LARGE)
    if digest is not None:
        found.append(Bar(f"{size_name(LARGE)}, {n} ranks: cost of the digest, %", (digest - 1) * 100, most=5.0))
    payload = 2 * (n - 1) / n * LARGE
    overhead = (result.bytes_sent[LARGE] / payload - 1) * 100
    found.append(Bar(f"{size_name(LARGE)}, {n} ranks: bytes on the wire above 2(N-1)/N, %", overhead, most=0.1))
    return found


def where_it_goes(result: Result) -> str:
    """The way from the C ring to wancoll, layer by layer: the median over the rounds of how much slower each one is."""
    rows = []
    for size in SIZES:
        for name in (RING, ENGINE, ENGINE_DIGEST, ENGINE_CHECKSUM, ENGINE_BOTH, WANCOLL):
            ratio = result.speed(name, RING, size)
            if ratio is not None:
                cells = [f"{result.median(name, size) * 1e6:.0f}", f"{(1 / ratio - 1) * 100:+.0f} %"]
                rows.append([f"{size_name(size):8}{name}", *cells])
    return table([f"where the time goes, {result.ranks} ranks", "us", "above the C ring"], rows)
