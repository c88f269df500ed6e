"""ZeRO-3: every rank has its shard of weights, gradients and optimizer's state. torch's FSDP2 does it.

A layer's weights are gathered before its forward and again before its backward, and dropped after each; its gradients
are scattered: three times (p-1)/p S where data parallel sends two.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from wancoll.examples.shared.adam import Adam
from wancoll.examples.shared.arguments import Options, shared_batch
from wancoll.examples.shared.model import backward, count, loss_of, nbytes, transformer
from wancoll.examples.shared.ranks import Sent, launch, mean
from wancoll.examples.shared.report import Report
from wancoll.examples.shared.text import batch, text


def local(tensor: Tensor | None) -> Tensor:
    """This rank's shard."""
    assert isinstance(tensor, DTensor)
    return tensor.to_local()


def train(options: Options) -> Report:
    """Train; the group stands."""
    rank, world = dist.get_rank(), dist.get_world_size()
    source, model = text(), transformer(options)
    n, p = count(model), options.precision
    mesh = init_device_mesh("cpu", (world,))
    for part in model:
        fully_shard(part, mesh=mesh, reshard_after_forward=True)
    fully_shard(model, mesh=mesh)
    parameters = list(model.parameters())
    shards = [local(each) for each in parameters]
    adam, sent, losses, gradients = Adam(shards), Sent(), [], 0
    for step in range(options.steps):
        x, y = (each.chunk(world)[rank] for each in batch(source, step, options))
        with sent:
            loss = loss_of(model(x), y)
            backward(loss)
        own = [local(each.grad) for each in parameters]
        gradients = nbytes(own)
        adam.step(own)
        model.zero_grad()
        losses.append(mean(loss))
    return Report(
        losses,
        sent.per_step,
        ((world - 1) / world * n * (2 * p.weight + p.gradient), "3 (p-1)/p S"),
        (nbytes(shards), gradients, adam.nbytes()),
        (n * p.weight / world, n * p.gradient / world, n * p.optimizer / world),
    )


if __name__ == "__main__":
    launch("ZeRO-3 by FSDP2", train, multiples=shared_batch)
