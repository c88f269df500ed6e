"""What a pipeline's stage does, in which order. Pure.

Each schedule is a function of the stage, p stages and m micro-batches.
"""

from __future__ import annotations

Step = tuple[str, int]  # F: forward of a micro-batch; B: backward


def gpipe(stage: int, p: int, m: int) -> list[Step]:
    """All forwards, then all backwards."""
    return [*(("F", i) for i in range(m)), *(("B", i) for i in range(m))]


def one_forward_one_backward(stage: int, p: int, m: int) -> list[Step]:
    """Do as many forwards as stages follow; then one of each in turn."""
    first = min(p - 1 - stage, m)
    steps = [("F", i) for i in range(first)]
    for i in range(m):
        steps += [("F", first + i), ("B", i)] if first + i < m else [("B", i)]
    return steps


SCHEDULES = {"GPipe": gpipe, "1F1B": one_forward_one_backward}
