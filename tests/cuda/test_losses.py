"""Whoever is lost with tensors of devices under way: each is the result of the named contributors, or untouched.

And no stream is left waiting: some members let a stream wait for the result, with a kernel behind it that reads.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import wancoll
from tests.client.tools import until
from tests.cuda.test_order import array
from tests.faults.support import (
    PEERS,
    Background,
    attempt,
    close_all,
    cluster_fixture,
    contribution,
    join,
    new_group,
    repair,
    total,
)
from wancoll.chaos import Cluster, in_threads
from wancoll.errors import OutcomeUnknown, PeerDaemonLost, TimeoutError

COUNT = 1 << 18
MOMENTS = ("", "on_post", "mid_op", "before_done", "after_done", "before_commit", "after_commit")  # "": at random


cluster = cluster_fixture(PEERS, after="standin", peer_args=["--master-grace=20"])


def call(comm: Any, x: Any, waits: bool) -> tuple[Any, Any]:
    """The outcome of a sum in place, and what a kernel saw whose stream waited for it."""
    seen: list[Any] = []

    def run() -> Any:
        work = comm.all_reduce(x, async_op=True)
        if waits:
            work.wait_stream(x.stream, timeout=25)
            seen.append(x.snapshot())
        return work.wait(25)

    return attempt(run), seen[0] if seen else None


def check(k: int, x: Any, outcome: Any, snapshot: Any) -> None:
    wanted = np.float32(10**k if outcome.receipt is None else total(outcome.receipt.contributors))
    assert (x.get() == wanted).all(), (k, outcome, x.get()[:3])
    if snapshot is not None:
        assert (x.seen(snapshot) == wanted).all(), (k, outcome)


def lose_a_daemon(cluster: Cluster, gpu: Any, rng: random.Random) -> None:
    repair(cluster)
    comms = join(cluster, range(PEERS))
    styles = [rng.choice(("interface", "dlpack", "legacy")) for _ in range(PEERS)]
    tensors = [array(gpu, contribution(k, COUNT), style, device=k % 2) for k, style in enumerate(styles)]
    # Two members of one process that share a stream: who lets it wait holds up the other one's input.
    shared = [style == "legacy" and styles[(k + 2) % PEERS] == "legacy" for k, style in enumerate(styles)]
    waiting = [rng.random() < 0.5 and not shared[k] for k in range(PEERS)]
    victim, moment = rng.randrange(PEERS), rng.choice(MOMENTS)
    if moment:
        cluster.failpoint(victim, moment, "kill")
    running = Background(lambda k: call(comms[k], tensors[k], waiting[k]), PEERS)
    if not moment:
        time.sleep(rng.uniform(0, 0.1))  # the random moment is the test
        cluster.kill(victim)
    for k, (outcome, snapshot) in enumerate(running.results()):
        if outcome.receipt is None:
            assert k == victim, (k, outcome.error)
            assert isinstance(outcome.error, OutcomeUnknown | PeerDaemonLost), outcome.error
        check(k, tensors[k], outcome, snapshot)
    receipts = [outcome.receipt for outcome, _ in running.results() if outcome.receipt is not None]
    assert len({receipt.contributors for receipt in receipts}) == 1
    if isinstance(running.results()[victim][0].error, PeerDaemonLost):  # it died before the call: nothing was sent
        assert f"m{victim}" not in receipts[0].contributors
    assert gpu.waiting() == 0
    assert cluster.wait(victim) == -signal.SIGKILL  # after_commit may come after all receipts
    close_all(comms)


@pytest.mark.parametrize("kill", range(2))
def test_a_daemon_is_killed(cluster: Cluster, gpu: Any, seed: int, kill: int) -> None:
    lose_a_daemon(cluster, gpu, random.Random(2 * seed + kill))


@pytest.mark.check
@pytest.mark.parametrize("seed", [0], indirect=True)
@pytest.mark.parametrize("moment", MOMENTS[1:])
def test_a_daemon_is_killed_there(
    cluster: Cluster, gpu: Any, seed: int, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.cuda.test_losses.MOMENTS", (moment,))
    lose_a_daemon(cluster, gpu, random.Random(moment))


def test_the_master_is_killed_and_comes_back(cluster: Cluster, gpu: Any) -> None:
    """The stream of one waits no longer than it said; in the end everybody has the sum of all."""
    repair(cluster)
    comms = join(cluster, range(PEERS))
    tensors = [array(gpu, contribution(k, COUNT), device=k % 2) for k in range(PEERS)]
    impatient = array(gpu, contribution(0, COUNT), device=1)
    others = [array(gpu, contribution(k, COUNT)) for k in range(1, PEERS)]
    cluster.kill_master()
    running = Background(lambda k: call(comms[k], tensors[k], k != 1), PEERS)
    until(lambda: len(comms[0].pending) == 1 or running.finished[0])
    work = comms[0].all_reduce(impatient, async_op=True)
    work.wait_stream(timeout=0.1)
    late = impatient.snapshot()
    assert (impatient.seen(late) == 1).all()
    cluster.start_master()
    all_have_the_sum(running, tensors)
    in_threads(lambda k: comms[k + 1].all_reduce(others[k], timeout=20), PEERS - 1)
    with pytest.raises(TimeoutError, match="kernels read the old bytes"):
        work.wait(20)
    assert work.wait(20).world_size == PEERS
    assert (impatient.get() == np.float32(1111)).all()
    assert gpu.waiting() == 0
    close_all(comms)


@pytest.fixture(scope="module")
def asking(standin: Any) -> Iterator[Cluster]:
    """Daemons whose master commits."""
    with Cluster(PEERS, fork=True, master_args=["--voters=0"]) as cluster:
        yield cluster


@pytest.mark.check
@pytest.mark.parametrize("moment", ["before_commit", "half_commit"])
def test_the_master_is_killed_while_it_commits(asking: Cluster, gpu: Any, moment: str) -> None:
    comms = join(asking, range(PEERS))
    tensors = [array(gpu, contribution(k, COUNT), device=k % 2) for k in range(PEERS)]
    asking.master_failpoint(moment, "kill")
    running = Background(lambda k: call(comms[k], tensors[k], k != 1), PEERS)
    until(lambda: not asking.master_running())
    asking.start_master()
    all_have_the_sum(running, tensors)
    assert gpu.waiting() == 0
    close_all(comms)


def all_have_the_sum(running: Background, tensors: list[Any]) -> None:
    for k, (outcome, snapshot) in enumerate(running.results()):
        assert outcome.receipt is not None, outcome.error
        assert len(outcome.receipt.contributors) == PEERS
        check(k, tensors[k], outcome, snapshot)


def test_a_member_is_interrupted(cluster: Cluster, gpu: Any) -> None:
    """Ctrl-C while one waits for who has not called: the tensor is whole, the stream waits on, and so does the call."""
    repair(cluster)
    comms = join(cluster, range(PEERS))
    tensors = [array(gpu, contribution(k, COUNT), "dlpack", device=k % 2) for k in range(PEERS)]
    work = comms[0].all_reduce(tensors[0], async_op=True)
    early = tensors[0].get()
    assert (early == 1).all()
    work.wait_stream(tensors[0].stream)
    late = tensors[0].snapshot()
    timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))

    def interrupted() -> None:
        timer.start()
        work.wait(20)

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    timer.join()
    until(lambda: gpu.waiting() == 1)
    in_threads(lambda k: comms[k + 1].all_reduce(tensors[k + 1], timeout=20), PEERS - 1)
    for k in range(PEERS):
        assert (tensors[k].get() == np.float32(1111)).all()
    assert (tensors[0].seen(late) == np.float32(1111)).all()
    assert work.wait(60).world_size == PEERS
    close_all(comms)


def a_client_with_a_device(socket: str, library: str, group: str) -> Iterator[str]:
    from tests.cuda.gpu import Gpu

    gpu = Gpu(Path(library))
    comm = wancoll.connect(socket=socket, group=group, name="m3", start_world=PEERS, timeout=30)
    x = array(gpu, contribution(3, COUNT))
    work = comm.all_reduce(x, async_op=True)
    work.wait_stream()
    yield "posted"
    work.wait()


@pytest.mark.check
def test_a_client_is_killed(cluster: Cluster, gpu: Any, standin: Any) -> None:
    repair(cluster)
    group = new_group()
    client = cluster.client(3, a_client_with_a_device, standin.lib._name, group)
    comms = in_threads(
        lambda k: cluster.connect(k, group=group, name=f"m{k}", start_world=PEERS, min_world=1), PEERS - 1, 60
    )
    assert client.next() == "posted"
    tensors = [array(gpu, contribution(k, COUNT), device=k % 2) for k in range(PEERS - 1)]
    running = Background(lambda k: call(comms[k], tensors[k], waits=True), PEERS - 2)
    client.kill()
    last = call(comms[2], tensors[2], waits=False)
    for k, (outcome, snapshot) in enumerate([*running.results(), last]):
        assert outcome.receipt is not None, outcome.error
        check(k, tensors[k], outcome, snapshot)
        assert len(outcome.receipt.contributors) == PEERS - 1
    close_all(comms)
