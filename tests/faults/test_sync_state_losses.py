"""sync_state while members die: who is left has the state that won or an error, and never a mixture."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import inf
from typing import Any

import numpy as np
import pytest

from tests.faults.support import Background, close_all, join, reduce_all, wait_until
from wancoll.chaos import Cluster
from wancoll.client.work import Work
from wancoll.collective import Kind
from wancoll.errors import OperationAborted, WancollError
from wancoll.sync.manifest import STRIPE

pytestmark = pytest.mark.timeout(180)

COUNT = 14  # stripes of the large tensor


@pytest.fixture(scope="module")
def group() -> Iterator[Cluster]:
    """Patient with a busy machine: who is killed shows at once, and nobody else shall be lost."""
    options = {"fork": True, "heartbeat_timeout": 15.0, "listen": "127.0.0.{i}:0", "peer_args": ["--master-grace=40"]}
    with Cluster(3, startup_timeout=60.0, **options) as cluster:
        yield cluster


@pytest.fixture
def cluster(group: Cluster) -> Cluster:
    """Three daemons, all up."""
    revive(group)
    return group


def revive(cluster: Cluster) -> None:
    """Start again who was killed."""
    for i in range(len(cluster)):
        if not cluster.running(i):
            cluster.restart_peer(i)


@dataclass
class Outcome:
    """What a member's sync came to."""

    receipt: Any = None
    error: WancollError | None = None


def state(value: int, comm: Any = None) -> dict[str, np.ndarray]:
    large = np.empty(COUNT * STRIPE, np.uint8) if comm is None else comm.empty(COUNT * STRIPE, np.uint8)
    large[...] = value
    large[:: 1 << 12] = np.arange(len(large) >> 12) % 251
    return {"large": large, **{f"small {i}": np.full(1000 + i, value, np.int16) for i in range(20)}}


def same(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    return all((one[key] == other[key]).all() for key in other)


class Held:
    """A member's transfers: it posts *most* of them, and no more until it may go on.

    So a sync cannot be over before it is broken into. With *most* = inf they are only noted.
    """

    def __init__(self, comm: Any, most: float) -> None:
        self.most = most
        self.made: list[Work] = []
        self.reached, self.goes_on = threading.Event(), threading.Event()
        post = comm._connection.post

        def held(work: Work, *deadline: Any) -> None:
            if work.descriptor.kind in (Kind.send, Kind.recv):
                if len(self.made) == most:
                    self.reached.set()
                    assert self.goes_on.wait(60)
                self.made.append(work)
            post(work, *deadline)

        comm._connection.post = held


class Sync:
    """A sync of a new group, running in threads: member k has values[k] and revision revisions[k].

    Args:
        cluster: where.
        peers: of the members.
        values: that their states are made of.
        revisions: of these.
        held: after how many transfers which members stop.
        spoil: number of a member that gets one stripe wrong.
        options: of sync_state; one that is a list has a value for each member.
    """

    def __init__(
        self,
        cluster: Cluster,
        peers: list[int],
        values: list[int],
        revisions: list[int],
        held: Mapping[int, float],
        *,
        spoil: int = -1,
        **options: Any,
    ) -> None:
        self.comms = join(cluster, peers)
        self.peers, self.values = peers, values
        # The first one's arrays lie outside the arena, those of the others in it.
        self.states = [
            state(value, comm if k else None) for k, (value, comm) in enumerate(zip(values, self.comms, strict=True))
        ]
        if spoil >= 0:
            self.states[spoil]["large"][5] ^= 1  # one stripe differs
        self.held = {k: Held(self.comms[k], most) for k, most in held.items()}
        self.running = Background(lambda k: self._call(k, revisions[k], options), len(peers))
        for one in self.held.values():
            assert one.most == inf or one.reached.wait(60), self.running.results(1)

    def _call(self, k: int, revision: int, options: dict[str, Any]) -> Outcome:
        try:
            mine = {name: value[k] if isinstance(value, list) else value for name, value in options.items()}
            return Outcome(receipt=self.comms[k].sync_state(self.states[k], revision=revision, **mine))
        except WancollError as bad:
            return Outcome(error=bad)

    def go_on(self) -> None:
        for one in self.held.values():
            one.goes_on.set()

    def outcomes(self, members: list[int]) -> list[Outcome]:
        results = self.running.results(120)
        return [results[k] for k in members]

    def all_have(self, value: int, members: list[int]) -> list[Any]:
        """Check that these members' syncs succeeded, and left the state of *value*; returns the receipts."""
        for k, outcome in zip(members, found := self.outcomes(members), strict=True):
            assert outcome.error is None, outcome.error
            assert same(self.states[k], state(value))
        return [outcome.receipt for outcome in found]

    def check_usable(self, members: list[int]) -> None:
        reduce_all([self.comms[k] for k in members], [self.peers[k] for k in members])


@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.nightly), 1])
def test_a_holder_dies_half_way(cluster: Cluster, victim: int) -> None:
    """Only what was under way is sent again, and the joiner has the holders' bytes."""
    sync = Sync(cluster, [0, 1, 2], [7, 7, 9], [5, 5, 4], {2: 8})
    cluster.kill(victim)
    sync.go_on()
    left = [k for k in range(3) if k != victim]
    first, last = sync.all_have(7, left)
    names = [sync.comms[k].name for k in left]
    total = sum(x.nbytes for x in sync.states[2].values())
    for receipt in (first, last):
        assert sorted(receipt.contributors) == names
        assert (receipt.bytes_moved, receipt.rounds, receipt.revision) == (total, 2, 5)
        assert receipt.epoch > 1
    assert last.bytes_received == total, "no stripe is received twice"
    assert last.bytes_repeated <= 7 * STRIPE, "what was under way: three a holder"
    assert last.bytes_received >= first.bytes_sent, "what who died had sent is kept"
    sync.check_usable(left)
    close_all(sync.comms)


