"""What the fault tests share: groups on a cluster, members that contribute 10**i, and what must hold afterwards."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from wancoll.chaos import Cluster, in_threads
from wancoll.collective import Receipt
from wancoll.errors import OutcomeUnknown, PeerDaemonLost, WancollError
from wancoll.failpoints import PEER
from wancoll.limits import DEFAULT

PEERS = 4
MIB = 1 << 20
# Seconds, of the clusters that tests share. A machine that stands still for a second is nobody's fault here: a master
# that stood still for a second less than this judges nobody, and starts over (R11).
HEARTBEAT_TIMEOUT = 4.0
AT_ONCE = HEARTBEAT_TIMEOUT - 1.0  # seconds, on a busy machine: sooner than silence can tell
BUSY = 15.0  # seconds more that anything may take where the machine has other things to do
MEMBERS_COMMIT = int(os.environ.get("WANCOLL_VOTERS") or DEFAULT.voters) > 0
FAILPOINTS = tuple(point for point in PEER if point != "half_done")  # that are come to whoever commits

_groups = itertools.count(1)


@dataclass
class Outcome:
    """What one call of one member came to."""

    receipt: Receipt | None
    error: WancollError | None
    ended: float  # time.monotonic()


def links_lost(cluster: Cluster, i: int) -> int:
    """How many links a daemon has lost, by its log, and single lanes of links that go on."""
    logs = cluster.logs(i, lines=1_000_000)
    return logs.count("LinkLost") + logs.count("LaneLost")


def attempt(call: Callable[[], Receipt]) -> Outcome:
    """Make the call; its expected failures are outcomes."""
    try:
        receipt = call()
    except WancollError as bad:
        return Outcome(None, bad, time.monotonic())
    return Outcome(receipt, None, time.monotonic())


def contribution(member: int, count: int) -> np.ndarray:
    """Member i contributes 10**i in every element, so that a sum names its contributors."""
    return np.full(count, 10**member, np.float32)


def untouched(tensor: np.ndarray, member: int) -> bool:
    """Whether the member's tensor still is its contribution, bit for bit."""
    return bool((tensor == np.float32(10**member)).all())


def new_group() -> str:
    """A group name that no other test has used."""
    return f"group-{next(_groups)}"


def join(cluster: Cluster, peers: Sequence[int], *, group: str = "", min_world: int = 1) -> list[Any]:
    """Member m{i} through each peer i of *peers*; returns their communicators in that order."""
    group = group or new_group()

    def connect(i: int) -> Any:
        return cluster.connect(i, group=group, name=f"m{i}", start_world=len(peers), min_world=min_world)

    return in_threads(connect, peers, timeout=30)


def close_all(comms: Sequence[Any]) -> None:
    """Leave, whatever has become of the members."""
    for comm in comms:
        comm.close()


def cluster_fixture(peers: int, *, scope: Any = "module", whole: bool = False, after: str = "", **options: Any) -> Any:
    """A fixture: a cluster, of which no daemon may have ended at the end if it is to stay *whole*.

    after: name of a fixture that comes first.
    """

    @pytest.fixture(scope=scope)
    def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
        if after:
            request.getfixturevalue(after)
        with Cluster(peers, fork=True, **options) as made:
            yield made
            for i in range(len(made) if whole else 0):
                assert made.running(i), made.logs(i)

    return cluster


def members_fixture(world: int, cluster: str = "cluster", **options: Any) -> Any:
    """A fixture: members of a new group on the module's *cluster*, which have reduced once; they leave at the end."""

    @pytest.fixture
    def comms(request: pytest.FixtureRequest) -> Iterator[list[Any]]:
        made = join(request.getfixturevalue(cluster), range(world), **options)
        reduce_all(made, range(world))
        yield made
        close_all(made)

    return comms


def ranked(cluster: Cluster, peers: Sequence[int], *, group: str = "", **options: Any) -> list[Any]:
    """Member m{k} through peer peers[k], which may come twice; returns their communicators in rank order."""
    options |= {"group": group or new_group(), "start_world": len(peers)}
    comms = in_threads(lambda k: cluster.connect(peers[k], name=f"m{k}", **options), len(peers), 30)
    return sorted(comms, key=lambda comm: comm.rank)


@contextmanager
def joined(cluster: Cluster, world: int) -> Iterator[list[Any]]:
    """The members of a new group, in rank order; they leave at the end."""
    comms = ranked(cluster, range(world))
    try:
        yield comms
    finally:
        close_all(comms)


def total(contributors: Sequence[str]) -> int:
    """The sum of the contributions of members named m{i}."""
    return sum(10 ** int(name.removeprefix("m")) for name in contributors)


def check_agreed(outcomes: Sequence[Outcome], tensors: Sequence[np.ndarray]) -> tuple[str, ...]:
    """All these members committed one sum of one contributor set; returns the set."""
    for outcome in outcomes:
        assert outcome.error is None, repr(outcome.error) + str(outcome.error)
    receipts = [outcome.receipt for outcome in outcomes]
    first = receipts[0]
    assert first is not None
    for receipt, tensor in zip(receipts, tensors, strict=True):
        assert receipt is not None
        assert (receipt.op_id, receipt.epoch, receipt.contributors, receipt.digest) == (
            first.op_id,
            first.epoch,
            first.contributors,
            first.digest,
        )
        assert receipt.world_size == len(receipt.contributors)
        right = tensor == np.float32(total(first.contributors))
        assert right.all(), f"{np.unique(tensor)[:10]} from {first.contributors}, {right.sum()} of {tensor.size} right"
    return first.contributors


