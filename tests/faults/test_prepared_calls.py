"""Calls that are repeated, which engines start and commit by themselves, while daemons, clients and masters fail."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket as socket_module
import threading
import time
from typing import Any

import numpy as np
import pytest

from tests.faults.support import BUSY, PEERS, close_all, contribution, join, members_fixture, total, wait_until
from wancoll.chaos import ClientProcess, Cluster, in_threads
from wancoll.client import connection
from wancoll.collective import Receipt
from wancoll.errors import WancollError

pytestmark = pytest.mark.skipif(os.environ.get("WANCOLL_VOTERS") == "0", reason="only where members commit")

COUNT = 1024
comms = members_fixture(PEERS)


def repeat(comm: Any, tensor: np.ndarray, until: threading.Event, count: int = COUNT) -> list[Receipt | WancollError]:
    """Make one call again and again, until the event or an error; each sum is checked."""
    found: list[Receipt | WancollError] = []
    result = np.empty(count, np.float32)
    while not until.is_set():
        try:
            receipt = comm.all_reduce(tensor, out=result)
        except WancollError as bad:
            found.append(bad)
            return found
        assert (result == total(receipt.contributors)).all(), receipt
        found.append(receipt)
    return found


def by_seq(receipts: list[Receipt | WancollError]) -> dict[int, tuple[str, tuple[str, ...]]]:
    return {one.seq: (one.digest, one.contributors) for one in receipts if isinstance(one, Receipt)}


def check_alike(outcomes: list[list[Receipt | WancollError]]) -> None:
    """Check that all who have a result of an operation have the same one."""
    known: dict[int, tuple[str, tuple[str, ...]]] = {}
    for receipts in outcomes:
        for seq, what in by_seq(receipts).items():
            assert known.setdefault(seq, what) == what


def share_by_engine(receipts: list[Receipt | WancollError]) -> float:
    made = [one for one in receipts if isinstance(one, Receipt)]
    return sum(one.by_engine for one in made) / max(1, len(made))


@pytest.mark.parametrize("count", [1, COUNT, 1 << 18])
def test_repeated_calls_are_the_engines(comms: list[Any], count: int) -> None:
    tensors = [contribution(k, count) for k in range(PEERS)]

    def calls(k: int) -> list[Receipt]:
        result = np.empty(count, np.float32)
        found = []
        for number in range(200):
            found.append(comms[k].all_reduce(tensors[k] if number % 3 else -tensors[k], out=result))
            assert (result == (1111 if number % 3 else -1111)).all()
        return found

    outcomes = in_threads(calls, PEERS, 60)
    assert len({tuple((one.seq, one.digest, one.contributors, one.epoch) for one in found) for found in outcomes}) == 1
    for found in outcomes:
        assert not found[0].by_engine
        assert sum(one.by_engine for one in found) > 15
        assert {(one.attempts, one.algorithm, one.bytes_sent) for one in found[:1]} == {
            (one.attempts, one.algorithm, one.bytes_sent) for one in found
        }


def test_kinds_and_shapes_in_turns_with_many_in_flight(comms: list[Any]) -> None:
    """Prepared calls and others in one order; more of them than the ring has slots."""

    def calls(k: int) -> tuple[int, int]:
        comm, mine, engine = comms[k], 0, 0
        for turn in range(6):
            works = []
            for number in range(100):
                value = 1.0 + number + 1000 * turn + k
                match number % 5:
                    case 0 if number % 25 == 0:
                        comm.barrier()
                    case 1:
                        x = np.full(7, value, np.float64)
                        works.append((comm.all_reduce(x, op="max", async_op=True), x, value + PEERS - 1 - k))
                    case 2:
                        x = np.full(3, value, np.float32)
                        out = np.empty(3 * PEERS, np.float32)
                        works.append((comm.all_gather(x, out=out, async_op=True), out, None))
                    case _:
                        x = np.full(100, value, np.float32)
                        ranks = sum(range(PEERS))
                        works.append((comm.all_reduce(x, async_op=True), x, PEERS * (value - k) + ranks))
            for work, out, expected in works:
                receipt = work.wait(timeout=60)
                assert out is None or expected is None or (out == expected).all()
                mine, engine = mine + 1, engine + receipt.by_engine
        return mine, engine

    for mine, engine in in_threads(calls, PEERS, 120):
        assert mine == 576
        assert engine > 0


@pytest.mark.check
def test_threads_of_one_client_share_the_ring(comms: list[Any]) -> None:
    """Threads of a member call in one order, and wait side by side."""

    def calls(k: int) -> None:
        works: list[Any] = [comms[k].all_reduce(np.full(10, n + k, np.float32), async_op=True) for n in range(40)]

        def wait(first: int) -> None:
            for n in range(first, 40, 4):
                assert (works[n].wait(timeout=60).out == PEERS * n + sum(range(PEERS))).all()

        for _ in range(3):
            in_threads(wait, 4, 60)
            works = [comms[k].all_reduce(np.full(10, n + k, np.float32), async_op=True) for n in range(40)]
        in_threads(wait, 4, 60)

    in_threads(calls, PEERS, 120)


@pytest.mark.check
@pytest.mark.parametrize("count", [COUNT, 1 << 18])
def test_daemons_are_killed_amid_repeated_calls(count: int, rng: random.Random) -> None:
    with Cluster(PEERS, fork=True) as cluster:
        for victim in (3, 2):
            made = join(cluster, range(victim + 1))
            over = threading.Event()
            killer = threading.Timer(rng.uniform(0.1, 0.5), cluster.kill, [victim])
            killer.start()
            threading.Timer(2.0, over.set).start()

            def call(k: int, made: list[Any] = made, over: threading.Event = over) -> list[Receipt | WancollError]:
                found = repeat(made[k], contribution(k, count), over, count)
                made[k].close()  # whoever stops first is out of the calls of the others
                return found

            outcomes = in_threads(call, victim + 1, 60)
            check_alike(outcomes)
            assert isinstance(outcomes[victim][-1], WancollError)
            for found in outcomes[:victim]:
                assert share_by_engine(found) > 0.5
                assert any(isinstance(one, Receipt) and f"m{victim}" not in one.contributors for one in found)


@pytest.mark.check
def test_a_client_dies_amid_repeated_calls(cluster: Cluster) -> None:
    comms = join(cluster, range(3))
    over = threading.Event()

    def member(k: int) -> list[Receipt | WancollError]:
        found = repeat(comms[k], contribution(k, COUNT), over)
        comms[k].close()
        return found

    def die(k: int) -> None:
        time.sleep(0.3)  # long enough for calls to be repeated; nothing waits for it
        comms[k]._connection._channel.shutdown()

    killer = threading.Thread(target=die, args=(2,))
    killer.start()
    threading.Timer(1.5, over.set).start()
    outcomes = in_threads(member, 3, 60)
    killer.join()
    check_alike(outcomes)
    assert isinstance(outcomes[2][-1], WancollError)
    assert any(isinstance(one, Receipt) and len(one.contributors) == 2 for one in outcomes[0])


@pytest.mark.check
def test_a_daemon_that_slept_longer_than_the_lease_commits_nothing() -> None:
    """C8: the master may have given the group to others meanwhile; engines look at the time before each commit."""
    with Cluster(2, fork=True, heartbeat_timeout=1.0, peer_args=["--master-grace=1.5"]) as cluster:
        comms = join(cluster, range(2))
        slept, late = threading.Event(), [0, 0]

        def member(k: int) -> Any:
            result, tensor = np.empty(COUNT, np.float32), contribution(k, COUNT)
            engine = 0
            while True:
                try:
                    receipt = comms[k].all_reduce(tensor, out=result)
                except WancollError as bad:
                    return bad, engine
                engine += receipt.by_engine
                late[k] += slept.is_set()

        def stop() -> None:
            time.sleep(0.5)
            for i in range(2):
                cluster.pause(i)
            time.sleep(3.2)  # longer than silence and grace together
            slept.set()
            for i in range(2):
                cluster.resume(i)

        sleeper = threading.Thread(target=stop)
        sleeper.start()
        for bad, engine in in_threads(member, 2, 60):
            assert isinstance(bad, WancollError)
            assert engine > 50
        sleeper.join()
        assert max(late) <= 1, "what had been committed before may be told now"
        close_all(comms)


@pytest.mark.check
def test_joiners_and_updates_amid_repeated_calls(cluster: Cluster) -> None:
    """An epoch ends the calls that were prepared; they are learnt anew in the next one."""
    comms = join(cluster, range(2), group="grows")
    engine = [0, 0, 0]

    def member(k: int) -> list[tuple[int, str, tuple[str, ...]]]:
        if k == 2:
            comms.append(cluster.connect(2, group="grows", name="m2", start_world=2))
        comm, found = comms[k], []
        tensor, result = contribution(k, COUNT), np.empty(COUNT, np.float32)
        deadline = time.monotonic() + 40
        while len(comm.members) < 3 and time.monotonic() < deadline:
            for _ in range(20):
                receipt = comm.all_reduce(tensor, out=result)
                assert (result == total(receipt.contributors)).all()
            comm.update_membership()
        for _ in range(50):
            receipt = comm.all_reduce(tensor, out=result)
            assert (result == 111).all()
            found.append((receipt.seq, receipt.digest, receipt.contributors))
            engine[k] += receipt.by_engine
        return found

    outcomes = in_threads(member, 3, 90)
    assert outcomes[0] == outcomes[1] == outcomes[2]
    assert min(engine) > 20
    close_all(comms)


def scribble(socket: str, group: str) -> str:
    """A client that fills its ring with what comes to its mind, and rings all the time."""
    import wancoll
    from wancoll.client.ring import SLOTS
    from wancoll.native import ffi

    comm = wancoll.connect(socket=socket, group=group, name="m1", start_world=2)
    tensor, result = np.full(COUNT, 10, np.float32), np.empty(COUNT, np.float32)
    for _ in range(20):
        comm.all_reduce(tensor, out=result)
    ring = comm._connection._channel.ring
    view, rng = memoryview(ring._map), random.Random(1)
    end = time.monotonic() + 2
    size = ffi.sizeof("wc_call")
    while time.monotonic() < end:
        at = rng.randrange(SLOTS) * size + 8 * rng.randrange(size // 8)
        value = rng.choice((rng.getrandbits(64), rng.randrange(200), (1 << 64) - 1, 0, 1 << 63))
        view[at : at + 8] = value.to_bytes(8, "little")
        with contextlib.suppress(OSError):  # full
            ring.socket.send(b"x" * 64, socket_module.MSG_DONTWAIT)
    try:
        comm.all_reduce(tensor, out=result, async_op=True).wait(timeout=2)
    except WancollError as bad:
        return type(bad).__name__
    return "went on"


@pytest.mark.check
def test_a_client_that_scribbles_over_its_ring_harms_itself_alone(cluster: Cluster) -> None:
    hostile: ClientProcess = cluster.client(1, scribble, "scribbled")
    comm = cluster.connect(0, group="scribbled", name="m0", start_world=2)
    others = join(cluster, (1, 2))  # another client of the same daemon
    over = threading.Event()
    threading.Timer(3.0, over.set).start()

    def honest(k: int) -> list[Receipt | WancollError]:
        if k:
            found = repeat(others[k - 1], contribution(k, COUNT), over)
            others[k - 1].close()
            return found
        found = []
        while not over.is_set():
            result = np.empty(COUNT, np.float32)
            try:
                receipt = comm.all_reduce(np.full(COUNT, 1, np.float32), out=result, async_op=True).wait(timeout=1)
            except WancollError as bad:
                found.append(bad)
                break
            assert (result == (11 if "m1" in receipt.contributors else 1)).all()
            found.append(receipt)
        return found

    _, one, other = in_threads(honest, 3, 60)
    hostile.result(30)
    comm.close()
    check_alike([one, other])
    assert share_by_engine(one) > 0.5
    assert len(one) > 100
    os.kill(cluster.pid(1), 0)
    wait_until(lambda: cluster.peer_status(1)["connected"], BUSY, "the daemon is well")


def interrupted(socket: str, group: str, seconds: float) -> int:
    """Call while a timer raises KeyboardInterrupt at any moment; returns how often it did."""
    import wancoll

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGALRM, interrupt)
    comm = wancoll.connect(socket=socket, group=group, name="m0", start_world=2)
    tensor, results = np.full(64, 1, np.float32), [np.empty(64, np.float32) for _ in range(4)]
    for _ in range(20):
        comm.all_reduce(tensor, out=results[0])
    rng, found = random.Random(5), 0
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-6, 4e-4))
            for result in results:
                comm.all_reduce(tensor, out=result, async_op=True)
            signal.setitimer(signal.ITIMER_REAL, 0)
        except KeyboardInterrupt:
            found += 1
        signal.setitimer(signal.ITIMER_REAL, 0)
        for work in comm._connection.pending:
            work.wait(timeout=20)
    comm.close()
    return found


@pytest.mark.check
def test_interrupts_at_any_moment_lose_no_call(cluster: Cluster) -> None:
    process: ClientProcess = cluster.client(0, interrupted, "interrupted", 3.0)
    other = cluster.connect(1, group="interrupted", name="m1", start_world=2)
    over, found = threading.Event(), list[Receipt | WancollError]()
    result = np.empty(64, np.float32)
    while not over.is_set():
        receipt = other.all_reduce(np.full(64, 1, np.float32), out=result)
        assert (result == len(receipt.contributors)).all()
        found.append(receipt)
        if len(receipt.contributors) == 1:
            over.set()
    assert process.result(30) > 100
    assert share_by_engine(found) > 0.5
    other.close()


def test_a_thread_that_waits_does_not_hold_up_one_that_calls(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that waits reads for both."""
    monkeypatch.setattr(connection, "_READ_SECONDS", 60.0)
    monkeypatch.setattr(connection, "_FOLLOW_SECONDS", 60.0)
    comms = join(cluster, range(2))

    def member(k: int) -> None:
        comm, x = comms[k], np.empty(4, np.float32)
        waiter = threading.Thread(target=lambda: comm.recv(x, source=comm.members.index(f"m{1 - k}")))
        waiter.start()
        for number in range(500):
            out = np.empty(16, np.float32)
            comm.all_reduce(np.full(16, number, np.float32), out=out, async_op=True).wait(timeout=30)
            assert (out == 2 * number).all()
        comm.send(np.ones(4, np.float32), dest=comm.members.index(f"m{1 - k}"))
        waiter.join(30)
        assert (x == 1).all()

    in_threads(member, 2, 60)
    close_all(comms)


