"""The member's state machine: what it says to the master, the engine and the client, step by step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from wancoll.collective import Descriptor, DType, Kind, ReduceOp
from wancoll.commit import tally
from wancoll.errors import ProtocolError
from wancoll.peer.core import commands as cmd
from wancoll.peer.core import links, outcomes
from wancoll.peer.core import member as core
from wancoll.peer.core.calls import EPOCHS_SPOKEN_OF
from wancoll.peer.core.op import OpState
from wancoll.wire import messages as m
from wancoll.wire.epochs import brief, change

KEY = b"k" * 16


def infos(*mids: int) -> list[m.MemberInfo]:
    return [m.MemberInfo(mid, f"m{mid}", f"d{mid}", ["h:1"], "") for mid in mids]


def epoch(
    number: int,
    *mids: int,
    upto: int = 0,
    voids: list[m.Void] | None = None,
    term: int = 1,
    floor: int = 1,
    avoid: list[tuple[int, int]] | None = None,
    spares: bool = False,
) -> m.Epoch:
    plan = m.Plan(8, 1024, True, {}, avoid or [], 0, "", spares)
    return m.Epoch("g", 1, term, number, infos(*mids), plan, KEY, floor, upto, voids or [], "because")


def post(call: int, d: Descriptor, epoch: int = 1) -> m.Post:
    return m.Post(call, d, 0, 4096, epoch)


def data(count: int = 4, on_failure: str = "retry") -> Descriptor:
    return Descriptor(Kind.all_reduce, DType.float32, ReduceOp.sum, count, on_failure=on_failure)


def kinds(commands: list[cmd.Command]) -> list[str]:
    """Names of commands, with the message's name where there is one."""
    names = []
    for command in commands:
        inner = getattr(command, "message", None)
        names.append(type(command).__name__ + (f":{type(inner).__name__}" if inner is not None else ""))
    return names


def told(commands: list[cmd.Command], kind: type) -> list[Any]:
    return [c.message for c in commands if isinstance(c, cmd.ToClient) and isinstance(c.message, kind)]


def errors_of(commands: list[cmd.Command]) -> list[tuple[int, str]]:
    """Which calls failed, and with which error; 0: the connection."""
    return [(one.id, one.error) for one in told(commands, m.Failure)]


class Driver:
    """A member in an epoch of mids, with calls numbered; *linked*: whose links are up, default all."""

    def __init__(self, *mids: int, floor: int = 1, linked: tuple[int, ...] | None = None) -> None:
        self.member = core.Member("g", "m1", 2, floor, first_engine_id=100)
        self.calls = 0
        self.member.join()
        self.member.joined(1, 1)
        self.entered = self.member.enter_epoch(epoch(1, *mids, floor=floor), 0.0)
        self.ready(1, *(mids if linked is None else linked))

    def ready(self, number: int, *linked: int) -> list[cmd.Command]:
        return self.member.links_ready(number, linked or [info.mid for info in self.member.epoch.members])

    def post(self, descriptor: Descriptor | None = None, epoch: int = 0) -> list[cmd.Command]:
        self.calls += 1
        message = post(self.calls, descriptor or data(), epoch or self.member.epoch_number)
        return self.member.post(message, self.member.call(message), 1.0)

    def update(self) -> list[cmd.Command]:
        return self.post(Descriptor(Kind.update_membership))

    @property
    def engine_id(self) -> int:
        """Of the youngest attempt."""
        return self.member.attempts.next - 1


def test_an_op_runs_reports_done_and_ends_with_its_commit() -> None:
    d = Driver(1, 2)
    assert kinds(d.entered) == ["ToClient:EpochInfo", "Enter"]
    assert kinds(d.post()) == ["StartOp"]
    [done] = d.member.op_finished(d.engine_id, digest=77, bytes_sent=9)
    assert done == cmd.ToMaster(m.Vote("g", 1, 1, 1, 77, data().fingerprint()))
    [result] = told(d.member.hear(m.Commit("g", 1, 1, 1), 3.0, 1, 1), m.Result)
    assert (result.id, result.seq, result.epoch, result.contributors) == (1, 1, 1, ["m1", "m2"])
    assert (result.digest, result.attempts, result.bytes_sent, result.seconds) == (77, 1, 9, 2.0)
    assert d.member.collectives.open == {}


@pytest.mark.parametrize(
    ("mids", "avoid", "spares"),
    [
        ((1,), [], set()),
        ((1, 2), [], set()),
        ((1, 2, 3), [], set()),
        ((1, 2, 3, 4), [], {3}),
        ((1, 2, 3, 4, 5), [], {3, 4}),
        ((5, 1, 7, 2, 3, 4), [(4, 5)], {2, 4}),
        ((5, 1, 7, 2, 3, 4), [(1, 4)], {2}),
    ],
)
def test_whoever_is_next_to_us_after_a_loss_is_two_places_away(mids, avoid, spares) -> None:
    member = core.Member("g", "m1", 2, 1, first_engine_id=100)
    member.join()
    member.joined(1, 1)
    for wanted in (False, True):
        [entered] = [
            command
            for command in member.enter_epoch(epoch(1 + wanted, *mids, avoid=avoid, spares=wanted), 0.0)
            if isinstance(command, links.Enter)
        ]
        assert entered.spares == (spares if wanted else set())
        assert not entered.spares & entered.neighbours
        for other in spares:  # lost: a neighbour between us, and nobody else
            [between] = [i for i in (-1, 1) if mids[(mids.index(1) + 2 * i) % len(mids)] == other][:1]
            rest = [mid for mid in mids if mid != mids[(mids.index(1) + between) % len(mids)]]
            assert other in (rest[rest.index(1) - 1], rest[(rest.index(1) + 1) % len(rest)])


def test_nothing_starts_before_the_links_are_up_and_then_in_order() -> None:
    d = Driver(1, 2)
    d.member.collectives.link_lost(2, "reset")
    assert d.post() == []
    assert d.post() == []
    d.member.enter_epoch(epoch(2, 1, 2), 2.0)
    started = d.ready(2)
    assert [c.op.seq for c in started if isinstance(c, cmd.StartOp)] == [1, 2]


