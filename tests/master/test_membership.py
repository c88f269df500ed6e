"""The master's rules (docs/protocol.md, R1 to R5 and R8), told as transcripts of step()."""

from __future__ import annotations

from itertools import combinations, permutations

import pytest

from tests.master.transcript import GROUP, Room
from wancoll.limits import PROTOCOL_VERSION, Limits
from wancoll.wire import messages as m
from wancoll_master.core import membership, report
from wancoll_master.core.ready import Broadcast, Ready, Received, SendStatus, Tick
from wancoll_master.plan.topology import pair, ring_order


@pytest.fixture
def room() -> Room:
    return Room()


# ---- joining and forming ----------------------------------------------------------------------------


def test_the_group_forms_when_start_world_members_are_there_in_join_order(room):
    room.hello("d7", lanes=2, addresses=("10.0.0.7:1", "[::1]:2"))
    room.join("b", daemon="d7", start=3, least=2)
    joined = room.one("d7", m.Joined)
    assert (joined.member, joined.mid) == ("b", 1)
    assert joined.reason == "1 of 3 members are here to start the group"
    room.join("a", daemon="d1", start=3, least=2)
    assert room.take("d1", m.Epoch) == []
    room.join("c", daemon="d7", start=3, least=2)
    to_b, to_c = room.take("d7", m.Epoch)
    to_a = room.one("d1", m.Epoch)
    assert (to_b.to, to_a.to, to_c.to) == (1, 2, 3)
    assert [(one.name, one.mid, one.daemon) for one in to_b.members] == [("b", 1, "d7"), ("a", 2, "d1"), ("c", 3, "d7")]
    assert to_b.members[0].addresses == ["10.0.0.7:1", "[::1]:2"]
    assert (to_b.epoch, to_b.plan.lanes, to_b.min_world, to_b.committed_upto, to_b.voids) == (1, 2, 2, 0, [])
    assert to_b.key == to_a.key
    assert "formed" in to_b.reason


def test_two_groups_have_different_keys_and_their_own_epochs(room):
    room.join("m0", group="one")
    room.join("m0", group="two")
    one, two = room.take("d0", m.Epoch)
    assert one.key != two.key
    assert (one.epoch, two.epoch) == (1, 1)
    assert one.members[0].mid != two.members[0].mid


def test_a_restarted_master_goes_on_above_its_journal():
    room = Room(term=5, floor=40, next_mid=1025)
    room.join("m0")
    assert room.one("d0", m.Welcome).term == 5
    assert room.one("d0", m.Joined).mid == 1025
    told = room.new_epoch()
    assert (told.epoch, told.term) == (41, 5)


@pytest.mark.parametrize(
    ("member", "start", "least", "says"),
    [
        ("x", 2, 3, "min_world=3; expected at most start_world=2"),
        ("x", 3, 2, "start_world=3, min_world=2; expected the group's start_world=2, min_world=1"),
        ("x", 2, 2, "start_world=2, min_world=2; expected the group's start_world=2, min_world=1"),
        ("m0", 2, 1, "that name is taken by a member of daemon d0"),
        ("m9", 2, 1, "that name is taken by a member of daemon d9"),
    ],
)
def test_a_join_is_refused_with_who_expected_and_got(room, member, start, least, says):
    room.form(2)
    room.join("m9", start=2)
    room.join(member, daemon="d5", start=start, least=least)
    refused = room.one("d5", m.Refused)
    assert refused.member == member
    assert says in refused.reason
    assert f"{member} of daemon d5" in refused.reason
    assert room.take("d5", m.Joined) == []
    assert room.records[-1].kind == "refused"


def test_a_full_group_and_a_daemon_with_too_many_members_are_refused():
    room = Room(Limits(group_members=2))
    room.join("x", daemon="d9", start=3, group="big")
    assert "start_world=3; expected at most 2" in room.one("d9", m.Refused).reason
    room.form(2)
    room.join("m2", daemon="d5", start=2)
    assert "full with 2 members" in room.one("d5", m.Refused).reason
    room.join("a", daemon="d5", group="other", start=2)
    room.join("b", daemon="d5", group="third", start=2)
    room.join("c", daemon="d5", group="fourth", start=2)
    assert "at most 2 members of one daemon" in room.one("d5", m.Refused).reason


def test_a_group_whose_members_would_not_fit_into_one_message_is_full():
    room = Room(Limits(message_bytes=8192))
    room.hello("d0", addresses=("a" * 300 + ":1",) * 3)
    room.join("m0", daemon="d0", start=3)
    room.join("m1", daemon="d0", start=3)
    assert "not fit into one message" in room.one("d0", m.Refused).reason


def test_leaving_before_the_group_forms(room):
    room.join("m0", start=2)
    room.join("m1", start=3)  # refused: the first one's numbers count
    room.say("d0", m.Leave(GROUP, "m0"))
    assert GROUP not in room.state.groups
    room.join("m1", start=1)
    assert room.new_epoch().members[0].name == "m1"


# ---- hello ------------------------------------------------------------------------------------------


def test_hello_is_welcomed_with_term_and_times():
    room = Room(Limits(heartbeat_interval=0.25, heartbeat_timeout=1.5), term=3)
    room.hello("d0")
    assert room.take("d0") == [m.Welcome(PROTOCOL_VERSION, 3, 0.25, 1.5, room.state.identity)]


def test_another_protocol_version_is_told_why(room):
    conn = room.hello("d0", protocol=PROTOCOL_VERSION + 1)
    assert "version" in room.closed[conn]
    assert str(PROTOCOL_VERSION + 1) in room.closed[conn]
    assert room.state.daemons == {}


