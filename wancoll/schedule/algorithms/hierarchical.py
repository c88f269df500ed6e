"""Hierarchical all-reduce: reduce inside each site, then between the sites by all uplinks, spread inside.

The direct all-reduce at two levels, after Karonis et al., 2000, "Exploiting hierarchy in parallel computer networks to
optimize collective operation performance", with every member in place of one leader for each site: a member takes care
of its site's share of the tensor, so that all uplinks carry the same.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from wancoll.schedule.build import Builder, Shape, Value
from wancoll.schedule.steps import chunk_bounds

_EVEN = 4096  # pieces up to which all sites have equal shares of each member's part


class _Piece(NamedTuple):
    """Bytes [start, start + length), the rank that has them in hand at each site, the site that reduces them last."""

    start: int
    length: int
    hands: tuple[int, ...]
    last: int


def all_reduce(builder: Builder, shape: Shape) -> None:
    """Four hops: to a member of the own site, to one of another site, back to its peers of all sites, to all of a site.

    The order of the operands: every site reduces in rank order; these are then reduced in the order of the sites' first
    ranks. With a codec what a site has come to is encoded once more for another one, unless sums stay raw.
    """
    groups = members_by_site(shape.sites)
    site = next(number for number, group in enumerate(groups) if builder.rank in group)
    pieces = _pieces(shape, groups, builder.coding.elements if builder.coding else 1)
    values = _reduce_inside(builder, groups, site, pieces)
    values = _reduce_between(builder, site, len(groups), pieces, values)
    _spread(builder, groups[site], site, pieces, values)


def members_by_site(sites: Sequence[str]) -> list[list[int]]:
    """The ranks of every site, the site of rank 0 first."""
    groups: dict[object, list[int]] = {}
    for rank, site in enumerate(sites):
        groups.setdefault(site or rank, []).append(rank)
    return list(groups.values())


def _pieces(shape: Shape, groups: list[list[int]], multiple: int) -> list[_Piece]:
    """Cut the tensor wherever one of the sites does to give its members equal parts, and by who reduces last."""
    starts = _starts(shape.count, groups, multiple)
    turns = _turns(shape.count, starts, multiple)
    cuts = sorted({*(start for site in starts for start in site), *turns, shape.count})
    pieces = []
    for begin, end in pairwise(cuts):
        hands = tuple(group[bisect_right(site, begin) - 1] for group, site in zip(groups, starts, strict=True))
        last = (bisect_right(turns, begin) - 1) % len(groups)
        pieces.append(_Piece(begin * shape.itemsize, (end - begin) * shape.itemsize, hands, last))
    return pieces


def _starts(count: int, groups: list[list[int]], multiple: int) -> list[list[int]]:
    """Where each site's members' parts of the tensor begin; those of members without any part at its end."""
    return [[start for start, _ in chunk_bounds(count, len(group), multiple)] for group in groups]


def _turns(count: int, starts: list[list[int]], multiple: int) -> list[int]:
    """Where the sites' turns to reduce last begin, one site after the other, again and again.

    Every part between two cuts is shared equally among the sites. Where sites of many sizes make very many cuts, those
    of the largest site alone are shared, and each among as many sites as keeps the turns about as many as the ranks.
    """
    cuts, parts = sorted({*(start for site in starts for start in site), count}), len(starts)
    if len(cuts) * parts > _EVEN:
        cuts = [*max(starts, key=len), count]
        parts = min(parts, -(-sum(map(len, starts)) // len(cuts)))
    return [begin + start for begin, end in pairwise(cuts) for start, _ in chunk_bounds(end - begin, parts, multiple)]


def most_messages(count: int, sites: Sequence[str], multiple: int) -> int:
    """Wire steps of the rank that has the most, at most.

    A rank sends and receives each piece twice inside its site, those in its hand once more for all its peers, and as
    often between the sites: six times all of them in sum, about.
    """
    starts = _starts(count, members_by_site(sites), multiple)
    return 6 * len({*(start for site in starts for start in site), *_turns(count, starts, multiple)} - {count})


def _reduce_inside(builder: Builder, groups: list[list[int]], site: int, pieces: list[_Piece]) -> list[Value | None]:
    """The site's values of the pieces that this rank has in hand."""
    group, alone = groups[site], len(groups) == 1
    for peer in _others(group, builder.rank):
        for piece in pieces:
            if piece.hands[site] == peer:
                builder.send(peer, builder.mine(piece.start, piece.length))
    values: list[Value | None] = []
    for piece in pieces:
        value = None
        if piece.hands[site] == builder.rank:
            # The result goes into its buffer: what it is made from must be elsewhere.
            to = None if piece.last == site and not alone else builder.making(piece.start, piece.length)
            value = builder.reduce_from(group, builder.mine(piece.start, piece.length), to=to, last=alone)
        values.append(value)
    return values


def _reduce_between(
    builder: Builder, site: int, count: int, pieces: list[_Piece], values: list[Value | None]
) -> list[Value | None]:
    """The results of the pieces that this rank has in hand."""
    mine = [(number, piece, value) for number, (piece, value) in enumerate(zip(pieces, values, strict=True)) if value]
    results = list(values)
    for other in _others(range(count), site):
        for _, piece, value in mine:
            if piece.last == other:
                builder.send(piece.hands[other], value, raw=builder.raw_sums)
    for number, piece, value in mine:
        if piece.last == site and count > 1:
            to = builder.making(piece.start, piece.length)
            value = builder.reduce_from(piece.hands, value, to=to, last=True, raw=builder.raw_sums)
            for other in _others(range(count), site):
                value = builder.send(piece.hands[other], value)
            results[number] = value
    for number, piece, _ in mine:
        if piece.last != site:
            results[number] = builder.recv(piece.hands[piece.last], piece.start, piece.length, result=piece.start)
    return results


def _spread(builder: Builder, group: list[int], site: int, pieces: list[_Piece], results: list[Value | None]) -> None:
    for number, (piece, result) in enumerate(zip(pieces, results, strict=True)):
        if result is not None:
            for peer in _others(group, builder.rank):
                result = results[number] = builder.send(peer, result)
        else:
            builder.recv(piece.hands[site], piece.start, piece.length, result=piece.start)


def _others(ranks: Sequence[int], me: int) -> list[int]:
    """All but *me*, those behind it first, so that no one is everybody's first."""
    index = ranks.index(me)
    return [*ranks[index + 1 :], *ranks[:index]]
