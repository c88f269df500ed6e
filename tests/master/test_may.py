"""Who may say what to a master: the whole table by value, and that nothing of another group is changed or shown."""

from __future__ import annotations

import typing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.fuzz.absurd import Absurd, Drawn
from tests.master.transcript import report_of
from wancoll.errors import ConfigError, ProtocolError
from wancoll.limits import PROTOCOL_VERSION, Limits
from wancoll.trust.identity import Identity
from wancoll.wire import messages as m
from wancoll_master.core import membership
from wancoll_master.core.leadership import StandbyResponder
from wancoll_master.core.liveness import presence
from wancoll_master.core.may import EVERYTHING, TABLE, may
from wancoll_master.core.paths import announced
from wancoll_master.core.ready import Announce, Ready, Received, Send, SendStatus
from wancoll_master.core.views import report
from wancoll_master.plan.planning import propose

PAGE = Path(__file__).parents[2] / "docs" / "security.md"
MESSAGES = list(typing.get_args(m.FromPeer))
ABOUT_ONE_GROUP = [kind for kind in MESSAGES if "group" in kind.__struct_fields__]
COMMANDS = {
    m.StatusRequest,
    m.Arm,
    m.Evict,
    m.AskToLeave,
    m.MakeToken,
    m.RevokeToken,
    m.ListTokens,
    m.AskKeys,
    m.RotateKey,
    m.RevokeKey,
}
PEER_ALONE = set(MESSAGES) - COMMANDS
ALLOWED = {  # all that is not here is refused
    "peer": PEER_ALONE | {m.StatusRequest},
    "relay": {m.Hello, m.Heartbeat, m.AskElection},
    "observer": {m.StatusRequest},
    "chaos": {m.StatusRequest, m.Arm},
    "admin": set(MESSAGES),
}


def some(kind: type, **fields: Any) -> Any:
    """A message of this kind with anything in it, but for *fields*."""
    return msgspec.structs.replace(Absurd().message(kind, Drawn(1)), **fields)


def test_every_message_that_a_master_takes_stands_in_the_table() -> None:
    assert set(TABLE) == set(MESSAGES)


@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)
def test_the_table_by_role(kind: type) -> None:
    message = some(kind)
    for role, allowed in ALLOWED.items():
        refusal = may(Identity("", typing.cast(Any, role)), message)
        assert (refusal is None) == (kind in allowed), role
        assert refusal is None or (kind.__name__ in refusal.what and role in refusal.expected)
    assert may(EVERYTHING, message) is None
    refusal = may(None, message)
    assert refusal is not None
    assert "--join" in str(refusal)


@pytest.mark.parametrize("kind", ABOUT_ONE_GROUP, ids=lambda kind: kind.__name__)
def test_who_is_for_one_group_says_nothing_of_another(kind: type) -> None:
    role: Any = "admin" if kind in (m.Evict, m.AskToLeave) else "peer"
    theirs, its_own = some(kind, group="b"), some(kind, group="a")
    refusal = may(Identity("d", role, ("a", "c")), theirs)
    assert refusal is not None
    assert "group b" in refusal.what
    assert refusal.expected == "one of a, c"
    assert may(Identity("d", role, ("a", "c")), its_own) is None
    assert may(Identity("d", role), theirs) is None


def test_no_message_names_a_group_elsewhere() -> None:
    """But Ended, in a list; else the rule of groups would not see it."""
    assert {kind for kind in MESSAGES if TABLE[kind].groups(some(kind, **_in(kind, "b")))} == {
        *ABOUT_ONE_GROUP,
        m.Ended,
    }
    mixed = m.Ended([("a", 1), ("b", 2)])
    refusal = may(Identity("d", "peer", ("a",)), mixed)
    assert refusal is not None
    assert "group b" in refusal.what


def _in(kind: type, group: str) -> dict[str, Any]:
    if kind is m.Ended:
        return {"members": [(group, 1)]}
    return {"group": group} if kind in ABOUT_ONE_GROUP else {}


