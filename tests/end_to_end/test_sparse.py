"""Sparse codecs through real clusters: what is sent, what stays with whom, and that nothing is lost on the way.

And dense ones in the collectives that take no sparse one.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import wancoll
from tests.faults.support import all_called, attempt, close_all, cluster_fixture, join, ranked, wait_until
from tests.schedule import codec as codecs
from wancoll.chaos import Cluster, in_threads
from wancoll.client.codecs import Feed
from wancoll.collective import Codec, DType
from wancoll.native import ffi
from wancoll.schedule.steps import chunk_bounds

COUNT = 5 * 4096 + 100
cluster = cluster_fixture(3)
both = pytest.mark.parametrize("codec", ["top1.5%", "top5%-int8", "top1.5%/top1.5%"])


@pytest.fixture
def comms(cluster: Cluster) -> Iterator[list[Any]]:
    found = ranked(cluster, range(3))
    yield found
    close_all(found)


def given(rank: int, step: int, count: int = COUNT) -> np.ndarray:
    rng = np.random.default_rng((rank, step, count))
    return (rng.normal(size=count) * (1 + np.arange(count) % 7)).astype(np.float32)


def through(codec: str, x: np.ndarray) -> np.ndarray:
    named = Codec.named(codec)
    assert named is not None
    return codecs.decode(named, DType.float32, codecs.encode(named, DType.float32, x), x.size)


@both
@pytest.mark.parametrize("op", ["sum", "avg"])
def test_what_is_sent_and_what_stays_is_what_was_given(comms: list[Any], codec: str, op: Any) -> None:
    steps, feedbacks = 6, [wancoll.ErrorFeedback() for _ in range(3)]

    def member(rank: int) -> tuple[list[bytes], np.ndarray]:
        results, total = [], np.zeros(COUNT)
        for step in range(steps):
            x = given(rank, step)
            receipt = comms[rank].all_reduce(x, op=op, codec=codec, feedback=feedbacks[rank], name="w", timeout=30)
            assert (receipt.codec, receipt.attempts) == (codec, 1)
            assert 0.3 < receipt.codec_error < 1
            results.append(x.tobytes())
            total += x * (3.0 if op == "avg" else 1.0)
        return results, total

    found = in_threads(member, 3, 60)
    assert found[0][0] == found[1][0] == found[2][0]
    kept = np.sum([feedback.residual("w") for feedback in feedbacks], axis=0, dtype=np.float64)
    exact = np.sum([given(rank, step) for rank in range(3) for step in range(steps)], axis=0, dtype=np.float64)
    assert np.abs(found[0][1] + kept - exact).max() < 1e-4
    assert np.linalg.norm(kept) > np.linalg.norm(exact) / 2  # it is much that stays


def test_what_an_owner_drops_of_a_sum_is_in_its_residual(comms: list[Any]) -> None:
    codec, feedbacks = "top1.5%/top1.5%", [wancoll.ErrorFeedback() for _ in range(3)]
    in_threads(
        lambda r: comms[r].all_reduce(given(r, 0), op="sum", codec=codec, feedback=feedbacks[r], name="w", timeout=30),
        3,
    )
    sent = [through(codec, given(rank, 0)) for rank in range(3)]
    dropped = (total := sent[0] + sent[1] + sent[2]) - through(codec, total)
    assert np.count_nonzero(dropped) > 600
    for rank, (start, stop) in enumerate(chunk_bounds(COUNT, 3, 4096)):
        expected = given(rank, 0) - sent[rank]
        expected[start:stop] += dropped[start:stop]
        assert feedbacks[rank].residual("w").tobytes() == expected.tobytes()


def test_bytes_sent(comms: list[Any]) -> None:
    """What 3 members send for 4 MiB of floats, with all headers: rings of floats send 4/3 of that."""
    for codec, least in (("none", 0.99), ("top1.5%", 130), ("top1.5%/top1.5%", 195)):
        results = in_threads(lambda r, c=codec: comms[r].all_reduce(given(r, 1, 1 << 20), codec=c, timeout=30), 3)
        for receipt in results:
            assert (1 << 22) * 4 / 3 / receipt.bytes_sent > least
            assert 0.97 * receipt.bytes_sent < receipt.bytes_received < 1.02 * receipt.bytes_sent
            assert receipt.world_size == 3


@both
def test_half_types_many_tensors_and_a_world_of_one(cluster: Cluster, comms: list[Any], codec: str) -> None:
    def member(rank: int) -> tuple[bytes, bytes]:
        tensors = [given(rank, step, 5000).astype(np.float16) for step in range(3)]
        feedback = wancoll.ErrorFeedback()
        comms[rank].all_reduce_many(
            tensors, op="avg", codec=codec, feedback=feedback, name="m", bucket_bytes=12000, timeout=30
        )
        left = sum(np.abs(feedback.residual(name)).sum() for name in feedback.names)
        assert left > 1000
        return tensors[0].tobytes(), tensors[2].tobytes()

    found = in_threads(member, 3)
    assert found[0] == found[1] == found[2]
    (alone,) = join(cluster, [0])
    x = given(0, 0)
    alone.all_reduce(x, codec=codec)
    assert x.tobytes() == through(codec, given(0, 0)).tobytes()
    close_all([alone])


@both
def test_members_with_other_codecs_are_named(comms: list[Any], codec: str) -> None:
    def member(rank: int) -> str:
        x = given(rank, 0)
        found = attempt(lambda: comms[rank].all_reduce(x, codec="top2%" if rank == 1 else codec, timeout=30))
        assert isinstance(found.error, wancoll.CollectiveMismatch)
        assert x.tobytes() == given(rank, 0).tobytes()
        return str(found.error)

    for text in in_threads(member, 3):
        assert f"codec={codec}" in text
        assert "codec=top2%" in text


@both
def test_the_daemon_of_a_late_owner_keeps_what_it_drops(comms: list[Any], codec: str) -> None:
    """Its residual has what it would have sent, and what was dropped of its share: nothing is lost."""
    feedbacks, ended = [wancoll.ErrorFeedback() for _ in range(3)], threading.Barrier(3)

    def call(rank: int) -> np.ndarray:
        x = given(rank, 0)
        if rank == 1:
            ended.wait(30)
        receipt = comms[rank].all_reduce(x, codec=codec, feedback=feedbacks[rank], name="w", grace=1.0, timeout=30)
        if rank != 1:
            ended.wait(30)
        assert receipt.counted == (rank != 1)
        return x

    found = in_threads(call, 3, 60)
    kept = np.sum([feedback.residual("w") for feedback in feedbacks], axis=0, dtype=np.float64)
    exact = np.sum([given(rank, 0) for rank in range(3)], axis=0, dtype=np.float64)
    assert np.abs(found[0] + kept - exact).max() < 1e-4


@pytest.mark.parametrize("liar", ["m0", "m1"])
def test_blocks_that_nobody_encodes_put_out_their_client_alone(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, liar: str
) -> None:
    """There are two members: whether the older or the younger one lies."""
    add = Feed.add

    def lie(feed: Feed, address: int) -> None:
        add(feed, address)
        if feed._name == liar:
            ffi.memmove(ffi.cast("char *", address), b"\xff" * feed.nbytes, feed.nbytes)

    monkeypatch.setattr(Feed, "add", lie)
    two = sorted(join(cluster, range(2)), key=lambda comm: comm.name)

    def call(comm: Any) -> Any:
        how = {"codec": "top1.5%", "feedback": wancoll.ErrorFeedback(), "name": comm.name, "timeout": 30}
        return attempt(lambda: comm.all_reduce(given(0, 0), **how))

    found = dict(zip(("m0", "m1"), in_threads(lambda k: call(two[k]), 2), strict=True))
    assert isinstance(found.pop(liar).error, wancoll.Evicted)
    ((honest, outcome),) = found.items()
    assert outcome.receipt is not None, outcome.error
    assert outcome.receipt.contributors == (honest,)
    assert any("that its client encoded is not valid" in event.text for event in cluster.status().events)
    close_all(two)


@both
def test_after_a_loss_residuals_are_those_of_the_attempt_that_committed(cluster: Cluster, codec: str) -> None:
    """The one that is lost gives zeros: so what two survivors get and keep must be what they gave."""
    comms = ranked(cluster, range(3))
    feedbacks = [wancoll.ErrorFeedback() for _ in range(3)]

    def begin(rank: int, step: int) -> tuple[Any, np.ndarray]:
        x = given(rank, step) if rank < 2 else np.zeros(COUNT, np.float32)
        how = {"op": "sum", "codec": codec, "feedback": feedbacks[rank], "name": "w", "async_op": True}
        return comms[rank].all_reduce(x, **how), x

    first = [begin(rank, 0) for rank in range(3)]
    assert [work.wait(30).attempts for work, _ in first] == [1, 1, 1]
    second = [begin(rank, 1) for rank in range(2)]
    peers = [int(comm.name.removeprefix("m")) for comm in comms]
    wait_until(lambda: all_called(cluster, peers[:2]), 10, "two have called")
    cluster.kill(peers[2])
    assert [work.wait(30).attempts for work, _ in second] == [2, 2]
    assert second[0][1].tobytes() == second[1][1].tobytes()
    kept = feedbacks[0].residual("w").astype(np.float64) + feedbacks[1].residual("w")
    exact = sum(given(rank, step).astype(np.float64) for rank in range(2) for step in range(2))
    missing = np.abs(exact - first[0][1] - second[0][1] - kept)
    lost = slice(*chunk_bounds(COUNT, 3, 4096)[2])  # what it owned, and dropped, in the first call
    assert np.abs(np.delete(missing, np.r_[lost])).max() < 1e-4
    assert (missing[lost].max() > 0.1) == ("/" in codec)
    close_all(comms)
    cluster.restart_peer(peers[2])


# ---- dense codecs, in other collectives ----------------------------------------------------------------------


@pytest.mark.parametrize("codec", ["int8", "int4"])
def test_blocks_and_tensors_are_what_their_encoded_form_says(comms: list[Any], codec: Any) -> None:
    """Uneven blocks begin anywhere; the root of a broadcast takes what the others get."""
    counts, cuts = (1000, 0, 333), (0, 1000, 1000, 1333)

    def member(rank: int) -> list[Any]:
        comm, how = comms[rank], {"codec": codec, "timeout": 30}
        x = given(rank, 0, 999)
        first = comm.all_gather(x, **how)
        second = comm.all_gather(given(rank, 1, counts[rank]), counts=counts, **how)
        third = comm.broadcast(x, 1, **how)
        fourth = comm.all_to_all(given(rank, 2, 3 * 500), **how)
        assert third.out is x
        return [first, second, third, fourth]

    found = in_threads(member, 3, 60)
    for rank, (first, second, third, fourth) in enumerate(found):
        for other in range(3):
            assert first.out[other].tobytes() == through(codec, given(other, 0, 999)).tobytes()
            block = second.out[cuts[other] : cuts[other + 1]]
            assert block.tobytes() == through(codec, given(other, 1, counts[other])).tobytes()
            sent = given(other, 2, 1500).reshape(3, 500)[rank]
            assert fourth.out.reshape(3, 500)[other].tobytes() == through(codec, sent).tobytes()
        assert third.out.tobytes() == through(codec, given(1, 0, 999)).tobytes()
        assert {first.codec, second.codec, third.codec, fourth.codec} == {codec}
        assert (rank == 1) == (third.bytes_received == 0)
    for of in range(3):
        assert len({receipts[of].digest for receipts in found}) == 1
    assert found[0][0].bytes_sent < 2 * 999 * 4 * 0.3


@pytest.mark.parametrize("op", ["sum", "avg"])
@pytest.mark.parametrize("half", [False, True])
def test_with_feedback_scattered_sums_lose_nothing(comms: list[Any], op: Any, half: bool) -> None:
    counts, steps = (5000, 700, 129), 4
    total, feedbacks = sum(counts), [wancoll.ErrorFeedback() for _ in range(3)]
    dtype = np.float16 if half else np.float32

    def member(rank: int) -> np.ndarray:
        got = np.zeros(counts[rank])
        for step in range(steps):
            x = given(rank, step, total).astype(dtype)
            how = {"op": op, "counts": counts, "codec": "int4", "feedback": feedbacks[rank], "name": "w"}
            receipt = comms[rank].reduce_scatter(x, **how, timeout=30)
            assert x.tobytes() == given(rank, step, total).astype(dtype).tobytes()
            assert 0.01 < receipt.codec_error < 0.2
            got += receipt.out.astype(np.float64) * (3 if op == "avg" else 1)
        return got

    found = np.concatenate(in_threads(member, 3, 60))
    kept = np.sum([feedback.residual("w") for feedback in feedbacks], axis=0, dtype=np.float64)
    exact = np.sum(
        [given(rank, step, total).astype(dtype) for rank in range(3) for step in range(steps)], axis=0, dtype=np.float64
    )
    assert np.abs(found + kept - exact).max() < (0.2 if half else 1e-4)
    assert np.abs(kept).max() > 0.3


def test_after_a_loss_blocks_are_those_of_the_survivors(cluster: Cluster) -> None:
    comms = ranked(cluster, range(3))
    works = [
        comm.reduce_scatter(given(rank, 0, 3000), codec="int8", async_op=True) for rank, comm in enumerate(comms[:2])
    ]
    peers = [int(comm.name.removeprefix("m")) for comm in comms]
    wait_until(lambda: all_called(cluster, peers[:2]), 10, "two have called")
    cluster.kill(peers[2])
    for rank, work in enumerate(works):
        assert work.wait(30).attempts == 2
        parts = [through("int8", given(other, 0, 3000).reshape(3, 1000)[rank]) for other in range(2)]
        assert work.wait().out.tobytes() == (parts[0] + parts[1]).tobytes()
    close_all(comms)
    cluster.restart_peer(peers[2])


def test_what_other_collectives_do_not_take_is_refused_by_name(comms: list[Any]) -> None:
    with pytest.raises(wancoll.ConfigError, match=r"all_gather\(codec=\.\.\.\): codec is not available"):
        comms[0].all_gather(given(0, 0), codec="top1.5%")
    with pytest.raises(wancoll.ConfigError, match="the codec does not take this dtype"):
        comms[0].broadcast(np.ones(3, np.int32), codec="int8")

    def member(rank: int) -> str:
        call = comms[rank].all_gather
        return str(attempt(lambda: call(given(rank, 0, 50), codec=("int8", "fp8", "int8")[rank], timeout=30)).error)

    for text in in_threads(member, 3):
        assert "codec=int8" in text
        assert "codec=fp8" in text
