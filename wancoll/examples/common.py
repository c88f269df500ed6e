"""What the examples share, so that each shows its own idea only: text, a small transformer, Adam, ranks, the table.

Run with no arguments an example starts its ranks on this machine; under torchrun it is one of them. It exits with 0
only if its losses are those of a single process, up to rounding.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import socket
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from wancoll.cli.units import format_bytes
from wancoll.schedule.training import PRECISIONS, Precision

BYTES = 256  # the model's vocabulary
LEARNING_RATE = 2e-3


@dataclass(frozen=True, slots=True)
class Options:
    """What every example is told on its command line.

    Attributes:
        world: ranks, where the example starts them.
        layers, hidden, heads: of the transformer.
        batch: samples of a step, over all ranks.
        micro_batches: of a step, for pipelines.
        sequence: bytes of a sample.
        dtype: of weights and gradients; the optimizer computes in float32.
        device_ms: a pipeline's forward of a micro-batch takes that long at least, milliseconds: the rest is slept, so
            that stages overlap on a machine with few cores as they would on devices of their own.
    """

    backend: str = "wancoll"
    world: int = 4
    steps: int = 20
    layers: int = 4
    hidden: int = 128
    heads: int = 4
    batch: int = 16
    micro_batches: int = 8
    sequence: int = 64
    dtype: str = "bfloat16"
    dropout: float = 0.0
    device_ms: float = 30.0

    @property
    def precision(self) -> Precision:
        """Bytes of a parameter: 2+2+12, or 4+4+8."""
        return PRECISIONS["mixed" if self.dtype == "bfloat16" else "single"]


@dataclass(slots=True)
class Report:
    """What one rank found out.

    Attributes:
        losses: of each step, over the whole batch.
        sent: bytes that this rank sent in a step, measured.
        sent_formula: the same by the textbook, and as text.
        memory: bytes of weights, gradients and optimizer, as this rank held them.
        memory_formula: the same by the textbook.
        rows: more of the table: name, measured, textbook.
    """

    losses: list[float]
    sent: float
    sent_formula: tuple[float, str]
    memory: tuple[float, float, float]
    memory_formula: tuple[float, float, float]
    rows: list[tuple[str, str, str]] = field(default_factory=list)


# ---- data ----------------------------------------------------------------------------------------------


def text() -> Tensor:
    """466 kB of English: Python's own help pages, as bytes."""
    from pydoc_data.topics import topics

    return torch.frombuffer(bytearray("\n".join(topics[name] for name in sorted(topics)).encode()), dtype=torch.uint8)


def batch(source: Tensor, step: int, options: Options) -> tuple[Tensor, Tensor]:
    """Step *step*'s bytes and those that follow each of them, (batch, sequence): the same on every rank."""
    chance = torch.Generator().manual_seed(step)
    starts = torch.randint(len(source) - options.sequence - 1, (options.batch, 1), generator=chance)
    at = starts + torch.arange(options.sequence)
    return source[at].long(), source[at + 1].long()


# ---- the model -----------------------------------------------------------------------------------------


class Linear(nn.Module):
    """A matrix (outputs, inputs) that may be kept in two bytes an element; what goes through it is float32.

    Processors without arithmetic on two bytes are fast this way, and what is kept and sent is as the textbook counts.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) * inputs**-0.5)

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        return functional.linear(x, self.weight.float())


class Norm(nn.Module):
    """RMS norm over the last dimension."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        return functional.rms_norm(x, (x.shape[-1],), self.weight.float())


