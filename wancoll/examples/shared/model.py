"""A small transformer that guesses the next byte; ranks may share its layers."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional

from wancoll.examples.shared.arguments import Options

BYTES = 256  # the vocabulary


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
    """A layer: attention, then an MLP of four times the width. Where ranks share one, they meet in enter and leave."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        h, self.heads = options.hidden, options.heads
        self.norm1, self.norm2 = Norm(h), Norm(h)
        self.qkv, self.out = Linear(h, 3 * h), Linear(h, h)
        self.up, self.down = Linear(h, 4 * h), Linear(4 * h, h)

    def enter(self, x: Tensor) -> Tensor:
        """What comes into the matrices."""
        return x

    def leave(self, x: Tensor) -> Tensor:
        """What comes out of them."""
        return x

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        x = x + self.leave(self.out(attention(self.qkv(self.enter(self.norm1(x))), self.heads)))
        return x + self.leave(self.down(functional.gelu(self.up(self.enter(self.norm2(x))))))


def transformer(options: Options) -> nn.Sequential:
    """The same weights on every rank. Its parts: embedding, the layers, norm and head as one."""
    torch.manual_seed(0)
    head = nn.Sequential(Norm(options.hidden), Linear(options.hidden, BYTES))
    model = nn.Sequential(Embed(options), *(Block(options) for _ in range(options.layers)), head)
    return model.to(getattr(torch, options.dtype))


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy."""
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def backward(loss: Tensor) -> None:
    """loss.backward(), which torch gives no types."""
    loss.backward()  # type: ignore[no-untyped-call]


def nbytes(tensors: Iterable[Tensor | None]) -> int:
    """Bytes of all tensors that are there."""
    return sum(each.numel() * each.element_size() for each in tensors if each is not None)


def count(model: nn.Module) -> int:
    """Parameters."""
    return sum(each.numel() for each in model.parameters())
