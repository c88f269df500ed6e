"""Codec arguments, error feedback and all_reduce_many against a test double of the daemon."""

from __future__ import annotations

import gc
import math
import time
from functools import cache
from itertools import product
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import wancoll
from tests.client.fake_daemon import ARENA, FakeDaemon
from tests.client.tools import BIG, numpy_kind, refused
from tests.later import at_night, later
from tests.schedule import codec
from tests.schedule.reference import execute
from wancoll.client import codecs
from wancoll.client.codecs import FLOATS, NOMINAL_ERROR, cheapest, coding
from wancoll.client.communicator import Communicator
from wancoll.client.many import buckets
from wancoll.collective import Codec, Descriptor, DType, Kind, ReduceOp
from wancoll.errors import ConfigError, OutcomeUnknown, PeerDaemonLost, WorldTooSmall
from wancoll.peer.core.calls import World, resolve
from wancoll.schedule import choose
from wancoll.schedule.build import takes
from wancoll.schedule.numbers import narrowed, storage, widened
from wancoll.wire import messages as m

ALL_REDUCES = choose.ALGORITHMS[Kind.all_reduce]
INTS = [dtype for dtype in DType if dtype not in FLOATS]


def tensor(dtype: DType, count: int = 5) -> Any:
    return np.ones(count, numpy_kind(dtype))


def gaussian(count: int, seed: int = 1, dtype: Any = np.float32) -> Any:
    return np.random.default_rng(seed).standard_normal(count).astype(dtype)


def lossy(how: Codec, dtype: DType, x: Any, kept: DType | None = None) -> Any:
    """What *x* is after the wire, as elements of the dtype *kept*."""
    return codecs.through(how, dtype, x, np.empty(codecs.coded_bytes(how, x.size), np.uint8), kept or dtype)


# ---- codec, max_rel_error, rounding -------------------------------------------------------------------


@pytest.mark.parametrize("name", Codec.__members__)
def test_codecs_travel(comm: Communicator, daemon: FakeDaemon, name: str) -> None:
    receipt = comm.all_reduce(np.ones(5, np.float32), codec=name)
    post = daemon.seen[-1]
    assert (post.call.codec, post.call.rounding, post.call.seed) == (Codec[name], "nearest", 0)
    assert (receipt.codec, receipt.bytes_saved, receipt.codec_error) == (name, 7 * Codec[name], Codec[name] / 128)


def test_stochastic_rounding_travels(comm: Communicator, daemon: FakeDaemon) -> None:
    comm.all_reduce(np.ones(5), codec="int8", rounding="stochastic", seed=2**64 - 1)
    assert (daemon.seen[-1].call.rounding, daemon.seen[-1].call.seed) == ("stochastic", 2**64 - 1)
    comm.all_reduce(np.ones(5), codec="int8", seed=9)  # of no meaning without: members need not agree
    assert (daemon.seen[-1].call.rounding, daemon.seen[-1].call.seed) == ("nearest", 0)
    comm.all_reduce(np.ones(5), max_rel_error=1e-9, rounding="stochastic", seed=9)
    call = daemon.seen[-1].call
    assert (call.codec, call.rounding, call.seed) == (0, "nearest", 0)


@pytest.mark.parametrize(
    ("bound", "wide", "half"),
    [
        (0.2, "int4", "int4"),
        (0.15, "int4", "int4"),
        (0.1, "int8", "int8"),
        (1e-2, "int8", "int8"),
        (9e-3, "bf16", "none"),
        (3e-3, "bf16", "none"),
        (2e-3, "fp16", "none"),
        (5e-4, "fp16", "none"),
        (4e-4, "none", "none"),
        (0, "none", "none"),
        (1, "int4", "int4"),
    ],
)
def test_the_cheapest_format(comm: Communicator, daemon: FakeDaemon, bound: float, wide: str, half: str) -> None:
    for dtype in DType:
        expected = "none" if dtype in INTS else wide if dtype in (DType.float32, DType.float64) else half
        assert comm.all_reduce(tensor(dtype), max_rel_error=bound).codec == expected
        assert daemon.seen[-1].call.codec == Codec[expected]


