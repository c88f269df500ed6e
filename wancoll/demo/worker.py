"""The demo's training processes: an elastic training loop as a user of wancoll would write it, and one without."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

import wancoll
from wancoll.demo import data
from wancoll.demo.model import PARAMETERS, Array, Replica, accuracy, loss_and_gradient
from wancoll.demo.reports import Finished, Started, Stepped, Waiting
from wancoll.testing import Ask, tell

if TYPE_CHECKING:
    from wancoll.client.communicator import Communicator


@dataclass(frozen=True, slots=True)
class Course:
    """What all train: the digits, the seed, the steps in all."""

    digits: data.Digits
    seed: int
    steps: int


# ---- elastic ------------------------------------------------------------------------------------------


def admit(comm: Communicator, replica: Replica) -> None:
    """Let in who waits, and hand over the state; all members call this together.

    It is asked for also where nobody seems to have come, which is cheap: members may have learnt of the same change in
    one piece or in two, and must not call different things for it.
    """
    comm.update_membership()
    hand_over(comm, replica)


def hand_over(comm: Communicator, replica: Replica) -> None:
    """Give every member the state of those that have come furthest; all members call this together."""
    replica.step = comm.sync_state({"state": replica.state}, revision=replica.step).revision


def take_step(comm: Communicator, replica: Replica, digits: data.Digits, buffer: Array, seed: int) -> Stepped:
    """One step of training on this member's shard of the batch. *buffer* is (PARAMETERS + 2,), from comm.empty."""
    step = replica.step + 1
    mine = data.shard(data.batch(seed, step, len(digits.labels)), comm.rank, comm.world_size)
    loss, gradient = loss_and_gradient(replica.parameters, digits.images[mine], digits.labels[mine])
    buffer[:PARAMETERS], buffer[-2], buffer[-1] = gradient, loss, len(mine)  # one operation for all that is summed up
    receipt = comm.all_reduce(buffer, op="avg")
    committed = time.monotonic()
    # Average over average: the mean over the samples that took part, also where a member was lost on the way.
    mean = buffer[:-1] / buffer[-1]
    replica.apply(mean[:PARAMETERS])
    samples = round(float(buffer[-1]) * receipt.world_size)
    return Stepped(step, float(mean[-1]), samples, receipt.epoch, receipt.contributors, receipt.attempts, committed)


def train(comm: Communicator, replica: Replica, course: Course, wait_before: tuple[int, ...]) -> None:
    """Train up to the course's last step."""
    buffer = comm.empty(PARAMETERS + 2, np.float32)  # in shared memory: the operation copies nothing
    while replica.step < course.steps:
        tell(take_step(comm, replica, course.digits, buffer, course.seed))
        if replica.step == course.steps:
            return
        admit(comm, replica)  # a newcomer goes on from here with the others: with the next step
        if replica.step + 1 in wait_before:
            wanted = tell(Ask(Waiting(replica.step + 1)))
            while comm.world_size < wanted:  # the same answer on every member: they are in the same epoch
                time.sleep(0.005)
                admit(comm, replica)


def take_part(socket: str, name: str, start_world: int, course: Course, wait_before: tuple[int, ...]) -> None:
    """One member, by its machine's daemon at *socket*. It tells the demo what it does.

    *start_world*: members at the start; one less may go on. *wait_before*: steps before which it waits for word; 0:
    before it connects.
    """
    replica = Replica(course.seed)
    begun: list[int] = []

    def life(comm: Communicator) -> None:
        hand_over(comm, replica)
        begun.append(replica.step)
        tell(Started(comm.rank, comm.epoch, comm.members))
        train(comm, replica, course, wait_before)

    if 0 in wait_before:
        tell(Ask(Waiting(0)))
    wancoll.run(life, socket=socket, name=name, start_world=start_world, min_world=start_world - 1)
    tell(finished(replica, course.digits, replica.step - begun[0]))


# ---- alone --------------------------------------------------------------------------------------------


def train_alone(course: Course) -> tuple[list[Stepped], Finished]:
    """The same training in a single process, without wancoll: what the demo compares with."""
    digits, replica, steps = course.digits, Replica(course.seed), list[Stepped]()
    for step in range(1, course.steps + 1):
        mine = data.batch(course.seed, step, len(digits.labels))
        loss, gradient = loss_and_gradient(replica.parameters, digits.images[mine], digits.labels[mine])
        replica.apply(gradient / len(mine))
        steps.append(Stepped(step, loss / len(mine), len(mine)))
    return steps, finished(replica, digits, course.steps)


def finished(replica: Replica, digits: data.Digits, steps: int) -> Finished:
    """The last report of a process that took *steps* steps."""
    return Finished(steps, accuracy(replica.parameters, digits.test_images, digits.test_labels), replica.digest())