def test_a_commit_before_done_or_of_another_epoch_is_ignored() -> None:
    d = Driver(1, 2)
    d.post()
    assert d.member.hear(m.Commit("g", 1, 1, 1), 2.0, 1, 1) == []
    d.member.op_finished(d.engine_id, 7, 0)
    assert d.member.hear(m.Commit("g", 2, 1, 1), 2.0, 1, 1) == []


def test_a_late_abort_voids_a_finished_op_and_runs_it_again_from_front() -> None:
    d = Driver(1, 2, 3)
    d.post()
    d.member.op_finished(d.engine_id, 7, 0)
    entered = d.member.enter_epoch(epoch(2, 1, 2), 2.0)
    assert told(entered, m.Result) == []
    assert told(entered, m.Failure) == []
    [start] = d.ready(2)
    assert isinstance(start, cmd.StartOp)
    assert start.op.input_buffer == 0
    d.member.op_finished(d.engine_id, 8, 0)
    [result] = told(d.member.hear(m.Commit("g", 2, 1, 1), 3.0, 1, 1), m.Result)
    assert (result.attempts, result.contributors, result.digest) == (2, ["m1", "m2"], 8)


def test_an_epoch_that_says_committed_delivers_with_the_old_contributors() -> None:
    d = Driver(1, 2, 3)
    d.post()
    d.member.op_finished(d.engine_id, 7, 0)
    entered = d.member.enter_epoch(epoch(2, 1, 2, upto=1), 2.0)
    [result] = told(entered, m.Result)
    assert (result.epoch, result.contributors) == (1, ["m1", "m2", "m3"])
    assert kinds(entered) == ["ToClient:Result", "ToClient:EpochInfo", "Enter"]


def test_done_waits_until_the_engine_has_let_go_of_older_attempts() -> None:
    d = Driver(1, 2, 3)
    d.post()
    first = d.engine_id
    entered = d.member.enter_epoch(epoch(2, 1, 2), 2.0)
    assert cmd.CancelOp(first) in entered
    d.ready(2)
    assert d.member.op_finished(d.engine_id, 8, 0) == []
    assert kinds(d.member.op_cancelled(first)) == ["ToMaster:Vote"]


def test_a_stale_finish_does_not_count_for_the_new_attempt() -> None:
    d = Driver(1, 2, 3)
    d.post()
    first = d.engine_id
    d.member.enter_epoch(epoch(2, 1, 2), 2.0)
    d.ready(2)
    assert d.member.op_finished(first, 7, 0) == []
    assert kinds(d.member.op_finished(d.engine_id, 8, 0)) == ["ToMaster:Vote"]


@pytest.mark.parametrize("attempt_is_live", [True, False])
def test_a_failure_is_told_only_when_the_memory_is_free(attempt_is_live: bool) -> None:
    d = Driver(1, 2)
    d.post()
    if not attempt_is_live:
        d.member.op_finished(d.engine_id, 7, 0)
    commands = d.member.evicted(m.Evicted("g", 1, "silent", 0), 2.0)
    failures = told(commands, m.Failure)
    if attempt_is_live:
        assert told(commands, m.Failure) == []  # nor is anything said of the connection: that ends all that is open
        failures = told(d.member.op_cancelled(d.engine_id), m.Failure)
    assert [(f.id, f.error) for f in failures] == [(1, "Evicted"), (0, "Evicted")]
    assert isinstance(commands[-1], links.Leave)


def test_eviction_carries_the_fate_of_what_was_finished() -> None:
    d = Driver(1, 2)
    d.post(), d.post()
    d.member.op_finished(d.engine_id - 1, 7, 0)
    d.member.op_finished(d.engine_id, 8, 0)
    commands = d.member.evicted(m.Evicted("g", 1, "silent", 1), 2.0)
    assert [r.id for r in told(commands, m.Result)] == [1]
    assert errors_of(commands) == [(2, "Evicted"), (0, "Evicted")]


def test_eviction_tells_of_no_epoch_that_an_update_did_not_end_in() -> None:
    """It may have admitted others: into an epoch that this member has not heard of."""
    d = Driver(1, 2)
    d.update()
    commands = d.member.evicted(m.Evicted("g", 1, "silent", 1), 2.0)
    assert told(commands, m.Result) == []
    assert errors_of(commands) == [(1, "Evicted"), (0, "Evicted")]


def test_what_the_others_committed_without_a_late_reporter_is_not_said_to_have_not_happened() -> None:
    d = Driver(1, 2)
    d.post(), d.post()
    commands = d.member.evicted(m.Evicted("g", 1, "m1 did not report", 1), 2.0)
    for number in (d.engine_id - 1, d.engine_id):
        assert cmd.CancelOp(number) in commands
        commands = commands + d.member.op_cancelled(number)
    assert errors_of(commands) == [(1, "OutcomeUnknown"), (2, "Evicted"), (0, "Evicted")]


@pytest.mark.parametrize(
    ("epoch_told", "digest", "fingerprint", "ends"),
    [(1, 7, 0, "result"), (1, 8, 0, "OutcomeUnknown"), (1, 7, 1, "OutcomeUnknown"), (2, 7, 0, "OutcomeUnknown")],
)
def test_what_others_committed_later_counts_only_where_it_is_the_same(
    epoch_told: int, digest: int, fingerprint: int, ends: str
) -> None:
    """The master was started again, and this member reported too late: nobody has compared its results."""
    d = Driver(1, 2)
    [done] = [d.post(), d.member.op_finished(d.engine_id, 7, 0)][1]
    d.post(), d.post()
    seen = [(1, digest, done.message.fingerprint ^ fingerprint), (2, 5, 5)]
    commands = d.member.evicted(m.Evicted("g", 1, "m1 was late", 0, 2, epoch_told, seen), 2.0)
    for number in (d.engine_id - 1, d.engine_id):
        commands += d.member.op_cancelled(number)
    told_of = {one.id: getattr(one, "error", "result") for one in told(commands, m.Result | m.Failure)}
    assert told_of == {1: ends, 2: "OutcomeUnknown", 3: "Evicted", 0: "Evicted"}


