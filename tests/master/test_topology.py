"""Ring orders from measured links: the bottleneck and the latency against brute force, and when an order stays."""

from __future__ import annotations

import time
from itertools import combinations, permutations, product
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wancoll_master.plan.ring_search import search
from wancoll_master.plan.topology import EXACT_BEST, best_ring, better_ring, pair, rated, ring_order

Matrix = list[list[float]]


def edges(path) -> list[tuple[int, int]]:
    path = list(path)
    return list(zip(path, path[1:] + path[:1], strict=True))


def rings(count: int, bad: set[tuple[int, int]] = frozenset()):
    for rest in permutations(range(1, count)):
        ring = [0, *rest]
        if count == 1 or all(pair(a, b) not in bad for a, b in edges(ring)):
            yield ring


def bottleneck(path, bandwidth: Matrix) -> float:
    return min(bandwidth[a][b] for a, b in edges(path))


def total(path, latency: Matrix) -> float:
    return sum(latency[a][b] for a, b in edges(path))


def matrices(count: int, number):
    return st.lists(st.lists(number, min_size=count, max_size=count), min_size=count, max_size=count)


# Few values make ties, many make each edge its own threshold.
SPEEDS = st.one_of(st.sampled_from([1.0, 2.0, 3.0]), st.floats(0.01, 1e9))
CHANCE = st.integers(0, 1 << 32).map(Random)
TIMES = st.one_of(st.sampled_from([0.0, 1.0, 2.0]), st.floats(0, 0.5))


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(4, 7))
def test_the_slowest_edge_is_the_fastest_possible_and_the_latency_the_least_among_those(data, count):
    bandwidth, latency = data.draw(matrices(count, SPEEDS)), data.draw(matrices(count, TIMES))
    bad = {
        pair(a, b) for a, b in data.draw(st.lists(st.tuples(*[st.integers(0, count - 1)] * 2), max_size=3)) if a != b
    }
    found = best_ring(range(count), bandwidth, latency, bad)
    possible = [(bottleneck(ring, bandwidth), -total(ring, latency)) for ring in rings(count, bad)]
    if found is None:
        assert possible == []
        return
    best = max(possible)
    assert sorted(found.order) == list(range(count))
    assert found.order[0] == 0
    assert all(pair(a, b) not in bad for a, b in edges(found.order))
    assert found.bottleneck == bottleneck(found.order, bandwidth) == best[0]
    assert found.latency == pytest.approx(total(found.order, latency))
    assert found.latency == pytest.approx(-best[1])


@settings(max_examples=6, deadline=None)
@given(st.data(), st.integers(8, 9))
def test_the_bottleneck_of_eight_and_nine_equals_brute_force(data, count):
    random = data.draw(CHANCE)
    bandwidth = [[random.uniform(1, 100) for _ in range(count)] for _ in range(count)]
    latency = [[random.uniform(0, 1) for _ in range(count)] for _ in range(count)]
    found = best_ring(range(count), bandwidth, latency)
    assert found is not None
    assert found.bottleneck == max(bottleneck(ring, bandwidth) for ring in rings(count))


def test_the_ring_sends_to_the_right_only():
    """Clockwise is fast, the other way is slow: a symmetric reading would not tell the two apart."""
    fast = [[100.0 if b == (a + 1) % 5 else 1.0 for b in range(5)] for a in range(5)]
    flat = [[1.0] * 5 for _ in range(5)]
    assert best_ring([7, 5, 9, 1, 4], fast, flat).order == (7, 5, 9, 1, 4)
    slow = [list(column) for column in zip(*fast, strict=True)]
    assert best_ring([7, 5, 9, 1, 4], slow, flat).order == (7, 4, 1, 9, 5)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_small_worlds(count):
    flat = [[2.0] * count for _ in range(count)]
    found = best_ring([9, 8, 7][:count], flat, flat)
    assert found.order == (9, 8, 7)[:count]
    assert (found.bottleneck, found.latency) == ((float("inf"), 0) if count == 1 else (2.0, 2.0 * count))
    if count > 1:
        assert best_ring([9, 8, 7][:count], flat, flat, {pair(9, 8)}) is None


# ---- many members -----------------------------------------------------------------------------------


@settings(max_examples=15, deadline=None)
@given(st.integers(EXACT_BEST + 1, 40), CHANCE)
def test_a_ring_of_fast_edges_hidden_among_slow_ones_is_found(count, random):
    order = list(range(1, count))
    random.shuffle(order)
    hidden = set(edges([0, *order]))
    bandwidth = [
        [random.uniform(50, 60) if (a, b) in hidden else random.uniform(1, 40) for b in range(count)]
        for a in range(count)
    ]
    latency = [[random.uniform(0, 1) for _ in range(count)] for _ in range(count)]
    found = best_ring(range(count), bandwidth, latency)
    assert found.order == (0, *order)