class Embed(nn.Module):
    """Bytes (batch, sequence) to vectors (batch, sequence, hidden)."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        self.bytes = nn.Embedding(BYTES, options.hidden)
        self.places = nn.Embedding(options.sequence, options.hidden)

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        out: Tensor = self.bytes(x).float() + self.places.weight.float()
        return out


def attention(qkv: Tensor, heads: int) -> Tensor:
    """Causal self-attention of (batch, sequence, 3 x heads x width): queries, keys and values beside each other."""
    q, k, v = (part.reshape(*part.shape[:2], heads, -1).transpose(1, 2) for part in qkv.chunk(3, dim=-1))
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


class Block(nn.Module):
    """A layer: attention, then an MLP of four times the width. Where ranks share one, they meet in enter and leave.

    Args:
        options: of the example.
        number: of the layer; its dropout draws by it.

    Attributes:
        part: of the sequence that this rank has between leave and enter.
    """

    def __init__(self, options: Options, number: int) -> None:
        super().__init__()
        h, self.heads, self.dropout = options.hidden, options.heads, options.dropout
        self.norm1, self.norm2 = Norm(h), Norm(h)
        self.qkv, self.out = Linear(h, 3 * h), Linear(h, h)
        self.up, self.down = Linear(h, 4 * h), Linear(4 * h, h)
        self.sequence, self.part = options.sequence, slice(None)
        self.chance = torch.Generator().manual_seed(number)

    def enter(self, x: Tensor) -> Tensor:
        """What comes into the matrices."""
        return x

    def leave(self, x: Tensor) -> Tensor:
        """What comes out of them."""
        return self._drop(x)

    def matrices(self) -> list[Tensor]:
        """The weights that tensor parallel splits."""
        return [each.weight for each in (self.qkv, self.out, self.up, self.down)]

    def _drop(self, x: Tensor) -> Tensor:
        """Dropout. Every rank draws for the whole sequence, and uses its part: that is what a single process draws."""
        if not self.dropout:
            return x
        drawn = torch.rand(x.shape[0], self.sequence, x.shape[2], generator=self.chance)[:, self.part]
        return x * (drawn >= self.dropout) / (1 - self.dropout)

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        x = x + self.leave(self.out(attention(self.qkv(self.enter(self.norm1(x))), self.heads)))
        return x + self.leave(self.down(functional.gelu(self.up(self.enter(self.norm2(x))))))


def transformer(options: Options) -> nn.Sequential:
    """The same weights on every rank. Its parts: embedding, the layers, norm and head as one."""
    torch.manual_seed(0)
    head = nn.Sequential(Norm(options.hidden), Linear(options.hidden, BYTES))
    model = nn.Sequential(Embed(options), *(Block(options, i) for i in range(options.layers)), head)
    return model.to(getattr(torch, options.dtype))


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy."""
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def backward(loss: Tensor) -> None:
    """loss.backward(), which torch gives no types."""
    loss.backward()  # type: ignore[no-untyped-call]


class Adam:
    """Adam (Kingma and Ba, 2015) that computes in float32: 12 bytes a parameter of two bytes, 8 of four.

    Written out, because it shows what is kept, and is there in a moment.
    """

    def __init__(self, weights: Iterable[Tensor]) -> None:
        self._weights = [each.detach() for each in weights]
        self._masters = [each if each.dtype == torch.float32 else each.float() for each in self._weights]
        self._means, self._squares = ([torch.zeros_like(each) for each in self._masters] for _ in range(2))
        self._steps = 0

    @torch.no_grad()
    def step(self, gradients: Iterable[Tensor | None]) -> None:
        """One step, with a gradient for each weight."""
        self._steps += 1
        fix, fix_square = 1 - 0.9**self._steps, 1 - 0.999**self._steps
        state = zip(gradients, self._weights, self._masters, self._means, self._squares, strict=True)
        for gradient, weight, master, mean, square in state:
            assert gradient is not None
            mean.lerp_(gradient.float(), 0.1)
            square.lerp_(gradient.float() ** 2, 0.001)
            master -= LEARNING_RATE * (mean / fix) / ((square / fix_square).sqrt() + 1e-8)
            if master is not weight:
                weight.copy_(master)

    def nbytes(self) -> int:
        """Of moments, and of float32 weights beside others."""
        own = (m for w, m in zip(self._weights, self._masters, strict=True) if m is not w)
        return nbytes([*self._means, *self._squares, *own])


def nbytes(tensors: Iterable[Tensor | None]) -> int:
    """Of all that there are."""
    return sum(each.numel() * each.element_size() for each in tensors if each is not None)


def count(model: nn.Module) -> int:
    """Parameters."""
    return sum(each.numel() for each in model.parameters())


def train_alone(options: Options) -> list[float]:
    """What a single process makes of the same batches: the loss of each step."""
    source, model = text(), transformer(options)
    weights = list(model.parameters())
    adam, losses = Adam(weights), []
    for step in range(options.steps):
        x, y = batch(source, step, options)
        loss = loss_of(model(x), y)
        backward(loss)
        adam.step(each.grad for each in weights)
        model.zero_grad()
        losses.append(loss.item())
    return losses


# ---- what is measured ----------------------------------------------------------------------------------


class Sent:
    """Counts what this rank sends while it is entered, in bytes, headers included; the backend "wancoll" knows."""

    def __init__(self) -> None:
        self._steps: list[float] = []
        self._before = 0.0

    @property
    def per_step(self) -> float:
        """Mean, without the first step, which sets things up. Not a number where nobody counts."""
        steps = self._steps[1:] or self._steps
        return sum(steps) / len(steps)

    def __enter__(self) -> None:
        self._before = self._count()

    def __exit__(self, *_: object) -> None:
        self._steps.append(self._count() - self._before)

    def _count(self) -> float:
        return float(getattr(getattr(dist.group.WORLD, "cluster", None), "bytes_sent", math.nan))