def test_what_was_stopped_may_have_been_committed_by_others() -> None:
    """It was done, then aborted; the others had not heard of that when the master died."""
    d = Driver(1, 2)
    d.post(), d.post()
    [done] = d.member.op_finished(d.engine_id - 1, 7, 0)
    d.member.hear(m.Abort("g", 1, 2, "members call different collectives"), 0.0, 1, 1)
    d.member.op_cancelled(d.engine_id)
    seen = [(1, 7, done.message.fingerprint)]
    commands = d.member.evicted(m.Evicted("g", 1, "m1 was late", 0, 1, 1, seen), 2.0)
    assert errors_of(commands) == [(1, "OutcomeUnknown"), (2, "Evicted"), (0, "Evicted")]


def test_an_update_ends_as_it_has_for_others() -> None:
    """They were told by a master that died, this member was not; what it had finished before has committed, too."""
    d = Driver(1, 2)
    d.post()
    d.member.op_finished(d.engine_id, 7, 0)
    d.update()
    updated = m.Updated("g", 1, m.UpdateOutcome(2, 2, ["m1", "m2", "m3"]))
    [first] = told(d.member.hear(updated, 2.0, 1, 1), m.Result)
    assert (first.seq, first.epoch, first.contributors) == (1, 1, ["m1", "m2"])
    assert d.member.hear(updated, 2.0, 1, 1) == []
    report = d.member.reconnected(2, 22)[0].message
    assert (report.finished.committed, report.updated) == (2, updated.outcome)
    assert sorted(seq for seq, _, _ in report.finished.done) == [1, 2]
    place, second = [
        one.message for one in d.member.enter_epoch(epoch(3, 1, 2, upto=2), 3.0) if isinstance(one, cmd.ToClient)
    ]
    assert isinstance(place, m.EpochInfo), "what the client calls after the result belongs to the new members"
    assert (second.seq, second.epoch, second.contributors) == (2, 2, ["m1", "m2", "m3"])
    assert d.member.collectives.updated == updated.outcome, "others may stand at it still"
    d.member.enter_epoch(epoch(4, 1, 2, upto=3), 3.0)
    assert d.member.collectives.updated == updated.outcome, "also where more is committed that they have not heard of"


def test_too_small_a_world_fails_pending_and_later_ops_but_not_update_membership() -> None:
    d = Driver(1, 2, floor=2)
    d.post()
    running = d.engine_id
    d.member.enter_epoch(epoch(2, 1, floor=2), 2.0)
    [pending] = told(d.member.op_cancelled(running), m.Failure)
    assert (pending.id, pending.error) == (1, "WorldTooSmall")
    assert "min_world=2" in pending.expected
    d.ready(2)
    [later] = told(d.post(), m.Failure)
    assert (later.id, later.error) == (2, "WorldTooSmall")
    assert kinds(d.update()) == ["ToMaster:Vote"]
    admitted = d.member.enter_epoch(epoch(3, 1, 9, upto=3, floor=2), 3.0)
    [result] = told(admitted, m.Result)
    assert (result.id, result.seq, result.epoch) == (3, 3, 3)


def test_what_is_called_behind_an_update_membership_waits_for_its_outcome_in_too_small_a_world() -> None:
    """Who is admitted at it calls the same seqs: they must not have failed here."""
    d = Driver(1, 2, floor=2)
    d.post()
    d.update()
    d.post()
    old = d.engine_id
    entered = d.member.enter_epoch(epoch(2, 1, floor=2), 2.0)
    entered += d.member.op_cancelled(old - 2) + d.member.op_cancelled(old)
    assert errors_of(entered) == [(1, "WorldTooSmall")]
    assert kinds(d.ready(2)) == ["ToMaster:Vote"]
    assert d.post() == d.update() == [], "nothing starts in this world"
    admitted = d.member.enter_epoch(epoch(3, 1, 9, upto=2, floor=2), 3.0)
    assert [(ended.id, ended.epoch) for ended in told(admitted, m.Result)] == [(2, 3)]
    started = [command.op.seq for command in d.ready(3) if isinstance(command, cmd.StartOp)]
    assert (started, told(admitted, m.Failure)) == ([3, 4, 5], [])


def test_they_fail_in_too_small_a_world_where_the_update_membership_does() -> None:
    d = Driver(1, floor=2)
    assert kinds(d.update()) == ["ToMaster:Vote"]
    assert d.post() == d.update() == d.post() == []
    ended = d.member.enter_epoch(epoch(2, 1, voids=[m.Void(1, "CollectiveMismatch", "", {})], floor=2), 2.0)
    assert errors_of(ended) == [(1, "CollectiveMismatch"), (2, "WorldTooSmall")]
    assert kinds(d.ready(2)) == ["ToMaster:Vote"], "and the next one is open"


def test_in_too_small_a_world_that_is_over_calls_wait_for_the_next() -> None:
    """Others have passed the update_membership, with joiners, and the master that told them has died."""
    d = Driver(1, floor=2)
    d.update()
    d.post()
    assert d.member.hear(m.Updated("g", 1, m.UpdateOutcome(1, 2, ["m1", "m9"])), 2.0, 1, 1) == []
    assert d.post() == []
    assert d.member.reconnected(2, 22)[0].message.aborted, "so no master lets it go on"
    ended = d.member.enter_epoch(epoch(3, 1, upto=1, floor=2), 3.0)
    assert [(one.id, one.epoch) for one in told(ended, m.Result)] == [(1, 2)]
    assert errors_of(ended) == [(2, "WorldTooSmall"), (3, "WorldTooSmall")]


def test_an_update_that_has_ended_for_others_ends_so_where_the_member_is_put_out_before_it_hears_of_their_epoch() -> (
    None
):
    d = Driver(1)
    d.update()
    d.member.hear(m.Updated("g", 1, m.UpdateOutcome(1, 2, ["m1", "m9"])), 2.0, 1, 1)
    out = d.member.evicted(m.Evicted("g", 1, "m1 was late", 0, 1, 1, []), 2.0)
    assert [(one.id, one.epoch) for one in told(out, m.Result)] == [(1, 2)]


