"""One training process of the demo: an elastic training loop as a user of wancoll would write it."""

from __future__ import annotations

import argparse
import os
import sys
import time
from typing import TYPE_CHECKING

import numpy as np

import wancoll
from wancoll.demo import data, reports
from wancoll.demo.model import PARAMETERS, Array, Replica, accuracy, loss_and_gradient
from wancoll.process import die_with_parent

if TYPE_CHECKING:
    from wancoll.client.communicator import Communicator


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


def take_step(comm: Communicator, replica: Replica, digits: data.Digits, buffer: Array, seed: int) -> reports.Stepped:
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
    return reports.Stepped(
        step, float(mean[-1]), samples, receipt.epoch, list(receipt.contributors), receipt.attempts, committed
    )


def train(comm: Communicator, replica: Replica, digits: data.Digits, options: argparse.Namespace) -> int:
    """Train up to step number options.steps; returns how many steps this process took part in."""
    buffer = comm.empty(PARAMETERS + 2, np.float32)  # in shared memory: the operation copies nothing
    taken = 0
    while True:
        reports.tell(take_step(comm, replica, digits, buffer, options.seed))
        taken += 1
        if replica.step == options.steps:
            return taken
        admit(comm, replica)  # a newcomer goes on from here with the others: with the next step
        if replica.step + 1 in options.wait_before:
            wanted = wait_for_word(replica.step + 1)
            while comm.world_size < wanted:  # the same answer on every member: they are in the same epoch
                time.sleep(0.005)
                admit(comm, replica)


def wait_for_word(step: int) -> int:
    """Tell the demo that step number *step* is next and wait until it says how many members there shall be."""
    reports.tell(reports.Waiting(step))
    line = sys.stdin.readline()
    if not line:
        sys.exit("the demo has gone")
    return int(line)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--parent", type=int, default=os.getppid(), help="process that this one must not outlive")
    parser.add_argument("--socket", required=True, help="of this machine's peer daemon")
    parser.add_argument("--name", required=True, help="of this member")
    parser.add_argument("--start-world", type=int, required=True)
    parser.add_argument("--min-world", type=int, required=True)
    parser.add_argument("--digits", required=True, help="the .npz file")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--wait-before", type=int, action="append", default=[], help="step; 0: before connecting")
    parser.add_argument("--spoil", action="store_true", help="flip one bit of the parameters at the end (a test)")
    return parser.parse_args()


def main() -> None:
    """`python -m wancoll.demo.worker`."""
    options = parse()
    die_with_parent(options.parent)
    digits = data.load(options.digits)
    replica = Replica(options.seed)
    if 0 in options.wait_before:
        wait_for_word(0)
    try:
        with wancoll.connect(
            socket=options.socket, name=options.name, start_world=options.start_world, min_world=options.min_world
        ) as comm:
            hand_over(comm, replica)
            reports.tell(reports.Started(comm.rank, comm.epoch, list(comm.members), replica.step))
            taken = train(comm, replica, digits, options)
    except wancoll.WancollError as error:
        sys.exit(f"{type(error).__name__}: {error}")
    if options.spoil:
        replica.parameters.view(np.uint32)[0] ^= 1
    score = accuracy(replica.parameters, digits.test_images, digits.test_labels)
    reports.tell(reports.Finished(taken, score, replica.digest()))


if __name__ == "__main__":
    main()
