"""all_reduce with a grace time through a real cluster: who is late, and what becomes of its tensor (R20)."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import wancoll
from tests.faults.support import close_all, cluster_fixture, join
from tests.later import later
from wancoll.chaos import Cluster, in_threads

GRACE = 2.0  # seconds; a machine that stands still for a second makes nobody late
COUNT = 300_000  # several frames, and pages
cluster = cluster_fixture(3)


@pytest.fixture
def comms(cluster: Cluster) -> Iterator[list[Any]]:
    found = join(cluster, range(3))
    yield found
    close_all(found)


def tensor(k: int, factor: float = 1.0) -> np.ndarray:
    return np.full(COUNT, factor * 10**k, np.float32)


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("algorithm", ["auto", *later("ring", "tree", "double_tree", "halving_doubling")])
def test_the_late_one_gets_what_the_others_have(comms: list[Any], inside: bool, algorithm: Any) -> None:
    ended = threading.Barrier(3)

    def call(k: int) -> Any:
        x = comms[k].empty(COUNT, np.float32) if inside else np.empty(COUNT, np.float32)
        x[:] = tensor(k)
        if k == 2:
            ended.wait(30)
        receipts = [comms[k].all_reduce(x, grace=GRACE, algorithm=algorithm, timeout=30)]
        if k != 2:
            ended.wait(30)
        assert (x == 11).all()
        x[:] = tensor(k)
        receipts.append(comms[k].all_reduce(x, grace=30, timeout=30))
        assert (x == 111).all()
        return receipts

    found = in_threads(call, 3, 60)
    assert [[each.counted for each in receipts] for receipts in found] == [[True, True], [True, True], [False, True]]
    assert len({receipts[0].digest for receipts in found}) == 1
    assert {frozenset(receipts[0].contributors) for receipts in found} == {frozenset(("m0", "m1", "m2"))}
    assert {receipts[0].op_id for receipts in found} == {f"{comms[0].group}/1"}


@pytest.mark.parametrize("codec", ["int8", *later("none")])
def test_with_feedback_what_came_too_late_is_sent_next_time(comms: list[Any], codec: Any) -> None:
    ended = threading.Barrier(3)

    def call(k: int) -> Any:
        feedback = wancoll.ErrorFeedback()
        how = {"codec": codec, "feedback": feedback, "name": "x", "timeout": 30}
        if k == 2:
            ended.wait(30)
        x = tensor(k)
        first = comms[k].all_reduce(x, grace=GRACE, **how)
        if k != 2:
            ended.wait(30)
        before = x.copy()
        if k == 2:
            assert (feedback.residual("x") == 100).all()
        x[:] = tensor(k)
        second = comms[k].all_reduce(x, grace=30, **how)
        return first.counted, second.counted, before, x

    found = in_threads(call, 3, 60)
    assert [each[:2] for each in found] == [(True, True), (True, True), (False, True)]
    for _, _, before, after in found:
        assert np.allclose(before, 11, rtol=0.02)
        assert np.allclose(after, 211, rtol=0.02)
        assert np.array_equal(before, found[0][2])
        assert np.array_equal(after, found[0][3])


def test_a_late_call_that_differs_fails_alone(comms: list[Any]) -> None:
    ended = threading.Barrier(3)

    def call(k: int) -> Any:
        if k == 2:
            ended.wait(30)
            x = np.zeros(7, np.float32)
            with pytest.raises(wancoll.CollectiveMismatch, match="late with operation 1"):
                comms[k].all_reduce(x, grace=GRACE, timeout=30)
            assert (x == 0).all()
        else:
            comms[k].all_reduce(tensor(k), grace=GRACE, timeout=30)
            ended.wait(30)
        x = tensor(k)
        assert comms[k].all_reduce(x, timeout=30).counted
        return x[0]

    assert in_threads(call, 3, 60) == [111] * 3


def test_many_may_be_under_way_and_nobody_waits_longer_than_the_first(comms: list[Any]) -> None:
    """Ten calls at once: the time runs for all of them from when they are called."""
    ended = threading.Barrier(3)

    def call(k: int) -> Any:
        if k == 2:
            ended.wait(30)
        began = time.monotonic()
        xs = [tensor(k, i + 1)[:1000] for i in range(10)]
        works = [comms[k].all_reduce(x, grace=GRACE, async_op=True) for x in xs]
        receipts = [work.wait(30) for work in works]
        took = time.monotonic() - began
        if k != 2:
            ended.wait(30)
        assert all((x == 11 * (i + 1)).all() for i, x in enumerate(xs))
        assert [each.counted for each in receipts] == [k != 2] * 10
        return took

    took = in_threads(call, 3, 60)
    assert GRACE <= max(took[:2]) < 9 * GRACE  # of the one that called first; ten times as long, one after the other


def test_what_cannot_have_a_grace_time_is_refused(comms: list[Any]) -> None:
    x = np.zeros(3, np.float32)
    with pytest.raises(wancoll.ConfigError, match="only a sum"):
        comms[0].all_reduce(x, op="avg", grace=1.0)
    for wrong in (0, -1, float("nan"), "1"):
        with pytest.raises(wancoll.ConfigError, match="grace cannot be used"):
            comms[0].all_reduce(x, grace=wrong)


@pytest.mark.check
def test_a_restarted_master_goes_on_counting_and_a_killed_member_is_no_late_one(cluster: Cluster) -> None:
    extra = cluster.add_peer()
    peers = [0, 1, 2, extra]
    comms = in_threads(lambda k: cluster.connect(peers[k], group="kills", name=f"m{k}", start_world=4), 4, 30)
    ended = threading.Barrier(3)

    def call(k: int) -> Any:
        if k == 3:
            return None
        x = tensor(k)
        if k == 2:
            ended.wait(60)
        else:
            work = comms[k].all_reduce(x, grace=3.0, async_op=True)
            if k == 0:
                cluster.kill_master()
                cluster.start_master()
                cluster.kill(extra)
            receipt = work.wait(60)
            ended.wait(60)
        if k == 2:
            receipt = comms[k].all_reduce(x, grace=3.0, timeout=60)
        assert (x == 11).all()
        return receipt.counted, receipt.contributors, receipt.digest

    found = in_threads(call, 4, 120)[:3]
    for comm in comms:
        comm.close()
    assert [counted for counted, _, _ in found] == [True, True, False]
    assert len({(names, digest) for _, names, digest in found}) == 1
    assert set(found[0][1]) == {"m0", "m1", "m2"}
