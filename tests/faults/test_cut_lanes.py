"""Lanes that break between live processes: redialled, the op goes on, nobody is evicted."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest

from tests.faults.support import (
    BUSY,
    MEMBERS_COMMIT,
    MIB,
    PEERS,
    attempt,
    check_agreed,
    close_all,
    contribution,
    in_threads,
    join,
    reduce_all,
    sums,
)
from wancoll.chaos import Cluster


def ring_neighbours(comms: list[Any]) -> list[tuple[int, int]]:
    """Pairs of peers that exchange data."""
    order = [int(name.removeprefix("m")) for name in comms[0].members]
    return [(order[i], order[(i + 1) % len(order)]) for i in range(len(order))]


def cut_in_mid_op(cluster: Cluster, rng: random.Random, moment: float, held: float, world: int) -> list[int]:
    """Cut a neighbouring pair at a moment of a 48 MB op, heal it after a while; returns the op's attempts."""
    comms = join(cluster, range(world))
    tensors = [comm.empty(12 * MIB, "float32") for comm in comms]
    for k, tensor in enumerate(tensors):
        tensor[...] = 10**k
    i, j = rng.choice(ring_neighbours(comms))
    began = time.monotonic()
    check_agreed(sums(comms, tensors).results(), tensors)
    whole = time.monotonic() - began  # of one without a cut, which takes long where the machine is busy
    for k, tensor in enumerate(tensors):
        tensor[...] = 10**k
    running = sums(comms, tensors)
    time.sleep(moment)  # the moment is the test
    cluster.cut(i, j)
    time.sleep(held)
    cluster.heal(i, j)
    healed = time.monotonic()
    outcomes = running.results()
    assert len(check_agreed(outcomes, tensors)) == world, "somebody was evicted"
    assert max(outcome.ended for outcome in outcomes) - healed < max(BUSY, 6 * whole)
    reduce_all(comms, range(world))
    close_all(comms)
    return [outcome.receipt.attempts for outcome in outcomes if outcome.receipt is not None]


@pytest.mark.parametrize(("held", "world"), [(0.0, PEERS), (1.0, PEERS), (0.3, 2)])
def test_cut_lanes_are_redialled(cluster: Cluster, rng: random.Random, held: float, world: int) -> None:
    """Cut at several moments, until one comes before the commit."""
    attempts = []
    for moment in (0.02, 0.0, 0.05, 0.02, 0.0, 0.05):
        attempts.append(cut_in_mid_op(cluster, rng, moment, held, world))
        if max(attempts[-1]) > 1:
            return
    pytest.fail(f"no cut came before the commit: {attempts}")


def test_a_cut_between_ops(cluster: Cluster, comms: list[Any], rng: random.Random) -> None:
    i, j = rng.choice(ring_neighbours(comms))
    for _ in range(3):
        cluster.cut(i, j)
        cluster.heal(i, j)
        reduce_all(comms, range(PEERS))


def test_a_cut_of_a_link_that_nobody_uses_changes_nothing(cluster: Cluster, comms: list[Any]) -> None:
    """But where members commit the two cannot tell each other: from link_timeout on the master does."""
    used = {frozenset(pair) for pair in ring_neighbours(comms)}
    i, j = next((i, j) for i in range(PEERS) for j in range(i) if frozenset((i, j)) not in used)
    epoch, term = comms[0].epoch, cluster.status().term
    cluster.cut(i, j)
    outcomes = reduce_all(comms, range(PEERS), MIB, algorithm="ring")  # where lines are slow others are chosen
    cluster.heal(i, j)
    assert [outcome.receipt.attempts for outcome in outcomes if outcome.receipt] == [1] * PEERS
    after = reduce_all(comms, range(PEERS))
    if cluster.status().term == term:  # a master that stood still for long starts over, and commits by their reports
        assert [outcome.receipt.epoch for outcome in after if outcome.receipt] == [epoch + MEMBERS_COMMIT] * PEERS


@pytest.mark.check
@pytest.mark.timeout(90)
def test_a_cut_that_stays_does_not_stop_the_group(cluster: Cluster, comms: list[Any], rng: random.Random) -> None:
    """Longer than link_timeout (5 s): another ring, or a member pays for it; the op ends all the same."""
    i, j = rng.choice(ring_neighbours(comms))
    cluster.cut(i, j)
    tensors = [contribution(k, MIB) for k in range(PEERS)]
    started = time.monotonic()
    outcomes = in_threads(lambda k: attempt(lambda: comms[k].all_reduce(tensors[k], op="sum")), PEERS, 40)
    took = time.monotonic() - started
    there = [k for k in range(PEERS) if outcomes[k].error is None]
    agreed = check_agreed([outcomes[k] for k in there], [tensors[k] for k in there])
    print(f"contributors {agreed} after {took:.1f} s")
    assert len(agreed) == len(there) >= PEERS - 1
    assert took < 5.0 + BUSY
    cluster.heal(i, j)
    reduce_all([comms[k] for k in there], there)
