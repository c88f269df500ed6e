"""Properties of schedules as data, for every kind and algorithm: who sends what to whom, bounded by what."""

from __future__ import annotations

import math
from functools import cache
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.later import at_night, later
from tests.schedule import codec as codecs
from tests.schedule.schedules import ALL_REDUCES, CODECS, PAIRS, call, coded, everyone, sends, sites_of, wire_bytes
from wancoll.collective import DATALESS, Codec, Descriptor, Kind
from wancoll.schedule.algorithms.hierarchical import members_by_site
from wancoll.schedule.build import Coding
from wancoll.schedule.choose import make
from wancoll.schedule.steps import Action, Buffer, Direction, chunk_bounds

LARGE = (33, 64)
WORLDS = (*range(1, 10), 13, 16, *LARGE)
COUNTS = (0, 1, 7, 1000)
PHASES = {Direction.send: (Action.copy,), Direction.recv: (Action.copy, Action.reduce, Action.final)}


def every_schedule(test):
    """For each kind and algorithm; large worlds, which are slow to look at, are for later."""
    test = pytest.mark.parametrize(("kind", "algorithm"), PAIRS, ids=[f"{k.name}-{a}" for k, a in PAIRS])(test)
    return pytest.mark.parametrize("large", [False, *later(True)], ids=["small", "large"])(test)


@cache
def worlds_of(kind, algorithm, large):
    """All worlds and counts, and codecs of all-reduces; large worlds have one of each."""
    return [
        (world_size, everyone(call(kind, count, world_size, codec=codec), algorithm, world_size))
        for world_size in WORLDS
        if (world_size in LARGE) == large
        for count in (COUNTS if world_size < 10 else (1000,))
        for codec in ((Codec.none, Codec.int8) if kind is Kind.all_reduce and world_size < 10 else (Codec.none,))
        if world_size < 40 or algorithm != "hierarchical"
    ]


