"""Which algorithm an operation takes, what memory it needs, and whom it talks to."""

from __future__ import annotations

import pytest

from tests.schedule.schedules import PAIRS, call, everyone, sites_of
from wancoll.collective import BLOCKS, DATALESS, Codec, Descriptor, DType, Kind
from wancoll.errors import ConfigError
from wancoll.schedule import cost
from wancoll.schedule.choose import ALGORITHMS, NoRoute, choose, has_sites, links, make, sizes
from wancoll.schedule.steps import Buffer

KIB = 1024
PLAN = {
    "all_reduce": [(4 * KIB, "full_exchange"), (KIB * KIB, "direct"), (0, "ring")],
    "all_gather": [(64 * KIB, "direct"), (0, "ring")],
    "all_to_all": [(0, "direct")],
}


def all_reduce(count, **fields):
    return Descriptor(Kind.all_reduce, count=count, **fields)


def test_the_cost_model_knows_the_same_algorithms():
    assert {kind: set(names) for kind, names in cost.AVAILABLE.items()} == {
        kind.name: set(names) for kind, names in ALGORITHMS.items() if kind not in DATALESS
    }


def test_who_asks_for_an_algorithm_gets_it():
    for kind, algorithm in PAIRS:
        descriptor = call(kind, 10, 6, algorithm=algorithm)
        assert choose(descriptor, 6, PLAN, sites=sites_of(6)) == algorithm
    with pytest.raises(ConfigError, match=r"gather has no such algorithm; expected auto, direct, ring; got tree"):
        choose(call(Kind.gather, 10, 6, algorithm="tree"), 6, PLAN)


def test_the_plan_decides_by_size():
    sizes_ = {1: "full_exchange", KIB: "full_exchange", KIB + 1: "direct", 256 * KIB: "direct", 256 * KIB + 1: "ring"}
    for count, algorithm in sizes_.items():
        assert choose(all_reduce(count), 8, PLAN) == algorithm


def test_the_plan_goes_by_the_larger_tensor():
    """16 KiB of float32 from each of 4 ranks are 64 KiB; from each of 5 they are more."""
    descriptor = Descriptor(Kind.all_gather, count=4 * KIB)
    assert choose(descriptor, 4, PLAN) == "direct"
    assert choose(descriptor, 5, PLAN) == "ring"
    assert choose(Descriptor(Kind.all_gather, counts=(1, 16 * KIB)), 2, PLAN) == "ring"


def test_without_a_plan_it_is_the_ring_or_else_direct():
    """Blocks that only one rank needs would be passed on in vain."""
    for kind in ALGORITHMS:
        in_one_hop = kind in (Kind.gather, Kind.scatter, Kind.all_to_all)
        assert choose(call(kind, 10, 4), 4, {}) == ("direct" if in_one_hop else "ring")


@pytest.mark.parametrize("codec", list(BLOCKS))
def test_with_a_codec_contributions_are_encoded_once(codec):
    assert choose(all_reduce(10**6, codec=codec), 8, PLAN) == "direct"
    assert choose(all_reduce(10**6, codec=codec), 8, {}) == "direct"
    assert choose(all_reduce(10, codec=codec), 8, PLAN) == "full_exchange"
    assert choose(all_reduce(10, codec=codec, algorithm="ring"), 8, PLAN) == "ring"
    assert choose(all_reduce(10, codec=codec), 8, {"all_reduce": [(0, "tree")]}) == "direct"


def test_the_plan_goes_by_what_is_on_the_wire():
    """2048 float32 are 8 KiB, but 4 KiB as bf16."""
    assert choose(all_reduce(2 * KIB), 8, PLAN) == "direct"
    assert choose(all_reduce(2 * KIB, codec=Codec.bf16), 8, PLAN) == "full_exchange"
    assert choose(all_reduce(2 * KIB + 1, codec=Codec.bf16), 8, PLAN) == "direct"


@pytest.mark.parametrize("sites", [(), ("a",) * 4, ("", "", "", ""), ("a", "b", "", "")])
def test_hierarchical_needs_sites(sites):
    assert not has_sites(sites)
    asked, planned = all_reduce(10, algorithm="hierarchical"), {"all_reduce": [(0, "hierarchical")]}
    assert choose(asked, 4, PLAN, sites=sites) == "full_exchange"
    assert choose(asked, 4, planned, sites=sites) == "ring"
    assert choose(all_reduce(10), 4, planned, sites=sites) == "ring"
    for enough in (("a", "b", "b", ""), ("a", "a", "", "")):
        assert has_sites(enough)
        assert choose(asked, 4, PLAN, sites=enough) == "hierarchical"


