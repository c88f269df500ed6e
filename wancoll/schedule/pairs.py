"""Which pairs of ranks talk to each other in an algorithm, and how many steps it takes: without building a schedule.

A schedule of a thousand ranks takes a while to build, and where links are missing there are as many pairs to ask about.
"""

from __future__ import annotations

from collections.abc import Sequence

from wancoll.collective import DATALESS, ROOTED, Descriptor, Kind
from wancoll.schedule import cost
from wancoll.schedule.algorithms import double_tree, hierarchical
from wancoll.schedule.steps import chunk_bounds

_EVERYONE = frozenset({"direct", "full_exchange"})


def talk(descriptor: Descriptor, algorithm: str, one: int, other: int, counts: Sequence[int]) -> bool | None:
    """Whether two ranks have bytes for each other. None: only their schedules say (hierarchical).

    Of halving_doubling this is so of partners that have no bytes, too. *counts*: see there.
    """
    n = len(counts)
    if (one - other) % n in (1, n - 1):
        return True  # every rank has a frame for its right neighbour
    if algorithm == "hierarchical":
        return None
    if algorithm == "ring" or descriptor.kind in DATALESS:
        return algorithm == "direct"
    if not (descriptor.count or any(counts)):
        return False
    if algorithm in _EVERYONE and descriptor.kind in ROOTED:
        return descriptor.root in (one, other)
    if algorithm in _EVERYONE:
        return bool(counts[one] or counts[other])
    if algorithm == "naive":
        return 0 in (one, other)
    if algorithm == "halving_doubling":
        return _partners(one, other, n)
    root = max(descriptor.root, 0)
    low, high = sorted(((one - root) % n, (other - root) % n))
    if algorithm == "tree":
        return high & (high - 1) == low
    halves = 2 if descriptor.count > _elements(descriptor) else 1  # of double_tree: those that have bytes
    ways = ((low, high), (high, low)) if low else ((low, high),)
    return any(double_tree.parent(lower, tree, n) == upper for tree in range(halves) for upper, lower in ways)


def counts(descriptor: Descriptor, algorithm: str, world_size: int, shares: Sequence[int]) -> Sequence[int]:
    """Elements of every rank's block, or of its chunk where each rank owns one (direct all_reduce)."""
    if algorithm == "direct" and descriptor.kind is Kind.all_reduce:
        bounds = chunk_bounds(descriptor.count, world_size, _elements(descriptor), shares)
        return [stop - start for start, stop in bounds]
    return descriptor.block_counts(world_size)


def _elements(descriptor: Descriptor) -> int:
    """How many elements are never cut: a codec's block."""
    return descriptor.codec.block[0] if descriptor.codec else 1


def _partners(one: int, other: int, n: int) -> bool:
    """Whether two ranks exchange in halving_doubling."""
    pairs = n - (1 << (n.bit_length() - 1))
    players = [rank // 2 if rank < 2 * pairs else rank - pairs for rank in (one, other)]
    if any(rank < 2 * pairs and rank % 2 for rank in (one, other)):
        return players[0] == players[1] and max(one, other) < 2 * pairs
    return (players[0] ^ players[1]).bit_count() == 1


def most_messages(descriptor: Descriptor, algorithm: str, world_size: int, sites: Sequence[str]) -> int:
    """Wire steps of the rank that has the most, at most; but for the frames to neighbours that have no other."""
    if descriptor.kind in DATALESS or world_size == 1:
        return 2 * (world_size - 1) if algorithm == "direct" else 0
    if algorithm == "hierarchical":
        return hierarchical.most_messages(descriptor.count, sites, _elements(descriptor))
    return cost.handled(algorithm, world_size, descriptor.kind.name)
