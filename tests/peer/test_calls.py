"""What a call means in an epoch that its caller did not know yet: roots, counts and blocks by member, not by rank."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from wancoll.collective import Codec, Descriptor, DType, Kind, ReduceOp
from wancoll.errors import ProtocolError
from wancoll.limits import Limits
from wancoll.peer.core import calls
from wancoll.peer.core.calls import Call, World, noise, posted, resolve
from wancoll.schedule.choose import make
from wancoll.schedule.steps import Direction
from wancoll.wire import messages as m

FLOATS = 4  # bytes of a float32


def world(*mids: int, sites: tuple[str, ...] = ()) -> World:
    return World(mids, tuple(f"m{mid}" for mid in mids), sites or ("",) * len(mids))


def plan(choices: dict[str, list[tuple[int, str]]] | None = None, avoid: tuple[tuple[int, int], ...] = ()) -> m.Plan:
    return m.Plan(1, 1, True, choices or {}, list(avoid), 0, "")


KNEW = world(10, 11, 12, 13)
SPARSE = Codec(150 << 8 | 2)


@pytest.mark.parametrize("kind", [Kind.broadcast, Kind.reduce, Kind.gather, Kind.scatter])
def test_a_root_stays_the_member_that_it_was(kind: Kind) -> None:
    call = Descriptor(kind, count=5, root=2)
    same = resolve(call, KNEW, KNEW, 0, plan())
    assert (same.descriptor, same.refusal) == (call, "")
    reordered = resolve(call, KNEW, world(12, 10, 13), 0, plan())
    assert reordered.descriptor.root == 0
    assert reordered.fingerprint != same.fingerprint
    assert reordered.fingerprint == Descriptor(kind, count=5, root=0).fingerprint()


def test_a_lost_root_is_named() -> None:
    resolved = resolve(Descriptor(Kind.broadcast, count=5, root=2), KNEW, world(10, 11, 13), 0, plan())
    assert resolved.refusal == "the root of broadcast, m12, was lost"
    assert (resolved.input_bytes, resolved.result_bytes, resolved.needs) == (0, 0, frozenset())


def test_counts_follow_their_members() -> None:
    call = Descriptor(Kind.all_gather, counts=(1, 2, 3, 4))
    resolved = resolve(call, KNEW, world(13, 11), 1, plan())
    assert resolved.descriptor.counts == (4, 2)
    assert (resolved.input_bytes, resolved.result_bytes) == (2 * FLOATS, 6 * FLOATS)


@pytest.mark.parametrize("counts", [(1, 2, 3, 4), ()])
def test_lost_ranks_blocks_stay_in_front_and_are_left_out(counts: tuple[int, ...]) -> None:
    call = Descriptor(Kind.reduce_scatter, DType.int64, ReduceOp.sum, 0 if counts else 3, counts)
    resolved = resolve(call, KNEW, world(10, 12, 13), 1, plan())
    own, starts, end = (3, [0, 3, 6], 10) if counts else (3, [0, 6, 9], 12)
    assert resolved.descriptor.block_counts(3) == ((1, 3, 4) if counts else (3, 3, 3))
    assert (resolved.input_bytes, resolved.result_bytes) == (8 * end, 8 * own)
    assert resolved.schedule == make(resolved.descriptor, "ring", 1, 3, blocks=starts)
    assert resolved.schedule != make(resolved.descriptor, "ring", 1, 3)


def test_shares_of_the_plan_cut_a_direct_all_reduce() -> None:
    uneven = replace(plan({"all_reduce": [(0, "direct")]}), shares=[1, 0, 3, 0])
    call = Descriptor(Kind.all_reduce, count=4000)
    for rank in range(4):
        assert resolve(call, KNEW, KNEW, rank, uneven).schedule == make(call, "direct", rank, 4, shares=[1, 0, 3, 0])
    assert resolve(call, KNEW, KNEW, 1, uneven).needs == {10, 12}  # and its neighbours: these
    assert resolve(call, KNEW, KNEW, 0, uneven).schedule != make(call, "direct", 0, 4)
    apart = replace(uneven, avoid=[(11, 13)])  # who own nothing, and have nothing to say to each other
    assert resolve(call, KNEW, KNEW, 1, apart).algorithm == "direct"
    assert resolve(call, KNEW, KNEW, 1, replace(apart, shares=[])).algorithm == "ring"


@pytest.mark.parametrize("shares", [[1], [1, 1, 1, 1, 1], [0, 0, 0, 0]])
def test_an_epoch_whose_shares_do_not_fit_is_refused(shares: list[int]) -> None:
    members = [m.MemberInfo(mid, f"m{mid}", f"d{mid}", ["192.0.2.1:1"], "") for mid in KNEW.mids]
    epoch = m.Epoch("g", 10, 1, 1, members, replace(plan(), shares=[1, 0, 2, 0]), b"k" * 16, 1, 0, [], "")
    calls.check_epoch(epoch, 10)
    with pytest.raises(ProtocolError, match="an epoch that cannot be"):
        calls.check_epoch(replace(epoch, plan=replace(epoch.plan, shares=shares)), 10)


def test_a_lost_last_block_is_not_read_any_more() -> None:
    resolved = resolve(Descriptor(Kind.all_to_all, count=2), KNEW, world(10, 11, 12), 0, plan())
    assert (resolved.input_bytes, resolved.result_bytes) == (6 * FLOATS, 6 * FLOATS)


@pytest.mark.parametrize(
    "call",
    [
        Descriptor(Kind.all_gather, counts=(1, 2, 3, 4)),
        Descriptor(Kind.all_gather, count=1),
        Descriptor(Kind.gather, count=1, root=0),
        Descriptor(Kind.all_to_all, count=1),
    ],
)
def test_a_member_that_the_caller_did_not_know_ends_calls_with_blocks_for_each(call: Descriptor) -> None:
    assert "m14 joined" in resolve(call, KNEW, world(10, 11, 12, 13, 14), 0, plan()).refusal


def test_the_plan_chooses_and_links_to_avoid_are_avoided() -> None:
    call = Descriptor(Kind.all_reduce, count=8)
    choices = {"all_reduce": [(64, "direct"), (0, "ring")]}
    small = resolve(call, KNEW, KNEW, 0, plan(choices))
    assert (small.algorithm, small.needs) == ("direct", {11, 12, 13})
    assert resolve(Descriptor(Kind.all_reduce, count=17), KNEW, KNEW, 0, plan(choices)).algorithm == "ring"
    around = resolve(call, KNEW, KNEW, 0, plan(choices, avoid=((11, 13), (1, 2))))
    assert (around.algorithm, around.needs) == ("ring", {11, 13})


def test_around_a_link_to_avoid_a_limit_on_the_error_leaves_sums_raw() -> None:
    call = Descriptor(Kind.all_reduce, count=800, codec=Codec.int8, rounding="stochastic", seed=4)
    for bounded in (False, True):
        call = replace(call, bounded=bounded)
        straight, around = (resolve(call, KNEW, KNEW, 0, plan(avoid=avoid)) for avoid in ((), ((11, 13),)))
        assert (straight.algorithm, straight.descriptor) == ("direct", call)
        assert (around.algorithm, around.descriptor) == ("ring", call)
        sent = [step for step in around.schedule.steps if step.direction is Direction.send]
        assert [step.left is not None and step.left.encoded for step in sent] == [not bounded] * 3 + [True] * 3


def test_without_a_route_the_pair_is_named() -> None:
    """The master lays the ring around such pairs; one that is a ring edge all the same has no way around."""
    call = Descriptor(Kind.gather, count=8, root=0, algorithm="direct")
    resolved = resolve(call, KNEW, KNEW, 3, plan(avoid=((10, 11),)))
    assert resolved.refusal == "direct needs a link between m10 and m11, who cannot reach each other"
    assert (resolved.input_bytes, resolved.result_bytes) == (8 * FLOATS, 0)
    assert resolve(call, KNEW, KNEW, 3, plan(avoid=((10, 12),))).algorithm == "ring"
    assert resolve(call, KNEW, KNEW, 3, plan(avoid=((11, 13),))).algorithm == "direct"


def test_a_schedule_that_is_too_long_for_the_engine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    call = Descriptor(Kind.all_to_all, count=2, algorithm="ring")
    steps = len(resolve(call, KNEW, KNEW, 0, plan()).schedule.steps)
    monkeypatch.setattr(calls, "MAX_STEPS", steps)
    assert resolve(call, KNEW, KNEW, 0, plan()).refusal == ""
    monkeypatch.setattr(calls, "MAX_STEPS", steps - 1)
    assert f"takes {steps} steps at m10, more than the {steps - 1}" in resolve(call, KNEW, KNEW, 0, plan()).refusal


def test_a_schedule_that_would_be_too_long_is_refused_on_all_members_before_it_is_built(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    many = World(tuple(range(10, 267)), tuple(f"m{mid}" for mid in range(10, 267)), ("",) * 257)
    call = Descriptor(Kind.all_to_all, count=1, algorithm="ring")
    monkeypatch.setattr(calls.choose, "make", None)
    told = {resolve(call, many, many, rank, plan()).refusal for rank in (0, 1, 256)}
    assert len(told) == 1
    assert "takes 65792 messages of one of 257 members, more than the 65536 steps" in told.pop()


def call(posting: Descriptor, knew: World | None = KNEW, peer: int = -1) -> Call:
    return posted(m.Post(1, posting, 0, 64, 1, peer), knew, 10, "m10")


@pytest.mark.parametrize(
    ("posting", "knew", "says"),
    [
        (Descriptor(Kind.all_reduce, count=4), None, "got epoch 1"),
        (Descriptor(Kind.broadcast, count=4, root=4), KNEW, "a root from 0 to 3; got 4"),
        (Descriptor(Kind.broadcast, count=4), KNEW, "a root from 0 to 3; got -1"),
        (Descriptor(Kind.all_gather, counts=(1, 2, 3)), KNEW, "4 counts"),
        (Descriptor(Kind.all_to_all, counts=(1, 2, 3, 4)), KNEW, "all_gather or reduce_scatter; got 4 for all_to_all"),
        (Descriptor(Kind.all_reduce, count=4, algorithm="magic"), KNEW, "ring"),
        (Descriptor(Kind.all_reduce, count=4, on_failure="panic"), KNEW, "retry or raise"),
        (Descriptor(Kind.all_reduce, count=4, rounding="up"), KNEW, "nearest or stochastic"),
        # What a kind has not would tell equal calls apart.
        (Descriptor(Kind.barrier, DType.float64, count=2**63 - 1), KNEW, "no elements, which barrier has not"),
        (Descriptor(Kind.update_membership, count=1), KNEW, "no elements"),
        (Descriptor(Kind.all_gather, count=4, root=0), KNEW, "no root, which all_gather has not; got 0"),
        (Descriptor(Kind.all_gather, count=4, op=ReduceOp.max), KNEW, "no op, since all_gather reduces nothing"),
        (Descriptor(Kind.all_reduce, DType.int32, count=8, codec=Codec.int8), KNEW, "codec.* got int8 for int32"),
        (Descriptor(Kind.all_reduce, DType.bfloat16, count=8, codec=Codec.bf16), KNEW, "codec"),
        (Descriptor(Kind.all_gather, DType.int8, count=8, codec=Codec.int8), KNEW, "codec that all_gather has"),
        (Descriptor(Kind.gather, count=8, root=0, codec=Codec.int8), KNEW, "codec that gather has"),
        (Descriptor(Kind.all_gather, count=8, codec=SPARSE), KNEW, "codec that all_gather has, rounded to nearest"),
        (
            Descriptor(Kind.reduce_scatter, count=8, codec=Codec.int8, rounding="stochastic"),
            KNEW,
            "codec that reduce_scatter has, rounded to nearest",
        ),
        (Descriptor(Kind.send, count=8, codec=Codec.int8), KNEW, "rank of another member; got rank -1"),
    ],
)
def test_posts_that_cannot_be_are_refused(posting: Descriptor, knew: World | None, says: str) -> None:
    with pytest.raises(ProtocolError, match=says):
        call(posting, knew)


@pytest.mark.parametrize("coded", [(True, False), (False, True)])
def test_encoded_buffers_are_of_calls_with_a_codec(coded: tuple[bool, bool]) -> None:
    """Their memory is what the elements are in it; who came late finds its daemon's result as elements."""

    def posts(count: int, **fields: Any) -> Call:
        post = m.Post(1, Descriptor(Kind.all_reduce, count=count, **fields), 0, 64, 1)
        return posted(replace(post, input_coded=coded[0], result_coded=coded[1]), KNEW, 10, "m10")

    for count, nbytes in ((0, 0), (1, 132), (128, 132), (129, 264)):
        found = posts(count, codec=Codec.int8)
        assert found.memory == tuple(nbytes if each else 4 * count for each in coded)
        meaning = resolve(found.posted, KNEW, KNEW, 0, plan(), ends=found.ends)
        assert meaning.schedule.ends == (*coded, False)
    with pytest.raises(ProtocolError, match="all_reduce with a codec"):
        posts(4)
    gathered = m.Post(1, Descriptor(Kind.all_gather, count=4, codec=Codec.int8), 0, 640, 1)
    with pytest.raises(ProtocolError, match="all_reduce with a codec"):
        posted(replace(gathered, input_coded=coded[0], result_coded=coded[1]), KNEW, 10, "m10")
    if coded[1]:
        with pytest.raises(ProtocolError, match="without grace"):
            posts(4, codec=Codec.int8, grace=1.0)


