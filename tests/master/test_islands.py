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


def test_shards_of_two_launches_do_not_mix_and_the_newest_launch_stays() -> None:
    room = formed()
    room.join("m3/0", start=2, shards=2, launch="one")
    room.join("m3/1", start=2, shards=2, launch="two")
    assert "another launch" in room.one("d3/0", m.Refused).reason
    assert [one.name for one in room.group.joining] == ["m3/1"]
    room.join("m3/0", start=2, shards=2, launch="two")
    for name in FOUR:
        room.done(name, 1, *UPDATE)
    room.admit()
    assert [one.name for one in room.new_epoch().members] == [*FOUR, "m3/0", "m3/1"]
    room.join("m3/0", daemon="d9", start=2, shards=2, launch="three")  # no launch puts a member out
    assert "that name is taken" in room.one("d9", m.Refused).reason


def test_a_launch_that_is_refused_puts_nobody_out() -> None:
    room = formed()
    room.join("m3/0", start=2, shards=2, launch="one")
    room.join("m3/1", start=3, shards=2, launch="two")
    assert "start_world=3" in room.one("d3/1", m.Refused).reason
    assert [one.name for one in room.group.joining] == ["m3/0"]


def behind_nats(*names: str, fails: str) -> Room:
    """Joiners of a group that forms; probes of the daemon *fails* come to nothing."""
    room = Room(Limits())
    for name in names:
        if (daemon := "d" + name[1:]) not in room.conns:
            address = f"9.9.9.{len(room.conns)}:1"
            hello = m.Hello(PROTOCOL_VERSION, daemon, 1, [address], 4, "", "0.1.0", hints=["10.0.0.1:1"], cores=256)
            room.conns[daemon] = room.stranger(hello, address.split(":", maxsplit=1)[0])
        room.join(name, start=2, shards=2)
        while asked := [(each, probe) for each in room.conns for probe in room.take(each, m.Probe)]:
            for daemon, probe in asked:
                ends, ok = (probe.joiner, probe.prober, probe.target), fails not in (daemon, probe.daemon)
                room.say(daemon, m.ProbeResult("g", *ends, ok, "no way", way=probe.way))
    return room


def test_half_an_island_that_waits_has_no_whole_one_refused() -> None:
    room = behind_nats("m9/0", "m1/0", "m1/1", fails="d9/0")
    assert [one.name for one in room.group.joining] == ["m9/0", "m1/0", "m1/1"]
    room = behind_nats("m9/0", *FOUR, fails="d9/0")
    assert room.names == FOUR
    assert "cannot reach" in room.one("d9/0", m.Refused).reason  # a joiner of a group that runs


def test_of_two_whole_islands_that_cannot_reach_each_other_one_is_refused() -> None:
    room = behind_nats("m1/0", "m1/1", "m9/0", "m9/1", fails="d9/0")
    assert "cannot reach" in room.one("d9/0", m.Refused).reason
    assert "m9/0 of its island is refused" in room.one("d9/1", m.Refused).reason
    assert [one.name for one in room.group.joining] == ["m1/0", "m1/1"]


def test_who_is_in_no_bad_pair_is_not_evicted_for_an_older_ring() -> None:
    room = Room()
    names = [f"m{island}/{shard}" for island in range(1, 5) for shard in range(2)]
    for name in names:
        room.join(name, start=4, shards=2)
    room.clear()
    for one, other in (("m1/0", "m2/0"), ("m1/0", "m3/0")):  # m4 is its only neighbour: no ring
        room.group.bad_pairs[tuple(sorted((room.mid(one), room.mid(other))))] = room.now + 60
    room.link_down("m3/1", "m4/0", "unreachable")  # votes only
    room.sleep(5.0)
    assert sorted(room.names) == sorted(names)
    room.link_down("m1/0", "m2/0", "unreachable")
    room.sleep(5.0)
    assert "m1/0" not in room.names
    assert "m4/0" in room.names


def test_a_link_that_is_up_again_evicts_nobody() -> None:
    room = Room()
    room.form(3)
    room.link_down("m0", "m1", "unreachable")
    room.link_down("m1", "m0", "unreachable")
    room.sleep(1.0)
    room.link_down("m1", "m0", "up")
    room.sleep(10.0)
    assert room.names == ["m0", "m1", "m2"]
    assert room.group.bad_pairs == {}
    assert room.epoch == 1


def test_a_goodbye_says_how_far_its_island_has_come() -> None:
    room = formed(voters=32)
    for name in ("m1/0", "m1/1"):
        room.say("d" + name[1:], m.Leave("g", name, "", False, 3))
    room.say("d2/0", m.Leave("g", "m2/0", "", False, 4))
    told = room.one("d2/1", m.Evicted)
    assert (told.committed_upto, told.unknown_upto) == (4, m.MOST)


def test_a_launch_that_was_away_and_joins_again_does_not_put_out_the_newer_one() -> None:
    room = formed()
    room.join("m3/0", start=2, shards=2, launch="one")
    was = room.group.joining[0].mid
    room.join("m3/1", daemon="d9", start=2, shards=2, launch="two")
    assert "another launch" in room.one("d3/0", m.Refused).reason
    room.say("d3/0", m.Join("g", "m3/0", 2, 1, was=was, shards=2, launch="one"))
    assert "the newest start" in room.one("d3/0", m.Refused).reason
    later = room.group.joining[0].mid
    assert [(one.name, one.launch) for one in room.group.joining] == [("m3/1", "two")]
    room.say("d9", m.Join("g", "m3/1", 2, 1, was=later, shards=2, launch="two"))  # nor is that put out by itself
    assert [(one.name, one.launch) for one in room.group.joining] == [("m3/1", "two")]
