"""What an operation is: dtypes, reduce ops, the descriptor that all members must agree on, and the receipt."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated, Any, Self

import msgspec
from msgspec import Meta


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


_ITEMSIZE = (4, 8, 2, 2, 1, 2, 4, 8, 1)  # by code


class ReduceOp(IntEnum):
    """Reductions. avg divides the sum by the number of contributors."""

    sum = 0
    avg = 1
    min = 2
    max = 3
    prod = 4


class Codec(IntEnum):
    """Wire formats of floating-point elements. The value is the engine's code for it.

    Beside those below there are the sparse ones, "top1.5%" or "top5%-int8/top5%-int8" (see `named`): of each block of
    4,096 elements that share, the greatest magnitudes, with 2 or 8 bits each. Where "/" says it again what is sent of
    the result is, too; else the result is not encoded.
    """

    none = 0  # as they are
    bf16 = 1
    fp16 = 2  # blocks of 128 with a scale
    int8 = 3  # blocks of 128 with a scale
    int4 = 4  # blocks of 32 with a scale
    fp8 = 5  # e4m3, blocks of 128 with a scale

    @classmethod
    def named(cls, name: str) -> Codec | None:
        """The codec of that name; None: there is none."""
        once, again, twice = name.partition("/")
        found = _SPARSE_NAME.fullmatch(once)
        if found is None:
            return cls.__members__.get(name)
        share = round(100 * float(found[1]))
        value = share << 8 | (_TWICE if again else 0) | (8 if found[2] else 2)
        return cls(value) if share and (not again or once == twice) else None

    @classmethod
    def _missing_(cls, value: object) -> Self | None:
        if not isinstance(value, int) or not 1 <= value >> 8 <= _WHOLE or value & (_TWICE - 1) not in (2, 8):
            return None
        once = f"top{(value >> 8) / 100:g}%{'-int8' if value & 8 else ''}"
        member = int.__new__(cls, value)
        member._name_, member._value_ = f"{once}/{once}" if value & _TWICE else once, value
        return member

    @property
    def sparse(self) -> bool:
        """Whether it keeps a share of a tensor's elements only."""
        return self > 0xFF

    @property
    def of_result(self) -> bool:
        """Whether the result is what its encoded form says, too."""
        return bool(self) and (not self.sparse or bool(self & _TWICE))

    @property
    def block(self) -> tuple[int, int]:
        """Elements of a block, and the bytes that they become on the wire. Raises KeyError: of none."""
        if not self.sparse:
            return BLOCKS[self]
        kept = max(1, SPARSE_BLOCK * (self >> 8) // _WHOLE)
        low = (SPARSE_BLOCK // kept).bit_length() - 1  # bits of a place that lie beside the code
        fields, row = kept * (low + (self & (_TWICE - 1))), kept + (SPARSE_BLOCK - 1 >> low)
        return SPARSE_BLOCK, 4 + -(-fields // 8) + -(-row // 8)


# Elements of a block of the codecs that are not sparse, and the bytes that they become.
BLOCKS = {
    Codec.bf16: (1, 2), Codec.fp16: (128, 260), Codec.int8: (128, 132), Codec.int4: (32, 20), Codec.fp8: (128, 132)
}  # fmt: skip
SPARSE_BLOCK = 4096  # elements
_SPARSE_NAME = re.compile(r"top(100|[0-9]{1,2}(?:\.[0-9]{1,2})?)%(-int8)?")
_WHOLE, _TWICE = 10000, 128  # as WC_SPARSE_WHOLE and WC_SPARSE_TWICE


class Kind(IntEnum):
    """What a call does. Every kind but send and recv takes one seq number, in program order."""

    all_reduce = 0
    update_membership = 1
    reduce_scatter = 2
    all_gather = 3
    broadcast = 4
    reduce = 5
    gather = 6
    scatter = 7
    all_to_all = 8
    barrier = 9
    send = 10
    recv = 11


REDUCING = frozenset({Kind.all_reduce, Kind.reduce_scatter, Kind.reduce})  # kinds with a reduce op
ROOTED = frozenset({Kind.broadcast, Kind.reduce, Kind.gather, Kind.scatter})
SAME_RESULT = frozenset({Kind.all_reduce, Kind.all_gather, Kind.broadcast})  # every member's result is the same bytes
# Kinds whose elements may travel in a codec; in a sparse one those of an all_reduce only.
CODED = frozenset({Kind.all_reduce, Kind.reduce_scatter, Kind.all_gather, Kind.broadcast, Kind.all_to_all})
DATALESS = frozenset({Kind.update_membership, Kind.barrier})
# Kinds that end nowhere without everyone, where every member gives something.
PROVING = frozenset({Kind.all_reduce, Kind.all_gather, Kind.reduce_scatter, Kind.all_to_all})
P2P_KINDS = frozenset({Kind.send, Kind.recv})  # kinds that two members call
ON_FAILURE = ("retry", "raise")  # what a call does when the epoch is lost under it
ROUNDINGS = ("nearest", "stochastic")  # of a codec
MOST_LABEL = 128  # characters
LIBRARY_TAGS = 0xFF << 56  # from here on tags of sends and recvs are the library's own: sync_state's


def shortened(text: str) -> str:
    """*text* as a label: its end becomes a digest where it is too long for one."""
    if len(text) <= MOST_LABEL:
        return text
    return f"{text[: MOST_LABEL - 20]}... {hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}"


Label = Annotated[str, Meta(max_length=MOST_LABEL)]

_KIND_AT = 60  # bit of a fingerprint
_Count = Annotated[int, Meta(ge=0, le=1 << 62)]
_Name = Annotated[str, Meta(min_length=1, max_length=128)]


class Descriptor(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The call as every member must have made it, in the terms of one epoch: root and counts are by its ranks.

    It travels as it is, in the client's Post; the bounds of its fields are looked at where it is decoded, and whether
    they fit together in wancoll.peer.core.calls.
    """

    kind: Kind
    dtype: DType = DType.float32  # element type; this where the kind moves no elements
    op: ReduceOp = ReduceOp.sum  # this where the kind reduces nothing
    # Elements of the tensor (all_reduce, broadcast, reduce, send, recv) or of the block that one rank gives another
    # (the other kinds); 0 where counts says it.
    count: _Count = 0
    # Elements of each rank's block, in rank order (all_gather and reduce_scatter with uneven blocks).
    counts: Annotated[tuple[_Count, ...], Meta(max_length=1024)] = ()
    root: Annotated[int, Meta(ge=-1, le=1023)] = -1  # rank of broadcast, reduce, gather and scatter
    codec: Codec = Codec.none
    algorithm: _Name = "auto"  # the schedule asked for; "auto": the group's choice
    on_failure: _Name = "retry"  # or "raise"
    rounding: _Name = "nearest"  # of the codec; or "stochastic"
    seed: Annotated[int, Meta(ge=0)] = 0  # of stochastic rounding
    # Seconds for which a member that has not called it is waited for, once another has; then its daemon takes part with
    # zeros (all_reduce of a sum; R20). 0.0: it is waited for.
    grace: Annotated[float, Meta(ge=0, le=1e9)] = 0.0
    label: Label = ""  # what the layer above calls it, where that is more than these fields say ("BOR of bool")
    bounded: bool = False  # the codec keeps to a limit on the error: it is left out where sums would be encoded again

    @property
    def takes_grace(self) -> bool:
        """Whether zeros can stand for a member's tensor (R20)."""
        return self.kind is Kind.all_reduce and self.op is ReduceOp.sum

    @property
    def proves_all(self) -> bool:
        """Whether a member can finish it only after every other one has made the call and given its share.

        Whatever the algorithm is; see ResolvedCall.proves_all.
        """
        if self.kind not in PROVING:
            return False
        return min(self.counts) > 0 if self.counts else self.count > 0

    @property
    def nbytes(self) -> int:
        """Size in bytes of what count counts; with counts, of all blocks."""
        return (sum(self.counts) if self.counts else self.count) * self.dtype.itemsize

    def block_counts(self, world_size: int) -> tuple[int, ...]:
        """Elements of every rank's block."""
        return self.counts or (self.count,) * world_size

    def __str__(self) -> str:
        return self.told(())

    def told(self, names: Sequence[str]) -> str:
        """Return str() with the root's name of *names*: ranks change, and torch has other ranks."""
        if self.kind in DATALESS:
            return f"{self.kind.name}({f'label={self.label}' if self.label else ''})"
        size = f"{list(self.counts)}" if self.counts else str(self.count)
        extra = f", op={self.op.name}" if self.kind in REDUCING else ""
        extra += f", root={self.root}" if self.kind in ROOTED else ""
        extra += f" ({names[self.root]})" if self.kind in ROOTED and 0 <= self.root < len(names) else ""
        extra += "".join(
            f", {name}={value}"
            for name, value, default in (
                ("codec", self.codec.name, "none"),
                ("algorithm", self.algorithm, "auto"),
                ("on_failure", self.on_failure, "retry"),
                ("rounding", self.rounding, "nearest"),
                ("seed", self.seed, 0),
                ("grace", self.grace, 0.0),
                ("label", self.label, ""),
                ("bounded", self.bounded, False),
            )
            if value != default
        )
        return f"{self.kind.name}({size} x {self.dtype.name}{extra})"

    def fingerprint(self) -> int:
        """64 bits that travel with every frame, so that members that disagree find out at once; the kind's on top."""
        data = msgspec.msgpack.encode(self)
        hashed = int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")
        return hashed % (1 << _KIND_AT) | self.kind << _KIND_AT


def same_kind(one: int, other: int) -> bool:
    """Whether two fingerprints are of calls of one kind: all that calls of different shards have to have in common."""
    return one >> _KIND_AT == other >> _KIND_AT


@dataclass(frozen=True, slots=True)
class Receipt:
    """What a commit hands back.

    Attributes:
        out: the array with the result (the object the caller passed as out or, in place, as the tensor).
        op_id: "group/seq", of a send or recv "group/p2p-seq"; unique within the group's life, the same on all members.
        epoch: the epoch that committed.
        seq: the operation's number, the count of calls in program order; sends and recvs have a count of their own.
        contributors: names whose data is in the result, in rank order.
        world_size: how many contributors.
        digest: 16 hex digits, equal on all members.
        attempts: 1 if the first try committed.
        algorithm: the schedule that ran.
        bytes_sent: payload and frame headers that this member put on the wire in the committed attempt.
        seconds: from the call reaching the daemon to its commit.
        codec: name of the wire format, "none" for the raw elements.
        bytes_saved: what the codec kept off this member's wire.
        codec_error: relative L2 error of what this member encoded last (its share of the result), 0.0 without codec.
        counted: whether this member's tensor is in the result: not where it came after the grace time, and its daemon
            took part with zeros.
        asked_master: False of an update_membership which the members passed by themselves, since their master was away:
            it has admitted nobody. One member may say so, and another, who heard of it from the master, not.
        bytes_in_memory: how many of bytes_sent went through memory, to members on this machine; 0: all over sockets.
        by_engine: whether the daemon's engine started and committed it by itself, as it does with repeated calls.
        bytes_received: payload that this member took from others in the committed attempt, without frame headers.
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
    codec: str = "none"
    bytes_saved: int = 0
    codec_error: float = 0.0
    counted: bool = True
    asked_master: bool = True
    bytes_in_memory: int = 0
    by_engine: bool = False
    bytes_received: int = 0