def test_the_nominal_errors_hold() -> None:
    """Of one encoding they are upper bounds; the formats are in the order of their sizes."""
    x = gaussian(1 << 16)
    sizes = [codec.coded_bytes(each, 1 << 16) for each, _ in NOMINAL_ERROR]
    assert sizes == sorted(sizes)
    assert {each for each, _ in NOMINAL_ERROR} == set(Codec) - {Codec.none}
    for each, nominal in NOMINAL_ERROR:
        assert np.linalg.norm(lossy(each, DType.float32, x) - x) < nominal * np.linalg.norm(x)
    assert cheapest("all_reduce", DType.float32, math.nextafter(0.15, 0)) is Codec.int8


@pytest.mark.parametrize("world", [2, *later(3), *at_night(4, 5, 6, 7, 8)])
@pytest.mark.parametrize("dtype", [DType.float32, *later(DType.bfloat16, DType.float16, DType.float64)])
def test_no_error_is_above_the_callers_limit(dtype: DType, world: int) -> None:
    """Whatever the algorithm, the rounding and the limit are: the call is refused, or its error is within the limit."""
    count, sites = 1 << 12, tuple("ab"[rank % 3 == 2] for rank in range(world))
    input_buffers = [narrowed(dtype, gaussian(count, seed, dtype=_wide(dtype))) for seed in range(world)]
    exact = np.sum([widened(dtype, input_buffer) for input_buffer in input_buffers], axis=0, dtype=np.float64)
    noise, refusals = [(1, 50 + rank, 100 + rank) for rank in range(world)], set()
    slack = 1.01 if dtype is DType.bfloat16 else 1  # whose sums lose nearly as much as int8 does, codec or not
    members = World(tuple(range(world)), tuple(f"m{rank}" for rank in range(world)), sites)

    @cache
    def error(how: codecs.Coding, algorithm: str, *apart: tuple[int, int]) -> Any:
        posted = Descriptor(Kind.all_reduce, dtype, ReduceOp.sum, count, algorithm=algorithm, **how._asdict())
        plan = m.Plan(1, 1, True, {}, list(apart), 0, "")
        meanings = [resolve(posted, members, members, rank, plan) for rank in range(world)]
        runs, schedules = meanings[0].descriptor, [each.schedule for each in meanings]
        keys = noise if runs.rounding == "stochastic" else None
        result = widened(dtype, execute(schedules, input_buffers, dtype, ReduceOp.sum, codec=runs.codec, noise=keys)[0])
        return np.linalg.norm(result.astype(np.float64) - exact) / np.linalg.norm(exact)

    for limit, rounding, algorithm in product(
        (0.22, 0.15, 0.0145, 0.01, 0.0043, 0.003, 0.0005), ("nearest", "stochastic"), ("auto", *ALL_REDUCES)
    ):
        if algorithm == "hierarchical" and not choose.has_sites(sites):
            continue
        try:
            how = coding("all_reduce", dtype, "none", limit, rounding, 7, algorithm)
        except ConfigError:
            refusals.add(algorithm)
            continue
        if how.codec is not Codec.none:
            limit *= slack
            assert 0 < error(how, algorithm) <= limit, (algorithm, rounding, how)
            if world > 3:
                assert error(how, algorithm, (0, 2)) <= limit, (algorithm, rounding, how)
    assert refusals == {"ring", "halving_doubling", "tree", "double_tree"}


def _wide(dtype: DType) -> Any:
    return np.float64 if dtype is DType.float64 else np.float32


