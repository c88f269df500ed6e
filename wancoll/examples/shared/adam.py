"""Adam, written out: what it keeps is what the textbook counts."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from wancoll.examples.shared.model import nbytes

LEARNING_RATE = 2e-3


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
        """Bytes of the moments, and of float32 copies of other weights."""
        own = (m for w, m in zip(self._weights, self._masters, strict=True) if m is not w)
        return nbytes([*self._means, *self._squares, *own])
