"""DiLoCo: members train alone for H steps and average what they have come to. One is killed, another one joins.

The bytes are those of data parallel, divided by H, and by four with int8; two halves of the model take turns, and each
is under way while the next steps are computed.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

import torch
import torch._dynamo  # torch's optimizers want it: once, before members are forked

from wancoll.examples.shared.adam import LEARNING_RATE
from wancoll.examples.shared.alone import train_alone
from wancoll.examples.shared.arguments import shared_batch, told_options
from wancoll.examples.shared.model import backward, count, loss_of, transformer
from wancoll.examples.shared.play import Member, digest, play
from wancoll.examples.shared.text import batch, text
from wancoll.torch import DiLoCo
from wancoll.units import format_bytes

if TYPE_CHECKING:
    from wancoll.client.communicator import Communicator

H = 10


def train(comm: Communicator, member: Member) -> None:
    """One member's life."""
    options, source, model = member.options, text(), transformer(member.options)
    inner = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    diloco = DiLoCo(model.parameters(), every=H, fragments=2, delay=2, mixing=0.5)
    diloco.join(comm)
    members = comm.members
    while diloco.steps < options.steps:
        step = diloco.steps
        x, y = (each.chunk(options.world)[comm.rank] for each in batch(source, step, options))
        loss = loss_of(model(x), y)
        backward(loss)
        inner.step()
        inner.zero_grad()
        ended = diloco.step(tokens=x.numel())
        sent = sum(each.receipt.bytes_sent for each in ended)
        members = tuple(ended[-1].weights) if ended else members  # in the last average: at the end some leave sooner
        weights = digest(diloco.outer) if diloco.steps == options.steps else ""
        member.tell(diloco.steps, loss.item(), members, sent, weights)
        while diloco.steps == options.steps * 2 // 3 // H * H - 1 and comm.world_size < options.world:
            time.sleep(0.05)  # here, where a round ends, all wait for the newcomer, so that it is there for a while
            comm.update_membership()
            diloco.join(comm)


if __name__ == "__main__":
    title = "DiLoCo"
    options = told_options(title, steps=120, multiples=shared_batch)
    size = count(transformer(options))  # a byte for each parameter
    sent = 2 * (options.world - 1) / options.world * size / H
    formula = f"{format_bytes(sent)} = 2(p-1)/p S / (4 H) of {options.world}"
    sys.exit(0 if play(train, options).show(title, train_alone(options), options, formula, points=10.0) else 1)
