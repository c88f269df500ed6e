"""What an operation should take by a pipelined alpha-beta model, and the choice of an algorithm from it.

T = messages * alpha + bytes * beta, as in Thakur, Rabenseifner and Gropp, 2005, "Optimization of collective
communication operations in MPICH", but for what this project's executor does. A member passes bytes on while the rest
of them still arrives, and sends and receives at the same time, so a step does not wait for the one before it. Two
things are left: a byte's way over the hops, alpha each, and the time for which the busiest member's uplink (or
downlink) is occupied. Of steps that follow each other on the same uplinks the next one begins when its first bytes are
there (alpha after the step before began) and the uplink is free: max(alpha, bytes * beta) later. The links' slow start,
losses and the cost of the reduction itself are not in the model.

It adds gamma for every message that the busiest member sends or receives: messages to different members leave
together and share one alpha, but each of them costs some CPU. It is 0 unless given. Messages are counted as this
project's schedules send them: halving-doubling sends every chunk of a half by itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

GRID = tuple(sorted({round(2 ** (i / 4)) for i in range(4 * 42 + 1)}))  # bytes: four sizes to an octave, to 4 TiB
NEAR = 1.02  # times within this factor are alike to `choices`: links are not measured better


@dataclass(frozen=True, slots=True)
class LinkCost:
    """What a message costs. Raises ValueError: a number that is negative or not finite."""

    alpha: float  # seconds for one message over one hop, however short it is
    beta: float  # seconds for each byte on one member's uplink or downlink
    gamma: float = 0.0  # seconds of a member's CPU for each message that it sends or receives
    owning: float = 1.0  # of the time of a direct all_reduce's bytes, with the plan's shares in place of even ones

    def __post_init__(self) -> None:
        if not all(math.isfinite(value) and value >= 0 for value in (self.alpha, self.beta, self.gamma, self.owning)):
            raise ValueError(f"costs are finite and not negative, got {self}")


@dataclass(frozen=True, slots=True)
class Sites:
    """Where the members are, for the hierarchical algorithm. Raises ValueError: no site, or an empty one."""

    sizes: tuple[int, ...]  # members of each site
    inside: LinkCost  # cost of links within a site; those between sites have the cost that the functions are given

    def __post_init__(self) -> None:
        if not self.sizes or min(self.sizes) < 1:
            raise ValueError(f"every site has at least one member, got sizes {self.sizes}")


@dataclass(frozen=True, slots=True)
class _Pipe:
    """One algorithm of one kind, for worlds above 1."""

    # seconds from (seconds that the whole tensor occupies a link, world size, alpha)
    time: Callable[[float, int, float], float]
    handled: Callable[[int], int]  # messages that the busiest member sends and receives, from the world size


def _levels(world_size: int) -> int:
    """ceil(log2 K): children of a binomial tree's root, hops of a double tree."""
    return (world_size - 1).bit_length()


def _depth(world_size: int) -> int:
    """floor(log2 K): hops from the root to the farthest leaf."""
    return world_size.bit_length() - 1


def _power_below(world_size: int) -> int:
    return 1 << _depth(world_size)


def _steps(count: int, each: float, alpha: float) -> float:
    """*count* steps on the same uplinks, each of which occupies them for *each* seconds."""
    return (count - 1) * max(alpha, each) + each + alpha


def _halving_doubling(t: float, k: int, alpha: float) -> float:
    """Halves, quarters and so on, there and back; with a fix-up the whole tensor first, and last."""
    core = _power_below(k)
    there = [t] if core != k else []
    there += [t / (1 << level) for level in range(1, _levels(core) + 1)]
    return sum(max(each, alpha) for each in there + there[:0:-1]) + there[0] + alpha


