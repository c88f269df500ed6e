"""Data parallel: every rank has all weights, computes on its part of the batch, and gradients are averaged.

torch's DistributedDataParallel does it, bucket after bucket, while backward still runs.
"""

from __future__ import annotations

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from wancoll.examples.shared.adam import Adam
from wancoll.examples.shared.arguments import Options, shared_batch
from wancoll.examples.shared.model import backward, count, loss_of, nbytes, transformer
from wancoll.examples.shared.ranks import Sent, launch, mean
from wancoll.examples.shared.report import Report
from wancoll.examples.shared.text import batch, text


def train(options: Options) -> Report:
    """Train; the group stands."""
    rank, world = dist.get_rank(), dist.get_world_size()
    source, model = text(), transformer(options)
    parameters = list(model.parameters())
    ddp, adam = DistributedDataParallel(model), Adam(parameters)
    sent, losses, gradients = Sent(), [], 0
    for step in range(options.steps):
        x, y = (each.chunk(world)[rank] for each in batch(source, step, options))
        with sent:
            loss = loss_of(ddp(x), y)
            backward(loss)
        gradients = nbytes(each.grad for each in parameters)
        adam.step(each.grad for each in parameters)
        ddp.zero_grad()
        losses.append(mean(loss))
    n, each = count(model), options.precision
    return Report(
        losses,
        sent.per_step,
        (2 * (world - 1) / world * n * each.gradient, "2(p-1)/p S"),
        (nbytes(parameters), gradients, adam.nbytes()),
        (n * each.weight, n * each.gradient, n * each.optimizer),
    )


if __name__ == "__main__":
    launch("data parallel", train, multiples=shared_batch)
