"""The network: one hidden layer, softmax cross entropy, SGD with momentum, in plain numpy. PURE."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

INPUTS, HIDDEN, CLASSES = 64, 256, 10
PARAMETERS = INPUTS * HIDDEN + HIDDEN + HIDDEN * CLASSES + CLASSES
LEARNING_RATE = 0.03
MOMENTUM = 0.9


def layers(flat: Array) -> tuple[Array, Array, Array, Array]:
    """Views of a flat vector of PARAMETERS elements: w1 (64, 256), b1 (256,), w2 (256, 10), b2 (10,)."""
    w1, b1, w2, b2 = np.split(flat, np.cumsum([INPUTS * HIDDEN, HIDDEN, HIDDEN * CLASSES]))
    return w1.reshape(INPUTS, HIDDEN), b1, w2.reshape(HIDDEN, CLASSES), b2


def first_parameters(seed: int) -> Array:
    """The float32 parameters that training starts from: He initialisation, biases zero."""
    flat = np.zeros(PARAMETERS, np.float32)
    w1, _, w2, _ = layers(flat)
    random = np.random.default_rng(seed)
    w1[:] = random.normal(0.0, np.sqrt(2.0 / INPUTS), w1.shape)
    w2[:] = random.normal(0.0, np.sqrt(2.0 / HIDDEN), w2.shape)
    return flat


def loss_and_gradient(parameters: Array, images: Array, labels: Array) -> tuple[float, Array]:
    """Cross entropy and its gradient (flat), summed over the n samples, which may be 0: sums of shards add up.

    Images are (n, 64) of the parameters' dtype, labels integers from 0 to 9.
    """
    w1, b1, w2, b2 = layers(parameters)
    hidden = np.maximum(images @ w1 + b1, 0)
    logits = hidden @ w2 + b2
    logits -= logits.max(axis=1, keepdims=True)
    log_sum = np.log(np.exp(logits).sum(axis=1, keepdims=True))
    each = np.arange(len(labels))
    loss = float((log_sum[:, 0] - logits[each, labels]).sum())

    error = np.exp(logits - log_sum)
    error[each, labels] -= 1
    gradient = np.empty_like(parameters)
    g1, gb1, g2, gb2 = layers(gradient)
    g2[:] = hidden.T @ error
    gb2[:] = error.sum(axis=0)
    back = (error @ w2.T) * (hidden > 0)
    g1[:] = images.T @ back
    gb1[:] = back.sum(axis=0)
    return loss, gradient


def accuracy(parameters: Array, images: Array, labels: Array) -> float:
    """Share of the samples whose most likely class is their label, 0 to 1."""
    w1, b1, w2, b2 = layers(parameters)
    logits = np.maximum(images @ w1 + b1, 0) @ w2 + b2
    return float((logits.argmax(axis=1) == labels).mean())


class Replica:
    """What every member holds a copy of: parameters (the first by *seed*), momentum and the number of steps applied."""

    def __init__(self, seed: int) -> None:
        self.step = 0
        self.state = np.zeros(2 * PARAMETERS, np.float32)  # in one piece, so that it can be handed over in one
        self.parameters, self.momentum = np.split(self.state, 2)
        self.parameters[:] = first_parameters(seed)

    def apply(self, gradient: Array) -> None:
        """One step of SGD with momentum. *gradient* is the mean over the step's samples: (PARAMETERS,), float32."""
        self.momentum *= np.float32(MOMENTUM)
        self.momentum += gradient
        self.parameters -= np.float32(LEARNING_RATE) * self.momentum
        self.step += 1

    def digest(self) -> str:
        """16 hex digits that are equal where step, parameters and momentum are equal, bit for bit."""
        return hashlib.blake2b(self.step.to_bytes(8, "little") + self.state.tobytes(), digest_size=8).hexdigest()
