"""The board: what a client and the engine show each other of one operation, in the arena beside its bytes. Pure.

It has three tables: *filled*, a byte for each block of front that the client sets once the block is there; *shown*, a
32-bit word for each block of back that becomes the attempt's number once the block is final; *order*, a count and so
many pairs of 64-bit offsets [start, stop) in front, in which the operation needs front, from the daemon: a hint.
docs/engine.md says how they are used.
"""

from __future__ import annotations

from typing import NamedTuple

from wancoll.limits import KIB

BLOCK = 64 * KIB  # of front and back, as of digests
MOST_RANGES = 1024  # in the order; what is beyond may come in any order
_ALIGN = 64


class Board(NamedTuple):
    """Where the tables lie, bytes from the board's begin: multiples of 64."""

    filled: int
    shown: int
    order: int
    nbytes: int


def board(front_bytes: int, back_bytes: int) -> Board:
    """The board of an operation that reads *front_bytes* and writes *back_bytes* in any epoch."""
    shown = _up(-(-front_bytes // BLOCK))
    order = shown + _up(4 * -(-back_bytes // BLOCK))
    return Board(0, shown, order, order + _up(8 + 16 * MOST_RANGES))


def _up(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN
