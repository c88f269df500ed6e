"""The handwritten digits that scikit-learn ships, and who computes on which of them."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wancoll.errors import ConfigError

BATCH = 128  # samples of one step, over all members
TEST_EVERY = 5  # every fifth sample is kept for the test


@dataclass(frozen=True, slots=True)
class Digits:
    """Images are (n, 64) float32 from 0 to 1, labels (n,) int64 from 0 to 9."""

    images: NDArray[np.float32]
    labels: NDArray[np.int64]
    test_images: NDArray[np.float32]
    test_labels: NDArray[np.int64]


def check_extra() -> None:
    """Raise ConfigError with what to install where the demo's package is missing."""
    if importlib.util.find_spec("sklearn") is None:
        raise ConfigError(
            "a package that only the demo needs is not installed",
            who="wancoll demo",
            expected="scikit-learn (the digits)",
            got="no scikit-learn",
            hint="run, in the source folder: pip install '.[demo]'",
        )


def digits() -> Digits:
    """1437 images to train on and 360 to test with."""
    from sklearn.datasets import load_digits

    data: Any = load_digits()
    images, labels = (data.data / 16).astype(np.float32), data.target.astype(np.int64)
    test = np.arange(len(labels)) % TEST_EVERY == 0
    return Digits(images[~test], labels[~test], images[test], labels[test])


def batch(seed: int, step: int, samples: int, size: int = BATCH) -> NDArray[np.int64]:
    """Which samples step number *step* uses: *size* different ones out of *samples*.

    A function of its arguments alone: whoever joins can compute any step without what came before.
    """
    return np.random.default_rng((seed, step)).choice(samples, size, replace=False)


def shard(indices: NDArray[np.int64], rank: int, world_size: int) -> NDArray[np.int64]:
    """The part of a batch that *rank* computes on; the shards of all ranks hold each sample once."""
    return indices[rank::world_size]
