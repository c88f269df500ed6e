"""ZeRO-2: every rank has all weights, and gradients and optimizer's state of its part of them only.

As backward comes through a layer, that layer's gradients go to their owners by a reduce-scatter and are dropped, while
backward goes on. The bytes are those of ZeRO-1; all gradients are never there at once.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from wancoll.examples.shared.adam import Adam
from wancoll.examples.shared.arguments import Options, shared_batch
from wancoll.examples.shared.model import backward, count, loss_of, nbytes, transformer
from wancoll.examples.shared.ranks import Sent, launch, mean
from wancoll.examples.shared.report import Report
from wancoll.examples.shared.text import batch, text


class Layer:
    """A part of the model: its weights in one tensor, and this rank's shard of them and of their gradients.

    *ready* is called when all gradients of the part are there.
    """

    def __init__(self, part: nn.Module, rank: int, world: int, ready: Callable[[Layer], None]) -> None:
        self._parameters, self._size, self._ready = list(part.parameters()), count(part), ready
        self.weights = torch.zeros(-(-self._size // world) * world, dtype=self._parameters[0].dtype)
        for each, flat in zip(self._parameters, self._split(self.weights), strict=True):
            flat.copy_(each.detach().flatten())
            each.data = flat.view_as(each)
            each.register_post_accumulate_grad_hook(self._arrived)  # type: ignore[no-untyped-call]
        self.shard = self.weights.chunk(world)[rank]
        self.gradient = torch.zeros_like(self.shard)
        self._whole: Tensor | None = None
        self._work: dist.Work | None = None

    def _split(self, flat: Tensor) -> tuple[Tensor, ...]:
        return torch.split(flat[: self._size], [each.numel() for each in self._parameters])

    def _arrived(self, _: Tensor) -> None:
        if all(each.grad is not None for each in self._parameters):
            self._ready(self)

    def send(self) -> None:
        """Begin to bring the gradients to their owners."""
        self._whole = torch.zeros_like(self.weights)
        for each, flat in zip(self._parameters, self._split(self._whole), strict=True):
            assert each.grad is not None
            flat.copy_(each.grad.flatten())
            each.grad = None
        self._work = dist.reduce_scatter_single(self.gradient, self._whole, op=dist.ReduceOp.SUM, async_op=True)

    def finish(self) -> None:
        """Wait until this rank has the sum of its shard, and drop the others'."""
        if self._work is not None:
            self._work.wait()
            self._work = self._whole = None

    def held(self) -> int:
        """Bytes of gradients that are there now."""
        return nbytes([*(each.grad for each in self._parameters), self.gradient, self._whole])


def train(options: Options) -> Report:
    """Train; the group stands."""
    rank, world = dist.get_rank(), dist.get_world_size()
    source, model = text(), transformer(options)
    flying: list[Layer] = []
    held: list[int] = []

    def ready(layer: Layer) -> None:
        layer.send()
        held.append(sum(each.held() for each in layers))
        flying.append(layer)
        if len(flying) > 1:  # one is on its way while backward computes the next
            flying.pop(0).finish()

    layers = [Layer(part, rank, world, ready) for part in model]
    adam, sent, losses = Adam(each.shard for each in layers), Sent(), []
    for step in range(options.steps):
        x, y = (each.chunk(world)[rank] for each in batch(source, step, options))
        with sent:
            loss = loss_of(model(x), y)
            backward(loss)
            flying.pop().finish()
            adam.step([each.gradient / world for each in layers])
            for each in layers:
                dist.all_gather_single(each.weights, each.shard.clone())
        losses.append(mean(loss))
    n, p = count(model), options.precision
    return Report(
        losses,
        sent.per_step,
        ((world - 1) / world * n * (p.gradient + p.weight), "(p-1)/p S + (p-1)/p S"),
        (nbytes(each.weights for each in layers), max(held), adam.nbytes()),
        (n * p.weight, n * p.gradient / world, n * p.optimizer / world),
        [("", "", "gradients: and two layers' while they leave")],
    )


if __name__ == "__main__":
    launch("ZeRO-2", train, multiples=shared_batch)
