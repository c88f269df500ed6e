"""What training processes tell the demo: one JSON object a line."""

from __future__ import annotations

import sys

import msgspec


class Waiting(msgspec.Struct, frozen=True, tag_field="report", tag="waiting"):
    """The process waits for a line on its standard input before its step number *step* goes on."""

    step: int


class Started(msgspec.Struct, frozen=True, tag_field="report", tag="started"):
    """The process is a member, and has what it needs to take part in the step after *step*."""

    rank: int
    epoch: int
    members: list[str]
    step: int


class Stepped(msgspec.Struct, frozen=True, tag_field="report", tag="stepped"):
    """One step is committed and applied.

    Attributes:
        step: its number, from 1.
        loss: mean cross entropy of the samples that took part.
        samples: how many took part.
        epoch: the epoch that committed.
        contributors: names of the members whose gradients are in it.
        attempts: of the all-reduce.
        committed: time.monotonic() when the call returned, seconds.
    """

    step: int
    loss: float
    samples: int
    epoch: int = 0
    contributors: list[str] = []
    attempts: int = 0
    committed: float = 0.0


class Finished(msgspec.Struct, frozen=True, tag_field="report", tag="finished"):
    """All steps are done. accuracy is that on the test samples, 0 to 1; digest that of the replica."""

    steps: int
    accuracy: float
    digest: str


AnyReport = Waiting | Started | Stepped | Finished
_DECODER: msgspec.json.Decoder[AnyReport] = msgspec.json.Decoder(AnyReport)


def tell(report: AnyReport) -> None:
    """Write a report to standard output."""
    sys.stdout.write(msgspec.json.encode(report).decode() + "\n")
    sys.stdout.flush()


def read(line: str) -> AnyReport:
    """The report of one line.

    Raises:
        msgspec.DecodeError: it is none.
    """
    return _DECODER.decode(line)