@pytest.mark.parametrize("address", ["nowhere", "host:", "host:99999", ":7000", "host:0", "::1:7000", "host:7x"])
def test_an_address_that_nobody_can_dial_is_refused_at_once(room, address):
    conn = room.hello("d0", addresses=("10.0.0.1:7000", address))
    assert repr(address) in room.closed[conn]
    assert "--advertise" in room.closed[conn]
    assert room.state.daemons == {}


def test_heartbeats_are_answered(room):
    room.hello("d0")
    room.clear()
    room.say("d0", m.Heartbeat(17))
    assert room.take("d0") == [m.Pong(17, 1)]


@pytest.mark.parametrize("incarnation", [1, 2])
def test_race_9_the_same_daemon_twice_ends_the_old_ones_memberships_first(room, incarnation):
    room.form(3)
    room.all_done(1)
    room.clear()
    old = room.conns["d1"]
    room.hello("d1", incarnation=incarnation)
    assert "d1" in room.closed[old]
    assert room.names == ["m0", "m2"]
    told = room.new_epoch()
    assert (told.epoch, told.committed_upto) == (2, 1)
    evicted = room.take("d1", m.Evicted)
    assert [(e.mid, e.committed_upto) for e in evicted] == ([(2, 1)] if incarnation == 1 else [])
    room.join("m1", start=3)  # its name is free again
    assert room.one("d1", m.Joined).mid == 4


# ---- done and commit --------------------------------------------------------------------------------


def test_r1_a_commit_needs_everyone(room):
    room.form(3)
    room.done("m0", 1)
    room.done("m2", 1)
    room.done("m2", 1)  # twice is not two
    assert all(room.commits(d) == [] for d in ("d0", "d1", "d2"))
    room.done("m1", 1)
    assert all(room.commits(d) == [1] for d in ("d0", "d1", "d2"))


def test_commits_are_cumulative_and_never_skip_an_op(room):
    room.form(2)
    for seq in (3, 2):
        room.all_done(seq)
    assert room.commits("d0") == []
    room.done("m0", 1)
    assert room.commits("d0") == []
    room.done("m1", 1)
    assert room.commits("d0") == [3]
    room.done("m1", 2)  # late news of what is committed
    room.all_done(4)
    assert room.commits("d1") == [3, 4]
    assert room.group.pending == {}


def test_a_commit_is_one_broadcast_and_reaches_each_daemon_once(room):
    for name, daemon in (("a", "d0"), ("b", "d1"), ("c", "d0")):
        room.join(name, daemon=daemon, start=3)
    room.all_done(1)
    sent = [command for command in room.ready.messages if isinstance(command, Broadcast)]
    assert [command.conns for command in sent] == [(room.conns["d0"], room.conns["d1"])]
    assert sent[0].message == m.Commit(GROUP, 1, 1, 1)


def test_a_member_alone_commits_by_itself(room):
    room.form(1)
    for seq in (1, 2):
        room.done("m0", seq)
    assert room.commits("d0") == [1, 2]


def test_race_1_commit_then_a_death(room):
    room.form(3)
    room.all_done(1)
    room.drop("d2")
    for daemon in ("d0", "d1"):
        commit, epoch = room.take(daemon)
        assert (commit.upto, epoch.epoch, epoch.committed_upto) == (1, 2, 1)
    room.clear()
    room.hello("d2")  # it had broken off before it could hear of the commit
    welcome, evicted = room.take("d2")
    assert isinstance(welcome, m.Welcome)
    assert (evicted.mid, evicted.committed_upto) == (3, 1)
    assert "connection reset" in evicted.reason
    room.hello("d2")
    assert room.take("d2", m.Evicted) == []  # told once


def test_what_commits_after_an_eviction_is_not_the_evicted_ones(room):
    room.form(2)
    room.done("m1", 1)
    room.drop("d1")
    room.done("m0", 1)
    assert room.commits("d0") == [1]
    room.hello("d1")
    assert room.one("d1", m.Evicted).committed_upto == 0


def test_race_2_done_crosses_an_abort(room):
    room.form(3)
    room.done("m0", 1)
    room.drop("d2")
    room.clear()
    room.done("m1", 1, epoch=1)
    room.done("m0", 1)
    assert room.commits("d0") == []
    room.done("m1", 1)
    assert room.commits("d0") == [1]


def test_race_6_a_late_abort_voids_what_is_finished_everywhere_but_on_the_dead(room):
    room.form(3)
    room.done("m0", 1)
    room.done("m1", 1)
    room.drop("d2")
    told = room.new_epoch()
    assert (told.epoch, told.committed_upto) == (2, 0)
    assert "m2" in told.reason
    assert "connection reset" in told.reason
    room.done("m1", 1)
    assert room.commits("d0") == []
    room.done("m0", 1)
    assert room.commits("d0") == [1]


def test_race_7_a_death_between_epochs(room):
    room.form(4)
    room.all_done(1)
    room.drop("d3")
    room.drop("d0")
    assert [told.epoch for told in room.take("d1", m.Epoch)] == [2, 3]
    told = room.take("d2", m.Epoch)[-1]
    assert (told.committed_upto, [one.name for one in told.members]) == (1, ["m1", "m2"])


def test_a_daemon_with_two_members_dies_in_one_epoch_change(room):
    for name, daemon in (("a", "d0"), ("b", "d1"), ("c", "d1")):
        room.join(name, daemon=daemon, start=3)
    room.clear()
    room.drop("d1")
    assert room.new_epoch().epoch == 2
    assert room.names == ["a"]


