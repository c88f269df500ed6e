"""Elastic data parallel: a member is killed, another one joins, and training goes on without losing a step.

Gradients are averaged over whoever took part. A newcomer is handed weights, optimizer and step.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

import torch
import torch._dynamo  # torch's optimizers want it: once, before members are forked

from wancoll.examples.shared.adam import LEARNING_RATE
from wancoll.examples.shared.alone import train_alone
from wancoll.examples.shared.arguments import told_options
from wancoll.examples.shared.model import backward, count, loss_of, transformer
from wancoll.examples.shared.play import Member, digest, play
from wancoll.examples.shared.text import batch, text
from wancoll.torch import ElasticDataParallel
from wancoll.units import format_bytes

if TYPE_CHECKING:
    from wancoll.client.communicator import Communicator


def train(comm: Communicator, member: Member) -> None:
    """One member's life."""
    options, source, model = member.options, text(), transformer(member.options)
    elastic = ElasticDataParallel(model, comm)
    adam = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    step = comm.sync_state(model, adam, revision=0).revision  # a newcomer's is the members'
    while step < options.steps:
        x, y = (each[comm.rank :: comm.world_size] for each in batch(source, step, options))
        elastic.weight = len(x)  # batches differ by one where the members do not divide the samples
        loss = loss_of(elastic(x), y)
        backward(loss)  # the gradients are the mean over receipt.contributors
        adam.step()
        adam.zero_grad()
        step, receipt = step + 1, elastic.receipt
        assert receipt is not None
        weights = digest(model.parameters()) if step == options.steps else ""
        member.tell(step, loss.item(), receipt.contributors, receipt.bytes_sent, weights)
        while step < options.steps:
            comm.update_membership()  # admits joiners
            step = comm.sync_state(model, adam, revision=step).revision
            if step != options.steps * 2 // 3 or comm.world_size >= options.world:
                break
            time.sleep(0.01)  # here all wait for the newcomer, so that it is there for a while


if __name__ == "__main__":
    title = "elastic data parallel"
    options = told_options(title, steps=60)
    size = 4 * count(transformer(options))
    formula = f"{format_bytes(2 * (options.world - 1) / options.world * size)} = 2(p-1)/p S of {options.world}"
    sys.exit(0 if play(train, options).show(title, train_alone(options), options, formula, points=5.0) else 1)
