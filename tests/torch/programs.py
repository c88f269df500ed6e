"""What the tests of this folder train: small models, their data, and the same on one process. Runs on every backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

STEPS = 4
BATCH = 12  # samples a step of all ranks together: divisible by 2, 3 and 4
WIDTH = 16


def model(seed: int = 0) -> nn.Sequential:
    """The same on every rank."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(WIDTH, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, WIDTH))


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets of all ranks."""
    generator = torch.Generator().manual_seed(1000 + step)
    x = torch.randn(BATCH, WIDTH, generator=generator)
    return x, torch.sin(3 * x).roll(1, dims=1)


class Tripwire(torch.autograd.Function):
    """The identity; its backward calls *act* first."""

    @staticmethod
    def forward(ctx: Any, x: Any, act: Callable[[], None]) -> Any:
        ctx.act = act
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        ctx.act()
        return grad, None


def share(x: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    """A rank's samples."""
    return x.chunk(size)[rank]


def train(
    net: nn.Module, optimizer: torch.optim.Optimizer, rank: int = 0, size: int = 1,
    forward: Callable[[nn.Module, torch.Tensor], torch.Tensor] = lambda net, x: net(x),
    mean: dist.ProcessGroup | None = None,
) -> list[float]:  # fmt: skip
    """A few steps on this rank's share; the losses are of all ranks together, or of those of the group *mean*."""
    losses = []
    for step in range(STEPS):
        x, y = (share(each, rank, size) for each in batch(step))
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(forward(net, x), y)
        loss.backward()
        optimizer.step()
        total = loss.detach().clone()
        if size > 1:
            dist.all_reduce(total, group=mean)
        losses.append(float(total) / size)
    return losses


def alone(
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = lambda net: torch.optim.SGD(net.parameters(), lr=0.2),
) -> tuple[nn.Sequential, list[float]]:
    """The model and the losses of one process that has all samples."""
    net = model()
    return net, train(net, optimizer(net))


def same_everywhere(net: nn.Module) -> None:
    """Assert that all ranks have the same bits."""
    mine = torch.cat([each.detach().reshape(-1) for each in net.parameters()])
    bits = mine.view(torch.int32).to(torch.int64)
    everyone = [torch.empty_like(bits) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, bits)
    for rank, theirs in enumerate(everyone):
        assert torch.equal(theirs, bits), f"rank {rank} differs from rank {dist.get_rank()}"


def close(one: nn.Module, other: nn.Module, tolerance: float = 1e-5) -> None:
    """Assert that two models are alike but for rounding."""
    for (name, a), b in zip(one.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(
            a.detach(), b.detach(), rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )
