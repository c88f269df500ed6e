"""Send and recv, the member's side, also where somebody is lost on the way; the master's: scripts/exchanges.txt."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from tests.master.script import Script
from tests.peer.test_member import Driver, epoch, kinds, told
from wancoll.collective import Descriptor, Kind
from wancoll.errors import ProtocolError
from wancoll.peer.core import commands as cmd
from wancoll.peer.core import links
from wancoll.wire import messages as m


def test_a_member_cannot_fill_the_masters_memory() -> None:
    room = Script()
    room.form(3)
    for _ in range(4096):
        room.send("m1", "m0")
    assert room.names == ["m0", "m1", "m2"]
    room.send("m1", "m0")
    assert room.names == ["m0", "m2"]


# ---- the member ---------------------------------------------------------------------------------------


class Partner(Driver):
    """Member 1, in a world with 2 and 3, that sends and receives."""

    def __init__(self) -> None:
        super().__init__(1, 2, 3)

    def call(
        self, kind: Kind, peer: int, *, tag: int = 0, count: int = 4, known: int = 0, ahead: bool = False
    ) -> list[cmd.Command]:
        self.calls += 1
        what = Descriptor(kind, count=count)
        post = m.Post(self.calls, what, 0, 64, known or self.member.epoch_number, peer, tag, ahead=ahead)
        return self.member.post(post, self.member.call(post), 1.0)

    def match(self, number: int, order: int) -> list[cmd.Command]:
        return self.member.p2p.matched(m.Matched("g", 1, self.member.epoch_number, number, order))

    def settle(self, number: int, digest: int = 7, error: str = "") -> list[cmd.Command]:
        told = m.Settled("g", 1, self.member.epoch_number, number, digest, error, "what", {"m1": "a", "m2": "b"})
        return self.member.p2p.settled(told, 3.0)


def test_a_send_is_told_matched_started_done_and_committed() -> None:
    d = Partner()
    assert d.call(Kind.send, 1, tag=3) == [cmd.ToMaster(m.P2PCall("g", 1, 1, 1, 2, 3, True, 0, 4))]
    assert d.match(1, 5) == [links.Need(frozenset({2}), links.P2P)]
    [start] = d.member.p2p.links_up({2})
    assert (start.op.seq, start.op.kind, start.op.resolved.input_bytes) == (5, Kind.send, 16)
    done = d.member.op_finished(start.op.engine_id, 99, 64)
    assert done == [cmd.ToMaster(m.P2PDone("g", 1, 1, 5, 0))]
    [result] = told(d.settle(1), m.Result)
    assert (result.seq, result.digest, result.contributors, result.bytes_sent) == (5, 7, ["m1", "m2"], 64)
    assert (result.attempts, result.epoch, result.seconds) == (1, 1, 2.0)
    assert d.member.in_flight == 0
    assert kinds(d.call(Kind.recv, 1)) == ["ToMaster:P2PCall"]
    assert kinds(d.match(2, 6)) == ["StartOp"]  # the link is up now
    assert d.member.op_finished(d.engine_id, 99, 0) == [cmd.ToMaster(m.P2PDone("g", 1, 1, 6, 99))]
    assert told(d.settle(2), m.Result)[0].contributors == ["m2", "m1"]


def test_what_the_engine_refuses_ends_with_its_other_half() -> None:
    d = Partner()
    d.call(Kind.send, 1)
    d.match(1, 5)
    [start] = d.member.p2p.links_up({2})
    refused = d.member.op_refused(start.op.engine_id, "no memory")
    assert refused == [cmd.ToMaster(m.P2PDone("g", 1, 1, 5, 0, "the engine refuses it: no memory"))]
    assert told(d.settle(1, error="OperationAborted"), m.Failure)
    assert d.member.in_flight == 0


def test_exchanges_with_one_member_start_in_the_masters_order() -> None:
    d = Partner()
    for _ in range(3):
        d.call(Kind.send, 1)
    assert kinds(d.match(3, 4)) == ["Need"]
    assert d.match(1, 5) == []
    assert d.match(2, 6) == []
    assert [start.op.number for start in d.member.p2p.links_up({2})] == [3, 1, 2]


def test_they_take_no_seq_and_wait_for_no_collective() -> None:
    d = Partner()
    d.call(Kind.recv, 1)
    [start] = d.post()
    assert start.op.seq == 1
    d.member.op_finished(start.op.engine_id, 7, 0)
    assert told(d.member.hear(m.Commit("g", 1, 1, 1), 3.0, 1, 1), m.Result)
    assert "recv(4 x float32, source=m2, tag=0) waits for the call of m2" in d.member.waiting_for()


@pytest.mark.parametrize("point", ["told", "matched", "running", "done"])
def test_a_lost_partner_ends_it_on_the_other_side(point: str) -> None:
    d = Partner()
    d.call(Kind.recv, 1)
    if point != "told":
        d.match(1, 1)
    if point in ("running", "done"):
        d.member.p2p.links_up({2})
    if point == "done":
        d.member.op_finished(d.engine_id, 7, 0)
    entered = d.member.enter_epoch(epoch(2, 1, 3), 2.0)
    if point == "running":  # the client is told when the memory is free
        assert cmd.CancelOp(d.engine_id) in entered
        assert told(entered, m.Failure) == []
        entered = d.member.op_cancelled(d.engine_id)
    [failed] = told(entered, m.Failure)
    assert (failed.id, failed.error) == (1, "OperationAborted")
    assert "m2, the other side, has left the group or was lost" in failed.what
    assert d.settle(1) == []
    [late] = told(d.call(Kind.send, 1, known=1), m.Failure)
    assert (late.id, late.error) == (2, "OperationAborted")


@pytest.mark.parametrize("finished", [False, True])
def test_a_loss_elsewhere_makes_it_run_again(finished: bool) -> None:
    d = Partner()
    d.call(Kind.send, 1)
    d.call(Kind.recv, 2)
    d.call(Kind.send, 1, tag=8)
    d.match(1, 1)
    d.member.p2p.links_up({2})
    first = d.engine_id
    if finished:
        d.member.op_finished(first, 0, 0)
    entered = d.member.enter_epoch(epoch(2, 1, 2), 2.0)
    again = [c.message for c in entered if isinstance(c, cmd.ToMaster)]
    assert [(one.epoch, one.number, one.tag) for one in again] == [(2, 1, 0), (2, 3, 8)]  # not the one with 3
    assert d.member.p2p.settled(m.Settled("g", 1, 1, 1, 7, "", "", {}), 2.0) == []  # of the old epoch
    assert kinds(d.match(1, 9)) == ["Need"]
    [start] = d.member.p2p.links_up({2})
    assert d.member.op_finished(start.op.engine_id, 0, 0) == ([] if not finished else [_done(2, 9)])
    if not finished:
        assert d.member.op_cancelled(first) == [_done(2, 9)]  # only now is the old attempt out of the memory
    [result] = told(d.settle(1), m.Result)
    assert (result.attempts, result.epoch) == (2, 2)


def _done(epoch: int, order: int) -> cmd.Command:
    return cmd.ToMaster(m.P2PDone("g", 1, epoch, order, 0))


def test_a_recv_ahead_is_one_in_each_epoch() -> None:
    d = Partner()
    said = m.P2PCall("g", 1, 1, 1, 2, 0, False, 0, 4, "", True)
    assert d.call(Kind.recv, 1, ahead=True) == [cmd.ToMaster(said)]
    entered = d.member.enter_epoch(epoch(2, 1, 2), 2.0)
    assert cmd.ToMaster(replace(said, epoch=2)) in entered
    with pytest.raises(ProtocolError, match="ahead for recv only"):
        d.call(Kind.send, 1, ahead=True)


def test_halves_that_do_not_fit_are_named() -> None:
    d = Partner()
    d.call(Kind.send, 1)
    [failed] = told(d.settle(1, error="CollectiveMismatch"), m.Failure)
    assert (failed.id, failed.error, failed.calls) == (1, "CollectiveMismatch", {"m1": "a", "m2": "b"})
    assert "send(4 x float32, dest=m2, tag=0)" in failed.got


def test_a_pair_that_cannot_reach_each_other_is_told_so() -> None:
    d = Partner()
    d.call(Kind.send, 1)
    entered = d.member.enter_epoch(epoch(2, 1, 2, 3, avoid=[(1, 2)]), 2.0)
    [failed] = told(entered, m.Failure)
    assert failed.what == "m1 and m2 cannot reach each other"


def test_too_small_a_world_ends_it() -> None:
    d = Partner()
    d.call(Kind.send, 1)
    [failed] = told(d.member.enter_epoch(epoch(2, 1, 2, floor=3), 2.0), m.Failure)
    assert failed.error == "WorldTooSmall"


@pytest.mark.parametrize("used", [False, True])
def test_a_broken_link_costs_an_epoch_only_where_bytes_may_be_lost(used: bool) -> None:
    d = Partner()
    d.call(Kind.send, 1)
    d.match(1, 1)
    d.member.p2p.links_up({2})
    d.member.op_finished(d.engine_id, 0, 0)
    if not used:
        d.settle(1)
    assert kinds(d.member.p2p.link_lost(2, "reset")) == (["ToMaster:LinkDown"] if used else [])
    d.call(Kind.send, 1)
    assert kinds(d.match(2, 2)) == ["Need"]


def test_a_link_that_is_not_made_in_time_is_told_of_again_and_again_while_something_waits_for_it() -> None:
    d = Partner()
    d.call(Kind.recv, 1)
    assert d.member.p2p.link_unreachable(2, "refused") == []
    d.match(1, 1)
    again = links.Need(frozenset({2}), links.P2P)
    for why in ("refused", "no answer"):
        told_master = cmd.ToMaster(m.LinkDown("g", 1, 1, 2, "unreachable", why, True))
        assert d.member.p2p.link_unreachable(2, why) == [told_master, again]
    ended = d.settle(1, error="OperationAborted")
    assert ended[-1] == links.LetGo(2)
    [failed] = told(ended, m.Failure)
    assert (failed.error, failed.what) == ("OperationAborted", "what")
    assert "connect to each other" in failed.hint
    assert d.member.p2p.link_unreachable(2, "refused") == []
    assert d.member.in_flight == 0


def test_what_the_master_ends_is_taken_out_of_the_engine_first() -> None:
    """This end's link is up, and the other end cannot make it: nothing is told while the engine may still write."""
    d = Partner()
    d.call(Kind.recv, 1)
    d.match(1, 1)
    d.member.p2p.links_up({2})
    assert d.settle(1, error="OperationAborted") == [cmd.CancelOp(d.engine_id)]
    [failed] = told(d.member.op_cancelled(d.engine_id), m.Failure)
    assert failed.error == "OperationAborted"
    [report] = [c.message for c in d.member.reconnected(2, 9) if isinstance(c, cmd.ToMaster)]
    assert (report.failed, report.p2p) == ([], [])  # the master named no other half


