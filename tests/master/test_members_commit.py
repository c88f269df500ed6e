"""Where members commit an epoch ends in two steps: all freeze and report, then the master decides, writes and tells."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tests.master.transcript import GROUP, Room, report_of
from wancoll.collective import Descriptor, Kind
from wancoll.limits import PROTOCOL_VERSION, Limits
from wancoll.wire import messages as m
from wancoll_master.core import borne
from wancoll_master.core.ready import Former, Used
from wancoll_master.core.views import report

UPDATE = Descriptor(Kind.update_membership).fingerprint()


def voters(count: int, **limits: Any) -> Room:
    room = Room(Limits(commit="members", **limits))
    room.form(count)
    assert room.group.told.plan.commit == "members"
    room.clear()
    return room


def frozen(
    room: Room,
    name: str,
    upto: int = 0,
    done: tuple[int, ...] = (),
    digest: int = 7,
    apart: tuple[int, ...] = (),
    alone: tuple[int, ...] = (),
    updated: int = 0,
) -> None:
    """The member says what it has, with the results of what it has committed; *updated*: of an update_membership."""
    results = [(seq, 0, UPDATE) if seq == updated else (seq, 7, 9) for seq in range(max(1, upto - 40), upto + 1)]
    results += [(seq, digest, 9) for seq in done]
    said = m.Frozen(GROUP, room.mid(name), room.epoch, upto, results, [], [], list(apart), list(alone))
    room.say("d" + name[1:], said)


def lose(room: Room, daemon: str) -> None:
    """And have nobody wait for it."""
    room.drop(daemon)
    room.sleep(2 * room.limits.return_grace)


def test_a_loss_is_decided_when_all_who_go_on_have_reported() -> None:
    room = voters(3)
    lose(room, "d2")
    assert room.one("d0", m.Abort).epoch == room.one("d1", m.Abort).epoch == 1
    frozen(room, "m0", 1, (2, 3))
    assert room.epoch == 1
    frozen(room, "m1", 0, (1, 2))
    epoch = room.new_epoch()
    assert (epoch.epoch, epoch.committed_upto, [one.name for one in epoch.members]) == (2, 2, ["m0", "m1"])
    assert room.journal[GROUP].base == 2


def test_who_left_in_peace_is_told_apart_from_who_is_lost_in_the_same_epoch() -> None:
    room = voters(4)
    room.say("d1", m.Leave(GROUP, "m1", "", False))
    room.say("d2", m.Leave(GROUP, "m2", "its client died: killed", True))
    frozen(room, "m0")
    frozen(room, "m3")
    epoch = room.new_epoch()
    assert (epoch.reason, epoch.goodbyes) == ("m1 left; lost m2: its client died: killed", ["m1"])
    lose(room, "d3")
    frozen(room, "m0")
    assert room.new_epoch().goodbyes == []


@pytest.mark.parametrize("votes", [True, False])
def test_who_leaves_in_peace_while_the_group_is_put_together_again_is_not_lost(votes: bool) -> None:
    room = Room(Limits(commit="members" if votes else "master"))
    plan = m.Plan(4, 1024, True, {}, [], 0, "", commit="members" if votes else "master")
    room.restarted(mids=(1, 2, 3, 4))
    for mid in (1, 2, 3):
        room.say(f"d{mid}", report_of(mid, of=(1, 2, 3, 4), plan=plan))
    room.say("d2", m.Leave(GROUP, "m2", "", False))
    room.say("d3", m.Leave(GROUP, "m3", "its client died: killed", True))
    room.sleep(room.limits.rejoin_grace + 0.1)
    if votes:
        frozen(room, "m1")
    epoch = room.new_epoch()
    assert ([one.name for one in epoch.members], epoch.goodbyes) == (["m1"], ["m2"])


def test_who_was_lost_is_told_what_the_others_have_with_its_digest() -> None:
    room = voters(3)
    lose(room, "d2")
    frozen(room, "m0", 1, (2, 3))
    frozen(room, "m1", 1, (2,))
    room.clear()
    room.hello("d2")
    fate = room.one("d2", m.Evicted)
    assert (fate.committed_upto, fate.unknown_upto, fate.epoch, fate.digests) == (0, 2, 1, [(1, 7, 9), (2, 7, 9)])


def test_who_was_lost_and_is_back_before_the_others_have_reported_is_told_when_they_have() -> None:
    """Over the connection that it has then: it would wait for ever."""
    room = voters(3)
    lose(room, "d2")
    room.hello("d2")
    frozen(room, "m0", 1, (2,))
    frozen(room, "m1", 1, (2,))
    fate = room.one("d2", m.Evicted)
    assert (fate.mid, fate.unknown_upto, fate.digests) == (3, 2, [(1, 7, 9), (2, 7, 9)])


def test_status_says_who_has_to_report_also_where_a_link_to_who_is_out_already_was_complained_of() -> None:
    room = voters(3)
    room.link_down("m0", "m2", "lost")
    room.say("d2", m.Leave(GROUP, "m2", "", False))
    frozen(room, "m0")
    assert report.waiting_for(room.state, room.group, 0.0) == "m1 to say what they have finished: the epoch ends"


def test_a_report_of_one_who_is_lost_then_does_not_count() -> None:
    room = voters(3)
    lose(room, "d2")
    frozen(room, "m1", 0, ())
    lose(room, "d1")
    frozen(room, "m0", 0, (1,))
    assert room.new_epoch().committed_upto == 1


def test_results_that_differ_end_the_epoch_and_are_not_committed() -> None:
    room = voters(2)
    room.say("d0", m.Differs(GROUP, room.mid("m0"), 1, 2, 7, room.mid("m1"), 8))
    frozen(room, "m0", 1, (2,), apart=(2,))
    frozen(room, "m1", 1, (2,), digest=8)
    epoch = room.new_epoch()
    assert (epoch.committed_upto, epoch.voids) == (1, [])
    assert "differ" in epoch.reason


@pytest.mark.parametrize("late", [False, True])
def test_whose_client_writes_to_what_it_has_handed_over_is_out_by_its_own_word(late: bool) -> None:
    """Also where it was found out when the epoch was over: the call goes on in the next one."""
    room = voters(3)
    if late:
        room.say("d0", m.Differs(GROUP, room.mid("m0"), 1, 1, 7, room.mid("m1"), 8))
        for name in "m0", "m1", "m2":
            frozen(room, name)
        assert room.new_epoch().epoch == 2
        room.clear()
    room.say("d1", m.Written(GROUP, room.mid("m1"), 1, "all_reduce(3 x float32)"))
    frozen(room, "m0")
    frozen(room, "m2")
    epoch = room.new_epoch()
    assert [one.name for one in epoch.members] == ["m0", "m2"]
    assert "the tensor was written to during the call: all_reduce(3 x float32)" in room.one("d1", m.Evicted).reason


def test_what_one_has_heard_another_result_of_is_not_committed_though_all_who_go_on_have_it_alike() -> None:
    """The other result is of one who is lost."""
    room = voters(3)
    lose(room, "d2")
    frozen(room, "m0", 0, (1,), apart=(1,))
    frozen(room, "m1", 0, (1,))
    assert room.new_epoch().committed_upto == 0


def after_restart(room: Room, *mids: int, **report: Any) -> None:
    """These members report, where members commit."""
    plan = m.Plan(4, 1024, True, {}, [], 0, "", commit="members")
    for mid in mids:
        room.say(f"d{mid}", report_of(mid, plan=plan, **report))


def test_who_is_left_out_by_an_epoch_that_nobody_has_heard_of_stays_out() -> None:
    room = Room(Limits(commit="members"))
    room.restarted(epoch=2, mids=(1, 2))
    after_restart(room, 1, 2, 3)
    room.sleep(room.limits.rejoin_grace + 0.1)
    assert "put out by the master before this one" in room.one("d3", m.Evicted).reason
    assert [one.mid for one in room.group.members] == [1, 2]


def test_where_the_journal_is_lost_and_one_is_missing_what_all_have_finished_is_unknown() -> None:
    room = Room(Limits(commit="members"))
    room.restarted()
    after_restart(room, 1, 2, epoch=2)
    room.sleep(room.limits.rejoin_grace + 0.1)
    for mid in (1, 2):
        room.say(f"d{mid}", m.Frozen(GROUP, mid, 2, 1, [(1, 7, 9), (2, 7, 9)], [], [], []))
    epoch = room.new_epoch()
    assert (epoch.committed_upto, [(void.seq, void.error) for void in epoch.voids]) == (1, [(2, "OutcomeUnknown")])


@pytest.mark.parametrize("commit", ["members", "master"])
def test_an_epoch_that_the_journal_does_not_know_is_written_before_it_goes_on(commit: str) -> None:
    room = Room(Limits(commit=commit))
    room.restarted()
    plan = m.Plan(4, 1024, True, {}, [], 0, "", commit=commit)
    for mid in (1, 2, 3):
        room.say(f"d{mid}", report_of(mid, plan=plan, epoch=2))
    assert room.one("d1", m.Resumed).epoch == 2
    assert room.ready.persist is not None
    assert (room.ready.persist.groups[GROUP].epoch, room.journal[GROUP].epoch) == (2, 2)


def test_what_is_given_up_is_void_and_nothing_above_it_has_happened() -> None:
    room = voters(2)
    room.give_up("m0", 2, reason="no memory")
    frozen(room, "m0", 1, (3,))
    frozen(room, "m1", 1, (3,))
    epoch = room.new_epoch()
    assert (epoch.committed_upto, [void.seq for void in epoch.voids]) == (1, [2])


def test_calls_that_differ_freeze_at_once_and_are_void() -> None:
    room = voters(2)
    room.mismatch("m0", 2, "a")
    assert room.one("d1", m.Abort).ask == 2
    frozen(room, "m0", 1)
    frozen(room, "m1", 1)
    assert room.epoch == 1
    room.mismatch("m1", 2, "b")
    epoch = room.new_epoch()
    assert (epoch.committed_upto, [(void.seq, void.error) for void in epoch.voids]) == (1, [(2, "CollectiveMismatch")])


def test_what_stalled_and_all_have_finished_meanwhile_is_not_void() -> None:
    """Who is lost may have committed it: the stall was the master's opinion, and nobody's who took part."""
    room = voters(3)
    room.give_up("m0", 1, 2, reason="nothing moved")
    lose(room, "d2")
    frozen(room, "m0", 0, (1,))
    frozen(room, "m1", 0, (1,))
    epoch = room.new_epoch()
    assert (epoch.committed_upto, [void.seq for void in epoch.voids]) == (1, [2])


def test_a_note_that_never_comes_is_a_stall_and_who_has_committed_is_believed() -> None:
    """m2 has committed the operation and goes on; the others never hear that it has finished it."""
    room = voters(3)
    done = m.OpWait(1, "all_reduce", 4, "done", 100.0, 100.0)

    def wait() -> None:
        for number in range(2):
            room.say(f"d{number}", m.Waits(GROUP, room.mid(f"m{number}"), 1, [done], []))

    for number in range(2):
        room.say(f"d{number}", m.Heartbeat(1, [(room.mid(f"m{number}"), 1, 1, 0)]))
    room.say("d2", m.Heartbeat(1, [(room.mid("m2"), 1, 2, 0)]))
    wait()
    assert room.take("d0", m.Abort) == []
    room.say("d2", m.Heartbeat(2, [(room.mid("m2"), 1, 2, 1)]))
    room.sleep(room.limits.heartbeat_interval)
    wait()
    assert room.one("d0", m.Abort).epoch == 1
    frozen(room, "m0", 0, (1,))
    frozen(room, "m1", 0, (1,))
    frozen(room, "m2", 1, (2,))
    epoch = room.new_epoch()
    assert (epoch.committed_upto, len(epoch.members), epoch.voids) == (1, 3, [])
    assert "operation 1 moved nothing for 20 s on m0, m1" in epoch.reason


def test_what_the_master_commits_waits_for_all_below_by_the_members_word() -> None:
    room = voters(2)
    for name in ("m0", "m1"):
        room.say("d" + name[1:], m.Done(GROUP, room.mid(name), 1, 100_000, 7, 9, 99_999))
    assert room.one("d0", m.Commit).upto == 100_000
    assert room.group.committed == 100_000


def test_nobody_is_left_and_all_is_unknown_and_the_name_waits() -> None:
    room = voters(2)
    lose(room, "d0")
    lose(room, "d1")
    room.hello("d0")
    assert room.one("d0", m.Evicted).unknown_upto == m.MOST
    room.join("m7", daemon="d7", start=1)
    assert room.take("d7", m.Epoch) == []
    room.sleep(room.limits.heartbeat_timeout + room.limits.master_grace)
    assert room.one("d7", m.Epoch).members[0].name == "m7"


@pytest.mark.parametrize("commit", ["members", "master"])
def test_a_new_master_waits_as_long_as_the_members_may_go_on_alone(commit: str) -> None:
    """By the daemons' own word and the earlier master's heartbeat_timeout, whatever its options are."""
    room = Room(Limits(commit="members"))
    for number in range(2):
        room.hello(f"d{number}", master_grace=20.5 + number)
        room.join(f"m{number}", start=2)
    assert room.journal[GROUP].alone == 25  # 21.5 + 3
    room.limits = Limits(commit=commit, heartbeat_timeout=1.0)
    room.restart()
    room.join("m7", daemon="d7", start=1)
    room.sleep(24.9)
    assert room.take("d7", m.Epoch) == []
    room.sleep(0.2)
    assert room.one("d7", m.Epoch).members[0].name == "m7"


def test_a_pair_that_cannot_talk_and_too_many_members_leave_it_to_the_master() -> None:
    room = voters(4)
    room.link_down("m0", "m2", "unreachable")
    room.sleep(1.0)
    for number in range(4):
        frozen(room, f"m{number}")
    assert room.new_epoch().plan.commit == "master"
    many = Room(Limits())
    many.form(33)
    assert many.group.told.plan.commit == "master"


def test_by_default_members_commit_while_they_are_few_enough() -> None:
    room = Room(Limits())
    room.form(32)
    assert room.group.told.plan.commit == "members"
    room.join("m32", start=32)
    room.admit("m32")
    room.all_update(1)
    for name in room.names:
        frozen(room, name)
    epoch = room.new_epoch()
    assert (len(epoch.members), epoch.committed_upto, epoch.plan.commit) == (33, 1, "master")
    lose(room, "d0")
    epoch = room.new_epoch()
    assert (len(epoch.members), epoch.plan.commit) == (32, "members")


def test_a_master_that_is_started_again_to_commit_itself_ends_the_epoch_in_which_members_do() -> None:
    room = Room(Limits(commit="master"))
    room.restarted()
    for mid in (1, 2, 3):
        report = report_of(mid, committed_upto=mid)
        plan = msgspec.structs.replace(report.plan, commit="members")
        room.say(f"d{mid}", msgspec.structs.replace(report, plan=plan))
    for mid in (1, 2, 3):
        assert room.one(f"d{mid}", m.Abort).epoch == 1
        room.say(f"d{mid}", m.Frozen(GROUP, mid, 1, mid, [(seq, 7, 9) for seq in range(1, 6)], [], [], []))
    epoch = room.new_epoch()
    assert (len(epoch.members), epoch.committed_upto, epoch.plan.commit) == (3, 5, "master")


@pytest.mark.parametrize("name", ["m0", "m2"])
def test_who_says_that_more_is_committed_than_the_others_bear_is_put_out(name: str) -> None:
    room = voters(3)
    room.give_up("m1", 4)
    for one in ("m0", "m1", "m2"):
        frozen(room, one, *((10, ()) if one == name else (1, (2,))))
    assert room.epoch == 2
    epoch = room.new_epoch()
    assert [one.name for one in epoch.members] == [one for one in ("m0", "m1", "m2") if one != name]
    assert epoch.committed_upto == 2
    fate = room.one("d" + name[1:], m.Evicted)
    assert "says that operation 3 is committed" in fate.reason
    assert (fate.committed_upto, fate.unknown_upto, fate.digests) == (0, m.MOST, [(1, 7, 9), (2, 7, 9)])


def test_what_somebody_has_committed_is_not_given_up_nor_doubted_by_another_one() -> None:
    room = voters(2)
    room.give_up("m1", 1)
    frozen(room, "m0", 2)
    frozen(room, "m1", 0, (1, 2), apart=(2,))
    epoch = room.new_epoch()
    assert (epoch.committed_upto, epoch.voids) == (2, [])


@pytest.mark.parametrize("how", ["heartbeat", "done"])
def test_what_one_member_says_is_committed_decides_nothing(how: str) -> None:
    """It is lost then, so that nobody can ask it; and what the master commits is not held up by it."""
    room = voters(3)
    if how == "done":
        room.say("d2", m.Done(GROUP, room.mid("m2"), 1, 60, 7, 9, 50))
    else:
        beat(room, "m2", called=60, committed=50)
    for name in ("m0", "m1"):
        room.say("d" + name[1:], m.Done(GROUP, room.mid(name), 1, 3, 7, 9, 2))
    assert room.group.committed == 2
    lose(room, "d2")
    frozen(room, "m0", 2, (4,))
    frozen(room, "m1", 2)
    assert room.new_epoch().committed_upto == 2


def beat(room: Room, name: str, called: int, committed: int) -> None:
    room.say("d" + name[1:], m.Heartbeat(1, [(room.mid(name), room.epoch, called, committed)]))


def test_what_all_have_committed_is_heard_in_heartbeats() -> None:
    """Who has not called what others have is late, though no operation was ever told to the master."""
    room = voters(3, call_timeout=4.0)
    for _ in range(9):
        for name in ("m0", "m1"):
            beat(room, name, 6, 5)
        beat(room, "m2", 5, 5)
        room.sleep(0.5)
    assert room.group.committed == 5
    assert {one.done_upto for one in report.groups(room.state, room.now)[0].members} == {5}
    for name in ("m0", "m1"):
        frozen(room, name, 5)
    assert [one.name for one in room.new_epoch().members] == ["m0", "m1"]
    assert "others called operation 6" in room.one("d2", m.Evicted).reason


def test_who_waits_in_an_operation_is_not_late_while_its_own_commit_is_open() -> None:
    room = voters(3, call_timeout=4.0)
    for _ in range(10):
        for name, committed in (("m0", 5), ("m1", 5), ("m2", 4)):
            beat(room, name, 5 + (name != "m2"), committed)
        room.sleep(0.5)
    assert room.names == ["m0", "m1", "m2"]


def test_a_link_came_up_where_all_have_committed_more_since() -> None:
    room = voters(3)
    room.link_down("m0", "m1", "unreachable")
    for name in room.names:
        beat(room, name, 3, 2)
    room.sleep(0.5 + room.limits.link_timeout)
    assert room.names == ["m0", "m1", "m2"]
    assert not room.group.bad_pairs


def test_who_does_not_say_that_it_is_frozen_is_put_out() -> None:
    room = voters(3)
    room.give_up("m1", 4)
    frozen(room, "m0")
    frozen(room, "m1")
    room.sleep(2 * room.limits.heartbeat_timeout - 0.1)
    assert room.epoch == 1
    room.sleep(0.2)
    assert [one.name for one in room.new_epoch().members] == ["m0", "m1"]
    assert "did not say within 6 s what it has finished" in room.one("d2", m.Evicted).reason


def test_who_was_not_heard_for_a_while_has_time_to_say_that_it_is_frozen() -> None:
    room = voters(3)
    room.give_up("m1", 4)
    for name in ("m0", "m1"):
        frozen(room, name)
    room.asleep.add("d2")
    room.sleep(room.limits.heartbeat_timeout - 0.5)
    room.asleep.clear()
    room.sleep(2 * room.limits.heartbeat_timeout)
    assert room.epoch == 1
    frozen(room, "m2")
    assert len(room.new_epoch().members) == 3


def test_who_is_heard_with_gaps_and_does_not_say_that_it_is_frozen_is_put_out_later() -> None:
    room = voters(2)
    room.give_up("m0", 4)
    frozen(room, "m0")
    for _ in range(8):
        assert room.epoch == 1
        room.asleep.add("d1")
        room.sleep(1.5)
        room.asleep.clear()
        room.sleep(0.5)
    room.sleep(6 * room.limits.heartbeat_timeout - 16 + 0.6)
    assert [one.name for one in room.new_epoch().members] == ["m0"]


def test_a_joiner_says_nothing_of_the_members_program() -> None:
    room = voters(2)
    room.join("m7", start=2)
    room.say("d7", m.Heartbeat(1, [(room.mid("m7"), room.epoch, 1 << 40, 1 << 40)]))
    assert (room.group.current.called, room.group.current.heard) == (0, 0)


def test_who_says_too_much_is_cut_off_and_not_who_speaks_next() -> None:
    room = voters(2)
    room.join("x", group="other", daemon="d1", start=1)
    for seq in range(1000, 1000 + 4096):
        room.say("d0", m.Done(GROUP, room.mid("m0"), 1, seq, 7, 9))
    room.say("d1", m.UpdateMembership(GROUP, room.mid("m1"), 1, 1))
    assert "d1" in room.state.daemons
    room.say("d0", m.Done(GROUP, room.mid("m0"), 1, 900, 7, 9))
    assert ("d0" in room.state.daemons, "d1" in room.state.daemons) == (False, True)


def test_after_a_restart_who_says_too_much_is_put_out_though_all_are_here() -> None:
    room = Room(Limits(commit="members"))
    room.restarted()
    for mid in (1, 2, 3):
        report = report_of(mid, committed_upto=9 if mid == 3 else 1)
        plan = msgspec.structs.replace(report.plan, commit="members")
        room.say(f"d{mid}", msgspec.structs.replace(report, plan=plan))
    for mid in (1, 2, 3):
        assert room.one(f"d{mid}", m.Resumed).epoch == 1  # the others may have come as far since they reported
    room.sleep(room.limits.heartbeat_timeout + 0.1)
    for mid in (1, 2, 3):
        assert room.one(f"d{mid}", m.Abort).epoch == 1
        room.say(f"d{mid}", m.Frozen(GROUP, mid, 1, 9 if mid == 3 else 1, [], [], [], []))
    epoch = room.new_epoch()
    assert ([one.mid for one in epoch.members], epoch.committed_upto) == ([1, 2], 1)
    assert "says that operation 9 is committed" in room.one("d3", m.Evicted).reason


def test_members_that_commit_while_they_report_go_on_after_a_restart() -> None:
    room = Room(Limits(commit="members"))
    room.restarted()
    for mid in (1, 2, 3):
        report = report_of(mid, committed_upto=8 + mid)
        plan = msgspec.structs.replace(report.plan, commit="members")
        room.say(f"d{mid}", msgspec.structs.replace(report, plan=plan))
    for mid in (1, 2, 3):
        assert room.one(f"d{mid}", m.Resumed).epoch == 1
        room.say(f"d{mid}", m.Heartbeat(1, [(mid, 1, 11, 11)], []))
    room.sleep(10 * room.limits.heartbeat_timeout)
    assert not any(room.take(f"d{mid}", m.Abort) for mid in (1, 2, 3))


def test_a_huge_number_that_one_member_says_costs_no_time() -> None:
    room = voters(1)
    huge = room.state.believable
    room.give_up("m0", 2)
    frozen(room, "m0", huge)
    assert room.new_epoch().committed_upto == huge


def test_a_link_that_is_lost_again_and_again_with_nothing_committed_is_avoided() -> None:
    room = voters(4)
    for _ in range(6):
        assert not room.group.bad_pairs
        for number in range(4):
            room.say(f"d{number}", m.Heartbeat(1, [(room.mid(f"m{number}"), room.epoch, 1, 0)], []))
        room.link_down("m0", "m1", "lost")
        room.sleep(1.0)
        for number in range(4):
            frozen(room, f"m{number}")
    assert list(room.group.bad_pairs) == [(1, 2)]


# ---- update_membership (C11) --------------------------------------------------------------------------


def at_an_update(room: Room) -> None:
    """A joiner is there, and all members stand at operation 1."""
    room.join("m7", daemon="d7", start=len(room.names))
    room.admit("m7")
    room.all_update(1)


def test_joiners_come_in_once_all_have_stopped_at_the_update() -> None:
    room = voters(2)
    at_an_update(room)
    assert room.one("d0", m.Abort).epoch == 1
    frozen(room, "m0", alone=(1,))
    assert room.epoch == 1
    frozen(room, "m1")
    epoch = room.new_epoch()
    assert ([one.name for one in epoch.members], epoch.committed_upto, epoch.passed) == (["m0", "m1", "m7"], 1, False)


def test_joiners_wait_where_the_members_have_passed_the_update_alone() -> None:
    room = voters(2)
    at_an_update(room)
    frozen(room, "m0", upto=1, done=(2,), updated=1)
    frozen(room, "m1", done=(2,), alone=(1,))
    epoch = room.new_epoch()
    assert ([one.name for one in epoch.members], epoch.committed_upto, epoch.passed) == (["m0", "m1"], 2, True)
    room.all_update(3)
    frozen(room, "m0", upto=2, updated=1)
    frozen(room, "m1", upto=2, updated=1)
    assert len(room.new_epoch().members) == 3


def test_who_is_lost_meanwhile_ends_the_epoch_and_the_update_is_called_again() -> None:
    room = voters(3)
    at_an_update(room)
    lose(room, "d2")
    frozen(room, "m0")
    frozen(room, "m1", alone=(1,))
    epoch = room.new_epoch()
    assert (epoch.committed_upto, len(epoch.members), epoch.passed) == (0, 2, True)


def test_after_a_restart_an_update_has_ended_where_all_were_told_or_all_went_on_alone() -> None:
    both, mixed = [(1,), (1,)], [(1,), ()]
    for alone, told, upto in ((both, mixed, 1), (mixed, both, 1), ([(1,), ()], [(), (1,)], 0)):
        room = Room(Limits(commit="members"))
        room.restarted()
        for mid in (1, 2):
            report = report_of(mid, updates=[1])
            plan = msgspec.structs.replace(report.plan, commit="members")
            room.say(f"d{mid}", msgspec.structs.replace(report, plan=plan))
        room.sleep(room.limits.rejoin_grace + 0.1)
        for mid in (1, 2):
            said = m.Frozen(GROUP, mid, room.epoch, 0, [], [], list(told[mid - 1]), [], list(alone[mid - 1]))
            room.say(f"d{mid}", said)
        assert room.new_epoch().committed_upto == upto


# ---- an operator, and names that wait (C8) ------------------------------------------------------------


def evict(room: Room, member: str = "", reason: str = "") -> m.EvictAnswer:
    conn = room.stranger(m.Evict(PROTOCOL_VERSION, GROUP, member, not member, reason))
    [answer] = room.inbox[conn]
    assert conn in room.closed
    assert isinstance(answer, m.EvictAnswer)
    return answer


def test_an_operator_puts_a_member_out_and_the_others_go_on() -> None:
    room = voters(3)
    answer = evict(room, "m2", "its disk is full")
    assert (answer.done, answer.what) == (True, "m2 of group g: evicted by an operator: its disk is full")
    for name in ("m0", "m1"):
        frozen(room, name)
    assert [one.name for one in room.new_epoch().members] == ["m0", "m1"]
    assert "its disk is full" in room.one("d2", m.Evicted).reason
    wrong = evict(room, "m2")
    assert (wrong.done, wrong.expected, wrong.got) == (False, "one of m0, m1", "m2")


def test_an_operator_sends_a_joiner_away() -> None:
    room = voters(2)
    room.join("m7", daemon="d7", start=2)
    assert evict(room, "m7").done
    refused = room.one("d7", m.Refused)
    assert (refused.reason, refused.evicted) == ("evicted by an operator", True)
    assert room.epoch == 1


def lose_all(room: Room) -> None:
    lose(room, "d0")
    lose(room, "d1")
    room.join("m7", daemon="d7", start=1)
    assert room.take("d7", m.Epoch) == []


def test_a_name_is_free_when_the_operator_says_that_all_have_stopped() -> None:
    room = voters(2)
    lose_all(room)
    assert "m1 of before were lost without a word" in room.one("d7", m.Joined).reason
    assert evict(room, "m8").expected == "one of m7, m0, m1"
    assert evict(room, "m0").what.endswith("; still missing: 1")
    assert evict(room, "m1").what.endswith("its name is free")
    assert room.one("d7", m.Epoch).members[0].name == "m7"


def test_a_new_master_waits_as_long_and_hears_of_those_who_have_stopped() -> None:
    room = voters(2)
    lose(room, "d0")
    lose(room, "d1")
    room.restart()
    room.join("m7", daemon="d7", start=1)
    room.sleep(room.limits.rejoin_grace + 1)
    assert room.take("d7", m.Epoch) == []
    assert evict(room).what.endswith("its name is free")
    assert room.one("d7", m.Epoch).members[0].name == "m7"
    assert evict(room, "m1").done is False


@pytest.mark.parametrize("commit", ["members", "master"])
def test_a_new_master_says_what_was_running_until_it_has_stopped(commit: str) -> None:
    """From its first moment, also once the name waits for nobody, and whoever commits."""
    room = Room(Limits(commit=commit))
    for i in range(2):
        room.hello(f"d{i}", incarnation=10 + i)
        room.join(f"m{i}", start=2)
    assert report.gone(room.state) == []
    room.restart()
    assert report.gone(room.state) == [(GROUP, 2, "m0, m1")]
    room.sleep(3000)
    assert report.gone(room.state, [GROUP]) == [(GROUP, 2, "m0, m1")]
    assert report.gone(room.state, ["another"]) == []
    room.hello("e0", incarnation=20, ended=[10])
    assert report.gone(room.state) == [(GROUP, 2, "m1")]
    room.restart()
    assert evict(room).what == "group g counts all of its members as stopped; its name is free"
    assert report.gone(room.state) == []
    room.restart()
    assert report.gone(room.state) == []


def test_the_last_of_a_group_of_before_that_is_said_to_have_ended_is_a_loss() -> None:
    room = Room(Limits(commit="members"))
    for i in range(2):
        room.hello(f"d{i}", incarnation=10 + i)
        room.join(f"m{i}", start=2)
    room.restart()
    for i in range(2):
        room.hello(f"e{i}", incarnation=20 + i, ended=[10 + i])
    losses = [(one.group, one.text.partition(":")[0]) for one in room.records if one.kind == "daemon died"]
    assert losses == [(GROUP, "lost m1")]


@pytest.mark.parametrize("commit", ["members", "master"])
def test_nobody_misses_a_group_whose_members_have_left(commit: str) -> None:
    room = Room(Limits(commit=commit))
    room.form(2)
    for i in range(2):
        room.say(f"d{i}", m.Leave(GROUP, f"m{i}"))
        if GROUP in room.state.groups and commit == "members":
            frozen(room, "m1")
    assert report.gone(room.state) == []
    room.restart()
    assert report.gone(room.state) == []


def test_of_many_members_the_first_are_missed() -> None:
    room = Room(Limits(commit="members"))
    room.form(40)
    room.restart()
    [(_, members, who)] = report.gone(room.state)
    assert (members, who.endswith(" and 24 more")) == (40, True)
    assert GROUP not in room.state.alone


def test_what_an_operator_says_of_a_group_that_is_no_more_is_told_as_this_groups() -> None:
    room = voters(2)
    lose(room, "d0")
    lose(room, "d1")
    assert GROUP not in room.state.groups
    assert evict(room, reason="rebooted").done
    said = room.records[-1]
    assert (said.group, said.kind) == (GROUP, "stopped"), "no loss: nobody is put out by it"
    assert said.text == "an operator says that all of its members stopped: rebooted"


def test_who_has_heard_that_it_is_out_is_not_waited_for() -> None:
    room = voters(2)
    lose(room, "d0")
    frozen(room, "m1")
    lose(room, "d1")
    room.hello("d1")
    room.join("m7", daemon="d7", start=1)
    assert room.take("d7", m.Epoch) == []
    room.say("d1", m.Ended([(GROUP, room.one("d1", m.Evicted).mid)]))
    assert room.one("d7", m.Epoch).members[0].name == "m7"


def test_a_group_that_is_evicted_whole_keeps_its_name_until_each_has_heard_of_it() -> None:
    room = voters(2)
    for i in (7, 8):
        room.join(f"m{i}", start=2)
    mids = [member.mid for member in room.group.members]
    assert evict(room).done
    assert room.take("d7", m.Epoch) == []
    assert room.journal[GROUP].former
    for i, mid in enumerate(mids):
        assert room.one(f"d{i}", m.Evicted).mid == mid
        assert room.take("d7", m.Epoch) == []
        room.say(f"d{i}", m.Ended([(GROUP, mid)]))
    assert room.one("d7", m.Epoch).members[0].name == "m7"
    assert (room.state.gone, room.state.alone, room.epoch) == ({}, {}, 2)


def test_who_is_evicted_and_does_not_hear_of_it_is_said_to_have_stopped_by_a_second_evict() -> None:
    room = voters(2)
    for i in (7, 8):
        room.join(f"m{i}", start=2)
    assert "again" in evict(room).what
    assert room.take("d7", m.Epoch) == []
    assert evict(room).what.endswith("its name is free")
    assert room.one("d7", m.Epoch).members[0].name == "m7"


def test_members_that_ended_while_the_master_was_away_keep_nobody_waiting() -> None:
    room = voters(2)
    mids = [member.mid for member in room.group.members]
    room.restart()
    for i, mid in enumerate(mids):
        room.hello(f"d{i}")
        room.say(f"d{i}", m.Ended([(GROUP, mid)]))
        room.say(f"d{i}", m.Heartbeat(0))
    room.join("m7", daemon="d7", start=1)
    room.sleep(room.limits.rejoin_grace + 0.1)
    assert room.one("d7", m.Epoch).members[0].name == "m7"


@pytest.mark.parametrize("before", [True, False])
def test_nobody_says_of_another_daemons_members_that_they_have_ended(before: bool) -> None:
    """C8: they may go on by themselves, and the name is theirs; also where it was said while they were here."""
    room = voters(2)
    mids = [member.mid for member in room.group.members]
    lie = m.Ended([(GROUP, mid) for mid in mids])
    room.hello("d9", incarnation=2)
    if before:
        room.say("d9", lie)
    lose_all(room)
    room.say("d9", lie)
    assert set(room.state.used[GROUP].former) == set(mids)
    assert GROUP in room.state.alone


def test_a_member_that_leaves_after_its_report_keeps_nobody_waiting() -> None:
    room = voters(2)
    mids, plan = [member.mid for member in room.group.members], room.group.told.plan
    room.restart()
    room.hello("d0")
    reported = [(mid, f"m{i}", f"d{i}") for i, mid in enumerate(mids)]
    room.say("d0", report_of(mids[0], members=reported, plan=plan, start_world=1))
    room.hello("d1")
    room.say("d1", m.Ended([(GROUP, mids[1])]))
    room.say("d0", m.Leave(GROUP, "m0"))
    room.join("m7", daemon="d7", start=1)
    room.sleep(room.limits.rejoin_grace + 0.1)
    assert room.one("d7", m.Epoch).members[0].name == "m7"


def test_a_group_that_ended_in_peace_keeps_nobody_waiting() -> None:
    room = voters(2)
    for i in (0, 1):
        room.say(f"d{i}", m.Leave(GROUP, f"m{i}"))
    if room.state.groups.get(GROUP) is not None:
        frozen(room, "m1")
    assert not room.journal[GROUP].former
    room.restart()
    room.join("m7", daemon="d7", start=1)
    room.sleep(room.limits.rejoin_grace + 0.1)
    assert room.one("d7", m.Epoch).members[0].name == "m7"


def test_an_empty_name_is_nobody_to_evict() -> None:
    room = voters(2)
    room.restart()
    conn = room.stranger(m.Evict(PROTOCOL_VERSION, GROUP, "", False, ""))
    assert [one.done for one in room.inbox[conn]] == [False]
    assert room.journal[GROUP].former


def test_a_name_waits_from_when_a_member_that_reported_was_heard_last() -> None:
    room = voters(2)
    plan, mids = room.group.told.plan, [member.mid for member in room.group.members]
    room.restart()
    until = room.state.alone[GROUP]
    room.sleep(1)
    room.hello("d0")
    reported = [(mid, f"m{i}", f"d{i}") for i, mid in enumerate(mids)]
    room.say("d0", report_of(mids[0], members=reported, plan=plan, start_world=1))
    room.drop("d0")
    assert room.state.alone[GROUP] >= until + 1


def test_a_name_waits_by_the_heartbeat_timeout_of_the_master_that_heard_a_member_last() -> None:
    """Each tells daemons its own; here the later one's is longer, and it ends before it has written down an epoch."""
    room = voters(2)
    plan, mids = room.group.told.plan, [member.mid for member in room.group.members]
    room.limits = Limits(commit="members", heartbeat_timeout=60.0)
    room.restart()
    assert room.state.alone[GROUP] == room.now + 603
    room.hello("d0")
    reported = [(mid, f"m{i}", f"d{i}") for i, mid in enumerate(mids)]
    room.say("d0", report_of(mids[0], members=reported, plan=plan, start_world=1))
    room.drop("d0")
    assert room.state.alone[GROUP] >= room.now + 660