def test_update_membership_sends_a_token_and_ends_with_the_commit() -> None:
    d = Driver(1, 2)
    assert kinds(d.update()) == ["ToMaster:Vote", "StartOp"]
    token = d.engine_id
    commands = d.member.hear(m.Commit("g", 1, 1, 1), 2.0, 1, 1)
    [result] = told(commands, m.Result)
    assert result.id == 1
    assert cmd.CancelOp(token) in commands


def test_a_joiner_starts_its_count_behind_what_was_committed() -> None:
    member = core.Member("g", "m1", 2, 1, 1)
    member.joined(1, 1)
    member.enter_epoch(epoch(5, 2, 1, upto=41), 0.0)
    member.links_ready(5, [1, 2])
    call = post(1, data(), 5)
    [start] = member.post(call, member.call(call), 0.0)
    assert isinstance(start, cmd.StartOp)
    assert start.op.seq == 42


def test_voids_end_called_and_not_yet_called_ops_alike() -> None:
    d = Driver(1, 2)
    d.post()
    running = d.engine_id
    voids = [m.Void(seq, "CollectiveMismatch", "calls differ", {"m1": "a", "m2": "b"}) for seq in (1, 2)]
    d.member.enter_epoch(epoch(2, 1, 2, voids=voids), 2.0)
    [first] = told(d.member.op_cancelled(running), m.Failure)
    d.ready(2)
    [second] = told(d.post(), m.Failure)
    assert [(f.id, f.error, f.calls) for f in (first, second)] == [
        (1, "CollectiveMismatch", {"m1": "a", "m2": "b"}),
        (2, "CollectiveMismatch", {"m1": "a", "m2": "b"}),
    ]
    assert kinds(d.post()) == ["StartOp"]


def test_a_void_that_is_told_again_in_short_keeps_its_text() -> None:
    d = Driver(1, 2)
    void = m.Void(1, "CollectiveMismatch", "calls differ", {"m1": "a", "m2": "b"})
    d.member.enter_epoch(epoch(2, 1, 2, voids=[void]), 2.0)
    d.member.enter_epoch(epoch(3, 1, 2, voids=[brief(void)]), 2.0)
    [failure] = told(d.post(), m.Failure)
    assert failure.calls == {"m1": "a", "m2": "b"}


def test_an_epoch_is_entered_from_what_changed() -> None:
    d = Driver(1, 2, 3)
    second, third = epoch(2, 1, 3, upto=0), epoch(3, 3, 1, upto=0)
    first = d.member.epoch
    assert first is not None
    changes = [change(first, second), change(second, third)]
    for whole, changed in zip((second, third), changes, strict=True):
        assert changed is not None
        assert links.Enter in map(type, d.member.hear(changed, 2.0, 1, 1))
        assert d.member.epoch == whole
    assert d.member.hear(changed, 2.0, 1, 1) == [], "it is told again"
    assert d.member.hear(msgspec.structs.replace(changed, epoch=4, term=0), 2.0, 1, 1) == [], "an old master tells"
    with pytest.raises(ProtocolError, match="expected epoch 3 of group g; got epoch 2 of group g"):
        d.member.hear(msgspec.structs.replace(changed, epoch=4), 2.0, 1, 1)
    assert d.member.epoch == third


def test_the_master_asks_for_a_call_that_comes_later() -> None:
    d = Driver(1, 2)
    assert d.member.hear(m.Abort("g", 1, 1, "mismatch"), 0.0, 1, 1) == []
    [answer] = d.post()
    assert answer == cmd.ToMaster(m.Mismatch("g", 1, 1, 1, str(data()), data().fingerprint()))


def test_of_a_mismatch_the_root_is_named() -> None:
    """Its rank is the ring's, which is not torch's."""
    d = Driver(1, 2)
    d.member.hear(m.Abort("g", 1, 1, "mismatch"), 0.0, 1, 1)
    [answer] = d.post(Descriptor(Kind.broadcast, DType.float32, count=4, root=1))
    assert isinstance(answer, cmd.ToMaster)
    assert isinstance(answer.message, m.Mismatch)
    assert answer.message.call == "broadcast(4 x float32, root=1 (m2))"


def test_on_failure_raise_asks_the_master_to_give_the_op_up() -> None:
    d = Driver(1, 2, 3)
    d.post(data(on_failure="raise"))
    running = d.engine_id
    entered = d.member.enter_epoch(epoch(2, 1, 2), 2.0)
    assert cmd.ToMaster(m.GiveUp("g", 1, 2, [1], "")) in entered
    assert d.ready(2) == []
    d.member.op_cancelled(running)
    void = m.Void(1, "OperationAborted", "m3 left", {})
    [failed] = told(d.member.enter_epoch(epoch(3, 1, 2, voids=[void]), 3.0), m.Failure)
    assert (failed.id, failed.error) == (1, "OperationAborted")


def test_on_failure_raise_runs_again_where_nobody_is_lost() -> None:
    d = Driver(1, 2, 3)
    d.post(data(on_failure="raise"))
    d.member.enter_epoch(epoch(2, 3, 1, 2), 2.0)
    assert kinds(d.ready(2)) == ["StartOp"]


def test_what_is_called_by_who_does_not_know_of_a_loss_is_given_up() -> None:
    """It must not run without the lost one, and the members that know call something else."""
    d = Driver(1, 2, 3)
    d.member.enter_epoch(epoch(2, 1, 2), 2.0)
    d.ready(2)
    why = "the membership changed: m3 left or was lost"
    assert d.post(data(on_failure="raise"), epoch=1) == [cmd.ToMaster(m.GiveUp("g", 1, 2, [1], why))]
    assert kinds(d.post(data(), epoch=1)) == ["StartOp"]
    entered = d.member.enter_epoch(epoch(3, 1, 2), 3.0)
    assert cmd.ToMaster(m.GiveUp("g", 1, 3, [1], why)) in entered


def test_older_epochs_and_terms_are_ignored() -> None:
    d = Driver(1, 2)
    d.member.enter_epoch(epoch(5, 1, 2, term=3), 1.0)
    assert d.member.enter_epoch(epoch(4, 1, 2, term=3), 1.0) == []
    assert d.member.enter_epoch(epoch(6, 1, 2, term=2), 1.0) == []


