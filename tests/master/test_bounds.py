"""What the master's core remembers has bounds: each is filled, and goes no further."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from tests.master.transcript import GROUP, Room, report_of
from wancoll.collective import Descriptor, DType, Kind
from wancoll.limits import Limits
from wancoll.wire import messages as m

FEW = Limits(
    commit="master",
    groups_known=3,
    daemons_gone=3,
    members_missing=3,
    bad_pairs=3,
    troubles=3,
    ops_in_flight=2,
    rejoin_grace=0.5,
)


@pytest.fixture
def room() -> Room:
    return Room(FEW)


def test_groups_that_are_known(room: Room) -> None:
    for i in range(6):
        room.join(f"m{i}", group=f"g{i}")
    assert list(room.state.used) == ["g3", "g4", "g5"]


def test_voids_of_groups_that_ended() -> None:
    room = Room()
    room.join("m0", group="g")
    room.say("d0", m.GiveUp("g", room.mid("m0"), 1, list(range(1, 100)), "x"))
    assert len(room.state.used["g"].voids) == 99
    room.say("d0", m.Leave("g", "m0", "done"))
    assert not room.state.groups
    assert room.state.used["g"].voids == {}


def test_fates_of_daemons_that_are_gone(room: Room) -> None:
    room.form(6)
    for i in range(5):
        room.drop(f"d{i}")
        room.sleep(2 * room.limits.heartbeat_timeout)
    assert list(room.state.gone) == [("d2", 1), ("d3", 1), ("d4", 1)]


def test_fates_of_one_daemon() -> None:
    room = Room(replace(FEW, group_members=2))
    for i in range(4):
        room.join(f"m{i}", daemon="d0", group=f"g{i}")
        room.say("d0", m.Heartbeat(1, [], [(room.mid(f"m{i}"), 100.0, "stopped")]))
    assert [one.group for one in room.state.gone["d0", 1]] == ["g2", "g3"]


def test_fates_of_members_that_did_not_report(room: Room) -> None:
    room.restarted(mids=tuple(range(1, 8)))
    members = [(mid, f"m{mid}", f"d{mid}") for mid in range(1, 8)]
    plan = m.Plan(4, 1024, True, {}, [], 0, "")
    head = (GROUP, 1, 1, members, plan, b"k" * 16, 1, 1, "formed", 0, 0, [])
    room.say("d1", m.Report(*head, False, [], [], [], 0, [], []))
    room.sleep(1)
    assert room.names == ["m1"]
    assert list(room.state.missing) == [(GROUP, 5), (GROUP, 6), (GROUP, 7)]


def test_members_that_report() -> None:
    """What bounds who joins bounds who reports: of a group, of a daemon, of a master."""
    room = Room(Limits(commit="master", group_members=4, members=6, rejoin_grace=0.5))
    room.restarted(mids=(1, 2, 3, 4))
    for daemon in "abcd":
        room.hello(daemon)

    def report(daemon: str, group: str, mids: range) -> list[str]:
        """The last one's fate."""
        members = [(mid, f"m{mid}", daemon) for mid in mids]
        for mid in mids:
            room.clear()
            room.say(daemon, msgspec.structs.replace(report_of(mid), group=group, members=members))
        return [told.reason for told in room.take(daemon, m.Evicted)]

    assert report("a", GROUP, range(1, 5)) == [], "a whole group comes back"
    assert report("b", "wide", range(10, 15)) == ["it reports a group of 5; expected at most 4 members"]
    assert report("a", "second", range(20, 21)) == ["expected at most 4 members of one daemon"]
    assert report("c", "third", range(30, 32)) == []
    assert report("d", "fourth", range(40, 41)) == ["expected at most 6 members of one master"]
    room.sleep(1)
    assert len(room.state.members) == 6
    assert len(room.group.members) == 4


def test_pairs_that_cannot_reach_each_other_and_complaints(room: Room) -> None:
    room.form(9)
    for i in range(3, 8):
        room.link_down("m0", f"m{i}", "unreachable")
        room.link_down("m1", f"m{i}", "unreachable")
    assert len(room.group.current.complaints) == 3
    assert len(room.group.bad_pairs) == 3
    assert len(room.group.troubles) <= 3


def test_operations_that_are_not_committed_and_those_that_stand_still(room: Room) -> None:
    room.form(2)
    for seq in range(1, 9):
        room.done("m0", seq)
    assert len(room.group.current.pending) == 8
    still = m.OpWait(9, "all_reduce", 4, "moving", 100.0, 100.0)
    for name in ("m0", "m1"):
        room.say(f"d{name[1:]}", m.Waits(GROUP, room.mid(name), room.epoch, [still], []))
    assert room.group.stalls == {}
    room.done("m0", 9)
    assert "d0" not in room.conns, "it names an operation that no member can have called"


def test_who_holds_whose_bytes_back(room: Room) -> None:
    room.form(3)
    for first in range(0, 1000, 100):
        links = [m.LinkWait(mid, False, "parked", 2.0, 2.0, 1) for mid in range(first, first + 100)]
        room.say("d0", m.Waits(GROUP, 1, 1, [], links))
    assert set(room.group.current.parks) <= {1, 2, 3}


def test_what_is_called_with_a_grace_time_and_what_it_costs_to_take_that_in(monkeypatch: pytest.MonkeyPatch) -> None:
    room, hashed = Room(), []
    real = Descriptor.__hash__

    def counted(self: Descriptor) -> int:
        hashed.append(self)
        return real(self)

    def call(name: str, count: int) -> None:
        said = Descriptor(Kind.all_reduce, DType.float32, count=count, grace=5.0)
        room.say("d" + name[1:], m.Grace(GROUP, room.mid(name), 1, 1, said))

    room.form(33)
    for count in range(2, 100):
        call("m0", count)
    monkeypatch.setattr(Descriptor, "__hash__", counted)
    for name in room.names[1:]:
        call(name, 4)
    assert len(hashed) <= 10 * len(room.names)
    grace = room.group.current.graces[1]
    assert {each.count: many for each, many in grace.counts.items()} == {99: 1, 4: 32}
    assert grace.call.count == 4