def test_race_8_an_op_that_some_have_not_posted_is_waited_for(room):
    room.form(2)
    room.done("m0", 1)
    room.done("m0", 2)
    room.sleep(60)
    assert room.commits("d0") == []
    room.no_epoch()
    room.done("m1", 1)
    assert room.commits("d0") == [1]
    room.done("m1", 2)
    assert room.commits("d0") == [2]


def test_leaving_is_a_loss_without_words_to_the_leaver(room):
    room.form(3)
    room.say("d1", m.Leave(GROUP, "m1"))
    told = room.new_epoch()
    assert [one.name for one in told.members] == ["m0", "m2"]
    assert told.reason == "m1 left"
    assert room.take("d1") == []
    room.say("d1", m.Leave(GROUP, "m1"))
    room.no_epoch()


def test_race_10_digests_differ_run_again_then_give_up(room):
    room.form(3)
    room.done("m0", 1, digest=0xA)
    room.done("m1", 1, digest=0xB)
    room.no_epoch()  # until all have said theirs
    room.done("m2", 1, digest=0xA)
    told = room.new_epoch()
    assert (told.epoch, told.committed_upto, told.voids) == (2, 0, [])
    assert told.reason.startswith("results of operation 1 differ: 000000000000000a on m0, m2; 000000000000000b on m1")
    assert [record.kind for record in room.records[-2:]] == ["digest", "epoch"]
    for name, digest in (("m0", 1), ("m1", 1), ("m2", 2)):
        room.done(name, 1, digest=digest)
    told = room.new_epoch()
    (void,) = told.voids
    assert (void.seq, void.error, told.committed_upto) == (1, "ProtocolError", 0)
    assert "0000000000000002 on m2" in void.text
    assert room.commits("d0") == []
    room.all_done(2)
    assert room.commits("d0") == [2]  # void 1 counts as done


def test_digests_that_agree_the_second_time_commit(room):
    room.form(2)
    room.done("m0", 1, digest=1)
    room.done("m1", 1, digest=2)
    room.done("m0", 1, digest=3)
    room.done("m1", 1, digest=3)
    assert room.commits("d1") == [1]
    assert room.group.digest_failures == {}


# ---- update_membership ------------------------------------------------------------------------------


def test_r5_nobody_waits_the_same_epoch_goes_on(room):
    room.form(2)
    room.all_done(1)
    room.update("m0", 2)
    room.done("m0", 3)
    room.done("m1", 3)
    assert room.commits("d0") == [1]
    room.update("m1", 2)
    assert room.commits("d0") == [3]
    room.no_epoch()


def test_r5_an_update_waits_for_everything_below(room):
    room.form(2)
    room.join("m2", start=2)
    room.admit("m2")
    room.all_update(2)
    room.no_epoch()
    room.done("m0", 1)
    room.no_epoch()
    room.done("m1", 1)
    assert room.commits("d0") == [1]
    told = room.new_epoch()
    assert (told.epoch, told.committed_upto) == (2, 2)


def test_r5_joiners_are_admitted_in_join_order_at_the_end(room):
    room.form(2)
    room.all_done(1)
    for name in ("m4", "m3"):
        room.join(name, start=2)
        assert "update_membership()" in room.one("d" + name[1:], m.Joined).reason
    room.admit("m4", "m3")
    room.no_epoch()
    room.all_update(2)
    told = room.new_epoch()
    assert [one.name for one in told.members] == ["m0", "m1", "m4", "m3"]
    assert (told.epoch, told.committed_upto, told.reason) == (2, 2, "admitted m4, m3")
    assert room.commits("d0") == [1]  # the update's end is told by the epoch alone
    room.all_done(3)
    assert room.commits("d3") == [3]


def test_joiners_are_probed_both_ways_once_for_each_daemon(room):
    for name, daemon in (("a", "d0"), ("b", "d1"), ("c", "d0")):
        room.join(name, daemon=daemon, start=3)
    room.clear()
    room.hello("d2", addresses=("far:7",))
    room.join("j", daemon="d2", start=3)
    assert room.take("d0", m.Probe) == [m.Probe(GROUP, 4, 1, 4, "d2", ["far:7"])]
    assert room.take("d1", m.Probe) == [m.Probe(GROUP, 4, 2, 4, "d2", ["far:7"])]
    assert room.take("d2", m.Probe) == [
        m.Probe(GROUP, 4, 4, 1, "d0", ["d0:7000"]),
        m.Probe(GROUP, 4, 4, 2, "d1", ["d1:7000"]),
    ]
    room.join("k", daemon="d0", start=3)  # shares a daemon with a and c
    assert [probe.target for probe in room.take("d0", m.Probe)] == [2]
    assert [probe.target for probe in room.take("d1", m.Probe)] == [5]


def test_a_joiner_of_a_members_own_daemon_needs_no_probe(room):
    room.form(1)
    room.join("x", daemon="d0", start=1)
    assert room.take("d0", m.Probe) == []
    room.update("m0", 1)
    assert [one.name for one in room.new_epoch().members] == ["m0", "x"]


def test_a_joiner_is_not_admitted_before_all_members_stand_at_the_update(room):
    room.form(2)
    room.join("m2", start=2)
    room.update("m0", 1)
    room.admit("m2")
    room.no_epoch()
    room.update("m1", 1)
    assert room.names == ["m0", "m1", "m2"]


def test_each_update_waits_anew_for_probes(room):
    room.form(1)
    room.join("m1", start=1)
    room.asleep.add("d0")  # so that m1 is not refused for its silence
    room.sleep(1.1)
    room.answer_probe("d1", room.one("d1", m.Probe), ok=False)
    room.asleep.clear()
    room.update("m0", 1)
    room.sleep(2.4)
    room.join("m2", start=1)  # comes too late for this one
    room.sleep(0.2)
    assert room.commits("d0") == [1]
    room.join("m3", start=1)
    room.clear()
    room.update("m0", 2)
    assert room.commits("d0") == []


