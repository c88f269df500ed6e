"""Who was asked to leave: the master tells who has, in order, from who was lost meanwhile."""

from __future__ import annotations

import pytest

from tests.master.transcript import GROUP, Room
from wancoll.limits import PROTOCOL_VERSION
from wancoll.wire import messages as m
from wancoll_master.core.liveness import operators
from wancoll_master.core.views import report


def ask(room: Room, name: str, group: str = "") -> bool:
    conn = room.stranger(m.AskToLeave(PROTOCOL_VERSION, group, name, 30.0, ""))
    [answer] = room.inbox[conn]
    assert isinstance(answer, m.EvictAnswer)
    return answer.done


@pytest.fixture
def room() -> Room:
    room = Room()
    room.form(3)
    return room


def test_a_daemon_has_left_once_its_connection_is_over_after_it_said_that_it_stops(room: Room) -> None:
    assert ask(room, "d1")
    room.say("d1", m.Leave(GROUP, "m1"))
    room.say("d1", m.Stopping())
    assert report.left(room.state) == []
    room.drop("d1")
    assert report.left(room.state) == [("", "d1")]
    assert report.left(room.state, ["g"]) == []
    assert not ask(room, "d1")
    assert report.left(room.state) == [("", "d1")]
    room.hello("d1", incarnation=2)
    assert ask(room, "d1")  # the other one, who has not left
    assert report.left(room.state) == []


@pytest.mark.parametrize("how", ["silent", "cut off", "killed"])
def test_a_daemon_that_is_lost_has_not_left(room: Room, how: str) -> None:
    assert ask(room, "d1")
    if how == "silent":
        room.asleep.add("d1")
    elif how == "cut off":
        room.breaks("d1")
    else:
        room.drop("d1")
    room.sleep(20)
    assert "d1" not in room.state.daemons
    assert report.left(room.state) == []
    room.hello("d1")  # back; what it was asked it never heard
    room.say("d1", m.Stopping())
    room.drop("d1")
    assert report.left(room.state) == [("", "d1")]


@pytest.mark.parametrize(
    ("leave", "left"),
    [
        (m.Leave(GROUP, "m1"), [(GROUP, "m1")]),
        (m.Leave(GROUP, "m1", "its client died: killed", True), []),
        (m.Leave(GROUP, "m1", "a bug of its daemon"), []),
        (m.Leave(GROUP, "m2"), []),
    ],
)
def test_a_member_has_left_by_its_daemons_word_alone(room: Room, leave: m.Leave, left: list[tuple[str, str]]) -> None:
    assert ask(room, "m1", GROUP)
    room.say("d2", m.Leave(GROUP, "m1"))  # not its daemon
    room.say("d1", leave)
    assert report.left(room.state) == left
    assert report.left(room.state, ["other"]) == []
    assert report.left(room.state, [GROUP]) == left


def test_who_was_not_asked_is_not_kept_and_of_the_others_the_newest(
    room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operators, "MOST_ASKED", 2)
    for name in ("d0", "d1", "d0", "d2"):
        assert ask(room, name)
    room.hello("d3")
    for i in range(4):
        room.say(f"d{i}", m.Stopping())
        room.drop(f"d{i}")
    assert report.left(room.state) == [("", "d0"), ("", "d2")]
