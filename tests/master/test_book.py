"""What a gate has written of tokens, names and keys, where there is no room to write."""

from __future__ import annotations

import sqlite3
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

from wancoll.errors import ConfigError
from wancoll.limits import PROTOCOL_VERSION
from wancoll.net.proof import Proof
from wancoll.trust.identity import Identity
from wancoll.trust.keys import Key
from wancoll.trust.registry import NotNow
from wancoll.trust.token import parse
from wancoll.wire import messages as m
from wancoll_master.gate import Gate

ADMIN = Identity("admin", "admin")


class Kept:
    """A book in memory, which may be full."""

    def __init__(self) -> None:
        self.rows: dict[str, dict[str, str]] = {}
        self.full = False

    def trust(self, kind: str) -> dict[str, str]:
        return dict(self.rows.get(kind, {}))

    def keep_trust(self, kind: str, rows: dict[str, str], gone: Collection[str] = ()) -> None:
        if self.full:
            raise sqlite3.OperationalError("database or disk is full")
        known = self.rows.setdefault(kind, {})
        for id in gone:
            known.pop(id, None)
        known.update(rows)


def signed(key: Key, name: str, token: str = "", receipt: bytes = b"") -> m.Signed:
    return Proof(key, (), receipt, name, token).first(bytes(32), bytes(32), m.StatusRequest(PROTOCOL_VERSION))


def admin(gate: Gate, ask: m.AboutTrust) -> m.AnswersOfTrust:
    who = gate.identify(signed(Key.read(f"{gate._folder}/admin.key"), "admin"))
    assert (who.name, who.role) == ("admin", "admin")
    return gate.answer(ask, who)


async def test_a_full_disk_keeps_no_master_from_starting(tmp_path: Path) -> None:
    book = Kept()
    book.full = True
    gate = Gate(str(tmp_path), book)
    assert book.rows == {}
    book.full = False
    assert gate.first_token()
    assert list(book.rows["master"]) == gate.publics  # with what came next


@pytest.mark.parametrize("ask", [{}, {"now": True}])
async def test_new_keys_count_though_the_journal_cannot_be_written(tmp_path: Path, ask: dict[str, bool]) -> None:
    """The file with the keys decides: a refusal would have them all the same at the next start."""
    book = Kept()
    gate = Gate(str(tmp_path), book)
    gate.address = "h:1"
    first, key = parse(gate.first_token()), Key.new()
    gate.identify(signed(key, "d", first.shown))
    book.full = True
    answer = admin(gate, m.RotateKey(PROTOCOL_VERSION, **ask))
    assert isinstance(answer, m.KeysAre)
    assert answer.refused == ""
    assert gate.settle() is not None
    assert [one.public for one in gate.keys] == answer.keys
    book.full = False
    again = Gate(str(tmp_path), book)  # it ended before anything was written
    assert [one.public for one in again.keys] == answer.keys
    if ask:
        with pytest.raises(ConfigError, match="is not known, or its secret is wrong"):
            again.identify(signed(key, "d", first.shown))
    else:
        assert again.identify(signed(key, "d")).token == first.id


async def test_a_rotation_whose_keys_cannot_be_written_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(str(tmp_path), Kept())
    before = list(gate.publics)

    def full(path: str, data: bytes) -> None:
        raise OSError(28, "No space left on device", path)

    monkeypatch.setattr("wancoll_master.gate.write_secret", full)
    answer = admin(gate, m.RotateKey(PROTOCOL_VERSION))
    assert "No space left on device" in answer.refused
    assert (gate.settled, gate.publics) == (True, before)


async def test_a_revocation_that_cannot_be_written_counts_now(tmp_path: Path) -> None:
    """It is written with what is written next; a new token is not given out at all."""
    book = Kept()
    gate = Gate(str(tmp_path), book)
    gate.address = "h:1"
    make = m.MakeToken(PROTOCOL_VERSION, "peer", "", [], 0, 60.0)

    def ask(question: m.AboutTrust) -> Any:
        answer = admin(gate, question)
        gate.settle()
        return answer

    def revoked() -> list[str]:
        return [one.id for one in ask(m.ListTokens(PROTOCOL_VERSION)).tokens if one.revoked]

    token, other, key = parse(ask(make).made), parse(ask(make).made), Key.new()
    who = gate.identify(signed(key, "d", other.shown))
    book.full = True
    said = ask(m.RevokeToken(PROTOCOL_VERSION, token.id)).refused
    assert said.startswith(f"token {token.id}: is revoked only until this master ends: that cannot be written")
    assert "got database or disk is full" in said
    assert "the key of d: is revoked only until" in ask(m.RevokeKey(PROTOCOL_VERSION, "d")).refused
    with pytest.raises(ConfigError, match="has a key that an operator has revoked"):
        gate.check(who)
    assert "a new token cannot be written; got database or disk is full" in ask(make).refused
    assert {one.id for one in ask(m.ListTokens(PROTOCOL_VERSION)).tokens} == {token.id, other.id}
    book.full = False
    assert parse(ask(make).made).id in book.rows["token"]
    gate = Gate(str(tmp_path), book)
    assert revoked() == [token.id]
    with pytest.raises(ConfigError, match="has a key that an operator has revoked"):
        gate.identify(signed(key, "d", other.shown))


async def test_while_a_change_is_written_nobody_new_comes_and_nothing_else_is_changed(tmp_path: Path) -> None:
    gate = Gate(str(tmp_path), Kept())
    gate.address = "h:1"
    token, key = parse(gate.first_token()), Key.new()
    gate.identify(signed(key, "d", token.shown))
    admin(gate, m.RotateKey(PROTOCOL_VERSION))
    assert len(gate.keys) == 1
    assert gate.identify(signed(key, "d")).name == "d"
    with pytest.raises(NotNow, match="writes another change of its tokens or keys"):
        gate.identify(signed(Key.new(), "e", token.shown))
    assert "ask again" in admin(gate, m.RotateKey(PROTOCOL_VERSION, finish=True)).refused
    assert gate.settle() is not None
    assert len(gate.keys) == 2
    assert gate.identify(signed(Key.new(), "e", token.shown)).name == "e"


async def test_where_no_token_can_be_made_a_master_leads_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("wancoll.trust.registry.MOST_TOKENS", 0)
    gate = Gate(str(tmp_path), Kept())
    assert gate.first_token() == ""
    refused = admin(gate, m.MakeToken(PROTOCOL_VERSION, "peer", "", [], 0, 0.0))
    assert "there are too many tokens" in refused.refused
