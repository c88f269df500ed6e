"""Inputs that are still being filled when the call is posted, and results whose blocks are shown: client and daemon."""

from __future__ import annotations

import os
import random
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.faults.support import new_group, wait_until
from wancoll._native import ffi
from wancoll.board import BLOCK, MOST_RANGES, Board, board
from wancoll.chaos import Cluster, in_threads
from wancoll.client import communicator
from wancoll.client.arena import Lease
from wancoll.client.placement import Placement
from wancoll.collective import Descriptor, Kind
from wancoll.schedule.choose import make
from wancoll.schedule.steps import reads

WORLD = 3
COUNT = 300_001  # 19 blocks, the last one short


def memory(lease: Lease) -> Any:
    return np.frombuffer(ffi.buffer(ffi.cast("char *", lease.block.address), lease.block.nbytes), np.uint8)


class Gated(Placement):
    """Posts before its input is there; fill() brings it, block by block."""

    made: list[Gated]
    lease: Lease
    tables: Board
    whole: Any  # the input's bytes
    missing: list[int]

    def prepare(self) -> None:
        super().prepare()
        self.missing = []
        given, result = (sum(each.nbytes for each in regions) for regions in (self.sources, self.targets))
        self.tables = board(given, result)
        self.lease = self._arena.take(self.tables.nbytes)
        memory(self.lease)[: self.tables.nbytes] = 0
        self.board, self.gated = self.lease.block.offset, given > 0
        if given:
            assert self._front is not None
            front = memory(self._front)[:given]
            self.whole = front.copy()
            front[:] = 0xA7
            self.missing = list(range(-(-given // BLOCK)))
        self.made.append(self)

    def fill(self, *blocks: int) -> None:
        assert self._front is not None
        for block in blocks:
            part = slice(block * BLOCK, min((block + 1) * BLOCK, len(self.whole)))
            memory(self._front)[part] = self.whole[part]
            memory(self.lease)[self.tables.filled + block] = 1
            self.missing.remove(block)
        os.eventfd_write(self._arena.bell, 1)

    def fill_all(self, seed: int) -> None:
        """All that is missing, a few blocks at a time, in any order."""
        draw = random.Random(seed)
        while self.missing:
            self.fill(*draw.sample(self.missing, min(len(self.missing), draw.randint(1, 4))))

    def shown(self) -> set[int]:
        words = memory(self.lease)[self.tables.shown : self.tables.order].view(np.uint32)
        return set(words[: -(-sum(each.nbytes for each in self.targets) // BLOCK)].tolist())

    def order(self) -> list[tuple[int, int]]:
        words = memory(self.lease)[self.tables.order : self.tables.nbytes].view(np.uint64)
        pairs = words[1 : 1 + 2 * int(words[0])].reshape(-1, 2).tolist()
        assert len(pairs) <= MOST_RANGES
        return [(start, stop) for start, stop in pairs]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(WORLD) as cluster:
        yield cluster


@pytest.fixture
def gated(monkeypatch: pytest.MonkeyPatch) -> list[Gated]:
    """All that is posted from here on, in the order of the calls."""
    Gated.made = []
    monkeypatch.setattr(communicator, "Placement", Gated)
    return Gated.made


def join(cluster: Cluster, peers: list[int]) -> list[Any]:
    group = new_group()
    comms = in_threads(lambda i: cluster.connect(peers[i], group=group, start_world=len(peers)), len(peers), 30)
    return sorted(comms, key=lambda comm: comm.rank)


def inputs(world: int, count: int = COUNT) -> list[Any]:
    return [np.random.default_rng(rank).integers(-999, 999, count).astype(np.float32) for rank in range(world)]


def fed(made: list[Gated]) -> None:
    for seed, one in enumerate(made):
        one.fill_all(seed)


def test_values(cluster: Cluster, gated: list[Gated]) -> None:
    """Of every collective that reads front, in and out of place, fed late; the blocks of the result are shown."""
    comms = join(cluster, [0, 1, 2])
    given = inputs(WORLD, 3 * 100_000)
    total = given[0] + given[1] + given[2]

    def check(call: Any, wanted: list[Any]) -> None:
        gated.clear()
        works = [call(comm, given[comm.rank].copy()) for comm in comms]
        assert [one.gated for one in gated] == [bool(one.sources) for one in gated]
        fed(gated)
        made = list(gated)
        for rank, work in enumerate(works):
            receipt = work.wait(30)
            found, right = receipt.out, wanted[rank]
            assert found is None if right is None else np.array_equal(found.ravel(), right), rank
        for rank, one in enumerate(made):
            assert not one.targets or wanted[rank] is None or one.shown() == {1}, rank

    thirds = [total.reshape(3, -1)[rank] for rank in range(WORLD)]
    for algorithm in ("ring", "direct", "tree", "naive"):
        check(lambda comm, x, how=algorithm: comm.all_reduce(x, algorithm=how, async_op=True), [total] * WORLD)
    check(lambda comm, x: comm.all_reduce(x, np.empty_like(x), async_op=True), [total] * WORLD)
    check(lambda comm, x: comm.reduce_scatter(x, async_op=True), thirds)
    check(lambda comm, x: comm.all_gather(x, async_op=True), [np.concatenate(given)] * WORLD)
    check(lambda comm, x: comm.broadcast(x, 1, async_op=True), [given[1]] * WORLD)
    check(lambda comm, x: comm.reduce(x, root=2, async_op=True), [None, None, total])
    swapped = [np.concatenate([one.reshape(3, -1)[rank] for one in given]) for rank in range(WORLD)]
    check(lambda comm, x: comm.all_to_all(x, async_op=True), swapped)
    for comm in comms:
        comm.close()


def test_the_order_is_the_schedules(cluster: Cluster, gated: list[Gated]) -> None:
    """It is there once the daemon has begun, before anything is filled: the ring's own chunk comes first."""
    comms = join(cluster, [0, 1, 2])
    given = inputs(WORLD)
    works = [comm.all_reduce(given[comm.rank].copy(), algorithm="ring", async_op=True) for comm in comms]
    wait_until(lambda: all(one.order() for one in gated), 30, "the order is there")
    for rank, one in enumerate(gated):
        call = Descriptor(Kind.all_reduce, count=COUNT)
        assert one.order() == list(reads(make(call, "ring", rank, WORLD)))
        assert one.order()[0][0] // 4 == (0, 100_001, 200_001)[rank]
    fed(gated)
    for work in works:
        assert np.array_equal(work.wait(30).out, sum(given))
    for comm in comms:
        comm.close()


@pytest.mark.parametrize("seed", range(3))
def test_a_loss_while_the_gate_is_half_open(cluster: Cluster, gated: list[Gated], seed: int) -> None:
    """A client dies before it has filled its input: that is a leave. The others' retry waits for the same gates."""
    draw = random.Random(seed)
    comms = join(cluster, [0, 1, 2])
    given = inputs(WORLD)
    tensors = [one.copy() for one in given]
    works = [comm.all_reduce(tensors[comm.rank], async_op=True) for comm in comms]
    wait_until(lambda: all(one.order() for one in gated), 30, "the attempts have begun")
    for one in gated:
        one.fill(*draw.sample(one.missing, draw.randint(1, len(one.missing) - 1)))
    lost = draw.randrange(WORLD)
    comms[lost]._connection._channel.socket.shutdown(socket.SHUT_RDWR)  # no goodbye
    rest = [rank for rank in range(WORLD) if rank != lost]
    wait_until(lambda: all(_world(comms[rank]) == 2 for rank in rest), 30, "the loss is known")
    assert all(np.array_equal(tensors[rank], given[rank]) for rank in range(WORLD))  # untouched until the commit
    feeder = threading.Thread(target=fed, args=([gated[rank] for rank in rest],))
    feeder.start()
    for rank in rest:
        made = gated[rank]
        receipt = works[rank].wait(30)
        assert receipt.attempts == 2
        assert receipt.world_size == 2
        assert np.array_equal(receipt.out, given[rest[0]] + given[rest[1]])
        assert made.shown() == {2}
    feeder.join()
    # The daemon of the one that died has let go of its memory, and takes others.
    again = join(cluster, [0, 1, 2])
    works = [comm.all_reduce(np.ones(5, np.float32), async_op=True) for comm in again]
    fed(gated[-3:])
    assert all(work.wait(30).out.tolist() == [3] * 5 for work in works)
    for comm in [*comms, *again]:
        comm.close()


def _world(comm: Any) -> int:
    comm._connection._step(None, 0)
    return int(comm.world_size)


def test_a_timeout_and_a_close_while_the_gate_is_half_open(cluster: Cluster, gated: list[Gated]) -> None:
    comms = join(cluster, [0, 1])
    given = inputs(2)
    works = [comm.all_reduce(given[comm.rank].copy(), async_op=True) for comm in comms]
    gated[0].fill_all(1)
    gated[1].fill(0, 7)
    with pytest.raises(TimeoutError, match="still pending"):
        works[0].wait(0.2)
    assert not works[1].done()
    begun = time.monotonic()
    comms[1].close()
    receipt = works[0].wait(30)
    assert time.monotonic() - begun < 10
    assert receipt.world_size == 1
    assert np.array_equal(receipt.out, given[0])
    comms[0].close()


def test_boards_that_cannot_be(cluster: Cluster, gated: list[Gated], monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside the arena, or missing: the client is cut off with the reason, nobody else is concerned."""
    for where in (1 << 61, -1):
        comms = join(cluster, [0, 1])
        given = inputs(2)

        def prepare(self: Gated, where: int = where) -> None:
            Placement.prepare(self)
            self.board, self.gated, self.missing = where, True, []

        with monkeypatch.context() as bent:
            bent.setattr(Gated, "prepare", prepare)
            with pytest.raises(Exception, match="outside the arena" if where >= 0 else "without a board"):
                comms[1].all_reduce(given[1].copy(), timeout=20)
        work = comms[0].all_reduce(given[0].copy(), async_op=True)
        gated[-1].fill_all(1)
        receipt = work.wait(30)
        assert receipt.world_size == 1
        assert np.array_equal(receipt.out, given[0])
        for comm in comms:
            comm.close()
