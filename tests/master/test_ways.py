"""The way that the master chooses for each pair, and what it tells of relays and of local addresses."""

from __future__ import annotations

import pytest

from tests.master.transcript import GROUP, Room
from wancoll.limits import PROTOCOL_VERSION
from wancoll.trust.identity import Identity
from wancoll.wire import messages as m
from wancoll.wire.messages import Way
from wancoll_master.core.paths import announced, ways
from wancoll_master.core.ready import Received
from wancoll_master.core.state import Step
from wancoll_master.core.views import report
from wancoll_master.plan.planning import near, propose


def answer(room: Room, reached: set[tuple[str, str]], *, punches: bool = False, by_relay: bool = True) -> list[m.Probe]:
    """All daemons answer their probes, the youngest first: who dials whom is in *reached*. Returns the probes."""
    asked = [(daemon, probe) for daemon in reversed(room.conns) for probe in room.take(daemon, m.Probe)]
    for daemon, probe in asked:
        ok = [(daemon, probe.daemon) in reached, punches, by_relay][probe.way]
        ends = probe.group, probe.joiner, probe.prober, probe.target
        room.say(daemon, m.ProbeResult(*ends, ok, "" if ok else "no answer", way=probe.way))
    return [probe for _, probe in asked]


def formed(reached: set[tuple[str, str]], count: int = 2, *, punches: bool = False, **state: object) -> Room:
    """A group of m0, m1, ... that forms with a relay in the master, once all probes are answered."""
    room = Room(own_relay=True, **state)
    for i in range(count):
        room.join(f"m{i}", start=count)
    while answer(room, reached, punches=punches):
        pass
    room.sleep(1.1)  # for round trips that nobody measures here
    assert room.epoch == 1
    return room


ALL = {("d0", "d1"), ("d1", "d0")}


@pytest.mark.parametrize(
    ("reached", "punches", "expected"),
    [
        (ALL, True, []),
        ({("d1", "d0")}, True, []),  # the younger dials anyway
        ({("d0", "d1")}, True, [(1, 2, Way.direct)]),
        (set(), True, [(1, 2, Way.punched)]),
        (set(), False, [(1, 2, Way.relayed)]),
    ],
)
def test_the_plan_names_pairs_of_which_the_elder_dials_or_that_punch_or_need_a_relay(
    reached: set[tuple[str, str]], punches: bool, expected: list[tuple[int, int, Way]]
) -> None:
    room = formed(reached, punches=punches)
    assert room.group.planned.plan.ways == expected
    [told] = room.take("d1", m.Epoch)
    assert told.plan.ways == expected


@pytest.mark.parametrize("punches", [True, False])
def test_who_asks_hears_why_a_pair_is_not_direct(punches: bool) -> None:
    tried = ("dialled",) if punches else ("dialled", "punched")
    why = "; ".join(f"{a} has {how} {b}: no answer" for how in tried for a, b in (("m0", "m1"), ("m1", "m0")))
    room = formed(set(), punches=punches)
    [group] = report.groups(room.state, room.now)
    assert [group.punched, group.relayed] == (
        [[("m0", "m1", 0.0, why)], []] if punches else [[], [("m0", "m1", 0.0, why)]]
    )
    [direct] = report.groups((room := formed(ALL)).state, room.now)
    assert direct.punched == direct.relayed == []


def test_neither_is_asked_for_a_way_before_both_have_failed_by_the_one_before() -> None:
    room = Room(own_relay=True)
    room.join("m0", start=2)
    room.join("m1", start=2)
    for way in Way:
        assert [probe.way for probe in answer(room, set())] == [way, way]
    assert not answer(room, set())


@pytest.mark.parametrize("punches", [True, False])
def test_where_no_relay_is_a_pair_punches_or_the_later_one_is_refused(punches: bool) -> None:
    room = Room()
    for i in range(2):
        hello = m.Hello(PROTOCOL_VERSION, f"d{i}", 1, [f"h{i}:1"], 4, "", "0.1.0", hints=[f"10.0.0.{i}:1"])
        room.conns[f"d{i}"] = room.stranger(hello)
        room.join(f"m{i}", start=2)
    while answer(room, set(), punches=punches):
        pass
    assert bool(room.take("d1", m.Refused)) is not punches


def test_daemons_behind_one_nat_are_not_asked_to_punch_it() -> None:
    room = Room(own_relay=True)
    for i in range(2):
        hello = m.Hello(PROTOCOL_VERSION, f"d{i}", 1, [f"9.9.9.9:{i + 1}"], 4, "", "0.1.0", hints=[f"10.0.0.{i}:1"])
        room.conns[f"d{i}"] = room.stranger(hello, "9.9.9.9")
        room.join(f"m{i}", start=2)
    asked = [answer(room, set()) for _ in range(3)]
    assert [[probe.way for probe in each] for each in asked] == [[Way.direct] * 2, [Way.relayed] * 2, []]


