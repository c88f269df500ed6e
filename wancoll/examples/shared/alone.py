"""What a single process makes of the same batches."""

from __future__ import annotations

from wancoll.examples.shared.adam import Adam
from wancoll.examples.shared.arguments import Options
from wancoll.examples.shared.model import backward, loss_of, transformer
from wancoll.examples.shared.text import batch, text


def train_alone(options: Options) -> list[float]:
    """The loss of each step."""
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