def reduce_all(comms: Sequence[Any], members: Sequence[int], count: int = 1000, **options: Any) -> list[Outcome]:
    """One in-place sum by these members; checks that it has exactly them as contributors."""
    tensors = [contribution(i, count) for i in members]

    def call(k: int) -> Outcome:
        return attempt(lambda: comms[k].all_reduce(tensors[k], op="sum", **options))

    outcomes = in_threads(call, len(comms), 30)
    assert sorted(check_agreed(outcomes, tensors)) == sorted(f"m{i}" for i in members)
    return outcomes


class Background:
    """Calls running in threads, one a member, while the test breaks something."""

    def __init__(self, fn: Callable[[int], Any], which: int | Sequence[int]) -> None:
        def call(index: int, future: Future[Any]) -> None:
            try:
                future.set_result(fn(index))
            except BaseException as bad:
                future.set_exception(bad)

        indices = range(which) if isinstance(which, int) else which
        self._futures: list[Future[Any]] = [Future() for _ in indices]
        self.started = time.monotonic()
        for index, future in zip(indices, self._futures, strict=True):
            threading.Thread(target=call, args=(index, future), daemon=True).start()

    def results(self, timeout: float = 30.0) -> list[Any]:
        """All results, in order; raises TimeoutError where one is not there in time."""
        deadline = time.monotonic() + timeout
        return [future.result(max(0.0, deadline - time.monotonic())) for future in self._futures]

    @property
    def finished(self) -> list[bool]:
        """Which calls have ended."""
        return [future.done() for future in self._futures]


@contextmanager
def until_stopped(threads: Sequence[threading.Thread], stop: threading.Event) -> Iterator[None]:
    """Threads that run meanwhile; *stop* is set in the end, and they are waited for."""
    for one in threads:
        one.start()
    try:
        yield
    finally:
        stop.set()
        for one in threads:
            one.join(30)


def sums(comms: Sequence[Any], tensors: Sequence[np.ndarray]) -> Background:
    """Each tensor's in-place sum, under way."""
    return Background(lambda k: attempt(lambda: comms[k].all_reduce(tensors[k], op="sum")), len(tensors))


class Steady:
    """All members sum again and again, each sum that of all and alike for all, until stop().

    Args:
        comms: of the members.
        beside: called after each sum with the member's number and that of the sum.
    """

    def __init__(self, comms: Sequence[Any], beside: Callable[[int, int], None] = lambda k, number: None) -> None:
        self._comms, self._beside, self._over = comms, beside, threading.Event()
        self.count = [0] * len(comms)
        self._running = Background(self._sum, len(comms))

    def _sum(self, k: int) -> list[int]:
        """A number for what each sum came to."""
        found, more = list[int](), np.ones(1, np.float32)
        while more[0]:
            tensor = contribution(k, 1000)
            outcome = attempt(lambda x=tensor: self._comms[k].all_reduce(x, op="sum"))
            agreed = check_agreed([outcome], [tensor])
            assert sorted(agreed) == [f"m{i}" for i in range(len(self._comms))], outcome
            assert outcome.receipt is not None
            found.append(hash((outcome.receipt.op_id, outcome.receipt.epoch, agreed, outcome.receipt.digest)))
            self.count[k] += 1
            self._beside(k, self.count[k])
            more[0] = k == 0 and not self._over.is_set()
            self._comms[k].all_reduce(more, op="max")
        return found

    def stop(self) -> None:
        self._over.set()
        first, *others = self._running.results(40)
        assert all(other == first for other in others)

    @property
    def failed(self) -> bool:
        """Whether somebody has ended without stop()."""
        return any(self._running.finished)


def by_master(comms: Sequence[Any], tensors: Sequence[np.ndarray]) -> Background:
    """What the master commits, under way: sums; where members commit those, the same sum, made known by m0."""
    if not MEMBERS_COMMIT:
        return sums(comms, tensors)
    first = next(k for k, comm in enumerate(comms) if comm.name == "m0")
    tensors[first][...] = total(comms[first].members)
    root = comms[first].rank
    return Background(lambda k: attempt(lambda: comms[k].broadcast(tensors[k], root=root)), len(tensors))


def check_first_attempt(outcomes: Sequence[Outcome], tensors: Sequence[np.ndarray]) -> None:
    """Everybody's contribution is in it, and nothing ran twice."""
    assert sorted(check_agreed(outcomes, tensors)) == [f"m{i}" for i in range(len(tensors))]
    assert [outcome.receipt and outcome.receipt.attempts for outcome in outcomes] == [1] * len(outcomes)


