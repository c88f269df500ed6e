"""What `wancoll chaos` draws, computes, checks and reports: the pure parts."""

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from wancoll.chaos.core import chaos_report as report
from wancoll.chaos.core import faults as drawing
from wancoll.chaos.core import invariants, workload
from wancoll.chaos.core.chaos_report import Commit, Findings
from wancoll.chaos.core.faults import MASTER_SLOT, Fault, Shape
from wancoll.chaos.core.invariants import Agreement, Injected, Times
from wancoll.chaos.core.records import Called
from wancoll.cli.trying.chaos import faults_by_phase
from wancoll.failpoints import MASTER, PEER

TIMES = Times(heartbeat=3.0, lane=4.0, link=3.0, rejoin=4.0, deadline=30.0)


def faults(seed: int, **shape: Any) -> tuple[Fault, ...]:
    settings: dict[str, Any] = {"peers": 6, "seconds": 600.0, "points": PEER, "master_points": MASTER}
    return drawing.draw(random.Random(seed).random, Shape(**(settings | shape)))


# ---- the schedule -----------------------------------------------------------------------------------


def test_the_same_seed_draws_the_same_faults() -> None:
    assert faults(7) == faults(7)
    assert faults(7) != faults(8)


def test_every_kind_and_every_failpoint_is_drawn() -> None:
    drawn = [fault for seed in range(5) for fault in faults(seed, relays=2)]
    assert {fault.kind for fault in drawn} == set(drawing.KINDS)
    assert {fault.point for fault in drawn} - {""} == {*PEER, *MASTER}
    assert {fault.action for fault in drawn if fault.kind == "point"} == {"kill", "pause"}
    assert {fault.point for fault in drawn if fault.kind == "master_full_disk"} == {"store_write", "store_sync"}
    assert any(a.at == b.at for a, b in pairwise(drawn)), "two at once"


def test_only_the_kinds_asked_for() -> None:
    drawn = faults(1, kinds=("kill", "cut"), master_every=0.0)
    assert {fault.kind for fault in drawn} == {"kill", "cut"}


def test_relays_are_hit_one_by_one_and_cost_no_slot() -> None:
    drawn = faults(1, kinds=("relay_kill", "relay_stop", "kill"), relays=2)
    hits = [fault for fault in drawn if fault.of_relay]
    assert {(fault.kind, fault.slot) for fault in hits} == {
        (f"relay_{what}", k) for what in ("kill", "stop") for k in (0, 1)
    }
    assert str(hits[0]).startswith(f"{hits[0].kind} relay-{hits[0].slot} for ")
    for k in (0, 1):
        of_one = [fault for fault in hits if fault.slot == k]
        assert all(a.at + a.seconds + 3 <= b.at for a, b in pairwise(of_one))
    assert not any(fault.touches for fault in hits)
    assert not any(fault.of_relay for fault in faults(1)), "there are none"


@pytest.mark.parametrize("seed", range(8))
def test_faults_keep_their_distance_and_spare_some_members(seed: int) -> None:
    drawn = faults(seed, peers=4, keep=2, interval=(0.5, 2.0))
    times = sorted({fault.at for fault in drawn})
    assert all(after - before >= 0.499 for before, after in pairwise(times))
    assert times[-1] < 600
    for fault in drawn:  # who is hit is whole, and others are
        broken = {s for f in drawn if f.number < fault.number and f.at + f.seconds + 3 > fault.at for s in f.touches}
        assert not broken & fault.touches
        assert 4 - len(broken) > 2 or not fault.touches
        assert fault.other == -1 or fault.slot != fault.other


def test_the_master_is_killed_every_thirty_seconds() -> None:
    kills = [f.at for f in faults(3, kinds=("kill", "stop", "cut", "join_storm"), peers=10) if f.kind == "master_kill"]
    assert len(kills) == 19
    assert all(28 <= after - before <= 32 for before, after in pairwise(kills))


# ---- the workload -----------------------------------------------------------------------------------


def steps(slots: int, largest: int = 1 << 16) -> list[workload.Step]:
    return [workload.step(7, number, largest, slots) for number in range(600)]