def test_an_evicted_member_cannot_know_what_it_had_finished() -> None:
    d = Partner()
    d.call(Kind.send, 1)
    d.call(Kind.send, 1)
    d.match(1, 1)
    d.member.p2p.links_up({2})
    d.member.op_finished(d.engine_id, 0, 0)
    failures = told(d.member.evicted(m.Evicted("g", 1, "silent", 0), 2.0), m.Failure)
    assert [(one.id, one.error) for one in failures] == [(1, "OutcomeUnknown"), (2, "Evicted"), (0, "Evicted")]
    assert told(d.call(Kind.send, 1), m.Failure)[0].error == "Evicted"


@pytest.mark.parametrize(("peer", "known"), [(0, 1), (3, 1), (-1, 1), (1, 5)])
def test_calls_that_cannot_be_are_refused(peer: int, known: int) -> None:
    with pytest.raises(ProtocolError, match="posted a call that cannot be"):
        Partner().call(Kind.send, peer, known=known)


def test_a_new_master_is_told_what_had_come_of_them() -> None:
    """The other half may not have heard."""
    d = Partner()
    d.call(Kind.send, 1)
    d.call(Kind.send, 1)
    d.match(1, 5), d.match(2, 6)
    d.settle(1, digest=77)
    d.member.p2p.settled(m.Settled("g", 1, 1, 2, 7, "CollectiveMismatch", "what", {}, 4), 3.0)
    [report] = [c.message for c in d.member.reconnected(2, 9) if isinstance(c, cmd.ToMaster)]
    assert isinstance(report, m.Report)
    assert (report.heard, report.settled) == (6, [(5, 77)])
    assert report.failed == [(2, 4, "CollectiveMismatch")]
