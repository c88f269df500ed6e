"""Links between ranks that are no ring neighbours: raised when an op needs them, routed around where they cannot be."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.faults.support import (
    PEERS,
    Background,
    WancollError,
    attempt,
    check_agreed,
    close_all,
    contribution,
    in_threads,
    join,
    members_fixture,
    reduce_all,
)
from wancoll.chaos import Cluster
from wancoll.errors import CollectiveMismatch

LINK_TIMEOUT = 2.0  # a machine that stands still for a second is no link's fault


@pytest.fixture(scope="module")
def impatient() -> Iterator[Cluster]:
    """A cluster whose links count as unreachable soon."""
    with Cluster(PEERS, fork=True, peer_args=[f"--link-timeout={LINK_TIMEOUT}"]) as cluster:
        yield cluster


comms = members_fixture(PEERS, "impatient")


def opposite(comms: list[Any]) -> tuple[int, int]:
    """Two peers whose members are no ring neighbours."""
    order = [int(name.removeprefix("m")) for name in comms[0].members]
    return order[0], order[2]


def direct(comms: list[Any], tensors: list[Any]) -> list[Any]:
    def call(k: int) -> Any:
        return attempt(lambda: comms[k].all_reduce(tensors[k], op="sum", algorithm="direct"))

    return in_threads(call, len(comms), 30)


def test_a_pair_that_cannot_meet_is_routed_around_and_nobody_is_evicted(impatient: Cluster, comms: list[Any]) -> None:
    i, j = opposite(comms)
    impatient.cut(i, j)
    try:
        tensors = [contribution(k, 1000) for k in range(PEERS)]
        outcomes = direct(comms, tensors)
        assert len(check_agreed(outcomes, tensors)) == PEERS
        assert {outcome.receipt.algorithm for outcome in outcomes} == {"ring"}
        assert outcomes[0].receipt.epoch == comms[0].epoch > 1
        again = direct(comms, [contribution(k, 1000) for k in range(PEERS)])
        assert {outcome.receipt.attempts for outcome in again} == {1}, "the plan remembers"
    finally:
        impatient.heal(i, j)


def test_who_comes_late_is_waited_for_and_no_link_is_blamed(impatient: Cluster) -> None:
    """Each in turn, in four groups at once."""
    groups = [join(impatient, range(PEERS)) for _ in range(PEERS)]
    epochs = [comms[0].epoch for comms in groups]
    tensors = [[contribution(k, 1000) for k in range(PEERS)] for _ in groups]

    def member(place: int) -> Any:
        late, k = divmod(place, PEERS)
        if k == late:
            time.sleep(2.0 * LINK_TIMEOUT)  # longer than a link may take
        return attempt(lambda: groups[late][k].all_reduce(tensors[late][k], op="sum", algorithm="direct"))

    found = in_threads(member, PEERS * PEERS, 40)
    for late, comms in enumerate(groups):
        outcomes = found[late * PEERS : (late + 1) * PEERS]
        check_agreed(outcomes, tensors[late])
        assert {(outcome.receipt.epoch, outcome.receipt.attempts) for outcome in outcomes} == {(epochs[late], 1)}
        close_all(comms)


def test_a_link_cut_in_the_middle_is_redialled(impatient: Cluster, comms: list[Any]) -> None:
    direct(comms, [contribution(k, 1000) for k in range(PEERS)])  # all links are up
    i, j = opposite(comms)
    tensors = [contribution(k, 4_000_000) for k in range(PEERS)]
    running = Background(
        lambda k: attempt(lambda: comms[k].all_reduce(tensors[k], op="sum", algorithm="direct")), PEERS
    )
    impatient.cut(i, j)
    impatient.heal(i, j)
    outcomes = running.results()
    assert len(check_agreed(outcomes, tensors)) == PEERS
    idle = comms[0].epoch
    impatient.cut(i, j)  # nothing uses it now
    impatient.heal(i, j)
    reduce_all(comms, range(PEERS))
    outcomes = direct(comms, [contribution(k, 1000) for k in range(PEERS)])
    assert {(outcome.receipt.epoch, outcome.receipt.attempts) for outcome in outcomes} == {(idle, 1)}


@pytest.mark.parametrize("odd", range(PEERS))
def test_different_algorithms_are_a_mismatch_and_no_hang(comms: list[Any], odd: int) -> None:
    """The odd one needs links that the others' op never raises."""

    def member(k: int) -> WancollError:
        algorithm = "direct" if k == odd else "ring"
        with pytest.raises(CollectiveMismatch) as caught:
            comms[k].all_reduce(np.ones(10, np.float32), algorithm=algorithm, timeout=20)
        return caught.value

    for error in in_threads(member, PEERS, 30):
        assert isinstance(error, CollectiveMismatch)
        assert "algorithm=direct" in error.calls[f"m{odd}"]
    reduce_all(comms, range(PEERS))
