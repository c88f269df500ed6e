"""What the clients of a chaos run report, one record each. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Called:
    """One call and what became of it. Times are of the machine's monotonic clock, in seconds.

    Attributes:
        what: for people.
        kind: of the collective.
        nbytes: of the tensor that the caller gave.
        begun: when it was called.
        ended: when its outcome was known.
        epoch: that committed it, or that the caller knew when it failed.
        seq: 0 where it failed.
        contributors: names in rank order.
        result: digest of the receipt where all members have the same result, and of the caller's bytes.
        error: class of what was raised, "" if it committed.
        text: of what was raised.
        wrong: what is wrong with the values afterwards, "" if nothing is.
        may_abort: whether a lost member may end it with OperationAborted.
    """

    what: str
    kind: str
    nbytes: int
    begun: float
    ended: float
    epoch: int
    seq: int = 0
    contributors: tuple[str, ...] = ()
    result: str = ""
    error: str = ""
    text: str = ""
    wrong: str = ""
    may_abort: bool = False


@dataclass(frozen=True, slots=True)
class Joined:
    """connect() has returned."""

    at: float


@dataclass(frozen=True, slots=True)
class NotJoined:
    """connect() has failed; it is tried again."""

    error: str


@dataclass(frozen=True, slots=True)
class Held:
    """The client stands still, as the run's phase says."""


Record = Called | Joined | NotJoined | Held
