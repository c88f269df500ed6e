"""Processes that stand for ranks: each sleeps until it is told to measure, so that only one group runs at a time."""

from __future__ import annotations

import multiprocessing
import os
import signal
import statistics
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from typing import Any, Protocol

import numpy as np

from wancoll.cli.perf.values import known_values, reduced
from wancoll.process import die_with_parent

ANSWER_TIMEOUT = 120.0  # seconds for one command
START_TIMEOUT = 60.0
_SPAWN = multiprocessing.get_context("spawn")


class Member(Protocol):
    """One rank's way to all-reduce float32, sum, in place."""

    def tensor(self, mode: str, nbytes: int) -> np.ndarray:
        """The array that the next operation reduces, and that then holds its result."""

    def all_reduce(self, mode: str, nbytes: int) -> int:
        """Reduce that array. Returns the bytes that it sent, 0 if unknown."""

    def close(self) -> None:
        """Leave the group."""


@dataclass(frozen=True)
class Sample:
    """What one rank saw: the median seconds of an operation, wrong elements, bytes sent by one operation."""

    seconds: float
    wrong: int
    bytes_sent: int


class Ranks:
    """A group of processes.

    Args:
        name: for errors.
        make: makes the member inside its process: make(rank, number of ranks, *arguments[rank]). Importable.
        arguments: one tuple for each rank.
        places: what is entered while each rank's process is started: the host that it runs on. None: here.
    """

    def __init__(
        self,
        name: str,
        make: Callable[..., Member],
        arguments: Sequence[tuple[Any, ...]],
        places: Sequence[AbstractContextManager[None]] | None = None,
    ) -> None:
        self.name = name
        resource_tracker.ensure_running()  # a process of ours, which must not be on one of the hosts
        self._pipes: list[Connection] = []
        self._processes = []
        for rank, extra in enumerate(arguments):
            ours, theirs = _SPAWN.Pipe()
            process = _SPAWN.Process(
                target=_serve,
                args=(os.getpid(), theirs, make, rank, len(arguments), extra),
                name=f"{name} {rank}",
                daemon=True,
            )
            with places[rank] if places else nullcontext():
                process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        try:
            for rank in range(len(arguments)):
                self.receive(rank, START_TIMEOUT)
        except BaseException:
            self.close()
            raise

    def pid(self, rank: int) -> int:
        """Process id of a rank."""
        pid = self._processes[rank].pid
        assert pid is not None
        return pid

    def send(self, rank: int, mode: str, nbytes: int, iterations: int) -> None:
        """Tell one rank to measure."""
        self._pipes[rank].send((mode, nbytes, iterations))

    def receive(self, rank: int, timeout: float = ANSWER_TIMEOUT) -> Sample:
        """One rank's answer."""
        pipe = self._pipes[rank]
        if not pipe.poll(timeout):
            raise TimeoutError(f"{self.name}: rank {rank} has not answered after {timeout:.0f} s")
        answer = pipe.recv()
        if isinstance(answer, str):
            raise RuntimeError(f"{self.name}: rank {rank} failed:\n{answer}")
        return answer

    def measure(self, mode: str, nbytes: int, iterations: int) -> Sample:
        """Have all ranks measure; the time is rank 0's."""
        for rank in range(len(self._pipes)):
            self.send(rank, mode, nbytes, iterations)
        samples = [self.receive(rank) for rank in range(len(self._pipes))]
        return Sample(samples[0].seconds, sum(s.wrong for s in samples), max(s.bytes_sent for s in samples))

    def close(self) -> None:
        """End the processes."""
        for pipe in self._pipes:
            pipe.close()
        deadline = time.monotonic() + 5.0
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
            process.kill()
            process.join()


def _serve(
    parent: int, pipe: Connection, make: Callable[..., Member], rank: int, world_size: int, extra: tuple[Any, ...]
) -> None:
    os.setsid()  # the scheduler shares a core between sessions: every process of every contender gets its own
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        member = make(rank, world_size, *extra)
        pipe.send(Sample(0.0, 0, 0))
        checked: set[tuple[str, int]] = set()
        while True:
            try:
                mode, nbytes, iterations = pipe.recv()
            except EOFError:
                break
            wrong = 0
            if (mode, nbytes) not in checked:
                checked.add((mode, nbytes))
                wrong = _wrong(member, mode, nbytes, rank, world_size)
            pipe.send(_timed(member, mode, nbytes, iterations, wrong))
        member.close()
    except Exception:
        pipe.send(traceback.format_exc())


def _wrong(member: Member, mode: str, nbytes: int, rank: int, world_size: int) -> int:
    contributions = [known_values("sum", each, world_size).astype(np.float32) for each in range(world_size)]
    tensor = member.tensor(mode, nbytes)
    tensor[...] = np.resize(contributions[rank], tensor.shape)
    member.all_reduce(mode, nbytes)
    return int(np.count_nonzero(member.tensor(mode, nbytes) != np.resize(reduced("sum", contributions), tensor.shape)))


def _timed(member: Member, mode: str, nbytes: int, iterations: int, wrong: int) -> Sample:
    member.tensor(mode, nbytes).fill(0)
    sent = member.all_reduce(mode, nbytes)  # warms up, and lets the ranks start together
    times = []
    for _ in range(iterations):
        begin = time.perf_counter()
        member.all_reduce(mode, nbytes)
        times.append(time.perf_counter() - begin)
    return Sample(statistics.median(times), wrong, sent)