def test_a_send_to_who_has_just_left_is_called_again_in_the_next_epoch() -> None:
    room = voters(3)
    gone = room.mid("m2")
    room.say("d2", m.Leave(GROUP, "m2"))
    room.say("d0", m.P2PCall(GROUP, room.mid("m0"), 1, 1, gone, 0, True, 1, 3, ""))
    for name in ("m0", "m1"):
        frozen(room, name)
    assert [one.name for one in room.new_epoch().members] == ["m0", "m1"]


def test_daemons_whose_processes_have_ended_keep_nobody_waiting() -> None:
    """All were killed, and started again on their machines: one that is started vouches for all that were there."""
    room = Room(Limits(commit="members"))
    for i in range(3):
        room.hello(f"d{i}", incarnation=10 + i)
        room.join(f"m{i}", start=3)
    room.hello("e0", ended=[11, 10, 5])
    assert [room.closed[conn] for conn in (1, 2)] == [
        f"daemon d{i}: the daemon's process has ended, as a later one of its machine says" for i in (0, 1)
    ]
    assert [one.name for one in room.journal[GROUP].former.values()] == ["m0", "m1", "m2"]
    lose(room, "d2")
    assert [one.name for one in room.journal[GROUP].former.values()] == ["m2"]
    room.join("m0", daemon="e0", start=1)
    assert "m2 of before were lost without a word" in room.one("e0", m.Joined).reason
    room.hello("e2", ended=[12])
    assert room.one("e0", m.Epoch).members[0].name == "m0"