@pytest.mark.check
def test_where_nothing_is_lent_calls_go_through_the_ring_all_the_same(cluster: Cluster, comms: list[Any]) -> None:
    def calls(k: int, count: int) -> list[Receipt]:
        out = np.empty(COUNT, np.float32)
        return [comms[k].all_reduce(contribution(k, COUNT), out=out) for _ in range(count)]

    in_threads(lambda k: calls(k, 100), PEERS, 60)
    for i in range(PEERS):
        cluster.failpoint(i, "on_epoch", "kill")  # no epoch comes
    found = in_threads(lambda k: calls(k, 100), PEERS, 30)  # each would wait for a heartbeat
    assert not any(receipt.by_engine for receipts in found for receipt in receipts[1:])
    for i in range(PEERS):
        cluster.failpoint(i, "on_epoch", "clear")
    assert any(
        receipt.by_engine for receipts in in_threads(lambda k: calls(k, 2000), PEERS, 60) for receipt in receipts
    )


@pytest.mark.check
def test_codecs_and_other_kinds_have_the_bits_of_their_first_call(comms: list[Any]) -> None:
    def calls(k: int) -> list[tuple[str, int]]:
        comm, x, found = comms[k], np.random.default_rng(k).normal(size=5000).astype(np.float32), []
        for codec in ("int8", "fp8", "bf16", "int4"):
            results, engine = set[tuple[bytes, str, float, int]](), 0
            for _ in range(60):
                y = np.empty_like(x)
                receipt = comm.all_reduce(x, out=y, codec=codec)
                results.add((y.tobytes(), receipt.digest, receipt.codec_error, receipt.bytes_saved))
                engine += receipt.by_engine
            assert len(results) == 1
            found.append((results.pop()[1], engine))
        engine = 0
        for number in range(60):
            gathered, share = np.empty(100 * PEERS, np.float32), np.empty(100, np.float32)
            engine += comm.all_gather(x[:100] + number, out=gathered).by_engine
            assert (gathered.reshape(PEERS, 100)[comm.rank] == x[:100] + number).all()
            all_of_it = np.arange(100 * PEERS, dtype=np.float32)
            engine += comm.reduce_scatter(all_of_it, out=share).by_engine
            assert (share == PEERS * all_of_it.reshape(PEERS, 100)[comm.rank]).all()
        return [*found, ("", engine)]

    outcomes = in_threads(calls, PEERS, 60)
    assert len({tuple(digest for digest, _ in found) for found in outcomes}) == 1
    assert all(engine > 0 for found in outcomes for _, engine in found)
