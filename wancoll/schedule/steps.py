"""Schedules as data: steps over byte ranges of three buffers, and chunk boundaries.

A schedule is one rank's list of steps. Its wire steps move bytes to and from other ranks, its local steps combine bytes
that are here. Between one pair of ranks the sends of the one are the receives of the other, in the same order. A step
may start before the ones it comes `after` have ended: it runs up to where they have come, byte by byte.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from itertools import accumulate, pairwise
from typing import NamedTuple


class Direction(IntEnum):
    """Which way the bytes of a step go, seen from the rank whose schedule it is."""

    send = 0
    recv = 1
    local = 2


class Action(IntEnum):
    """What becomes of the bytes.

    A send copies from left to the wire. A recv copies from the wire to `to`, or reduces: to = left op received. A local
    step copies (to = left; both are encoded or none), reduces (to = left op right; right may be encoded), encodes or
    decodes left.
    """

    copy = 0
    reduce = 1
    final = 2  # as reduce, then the reduce op's last step (avg divides)
    encode = 3  # to, encoded = left
    decode = 4  # to = left, encoded


class Buffer(IntEnum):
    """Where bytes lie: the caller's (never written), the result's, and memory of the attempt's own."""

    input = 0
    result = 1
    scratch = 2


class Place(NamedTuple):
    """Where a step's range begins in a buffer."""

    buffer: Buffer
    offset: int  # bytes, of the range's first element
    encoded: bool = False  # whether the bytes are in the codec's wire format there


class Step(NamedTuple):
    """One step."""

    direction: Direction
    action: Action
    # where the range begins in the whole, bytes of raw elements; both ends of a wire step have the same. Lanes share a
    # range at cuts that depend on it, so it is where the bytes belong in the result if they belong there.
    start: int
    length: int  # of the range, bytes of raw elements
    peer: int = -1  # the other rank of a wire step
    number: int = 0  # counts the wire steps from one rank to another from 0; frames carry it
    # where the result of the step goes (not of a send). On the wire bytes are encoded if they are at their ends.
    to: Place | None = None
    left: Place | None = None  # what is sent, or the left operand
    right: Place | None = None  # right operand of a local reduction
    # indices of earlier steps of this schedule over the same range, whose progress bounds this one. A recv does not
    # wait for them: bytes that come before they have come as far break the protocol.
    after: tuple[int, ...] = ()
    result: bool = False  # what it writes to the result is final and enters the digest
    measured: bool = False  # of an encode: the error that it makes is added up for the receipt


MAX_STEPS = 1 << 16  # of one schedule, as in the engine


class Ends(NamedTuple):
    """Which of the caller's two buffers hold encoded bytes: what tensor they stand for is the same."""

    input: bool = False
    result: bool = False
    kept: bool = False  # the result's has room for as much again, where sums stay which this rank makes results of


RAW_ENDS = Ends()


class Schedule(NamedTuple):
    """One rank's steps, and the bytes of scratch memory that they use.

    Where the result *adopts* what its encoded form says, this is the first that lies in scratch memory, unless the
    result buffer has it.
    """

    steps: tuple[Step, ...]
    scratch: int = 0
    ends: Ends = RAW_ENDS
    kept: tuple[int, int] = (0, 0)  # where the sums that are kept begin and end in the tensor, elements
    adopts: bool = False


def chunk_bounds(
    count: int, world_size: int, multiple: int = 1, shares: Sequence[int] = ()
) -> tuple[tuple[int, int], ...]:
    """[start, stop) in elements of every rank's chunk; sizes differ by at most one multiple, the longer ones first.

    Depends on its arguments alone (rule 6 of the promise). Boundaries, but for the end, are multiples of *multiple*: a
    codec's block. With *shares*, one for each rank, chunks are as long as these are large, but for one multiple.
    """
    if shares:
        whole, blocks = sum(shares), -(-count // multiple)
        cuts = [-(-blocks * upto // whole) * multiple for upto in accumulate(shares, initial=0)]
        return tuple((min(start, count), min(stop, count)) for start, stop in pairwise(cuts))
    base, longer = divmod(-(-count // multiple), world_size)
    bounds = []
    start = 0
    for chunk in range(world_size):
        stop = start + base + (1 if chunk < longer else 0)
        bounds.append((min(start * multiple, count), min(stop * multiple, count)))
        start = stop
    return tuple(bounds)