def test_an_update_waits_for_probes_under_way(room):
    room.form(2)
    room.join("m2", start=2)
    room.all_update(1)
    assert room.commits("d0") == []
    probes = [(daemon, probe) for daemon in ("d0", "d1", "d2") for probe in room.take(daemon, m.Probe)]
    assert len(probes) == 4
    for daemon, probe in probes[:-1]:
        room.answer_probe(daemon, probe)
    room.no_epoch()
    room.answer_probe(*probes[-1])
    assert room.new_epoch().committed_upto == 1


@pytest.mark.parametrize(
    ("prober", "says"),
    [
        ("d1", "m1 (daemon d1) cannot reach m2 (daemon d2) at d2:7000"),
        ("d2", "m2 (daemon d2) cannot reach m0 (daemon d0) at d0:7000"),
    ],
)
def test_a_joiner_that_cannot_be_reached_is_refused_and_the_members_go_on(room, prober, says):
    room.form(2)
    room.join("m2", start=2)
    room.all_update(1)
    probe = room.take(prober, m.Probe)[0]
    room.answer_probe(prober, probe, ok=False, reason="connection refused")
    refused = room.one("d2", m.Refused)
    assert says in refused.reason
    assert "connection refused" in refused.reason
    assert "--advertise" in refused.reason
    assert room.commits("d0") == [1]
    room.no_epoch()
    room.clear()
    room.join("m2", start=2)  # it may try again
    assert room.one("d2", m.Joined).mid == 4


def test_a_probe_without_an_answer_refuses_the_joiner_in_bounded_time(room):
    room.form(2)
    room.join("m2", start=2)
    room.all_update(1)
    probe = room.one("d0", m.Probe)
    room.answer_probe("d0", probe)
    started = room.now
    room.sleep(room.limits.probe_timeout + room.limits.heartbeat_interval + 0.01)
    refused = room.one("d2", m.Refused)
    assert "cannot reach" in refused.reason
    assert "gave no answer within 2 s" in refused.reason
    assert room.commits("d0") == [1]
    assert room.now - started < 3


def test_a_dying_member_is_not_blamed_on_the_joiner(room):
    room.form(2)
    room.asleep.add("d1")
    room.sleep(1.5)
    room.join("m2", start=2)
    room.answer_probe("d0", room.one("d0", m.Probe))
    first, second = room.take("d2", m.Probe)
    room.answer_probe("d2", first)
    room.answer_probe("d2", second, ok=False, reason="no answer")  # m1 is stopped
    room.sleep(2)
    assert room.names == ["m0"]  # m1 was silent for heartbeat_timeout
    assert room.take("d2", m.Refused) == []
    room.clear()
    room.update("m0", 1)
    assert [one.name for one in room.new_epoch().members] == ["m0", "m2"]


def test_a_member_that_wakes_up_is_asked_again(room):
    room.form(1)
    room.asleep.add("d0")
    room.sleep(1.2)
    room.join("m2", start=1)
    probe, back = room.one("d0", m.Probe), room.one("d2", m.Probe)
    room.answer_probe("d2", back, ok=False, reason="no answer")
    room.asleep.clear()
    room.sleep(1)
    assert room.one("d0", m.Probe) == probe
    assert room.one("d2", m.Probe) == back
    assert room.take("d2", m.Refused) == []


def test_a_stream_of_joiners_does_not_hold_the_members_for_ever(room):
    room.form(1)
    room.join("m1", daemon="d1", start=1)
    room.update("m0", 1)
    started = room.now
    for i in range(2, 9):
        room.sleep(0.5)
        room.join(f"m{i}", start=1)
        if room.commits("d0") == [1]:
            break
    assert room.now - started <= 3
    assert room.take("d1", m.Refused)


def test_a_joiner_that_leaves_or_dies_while_an_update_waits_for_it(room):
    room.form(1)
    room.join("m1", start=1)
    room.join("m2", start=1)
    room.update("m0", 1)
    room.say("d1", m.Leave(GROUP, "m1"))
    assert room.commits("d0") == []
    room.drop("d2")
    assert room.commits("d0") == [1]


def test_a_loss_while_an_update_is_held(room):
    room.form(3)
    room.join("m3", start=3)
    room.all_update(1)
    room.drop("d1")
    told = room.new_epoch()
    assert (told.epoch, told.committed_upto, [one.name for one in told.members]) == (2, 0, ["m0", "m2"])
    room.admit("m3")
    room.no_epoch()
    room.all_update(1)
    told = room.new_epoch()
    assert (told.epoch, told.committed_upto, [one.name for one in told.members]) == (3, 1, ["m0", "m2", "m3"])


def test_a_new_member_is_probed_by_joiners_that_still_wait(room):
    room.form(1)
    room.join("m1", start=1)
    room.admit("m1")
    room.join("m2", start=1)
    room.clear()
    room.update("m0", 1)
    room.sleep(2.6)  # m2's probes are not answered: refused; m1 is admitted
    assert [one.name for one in room.new_epoch().members] == ["m0", "m1"]


def test_joiners_that_wait_are_probed_against_members_admitted_meanwhile(room):
    room.form(1)
    room.join("m1", daemon="d1", start=1)
    room.admit("m1")
    room.update("m0", 1)
    assert room.epoch == 2
    room.clear()
    room.join("m2", start=1)
    assert [probe.target for probe in room.take("d2", m.Probe)] == [1, 2]


