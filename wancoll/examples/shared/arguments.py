"""What every example is told on its command line."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Precision:
    """Bytes of a parameter: the weight, its gradient, and what the optimizer keeps."""

    weight: int
    gradient: int
    optimizer: int

    @property
    def total(self) -> int:
        """Bytes of a parameter that nobody shares."""
        return self.weight + self.gradient + self.optimizer


@dataclass(frozen=True, slots=True)
class Options:
    """What every example is told on its command line."""

    backend: str = "wancoll"
    world: int = 4  # ranks, where the example starts them
    steps: int = 20
    layers: int = 4  # of the transformer, as are hidden and heads
    hidden: int = 128
    heads: int = 4
    batch: int = 16  # samples of a step, over all ranks
    micro_batches: int = 8  # of a step, for pipelines
    sequence: int = 64  # bytes of a sample
    dtype: str = "bfloat16"  # of weights and gradients; the optimizer computes in float32
    # A pipeline's forward of a micro-batch takes that long at least, milliseconds: the rest is slept, so that stages
    # overlap on a machine with few cores as they would on devices of their own.
    device_ms: float = 30.0

    @property
    def precision(self) -> Precision:
        """Bytes of a parameter: 2+2+12, or 4+4+8."""
        return Precision(2, 2, 12) if self.dtype == "bfloat16" else Precision(4, 4, 8)


Multiples = Callable[[Options], Mapping[str, tuple[int, str]]]  # which options have to be multiples, of what, and why


def shared_batch(options: Options) -> Mapping[str, tuple[int, str]]:
    """The ranks share the batch, and all have as much of it."""
    return {"batch": (options.world, "the ranks that share it")}


def parsed(
    title: str, defaults: Options, *, multiples: Multiples = lambda _: {}, without: Sequence[str] = ()
) -> Options:
    """The command line's options, from *defaults*, but for those *without* use here; *title* heads the help.

    *multiples*: what the example cuts into equal parts.
    """
    parser = argparse.ArgumentParser(description=title, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    for name in Options.__dataclass_fields__:
        if name not in without:
            value = getattr(defaults, name)
            known = ("bfloat16", "float32") if name == "dtype" else None
            parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value, choices=known)
    options = replace(defaults, **vars(parser.parse_args()))
    if "RANK" in os.environ:
        options = replace(options, world=int(os.environ.get("WORLD_SIZE", options.world)))
    for name, (of, why) in {**multiples(options), "hidden": (options.heads, "the heads")}.items():
        if of < 1 or getattr(options, name) % of:
            got = getattr(options, name)
            parser.error(f"--{name.replace('_', '-')}: expected a multiple of {of}, {why}, got {got}")
    return options


def told_options(title: str, steps: int, *, multiples: Multiples = lambda _: {}) -> Options:
    """The command line's options of an example that starts its own cluster; see parsed()."""
    if "RANK" in os.environ:
        sys.exit(f"{title}: RANK is set, but it starts all its members itself: expected python -m, not torchrun")
    defaults = Options(steps=steps, hidden=64, dtype="float32")
    return parsed(title, defaults, multiples=multiples, without=("backend", "micro_batches", "device_ms"))
