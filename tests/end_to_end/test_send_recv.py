"""send and recv through a real cluster: order, tags, sizes, calls that do not fit, members that are lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.faults.support import cluster_fixture, joined
from tests.schedule.numbers import digest
from wancoll.chaos import Cluster, in_threads
from wancoll.errors import CollectiveMismatch, OperationAborted

COUNTS = (0, 1, 1000, 300_001)
cluster = cluster_fixture(3)


def together(*calls: Callable[[], Any]) -> list[Any]:
    return in_threads(lambda i: calls[i](), len(calls), 60)


def numbers(count: int, seed: int = 0) -> Any:
    return np.random.default_rng((count, seed)).standard_normal(count).astype(np.float32)


@pytest.mark.parametrize("world", [2, 3])
def test_around_a_ring(cluster: Cluster, world: int) -> None:
    with joined(cluster, world) as comms:

        def member(rank: int) -> None:
            comm = comms[rank]
            right, left = (rank + 1) % world, (rank - 1) % world
            for count in COUNTS:
                x, y = numbers(count, rank), np.zeros(count, np.float32)
                work = comm.send(x, right, async_op=True)
                receipt = comm.recv(y, left, timeout=30)
                sent = work.wait(30)
                assert receipt.out is y
                assert receipt.op_id.endswith(f"/p2p-{receipt.seq}")
                assert y.tobytes() == numbers(count, left).tobytes()
                assert sent.out is None
                assert sent.digest == f"{digest(x.tobytes()):016x}"
                assert receipt.digest == f"{digest(y.tobytes()):016x}"
                assert set(receipt.contributors) <= set(comm.members)
                assert receipt.attempts == 1

        in_threads(member, world)


def test_tags_and_order(cluster: Cluster) -> None:
    """Of one tag the first sent is the first received; tags do not wait for each other; collectives go on beside."""
    with joined(cluster, 3) as comms:
        one, two, three = comms

        def sender() -> None:
            works = [one.send(np.array([tag % 251, i]), 1, tag, async_op=True) for i in range(10) for tag in (1, 2**63)]
            one.all_reduce(np.ones(100))
            for work in works:
                work.wait(30)

        def receiver() -> None:
            found = {tag: [np.zeros(2, np.int64) for _ in range(10)] for tag in (2**63, 1)}
            works = [two.recv(x, 0, tag, async_op=True) for tag, arrays in found.items() for x in arrays]
            two.all_reduce(np.ones(100))
            for work in works:
                work.wait(30)
            for tag, arrays in found.items():
                assert [x.tolist() for x in arrays] == [[tag % 251, i] for i in range(10)]

        together(sender, receiver, lambda: three.all_reduce(np.ones(100)))


@pytest.mark.parametrize("bad", [np.zeros(4, np.int8), np.zeros(3, np.uint8)])
def test_halves_that_do_not_fit(cluster: Cluster, bad: Any) -> None:
    with joined(cluster, 2) as (one, two):

        def send() -> None:
            with pytest.raises(CollectiveMismatch) as caught:
                one.send(np.ones(3, np.int8), 1, timeout=30)
            assert set(caught.value.calls) == {one.name, two.name}
            assert "send(3 x int8" in caught.value.calls[one.name]

        def recv() -> None:
            with pytest.raises(CollectiveMismatch, match="send and recv do not fit"):
                two.recv(bad, 0, timeout=30)
            assert not bad.any()

        together(send, recv)
        x = np.zeros(3, np.int8)
        together(lambda: one.send(np.ones(3, np.int8), 1), lambda: two.recv(x, 0))  # the group is usable
        assert x.all()


def test_the_other_side_is_lost(cluster: Cluster) -> None:
    with joined(cluster, 3) as (one, two, three):
        x, y = np.zeros(3, np.int8), np.ones(3, np.int8)
        receiving, sending = one.recv(x, 1, async_op=True), three.send(y, 1, async_op=True)
        between = one.recv(x[:0], 2, 5, async_op=True)  # of two that live: goes on
        two.close()

        def recv() -> None:
            with pytest.raises(OperationAborted, match=two.name):
                receiving.wait(30)

        def send() -> None:
            with pytest.raises(OperationAborted, match=two.name):
                sending.wait(30)
            three.send(y[:0], 0, 5, timeout=30)

        together(recv, send)
        between.wait(30)
        assert not x.any()
        assert y.all()
        together(one.barrier, three.barrier)
        assert one.world_size == 2
