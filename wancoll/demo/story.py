"""The demo's course of events: who starts when, the kill in the middle of an all-reduce, the newcomer."""

from __future__ import annotations

import os
import tempfile
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from wancoll.chaos import Cluster
from wancoll.demo import data, reports
from wancoll.demo.outcome import Outcome
from wancoll.demo.show import Show
from wancoll.demo.trainers import Crew, Trainer
from wancoll.process import wait_stopped

_ALONE = "single process"
_MID_OP_TIMEOUT = 10.0  # seconds for the armed all-reduce to come to its middle


@dataclass(frozen=True, slots=True)
class Plan:
    """What shall happen.

    Attributes:
        peers: members at the start.
        steps: of training, in all.
        seed: of the first parameters and the batches.
        silence_timeout: seconds without a report from any process before the demo gives up.
        spoil: flip one bit in the newcomer's parameters at the end, so that the demo must fail; for its own test.
    """

    peers: int = 4
    steps: int = 800
    seed: int = 0
    silence_timeout: float = 60.0
    spoil: bool = False

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


def play(plan: Plan, show: Show) -> Outcome:
    """Run the demo on processes of its own; they all end with it, also when it fails or is interrupted."""
    with (
        tempfile.TemporaryDirectory(prefix="wancoll-demo-") as folder,
        Cluster(plan.peers) as cluster,
        ThreadPoolExecutor(max_workers=1) as helper,
        Crew(folder, plan.silence_timeout) as crew,
    ):
        return _Director(plan, show, cluster, helper, crew, os.path.join(folder, "digits.npz")).direct()


class _Director:
    """Reacts to the training processes' reports; see play()."""

    def __init__(
        self, plan: Plan, show: Show, cluster: Cluster, helper: ThreadPoolExecutor, crew: Crew, digits: str
    ) -> None:
        self._plan, self._show, self._cluster, self._helper, self._crew = plan, show, cluster, helper, crew
        self._digits = digits
        self._outcome = Outcome(plan.steps)
        self._common = [f"--digits={digits}", f"--seed={plan.seed}", f"--steps={plan.steps}"]
        self._alone: Trainer | None = None
        self._members: list[Trainer] = []  # [i] is the client of the cluster's daemon i
        self._ranks: dict[int, int] = {}  # rank -> index of the member, at the start
        self._waiting: set[str] = set()
        self._new_daemon: Future[int] | None = None  # its index, once it runs

    def direct(self) -> Outcome:
        """Start all, react until all have finished."""
        data.digits().save(self._digits)
        for _ in range(self._plan.peers):
            self._start_member(
                f"--wait-before={self._plan.kill_in}",
                f"--wait-before={self._plan.join_before}",
            )
        self._alone = self._crew.start(_ALONE, "wancoll.demo.alone", self._common)
        while not self._over():
            trainer, report = self._crew.hear()
            if trainer is self._alone:
                self._hear_alone(report)
            else:
                self._hear_member(trainer, report)
        return self._outcome

    def _over(self) -> bool:
        everyone = [*self._members, *([self._alone] if self._alone else [])]
        return bool(self._outcome.newcomer) and all(one.finished or one.killed for one in everyone)

    def _start_member(self, *extra: str) -> None:
        i = len(self._members)
        name = self._cluster.name(i)
        arguments = [
            f"--socket={self._cluster.socket(i)}",
            f"--name={name}",
            f"--start-world={self._plan.peers}",
            f"--min-world={self._plan.peers - 1}",
            *self._common,
            *extra,
        ]
        self._members.append(self._crew.start(name, "wancoll.demo.worker", arguments))
        self._outcome.reports[name] = []

    def _hear_alone(self, report: reports.AnyReport) -> None:
        if isinstance(report, reports.Stepped):
            self._outcome.alone.append(report)
        elif isinstance(report, reports.Finished):
            self._outcome.alone_finished = report

    def _hear_member(self, trainer: Trainer, report: reports.AnyReport) -> None:
        match report:
            case reports.Started():
                self._show.started(trainer.name, report)
                self._ranks.setdefault(report.rank, self._members.index(trainer))
            case reports.Waiting():
                self._waiting.add(trainer.name)
                if self._waiting == {one.name for one in self._members if not one.killed}:
                    self._all_wait(report.step)
            case reports.Stepped():
                self._outcome.reports[trainer.name].append(report)
                self._show.stepped(trainer.name, report)
                if report.step == self._plan.kill_in and len(self._outcome.hit) == self._plan.peers - 1:
                    self._show.recovered(self._outcome)
                if report.step >= self._plan.call_newcomer_in:
                    self._call_newcomer()
            case reports.Finished():
                self._outcome.finished[trainer.name] = report

    def _all_wait(self, step: int) -> None:
        """Every member that is alive waits for word, at the same step; a newcomer before it connects."""
        if step == self._plan.kill_in and not self._outcome.victim:
            self._waiting.clear()
            self._kill_in_mid_op()
        elif not self._outcome.newcomer:  # they are there sooner than it
            self._call_newcomer(wait=True)
        else:
            self._waiting.clear()
            for trainer in self._members:
                if not trainer.killed:
                    trainer.go_on(self._plan.peers)

    def _kill_in_mid_op(self) -> None:
        """Let the all-reduce start, stop one member's daemon in the middle of it, and kill daemon and training process.

        The stop pins the moment: what is killed has begun the operation and has not told the master that it is done.
        """
        i = self._ranks[self._plan.peers // 2]
        victim, name = self._members[i], self._cluster.name(i)
        for moment in ("mid_op", "before_done"):  # before_done: where the first bytes are the last ones too
            self._cluster.failpoint(i, moment, "pause")
        for trainer in self._members:
            trainer.go_on(0)
        wait_stopped(self._cluster.pid(i), f"{name}'s daemon", _MID_OP_TIMEOUT)
        self._outcome.victim, self._outcome.killed_in = name, self._plan.kill_in
        self._outcome.killed_at = time.monotonic()
        victim.kill()
        self._cluster.kill(i)
        self._show.killed(self._outcome)

    def _call_newcomer(self, *, wait: bool = False) -> None:
        """Start the newcomer's daemon beside the training, then its training process, which waits for word."""
        if self._new_daemon is None:
            self._new_daemon = self._helper.submit(self._cluster.add_peer)
        if not self._outcome.newcomer and (wait or self._new_daemon.done()):
            self._outcome.newcomer = self._cluster.name(self._new_daemon.result())
            self._show.called(self._outcome.newcomer)
            self._start_member("--wait-before=0", *(["--spoil"] if self._plan.spoil else []))
