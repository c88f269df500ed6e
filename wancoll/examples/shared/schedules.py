"""What a pipeline's stage does, in which order. Pure.

Each schedule is a function of the stage, p stages and m micro-batches.
"""

from __future__ import annotations

Step = tuple[str, int]  # F: forward of a micro-batch; B: backward; I: backward to the inputs only; W: to the weights


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


def zero_bubble(stage: int, p: int, m: int) -> list[Step]:
    """What stages do that take, tick after tick, what they can: forward, then backward to inputs, then to weights.

    As in 1F1B stage s has p - s micro-batches under way at most, and of p at most it keeps what backward needs.
    """
    plans: list[list[Step]] = [[] for _ in range(p)]
    done = [dict.fromkeys("FIW", 0) for _ in range(p)]
    while any(each["W"] < m for each in done):
        before = [each.copy() for each in done]  # what was there when the tick began
        for s, n in enumerate(done):
            room = n["F"] < m and n["F"] - n["I"] < p - s and n["F"] - n["W"] < p
            if room and (s == 0 or before[s - 1]["F"] > n["F"]):
                what = "F"
            elif n["I"] < n["F"] and (s == p - 1 or before[s + 1]["I"] > n["I"]):
                what = "I"
            elif n["W"] < n["I"]:
                what = "W"
            else:
                continue
            plans[s].append((what, n[what]))
            n[what] += 1
    return plans[stage]


SCHEDULES = {"GPipe": gpipe, "1F1B": one_forward_one_backward, "zero bubble": zero_bubble}