def test_sums_are_kept_of_sparse_codecs_that_encode_the_result() -> None:
    once, twice = Codec.named("top1.5%"), Codec.named("top1.5%/top1.5%")
    assert once is not None
    assert twice is not None

    def posts(**fields: Any) -> Call:
        post = m.Post(1, Descriptor(Kind.all_reduce, count=9000, **fields), 0, 64, 1)
        return posted(replace(post, input_coded=True, result_kept=True), KNEW, 10, "m10")

    found = posts(codec=twice)
    assert found.memory == (3 * 81, 2 * 36000)
    assert resolve(found.posted, KNEW, KNEW, 0, plan(), ends=found.ends).schedule.kept == (0, 4096)
    for codec in (Codec.none, Codec.int8, once):
        with pytest.raises(ProtocolError, match=r"a codec|sums that are kept"):
            posts(codec=codec)
    late = m.Post(1, Descriptor(Kind.all_reduce, count=9000, codec=once), 0, 64, 1, filled=128, input_coded=True)
    with pytest.raises(ProtocolError, match="that is there"):
        posted(late, KNEW, 10, "m10")
    for wrong in ({"op": ReduceOp.max}, {"algorithm": "tree"}, {"rounding": "stochastic"}):
        with pytest.raises(ProtocolError, match="for sparse codecs"):
            posts(codec=twice, **wrong)


