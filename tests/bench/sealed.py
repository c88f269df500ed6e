"""`python -m tests.bench.sealed`: what TLS costs, in turns with and without, each figure beside its bar."""

from __future__ import annotations

import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from cyclopts import App, Parameter

from tests.bench.__main__ import machine
from tests.bench.contenders import WancollMember
from tests.bench.ranks import Ranks
from tests.bench.recovery import Bench, Phase
from tests.bench.report import Bar, bar_table, size_name
from tests.engine.engines import Mesh, mesh_of, wait_for
from tests.wan.network import Wan, why_not
from wancoll.chaos import Cluster
from wancoll.collective import DType, ReduceOp
from wancoll.native.engine import Done
from wancoll.native.seal import Seals
from wancoll.trust.keys import Key

KIB, MIB = 1 << 10, 1 << 20
CIPHER = "aes-128-gcm"
MOST_CIPHER = 1.15  # times the cipher's own time, beyond that in clear
MOST_SMALL = 1.1  # times that in clear, of 4 KiB
MOST_FAR = 1.02  # times that in clear, far apart
MOST_RECOVERY = 0.02  # seconds beyond that in clear
SMALL, LARGE = 4 * KIB, 64 * MIB
LANES = 8
FAR = {"delay": 0.04, "rate": 500e6, "loss": 0.0}
KILL = Phase("killed in the middle", share=0.5)

app = App(name="python -m tests.bench.sealed", help=__doc__)


@dataclass(frozen=True)
class Pair:
    """The same, in clear and sealed, one right after the other."""

    clear: float
    sealed: float

    @property
    def ratio(self) -> float:
        return self.sealed / self.clear


def medians(pairs: list[Pair]) -> str:
    """For people."""
    clear, sealed = statistics.median(p.clear for p in pairs), statistics.median(p.sealed for p in pairs)
    return f"clear {clear * 1e3:.3f} ms, sealed {sealed * 1e3:.3f} ms"


