"""Which fragment of a model travels when: the schedule of Streaming DiLoCo (arXiv 2501.18512, section 3). Pure.

A model's parameters are cut into fragments. Each of them has one outer step in a *round* of `every` inner steps, and
they take turns: fragment p begins its own after (p + 1) / fragments of the round, so the last one begins where the
round ends. What it sends is on its way during the next `delay` inner steps. Once a round nothing is under way, and
members may join: after the last outer step where there is no delay, else one inner step before the round ends. What
would still be on its way then ends there. Whether anybody waits is asked for up to `delay` inner steps ahead, once
nothing else is on its way: then that costs no time.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto
from itertools import accumulate


class Act(Enum):
    """What is done with a fragment, or with the group."""

    end = auto()  # the fragment's result is waited for, and taken over
    begin = auto()  # the fragment's difference is sent
    ask = auto()  # those who wait may come in; nothing else happens until admit. The fragment is -1
    admit = auto()  # they are handed the state; where it was not asked before, it is now. The fragment is -1


def turn(step: int, every: int, fragments: int, delay: int) -> list[tuple[Act, int]]:
    """What happens after the inner step number *step*, counted from 1: in this order, on every member alike.

    A round is *every* inner steps, and a fragment is under way for *delay* of them. Members are admitted last, so that
    a newcomer goes on with the next inner step, as they do.
    """
    admits = every - 1 if delay else every
    ends: list[tuple[int, int]] = []  # how long ago it began, fragment
    begins: list[tuple[Act, int]] = []
    idle = admits - delay  # from there on, up to admits, nothing is under way
    for p in range(fragments):
        start = (p + 1) * every // fragments
        takes = min(delay, (admits - start) % every)
        idle = max(idle, start % every + takes)
        if step < start:
            continue
        ago = (step - start) % every
        if not ago:
            begins.append((Act.begin, p))
            if not delay:
                begins.append((Act.end, p))
        elif ago == takes:
            ends.append((ago, p))
    acts = [(Act.end, p) for _, p in sorted(ends, reverse=True)] + begins
    if step % every == admits % every:
        return [*acts, (Act.admit, -1)]
    return [*acts, (Act.ask, -1)] if step % every == idle else acts


def most_fragments(every: int, delay: int) -> int:
    """With a delay no fragment may begin where members join, one step before the last fragment begins."""
    return max(1, every // 2) if delay else every


def cut(sizes: Sequence[int], fragments: int) -> list[range]:
    """Indices of the parameters of each fragment: neighbours stay together, and fragments are about equally large."""
    ends = list(accumulate(sizes, initial=0))
    cuts = [0]
    for p in range(1, fragments):
        goal = ends[-1] * p / fragments
        among = range(cuts[-1] + 1, len(sizes) - (fragments - p) + 1)  # each fragment has one parameter at least
        cuts.append(min(among, key=lambda i: (abs(ends[i] - goal), i)))
    return [range(a, b) for a, b in zip(cuts, [*cuts[1:], len(sizes)], strict=True)]
