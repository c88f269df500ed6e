"""A member is lost during, at the end of, and after its op: the others agree on one contributor set."""

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
    Background,
    Outcome,
    attempt,
    check_agreed,
    close_all,
    contribution,
    finished_but_not_committed,
    in_threads,
    join,
    killed_at,
    killed_by_failpoint,
    reduce_all,
    untouched,
)
from tests.later import later
from wancoll.chaos import Cluster
from wancoll.errors import Evicted, OutcomeUnknown, PeerDaemonLost

OP_BYTES = 48 * MIB
PAUSE = 0.25  # seconds between SIGSTOP and SIGKILL
BOUND = BUSY  # from the detection, which is the kill here: it closes the control connection


def reduce_in_place(comms: list[Any], tensors: list[list[Any]], k: int) -> list[Outcome]:
    """Member k: all its ops in flight at once, then wait for each."""
    try:
        works = [comms[k].all_reduce(tensor, op="sum", async_op=True) for tensor in tensors[k]]
    except PeerDaemonLost as bad:  # killed while it was posting
        return [Outcome(None, bad, time.monotonic())] * len(tensors[k])
    return [attempt(lambda work=work: work.wait(timeout=30)) for work in works]


def fill(tensors: list[list[Any]]) -> None:
    for k, mine in enumerate(tensors):
        for tensor in mine:
            tensor[...] = 10**k


def clean_seconds(comms: list[Any], tensors: list[list[Any]]) -> float:
    """How long the ops take when nothing is broken."""
    fill(tensors)
    started = time.monotonic()
    outcomes = in_threads(lambda k: reduce_in_place(comms, tensors, k), PEERS)
    ended = max(outcome.ended for mine in outcomes for outcome in mine)
    for op in range(len(tensors[0])):
        check_agreed([mine[op] for mine in outcomes], [mine[op] for mine in tensors])
    return ended - started


def trial(cluster: Cluster, rng: random.Random, ops: int) -> tuple[int, float]:
    """One kill in a fresh group. Returns how many ops had all members, and seconds from the kill to the last commit."""
    comms = join(cluster, range(PEERS))
    count = OP_BYTES // 4 // ops
    tensors = [[comm.empty(count, "float32") for _ in range(ops)] for comm in comms]
    clean = [clean_seconds(comms, tensors) for _ in range(2)][-1]  # the first one touches pages and warms lanes
    fill(tensors)
    victim = rng.randrange(PEERS)
    moment = rng.uniform(0, clean)
    running = Background(lambda k: reduce_in_place(comms, tensors, k), PEERS)
    time.sleep(moment)  # the random moment is the test
    cluster.pause(victim)
    time.sleep(PAUSE)
    killed = time.monotonic()
    cluster.kill(victim)
    outcomes = running.results()
    survivors = [k for k in range(PEERS) if k != victim]
    worlds = []
    for op in range(ops):
        agreed = check_agreed([outcomes[k][op] for k in survivors], [tensors[k][op] for k in survivors])
        assert {f"m{k}" for k in survivors} <= set(agreed), agreed
        worlds.append(len(agreed))
        lost = outcomes[victim][op]
        if lost.error is None:
            check_agreed([lost, outcomes[survivors[0]][op]], [tensors[victim][op], tensors[survivors[0]][op]])
        else:
            assert isinstance(lost.error, OutcomeUnknown | PeerDaemonLost), repr(lost.error)
            assert untouched(tensors[victim][op], victim)
    assert worlds == sorted(worlds, reverse=True), f"a lost member came back: {worlds}"
    took = max(outcomes[k][op].ended for k in survivors for op in range(ops)) - killed
    bound = max(BOUND, 6 * clean)  # a clean one takes a fifth of a second, unless the machine is busy
    assert took < bound, f"the survivors' last commit came {took:.2f} s after the kill, {clean:.2f} s without one"
    reduce_all([comms[k] for k in survivors], survivors)
    close_all(comms)
    cluster.restart_peer(victim)
    return worlds.count(PEERS), took


