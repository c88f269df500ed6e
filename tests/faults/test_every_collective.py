"""The promise under failure, for every collective and algorithm: killed in mid-op, before its vote, before Commit.

Member i contributes 10**i, and its block for rank j has j / 4 on top, so a result names who is in it and whose it is.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from tests.faults.support import (
    MEMBERS_COMMIT,
    PEERS,
    Background,
    Outcome,
    all_called,
    all_finished,
    attempt,
    close_all,
    in_threads,
    join,
    killed_by_failpoint,
    reduce_all,
    stands_still,
    total,
    wait_until,
)
from tests.later import later
from wancoll.chaos import Cluster
from wancoll.collective import Kind
from wancoll.errors import OperationAborted, OutcomeUnknown
from wancoll.schedule.choose import ALGORITHMS

Array = np.ndarray[Any, np.dtype[Any]]
PAIRS = [
    (kind.name, algorithm)
    for kind, algorithms in ALGORITHMS.items()
    for algorithm in algorithms
    if kind is not Kind.update_membership
]
QUICK = PAIRS[::3]
WITH_ROOT = ("broadcast", "reduce", "gather", "scatter")
BIG = 400_000  # elements of a block: an op that has a middle


@dataclass
class Member:
    """One member's part in a call: what it gives, the call, and what it must have got."""

    index: int  # of its name, m{index}
    give: Array | None
    call: Callable[[], Any]
    expected: Callable[[Sequence[str]], Array | None]

    def run(self) -> Outcome:
        return attempt(self.call)


def member(kind: str, algorithm: str, comm: Any, index: int, root: int, count: int) -> Member:
    """root: the member's index; its rank is asked of the communicator."""
    rank = comm.rank
    root_rank = comm.members.index(f"m{root}")

    def full(value: float) -> Array:
        return np.full(count, value, np.float32)

    flat, nothing = full(10**index), full(0)
    blocks = np.stack([flat + np.float32(j / 4) for j in range(PEERS)])
    options = {} if kind == "barrier" else {"algorithm": algorithm}

    def numbers(contributors: Sequence[str]) -> list[int]:
        return [int(name.removeprefix("m")) for name in contributors]

    def rows(values: Sequence[float]) -> Array:
        return np.stack([full(value) for value in values])

    match kind:
        case "all_reduce":
            return Member(
                index, flat, lambda: comm.all_reduce(flat, out=nothing, **options), lambda who: full(total(who))
            )
        case "reduce_scatter":
            return Member(
                index,
                blocks,
                lambda: comm.reduce_scatter(blocks, **options),
                lambda who: full(total(who) + len(who) * rank / 4),
            )
        case "all_gather":
            return Member(
                index, flat, lambda: comm.all_gather(flat, **options), lambda who: rows([10**i for i in numbers(who)])
            )
        case "broadcast":
            x = flat if index == root else nothing
            return Member(
                index,
                x if index == root else None,
                lambda: comm.broadcast(x, root=root_rank, **options),
                lambda who: full(10**root),
            )
        case "reduce":
            return Member(
                index,
                flat,
                lambda: comm.reduce(flat, root=root_rank, **options),
                lambda who: full(total(who)) if index == root else None,
            )
        case "gather":
            return Member(
                index,
                flat,
                lambda: comm.gather(flat, root=root_rank, **options),
                lambda who: rows([10**i for i in numbers(who)]) if index == root else None,
            )
        case "scatter":
            x = blocks if index == root else None
            return Member(
                index,
                x,
                lambda: comm.scatter(x, out=nothing, root=root_rank, **options),
                lambda who: full(10**root + rank / 4),
            )
        case "all_to_all":
            return Member(
                index,
                blocks,
                lambda: comm.all_to_all(blocks, out=np.zeros_like(blocks), **options),
                lambda who: rows([10**i + rank / 4 for i in numbers(who)]),
            )
        case "barrier":
            return Member(index, None, comm.barrier, lambda who: None)
    raise AssertionError(kind)


def check(members: Sequence[Member], outcomes: Sequence[Outcome], gave: Sequence[Array | None]) -> tuple[str, ...]:
    """These members committed one contributor set, each has what it must have, and what it gave is untouched."""
    sets = set()
    for one, outcome, before in zip(members, outcomes, gave, strict=True):
        assert outcome.error is None, f"m{one.index}: {outcome.error!r} {outcome.error}"
        receipt = outcome.receipt
        assert receipt is not None
        sets.add((receipt.op_id, receipt.epoch, receipt.contributors))
        want = one.expected(receipt.contributors)
        if want is None:
            assert receipt.out is None
        else:
            assert receipt.out.shape == want.shape, (one.index, receipt.contributors)
            assert (receipt.out == want).all(), (one.index, receipt.contributors, np.unique(receipt.out)[:8])
        if before is not None and one.give is not receipt.out:
            assert (one.give == before).all()
    assert len(sets) == 1, sets
    return next(iter(sets))[2]


