"""Who talks to whom, and how much, without a schedule: as the schedules say. And what a thousand ranks cost."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import pytest

from tests.schedule.schedules import PAIRS as OFFERED
from tests.schedule.schedules import call, everyone, sites_of
from wancoll.collective import Codec, Descriptor, Kind
from wancoll.schedule import pairs
from wancoll.schedule.build import Builder
from wancoll.schedule.choose import ALGORITHMS, choose, links, make
from wancoll.schedule.steps import MAX_STEPS, Action, Direction

THOUSAND = 1000
# Steps of the busiest rank of a thousand, for each rank; with a codec there are steps to encode and decode, too.
LINEAR, LINEAR_CODED = 5.01, 9.01


@pytest.mark.parametrize(("kind", "algorithm"), OFFERED)
def test_pairs_that_talk_are_those_whose_schedules_say_so(kind: Kind, algorithm: str) -> None:
    for n in (2, 3, 4, 5, 7, 8, 11):
        for count in (0, 1, 3, 1000):
            for codec in (Codec.none, Codec.int4) if kind is Kind.all_reduce else (Codec.none,):
                asked = call(kind, count, n, codec=codec)
                for shares in ((), (0, 3, *(0, 1) * n)[:n]) if algorithm == "direct" else ((),):
                    talks = [links(schedule) for schedule in everyone(asked, algorithm, n, shares=shares)]
                    counts = pairs.counts(asked, algorithm, n, shares)
                    for one, other in combinations(range(n), 2):
                        told = pairs.talk(asked, algorithm, one, other, counts)
                        assert told == pairs.talk(asked, algorithm, other, one, counts)
                        if algorithm == "halving_doubling" and count < 1000:
                            assert told or other not in talks[one]
                        elif told is not None:
                            assert told == (other in talks[one]), (n, count, shares, one, other)


@pytest.mark.parametrize(("kind", "algorithm"), OFFERED)
def test_the_busiest_ranks_messages_are_known(kind: Kind, algorithm: str) -> None:
    for n in (2, 3, 5, 8, 12):
        asked = call(kind, 100, n)
        schedules = everyone(asked, algorithm, n)
        most = max(sum(step.direction is not Direction.local for step in one.steps) for one in schedules)
        known = pairs.most_messages(asked, algorithm, n, sites_of(n))
        assert most <= known + 2  # a frame for each neighbour that has no other
        assert algorithm == "hierarchical" or known <= most


def test_a_schedule_that_would_be_too_long_is_not_begun() -> None:
    fits, beyond = (pairs.most_messages(call(Kind.all_to_all, 1, n), "ring", n, ()) for n in (256, 257))
    assert fits < MAX_STEPS < beyond
    planned = {"all_to_all": [(0, "ring")]}
    assert choose(call(Kind.all_to_all, 1, 128), 128, planned) == "ring"
    assert choose(call(Kind.all_to_all, 1, 129), 129, planned) == "direct"


@pytest.mark.parametrize(
    "sizes",
    [[125] * 8, range(1, 45), [10, 20, 30, 50, 70, 90, 110, 150, 200, 270], [*[1] * 100, 900], [400, 600]],
    ids=["even", "all-different", "ten-sizes", "one-large", "two"],
)
def test_a_hierarchy_of_sites_of_any_sizes_takes_few_steps(sizes: Sequence[int]) -> None:
    planned, asked = {"all_reduce": [(0, "hierarchical")]}, Descriptor(Kind.all_reduce, count=10**6)
    sites = tuple(str(site) for site, size in enumerate(sizes) for _ in range(size))
    assert choose(asked, len(sites), planned, sites=sites) == "hierarchical"
    for rank in (0, len(sites) // 2, len(sites) - 1):
        assert len(make(asked, "hierarchical", rank, len(sites), sites=sites).steps) <= 12 * len(sites)


def test_the_sites_of_a_hierarchy_reduce_equal_parts() -> None:
    """Also where there are too many for each to have a part of all that a member has in hand."""
    sizes = [*[1] * 100, 900]
    sites = tuple(str(site) for site, size in enumerate(sizes) for _ in range(size))
    asked = Descriptor(Kind.all_reduce, count=10**6)
    ends = [make(asked, "hierarchical", rank, len(sites), sites=sites) for rank in (0, 50, 99)]
    for one in ends:  # each of these is a site of its own
        mine = sum(step.length for step in one.steps if step.action is Action.final)
        assert mine == pytest.approx(asked.nbytes / len(sizes), rel=0.2)


@pytest.mark.parametrize(("kind", "algorithm"), OFFERED)
def test_a_thousand_ranks_take_steps_in_proportion(kind: Kind, algorithm: str) -> None:
    if (kind, algorithm) == (Kind.all_to_all, "ring"):
        return  # refused: see above
    ranks, sites = (0, 511, THOUSAND - 1), tuple(str(rank % 10) for rank in range(THOUSAND))
    for codec in (Codec.none, Codec.int8) if kind is Kind.all_reduce else (Codec.none,):
        asked = call(kind, 128 * THOUSAND, THOUSAND, codec=codec)
        most = max(len(make(asked, algorithm, rank, THOUSAND, sites=sites).steps) for rank in ranks)
        assert most <= (LINEAR_CODED if codec else LINEAR) * THOUSAND


def test_links_to_avoid_are_looked_up_without_building_schedules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of pairs may be out of reach when two sites are."""

    def begun(*_: object) -> None:
        raise AssertionError("a schedule was begun")

    monkeypatch.setattr(Builder, "__init__", begun)
    avoid = [(rank, rank + 500) for rank in range(500)] + [(rank, rank + 250) for rank in range(700)]
    for kind in ALGORITHMS:
        asked = call(kind, THOUSAND, THOUSAND)
        assert choose(asked, THOUSAND, {}, avoid=avoid) == "ring"
    for algorithm in ALGORITHMS[Kind.all_reduce]:
        if algorithm != "hierarchical":
            choose(Descriptor(Kind.all_reduce, count=THOUSAND, algorithm=algorithm), THOUSAND, {}, avoid=avoid)