LONG = [pytest.mark.nightly, pytest.mark.timeout(3600)]


@pytest.mark.parametrize(
    ("times", "ops"), [(2, 1), *later((2, 8)), pytest.param(200, 1, marks=LONG), pytest.param(100, 8, marks=LONG)]
)
def test_late_abort(cluster: Cluster, rng: random.Random, times: int, ops: int) -> None:
    results = [trial(cluster, rng, ops) for _ in range(times)]
    whole = sum(whole for whole, _ in results)
    slowest = max(took for _, took in results)
    print(f"{times} kills, {ops} ops each: {whole} of {times * ops} ops had all members; slowest {slowest:.3f} s")


# ---- at named places ---------------------------------------------------------------------------------


PLACES = ["on_post", "mid_op", "before_done", "after_done", "before_commit", "after_commit"]


@pytest.mark.parametrize("name", PLACES + ["half_done"] * MEMBERS_COMMIT)
def test_killed_at(cluster: Cluster, rng: random.Random, name: str) -> None:
    victim = rng.randrange(PEERS)
    outcomes, contributed = killed_at(
        cluster, name, victim, 4 * MIB if name == "mid_op" else rng.choice([1, 1000, MIB])
    )
    for _ in range(4 * (name == "mid_op")):
        if contributed < PEERS:
            break
        cluster.restart_peer(victim)  # on a busy machine it was all moved before the daemon looked
        outcomes, contributed = killed_at(cluster, name, victim, 4 * MIB)
    assert name != "mid_op" or contributed < PEERS
    assert name != "after_commit" or outcomes[victim].error is None


def test_survivors_finished_but_not_committed(cluster: Cluster) -> None:
    outcomes = finished_but_not_committed(cluster, 2, MIB, BOUND)
    assert all(outcome.receipt.attempts == (1 if MEMBERS_COMMIT else 2) for outcome in outcomes)


def test_a_second_death_while_the_first_is_mended(cluster: Cluster, comms: list[Any]) -> None:
    """m3 dies in the op, m1 as soon as it hears of the epoch without m3."""
    cluster.failpoint(1, "on_epoch", "kill")
    cluster.failpoint(3, "mid_op", "kill")
    tensors = [contribution(k, MIB) for k in range(PEERS)]
    outcomes = in_threads(lambda k: attempt(lambda: comms[k].all_reduce(tensors[k], op="sum")), PEERS)
    for victim in (1, 3):
        killed_by_failpoint(cluster, victim)
        assert isinstance(outcomes[victim].error, OutcomeUnknown)
        assert untouched(tensors[victim], victim)
    agreed = check_agreed([outcomes[0], outcomes[2]], [tensors[0], tensors[2]])
    assert sorted(agreed) == ["m0", "m2"]


def test_a_death_while_the_first_epoch_is_dialled(cluster: Cluster) -> None:
    """The handshake phase: m2 dies when it hears of the first epoch; the rest of the group starts without it."""
    cluster.failpoint(2, "on_epoch", "kill")
    group = "handshake"

    def member(k: int) -> Outcome | None:
        try:
            comm = cluster.connect(k, group=group, name=f"m{k}", start_world=PEERS, min_world=2)
        except PeerDaemonLost:
            assert k == 2
            return None
        tensor = contribution(k, 1000)
        outcome = attempt(lambda: comm.all_reduce(tensor, op="sum"))
        comms.append(comm)
        tensors[k] = tensor
        return outcome

    comms: list[Any] = []
    tensors: dict[int, Any] = {}
    outcomes = in_threads(member, PEERS)
    killed_by_failpoint(cluster, 2)
    survivors = [outcome for k, outcome in enumerate(outcomes) if k != 2 and outcome is not None]
    assert sorted(check_agreed(survivors, [tensors[k] for k in (0, 1, 3)])) == ["m0", "m1", "m3"]
    assert outcomes[2] is None or isinstance(outcomes[2].error, OutcomeUnknown | PeerDaemonLost | Evicted)
    close_all(comms)