def test_a_master_that_is_started_again_too_knows_who_has_ended() -> None:
    room = Room(Limits(commit="members"))
    for i in range(3):
        room.hello(f"d{i}", incarnation=10 + i)
        room.join(f"m{i}", start=3)
    room.restart()
    room.hello("e0", ended=[10])
    room.restart()
    room.hello("e1", ended=[11])
    room.join("m7", daemon="e1", start=1)
    assert "m2 of before" in room.one("e1", m.Joined).reason
    room.sleep(room.limits.rejoin_grace + 1)
    assert room.take("e1", m.Epoch) == []
    room.hello("e2", ended=[12])
    assert room.one("e1", m.Epoch).members[0].name == "m7"


def test_nobody_vouches_for_a_member_whose_process_is_not_known() -> None:
    """It did not report, and the journal is lost: nobody can say what process that was."""
    room = Room(Limits(commit="members"))
    unknown = Used(3, frozenset({1}), 0, {}, 600, {1: Former("member 1", 0)})
    room.journal = {GROUP: unknown}
    room.restart()
    room.hello("e0", incarnation=11, ended=[0])
    assert room.state.used[GROUP] == unknown


def test_to_evict_a_lost_member_is_not_to_refuse_who_waits_for_its_name() -> None:
    room = voters(2)
    lose(room, "d0")
    lose(room, "d1")
    room.join("m0", daemon="d7", start=1)
    assert evict(room, "m0").what.endswith("; still missing: 1")
    room.restart()
    room.join("m0", daemon="d7", start=1)
    room.sleep(room.limits.rejoin_grace + 1)
    assert evict(room, "m1").what.endswith("its name is free")
    assert room.one("d7", m.Epoch).members[0].name == "m0"


