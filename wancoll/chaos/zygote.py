"""Starts services by forking a process that has them loaded: a tenth of the time of a new interpreter."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor

from wancoll.errors import ConfigError

_START_SECONDS = 30.0


class Forked:
    """A process that a zygote has forked; what subprocess.Popen offers of it, as far as Service needs that."""

    def __init__(self) -> None:
        self.pid = 0
        self.returncode: int | None = None
        self.started = threading.Event()
        self.ended = threading.Event()

    def poll(self) -> int | None:
        """The exit code, None while it runs."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, once there is one.

        Raises:
            subprocess.TimeoutExpired: not in time.
        """
        if not self.ended.wait(timeout):
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        """SIGTERM."""
        self.send_signal(signal.SIGTERM)


class Zygote:
    """The zygote, seen from its parent.

    Args:
        starter: runs the fork; one thread that lives as long as the processes shall.
    """

    def __init__(self, starter: Executor) -> None:
        self._ids = itertools.count(1)
        self._lock = threading.Lock()
        self._starting: dict[int, Forked] = {}
        self._running: dict[int, Forked] = {}
        self._process: subprocess.Popen[str] = starter.submit(
            subprocess.Popen,
            [sys.executable, "-m", "wancoll.chaos.zygote_main", str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        ).result()
        self._reader = threading.Thread(target=self._read, name="zygote", daemon=True)
        self._reader.start()

    def start(self, arguments: Sequence[str], environment: Mapping[str, str], out: str, err: str) -> Forked:
        """Run `wancoll *arguments*`.

        Raises:
            ConfigError: the zygote does not answer.
        """
        number, forked = next(self._ids), Forked()
        order = {
            "id": number, "arguments": list(arguments), "environment": dict(environment), "out": out, "err": err,
        }  # fmt: skip
        assert self._process.stdin is not None
        with self._lock:
            self._starting[number] = forked
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.write(json.dumps(order) + "\n")
                self._process.stdin.flush()
        if not forked.started.wait(_START_SECONDS):
            raise ConfigError("starts no process", who="the zygote", got=f"exit code {self._process.poll()}")
        return forked

    def close(self) -> None:
        """End it, and with it all that it has forked."""
        self._process.kill()
        self._process.wait()
        self._reader.join()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            said: dict[str, int] = json.loads(line)
            if "id" in said:
                with self._lock:
                    forked = self._starting.pop(said["id"])
                forked.pid = said["pid"]
                self._running[forked.pid] = forked
                forked.started.set()
            else:
                forked = self._running.pop(said["pid"])
                forked.returncode = said["code"]
                forked.ended.set()
        for forked in self._running.values():  # they end with the zygote
            forked.returncode = forked.returncode if forked.returncode is not None else -signal.SIGKILL
            forked.ended.set()
