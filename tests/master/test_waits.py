"""Whom slow operations wait for: what members say of them comes in, members and links come out, by name."""

from __future__ import annotations

from typing import Any

import pytest

from tests.master.transcript import GROUP, Room
from wancoll.cli import status as cli
from wancoll.limits import Limits
from wancoll.peer.core.waits import SAID_AGAIN, WaitLog
from wancoll.wire import messages as m
from wancoll_master.core import report, waits
from wancoll_master.core.ready import Record

WHAT = "all_reduce(10 x float32, op=sum)"
LIMITS = Limits(slow_after=1.0, stall_timeout=8.0)


def op(seq: int = 1, stage: str = "moving", age: float = 2.0, still: float = 0.1) -> m.OpWait:
    return m.OpWait(seq, WHAT, 40, stage, age, still)


class Wait(Room):
    """A room with three members whose daemons say how far their clients are."""

    def __init__(self, count: int = 3) -> None:
        super().__init__(LIMITS)
        self.form(count)
        self.called = dict.fromkeys(self.names, 1)

    def beat(self) -> None:
        for name in self.names:
            daemon = self._daemon(name)
            if daemon not in self.asleep:
                self.say(daemon, m.Heartbeat(1, [(self.mid(name), self.epoch, self.called[name])]))

    def link(self, other: str, state: str, since: float = 1.5, heard: float = 1.5, reason: str = "") -> m.LinkWait:
        return m.LinkWait(self.mid(other), False, state, since, heard, 100, reason)

    def tell(self, name: str, *links: m.LinkWait, ops: list[m.OpWait] | None = None) -> m.Waited:
        found = [op()] if ops is None else ops
        self.say(self._daemon(name), m.Waits(GROUP, self.mid(name), self.epoch, found, list(links)))
        answers = self.take(self._daemon(name), m.Waited)
        assert len(answers) == 1
        return answers[0]

    def causes(self) -> list[tuple[str, str, str]]:
        found = report.groups(self.state, self.now)[0].waits
        return [(one.member, one.other, one.why) for one in found[0].causes] if found else []

    @property
    def notes(self) -> list[Record]:
        return [record for record in self.ready.log if not record.kept]


@pytest.fixture
def room() -> Wait:
    return Wait()


def test_a_member_that_has_not_called(room: Wait) -> None:
    room.called["m2"] = 0
    room.beat()
    for name in ("m0", "m1"):
        answer = room.tell(name)
    assert answer.seq == 1
    assert answer.text == f"operation 1, {WHAT}, of epoch 1, waits for m2 (rank 2): it has not called the operation"
    found = report.groups(room.state, room.now)[0]
    wait = found.waits[0]
    assert (wait.op, wait.seq, wait.what, wait.nbytes, wait.seconds, wait.done) == ("g/1", 1, WHAT, 40, 2.0, 0)
    assert found.waiting_for == f"{answer.text}, for 2.0 s"
    assert cli.wait_lines(wait) == [
        f"g/1, {WHAT}, epoch 1: not ended after 2.0 s, 0 members are done",
        "  waits for m2 (rank 2): it has not called the operation, since 2.0 s ago",
    ]


def test_what_a_daemon_said_before_the_call_says_nothing_of_it(room: Wait) -> None:
    room.called = dict.fromkeys(room.names, 0)
    room.beat()
    room.now += 1.1
    room.asleep.add("d2")
    room.called = dict.fromkeys(room.names, 1)
    room.beat()
    room.tell("m0", ops=[op(age=1.05)])
    assert room.causes() == []
    room.now += 1.4
    room.beat()
    room.tell("m0", ops=[op(age=2.45)])
    assert room.causes() == [("m2", "", "its daemon d2 has said nothing")]


def test_a_silent_daemon_takes_the_blame_for_its_links(room: Wait) -> None:
    room.beat()
    room.now += 1.5
    room.asleep.add("d1")
    room.beat()
    room.tell("m0", room.link("m1", "dead"))
    room.tell("m2", room.link("m1", "blocked"))
    assert room.causes() == [("m1", "", "its daemon d1 has said nothing")]


def test_a_dead_link_and_which_direction_it_is(room: Wait) -> None:
    room.beat()
    room.tell("m0", room.link("m1", "dead", since=1.5))
    room.tell("m1", room.link("m0", "idle", heard=1.6))
    room.tell("m2")
    assert room.causes() == [("m0", "m1", "its packets do not arrive")]
    # m1 still gets packets: what m0 sends arrives, and the acknowledgements are lost.
    room.tell("m1", room.link("m0", "idle", heard=0.4))
    assert room.causes() == [("m1", "m0", "its packets do not arrive")]
    # Both send, m1 hears nothing: one direction, told by both.
    room.tell("m0", room.link("m1", "dead", since=1.5, heard=0.2))
    room.tell("m1", room.link("m0", "dead", since=1.4, heard=1.5))
    assert room.causes() == [("m0", "m1", "its packets do not arrive")]
    # Nobody hears anybody.
    room.tell("m0", room.link("m1", "dead", since=1.5, heard=1.6))
    assert {(one, other) for one, other, _ in room.causes()} == {("m0", "m1"), ("m1", "m0")}


