"""What the clients of a chaos run report, one record each. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Called:
    """One call and what became of it. Times are of the machine's monotonic clock, in seconds."""

    what: str  # for people
    kind: str  # of the collective
    nbytes: int  # of the tensor that the caller gave
    begun: float  # when it was called
    ended: float  # when its outcome was known
    epoch: int  # that committed it, or that the caller knew when it failed
    seq: int = 0  # 0 where it failed
    contributors: tuple[str, ...] = ()  # names in rank order
    result: str = ""  # digest of the receipt where all members have the same result, and of the caller's bytes
    error: str = ""  # class of what was raised, "" if it committed
    text: str = ""  # of what was raised
    wrong: str = ""  # what is wrong with the values afterwards, "" if nothing is
    may_abort: bool = False  # whether a lost member may end it with OperationAborted


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