def cipher_rate() -> float:
    """Bytes per second of processor time, of one core."""
    command = ["openssl", "speed", "-evp", CIPHER, "-bytes", "16384", "-seconds", "1"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(rf"{CIPHER}\s+([0-9.]+)k", said, re.IGNORECASE)
    assert found is not None, said
    return float(found[1]) * 1000


def some_seals() -> Seals:
    """Of a key that is made here."""
    key = Key.new()
    return Seals(key.certificate(), key.pem)


# ---- engines ---------------------------------------------------------------------------------------------


class Work:
    """One sum of two engines again and again, in the same memory."""

    def __init__(self, mesh: Mesh, nbytes: int) -> None:
        self._mesh = mesh
        self._inputs = [np.full(nbytes // 4, rank, np.float32) for rank in range(2)]
        self._result_buffers = [np.full(nbytes // 4, 7, np.float32) for _ in range(2)]

    def once(self) -> None:
        """One operation."""
        mesh = self._mesh
        mesh.seq += 1
        for rank in range(2):
            mesh.post(rank, mesh.seq, self._inputs[rank], self._result_buffers[rank], DType.float32, ReduceOp.sum)
        for engine in mesh.engines:
            wait_for(engine, Done)
        mesh.kept.clear()

    def measure(self, count: int) -> tuple[float, float]:
        """Wall and processor seconds of an operation, of both ranks together."""
        self.once()
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(count):
            self.once()
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        assert all((result_buffer == 1).all() for result_buffer in self._result_buffers)
        return wall / count, cpu / count


def engines(rounds: int) -> list[Bar]:
    """Two engines of one process, without daemons. The large one in processor time, which a busy machine bends less."""
    opened = 4 * LARGE  # by two ranks, each of which seals and opens the tensor's size
    walls: dict[int, list[Pair]] = {SMALL: [], LARGE: []}
    cpus: dict[int, list[Pair]] = {SMALL: [], LARGE: []}
    rates, beyond = [], []
    with ExitStack() as stack:
        config = {"workers": 1, "segment": 512 * KIB, "stripe": 256 * KIB}
        clear = stack.enter_context(mesh_of(2, 4, **config))
        sealed = stack.enter_context(mesh_of(2, 4, seals=some_seals(), **config))
        works = {size: (Work(clear, size), Work(sealed, size)) for size in walls}
        for turn in range(rounds):
            rates.append(rate := cipher_rate())
            for size, count in ((SMALL, 100), (LARGE, 1)):
                for again in range(8):
                    order = (0, 1) if (turn + again) % 2 else (1, 0)
                    found = {which: works[size][which].measure(count) for which in order}
                    walls[size].append(Pair(found[0][0], found[1][0]))
                    cpus[size].append(pair := Pair(found[0][1], found[1][1]))
                    if size == LARGE:
                        beyond.append((pair.sealed - pair.clear) / (opened / rate))
    print(f"{CIPHER}: {statistics.median(rates) / 1e9:.2f} GB/s of one core")
    for size, taken in walls.items():
        print(f"engines, {size_name(size)}: {medians(taken)}; of processors {medians(cpus[size])}")
    half = statistics.median(rates) / (opened / 2)  # what one rank seals and opens
    extra = statistics.median(p.sealed - p.clear for p in walls[LARGE])
    return [
        Bar(
            "engines, 64 MiB: processor time beyond that in clear, of the cipher's",
            statistics.median(beyond),
            most=MOST_CIPHER,
        ),
        Bar("engines, 64 MiB: the same by the clock, of one rank's cipher's", extra * half, most=MOST_CIPHER),
        Bar("engines, 4 KiB: of the time in clear", statistics.median(p.ratio for p in walls[SMALL]), most=MOST_SMALL),
        Bar(
            "engines, 4 KiB: of the processor time in clear",
            statistics.median(p.ratio for p in cpus[SMALL]),
            most=MOST_SMALL,
        ),
    ]


# ---- daemons ---------------------------------------------------------------------------------------------


@contextmanager
def groups(wan: Wan | None) -> Iterator[tuple[Ranks, Ranks]]:
    """Two members of daemons in clear, and of daemons with certificates."""
    with ExitStack() as stack:
        made = []
        for secure in (False, True):
            cluster = stack.enter_context(Cluster(2, lanes=LANES, network=wan, secure=secure))
            made.append(ranks := Ranks(f"secure={secure}", WancollMember, [(cluster.socket(i),) for i in range(2)]))
            stack.callback(ranks.close)
        yield made[0], made[1]


def in_turns(both: tuple[Ranks, Ranks], size: int, count: int, rounds: int) -> list[Pair]:
    """Medians of *count* operations each."""
    pairs = []
    for turn in range(-1, rounds):
        order = (0, 1) if turn % 2 else (1, 0)
        found = {which: both[which].measure("arena", size, count) for which in order}
        assert not any(sample.wrong for sample in found.values())
        if turn >= 0:  # the first one warms up
            pairs.append(Pair(found[0].seconds, found[1].seconds))
    return pairs


def members(rounds: int) -> list[Bar]:
    """Members on loopback, through their daemons: what a call takes."""
    with groups(None) as both:
        small = in_turns(both, SMALL, 100, 4 * rounds)
        large = in_turns(both, LARGE, 3, 2 * rounds)
    rate = statistics.median(cipher_rate() for _ in range(3))
    print(f"members, 4 KiB: {medians(small)}\nmembers, 64 MiB: {medians(large)}")
    extra = statistics.median(p.sealed - p.clear for p in large)
    return [
        Bar("members, 4 KiB: of the time in clear", statistics.median(p.ratio for p in small), most=MOST_SMALL),
        Bar(
            "members, 64 MiB: time beyond that in clear, of one rank's cipher's",
            extra / (2 * LARGE / rate),
            most=MOST_CIPHER,
        ),
    ]


def far(rounds: int) -> list[Bar]:
    """Members 40 ms apart, 500 Mbit/s each."""
    with Wan(2, **FAR) as wan, groups(wan) as both:
        pairs = {size: in_turns(both, size, count, rounds) for size, count in ((64 * KIB, 3), (LARGE, 1))}
    for size, taken in pairs.items():
        print(f"far apart, {size_name(size)}: {medians(taken)}")
    return [
        Bar(
            f"far apart, {size_name(size)}: of the time in clear",
            statistics.median(p.sealed for p in taken) / statistics.median(p.clear for p in taken),
            most=MOST_FAR,
        )
        for size, taken in pairs.items()
    ]


def recovery(rounds: int) -> list[Bar]:
    """A daemon of four on loopback is killed in the middle of 64 MiB: from there to the survivors' commit."""
    pairs = []
    with Cluster(4) as clear, Cluster(4, secure=True) as sealed:
        both = Bench(4, clear, LARGE), Bench(4, sealed, LARGE)
        for turn in range(2 * rounds):
            order = (0, 1) if turn % 2 else (1, 0)
            found = {which: both[which].lose_one(KILL, turn % 4) for which in order}
            pairs.append(Pair(found[0].detection + found[0].extra, found[1].detection + found[1].extra))
    print(f"recovery, beyond a clean operation: {medians(pairs)}")
    clear_, sealed_ = (statistics.median(column) for column in zip(*((p.clear, p.sealed) for p in pairs), strict=True))
    return [Bar("recovery: seconds beyond that in clear", sealed_ - clear_, most=MOST_RECOVERY)]


PARTS = {"engines": engines, "members": members, "far": far, "recovery": recovery}


@app.default
def bench_sealed(
    *parts: Annotated[str, Parameter(help="engines, members, far (needs root), recovery; all unless some are named.")],
    rounds: int = 7,
) -> int:
    """Measure, print what was found and the bars. Exit code 1 if one was missed.

    Args:
        rounds: of each part, about; seven take one to three minutes each.
    """
    print(machine(), flush=True)
    bars: list[Bar] = []
    for name in parts or PARTS:
        if name == "far" and (reason := why_not()):
            print(f"no WAN here: {reason}")
            continue
        begin = time.monotonic()
        bars += PARTS[name](rounds)
        print(f"{name}: {time.monotonic() - begin:.0f} s", flush=True)
    print(f"\n{bar_table(bars)}")
    return 0 if all(bar.verdict == "reached" for bar in bars) else 1


if __name__ == "__main__":
    sys.exit(app(result_action="return_value"))