def test_steps_follow_from_seed_and_number_and_differ() -> None:
    assert steps(7) == steps(7)
    found = steps(7)
    assert {step.kind for step in found} == {
        "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "barrier",
    }  # fmt: skip
    assert {step.codec for step in found} == {"none", "int8"}
    assert {step.op for step in found} == {"sum", "avg", "min", "max", "prod"}
    assert {step.dtype for step in found} == {"float32", "float64", "float16", "int32", "int64", "uint8"}
    assert len({step.count for step in found}) > 100
    assert max(step.count * np.dtype(step.dtype).itemsize for step in found) <= 1 << 16


@pytest.mark.parametrize("slots", [7, 13, 16])
def test_sums_name_their_contributors_exactly(slots: int) -> None:
    """The reference of each set of contributors is what numpy sums up, in any order, and no two sets are alike."""
    rng = random.Random(slots)
    for step in steps(slots)[:200]:
        if step.kind != "all_reduce" or step.codec != "none":
            continue
        one = rng.sample(range(slots), rng.randint(1, slots))
        right = workload.expected(step, one)
        parts = [workload.contribution(step, slot) for slot in one]
        if step.op in ("sum", "avg"):
            total = parts[0].copy()
            for part in parts[1:]:
                total += part
            if step.op == "avg":
                total = total / total.dtype.type(len(one)) if total.dtype.kind == "f" else total // len(one)
            assert (total == right).all(), step
        assert workload.compare(step, one, right) == ""
        if step.op in ("sum", "prod"):
            missing = one[:-1] or [(one[0] + 1) % slots]
            assert workload.compare(step, one, workload.expected(step, missing)), step
            assert workload.compare(step, one, right + parts[0]), f"{step}: one counted twice"


def test_a_codec_may_be_off_by_its_bound_and_no_more() -> None:
    step = next(step for step in steps(7, 1 << 20) if step.codec == "int8" and step.op == "sum" and step.count > 1000)
    right = workload.expected(step, range(4))
    assert workload.compare(step, range(4), right * np.float32(1.003)) == ""
    assert "element" in workload.compare(step, range(4), workload.expected(step, range(3)))
    assert "element" in workload.compare(step, range(4), right * np.float32(2))


def test_stale_and_misplaced_bytes_show() -> None:
    a, b = workload.pattern(5000, 3, 0), workload.pattern(5000, 4, 0)
    assert (a != b).mean() > 0.5
    assert (a[:-64] != a[64:]).mean() > 0.5
    assert set(a) == set(range(1, 17))


# ---- agreement --------------------------------------------------------------------------------------


def called(seq: int, **fields: Any) -> Called:
    base: dict[str, Any] = {
        "what": "step 1", "kind": "all_reduce", "nbytes": 8, "begun": 1.0, "ended": 2.0,
        "epoch": 1, "seq": seq, "contributors": ("m0", "m1"), "result": "aa",
    }  # fmt: skip
    return Called(**(base | fields))


def failed(error: str, **fields: Any) -> Called:
    return called(0, error=error, contributors=(), result="", text="because", **fields)


def rules(agreement: Agreement, *said: tuple[str, Called]) -> list[str]:
    return [violation.rule for who, call in said for violation in agreement.add(who, call)]


def test_members_that_agree() -> None:
    agreement = Agreement(small=False)
    assert rules(agreement, ("m0", called(5)), ("m1", called(5)), ("m0", called(6)), ("m1", called(6))) == []


@pytest.mark.parametrize(
    "other",
    [called(5, result="bb"), called(5, contributors=("m0", "m1", "m2"))],
    ids=["bytes", "contributors"],
)
def test_members_that_do_not_agree(other: Called) -> None:
    assert rules(Agreement(small=False), ("m0", called(5)), ("m1", other)) == ["agreement"]


def test_one_commits_what_another_is_told_was_given_up() -> None:
    agreement = Agreement(small=False)
    aborted = failed("OperationAborted", may_abort=True)
    assert rules(agreement, ("m0", called(5)), ("m1", called(5)), ("m0", called(6)), ("m1", aborted)) == ["agreement"]


