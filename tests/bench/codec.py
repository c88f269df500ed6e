"""Speed of the codec kernels, one core, beside memcpy over the same buffers."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.bench.report import Bar, size_name, table

NATIVE = Path(__file__).parents[2] / "native"
DRIVER = Path(__file__).with_name("codec.c")
FLAGS = ("-std=c11", "-O3", "-ffp-contract=off", "-pthread")  # as native/build.py
TABLES = ("avx512", "avx2", "neon", "generic")
ROUNDS = 9
TIMEOUT = 600.0
SLICE = 64 << 10  # bytes: what the engine hands over at a time stays in the cache


@dataclass(frozen=True)
class Case:
    """One kernel on *size* bytes of float32; ratio: its speed in memcpy's."""

    table: str
    codec: str
    verb: str
    size: int
    seconds: float
    memcpy: float
    ratio: float

    def row(self) -> list[str]:
        """As a line of a table."""
        speeds = [self.size / seconds / 1e9 for seconds in (self.seconds, self.memcpy)]
        return [f"{self.codec} {self.verb}", size_name(self.size), *(f"{s:.1f}" for s in speeds), f"{self.ratio:.2f}"]


def measure(rounds: int = ROUNDS, tables: tuple[str, ...] = TABLES) -> list[Case]:
    """Compile the driver as the extension is compiled, and run it for the *tables* that this CPU has.

    Raises:
        RuntimeError: no C compiler.
    """
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        raise RuntimeError("the codec benchmark needs a C compiler (cc or gcc)")
    with tempfile.TemporaryDirectory(prefix="wancoll-bench-") as folder:
        binary = f"{folder}/codec"
        sources = map(str, [DRIVER, *sorted(NATIVE.glob("kernels/*.c"))])
        subprocess.run([compiler, *FLAGS, f"-I{NATIVE}", "-o", binary, *sources], check=True, timeout=TIMEOUT)
        command = [binary, str(rounds), *tables]
        done = subprocess.run(command, check=True, timeout=TIMEOUT, stdout=subprocess.PIPE, text=True)
    cases = []
    for line in done.stdout.splitlines():
        name, codec, verb, size, *numbers = line.split("\t")
        cases.append(Case(name, codec, verb, int(size), *map(float, numbers)))
    return cases


def tables(cases: list[Case]) -> str:
    """A table for each instruction set."""
    parts = []
    for name in dict.fromkeys(case.table for case in cases):
        head = [f"codecs, float32, {name}", "at a time", "GB/s", "memcpy GB/s", "x memcpy"]
        parts.append(table(head, [case.row() for case in cases if case.table == name]))
    return "\n\n".join(parts)


def bars(cases: list[Case]) -> list[Bar]:
    """int8 on the best instruction set, which is measured first: at least half of memcpy's speed."""
    found = []
    for case in cases:
        if case.table == cases[0].table and case.codec == "int8" and case.verb in ("encode", "decode-accumulate"):
            place = "in the cache" if case.size == SLICE else "out of the cache"
            found.append(Bar(f"int8 {case.verb}, {place}: times the speed of memcpy", case.ratio, least=0.5))
    return found