@pytest.mark.parametrize(("each", "dtype"), [(c, d) for c in Codec for d in FLOATS if takes(c, d)])
def test_what_the_client_thinks_that_the_wire_does(each: Codec, dtype: DType) -> None:
    for count in (1, 31, 128, 1000):
        x = gaussian(count, count)
        x[:: max(1, count // 3)] *= 1e4
        bits = (x.view(np.uint32) >> 16).astype(np.uint16) if dtype is DType.bfloat16 else x.astype(storage(dtype))
        expected = codec.decode(each, dtype, codec.encode(each, dtype, bits), count)
        assert lossy(each, dtype, bits).tobytes() == expected.tobytes()


@pytest.mark.parametrize(
    ("x", "options", "words"),
    [
        (tensor(DType.int32), {"codec": "int8"}, ("all_reduce(codec='int8')", "float32 or float64 or", "got int32")),
        (tensor(DType.float32), {"codec": "gzip"}, ("codec is not available", "none or bf16 or fp16", "'gzip'")),
        (tensor(DType.float32), {"codec": "int8", "max_rel_error": 0.1}, ("exclude each other", "one of them")),
        (tensor(DType.float32), {"max_rel_error": -1}, ("max_rel_error cannot be used", "such as 0.01", "got -1")),
        (
            tensor(DType.float32),
            {"max_rel_error": 0.01, "algorithm": "ring"},
            ("encodes sums again", "auto, direct, full_exchange, naive, hierarchical", "'ring'", "codec='int8'"),
        ),
        (tensor(DType.float32), {"codec": "top1.5%", "op": "max"}, ("a sparse codec cannot do this", "got op max")),
        (tensor(DType.float32), {"codec": "top1.5%", "algorithm": "tree"}, ("full_exchange or ring", "'tree'")),
        (tensor(DType.float32), {"codec": "top1%/top1%", "algorithm": "naive"}, ("direct or ring", "'naive'")),
        (tensor(DType.float32), {"codec": "top1.5%", "rounding": "stochastic"}, ("rounding='nearest'", "'stochastic'")),
        (tensor(DType.float32), {"codec": "top0%"}, ("codec is not available", "top1.5%/top1.5%", "'top0%'")),
        (tensor(DType.float32), {"codec": "top\u0663%"}, ("codec is not available", "'top\u0663%'")),  # no 3 of ours
        (tensor(DType.float32), {"codec": "int8", "rounding": "up"}, ("rounding is not available", "nearest or stoch")),
        (tensor(DType.float32), {"rounding": "stochastic"}, ("without a codec", "codec= or max_rel_error=")),
        (tensor(DType.float32), {"codec": "int8", "rounding": "stochastic", "seed": -1}, ("seed", "64 bits", "got -1")),
        (tensor(DType.float32), {"name": "a"}, ("a name is for error feedback", "feedback= with it", "got 'a'")),
        (tensor(DType.float32), {"feedback": 1, "name": "a"}, ("no error feedback", "a wancoll.ErrorFeedback")),
        (tensor(DType.float32), {"feedback": wancoll.ErrorFeedback()}, ("needs the tensor's name", "got ''")),
        (tensor(DType.int8), {"feedback": wancoll.ErrorFeedback(), "name": "a"}, ("only floating", "got int8")),
        (
            tensor(DType.float32),
            {"feedback": wancoll.ErrorFeedback(), "name": "a", "codec": "int8", "op": "max"},
            ("only sums can make up", "sum or avg", "got max"),
        ),
        (
            tensor(DType.float32),
            {"feedback": wancoll.ErrorFeedback(), "name": "a", "codec": "int8", "rounding": "stochastic"},
            ("stochastic rounding loses is not known", "rounding='nearest'", "mean zero"),
        ),
    ],
)  # fmt: skip
def test_refusals(
    comm: Communicator, daemon: FakeDaemon, x: Any, options: dict[str, Any], words: tuple[str, ...]
) -> None:
    with refused(*words):
        comm.all_reduce(x, **options)
    assert not daemon.seen


# ---- error feedback -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("inside", [True, False])
def test_what_was_lost_is_sent_with_the_next_call(
    comm: Communicator, daemon: FakeDaemon, dtype: Any, in_place: bool, inside: bool
) -> None:
    daemon.world = ("me",)  # the result is what was sent; the algorithm is called a ring, so all of it was encoded
    count = 1000
    feedback = wancoll.ErrorFeedback()
    total, through = np.zeros(count), np.zeros(count)
    kind = DType[np.dtype(dtype).name]
    kept = np.float64 if dtype is np.float64 else np.float32
    for step in range(20):
        x = comm.empty(count, dtype) if inside else np.empty(count, dtype)
        x[:] = gaussian(count, step, dtype)
        given = x.copy()
        out = x if in_place else np.zeros(count, dtype)
        before = feedback.residual("w") if step else np.zeros(count, kept)
        comm.all_reduce(x, None if in_place else out, codec="int4", feedback=feedback, name="w")
        decoded = (out.astype(kept) / 2).astype(dtype)  # two members
        assert in_place or x.tobytes() == given.tobytes()
        sent = given.astype(kept) + before
        wide = DType[np.dtype(kept).name]
        assert decoded.tobytes() == lossy(Codec.int4, wide, sent, kind).tobytes()
        after = feedback.residual("w")
        assert after.dtype == kept
        assert (after == sent - decoded.astype(kept)).all()
        total += given
        through += decoded.astype(np.float64)
    # All that is missing is the last residual.
    assert np.allclose(through + after, total, atol=1e-4)
    assert np.linalg.norm(after) > 0
    assert feedback.names == ("w",)
    assert feedback.nbytes == count * np.dtype(kept).itemsize
    assert repr(feedback) == f"<ErrorFeedback of 1 tensors, {feedback.nbytes} bytes>"


def test_a_residual_changes_only_on_commit(held: Communicator, manual: FakeDaemon) -> None:
    feedback = wancoll.ErrorFeedback()
    x = gaussian(300)
    work = held.all_reduce(x, codec="int8", feedback=feedback, name="w", async_op=True)
    manual.wait_for_posts(1)
    assert not len(feedback)
    with pytest.raises(ConfigError, match="in use by a call that is not finished"):
        held.all_reduce(gaussian(300), codec="int8", feedback=feedback, name="w")
    other = held.all_reduce(gaussian(300), codec="int8", feedback=feedback, name="v", async_op=True)
    manual.wait_for_posts(2)
    manual.answer(manual.posts[0])
    work.wait(10)
    first = feedback.residual("w")
    assert first.any()
    manual.fail(manual.posts[0])
    with pytest.raises(WorldTooSmall):
        other.wait(10)
    assert feedback.names == ("w",)
    again = held.all_reduce(gaussian(300, 2), codec="int8", feedback=feedback, name="w", async_op=True)
    manual.fail(manual.next_post())
    with pytest.raises(WorldTooSmall):
        again.wait(10)
    assert (feedback.residual("w") == first).all()
    assert manual.seen[-1].call.codec == Codec.int8


def test_the_residual_is_the_same_whatever_runs(held: Communicator, manual: FakeDaemon) -> None:
    feedback, x = wancoll.ErrorFeedback(), gaussian(1000)
    int8, limited = {"codec": "int8"}, {"max_rel_error": 0.01}
    for how, algorithm, world in (
        (int8, "ring", ("me", "b")),
        (limited, "ring", ("me", "b")),
        (int8, "direct", ("b", "c", "me")),
        (int8, "naive", ("me", "b")),
        (int8, "direct", ("me",)),
    ):
        feedback.reset()
        work = held.all_reduce(x.copy(), feedback=feedback, name="w", async_op=True, **how)
        post = manual.next_post()
        manual.drop(post)
        manual.send(m.Result(post.id, 1, 1, list(world), 0, 1, algorithm, 0, 0.0, 0, 0.0))
        assert work.wait(10).codec == "int8"
        expected = x - lossy(Codec.int8, DType.float32, x)
        assert (feedback.residual("w") == expected).all(), (algorithm, world)


def test_a_residual_decays(held: Communicator, manual: FakeDaemon) -> None:
    feedback, x = wancoll.ErrorFeedback(decay=0.5), gaussian(5000)
    codec = Codec.named("top1.5%")
    assert codec is not None
    residual = np.zeros_like(x)
    for _ in range(3):
        work = held.all_reduce(x.copy(), feedback=feedback, name="w", codec="top1.5%", async_op=True)
        post = manual.next_post()
        manual.drop(post)
        manual.send(m.Result(post.id, 1, 1, ["me", "b"], 0, 1, "full_exchange", 0, 0.0, 0, 0.0))
        wanted = x + np.float32(0.5) * residual
        residual = wanted - lossy(codec, DType.float32, wanted)
        assert work.wait(10).codec_error == pytest.approx(np.linalg.norm(residual) / np.linalg.norm(wanted), rel=1e-5)
        assert (feedback.residual("w") == residual).all()
    for decay in (-0.1, 1.1, "much", True):
        with refused("ErrorFeedback(decay=...)", "from 0 to 1"):
            wancoll.ErrorFeedback(decay=decay)  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_the_error_of_tiny_and_of_huge_values_is_measured(comm: Communicator, size: float) -> None:
    x = gaussian(5000) * np.float32(size)
    receipt = comm.all_reduce(x.copy(), codec="top1.5%", feedback=wancoll.ErrorFeedback(), name="w")
    codec = Codec.named("top1.5%")
    assert codec is not None
    wide = x.astype(np.float64)
    expected = np.linalg.norm(wide - lossy(codec, DType.float32, x)) / np.linalg.norm(wide)
    assert receipt.codec_error == pytest.approx(expected, rel=1e-6)


def test_the_rounding_of_half_types_is_not_lost(held: Communicator, manual: FakeDaemon) -> None:
    """1 + 2^-12 is no float16: what the residual could not add stays in it, where nothing is encoded."""
    feedback = wancoll.ErrorFeedback()
    feedback.load_state_dict({"w": np.full(64, 2.0**-12, np.float32)})
    work = held.all_reduce(np.ones(64, np.float16), feedback=feedback, name="w", async_op=True)
    post = manual.next_post()
    manual.drop(post)
    manual.send(m.Result(post.id, 1, 1, ["me"], 0, 1, "direct", 0, 0.0, 0, 0.0))
    work.wait(10)
    assert (feedback.residual("w") == 2.0**-12).all()


def test_infinities_leave_no_residual(comm: Communicator) -> None:
    feedback = wancoll.ErrorFeedback()
    x = gaussian(256)
    x[[3, 200]] = np.inf, np.nan
    comm.all_reduce(x, codec="int8", feedback=feedback, name="w")
    residual = feedback.residual("w")
    assert np.isfinite(residual).all()
    assert residual[[3, 200]].tolist() == [0, 0]
    assert residual.any()


def test_without_a_codec_the_residual_is_paid_back(comm: Communicator, daemon: FakeDaemon) -> None:
    feedback, x = wancoll.ErrorFeedback(), gaussian(100)
    comm.all_reduce(x.copy(), feedback=feedback, name="w")
    assert not len(feedback)  # nothing was lost
    comm.all_reduce(x.copy(), codec="int4", feedback=feedback, name="w")
    residual = feedback.residual("w")
    assert (comm.all_reduce(x.copy(), feedback=feedback, name="w").out == 2 * (x + residual)).all()
    assert not feedback.residual("w").any()
    comm.all_reduce(np.zeros(0, np.float32), codec="int4", feedback=feedback, name="nothing")
    assert feedback.names == ("w",)


def test_state(comm: Communicator) -> None:
    feedback = wancoll.ErrorFeedback()
    for name in ("a", "b"):
        comm.all_reduce(gaussian(100), codec="int4", feedback=feedback, name=name)
    state = feedback.state_dict()
    assert sorted(state) == ["a", "b"]
    state["a"][:] = 5
    assert not (feedback.residual("a") == 5).any()  # a copy
    other = wancoll.ErrorFeedback()
    other.load_state_dict(state)
    state["a"][:] = 6
    assert (other.residual("a") == 5).all()
    assert (other.residual("b") == feedback.residual("b")).all()
    other.load_state_dict({"b": state["b"]})
    assert other.names == ("b",)
    for bad in ({1: state["b"]}, {"a": np.zeros(3, np.int32)}, {"a": np.zeros((3, 1), np.float32)}, {"a": "x"}):
        with pytest.raises(ConfigError, match="a residual cannot be loaded"):
            other.load_state_dict(bad)  # type: ignore[arg-type]
        assert other.names == ("b",)
    feedback.reset(["a", "unknown"])
    assert feedback.names == ("b",)
    feedback.reset()
    assert (len(feedback), feedback.nbytes) == (0, 0)
    with pytest.raises(KeyError):
        feedback.residual("b")


def test_a_name_is_of_one_tensor(comm: Communicator, daemon: FakeDaemon) -> None:
    feedback = wancoll.ErrorFeedback()
    comm.all_reduce(gaussian(100), codec="int4", feedback=feedback, name="w")
    for x in (gaussian(99), gaussian(100, dtype=np.float64)):
        with pytest.raises(ConfigError) as caught:
            comm.all_reduce(x, codec="int4", feedback=feedback, name="w")
        text = str(caught.value)
        assert "all_reduce(name='w'): the residual of that name belongs to another tensor" in text
        assert "expected 100 elements, kept as float32" in text
        assert f"got {x.size} of {x.dtype}" in text
        assert "reset(['w'])" in text
    comm.all_reduce(gaussian(100).reshape(10, 10), codec="int4", feedback=feedback, name="w")
    assert len(daemon.seen) == 2


# ---- all_reduce_many ------------------------------------------------------------------------------------

F, I = DType.float32, DType.int64


@pytest.mark.parametrize(
    ("sizes", "limit", "expected"),
    [
        ([], 100, []),
        ([(F, 40)] * 5, 100, [[0, 1], [2, 3], [4]]),
        ([(F, 50), (F, 50), (F, 1)], 100, [[0, 1], [2]]),
        ([(F, 40), (F, 200), (F, 40), (F, 40)], 100, [[0, 2], [1], [3]]),
        ([(F, 40), (I, 8), (F, 40), (I, 8), (F, 40)], 100, [[0, 2], [1, 3], [4]]),
        ([(F, 0), (F, 0)], 1, [[0, 1]]),
        ([(F, 100), (F, 0), (F, 1)], 100, [[0, 1], [2]]),
        ([(F, 101), (F, 101)], 100, [[0], [1]]),
    ],
)
def test_buckets(sizes: list[tuple[DType, int]], limit: int, expected: list[list[int]]) -> None:
    assert buckets(sizes, limit) == expected


@pytest.mark.parametrize("inside", [True, False])
def test_many_tensors(comm: Communicator, daemon: FakeDaemon, inside: bool) -> None:
    make = comm.empty if inside else np.empty
    shapes: list[Any] = [(3, 4), (), (100,), (0,), (BIG,), (7, 1), (2000,)]
    tensors = [make(shape, dtype) for shape in shapes for dtype in (np.float32, np.int64)]
    for i, x in enumerate(tensors):
        x[...] = i + 1
    receipt = comm.all_reduce_many(tensors, bucket_bytes=8000)
    assert all(out is x for out, x in zip(receipt.out, tensors, strict=True))
    for i, x in enumerate(tensors):
        assert (x == 2 * (i + 1)).all()
    # float32: [12 + 1 + 100 + 0 + 7], big, [2000]; int64: alike
    assert [(post.call.dtype, post.call.count) for post in daemon.seen] == [
        (DType.float32, 120),
        (DType.int64, 120),
        (DType.float32, BIG),
        (DType.int64, BIG),
        (DType.float32, 2000),
        (DType.int64, 2000),
    ]
    assert [one.seq for one in receipt.receipts] == [1, 2, 3, 4, 5, 6]
    assert [len(one.out) for one in receipt.receipts] == [5, 5, 1, 1, 1, 1]
    assert receipt.receipts[0].out[0] is tensors[0]
    whole = comm.all_reduce_many(tuple(tensors), op="max", algorithm="tree", on_failure="raise")
    assert len(whole.receipts) == 2
    call = daemon.seen[-1].call
    assert (call.op, call.algorithm, call.on_failure) == (3, "tree", "raise")
    for i, x in enumerate(tensors):
        assert (x == 2 * (i + 1)).all()
    assert comm.all_reduce_many([]).receipts == ()


def test_a_large_tensor_in_the_arena_is_not_copied(comm: Communicator, daemon: FakeDaemon) -> None:
    x = comm.empty(BIG)
    x[:] = 1
    comm.all_reduce_many([np.ones(3, np.float32), x], bucket_bytes=100)
    post = daemon.seen[-1]
    daemon.bytes[post.result_buffer : post.result_buffer + 4].view(np.float32)[0] = -1
    assert x[0] == -1


def test_all_buckets_are_under_way_and_each_is_all_or_nothing(held: Communicator, manual: FakeDaemon) -> None:
    tensors = [np.full(10, i, np.float32) for i in range(6)]
    work = held.all_reduce_many(tensors, bucket_bytes=80, async_op=True)
    manual.wait_for_posts(3)
    assert not work.done()
    assert repr(work) == "<ManyWork of 6 tensors: 0 of 3 buckets have ended>"
    with pytest.raises(ConfigError, match="in use by a call that is not finished"):
        held.all_reduce(tensors[5])
    posts = list(manual.posts)
    manual.fail(posts[1])
    manual.answer(posts[2])
    with pytest.raises(TimeoutError) as late:
        work.wait(0.01)
    assert late.value.work is work
    manual.answer(posts[0])
    for _ in range(2):
        with pytest.raises(WorldTooSmall) as caught:
            work.wait(10)
        assert caught.value.__notes__ == ["all_reduce_many: 1 of 3 buckets failed, 2 were committed"]
    assert work.done()
    assert repr(work) == "<ManyWork of 6 tensors: 3 of 3 buckets have ended>"
    assert [x[0] for x in tensors] == [0, 2, 2, 3, 8, 10]


def test_nothing_is_sent_if_one_of_many_is_in_use(held: Communicator, manual: FakeDaemon) -> None:
    x, y = np.ones(10, np.float32), np.ones(10, np.float32)
    work = held.all_reduce(y, async_op=True)
    with pytest.raises(ConfigError, match=f"memory of call {work.id}, all_reduce"):
        held.all_reduce_many([x, y], bucket_bytes=40)
    assert held.pending == (work,)
    manual.answer(manual.next_post())


def test_many_in_an_arena_that_cannot_hold_all(held: Communicator, manual: FakeDaemon) -> None:
    """The buckets wait for each other's memory."""
    rest = [held.empty(nbytes, np.uint8) for nbytes in (ARENA // 8 * 7, ARENA // 64 * 7)]  # 16 MiB are left
    tensors = [np.full(1 << 20, i, np.uint8) for i in range(24)]  # 1 MiB each, twice that for each bucket
    with pytest.raises(TimeoutError) as late:
        held.all_reduce_many(tensors, bucket_bytes=1 << 20, timeout=0.05)
    work = late.value.work
    manual.wait_for_posts(8)
    assert not any(x[0] != i for i, x in enumerate(tensors))
    manual.manual = False
    for post in list(manual.posts):
        manual.answer(post)
    assert len(work.wait(10).receipts) == 24
    assert all((x == 2 * i).all() for i, x in enumerate(tensors))
    with pytest.raises(wancoll.ArenaFull, match="the arena has no room"):
        held.all_reduce_many([np.zeros(20 << 20, np.uint8)])
    del rest
    gc.collect()
    assert held.all_reduce_many([np.zeros(20 << 20, np.uint8)]).receipts


def test_many_when_the_daemon_dies(held: Communicator, manual: FakeDaemon) -> None:
    tensors = [np.ones(10, np.float32) for _ in range(4)]
    work = held.all_reduce_many(tensors, bucket_bytes=40, async_op=True)
    manual.wait_for_posts(4)
    manual.answer(manual.posts[0])
    manual.hang_up()
    with pytest.raises(OutcomeUnknown) as caught:
        work.wait(10)
    assert "of 4 buckets failed" in caught.value.__notes__[0]
    with pytest.raises(PeerDaemonLost):
        held.all_reduce_many(tensors)


def test_codecs_of_many(comm: Communicator, daemon: FakeDaemon) -> None:
    tensors = [tensor(dtype) for dtype in DType]
    receipt = comm.all_reduce_many(tensors, codec="bf16")
    assert {one.codec for one in receipt.receipts} == {"bf16", "none"}
    assert {DType(post.call.dtype) for post in daemon.seen if post.call.codec} == {DType.float32, DType.float64}
    daemon.seen.clear()
    with pytest.raises(ConfigError, match=r"all_reduce_many\(codec=...\): codec is not available"):
        comm.all_reduce_many(tensors, codec="gzip")
    with pytest.raises(ConfigError, match="exclude each other"):
        comm.all_reduce_many([tensor(DType.int8)], codec="int8", max_rel_error=0.1)


def test_codecs_of_many_by_error(comm: Communicator, daemon: FakeDaemon) -> None:
    comm.all_reduce_many([tensor(dtype) for dtype in DType], max_rel_error=0.005, rounding="stochastic", seed=4)
    coded = {DType(post.call.dtype): post for post in daemon.seen if post.call.codec}
    assert set(coded) == {DType.float32, DType.float64}
    assert all((post.call.codec, post.call.seed) == (Codec.bf16, 4) for post in coded.values())


def test_feedback_of_many(comm: Communicator, daemon: FakeDaemon) -> None:
    feedback = wancoll.ErrorFeedback()
    x, y, n = gaussian(60), gaussian(70, 2), np.ones(3, np.int64)
    for _ in range(2):
        comm.all_reduce_many([x.copy(), n.copy(), y.copy()], codec="int4", feedback=feedback, name="g")
    assert feedback.names == ("g/0",)
    both = np.concatenate([x, y])
    first = both - lossy(Codec.int4, DType.float32, both)
    assert (feedback.residual("g/0") == both + first - lossy(Codec.int4, DType.float32, both + first)).all()
    with pytest.raises(ConfigError, match=r"all_reduce_many\(name='g/0'\).*another tensor"):
        comm.all_reduce_many([x.copy()], codec="int4", feedback=feedback, name="g")
    with pytest.raises(ConfigError, match="needs the tensor's name"):
        comm.all_reduce_many([x.copy()], codec="int4", feedback=feedback)


SHARED = np.zeros(10, np.float32)


@pytest.mark.parametrize(
    ("tensors", "options", "words"),
    [
        ([SHARED, SHARED], {}, ("two tensors share memory", "number 0 and number 1", "leave one of them out")),
        (SHARED, {}, ("tensors is no list", "all_reduce_many(tensors)", "got ndarray")),
        ([b"abc"], {}, ("read-only", "all_reduce_many(tensors[0])")),
        ([SHARED], {"bucket_bytes": 0}, ("bucket_bytes cannot be used", "1 or more", "got 0")),
        ([SHARED], {"algorithm": "star"}, ("algorithm is not available", "all_reduce_many(algorithm=...)")),
        ([SHARED], {"timeout": 1, "async_op": True}, ("timeout says how long", "all_reduce_many(timeout=...)")),
    ],
)
def test_refusals_of_many(
    comm: Communicator, daemon: FakeDaemon, tensors: Any, options: dict[str, Any], words: tuple[str, ...]
) -> None:
    with refused(*words):
        comm.all_reduce_many(tensors, **options)
    comm.all_reduce(np.ones(1))
    assert len(daemon.seen) == 1


def test_many_is_quick_with_many_tensors(comm: Communicator, daemon: FakeDaemon) -> None:
    """Thousands of tensors in dozens of buckets: looking for memory in use must not take the time of all pairs."""
    tensors = [np.ones(100, np.float32) for _ in range(4000)]
    started = time.monotonic()
    comm.all_reduce_many(tensors, bucket_bytes=40000, timeout=30)
    assert time.monotonic() - started < 15
    assert len(daemon.seen) == 40
    assert all((x == 2).all() for x in tensors)


def fed(dtype: DType, how: Codec, values: Any, residual: Any) -> tuple[bytes, ...]:
    """What is sent, the residual once that is committed, and the residual where it came too late."""
    feedback = wancoll.ErrorFeedback()
    feedback.load_state_dict({"w": residual})
    feed = codecs.Feed("all_reduce", feedback, "w", dtype, values.size, how, late=True)
    memory = np.zeros(feed.nbytes, np.uint8)
    memory[: values.nbytes] = values.view(np.uint8)
    feed.add(memory.ctypes.data)
    sent = memory[: codec.coded_bytes(how, values.size) if how else values.nbytes]
    feed.commit(True, ["here"])
    committed = feedback.residual("w")
    feed.commit(False, ["here"])
    return sent.tobytes(), committed.tobytes(), feedback.residual("w").tobytes()


@pytest.mark.parametrize(("dtype", "how"), [(dtype, how) for dtype in FLOATS for how in Codec if takes(how, dtype)])
def test_a_large_tensor_is_fed_piece_by_piece_with_the_same_bits(
    dtype: DType, how: Codec, monkeypatch: pytest.MonkeyPatch
) -> None:
    elements = codec.block(how)[0]
    assert not elements or codecs._AT_ONCE % elements == 0
    rng = np.random.default_rng(5)
    kept = np.float64 if dtype is DType.float64 else np.float32
    wide = (rng.standard_normal(5001) * 10.0 ** rng.integers(-3, 4, 5001)).astype(kept)
    wide[[3, 2500, 4999]] = np.inf, np.nan, -np.inf
    values, residual = narrowed(dtype, wide), rng.standard_normal(5001).astype(kept)
    whole = fed(dtype, how, values, residual)
    monkeypatch.setattr(codecs, "_AT_ONCE", 1024)
    assert fed(dtype, how, values, residual) == whole
    assert np.isfinite(np.frombuffer(whole[1], kept)).all()


def test_a_block_that_its_lost_owner_did_not_take_leaves_its_residual_as_it_was() -> None:
    feedback = wancoll.ErrorFeedback()
    before = np.arange(7, dtype=np.float32) / 8
    feedback.load_state_dict({"w": before})
    feed = codecs.Feed("reduce_scatter", feedback, "w", DType.float32, 7, Codec.int4, blocks={"a": 2, "b": 3, "c": 2})
    values = np.linspace(-1, 1, 7, dtype=np.float32)
    feed.add(values.ctypes.data)
    feed.commit(True, ["a", "c"])
    after = np.asarray(feedback.residual("w"))
    assert after[2:5].tolist() == before[2:5].tolist()
    assert not np.array_equal(after[:2], before[:2])
    assert not np.array_equal(after[5:], before[5:])


@pytest.mark.parametrize("named", ["zip", None, 7, "top1.5%"])
@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "broadcast", "all_to_all"])
def test_only_codecs_that_a_call_takes_are_offered(comm: Communicator, kind: str, named: Any) -> None:
    with pytest.raises(ConfigError, match=r"expected none or bf16 or fp16 or int8 or int4 or fp8; got") as bad:
        getattr(comm, kind)(np.ones(comm.world_size, np.float32), codec=named)
    assert kind in str(bad.value)