def test_an_operation_that_two_epochs_committed() -> None:
    agreement = Agreement(small=False)
    assert rules(agreement, ("m0", called(5)), ("m1", called(5, epoch=2))) == []
    assert [one.rule for one in agreement.committed_twice(formed=[1])] == ["agreement"]
    assert agreement.committed_twice(formed=[2]) == [], "a group that was formed anew counts from the start"


def test_update_membership_may_lead_to_different_epochs() -> None:
    agreement = Agreement(small=False)
    update = {"kind": "update_membership", "result": ""}
    assert rules(agreement, ("m0", called(5, **update)), ("m1", called(5, epoch=2, **update))) == []
    assert agreement.committed_twice(formed=[]) == []
    mismatch = failed("OperationAborted", kind="update_membership", may_abort=True)
    assert rules(agreement, ("m2", called(4)), ("m2", mismatch)) == ["agreement"]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (called(5, kind="update_membership", result=""), called(5, epoch=9)),
        (called(5), called(5, epoch=9, kind="update_membership", result="")),
        (failed("OperationAborted", may_abort=True), called(5, epoch=9)),
        (called(5), failed("OperationAborted", epoch=9, may_abort=True)),
    ],
    ids=["an update before", "an update after", "a failure before", "a failure after"],
)
def test_a_group_that_was_formed_anew_counts_from_the_start(before: Called, after: Called) -> None:
    agreement = Agreement(small=False)
    assert rules(agreement, ("m0", called(4)), ("m0", before)) == []
    agreement.joined("m0")
    assert rules(agreement, ("m0", called(4, epoch=9)), ("m0", after), ("m1", called(4, epoch=9)), ("m1", after)) == []
    assert agreement.committed_twice(formed=[8]) == []
    assert {one.what for one in agreement.committed_twice(formed=[1])} == {"step 1, operation 4", "step 1, operation 5"}


def test_a_member_that_skips_an_operation() -> None:
    agreement = Agreement(small=False)
    assert rules(agreement, ("m0", called(5)), ("m0", called(7))) == ["order"]
    agreement.joined("m1")
    assert rules(agreement, ("m1", called(9)), ("m1", failed("Evicted"))) == []


def test_errors_that_may_be_and_that_may_not() -> None:
    def of(call: Called, *, small: bool = False) -> list[str]:
        return rules(Agreement(small), ("m0", called(5)), ("m0", call))

    assert of(failed("OperationAborted", may_abort=True)) == []
    assert of(failed("OperationAborted")) == ["outcome"]
    assert of(failed("CollectiveMismatch")) == ["outcome"]
    assert of(failed("WorldTooSmall", epoch=1), small=True) == []
    assert of(failed("ProtocolError")) == ["outcome"]
    assert of(failed("TimeoutError")) == ["deadline"]
    assert of(failed("Evicted", wrong="1 element")) == ["value"], "the tensor was not as it had been"
    assert of(called(6, wrong="1 element")) == ["value"]


# ---- gaps, causes, the event log --------------------------------------------------------------------


def hit(kind: str, slot: int, began: float, ended: float, **fields: Any) -> Injected:
    return Injected(Fault(1, began, kind, slot, **fields), began, began, ended, hit=True)


def test_a_gap_is_excused_by_what_takes_time_to_notice() -> None:
    commits = [0.0, 1.0, 8.5, 9.0]

    def gaps(*more: Any) -> list[invariants.Violation]:
        return invariants.too_long(invariants.gaps(commits, *more))

    assert [one.rule for one in gaps([], [])] == ["gap"]
    stop = invariants.blind([hit("stop", 1, 1.0, 30.0)], TIMES)
    assert stop == [(1.0, 4.0)], "after heartbeat_timeout the master knows"
    assert gaps(stop, []) == []
    assert gaps(invariants.blind([hit("kill", 1, 1.0, 3.0)], TIMES), []) != []
    assert gaps([(1.0, 3.0), (2.0, 3.0)], [])[0].got.startswith("7.5 s: 2.0 s of"), "counted once"
    assert gaps([], [(5.0, 3.0)]) == [], "the machine let them wait"


def test_what_happens_while_the_master_is_away_is_noticed_when_it_is_back() -> None:
    away = hit("master_kill", MASTER_SLOT, 10.0, 12.0)
    killed = hit("kill", 1, 11.0, 13.0)
    assert invariants.blind([away, killed], TIMES) == [(10.0, 12.0), (11.0, 16.0)]
    assert invariants.blind([away, hit("kill", 1, 20.0, 21.0)], TIMES)[1] == (20.0, 20.0)


