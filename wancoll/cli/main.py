"""The `wancoll` command: names its subcommands (imported when called) and turns expected failures into exit codes."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from cyclopts import App, CycloptsError, MissingArgumentError

from wancoll.cli.variables import Variables
from wancoll.errors import ConfigError, WancollError
from wancoll.limits import package_version

COMMANDS = {  # its function below wancoll.cli, and its help
    "master": ("running.master:master", "Run the master: it tracks membership and decides commit and abort."),
    "peer": ("running.peer:peer", "Run this machine's peer daemon: it moves and reduces the data of its clients."),
    "relay": ("running.relay:relay", "Run a relay, by which daemons meet that cannot reach each other."),
    "status": (
        "looking.status:status",
        "Say whether all is well (exit code 3: it is not); show groups, members, events.",
    ),
    "top": ("looking.status:top", "Watch groups, members, and whom operations wait for."),
    "events": ("looking.events:events", "Show what a master has recorded, and go on with --follow."),
    "evict": ("changing.evict:evict", "Put a member out of its group, or say that a lost one has stopped."),
    "key": ("changing.key:key", "Show and replace the key of a master, and revoke keys of daemons."),
    "leave": ("changing.leave:leave", "Have a daemon, or one member, leave in order: nobody runs anything again."),
    "doctor": ("looking.doctor:doctor", "Look at this machine, a master, the ways to daemons; say what to change."),
    "trace": ("looking.trace:trace", "Write what operations do, phase by phase, to a file for Perfetto."),
    "token": ("changing.token:token", "Make, show and revoke the tokens that daemons join with."),
    "demo": ("trying.demo:demo", "Train a small network on 4 local peers, and kill one of them on the way."),
    "perf": ("perf.command:perf", "Measure collectives, with the columns of nccl-tests."),
    "chaos": ("trying.chaos:chaos", "Break a local cluster by a seeded schedule, and check what it promises."),
}

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


def one_line(error: BaseException) -> str:
    """An error as a single line of printable text."""
    text = " ".join(str(error).split())
    return "".join(c if c.isprintable() else "?" for c in text) or type(error).__name__


app = App(
    name="wancoll",
    help="All-reduce over many TCP connections that outlives its peers.",
    version=package_version,
    config=Variables("WANCOLL_", command=False),
)
for _name, (_path, _help) in COMMANDS.items():
    app.command(f"wancoll.cli.{_path}", name=_name, help=_help)


def expected_failures(error: BaseException) -> list[WancollError]:
    """The WancollErrors inside *error*, or nothing if it holds anything else: that is a bug and gets its traceback."""
    if isinstance(error, WancollError):
        return [error]
    if isinstance(error, ImportError) and error.__cause__ is not None:
        return expected_failures(error.__cause__)  # cyclopts' own, for what a command raises when it is imported
    if isinstance(error, BaseExceptionGroup):
        parts = [expected_failures(inner) for inner in error.exceptions]
        if all(parts):
            return [failure for part in parts for failure in part]
    return []


def _missing(error: CycloptsError) -> str:
    """The message for an option that was not given; cyclopts says the same where only its value is missing."""
    if not isinstance(error, MissingArgumentError) or error.argument is None or error.keyword or error.tokens_so_far:
        return ""
    command = " ".join(error.command_chain or ())
    return "" if error.argument.tokens else f'Command "{command}" needs {error.argument.name}, which is missing.'


class _Lossy(io.FileIO):
    """A file where what cannot be written, as on a full disk, is lost, and nobody hears of it."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data) or memoryview(data).nbytes
        except OSError:
            return memoryview(data).nbytes


def _keep_going_without_stderr() -> None:
    """A line of the log, or of an error, that cannot be written ends no process, and is no reason for exit code 120."""
    real = sys.__stderr__
    if real is not None and sys.stderr is real:  # else something else takes what is written
        raw = io.BufferedWriter(_Lossy(real.fileno(), "wb", closefd=False))
        sys.stderr = io.TextIOWrapper(raw, real.encoding, real.errors, line_buffering=True)


def run(tokens: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit: 0 fine, 1 failed, 2 wrong usage or configuration, 130 interrupted."""
    _keep_going_without_stderr()
    try:
        code = app(tokens, result_action="return_value", exit_on_error=False, print_error=False)
        sys.stdout.flush()
    except CycloptsError as error:
        print(f"wancoll: {_missing(error) or one_line(error)} (--help lists the options)", file=sys.stderr)
        sys.exit(EXIT_USAGE)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    except BrokenPipeError:
        # The reader of stdout (`wancoll status | head`) has left: nothing more to say, also not at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(EXIT_FAILED)
    except (WancollError, ImportError, BaseExceptionGroup) as error:
        failures = expected_failures(error)
        if not failures:
            raise
        for failure in failures:
            print(f"wancoll: {type(failure).__name__}: {one_line(failure)}", file=sys.stderr)
        sys.exit(EXIT_USAGE if any(isinstance(failure, ConfigError) for failure in failures) else EXIT_FAILED)
    sys.exit(code if isinstance(code, int) else 0)
