"""Clients as processes of their own, so that a test can kill or stop one. They run a function of the caller's."""

from __future__ import annotations

import contextlib
import inspect
import multiprocessing
import os
import pickle
import signal
import time
from collections.abc import Callable
from concurrent.futures import Executor
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from wancoll.chaos.process import wait_stopped
from wancoll.chaos.tether import die_with_parent
from wancoll.errors import ConfigError, WancollError

_SPAWN = multiprocessing.get_context("spawn")
_FORK = multiprocessing.get_context("forkserver")


class ClientProcess:
    """A process that runs `target(socket, *arguments)`.

    What *target* returns is result(). If it is a generator function, what it yields is handed out by next().

    Args:
        starter: the thread that forks (see process.Service).
        label: names the client in errors.
        target: a function that a new interpreter can import.
        socket: path of its daemon's client socket, the first argument.
        arguments: the others; they are pickled.
        fork: from a process that has the target's module loaded.
    """

    def __init__(
        self,
        starter: Executor,
        label: str,
        target: Callable[..., Any],
        socket: str,
        arguments: tuple[Any, ...],
        *,
        fork: bool = False,
    ) -> None:
        self.label = label
        self._pipe, theirs = _SPAWN.Pipe(duplex=False)
        parent = 0 if fork else os.getpid()
        work = (parent, theirs, target, socket, arguments)
        if fork:
            _FORK.set_forkserver_preload([target.__module__])
            self._process: BaseProcess = _FORK.Process(target=_run, args=work, name=label, daemon=True)
        else:
            self._process = _SPAWN.Process(target=_run, args=work, name=label, daemon=True)
        starter.submit(self._process.start).result()
        theirs.close()
        self._last: tuple[str, Any] | None = None

    @property
    def pid(self) -> int:
        """Process id."""
        assert self._process.pid is not None
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether the process is there; a stopped one is."""
        return self._process.is_alive()

    def kill(self) -> None:
        """SIGKILL; returns when the process is gone."""
        self._process.kill()
        self._process.join()

    def pause(self) -> None:
        """SIGSTOP; returns when all its threads stand still."""
        os.kill(self.pid, signal.SIGSTOP)
        wait_stopped(self.pid, self.label, 5.0)

    def resume(self) -> None:
        """SIGCONT."""
        os.kill(self.pid, signal.SIGCONT)

    def next(self, timeout: float = 60.0) -> Any:
        """The next value that the target yields; raises what it raised.

        Raises:
            ConfigError: it returned or was killed instead, or is not there after *timeout* seconds.
        """
        kind, value = self._receive(time.monotonic() + timeout)
        if kind == "yield":
            return value
        self._last = (kind, value)
        if kind == "raise":
            raise value
        raise ConfigError("yielded nothing more", who=self.label, expected="another value", got=f"its end: {value!r}")

    def result(self, timeout: float = 60.0) -> Any:
        """What the target returned, once it did; raises what it raised. Values not taken with next() are dropped.

        Raises:
            ConfigError: the process was killed, or has not returned after *timeout* seconds.
        """
        deadline = time.monotonic() + timeout
        while True:
            kind, value = self._receive(deadline)
            if kind != "yield":
                self._last = (kind, value)
                if kind == "raise":
                    raise value
                return value

    def close(self) -> None:
        """Kill the process if it still runs, and free what it used here."""
        self.kill()
        self._pipe.close()

    def _receive(self, deadline: float) -> tuple[str, Any]:
        if self._last is not None:
            return self._last
        if not self._pipe.poll(max(0.0, deadline - time.monotonic())):
            raise ConfigError("has not answered in time", who=self.label, got="a process that still runs")
        try:
            kind, value = self._pipe.recv()
        except (EOFError, ConnectionResetError):
            self._process.join(5.0)
            raise ConfigError(
                "ended without a result", who=self.label, got=f"exit code {self._process.exitcode}"
            ) from None
        return str(kind), value


def _run(parent: int, pipe: Connection, target: Callable[..., Any], socket: str, arguments: tuple[Any, ...]) -> None:
    die_with_parent(parent or os.getppid())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C at the terminal is for the parent
    try:
        if inspect.isgeneratorfunction(target):
            answer = yield_to(pipe, target(socket, *arguments))
        else:
            answer = target(socket, *arguments)
        outcome: tuple[str, Any] = ("return", answer)
    except BaseException as bad:
        outcome = ("raise", _portable(bad))
    with contextlib.suppress(BrokenPipeError):
        pipe.send(outcome)


def yield_to(pipe: Connection, values: Any) -> Any:
    """Send what a generator yields; returns what it returns."""
    while True:
        try:
            value = next(values)
        except StopIteration as end:
            return end.value
        pipe.send(("yield", value))


def _portable(bad: BaseException) -> BaseException:
    """*bad* itself if it survives pickling as what it is, else a WancollError with its text."""
    with contextlib.suppress(Exception):
        if str(pickle.loads(pickle.dumps(bad))) == str(bad):
            return bad
    return WancollError(f"{type(bad).__name__}: {bad}")