def test_bytes_that_are_held_back_for_good_reason_are_no_fault(room: Wait) -> None:
    """m2 has not called: m1's bytes wait there, and m0's wait at m1."""
    room.called["m2"] = 0
    room.beat()
    answer = room.tell("m2", room.link("m1", "parked"), ops=[])
    assert (answer.seq, answer.text) == (0, "")
    answer = room.tell("m1", room.link("m2", "blocked"))
    assert answer.parked == [room.mid("m2")]
    assert room.tell("m0").parked == []
    assert room.causes() == [("m2", "", "it has not called the operation")]
    # It runs the operation, and bytes of a later one wait there.
    room.called["m2"] = 1
    room.now += 1.0
    room.beat()
    room.tell("m2", room.link("m1", "parked"))
    room.tell("m1", room.link("m2", "blocked"))
    assert room.causes() == []
    # It takes nothing, without a reason.
    room.now += 0.5
    room.beat()
    room.tell("m2", room.link("m1", "idle"))
    assert room.tell("m1", room.link("m2", "blocked")).parked == []
    assert room.causes() == [("m1", "m2", "its other end takes nothing")]


def test_a_link_that_is_down(room: Wait) -> None:
    room.beat()
    room.tell("m0", room.link("m1", "down", reason="no answer"))
    room.tell("m1", room.link("m0", "down", reason="refused"))
    assert room.causes() == [("m0", "m1", "it is down: no answer")]


def test_who_is_done_is_not_waited_for(room: Wait) -> None:
    room.called["m2"] = 0
    room.beat()
    room.done("m0", 1)
    room.done("m1", 1)
    room.now += 0.5
    assert room.causes() == []
    room.now += 0.6
    room.beat()
    assert room.causes() == [("m2", "", "it has not called the operation")]
    assert report.groups(room.state, room.now)[0].waits[0].done == 2
    room.done("m2", 1)
    assert report.groups(room.state, room.now)[0].waits == []


def test_what_was_said_grows_stale(room: Wait) -> None:
    room.beat()
    room.tell("m0", room.link("m1", "dead"))
    assert room.causes()
    room.now += 2.0
    room.beat()
    assert room.causes() == []


def test_a_recv_that_has_no_send(room: Wait) -> None:
    room.beat()
    call = m.OpWait(0, "recv(4 x float32, source=m2, tag=0)", 16, "alone", 3.0, 0.0, room.mid("m2"))
    room.tell("m0", ops=[call])
    assert room.causes() == [("m2", "", "it has not called its half")]
    wait = report.groups(room.state, room.now)[0].waits[0]
    assert (wait.op, wait.seq, wait.nbytes) == ("m0: recv(4 x float32, source=m2, tag=0)", 0, 16)


def test_the_log_says_when_a_wait_begins_and_ends(room: Wait) -> None:
    room.called["m2"] = 0
    room.beat()
    room.tell("m0", ops=[op(age=1.1)])
    assert room.notes == []  # a silent daemon would not show yet
    room.now += 1.3
    room.beat()
    room.tell("m0", ops=[op(age=2.4)])
    assert [(note.kind, "m2 (rank 2)" in note.text) for note in room.notes] == [("waits", True)]
    room.now += 0.5
    room.tell("m0", ops=[op(age=2.9)])
    assert room.notes == []
    room.done("m0", 1)
    room.done("m1", 1)
    room.done("m2", 1)
    assert [(note.kind, note.text) for note in room.notes] == [
        ("waits no more", "operation 1 ended 2.9 s after it was called")
    ]
    room.now += 3.0
    room.tell("m0", ops=[op(2, age=2.9)])
    assert room.notes == []  # not again so soon
    room.now += waits.SAID_AGAIN
    room.tell("m0", ops=[op(2, age=32.9)])
    assert [note.kind for note in room.notes] == ["waits"]