def kill(cluster: Cluster, kind: str, algorithm: str, moment: str, victim: int, root: int, count: int) -> None:
    comms = join(cluster, range(PEERS))
    warm = [member(kind, algorithm, comm, k, root, 10) for k, comm in enumerate(comms)]
    check(warm, in_threads(lambda k: warm[k].run(), PEERS), [None] * PEERS)
    members = [member(kind, algorithm, comm, k, root, count) for k, comm in enumerate(comms)]
    gave = [None if one.give is None else one.give.copy() for one in members]
    survivors = [k for k in range(PEERS) if k != victim]
    voted = MEMBERS_COMMIT and kind not in WITH_ROOT
    if moment == "late":  # the victim stops after its last byte; the others are finished and not told
        cluster.failpoint(victim, "before_done", "pause")
        running = Background(lambda k: members[k].run(), PEERS)
        wait_until(lambda: stands_still(cluster.pid(victim)), 10, "the victim reaches before_done")
        there = all_finished if voted else all_called  # roots are not waited for by all
        wait_until(lambda: there(cluster, survivors), 10, "the others are there")
        assert not any(running.finished)
        cluster.kill(victim)
        outcomes = running.results()
    else:
        cluster.failpoint(victim, moment, "kill")
        outcomes = in_threads(lambda k: members[k].run(), PEERS)
        killed_by_failpoint(cluster, victim)
    lost = outcomes[victim]
    assert isinstance(lost.error, OutcomeUnknown), repr(lost.error)
    if gave[victim] is not None:
        assert (members[victim].give == gave[victim]).all()
    alive = [members[k] for k in survivors]
    if victim == root and any(outcomes[k].error is not None for k in survivors):
        for k in survivors:
            error = outcomes[k].error
            assert isinstance(error, OperationAborted), (k, repr(error))
            assert f"m{root}" in str(error)
            assert gave[k] is None or (members[k].give == gave[k]).all()
    else:
        agreed = check(alive, [outcomes[k] for k in survivors], [gave[k] for k in survivors])
        assert set(agreed) >= {f"m{k}" for k in survivors}
        attempts = [outcomes[k].receipt.attempts for k in survivors]
        if voted and moment == "late":  # it might have told one of them
            assert (f"m{victim}" in agreed, attempts) == (True, [1] * len(survivors))
        elif voted and moment == "before_done":  # so it is where all others are finished, too
            assert (f"m{victim}" in agreed) == (attempts == [1] * len(survivors))
        elif moment in ("late", "before_done", "mid_op", "on_post"):
            assert f"m{victim}" not in agreed
            # A busy machine may hear of the broken links before it hears of the death: that is an attempt more.
            assert min(attempts) >= (2 if moment == "late" else 1)
    reduce_all([comms[k] for k in survivors], survivors)
    close_all(comms)


@pytest.mark.parametrize(("kind", "algorithm"), [*QUICK, *later(*sorted({*PAIRS} - {*QUICK}))])
def test_late_abort(cluster: Cluster, rng: random.Random, kind: str, algorithm: str) -> None:
    victim, root = rng.sample(range(PEERS), 2)
    kill(cluster, kind, algorithm, "late", victim, root, 5000)


@pytest.mark.parametrize("kind", WITH_ROOT)
def test_a_lost_root_ends_the_call_for_all(cluster: Cluster, rng: random.Random, kind: str) -> None:
    root = rng.randrange(PEERS)
    kill(cluster, kind, "auto", "late", root, root, 5000)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("moment", ["late", "on_post", "mid_op", "before_done", "after_done"])
@pytest.mark.parametrize(("kind", "algorithm"), PAIRS)
def test_kills_many_times(cluster: Cluster, rng: random.Random, kind: str, algorithm: str, moment: str) -> None:
    if kind == "barrier" and moment == "mid_op":
        pytest.skip("no bytes of a barrier arrive: mid_op is not come to")
    for _ in range(5):
        victim, root = rng.randrange(PEERS), rng.randrange(PEERS)
        count = BIG if moment == "mid_op" else rng.choice([1, 1000, BIG])
        if kind in WITH_ROOT and moment == "mid_op":  # the victim must receive something
            root = rng.choice([k for k in range(PEERS) if (k == victim) == (kind in ("reduce", "gather"))])
        kill(cluster, kind, algorithm, moment, victim, root, count)
        cluster.restart_peer(victim)
