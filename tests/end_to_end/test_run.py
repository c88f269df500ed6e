"""wancoll.run on real processes: each of them is killed once, and every step counts once."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import wancoll
from wancoll.testing import Ask, ClientProcess, Cluster, in_threads, tell

SIZE = 1000
GATE = 50  # steps
SECONDS = 60.0


def of_step(step: int) -> Any:
    """Whole numbers, which every member gives: their mean is the same whoever takes part, and exact."""
    return np.arange(SIZE, dtype=np.float64) * (step % 97) + step


def live(socket: str, name: str) -> tuple[int, Any, int]:
    """A training process; tells the test where it stands at each gate. Returns its steps, its state, its lives."""
    state, step, lives = np.zeros(SIZE), 0, 0

    def catch_up(comm: wancoll.Communicator) -> None:
        nonlocal step
        step = comm.sync_state({"state": state}, revision=step).revision

    def train(comm: wancoll.Communicator) -> tuple[int, Any, int]:
        nonlocal step, lives
        lives += 1
        catch_up(comm)
        gradient = comm.empty(SIZE, np.float64)
        while True:
            gradient[:] = of_step(step)
            comm.all_reduce(gradient, op="avg")
            state[:] += gradient
            step += 1
            if step % GATE == 0 and tell(Ask((step, comm.world_size, comm.epoch))) == "stop":
                return step, state, lives
            if step % 10 == 0:
                comm.update_membership()
                catch_up(comm)

    return wancoll.run(train, name=name, socket=socket, start_world=3, min_world=1, timeout=SECONDS)


class Story:
    """The faults, one after the other: each when all three members are there again."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.members = [cluster.client(i, live, f"m{i}") for i in range(3)]
        self.faults: list[Callable[[], None]] = [self.kill_daemon, self.kill_trainer, self.kill_master]
        self.decided: dict[int, str] = {}  # what all are told at a gate, by its step
        self.epoch = 0  # in which the last fault came
        self.stopped: list[ClientProcess] = []

    def play(self) -> list[tuple[int, Any, int]]:
        deadline = time.monotonic() + 2 * SECONDS
        while len(self.stopped) < 3:
            assert time.monotonic() < deadline, self.decided
            heard = ClientProcess.heard([one for one in self.members if one not in self.stopped], 1.0)
            for member in heard[:1]:  # a fault changes who has something to say
                self.gate(member, *member.next(0.0))
        return [member.result(SECONDS) for member in self.members]

    def gate(self, member: ClientProcess, step: int, world: int, epoch: int) -> None:
        fault = None
        if step not in self.decided:
            whole = world == 3 and epoch > self.epoch
            self.decided[step] = "stop" if whole and not self.faults else "go"
            if whole and self.faults:
                fault, self.epoch = self.faults.pop(0), epoch
        member.answer(self.decided[step])
        if self.decided[step] == "stop":
            self.stopped.append(member)
        if fault is not None:
            fault()

    def kill_daemon(self) -> None:
        self.cluster.kill(0)
        self.cluster.restart_peer(0)

    def kill_trainer(self) -> None:
        """Whatever starts trainers starts it again; it has nothing but its name."""
        self.members[1].kill()
        self.members[1] = self.cluster.client(1, live, "m1")

    def kill_master(self) -> None:
        """For longer than --master-grace: all are out."""
        self.cluster.kill_master()
        deadline = time.monotonic() + SECONDS
        while any(one["epoch"] for i in range(3) for one in self.cluster.peer_status(i)["members"]):
            assert time.monotonic() < deadline
            time.sleep(0.01)
            for member in ClientProcess.heard(self.members, 0.0):
                self.gate(member, *member.next(0.0))  # no fault: the last one's epoch lasts
        self.cluster.start_master()


@pytest.mark.check
@pytest.mark.timeout(200)
def test_each_process_is_killed_once_and_every_step_counts_once() -> None:
    with Cluster(3, fork=True, peer_args=["--master-grace=1"], master_args=["--rejoin-grace=1"]) as cluster:
        ended = Story(cluster).play()
    steps = {step for step, _, _ in ended}
    assert len(steps) == 1
    unbroken = np.zeros(SIZE)
    for step in range(steps.pop()):
        unbroken += of_step(step)
    for _, state, _ in ended:
        assert np.array_equal(state, unbroken)
    assert [lives >= least for (_, _, lives), least in zip(ended, (3, 2, 2), strict=True)] == [True] * 3


@pytest.mark.check
def test_who_waits_for_the_group_is_told_who_is_there(caplog: pytest.LogCaptureFixture) -> None:
    here = "2 of 3 members are here to start the group"
    with Cluster(2, fork=True) as cluster:
        with pytest.raises(wancoll.TimeoutError, match=f"{here} \\(here: (a, b|b, a)\\)"):
            in_threads(lambda i: cluster.connect(i, name="ab"[i], start_world=3, timeout=6), 2, 30)
        assert f"still waiting for a place: {here} (here:" in caplog.text


@pytest.mark.check
def test_it_ends_where_trying_again_cannot_help() -> None:
    """A daemon that has no token for the master that it names: it would wait for ever."""
    with (
        Cluster(0, secure=True) as cluster,
        pytest.raises(wancoll.ConfigError, match="this master speaks TLS only; give --join"),
    ):
        wancoll.run(lambda comm: None, "g", master=cluster.master_option)