def test_a_daemon_has_the_name_that_its_key_was_admitted_with() -> None:
    hello = some(m.Hello, daemon="d1")
    assert may(Identity("d1", "peer"), hello) is None
    refusal = may(Identity("d2", "peer"), hello)
    assert refusal is not None
    assert refusal.expected == "the name d2, that its key was admitted with"


# ---- at the head of the step -------------------------------------------------------------------------


class Master:
    """The state machine with connections of verified daemons: "d1" is for group "a", "d2" for group "b"."""

    def __init__(self) -> None:
        self.state = membership.new_state(Limits(), bytes(32), announce=["10.9.0.0/16"])
        self.who = {1: Identity("d1", "peer", ("a",)), 2: Identity("d2", "peer", ("b",))}
        for conn, identity in self.who.items():
            self.hear(conn, hello(identity.name))

    def hear(self, conn: int, message: Any, **of: Any) -> Ready:
        event = Received(conn, message, **{"identity": self.who.get(conn)} | of)
        return membership.step(self.state, 1.0, event, propose)


def hello(name: str, *addresses: str) -> m.Hello:
    return m.Hello(PROTOCOL_VERSION, name, 1, list(addresses) or ["192.0.2.1:9"], 1, "", "0")


@pytest.mark.parametrize("who", [Identity("d3", "observer"), Identity("d4", "peer")])
def test_a_hello_of_who_may_not_say_it_sends_that_daemon_away(who: Identity) -> None:
    master = Master()
    [close] = master.hear(3, hello("d3"), identity=who).closes
    assert close.final
    assert close.reason.startswith("this connection may not say Hello")
    [close] = master.hear(1, hello("d2")).closes  # one that is here is cut off, and may come back as itself
    assert not close.final
    assert "d1" not in master.state.daemons


def test_a_join_of_another_group_is_answered_and_changes_nothing() -> None:
    master = Master()
    master.hear(2, m.Join("b", "m", 1, 1))
    epoch = master.state.groups["b"].epoch
    ready = master.hear(1, m.Join("b", "m1", 1, 1))
    [answer] = ready.messages
    assert isinstance(answer, Send)
    assert isinstance(answer.message, m.Refused)
    assert (answer.conn, answer.message.group, answer.message.member) == (1, "b", "m1")
    assert "group b" in answer.message.reason
    assert "wancoll token create --group" in answer.message.reason
    assert [one.name for one in master.state.groups["b"].members] == ["m"]
    assert master.state.groups["b"].epoch == epoch
    assert master.state.refused == {"Join": 1}
    master.hear(1, m.Join("a", "m1", 1, 1))
    assert master.state.groups["a"].epoch > 0


@pytest.mark.parametrize("what", ["Report", "Leave", "Ended", "Vote", "Evict"])
def test_what_is_said_of_another_group_ends_the_connection_of_who_says_it(what: str) -> None:
    master = Master()
    master.hear(2, m.Join("b", "m", 1, 1))
    group, mid = master.state.groups["b"], master.state.groups["b"].members[0].mid
    said = {
        "Report": report_of(mid, group="b", epoch=group.epoch + 1000),
        "Leave": m.Leave("b", "m"),
        "Ended": m.Ended([("b", mid)]),
        "Vote": m.Vote("b", mid, group.epoch, 1, 7, 9),
        "Evict": m.Evict(PROTOCOL_VERSION, "b", "m", False, ""),
    }[what]
    before = group.epoch, group.committed, [one.name for one in group.members], dict(group.current.tally.open)
    ready = master.hear(1, said)
    if what == "Evict":
        [answer] = ready.messages
        assert isinstance(answer, Send)
        assert isinstance(answer.message, m.EvictAnswer)
        assert (answer.message.done, answer.message.what) == (False, "may not say Evict")
        assert answer.message.hint == "a token of that role allows it: `wancoll token create --role`"
    else:
        assert f"may not say {what} of group b" in ready.closes[0].reason
        assert "d1" not in master.state.daemons
    assert (group.epoch, group.committed, [one.name for one in group.members], dict(group.current.tally.open)) == before


