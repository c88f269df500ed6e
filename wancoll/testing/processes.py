"""Processes that run a Python function: clients that a test can kill or stop, and services that are forked."""

from __future__ import annotations

import contextlib
import inspect
import multiprocessing
import os
import pickle
import runpy
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from wancoll.errors import ConfigError, WancollError
from wancoll.process import Child, die_with_parent, in_starter

_SPAWN = multiprocessing.get_context("spawn")
_FORK = multiprocessing.get_context("forkserver")
_FORK.set_forkserver_preload(["wancoll.testing.forkserver"])
_reaping = threading.Lock()  # multiprocessing looks after its children at each start, too


def _start(fork: bool, run: Callable[..., None], arguments: tuple[Any, ...], label: str) -> BaseProcess:
    """Run `run(parent, *arguments)` in a process of its own; *parent* is for die_with_parent, 0: the fork server."""
    context: Any = _FORK if fork else _SPAWN
    process: BaseProcess = context.Process(
        target=run, args=(0 if fork else os.getpid(), *arguments), name=label, daemon=True
    )
    with _reaping:
        in_starter(process.start)
    return process


def _poll(process: BaseProcess) -> Callable[[], int | None]:
    def poll() -> int | None:
        with _reaping:
            return process.exitcode

    return poll


# ---- services ---------------------------------------------------------------------------------------


def fork_service(label: str, arguments: Sequence[str], folder: str, environment: Mapping[str, str]) -> Child:
    """`wancoll ARGUMENTS`, as wancoll.process.start, from a process that has it loaded: a tenth of the time."""
    out, log = (os.path.join(folder, f"{label}.{end}") for end in ("out", "log"))
    os.close(os.open(out, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600))  # said() looks into it at once
    process = _start(True, _serve, (list(arguments), dict(environment), out, log), label)
    assert process.pid is not None
    return Child(f"{label} (wancoll {' '.join(arguments)})", process.pid, _poll(process), out, log)


def _serve(_parent: int, arguments: list[str], environment: dict[str, str], out: str, log: str) -> None:
    die_with_parent(os.getppid())
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(os.open(out, os.O_WRONLY), 1)
    os.dup2(os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), 2)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["wancoll", *arguments]
    runpy.run_module("wancoll", run_name="__main__")  # the program that a user starts, whatever lies behind it


# ---- clients ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ask:
    """Yielded by a client's generator: *value* is handed out as ever, and the generator goes on with the answer()."""

    value: Any


_told: Connection | None = None  # in a client: to whoever started it


def tell(value: Any) -> Any:
    """In a client: hand out *value*, as a generator's yield does, from anywhere; returns the answer() to an Ask."""
    assert _told is not None
    asks = isinstance(value, Ask)
    _told.send(("yield", value.value if asks else value))
    return _told.recv() if asks else None


class ClientProcess(Child):
    """A process that runs `target(*arguments)`.

    What *target* returns is result(). If it is a generator function, what it yields is handed out by next(); so is what
    it says with tell().

    Args:
        label: names the client in errors.
        target: a function that a new interpreter can import.
        arguments: they are pickled.
        fork: from a process that has what wancoll needs loaded.
    """

    def __init__(
        self, label: str, target: Callable[..., Any], arguments: tuple[Any, ...], *, fork: bool = False
    ) -> None:
        self._pipe, theirs = _SPAWN.Pipe()
        process = _start(fork, _run, (theirs, target, arguments), label)
        theirs.close()
        assert process.pid is not None
        super().__init__(label, process.pid, _poll(process))
        self._last: tuple[str, Any] | None = None

    def next(self, timeout: float = 60.0) -> Any:
        """The next value that the target yields; raises what it raised.

        Raises:
            ConfigError: it returned or was killed instead, or is not there after *timeout* seconds.
        """
        kind, value = self._receive(time.monotonic() + timeout)
        if kind == "return":
            raise ConfigError(
                "yielded nothing more", who=self.label, expected="another value", got=f"its end: {value!r}"
            )
        return value

    def answer(self, value: Any) -> None:
        """What the target goes on with after an Ask. One that has ended hears nothing."""
        with contextlib.suppress(OSError):
            self._pipe.send(value)

    def result(self, timeout: float = 60.0) -> Any:
        """What the target returned, once it did; raises what it raised. Values not taken with next() are dropped.

        Raises:
            ConfigError: the process was killed, or has not returned after *timeout* seconds.
        """
        deadline = time.monotonic() + timeout
        while True:
            kind, value = self._receive(deadline)
            if kind == "return":
                return value

    @property
    def ended(self) -> bool:
        """Whether next() has nothing more to give, because it returned, raised or was killed."""
        return self._last is not None

    def close(self) -> None:
        """Kill the process if it still runs, and free what it used here."""
        self.kill()
        self._pipe.close()

    def _receive(self, deadline: float) -> tuple[str, Any]:
        if self._last is None:
            if not self._pipe.poll(max(0.0, deadline - time.monotonic())):
                raise ConfigError("has not answered in time", who=self.label, got="a process that still runs")
            try:
                kind, value = self._pipe.recv()
            except (EOFError, ConnectionResetError):
                kind, value = "raise", ConfigError("ended without a result", who=self.label)
                with contextlib.suppress(ConfigError):
                    value = ConfigError("ended without a result", who=self.label, got=f"exit code {self.wait(5.0)}")
            if kind == "yield":
                return kind, value
            self._last = kind, value
        kind, value = self._last
        if kind == "raise":
            raise value
        return kind, value

    @staticmethod
    def heard(clients: Iterable[ClientProcess], timeout: float) -> list[ClientProcess]:
        """Those of which next() returns or raises at once; waits *timeout* seconds for one."""
        by_pipe: dict[Any, ClientProcess] = {client._pipe: client for client in clients if not client.ended}
        return [by_pipe[pipe] for pipe in wait(list(by_pipe), timeout)] if by_pipe else []


def _run(parent: int, pipe: Connection, target: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    global _told  # noqa: PLW0603
    die_with_parent(parent or os.getppid())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C at the terminal is for the parent
    _told = pipe
    try:
        answer = target(*arguments)
        outcome = ("return", _tell_all(answer) if inspect.isgeneratorfunction(target) else answer)
    except BaseException as bad:
        outcome = ("raise", _portable(bad))
    with contextlib.suppress(BrokenPipeError):
        pipe.send(outcome)


def _tell_all(values: Generator[Any, Any, Any]) -> Any:
    """Tell what a generator yields; returns what it returns."""
    answer = None
    while True:
        try:
            value = values.send(answer)
        except StopIteration as end:
            return end.value
        answer = tell(value)


def _portable(bad: BaseException) -> BaseException:
    """*bad* itself if it survives pickling as what it is, else a WancollError with its text."""
    with contextlib.suppress(Exception):
        if str(pickle.loads(pickle.dumps(bad))) == str(bad):
            return bad
    return WancollError(f"{type(bad).__name__}: {bad}")