# A rank of a double tree has four links at most, each with half of the tensor both ways.
# In tree and naive a root's downlink takes from its children while its uplink gives to them: the directions overlap.
_ALL_REDUCE = {
    "ring": _Pipe(lambda t, k, a: _steps(2 * (k - 1), t / k, a), lambda k: 4 * (k - 1)),
    "direct": _Pipe(lambda t, k, a: _steps(2, t * (k - 1) / k, a), lambda k: 4 * (k - 1)),
    "halving_doubling": _Pipe(
        _halving_doubling, lambda k: 4 * (_power_below(k) - 1) + (0 if _power_below(k) == k else 2 * _power_below(k))
    ),
    "tree": _Pipe(lambda t, k, a: 2 * _depth(k) * a + _levels(k) * t, lambda k: 2 * _levels(k)),
    "double_tree": _Pipe(lambda t, k, a: 2 * _levels(k) * a + min(k, 4) / 2 * t, lambda k: 2 * min(k, 4)),
    "full_exchange": _Pipe(lambda t, k, a: a + (k - 1) * t, lambda k: 2 * (k - 1)),
    "naive": _Pipe(lambda t, k, a: 2 * a + (k - 1) * t, lambda k: 2 * (k - 1)),
}
_HALF = {
    "ring": _Pipe(lambda t, k, a: _steps(k - 1, t / k, a), lambda k: 2 * (k - 1)),
    "direct": _Pipe(lambda t, k, a: a + t * (k - 1) / k, lambda k: 2 * (k - 1)),
}
_WHOLE_TENSOR = {  # from a root, or to it; a ring is a chain
    "ring": _Pipe(lambda t, k, a: (k - 1) * a + t, lambda k: 1 if k == 2 else 2),
    "tree": _Pipe(lambda t, k, a: _depth(k) * a + _levels(k) * t, _levels),
    "double_tree": _Pipe(lambda t, k, a: _levels(k) * a + t, lambda k: min(k, 4)),
    "direct": _Pipe(lambda t, k, a: a + (k - 1) * t, lambda k: k - 1),
}
_BLOCKS = {  # the same; the chain is for where links are missing
    "direct": _Pipe(lambda t, k, a: a + t * (k - 1) / k, lambda k: k - 1),
    "ring": _Pipe(lambda t, k, a: (k - 1) * a + t * (k - 1) / k, lambda k: 2 * k - 3),
}
_EXCHANGE = {
    "direct": _Pipe(lambda t, k, a: a + t * (k - 1) / k, lambda k: 2 * (k - 1)),
    "ring": _Pipe(lambda t, k, a: (k - 1) * (a + t / 2), lambda k: k * (k - 1)),
}
_PIPES = {
    "all_reduce": _ALL_REDUCE, "reduce_scatter": _HALF, "all_gather": _HALF, "broadcast": _WHOLE_TENSOR,
    "reduce": _WHOLE_TENSOR, "gather": _BLOCKS, "scatter": _BLOCKS, "all_to_all": _EXCHANGE,
}  # fmt: skip

# Which algorithms each kind of collective has. Of those about equally fast the first is chosen:
# a ring has two links for each member and one sender for each receiver, a direct exchange a link for each pair.
AVAILABLE = {kind: tuple(pipes) for kind, pipes in _PIPES.items()}
AVAILABLE["all_reduce"] += ("hierarchical",)
KINDS = tuple(AVAILABLE)


def handled(algorithm: str, world_size: int, kind: str = "all_reduce") -> int:
    """Messages that the busiest member sends and receives, in sum. Raises ValueError: there is no such algorithm."""
    pipe = _pipe(kind, algorithm, world_size)
    return pipe.handled(world_size) if world_size > 1 else 0


def predicted(
    algorithm: str, kind: str, nbytes: float, world_size: int, cost: LinkCost, *, sites: Sites | None = None
) -> float:
    """Seconds from the first byte to the last, without the commit.

    Hierarchical needs *sites*, and *cost* is that of links between them. Where a kind has two sizes, *nbytes* are of
    the large tensor: the input of reduce_scatter and scatter, the result of all_gather and gather, either of
    all_to_all. Raises ValueError: no such kind, no such algorithm of it, no members, or *sites* that do not have them
    all.
    """
    if algorithm == "hierarchical" and kind == "all_reduce":
        return _hierarchical(nbytes, world_size, cost, sites)
    pipe = _pipe(kind, algorithm, world_size)
    if world_size == 1:
        return 0.0
    if (kind, algorithm) == ("all_reduce", "direct"):
        nbytes *= cost.owning
    return pipe.time(nbytes * cost.beta, world_size, cost.alpha) + pipe.handled(world_size) * cost.gamma