def test_a_loss_needs_a_cause() -> None:
    lost = failed("Evicted", begun=20.0, ended=21.0)
    assert invariants.unexplained_loss(2, lost, [hit("stop", 2, 15.0, 18.0)], TIMES, 0.0) == ""
    assert invariants.unexplained_loss(2, lost, [hit("cut", 1, 15.0, 18.0, other=2)], TIMES, 0.0) == ""
    assert invariants.unexplained_loss(2, lost, [hit("stop", 1, 15.0, 18.0)], TIMES, 0.0)
    assert invariants.unexplained_loss(2, lost, [hit("master_kill", MASTER_SLOT, 15.0, 18.0)], TIMES, 0.0)
    assert invariants.unexplained_loss(2, lost, [], TIMES, TIMES.link - 0.1)
    assert invariants.unexplained_loss(2, lost, [], TIMES, TIMES.link) == ""  # the machine's
    doubted, journal = (
        failed("OutcomeUnknown", begun=20.0, ended=21.0),
        hit("master_full_disk", MASTER_SLOT, 15.0, 18.0),
    )
    assert invariants.unexplained_loss(2, doubted, [journal], TIMES, 0.0) == ""
    assert invariants.unexplained_loss(2, lost, [journal], TIMES, 0.0)
    assert invariants.unexplained_loss(2, doubted, [hit("master_kill", MASTER_SLOT, 15.0, 18.0)], TIMES, 0.0)
    late = failed("Evicted", begun=120.0, ended=121.0)
    assert invariants.unexplained_loss(2, late, [hit("stop", 2, 15.0, 18.0)], TIMES, 0.0)


def test_the_event_log_names_who_was_lost() -> None:
    one = [hit("kill", 1, 15.0, 16.0)]

    def missing(*log: tuple[float, str, str]) -> list[str]:
        return [violation.rule for violation in invariants.culprits(one, log, TIMES)]

    assert missing((15.1, "daemon died", "lost m1: daemon peer-1: the connection was closed")) == []
    assert missing((15.1, "daemon died", "lost m10: daemon peer-10: closed")) == ["event log"]
    assert missing((100.0, "daemon died", "lost m1: daemon peer-1")) == ["event log"]


def test_who_was_no_member_when_it_was_killed_needs_no_event() -> None:
    one = [hit("client_kill", 1, 15.0, 16.0)]
    formed = (1.0, "epoch", "the group has formed: m0, m1, m2; 3 members: m0, m1, m2")
    lost = (9.0, "evicted", "lost m0, m1: daemon peer-0 was silent for 3.0 s")
    without = (9.1, "epoch", "lost m1: its link broke; 1 member: m2")
    joins = (12.0, "joined", "m1 of daemon peer-1 as 7; the group runs with 1 member in epoch 2")

    def excused(*log: tuple[float, str, str]) -> bool:
        return invariants.culprits(one, log, TIMES) == []

    assert not excused(formed)
    assert excused(formed, lost)
    assert excused(formed, lost, without, joins)
    assert excused(formed, (9.0, "epoch", "the master was restarted; m1 did not report; 2 members: m0, m2"))
    assert not excused(formed, (9.0, "evicted", "lost m10: daemon peer-10 was silent"))
    assert not excused(formed, lost, joins, (14.0, "epoch", "admitted m1; 2 members: m2, m1"))
    assert not excused(formed, lost, joins, (14.95, "epoch", "admitted m1; 2 members: m2, m1")), "just before"
    assert not excused(formed, lost, (9.2, "resumed", "the master was restarted; epoch 1 goes on with m1, m2"))
    assert excused(formed, lost, (15.5, "epoch", "admitted m1; 2 members: m2, m1"))


def test_what_tells_of_a_loss() -> None:
    assert invariants.tells_of_loss("epoch", "the master was restarted; m2 did not report; 1 member: m1")
    assert not invariants.tells_of_loss("joined", "m1 of daemon peer-1 as 7")
    assert not invariants.tells_of_loss("epoch", "admitted m1; 2 members: m0, m1")