# ---- members that lie (C3) ----------------------------------------------------------------------------


def closed(*said: tuple[int, dict[int, int]], lost: int = 0, **limits: Any) -> Room:
    """The epoch ends, and each has committed so much and has these digests by seq; the last *lost* have gone since."""
    room = voters(len(said), **limits)
    room.mismatch("m0", 99, "a")
    for number, (upto, digests) in enumerate(said):
        results = [(seq, digest, 9) for seq, digest in digests.items()]
        room.say(f"d{number}", m.Frozen(GROUP, room.mid(f"m{number}"), room.epoch, upto, results, [], [], []))
    for number in range(len(said) - lost, len(said)):
        lose(room, f"d{number}")
    room.sleep(room.limits.mismatch_wait + 0.1)
    return room


def outcome(room: Room) -> tuple[list[str], int, list[int]]:
    """The members that go on, what is committed, and the calls of which nobody can say whether they are."""
    epoch = room.group.told
    unknown = [void.seq for void in epoch.voids if void.error == "OutcomeUnknown"]
    return [one.name for one in epoch.members], epoch.committed_upto, unknown


A, B, NONE = {1: 7}, {1: 8}, dict[int, int]()
COUNTED = {
    # what each has committed, and its digests; who goes on, D, what is unknown
    "the liar says nothing of what it voted for": ([(1, A), (0, A), (0, NONE)], "m0 m1", 1, []),
    "the liar has another result": ([(1, A), (0, A), (0, B)], "m0 m1", 1, []),
    "the liar claims what nobody has": ([(0, A), (0, A), (1, B)], "m0 m1", 1, []),
    "the liar claims what nobody has finished": ([(0, NONE), (0, NONE), (1, B)], "m0 m1", 0, []),
    "the liar claims, and does not say with which result": ([(0, A), (0, B), (1, NONE)], "m0 m1", 0, []),
    "the liar made two results, and claims one": ([(0, A), (0, B), (1, A)], "m0 m2", 1, []),
    "the liar claims what another one has, and one lags": ([(0, A), (0, NONE), (1, A)], "m0 m2", 1, []),
    "two claims": ([(1, A), (0, A), (0, A), (1, B)], "m0 m1 m2", 1, []),
    "two claims, and only one is contradicted by most": ([(1, A), (1, A), (1, B), (0, NONE)], "m0 m1", 1, []),
    "a claim contradicted by most, and who has the same and claims nothing": (
        [(1, A), (0, A), (0, NONE), (0, NONE), (0, NONE)], "m1 m2 m3 m4", 0, []
    ),
    "who is out for one operation does not count in the next": (
        [(2, A | {2: 7}), (0, A | {2: 7}), (0, A), (0, A), (0, B)], "m0 m1 m2 m3", 1, [2]
    ),
    "what was counted with a report stands when it counts no more": (
        [(1, A), (0, A | {2: 7}), (2, {2: 7})], "m1 m2", 2, []
    ),
    "the same of five, and one liar": (
        [(3, {1: 7, 2: 7, 3: 7}), (2, {1: 7, 2: 7}), (1, A), (0, {1: 7, 2: 7, 3: 7}), (3, {3: 7})], "m0 m3 m4", 3, []
    ),
    "two claims, both contradicted by most": ([(1, A), (1, B), (0, NONE), (0, NONE), (0, NONE)], "m2 m3 m4", 0, []),
    "a tie": ([(1, A), (0, NONE)], "m0 m1", 0, [1]),
    "a tie of results": ([(1, A), (0, B)], "m0 m1", 0, [1]),
    "a tie of claims": ([(1, A), (1, B)], "m0 m1", 0, [1]),
    "a tie of four": ([(1, A), (0, A), (0, B), (0, NONE)], "m0 m1 m2 m3", 0, [1]),
    "what is above a tie": ([(3, {1: 7, 2: 7, 3: 7}), (1, {1: 7, 3: 7})], "m0 m1", 1, [2, 3]),
    "results are kept of the newest alone": ([(50, {50: 7}), (49, {49: 7, 50: 7}), (0, NONE)], "m0 m1", 50, []),
    "a huge claim": ([(0, A), (0, A), (1 << 40, {1 << 40: 7})], "m0 m1", 1, []),
    "most lie": ([(1, A), (0, B), (0, B)], "m1 m2", 1, []),
}  # fmt: skip