def test_if_nothing_moves_links_are_made_anew_and_at_last_the_operation_is_given_up(room: Wait) -> None:
    room.called = dict.fromkeys(room.names, 5)
    for times in range(1, waits.STALLS + 2):
        epoch = room.epoch
        room.now += 1.0
        room.beat()
        stuck = [op(age=9.0, still=LIMITS.stall_timeout)]
        room.tell("m0", ops=stuck)
        room.tell("m1", ops=stuck)
        assert room.epoch == epoch
        room.clear()
        room.now += 0.5
        room.tell("m2", ops=stuck)
        assert room.epoch == epoch + 1
        redials = [room.take(f"d{i}", m.Redial) for i in range(3)]
        told = room.new_epoch()
        if times <= waits.STALLS:
            assert [[one.others for one in each] for each in redials] == [[[]], [[]], [[]]]
            assert told.voids == []
        else:
            assert redials == [[], [], []]
            assert [(void.seq, void.error) for void in told.voids] == [(1, "OperationAborted")]
            assert "moved nothing for 8 s on m0, m1, m2, 3 times" in told.voids[0].text


@pytest.mark.parametrize("spoils", ["slow", "waits", "link", "late"])
def test_what_is_no_stall(room: Wait, spoils: str) -> None:
    room.called = dict.fromkeys(room.names, 0 if spoils == "late" else 5)
    room.now += 1.0
    room.beat()
    still = 1.0 if spoils == "slow" else 9.0
    links = [room.link("m1", "dead")] if spoils == "link" else []
    room.tell("m0", ops=[op(age=9.0, still=9.0)])
    room.tell("m1", ops=[op(age=9.0, still=9.0, stage="links" if spoils == "waits" else "moving")])
    room.now += 0.5
    room.tell("m2", *links, ops=[op(age=9.0, still=still)])
    assert room.epoch == 1


def test_the_other_end_of_a_lost_link_is_told(room: Wait) -> None:
    room.link_down("m0", "m1")
    room.sleep(0.2)
    redial: Any = room.one("d1", m.Redial)
    assert (redial.to, redial.others, redial.epoch) == (room.mid("m1"), [room.mid("m0")], 1)
    assert redial.older >= 0.5
    assert room.take("d0", m.Redial) == []
    room.clear()
    room.link_down("m0", "m1")
    room.link_down("m1", "m0")
    room.sleep(0.2)
    assert [room.take(f"d{i}", m.Redial) for i in range(3)] == [[], [], []]


def test_who_could_not_reach_whom_and_what_was_done() -> None:
    room = Wait(4)
    room.link_down("m0", "m1")
    room.sleep(0.2)
    room.link_down("m0", "m1", "unreachable")
    room.link_down("m1", "m0", "unreachable")
    room.sleep(0.2)
    found = report.groups(room.state, room.now)[0].pairs
    assert [(one.source, one.target, one.kind, one.times, one.done) for one in found] == [
        ("m1", "m0", "unreachable", 1, "routed around"),
        ("m0", "m1", "unreachable", 2, "routed around"),
    ]
    assert found[1].seconds > found[1].last
    assert found[0].why == "timed out"
    texts = [record.text for record in room.records if record.kind == "link"]
    assert len(texts) == 1
    assert "m0 cannot reach m1 for 0.3 s (timed out); m1 cannot reach m0 for 0.1 s (timed out)" in texts[0]


def test_a_word_of_an_ended_epoch_is_kept_for_people() -> None:
    room = Wait(4)
    room.link_down("m0", "m1", "unreachable")
    room.sleep(0.2)
    assert room.epoch == 2
    room.link_down("m1", "m0", "unreachable", epoch=1)
    room.sleep(1.0)
    assert room.epoch == 2
    found = report.groups(room.state, room.now)[0].pairs
    assert [(one.source, one.target, one.done) for one in found] == [
        ("m1", "m0", "routed around"),
        ("m0", "m1", "routed around"),
    ]


def test_an_eviction_says_who_could_not_reach_whom(room: Wait) -> None:
    room.link_down("m0", "m1", "unreachable")
    room.sleep(4.0)
    assert room.names == ["m0", "m2"]
    assert "m0 cannot reach m1 for 2.5 s (timed out)" in room.one("d1", m.Evicted).reason
    pairs = report.groups(room.state, room.now)[0].pairs
    assert [(one.source, one.target, one.done) for one in pairs] == [("m0", "m1", "evicted m1")]


def test_the_daemons_log_says_it_once() -> None:
    log = WaitLog()
    assert log.begins(1, 10.0, 12.0)
    assert not log.begins(1, 10.0, 13.0)
    assert log.ended(1, 13.0) == 0.0
    assert log.ended(2, 14.0) == 4.0
    assert not log.begins(2, 13.0, 15.0)
    assert log.ended(None, 16.0) == 0.0
    assert log.begins(3, 40.0, 12.0 + SAID_AGAIN)