@pytest.mark.check
def test_the_joiner_dies_half_way(cluster: Cluster) -> None:
    """The holders go on without it, unchanged."""
    sync = Sync(cluster, [0, 1, 2], [7, 7, 9], [5, 5, 4], {2: 8})
    cluster.kill(2)
    sync.go_on()
    for receipt in sync.all_have(7, [0, 1]):
        assert sorted(receipt.contributors) == ["m0", "m1"]
        assert (receipt.bytes_moved, receipt.tensors) == (0, ())
        assert receipt.bytes_sent < sync.states[2]["large"].nbytes
    sync.check_usable([0, 1])
    close_all(sync.comms)


@pytest.mark.check
@pytest.mark.parametrize("on_failure", ["retry", pytest.param("raise", marks=pytest.mark.nightly)])
def test_the_last_holder_dies_half_way(cluster: Cluster, on_failure: str) -> None:
    """Two joiners: both get the same error, and both have what they had, bit for bit."""
    sync = Sync(cluster, [0, 1, 2], [7, 8, 9], [5, 4, 3], {1: 4, 2: 4}, on_failure=on_failure)
    cluster.kill(0)
    sync.go_on()
    outcomes = sync.outcomes([1, 2])
    for k, outcome in zip((1, 2), outcomes, strict=True):
        assert isinstance(outcome.error, OperationAborted), outcome
        assert same(sync.states[k], state(sync.values[k])), "untouched"
    if on_failure == "retry":
        assert str(outcomes[0].error) == str(outcomes[1].error)
        assert "nobody is left who could send" in str(outcomes[0].error)
    sync.check_usable([1, 2])
    again = Background(lambda k: sync.comms[k].sync_state(sync.states[k], revision=5 - k), [1, 2]).results(60)
    assert same(sync.states[2], state(8)), "those who are left elect anew"
    assert {receipt.revision for receipt in again} == {4}
    close_all(sync.comms)


@pytest.mark.check
def test_who_overwrites_is_told_what_a_failure_leaves(cluster: Cluster) -> None:
    """The last holder dies: one member has what it had, the other a mixture, which the next call makes good."""
    sync = Sync(cluster, [0, 1, 2], [7, 8, 9], [5, 4, 6], {1: 4, 2: 4}, strategy=["majority", "majority", "overwrite"])
    cluster.kill(0)
    sync.go_on()
    kept, torn = (outcome.error for outcome in sync.outcomes([1, 2]))
    assert isinstance(kept, OperationAborted)
    assert same(sync.states[1], state(8))
    assert isinstance(torn, OperationAborted)
    assert "hold a part of another state: call sync_state again" in str(torn)
    assert not same(sync.states[2], state(9))
    assert "call sync_state again" not in str(kept).partition("; ")[0]
    call = [{"revision": 4}, {"revision": 9, "strategy": "overwrite"}]
    Background(lambda k: sync.comms[k].sync_state(sync.states[k], **call[k - 1]), [1, 2]).results(60)
    assert same(sync.states[2], state(8))
    close_all(sync.comms)


@pytest.mark.nightly
def test_who_has_received_a_stripe_passes_it_on(cluster: Cluster) -> None:
    """The only member that has all of the state dies; one that lacked a single stripe has got it by then."""
    sync = Sync(cluster, [0, 1, 2], [7, 7, 9], [5, 4, 3], {1: inf, 2: 11}, spoil=1)
    wait_until(
        lambda: any(work.descriptor.kind is Kind.recv and work.finished for work in sync.held[1].made), 30, "its stripe"
    )
    cluster.kill(0)
    sync.go_on()
    for receipt in sync.all_have(7, [1, 2]):
        assert receipt.holders == ("m0",)
        assert sorted(receipt.contributors) == ["m1", "m2"]
    close_all(sync.comms)


@pytest.mark.check
def test_the_master_is_started_again_half_way(cluster: Cluster) -> None:
    """Nobody is lost, and the sync ends as if nothing had been."""
    sync = Sync(cluster, [0, 1, 2], [7, 7, 9], [5, 5, 4], {2: 8})
    cluster.kill_master()
    cluster.start_master()
    sync.go_on()
    assert [len(receipt.contributors) for receipt in sync.all_have(7, [0, 1, 2])] == [3] * 3
    close_all(sync.comms)
