"""What the members' places mean for an epoch's plan: the ring's order, how finely lanes share the work. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from wancoll.limits import KIB, MIB
from wancoll.local import split_address

EXACT = 10  # members up to which an order is found if there is one
_STEPS = 50_000  # beyond, the search gives up after this many
STRIPE = 256 * KIB  # over a network: all lanes share a transfer, since one connection does not fill the path
LOCAL_STRIPE = 1024 * MIB  # within one machine: one connection does, and every further busy one costs caches and calls


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
    place = {member: i for i, member in enumerate(order)}
    allowed = [(1 << count) - 1] * count  # for each place, the set of places that may be next to it
    for one, other in bad:
        if one in place and other in place:
            allowed[place[one]] &= ~(1 << place[other])
            allowed[place[other]] &= ~(1 << place[one])
    if count <= 3:  # everybody is everybody's neighbour
        return list(order) if all(mask == (1 << count) - 1 for mask in allowed) else None
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


def one_machine(addresses: Iterable[str]) -> bool:
    """Whether members whose lanes are at *addresses* are all on one machine."""
    return len({split_address(address)[0] for address in addresses}) == 1
