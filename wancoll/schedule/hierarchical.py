"""Hierarchical all-reduce: reduce inside each site, exchange between the sites by all members' uplinks, spread inside.

The direct all-reduce at two levels, after Karonis et al., 2000, "Exploiting hierarchy in parallel computer networks to
optimize collective operation performance", with every member in place of one leader for each site: a member takes care
of its site's share of the tensor, so that all uplinks carry the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from wancoll.schedule.build import Builder, Coding, Value, back
from wancoll.schedule.plan import Schedule, chunk_bounds


class _Share(NamedTuple):
    """Bytes [start, start + length), the rank that has them in hand at each site, the site that reduces them last."""

    start: int
    length: int
    hands: tuple[int, ...]
    last: int


def all_reduce(
    rank: int,
    world_size: int,
    count: int,
    itemsize: int,
    coding: Coding | None = None,
    *,
    sites: Sequence[str],
) -> Schedule:
    """Four hops: to a member of the own site, to one of another site, back to its peers of all sites, to all of a site.

    The order of the operands: every site reduces in rank order; these are then reduced in the order of the sites' first
    ranks. What sites send each other is encoded, once by each sender; inside a site members send each other raw
    elements, and the encoded result.

    Args:
        rank: whose schedule.
        world_size: ranks.
        count: elements of the tensor.
        itemsize: bytes of an element.
        coding: of what crosses the wire between sites.
        sites: label of every rank's site; "" is a site of its own.
    """
    builder = Builder(rank, world_size, coding)
    if world_size == 1:
        builder.keep(builder.mine(0, count * itemsize), 0)
        return builder.finish()
    groups = members_by_site(sites)
    site = next(number for number, group in enumerate(groups) if rank in group)
    shares = _shares(count, itemsize, groups, coding.elements if coding else 1)
    values = _reduce_inside(builder, groups, site, shares)
    values = _exchange(builder, site, len(groups), shares, values)
    _spread(builder, groups[site], site, shares, values)
    return builder.finish()


def members_by_site(sites: Sequence[str]) -> list[list[int]]:
    """The ranks of every site, the site of rank 0 first."""
    groups: dict[object, list[int]] = {}
    for rank, site in enumerate(sites):
        groups.setdefault(site or rank, []).append(rank)
    return list(groups.values())


def _shares(count: int, itemsize: int, groups: list[list[int]], multiple: int) -> list[_Share]:
    """Cut the tensor wherever one of the sites does to give its members equal parts, and each piece among the sites."""
    bounds = [chunk_bounds(count, len(group), multiple) for group in groups]
    cuts = sorted({start for site in bounds for start, _ in site} | {count})
    shares = []
    for begin, end in pairwise(cuts):
        hands = tuple(
            next(rank for rank, (start, stop) in zip(group, site, strict=True) if start <= begin < stop)
            for group, site in zip(groups, bounds, strict=True)
        )
        for last, (start, stop) in enumerate(chunk_bounds(end - begin, len(groups), multiple)):
            if start < stop:
                shares.append(_Share((begin + start) * itemsize, (stop - start) * itemsize, hands, last))
    return shares


def _reduce_inside(builder: Builder, groups: list[list[int]], site: int, shares: list[_Share]) -> list[Value | None]:
    """The site's values of the shares that this rank has in hand."""
    group, alone = groups[site], len(groups) == 1
    for peer in _others(group, builder.rank):
        for share in shares:
            if share.hands[site] == peer:
                builder.send(peer, builder.mine(share.start, share.length), raw=True)
    values: list[Value | None] = []
    for share in shares:
        value = None
        if share.hands[site] == builder.rank:
            # The result will be in back: what it is made from must be elsewhere.
            home = None if share.last == site and not alone else back(share.start)
            value = builder.reduce_from(group, builder.mine(share.start, share.length), home=home, last=alone, raw=True)
        values.append(value)
    return values


def _exchange(
    builder: Builder, site: int, count: int, shares: list[_Share], values: list[Value | None]
) -> list[Value | None]:
    """The results of the shares that this rank has in hand."""
    mine = [(number, share, value) for number, (share, value) in enumerate(zip(shares, values, strict=True)) if value]
    results = list(values)
    for other in _others(range(count), site):
        for _, share, value in mine:
            if share.last == other:
                builder.send(share.hands[other], value)
    for number, share, value in mine:
        if share.last == site and count > 1:
            value = builder.reduce_from(share.hands, value, home=back(share.start), last=True)
            for other in _others(range(count), site):
                value = builder.send(share.hands[other], value)
            results[number] = value
    for number, share, _ in mine:
        if share.last != site:
            results[number] = builder.recv(share.hands[share.last], share.start, share.length, result=share.start)
    return results


def _spread(builder: Builder, group: list[int], site: int, shares: list[_Share], results: list[Value | None]) -> None:
    for number, (share, result) in enumerate(zip(shares, results, strict=True)):
        if result is not None:
            for peer in _others(group, builder.rank):
                result = results[number] = builder.send(peer, result)
        else:
            builder.recv(share.hands[site], share.start, share.length, result=share.start)


def _others(ranks: Sequence[int], me: int) -> list[int]:
    """All but *me*, those behind it first, so that no one is everybody's first."""
    place = ranks.index(me)
    return [*ranks[place + 1 :], *ranks[:place]]