@given(st.integers(0, 10**13), st.integers(1, 1024), st.sampled_from([1, 32, 128]))
def test_chunks_cover_everything_once_and_differ_by_at_most_one(count, world_size, multiple):
    bounds = chunk_bounds(count, world_size, multiple)
    assert len(bounds) == world_size
    assert bounds[0][0] == 0
    assert bounds[-1][1] == count
    assert all(before[1] == after[0] for before, after in pairwise(bounds))
    assert all(start % multiple == 0 or start == count for start, _ in bounds)
    sizes = [-(-(stop - start) // multiple) for start, stop in bounds]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1


@given(
    st.integers(0, 10**13),
    st.lists(st.integers(0, 1 << 16), min_size=1, max_size=1024).filter(any),
    st.sampled_from([1, 32, 128]),
)
def test_chunks_are_as_long_as_their_shares(count, shares, multiple):
    bounds, whole, blocks = chunk_bounds(count, len(shares), multiple, shares), sum(shares), -(-count // multiple)
    assert [bounds[0][0], bounds[-1][1]] == [0, count]
    assert all(before[1] == after[0] for before, after in pairwise(bounds))
    assert all(start % multiple == 0 or start == count for start, _ in bounds)
    for (start, stop), share in zip(bounds, shares, strict=True):
        assert abs(-(-(stop - start) // multiple) * whole - blocks * share) < whole  # by less than a block
        assert share or start == stop


def test_whoever_owns_nothing_sends_the_tensor_once():
    descriptor = Descriptor(Kind.all_reduce, count=9000)
    schedules = everyone(descriptor, "direct", 4, shares=[1, 1, 0, 1])
    assert [wire_bytes(schedule) for schedule in schedules] == [4 * 15000] * 2 + [4 * 9000, 4 * 15000]
    assert [schedule.scratch for schedule in schedules][2] == 0


@every_schedule
def test_my_sends_are_the_peers_receives_in_the_same_order(kind, algorithm, large):
    for world_size, schedules in worlds_of(kind, algorithm, large):
        lanes = {}
        for rank, schedule in enumerate(schedules):
            for step in schedule.steps:
                if step.direction is Direction.local:
                    continue
                assert 0 <= step.peer < world_size
                assert step.peer != rank
                mine = step.direction is Direction.send
                pair, place = ((rank, step.peer), step.left) if mine else ((step.peer, rank), step.to)
                lane = lanes.setdefault(pair, ([], []))[step.direction]
                assert step.number == len(lane)
                lane.append((step.start, step.length, place.encoded))
        for sent, received in lanes.values():
            assert sent == received


@every_schedule
def test_every_rank_hears_from_its_left_neighbour(kind, algorithm, large):
    """So members whose calls differ find out; empty frames are sent where there is nothing else to send only."""
    for world_size, schedules in worlds_of(kind, algorithm, large):
        for rank, schedule in enumerate(schedules):
            to_the_right = [step for step in sends(schedule) if step.peer == (rank + 1) % world_size]
            assert to_the_right or world_size == 1
            empty = [step for step in sends(schedule) if not step.length]
            barrier = kind is Kind.barrier and algorithm == "direct"  # whose frames to all are empty
            assert empty in ([], sends(schedule) if barrier else to_the_right)


@every_schedule
def test_steps_are_bound_by_earlier_ones_of_the_same_range(kind, algorithm, large):
    for _, schedules in worlds_of(kind, algorithm, large):
        for schedule in schedules:
            for index, step in enumerate(schedule.steps):
                assert len(step.after) <= 2
                assert step.after == tuple(sorted(set(step.after)))
                for bound in step.after:
                    before = schedule.steps[bound]
                    assert bound < index
                    assert before.direction is not Direction.send or step.direction is Direction.recv
                    assert (before.start, before.length) == (step.start, step.length)


@every_schedule
def test_actions_and_places_fit_directions(kind, algorithm, large):
    for _, schedules in worlds_of(kind, algorithm, large):
        for schedule in schedules:
            for step in schedule.steps:
                assert step.action in PHASES.get(step.direction, tuple(Action))
                assert (step.to is None) == (step.direction is Direction.send)
                reduces = step.action in (Action.reduce, Action.final)
                assert (step.right is not None) == (reduces and step.direction is Direction.local)
                assert step.left is not None or (step.direction is Direction.recv and not reduces)
                if step.direction is Direction.recv and reduces:
                    assert step.left.buffer is Buffer.input  # the engine reduces as bytes come in
                places = [place for place in (step.to, step.left, step.right) if place is not None]
                for place in places:
                    assert place.buffer is Buffer.scratch or place.encoded == schedule.ends[place.buffer]
                assert step.to is None or step.to.buffer is not Buffer.input
                if step.to is not None and step.action is not Action.copy:
                    assert step.to.encoded == (step.action is Action.encode)
                assert not step.result or step.to.buffer is Buffer.result
                assert not step.measured or step.action is Action.encode


@pytest.mark.parametrize("algorithm", ALL_REDUCES)
@pytest.mark.parametrize("codec", CODECS)
def test_ranges_begin_at_blocks_of_the_codec(algorithm, codec):
    block = codec.block[0] * 4
    for world_size in range(1, 10):
        for schedule in everyone(call(Kind.all_reduce, 12345, world_size, codec=codec), algorithm, world_size):
            assert all(step.start % block == 0 for step in schedule.steps)
            ends = {step.start + step.length for step in schedule.steps if step.length}
            assert all(end % block == 0 or end == 4 * 12345 for end in ends)


def test_the_codecs_agree_on_their_blocks():
    for codec in CODECS:
        assert codecs.block(codec) == codec.block
    assert set(CODECS) == set(Codec) - {Codec.none}
    assert Coding(32, 20, 4).coded_bytes(4 * 33) == 40


# ---- how much, and how often -----------------------------------------------------------------------------


def chunk_sizes(count, world_size, codec=Codec.none):
    """Bytes on the wire of every chunk of float32."""
    multiple = 1 if codec is Codec.none else codec.block[0]
    sizes = [4 * (stop - start) for start, stop in chunk_bounds(count, world_size, multiple)]
    return sizes if codec is Codec.none else [coded(size, codec) for size in sizes]


def children(place, world_size):
    return sum(1 for bit in range(10) if place % 2 ** (bit + 1) == 0 and place + 2**bit < world_size)


def degree(place, tree, n):
    """Parent and children of a rank of a double tree, *place* ranks from the root: what lies around it, in order."""
    if place == 0:
        return int(n > 1)
    place = (place + tree - 1) % (n - 1) + 1
    lowest = place & -place
    return 1 + (lowest > 1) + (lowest > 1 and place + 1 < n)


def expected_all_reduce(algorithm, rank, n, count, codec=Codec.none):
    """Bytes that *rank* sends, from the formulas in the literature."""
    sizes = chunk_sizes(count, n, codec)
    whole = 4 * count if codec is Codec.none else coded(4 * count, codec)
    match algorithm:
        case "ring":  # all chunks but one, twice
            return 2 * sum(sizes) - sizes[(rank + 1) % n] - sizes[(rank + 2) % n]
        case "direct":
            return sum(sizes) - sizes[rank] + (n - 1) * sizes[rank]
        case "tree":
            return whole * (children(rank, n) + (rank > 0))
        case "double_tree":  # half of it over every link that the rank has in each tree
            halves = [4 * (stop - start) for start, stop in chunk_bounds(count, 2, codec.block[0] if codec else 1)]
            return sum(
                (half if codec is Codec.none else coded(half, codec)) * degree(rank, tree, n)
                for tree, half in enumerate(halves)
            )
        case "naive":
            return whole * (n - 1 if rank == 0 else 1)
        case "full_exchange":
            return whole * (n - 1)


@given(
    st.sampled_from(["ring", "direct", "tree", "double_tree", "naive", "full_exchange"]),
    st.integers(2, 64),
    st.integers(0, 10**6),
    st.sampled_from(list(Codec)),
    st.integers(0, 63),
)
def test_bytes_that_an_all_reduce_sends(algorithm, n, count, codec, rank):
    rank %= n
    schedule = schedule_of(algorithm, n, count, codec, rank)
    assert wire_bytes(schedule, codec) == expected_all_reduce(algorithm, rank, n, count, codec)


def schedule_of(algorithm, n, count, codec, rank):
    return make(Descriptor(Kind.all_reduce, count=count, codec=codec), algorithm, rank, n, sites=sites_of(n))


@pytest.mark.parametrize("algorithm", ALL_REDUCES)
@pytest.mark.parametrize("n", [*WORLDS[1:-2], *later(*LARGE)])
def test_bytes_of_all_ranks(algorithm, n):
    """2(N-1) tensors in all, but where every rank gets every tensor."""
    for count in (0, 1, 999, 100_000) if n < 32 else (9999,):
        total = sum(wire_bytes(schedule) for schedule in everyone(call(Kind.all_reduce, count, n), algorithm, n))
        assert total == 4 * count * (n * (n - 1) if algorithm == "full_exchange" else 2 * (n - 1))


@pytest.mark.parametrize("n", WORLDS[1:])
def test_bytes_of_halving_and_doubling(n):
    """2(P-1)/P of the tensor, P the power of two below N; the pairs of the fix-up send another tensor each way."""
    core = 2 ** int(math.log2(n))
    count = 10 * core
    for rank, schedule in enumerate(everyone(call(Kind.all_reduce, count, n), "halving_doubling", n)):
        paired = rank < 2 * (n - core)
        played = 0 if paired and rank % 2 else 8 * count * (core - 1) // core
        assert wire_bytes(schedule) == played + (4 * count if paired else 0)


@pytest.mark.parametrize("sites", ["aabb", "aaabb", "aaaabbbbcccc", "abc", "aabcb", "aaabbbbbc"])
@pytest.mark.parametrize("codec", [Codec.none, Codec.int8])
def test_bytes_of_hierarchical(sites, codec):
    """Inside as a direct all-reduce of the site; outside every uplink carries 2(M-1)/M of its member's share."""
    groups = members_by_site(sites)
    m = len(groups)
    count = 128 * math.lcm(*map(len, groups)) * m
    schedules = everyone(call(Kind.all_reduce, count, len(sites), codec=codec), "hierarchical", len(sites), sites=sites)

    def crossing(length):
        return length if codec is Codec.none else coded(length, codec)

    for group in groups:
        for rank in group:
            k, steps = len(group), [step for step in sends(schedules[rank]) if step.length]
            inside = [step for step in steps if step.peer in group]
            outside = sum(crossing(step.length) for step in steps if step.peer not in group)
            part = 4 * count // k
            assert sum(crossing(step.length) for step in inside) == 2 * (k - 1) * crossing(part)
            assert all(step.left.encoded == (codec is not Codec.none) for step in steps)
            assert outside == 2 * crossing(part) * (m - 1) // m


@pytest.mark.parametrize("n", [1, 2, 3, 7, 8, 13, *later(64)])
def test_bytes_of_the_other_kinds(n):
    """In units of a block (or, of broadcast and reduce, a tensor) of 40 bytes."""
    sent = {
        (kind, algorithm): [wire_bytes(s) // 40 for s in everyone(call(kind, 10, n), algorithm, n)]
        for kind, algorithm in PAIRS
        if kind is not Kind.all_reduce
    }
    root = n * 2 // 3
    at_root, elsewhere = [n - 1 if rank == root else 0 for rank in range(n)], [int(rank != root) for rank in range(n)]
    places = [(rank - root) % n for rank in range(n)]
    for name in ("ring", "direct"):
        assert sent[Kind.reduce_scatter, name] == sent[Kind.all_gather, name] == [n - 1] * n
    assert sent[Kind.broadcast, "ring"] == [int((rank + 1) % n != root) for rank in range(n)]
    assert sent[Kind.broadcast, "tree"] == [children(place, n) for place in places]
    assert sent[Kind.broadcast, "direct"] == sent[Kind.scatter, "direct"] == at_root
    halves = [wire_bytes(schedule) // 20 for schedule in everyone(call(Kind.broadcast, 10, n), "double_tree", n)]
    assert halves == [degree(place, 0, n) + degree(place, 1, n) - 2 * (place > 0) for place in places]
    for name in ("ring", "tree", "double_tree", "direct"):
        assert sent[Kind.reduce, name] == elsewhere
    assert sent[Kind.gather, "direct"] == elsewhere
    assert sent[Kind.gather, "ring"] == [place or 0 for place in places]  # its own block and those before it
    assert sent[Kind.scatter, "ring"] == [n - 1 - place for place in places]
    assert sent[Kind.all_to_all, "ring"] == [n * (n - 1) // 2] * n
    assert sent[Kind.all_to_all, "direct"] == [n - 1] * n
    for nothing in ((Kind.barrier, "ring"), (Kind.barrier, "direct"), (Kind.update_membership, "ring")):
        assert sent[nothing] == [0] * n


def test_who_ends_a_direct_barrier_knows_that_all_have_called_it():
    """Whoever has not been begun keeps everyone else from its end; of a ring only its right neighbour."""
    asked = Descriptor(Kind.barrier)
    for n in (2, 3, 5, 8):
        for algorithm, waits in (("direct", n - 1), ("ring", 1)):
            heard = [{step.peer for step in one.steps if step.direction is Direction.recv}
                     for one in everyone(asked, algorithm, n)]  # fmt: skip
            assert [len(peers) for peers in heard] == [waits] * n
            assert all(rank not in peers for rank, peers in enumerate(heard))


def test_uneven_blocks_are_sent_once_per_step():
    counts = (5, 0, 12, 1)
    for kind in (Kind.all_gather, Kind.reduce_scatter):
        descriptor = Descriptor(kind, counts=counts)
        for rank in range(4):
            ring, direct = (wire_bytes(everyone(descriptor, name, 4)[rank]) for name in ("ring", "direct"))
            if kind is Kind.all_gather:
                assert (ring, direct) == (4 * (18 - counts[(rank + 1) % 4]), 12 * counts[rank])
            else:
                assert ring == direct == 4 * (18 - counts[rank])


def hops(schedules):
    """Transfers that follow each other on the longest way."""

    @cache
    def when(rank, index):
        step = schedules[rank].steps[index]
        latest = max((when(rank, bound) for bound in step.after), default=0)
        if step.direction is not Direction.recv or not step.length:
            return latest
        other = schedules[step.peer].steps
        (sent,) = (
            i for i, s in enumerate(other) if (s.direction, s.peer, s.number) == (Direction.send, rank, step.number)
        )
        return 1 + when(step.peer, sent)

    return max(when(rank, index) for rank, schedule in enumerate(schedules) for index in range(len(schedule.steps)))


@pytest.mark.parametrize("n", [2, 3, 4, 5, 8, 11, 16])
def test_hops(n):
    core, depth = int(math.log2(n)), max(place.bit_count() for place in range(n))
    expected = {
        (Kind.all_reduce, "ring"): 2 * (n - 1),
        (Kind.all_reduce, "direct"): 2,
        (Kind.all_reduce, "naive"): 2,
        (Kind.all_reduce, "full_exchange"): 1,
        (Kind.all_reduce, "tree"): 2 * depth,
        (Kind.all_reduce, "double_tree"): 2 * math.ceil(math.log2(n)),
        (Kind.broadcast, "double_tree"): math.ceil(math.log2(n)),
        (Kind.reduce, "double_tree"): math.ceil(math.log2(n)),
        (Kind.all_reduce, "halving_doubling"): 2 * core + (0 if 2**core == n else 2),
        (Kind.all_reduce, "hierarchical"): 2 if n < 4 else 4,
        (Kind.broadcast, "tree"): depth,
        (Kind.reduce, "tree"): depth,
    }
    for kind, algorithm in PAIRS:
        if kind not in DATALESS:
            wanted = expected.get((kind, algorithm), n - 1 if algorithm == "ring" else 1)
            assert hops(everyone(call(kind, 128, n), algorithm, n)) == wanted, (kind, algorithm)


@pytest.mark.parametrize("rank", range(8))
def test_halving_and_doubling_pass_on_first_what_came_first(rank):
    """Else a hop would wait for the whole of the one before it. The partners are r^1, r^2, r^4, and back again."""
    steps = make(Descriptor(Kind.all_reduce, count=1000), "halving_doubling", rank, 8).steps

    def newest(index):
        """The receive that the step waits for, as (index, (distance, number)); (-1, None) if it needs none."""
        step = steps[index]
        if step.direction is Direction.recv:
            return index, (step.peer ^ rank, step.number)
        return max((newest(bound) for bound in step.after), default=(-1, None))

    sources = {1: [], 2: [], 4: []}
    for index, step in enumerate(steps):
        if step.direction is Direction.send and step.length:
            sources[step.peer ^ rank].append(newest(index)[1])
    assert sources == {
        1: [None, None, None, None, (4, 0), (4, 1), (2, 2), (2, 3)],
        2: [(1, 0), (1, 1), (4, 0), (4, 1)],
        4: [(2, 0), (4, 0)],
    }


@pytest.mark.parametrize("n", [2, 3, 8, 13, *at_night(64)])
def test_scratch_memory(n):
    """In tensors, without codec. Ranges begin at multiples of 64 bytes; nothing is ever more than documented."""
    count = 64 * 64
    bounds = {
        "ring": 0,
        "direct": 1 - 2 / n,
        "tree": max(0, math.ceil(math.log2(n)) - 1),
        "double_tree": 0.5 if n > 3 else 0,
        "naive": n - 2,
        "full_exchange": n - 2,
        "halving_doubling": 1,
        "hierarchical": 2,
    }
    assert set(bounds) == set(ALL_REDUCES)
    for algorithm, tensors in bounds.items():
        scratch = max(s.scratch for s in everyone(call(Kind.all_reduce, count, n), algorithm, n))
        assert scratch <= 4 * count * tensors + 64 * n * n * (tensors > 0)
    for name in ("ring", "direct"):
        scratch = max(s.scratch for s in everyone(call(Kind.reduce_scatter, count, n), name, n))
        assert scratch <= 4 * count * (n - 2)  # of blocks: of the input it is (N-2)/N
    for name, tensors in (("ring", 1 if n > 2 else 0), ("tree", bounds["tree"]), ("direct", max(0, n - 2))):
        assert max(s.scratch for s in everyone(call(Kind.reduce, count, n), name, n)) == 4 * count * tensors
    for kind in (Kind.all_gather, Kind.broadcast, Kind.gather, Kind.scatter, Kind.all_to_all):
        for name in [name for k, name in PAIRS if k is kind]:
            schedules = everyone(call(kind, count, n), name, n)
            passed_on = [wire_bytes(schedule) for schedule in schedules]
            if name == "direct" or kind in (Kind.all_gather, Kind.broadcast):
                passed_on = [0] * n
            assert all(s.scratch <= most for s, most in zip(schedules, passed_on, strict=True))


def test_a_world_of_one_sends_nothing():
    for kind, algorithm in PAIRS:
        (schedule,) = everyone(call(kind, 100, 1), algorithm, 1)
        assert len(schedule.steps) == (0 if kind in DATALESS else 1)
        assert not sends(schedule)


@settings(max_examples=30)
@given(st.sampled_from(PAIRS), st.integers(1, 20), st.integers(0, 300))
def test_schedules_are_pure(pair, n, count):
    descriptor = call(pair[0], count, n)
    assert everyone(descriptor, pair[1], n) == everyone(descriptor, pair[1], n)
