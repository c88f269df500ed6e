"""What members report to a master that was started again (R7): whose words count; scripts/rebuilding.txt has more."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tests.master.transcript import Room, report_of
from wancoll.limits import PROTOCOL_VERSION, Limits
from wancoll.trust.identity import Identity
from wancoll.wire import messages as m
from wancoll_master.core import membership
from wancoll_master.core.ready import Ready, Received, Send, Used
from wancoll_master.plan.planning import propose

NOTHING = m.EpochReport(0, [], [], [])


def test_a_member_is_of_one_group() -> None:
    """One mid in the reports for two groups would be one member that two groups hold, and end with one of them."""
    state = membership.new_state(Limits(voters=0), b"s" * 32, term=2, floor=3, next_mid=1025, now=100.0)

    def say(message: m.FromPeer) -> Ready:
        return membership.step(state, 100.0, Received(1, message), propose)

    plan = m.Plan(1, 1 << 18, True, {}, [], 0, "")
    members = [(7, "h", "H"), (9, "y", "Y")]
    say(m.Hello(PROTOCOL_VERSION, "H", 1, ["10.0.0.1:5"], 1, "", "0", 0, [], False, 1, 9))
    for group in ("z", "g"):
        ready = say(m.Report(group, 7, 3, members, plan, b"k" * 16, 2, 1, "r", 0, [], False, NOTHING, [], 0, [], []))
        if group == "z":
            assert not ready.closes
            assert not ready.messages
    assert not ready.closes, "it may have members that are its own"
    assert isinstance(ready.messages[0], Send)
    assert isinstance(fate := ready.messages[0].message, m.Evicted)
    assert (fate.group, fate.reason) == ("g", "member 7 is one of group z")
    assert state.members == {}


def test_members_of_another_group_are_not_reported_by_the_first_who_comes() -> None:
    """Ids are small numbers, so that a daemon of group "a" can guess those of "b": the journal knows whose they are."""
    used = {"b": Used(3, frozenset({1, 2}), 0)}
    state = membership.new_state(Limits(voters=0), b"s" * 32, term=2, floor=5, next_mid=1025, used=used)
    who = {name: Identity(name, "peer", (name[0],)) for name in ("a1", "b1", "b2")}
    conns = {name: conn for conn, name in enumerate(who)}
    plan = m.Plan(1, 1 << 18, True, {}, [], 0, "")

    def say(name: str, message: m.FromPeer) -> dict[str, m.FromMaster]:
        ready = membership.step(state, 1.0, Received(conns[name], message, who[name]), propose)
        assert not ready.closes
        names = {conn: one for one, conn in conns.items()}
        return {names[one.conn]: one.message for one in ready.messages if isinstance(one, Send)}

    def report(name: str, mid: int, members: list[tuple[int, str, str]]) -> dict[str, m.FromMaster]:
        numbers = (plan, b"k" * 16, 2, 2, "r", 0, [], False, NOTHING, [], 0, [], [])
        return say(name, m.Report(name[0], mid, 3, members, *numbers))

    for name in who:
        say(name, m.Hello(PROTOCOL_VERSION, name, conns[name] + 1, ["10.0.0.1:5"], 1, "", "0"))
    for mid in (1, 2, 7):
        fate = report("a1", mid, [(1, "m1", "a1"), (2, "m2", "a1"), (7, "m7", "a1")]).get("a1")
        assert isinstance(fate, m.Evicted) == (mid < 7)
    members = [(1, "x", "b1"), (2, "y", "b2")]
    assert report("b1", 1, members) == {}
    told = report("b2", 2, members)
    assert {name: type(message) for name, message in told.items()} == {"b1": m.Resumed, "b2": m.Resumed}


A, B = (1, 7, 9), (1, 8, 9)
LIES = {
    # what each says is committed, and is done with; who is evicted, what is committed, and of what nobody knows it
    "nobody lies": ([(1, [A]), (0, [A]), (0, [A])], [], 1, []),
    "a claim without a result, where two have come apart": ([(0, [A]), (0, [B]), (1, [])], [3], 0, []),
    "a claim of one of the two results": ([(0, [A]), (0, [B]), (1, [A])], [2], 1, []),
    "a claim of another result": ([(0, [A]), (0, [A]), (1, [B])], [3], 1, []),
    "a claim of what nobody has": ([(0, []), (0, []), (9, [])], [3], 0, []),
    "what was committed is denied": ([(1, [A]), (0, [A]), (0, [])], [3], 1, []),
    "it is denied by one of two": ([(1, [A]), (0, [])], [], 0, [1]),
}


@pytest.mark.parametrize("case", LIES)
def test_no_report_decides_alone_where_the_master_commits(case: str) -> None:
    said, out, upto, unknown = LIES[case]
    room, mids = Room(), tuple(range(1, len(said) + 1))
    room.restarted(mids=mids)
    for mid, (committed, done) in zip(mids, said, strict=True):
        room.say(f"d{mid}", report_of(mid, of=mids, committed_upto=committed, done=done))
    assert [mid for mid in mids if room.take(f"d{mid}", m.Evicted)] == out
    assert room.group.committed == upto
    assert [void.seq for void in room.group.voids.values() if void.error == "OutcomeUnknown"] == unknown
    assert room.epoch == (2 if out or unknown else 1)
    assert room.state.members.keys() == set(mids) - set(out)


@pytest.mark.parametrize(
    "lie",
    [
        {"start_world": 1},
        {"min_world": 2},
        {"call_timeout": 9.0},
        {"key": b"x" * 16},
        {"members": [(3, "m2", "d2"), (1, "m0", "d1"), (2, "m1", "d0")]},
        {"plan": "other"},
    ],
    ids=lambda lie: next(iter(lie)),
)
def test_the_journal_says_what_an_epoch_was_also_to_a_liar_that_reports_first(lie: dict[str, Any]) -> None:
    """Else what the first one says would have the honest ones, who say otherwise, cut off."""
    room = Room(Limits(voters=32))
    for i in range(3):
        room.join(f"m{i}", start=3)
    told = room.one("d0", m.Epoch)
    used = room.state.used
    room.restart()
    room.state.used.update(used)
    members = [(one.mid, one.name, one.daemon) for one in told.members]
    honest = {"members": members, "plan": told.plan, "key": told.key, "start_world": 3, "min_world": 1}
    if "plan" in lie:
        lie = {"plan": msgspec.structs.replace(told.plan, lanes=told.plan.lanes + 1)}
    for daemon in ("d0", "d1", "d2"):
        room.hello(daemon)
    liar = room.conns["d2"]
    room.say("d2", report_of(3, **(honest | lie)))
    assert "reports another epoch than the journal's" in room.closed[liar]
    for mid, daemon in ((1, "d0"), (2, "d1")):
        room.say(daemon, report_of(mid, **honest))
        assert room.conns[daemon] not in room.closed
    assert set(room.group.rebuild.reports) == {1, 2}
