"""One grid of times for what a daemon does now and then: its tasks wake together, for a wake costs most. Pure."""

from __future__ import annotations


def next_on_grid(now: float, every: float) -> float:
    """The first multiple of *every* after *now*, seconds."""
    found = (now // every + 1) * every
    return found if found > now else found + every
