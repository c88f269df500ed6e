"""The order of a ring: one that avoids pairs, and the one whose slowest edge is fastest. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import lru_cache
from math import inf
from typing import NamedTuple

from wancoll.limits import KIB, MIB
from wancoll.local import split_address
from wancoll_master.plan import ring_search

EXACT = 10  # members up to which an order is found if there is one
EXACT_BEST = 12  # and up to which the best order is
SEARCHED = 256  # members up to which a better order is looked for
MATERIAL = 1.1  # times better than the present order a ring has to be, so that noise does not move ranks
_STEPS = 50_000  # beyond EXACT, the search for any order gives up after this many
_SEARCH_STEPS = 300_000  # beyond EXACT_BEST, moves that the search for the best order looks at

Matrix = Sequence[Sequence[float]]  # [from][to], by place in the order
STRIPE = 256 * KIB  # over a network: all lanes share a step, since one connection does not fill the path
LOCAL_STRIPE = 1024 * MIB  # within one machine: one connection does, and every further busy one costs caches and calls
SHARED_STRIPE = 64 * KIB  # there, where it has cores for several threads of each daemon: 1 MiB is worth them, too


def pair(a: int, b: int) -> tuple[int, int]:
    """The pair in the order in which sets of pairs hold it."""
    return (a, b) if a < b else (b, a)


def ring_order(order: Sequence[int], bad: Collection[tuple[int, int]]) -> list[int] | None:
    """A ring in which no neighbours are a *bad* pair(), as near to *order* as possible; None if none was found.

    Depth first through the members in their present order, so the first hit changes the earliest ranks least, and the
    first member stays the first. Dead ends are remembered as (last member, members left), which makes the search exact
    and short (at most n^2 * 2^n steps) for small worlds; larger ones have a bound on steps, and few bad pairs are
    avoided well within it.
    """
    count = len(order)
    allowed = _allowed(order, bad)
    if count <= 3:  # everybody is everybody's neighbour
        return list(order) if all(mask.bit_count() == count - 1 for mask in allowed) else None
    path = [0]
    left = (1 << count) - 2
    untried = [left & allowed[0]]  # next places for each prefix of the path
    dead: set[tuple[int, int]] = set()
    for _ in range(_STEPS if count > EXACT else count * count << count):
        if untried[-1]:
            bit = untried[-1] & -untried[-1]
            untried[-1] ^= bit
            last = bit.bit_length() - 1
            if (last, left ^ bit) in dead:
                continue
            path.append(last)
            left ^= bit
            if not left and allowed[0] & bit:
                return [order[i] for i in path]
            untried.append(left & allowed[last])
        elif len(path) > 1:
            last = path.pop()
            untried.pop()
            dead.add((last, left))
            left |= 1 << last
        else:
            return None
    return None


class Ring(NamedTuple):
    """A ring and what it is worth."""

    order: tuple[int, ...]  # members in rank order; each sends to the next, the last to the first
    bottleneck: float  # bandwidth of its slowest edge, inf for one member alone
    latency: float  # sum over its edges


def rated(order: Sequence[int], path: Sequence[int], bandwidth: Matrix, latency: Matrix) -> Ring:
    """The ring that goes through the places of *path* in turn. Matrices are by place in *order*."""
    edges = list(zip(path, [*path[1:], path[0]], strict=True)) if len(path) > 1 else []
    slowest = min((bandwidth[a][b] for a, b in edges), default=inf)
    return Ring(tuple(order[i] for i in path), slowest, sum(latency[a][b] for a, b in edges))


def best_ring(
    order: Sequence[int], bandwidth: Matrix, latency: Matrix, bad: Collection[tuple[int, int]] = ()
) -> Ring | None:
    """The ring whose slowest edge is fastest, and among those the one of least latency in sum; None if none was found.

    Exact for up to EXACT_BEST members: the bottleneck by a search over the bandwidths there are, each tried with a
    dynamic program over the subsets of members (Bellman; Held and Karp, 1962), the latency by one more over the edges
    that are left. Beyond, a local search (ring_search) with a bound on its steps.

    Matrices have each member's path to each other one, by place in *order*; bandwidths are above 0. *bad* pair()s must
    not be neighbours, and the first member stays the first.
    """
    count = len(order)
    allowed = _allowed(order, bad)
    if count == 1:
        return rated(order, [0], bandwidth, latency)
    if count <= EXACT_BEST:
        path = _exact(count, bandwidth, latency, allowed)
    else:
        path = ring_search.search(count, bandwidth, latency, allowed, _SEARCH_STEPS)
    return None if path is None else rated(order, path, bandwidth, latency)


def better_ring(
    order: Sequence[int],
    bandwidth: Matrix,
    latency: Matrix,
    bad: Collection[tuple[int, int]] = (),
    *,
    material: float = MATERIAL,
) -> Ring | None:
    """best_ring(), but *order* itself unless its bottleneck or its latency can become *material* times better."""
    found = best_ring(order, bandwidth, latency, bad) if len(order) <= SEARCHED else None
    kept = ring_order(order, bad)
    if kept is None:
        return found
    place = {member: i for i, member in enumerate(order)}
    present = rated(order, [place[member] for member in kept], bandwidth, latency)
    if found is None or found.bottleneck < present.bottleneck:
        return present
    faster = found.bottleneck >= material * present.bottleneck
    nearer = found.latency * material <= present.latency and present.latency > found.latency
    return found if faster or nearer else present


def _allowed(order: Sequence[int], bad: Collection[tuple[int, int]]) -> list[int]:
    """For each place, the set (as bits) of places that may be next to it."""
    count = len(order)
    place = {member: i for i, member in enumerate(order)}
    allowed = [((1 << count) - 1) & ~(1 << i) for i in range(count)]
    for one, other in bad:
        if one in place and other in place:
            allowed[place[one]] &= ~(1 << place[other])
            allowed[place[other]] &= ~(1 << place[one])
    return allowed


def _exact(count: int, bandwidth: Matrix, latency: Matrix, allowed: Sequence[int]) -> list[int] | None:
    edges = [(a, b) for a in range(count) for b in range(count) if allowed[a] >> b & 1]
    speeds = sorted({bandwidth[a][b] for a, b in edges})
    low, high = 0, len(speeds)  # a ring is known for speeds[low - 1] if low > 0, none for speeds[high]
    while low < high:
        middle = (low + high) // 2
        if _possible(count, _into(count, [(a, b) for a, b in edges if bandwidth[a][b] >= speeds[middle]])):
            low = middle + 1
        else:
            high = middle
    if low == 0:
        return None
    fast = [(a, b) for a, b in edges if bandwidth[a][b] >= speeds[low - 1]]
    return _nearest(count, _into(count, fast), latency)


def _into(count: int, edges: Collection[tuple[int, int]]) -> list[int]:
    """For each place, the set of places with an edge to it."""
    into = [0] * count
    for a, b in edges:
        into[b] |= 1 << a
    return into


def _possible(count: int, into: Sequence[int]) -> bool:
    """Whether a ring through all places exists. ends[set]: where a path from 0 through all of the set can end."""
    ends = [0] * (1 << count)
    ends[1] = 1
    for places in range(1, 1 << count, 2):
        if reached := ends[places]:
            for new in range(1, count):
                if not places >> new & 1 and reached & into[new]:
                    ends[places | 1 << new] |= 1 << new
    return bool(ends[-1] & into[0])


def _nearest(count: int, into: Sequence[int], latency: Matrix) -> list[int]:
    """The ring of least latency, given that there is one. best[set]: last place -> (latency from 0, the one before)."""
    best: list[dict[int, tuple[float, int]]] = [{} for _ in range(1 << count)]
    best[1][0] = (0.0, 0)
    for places in range(1, 1 << count, 2):
        for last, (far, _) in best[places].items():
            for new in range(1, count):
                if not places >> new & 1 and into[new] >> last & 1:
                    known = best[places | 1 << new]
                    total = far + latency[last][new]
                    if new not in known or total < known[new][0]:
                        known[new] = (total, last)
    places = (1 << count) - 1
    last = min(
        (last for last in best[places] if into[0] >> last & 1),
        key=lambda last: best[places][last][0] + latency[last][0],
    )
    path = []
    while last:
        path.append(last)
        before = best[places][last][1]
        places, last = places & ~(1 << last), before
    return [0, *reversed(path)]


def machine(addresses: Sequence[str]) -> str:
    """The host that all of the addresses are at; "": they are at several."""
    first = _host(addresses[0])
    return first if len(addresses) == 1 or all(_host(address) == first for address in addresses) else ""


@lru_cache(maxsize=1 << 14)
def _host(address: str) -> str:
    return split_address(address)[0]