def test_a_closing_that_puts_out_all_who_are_left_ends_the_group_and_not_the_master() -> None:
    room = voters(4)
    room.mismatch("m0", 99, "a")
    for name, (upto, done) in {"m0": (0, []), "m1": (1, [(1, 7, 9)]), "m2": (1, [(1, 7, 9)])}.items():
        room.say(f"d{name[1]}", m.Frozen(GROUP, room.mid(name), room.epoch, upto, done, [], [], []))
    room.sleep(room.limits.mismatch_wait + 0.1)
    for daemon in ("d1", "d2", "d3"):
        lose(room, daemon)
    assert GROUP not in room.state.groups
    assert "operation 1 is committed, as most have it" in room.one("d0", m.Evicted).reason


@pytest.mark.parametrize("third", [(1, [(1, 7, 9)]), (2, [(1, 7, 9), (2, 3, 9)])])
def test_a_restart_that_puts_out_all_who_are_left_ends_the_group_and_not_the_master(
    third: tuple[int, list[tuple[int, int, int]]],
) -> None:
    """Three contradict the fourth, or each other too, and are lost."""
    room = Room(Limits(commit="master"))
    room.restarted(mids=(1, 2, 3, 4))
    room.hello("d4", incarnation=1)
    plan = m.Plan(4, 1024, True, {}, [], 0, "", commit="master")
    claims = {1: (2, [(1, 7, 9), (2, 1, 9)]), 2: (2, [(1, 7, 9), (2, 2, 9)]), 3: third, 4: (0, [])}
    for mid, (upto, done) in claims.items():
        room.say(f"d{mid}", report_of(mid, of=(1, 2, 3, 4), plan=plan, committed_upto=upto, done=done))
        if mid < 4:
            room.drop(f"d{mid}")
    room.sleep(room.limits.rejoin_grace + 0.1)
    assert GROUP not in room.state.groups
    fate = room.one("d4", m.Evicted)
    assert (fate.committed_upto, fate.unknown_upto) == (0, m.MOST)
    room.join("n0", daemon="d4", start=1)
    room.sleep(room.limits.rejoin_grace + 0.1)
    assert room.epoch > 1