def test_without_a_master_all_that_was_called_is_unknown() -> None:
    """Others may have found a master, and be done with what this member is not. An update has no result to lose."""
    d = Driver(1, 2)
    d.post(), d.post()
    running = d.engine_id
    d.update()
    d.member.op_finished(running - 1, 7, 0)
    commands = d.member.master_unreachable("h:1", 10.0, "refused")
    commands += d.member.op_cancelled(running)
    assert errors_of(commands) == [
        (1, "OutcomeUnknown"), (3, "MasterUnreachable"), (2, "OutcomeUnknown"), (0, "MasterUnreachable"),
    ]  # fmt: skip


def test_the_same_master_commits_nothing_that_is_not_finished_here() -> None:
    d = Driver(1, 2)
    d.post(), d.post()
    running = d.engine_id
    d.member.op_finished(running - 1, 7, 0)
    commands = d.member.forgotten("reset") + d.member.op_cancelled(running)
    assert errors_of(commands) == [(1, "OutcomeUnknown"), (2, "Evicted"), (0, "Evicted")]


# How a membership ends: the error of its calls that have not happened, and which of them may have.
BEGUN, FINISHED, ROOTED, NEW, UPDATE = "begun", "finished", "a broadcast that is not begun", "not begun", "an update"
MAYBE = {BEGUN, FINISHED, ROOTED}
ENDS: dict[str, tuple[str, set[str], Callable[[core.Member], list[cmd.Command]]]] = {
    "detached": ("PeerDaemonLost", MAYBE, lambda one: one.leave("detached")),
    "its daemon stops": (
        "PeerDaemonLost", MAYBE,
        lambda one: one.leave("", ending=outcomes.left("m1", "stops", m.Failure(0, "PeerDaemonLost", "stops"))),
    ),
    "its daemon goes down": ("PeerDaemonLost", MAYBE, lambda one: one.lost("goes down")),
    "nonsense": (
        "ProtocolError", MAYBE, lambda one: one.leave("x", ending=outcomes.nonsense(ProtocolError("is no call")))
    ),
    "asked to leave": (
        "AskedToLeave", MAYBE, lambda one: one.leave("", ending=outcomes.asked_to_leave("m1", "", daemon=False))
    ),
    "no master": ("MasterUnreachable", MAYBE, lambda one: one.master_unreachable("h:1", 9.0, "refused")),
    "sent away": ("ConfigError", MAYBE, lambda one: one.sent_away("d", "its token was revoked")),
    "forgotten": ("Evicted", MAYBE, lambda one: one.forgotten("reset")),
    "forgotten where the master commits": ("Evicted", {FINISHED}, lambda one: one.forgotten("reset")),
    "evicted": ("Evicted", set(), lambda one: one.evicted(m.Evicted("g", 1, "silent", 0), 2.0)),
    "evicted, and one may have been committed": (
        "Evicted", {FINISHED}, lambda one: one.evicted(m.Evicted("g", 1, "silent", 0, 1), 2.0)
    ),
    "evicted, and nobody knows": (
        "Evicted", MAYBE, lambda one: one.evicted(m.Evicted("g", 1, "silent", 0, m.MOST), 2.0)
    ),
}  # fmt: skip


@pytest.mark.parametrize("how", ENDS)
def test_every_end_says_of_every_call_what_may_have_happened_and_the_connection_ends_last(how: str) -> None:
    """Definite where that is known, and where nobody can know, OutcomeUnknown with its cause (R8)."""
    error, maybe, end = ENDS[how]
    d = Driver(1, 2)
    entered = epoch(2, 1, 2)
    collectors = "master" if "master commits" in how else "members"
    plan = msgspec.structs.replace(entered.plan, collectors=collectors)
    d.member.enter_epoch(msgspec.structs.replace(entered, plan=plan), 1.0)
    d.ready(2, 1, 2)
    calls = {
        FINISHED: data(),
        BEGUN: data(),
        NEW: data(),
        ROOTED: rooted(1),
        UPDATE: Descriptor(Kind.update_membership),
    }
    d.post(calls[FINISHED]), d.post(calls[BEGUN])
    running = d.engine_id
    d.member.op_finished(running - 1, 7, 0)
    d.member.collectives.link_lost(2, "reset")
    for state in (NEW, ROOTED, UPDATE):
        d.post(calls[state])
    before = [op.state for op in d.member.collectives.open.values()]
    assert [before[0], *before[2:]] == [OpState.done, *[OpState.waiting] * 3]
    commands = end(d.member)
    assert not [one for one in told(commands, m.Failure) if not one.id]
    failures = told(commands + d.member.op_cancelled(running), m.Failure)
    ends = {state: next(one for one in failures if one.id == number) for number, state in enumerate(calls, 1)}
    assert {state: (one.error, one.cause) for state, one in ends.items()} == {
        state: ("OutcomeUnknown", error) if state in maybe else (error, "") for state in calls
    }
    last = [(one.id, one.error) for one in failures[5:]]
    assert last == ([] if how in ("detached", "its daemon goes down") else [(0, error)])
    assert all("untouched" in one.what or "kept" in one.what for one in ends.values())


def test_a_link_is_reported_unreachable_each_time_and_to_a_new_master_once() -> None:
    """The master may have taken the first word for one of a link that came up since."""
    d = Driver(1, 2)
    up, two = links.MemberLinks(1, d.member.epoch), infos(2)[0]
    for why in ("refused", "no answer"):
        [said] = d.member.links_say(links.LinkUnreachable(up, two, links.COLLECTIVES, why))
        assert said == cmd.ToMaster(m.LinkDown("g", 1, 1, 2, "unreachable", why))
    d.member.reconnected(2, 9)
    assert d.member.resumed(m.Resumed("g", 1, 1, 2)) == [said]
    up.links = {(2, links.COLLECTIVES): links.Link(up, two, links.COLLECTIVES, 0.0, links.State.up)}
    taken_back = cmd.ToMaster(m.LinkDown("g", 1, 1, 2, "up", ""))
    assert d.member.links_say(links.LinksUp(up, 1)) == [taken_back]
    assert d.member.links_say(links.LinksUp(up, 1)) == []
    d.member.enter_epoch(epoch(2, 1, 2), 1.0)
    unreachable = links.LinkUnreachable(up, two, links.COLLECTIVES, "refused")
    assert kinds(d.member.links_say(unreachable)) == ["ToMaster:LinkDown"]


