"""Members are lost between hosts that are 40 ms apart: late aborts and churn, with values checked."""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.bench.recovery import BAR, PHASES, Bench
from tests.faults.support import (
    FAILPOINTS,
    MIB,
    PEERS,
    close_all,
    finished_but_not_committed,
    join,
    killed_at,
    new_group,
    reduce_all,
    repair,
    wait_until,
)
from tests.wan.churn import Churn
from tests.wan.network import Wan
from wancoll.chaos import Cluster

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
    finished_but_not_committed(cluster, rng.randrange(PEERS), SMALL, BOUND)


@pytest.mark.parametrize("point", ["mid_op", "after_done"])
def test_killed_at(cluster: Cluster, rng: random.Random, point: str) -> None:
    _, contributed = killed_at(cluster, point, rng.randrange(PEERS), SMALL)
    assert point != "mid_op" or contributed < PEERS


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_killed_when_the_others_had_finished_64_mib(cluster: Cluster, rng: random.Random) -> None:
    for _ in range(10):
        finished_but_not_committed(cluster, victim := rng.randrange(PEERS), LARGE, BOUND)
        cluster.restart_peer(victim)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("point", FAILPOINTS)
def test_killed_at_64_mib(cluster: Cluster, rng: random.Random, point: str) -> None:
    worlds = []
    for _ in range(10):
        worlds.append(killed_at(cluster, point, rng.randrange(PEERS), LARGE)[1])
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
