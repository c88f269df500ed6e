"""`wancoll chaos`: options to a chaos run, its findings to a report and an exit code."""

from __future__ import annotations

import json
import math
import re
import shlex
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter
from cyclopts.config import Env

from wancoll.chaos.core.faults import KINDS, Shape
from wancoll.errors import ConfigError
from wancoll.limits import DEFAULT, format_size
from wancoll.options import Seconds, Seed, Switch, between
from wancoll.process import exit_on_sigterm
from wancoll.units import parse_size

if TYPE_CHECKING:
    from rich.table import Table

MOST_PEERS = 13  # on one machine, and with room for a join storm where values still name their contributors

chaos = App(
    name="chaos",
    config=Env("WANCOLL_CHAOS_", command=False),  # names like seconds and seed are too common for WANCOLL_SEED
    help_epilogue="Exit code 0 only if nothing was violated; else the command that does it again is printed.",
)


@chaos.default
def run(
    *,
    peers: Annotated[int, Parameter(validator=between(3, MOST_PEERS))] = 4,
    seconds: Seconds = 60.0,
    seed: Seed = 0,
    faults: Annotated[
        str, Parameter(help=f"Kinds of faults, separated by commas: {', '.join(KINDS)}. Empty: all.")
    ] = "",
    interval: str = "0.5:2",
    size: str = "1MiB",
    min_world: Annotated[int, Parameter(validator=between(1, MOST_PEERS))] = 1,
    relays: Annotated[int, Parameter(validator=between(0, MOST_PEERS))] = 0,
    master_every: float = 30.0,
    quiet: Seconds = 4.0,
    as_json: Annotated[Path | None, Parameter(name="--json")] = None,
    keep_logs: Path | None = None,
    voters: Annotated[int, Parameter(validator=between(0, DEFAULT.voters))] = DEFAULT.voters,
    secure: Switch = False,
    spoil: Annotated[bool, Parameter(negative=(), show=False)] = False,
) -> int:
    """Break a cluster on this machine in every way, by a seeded schedule, and check what it promises.

    Args:
        peers: Members. Each is a daemon and a training process on this machine.
        seconds: Seconds of faults; starting, settling and checking take more.
        seed: Seed of the faults, their moments, and the workload.
        interval: Least and most seconds between two faults, as LEAST:MOST.
        size: Size of the largest tensor, such as 1MiB.
        min_world: As in connect().
        relays: Daemons without clients that are relays: peers 0 and 1, 2 and 3, and so on, reach each other only so.
        master_every: Seconds between kills of the master beside the drawn faults. 0: none.
        quiet: Seconds without faults at the start, to compare with.
        as_json: Write the report there as JSON.
        keep_logs: Folder that the processes' logs are copied to. Without it they are kept only after a violation, in
            wancoll-chaos-SEED-logs.
        voters: As in `wancoll master`.
        secure: All that daemons say goes over TLS, lanes too.
        spoil: Change results, so that the run fails.
    """
    from rich.console import Console

    from wancoll.chaos.chaos_run import TIMES, ChaosOptions, ChaosRun
    from wancoll.chaos.core.chaos_report import build, lines
    from wancoll.failpoints import MASTER, PEER

    kinds = _kinds(faults)
    least, most = _interval(interval)
    largest = parse_size(size, "--size")
    if not 1024 <= largest <= 1 << 30:
        raise ConfigError("not usable", who="--size", expected="1KiB to 1GiB", got=size)
    if min_world > peers - 2:
        raise ConfigError(
            "too high", who="--min-world", expected=f"at most --peers - 2, {peers - 2}", got=str(min_world)
        )
    if not (math.isfinite(master_every) and master_every >= 0):
        raise ConfigError("not usable", who="--master-every", expected="0 or more seconds", got=str(master_every))
    command = ["wancoll", "chaos", f"--peers={peers}", f"--seconds={seconds:g}", f"--seed={seed}"]
    command += [f"--interval={interval}", f"--size={size}", f"--min-world={min_world}", f"--quiet={quiet:g}"]
    command += [f"--master-every={master_every:g}", f"--voters={voters}", *([f"--faults={faults}"] if faults else [])]
    command += ["--secure"] * secure + [f"--relays={relays}"] * bool(relays)
    shape = Shape(
        peers, seconds, (least, most), kinds, keep=max(2, min_world + 1), master_every=master_every,
        heartbeat_timeout=TIMES.heartbeat, points=PEER, master_points=MASTER, relays=relays,
    )  # fmt: skip
    options = ChaosOptions(
        shape, seed, largest, min_world, quiet=quiet, command=shlex.join(command), keep_logs=str(keep_logs or ""),
        voters=voters, secure=secure, spoil=spoil,
    )  # fmt: skip
    console = Console(markup=False, highlight=False)
    say = partial(console.print, soft_wrap=True)
    say(f"tensors of up to {format_size(largest)}")
    exit_on_sigterm()
    findings = ChaosRun(options, say).do()
    report = build(findings)
    console.print(faults_by_phase(report["phases"]))
    say("\n".join(lines(report)))
    if as_json is not None:
        as_json.write_text(json.dumps(report, indent=1), encoding="utf-8")
    if not report["violations"]:
        return 0
    where = options.keep_logs or f"wancoll-chaos-{seed}-logs"
    print(f"wancoll chaos: what was promised did not hold; logs: {where}; again:\n{options.command}", file=sys.stderr)
    return 1


def _kinds(text: str) -> tuple[str, ...]:
    kinds = tuple(kind.strip() for kind in text.split(",") if kind.strip()) or tuple(KINDS)
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown:
        raise ConfigError("unknown", who="--faults", expected=f"of {', '.join(KINDS)}", got=", ".join(unknown))
    return kinds


def _interval(text: str) -> tuple[float, float]:
    number = r"\s*([0-9]+\.?[0-9]*|\.[0-9]+)\s*"
    found = re.fullmatch(f"{number}:{number}", text)
    least, most = (float(found[1]), float(found[2])) if found else (0.0, 0.0)
    if not 0.05 <= least <= most:
        raise ConfigError("not usable", who="--interval", expected="LEAST:MOST seconds, from 0.05 on", got=text)
    return least, most


def faults_by_phase(counts: Mapping[str, Mapping[str, int]]) -> Table:
    """How many faults of each kind hit in each phase: a row a phase, since a run may meet twenty of them."""
    from rich.table import Table

    table = Table("phase", "hits", "by", title="faults by phase", title_justify="left", box=None, padding=(0, 1, 0, 0))
    for phase in sorted({phase for each in counts.values() for phase in each}):
        hits = {kind: each[phase] for kind, each in counts.items() if phase in each}
        by = ", ".join(f"{kind} {count}" for kind, count in sorted(hits.items(), key=lambda one: -one[1]))
        table.add_row(phase, str(sum(hits.values())), by)
    return table
