"""Members are lost between hosts that are 40 ms apart: late aborts and churn, with values checked."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.bench.recovery import BAR, PHASES, Bench
from tests.faults.support import (
    FAILPOINTS,
    MEMBERS_COMMIT,
    MIB,
    PEERS,
    all_finished,
    check_agreed,
    close_all,
    contribution,
    join,
    killed_by_failpoint,
    new_group,
    reduce_all,
    repair,
    stands_still,
    sums,
    untouched,
    wait_until,
)
from tests.wan.churn import Churn
from tests.wan.network import Wan
from wancoll.chaos import Cluster
from wancoll.errors import OutcomeUnknown

pytestmark = pytest.mark.wan

LANES = 8
BOUND = 20.0  # seconds for the survivors' commit of a small sum, on a busy machine too
SMALL, LARGE = 256 << 10, 16 * MIB  # elements: 1 MiB and 64 MiB


@contextmanager
def far_apart(*peer_args: str) -> Iterator[tuple[Wan, Cluster]]:
    """Four peers, 40 ms one way, 500 Mbit/s each, 0.1 % loss."""
    with (
        Wan(PEERS, delay=0.040, rate=500e6, loss=0.001) as wan,
        Cluster(
            PEERS, lanes=LANES, heartbeat_timeout=6.0, network=wan, peer_args=["--master-grace=20", *peer_args]
        ) as cluster,
    ):
        yield wan, cluster


@pytest.fixture(scope="module")
def shared() -> Iterator[tuple[Wan, Cluster]]:
    with far_apart() as both:
        yield both


@pytest.fixture
def cluster(shared: tuple[Wan, Cluster]) -> Cluster:
    repair(shared[1])
    return shared[1]


# ---- late aborts ------------------------------------------------------------------------------------------


def finished_but_not_committed(cluster: Cluster, victim: int, count: int) -> None:
    """The victim stops between its last byte and its Done and is killed there; all others are finished by then."""
    survivors = [k for k in range(PEERS) if k != victim]
    comms = join(cluster, range(PEERS))
    reduce_all(comms, range(PEERS))
    cluster.failpoint(victim, "before_done", "pause")
    tensors = [contribution(k, count) for k in range(PEERS)]
    running = sums(comms, tensors)
    wait_until(lambda: stands_still(cluster.pid(victim)), 30, "the victim reaches before_done")
    wait_until(lambda: all_finished(cluster, survivors), 30, "the others are done with operation 2")
    assert not any(running.finished), "somebody was told before the commit"
    assert all(untouched(tensor, k) for k, tensor in enumerate(tensors))
    cluster.kill(victim)
    killed = time.monotonic()
    outcomes = running.results(60)
    agreed = check_agreed([outcomes[k] for k in survivors], [tensors[k] for k in survivors])
    assert sorted(agreed) == [f"m{k}" for k in (range(PEERS) if MEMBERS_COMMIT else survivors)]
    assert max(outcomes[k].ended for k in survivors) - killed < BOUND
    assert isinstance(outcomes[victim].error, OutcomeUnknown)
    assert untouched(tensors[victim], victim)
    reduce_all([comms[k] for k in survivors], survivors)
    close_all(comms)


def killed_at(cluster: Cluster, point: str, victim: int, count: int) -> int:
    """The victim dies at the failpoint in the middle of an op; returns how many contributed."""
    survivors = [k for k in range(PEERS) if k != victim]
    comms = join(cluster, range(PEERS))
    reduce_all(comms, range(PEERS))
    tensors = [contribution(k, count) for k in range(PEERS)]
    first = (victim + 1) % PEERS
    if point == "on_epoch":  # of the epoch that another member's death brings
        cluster.failpoint(first, "mid_op", "kill")
        survivors.remove(first)
    cluster.failpoint(victim, point, "kill")
    running = sums(comms, tensors)
    outcomes = running.results(60)
    killed_by_failpoint(cluster, victim)
    agreed = check_agreed([outcomes[k] for k in survivors], [tensors[k] for k in survivors])
    assert {f"m{k}" for k in survivors} <= set(agreed)
    for lost in set(range(PEERS)) - set(survivors):
        if outcomes[lost].error is None:
            check_agreed([outcomes[lost], outcomes[survivors[0]]], [tensors[lost], tensors[survivors[0]]])
        else:
            assert isinstance(outcomes[lost].error, OutcomeUnknown), repr(outcomes[lost].error)
            assert untouched(tensors[lost], lost)
    if point in ("before_commit", "after_commit"):  # the victim heard of the commit, so it happened
        assert len(agreed) == PEERS
    if point in ("on_post", "mid_op") or (point == "before_done" and not MEMBERS_COMMIT):  # nobody can know that it was
        assert len(agreed) < PEERS
    reduce_all([comms[k] for k in survivors], survivors)
    close_all(comms)
    return len(agreed)


def test_a_loss_needs_no_new_links(cluster: Cluster) -> None:
    """The members two places away are linked before they are neighbours."""

    def lanes(i: int) -> int:
        return int(cluster.peer_status(i)["resources"]["lanes"])

    comms = join(cluster, range(PEERS))
    wait_until(lambda: [lanes(i) for i in range(PEERS)] == [3 * (LANES + 1)] * PEERS, 20, "links to all three others")
    [(victim, last)] = [(k, comm) for k, comm in enumerate(comms) if comm.rank == PEERS - 1]
    others = [k for k in range(PEERS) if k != victim]
    last.close()
    reduce_all([comms[k] for k in others], others)
    wait_until(
        lambda: [lanes(k) for k in others] == [2 * (LANES + 1)] * 3, 60, "the links to the one that left are closed"
    )
    close_all(comms)


def test_killed_when_the_others_had_finished(cluster: Cluster, rng: random.Random) -> None:
    finished_but_not_committed(cluster, rng.randrange(PEERS), SMALL)


@pytest.mark.parametrize("point", ["mid_op", "after_done"])
def test_killed_at(cluster: Cluster, rng: random.Random, point: str) -> None:
    killed_at(cluster, point, rng.randrange(PEERS), SMALL)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_killed_when_the_others_had_finished_64_mib(cluster: Cluster, rng: random.Random) -> None:
    for _ in range(10):
        finished_but_not_committed(cluster, victim := rng.randrange(PEERS), LARGE)
        cluster.restart_peer(victim)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("point", FAILPOINTS)
def test_killed_at_64_mib(cluster: Cluster, rng: random.Random, point: str) -> None:
    worlds = []
    for _ in range(10):
        worlds.append(killed_at(cluster, point, rng.randrange(PEERS), LARGE))
        repair(cluster)
    print(f"kills at {point}: {worlds.count(PEERS)} of {len(worlds)} committed with all members")


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_recovery_takes_at_most_a_second_beyond_a_clean_operation() -> None:
    with far_apart() as (wan, cluster):
        bench = Bench(wan.peers, cluster, 64 * MIB)
        [phase] = [phase for phase in PHASES if phase.name == "killed in the middle"]
        kills = [bench.lose_one(phase, turn % PEERS) for turn in range(5)]
    assert statistics.median(kill.extra for kill in kills) < BAR, kills


# ---- churn -----------------------------------------------------------------------------------------------


def churn(rng: random.Random, seconds: float, count: int) -> Churn:
    with far_apart() as (wan, cluster):
        work = Churn(wan, cluster, count, rng, new_group())
        work.run(seconds)
        print(
            f"{dict(work.faults)}: {len(work.committed)} sums, {len(work.failed)} calls of lost members, "
            f"the longest gap between commits {work.longest_gap:.1f} s"
        )
    return work


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_churn(rng: random.Random) -> None:
    churn(rng, 30, SMALL)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_churn_64_mib(rng: random.Random) -> None:
    churn(rng, 120, LARGE)
