"""What a single process makes of the same batches, and how far from it an example may come."""

from __future__ import annotations

from collections.abc import Sequence

from wancoll.examples.shared.adam import Adam
from wancoll.examples.shared.model import backward, loss_of, transformer
from wancoll.examples.shared.options import Options
from wancoll.examples.shared.text import batch, text


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


def differs(losses: Sequence[float], alone: Sequence[float]) -> float:
    """The largest difference of a step's loss, relative."""
    return max(abs(a - b) / b for a, b in zip(losses, alone, strict=True))


def allowed(options: Options) -> float:
    """What `differs` may be: gradients of two bytes are rounded before they are summed up."""
    return 0.02 if options.dtype == "bfloat16" else 1e-3