def test_a_complaint_that_the_old_master_took_with_it_is_said_again() -> None:
    d = Driver(1, 2, linked=())
    [complaint] = d.member.collectives.link_lost(2, "reset")
    [told] = d.member.reconnected(2, 9)
    assert isinstance(told.message, m.Report)
    assert d.member.master_session.reporting
    assert d.member.resumed(m.Resumed("g", 1, 1, 2)) == [complaint]
    assert not d.member.master_session.reporting
    assert d.member.reconnected(3, 9) == [], "the same master has dropped it"


def test_that_its_client_writes_during_a_call_is_said_again_to_a_new_master() -> None:
    d = Driver(1, 2)
    d.post()
    op = d.member.collectives.open[1]
    [said] = d.member.written(op)
    assert said == cmd.ToMaster(m.Written("g", 1, 1, str(op)))
    d.member.reconnected(2, 9)
    assert said in d.member.resumed(m.Resumed("g", 1, 1, 2))
    d.member.forgotten("reset")
    assert d.member.written(op) == []  # it is out


def test_what_never_began_has_not_happened_whatever_the_master_does() -> None:
    """Of a sum nobody has a result without this member's share; a broadcast may have ended for others."""
    d = Driver(1, 2)
    d.post()
    d.member.collectives.link_lost(2, "reset")
    d.post()
    d.post(Descriptor(Kind.broadcast, DType.float32, count=4, root=1))
    d.post(data(0))
    commands = d.member.master_unreachable("h:1", 10.0, "refused") + d.member.op_cancelled(d.engine_id)
    ends = {failure.id: failure.error for failure in told(commands, m.Failure) if failure.id}
    assert ends == {1: "OutcomeUnknown", 2: "MasterUnreachable", 3: "OutcomeUnknown", 4: "OutcomeUnknown"}


def test_what_began_in_an_earlier_epoch_only_has_not_happened_in_this_one() -> None:
    d = Driver(1, 2)
    d.post()
    first = d.engine_id
    d.member.enter_epoch(epoch(2, 1, 2), 1.0)
    commands = d.member.op_cancelled(first) + d.member.master_unreachable("h:1", 10.0, "refused")
    assert errors_of(commands) == [(1, "MasterUnreachable"), (0, "MasterUnreachable")]


def test_who_was_told_to_stop_reports_so_and_nothing_as_done() -> None:
    d = Driver(1, 2)
    d.post()
    d.member.op_finished(d.engine_id, 7, 0)
    assert [(one.aborted, one.finished.done) for one in reports(d, 2)] == [(False, [(1, 7, data().fingerprint())])]
    d.member.hear(m.Abort("g", 1, 1, "calls differ"), 0.0, 1, 1)
    assert [(one.aborted, one.finished.done) for one in reports(d, 3)] == [(True, [])]


def reports(d: Driver, master: int) -> list[m.Report]:
    said = [one.message for one in d.member.reconnected(master, master) if isinstance(one, cmd.ToMaster)]
    return [one for one in said if isinstance(one, m.Report)]


def test_links_that_come_up_after_an_abort_start_nothing() -> None:
    d = Driver(1, 2)
    d.post()
    assert kinds(d.member.hear(m.Abort("g", 1, 1, "calls differ"), 0.0, 1, 1)) == ["CancelOp", "ToMaster:Mismatch"]
    assert d.ready(1) == []
    assert d.post() == []
    assert d.member.enter_epoch(epoch(2, 1, 2), 1.0)
    assert kinds(d.ready(2)) == ["StartOp", "StartOp"]


# ---- other collectives --------------------------------------------------------------------------------


def rooted(root: int, kind: Kind = Kind.broadcast, **more: Any) -> Descriptor:
    return Descriptor(kind, count=4, root=root, **more)


def test_only_results_that_all_have_are_compared() -> None:
    d = Driver(1, 2, 3)
    d.post(Descriptor(Kind.reduce_scatter, count=4))
    [done] = d.member.op_finished(d.engine_id, 77, 9, 5, 0.25)
    assert done.message.digest == 0
    [result] = told(d.member.hear(m.Commit("g", 1, 1, 1), 3.0, 1, 1), m.Result)
    assert (result.digest, result.algorithm, result.bytes_saved, result.codec_error) == (77, "ring", 5, 0.25)


def test_a_barrier_is_an_op_with_no_result() -> None:
    d = Driver(1, 2)
    assert kinds(d.post(Descriptor(Kind.barrier))) == ["StartOp"]
    assert kinds(d.member.op_finished(d.engine_id, 0, 0)) == ["ToMaster:Vote"]
    [result] = told(d.member.hear(m.Commit("g", 1, 1, 1), 3.0, 1, 1), m.Result)
    assert result.algorithm == "none"


def test_a_member_that_is_left_alone_stands_at_its_update_though_an_old_token_is_in_the_engine() -> None:
    d = Driver(1, 2)
    d.update()
    token = d.engine_id
    d.member.enter_epoch(epoch(2, 1), 2.0)
    assert d.ready(2) == [cmd.ToMaster(m.Vote("g", 1, 2, 1, *tally.UPDATE))]
    assert d.member.op_cancelled(token) == []
    assert told(d.member.hear(m.Commit("g", 2, 1, 1), 3.0, 1, 1), m.Result)


def test_what_is_told_of_a_call_fits_its_message() -> None:
    d = Driver(*range(1, 601))
    d.post(Descriptor(Kind.all_gather, counts=(100_000,) * 600))
    [answer] = d.member.mismatch(1)
    assert isinstance(answer, cmd.ToMaster)
    assert len(answer.message.call) == 4000


def test_alone_a_barrier_needs_no_engine() -> None:
    d = Driver(1)
    assert kinds(d.post(Descriptor(Kind.barrier))) == ["ToMaster:Vote"]
    assert told(d.member.hear(m.Commit("g", 1, 1, 1), 3.0, 1, 1), m.Result)