def _hierarchical(nbytes: float, world_size: int, cost: LinkCost, sites: Sites | None) -> float:
    """Reduce-scatter inside the sites, all-reduce between them by all members' uplinks, all-gather inside."""
    largest, smallest, count = _shape(world_size, sites)
    inside = sites.inside if sites else cost
    scatter = predicted("direct", "reduce_scatter", nbytes, largest, inside)
    gather = predicted("direct", "all_gather", nbytes, largest, inside)
    part = nbytes / smallest  # where the site has fewest uplinks
    return scatter + predicted("direct", "all_reduce", part, count, cost) + gather


# ---- the choice ----------------------------------------------------------------------------------------


def choices(
    world_size: int, cost: LinkCost, *, sites: Sites | None = None, kinds: Iterable[str] = KINDS
) -> dict[str, list[tuple[int, str]]]:
    """Which algorithm at which size, for each kind: the first in AVAILABLE whose time is within NEAR of the best.

    The same arguments, which are as in predicted(), give the same lists everywhere: plain float arithmetic in a fixed
    order. Without *sites* hierarchical is no candidate.

    Returns:
        Kind -> (most bytes of the tensor, algorithm), ascending. The first entry whose bound is not below the size
        holds; the last bound is 0, which means no limit. An empty tensor goes the way of one byte.
    """
    return {kind: _choices(kind, world_size, cost, sites) for kind in kinds}


def chosen(entries: Iterable[tuple[int, str]], nbytes: int) -> str:
    """The algorithm that a list of `choices` names for *nbytes*. Raises ValueError: no entry without a limit."""
    for most, algorithm in entries:
        if nbytes <= most or most == 0:
            return algorithm
    raise ValueError(f"no algorithm for {nbytes} bytes: the last bound of the choices is not 0")


def usable(choices: Mapping[str, Sequence[tuple[int, str]]], shares: Sequence[int], world_size: int) -> bool:
    """Whether *choices*, from elsewhere, name algorithms that there are, for every size, and *shares* fit the world."""
    return (not shares or (len(shares) == world_size and any(shares))) and all(
        kind in AVAILABLE and entries and entries[-1][0] == 0 and all(name in AVAILABLE[kind] for _, name in entries)
        for kind, entries in choices.items()
    )


def _choices(kind: str, world_size: int, cost: LinkCost, sites: Sites | None) -> list[tuple[int, str]]:
    if kind not in AVAILABLE:
        raise ValueError(f"unknown kind {kind!r}, expected one of {', '.join(KINDS)}")
    names = [name for name in AVAILABLE[kind] if name != "hierarchical" or sites is not None]

    def best(nbytes: int) -> str:
        times = [predicted(name, kind, nbytes, world_size, cost, sites=sites) for name in names]
        limit = min(times) * NEAR
        return next(name for name, time in zip(names, times, strict=True) if time <= limit)

    found: list[tuple[int, str]] = []
    low, winner = GRID[0], best(GRID[0])
    for high in GRID[1:]:
        while best(high) != winner:
            low = _last(low, high, winner, best)
            found.append((low, winner))
            low, winner = low + 1, best(low + 1)
        low = high
    return [*found, (0, winner)]


def _last(low: int, high: int, winner: str, best: Callable[[int], str]) -> int:
    """The size from *low*, where *winner* is best, up to *high*, where it is not, after which it no longer is."""
    while high - low > 1:
        middle = (low + high) // 2
        if best(middle) == winner:
            low = middle
        else:
            high = middle
    return low


# ---- checks --------------------------------------------------------------------------------------------


def _pipe(kind: str, algorithm: str, world_size: int) -> _Pipe:
    if world_size < 1:
        raise ValueError(f"a world has at least 1 member, got {world_size}")
    if algorithm not in _PIPES.get(kind, ()):
        raise ValueError(f"no algorithm {algorithm!r} for {kind!r}, expected one of {AVAILABLE.get(kind, KINDS)}")
    return _PIPES[kind][algorithm]


def _shape(world_size: int, sites: Sites | None) -> tuple[int, int, int]:
    """Members of the largest and of the smallest site, and how many sites there are."""
    if sites is None:
        raise ValueError("hierarchical needs sites")
    if sum(sites.sizes) != world_size:
        raise ValueError(f"sites of {sites.sizes} members do not make a world of {world_size}")
    return max(sites.sizes), min(sites.sizes), len(sites.sizes)