# ---- too small a world ------------------------------------------------------------------------------


def test_a_small_world_still_gets_its_epoch_and_resumes_through_update_membership(room):
    room.form(3, least=2)
    room.all_done(1)
    room.drop("d1")
    room.drop("d2")
    told = room.take("d0", m.Epoch)[-1]
    assert (told.epoch, told.min_world, told.committed_upto) == (3, 2, 1)
    room.done("m0", 2)  # members fail these by themselves; the master lets none through
    assert room.group.pending == {}
    room.update("m0", 6)
    room.sleep(30)
    assert room.commits("d0") == [1]
    room.join("m4", start=3, least=2)
    assert room.epoch == 3
    room.admit("m4")
    told = room.new_epoch()
    assert (told.epoch, told.committed_upto, [one.name for one in told.members]) == (4, 6, ["m0", "m4"])
    room.all_done(7)
    assert room.commits("d4") == [7]


def test_not_enough_joiners_keep_the_small_world_waiting(room):
    room.form(4, least=4)
    room.drop("d0")
    room.drop("d1")
    room.join("m5", start=4, least=4)
    room.admit("m5")
    room.all_update(3)
    room.sleep(10)
    room.clear()
    room.join("m6", start=4, least=4)
    room.no_epoch()
    room.admit("m6")
    assert room.new_epoch().committed_upto == 3


def test_members_that_strayed_apart_in_a_small_world_are_told(room):
    room.form(3, least=3)
    room.drop("d2")
    room.clear()
    room.update("m0", 5)
    room.update("m1", 3)
    told = room.new_epoch()
    (void,) = told.voids
    assert (void.seq, void.error, told.committed_upto) == (3, "CollectiveMismatch", 2)
    assert void.calls == {"m0": "an earlier operation", "m1": "update_membership()"}
    room.update("m0", 5)
    room.update("m1", 4)
    room.new_epoch()
    room.update("m0", 5)
    room.update("m1", 5)
    room.no_epoch()
    room.join("m3", start=3, least=3)
    room.admit("m3")
    told = room.new_epoch()
    assert (told.committed_upto, told.voids) == (5, [])


# ---- the end of a group -----------------------------------------------------------------------------


def test_a_group_without_anyone_is_forgotten_but_its_epochs_stay_used(room):
    room.form(2)
    room.all_done(1)
    room.drop("d0")
    room.drop("d1")
    assert room.state.groups == {}
    room.join("m0", start=1)
    told = room.new_epoch()
    assert (told.epoch, told.committed_upto) == (3, 0)
    assert told.epoch > 2


def test_joiners_of_a_group_that_died_form_it_afresh(room):
    room.form(2)
    room.all_done(1)
    room.join("m2", start=2)
    room.drop("d0")
    room.drop("d1")
    assert room.epoch == 2
    room.clear()
    room.join("m3", start=2)
    told = room.new_epoch()
    assert (told.epoch, told.committed_upto, [one.name for one in told.members]) == (3, 0, ["m2", "m3"])
    room.all_done(1)
    assert room.commits("d2") == [1]


# ---- silence ----------------------------------------------------------------------------------------


def test_race_5_a_silent_member_is_evicted_and_told(room):
    room.form(3)
    room.all_done(1)
    room.clear()
    room.asleep.add("d1")
    silent = room.conns["d1"]
    started = room.now
    while room.epoch == 1:
        room.sleep(0.1)
    assert 3.0 <= room.now - started <= 3.2
    assert room.names == ["m0", "m2"]
    evicted = room.take("d1", m.Evicted, conn=silent)
    assert [(e.mid, e.committed_upto) for e in evicted] == [(2, 1)]
    assert "silent for 3.0 s" in evicted[0].reason
    assert "silent" in room.closed[silent]
    told = room.new_epoch()
    assert (told.committed_upto, "silent" in told.reason) == (1, True)
    room.hello("d1")  # it wakes up and finds its connection closed
    assert room.one("d1", m.Evicted).committed_upto == 1


def test_any_message_is_a_sign_of_life(room):
    room.form(2)
    room.asleep.add("d1")
    for _ in range(5):
        room.sleep(2)
        room.done("m1", 1)
    assert room.epoch == 1


def test_a_master_that_slept_itself_blames_nobody(room):
    room.form(2)
    room.now += 1000
    room.step(Tick())
    assert room.epoch == 1
    room.asleep.add("d1")
    room.sleep(3.1)
    assert room.names == ["m0"]


# ---- links ------------------------------------------------------------------------------------------


def test_a_lost_link_between_living_members_is_a_new_epoch_of_the_same(room):
    room.form(3)
    room.all_done(1)
    room.done("m0", 2)
    room.link_down("m0", "m1")
    room.link_down("m1", "m0")
    room.no_epoch()
    room.sleep(room.limits.link_settle + 0.01)
    told = room.new_epoch()
    assert (told.epoch, told.committed_upto, [one.name for one in told.members]) == (2, 1, ["m0", "m1", "m2"])
    assert told.reason == "the link of m0 to m1 broke: timed out"
    room.link_down("m1", "m0", epoch=1)  # of an old epoch
    room.sleep(1)
    room.no_epoch()


def test_a_lost_link_to_a_dead_member_is_one_epoch_only(room):
    room.form(3)
    room.link_down("m0", "m1")
    room.sleep(0.05)
    room.drop("d1")
    assert room.new_epoch().epoch == 2
    room.sleep(1)
    assert room.epoch == 2
    told_late = m.LinkDown(GROUP, 3, 2, 2, "lost", "")  # m2 notices after the epoch came
    room.say("d2", told_late)
    room.sleep(1)
    assert room.epoch == 2


