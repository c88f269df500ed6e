"""Inputs that are still being filled when the call is posted: client, daemon and master."""

from __future__ import annotations

import os
import random
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.faults.support import Background, attempt, close_all, cluster_fixture, new_group, ranked, wait_until
from tests.later import later
from wancoll._native import ffi
from wancoll.chaos import Cluster
from wancoll.client import communicator
from wancoll.client.memory.arena import Lease
from wancoll.client.memory.placement import Placement
from wancoll.errors import Evicted
from wancoll.limits import BLOCK

WORLD = 3
COUNT = 300_001  # 19 blocks, the last one short


def memory(lease: Any) -> Any:
    return np.frombuffer(ffi.buffer(ffi.cast("char *", lease.block.address), lease.block.nbytes), np.uint8)


class LateInput(Placement):
    """Posts before its input is there; fill() brings it, block by block."""

    made: list[LateInput]
    lease: Lease
    whole: Any  # the input's bytes
    missing: list[int]

    def prepare(self, deadline: float | None = None) -> None:
        super().prepare(deadline)
        self.missing = []
        if self.sources:
            given = sum(each.nbytes for each in self.sources)
            input_buffer = memory(self._input_buffer)[:given]
            self.whole = input_buffer.copy()
            input_buffer[:] = 0xA7
            self.missing = list(range(-(-given // BLOCK)))
            self.lease = self._arena.take(len(self.missing))
            memory(self.lease)[: len(self.missing)] = 0
            self.filled = self.lease.block.offset
        self.made.append(self)

    def fill(self, *blocks: int) -> None:
        for block in blocks:
            part = slice(block * BLOCK, min((block + 1) * BLOCK, len(self.whole)))
            memory(self._input_buffer)[part] = self.whole[part]
            memory(self.lease)[block] = 1
            self.missing.remove(block)
        self.ring()

    def ring(self) -> None:
        os.eventfd_write(self._arena.bell, 1)

    def fill_all(self, seed: int) -> None:
        """All that is missing, a few blocks at a time, in any order."""
        draw = random.Random(seed)
        while self.missing:
            self.fill(*draw.sample(self.missing, min(len(self.missing), draw.randint(1, 4))))


SOON = ["--slow-after=0.3"]
cluster = cluster_fixture(WORLD, whole=True, master_args=SOON, peer_args=SOON)


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> list[LateInput]:
    """All that is posted from here on, in the order of the calls."""
    LateInput.made = []
    monkeypatch.setattr(communicator, "Placement", LateInput)
    return LateInput.made


def inputs(world: int, count: int = COUNT) -> list[Any]:
    return [np.random.default_rng(rank).integers(-999, 999, count).astype(np.float32) for rank in range(world)]


def fed(made: list[LateInput]) -> None:
    for seed, one in enumerate(made):
        one.fill_all(seed)


def start(comms: list[Any], given: list[Any]) -> list[Any]:
    return [comm.all_reduce(given[comm.rank].copy(), async_op=True) for comm in comms]


def test_values(cluster: Cluster, late: list[LateInput]) -> None:
    """Of every collective that reads the input, and of send, in and out of place, fed late."""
    comms = ranked(cluster, [0, 1, 2])
    given = inputs(WORLD, 3 * 100_000)
    total = given[0] + given[1] + given[2]

    def check(call: Any, wanted: list[Any]) -> None:
        late.clear()
        works = [call(comm, given[comm.rank].copy()) for comm in comms[: len(wanted)]]
        assert [one.filled >= 0 for one in late] == [bool(one.sources) for one in late]
        fed(late)
        for rank, work in enumerate(works):
            found, right = work.wait(30).out, wanted[rank]
            assert right is None or np.array_equal(found.ravel(), right), rank

    thirds = [total.reshape(3, -1)[rank] for rank in range(WORLD)]
    for algorithm in ("ring", "direct", "tree", "double_tree", "naive"):
        check(lambda comm, x, how=algorithm: comm.all_reduce(x, algorithm=how, async_op=True), [total] * WORLD)
    check(lambda comm, x: comm.all_reduce(x, np.empty_like(x), async_op=True), [total] * WORLD)
    check(lambda comm, x: comm.reduce_scatter(x, async_op=True), thirds)
    check(lambda comm, x: comm.all_gather(x, async_op=True), [np.concatenate(given)] * WORLD)
    check(lambda comm, x: comm.broadcast(x, 1, async_op=True), [given[1]] * WORLD)
    check(lambda comm, x: comm.reduce(x, root=2, async_op=True), [None, None, total])
    swapped = [np.concatenate([one.reshape(3, -1)[rank] for one in given]) for rank in range(WORLD)]
    check(lambda comm, x: comm.all_to_all(x, async_op=True), swapped)

    def pass_on(comm: Any, x: Any) -> Any:
        return comm.recv(x, 0, async_op=True) if comm.rank else comm.send(x, 1, async_op=True)

    check(pass_on, [None, given[0]])
    close_all(comms)


@pytest.mark.parametrize("seed", [0, *later(1, 2)])
def test_a_loss_while_the_input_is_half_filled(cluster: Cluster, late: list[LateInput], seed: int) -> None:
    """A client dies before it has filled its input: that is a leave. The others' retry waits for the same inputs."""
    draw = random.Random(seed)
    comms = ranked(cluster, [0, 1, 2])
    given = inputs(WORLD)
    tensors = [one.copy() for one in given]
    works = [comm.all_reduce(tensors[comm.rank], async_op=True) for comm in comms]
    for one in late:
        one.fill(*draw.sample(one.missing, draw.randint(1, len(one.missing) - 1)))
    for comm in comms:  # before that there is no attempt that could be lost
        wait_until(lambda name=comm.name: stages(cluster, name) == ["input"], 20, "the engine waits for its input")
    lost = draw.randrange(WORLD)
    comms[lost]._connection._channel.socket.shutdown(socket.SHUT_RDWR)  # no goodbye
    rest = [rank for rank in range(WORLD) if rank != lost]
    wait_until(lambda: all(_world(comms[rank]) == 2 for rank in rest), 30, "the loss is known")
    assert all(np.array_equal(tensors[rank], given[rank]) for rank in range(WORLD))  # untouched until the commit
    feeder = threading.Thread(target=fed, args=([late[rank] for rank in rest],))
    feeder.start()
    for rank in rest:
        receipt = works[rank].wait(30)
        assert receipt.attempts >= 2  # one more where the links are found broken before the loss
        assert receipt.world_size == 2
        assert np.array_equal(receipt.out, given[rest[0]] + given[rest[1]])
    feeder.join()
    # The daemon of the one that died has let go of its memory, and takes others.
    again = ranked(cluster, [0, 1, 2])
    works = [comm.all_reduce(np.ones(5, np.float32), async_op=True) for comm in again]
    fed(late[-3:])
    assert all(work.wait(30).out.tolist() == [3] * 5 for work in works)
    close_all([*comms, *again])


def stages(cluster: Cluster, name: str) -> list[str]:
    """What the operations of the member are at, by its daemon."""
    members = [one for i in range(WORLD) for one in cluster.peer_status(i)["members"] if one["name"] == name]
    return [op["stage"] for op in members[0]["waits"]["operations"]]


def _world(comm: Any) -> int:
    comm._connection._step(None, 0)
    return int(comm.world_size)


def test_who_is_waited_for(cluster: Cluster, late: list[LateInput]) -> None:
    """The client whose input is missing, by name: in status, in its daemon's, in timeouts; no link, and nobody else."""
    comms = ranked(cluster, [0, 1, 2])
    given = inputs(WORLD)
    slow = comms[1].name
    before = comms[0].epoch
    works = start(comms, given)
    for rank in (0, 2):
        late[rank].fill_all(rank)
    late[1].fill(3, 0, 7)

    def causes() -> set[tuple[str, str]]:
        found = [group for group in cluster.status().groups if group.name == comms[0]._connection.group]
        return {(cause.member, cause.why) for wait in found[0].waits for cause in wait.causes}

    wait_until(lambda: causes() == {(slow, "its client has not filled its input")}, 20, "the master says who")

    wait_until(lambda: stages(cluster, slow) == ["input"], 20, "its daemon says so")
    for rank in range(WORLD):
        wait_until(lambda rank=rank: "has not filled its input" in _timeout(works[rank]), 20, "timeouts say who")
        assert f"waits for {slow} (rank 1)" in _timeout(works[rank])
    late[1].fill_all(1)
    for work in works:
        receipt = work.wait(30)
        assert np.array_equal(receipt.out, sum(given))
        assert receipt.attempts == 1
    assert comms[0].epoch == before
    close_all(comms)


def _timeout(work: Any) -> str:
    with pytest.raises(TimeoutError, match="still pending") as caught:
        work.wait(0.05)
    return str(caught.value)


def test_the_call_timeout_is_the_slow_clients(cluster: Cluster, late: list[LateInput]) -> None:
    # Longer than a machine stands still while the others fill theirs.
    comms = ranked(cluster, [0, 1, 2], call_timeout=2.5)
    given = inputs(WORLD)
    works = start(comms, given)
    for rank in (0, 1):
        late[rank].fill_all(rank)
    late[2].fill(1)
    with pytest.raises(Evicted, match=r"it has not filled its input \(call_timeout\)"):
        works[2].wait(30)
    for rank in (0, 1):
        receipt = works[rank].wait(30)
        assert np.array_equal(receipt.out, given[0] + given[1])
    close_all(comms)


def test_a_timeout_and_a_close_while_the_input_is_half_filled(cluster: Cluster, late: list[LateInput]) -> None:
    comms = ranked(cluster, [0, 1])
    given = inputs(2)
    works = start(comms, given)
    late[0].fill_all(1)
    late[1].fill(0, 7)
    with pytest.raises(TimeoutError, match="still pending"):
        works[0].wait(0.2)
    assert not works[1].done()
    comms[1].close()
    receipt = works[0].wait(20)
    assert receipt.world_size == 1
    assert np.array_equal(receipt.out, given[0])
    comms[0].close()


def shut(socket_path: str, group: str) -> Iterator[str]:
    """A client that posts, and never fills its input."""
    import wancoll

    LateInput.made = []
    communicator.Placement = LateInput  # type: ignore[misc]
    comm = wancoll.connect(socket=socket_path, group=group, start_world=2)
    work = comm.all_reduce(np.ones(COUNT, np.float32), async_op=True)
    LateInput.made[0].fill(0)
    yield comm.name
    work.wait()


@pytest.mark.parametrize("how", [signal.SIGKILL, *later(signal.SIGSTOP)])
def test_a_process_that_is_killed_or_stopped_with_its_input_missing(cluster: Cluster, how: signal.Signals) -> None:
    """It is lost like any other; the other's operation is committed without it."""
    group, x = new_group(), np.full(COUNT, 5, np.float32)
    client = cluster.client(1, shut, group)
    comm = cluster.connect(0, group=group, start_world=2)
    running = Background(lambda _: attempt(lambda: comm.all_reduce(x, timeout=30)), 1)
    client.next(20)
    client.signal(how)
    [outcome] = running.results()
    assert outcome.receipt is not None, outcome.error
    assert outcome.receipt.contributors == (comm.name,)
    assert (x == 5).all()
    kinds = [event.kind for event in cluster.status().events if event.group == group]
    assert ("client died" if how == signal.SIGKILL else "evicted") in kinds, kinds
    client.kill()
    comm.close()


def test_tables_that_cannot_be(cluster: Cluster, late: list[LateInput], monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside the arena, over what is read or written, not aligned: the client is cut off with the reason, alone."""

    def over(region: str) -> Any:
        return lambda one: getattr(one, region) + 64

    honest = LateInput.prepare
    for where, says in (
        (lambda _: 1 << 61, "outside the arena"),
        (lambda one: one.filled + 1, "not aligned"),
        (over("input_buffer"), "input and filled overlap"),
        (over("result_buffer"), "result and filled overlap"),
    ):
        comms = ranked(cluster, [0, 1])
        given = inputs(2)

        def prepare(self: LateInput, deadline: float | None = None, where: Any = where) -> None:
            honest(self, deadline)
            self.filled = where(self)

        with monkeypatch.context() as bent:
            bent.setattr(LateInput, "prepare", prepare)
            with pytest.raises(Exception, match=says):
                comms[1].all_reduce(given[1].copy(), timeout=20)
        work = comms[0].all_reduce(given[0].copy(), async_op=True)
        late[-1].fill_all(1)
        receipt = work.wait(30)
        assert receipt.world_size == 1
        assert np.array_equal(receipt.out, given[0])
        close_all(comms)


@pytest.mark.parametrize("seed", [0, *later(1, 2, 3)])
def test_a_client_that_writes_what_it_likes(cluster: Cluster, late: list[LateInput], seed: int) -> None:
    """Says and unsays at random that its input is there: what is committed is the same bytes on all members.

    Its tensor alone may suffer; what the others gave is in the sum as they gave it.
    """
    draw = random.Random(seed)
    comms = ranked(cluster, [0, 1, 2])
    given = inputs(WORLD)
    works = start(comms, given)
    hostile = late[1]
    ended = threading.Event()

    def torment() -> None:
        table = memory(hostile.lease)
        while not ended.is_set():
            table[draw.randrange(len(hostile.missing))] = draw.choice((0, 1, 0x80, 0xFF))
            if draw.random() < 0.5:
                hostile.ring()

    thread = threading.Thread(target=torment)
    thread.start()
    try:
        fed([late[0], late[2]])
        receipts = [work.wait(30) for work in works]
    finally:
        ended.set()
        thread.join()
    assert len({receipt.digest for receipt in receipts}) == 1
    first = np.asarray(receipts[0].out).tobytes()
    assert all(np.asarray(receipt.out).tobytes() == first for receipt in receipts)
    # Nothing of its own was ever there, and what is there instead is -5e-15.
    assert np.abs(receipts[0].out - (given[0] + given[2])).max() < 1e-9
    again = start(comms, given)
    fed(late[-3:])
    assert all(np.array_equal(work.wait(30).out, sum(given)) for work in again)
    close_all(comms)


def test_the_engine_lets_go_of_a_bell_that_its_client_keeps(cluster: Cluster) -> None:
    def bells() -> int:
        """Bells that the daemon's workers listen to: their epolls have 1 for each."""
        found = 0
        for info in Path(f"/proc/{cluster.pid(0)}/fdinfo").iterdir():
            with suppress(FileNotFoundError):  # closed meanwhile
                lines = [line.split() for line in info.read_text().splitlines() if line.startswith("tfd:")]
                found += sum(line[line.index("data:") + 1] == "1" for line in lines)
        return found

    wait_until(lambda: bells() == 0, 10, "other tests' clients have gone")
    comm = cluster.connect(0, group=new_group())
    kept = os.dup(comm._connection.arena.bell)
    assert bells() > 0
    comm.close()
    try:
        wait_until(lambda: bells() == 0, 10, "the daemon has let go of the client's")
    finally:
        os.close(kept)
