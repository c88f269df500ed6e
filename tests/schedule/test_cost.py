"""The cost model: the pipelined prediction, and the choice from it."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wancoll.collective import Descriptor, Kind
from wancoll.schedule import cost as model
from wancoll.schedule.choose import make
from wancoll.schedule.cost import (
    AVAILABLE,
    KINDS,
    LinkCost,
    Sites,
    choices,
    chosen,
    handled,
    predicted,
)
from wancoll.schedule.steps import Direction, Schedule

BOOK = LinkCost(alpha=5e-6, beta=1 / 100e9)  # a near one
WAN = LinkCost(alpha=0.04, beta=1 / 62.5e6)  # 40 ms one way, 500 Mbit/s
MIB = 1 << 20

worlds = st.integers(1, 300)
sizes = st.integers(1, 1 << 34)
costs = st.builds(
    LinkCost,
    alpha=st.floats(1e-6, 0.3),
    beta=st.floats(1e-11, 1e-5),
    gamma=st.one_of(st.just(0.0), st.floats(1e-7, 1e-4)),
)
site_lists = st.lists(st.integers(1, 9), min_size=1, max_size=6).map(tuple)


def ways(kind: str, sites: Sites | None = None) -> list[str]:
    return [name for name in AVAILABLE[kind] if name != "hierarchical" or sites]


def test_gamma_is_paid_for_each_message_of_the_busiest_member() -> None:
    counts = {"naive": 14, "tree": 6, "ring": 28, "halving_doubling": 28, "direct": 28, "full_exchange": 14}
    counts["double_tree"] = 8
    costly = LinkCost(BOOK.alpha, BOOK.beta, gamma=1e-6)
    for name, count in counts.items():
        assert handled(name, 8) == count
        extra = predicted(name, "all_reduce", MIB, 8, costly) - predicted(name, "all_reduce", MIB, 8, BOOK)
        assert extra == pytest.approx(count * 1e-6)
    assert handled("halving_doubling", 11) == 44


# ---- the pipelined model -------------------------------------------------------------------------------


def stream(steps: int, each: float, alpha: float, beta: float) -> float:
    """When the last of *steps* chunks is here: each is sent on once it begins to arrive and the uplink is free."""
    begun, free = 0.0, 0.0
    for step in range(steps):
        begun = max(free, begun + alpha if step else 0.0)
        free = begun + each * beta
    return free + alpha


@given(st.integers(2, 64), sizes, costs)
def test_rings_and_direct_exchanges_are_streams(k: int, n: int, cost: LinkCost) -> None:
    cost = LinkCost(cost.alpha, cost.beta)
    shares: dict[tuple[str, str], tuple[int, float]] = {
        ("all_reduce", "ring"): (2 * (k - 1), n / k),
        ("all_reduce", "direct"): (2, n * (k - 1) / k),
        ("all_reduce", "full_exchange"): (1, n * (k - 1)),
        ("reduce_scatter", "ring"): (k - 1, n / k),
        ("all_gather", "ring"): (k - 1, n / k),
        ("reduce_scatter", "direct"): (1, n * (k - 1) / k),
        ("all_gather", "direct"): (1, n * (k - 1) / k),
        ("broadcast", "direct"): (1, n * (k - 1)),
        ("reduce", "direct"): (1, n * (k - 1)),
        ("gather", "direct"): (1, n * (k - 1) / k),
        ("scatter", "direct"): (1, n * (k - 1) / k),
        ("all_to_all", "direct"): (1, n * (k - 1) / k),
    }
    for (kind, name), (steps, each) in shares.items():
        expected = stream(steps, each, cost.alpha, cost.beta)
        assert predicted(name, kind, n, k, cost) == pytest.approx(expected, rel=1e-9), (kind, name)


LIMITS: list[tuple[str, str, Callable[[int], float], Callable[[int], float]]] = [
    # kind, algorithm, hops of an empty tensor, times the tensor that the busiest link carries
    ("all_reduce", "naive", lambda k: 2, lambda k: k - 1),
    ("all_reduce", "tree", lambda k: 2 * math.floor(math.log2(k)), lambda k: math.ceil(math.log2(k))),
    ("all_reduce", "ring", lambda k: 2 * (k - 1), lambda k: 2 * (k - 1) / k),
    ("all_reduce", "direct", lambda k: 2, lambda k: 2 * (k - 1) / k),
    ("all_reduce", "full_exchange", lambda k: 1, lambda k: k - 1),
    ("all_reduce", "double_tree", lambda k: 2 * math.ceil(math.log2(k)), lambda k: min(k, 4) / 2),
    ("broadcast", "double_tree", lambda k: math.ceil(math.log2(k)), lambda k: 1),
    ("reduce", "double_tree", lambda k: math.ceil(math.log2(k)), lambda k: 1),
    ("broadcast", "tree", lambda k: math.floor(math.log2(k)), lambda k: math.ceil(math.log2(k))),
    ("broadcast", "ring", lambda k: k - 1, lambda k: 1),
    ("broadcast", "direct", lambda k: 1, lambda k: k - 1),
    ("reduce", "tree", lambda k: math.floor(math.log2(k)), lambda k: math.ceil(math.log2(k))),
    ("reduce", "direct", lambda k: 1, lambda k: k - 1),
]


@pytest.mark.parametrize("world", [2, 3, 4, 5, 8, 9, 64, 100])
@pytest.mark.parametrize(("kind", "name", "hops", "share"), LIMITS)
def test_a_small_tensor_pays_hops_and_a_large_one_the_busiest_link(
    kind: str, name: str, hops: Callable[[int], float], share: Callable[[int], float], world: int
) -> None:
    assert predicted(name, kind, 0, world, WAN) == pytest.approx(hops(world) * WAN.alpha)
    huge = 2.0**50
    assert predicted(name, kind, huge, world, WAN) == pytest.approx(share(world) * huge * WAN.beta, rel=1e-3)


def test_halving_doubling_pipelined() -> None:
    # Powers of two: 2 log2 K hops, as few bytes as a ring. Else the fix-up: a hop and the whole tensor there and back.
    n, t = 1e13, 1e13 * WAN.beta
    for k, hops, share in ((2, 2, 1), (8, 6, 2 * 7 / 8), (64, 12, 2 * 63 / 64), (9, 8, 2 * 7 / 8 + 2)):
        assert predicted("halving_doubling", "all_reduce", 0, k, WAN) == pytest.approx(hops * WAN.alpha)
        assert predicted("halving_doubling", "all_reduce", n, k, WAN) == pytest.approx(share * t, rel=1e-3)
    # K = 4, and half the tensor takes twice alpha.
    n = round(4 * WAN.alpha / WAN.beta)
    assert predicted("halving_doubling", "all_reduce", n, 4, WAN) == pytest.approx(WAN.alpha * (2 + 1 + 1 + 2 + 1))
    # It takes alpha, and a quarter half of that: then the quarters wait.
    time = predicted("halving_doubling", "all_reduce", n // 2, 4, WAN)
    assert time == pytest.approx(WAN.alpha * (1 + 1 + 1 + 1 + 1))


def test_hierarchical_pipelined_spares_the_slow_links() -> None:
    sites = Sites((4, 4), LinkCost(1e-4, 1e-9))
    n = 64 * MIB
    between = 0.04 + 2 * (n / 4 / 2) * WAN.beta  # a stream of two halves of every member's quarter
    expected = 2 * (1e-4 + 3 / 4 * n * 1e-9) + between
    assert predicted("hierarchical", "all_reduce", n, 8, WAN, sites=sites) == pytest.approx(expected)
    assert choices(8, WAN, sites=sites)["all_reduce"][-1] == (0, "hierarchical")
    uneven = Sites((4, 2), LinkCost(1e-4, 1e-9))  # the site of two has fewer uplinks, the one of four more to share
    expected = 2 * (1e-4 + 3 / 4 * n * 1e-9) + 0.04 + 2 * (n / 2 / 2) * WAN.beta
    assert predicted("hierarchical", "all_reduce", n, 6, WAN, sites=uneven) == pytest.approx(expected)
    alone = Sites((8,), WAN)
    assert predicted("hierarchical", "all_reduce", n, 8, WAN, sites=alone) == pytest.approx(
        predicted("direct", "reduce_scatter", n, 8, WAN) + predicted("direct", "all_gather", n, 8, WAN)
    )


@given(st.sampled_from(KINDS), worlds, sizes, sizes, costs)
def test_time_grows_with_size_and_is_never_negative(kind: str, world: int, one: int, two: int, cost: LinkCost) -> None:
    small, large = sorted((one, two))
    for name in ways(kind):
        low, high = (predicted(name, kind, n, world, cost) for n in (small, large))
        assert 0 <= low <= high * (1 + 1e-12)


def schedules(kind: str, name: str, world: int) -> list[Schedule]:
    """Of all ranks, for a tensor, or the blocks of all, of 32 KiB a rank; the root is rank 1."""
    rooted = kind in ("broadcast", "reduce", "gather", "scatter")
    count = world * 8192 if kind in ("all_reduce", "broadcast", "reduce") else 8192
    descriptor = Descriptor(Kind[kind], count=count, root=1 if rooted else -1)
    return [make(descriptor, name, rank, world) for rank in range(world)]


def longest_way(ranks: list[Schedule]) -> int:
    """Most messages of which each can only begin when the one before it has begun to arrive."""
    sends = {
        (rank, step.peer, step.number): (rank, index)
        for rank, schedule in enumerate(ranks)
        for index, step in enumerate(schedule.steps)
        if step.direction is Direction.send
    }

    @functools.cache
    def hops(rank: int, index: int) -> int:
        step = ranks[rank].steps[index]
        before = max((hops(rank, earlier) for earlier in step.after), default=0)
        if step.direction is not Direction.recv:
            return before
        return max(before, 1 + hops(*sends[step.peer, rank, step.number]))

    return max(hops(rank, index) for rank, schedule in enumerate(ranks) for index in range(len(schedule.steps)))


@pytest.mark.parametrize("world", [2, 3, 4, 5, 7, 8, 11])
@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind, names in AVAILABLE.items() for name in names if name != "hierarchical"]
)
def test_the_model_counts_what_the_schedules_do(kind: str, name: str, world: int) -> None:
    ranks = schedules(kind, name, world)
    assert longest_way(ranks) * WAN.alpha == pytest.approx(predicted(name, kind, 0, world, WAN))
    wire = [[step for step in ranks[rank].steps if step.peer >= 0 and step.length] for rank in range(world)]
    assert max(map(len, wire)) == handled(name, world, kind)
    whole = world * 8192 * 4
    slope = predicted(name, kind, whole, world, LinkCost(0.0, 1.0))
    busiest = max(
        sum(step.length for step in steps if step.direction is direction)
        for steps in wire
        for direction in (Direction.send, Direction.recv)
    )
    if name == "halving_doubling" and world.bit_count() > 1:
        assert busiest < slope < 1.6 * busiest  # the fix-up comes by the downlink before, and goes by the uplink after
    else:
        assert slope == pytest.approx(busiest, rel=0.01)


@pytest.mark.parametrize("members", [(4, 4), (4, 2), (3, 3, 3), (1, 4), (2, 4, 6)])
def test_the_model_counts_what_the_hierarchical_schedules_do(members: tuple[int, ...]) -> None:
    labels = [f"site{number}" for number, size in enumerate(members) for _ in range(size)]
    world, whole = len(labels), 12 * 8192 * 4
    descriptor = Descriptor(Kind.all_reduce, count=12 * 8192)
    ranks = [make(descriptor, "hierarchical", rank, world, sites=labels) for rank in range(world)]
    free, hop, byte = LinkCost(0.0, 0.0), LinkCost(1.0, 0.0), LinkCost(0.0, 1.0)

    def time(nbytes: int, inside: LinkCost, between: LinkCost) -> float:
        return predicted("hierarchical", "all_reduce", nbytes, world, between, sites=Sites(members, inside))

    def busiest(inside: bool) -> int:
        return max(
            sum(
                step.length
                for step in schedule.steps
                if step.direction is Direction.send and (labels[step.peer] == labels[rank]) is inside
            )
            for rank, schedule in enumerate(ranks)
        )

    assert longest_way(ranks) == time(0, hop, hop) == 4
    assert (time(0, hop, free), time(0, free, hop)) == (2, 2)
    assert busiest(inside=False) == pytest.approx(time(whole, free, byte), rel=0.01)
    assert busiest(inside=True) == pytest.approx(time(whole, byte, free), rel=0.01)


# ---- the choice ----------------------------------------------------------------------------------------


@given(worlds, costs, st.lists(sizes, min_size=1, max_size=20))
def test_the_choice_is_the_best_but_for_two_percent(world: int, cost: LinkCost, tensors: list[int]) -> None:
    for kind, entries in choices(world, cost).items():
        around = [size + d for size, _ in entries[:-1] for d in (0, 1)]
        for n in (*tensors, *around):
            best = min(predicted(name, kind, n, world, cost) for name in ways(kind))
            assert predicted(chosen(entries, n), kind, n, world, cost) <= best * model.NEAR * 1.001, (kind, n)


@given(site_lists, costs, costs, sizes)
def test_the_choice_knows_sites(members: tuple[int, ...], inside: LinkCost, cost: LinkCost, n: int) -> None:
    world, sites = sum(members), Sites(members, inside)
    entries = choices(world, cost, sites=sites, kinds=["all_reduce"])["all_reduce"]
    best = min(predicted(name, "all_reduce", n, world, cost, sites=sites) for name in ways("all_reduce", sites))
    taken = predicted(chosen(entries, n), "all_reduce", n, world, cost, sites=sites)
    assert taken <= best * model.NEAR * 1.001


@given(worlds, costs)
def test_choices_are_ascending_whole_and_repeatable(world: int, cost: LinkCost) -> None:
    found = choices(world, cost)
    assert found == choices(world, LinkCost(cost.alpha, cost.beta, cost.gamma))
    assert tuple(found) == KINDS
    for kind, entries in found.items():
        bounds = [bound for bound, _ in entries]
        assert all(type(bound) is int for bound in bounds)
        assert bounds[-1] == 0
        assert bounds[:-1] == sorted(set(bounds[:-1]))
        assert 0 not in bounds[:-1]
        names = [name for _, name in entries]
        assert set(names) <= set(AVAILABLE[kind]) - {"hierarchical"}
        assert all(a != b for a, b in itertools.pairwise(names))


def test_choices_over_a_wan() -> None:
    found = choices(4, WAN)
    assert [name for _, name in found["all_reduce"]] == ["full_exchange", "direct", "ring"]
    first, second = (bound for bound, _ in found["all_reduce"][:-1])
    # With t = n beta: 2a + 3/4 t = 1.02 (a + 3t), and 6a + t/4 = 1.02 (a + 6/4 t).
    assert first == math.floor(0.98 / 2.31 * WAN.alpha / WAN.beta)
    assert second == math.floor(4.98 / 1.28 * WAN.alpha / WAN.beta)
    assert [name for _, name in found["broadcast"]] == ["direct", "double_tree", "ring"]
    assert found["gather"] == found["scatter"] == found["all_to_all"] == [(0, "direct")]


def test_a_bound_is_the_last_size_of_its_algorithm() -> None:
    entries = choices(8, WAN, kinds=["all_gather"])["all_gather"]
    bound = entries[0][0]
    ring, direct = (predicted(name, "all_gather", bound, 8, WAN) for name in ("ring", "direct"))
    assert ring > direct * model.NEAR
    ring, direct = (predicted(name, "all_gather", bound + 1, 8, WAN) for name in ("ring", "direct"))
    assert ring <= direct * model.NEAR
    assert (chosen(entries, bound), chosen(entries, bound + 1)) == ("direct", "ring")


def test_kinds_are_those_of_the_collectives() -> None:
    assert set(KINDS) <= set(Kind.__members__)


@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_every_available_algorithm_has_a_prediction(world: int) -> None:
    sites = Sites((1,) * world, BOOK)
    for kind, names in AVAILABLE.items():
        for name in names:
            time = predicted(name, kind, MIB, world, BOOK, sites=sites)
            assert time == 0 if world == 1 else time > 0


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: predicted("star", "all_reduce", 1, 2, BOOK), "no algorithm 'star' for 'all_reduce', expected one of"),
        (lambda: predicted("ring", "all_reduce", 1, 0, BOOK), "at least 1 member, got 0"),
        (lambda: predicted("hierarchical", "all_reduce", 1, 4, BOOK), "needs sites"),
        (
            lambda: predicted("hierarchical", "all_reduce", 1, 4, BOOK, sites=Sites((2, 1), BOOK)),
            "do not make a world of 4",
        ),
        (lambda: predicted("naive", "broadcast", 1, 4, BOOK), "no algorithm 'naive' for 'broadcast'"),
        (lambda: predicted("hierarchical", "broadcast", 1, 4, BOOK), "no algorithm 'hierarchical'"),
        (lambda: choices(4, BOOK, kinds=["barrier"]), "unknown kind 'barrier', expected one of all_reduce, "),
        (lambda: LinkCost(-1e-6, 0), "not negative"),
        (lambda: LinkCost(0, math.inf), "finite"),
        (lambda: Sites((2, 0), BOOK), "at least one member"),
        (lambda: Sites((), BOOK), "at least one member"),
        (lambda: chosen([(5, "ring")], 6), "no algorithm for 6 bytes"),
    ],
)
def test_what_makes_no_sense_is_refused(call: Callable[[], object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        call()
