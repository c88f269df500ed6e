"""Real text, and the batches that every rank draws from it alike."""

from __future__ import annotations

import torch
from torch import Tensor

from wancoll.examples.shared.arguments import Options


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