def test_a_pair_that_cannot_be_had_is_avoided():
    asked = all_reduce(1000, algorithm="direct")
    assert choose(asked, 5, PLAN, avoid=[(0, 2)]) == "ring"
    assert choose(asked, 5, PLAN, avoid=[(4, 1), (3, 0)]) == "ring"
    assert choose(all_reduce(1000, algorithm="tree"), 5, PLAN, avoid=[(1, 3)]) == "tree"  # they never talk
    assert choose(all_reduce(1, algorithm="direct"), 5, PLAN, avoid=[(2, 4)]) == "direct"  # nor these: one element
    with pytest.raises(NoRoute, match="direct needs a link between ranks 3 and 4") as caught:
        choose(asked, 5, PLAN, avoid=[(3, 4)])
    assert (caught.value.pair, caught.value.algorithm) == ((3, 4), "direct")
    with pytest.raises(NoRoute, match="ring needs a link between ranks 4 and 0"):
        choose(Descriptor(Kind.barrier), 5, PLAN, avoid=[(4, 0)])
    for kind in ALGORITHMS:
        assert choose(call(kind, 1000, 5), 5, {}, avoid=[(1, 3), (1, 4), (0, 3)]) == "ring"
        with pytest.raises(NoRoute, match="ranks 0 and 1"):
            choose(call(kind, 1000, 5), 5, {}, avoid=[(1, 3), (0, 1), (3, 0)])


def test_links_are_mutual_and_hold_the_neighbours():
    for kind, algorithm in PAIRS:
        for n in (1, 2, 5, 8):
            talks = [links(schedule) for schedule in everyone(call(kind, 100, n), algorithm, n)]
            for rank, others in enumerate(talks):
                assert all(rank in talks[other] for other in others)
                assert {(rank + 1) % n, (rank - 1) % n} - {rank} <= others


@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [("ring", {2, 4}), ("direct", {0, 1, 2, 4, 5, 6, 7}), ("tree", {2, 4}), ("halving_doubling", {1, 2, 4, 7})],
)
def test_links_of_rank_3_of_8(algorithm, expected):
    assert links(make(all_reduce(1000), algorithm, 3, 8)) == expected


def test_point_to_point_has_no_schedule():
    with pytest.raises(ValueError, match="send is no collective"):
        make(Descriptor(Kind.send, count=1), "direct", 0, 2)


# ---- sizes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "at_root", "elsewhere"),
    [
        (Kind.all_reduce, (80, 80), (80, 80)),
        (Kind.reduce_scatter, (400, 80), (400, 80)),
        (Kind.all_gather, (80, 400), (80, 400)),
        (Kind.broadcast, (80, 80), (0, 80)),
        (Kind.reduce, (80, 80), (80, 0)),
        (Kind.gather, (80, 400), (80, 0)),
        (Kind.scatter, (400, 80), (0, 80)),
        (Kind.all_to_all, (400, 400), (400, 400)),
        (Kind.barrier, (0, 0), (0, 0)),
        (Kind.update_membership, (0, 0), (0, 0)),
    ],
)
def test_sizes(kind, at_root, elsewhere):
    descriptor = call(kind, 10, 5, dtype=DType.float64)
    for rank in range(5):
        assert sizes(descriptor, rank, 5) == (at_root if rank == 3 else elsewhere)


def test_sizes_of_uneven_blocks_and_with_lost_ranks():
    assert sizes(Descriptor(Kind.all_gather, counts=(1, 5, 0)), 1, 3) == (20, 24)
    assert sizes(Descriptor(Kind.reduce_scatter, counts=(1, 5, 0)), 1, 3) == (24, 20)
    assert sizes(Descriptor(Kind.reduce_scatter, counts=(1, 5, 0)), 1, 3, (0, 7, 6)) == (48, 20)
    assert sizes(Descriptor(Kind.all_to_all, count=2), 0, 3, (0, 4, 8)) == (40, 24)
    assert sizes(Descriptor(Kind.scatter, count=2, root=0), 0, 2, (2, 8)) == (40, 8)
    assert sizes(Descriptor(Kind.scatter, count=2, root=0), 1, 2, (2, 8)) == (0, 8)


def test_schedules_stay_within_their_sizes():
    for kind, algorithm in PAIRS:
        for n in (1, 2, 5, 8):
            descriptor = call(kind, 33, n)
            for rank, schedule in enumerate(everyone(descriptor, algorithm, n)):
                ends = {Buffer.input: 0, Buffer.result: 0, Buffer.scratch: 0}
                for step in schedule.steps:
                    for place in (step.to, step.left, step.right):
                        if place is not None:
                            ends[place.buffer] = max(ends[place.buffer], place.offset + step.length)
                input_buffer, result_buffer = sizes(descriptor, rank, n)
                assert ends[Buffer.input] in (input_buffer, 0) or kind is not Kind.all_reduce
                assert ends[Buffer.input] <= input_buffer
                assert ends[Buffer.result] == result_buffer
                assert ends[Buffer.scratch] <= schedule.scratch