# ---- ranks ---------------------------------------------------------------------------------------------


def mean(value: Tensor | float) -> float:
    """Over all ranks."""
    total = torch.as_tensor(value, dtype=torch.float64).detach().clone().reshape(1)
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def launch(
    title: str, train: Callable[[Options], Report], world: int = 4, shares: bool = False, **defaults: object
) -> None:
    """Run *train* on every rank, print what it found out, and exit.

    Args:
        title: heads the table.
        train: runs in a process group that stands.
        world: ranks, unless torchrun or --world says otherwise.
        shares: each rank has its part of the batch.
        defaults: of Options, for this example.
    """
    options = parsed(title, Options(world=world, **defaults), shares=shares)  # type: ignore[arg-type]
    if "RANK" in os.environ:
        sys.exit(_rank(title, train, options))
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    fork = multiprocessing.get_context("fork")  # torch is loaded once
    torch.set_num_threads(1)
    ranks = [fork.Process(target=_forked, args=(title, train, options, rank, port)) for rank in range(options.world)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    sys.exit(max(abs(process.exitcode or 0) for process in ranks))


def parsed(title: str, defaults: Options, *, shares: bool = False, without: Sequence[str] = ()) -> Options:
    """The command line's options.

    Args:
        title: heads the help.
        defaults: of them.
        shares: the ranks share the batch, and all have as much of it.
        without: those that the example would not obey.
    """
    parser = argparse.ArgumentParser(description=title, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    for name in Options.__dataclass_fields__:
        if name not in without:
            value = getattr(defaults, name)
            parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    options = replace(defaults, **vars(parser.parse_args()))
    world = int(os.environ.get("WORLD_SIZE", options.world)) if "RANK" in os.environ else options.world
    if shares and (world < 1 or options.batch % world):
        parser.error(f"--batch: expected a multiple of {world}, the ranks that share it, got {options.batch}")
    return options


def _forked(title: str, train: Callable[[Options], Report], options: Options, rank: int, port: int) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(options.world)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    sys.exit(_rank(title, train, options))


def _rank(title: str, train: Callable[[Options], Report], options: Options) -> int:
    if options.backend == "wancoll":
        import wancoll.torch  # noqa: F401

    dist.init_process_group(options.backend)
    try:
        report = train(options)
        worst = torch.tensor([report.sent, *report.memory], dtype=torch.float64)
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)  # of the rank that has most
        report.sent, *memory = worst.tolist()
        report.memory = (memory[0], memory[1], memory[2])
        world = dist.get_world_size()
        right = dist.get_rank() != 0 or show(title, report, train_alone(options), options, world)
        dist.barrier()
    finally:
        dist.destroy_process_group()
    return 0 if right else 1


# ---- the table -----------------------------------------------------------------------------------------


def differs(losses: Sequence[float], alone: Sequence[float]) -> float:
    """The largest difference of a step's loss, relative."""
    return max(abs(a - b) / b for a, b in zip(losses, alone, strict=True))


def allowed(options: Options) -> float:
    """What `differs` may be: gradients of two bytes are rounded before they are summed up."""
    return 0.02 if options.dtype == "bfloat16" else 1e-3


def show(title: str, report: Report, alone: Sequence[float], options: Options, world: int) -> bool:
    """Print the table; whether the losses are those of a single process."""
    parameters = count(transformer(options))
    print(f"{title}: {world} ranks, {parameters:,} parameters of {options.dtype}, {len(report.losses)} steps\n")
    formula, words = report.sent_formula
    sent = f"{format_bytes(report.sent)}" if report.sent == report.sent else "not counted"
    lines = [("of the busiest rank", "measured", "textbook")]
    lines.append(("bytes sent a step", sent, f"{format_bytes(formula)} = {words}"))
    for name, have, want in zip(
        ("weights", "gradients", "optimizer"), report.memory, report.memory_formula, strict=True
    ):
        lines.append((name, format_bytes(have), format_bytes(want)))
    lines += report.rows
    apart = differs(report.losses, alone)
    lines.append(("first and last loss", f"{report.losses[0]:.4f} {report.losses[-1]:.4f}", "a single process:"))
    lines.append(("", "", f"{alone[0]:.4f} {alone[-1]:.4f}"))
    for name, measured, textbook in lines:
        print(f"{name:<22}{measured:>20}   {textbook}")
    right = apart <= allowed(options)
    print(f"\nlosses differ by {100 * apart:.3f} % at most: {'right' if right else 'WRONG'}", flush=True)
    return right
