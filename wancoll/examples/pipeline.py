"""Pipeline: each rank has some of the layers; micro-batches go through them one after another.

A stage waits at the start and at the end of a step: that bubble is (p-1)/(m+p-1) of the time. GPipe runs all
forwards first and keeps what m micro-batches need for backward, 1F1B at most p.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from wancoll.examples.shared.adam import Adam
from wancoll.examples.shared.arguments import Options
from wancoll.examples.shared.model import count, loss_of, nbytes, transformer
from wancoll.examples.shared.ranks import Sent, launch, mean
from wancoll.examples.shared.report import Report
from wancoll.examples.shared.schedules import SCHEDULES, Step
from wancoll.examples.shared.text import batch, text


class Stage:
    """This rank's layers, between those of the ranks before and after it (None: there is none)."""

    def __init__(self, part: nn.Module, before: int | None, after: int | None, options: Options) -> None:
        self.part, self.before, self.after, self.options = part, before, after, options
        self.parameters = list(part.parameters())
        self.loss = 0.0  # of a step, on the last stage
        self.kept = 0  # micro-batches, at most, that a step kept for backward

    def run(self, plan: Sequence[Step], inputs: Sequence[Tensor], targets: Sequence[Tensor]) -> float:
        """One step of micro-batches *inputs*: gradients stand at the parameters; seconds that it computed.

        Each forward takes device_ms at least and a backward twice that: the rest is slept, as if each stage had a
        device of its own. Else stages that share a processor would wait for each other, not for what they need.
        """
        self.loss, self.kept, busy, sending = 0.0, 0, 0.0, []
        kept: dict[int, tuple[Tensor, Tensor]] = {}  # input, output
        for what, i in plan:
            gradient = None
            if what == "F":
                x = inputs[i] if self.before is None else self._receive(self.before, inputs[i]).requires_grad_()
            elif self.after is not None:
                gradient = self._receive(self.after, inputs[i])
            began = time.perf_counter()
            if what == "F":
                out = self.part(x)
                if self.after is None:
                    out = loss_of(out, targets[i]) / len(inputs)
                    self.loss += out.item()
                kept[i] = x, out
                self.kept = max(self.kept, len(kept))
                to, sent = self.after, out
            else:
                x, out = kept.pop(i)
                torch.autograd.backward(out, gradient)
                to, sent = self.before, x.grad
            wanted = self.options.device_ms / 1000 * (2 if what == "B" else 1)
            time.sleep(max(0.0, began + wanted - time.perf_counter()))
            busy += time.perf_counter() - began
            if to is not None:
                sent = sent.detach().contiguous()
                sending.append((dist.isend(sent, to), sent))
        for work, _ in sending:
            if work is not None:
                work.wait()
        return busy

    def _receive(self, source: int, like: Tensor) -> Tensor:
        x = torch.empty(*like.shape[:2], self.options.hidden)
        dist.recv(x, source)
        return x


def cut(model: nn.Sequential, stages: int) -> list[nn.Sequential]:
    """The embedding goes with the first layers, the head with the last."""
    layers = len(model) - 2
    ends = [1 + layers * (s + 1) // stages for s in range(stages)]
    ends[-1] = len(model)
    parts = list(model)
    return [nn.Sequential(*parts[begin:end]) for begin, end in zip([0, *ends], ends, strict=False)]


def train(options: Options) -> Report:
    """Train; the group stands. The schedules take turns: their gradients are the same."""
    rank, p, m = dist.get_rank(), dist.get_world_size(), options.micro_batches
    source, model = text(), transformer(options)
    n, each = count(model), options.precision
    part = cut(model, p)[rank]
    stage = Stage(part, rank - 1 if rank else None, rank + 1 if rank < p - 1 else None, options)
    adam, sent, losses, gradients = Adam(stage.parameters), Sent(), [], 0
    waited: dict[str, list[float]] = {}
    kept = {}
    for step, name in zip(range(options.steps), itertools.cycle(SCHEDULES)):
        x, y = (each.chunk(m) for each in batch(source, step, options))
        plan = SCHEDULES[name](rank, p, m)
        dist.barrier()
        began = time.perf_counter()
        with sent:
            busy = stage.run(plan, x, y)
        dist.barrier()
        waited.setdefault(name, []).append(1 - busy / (time.perf_counter() - began))
        kept[name] = stage.kept
        gradients = nbytes(each.grad for each in stage.parameters)
        adam.step(each.grad for each in stage.parameters)
        part.zero_grad()
        losses.append(mean(stage.loss) * p)
    rows = [("bubble", "with what sends take", "of computing alone; and micro-batches kept")]
    for name, values in waited.items():
        had, most = mean(min(values)), m if name == "GPipe" else min(m, p)
        theirs = 100 * (p - 1) / (m + p - 1)
        rows.append((f"  {name}", f"{100 * had:.1f} %, {kept[name]}", f"{theirs:.1f} % = (p-1)/(m+p-1), {most}"))
    edges = options.batch * options.sequence * options.hidden * 4  # a step's activations between stages, float32
    return Report(
        losses,
        sent.per_step,
        (edges * min(2, p - 1), "activations on, gradients back"),
        (nbytes(stage.parameters), gradients, adam.nbytes()),
        (n * each.weight / p, n * each.gradient / p, n * each.optimizer / p),
        rows,
    )


if __name__ == "__main__":
    launch(
        "pipeline", train, steps=12,
        multiples=lambda options: {
            "batch": (options.micro_batches, "the micro-batches"), "layers": (options.world, "the stages"),
        },
    )  # fmt: skip
