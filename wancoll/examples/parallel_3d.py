"""Data x pipeline x tensor: eight ranks in a cube. Its lines are groups of a device mesh.

Ranks along "tensor" split each layer, those along "pipe" have different layers, those along "data" different samples;
only these average gradients. What sends most goes over the nearest neighbours: tensor, then pipe, then data.
"""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from wancoll.examples.pipeline import Stage, cut
from wancoll.examples.shared.adam import Adam
from wancoll.examples.shared.arguments import Options
from wancoll.examples.shared.model import count, nbytes, transformer
from wancoll.examples.shared.ranks import Sent, launch, mean
from wancoll.examples.shared.report import Report
from wancoll.examples.shared.schedules import one_forward_one_backward
from wancoll.examples.shared.text import batch, text
from wancoll.examples.tensor_parallel import split

PIPE, TENSOR = 2, 2  # the rest is data


def train(options: Options) -> Report:
    """Train; the group stands."""
    world = dist.get_world_size()
    data = world // (PIPE * TENSOR)
    mesh = init_device_mesh("cpu", (data, PIPE, TENSOR), mesh_dim_names=("data", "pipe", "tensor"))
    group = mesh.get_group("data")
    d, s, _ = mesh.get_coordinate() or (0, 0, 0)
    rank, m = dist.get_rank(), options.micro_batches // data  # of each pipeline
    source, model = text(), transformer(options)
    n, p = count(model), options.precision
    split(model, options, mesh.get_group("tensor"))
    part = cut(model, PIPE)[s]
    stage = Stage(part, rank - TENSOR if s else None, rank + TENSOR if s < PIPE - 1 else None, options)
    plan = one_forward_one_backward(s, PIPE, m)
    adam, sent, losses, gradients = Adam(stage.parameters), Sent(), [], 0
    for step in range(options.steps):
        x, y = (each.chunk(data)[d].chunk(m) for each in batch(source, step, options))
        with sent:
            stage.run(plan, x, y)
            for each in stage.parameters:
                dist.all_reduce(each.grad, op=dist.ReduceOp.AVG, group=group)
        gradients = nbytes(each.grad for each in stage.parameters)
        adam.step(each.grad for each in stage.parameters)
        part.zero_grad()
        losses.append(mean(stage.loss) * PIPE)
    shard = n / (PIPE * TENSOR)
    edges = options.batch / data * options.sequence * options.hidden * 4  # a pipeline's activations, float32
    lines = {
        "tensor": 4 * options.layers / PIPE * 2 * (TENSOR - 1) / TENSOR * edges,
        "pipe": edges * min(2, PIPE - 1),
        "data": 2 * (data - 1) / data * shard * p.gradient,
    }
    return Report(
        losses,
        sent.per_step,
        (sum(lines.values()), "tensor + pipe + data"),
        (nbytes(stage.parameters), gradients, adam.nbytes()),
        (shard * p.weight, shard * p.gradient, shard * p.optimizer),
        [("mesh", f"{data} x {PIPE} x {TENSOR}", ", ".join(f"{k} {v / 1e6:.3g} MB" for k, v in lines.items()))],
    )


def parts(options: Options) -> dict[str, tuple[int, str]]:
    """What it cuts into equal parts."""
    return {
        "world": (PIPE * TENSOR, "the ranks that hold one model"),
        "micro_batches": (options.world // (PIPE * TENSOR), "the models"),
        "batch": (options.micro_batches, "the micro-batches"),
        "heads": (TENSOR, "the ranks of a layer"),
    }


if __name__ == "__main__":
    launch("data x pipeline x tensor", train, world=8, device_ms=0.0, multiples=parts)
