"""`make bench`: compares wancoll with gloo and a bare C ring, measures codecs and a daemon's costs, judges the bars."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, Parameter

from tests.bench import codec, cost, speed, sync
from tests.bench.report import Bar, bar_table
from wancoll.limits import DEFAULT
from wancoll.native.engine import kernel_name

SYNCS = 5  # rounds of catching up

app = App(name="python -m tests.bench", help=__doc__)
Part = Literal["speed", "codec", "processor", "memory", "sync"]
PARTS: tuple[Part, ...] = ("speed", "codec", "processor", "memory", "sync")


def machine() -> str:
    """What it runs on: the instruction set is the one that the engine uses."""
    release = os.uname().release
    congestion = Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()
    load = os.getloadavg()[0]
    cores = f"{os.cpu_count()} cores with {kernel_name()}"
    return f"{cores}, Linux {release}, congestion control {congestion}, load {load:.1f} at the start"


@app.default
def bench(
    *parts: Annotated[Part, Parameter(help="What to measure; all if left out.")],
    ranks: Annotated[tuple[int, ...], Parameter(help="Numbers of ranks for the speed.", negative=())] = (2, 4),
    rounds: Annotated[int, Parameter(help="Rounds of the speed measurement.")] = 7,
    voters: Annotated[int, Parameter(help="As in wancoll master.")] = DEFAULT.voters,
    mpi: Annotated[
        str, Parameter(help="Folder of mpirun and of a Python that has mpi4py: compares Open MPI, too.")
    ] = "",
    as_json: Annotated[str, Parameter(name="--json", help="Also write all numbers to this file.")] = "",
) -> int:
    """Measure, print tables and bars. Exit code 1 if a value was wrong; a missed bar is only printed."""
    begin = time.monotonic()
    described = machine()
    print(f"{described}; {'the members collect' if voters else 'the master collects'} votes", flush=True)
    bars: list[Bar] = []
    results = []
    if "speed" in (parts or PARTS):
        with tempfile.TemporaryDirectory(prefix="wancoll-bench-") as folder:
            for count in ranks:
                result = speed.run(count, rounds, folder, voters=voters, mpi=mpi)
                results.append(result)
                bars += speed.bars(result)
                print(f"\n{speed.tables(result)}\n\n{speed.where_it_goes(result)}", flush=True)
    if "codec" in (parts or PARTS):
        cases = codec.measure()
        bars += codec.bars(cases)
        print(f"\n{codec.tables(cases)}", flush=True)
    if "processor" in (parts or PARTS):
        bars += cost.processor(voters)
    if "memory" in (parts or PARTS):
        bars += cost.memory()
    synced = [sync.run(holders, SYNCS) for holders in (2, 3)] if "sync" in (parts or PARTS) else []
    for each in synced:
        bars += sync.bars(each)
        print(f"\n{sync.tables(each)}", flush=True)
    print(f"\n{bar_table(bars)}\n\n{time.monotonic() - begin:.0f} s")
    if as_json:
        Path(as_json).write_text(
            json.dumps(
                {
                    "machine": described,
                    "voters": voters,
                    "speed": [{"ranks": r.ranks, "seconds": r.seconds, "wrong": r.wrong} for r in results],
                    "bars": [{"what": b.what, "value": b.value, "verdict": b.verdict} for b in bars],
                },
                indent=2,
            )
        )
    wrong = {name: count for result in results for name, count in result.wrong.items() if count}
    wrong |= {f"sync_state from {each.holders}": each.wrong for each in synced if each.wrong}
    if wrong:
        print(f"wrong values: {wrong}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(app(result_action="return_value"))
