"""Tensor parallel: each layer's matrices are split over the ranks, the first of a pair in columns, the second in rows.

So what lies between them (the heads of attention, the MLP's width) is computed apart, and an all-reduce sums up what
comes out: two in forward and, mirrored, two in backward for each layer (Megatron-LM, Shoeybi et al., 2019).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from wancoll.examples.common import (
    Adam,
    Block,
    Options,
    Report,
    Sent,
    backward,
    batch,
    count,
    launch,
    loss_of,
    nbytes,
    text,
    transformer,
)


class Enter(torch.autograd.Function):
    """Forward as it is; backward each rank has the gradient through its columns: sum them up."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:  # noqa: D102
        ctx.group = group
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # noqa: D102
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class Leave(torch.autograd.Function):
    """Forward each rank has what its rows add: sum it up; backward as it is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:  # noqa: D102
        x = x.contiguous()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # noqa: D102
        return gradient, None


class ParallelBlock(Block):
    """This rank's columns and rows of a whole layer."""

    def __init__(self, options: Options, number: int, whole: Block, group: dist.ProcessGroup) -> None:
        super().__init__(options, number)
        self.group, rank, world = group, dist.get_rank(group), dist.get_world_size(group)
        self.heads = whole.heads // world
        self.norm1, self.norm2 = whole.norm1, whole.norm2
        qkv = whole.qkv.weight.view(3, options.hidden, options.hidden).chunk(world, dim=1)[
            rank
        ]  # whole heads of each of the three
        for mine, part in (
            (self.qkv, qkv.flatten(0, 1)),
            (self.out, whole.out.weight.chunk(world, dim=1)[rank]),
            (self.up, whole.up.weight.chunk(world)[rank]),
            (self.down, whole.down.weight.chunk(world, dim=1)[rank]),
        ):
            mine.weight = nn.Parameter(part.detach().clone())

    def enter(self, x: Tensor) -> Tensor:
        """Each rank has all of x."""
        return Enter.apply(x, self.group)  # type: ignore[no-any-return, no-untyped-call]

    def leave(self, x: Tensor) -> Tensor:
        """Each rank gets all of the sum."""
        return self._drop(Leave.apply(x, self.group))  # type: ignore[no-untyped-call]


def split(
    model: nn.Sequential, options: Options, group: dist.ProcessGroup, kind: type[ParallelBlock] = ParallelBlock
) -> None:
    """Put this rank's parts in the place of the layers."""
    for i, part in enumerate(model):
        if isinstance(part, Block):
            model[i] = kind(options, i - 1, part, group)


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
    launch("tensor parallel", train)
