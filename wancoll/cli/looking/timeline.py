"""What daemons traced as a file in Chrome's trace format, which Perfetto and chrome://tracing show. Pure.

Times in a file are those of its machine's clock; its metadata says how far a master's own is ahead, so that files of
several machines become one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Annotated, Any

import msgspec

from wancoll.errors import ConfigError
from wancoll.wire.messages import Clock

# What an operation does between two marks, by the mark that ends it. Where a mark is missing the next one counts.
SPANS = {
    "seen": "was under way before the trace",
    "started": "waits for links",
    "first": "waits for others' first bytes",
    "last": "bytes move",
    "done": "finishes",
    "committed": "waits for the commit",
}
# And what it does when the trace ends, by the state that is its outcome (peer/core/op.py). Others have failed unrun.
OPEN = {
    "waiting": "waits for links",
    "matched": "waits for links",
    "running": "moves bytes, or waits for others'",
    "done": "waits for the commit",
    "given_up": "waits for others to give up",
    "ended": "waits for the engine to let go",
}
UNRUN = "fails without a run"
_MARKS = ("posted", *SPANS, "until")
_MOST_AHEAD = 1e11  # seconds, also behind
Row = Mapping[str, Any]
Micros = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]


class Event(msgspec.Struct, omit_defaults=True):
    """A span (ph "X"; microseconds since 1970), or the name of a process or thread (ph "M")."""

    name: str
    ph: str
    pid: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
    tid: int
    args: dict[str, Any]
    ts: Micros | msgspec.UnsetType = msgspec.UNSET
    dur: Micros | msgspec.UnsetType = msgspec.UNSET
    cat: str | msgspec.UnsetType = msgspec.UNSET


class Metadata(msgspec.Struct):
    """What a file says of itself: its machine's clock beside a master's."""

    clock: Clock | None


class TraceFile(msgspec.Struct):
    """A trace file, as it is written."""

    traceEvents: list[Event]
    displayTimeUnit: str
    metadata: Metadata


def timeline(traced: Mapping[str, Sequence[Row]], clock: Clock | None = None) -> TraceFile:
    """A trace file: a process for each daemon, a thread for each member of a group, and more where calls overlap.

    *traced* has by daemon its rows (peer/core/tracing.py), times in seconds since 1970; *clock* is the machine's.
    """
    events: list[Event] = []
    for pid, daemon in enumerate(sorted(traced), 1):
        events.append(_name("process_name", pid, 0, daemon))
        threads: dict[tuple[str, str], list[tuple[int, float]]] = {}  # of a member: number, until when it is taken
        count = 0
        for row in sorted(traced[daemon], key=lambda row: row["at"]["posted"]):
            owner, began, ended = (row["group"], row["member"]), row["at"]["posted"], max(row["at"].values())
            taken = threads.setdefault(owner, [])
            place = next((i for i, (_, until) in enumerate(taken) if until <= began), len(taken))
            if place == len(taken):
                count += 1
                more = f" ({place + 1})" if place else ""
                events.append(_name("thread_name", pid, count, f"{row['group']}: {row['member']}{more}"))
                taken.append((count, ended))
            tid = taken[place][0]
            taken[place] = tid, ended
            events += _of(row, pid, tid, began, ended)
    return TraceFile(events, "ms", Metadata(clock))


def merged(files: Mapping[str, TraceFile]) -> TraceFile:
    """All *files*, each of another machine, in one, by the first one's clock: a master's stood beside each.

    Raises:
        ConfigError: one does not know a master's clock, or knows another master's than the others.
    """
    events: list[Event] = []
    clocks: list[Clock] = []
    pids = 0
    for name, file in files.items():
        clock = file.metadata.clock
        if clock is None:
            raise ConfigError(
                "cannot be laid beside others", who=name, expected="a clock that was compared with the master's",
                got="none", hint="its daemons had no master; trace again while one answers",
            )  # fmt: skip
        if clocks and clock.master != clocks[0].master:
            raise ConfigError(
                "was compared with another master's clock", who=name, expected=f"master {clocks[0].master} as in "
                f"{next(iter(files))}", got=f"master {clock.master}",
                hint="one was started again, or another leads; trace all machines at one time",
            )  # fmt: skip
        if not abs(clock.ahead) < _MOST_AHEAD:
            raise ConfigError("has a clock that is none", who=name, got=f"{clock.ahead} s ahead")
        clocks.append(clock)
        for event in file.traceEvents:
            later = round(1e6 * (clock.ahead - clocks[0].ahead))
            ts = event.ts if event.ts is msgspec.UNSET else max(0, event.ts + later)
            events.append(msgspec.structs.replace(event, pid=pids + event.pid, ts=ts))
        pids += max((event.pid for event in file.traceEvents), default=0)
    off = max((clock.uncertain for clock in clocks), default=0.0)
    return TraceFile(events, "ms", Metadata(Clock(clocks[0].ahead, off, clocks[0].master) if clocks else None))


def phases(row: Row) -> Iterator[tuple[str, float, float]]:
    """The phases of an attempt: name, and seconds from and until when."""
    at = [(mark, row["at"][mark]) for mark in _MARKS if row["at"].get(mark)]
    for (_, since), (mark, until) in pairwise(at):
        name = OPEN.get(row["outcome"], UNRUN) if mark == "until" else SPANS[mark]
        yield name, since, max(since, until)


def _of(row: Row, pid: int, tid: int, began: float, ended: float) -> list[Event]:
    """The attempt as a whole, and its phases below it."""
    told = {name: row[name] for name in row if name != "at"}
    name = f"{row['op']} {row['seq']}" + (f", attempt {row['attempt']}" if row["attempt"] > 1 else "")
    found = [_span(name, pid, tid, began, ended, told)]
    return found + [_span(phase, pid, tid, since, until, {}) for phase, since, until in phases(row)]


def _span(name: str, pid: int, tid: int, since: float, until: float, told: Mapping[str, Any]) -> Event:
    """Whole microseconds: so they add up."""
    ts = round(1e6 * since)
    cat = "operation" if told else "phase"
    return Event(name, "X", pid, tid, dict(told), ts=ts, dur=round(1e6 * until) - ts, cat=cat)


def _name(what: str, pid: int, tid: int, name: str) -> Event:
    return Event(what, "M", pid, tid, {"name": name})