def wait_until(condition: Callable[[], bool], timeout: float, what: str) -> None:
    """Return as soon as the condition holds."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout} s: {what}"
        time.sleep(0.002)


def states(cluster: Cluster, group: str) -> dict[str, str]:
    """member name -> "joining" or "member", as the master sees it."""
    for found in cluster.status().groups:
        if found.name == group:
            return {member.name: member.state for member in found.members}
    return {}


def wait_joining(cluster: Cluster, group: str, name: str) -> None:
    """Return once the master has *name* among the group's joiners."""
    wait_until(lambda: states(cluster, group).get(name) == "joining", 10, f"{name} asks to join {group}")


def all_finished(cluster: Cluster, peers: Sequence[int]) -> bool:
    """Whether each of these peers has one member, which has finished what it called and waits for the commit."""
    waits = [member["waiting_for"] for i in peers for member in cluster.peer_status(i)["members"]]
    return len(waits) == len(peers) and all("finished here" in each for each in waits)


def all_called(cluster: Cluster, peers: Sequence[int]) -> bool:
    """Whether each of these peers has one member, and an operation of it is open."""
    ops = [member["ops"] for i in peers for member in cluster.peer_status(i)["members"]]
    return len(ops) == len(peers) and all(ops)


def repair(cluster: Cluster) -> None:
    """Make the first four peers whole again after a test; what is left of more that it added ends."""
    for i in range(PEERS, len(cluster)):
        if cluster.running(i):
            cluster.kill(i)
    for i in range(PEERS):
        if not cluster.running(i):
            cluster.restart_peer(i)
        else:
            cluster.resume(i)
            for name in PEER:
                cluster.failpoint(i, name, "clear")
    for i, j in itertools.combinations(range(PEERS), 2):
        cluster.heal(i, j)


def killed_by_failpoint(cluster: Cluster, i: int, timeout: float = 10.0) -> None:
    """Wait for peer i's daemon to die at its failpoint."""
    assert cluster.wait(i, timeout) == -signal.SIGKILL


def one_of_three_dies(cluster: Cluster, point: str, count: int, meanwhile: Callable[[], bool] = lambda: True) -> None:
    """Daemon 1 of three dies at this failpoint, in a sum of a group that has run one: the others commit right sums.

    *meanwhile* has to hold once the group has run.
    """
    comms = join(cluster, range(3))
    reduce_all(comms, range(3), count)
    assert meanwhile()
    tensors = [contribution(k, count) for k in range(3)]
    cluster.failpoint(1, point, "kill")
    running = sums(comms, tensors)
    killed_by_failpoint(cluster, 1, BUSY)
    outcomes = running.results()
    left = [0, 2]
    agreed = check_agreed([outcomes[k] for k in left], [tensors[k] for k in left])
    assert set(agreed) >= {"m0", "m2"}
    close_all(comms)
    cluster.restart_peer(1)


def bits_of_sum(comms: Sequence[Any], tensors: Sequence[np.ndarray]) -> set[bytes]:
    """The bytes that members have of the sum of these, which stay as they are."""
    mine = [tensor.copy() for tensor in tensors]
    in_threads(lambda k: comms[k].all_reduce(mine[k], op="sum"), len(comms), 30)
    return {tensor.tobytes() for tensor in mine}


def stands_still(pid: int) -> bool:
    """Whether the process has been stopped (SIGSTOP): its first thread, not just any (wancoll.process.is_stopped)."""
    with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as stat:
        return stat.read().rpartition(")")[2].split()[0] == "T"


def finished_but_not_committed(cluster: Cluster, victim: int, count: int, bound: float) -> list[Outcome]:
    """The pure late abort: the victim stops between its last byte and its vote; all others are finished by then.

    It is killed there. Where members commit it might have told one of them: what all of them have is committed, with
    its share. *bound*: seconds from the kill to the survivors' last commit.
    """
    survivors = [k for k in range(PEERS) if k != victim]
    comms = join(cluster, range(PEERS))
    reduce_all(comms, range(PEERS))
    cluster.failpoint(victim, "before_done", "pause")
    tensors = [comm.empty(count, "float32") for comm in comms]
    for k, tensor in enumerate(tensors):
        tensor[...] = 10**k
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
    assert max(outcomes[k].ended for k in survivors) - killed < bound
    assert isinstance(outcomes[victim].error, OutcomeUnknown)
    assert untouched(tensors[victim], victim)
    reduce_all([comms[k] for k in survivors], survivors)
    close_all(comms)
    return [outcomes[k] for k in survivors]


def killed_at(cluster: Cluster, point: str, victim: int, count: int) -> tuple[list[Outcome], int]:
    """The victim dies at the failpoint in the middle of an op; returns all outcomes, and how many contributed."""
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
            assert isinstance(outcomes[lost].error.__cause__, PeerDaemonLost)
            assert untouched(tensors[lost], lost)
    if point in ("before_commit", "after_commit"):  # the victim heard of the commit, so it happened
        assert len(agreed) == PEERS
    if point == "on_post" or (point == "before_done" and not MEMBERS_COMMIT):  # nobody can know that it was done
        assert len(agreed) < PEERS
    reduce_all([comms[k] for k in survivors], survivors)
    close_all(comms)
    return outcomes, len(agreed)