def test_a_dial_that_fails_later_takes_no_punched_way_and_a_failed_punch_does() -> None:
    room = formed(set(), punches=True)
    one, other = (room.state.daemons[name] for name in ("d0", "d1"))
    step = Step(room.state, room.now, propose)
    for ends in ((one, other), (other, one)):
        ways.found(step, *ends, Way.direct, ok=False)
    assert ways.way(step, one, other) is Way.punched
    for ends in ((one, other), (other, one)):
        ways.found(step, *ends, Way.punched, ok=False)
    assert ways.way(step, one, other) is Way.relayed
    ways.found(step, one, other, Way.direct, ok=True)
    assert ways.way(step, one, other) is Way.direct
    assert ways.way(step, other, one) is None


def test_where_no_relay_comes_through_either_the_later_one_is_refused_and_told_both() -> None:
    room = Room(own_relay=True)
    room.join("m0", start=2)
    room.join("m1", start=2)
    for _ in Way:
        answer(room, set(), by_relay=False)
    [refused] = room.take("d1", m.Refused)
    assert "m1 (daemon d1) cannot reach m0" in refused.reason
    assert "; nor both at once: m" in refused.reason
    assert "; nor by a relay: m" in refused.reason
    assert "--relay RATE" in refused.reason
    assert [joiner.name for joiner in room.group.joining] == ["m0"]


def test_nobody_is_asked_while_a_group_forms_where_neither_a_relay_nor_a_nat_is() -> None:
    room = Room()
    room.form(2)
    assert not answer(room, set())
    assert room.group.planned.plan.ways == []


def test_a_pair_that_is_not_answered_in_time_holds_the_group_up_no_longer() -> None:
    room = Room(own_relay=True)
    room.join("m0", start=2)
    room.join("m1", start=2)
    limits = room.limits
    room.sleep(2 * limits.probe_timeout + limits.punch_timeout + 3 * limits.heartbeat_interval + 0.1)
    assert room.take("d1", m.Refused)


def test_the_next_epochs_have_the_same_ways_and_those_of_a_master_before() -> None:
    room = formed({("d1", "d0"), ("d2", "d0"), ("d1", "d2")}, 3)
    assert room.group.planned.plan.ways == [(2, 3, Way.direct)]
    room.drop("d0")
    assert room.epoch == 2
    assert room.group.planned.plan.ways == [(2, 3, Way.direct)]
    before = m.Plan(4, 1024, True, {}, [], 0, "", ways=[(2, 3, Way.relayed), (3, 9, Way.relayed)])
    room.state.reached.forget(["d1", "d2"])
    assert ways.of(Step(room.state, room.now, propose), room.group.members, before) == [(2, 3, Way.relayed)]


def test_round_trips_are_measured_the_way_that_there_is() -> None:
    room = Room(own_relay=True)
    for i in range(2):
        hello = m.Hello(PROTOCOL_VERSION, f"d{i}", 1, [f"h{i}:1"], 4, "", "0.1.0", measures=True)
        room.conns[f"d{i}"] = room.stranger(hello)
        room.join(f"m{i}", start=2)
    assert [ask.way for ask in room.take("d1", m.MeasureLink)] == [Way.direct]
    room.sleep(2.0)  # neither has come through
    for _ in Way:
        answer(room, set())
    assert [ask.way for ask in room.take("d1", m.MeasureLink)] == [Way.relayed]


# ---- relays -------------------------------------------------------------------------------------------


def relay(room: Room, name: str, role: str = "admin", *, relays: bool = True) -> int:
    """A relay, or a daemon, that says so with a token for this role."""
    conn, room._next_conn = room._next_conn, room._next_conn + 1
    hello = m.Hello(PROTOCOL_VERSION, name, 1, [f"{name}:7401"], 4, "", "0.1.0", relays=relays)
    room.step(Received(conn, hello, Identity(name, role, key=b"k" * 32)))  # type: ignore[arg-type]
    room.conns[name] = conn
    return conn


def test_daemons_are_told_of_relays_that_come_and_go_the_masters_own_last() -> None:
    room = Room(own_relay=True)
    room.hello("d0")
    assert [told.relays for told in room.take("d0", m.Relays)] == [[m.RelayInfo("the master")]]
    relay(room, "r", "relay")
    here = m.RelayInfo("r", ("r:7401",), b"k" * 32)
    assert [told.relays for told in room.take("d0", m.Relays)] == [[here, m.RelayInfo("the master")]]
    assert [told.relays for told in room.take("r", m.Relays)] == [[m.RelayInfo("the master")]]  # not of itself
    room.drop("r")
    assert [told.relays for told in room.take("d0", m.Relays)] == [[m.RelayInfo("the master")]]


def test_who_has_a_relays_token_is_one_and_a_member_of_nothing() -> None:
    room = Room()
    assert "wants to be a daemon" in room.closed[relay(room, "r", "relay", relays=False)]
    relay(room, "r", "relay")
    room.step(Received(room.conns["r"], m.Join(GROUP, "m", 1, 1), Identity("r", "relay", key=b"k" * 32)))
    [refused] = room.take("r", m.Refused)
    assert "may not say Join" in refused.reason


