"""Masters that share an etcd share their keys, tokens and revocations there; with a real etcd."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.later import at_night, later
from tests.master.dialler import Master
from tests.master.lease import TTL, Later, quick_elections
from tests.master.test_book import admin, signed
from tests.master.test_master import PATIENT, hello
from wancoll.chaos import Etcd
from wancoll.errors import ConfigError
from wancoll.limits import PROTOCOL_VERSION
from wancoll.local import join_address
from wancoll.net.proof import Proof
from wancoll.trust.keys import Key
from wancoll.trust.seal import Seal
from wancoll.trust.token import Token, parse
from wancoll.wire import messages as m
from wancoll_master.config import EtcdConfig, MasterConfig
from wancoll_master.election import Election
from wancoll_master.gate import Gate
from wancoll_master.serve import serve
from wancoll_master.server import Server
from wancoll_master.store.etcd import Entry, EtcdError, TxnAnswer, delete, delete_under, put
from wancoll_master.store.etcd import Etcd as Client
from wancoll_master.store.etcd_store import Deposed, EtcdStore, Keys, Leader, Numbers
from wancoll_master.store.etcd_store import text as numbers_text
from wancoll_master.store.journal import Journal
from wancoll_master.store.shared_trust import Rows, SharedTrust, _as_text, shared

PATIENCE = 60.0
LIST, NOW = m.ListTokens(PROTOCOL_VERSION), m.RotateKey(PROTOCOL_VERSION, now=True)


class Masters:
    """Masters of one etcd, each to be started and ended, with a folder and a key file of its own."""

    def __init__(self, url: str, folder: Path, nursery: trio.Nursery, access: dict[str, str]) -> None:
        self.url, self.folder, self._nursery, self._access = url, folder, nursery, access
        self.prefix = f"wancoll-{secrets.token_hex(4)}/"
        self.tokens: list[str] = []
        self._running: dict[str, trio.CancelScope] = {}

    def key(self, name: str) -> Path:
        return self.folder / name / "state" / "seal.key"

    def copy_key(self, one: str, other: str) -> None:
        self.key(other).parent.mkdir(parents=True)
        shutil.copy2(self.key(one), self.key(other))

    async def start(self, name: str) -> Master:
        async def run(config: MasterConfig, *, task_status: trio.TaskStatus[str] = trio.TASK_STATUS_IGNORED) -> None:
            with trio.CancelScope() as self._running[name]:
                async with trio.open_nursery() as nursery:
                    address, *_ = await nursery.start(serve, config, self.tokens.append)
                    task_status.started(address)

        config = MasterConfig(
            limits=PATIENT, listen="127.0.0.1:0", secure=True, state=str(self.folder / name / "state"),
            etcd=EtcdConfig(self.url, self.prefix, lease_ttl=TTL, **self._access),
        )  # fmt: skip
        return Master(await self._nursery.start(run, config), self.folder / name, "")

    def end(self, *names: str) -> None:
        """These, or all."""
        for name in names or self._running:
            self._running[name].cancel()

    async def token(self, count: int = 1) -> Any:
        with trio.fail_after(PATIENCE):
            while len(self.tokens) < count:  # noqa: ASYNC110 - of a master
                await trio.sleep(0.01)
        return parse(self.tokens[-1])

    @contextlib.asynccontextmanager
    async def etcd(self) -> AsyncIterator[Client]:
        async with Client(EtcdConfig(self.url), 5.0) as client:
            yield client

    async def kept(self) -> list[Entry]:
        async with self.etcd() as client:
            return await client.under(f"{self.prefix}trust/")

    async def change(self, key: str, value: str) -> None:
        async with self.etcd() as client:
            assert (await client.txn([], [put(key, value)], [])).succeeded

    async def trust(self, path: Path) -> SharedTrust:
        async with self.etcd() as client:
            return await shared(client, self.prefix, str(path))


@contextlib.asynccontextmanager
async def masters(url: str, folder: Path, **access: str) -> AsyncIterator[Masters]:
    with quick_elections():
        async with trio.open_nursery() as nursery:
            with trio.fail_after(60):
                yield Masters(url, folder, nursery, access)
            nursery.cancel_scope.cancel()


@contextlib.asynccontextmanager
async def a_and_b(url: str, folder: Path) -> AsyncIterator[tuple[Masters, Master, Master, Token]]:
    """Two masters, the second one started when the first one had made this token."""
    async with masters(url, folder) as all_of_them:
        a = await all_of_them.start("a")
        token = await all_of_them.token()
        all_of_them.copy_key("a", "b")
        yield all_of_them, a, await all_of_them.start("b"), token


async def leads(master: Master) -> m.Tokens:
    """What it says of tokens, once it leads."""
    with trio.fail_after(PATIENCE):
        while True:
            with contextlib.suppress(AssertionError):  # it stands by
                answer: m.Tokens = await master.do(m.ListTokens(PROTOCOL_VERSION))
                return answer
            await trio.sleep(0.02)


async def follows(master: Master, keys: list[str]) -> None:
    """Return once its folder has these."""
    with trio.fail_after(PATIENCE):
        while master.keys != keys:  # noqa: ASYNC110 - of a master
            await trio.sleep(0.02)


async def said(capfd: pytest.CaptureFixture[str], what: str, times: int = 1) -> str:
    """All that was logged, once that has *what* in it."""
    text = ""
    with trio.fail_after(PATIENCE):
        while text.count(what) < times:
            await trio.sleep(0.02)
            text += "".join(capfd.readouterr())
    return text


async def test_what_one_master_gave_or_revoked_holds_at_the_next(etcd: Etcd, tmp_path: Path) -> None:
    async with a_and_b(etcd.url, tmp_path) as (all_of_them, a, b, first):
        assert a.keys == b.keys == [first.master.hex()]
        assert not (b.folder / "state" / "master.key").exists()  # sealed, in etcd alone
        d, _ = await a.join("d", first)
        bad, once = await a.make(), await a.make(uses=1, groups=["g"])
        (evil, _), (void, _), _ = await a.join("evil", bad), await a.join("void", first), await a.join("only", once)
        for proof, ask in ((d, hello("d")), (d, LIST), (Proof(Key.new(), ()), hello("x")), (b.admin, LIST)):
            assert isinstance(await b.ask(proof, ask, m.StandsBy | m.Bye), m.StandsBy)  # it knows nobody
        async with b.dial() as stranger:  # but not to whoever proves nothing
            await stranger.say(hello("d"))
            assert "may not begin with Hello over TLS" in await stranger.end()
        await a.do(m.RevokeToken(PROTOCOL_VERSION, bad.id))
        await a.do(m.RevokeKey(PROTOCOL_VERSION, "void"))
        known = sorted((await a.do(LIST)).tokens, key=lambda one: one.id)
        all_of_them.end("a")
        assert (await leads(b)).tokens == known  # by id
        assert [(one.id == bad.id, one.used) for one in known if one.revoked] == [(True, 0)]
        assert isinstance(await b.ask(replace(d, receipt=b""), hello("d"), m.Welcome), m.Welcome)
        for proof, name, why in (
            (evil, "evil", "by which it came in is revoked; expected one that is good"),
            (void, "void", "has a key that an operator has revoked"),
            (Proof(Key.new(), (), b"", "f", bad.shown), "f", "is revoked"),
            (Proof(Key.new(), (), b"", "f", once.shown), "f", "is used up"),
            (Proof(Key.new(), (), b"", "d", first.shown), "d", "which is another daemon's (it has another key)"),
        ):
            assert why in await b.refused(proof, hello(name))
        await b.join("f", first)
        await b.join("g", await b.make())
        assert len(all_of_them.tokens) == 1  # b made none of its own
        all_of_them.end("b")
        open_words = (first.secret, bad.secret, "BEGIN")
        assert not [one.key for one in await all_of_them.kept() if any(word in one.value for word in open_words)]


async def test_who_came_to_a_standby_is_looked_at_when_it_leads(etcd: Etcd, tmp_path: Path) -> None:
    """Also who has said hello, and was kept until somebody led."""
    async with a_and_b(etcd.url, tmp_path) as (all_of_them, a, b, token):
        d, _ = await a.join("d", token)
        good, _ = await a.join("good", await a.make())
        await a.do(m.RevokeToken(PROTOCOL_VERSION, token.id))
        all_of_them.end("a")
        answers: list[Any] = []

        async def comes(proof: Proof, name: str) -> None:
            kinds = m.Welcome | m.Bye | m.StandsBy
            while isinstance(answer := await b.ask(proof, hello(name), kinds), m.StandsBy):  # noqa: ASYNC110
                await trio.sleep(0.01)
            answers.append(answer)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(comes, d, "d")
            nursery.start_soon(comes, good, "good")
        answers.sort(key=lambda one: type(one).__name__)
        assert "by which it came in is revoked" in answers[0].reason
        assert (answers[0].final, type(answers[1])) == (True, m.Welcome)


@pytest.mark.check
async def test_nothing_is_told_before_etcd_has_it(tmp_path: Path) -> None:
    with Etcd() as etcd:
        async with masters(etcd.url, tmp_path) as all_of_them:
            a = await all_of_them.start("a")
            token = await all_of_them.token()
            await trio.to_thread.run_sync(etcd.pause)
            heard: Any = None
            try:
                with trio.move_on_after(1.0):
                    heard = await a.ask(Proof(Key.new(), (), b"", "d", token.shown), hello("d"), m.Welcome | m.Admitted)
            finally:
                etcd.resume()
            assert heard is None
            await leads(a)
            await a.join("e", token)


async def test_two_that_start_at_once_make_one_key(etcd: Etcd, tmp_path: Path) -> None:
    async with masters(etcd.url, tmp_path) as all_of_them:
        found: list[SharedTrust | ConfigError] = []

        async def start(path: Path) -> None:
            try:
                found.append(await all_of_them.trust(path))
            except ConfigError as bad:
                found.append(bad)

        async with trio.open_nursery() as nursery:  # with one key file
            for _ in range(4):
                nursery.start_soon(start, tmp_path / "one" / "key")
        made = {one.keys[0].public for one in found if isinstance(one, SharedTrust)}
        assert (len(found), len(made)) == (4, 1), found
        found.clear()
        all_of_them.prefix += "next/"
        async with trio.open_nursery() as nursery:  # each makes one: only the first one's is good
            for k in range(3):
                nursery.start_soon(start, tmp_path / f"of-{k}" / "key")
        [winner] = [one for one in found if isinstance(one, SharedTrust)]
        refused = [str(one) for one in found if isinstance(one, ConfigError)]
        assert len(refused) == 2
        assert all("is not the key that etcd's content is sealed with; expected the key with id " in r for r in refused)
        left = [str(tmp_path / f"of-{k}" / "key") for k in range(3) if os.listdir(tmp_path / f"of-{k}")]
        assert left == [winner.seal.path]


async def test_a_wrong_or_missing_key_file_is_told(etcd: Etcd, tmp_path: Path) -> None:
    async with masters(etcd.url, tmp_path) as all_of_them:
        await all_of_them.trust(tmp_path / "key")
        with pytest.raises(
            ConfigError, match=r"/none: the key file is missing that .*; copy it from there to this path"
        ):
            await all_of_them.trust(tmp_path / "none")
        assert not (tmp_path / "none").exists()
        all_of_them.prefix += "other/"
        other = await all_of_them.trust(tmp_path / "other")
        all_of_them.prefix = all_of_them.prefix.removesuffix("other/")
        with pytest.raises(ConfigError, match=rf"got one with id {other.seal.id}; copy the key file of a master that"):
            await all_of_them.trust(tmp_path / "other")
        os.chmod(tmp_path / "key", 0o644)
        with pytest.raises(ConfigError, match="is a key file that others may read or replace"):
            await all_of_them.trust(tmp_path / "key")


async def test_a_folder_with_a_key_of_its_own_is_refused(etcd: Etcd, tmp_path: Path) -> None:
    folder = tmp_path / "a" / "state"
    folder.mkdir(parents=True)
    (folder / "master.key").touch()
    with pytest.RaisesGroup(pytest.RaisesExc(ConfigError, match="is the state folder of a master with a key of its"),
                            flatten_subgroups=True):  # fmt: skip
        async with masters(etcd.url, tmp_path) as all_of_them:
            await all_of_them.start("a")


@pytest.mark.check
async def test_what_etcd_has_lost_is_written_back_by_who_led_last(
    etcd: Etcd, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    async with a_and_b(etcd.url, tmp_path) as (all_of_them, a, b, token):
        bad = await a.make()
        (d, _), (evil, _), _ = await a.join("d", token), await a.join("evil", bad), await a.join("void", token)
        await a.do(m.RevokeToken(PROTOCOL_VERSION, bad.id))
        await a.do(m.RevokeKey(PROTOCOL_VERSION, "void"))
        before = await all_of_them.kept()
        assert len(before) == 6  # the keys, two tokens, two names, one void key
        async with all_of_them.etcd() as client:
            await client.txn([], [delete_under(all_of_them.prefix)], [])
        await said(capfd, "etcd has lost the masters' key and tokens; this master writes back")
        known = (await leads(a)).tokens
        assert [one.key for one in await all_of_them.kept()] == [one.key for one in before]
        assert {one.id for one in known if one.revoked} == {bad.id}
        all_of_them.end("a")
        assert sorted((await leads(b)).tokens, key=lambda one: one.id) == sorted(known, key=lambda one: one.id)
        assert isinstance(await b.ask(d, hello("d"), m.Welcome), m.Welcome)
        assert "is revoked" in await b.refused(evil, hello("evil"))


async def test_what_one_knew_before_another_led_is_not_written_back(etcd: Etcd, tmp_path: Path) -> None:
    """It may lack what was revoked since."""
    async with masters(etcd.url, tmp_path) as all_of_them, all_of_them.etcd() as client:
        config = EtcdConfig(etcd.url, all_of_them.prefix, lease_ttl=TTL)
        trust = await all_of_them.trust(tmp_path / "key")
        journal = Journal("")
        one = Election(config, Server(MasterConfig(limits=PATIENT), journal), "me:1", None, trust)
        store = EtcdStore(client, Keys(all_of_them.prefix), Numbers(0, 0, 1, 0), 0, 30.0)
        one._rows = await trust.rows(store, client, None)
        for id, kept in ((one._id, True), ("another", False)):
            leader = numbers_text(Leader("it:1", 7, id))
            await all_of_them.change(Keys(all_of_them.prefix).leader, leader)
            await one._look(client)
            assert (one._rows is not None) == kept
        journal.close()


async def test_a_master_that_finds_its_keys_gone_makes_no_others(
    etcd: Etcd, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """One that runs may have them still; new ones would end all daemons."""
    known = tmp_path / "master.pub"
    known.touch()
    async with masters(etcd.url, tmp_path) as all_of_them, all_of_them.etcd() as client:
        found: list[SharedTrust] = []

        async def start() -> None:
            found.append(await shared(client, all_of_them.prefix, str(tmp_path / "key"), str(known)))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(start)
            assert "put back what etcd had" in await said(capfd, "trust/keys is lost, whose public half is in")
            assert await all_of_them.kept() == []
            elsewhere = await all_of_them.trust(tmp_path / "key")  # whoever has them writes them back
        assert found[0].keys[0].public == elsewhere.keys[0].public


async def test_a_master_of_other_keys_does_not_lead(
    etcd: Etcd, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    async with a_and_b(etcd.url, tmp_path) as (all_of_them, _, b, token):
        async with all_of_them.etcd() as client:
            await client.txn([], [delete(f"{all_of_them.prefix}trust/keys")], [])
        all_of_them.end("a")
        log = await said(capfd, "is not the key that this master was started with", 2)  # standing by, leading
        assert "got none; let masters that run run: the one that led last writes it back; if it has ended, put" in log
        proof, ask = Proof(Key.new(), (), b"", "d", token.shown), m.StatusRequest(PROTOCOL_VERSION)
        assert isinstance(await b.ask(proof, ask, m.StandsBy | m.Status), m.StandsBy)


async def test_keys_that_took_the_place_of_ours_without_a_rotation_are_not_followed(etcd: Etcd, tmp_path: Path) -> None:
    async with masters(etcd.url, tmp_path) as all_of_them, all_of_them.etcd() as client:
        ours = await all_of_them.trust(tmp_path / "key")
        assert await ours.newer(client) is None
        key = f"{all_of_them.prefix}trust/keys"
        await all_of_them.change(key, ours.seal.close(key, _as_text(ours)))  # the same, written again
        newer = await ours.newer(client)
        assert newer is not None
        assert (newer.id, newer.keys[0].public, newer.admin.public) == (
            ours.id, ours.keys[0].public, ours.admin.public
        )  # fmt: skip
        await all_of_them.change(key, ours.seal.close(key, _as_text(replace(ours, id="another"))))
        with pytest.raises(EtcdError, match=r"one that it gave way to; got another; let masters that run run"):
            await newer.newer(client)
        await all_of_them.change(key, ours.seal.close(key, "id\nno keys"))
        with pytest.raises(EtcdError, match=r"trust/keys in etcd: cannot be read by this version"):
            await newer.newer(client)


async def test_what_was_made_under_keys_that_were_deleted_counts_no_more(etcd: Etcd, tmp_path: Path) -> None:
    async with masters(etcd.url, tmp_path) as all_of_them:
        a = await all_of_them.start("a")
        d, _ = await a.join("d", await all_of_them.token())
        before = {one.key for one in await all_of_them.kept()}
        all_of_them.end("a")
        async with all_of_them.etcd() as client:
            await client.txn([], [delete(f"{all_of_them.prefix}trust/keys")], [])
        all_of_them.copy_key("a", "b")
        b = await all_of_them.start("b")
        token = await all_of_them.token(2)
        assert [one.id for one in (await leads(b)).tokens] == [token.id]
        assert "has a key that this master does not know" in await b.refused(d, hello("d"))
        await b.join("d", token)  # with another key: the name is free
        kept = {one.key for one in await all_of_them.kept()}
        assert sorted(key.rsplit("/", 2)[1] for key in kept & before) == ["name", "token", "trust"]
        assert len(kept) == 5


async def test_whoever_is_admin_at_a_standby_is_so_at_the_leader(etcd: Etcd, tmp_path: Path) -> None:
    """Commands on its machine ask it first, and then the leader that it names."""
    async with a_and_b(etcd.url, tmp_path) as (_, a, b, token):
        await leads(a)
        answer = await a.ask(b.admin, m.RevokeToken(PROTOCOL_VERSION, token.id), m.Tokens)
        assert [(one.id, one.revoked) for one in answer.tokens] == [(token.id, True)]
        before = b.admin
        new = parse((await a.do(NOW)).made)
        await follows(b, [new.master.hex()])
        with trio.fail_after(PATIENCE):
            while b.admin.key.public == before.key.public:  # noqa: ASYNC110 - of a master
                await trio.sleep(0.02)
        assert "has a key that this master does not know" in (await a.ask(before, LIST, m.Bye)).reason
        assert [one.id for one in (await a.ask(b.admin, LIST, m.Tokens)).tokens] == [new.id]


@pytest.mark.check
@pytest.mark.parametrize("what", ["keys", "gone", "moved", "row"])
async def test_what_somebody_else_changed_in_etcd_is_told(
    etcd: Etcd, tmp_path: Path, what: str, capfd: pytest.CaptureFixture[str]
) -> None:
    async with masters(etcd.url, tmp_path) as all_of_them:
        a = await all_of_them.start("a")
        await a.join("d", await all_of_them.token())
        e, _ = await a.join("e", await a.make())
        all_of_them.end("a")
        kept = {one.key: one.value for one in await all_of_them.kept()}
        [one, other] = sorted(key for key in kept if "/token/" in key)
        if what == "keys":
            await all_of_them.change(f"{all_of_them.prefix}trust/keys", kept[one])
            with pytest.raises(ConfigError, match=r"trust/keys in etcd: was changed .*got what does not open; see"):
                await all_of_them.trust(all_of_them.key("a"))
            return
        if what == "gone":  # with it the word that it was revoked, had it been: docs/security.md
            async with all_of_them.etcd() as client:
                await client.txn([], [delete(key) for key in (one, other)], [])
            a = await all_of_them.start("a")
            await all_of_them.token(2)
            assert isinstance(await a.ask(e, hello("e"), m.Welcome), m.Welcome)
            return
        await all_of_them.change(one, kept[other] if what == "moved" else kept[one][:-8] + "AAAAAAA=")
        a = await all_of_them.start("a")
        await said(capfd, f"{one} in etcd: was changed by somebody who has not the masters' key")
        answer = await a.ask(e, m.StatusRequest(PROTOCOL_VERSION), m.StandsBy | m.Status)
        assert isinstance(answer, m.StandsBy)  # it does not lead
        await all_of_them.change(one, kept[one])
        await leads(a)


@pytest.mark.check
async def test_a_rotation_goes_on_with_the_next_leader_and_standbys_follow_it(etcd: Etcd, tmp_path: Path) -> None:
    async with a_and_b(etcd.url, tmp_path) as (all_of_them, a, b, old):
        d, _ = await a.join("d", old)
        both = [key.hex() for key in (await a.do(m.RotateKey(PROTOCOL_VERSION))).keys]
        assert both[0] == old.master.hex()
        await follows(b, both)
        new = await a.make(seconds=600.0)
        assert new.master.hex() == both[1]
        all_of_them.end("a")
        await leads(b)
        assert [key.hex() for key in (await b.do(m.AskKeys(PROTOCOL_VERSION))).keys] == both
        _, told = await b.join("late", old)
        assert [key.hex() for key in told.keys] == both
        await b.do(m.RotateKey(PROTOCOL_VERSION, finish=True))
        all_of_them.end()
        for name in ("a", "b"):
            all_of_them.copy_key(name, f"{name}-next")
        a = await all_of_them.start("a-next")
        await leads(a)
        assert a.keys == both[1:]
        assert "names no key of this master's any more" in await a.refused(
            Proof(Key.new(), (), b"", "too-late", old.shown), hello("too-late")
        )
        assert isinstance(await a.ask(d, hello("d"), m.Welcome), m.Welcome)
        await a.join("later", new)


@pytest.mark.check
async def test_at_once_nothing_of_before_is_left_in_etcd(etcd: Etcd, tmp_path: Path) -> None:
    async with a_and_b(etcd.url, tmp_path) as (all_of_them, a, b, old):
        d, _ = await a.join("d", old)
        new = parse((await a.do(NOW)).made)
        await follows(b, [new.master.hex()])
        assert new.master != old.master
        all_of_them.end("a")
        assert [one.id for one in (await leads(b)).tokens] == [new.id]
        kept = [one.key.split("/")[-2:] for one in await all_of_them.kept()]
        assert sorted(kept) == [["token", new.id], ["trust", "keys"]]
        assert "has a key that this master does not know" in await b.refused(d, hello("d"))
        await b.join("d", new)


class TakesSome(Client):
    """An etcd that takes so many transactions, and is away then for as long as a master tries."""

    takes = 10**9

    async def txn(self, *what: Any) -> TxnAnswer:
        if self.takes <= 0:
            raise Deposed("etcd is away")
        self.takes -= 1
        return await super().txn(*what)


@pytest.mark.parametrize("takes", [0, 1])
async def test_at_once_is_one_transaction_however_many_tokens_and_names_there_are(
    etcd: Etcd, tmp_path: Path, takes: int
) -> None:
    """So where etcd is lost at that moment the next leader has all of it or nothing, and the operator hears which."""
    async with masters(etcd.url, tmp_path) as all_of_them, TakesSome(EtcdConfig(etcd.url), 5.0) as client:
        trust, keys = await all_of_them.trust(tmp_path / "key"), Keys(all_of_them.prefix)
        begun = await client.txn([], [put(keys.leader, "me"), put(keys.facts, numbers_text(Numbers(0, 0, 1, 0)))], [])
        store = EtcdStore(client, keys, Numbers(0, 0, 1, 0), begun.revision, 30.0)
        gate = Gate(str(tmp_path / "one"), None, shared=trust.keys, admin=trust.admin)
        gate.address = "h:1"
        gate.lead(await trust.rows(store, client, None))
        made = [admin(gate, m.MakeToken(PROTOCOL_VERSION, "peer", "", [], 0, 60.0)) for _ in range(80)]
        token = parse(made[0].made)  # type: ignore[union-attr]
        for name in map(str, range(30)):
            gate.identify(signed(Key.new(), name, token.shown))

        async def write() -> bool:
            """Whether all was; else this master is deposed."""
            with trio.CancelScope() as scope, contextlib.suppress(Deposed):
                await store.write_forever(scope.cancel)
            return store.written == store.asked

        async def next_leader() -> tuple[Gate, dict[str, str], dict[str, str]]:
            rows = await trust.rows(EtcdStore(client, keys, Numbers(0, 0, 1, 0), 0, 30.0), client, None)
            found = Gate(str(tmp_path / "next"), None, shared=trust.keys, admin=trust.admin)
            found.lead(rows)
            return found, rows.trust("token"), rows.trust("name")

        assert await write()
        found, known, names = await next_leader()
        assert (len(known), len(names)) == (80, 30)
        client.takes = takes
        told = admin(gate, NOW)
        assert isinstance(told, m.KeysAre)
        assert await write() == bool(takes)
        found, known, names = await next_leader()
        if not takes:
            assert found.publics == [trust.keys[0].public.hex()]
            assert (len(known), len(names)) == (80, 30)
            return
        new = parse(told.made)
        assert found.publics == [new.master.hex()] != [trust.keys[0].public.hex()]
        assert (list(known), names) == ([new.id], {})
        assert not found.first_token()  # the operator's is good
        kept = [one.key.split("/")[-2:] for one in await all_of_them.kept()]
        assert sorted(kept) == [["token", new.id], ["trust", "keys"]]
        assert found.identify(signed(Key.new(), "0", new.shown)).token == new.id  # the name is free


@pytest.mark.parametrize("what", [*later("at once"), *at_night("a token")])
async def test_what_was_never_written_is_not_so_and_nobody_is_sent_away(tmp_path: Path, what: str) -> None:
    """etcd dies at that moment: the master leads no more, and goes on with what etcd has once that is back."""
    with Etcd() as etcd:
        async with a_and_b(etcd.url, tmp_path) as (_, a, b, token):
            d, _ = await a.join("d", token)
            async with a.dial() as daemon:
                await daemon.prove(d, hello("d"))
                await daemon.expect(m.Welcome)
                await trio.to_thread.run_sync(etcd.kill)
                revoke = m.RevokeToken(PROTOCOL_VERSION, token.id)
                answer = await a.ask(a.admin, NOW if what == "at once" else revoke, m.Bye | m.Tokens | m.KeysAre)
                for bye in (answer, await daemon.expect(m.Bye)):
                    assert "this master leads no more: " in bye.reason
                    assert not bye.final
            assert a.keys == b.keys == [token.master.hex()]
            await trio.to_thread.run_sync(etcd.start)
            leader = a
            with trio.fail_after(PATIENCE):
                while isinstance(await leader.ask(d, hello("d"), m.Welcome | m.StandsBy | m.Bye), m.StandsBy | m.Bye):
                    leader = b if leader is a else a
            await leader.join("e", token)
            assert [one.revoked for one in (await leads(leader)).tokens] == [False]


@contextlib.asynccontextmanager
async def that_writes_later(folder: Path) -> AsyncIterator[tuple[Server, Gate, Later, Master, Token]]:
    """A master that leads, one of several, and its first token."""
    store, journal = Later(), Journal("")
    trust = SharedTrust("p/", Seal.make(str(folder / "key")), "id", [Key.new()], Key.new())
    gate = Gate(str(folder / "state"), None, shared=trust.keys, admin=trust.admin)
    found = Server(MasterConfig(limits=PATIENT, first=True), journal, gate)
    async with trio.open_nursery() as nursery:
        [listener] = await trio.open_tcp_listeners(0, host="127.0.0.1")
        gate.address = join_address(*listener.socket.getsockname()[:2])
        nursery.start_soon(trio.serve_listeners, found.accept, [listener])
        gate.lead(Rows(trust, store, {"token": {}, "name": {}, "key": {}}))
        found.lead(store)
        token = parse(gate.first_token())
        store.written = store.asked
        with trio.fail_after(50):
            yield found, gate, store, Master(gate.address, folder, ""), token
        nursery.cancel_scope.cancel()
    journal.close()


async def in_hand(store: Later, asked: int) -> None:
    """The store was asked for more writes than these."""
    while store.asked <= asked:  # noqa: ASYNC110 - by a master
        await trio.sleep(0.005)


@pytest.mark.parametrize("what", ["at once", "a token"])
@pytest.mark.parametrize("comes", ["written", "deposed"])
async def test_rights_end_when_that_is_written_and_not_before(tmp_path: Path, what: str, comes: str) -> None:
    """Meanwhile who is there stays, who is known is let in, and who asks for another change is to ask again."""
    async with that_writes_later(tmp_path) as (server, gate, store, master, token), contextlib.AsyncExitStack() as all:

        def written() -> None:
            store.written = store.asked
            server.release()

        joined = list[tuple[Proof, m.Admitted]]()

        async def join() -> None:
            joined.append(await master.join("d", token))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(join)
            await in_hand(store, store.asked)
            written()
        [(d, _)], old = joined, master.keys
        daemon, one, next, late = [await all.enter_async_context(master.dial()) for _ in range(4)]
        await daemon.prove(d, hello("d"))
        await daemon.expect(m.Admitted)
        await late.challenged()
        asked = store.asked
        operator = master.admin
        await one.prove(operator, NOW if what == "at once" else m.RevokeToken(PROTOCOL_VERSION, token.id))
        await in_hand(store, asked)
        asked, make = store.asked, m.MakeToken(PROTOCOL_VERSION, "peer", "", [], 0, 60.0)
        again = "this master: writes another change of its tokens or keys; "
        await next.prove(operator, make)
        newcomer = await master.ask(Proof(Key.new(), (), b"", "e", token.shown), hello("e"), m.Bye | m.Welcome)
        assert (newcomer.reason.startswith(again), newcomer.final) == (True, False)  # it asks again
        await daemon.say(m.Heartbeat(number=7, heard=0))
        assert (await daemon.expect(m.Pong)).number == 7
        assert isinstance(await master.ask(d, m.StatusRequest(PROTOCOL_VERSION), m.Status), m.Status)
        assert (store.asked, master.keys) == (asked, old)
        if comes == "deposed":
            server.step_down("the test says so")
            for peer in (daemon, one, next, late):
                assert await peer.end() == "this master leads no more: the test says so"
            assert master.keys == old
            assert not [one for one in gate._registry.grants.values() if one.revoked]
            return
        written()
        assert (await next.expect(m.Tokens)).refused.startswith(again)
        answer = await one.expect(m.Tokens | m.KeysAre)
        bye = await daemon.expect(m.Bye)
        assert bye.final
        assert ("is not known any more" if what == "at once" else "is revoked") in bye.reason
        await late.prove(d, hello("d"))
        late_why = "has a key that this master does not know" if what == "at once" else "is revoked"
        assert late_why in await late.end()
        if what == "at once":
            assert master.keys == [parse(answer.made).master.hex()]
            return
        assert [one.revoked for one in answer.tokens] == [True]
        rows = [json.loads(Seal.read(str(tmp_path / "key")).open(k, v)) for k, v in store.kept.items() if v]
        assert [row["revoked"] for row in rows if "revoked" in row] == [True]


async def test_a_folder_that_cannot_be_written_ends_neither_a_lead_nor_a_rotation(tmp_path: Path) -> None:
    async with that_writes_later(tmp_path) as (server, gate, store, master, _), master.dial() as operator:
        asked = store.asked
        (tmp_path / "state" / "master.pub.new").mkdir()
        await operator.prove(master.admin, m.RotateKey(PROTOCOL_VERSION))
        await in_hand(store, asked)
        store.written = store.asked
        server.release()
        assert len((await operator.expect(m.KeysAre)).keys) == len(gate.keys) == 2
        assert server.state is not None
        assert len(master.keys) == 1


async def test_whoever_is_kept_until_a_master_leads_says_little(tmp_path: Path) -> None:
    """Nobody has looked at its key yet."""
    async with that_writes_later(tmp_path) as (server, _, _, master, _):
        server.step_down("the test says so")
        server.stand_by(m.StandsBy("", 0), wait=True)
        async with master.dial() as stranger:
            await stranger.prove(Proof(Key.new(), (), b"", "s", ""), hello("s"))
            await stranger.say(m.Heartbeat(1, called=[(1, 1, 1, 1)] * 30_000))
            assert "frame" in await stranger.end()
