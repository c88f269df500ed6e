"""A daemon that takes part for a client that is late (R20), step by step."""

from __future__ import annotations

from typing import Any

import pytest

from tests.peer.test_member import Driver, data, epoch, kinds, told
from wancoll.collective import Codec, Descriptor, DType, Kind, ReduceOp
from wancoll.limits import Limits
from wancoll.peer.core import commands as cmd
from wancoll.wire import messages as m

SUM = Descriptor(Kind.all_reduce, DType.float32, count=4, grace=0.5)


def zeros_for(seq: int, number: int = 1, call: Descriptor = SUM) -> m.ContributeZeros:
    return m.ContributeZeros("g", 1, number, seq, call)


def covering(*mids: int, **options: Any) -> tuple[Driver, Any]:
    """A member whose daemon takes part in op 1, and that op."""
    d = Driver(*(mids or (1, 2)), **options)
    [start] = d.member.hear(zeros_for(1), 2.0, 1, 1)
    assert isinstance(start, cmd.StartOp)
    assert start.op.zeros
    return d, start.op


def finish(d: Driver, seq: int = 1, number: int = 1) -> list[cmd.Command]:
    [done] = d.member.op_finished(d.engine_id, 7, 0)
    assert done == cmd.ToMaster(m.Vote("g", 1, number, seq, 7, SUM.fingerprint()))
    return d.member.hear(m.Commit("g", number, seq, 1), 3.0, 1, 1)


def test_a_call_with_grace_is_told_when_it_is_made_and_in_each_epoch_again() -> None:
    d = Driver(1, 2, 3)
    assert d.post(SUM)[-1] == cmd.ToMaster(m.CalledWithGrace("g", 1, 1, 1, SUM))
    assert kinds(d.post(data())) == ["StartOp"]
    entered = d.member.enter_epoch(epoch(2, 1, 2), 2.0)
    assert cmd.ToMaster(m.CalledWithGrace("g", 1, 2, 1, SUM)) in entered
    d.ready(2)
    d.member.op_finished(d.engine_id - 1, 7, 0)
    d.member.hear(m.Commit("g", 2, 1, 1), 3.0, 1, 1)
    assert "ToMaster:CalledWithGrace" not in kinds(d.member.enter_epoch(epoch(3, 1, 2, upto=1), 2.0))


def test_a_new_master_is_told_again() -> None:
    d = Driver(1, 2)
    d.post(SUM)
    d.member.reconnected(2, 9)
    assert cmd.ToMaster(m.CalledWithGrace("g", 1, 1, 1, SUM)) in d.member.resumed(m.Resumed("g", 1, 1, 2))


def test_alone_nobody_is_late() -> None:
    assert kinds(Driver(1).post(SUM)) == ["StartOp"]


def test_the_client_hears_when_it_calls_after_the_commit() -> None:
    d, op = covering()
    assert d.member.in_flight == 0
    assert finish(d) == []
    assert d.post(SUM) == [cmd.HandOver(op), cmd.ToClient(op.outcome.__class__(**{**fields(op.outcome), "id": 1}))]
    assert (op.input_buffer, op.result_buffer, op.outcome.counted, op.outcome.contributors) == (
        0,
        4096,
        False,
        ["m1", "m2"],
    )
    assert d.member.collectives.called == 1
    assert kinds(d.post(data())) == ["StartOp"]  # and goes on as ever
    d.member.op_finished(d.engine_id, 7, 0)
    [result] = told(d.member.hear(m.Commit("g", 1, 2, 1), 4.0, 1, 1), m.Result)
    assert result.counted


def fields(message: Any) -> dict[str, Any]:
    return {name: getattr(message, name) for name in message.__struct_fields__}


def test_the_client_hears_at_the_commit_when_it_calls_before() -> None:
    d, op = covering()
    assert d.post(SUM) == []
    assert d.member.in_flight == 1
    handed, result = finish(d)
    assert handed == cmd.HandOver(op)
    assert (result.message.id, result.message.counted) == (1, False)


def test_zeros_stay_in_the_next_epoch_and_the_client_says_that_it_is_there() -> None:
    d, op = covering(1, 2, 3)
    assert "ToMaster:CalledWithGrace" not in kinds(d.member.enter_epoch(epoch(2, 1, 2), 2.0))
    assert kinds(d.ready(2)) == ["StartOp"]
    assert d.post(SUM) == []
    assert cmd.ToMaster(m.CalledWithGrace("g", 1, 3, 1, SUM)) in d.member.enter_epoch(epoch(3, 1, 2), 3.0)
    assert d.ready(3) == [cmd.StartOp(op)]
    d.member.op_cancelled(d.engine_id - 2)
    d.member.op_cancelled(d.engine_id - 1)
    assert kinds(finish(d, number=3)) == ["HandOver", "ToClient:Result"]


@pytest.mark.parametrize("before", [True, False])
def test_a_call_that_differs_fails_alone(before: bool) -> None:
    d, _ = covering()
    if before:
        [failure] = told(d.post(data(5)), m.Failure)
        assert d.member.in_flight == 0
        assert finish(d) == []
    else:
        assert finish(d) == []
        [failure] = told(d.post(data(5)), m.Failure)
    assert (failure.id, failure.error, failure.expected) == (1, "CollectiveMismatch", str(SUM))
    assert d.member.collectives._late == {}
    assert kinds(d.post(data())) == ["StartOp"]