# ---- leaks ------------------------------------------------------------------------------------------


def test_leaks_are_counted_without_what_links_explain() -> None:
    before = {"peer-0": {"fds": 64, "lanes": 16, "tasks": 21, "threads": 2, "arenas": 1, "ops": 0, "memory": 40 << 20}}

    def found(**now: int) -> list[str]:
        return [one.what for one in invariants.leaks(before, {"peer-0": before["peer-0"] | now}, 1 << 20, 0.0)]

    assert found() == []
    assert found(fds=96, lanes=32) == found(fds=32, lanes=0) == [], "a lane has two"
    assert found(fds=66) == found(fds=98, lanes=32) == found(fds=34, lanes=0) == ["fds"]
    assert found(tasks=30) == ["tasks"]
    assert found(tasks=31, connections=5) == [], "each connection has its tasks"
    assert found(arenas=2, ops=1) == ["arenas", "ops"]
    assert found(memory=500 << 20) == ["memory"]
    # Who was not there before is compared with its like.
    assert invariants.leaks(before, {"peer-7": before["peer-0"]}, 1 << 20, 0.0) == []
    assert invariants.leaks(before, {"peer-7": before["peer-0"] | {"threads": 9}}, 1 << 20, 0.0) != []


# ---- the report -------------------------------------------------------------------------------------


def findings(*violations: invariants.Violation) -> Findings:
    commits = [Commit(t / 10, 1 if t < 50 else 2, 1000) for t in range(100) if not 50 <= t < 56]
    return Findings(
        "wancoll chaos --seed=7", 2.0, 10.0, (0.0, 2.0), commits,
        [hit("kill", 1, 5.0, 6.0), Injected(Fault(2, 7.0, "flip", 0, other=2), 7.0, 7.0, 7.0, note="<no> lanes")],
        violations, Counter(committed=94), [("m1", 0.0, 5.0)], {"before": {"peer-0": {"fds": 3}}},
        [(2.5, 1, "daemon died", "lost m1: daemon peer-1")], [], 0.5,
    )  # fmt: skip


def test_the_report() -> None:
    built = report.build(findings())
    assert built["goodput"]["quiet"] == pytest.approx(10_000)
    assert built["goodput"]["ratio"] == pytest.approx(74 / 80)
    assert built["longest_gap"] == pytest.approx(0.7)
    assert built["recoveries"]["count"] == 1
    assert built["recoveries"]["p50"] == pytest.approx(0.6)
    assert built["phases"] == {"kill": {"": 1}, "flip": {"missed": 1}}
    assert report.lines(built) == [
        "8 s in clear, 2 faults, 1 of them hit",
        "74 operations committed in that time, 94 with the times before and after",
        "longest time without one 0.70 s",
        "goodput 9.25 kB/s, 0.93 of the 10 kB/s without faults",
        "recoveries: 1, p50 0.600 s, p99 0.600 s",
        "calls of all members, before and after, too: 94 committed",
        "violations: 0",
    ]


def test_a_recovery_is_that_of_the_last_fault_before_it() -> None:
    commits = [Commit(0.5, 1, 1), Commit(3.0, 2, 1)]
    two = [hit("kill", 1, 1.0, 2.0), hit("stop", 2, 2.0, 3.0)]
    assert [(one.fault.kind, seconds) for one, seconds in report.recoveries(two, commits)] == [("stop", 1.0)]


def test_percentiles() -> None:
    assert report.percentile([], 0.5) == 0.0
    assert report.percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert report.percentile([float(i) for i in range(1, 101)], 0.99) == 99.0


def test_faults_by_phase_fit_80_columns(capsys: Any) -> None:
    """However many phases a run meets: no word is cut."""
    phases = [f"after_point_{number}" for number in range(20)] + ["finished, not committed"]
    Console(width=80).print(faults_by_phase({kind: dict.fromkeys(phases, 100) for kind in drawing.KINDS}))
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    for word in (*phases[-1].split(", "), *phases[:-1], *(f"{kind} 100" for kind in drawing.KINDS)):
        assert " ".join(shown.split()).count(word) >= 1
    assert shown.count(f" {100 * len(drawing.KINDS)} ") == len(phases)
