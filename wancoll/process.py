"""Child processes: tied to this one, their output in files, waited for, signalled, ended in bounded time.

`python -m wancoll.process PARENT PROGRAM ARGUMENTS...` is that program (a path, or a Python module) tied to PARENT: the
kernel kills it when PARENT goes, also while it is stopped. Imports nothing but the standard library and the errors.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import NoReturn, TypeVar

from wancoll.errors import ConfigError

T = TypeVar("T")

_POLL = 0.005  # seconds between looks at a file or a process
_TAIL_BYTES = 8192
_PR_SET_PDEATHSIG = 1
_starters: dict[int, ThreadPoolExecutor] = {}  # process id -> the thread that forks


def die_with_parent(parent: int) -> None:
    """SIGKILL this process when the thread that started it ends, or now, if process *parent* has ended already."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    if os.getppid() != parent:
        os._exit(1)


def exit_on_sigterm() -> None:
    """Let SIGTERM end a command as an exception does, so that the processes that it has started end first."""

    def terminated(number: int, _frame: object) -> NoReturn:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, terminated)


def in_starter(call: Callable[[], T]) -> T:
    """Run *call*, which forks, in a thread that lives as long as this process: the kernel ties a child to a thread."""
    starter = _starters.get(os.getpid())
    if starter is None:
        starter = _starters.setdefault(os.getpid(), ThreadPoolExecutor(1, "wancoll-starter"))
    return starter.submit(call).result()


def start(
    label: str,
    command: Sequence[str],
    folder: str,
    *,
    environment: Mapping[str, str] | None = None,
    place: AbstractContextManager[None] | None = None,
) -> Child:
    """Start a program or a Python module (see this module), in a session of its own, with nothing on standard input.

    *label* names it in errors, and its files in *folder*: LABEL.out has its standard output, and its standard error is
    appended to LABEL.log. *environment* is the child's; None: this process's. The thread that starts it has entered
    *place* meanwhile: the host that the child runs on.
    """
    out, log = (os.path.join(folder, f"{label}.{end}") for end in ("out", "log"))

    def spawn() -> subprocess.Popen[bytes]:
        opened = partial(open, opener=partial(os.open, mode=0o600))  # this user's alone
        with opened(out, "wb") as stdout, opened(log, "ab") as stderr, place or nullcontext():
            # A session of its own: a Ctrl-C at the terminal is for this process, which then ends its children.
            return subprocess.Popen(
                [sys.executable, "-m", "wancoll.process", str(os.getpid()), *command],
                stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, env=environment, start_new_session=True,
            )  # fmt: skip

    process = in_starter(spawn)
    return Child(f"{label} ({' '.join(command)})", process.pid, process.poll, out, log)


