"""What a recorder keeps of operations: those that end while it is there, and those under way before and after."""

from __future__ import annotations

from typing import Any

from wancoll.collective import Descriptor, DType, Kind, ReduceOp
from wancoll.peer.core.calls import Call, World
from wancoll.peer.core.op import Op, OpState
from wancoll.peer.core.tracing import Recorder

OWN = "g", "m", 3


def op(seq: int, posted: float) -> Op:
    posted_as = Descriptor(Kind.all_reduce, DType.float32, ReduceOp.sum, 4)
    call = Call(posted_as, World((1, 2), ("m", "n"), ("", "")), -1, 16, 16, False)
    return Op(seq, seq, call, 0, 4096, 0, posted, seq)


def runs(one: Op, engine_id: int) -> Op:
    one.state, one.engine_id, one.attempts = OpState.running, engine_id, one.attempts + 1
    return one


def rows(recorder: Recorder) -> list[tuple[Any, ...]]:
    return [(row["seq"], row["attempt"], row["outcome"], row["at"]) for row in recorder.rows]


def test_what_begins_and_ends_meanwhile() -> None:
    recorder, one = Recorder(), op(1, 1.0)
    recorder.started(runs(one, 5), *OWN, 2.0)
    recorder.finished(5, 1.5, 3.0, 4.0, cancelled=False)  # the first bytes came while the engine was being told
    recorder.told(one, *OWN, 2, "", 5.0)
    at = {"posted": 1.0, "started": 2.0, "first": 2.0, "last": 3.0, "done": 4.0, "committed": 5.0}
    assert rows(recorder) == [(1, 1, "committed", at)]
    told = dict(recorder.rows[0])
    del told["at"], told["seq"], told["attempt"], told["outcome"]
    assert told == {
        "group": "g", "member": "m", "epoch": 3, "op": "all_reduce", "algorithm": "", "codec": "none", "bytes": 16,
        "contributors": 2,
    }  # fmt: skip


def test_what_runs_again_waits_from_when_it_was_let_go() -> None:
    recorder, one = Recorder(), op(1, 1.0)
    recorder.started(runs(one, 5), *OWN, 2.0)
    recorder.finished(5, 0.0, 0.0, 3.0, cancelled=True)
    recorder.started(runs(one, 6), *OWN, 4.0)
    recorder.finished(6, 0.0, 0.0, 5.0, cancelled=False)
    recorder.started(runs(one, 7), *OWN, 6.0)  # it was done, and not committed, when the epoch ended
    recorder.finished(6, 0.0, 0.0, 6.5, cancelled=True)  # of nobody
    one.state = OpState.waiting
    recorder.finished(7, 0.0, 0.0, 7.0, cancelled=True)
    recorder.over(one, *OWN, 8.0)
    assert rows(recorder) == [
        (1, 1, "aborted", {"posted": 1.0, "started": 2.0, "done": 3.0}),
        (1, 2, "aborted", {"posted": 3.0, "started": 4.0, "done": 5.0}),
        (1, 3, "aborted", {"posted": 5.0, "started": 6.0, "done": 7.0}),
        (1, 4, "waiting", {"posted": 7.0, "until": 8.0}),
    ]


def test_what_is_under_way_when_it_ends() -> None:
    recorder, waits, running, done = Recorder(), op(1, 1.0), op(2, 1.0), op(3, 1.0)
    recorder.started(runs(running, 5), *OWN, 2.0)
    recorder.started(runs(done, 6), *OWN, 2.0)
    recorder.finished(6, 2.5, 3.0, 4.0, cancelled=False)
    done.state = OpState.done
    for one in (waits, running, done):
        recorder.over(one, *OWN, 9.0)
    assert rows(recorder) == [
        (1, 1, "waiting", {"posted": 1.0, "until": 9.0}),
        (2, 1, "running", {"posted": 1.0, "started": 2.0, "until": 9.0}),
        (3, 1, "done", {"posted": 1.0, "started": 2.0, "first": 2.5, "last": 3.0, "done": 4.0, "until": 9.0}),
    ]


def test_what_was_under_way_when_it_began() -> None:
    recorder, waits, ends, stays, done = Recorder(), op(1, 1.0), runs(op(2, 1.0), 5), runs(op(3, 1.0), 6), op(4, 1.0)
    done.state, done.attempts, done.finished = OpState.done, 2, True
    for one in (waits, ends, stays, done):
        recorder.found(one, *OWN, 7.0)
    recorder.finished(5, 7.5, 7.5, 8.0, cancelled=False)  # nobody saw when its first bytes came
    recorder.told(ends, *OWN, 2, "", 8.5)
    recorder.told(done, *OWN, 2, "", 8.75)
    recorder.over(stays, *OWN, 9.0)
    recorder.started(runs(waits, 7), *OWN, 9.0)
    recorder.finished(7, 0.0, 0.0, 9.5, cancelled=False)
    recorder.told(waits, *OWN, 0, "OutcomeUnknown", 9.75)
    assert rows(recorder) == [
        (2, 1, "committed", {"posted": 1.0, "seen": 7.0, "done": 8.0, "committed": 8.5}),
        (4, 2, "committed", {"posted": 1.0, "seen": 7.0, "committed": 8.75}),
        (3, 1, "running", {"posted": 1.0, "seen": 7.0, "until": 9.0}),
        (1, 1, "OutcomeUnknown", {"posted": 1.0, "started": 9.0, "done": 9.5, "committed": 9.75}),
    ]


def test_what_was_done_before_it_began_and_runs_again() -> None:
    recorder, one = Recorder(), op(1, 1.0)
    one.state, one.attempts = OpState.done, 1
    recorder.found(one, *OWN, 7.0)
    recorder.started(runs(one, 5), *OWN, 8.0)
    recorder.over(one, *OWN, 9.0)
    assert rows(recorder) == [
        (1, 1, "aborted", {"posted": 1.0, "seen": 7.0}),
        (1, 2, "running", {"posted": 7.0, "started": 8.0, "until": 9.0}),
    ]


def test_what_fails_before_the_engine_has_it() -> None:
    recorder, one = Recorder(), op(1, 1.0)
    recorder.told(one, *OWN, 0, "CollectiveMismatch", 3.0)
    assert rows(recorder) == [(1, 1, "CollectiveMismatch", {"posted": 1.0, "until": 3.0})]
