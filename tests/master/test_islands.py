"""Islands of two shards: who is admitted, who is lost with whom, what is committed, what a restarted master does."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from tests.master.transcript import Room, report_of
from wancoll.collective import Descriptor, Kind
from wancoll.commit.tally import UPDATE
from wancoll.limits import PROTOCOL_VERSION, Limits
from wancoll.wire import messages as m

FOUR = ["m1/0", "m1/1", "m2/0", "m2/1"]


def formed(*, voters: int = 0, start: int = 2) -> Room:
    room = Room(Limits(voters=voters))
    for name in FOUR:
        room.join(name, start=start, shards=2)
    assert room.names == FOUR
    room.clear()
    return room


def test_a_group_forms_of_whole_islands_and_the_epoch_has_them_one_after_the_other() -> None:
    room = Room()
    for name in ("m2/1", "m1/0", "m3/0", "m2/0"):
        room.join(name, start=2, shards=2)
        room.no_epoch()
    room.join("m1/1", start=2, shards=2)
    epoch = room.new_epoch()
    assert [one.name for one in epoch.members] == ["m2/0", "m2/1", "m1/0", "m1/1"]
    assert (epoch.shards, [one.name for one in room.group.joining]) == (2, ["m3/0"])


@pytest.mark.parametrize(
    ("name", "shards", "why"),
    [
        ("m3/0", 3, "with shards=3; expected the group's shards=2"),
        ("m3", 1, "with shards=1; expected the group's shards=2"),
        ("m3/2", 2, "expected a name ISLAND/SHARD"),
        ("m3/01", 2, "expected a name ISLAND/SHARD"),
        ("/0", 2, "expected a name ISLAND/SHARD"),
    ],
)
def test_a_join_is_refused_by_name(name: str, shards: int, why: str) -> None:
    room = formed()
    room.join(name, daemon="d9", start=2, shards=shards)
    assert why in room.one("d9", m.Refused).reason


def test_half_an_island_holds_nobody_up_and_is_admitted_once_it_is_whole() -> None:
    room = formed()
    room.join("m3/0", start=2, shards=2)
    for name in FOUR:
        room.done(name, 1, *UPDATE)
    assert {each.upto for name in FOUR for each in room.take(room._daemon(name), m.Commit)} == {1}
    room.join("m3/1", start=2, shards=2)
    for name in FOUR:
        room.done(name, 2, *UPDATE)
    for name in ("m3/0", "m3/1"):
        for probe in room.take(room._daemon(name), m.Probe):
            room.answer_probe(room._daemon(name), probe)
    assert [one.name for one in room.new_epoch().members] == [*FOUR, "m3/0", "m3/1"]


def test_an_operation_needs_all_columns_equal_within_each() -> None:
    room = formed()
    for name, result in zip(FOUR[:3], ((7, 9), (8, 10), (7, 9)), strict=True):
        room.done(name, 1, *result)
    assert room.take("d1/0", m.Commit) == []
    room.done("m2/1", 1, 8, 10)
    assert [each.upto for each in room.take("d1/0", m.Commit)] == [1]
    for name, result in zip(FOUR, ((7, 9), (8, 10), (7, 9), (9, 10)), strict=True):
        room.done(name, 2, *result)
    assert room.take("d1/0", m.Commit) == []
    assert "results of operation 2 differ" in room.new_epoch().reason


def test_columns_that_call_different_kinds_are_asked() -> None:
    room = formed()
    room.done("m1/0", 1, 7, 9)
    room.done("m1/1", 1, *UPDATE)
    assert room.one("d2/0", m.Abort).ask == 1
    for name in FOUR:
        call = Descriptor(Kind.all_reduce if name.endswith("0") else Kind.update_membership)
        room.say(room._daemon(name), m.Mismatch("g", room.mid(name), 1, 1, str(call), call.fingerprint()))
    [void] = room.new_epoch().voids
    assert (void.error, len(void.calls)) == ("CollectiveMismatch", 4)


@pytest.mark.parametrize("how", ["died", "left", "evicted"])
def test_who_is_out_takes_its_island_along_in_one_epoch(how: str) -> None:
    room = formed()
    if how == "evicted":
        room.stranger(m.Evict(PROTOCOL_VERSION, "g", "m2/0", False, ""))
    else:
        room.say("d2/0", m.Leave("g", "m2/0", "", how == "died"))
    epoch = room.new_epoch()
    assert [one.name for one in epoch.members] == ["m1/0", "m1/1"]
    told = room.one("d2/1", m.Evicted)
    assert told.reason.startswith("m2/0 of its island is out")
    assert epoch.goodbyes == (["m2/0", "m2/1"] if how == "left" else [])


def test_where_members_commit_the_lost_ones_hear_of_their_columns_results() -> None:
    room = formed(voters=32)
    room.say("d2/0", m.Leave("g", "m2/0", "", True))
    for name, done in (("m1/0", (1, 7, 9)), ("m1/1", (1, 8, 10))):
        room.say(room._daemon(name), m.Frozen("g", room.mid(name), 1, m.EpochReport(0, [done], [], [])))
    assert room.new_epoch().committed_upto == 1
    assert room.one("d2/1", m.Evicted).digests == [(1, 8, 10)]


def test_after_a_restart_an_island_that_does_not_report_whole_is_out() -> None:
    room = Room()
    room.restarted(1, (1, 2, 3, 4))
    members = [(mid, name, f"d{mid}") for mid, name in enumerate(FOUR, 1)]
    for mid in (1, 2, 3):
        report = replace(report_of(mid, of=(1, 2, 3, 4)), members=members, shards=2, start_world=2)
        room.say(f"d{mid}", report)
    room.sleep(room.limits.rejoin_grace + 1)
    assert [one.name for one in room.new_epoch().members] == ["m1/0", "m1/1"]
    assert "other shards of its island did not report" in room.one("d3", m.Evicted).reason


def test_a_report_of_a_part_of_an_island_is_refused() -> None:
    room = Room()
    room.restarted(1, (1, 2, 3))
    members = [(mid, name, f"d{mid}") for mid, name in enumerate(FOUR[:3], 1)]
    room.say("d1", replace(report_of(1, of=(1, 2, 3)), members=members, shards=2))
    assert "d1" not in room.state.daemons


@pytest.mark.parametrize("voters", [0, 32])
def test_both_shards_of_one_daemon_call_too_late(voters: int) -> None:
    room = Room(Limits(voters=voters))
    for name in FOUR:
        room.join(name, daemon=name[:2], start=2, shards=2, call_timeout=5.0)
    mids = {one.name: one.mid for one in room.group.members}
    for number in range(1, 30):
        room.now += 0.5
        for daemon, called in (("m1", 1), ("m2", 0)):
            beat = [(mids[f"{daemon}/{shard}"], room.group.epoch, called, 0) for shard in range(2)]
            room.say(daemon, m.Heartbeat(number, called=beat))
    assert room.names == ["m1/0", "m1/1"]


def test_all_shards_that_were_asked_to_leave_have_left() -> None:
    room = formed()
    for name in ("m2/0", "m2/1"):
        room.stranger(m.AskToLeave(PROTOCOL_VERSION, "g", name, 0.0, ""))
    for name in ("m2/0", "m2/1"):
        room.say(f"d{name[1:]}", m.Leave("g", name, "", False))
    assert room.state.leaves == {("g", "m2/0"): True, ("g", "m2/1"): True}