def test_a_retry_speaks_of_the_same_root_and_a_later_call_of_the_old_epochs_rank() -> None:
    d = Driver(3, 1, 2)
    [first] = d.post(rooted(2))
    assert first.op.resolved.descriptor.root == 2
    assert first.op.resolved.needs == {2, 3}
    d.member.enter_epoch(epoch(2, 1, 2), 2.0)
    [again] = d.ready(2)
    [later] = d.post(rooted(1), epoch=1)  # the client had not read of epoch 2 when it called
    [new] = d.post(rooted(1))
    assert [start.op.resolved.descriptor.root for start in (again, later, new)] == [1, 0, 1]
    [done] = [c for c in d.member.op_finished(again.op.engine_id, 7, 0) + d.member.op_cancelled(100) if c]
    assert done.message.fingerprint == rooted(1).fingerprint()


def test_a_lost_root_is_given_up_in_the_new_epoch_and_for_calls_that_come_later() -> None:
    d = Driver(1, 2, 3)
    d.post(rooted(2))
    d.post()
    entered = d.member.enter_epoch(epoch(2, 1, 2), 2.0)
    why = "the root of broadcast, m3, was lost"
    assert cmd.ToMaster(m.GiveUp("g", 1, 2, [1], why)) in entered
    assert [start.op.seq for start in d.ready(2)] == [2]
    assert d.post(rooted(2), epoch=1) == [cmd.ToMaster(m.GiveUp("g", 1, 2, [3], why))]
    void = m.Void(1, "OperationAborted", why, {})
    entered = d.member.enter_epoch(epoch(3, 1, 2, voids=[void]), 3.0)
    assert cmd.ToMaster(m.GiveUp("g", 1, 3, [3], why)) in entered
    [failed] = told(d.member.op_cancelled(100), m.Failure)
    assert (failed.id, failed.error, failed.what) == (1, "OperationAborted", why)


def test_a_member_whose_call_has_another_root_gets_the_void_too() -> None:
    d = Driver(1, 2, 3)
    void = m.Void(1, "OperationAborted", "the root of broadcast, m3, was lost", {})
    d.member.enter_epoch(epoch(2, 1, 2, voids=[void]), 2.0)
    [failed] = told(d.post(rooted(0)), m.Failure)
    assert (failed.error, failed.what) == ("OperationAborted", void.text)


def test_a_call_that_has_no_route_is_given_up_and_runs_where_there_is_one() -> None:
    d = Driver(1, 2, 3, 4)
    d.post(rooted(0, Kind.gather))
    entered = d.member.enter_epoch(epoch(2, 1, 2, 3, 4, avoid=[(1, 2)]), 2.0)
    [given_up] = [c.message for c in entered if isinstance(c, cmd.ToMaster)]
    assert "needs a link between m1 and m2, who cannot reach each other" in given_up.reason
    d.member.enter_epoch(epoch(3, 1, 2, 4), 2.0)  # before the master could void it
    assert kinds(d.ready(3)) == ["StartOp"]


def test_an_epoch_that_the_client_cannot_know_is_nonsense() -> None:
    d = Driver(1, 2)
    with pytest.raises(ProtocolError, match="got epoch 2"):
        d.post(epoch=2)
    d.member.enter_epoch(epoch(3, 1, 2), 2.0)
    d.post(epoch=3)
    d.post(data(16), epoch=1)  # another thread of it has made the call before
    d.member.enter_epoch(epoch(2 + EPOCHS_SPOKEN_OF, 1, 2), 2.0)
    d.post(epoch=2 + EPOCHS_SPOKEN_OF)
    with pytest.raises(ProtocolError, match="got epoch 1"):
        d.post(data(17), epoch=1)  # no thread is so late


# ---- links on demand ----------------------------------------------------------------------------------


def test_an_op_that_waits_for_a_link_holds_back_those_behind_it() -> None:
    d = Driver(1, 2, 3, 4, linked=(2, 4))
    assert kinds(d.post()) == ["StartOp"]
    assert d.post(Descriptor(Kind.all_to_all, count=1)) == [links.Need(frozenset({3}))]
    assert d.post() == []
    assert kinds(d.ready(1, 2, 4)) == ["Need"]
    assert [start.op.seq for start in d.ready(1, 2, 3, 4)] == [2, 3]
    assert kinds(d.post()) == ["StartOp"]


def test_the_loss_of_a_link_that_nothing_uses_costs_nothing() -> None:
    d = Driver(1, 2, 3, 4)
    d.post(Descriptor(Kind.all_to_all, count=1))
    d.member.op_finished(d.engine_id, 7, 0)
    d.member.hear(m.Commit("g", 1, 1, 1), 2.0, 1, 1)
    assert d.member.collectives.link_lost(3, "reset") == []
    assert kinds(d.post()) == ["StartOp"]
    assert kinds(d.post(Descriptor(Kind.all_to_all, count=1))) == ["Need"]


@pytest.mark.parametrize("finished", [False, True])
def test_the_loss_of_a_link_with_uncommitted_bytes_ends_the_epoch(finished: bool) -> None:
    d = Driver(1, 2, 3, 4)
    d.post(Descriptor(Kind.all_to_all, count=1))
    if finished:  # here; the other end may still wait for bytes that are lost
        d.member.op_finished(d.engine_id, 7, 0)
    assert kinds(d.member.collectives.link_lost(3, "reset")) == ["ToMaster:LinkDown"]
    assert d.post() == []


def test_a_link_that_is_lost_while_an_op_waits_for_others_is_needed_again() -> None:
    d = Driver(1, 2, 3, 4, 5, linked=(2, 5))
    assert d.post(Descriptor(Kind.all_to_all, count=1)) == [links.Need(frozenset({3, 4}))]
    assert d.ready(1, 2, 3, 5) == [links.Need(frozenset({4}))]
    assert d.member.collectives.link_lost(3, "reset") == [links.Need(frozenset({3, 4}))]
    assert kinds(d.ready(1, 2, 3, 4, 5)) == ["StartOp"]


