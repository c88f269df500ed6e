"""What the members of a chaos run compute: drawn from the seed and the step's number, with values that tell. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

_PATTERN = 16  # values of the factor that tells elements and steps apart
_PRIMES = (3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59)
_LARGEST = {  # up to which integers are exact; wrapped ones always are
    "float32": 2**24,
    "float64": 2**53,
    "float16": 2**11,
    "int32": 2**31,
    "int64": 2**63,
    "uint8": 2**8,
}


@dataclass(frozen=True, slots=True)
class Step:
    """One call, or several at a time, that all members make."""

    number: int  # of the step
    kind: str  # all_reduce, all_gather, reduce_scatter, all_to_all, broadcast or barrier
    dtype: str  # numpy's name
    op: str  # of what reduces
    count: int  # elements of the tensor, or of one member's block
    codec: str  # "none" or "int8"
    algorithm: str  # "auto" mostly
    depth: int  # calls under way at the same time
    in_place: bool  # whether the result replaces the tensor (all_reduce)
    on_failure: str  # "retry" or "raise"
    base: int  # member i contributes base**i, times the pattern if there is room for it
    patterned: bool  # whether there is
    root: int  # draws the root among those who took part in what was committed last

    def __str__(self) -> str:
        text = f"step {self.number}: {self.kind}({self.count} x {self.dtype}, {self.op}, codec {self.codec}"
        return f"{text}, algorithm {self.algorithm}, on_failure {self.on_failure}, {self.depth} at once)"


class _Dice:
    """Numbers that follow from a text."""

    def __init__(self, text: str) -> None:
        self._bytes = hashlib.blake2b(text.encode()).digest()
        self._at = 0

    def below(self, count: int) -> int:
        piece = self._bytes[self._at : self._at + 4]
        self._at += 4
        return int.from_bytes(piece, "little") % count

    def pick(self, *of: str) -> str:
        return of[self.below(len(of))]


def step(seed: int, number: int, largest: int, slots: int) -> Step:
    """Step *number*, from 0, of the workload of *seed*: members below *slots*, tensors of up to *largest* bytes."""
    dice = _Dice(f"{seed} {number}")
    roll = dice.below(100)
    kind = (
        "all_reduce" if roll < 75 else dice.pick("all_gather", "reduce_scatter", "all_to_all", "broadcast", "barrier")
    )
    op = (
        dice.pick("sum", "sum", "sum", "avg", "max", "min", "prod")
        if kind in ("all_reduce", "reduce_scatter")
        else "sum"
    )
    codec = "int8" if kind == "all_reduce" and op in ("sum", "avg") and dice.below(100) < 15 else "none"
    fitting = [name for name in _LARGEST if _base(name, slots)[0]]
    dtype = "float32" if codec != "none" else "int64" if op == "prod" else fitting[dice.below(len(fitting))]
    base, patterned = _base(dtype, slots)
    depth = 1 + dice.below(4) if kind == "all_reduce" and dice.below(100) < 25 else 1
    # Sizes spread evenly over the orders of magnitude.
    nbytes = max(8, largest >> dice.below(max(1, largest.bit_length() - 3)))
    count = max(1, (nbytes - dice.below(nbytes // 3 + 1)) // np.dtype(dtype).itemsize // depth)
    if kind in ("all_gather", "reduce_scatter", "all_to_all"):
        count = max(1, count // slots)
    algorithm = (
        dice.pick("ring", "direct", "tree", "double_tree", "halving_doubling")
        if kind == "all_reduce" and roll < 15
        else "auto"
    )
    on_failure = "raise" if 15 <= roll < 20 else "retry"
    return Step(
        number, kind, dtype, op, count, codec, algorithm, depth, bool(dice.below(2)), on_failure, base, patterned,
        dice.below(1 << 16),
    )  # fmt: skip


def _base(dtype: str, slots: int) -> tuple[int, bool]:
    """The largest base whose sums name the contributors exactly, 0 if none does, and whether a pattern fits too."""
    for factor in (_PATTERN, 1):
        for base in (10, 4, 2):
            if factor * (base**slots - 1) // (base - 1) <= _LARGEST[dtype] - 1:
                return base, factor > 1
    return 0, False


def pattern(count: int, step_number: int, shift: int) -> Array:
    """Factors 1 to 16, by element, step and *shift*: stale and misplaced bytes show. Shape (count,), int64."""
    at = np.arange(count, dtype=np.uint32) + np.uint32((97 * step_number + 131 * shift) & 0xFFFFFFFF)
    at *= np.uint32(0x9E3779B1)
    return (at >> np.uint32(28)).astype(np.int64) + 1


def contribution(step: Step, slot: int, shift: int = 0) -> Array:
    """What member *slot* gives to call *shift* of the step, or to member *shift*. Shape (step.count,)."""
    return _scaled(step, _weight(step, slot), shift)


def _weight(step: Step, slot: int) -> float:
    if step.codec != "none":
        return 1 + slot / 8
    return _PRIMES[slot] if step.op == "prod" else step.base**slot


def _scaled(step: Step, weight: float, shift: int) -> Array:
    dtype = np.dtype(step.dtype)
    if step.op == "prod" or not step.patterned:
        return np.full(step.count, weight, dtype)
    factors = pattern(step.count, step.number, shift)
    if dtype.kind == "f":
        result: Array = factors.astype(dtype)
        result *= dtype.type(weight)
        return result
    return (factors * int(weight)).astype(dtype)


def expected(step: Step, slots: Sequence[int], shift: int = 0) -> Array:
    """The reduction of what *slots* contribute to call *shift*. Shape (step.count,)."""
    weights = [_weight(step, slot) for slot in slots]
    match step.op:
        case "sum":
            return _scaled(step, sum(weights), shift)
        case "avg":
            total = _scaled(step, sum(weights), shift)
            return total / total.dtype.type(len(slots)) if total.dtype.kind == "f" else total // len(slots)
        case "min":
            return _scaled(step, min(weights), shift)
        case "max":
            return _scaled(step, max(weights), shift)
        case _:
            product = 1
            for weight in weights:
                product *= int(weight)
            return np.full(step.count, (product + 2**63) % 2**64 - 2**63, step.dtype)  # it wraps around


def compare(step: Step, slots: Sequence[int], got: Array, shift: int = 0) -> str:
    """Why *got* is not the reduction of what *slots* contributed; "" if it is."""
    right = expected(step, slots, shift)
    if step.codec == "none":
        return same(got, right)
    # Whoever encodes is off by half a step of 1/127 of the block's largest: each member once, and once for the result.
    total = _PATTERN * sum(_weight(step, slot) for slot in slots) / (len(slots) if step.op == "avg" else 1)
    bound = 1.1 * (len(slots) + 1) * total / 254
    off = np.abs(got.astype(np.float64) - right.astype(np.float64))
    worst = int(off.argmax())
    if off[worst] <= bound:
        return ""
    return f"element {worst} is {got[worst]!r}, expected {right[worst]!r} within {bound:.4g}"


def same(got: Array, right: Array) -> str:
    """Why two tensors differ, "" if they do not."""
    if got.shape != right.shape:
        return f"{got.shape[0]} elements, expected {right.shape[0]}"
    wrong = np.flatnonzero(got != right)
    if not wrong.size:
        return ""
    at = int(wrong[0])
    return f"{wrong.size} of {got.size} elements, the first at {at}: {got[at]!r}, expected {right[at]!r}"
