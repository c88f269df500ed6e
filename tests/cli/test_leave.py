"""Who `wancoll leave` asks, and when it takes that one for gone."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from cyclopts import CycloptsError

from wancoll.cli.asking import Asking
from wancoll.cli.changing import leave
from wancoll.cli.main import app
from wancoll.errors import ConfigError, Evicted, MasterUnreachable, PeerDaemonLost
from wancoll.net import ask as net_ask
from wancoll.wire import messages as m


def call(*options: str) -> Any:
    return app(["leave", *options], result_action="return_value", exit_on_error=False)


def test_no_variable_says_who_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell has them set for other commands."""
    asked: list[m.AskToLeave] = []

    def take(question: m.AskToLeave, *_: object) -> m.EvictAnswer:
        asked.append(question)
        return m.EvictAnswer(False, "was asked")

    def here(path: str, question: m.AskToLeave, patience: float) -> None:
        asked.append(question)

    monkeypatch.setattr(leave, "ask_leader", take)
    monkeypatch.setattr(leave, "_here", here)
    for name, value in {
        "SOCKET": "/run/other.sock",
        "GROUP": "g",
        "NAME": "m7",
        "WITHIN": "7",
        "MASTER": "h:1",
    }.items():
        monkeypatch.setenv(f"WANCOLL_{name}", value)
    with pytest.raises(ConfigError, match=r"does not know who shall leave; .*; got neither; .*WANCOLL_SOCKET"):
        call()
    assert asked == []
    with pytest.raises(ConfigError, match="was asked"):
        call("peer-1")
    assert call("--socket", "/run/own.sock") == 0
    assert [(one.group, one.name, one.within) for one in asked] == [("", "peer-1", 7.0), ("", "", 7.0)]
    with pytest.raises(ConfigError, match=r"got peer-1 and --socket /run/own\.sock"):
        call("peer-1", "--socket", "/run/own.sock")
    with pytest.raises(ConfigError, match="got --group g"):
        call("--group", "g")
    with pytest.raises(ConfigError, match="a daemon's name, or --socket; got --group g and --socket"):
        call("--group", "g", "--socket", "/run/own.sock")


def test_what_it_advises_after_a_wait_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[m.AskToLeave] = []
    monkeypatch.setattr(leave, "_here", lambda path, question, patience: asked.append(question))
    assert call("--socket", "/run/own.sock", "--within", "0") == 0
    assert [one.within for one in asked] == [0.0]
    with pytest.raises(CycloptsError, match="0 or above"):
        call("--socket", "/run/own.sock", "--within", "-1")


@pytest.mark.parametrize("command", ["leave", "trace"])
def test_of_another_users_daemon_it_is_said_that_it_is_one(monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    """As the kernel says it: these tests may be root's, who may ask all."""

    def refuse(path: str, timeout: float) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(net_ask, "connect_local", refuse)
    with pytest.raises(PeerDaemonLost, match=r"/s: cannot be .*denied; it is another user's: run this as the daemon's"):
        app([command, "--socket", "/s"], result_action="return_value", exit_on_error=False)


@pytest.mark.parametrize("heard", [True, False])
def test_only_a_master_that_knew_it_can_say_that_it_is_gone(monkeypatch: pytest.MonkeyPatch, *, heard: bool) -> None:
    question = m.AskToLeave(1, "", "d", 30.0, "")
    told: list[float] = []
    looks = iter([(1, True), None, (2, False), (2, False), (2, True), (2, True), (2, False)])
    clock = iter(range(100))

    def newest(*_: object) -> m.Status | None:
        look = next(looks, (2, False))
        if look is None:
            return None
        here, left = (["d"], []) if look[1] else ([], [("", "d")] if told[-1:] == [28.0] else [])
        return m.Status(1, 0.0, "", here, [], [], master=look[0], left=left)

    def take(question: m.AskToLeave, *_: object) -> m.EvictAnswer:
        told.append(question.within)
        knows = heard and len(told) == 3  # it takes a while until the daemon has said that it is there
        return m.EvictAnswer(True, "", master=2) if knows else m.EvictAnswer(False, "has no such daemon")

    monkeypatch.setattr(leave, "_newest", newest)
    monkeypatch.setattr(leave, "ask_leader", take)
    monkeypatch.setattr(leave.time, "monotonic", lambda: float(next(clock)))
    monkeypatch.setattr(leave.time, "sleep", lambda seconds: None)
    options = ["h:1"], question, 1, 33.0, Asking(timeout=1.0), "daemon d"
    if heard:
        leave._await_gone(*options)
        assert next(looks, None) is None
        assert told == [30.0, 29.0, 28.0]
    else:
        with pytest.raises(MasterUnreachable, match=r"has not left yet.*another master leads since"):
            leave._await_gone(*options)
        assert len(told) > 20


@pytest.mark.parametrize(("group", "error"), [("", PeerDaemonLost), ("g", Evicted)])
def test_who_is_lost_has_not_left(monkeypatch: pytest.MonkeyPatch, group: str, error: type[Exception]) -> None:
    """Neither by its absence, nor by the leave of another one."""
    gone = m.Status(1, 0.0, "", [], [], [], master=1, left=[("other", "d"), (group, "e")])
    left = msgspec.structs.replace(gone, left=[*gone.left, (group, "d")])
    monkeypatch.setattr(leave, "_newest", lambda *_: found)
    options = ["h:1"], m.AskToLeave(1, group, "d", 30.0, ""), 1, 33.0, Asking(timeout=1.0), "d"
    found = gone
    with pytest.raises(error, match=r"^d: was lost before it left; it may come back; .*wancoll status"):
        leave._await_gone(*options)
    found = left
    leave._await_gone(*options)
