"""Ring orders that keep pairs of members apart that cannot reach each other. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence

EXACT = 10  # members up to which an order is found if there is one
_STEPS = 20_000  # beyond, the search gives up after this many tries


def pair(a: int, b: int) -> tuple[int, int]:
    """The pair in the order in which sets of pairs hold it."""
    return (a, b) if a < b else (b, a)


def ring_order(order: Sequence[int], bad: Collection[tuple[int, int]]) -> list[int] | None:
    """A ring in which no neighbours are a bad pair, as near to *order* as possible; None if none was found.

    Depth first through the members in their present order, so the first hit changes the earliest ranks least.
    Dead ends are remembered as (last member, members left), which makes the search exact and short (at most
    n^2 * 2^n steps) for small worlds; larger ones have a bound on steps, and few bad pairs are avoided well within it.

    Args:
        order: members in rank order, the first one stays the first.
        bad: pairs as made by pair().
    """
    count = len(order)
    if count < 2:
        return list(order)
    allowed = [[pair(a, b) not in bad for b in order] for a in order]
    if count <= 3:  # everybody is everybody's neighbour
        fine = all(allowed[i][j] for i in range(count) for j in range(i))
        return list(order) if fine else None
    path = [0]
    candidates = [iter(range(1, count))]
    left = (1 << count) - 2
    dead: set[tuple[int, int]] = set()
    steps = 0
    while candidates:
        for i in candidates[-1]:
            steps += 1
            if left >> i & 1 and allowed[path[-1]][i] and (i, left & ~(1 << i)) not in dead:
                path.append(i)
                left &= ~(1 << i)
                if not left and allowed[i][0]:
                    return [order[k] for k in path]
                candidates.append(iter(range(1, count)))
                break
        else:
            last = path.pop()
            candidates.pop()
            dead.add((last, left))
            left |= 1 << last
        if count > EXACT and steps > _STEPS:
            return None
    return None