# ---- whom the master means, and what the links say ---------------------------------------------------


HEARD = [  # in epoch 1 by m1, whose mid is 1 and whose op 1 is finished
    (epoch(2, 1, 2), ["ToClient:EpochInfo", "Enter"]),
    (m.Commit("g", 1, 1, 1), ["ToClient:Result"]),
    (m.Abort("g", 1, 1, "mismatch"), ["ToMaster:Mismatch"]),
    (m.ContributeZeros("g", 1, 1, 2, Descriptor(Kind.all_reduce, count=4, grace=1.0)), ["StartOp"]),
    (m.Redial("g", 1, 1, [2], 0.5, "stuck"), ["Redial"]),
    (m.Evicted("g", 1, "silent", 0), ["ToClient:Failure", "ToClient:Failure", "Leave"]),
    (m.Waited("g", 1, 1, 1, "m2", []), []),
]


@pytest.mark.parametrize(("message", "follows"), HEARD, ids=lambda value: type(value).__name__)
def test_a_member_hears_what_the_master_says_to_it_and_to_nobody_else(message: Any, follows: list[str]) -> None:
    d = Driver(1, 2)
    d.post()
    d.member.op_finished(d.engine_id, 7, 0)
    for other in ({"group": "h"}, {"to": 2}, {"mid": 2}):
        if other.keys() <= set(message.__struct_fields__):
            assert not d.member.addressed(msgspec.structs.replace(message, **other))
            assert d.member.hear(msgspec.structs.replace(message, **other), 2.0, 1, 1) == []
    assert d.member.addressed(message)
    assert kinds(d.member.hear(message, 2.0, 1, 1)) == follows
    d.member.leave("detached")
    assert not d.member.addressed(message)
    assert d.member.hear(message, 3.0, 1, 1) == []


def test_a_redial_of_another_epoch_is_ignored() -> None:
    d = Driver(1, 2)
    assert d.member.hear(m.Redial("g", 1, 2, [], 0.5, "stuck"), 2.0, 1, 1) == []
    assert d.member.hear(m.Redial("g", 1, 1, [], 0.5, "stuck"), 2.0, 1, 1) == [links.Redial((), 0.5, "stuck")]


def test_answers_to_a_join_are_heard_by_name_until_the_first_epoch() -> None:
    member = core.Member("g", "m1", 2, 1, first_engine_id=100)
    member.join()
    for group, name in (("h", "m1"), ("g", "m2")):
        member.hear(m.Joined(group, name, 7, ""), 0.0, 3, 11)
        assert member.hear(m.Refused(group, name, "full"), 0.0, 3, 11) == []
    assert (member.mid, member.over) == (0, False)
    member.hear(m.Joined("g", "m1", 1, ""), 0.0, 3, 11)
    assert (member.mid, member.master_session.connection, member.master_session.master) == (1, 3, 11)
    member.hear(epoch(1, 1, 2), 0.0, 3, 11)
    member.hear(m.Joined("g", "m1", 9, ""), 0.0, 4, 12)
    assert member.hear(m.Refused("g", "m1", "full"), 0.0, 4, 12) == []
    assert (member.mid, member.master_session.connection, member.over) == (1, 3, False)
    other = core.Member("g", "m1", 2, 1, first_engine_id=100)
    assert kinds(other.hear(m.Refused("g", "m1", "full"), 0.0, 3, 11)) == ["ToClient:Failure", "Leave"]


@pytest.mark.parametrize(
    ("evicted", "told"),
    [
        (False, m.Failure(0, "ConfigError", "the master refused the join: full", "m1")),
        (True, m.Failure(0, "Evicted", "full, while it waited for its place", "m1", hint=outcomes._AGAIN)),
    ],
)
def test_a_joiner_that_an_operator_sends_away_has_done_nothing_wrong(evicted: bool, told: m.Failure) -> None:
    member = core.Member("g", "m1", 2, 1, first_engine_id=100)
    member.join()
    ended = member.hear(m.Refused("g", "m1", "full", evicted), 0.0, 3, 11)
    assert next(one.message for one in ended if isinstance(one, cmd.ToClient)) == told


@pytest.mark.parametrize("p2p", [False, True])
def test_what_the_links_say(p2p: bool) -> None:
    d = Driver(1, 2, 3, 4, linked=(2, 4))
    _, three, _ = others = infos(2, 3, 4)
    channel = links.P2P if p2p else links.COLLECTIVES
    up = links.MemberLinks(1, d.member.epoch)
    up.links = {(one.mid, channel): links.Link(up, one, channel, 0.0, links.State.up) for one in others}
    if p2p:
        call = m.Post(1, Descriptor(Kind.send, count=4), 0, 64, 1, 2, 0)
        d.member.post(call, d.member.call(call), 1.0)
        d.member.hear(m.Matched("g", 1, 1, 1, 1), 1.0, 1, 1)
    else:
        assert d.post(Descriptor(Kind.all_to_all, count=1)) == [links.Need(frozenset({3}))]
    assert d.member.links_say(links.LinksUp(up, 7)) == []  # of another epoch
    told = [links.LinksUp(up, 1), links.P2PUp(up)]
    assert d.member.links_say(told[not p2p]) == []
    assert kinds(d.member.links_say(told[p2p])) == ["StartOp"]
    assert d.member.links_say(links.LinkLost(up, three, 1 - channel, "reset")) == []  # nothing uses that one
    assert d.member.links_say(links.LinkBroken(up, three, 1 - channel, "reset")) == []
    for trouble, kind in (
        (links.LinkBroken(up, three, channel, "reset"), "broken"),
        (links.LinkLost(up, three, channel, "reset"), "lost"),
        (links.LinkUnreachable(up, three, channel, "refused"), "unreachable"),
    ):
        if p2p and kind == "unreachable":
            d.member.enter_epoch(epoch(2, 1, 2, 3, 4), 2.0)
            d.member.hear(m.Matched("g", 1, 2, 1, 2), 2.0, 1, 1)
        said = m.LinkDown("g", 1, d.member.epoch_number, 3, kind, trouble.reason, p2p)
        assert d.member.links_say(trouble)[0] == cmd.ToMaster(said)
