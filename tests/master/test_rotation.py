"""How one key of a master gives way to another one: begun and finished by an operator, or all at once."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest

from tests.master.dialler import secure
from tests.master.test_book import Kept, admin, signed
from tests.master.test_master import hello
from wancoll.errors import ConfigError
from wancoll.limits import PROTOCOL_VERSION
from wancoll.net.proof import Proof, read_receipt
from wancoll.net.tls import server_name
from wancoll.trust.keys import Key
from wancoll.trust.token import Token, parse
from wancoll.wire import messages as m
from wancoll_master.gate import Gate

BEGIN, FINISH, NOW = (m.RotateKey(PROTOCOL_VERSION, **more) for more in ({}, {"finish": True}, {"now": True}))


def started(folder: Path, book: Kept) -> tuple[Gate, Token]:
    gate = Gate(str(folder), book)
    gate.address = "h:1"
    return gate, parse(gate.first_token())


def turned(gate: Gate, ask: m.RotateKey) -> m.KeysAre:
    """The answer, and it is so."""
    answer = admin(gate, ask)
    assert isinstance(answer, m.KeysAre)
    assert answer.refused == ""
    assert gate.settle() is not None
    assert [key.public for key in gate.keys] == answer.keys
    return answer


async def test_a_rotation_from_its_begin_to_its_end(tmp_path: Path) -> None:
    gate, token = started(tmp_path, Kept())
    (old,) = gate.keys
    assert "there is no rotation to finish" in admin(gate, FINISH).refused
    early = signed(Key.new(), "early", token.shown)
    receipt = gate.admitted(gate.identify(early))
    assert receipt is not None
    assert turned(gate, BEGIN).keys == [old.public, gate.keys[-1].public]
    new = gate.keys[-1]
    assert (tmp_path / "master.pub").read_text().split() == [old.public.hex(), new.public.hex()]
    assert "a rotation is under way already" in admin(gate, BEGIN).refused
    told = gate.admitted(gate.identify(early))
    assert told is not None
    assert told.keys == [old.public, new.public]
    for key in (old, new):  # one receipt for masters and daemons that know the one or the other
        assert read_receipt(told.receipt, early.key, [key.public]) is not None
    assert gate.identify(signed(Key.new(), "late", token.shown)).name == "late"  # the token of before is good still
    answer = admin(gate, m.MakeToken(PROTOCOL_VERSION, "peer", "", [], 0, 60.0))
    assert isinstance(answer, m.Tokens)
    newer = parse(answer.made)
    assert newer.master == new.public
    assert turned(gate, FINISH).keys == [new.public]
    with pytest.raises(ConfigError, match="names no key of this master's any more"):
        gate.identify(signed(Key.new(), "later", token.shown))
    assert gate.identify(early).name == "early"  # who is known needs no token
    assert gate.identify(signed(Key.new(), "later", newer.shown)).name == "later"
    tokens = admin(gate, m.ListTokens(PROTOCOL_VERSION))
    assert isinstance(tokens, m.Tokens)
    assert {one.id: one.replaced for one in tokens.tokens} == {token.id: True, newer.id: False}


async def test_at_once_nothing_of_before_is_good(tmp_path: Path) -> None:
    book = Kept()
    gate, token = started(tmp_path, book)
    key = Key.new()
    who = gate.identify(signed(key, "d", token.shown))
    told = gate.admitted(who)
    assert told is not None
    gate.identify(signed(Key.new(), "voided", token.shown))
    admin(gate, m.RevokeKey(PROTOCOL_VERSION, "voided"))
    gate.settle()
    new = parse(turned(gate, NOW).made)
    with pytest.raises(ConfigError, match="is not known any more"):
        gate.check(who)
    with pytest.raises(ConfigError, match="has a key that this master does not know"):
        gate.identify(signed(key, "d", "", told.receipt))
    with pytest.raises(ConfigError, match="is not known, or its secret is wrong"):
        gate.identify(signed(key, "d", token.shown))
    assert {kind: list(rows) for kind, rows in book.rows.items()} == {
        "token": [new.id], "name": [], "key": [], "master": gate.publics,
    }  # fmt: skip
    assert gate.identify(signed(key, "d", new.shown)).token == new.id


@pytest.mark.parametrize("crash", ["before the file", "after the file", "after the rows"])
@pytest.mark.parametrize("ask", [BEGIN, FINISH, NOW], ids=["begin", "finish", "now"])
async def test_a_master_that_is_killed_at_it_has_the_keys_of_before_or_the_new_ones(
    tmp_path: Path, ask: m.RotateKey, crash: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    book = Kept()
    gate, token = started(tmp_path, book)
    key = Key.new()
    gate.identify(signed(key, "d", token.shown))
    if ask.finish:
        turned(gate, BEGIN)
    before, wanted = gate.publics, list[str]()

    class Killed(BaseException):
        pass

    real = Gate._write_keys

    def write_keys(self: Gate, keys: list[Key]) -> list[Key]:
        wanted.extend(one.public.hex() for one in keys)
        if crash == "before the file":
            raise Killed
        done = real(self, keys)
        if crash == "after the file":
            raise Killed
        return done

    with monkeypatch.context() as at, contextlib.suppress(Killed):
        at.setattr(Gate, "_write_keys", write_keys)
        admin(gate, ask)
    again = Gate(str(tmp_path), book)
    again.address = "h:1"
    assert again.publics == (before if crash == "before the file" else wanted)
    if ask.now and crash != "before the file":
        with pytest.raises(ConfigError, match="has a key that this master does not know"):
            again.identify(signed(key, "d"))
        assert bool(again.first_token()) == (crash == "after the file")
    else:
        assert again.identify(signed(key, "d")).token == token.id
        assert again.first_token() == "" or ask.finish


async def test_rows_of_other_keys_are_void(tmp_path: Path) -> None:
    """The file was lost, or another folder was given."""
    book = Kept()
    gate, token = started(tmp_path, book)
    key = Key.new()
    gate.identify(signed(key, "d", token.shown))
    os.unlink(tmp_path / "master.key")
    again, other = started(tmp_path, book)
    assert again.publics != gate.publics
    assert list(book.rows["token"]) == [other.id]
    with pytest.raises(ConfigError, match="has a key that this master does not know"):
        again.identify(signed(key, "d"))


async def test_a_key_file_that_others_may_read_is_refused(tmp_path: Path) -> None:
    Gate(str(tmp_path), Kept())
    for name in ("master.key", "admin.key"):
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o600
    (tmp_path / "master.key").chmod(0o640)
    with pytest.raises(ConfigError, match="is a key that others may read or replace"):
        Gate(str(tmp_path), Kept())


# ---- at a master that runs ----------------------------------------------------------------------------


async def test_daemons_that_are_connected_are_told_of_each_change(tmp_path: Path) -> None:
    async with secure(tmp_path) as master, master.dial() as daemon:
        proof, first = await master.join("d")
        (old,) = first.keys
        await daemon.prove(proof, hello("d", 2))
        assert await daemon.expect(m.Admitted) == first
        _, new = (await master.do(BEGIN)).keys
        told = await daemon.expect(m.Admitted)
        assert told.keys == [old, new]
        for key in (old, new):
            assert read_receipt(told.receipt, proof.key.public, [key]) is not None
            async with master.dial(name=server_name(key)) as shown:  # whoever expects a key is shown it
                assert shown.master == key
        async with master.dial(name="another.wancoll") as shown:
            assert shown.master == new
        assert (await master.do(m.AskKeys(PROTOCOL_VERSION))).keys == [old, new]
        assert [bytes.fromhex(one) for one in master.keys] == [old, new]
        await master.do(FINISH)
        told = await daemon.expect(m.Admitted)
        assert told.keys == [new]
        async with master.dial(name=server_name(old)) as shown:
            assert shown.master == new
        status = await master.ask(master.admin, m.StatusRequest(PROTOCOL_VERSION), m.Status)
        assert {one.kind for one in status.events} >= {"key"}


async def test_at_once_all_who_are_connected_are_sent_away_the_thief_too(tmp_path: Path) -> None:
    async with secure(tmp_path) as master, master.dial() as daemon, master.dial() as thief, master.dial() as late:
        proof, _ = await master.join("d")
        await daemon.prove(proof, hello("d"))
        await daemon.expect(m.Admitted)
        stolen = Proof(Key.new(), (), b"", "thief", (await master.make(role="admin")).shown)
        assert (await master.ask(stolen, m.AskKeys(PROTOCOL_VERSION), m.KeysAre)).refused == ""
        await thief.challenged()
        new = parse((await master.do(NOW)).made)
        assert "is not known any more" in await daemon.end()
        await thief.prove(stolen, m.ListTokens(PROTOCOL_VERSION))  # over a connection of before
        assert "is not known, or its secret is wrong" in await thief.end()
        await late.prove(proof, hello("d"))
        assert "has a key that this master does not know" in await late.end()
        assert new.master.hex() == master.keys[-1]
        _, told = await master.join("d", new)
        assert told.keys == [new.master]