def test_after_a_restart_too_what_was_counted_with_a_report_stands_when_it_counts_no_more() -> None:
    """The liar claims 2 and hides its result of 1, which the member that is out for 2 has committed."""
    room = Room(Limits(commit="master"))
    room.restarted(mids=(1, 2, 3))
    plan = m.Plan(4, 1024, True, {}, [], 0, "", commit="master")
    claims = {1: (1, [(1, 7, 9)]), 2: (0, [(1, 7, 9), (2, 7, 9)]), 3: (2, [(2, 7, 9)])}
    for mid, (upto, done) in claims.items():
        room.say(f"d{mid}", report_of(mid, of=(1, 2, 3), plan=plan, committed_upto=upto, done=done))
    room.sleep(room.limits.rejoin_grace + 0.1)
    assert outcome(room) == (["m2", "m3"], 2, [])
    assert room.one("d1", m.Evicted).digests == [(1, 7, 9), (2, 7, 9)]


def test_liars_that_are_lost_are_counted_once_and_not_at_each_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else lists that a few members choose hold up a master for minutes."""
    counts: list[int] = []
    real = borne._count
    monkeypatch.setattr(borne, "_count", lambda words, seq: counts.append(seq) or real(words, seq))  # type: ignore[func-returns-value]
    right = {seq: (7, seq) for seq in range(1, 201)}
    liars = {100 + k: borne.Word(200, {seq: (k, seq) for seq in right}) for k in range(40)}
    honest = {mid: borne.Word(200, right) for mid in range(1, 51)}
    found = borne.judge(honest | liars, honest.keys(), 0, lambda seq: False, ())
    assert (found.upto, found.out, counts) == (200, {}, [1])
    assert found.results == [(seq, 7, seq) for seq in right]


@pytest.mark.parametrize("apart", [False, True])
def test_what_only_a_lost_liar_says_is_committed_is_not_so_for_having_been_finished(apart: bool) -> None:
    """Another member may have another result, or only the master may commit it."""
    honest = {mid: borne.Word(0, {1: (1, 9), 2: (2, 9)}, () if apart else {2}) for mid in (1, 2)}
    liar = borne.Word(2, {1: (5, 9), 2: (2, 9)})
    found = borne.judge(honest | {3: liar}, {1, 2}, 0, {2}.__contains__ if apart else lambda seq: False, ())
    assert (found.sure, found.upto, found.results, found.out) == (0, 1, [(1, 1, 9)], {})


def test_reports_are_counted_anew_without_a_lost_liar() -> None:
    words = {1: borne.Word(1, {1: (1, 9)}), 2: borne.Word(0, {1: (1, 9)}), 3: borne.Word(0, {})}
    found = borne.judge(words | {4: borne.Word(1, {1: (5, 9)})}, {1, 2, 3}, 0, lambda seq: False, ())
    assert set(found.out) == {3}
    assert not found.tied


@pytest.mark.parametrize("case", COUNTED)
def test_reports_are_counted_where_one_says_that_an_operation_is_committed_and_another_contradicts(case: str) -> None:
    said, names, upto, unknown = COUNTED[case]
    assert outcome(closed(*said)) == (names.split(), upto, unknown)


def test_the_report_of_a_member_that_is_lost_since_counts() -> None:
    assert outcome(closed((0, A), (0, NONE), (0, A), (1, A), lost=1)) == (["m0", "m2"], 1, [])
    assert outcome(closed((0, A), (0, NONE), (1, A), lost=1)) == (["m0"], 1, [])
    assert outcome(closed((0, A), (0, NONE), lost=1)) == (["m0"], 1, [])  # nobody claims it


@pytest.mark.parametrize("commit", ["members", "master"])
def test_after_a_restart_reports_of_the_lost_whom_an_epoch_that_nobody_heard_of_left_out_do_not_count(
    commit: str,
) -> None:
    """They had been put out, and may lack what the others have committed; else it would be a tie."""
    room = reported(commit, {1: 1, 2: 1, 3: 0, 4: 0}, mids=(1, 2), lost=(3, 4))
    assert [one.mid for one in room.group.members] == [1, 2]
    assert outcome(room) == (["m1", "m2"], 1, [])


@pytest.mark.parametrize("commit", ["members", "master"])
@pytest.mark.parametrize(("claims", "upto"), [((1, 1, 0), 1), ((1, 1, 0, 0), 0), ((1, 0, 0), 0), ((1, 1, 1), 1)])
def test_after_a_restart_an_epoch_that_nobody_heard_of_bounds_what_is_committed_unless_most_say_more(
    commit: str, claims: tuple[int, ...], upto: int
) -> None:
    """It is of another history then; who says the contrary has been found wrong by most."""
    said = dict(enumerate(claims, 1))
    room = reported(commit, said, mids=tuple(said))
    names = [f"m{mid}" for mid, claim in said.items() if not upto or claim]
    assert outcome(room) == (names, upto, [])


LIE = m.UpdateOutcome(1, 9, ["m4"])
TRUTH, NEWER = (m.UpdateOutcome(1, epoch, ["m1", "m2", "m3", "m4"]) for epoch in (1, 2))


@pytest.mark.parametrize("commit", ["members", "master"])
@pytest.mark.parametrize(
    ("told", "stands", "believed"),
    [
        ({1: TRUTH}, (2, 3, 4), TRUTH),
        ({1: TRUTH, 3: TRUTH, 4: LIE}, (2,), TRUTH),
        ({4: LIE}, (2,), None),  # the others have not come to it, so it cannot have ended
        ({1: TRUTH, 2: TRUTH, 4: m.UpdateOutcome(7, 1, ["m4"])}, (3,), TRUTH),
        ({1: TRUTH, 4: NEWER}, (2, 3), None),  # a tie: it ends for them with what comes next
    ],
)
def test_how_an_update_has_ended_is_not_believed_on_one_members_word(
    commit: str, told: dict[int, m.UpdateOutcome], stands: tuple[int, ...], believed: m.UpdateOutcome | None
) -> None:
    """What all bear, and most say, those hear that stand at it. *told*: who says what; *stands*: members that wait."""
    room = Room(Limits(commit=commit))
    room.restarted(mids=(1, 2, 3, 4, 9))
    room.hello("d4")
    plan = m.Plan(4, 1024, True, {}, [], 0, "", commit=commit)
    for mid in (1, 2, 3, 4):
        said: dict[str, Any] = {"updates": [1]} if mid in stands else {}
        if mid in told:
            said |= {"committed_upto": told[mid].seq, "updated": told[mid], "done": [(1, 0, UPDATE)]}
        room.say(f"d{mid}", report_of(mid, of=(1, 2, 3, 4, 9), plan=plan, **said))
    room.sleep(room.limits.rejoin_grace + 0.1)
    heard = [one.outcome for mid in stands for one in room.take(f"d{mid}", m.Updated)]
    assert heard == ([believed] * len(stands) if believed else [])


def reported(commit: str, said: dict[int, int], mids: tuple[int, ...], lost: tuple[int, ...] = ()) -> Room:
    """A master whose journal knows a newer epoch than all who report: each has committed so much. Some are lost since.

    Member 9 never reports.
    """
    room = Room(Limits(commit=commit))
    room.restarted(epoch=2, mids=mids)
    if 4 in said:
        room.hello("d4")
    plan = m.Plan(4, 1024, True, {}, [], 0, "", commit=commit)
    for mid in sorted(said, key=lambda mid: mid not in lost):
        done = [(1, 7, 9)] if said[mid] else []
        room.say(f"d{mid}", report_of(mid, of=(*said, 9), plan=plan, committed_upto=said[mid], done=done))
        if mid in lost:
            room.drop(f"d{mid}")
    room.sleep(room.limits.rejoin_grace + 0.1)
    return room


def test_who_is_put_out_with_another_result_is_told_no_receipt_of_it() -> None:
    room = closed((0, A), (0, B), (1, A))
    fate = room.one("d1", m.Evicted)
    assert "operation 1 is committed, as most have it" in fate.reason
    assert (fate.committed_upto, fate.unknown_upto, fate.digests) == (0, 1, [(1, 7, 9)])


def test_a_tie_about_a_huge_number_is_about_no_more_than_an_honest_member_can_lack() -> None:
    room = closed((1 << 40, NONE), (0, NONE), ops_in_flight=4, covers=2)
    assert outcome(room) == (["m0", "m1"], 0, [1, 2, 3, 4, 5, 6])


def test_where_as_many_say_the_one_as_the_other_joiners_wait_and_nobody_ends_the_update() -> None:
    room = voters(2)
    at_an_update(room)
    frozen(room, "m0", upto=1, updated=1)
    frozen(room, "m1", upto=0)
    assert outcome(room) == (["m0", "m1"], 0, [1])