def test_the_search_mostly_finds_the_best_and_never_uses_a_forbidden_edge():
    """It promises no best ring: of worlds that are the same each time it finds that of nearly all, in these steps."""
    shares = []
    for seed in range(60):
        count, chance = 6 + seed % 3, Random(seed)
        bandwidth = [[chance.uniform(1, 100) for _ in range(count)] for _ in range(count)]
        latency = [[chance.uniform(0, 1) for _ in range(count)] for _ in range(count)]
        bad = {pair(0, 1), pair(2, 3)}
        everyone = (1 << count) - 1
        allowed = [everyone & ~sum(1 << b for b in range(count) if a == b or pair(a, b) in bad) for a in range(count)]
        found = search(count, bandwidth, latency, allowed, 20_000)
        assert found is not None
        assert sorted(found) == list(range(count))
        assert found[0] == 0
        assert all(pair(a, b) not in bad for a, b in edges(found))
        best = max(bottleneck(ring, bandwidth) for ring in rings(count, bad))
        shares.append(bottleneck(found, bandwidth) / best)
    assert min(shares) > 0.6
    assert sum(share == 1 for share in shares) >= 55


def test_two_sites_of_many_members_are_crossed_twice():
    count = 40
    near = [[0.001 if a % 2 == b % 2 else 0.05 for b in range(count)] for a in range(count)]
    flat = [[10.0] * count for _ in range(count)]
    found = best_ring(range(count), flat, near)
    assert sum(a % 2 != b % 2 for a, b in edges(found.order)) == 2


def test_the_search_ends_soon_and_says_the_same_each_time():
    count = 250
    bandwidth = [[float((a * 7919 + b * 104729) % 9973 + 1) for b in range(count)] for a in range(count)]
    began = time.perf_counter()
    first = best_ring(range(count), bandwidth, bandwidth)
    assert time.perf_counter() - began < 10  # a fraction of a second; a budget that does not bind takes minutes
    assert first == best_ring(range(count), bandwidth, bandwidth)
    assert first.bottleneck > rated(range(count), range(count), bandwidth, bandwidth).bottleneck


def test_no_ring_without_forbidden_edges():
    count = 20
    flat = [[1.0] * count for _ in range(count)]
    assert best_ring(range(count), flat, flat, {pair(3, b) for b in range(count) if b != 3}) is None


# ---- when an order stays ----------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 5, 14, 300])
def test_nothing_known_changes_nothing(count):
    flat = [[1.0] * count for _ in range(count)]
    order = list(range(count, 0, -1))
    assert better_ring(order, flat, flat).order == tuple(order)


def test_noise_moves_no_ranks_but_a_material_gain_does():
    """One slow edge in the present order, around which there is a way."""
    latency = [[0.01] * 5 for _ in range(5)]
    for slow, stays in ((95.0, True), (50.0, False)):
        bandwidth = [[100.0] * 5 for _ in range(5)]
        bandwidth[1][2] = slow
        assert (better_ring(range(5), bandwidth, latency).order == (0, 1, 2, 3, 4)) == stays
    assert better_ring(range(5), bandwidth, latency, material=3.0).order == (0, 1, 2, 3, 4)


def test_latency_alone_is_reason_enough():
    near = [[0.001 if a % 2 == b % 2 else 0.05 for b in range(6)] for a in range(6)]
    flat = [[10.0] * 6 for _ in range(6)]
    found = better_ring(range(6), flat, near)
    assert sum(a % 2 != b % 2 for a, b in edges(found.order)) == 2
    assert better_ring(found.order, flat, [[near[a][b] for b in found.order] for a in found.order]) == found


def test_bad_pairs_are_left_even_if_the_ring_gets_slower_by_it():
    bandwidth = [[100.0 if (b - a) % 5 in (1, 4) else 60.0 for b in range(5)] for a in range(5)]
    latency = [[0.01] * 5 for _ in range(5)]
    bad = {pair(1, 2)}
    found = better_ring(range(5), bandwidth, latency, bad)
    assert all(pair(a, b) not in bad for a, b in edges(found.order))
    assert found.bottleneck == 60.0
    assert better_ring(range(5), bandwidth, latency, {pair(a, b) for a, b in product(range(5), repeat=2)}) is None


# ---- pairs that cannot meet --------------------------------------------------------------------------


def fits(order: list[int], bad: set[tuple[int, int]]) -> bool:
    return all(pair(a, b) not in bad for a, b in edges(order) if a != b)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 6])
def test_ring_orders_are_found_exactly_where_they_exist(count):
    members = list(range(10, 10 + count))
    pairs = list(combinations(members, 2))
    for size in range(min(len(pairs), 5) + 1):
        for bad in map(set, combinations(pairs, size)):
            found = ring_order(members, bad)
            possible = any(fits([members[0], *rest], bad) for rest in permutations(members[1:]))
            assert (found is not None) == possible
            if found is not None:
                assert sorted(found) == members
                assert found[0] == members[0]
                assert fits(found, bad)


def test_an_order_without_bad_pairs_stays_as_it_is():
    assert ring_order([5, 3, 9, 1], set()) == [5, 3, 9, 1]
    assert ring_order([5, 3, 9, 1], {pair(5, 9)}) == [5, 3, 9, 1]


def test_large_worlds_with_some_bad_pairs():
    members = list(range(200))
    bad = {pair(i, i + 1) for i in range(0, 190, 7)} | {pair(0, 199)}
    found = ring_order(members, bad)
    assert found is not None
    assert fits(found, bad)


def test_ten_members_in_the_worst_case_end_soon():
    members = list(range(10))
    bad = {pair(a, b) for a in range(5) for b in range(a)} | {pair(5, 6)}
    assert ring_order(members, bad) is not None  # alternating between the halves
    bad |= {pair(0, b) for b in range(1, 9)}
    assert ring_order(members, bad) is None
