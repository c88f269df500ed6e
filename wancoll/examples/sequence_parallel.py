"""Sequence parallel: tensor parallel, whose ranks also share the sequence where matrices are not split.

Around norm, dropout and sums each rank has its part of the sequence, and keeps only that for backward. Where tensor
parallel has an all-reduce, a reduce-scatter leaves the matrices and an all-gather enters them: the same bytes
(Korthikanti et al., 2022). Weights outside the matrices see part of the sequence: their gradients are summed up.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from wancoll.examples.shared.adam import Adam
from wancoll.examples.shared.arguments import Options
from wancoll.examples.shared.model import Block, Embed, backward, count, keeping, loss_of, nbytes, transformer
from wancoll.examples.shared.ranks import Sent, launch, mean
from wancoll.examples.shared.report import Report
from wancoll.examples.shared.text import batch, text
from wancoll.examples.tensor_parallel import ParallelBlock, exchange, split
from wancoll.units import format_bytes


def gather(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    """(batch, sequence / p, hidden) of each rank to (batch, sequence, hidden)."""
    mine = part.transpose(0, 1).contiguous()
    whole = mine.new_empty(mine.shape[0] * dist.get_world_size(group), *mine.shape[1:])
    dist.all_gather_single(whole, mine, group=group)
    return whole.transpose(0, 1)


def scatter(whole: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum of all ranks' (batch, sequence, hidden), of which each gets its part of the sequence."""
    given = whole.transpose(0, 1).contiguous()
    mine = given.new_empty(given.shape[0] // dist.get_world_size(group), *given.shape[1:])
    dist.reduce_scatter_single(mine, given, group=group)
    return mine.transpose(0, 1)


class SequenceBlock(ParallelBlock):
    """A layer whose norms, dropouts and sums have this rank's part of the sequence."""

    def __init__(self, options: Options, number: int, whole: Block, group: dist.ProcessGroup) -> None:
        super().__init__(options, number, whole, group)
        each = options.sequence // dist.get_world_size(group)
        self.part = slice(dist.get_rank(group) * each, (dist.get_rank(group) + 1) * each)

    def enter(self, x: Tensor) -> Tensor:
        """The parts become whole."""
        return exchange(x, gather, scatter, self.group)

    def leave(self, x: Tensor) -> Tensor:
        """The sums become parts."""
        return self._drop(exchange(x, scatter, gather, self.group))


def train(options: Options) -> Report:
    """Train; the group stands. All ranks have the whole batch, and a part of each sample."""
    world, group = dist.get_world_size(), dist.group.WORLD
    source, model = text(), transformer(options)
    n, p = count(model), options.precision
    assert group is not None
    split(model, options, group, SequenceBlock)
    embed, first = model[0], model[1]
    assert isinstance(embed, Embed)
    assert isinstance(first, SequenceBlock)
    parameters, split_ones = list(model.parameters()), [w for b in model if isinstance(b, Block) for w in b.matrices()]
    shared = [each for each in parameters if not any(each is other for other in split_ones)]
    activations = options.batch * options.sequence * options.hidden * 4  # float32
    adam, sent, losses, gradients = Adam(parameters), Sent(), [], 0
    for step in range(options.steps):
        x, y = (each[:, first.part] for each in batch(source, step, options))
        kept: dict[int, int] = {}
        with sent, keeping(kept):
            places = embed.places.weight[first.part].float()
            loss = loss_of(model[1:](embed.bytes(x).float() + places), y) / world
            backward(loss)
            for each in shared:
                dist.all_reduce(each.grad)
        gradients = nbytes(each.grad for each in parameters)
        adam.step(each.grad for each in parameters)
        model.zero_grad()
        losses.append(mean(loss) * world)
    return Report(
        losses,
        sent.per_step,
        (
            2 * (world - 1) / world * (4 * options.layers * activations + nbytes(shared)),
            "2(p-1)/p (4 L activations + rest)",
        ),
        (nbytes(parameters), gradients, adam.nbytes()),
        (n * p.weight / world, n * p.gradient / world, n * p.optimizer / world),
        [("embedding and head", "whole on each rank", ""), ("kept for backward", format_bytes(sum(kept.values())), "")],
    )


if __name__ == "__main__":
    launch(
        "sequence parallel", train, dropout=0.1,
        multiples=lambda options: dict.fromkeys(("heads", "sequence"), (options.world, "the ranks")),
    )  # fmt: skip