def test_there_are_so_many_relays_at_most() -> None:
    room = Room()
    for i in range(m.MOST_RELAYS):
        relay(room, f"r{i}")
    assert "one relay too many" in room.closed[relay(room, "more")]


# ---- behind NAT ---------------------------------------------------------------------------------------


def hello_from(source: str, addresses: list[str], hints: list[str], allowed: tuple[str, ...] = ()) -> m.Hello:
    hello = m.Hello(PROTOCOL_VERSION, "d", 1, addresses, 4, "", "0.1.0", hints=hints)
    return announced.settled(hello, source, allowed)


@pytest.mark.parametrize(
    ("source", "said", "hints", "allowed", "expected", "kept"),
    [
        ("203.0.113.7", ["10.0.0.2:7600"], ["10.0.0.2:7600"], (), ["203.0.113.7:7600"], ["10.0.0.2:7600"]),
        ("203.0.113.7", ["203.0.113.7:1"], ["10.0.0.2:7600"], (), ["203.0.113.7:1"], ["10.0.0.2:7600"]),  # --advertise
        ("10.0.0.2", ["10.0.0.2:7600"], ["10.0.0.2:7600"], (), ["10.0.0.2:7600"], []),  # no NAT
        ("203.0.113.7", ["10.0.0.2:1"], ["10.0.0.2:1"], ("10.0.0.0/8",), ["10.0.0.2:1"], ["10.0.0.2:1"]),
        ("", ["10.0.0.2:7600"], ["10.0.0.2:7600"], (), ["10.0.0.2:7600"], []),  # in clear nobody looks
    ],
)
def test_where_a_daemon_behind_a_nat_is_to_others(
    source: str, said: list[str], hints: list[str], allowed: tuple[str, ...], expected: list[str], kept: list[str]
) -> None:
    hello = hello_from(source, said, hints, allowed)
    assert (hello.addresses, hello.hints) == (expected, kept)
    announced.check(hello.addresses, source, allowed)


def test_local_addresses_are_told_to_daemons_behind_the_same_nat_alone() -> None:
    room = Room()
    for i, (source, local) in enumerate((("9.9.9.9", "10.0.0.2"), ("9.9.9.9", "10.0.0.3"), ("8.8.8.8", "10.0.0.2"))):
        hello = m.Hello(PROTOCOL_VERSION, f"d{i}", 1, [f"{local}:1"], 4, "", "0.1.0", hints=[f"{local}:1"])
        conn, room._next_conn = room._next_conn, room._next_conn + 1
        room.step(Received(conn, announced.settled(hello, source), source=source))
        room.conns[f"d{i}"] = conn
        room.join(f"m{i}", start=3)
    assert room.take("d0", m.Nearby) == [m.Nearby("d1", ["10.0.0.3:1"])]
    assert room.take("d1", m.Nearby) == [m.Nearby("d0", ["10.0.0.2:1"])]
    assert room.take("d2", m.Nearby) == []
    daemons = [room.state.daemons[f"d{i}"] for i in range(3)]
    assert not any(near(one, other) for one in daemons for other in daemons if one is not other)
    assert {probe.target for probe in room.take("d2", m.Probe)} == {1, 2}  # who is behind a NAT is probed


def test_two_joiners_of_a_running_group_are_probed_for_each_other_and_one_that_leaves_holds_up_nobody() -> None:
    room = Room(own_relay=True)
    room.form(1)
    room.join("m1")
    room.join("m2")
    asked = {(probe.prober, probe.target) for daemon in ("d1", "d2") for probe in room.take(daemon, m.Probe)}
    assert {(2, 3), (3, 2)} <= asked
    for prober, target in ((1, 2), (2, 1), (1, 3), (3, 1)):
        joiner = max(prober, target)
        room.say(f"d{prober - 1}", m.ProbeResult(GROUP, joiner, prober, target, True, ""))
    room.say("d1", m.Leave(GROUP, "m1", ""))
    room.all_update(1)
    room.sleep(room.limits.probe_timeout + 2 * room.limits.heartbeat_interval)
    assert room.names == ["m0", "m2"]
    assert not room.take("d2", m.Refused)


def test_what_a_nat_refuses_does_not_end_the_daemon_behind_it() -> None:
    def killed(**state: object) -> Room:
        room = formed(ALL if state.pop("dialled") else {("d1", "d0")}, **state)
        room.breaks("d1")
        room.link_down("m0", "m1")
        for probe in room.take("d0", m.Probe):
            room.say("d0", m.ProbeResult(GROUP, 0, probe.prober, probe.target, False, "refused", refused=True))
        room.sleep(room.limits.doubt_grace + 0.05)
        return room

    assert killed(dialled=True).names == ["m0"]
    assert killed(dialled=False).names == ["m0", "m1"]  # d0 never could dial it