@pytest.mark.parametrize(
    "posting",
    [
        Descriptor(Kind.all_gather, count=3),
        Descriptor(Kind.all_gather, counts=(1, 2, 3, 4)),
        Descriptor(Kind.gather, count=3, root=0),
        Descriptor(Kind.reduce_scatter, count=3),
        Descriptor(Kind.scatter, count=3, root=0),
        Descriptor(Kind.all_to_all, count=3),
        Descriptor(Kind.all_reduce, count=3),
        Descriptor(Kind.broadcast, count=3, root=0),
    ],
)
def test_no_epoch_touches_memory_that_the_call_has_not(posting: Descriptor) -> None:
    """The daemon checks a call's regions once, when it is posted, by the members that the client knew."""
    known = call(posting)
    for mids in [(10,), (12, 10), (10, 11, 12), (13, 12, 11, 10), (10, 11, 12, 13, 14), (14, 10, 15)]:
        later = resolve(posting, KNEW, world(*mids), mids.index(10), plan())
        assert later.input_bytes <= known.input_bytes
        assert later.result_bytes <= known.result_bytes


def test_a_send_is_one_step_to_the_member_that_was_named() -> None:
    sends, receives = (call(Descriptor(kind, count=3), peer=2) for kind in (Kind.send, Kind.recv))
    assert (sends.input_bytes, sends.result_bytes, sends.p2p) == (12, 0, True)
    assert (receives.input_bytes, receives.result_bytes, receives.p2p) == (0, 12, True)
    later = world(12, 13, 10)
    one, two = (resolve(each.posted, KNEW, later, 2, plan(), peer=2) for each in (sends, receives))
    assert one.fingerprint == two.fingerprint != resolve(replace(sends.posted, count=4), KNEW, later, 2, plan(), peer=2)
    for resolved, direction in ((one, Direction.send), (two, Direction.recv)):
        (step,) = resolved.schedule.steps
        assert (resolved.needs, step.peer, step.direction, step.length) == ({12}, 0, direction, 12)
    lost = resolve(sends.posted, KNEW, world(10, 11, 13), 0, plan(), peer=2)
    assert lost.refusal == "m12, the other side, has left the group or was lost"
    apart = resolve(sends.posted, KNEW, KNEW, 0, plan(avoid=((10, 12),)), peer=2)
    assert apart.refusal == "m10 and m12 cannot reach each other"


def test_noise_is_of_the_seed_the_op_and_the_member_only() -> None:
    call = Descriptor(Kind.all_reduce, count=8, rounding="stochastic", seed=3)
    assert noise(call, 5, 10) == noise(call, 5, 10)
    keys = [noise(call, 5, 10), noise(call, 5, 11), noise(call, 6, 10), noise(replace(call, seed=4), 5, 10)]
    assert len({key for each in keys for key in each}) == 11  # members encode a result alike
    assert keys[0][0] == keys[1][0]
    assert noise(Descriptor(Kind.all_reduce, count=8, seed=3), 5, 10) == (0, 0, 0)


def test_an_algorithm_that_needs_too_much_memory_is_refused() -> None:
    limits = Limits(scratch_bytes=1000)
    small, big = (Descriptor(Kind.all_reduce, count=count, algorithm="full_exchange") for count in (100, 1000))
    assert not resolve(small, world(1, 2, 3), world(1, 2, 3), 0, plan(), limits).refusal
    assert "more than the 1000" in resolve(big, world(1, 2, 3), world(1, 2, 3), 0, plan(), limits).refusal