def test_a_flood_of_refusals_is_counted_and_logged_now_and_then() -> None:
    master, lines = Master(), 0
    for conn in range(100, 1100):
        ready = master.hear(conn, m.StatusRequest(PROTOCOL_VERSION))
        assert "a key that this master has admitted" in ready.closes[0].reason
        assert not ready.answers
        lines += len(ready.log)
        assert not any(one.kept for one in ready.log)
    assert master.state.refused == {"StatusRequest": 1000}
    assert lines == 10


def test_status_tells_of_its_own_groups_alone() -> None:
    master = Master()
    for conn, group in ((1, "a"), (2, "b")):
        master.hear(conn, m.Join(group, "m", 1, 1))
    for source, target in (("d1", "d2"), ("d2", "d1")):
        conn = 1 if source == "d1" else 2
        master.hear(conn, m.LinkReport([m.LinkMeasure(target, 0.01, 1e6, 0, 0.0)]))
    observer = Identity("eyes", "observer", ("a",))
    [answer] = master.hear(3, m.StatusRequest(PROTOCOL_VERSION), identity=observer).answers
    assert answer == SendStatus(3, ("a",))
    state = master.state
    assert [one.name for one in report.groups(state, 1.0, ("a",))] == ["a"]
    assert report.daemons(state, ("a",)) == ["d1"]
    assert report.links(state, ("a",)) == []
    assert [one.name for one in report.groups(state, 1.0)] == ["a", "b"]
    assert report.daemons(state) == ["d1", "d2"]
    assert len(report.links(state)) == 2


def test_another_key_under_a_name_is_another_daemon_and_members_are_told_keys() -> None:
    master = Master()
    first, second = (Identity("d9", "peer", (), "", bytes([number]) * 32) for number in (1, 2))
    master.hear(9, hello("d9"), identity=first)
    master.who[9] = first
    ready = master.hear(9, m.Join("g", "m", 1, 1))
    [epoch] = [one.epoch for one in ready.messages if isinstance(one, Announce)]
    assert [member.key for member in epoch.members] == [first.key]
    back = msgspec.structs.replace(hello("d9"), master=master.state.identity, session=9, dial=1)
    assert presence.returning(master.state, back) == 9
    master.hear(10, back, identity=second)  # of the same incarnation, as it says
    assert master.state.daemons["d9"].conn == 9
    assert master.state.twins["d9"].conn == 10
    master.hear(11, back, identity=first)
    assert (master.state.daemons["d9"].conn, master.state.daemons["d9"].key) == (11, first.key)


# ---- announced addresses -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("address", "source", "allowed", "good"),
    [
        ("192.0.2.1:9", "192.0.2.1", (), True),
        ("192.0.2.1:9", "::ffff:192.0.2.1", (), True),
        ("[2001:db8::1]:9", "2001:db8::1", (), True),
        ("192.0.2.2:22", "192.0.2.1", (), False),
        ("127.0.0.1:22", "192.0.2.1", (), False),
        ("169.254.169.254:80", "192.0.2.1", (), False),
        ("[::1]:22", "2001:db8::1", (), False),
        ("inside.example:22", "192.0.2.1", (), False),
        ("inside.example:22", "192.0.2.1", ("10.0.0.0/8",), False),
        ("10.1.2.3:9", "192.0.2.1", ("10.0.0.0/8",), True),
        ("inside.example:22", "192.0.2.1", ("any",), True),
        ("127.0.0.1:9", "127.0.0.1", (), True),
        ("10.1.2.3:9", "", (), True),
        ("127.0.0.1%lo:9", "127.0.0.1", (), False),  # members would look it up
        ("[2001:db8::1%lo]:9", "2001:db8::1", (), False),
        ("[fe80::1%lo]:9", "fe80::1%lo", (), True),
        ("10.1.2.3", "", (), False),
        (":9", "", (), False),
    ],
)
def test_a_daemon_announces_its_own_address(address: str, source: str, allowed: tuple[str, ...], good: bool) -> None:
    if good:
        announced.check([address], source, allowed)
    else:
        with pytest.raises(ProtocolError):
            announced.check(["192.0.2.1:1", address] if source == "192.0.2.1" else [address], source, allowed)


