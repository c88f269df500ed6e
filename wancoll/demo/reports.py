"""What training processes tell the demo."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Waiting:
    """The process waits for word before its step number *step* goes on: how many members there shall be."""

    step: int


@dataclass(frozen=True, slots=True)
class Started:
    """The process is a member, and has what it needs to take part."""

    rank: int
    epoch: int
    members: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Stepped:
    """One step is committed and applied."""

    step: int  # its number, from 1
    loss: float  # mean cross entropy of the samples that took part
    samples: int  # how many took part
    epoch: int = 0  # the epoch that committed
    contributors: tuple[str, ...] = ()  # names of the members whose gradients are in it
    attempts: int = 0  # of the all-reduce
    committed: float = 0.0  # time.monotonic() when the call returned, seconds


@dataclass(frozen=True, slots=True)
class Finished:
    """All steps are done. accuracy is that on the test samples, 0 to 1; digest that of the replica."""

    steps: int
    accuracy: float
    digest: str


AnyReport = Waiting | Started | Stepped | Finished
