"""The master's rules where a table of cases or a loop says it better than a script (see test_scripts.py)."""

from __future__ import annotations

import pytest

from tests.master.transcript import GROUP, Room
from wancoll.commit.tally import UPDATE
from wancoll.limits import PROTOCOL_VERSION, Limits
from wancoll.wire import messages as m
from wancoll.wire.epochs import applied
from wancoll_master.core.ready import Announce, Ready, Received, frames, tellings


@pytest.fixture
def room() -> Room:
    return Room()


def test_a_group_whose_members_would_not_fit_into_one_message_is_full():
    room = Room(Limits(voters=0, message_bytes=8192))
    room.hello("d0", addresses=("a" * 300 + ":1",) * 3)
    room.join("m0", daemon="d0", start=3)
    room.join("m1", daemon="d0", start=3)
    assert "not fit into one message" in room.one("d0", m.Refused).reason


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


def test_a_link_that_breaks_all_the_time_does_not_spin_the_master(room):
    room.form(3)
    started, began = room.now, room.epoch
    for _ in range(200):
        room.link_down("m0", "m1")
        room.sleep(0.01)
    assert room.epoch - began <= (room.now - started) / room.limits.link_settle


@pytest.mark.parametrize(
    ("message", "says"),
    [
        (m.Hello(PROTOCOL_VERSION, "d1", 1, ["a:1"], 1, "", "v"), "introduces itself twice"),
        (m.Vote(GROUP, 1, 1, 1, 0, 0), "not its own"),
        (m.Vote("h", 2, 1, 1, 0, 0), "not its own"),
        (m.Vote(GROUP, 2, 9, 1, 0, 0), "has not begun"),
        (m.Vote(GROUP, 2, 1, 1 << 40, 0, 0), "impossible operation"),
        (m.Vote(GROUP, 2, 1, 1 << 40, *UPDATE), "impossible operation"),
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
        m.Vote(GROUP, 99, 1, 1, 0, 0),
        m.Vote(GROUP, 4, 1, 1, 0, 0),  # a joiner's
        m.Vote(GROUP, 2, 0, 1, 0, 0),
        m.Vote(GROUP, 2, 1, 0, 0, 0),
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


def test_the_deadline_moves_with_the_state(room):
    assert room.state.deadline == float("inf")
    room.step(Received(50, m.Hello(PROTOCOL_VERSION, "d0", 1, ["a:1"], 1, "", "v")))
    assert room.state.deadline == room.now + room.limits.heartbeat_timeout


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
        room.hello(f"d{number}", addresses=(address,), cores=2)
        room.say(f"d{number}", m.Join(GROUP, f"m{number}", 2, 1))
    epochs = [message for conn in room.conns.values() for message in room.inbox[conn] if isinstance(message, m.Epoch)]
    assert [epoch.plan.stripe for epoch in epochs] == [expected, expected]
    assert [epoch.plan.turns for epoch in epochs] == [expected == 256 << 10] * 2


def test_a_program_whose_calls_never_match_ends_with_a_named_reason_and_few_bytes() -> None:
    room = Room(Limits(voters=0, voids=100))
    room.form(4)
    calls = ["all_reduce(16777216 x float32, op=avg)", "all_reduce(1048576 x float32, op=avg)"]
    largest = nbytes = 0
    for seq in range(1, room.limits.voids + 2):
        room.clear()
        for name in ("m0", "m1", "m2", "m3"):
            room.mismatch(name, seq, calls[name == "m2"])
        for message in room.ready.messages:
            sizes = [len(frame) for _, frame in frames(message)]
            largest, nbytes = max(largest, *sizes), nbytes + sum(sizes)
    out = room.one("d0", m.Evicted)
    assert out.committed_upto == 0
    assert "101 operations from 1 to 101 were given up and none of them was committed" in out.reason
    assert room.state.groups == {}
    assert largest < 1024, "a text is said once"
    assert nbytes < 4 * (room.limits.voids + 1) * 512


def test_of_a_mismatch_among_many_members_a_few_of_each_call_are_named() -> None:
    room = Room()
    room.form(60)
    for name in list(room.names):
        room.mismatch(name, 1, {"m7": "broadcast", "m30": "barrier"}.get(name, "all_reduce"))
    (void,) = room.new_epoch().voids
    assert len(void.calls) == 32
    assert [who for who, call in void.calls.items() if call != "all_reduce"] == ["m7", "m30"]
    assert void.text.endswith("; of 60 members 32 are named")


def test_members_that_know_an_epoch_are_told_what_changed_and_joiners_the_whole() -> None:
    room = Room()
    room.form(3)
    room.join("m3", start=3)
    room.admit("m3")
    base = room.group.told
    room.all_update(1)
    (announce,) = [message for message in room.ready.messages if isinstance(message, Announce)]
    whole, changed = tellings(announce)
    assert whole == (announce.epoch, [announce.to[3]])
    assert isinstance(changed[0], m.EpochChange)
    assert changed[1] == list(announce.to[:3])
    assert applied(base, changed[0]) == announce.epoch


# ---- what a joiner waits for, and when a group starts ----------------------------------------------------


def waits(room: Room, daemon: str, mid: int) -> list[str]:
    room.clear()
    room.say(daemon, m.AskPlace(GROUP, mid))
    return [said.reason for said in room.take(daemon, m.Joined)]


def test_who_waits_for_a_place_may_ask_who_is_there():
    room = Room()
    room.join("m0", start=12)
    assert waits(room, "d0", 1) == ["1 of 12 members are here to start the group (here: m0)"]
    for i in range(1, 11):
        room.join(f"m{i}", start=12)
    names = ", ".join(f"m{i}" for i in range(8))
    assert waits(room, "d0", 1) == [f"11 of 12 members are here to start the group (here: {names} and 3 more)"]
    assert waits(room, "d1", 1) == []  # another daemon's
    assert waits(room, "d1", 99) == []
    room.join("m11", start=12)
    assert waits(room, "d0", 1) == []  # it has a place
    room.join("m12", start=12)
    assert waits(room, "d12", 13)[0].startswith("the group runs with 12 members in epoch 1; joiners are admitted where")


@pytest.mark.parametrize("restarted", [False, True])
def test_a_group_that_ran_may_start_anew_with_fewer(restarted):
    """By an option: of machines that all went down not all may come back."""
    for anew, epochs in ((False, 0), (True, 2)):
        room = Room(Limits(voters=0, restart_with_min_world=anew))
        for i in range(3):
            room.join(f"m{i}", start=3, least=2)
        assert room.epoch == 1
        if restarted:
            room.restart()
            room.sleep(room.limits.rejoin_grace + 1)  # nobody reports
        else:
            for i in range(3):
                room.drop(f"d{i}")
        room.join("m0", start=3, least=2)
        assert GROUP not in room.state.groups or not room.state.groups[GROUP].members
        room.join("m1", start=3, least=2)
        assert len(room.state.groups[GROUP].members) == (2 if anew else 0)
        assert room.epoch >= epochs
    new = Room(Limits(voters=0, restart_with_min_world=True))
    new.join("m0", start=3, least=2)
    new.join("m1", start=3, least=2)
    assert not new.state.groups[GROUP].members  # it has not run yet


@pytest.mark.parametrize("killed_first", [True, False])
def test_a_newcomer_is_not_refused_for_a_member_that_is_away(killed_first: bool) -> None:
    """Nobody answers where a daemon was just killed: that is no fault of the newcomer's."""
    room = Room()
    room.form(3)
    room.hello("d9")
    if killed_first:
        room.breaks("d1")
    room.join("m9", start=3)
    if not killed_first:
        room.breaks("d1")
    [to_dead] = [probe for probe in room.take("d9", m.Probe) if probe.daemon == "d1"]
    room.answer_probe("d9", to_dead, False, "d1:7000: Connection refused")
    assert room.take("d9", m.Refused) == []
