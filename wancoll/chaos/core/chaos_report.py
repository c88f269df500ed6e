"""The report of a chaos run as plain data, ready for JSON, and as lines of text. Pure."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from wancoll.chaos.core.invariants import Gap, Injected, Violation
from wancoll.limits import counted
from wancoll.units import format_rate

_RECOVERY_AT_MOST = 60.0  # seconds; later it has other reasons


@dataclass(frozen=True, slots=True)
class Commit:
    """One operation, when the first member knew that it was committed."""

    at: float
    epoch: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Findings:
    """All that a run knows at its end; times are on one clock."""

    command: str  # that does it again
    started: float  # when the faults began
    stopped: float  # when they ended
    quiet: tuple[float, float]  # (from, to) of the same workload without faults
    commits: Sequence[Commit]  # in order, those of the quiet time included
    faults: Sequence[Injected]  # in order
    violations: Sequence[Violation]  # in order
    calls: Counter[str]  # how many calls ended how: "committed", or the error's class
    lives: Sequence[tuple[str, float, float]]  # (member, from, to) of each membership
    resources: dict[str, dict[str, dict[str, int]]]  # what processes held before and after
    events: Sequence[tuple[float, int, str, str]]  # the master's event log: (time, epoch, kind, text)
    gaps: Sequence[Gap]  # the long times without a commit, the longest first
    stalled: float  # seconds for which this machine let a process wait that could run, in all
    secure: bool = False  # whether all went over TLS


def recoveries(faults: Sequence[Injected], commits: Sequence[Commit]) -> list[tuple[Injected, float]]:
    """Seconds from a fault to the first commit of the epoch that it made necessary; the last fault before it counts."""
    hits = sorted((one for one in faults if one.hit), key=lambda one: one.began)
    found = []
    at, epoch = 0, 0
    for index, one in enumerate(hits):
        while at < len(commits) and commits[at].at < one.began:
            epoch = max(epoch, commits[at].epoch)
            at += 1
        after = next((commit for commit in commits[at:] if commit.epoch > epoch), None)
        if after is None or after.at - one.began > _RECOVERY_AT_MOST:
            continue
        if index + 1 == len(hits) or after.at <= hits[index + 1].began:
            found.append((one, after.at - one.began))
    return found


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that *share* of them do not exceed; 0 if there is none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, math.ceil(share * len(ordered)) - 1))] if ordered else 0.0


def goodput(commits: Sequence[Commit], begin: float, end: float) -> float:
    """Bytes of the tensors committed in that time, per second."""
    return sum(one.nbytes for one in commits if begin <= one.at < end) / max(1e-9, end - begin)


def build(findings: Findings) -> dict[str, Any]:
    """The report: numbers, strings, lists and dicts only; times are seconds since the faults began."""
    start = findings.started
    phases: dict[str, Counter[str]] = {}
    for one in findings.faults:
        phases.setdefault(one.fault.kind, Counter())[one.phase if one.hit else "missed"] += 1
    took = recoveries(findings.faults, findings.commits)
    by_kind: dict[str, list[float]] = {}
    for one, seconds in took:
        by_kind.setdefault(one.fault.kind, []).append(seconds)
    quiet = goodput(findings.commits, *findings.quiet)
    under = goodput(findings.commits, findings.started, findings.stopped)
    within = [one.at for one in findings.commits if findings.started <= one.at <= findings.stopped]
    pauses = [after - before for before, after in itertools.pairwise(within)]
    return {
        "command": findings.command,
        "secure": findings.secure,
        "seconds": round(findings.stopped - findings.started, 3),
        "operations": len(within),
        "in_all": len(findings.commits),
        "calls": dict(findings.calls),
        "goodput": {"quiet": quiet, "faults": under, "ratio": under / quiet if quiet else 0.0},
        "longest_gap": max(pauses, default=0.0),
        "stalled": findings.stalled,
        "faults": [
            {
                **asdict(one.fault),
                "text": str(one.fault),
                "began": one.began - start,
                "ended": (one.ended if one.ended < float("inf") else findings.stopped) - start,
                "hit": one.hit,
                "phase": one.phase,
                "note": one.note,
            }
            for one in findings.faults
        ],
        "phases": {kind: dict(counts) for kind, counts in sorted(phases.items())},
        "recoveries": {
            "count": len(took),
            "p50": percentile([seconds for _, seconds in took], 0.5),
            "p99": percentile([seconds for _, seconds in took], 0.99),
            "by_kind": {
                kind: {"count": len(each), "p50": percentile(each, 0.5), "p99": percentile(each, 0.99)}
                for kind, each in sorted(by_kind.items())
            },
        },
        "violations": [{**asdict(one), "at": one.at - start, "text": str(one)} for one in findings.violations],
        "lives": [(who, begin - start, end - start) for who, begin, end in findings.lives],
        "gaps": [{**asdict(one), "at": one.at - start} for one in findings.gaps],
        "events": [(at - start, *what) for at, *what in findings.events],
        "resources": findings.resources,
    }


def lines(report: dict[str, Any]) -> list[str]:
    """The report for a terminal."""
    speed, back = report["goodput"], report["recoveries"]
    done = counted(report["operations"], "operation")
    hits = sum(fault["hit"] for fault in report["faults"])
    quiet = f"{speed['ratio']:.2f} of the {format_rate(speed['quiet'], 3)} without faults"
    calls = ", ".join(f"{count} {how}" for how, count in sorted(report["calls"].items()))
    over = "over TLS" if report["secure"] else "in clear"
    text = [
        f"{report['seconds']:.0f} s {over}, {counted(len(report['faults']), 'fault')}, {hits} of them hit",
        f"{done} committed in that time, {report['in_all']} with the times before and after",
        f"longest time without one {report['longest_gap']:.2f} s",
        f"goodput {format_rate(speed['faults'], 3)}, {quiet}",
        f"recoveries: {back['count']}, p50 {back['p50']:.3f} s, p99 {back['p99']:.3f} s",
        f"calls of all members, before and after, too: {calls}",
        f"violations: {len(report['violations'])}",
    ]
    return text + [f"  {one['at']:8.3f} s  {one['text']}" for one in report["violations"]]
