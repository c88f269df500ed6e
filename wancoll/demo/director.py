"""The demo's course of events: who starts when, the kill in the middle of an all-reduce, the newcomer."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from wancoll.demo import data, reports
from wancoll.demo.outcome import Outcome
from wancoll.demo.show import Show
from wancoll.demo.worker import Course, take_part, train_alone
from wancoll.errors import ConfigError, WancollError
from wancoll.process import wait_stopped
from wancoll.testing import ClientProcess, Cluster

_MID_OP_TIMEOUT = 10.0  # seconds for the armed all-reduce to be under way
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


@dataclass(frozen=True, slots=True)
class DemoPlan:
    """What shall happen."""

    peers: int = 4  # members at the start
    steps: int = 800  # of training, in all
    seed: int = 0  # of the first parameters and the batches
    silence_timeout: float = 60.0  # seconds without a report from any process before the demo gives up
    secure: bool = False  # whether all goes over TLS

    @property
    def kill_in(self) -> int:
        """The step whose all-reduce a peer does not survive."""
        return self.steps // 2

    @property
    def call_newcomer_in(self) -> int:
        """The step after which the newcomer's machine is started, while the others train."""
        return self.steps * 9 // 16

    @property
    def join_before(self) -> int:
        """The first step that the newcomer takes part in."""
        return self.steps * 3 // 4


def play(plan: DemoPlan, show: Show) -> Outcome:
    """Run the demo on processes of its own; they all end with it, also when it fails or is interrupted."""
    os.environ.update(_ONE_THREAD)  # which the training processes inherit
    with Cluster(plan.peers, fork=True, secure=plan.secure) as cluster, ThreadPoolExecutor(max_workers=1) as helper:
        return _Director(plan, show, cluster, helper).direct()


class _Director:
    """Reacts to the training processes' reports; see play()."""

    def __init__(self, plan: DemoPlan, show: Show, cluster: Cluster, helper: ThreadPoolExecutor) -> None:
        self._plan, self._show, self._cluster, self._helper = plan, show, cluster, helper
        self._outcome = Outcome(plan.steps)
        self._course = Course(data.digits(), plan.seed, plan.steps)
        self._processes: list[ClientProcess] = []  # [i] is the client of the cluster's daemon i
        self._ranks: dict[int, int] = {}  # rank -> index of the member, at the start
        self._waiting: set[str] = set()
        self._new_daemon: Future[int] | None = None  # its index, once it runs

    def direct(self) -> Outcome:
        """Start all, react until all have finished."""
        for _ in range(self._plan.peers):
            self._start_member(self._plan.kill_in, self._plan.join_before)
        alone = ClientProcess("single process", train_alone, (self._course,), fork=True)
        try:
            while not self._outcome.newcomer or self._training():
                for i, report in self._hear():
                    self._hear_member(i, report)
            self._outcome.alone, self._outcome.alone_finished = alone.result(self._plan.silence_timeout)
        finally:
            alone.close()
        return self._outcome

    def _start_member(self, *wait_before: int) -> None:
        i = len(self._processes)
        name = self._cluster.name(i)
        process = self._cluster.client(i, take_part, name, self._plan.peers, self._course, wait_before)
        self._processes.append(process)
        self._outcome.reports[name] = []

    def _training(self) -> dict[ClientProcess, int]:
        """Those that are alive and have not finished, and their index."""
        over = {self._outcome.victim, *self._outcome.finished}
        return {one: i for i, one in enumerate(self._processes) if self._cluster.name(i) not in over}

    def _hear(self) -> Iterator[tuple[int, reports.AnyReport]]:
        """The next reports, and the index of whose they are.

        Raises:
            WancollError: a process ended that was neither killed nor finished, or all have been silent for too long.
        """
        training = self._training()
        heard = ClientProcess.heard(training, self._plan.silence_timeout)
        if not heard:
            raise WancollError(
                f"no training process has said anything for {self._plan.silence_timeout:g} s",
                who=", ".join(self._cluster.name(i) for i in training.values()),
                hint="a slow machine needs more: --silence-timeout",
            )
        for process in heard:
            i = training[process]
            if self._cluster.name(i) == self._outcome.victim:  # since: by what another one said
                continue
            try:
                report = process.next(0.0)
            except Exception as bad:
                got = f"{type(bad).__name__}: {bad}"
                raise WancollError("the training process ended early", who=self._cluster.name(i), got=got) from bad
            yield i, report

    def _hear_member(self, i: int, report: reports.AnyReport) -> None:
        name = self._cluster.name(i)
        match report:
            case reports.Started():
                self._show.started(report)
                self._ranks.setdefault(report.rank, i)
            case reports.Waiting():
                self._waiting.add(name)
                if self._waiting == set(self._outcome.members):
                    self._all_wait(report.step)
            case reports.Stepped():
                self._outcome.reports[name].append(report)
                self._show.stepped(report)
                if report.step == self._plan.kill_in and len(self._outcome.hit) == self._plan.peers - 1:
                    self._show.recovered(self._outcome)
                if report.step >= self._plan.call_newcomer_in:
                    self._call_newcomer()
            case reports.Finished():
                self._outcome.finished[name] = report

    def _all_wait(self, step: int) -> None:
        """Every member that is alive waits for word, at the same step; a newcomer before it connects."""
        if step == self._plan.kill_in and not self._outcome.victim:
            self._waiting.clear()
            self._kill_in_mid_op()
        elif not self._outcome.newcomer:  # they are there sooner than it
            self._call_newcomer(wait=True)
        else:
            self._waiting.clear()
            for process in self._training():
                process.answer(self._plan.peers)

    def _kill_in_mid_op(self) -> None:
        """Let the all-reduce start, stop one member's daemon in it, and kill daemon and training process.

        The stop pins the moment: all have called the operation, and the one to be killed has sent nothing yet. Once all
        of its bytes were with the others they would commit its part without it.
        """
        i = self._ranks[self._plan.peers // 2]
        name = self._cluster.name(i)
        self._cluster.failpoint(i, "on_post", "pause")
        for process in self._processes:
            process.answer(0)
        wait_stopped(self._cluster.pid(i), f"{name}'s daemon", _MID_OP_TIMEOUT)
        self._await_running([k for k in range(self._plan.peers) if k != i])
        self._outcome.victim, self._outcome.killed_in = name, self._plan.kill_in
        self._outcome.killed_at = time.monotonic()
        self._processes[i].kill()
        self._cluster.kill(i)
        self._show.killed(self._outcome)

    def _await_running(self, who: list[int]) -> None:
        """Return once these members' daemons run the operation."""
        deadline = time.monotonic() + _MID_OP_TIMEOUT
        while not all(self._cluster.peer_status(k)["resources"]["ops"] for k in who):
            if time.monotonic() > deadline:
                raise ConfigError("did not begin the all-reduce", who="a peer", expected=f"within {_MID_OP_TIMEOUT} s")
            time.sleep(0.001)

    def _call_newcomer(self, *, wait: bool = False) -> None:
        """Start the newcomer's daemon beside the training, then its training process, which waits for word."""
        if self._new_daemon is None:
            self._new_daemon = self._helper.submit(self._cluster.add_peer)
        if not self._outcome.newcomer and (wait or self._new_daemon.done()):
            self._outcome.newcomer = self._cluster.name(self._new_daemon.result())
            self._show.called(self._outcome.newcomer)
            self._start_member(0)
