"""Tensor parallel: each layer's matrices are split over the ranks, the first of a pair in columns, the second in rows.

So what lies between them (the heads of attention, the MLP's width) is computed apart, and an all-reduce sums up what
comes out: two in forward and, mirrored, two in backward for each layer (Megatron-LM, Shoeybi et al., 2019).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from wancoll.examples.shared.adam import Adam
from wancoll.examples.shared.arguments import Options
from wancoll.examples.shared.model import Block, backward, count, loss_of, nbytes, transformer
from wancoll.examples.shared.ranks import Sent, launch
from wancoll.examples.shared.report import Report
from wancoll.examples.shared.text import batch, text

Among = Callable[[Tensor, dist.ProcessGroup], Tensor]  # what ranks make of a tensor together


class Exchange(torch.autograd.Function):
    """*there* forward, *back* of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Among, back: Among, group: dist.ProcessGroup) -> Tensor:  # noqa: D102
        ctx.back, ctx.group = back, group
        return there(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:  # noqa: D102
        return ctx.back(gradient, ctx.group), None, None, None


def exchange(x: Tensor, there: Among, back: Among, group: dist.ProcessGroup) -> Tensor:
    """Exchange.apply, which torch gives no types."""
    return Exchange.apply(x, there, back, group)  # type: ignore[no-any-return, no-untyped-call]


def same(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return x as it is."""
    return x


def total(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum of all ranks'."""
    x = x.contiguous()
    dist.all_reduce(x, group=group)
    return x


class ParallelBlock(Block):
    """This rank's columns and rows of a whole layer."""

    def __init__(self, options: Options, whole: Block, group: dist.ProcessGroup) -> None:
        super().__init__(options)
        self.group, rank, world = group, dist.get_rank(group), dist.get_world_size(group)
        self.heads = whole.heads // world
        self.norm1, self.norm2 = whole.norm1, whole.norm2
        each = whole.qkv.weight.view(3, options.hidden, options.hidden)  # queries, keys, values
        qkv = each.chunk(world, dim=1)[rank]  # whole heads
        for mine, part in (
            (self.qkv, qkv.flatten(0, 1)),
            (self.out, whole.out.weight.chunk(world, dim=1)[rank]),
            (self.up, whole.up.weight.chunk(world)[rank]),
            (self.down, whole.down.weight.chunk(world, dim=1)[rank]),
        ):
            mine.weight = nn.Parameter(part.detach().clone())

    def enter(self, x: Tensor) -> Tensor:
        """Each rank has all of x, and the gradient through its columns: they are summed up."""
        return exchange(x, same, total, self.group)

    def leave(self, x: Tensor) -> Tensor:
        """Each rank has what its rows add, and gets the sum; the gradient is as it is."""
        return exchange(x, total, same, self.group)


def split(model: nn.Sequential, options: Options, group: dist.ProcessGroup) -> None:
    """Put this rank's parts in the place of the layers."""
    for i, part in enumerate(model):
        if isinstance(part, Block):
            model[i] = ParallelBlock(options, part, group)


def train(options: Options) -> Report:
    """Train; the group stands. All ranks compute the whole batch."""
    world = dist.get_world_size()
    source, model = text(), transformer(options)
    n, p = count(model), options.precision
    assert dist.group.WORLD is not None
    split(model, options, dist.group.WORLD)
    parameters = list(model.parameters())
    adam, sent, losses, gradients = Adam(parameters), Sent(), [], 0
    for step in range(options.steps):
        x, y = batch(source, step, options)
        with sent:
            loss = loss_of(model(x), y)
            backward(loss)
        gradients = nbytes(each.grad for each in parameters)
        adam.step(each.grad for each in parameters)
        model.zero_grad()
        losses.append(loss.item())
    activations = options.batch * options.sequence * options.hidden * 4  # float32
    return Report(
        losses,
        sent.per_step,
        (4 * options.layers * 2 * (world - 1) / world * activations, "4 L 2(p-1)/p activations"),
        (nbytes(parameters), gradients, adam.nbytes()),
        (n * p.weight / world, n * p.gradient / world, n * p.optimizer / world),
        [("embedding and head", "whole on each rank", "")],
    )


if __name__ == "__main__":
    launch("tensor parallel", train, multiples=lambda options: {"heads": (options.world, "the ranks")})
