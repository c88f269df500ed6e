"""Transfers as data, chunk boundaries, and the numpy reference executor that the engine must equal bit for bit."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class Direction(IntEnum):
    """Which way the bytes of a transfer go, seen from the rank whose schedule it is."""

    send = 0
    recv = 1


class Action(IntEnum):
    """What a receiver does with the bytes. A send has `front` or `back` as its source instead."""

    copy = 0  # back = received (already final)
    reduce = 1  # back = front + received
    final = 2  # as reduce, then the reduce op's last step (avg divides); the chunk is then final
    front = 3  # send: from the caller's bytes
    back = 4  # send: from what was reduced or received here


@dataclass(frozen=True, slots=True)
class Transfer:
    """One line of a schedule.

    Args:
        direction: send or recv.
        peer: the other rank.
        step: number that both ends share; frames carry it.
        chunk: which chunk.
        action: see Action.
        after: index in this schedule of the recv whose progress bounds this send byte by byte, or -1.
    """

    direction: Direction
    peer: int
    step: int
    chunk: int
    action: Action
    after: int = -1


Schedule = tuple[Transfer, ...]


def chunk_bounds(count: int, world_size: int) -> tuple[tuple[int, int], ...]:
    """[start, stop) in elements of every chunk; sizes differ by at most one, the longer ones first.

    Depends on count and world size alone (rule 6 of the promise).
    """
    base, longer = divmod(count, world_size)
    bounds = []
    start = 0
    for chunk in range(world_size):
        stop = start + base + (1 if chunk < longer else 0)
        bounds.append((start, stop))
        start = stop
    return tuple(bounds)
