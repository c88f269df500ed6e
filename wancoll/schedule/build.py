"""Builds one rank's schedule: algorithms say what is sent, received and reduced, this finds places and bounds.

An algorithm handles values: byte ranges that are (or will be) here. With a codec, a rank's own bytes are what they are
once encoded, whoever reduces them; sums are encoded before they are sent, once for each value; what was received
encoded is passed on as it came; and the result is what its encoded form says, on every rank, so that all hold the same
bytes. Where the caller's memory has its bytes encoded, or takes the result so, it is read and written as it is. In
kinds other than all_reduce the result is never encoded as such: it is sums, or what the blocks in it say.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from wancoll.collective import Codec, DType, Kind, ReduceOp
from wancoll.schedule.steps import RAW_ENDS, Action, Buffer, Direction, Ends, Place, Schedule, Step, chunk_bounds

_WIDE = (DType.float32, DType.float64)
_HALF = (DType.float16, DType.bfloat16)  # which gain nothing from bf16 and fp16


def takes(codec: Codec, dtype: DType) -> bool:
    """Whether tensors of *dtype* can travel as *codec*."""
    return bool(codec) and dtype in (_WIDE if codec in (Codec.bf16, Codec.fp16) else _WIDE + _HALF)


# The algorithms that send a sparse codec's blocks only, by Codec.of_result: all reduce in rank order, to the same bits.
SPARSE = {False: ("full_exchange", "ring"), True: ("direct", "ring")}


def fits_sparse(codec: Codec, op: ReduceOp, algorithm: str) -> bool:
    """Whether a sparse *codec* has a meaning for *op*, and is of use with *algorithm*."""
    return op in (ReduceOp.sum, ReduceOp.avg) and algorithm in ("auto", *SPARSE[codec.of_result])


@dataclass(frozen=True, slots=True)
class Coding:
    """A codec, as far as sizes matter: *elements* of *itemsize* bytes each become *coded* bytes on the wire."""

    elements: int
    coded: int
    itemsize: int
    of_result: bool = True  # the result is what its encoded form says

    @classmethod
    def of(cls, codec: Codec, dtype: DType, kind: Kind = Kind.all_reduce) -> Coding | None:
        """The coding of *codec* for elements of *dtype*; None if they travel as they are."""
        return cls(*codec.block, dtype.itemsize, codec.of_result and kind is Kind.all_reduce) if codec else None

    def coded_bytes(self, nbytes: int) -> int:
        """Wire size of *nbytes* of elements; the last block is a whole one."""
        return -(-nbytes // (self.elements * self.itemsize)) * self.coded


class Value(NamedTuple):
    """Bytes [start, start + length) of the whole that are here once their steps have come that far."""

    start: int  # as Step.start
    length: int  # bytes of raw elements
    raw: Place | None  # where they are as elements, None if only encoded
    raw_after: int = -1  # the step that puts them there, -1 if they are there from the start
    coded: Place | None = None  # where they are encoded, None if nowhere
    coded_after: int = -1  # the step that puts them there


def result_at(offset: int) -> Place:
    """Where the bytes at *offset* of the result are."""
    return Place(Buffer.result, offset)


@dataclass(frozen=True, slots=True)
class Shape:
    """What algorithms know of an operation, but for the codec. A kind uses what it has."""

    count: int  # elements of the tensor; of a block where there are blocks of one size
    itemsize: int  # bytes of an element
    root: int  # a rank, where there is one
    lengths: Sequence[int]  # bytes of every rank's block
    starts: Sequence[int]  # where every rank's block begins in the input (of scatter: in the root's), bytes
    sites: Sequence[str]  # label of every rank's site; "" is a site of its own
    shares: Sequence[int] = ()  # how much of a tensor every rank owns in a direct all-reduce; empty: all alike

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor, or of a block."""
        return self.count * self.itemsize


def spans(shape: Shape, parts: int, coding: Coding | None = None, shares: Sequence[int] = ()) -> list[tuple[int, int]]:
    """(start, length) in bytes of every chunk of the tensor: see chunk_bounds."""
    bounds = chunk_bounds(shape.count, parts, coding.elements if coding else 1, shares)
    return [(start * shape.itemsize, (stop - start) * shape.itemsize) for start, stop in bounds]


class Builder:
    """Builds one rank's schedule.

    Args:
        rank: whose.
        world_size: how many ranks there are.
        coding: of what crosses the wire; None: raw elements.
        nbytes: of the result, where there is a coding.
        ends: which of the caller's buffers are encoded.
        raw_sums: sums cross the wire raw, but for the result: then its error does not grow with the ranks.
    """

    def __init__(
        self, rank: int, world_size: int, coding: Coding | None = None, nbytes: int = 0, ends: Ends = RAW_ENDS,
        *, raw_sums: bool = False,
    ) -> None:  # fmt: skip
        self.rank, self.world_size, self.coding, self.raw_sums = rank, world_size, coding, raw_sums
        self._ends, self._nbytes = ends, nbytes
        self._steps: list[Step] = []
        self._scratch = 0
        if self._codes_result and not ends.result:
            assert coding is not None
            self.room(coding.coded_bytes(nbytes))  # of the encoded result, which the engine hashes there
        self._sent: Counter[int] = Counter()
        self._received: Counter[int] = Counter()
        self._users: dict[Place, dict[int, None]] = {}  # the last steps that wrote or read what is there
        self.right, self.left = (rank + 1) % world_size, (rank - 1) % world_size

    @property
    def _codes_result(self) -> bool:
        return self.coding is not None and self.coding.of_result

    @property
    def rightwards(self) -> list[int]:
        """The other ranks, the right neighbour first."""
        return [(self.rank + offset) % self.world_size for offset in range(1, self.world_size)]

    @property
    def leftwards(self) -> list[int]:
        """The other ranks, the left neighbour first."""
        return self.rightwards[::-1]

    def mine(self, start: int, length: int, at: int | None = None) -> Value:
        """The caller's own bytes, at offset *at* of the input (*start* unless given); with a codec, encoded only."""
        if self.coding is None or not length:
            return Value(start, length, Place(Buffer.input, start if at is None else at))
        if self._ends.input:
            return Value(start, length, None, coded=Place(Buffer.input, self.coding.coded_bytes(start), encoded=True))
        place = Place(Buffer.input, start if at is None else at)
        return self.encoded(Value(start, length, place))._replace(raw=None)

    def range_at(self, offset: int) -> int:
        """Where the range of the block begins that is at *offset* of the result: ranges begin at a codec's blocks."""
        return offset if self.coding is None else 0

    def making(self, start: int, length: int) -> Place:
        """Where bytes of the result may be made: where they belong, unless that takes them encoded.

        Nor there if sums are sent from it: what a step sends no other one may overwrite but a receive. Where the caller
        keeps sums they stay for it beyond the result.
        """
        if self._ends.kept:
            return result_at(self._nbytes + start)
        return self.room(length) if self._ends.result or self.raw_sums else result_at(start)

    def send(self, peer: int, value: Value, *, raw: bool = False) -> Value:
        """Send *value* to rank *peer*; the one returned knows its encoded form, for the next send of it.

        *raw*: without the codec; the receiver says so, too.
        """
        if not value.length:
            return value
        if self._coded(raw):
            value = self.encoded(value)
            place, after = value.coded, value.coded_after
        else:
            value = self.decoded(value)
            place, after = value.raw, value.raw_after
        number = self._sent[peer]
        self._sent[peer] += 1
        self._add(Direction.send, Action.copy, value, peer=peer, number=number, left=place, after=(after,))
        return value

    def recv(
        self,
        peer: int,
        start: int,
        length: int,
        *,
        result: int | None = None,
        to: Place | None = None,
        raw: bool = False,
    ) -> Value:
        """Receive bytes [start, start + length) of the whole, as in Step, from rank *peer*.

        With *result* they are final and belong at this offset of the result. Else, where they are not encoded, they go
        *to* a place; None: new scratch.
        """
        if not length:
            return Value(start, 0, result_at(0))
        coded, adopts = self._coded(raw), result is not None and self._codes_result
        if coded:
            to = self._coded_result(start) if adopts else self._coded_room(length)
        else:
            to = result_at(result) if result is not None else to or self.room(length)
        value = Value(start, length, None if coded else to, coded=to if coded else None)
        final = result is not None and (not coded or (adopts and self._ends.result))
        done = self._receive(peer, value, Action.copy, to=to, result=final)
        if not coded:
            return value._replace(raw_after=done)
        value = value._replace(coded_after=done)
        if result is None or adopts:
            return self._final(value) if adopts else value
        return self._decode(value, result_at(result), result=True)

    def recv_reduced(
        self,
        peer: int,
        left: Value,
        *,
        to: Place | None = None,
        last: bool = False,
        raw: bool = False,
    ) -> Value:
        """Receive the range of *left* from rank *peer* and reduce: left op received. See reduce for the rest.

        One step where left is the caller's own and nothing is encoded, so that bytes are reduced while they are hot.
        All reduce ops are commutative to the bit, so that a schedule may say so whichever operand its order puts first.
        """
        if not left.length:
            return left
        if left.raw is None or left.raw_after >= 0 or self.coding is not None:
            received = self.recv(peer, left.start, left.length, raw=raw)
            return self.reduce(left, received, to=to, last=last)
        to = to or self.room(left.length)
        done = self._receive(peer, left, Action.final if last else Action.reduce, to=to, left=left.raw, result=last)
        return Value(left.start, left.length, to, done)

    def send_nothing(self, peer: int) -> None:
        """Send rank *peer* an empty frame: it says that this rank has made the call."""
        number = self._sent[peer]
        self._sent[peer] += 1
        nothing = Value(0, 0, None)
        self._add(Direction.send, Action.copy, nothing, peer=peer, number=number, left=Place(Buffer.input, 0))

    def recv_nothing(self, peer: int) -> None:
        """Receive an empty frame from rank *peer*."""
        self._receive(peer, Value(0, 0, None), Action.copy, to=result_at(0))

    def reduce_from(
        self,
        ranks: Sequence[int],
        own: Value,
        *,
        to: Place | None = None,
        last: bool = False,
        raw: bool = False,
    ) -> Value:
        """Receive the range of *own* from all others of *ranks* and reduce: ((x0 op x1) op x2) ..., in their order.

        This rank, among *ranks*, stands for *own*, which must not lie at *to*. The rest is as in reduce; the outcome is
        at *to* if there was anything to reduce.
        """
        if len(ranks) == 1 or not own.length:
            return own

        def taken(rank: int, at: Place | None = None) -> Value:
            return own if rank == self.rank else self.recv(rank, own.start, own.length, to=at, raw=raw)

        to = to or self.room(own.length)
        first, second, *rest = ranks
        done = last and not rest
        if self.rank in (first, second):
            value = self.recv_reduced(first if second == self.rank else second, own, to=to, last=done, raw=raw)
        else:
            value = self.reduce(taken(first, to), taken(second), to=to, last=done)
        for rank in rest:
            value = self.reduce(value, taken(rank), to=to, last=last and rank == ranks[-1])
        return value

    def reduce(self, left: Value, right: Value, *, to: Place | None = None, last: bool = False) -> Value:
        """Reduce two values of the same range: left op right, at *to* (None: new scratch).

        That may be where left is, not where right is. *last*: the outcome is the result (avg divides; with a codec it
        is encoded, and what that says is the result), and belongs at *to*.
        """
        if not left.length:
            return left
        to = to or self.room(left.length)
        if left.raw is None:
            left = self._decode(left, to)
        adopts = last and self._codes_result
        right_place, right_after = (
            (right.coded, right.coded_after) if right.raw is None else (right.raw, right.raw_after)
        )
        done = self._add(
            Direction.local,
            Action.final if last else Action.reduce,
            left,
            to=to,
            left=left.raw,
            right=right_place,
            after=(left.raw_after, right_after),
            result=last and not adopts,
        )
        value = Value(left.start, left.length, to, done)
        return self._adopt(value) if adopts else value

    def keep(self, value: Value, result: int) -> Value:
        """Copy *value*, the caller's own or another one, to where it belongs in the result, as a part of the result."""
        if not value.length:
            return value
        if value.raw is None and not self._codes_result:
            return self._decode(value, result_at(result), result=True)
        if value.raw is None:
            to, left, after, final = self._coded_result(value.start), value.coded, value.coded_after, self._ends.result
        else:
            to, left, after, final = result_at(result), value.raw, value.raw_after, True
        done = self._add(Direction.local, Action.copy, value, to=to, left=left, after=(after,), result=final)
        if value.raw is None:
            return self._final(value._replace(coded=to, coded_after=done))
        return value._replace(raw=to, raw_after=done)

    def encoded(self, value: Value) -> Value:
        """*value* with its encoded form, made now if there was none."""
        if value.coded is not None or not value.length:
            return value
        return self._encode(value, self._coded_room(value.length), measured=not self._codes_result)

    def decoded(self, value: Value) -> Value:
        """*value* as elements, decoded into scratch if it was encoded only."""
        return value if value.raw is not None else self._decode(value, self.room(value.length))

    def room(self, length: int) -> Place:
        """Scratch memory for *length* bytes of elements; ranges lie in cache lines of their own."""
        place = Place(Buffer.scratch, self._scratch)
        self._scratch += -(-length // 64) * 64
        return place

    def finish(self) -> Schedule:
        """The schedule.

        Every rank sends at least one frame to its right neighbour, empty if need be: members whose calls differ find
        out wherever they differ, since around the ring some neighbours do (R15).
        """
        if self.world_size > 1 and not self._sent[self.right]:
            self.send_nothing(self.right)
        if self.world_size > 1 and not self._received[self.left]:
            self.recv_nothing(self.left)
        return self.schedule()

    def schedule(self) -> Schedule:
        """The schedule as it is: for two ranks that have nothing to do with the others."""
        return Schedule(tuple(self._steps), self._scratch, self._ends, adopts=self._codes_result)

    # ---- inside --------------------------------------------------------------------------------------

    def _coded(self, raw: bool) -> bool:
        return self.coding is not None and not raw

    def _coded_room(self, length: int) -> Place:
        assert self.coding is not None
        return self.room(self.coding.coded_bytes(length))._replace(encoded=True)

    def _coded_result(self, start: int) -> Place:
        assert self.coding is not None
        buffer = Buffer.result if self._ends.result else Buffer.scratch
        return Place(buffer, self.coding.coded_bytes(start), encoded=True)

    def _adopt(self, value: Value) -> Value:
        coded = self._encode(value, self._coded_result(value.start), result=self._ends.result, measured=True)
        return self._final(coded._replace(raw=None))

    def _final(self, value: Value) -> Value:
        """The *value* that is encoded where the encoded result is, as elements where the caller wants these."""
        return value if self._ends.result else self._decode(value, result_at(value.start), result=True)

    def _encode(self, value: Value, to: Place, *, result: bool = False, measured: bool) -> Value:
        done = self._add(
            Direction.local, Action.encode, value, to=to, left=value.raw, after=(value.raw_after,),
            result=result, measured=measured,
        )  # fmt: skip
        return value._replace(coded=to, coded_after=done)

    def _decode(self, value: Value, to: Place, *, result: bool = False) -> Value:
        done = self._add(
            Direction.local, Action.decode, value, to=to, left=value.coded, after=(value.coded_after,), result=result
        )
        return value._replace(raw=to, raw_after=done)

    def _receive(
        self, peer: int, value: Value, action: Action, *, to: Place, left: Place | None = None, result: bool = False
    ) -> int:
        number = self._received[peer]
        self._received[peer] += 1
        return self._add(Direction.recv, action, value, peer=peer, number=number, to=to, left=left, result=result)

    def _add(
        self,
        direction: Direction,
        action: Action,
        value: Value,
        *,
        peer: int = -1,
        number: int = 0,
        to: Place | None = None,
        left: Place | None = None,
        right: Place | None = None,
        after: tuple[int, ...] = (),
        result: bool = False,
        measured: bool = False,
    ) -> int:
        # Bytes are overwritten by one that comes after all who use them. A correct sender of what is received cannot be
        # early (the executor checks it); the engine refuses the frame of any other.
        users = self._users.get(to, ()) if to is not None and value.length else ()
        bounds = tuple(sorted({*(index for index in after if index >= 0), *users}))
        self._steps.append(
            Step(direction, action, value.start, value.length, peer, number, to, left, right, bounds, result, measured)
        )
        done = len(self._steps) - 1
        for place in (left, right):
            if place is not None and place.buffer is not Buffer.input:
                known = self._users.setdefault(place, {})
                for bound in bounds:
                    known.pop(bound, None)
                known[done] = None
        if to is not None and value.length:
            self._users[to] = {done: None}
        return done
