"""`wancoll trace`: what operations do in the next seconds, phase by phase, as a file for Perfetto."""

from __future__ import annotations

import json
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import msgspec
from cyclopts import App, Parameter

from wancoll.cli.looking.timeline import TraceFile, merged, timeline
from wancoll.errors import ConfigError, PeerDaemonLost, ProtocolError
from wancoll.limits import DEFAULT, counted
from wancoll.local import default_socket
from wancoll.net.ask import said
from wancoll.net.unix import what_to_do
from wancoll.options import Seconds
from wancoll.wire import messages as m

Out = Annotated[str, Parameter(name=["--out", "-o"], help="File to write.")]

Answer = tuple[str, list[dict[str, Any]], m.Clock | None]  # a daemon's name, its rows, its machine's clock

trace = App(name="trace", help="Write what operations do, phase by phase, to a file for Perfetto.")


@trace.default
def record(
    *,
    seconds: Seconds = 5.0,
    socket: tuple[str, ...] = (),
    out: Out = "trace.json",
    timeout: Seconds = DEFAULT.connect_timeout,
) -> int:
    """Trace the operations of this machine's daemons, and write a file for https://ui.perfetto.dev or chrome://tracing.

    Each daemon is a process there, each member of a group a thread; an operation shows when it was called, when its
    links were ready, when the first and last bytes of others came, when its result stood, and when it was committed. An
    attempt that was aborted has a row of its own. For several machines trace on each at the same time, then `wancoll
    trace merge`. A daemon keeps the newest 65536 attempts, and pays only meanwhile.

    Args:
        seconds: For so long, at most 600.
        socket: Unix socket of a daemon here; repeat it for several. Empty: the default one.
        timeout: Seconds for the answer, after that.
    """
    paths = list(dict.fromkeys(socket or (default_socket(),)))
    with ThreadPoolExecutor(len(paths)) as pool:
        answers = list(pool.map(lambda path: ask(path, seconds, timeout), paths))
    traced = {daemon: rows for daemon, rows, _ in answers}
    if len(traced) < len(answers):
        raise ConfigError("two sockets are of daemons with one name", who="--socket", got=", ".join(paths))
    _write(timeline_of(answers), out)
    count = sum(map(len, traced.values()))
    print(f"{counted(count, 'attempt')} of {counted(len(traced), 'daemon')} in {out}")
    return 0


@trace.command
def merge(
    first: str,
    /,
    *files: str,
    out: Out = "all.json",
) -> int:
    """Make one file of those of several machines, which traced at the same time.

    Their clocks need not agree: each daemon compares its machine's with the master's at each heartbeat, and all times
    become the first file's, right to within a round trip.

    Args:
        first: Of one machine.
        files: Of one other machine each.
    """
    read: dict[str, TraceFile] = {}
    for name in dict.fromkeys((first, *files)):
        try:
            read[name] = msgspec.json.decode(Path(name).read_bytes(), type=TraceFile)
        except OSError as bad:
            raise ConfigError("cannot be read", who=name, got=str(bad)) from bad
        except msgspec.DecodeError as bad:
            raise ConfigError("is none", who=name, expected="a file of `wancoll trace`", got=str(bad)) from bad
    whole = merged(read)
    _write(whole, out)
    off = 2 * whole.metadata.clock.uncertain if whole.metadata.clock is not None else 0.0
    print(f"{counted(len(read), 'file')} in {out}; times of two machines compare to within {1e3 * off:.3g} ms")
    return 0


def timeline_of(answers: Iterable[Answer]) -> TraceFile:
    """The file of daemons of one machine."""
    answers = list(answers)
    clocks = [clock for _, _, clock in answers if clock is not None]
    nearest = min(clocks, key=lambda clock: clock.uncertain, default=None)
    return timeline({daemon: rows for daemon, rows, _ in answers}, nearest)


def _write(file: TraceFile, out: str) -> None:
    try:
        Path(out).write_bytes(msgspec.json.encode(file))
    except OSError as bad:
        raise ConfigError("cannot be written", who=f"--out {out}", got=str(bad)) from bad


def ask(path: str, seconds: float, timeout: float) -> Answer:
    """What the daemon at *path* does in so many seconds. Raises WancollError: it cannot be traced."""
    rows: list[dict[str, Any]] = []
    try:
        who, within = f"daemon at {path}", seconds + timeout
        for answer in said(path, m.TraceRequest(seconds), m.FromDaemon, timeout=within, who=who, anybody=True):
            if isinstance(answer, m.Failure):
                who, hint = f"{answer.who} at {path}", answer.hint
                raise ConfigError(answer.what, who=who, expected=answer.expected, got=answer.got, hint=hint)
            if not isinstance(answer, m.Traced):
                raise ProtocolError("did not answer", who=path, expected="Traced", got=type(answer).__name__)
            rows += json.loads(answer.rows)
            if answer.last:
                return answer.daemon, rows, answer.clock
        raise ConnectionError("it closed the connection without an answer")
    except OSError as bad:
        raise PeerDaemonLost(
            "cannot be traced", who=f"daemon at {path}", got=str(bad) or type(bad).__name__,
            hint=what_to_do(bad),
        ) from bad  # fmt: skip