def test_a_link_that_breaks_all_the_time_does_not_spin_the_master(room):
    room.form(3)
    started, began = room.now, room.epoch
    for _ in range(200):
        room.link_down("m0", "m1")
        room.sleep(0.01)
    assert room.epoch - began <= (room.now - started) / room.limits.link_settle


def test_a_pair_that_cannot_meet_is_routed_around(room):
    room.form(4)
    room.link_down("m1", "m2", "unreachable")
    room.sleep(0.2)
    told = room.new_epoch()
    assert [one.name for one in told.members] == ["m0", "m1", "m3", "m2"]
    assert "m1 and m2 cannot reach each other" in told.reason
    assert told.plan.avoid == [(2, 3)]
    room.drop("d3")  # now all are neighbours: tried, and only a complaint evicts
    assert room.new_epoch().plan.avoid == []
    assert room.names == ["m0", "m1", "m2"]
    room.sleep(61)
    assert room.names == ["m0", "m1", "m2"]


def test_a_pair_that_are_no_neighbours_keep_their_ranks_and_are_told_in_the_plan(room):
    room.form(4)
    room.link_down("m2", "m0", "unreachable")
    room.sleep(0.2)
    told = room.new_epoch()
    assert [one.name for one in told.members] == ["m0", "m1", "m2", "m3"]
    assert told.plan.avoid == [(1, 3)]
    assert "m2 and m0 cannot reach each other" in told.reason
    room.sleep(61)
    assert room.names == ["m0", "m1", "m2", "m3"]
    room.drop("d3")
    assert room.take("d0", m.Epoch)[-1].plan.avoid == []  # a new chance after a while


def test_sites_are_told_to_all(room):
    room.hello("d0", site="here")
    room.hello("d1")
    room.join("m0", start=2)
    room.join("m1", start=2)
    assert [one.site for one in room.one("d1", m.Epoch).members] == ["here", ""]


def test_a_bad_pair_is_kept_apart_in_later_epochs_too(room):
    room.form(5)
    room.link_down("m1", "m2", "unreachable")
    room.sleep(0.2)
    room.drop("d4")
    order = room.names
    assert abs(order.index("m1") - order.index("m2")) == 2


def test_a_pair_that_cannot_be_routed_around_costs_the_newer(room):
    room.form(3)
    room.all_done(1)
    room.clear()
    room.link_down("m2", "m1", "unreachable")
    room.link_down("m1", "m2", "unreachable")
    room.sleep(room.limits.link_timeout)
    assert room.names == ["m0", "m1"]
    evicted = room.one("d2", m.Evicted)
    assert (evicted.mid, evicted.committed_upto) == (3, 1)
    assert "cannot reach each other" in evicted.reason
    assert room.new_epoch().epoch == 2
    assert "d2" in room.conns  # its other groups live on


def test_both_ends_words_of_one_cut_begin_no_epochs_for_ever(room):
    """What m1 dials m0 takes for a link that was lost: its word must not end the epoch before that of m1 counts."""
    room.form(3)
    room.link_down("m1", "m0", "unreachable")
    room.link_down("m0", "m1", "lost")
    room.sleep(room.limits.link_timeout)
    assert room.epoch == 2
    assert room.names == ["m0", "m2"]


def test_the_one_with_more_complaints_pays(room):
    room.form(3)
    room.link_down("m2", "m0", "unreachable")
    room.sleep(1)
    room.link_down("m1", "m0", "unreachable")
    room.sleep(room.limits.link_timeout)
    assert room.names == ["m1", "m2"]


def test_a_link_that_comes_up_after_all_costs_nobody(room):
    room.form(2)
    room.link_down("m1", "m0", "unreachable")
    room.sleep(1)
    room.all_done(1)
    room.sleep(room.limits.link_timeout)
    assert room.names == ["m0", "m1"]
    assert room.epoch == 1


# ---- voids ------------------------------------------------------------------------------------------


def test_mismatched_calls_are_named_to_everyone(room):
    room.form(3)
    room.all_done(1)
    room.clear()
    room.done("m2", 2)
    room.mismatch("m0", 2, "all_reduce(8 x float32, op=sum)")
    for daemon in ("d0", "d1", "d2"):
        abort = room.one(daemon, m.Abort)
        assert (abort.epoch, abort.ask) == (1, 2)
    room.mismatch("m0", 2, "all_reduce(8 x float32, op=sum)")
    room.mismatch("m1", 2, "all_reduce(8 x float32, op=max)")
    room.no_epoch()
    room.mismatch("m2", 2, "all_reduce(8 x float32, op=sum)")
    told = room.new_epoch()
    (void,) = told.voids
    assert (told.epoch, told.committed_upto, void.seq, void.error) == (2, 1, 2, "CollectiveMismatch")
    assert void.calls == {
        "m0": "all_reduce(8 x float32, op=sum)",
        "m1": "all_reduce(8 x float32, op=max)",
        "m2": "all_reduce(8 x float32, op=sum)",
    }
    room.all_done(3)
    assert room.commits("d1") == [3]


def test_who_has_not_called_yet_is_waited_for_shortly(room):
    room.form(3)
    room.mismatch("m0", 1, "a")
    room.mismatch("m1", 1, "b")
    room.sleep(room.limits.mismatch_wait + 0.01)
    assert room.new_epoch().voids[0].calls == {"m0": "a", "m1": "b", "m2": "not called yet"}


def test_after_an_abort_nothing_commits_in_that_epoch(room):
    room.form(2)
    room.mismatch("m0", 2, "a")
    room.all_done(1)
    room.all_update(1)
    assert room.commits("d0") == []
    room.mismatch("m1", 2, "b")
    assert room.new_epoch().committed_upto == 0
    room.all_done(1)
    assert room.commits("d0") == [1]


