"""Members are lost with tensors of devices under way: each is the sum of the named contributors, or untouched."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.cuda.test_order import array
from tests.faults.support import PEERS, Background, attempt, close_all, contribution, join, repair, total
from wancoll.chaos import Cluster
from wancoll.errors import PeerDaemonLost

COUNT = 1 << 20


@pytest.fixture(scope="module")
def cluster(standin: Any) -> Iterator[Cluster]:
    with Cluster(PEERS, fork=True) as cluster:
        yield cluster


@pytest.mark.parametrize("style", ["interface", "dlpack"])
def test_a_daemon_is_killed(cluster: Cluster, gpu: Any, seed: int, style: str) -> None:
    rng = random.Random(seed)
    repair(cluster)
    comms = join(cluster, range(PEERS))
    tensors = [array(gpu, contribution(k, COUNT), style, device=k % 2) for k in range(PEERS)]
    victim = rng.randrange(PEERS)
    running = Background(lambda k: attempt(lambda: comms[k].all_reduce(tensors[k], timeout=25)), PEERS)
    time.sleep(rng.uniform(0, 0.1))  # the random moment is the test
    cluster.kill(victim)
    outcomes = running.results()
    for k, (outcome, tensor) in enumerate(zip(outcomes, tensors, strict=True)):
        got = tensor.get()
        if outcome.receipt is None:
            assert k == victim
            assert isinstance(outcome.error, PeerDaemonLost), outcome.error
            assert (got == np.float32(10**k)).all()
        else:
            assert (got == np.float32(total(outcome.receipt.contributors))).all()
    sets = {outcome.receipt.contributors for outcome in outcomes if outcome.receipt is not None}
    assert len(sets) == 1
    close_all(comms)