def test_a_client_that_has_called_is_not_covered() -> None:
    d = Driver(1, 2)
    d.post(SUM)
    assert d.member.hear(zeros_for(1), 2.0, 1, 1) == []
    assert d.member.hear(zeros_for(2), 2.0, 1, 1) != []
    assert d.member.hear(zeros_for(2), 2.0, 1, 1) == []  # once
    assert d.member.hear(zeros_for(3, number=2), 2.0, 1, 1) == []  # of another epoch
    assert d.member.hear(zeros_for(4), 2.0, 1, 1) == []  # op 3 may be anything


def test_void_ops_below_are_no_gap() -> None:
    voids = [m.Void(1, "OperationAborted", "x", {}), m.Void(2, "OperationAborted", "x", {})]
    d = Driver(1, 2, 3)
    d.member.enter_epoch(epoch(2, 1, 2, voids=voids), 2.0)
    d.ready(2)
    assert kinds(d.member.hear(zeros_for(3, number=2), 2.0, 1, 1)) == ["StartOp"]
    assert finish(d, seq=3, number=2) == []
    assert [kinds(d.post(SUM)) for _ in range(3)] == [["ToClient:Failure"]] * 2 + [["HandOver", "ToClient:Result"]]


def test_what_is_void_is_so_for_the_late_one() -> None:
    d, op = covering(1, 2, 3)
    void = m.Void(1, "ProtocolError", "digests differ", {})
    d.member.enter_epoch(epoch(2, 1, 2, voids=[void]), 2.0)
    d.member.op_cancelled(op.engine_id)
    [failure] = told(d.post(SUM), m.Failure)
    assert (failure.id, failure.error) == (1, "ProtocolError")
    assert kinds(d.post(data())) == []  # links of the new epoch are not up yet
    assert (d.member.collectives.called, d.member.collectives._voids) == (2, {})


@pytest.mark.parametrize("committed", [True, False])
def test_who_is_put_out_hears_that_and_no_more(committed: bool) -> None:
    """Its client knows that it is out before it can be told anything else, and uses its tensors again."""
    d, _ = covering()
    d.member.op_finished(d.engine_id, 7, 0)
    ends = d.member.evicted(m.Evicted("g", 1, "silent", int(committed)), 3.0)
    assert kinds(ends) == ["ToClient:Failure", "Leave"]
    assert [[each.error for each in told(d.post(SUM), m.Failure)] for _ in range(2)] == [["Evicted"]] * 2


def test_bounds() -> None:
    d = Driver(1, 2)
    d.member.collectives._limits = Limits(zero_contributions=2, zero_contribution_bytes=100)
    assert kinds(d.member.hear(zeros_for(1), 2.0, 1, 1)) == ["StartOp"]
    big = Descriptor(Kind.all_reduce, DType.float32, count=9, grace=0.5)
    assert d.member.hear(zeros_for(2, call=big), 2.0, 1, 1) == []  # 104 bytes in all
    assert kinds(d.member.hear(zeros_for(2), 2.0, 1, 1)) == ["StartOp"]
    assert d.member.hear(zeros_for(3), 2.0, 1, 1) == []


def test_memory_is_held_only_for_what_will_be_handed_over() -> None:
    d, op = covering(1, 2, 3)
    d.member.collectives._limits = Limits(zero_contribution_bytes=40)  # one
    op.memory = "zeros and a result"
    d.member.enter_epoch(epoch(2, 1, 2, voids=[m.Void(1, "ProtocolError", "digests differ", {})]), 2.0)
    d.ready(2)
    assert op.memory is not None  # the engine still has it
    assert d.member.hear(zeros_for(2, number=2), 2.0, 1, 1) == []
    d.member.op_cancelled(op.engine_id)
    assert op.memory is None
    [start] = d.member.hear(zeros_for(2, number=2), 2.0, 1, 1)
    assert isinstance(start, cmd.StartOp)
    start.op.memory = "zeros and a result"
    assert finish(d, seq=2, number=2) == []
    assert start.op.memory is not None  # for the client, when it calls
    d.member.evicted(m.Evicted("g", 1, "silent", 2), 3.0)
    assert start.op.memory is None


@pytest.mark.parametrize(
    "call",
    [
        data(),
        Descriptor(Kind.all_reduce, DType.float32, ReduceOp.avg, 4, grace=1.0),
        Descriptor(Kind.barrier, grace=1.0),
        Descriptor(Kind.broadcast, DType.float32, count=4, root=0, grace=1.0),
        Descriptor(Kind.all_reduce, DType.int64, count=4, codec=Codec.int8, grace=1.0),
        Descriptor(Kind.all_reduce, count=4, algorithm="of a later version", grace=1.0),
        Descriptor(Kind.all_reduce, count=4, root=1, grace=1.0),
    ],
    ids=str,
)
def test_what_no_client_can_call_is_not_covered_and_ends_nobody(call: Descriptor) -> None:
    """Another member's daemon has said it: what it says of its own call is no word about this daemon's master."""
    d = Driver(1, 2)
    assert d.member.hear(zeros_for(1, call=call), 2.0, 1, 1) == []
    assert kinds(d.post(SUM)) == ["StartOp", "ToMaster:CalledWithGrace"]


def test_an_aborted_epoch_is_not_for_it() -> None:
    d = Driver(1, 2)
    d.member.hear(m.Abort("g", 1, 1, "calls differ"), 0.0, 1, 1)
    assert d.member.hear(zeros_for(1), 2.0, 1, 1) == []
