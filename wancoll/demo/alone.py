"""The same training in a single process, without wancoll: what the demo compares with."""

from __future__ import annotations

import argparse
import os

from wancoll.demo import data, reports
from wancoll.demo.model import Replica, accuracy, loss_and_gradient
from wancoll.process import die_with_parent


def train(digits: data.Digits, *, seed: int, steps: int) -> tuple[Replica, list[float]]:
    """Returns the trained replica and the mean loss of each step."""
    replica = Replica(seed)
    losses = []
    for step in range(1, steps + 1):
        mine = data.batch(seed, step, len(digits.labels))
        loss, gradient = loss_and_gradient(replica.parameters, digits.images[mine], digits.labels[mine])
        replica.apply(gradient / len(mine))
        losses.append(loss / len(mine))
    return replica, losses


def main() -> None:
    """`python -m wancoll.demo.alone`: reports its steps when all are done."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--parent", type=int, default=os.getppid())
    parser.add_argument("--digits", required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    options = parser.parse_args()
    die_with_parent(options.parent)
    digits = data.load(options.digits)
    replica, losses = train(digits, seed=options.seed, steps=options.steps)
    for step, loss in enumerate(losses, start=1):
        reports.tell(reports.Stepped(step, loss, data.BATCH))
    score = accuracy(replica.parameters, digits.test_images, digits.test_labels)
    reports.tell(reports.Finished(replica.step, score, replica.digest()))


if __name__ == "__main__":
    main()
