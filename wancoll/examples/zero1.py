"""ZeRO-1: every rank has all weights and gradients, and the optimizer's state of its part of them.

Gradients are summed up by a reduce-scatter: a rank gets only the part that it updates. Then an all-gather brings the
weights together. An all-reduce is these two, so the bytes are those of data parallel.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from wancoll.examples.shared.adam import Adam
from wancoll.examples.shared.arguments import Options, shared_batch
from wancoll.examples.shared.model import backward, count, loss_of, nbytes, transformer
from wancoll.examples.shared.ranks import Sent, launch, mean
from wancoll.examples.shared.report import Report
from wancoll.examples.shared.text import batch, text


def flatten(model: nn.Module, world: int) -> tuple[Tensor, Tensor]:
    """Lay the parameters, and their gradients, into one tensor each, whose length *world* divides."""
    parameters = list(model.parameters())
    size = -(-sum(each.numel() for each in parameters) // world) * world
    weights, gradients = (torch.zeros(size, dtype=parameters[0].dtype) for _ in range(2))
    at = 0
    for each in parameters:
        here = slice(at, at + each.numel())
        weights[here] = each.detach().flatten()
        each.data, each.grad = weights[here].view_as(each), gradients[here].view_as(each)
        at += each.numel()
    return weights, gradients


def train(options: Options) -> Report:
    """Train; the group stands."""
    rank, world = dist.get_rank(), dist.get_world_size()
    source, model = text(), transformer(options)
    weights, gradients = flatten(model, world)
    mine = weights.chunk(world)[rank]  # the part that this rank updates, in place
    gradient = torch.empty_like(mine)
    adam, sent, losses = Adam([mine]), Sent(), []
    for step in range(options.steps):
        x, y = (each.chunk(world)[rank] for each in batch(source, step, options))
        gradients.zero_()
        loss = loss_of(model(x), y)
        backward(loss)
        with sent:
            dist.reduce_scatter_single(gradient, gradients, op=dist.ReduceOp.SUM)
            adam.step([gradient / world])
            dist.all_gather_single(weights, mine.clone())
        losses.append(mean(loss))
    n, each = count(model), options.precision
    return Report(
        losses,
        sent.per_step,
        ((world - 1) / world * n * (each.gradient + each.weight), "(p-1)/p S + (p-1)/p S"),
        (nbytes([weights]), nbytes([gradients]), adam.nbytes()),
        (n * each.weight, n * each.gradient, n * each.optimizer / world),
    )


if __name__ == "__main__":
    launch("ZeRO-1", train, multiples=shared_batch)