def test_a_death_while_calls_are_collected(room):
    room.form(3)
    room.mismatch("m0", 1, "a")
    room.drop("d2")
    told = room.new_epoch()
    assert told.voids == []  # the dead one may have been the one that differed
    room.sleep(2)
    room.no_epoch()


def test_different_fingerprints_are_a_mismatch(room):
    room.form(2)
    room.done("m0", 1, fingerprint=1)
    room.done("m1", 1, fingerprint=2)
    assert room.one("d0", m.Abort).ask == 1


@pytest.mark.parametrize("first", ["data", "update"])
def test_update_membership_against_data_is_a_mismatch(room, first):
    room.form(2)
    for name, kind in (("m0", first == "data"), ("m1", first == "update")):
        if kind:
            room.done(name, 1)
        else:
            room.update(name, 1)
    assert room.one("d1", m.Abort).ask == 1


def test_giving_up_voids_for_all_what_is_not_committed(room):
    room.form(2)
    room.all_done(1)
    room.done("m1", 2)
    room.give_up("m0", 1, 2, 4)
    told = room.new_epoch()
    assert (told.epoch, told.committed_upto) == (2, 1)
    assert [(void.seq, void.error) for void in told.voids] == [(2, "OperationAborted"), (4, "OperationAborted")]
    assert "the group has formed" in told.voids[0].text
    room.give_up("m1", 1, 2)  # known already
    room.no_epoch()
    room.done("m1", 4)
    assert room.group.pending == {}
    room.all_done(5)
    assert room.commits("d0") == [1]
    room.all_done(3)
    assert room.commits("d0") == [5]
    assert room.group.voids == {}


def test_a_reason_for_giving_up_is_what_everyone_is_told(room):
    room.form(3)
    room.drop("d2")
    room.clear()
    room.give_up("m0", 1, reason="the root of broadcast, m2, was lost")
    room.give_up(
        "m1",
        1,
        reason="too late",
    )
    told = room.new_epoch()
    assert [(void.seq, void.error, void.text) for void in told.voids] == [
        (1, "OperationAborted", "the root of broadcast, m2, was lost")
    ]
    assert told.reason == "m0 gave up operation 1: the root of broadcast, m2, was lost"
    room.no_epoch()


def test_voids_that_are_not_passed_yet_are_told_again(room):
    room.form(3)
    room.give_up("m0", 2)
    room.drop("d2")
    told = room.take("d0", m.Epoch)[-1]
    assert ([void.seq for void in told.voids], told.committed_upto) == ([2], 0)


def test_an_epoch_that_tells_a_void_for_the_first_time_does_not_commit_it(room):
    """A member that finished the op must not take the void for a commit."""
    room.form(2)
    room.all_done(1)
    room.give_up("m0", 2)
    assert room.new_epoch().committed_upto == 1


# ---- nonsense ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "says"),
    [
        (m.Hello(PROTOCOL_VERSION, "d1", 1, ["a:1"], 1, "", "v"), "introduces itself twice"),
        (m.Done(GROUP, 1, 1, 1, 0, 0), "not its own"),
        (m.Done("h", 2, 1, 1, 0, 0), "not its own"),
        (m.Done(GROUP, 2, 9, 1, 0, 0), "has not begun"),
        (m.Done(GROUP, 2, 1, 1 << 40, 0, 0), "impossible operation"),
        (m.UpdateMembership(GROUP, 2, 1, 1 << 40), "impossible operation"),
        (m.Mismatch(GROUP, 2, 1, 1 << 40, "x"), "impossible operation"),
        (m.GiveUp(GROUP, 2, 1, [1 << 40], ""), "impossible operation"),
        (m.LinkDown(GROUP, 2, 1, 2, "lost", ""), "itself"),
        (m.LinkDown(GROUP, 2, 1, 1, "sideways", ""), "unknown kind"),
        (m.ProbeResult(GROUP, 4, 1, 4, True, ""), "probe of another daemon"),
    ],
)
def test_nonsense_is_told_and_cut_off_and_the_others_go_on(room, message, says):
    room.form(3)
    room.join("m3", start=3)
    conn = room.conns["d1"]
    room.say("d1", message)
    assert says in room.closed[conn]
    assert "daemon d1" in room.closed[conn]
    assert room.names == ["m0", "m2"]


@pytest.mark.parametrize(
    "message",
    [
        m.Done(GROUP, 99, 1, 1, 0, 0),
        m.Done(GROUP, 4, 1, 1, 0, 0),  # a joiner's
        m.Done(GROUP, 2, 0, 1, 0, 0),
        m.Done(GROUP, 2, 1, 0, 0, 0),
        m.LinkDown(GROUP, 2, 1, 77, "lost", ""),
        m.LinkDown(GROUP, 2, 1, 4, "lost", ""),  # about a joiner
        m.Leave("nowhere", "m1"),
        m.Leave(GROUP, "m0"),  # another daemon's
        m.ProbeResult(GROUP, 77, 2, 77, False, ""),
        m.ProbeResult(GROUP, 4, 2, 3, False, ""),
        m.GiveUp(GROUP, 2, 1, [], ""),
        m.Mismatch(GROUP, 2, 1, 0, "x"),
    ],
)
def test_what_is_stale_or_void_changes_nothing(room, message):
    room.form(3)
    room.join("m3", daemon="d3", start=3)
    room.clear()
    room.say("d1", message)
    assert room.closed == {}
    assert room.ready == Ready()
    room.sleep(1)
    assert room.epoch == 1


