"""The demo's training processes: started, listened to, told to go on, killed, ended."""

from __future__ import annotations

import contextlib
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Self

import msgspec

from wancoll.demo import reports
from wancoll.errors import WancollError

_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
_UNREAD_REPORTS = 1000  # after that a process waits until the demo has read some
_TAIL_LINES = 15


class Trainer:
    """One training process.

    Args:
        name: of the member; names the process in errors.
        module: what `python -m` runs.
        arguments: of the module.
        folder: where its standard error goes.
        heard: where its reports go, each with this object; None when the process has ended.
    """

    def __init__(self, name: str, module: str, arguments: Sequence[str], folder: str, heard: Mailbox) -> None:
        self.name, self.killed, self.finished = name, False, False
        self._log = os.path.join(folder, f"{name}.train.log")
        with open(self._log, "wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, f"--parent={os.getpid()}", *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, **_ONE_THREAD},
                start_new_session=True,  # a Ctrl-C at the terminal is for the demo, which then ends its children
            )
        self._heard = heard
        self.reader = threading.Thread(target=self._read, name=f"reports of {name}", daemon=True)
        self.reader.start()

    def go_on(self, world_size: int) -> None:
        """Answer its Waiting report: there shall be at least *world_size* members before it goes on."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended: its reader says so
            self._process.stdin.write(f"{world_size}\n")
            self._process.stdin.flush()

    def kill(self) -> None:
        """SIGKILL; does not wait."""
        self.killed = True
        self._process.kill()

    def exit_code(self) -> int:
        """Of the process; waits for its end."""
        return self._process.wait()

    def tail(self) -> str:
        """The last lines that it wrote to its standard error."""
        with open(self._log, encoding="utf-8", errors="replace") as log:
            return "\n".join(log.read().splitlines()[-_TAIL_LINES:])

    def free(self) -> None:
        """Reap the process, which has been killed, and close its pipes."""
        self._process.wait()
        self.reader.join()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            try:
                self._heard.put((self, reports.read(line)))
            except msgspec.DecodeError:
                sys.stderr.write(f"{self.name}: {line}")  # no report: something in there printed it
        self._heard.put((self, None))


Mailbox = queue.Queue[tuple[Trainer, reports.AnyReport | None]]


class Crew:
    """All training processes of one demo. A context manager; they end with it.

    Args:
        folder: for their logs.
        silence_timeout: seconds without any report after which the demo gives up.
    """

    def __init__(self, folder: str, silence_timeout: float) -> None:
        self._folder, self._silence_timeout = folder, silence_timeout
        self._heard: Mailbox = queue.Queue(_UNREAD_REPORTS)
        self._trainers: list[Trainer] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for trainer in self._trainers:
            trainer.kill()
        while any(trainer.reader.is_alive() for trainer in self._trainers):
            with contextlib.suppress(queue.Empty):  # a reader may wait for room
                self._heard.get(timeout=0.01)
        for trainer in self._trainers:
            trainer.free()

    def start(self, name: str, module: str, arguments: Sequence[str]) -> Trainer:
        """Start a process. In the main thread only: the kernel ends a child together with the thread that forked it."""
        trainer = Trainer(name, module, arguments, self._folder, self._heard)
        self._trainers.append(trainer)
        return trainer

    def hear(self) -> tuple[Trainer, reports.AnyReport]:
        """The next report, and whose it is.

        Raises:
            WancollError: a process ended that was neither killed nor finished, or all have been silent for too long.
        """
        deadline = time.monotonic() + self._silence_timeout
        while True:
            try:
                trainer, report = self._heard.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise self._silence() from None
            if report is not None:
                trainer.finished = trainer.finished or isinstance(report, reports.Finished)
                return trainer, report
            if not trainer.killed and not trainer.finished:
                got = f"exit code {trainer.exit_code()}; the end of its log:\n{trainer.tail()}"
                raise WancollError("the training process ended early", who=trainer.name, got=got)

    def _silence(self) -> WancollError:
        silent = [trainer for trainer in self._trainers if not trainer.finished and not trainer.killed]
        return WancollError(
            f"no training process has said anything for {self._silence_timeout:g} s",
            who=", ".join(trainer.name for trainer in silent),
            got="; ".join(f"{trainer.name}: {trainer.tail()}" for trainer in silent if trainer.tail()) or "no error",
            hint="a slow machine needs more: --silence-timeout",
        )