def test_who_announces_what_is_not_its_own_is_nobody_to_dial() -> None:
    master = Master()
    master.who[3] = Identity("d3", "peer", ("a",))
    master.hear(1, m.Join("a", "m", 1, 1))
    ready = master.hear(3, hello("d3", "192.0.2.7:9", "192.0.2.8:22"), source="192.0.2.7")
    assert "192.0.2.8:22" in ready.closes[0].reason
    assert "--announce" in ready.closes[0].reason
    assert "--advertise 192.0.2.7:22" in ready.closes[0].reason
    [told] = ready.log
    assert (told.kind, told.kept, told.text) == ("refused", True, f"daemon d3: {ready.closes[0].reason}")
    assert "d3" not in master.state.daemons
    master.hear(3, hello("d3", "192.0.2.7:9", "10.9.0.1:22"), source="192.0.2.7")
    assert "d3" in master.state.daemons


@pytest.mark.parametrize("bad", [{"addresses": ["192.0.2.8:22"]}, {"protocol": PROTOCOL_VERSION + 1}])
def test_what_no_wait_makes_right_ends_a_newcomer_and_no_daemon_that_was_here(bad: dict[str, Any]) -> None:
    """One that was here before may be a machine whose master is being replaced by another version."""
    for before in ({}, {"term": 1}, {"master": 7}):
        master = Master()
        master.who[3] = Identity("d3", "peer", ("a",))
        ready = master.hear(3, msgspec.structs.replace(hello("d3"), **bad, **before), source="192.0.2.9")
        assert [(close.conn, close.final) for close in ready.closes] == [(3, not before)]
        assert [(one.kind, one.kept) for one in ready.log] == [("refused", not before)]


def test_a_standby_keeps_nobody_whose_name_it_would_have_to_look_up() -> None:
    """It knows no keys, so a stranger's name server could hold up threads; who may come in comes again."""
    standby = StandbyResponder(4)
    standby.leader_is(m.StandsBy("", 0), wait=True)
    assert not standby.keeps(Received(1, hello("d1", "192.0.2.7:9", "inside.example:22"), None))
    assert standby.keeps(Received(2, hello("d2"), None))
    assert [event.conn for event in standby.empty()] == [2]


def test_networks_that_are_none_are_refused() -> None:
    with pytest.raises(ConfigError, match="--announce"):
        announced.networks(["10.0.0.0/8", "somewhere"])
    assert len(announced.networks(["10.0.0.0/8", "any"])) == 1


def test_the_page_shows_the_same_table() -> None:
    rows = [line.split("|")[1:-1] for line in PAGE.read_text().split("<!-- the table of may.py -->")[1].splitlines()]
    shown = {row[0].strip(" `"): [cell.strip() for cell in row[2:]] for row in rows if len(row) == 5}
    for kind in MESSAGES:
        rule = TABLE[kind]
        named = bool(rule.name(some(kind, **({"daemon": "d"} if kind is m.Hello else {}))))
        groups = bool(list(rule.groups(some(kind, **_in(kind, "b")))))
        expected = [
            ", ".join(rule.roles),
            "yes" if groups else "",
            "yes" if named else "",
        ]
        assert shown.pop(kind.__name__) == expected, kind.__name__
    assert set(shown) == {"message", "---"}
