"""One `wancoll` service as a child process: started, waited for, signalled, ended. Its output goes to files."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from contextlib import AbstractContextManager
from typing import Any

from wancoll.chaos.zygote import Forked, Zygote
from wancoll.errors import ConfigError

_POLL = 0.005  # seconds between looks at a file or a process state
_TAIL_BYTES = 8192


class Service:
    """A running `wancoll` command.

    Args:
        starter: runs the fork. The kernel ties a child to the thread that forked it, so this must be one
            thread that lives as long as the children shall.
        label: "master" or "peer-0"; names the log files.
        arguments: of the `wancoll` command.
        folder: where the log files go.
        environment: of the child.
        place: what the starting thread enters while it starts the child: the host that the child runs on.
        zygote: forks the child instead, if there is one.
    """

    _process: subprocess.Popen[bytes] | Forked

    def __init__(
        self,
        starter: Executor,
        label: str,
        arguments: Sequence[str],
        folder: str,
        environment: Mapping[str, str],
        place: AbstractContextManager[None],
        zygote: Zygote | None = None,
    ) -> None:
        self.label = label
        self._out, self._err = (os.path.join(folder, f"{label}.{stream}") for stream in ("out", "log"))
        self._arguments = list(arguments)
        self._ready_from = os.path.getsize(self._out) if os.path.exists(self._out) else 0
        command = [sys.executable, "-m", "wancoll.chaos.launch", str(os.getpid()), *arguments]
        with open(self._out, "ab") as out, open(self._err, "ab") as err:
            if zygote is not None:
                self._process = zygote.start(self._arguments, environment, self._out, self._err)
                return
            self._process = starter.submit(
                _start,
                place,
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=dict(environment),
                start_new_session=True,  # a Ctrl-C at the terminal is for the parent, which then ends its children
            ).result()

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether the process is there; a stopped one is."""
        return self.exit_code is None

    @property
    def exit_code(self) -> int | None:
        """None while it runs, minus the signal's number if one ended it."""
        return self._process.poll()

    def ready(self, timeout: float) -> str:
        """Wait for the readiness line; returns what follows "ready ".

        Raises:
            ConfigError: it ended, or said nothing within *timeout* seconds; the error holds the end of its log.
        """
        deadline = time.monotonic() + timeout
        while True:
            ended = not self.running  # looked at before the file: its last words count
            with open(self._out, encoding="utf-8", errors="replace") as out:
                out.seek(self._ready_from)
                for line in out:
                    before, found, rest = line.rstrip("\n").partition(" ready ")
                    if found and before.startswith("wancoll ") and line.endswith("\n"):
                        return rest
            if ended or time.monotonic() > deadline:
                got = f"exit code {self._process.returncode}" if ended else f"nothing within {timeout:.1f} s"
                raise ConfigError(
                    "the child process did not become ready",
                    who=f"{self.label} (wancoll {' '.join(self._arguments)})",
                    expected="a line with 'ready' on its standard output",
                    got=f"{got}; the end of its log:\n{self.log_tail()}",
                )
            time.sleep(_POLL)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal.

        Raises:
            ConfigError: the process has ended.
        """
        if not self.running:
            raise ConfigError(
                f"cannot get {number.name}",
                who=self.label,
                expected="a running process",
                got=f"exit code {self._process.returncode}",
            )
        self._process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL; returns when the process is gone."""
        if self.running:
            self._process.kill()
        self._process.wait()

    def pause(self, timeout: float = 5.0) -> None:
        """SIGSTOP; returns when all its threads stand still."""
        self.signal(signal.SIGSTOP)
        wait_stopped(self.pid, self.label, timeout)

    def wait(self, timeout: float) -> int:
        """The exit code, once it ends by itself.

        Raises:
            ConfigError: it still runs after *timeout* seconds.
        """
        try:
            return self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise ConfigError(
                "the process still runs",
                who=self.label,
                expected=f"its end within {timeout:.1f} s",
                got=self.log_tail(1),
            ) from None

    def end(self, deadline: float) -> None:
        """Wait until *deadline* (monotonic seconds) for the process to end, then SIGKILL it."""
        try:
            self._process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.kill()

    def ask_to_end(self) -> None:
        """SIGTERM, also where the process is stopped. Does not wait."""
        if self.running:
            self._process.terminate()
            self._process.send_signal(signal.SIGCONT)

    def log_tail(self, lines: int = 50) -> str:
        """The last lines that the process wrote to its standard error."""
        try:
            with open(self._err, "rb") as log:
                log.seek(max(0, os.path.getsize(self._err) - _TAIL_BYTES * max(1, lines // 25)))
                text = log.read().decode(errors="replace")
        except FileNotFoundError:
            return ""
        return "\n".join(text.splitlines()[-lines:])


def _start(place: AbstractContextManager[None], command: list[str], **options: Any) -> subprocess.Popen[bytes]:
    with place:
        return subprocess.Popen(command, **options)


def wait_stopped(pid: int, label: str, timeout: float) -> None:
    """Return once every thread of *pid* is stopped.

    Raises:
        ConfigError: not so within *timeout* seconds.
    """
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
