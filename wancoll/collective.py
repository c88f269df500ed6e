"""What an operation is: dtypes, reduce ops, the descriptor that all members must agree on, and the receipt."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import IntEnum
from typing import Any


class DType(IntEnum):
    """Element types. The value is the code that the engine and the wire use; the name is numpy's."""

    float32 = 0
    float64 = 1
    float16 = 2
    bfloat16 = 3
    int8 = 4
    int16 = 5
    int32 = 6
    int64 = 7
    uint8 = 8

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return _ITEMSIZE[self]


_ITEMSIZE = {
    DType.float32: 4,
    DType.float64: 8,
    DType.float16: 2,
    DType.bfloat16: 2,
    DType.int8: 1,
    DType.int16: 2,
    DType.int32: 4,
    DType.int64: 8,
    DType.uint8: 1,
}


class ReduceOp(IntEnum):
    """Reductions. avg divides the sum by the number of contributors."""

    sum = 0
    avg = 1
    min = 2
    max = 3
    prod = 4


class Kind(IntEnum):
    """What a call does. Every kind takes one seq number, in program order."""

    all_reduce = 0
    update_membership = 1


@dataclass(frozen=True, slots=True)
class Descriptor:
    """The call as every member must have made it.

    Args:
        kind: which collective.
        dtype: element type (float32 where the kind moves no elements).
        op: reduce op (sum where the kind reduces nothing).
        count: elements.
        codec: wire format, "none" for the raw elements.
        algorithm: schedule asked for, "auto" for the group's choice.
        on_failure: "retry" or "raise".
    """

    kind: Kind
    dtype: DType = DType.float32
    op: ReduceOp = ReduceOp.sum
    count: int = 0
    codec: str = "none"
    algorithm: str = "auto"
    on_failure: str = "retry"

    @property
    def nbytes(self) -> int:
        """Size of the tensor in bytes."""
        return self.count * self.dtype.itemsize

    def __str__(self) -> str:
        if self.kind is Kind.update_membership:
            return "update_membership()"
        extra = "".join(
            f", {name}={value}"
            for name, value, default in (
                ("codec", self.codec, "none"),
                ("algorithm", self.algorithm, "auto"),
                ("on_failure", self.on_failure, "retry"),
            )
            if value != default
        )
        return f"{self.kind.name}({self.count} x {self.dtype.name}, op={self.op.name}{extra})"

    def fingerprint(self) -> int:
        """64 bits that travel with every frame, so that members that disagree find out at once."""
        text = repr(
            (int(self.kind), int(self.dtype), int(self.op), self.count, self.codec, self.algorithm, self.on_failure)
        )
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


@dataclass(frozen=True, slots=True)
class Receipt:
    """What a commit hands back.

    Attributes:
        out: the array with the result (the object the caller passed as out or, in place, as the tensor).
        op_id: "group/seq", unique within the group's life.
        epoch: the epoch that committed.
        seq: the operation's number, the count of calls in program order.
        contributors: names whose data is in the result, in rank order.
        world_size: how many contributors.
        digest: 16 hex digits, equal on all members.
        attempts: 1 if the first try committed.
        algorithm: the schedule that ran.
        bytes_sent: payload and frame headers that this member put on the wire in the committed attempt.
        seconds: from the call reaching the daemon to its commit.
    """

    out: Any
    op_id: str
    epoch: int
    seq: int
    contributors: tuple[str, ...]
    world_size: int
    digest: str
    attempts: int
    algorithm: str
    bytes_sent: int
    seconds: float