def test_a_digest_that_changes_is_nonsense(room):
    room.form(2)
    room.done("m1", 1, digest=1)
    room.done("m1", 1, digest=2)
    assert room.names == ["m0"]


def test_a_member_cannot_fill_the_masters_memory(room):
    room = Room(Limits(ops_in_flight=2))
    room.form(2)
    for seq in range(1, 9):
        room.done("m1", seq)
    assert len(room.group.pending) == 8
    room.done("m1", 9)
    assert room.names == ["m0"]


def test_the_first_message_must_introduce_the_daemon(room):
    conn = room.stranger(m.Heartbeat(1))
    assert "expected Hello first" in room.closed[conn]


# ---- status -----------------------------------------------------------------------------------------


def test_a_status_request_needs_no_hello(room):
    conn = room.stranger(m.StatusRequest(PROTOCOL_VERSION))
    assert isinstance(room.inbox[conn][0], SendStatus)
    assert room.closed[conn] == ""
    room.hello("d0")
    room.say("d0", m.StatusRequest(PROTOCOL_VERSION))
    assert "d0" in room.conns


def test_status_says_what_a_group_waits_for(room):
    def waiting() -> str:
        (group,) = report.groups(room.state, room.now)
        return group.waiting_for

    room.join("m0", start=3, least=2)
    assert waiting() == "2 more members to start: 1 of 3 are here"
    room.join("m1", start=3, least=2)
    room.join("m2", start=3, least=2)
    assert waiting() == ""
    room.done("m1", 1)
    room.sleep(1.5)
    assert waiting() == "m0, m2 to be done with operation 1, for 1.5 s"
    assert [one.done_upto for one in report.groups(room.state, room.now)[0].members] == [0, 1, 0]
    room.all_done(1)
    room.join("m3", start=3, least=2)
    room.all_update(2)
    assert waiting() == "the probes of m3 before update_membership at operation 2 ends, for 0.0 s"
    room.say("d3", m.Leave(GROUP, "m3"))
    room.link_down("m0", "m1")
    assert waiting() == "the link between m0 and m1"
    room.sleep(1)
    room.mismatch("m0", 3, "x")
    assert waiting() == "what m1, m2 called at operation 3: the members' calls differ"
    room.drop("d1")
    room.drop("d2")
    room.update("m0", 9)
    assert waiting() == "joiners: 1 of min_world=2 members, for 0.0 s"
    (group,) = report.groups(room.state, room.now)
    assert [(one.name, one.rank, one.state, one.done_upto) for one in group.members] == [("m0", 0, "member", 9)]
    assert (group.phase, group.committed_upto, group.min_world) == ("running", 2, 2)


# ---- ring orders ------------------------------------------------------------------------------------


def fits(order: list[int], bad: set[tuple[int, int]]) -> bool:
    return all(pair(a, b) not in bad for a, b in zip(order, order[1:] + order[:1], strict=True) if a != b)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 6])
def test_ring_orders_are_found_exactly_where_they_exist(count):
    members = list(range(10, 10 + count))
    pairs = list(combinations(members, 2))
    for size in range(min(len(pairs), 5) + 1):
        for bad in map(set, combinations(pairs, size)):
            found = ring_order(members, bad)
            possible = any(fits([members[0], *rest], bad) for rest in permutations(members[1:]))
            assert (found is not None) == possible
            if found is not None:
                assert sorted(found) == members
                assert found[0] == members[0]
                assert fits(found, bad)


def test_an_order_without_bad_pairs_stays_as_it_is():
    assert ring_order([5, 3, 9, 1], set()) == [5, 3, 9, 1]
    assert ring_order([5, 3, 9, 1], {pair(5, 9)}) == [5, 3, 9, 1]


def test_large_worlds_with_some_bad_pairs():
    members = list(range(200))
    bad = {pair(i, i + 1) for i in range(0, 190, 7)} | {pair(0, 199)}
    found = ring_order(members, bad)
    assert found is not None
    assert fits(found, bad)


def test_ten_members_in_the_worst_case_end_soon():
    members = list(range(10))
    bad = {pair(a, b) for a in range(5) for b in range(a)} | {pair(5, 6)}
    assert ring_order(members, bad) is not None  # alternating between the halves
    bad |= {pair(0, b) for b in range(1, 9)}
    assert ring_order(members, bad) is None


def test_next_deadline_moves_with_the_state(room):
    assert membership.next_deadline(room.state) == float("inf")
    room.step(Received(50, m.Hello(PROTOCOL_VERSION, "d0", 1, ["a:1"], 1, "", "v")))
    assert membership.next_deadline(room.state) == room.now + room.limits.heartbeat_timeout


@pytest.mark.parametrize(
    ("addresses", "expected"),
    [
        (["127.0.0.1:1", "127.0.0.1:2"], 1 << 30),
        (["[::1]:1", "[::1]:2"], 1 << 30),
        (["10.0.0.1:1", "10.0.0.2:1"], 256 << 10),
        (["127.0.0.1:1", "10.0.0.2:1"], 256 << 10),
    ],
)
def test_the_plan_cuts_finely_between_machines_and_coarsely_within_one(addresses, expected):
    room = Room()
    for number, address in enumerate(addresses):
        room.hello(f"d{number}", addresses=(address,))
        room.say(f"d{number}", m.Join(GROUP, f"m{number}", 2, 1))
    epochs = [message for conn in room.conns.values() for message in room.inbox[conn] if isinstance(message, m.Epoch)]
    assert [epoch.plan.stripe for epoch in epochs] == [expected, expected]
    assert [epoch.plan.turns for epoch in epochs] == [expected == 256 << 10] * 2