class Child:
    """A child process, called *label* in errors; *poll* gives its exit_code.

    *out* and *log* are paths of the files with its standard output, which said() reads, and its standard error.
    """

    def __init__(self, label: str, pid: int, poll: Callable[[], int | None], out: str = "", log: str = "") -> None:
        self.label, self.pid, self._poll, self._out, self._log = label, pid, poll, out, log

    @property
    def exit_code(self) -> int | None:
        """None while it runs, minus the signal's number if one ended it."""
        return self._poll()

    @property
    def running(self) -> bool:
        """Whether the process is there; a stopped one is."""
        return self.exit_code is None

    def said(self, word: str, timeout: float) -> str:
        """Wait for a service's line "wancoll NAME WORD ...", with "started" or "ready"; returns what follows.

        Raises:
            ConfigError: it ended, or said nothing within *timeout* seconds; the error holds the end of its log.
        """
        return self.until(partial(self._after, word), timeout, f"a line with {word!r} on its standard output")

    def _after(self, word: str) -> str | None:
        with open(self._out, encoding="utf-8", errors="replace") as out:
            for line in out:
                before, found, rest = line.rstrip("\n").partition(f" {word} ")
                if found and before.startswith("wancoll ") and line.endswith("\n"):
                    return rest
        return None

    def until(self, look: Callable[[], T | None], timeout: float, expected: str) -> T:
        """What *look* gives as soon as it gives something.

        Raises:
            ConfigError: the process ended, or *timeout* seconds have passed; the error holds the end of its log.
        """
        deadline = time.monotonic() + timeout
        while True:
            code = self.exit_code  # before the look: its last words count
            if found := look():
                return found
            if code is not None or time.monotonic() > deadline:
                got = f"nothing within {timeout:.1f} s" if code is None else f"exit code {code}"
                raise ConfigError(
                    "the child process did not start",
                    who=self.label,
                    expected=expected,
                    got=f"{got}; the end of its log:\n{self.log_tail()}",
                )
            time.sleep(_POLL)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal. Raises ConfigError: the process has ended."""
        code = self.exit_code
        if code is not None:
            raise ConfigError(
                f"cannot get {number.name}", who=self.label, expected="a running process", got=f"exit code {code}"
            )
        with contextlib.suppress(ProcessLookupError):  # it has ended since
            os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL; returns when the process is gone."""
        while self.running:
            with contextlib.suppress(ConfigError):
                self.signal(signal.SIGKILL)
            time.sleep(_POLL)

    def pause(self, timeout: float = 5.0) -> None:
        """SIGSTOP; returns when all its threads stand still."""
        self.signal(signal.SIGSTOP)
        wait_stopped(self.pid, self.label, timeout)

    def resume(self) -> None:
        """SIGCONT."""
        self.signal(signal.SIGCONT)

    def wait(self, timeout: float) -> int:
        """The exit code, once it ends by itself. Raises ConfigError: it still runs after *timeout* seconds."""
        deadline = time.monotonic() + timeout
        while (code := self.exit_code) is None:
            if time.monotonic() > deadline:
                expected = f"its end within {timeout:.1f} s"
                raise ConfigError("the process still runs", who=self.label, expected=expected, got=self.log_tail(1))
            time.sleep(_POLL)
        return code

    def log_tail(self, lines: int = 50) -> str:
        """The last lines that the process wrote to its standard error."""
        try:
            with open(self._log, "rb") as log:
                log.seek(max(0, os.path.getsize(self._log) - _TAIL_BYTES * max(1, lines // 25)))
                return "\n".join(log.read().decode(errors="replace").splitlines()[-lines:])
        except FileNotFoundError:
            return ""


def end(children: Sequence[Child], seconds: float) -> None:
    """SIGTERM to all, also to those that are stopped; after *seconds*, SIGKILL to those that are left."""
    for child in children:
        with contextlib.suppress(ConfigError):
            child.signal(signal.SIGTERM)
            child.signal(signal.SIGCONT)
    deadline = time.monotonic() + seconds
    while any(child.running for child in children) and time.monotonic() < deadline:
        time.sleep(_POLL)
    for child in children:
        child.kill()


def wait_stopped(pid: int, label: str, timeout: float) -> None:
    """Return once every thread of *pid* is stopped. Raises ConfigError: not so within *timeout* seconds."""
    deadline = time.monotonic() + timeout
    while not all(state == "T" for state in _thread_states(pid)):
        if time.monotonic() > deadline:
            raise ConfigError("did not stop", who=label, expected=f"all threads stopped within {timeout:.1f} s")
        time.sleep(0.0005)


def is_stopped(pid: int) -> bool:
    """Whether any thread of *pid* stands still; not so where there is no such process any more."""
    try:
        return "T" in _thread_states(pid)
    except FileNotFoundError:
        return False


def _thread_states(pid: int) -> list[str]:
    states = []
    for thread in os.listdir(f"/proc/{pid}/task"):
        try:
            with open(f"/proc/{pid}/task/{thread}/stat", encoding="ascii", errors="replace") as stat:
                states.append(stat.read().rpartition(")")[2].split()[0])
        except (FileNotFoundError, ProcessLookupError):
            continue  # the thread ended meanwhile
    return states


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    program = sys.argv[2]
    if os.sep in program:
        os.execv(program, sys.argv[2:])
    del sys.argv[:2]
    runpy.run_module(program, run_name="__main__", alter_sys=True)
