"""Masters that share an etcd share an authority, tokens and revocations there; with a real etcd."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import ssl
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio
from msgspec.structs import replace as but

from tests.later import at_night, later
from tests.master.lease import TTL, quick_elections
from tests.master.test_gate import Master, hello
from tests.master.test_leadership import Later
from tests.master.test_master import PATIENT
from wancoll.chaos import Etcd
from wancoll.cli.asking import Asking
from wancoll.cli.changing import token as token_command
from wancoll.errors import ConfigError, ProtocolError
from wancoll.limits import PROTOCOL_VERSION
from wancoll.local import join_address
from wancoll.net.enroll import Refused, Wallet, WrongMaster
from wancoll.trust.authority import Authority, Request, issuer_of, new_key, request
from wancoll.trust.identity import Identity
from wancoll.trust.papers import Papers, fingerprints, unverified, write_secret
from wancoll.trust.seal import Seal
from wancoll.trust.token import Token, parse
from wancoll.wire import messages as m
from wancoll.wire.framing import Decoder, encode
from wancoll_master.config import EtcdConfig, MasterConfig
from wancoll_master.core.rotation import Rotation
from wancoll_master.election import Election
from wancoll_master.gate import Gate
from wancoll_master.serve import serve
from wancoll_master.server import Server
from wancoll_master.store.authorities import as_text
from wancoll_master.store.etcd import Access, Entry, EtcdError, TxnAnswer, delete, delete_under, put
from wancoll_master.store.etcd import Etcd as Client
from wancoll_master.store.etcd_store import Deposed, EtcdStore, Keys, Leader, first_numbers
from wancoll_master.store.etcd_store import text as numbers_text
from wancoll_master.store.journal import Journal
from wancoll_master.store.shared_trust import Rows, SharedTrust, shared

PATIENCE = 60.0


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
        async with Client(Access([self.url]), 5.0) as client:
            yield client

    async def kept(self) -> list[Entry]:
        async with self.etcd() as client:
            return await client.under(f"{self.prefix}trust/")

    async def change(self, key: str, value: str) -> None:
        async with self.etcd() as client:
            assert (await client.txn([], [put(key, value)], [])).succeeded

    async def trust(self, path: Path) -> SharedTrust:
        async with self.etcd() as client:
            return await shared(client, self.prefix, str(path), time.time)


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
            with contextlib.suppress(AssertionError):
                return await master.admin(m.ListTokens(PROTOCOL_VERSION))
            await trio.sleep(0.02)


async def join(master: Master, name: str, token: Any, within: float = 20.0) -> Wallet:
    wallet = Wallet(str(master.folder / f"of-{name}"), token)
    await trio.to_thread.run_sync(wallet.enroll, master.address, name, within)
    return wallet


def authority_of(master: Master) -> bytes:
    return (master.folder / "state" / "authority.pem").read_bytes()


async def test_what_one_master_gave_or_revoked_holds_at_the_next(etcd: Etcd, tmp_path: Path) -> None:
    async with a_and_b(etcd.url, tmp_path) as (all_of_them, a, b, first):
        assert authority_of(a) == authority_of(b)
        assert not (b.folder / "state" / "authority.key").exists()  # sealed, in etcd alone
        at_a, at_b = await join(a, "d", first), await join(b, "e", first)  # b sends it to a
        bad, once = await a.make(), await a.make(uses=1, groups=["g"])
        evil, _ = await join(a, "evil", bad), await join(a, "only", once)
        assert isinstance(await a.ask(hello("evil"), evil.papers), m.Welcome)
        assert isinstance(await b.ask(hello("evil"), evil.papers), m.StandsBy)
        assert isinstance(await b.ask(m.ListTokens(PROTOCOL_VERSION), at_b.papers), m.StandsBy)
        assert isinstance(await b.ask(m.Renew(b""), at_b.papers), m.StandsBy)
        await a.admin(m.RevokeToken(PROTOCOL_VERSION, bad.id))
        known = sorted((await a.admin(m.ListTokens(PROTOCOL_VERSION))).tokens, key=lambda one: one.id)
        all_of_them.end("a")
        assert (await leads(b)).tokens == known  # by id
        assert [(one.id == bad.id, one.used) for one in known if one.revoked] == [(True, 0)]
        for wallet, name in ((at_a, "d"), (at_b, "e")):
            assert isinstance(await b.ask(hello(name), wallet.papers), m.Welcome)
        answer = await b.ask(hello("evil"), evil.papers)
        assert answer.final
        assert "by which it came in is revoked; expected one that is good; got this one; start it with a new" in (
            answer.reason
        )
        with pytest.raises(Refused, match="is revoked"):
            await join(b, "f", bad)
        with pytest.raises(Refused, match="is used up"):
            await join(b, "f", once)
        with pytest.raises(Refused, match=r"which is another daemon's \(it has another key\)"):
            await trio.to_thread.run_sync(Wallet(str(tmp_path / "x"), first).enroll, b.address, "d", 20.0)
        await join(b, "f", first)
        assert isinstance(await b.ask(hello("evil2"), (await join(b, "evil2", await b.make())).papers), m.Welcome)
        assert len(all_of_them.tokens) == 1  # b made none of its own
        all_of_them.end("b")
        secrets_of = [line.encode() for line in (first.secret, bad.secret, "BEGIN")]
        assert not [one.key for one in await all_of_them.kept() if any(s.decode() in one.value for s in secrets_of)]


async def test_who_came_to_a_standby_is_looked_at_again_when_it_leads(etcd: Etcd, tmp_path: Path) -> None:
    async with a_and_b(etcd.url, tmp_path) as (all_of_them, a, b, token):
        wallet = await join(a, "d", token)
        async with b.dial(wallet.papers) as daemon:
            await a.admin(m.RevokeToken(PROTOCOL_VERSION, token.id))
            all_of_them.end("a")
            await leads(b)
            await daemon.say(hello("d"))
            assert "by which it came in is revoked" in (await daemon.hear()).reason
            assert await daemon.hear() is None


@pytest.mark.check
async def test_nothing_is_told_before_etcd_has_it(tmp_path: Path) -> None:
    with Etcd() as etcd:
        async with masters(etcd.url, tmp_path) as all_of_them:
            a = await all_of_them.start("a")
            token = await all_of_them.token()
            await trio.to_thread.run_sync(etcd.pause)
            try:
                with pytest.raises((ConnectionError, TimeoutError, ProtocolError)):
                    await join(a, "d", token, 1.0)
                assert not (a.folder / "of-d" / "certificate.pem").exists()
            finally:
                etcd.resume()
            assert await leads(a)
            await join(a, "d", token)


async def test_two_that_start_at_once_make_one_authority(etcd: Etcd, tmp_path: Path) -> None:
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
        prints = {one.rotation.signs.fingerprint for one in found if isinstance(one, SharedTrust)}
        assert (len(found), len(prints)) == (4, 1), found
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
        with pytest.raises(ConfigError, match="the key file could be read or changed by others"):
            await all_of_them.trust(tmp_path / "key")


async def test_a_folder_with_an_authority_of_its_own_is_refused(etcd: Etcd, tmp_path: Path) -> None:
    folder = tmp_path / "a" / "state"
    folder.mkdir(parents=True)
    (folder / "authority.key").touch()
    with pytest.RaisesGroup(pytest.RaisesExc(ConfigError, match="is the state folder of a master with an authority"),
                            flatten_subgroups=True):  # fmt: skip
        async with masters(etcd.url, tmp_path) as all_of_them:
            await all_of_them.start("a")


async def wiped(all_of_them: Masters) -> None:
    """etcd loses all."""
    async with all_of_them.etcd() as client:
        await client.txn([], [delete_under(all_of_them.prefix)], [])


@pytest.mark.check
async def test_what_etcd_has_lost_is_written_back_by_who_led_last(
    etcd: Etcd, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    async with a_and_b(etcd.url, tmp_path) as (all_of_them, a, b, token):
        bad = await a.make()
        at_a, evil = await join(a, "d", token), await join(a, "evil", bad)
        await a.admin(m.RevokeToken(PROTOCOL_VERSION, bad.id))
        before = await all_of_them.kept()
        assert len(before) == 5  # the authority, two tokens, two names
        await wiped(all_of_them)
        with trio.fail_after(PATIENCE):
            while len(await all_of_them.kept()) < len(before):  # noqa: ASYNC110 - of etcd
                await trio.sleep(0.02)
        assert "etcd has lost the masters' authority and tokens; this master writes back" in "".join(capfd.readouterr())
        assert [one.key for one in await all_of_them.kept()] == [one.key for one in before]
        known = (await leads(a)).tokens
        assert {one.id for one in known if one.revoked} == {bad.id}
        assert isinstance(await a.ask(hello("d"), at_a.papers), m.Welcome)
        all_of_them.end("a")
        assert sorted((await leads(b)).tokens, key=lambda one: one.id) == sorted(known, key=lambda one: one.id)
        assert isinstance(await b.ask(hello("d"), at_a.papers), m.Welcome)
        assert (await b.ask(hello("evil"), evil.papers)).final
        await join(b, "e", token)


async def test_what_one_knew_before_another_led_is_not_written_back(etcd: Etcd, tmp_path: Path) -> None:
    """It may lack what was revoked since."""
    async with masters(etcd.url, tmp_path) as all_of_them, all_of_them.etcd() as client:
        config = EtcdConfig(etcd.url, all_of_them.prefix, lease_ttl=TTL)
        trust = await all_of_them.trust(tmp_path / "key")
        journal = Journal("")
        one = Election(config, Server(MasterConfig(limits=PATIENT), journal), "me:1", None, trust)
        store = EtcdStore(client, Keys(all_of_them.prefix), first_numbers(), 0, 30.0)
        one._rows = await trust.rows(store, client, None)
        for id, kept in ((one._id, True), ("another", False)):
            leader = numbers_text(Leader("it:1", 7, id))
            await all_of_them.change(Keys(all_of_them.prefix).leader, leader)
            await one._look(client)
            assert (one._rows is not None) == kept
        journal.close()


async def test_a_master_that_finds_its_authority_gone_makes_no_other(
    etcd: Etcd, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """One that runs may have it still; a new one would end all daemons."""
    known = tmp_path / "authority.pem"
    known.touch()
    async with masters(etcd.url, tmp_path) as all_of_them, all_of_them.etcd() as client:
        found: list[SharedTrust] = []

        async def start() -> None:
            found.append(await shared(client, all_of_them.prefix, str(tmp_path / "key"), time.time, str(known)))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(start)
            said = ""
            while "trust/authority is lost, of which" not in said:
                await trio.sleep(0.02)
                said += "".join(capfd.readouterr())
            assert "put back what etcd had" in said
            assert await all_of_them.kept() == []
            elsewhere = await all_of_them.trust(tmp_path / "key")  # whoever has it writes it back
        assert found[0].rotation.signs.fingerprint == elsewhere.rotation.signs.fingerprint


async def test_a_master_of_another_authority_does_not_lead(
    etcd: Etcd, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    async with a_and_b(etcd.url, tmp_path) as (all_of_them, _, b, token):
        async with all_of_them.etcd() as client:
            await client.txn([], [delete(f"{all_of_them.prefix}trust/authority")], [])
        all_of_them.end("a")
        said = ""
        with trio.fail_after(PATIENCE):
            while said.count("is not the authority that this master was started with") < 2:  # standing by, leading
                await trio.sleep(0.02)
                said += "".join(capfd.readouterr())
        assert "got none; let masters that run run: the one that led last writes it back; if it has ended, put" in said
        with pytest.raises(ConnectionError, match="stands by"):
            await join(b, "d", token)


async def test_an_authority_that_took_the_place_of_ours_without_a_rotation_is_not_followed(
    etcd: Etcd, tmp_path: Path
) -> None:
    async with masters(etcd.url, tmp_path) as all_of_them, all_of_them.etcd() as client:
        ours = await all_of_them.trust(tmp_path / "key")
        assert await ours.newer(client) is None
        key = f"{all_of_them.prefix}trust/authority"
        await all_of_them.change(key, ours.seal.close(key, as_text(ours.rotation, ours.id)))  # the same, written again
        newer = await ours.newer(client)
        assert newer is not None
        assert newer.rotation.signs.fingerprint == ours.rotation.signs.fingerprint
        await all_of_them.change(key, ours.seal.close(key, as_text(ours.rotation, "another")))
        with pytest.raises(EtcdError, match=r"one that it gave way to; got another; let masters that run run"):
            await newer.newer(client)


async def test_what_was_made_under_an_authority_that_was_deleted_counts_no_more(etcd: Etcd, tmp_path: Path) -> None:
    async with masters(etcd.url, tmp_path) as all_of_them:
        a = await all_of_them.start("a")
        await join(a, "d", await all_of_them.token())
        before = {one.key for one in await all_of_them.kept()}
        all_of_them.end("a")
        async with all_of_them.etcd() as client:
            await client.txn([], [delete(f"{all_of_them.prefix}trust/authority")], [])
        all_of_them.copy_key("a", "b")
        b = await all_of_them.start("b")
        token = await all_of_them.token(2)
        assert [one.id for one in (await leads(b)).tokens] == [token.id]
        await join(b, "d", token)  # with another key: the name is free
        kept = {one.key for one in await all_of_them.kept()}
        assert sorted(key.rsplit("/", 2)[1] for key in kept & before) == ["name", "token", "trust"]
        assert len(kept) == 5


async def test_a_standby_that_names_another_one_is_followed_once(tmp_path: Path) -> None:
    """Two that name each other would be asked for ever."""
    made, key = Authority.make(time.time()), new_key()
    write_secret(str(tmp_path / "ca"), made.certificate)
    write_secret(str(tmp_path / "m"), made.sign_master(Request.read(request(key)), time.time(), 600) + key)
    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    address = f"127.0.0.1:{listeners[0].socket.getsockname()[1]}"
    heard: list[Any] = []

    async def stand_by(stream: trio.SSLStream[trio.SocketStream]) -> None:
        decoder: Decoder[Any] = Decoder(m.FromPeer, 1 << 20)
        with contextlib.suppress(trio.BrokenResourceError):
            heard.extend(decoder.feed(bytes(await stream.receive_some())))
            asked = isinstance(heard[-1], m.AskAuthority)
            await stream.send_all(encode(m.AuthorityIs(made.certificate) if asked else m.StandsBy(address, 1)))
            await stream.receive_some()
        await trio.aclose_forcefully(stream)

    with trio.fail_after(PATIENCE):
        async with trio.open_nursery() as nursery:
            context = Papers(str(tmp_path / "ca"), str(tmp_path / "m")).to_listen()
            nursery.start_soon(trio.serve_listeners, stand_by, [trio.SSLListener(one, context) for one in listeners])
            wallet = Wallet(str(tmp_path / "w"), Token(made.fingerprint, "abcd", "s" * 43, address))
            with pytest.raises(ConnectionError, match=f"{address} stands by; {address} leads"):
                await trio.to_thread.run_sync(wallet.enroll, address, "d", 5.0)
            nursery.cancel_scope.cancel()
    assert [type(one) for one in heard] == [m.AskAuthority, m.Enroll] * 2


async def test_tokens_are_looked_after_at_a_standby_too(
    etcd: Etcd, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with a_and_b(etcd.url, tmp_path) as (_, a, b, token):
        await leads(a)
        asking = Asking(state=str(b.folder / "state"))
        await trio.to_thread.run_sync(partial(token_command.show, master=b.address, asking=asking))
        rows = [line.split()[:5] for line in capsys.readouterr().out.splitlines()]
        assert [token.id, "peer", "any", "all", "unlimited"] in rows
        await trio.to_thread.run_sync(partial(token_command.revoke, token.id, master=b.address, asking=asking))
        assert [one.revoked for one in (await leads(a)).tokens] == [True]


@pytest.mark.check
@pytest.mark.parametrize("what", ["authority", "gone", "moved", "row"])
async def test_what_somebody_else_changed_in_etcd_is_told(
    etcd: Etcd, tmp_path: Path, what: str, capfd: pytest.CaptureFixture[str]
) -> None:
    async with masters(etcd.url, tmp_path) as all_of_them:
        a = await all_of_them.start("a")
        token = await all_of_them.token()
        await join(a, "d", token)
        wallet = await join(a, "e", await a.make())
        all_of_them.end("a")
        kept = {one.key: one.value for one in await all_of_them.kept()}
        [one, other] = sorted(key for key in kept if "/token/" in key)
        if what == "authority":
            await all_of_them.change(f"{all_of_them.prefix}trust/authority", kept[one])
            with pytest.raises(
                ConfigError, match=r"trust/authority in etcd: was changed .*got what does not open; see"
            ):
                await all_of_them.trust(all_of_them.key("a"))
            return
        if what == "gone":  # with it the word that it was revoked, had it been: docs/security.md
            async with all_of_them.etcd() as client:
                await client.txn([], [delete(key) for key in (one, other)], [])
            a = await all_of_them.start("a")
            await all_of_them.token(2)
            assert isinstance(await a.ask(hello("e"), wallet.papers), m.Welcome)
            return
        await all_of_them.change(one, kept[other] if what == "moved" else kept[one][:-8] + "AAAAAAA=")
        a = await all_of_them.start("a")
        said = ""
        with trio.fail_after(PATIENCE):
            while f"{one} in etcd: was changed by somebody who has not the masters' key" not in said:
                await trio.sleep(0.02)
                said += "".join(capfd.readouterr())
        answer = await a.ask(m.StatusRequest(PROTOCOL_VERSION), wallet.papers)
        assert isinstance(answer, m.StandsBy)  # it does not lead
        await all_of_them.change(one, kept[one])
        await leads(a)


@pytest.mark.check
async def test_a_rotation_goes_on_with_the_next_leader_and_standbys_follow_it(etcd: Etcd, tmp_path: Path) -> None:
    async with a_and_b(etcd.url, tmp_path) as (all_of_them, a, b, old):
        asking = Asking(state=str(b.folder / "state"))  # who stands by says who leads
        ca = partial(trio.to_thread.run_sync, asking.ask_as_admin)
        told = await ca(m.Rotate(PROTOCOL_VERSION, 0.0, False), m.RotationIs, b.address)
        both = [one.sha256 for one in told.authorities]
        assert (told.phase, len(both)) == ("spreading", 2)
        await follows(b, both)
        new = await a.make(seconds=600.0)
        assert [old.authority, new.authority] == both
        for name, token in (("at-b-old", old), ("at-b-new", new)):  # b shows each a certificate that it believes
            assert isinstance(await a.ask(hello(name), (await join(b, name, token)).papers), m.Welcome)
        refused = await a.ask(m.Rotate(PROTOCOL_VERSION, 0.0, False), a.papers)
        assert "is under way already" in refused.refused
        all_of_them.end("a")
        await leads(b)
        assert await ca(m.AskRotation(PROTOCOL_VERSION), m.RotationIs, b.address) == told
        key = f"{all_of_them.prefix}trust/authority"
        for phase, believed in (("retiring", both[::-1]), ("steady", both[1:])):
            all_of_them.end()
            found = await all_of_them.trust(all_of_them.key("b"))
            late = replace(found.rotation, until=0.0, period=4.0)  # a phase is over
            await all_of_them.change(key, found.seal.close(key, as_text(late, found.id)))
            for name in ("a", "b"):
                all_of_them.copy_key(name, f"{name}-{phase}")
            a = await all_of_them.start(f"a-{phase}")
            await leads(a)
            b = await all_of_them.start(f"b-{phase}")
            await follows(b, believed)
            assert (await all_of_them.trust(all_of_them.key("b"))).rotation.phase == phase
            if phase == "retiring":
                assert isinstance(await a.ask(hello("late"), (await join(b, "late", old)).papers), m.Welcome)
        with pytest.raises(WrongMaster, match=r"authority was replaced \(`wancoll ca show`\)"):
            await join(b, "too-late", old)
        all_of_them.end("a-steady")
        await leads(b)
        await join(b, "later", new)


@pytest.mark.check
async def test_at_once_nothing_of_before_is_left_in_etcd(etcd: Etcd, tmp_path: Path) -> None:
    async with a_and_b(etcd.url, tmp_path) as (all_of_them, a, b, old):
        wallet = await join(a, "d", old)
        told = await a.ask(m.Rotate(PROTOCOL_VERSION, 0.0, True), a.papers)
        new = parse(told.made)
        assert [new.authority] == [one.sha256 for one in told.authorities]
        assert new.authority != old.authority
        await follows(b, [new.authority])
        all_of_them.end("a")
        assert [one.id for one in (await leads(b)).tokens] == [new.id]
        kept = [one.key.split("/")[-2:] for one in await all_of_them.kept()]
        assert sorted(kept) == [["token", new.id], ["trust", "authority"]]
        with pytest.raises(ConnectionError, match="where that was replaced, join with a new token"):
            await b.ask(hello("d"), wallet.papers)
        await join(b, "d", new)


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
    async with masters(etcd.url, tmp_path) as all_of_them, TakesSome(Access([etcd.url]), 5.0) as client:
        trust, keys = await all_of_them.trust(tmp_path / "key"), Keys(all_of_them.prefix)
        begun = await client.txn([], [put(keys.leader, "me"), put(keys.facts, numbers_text(first_numbers()))], [])
        store = EtcdStore(client, keys, first_numbers(), begun.revision, 30.0)
        gate = Gate(str(tmp_path / "one"), None, shared=trust.rotation)
        gate.address = "h:1"
        gate.lead(await trust.rows(store, client, None))
        admin = gate.renewed(Identity("admin", "admin"))
        tokens = [gate.answer(m.MakeToken(PROTOCOL_VERSION, "peer", "", [], 0, 60.0), admin) for _ in range(80)]
        key, of = request(new_key()), parse(tokens[0].made)  # type: ignore[union-attr]
        for name in map(str, range(30)):
            enrolled = gate.answer(m.Enroll(PROTOCOL_VERSION, of.id, of.secret, name, key), None)
            assert isinstance(enrolled, m.Enrolled)
            assert enrolled.certificate

        async def write() -> bool:
            """Whether all was; else this master is deposed."""
            with trio.CancelScope() as scope, contextlib.suppress(Deposed):
                await store.write_forever(scope.cancel)
            return store.written == store.asked

        async def next_leader() -> tuple[Gate, dict[str, str], dict[str, str]]:
            rows = await trust.rows(EtcdStore(client, keys, first_numbers(), 0, 30.0), client, None)
            found = Gate(str(tmp_path / "next"), None, shared=trust.rotation)
            found.lead(rows)
            return found, rows.trust("token"), rows.trust("name")

        assert await write()
        found, known, names = await next_leader()
        assert (len(known), len(names)) == (80, 30)
        client.takes = takes
        told = gate.answer(m.Rotate(PROTOCOL_VERSION, 0.0, True), admin)
        assert isinstance(told, m.RotationIs)
        assert await write() == bool(takes)
        found, known, names = await next_leader()
        assert found.authorities is not None
        if not takes:
            assert fingerprints(found.authorities.certificates) == [trust.rotation.signs.fingerprint]
            assert (len(known), len(names)) == (80, 30)
            return
        new = parse(told.made)
        assert fingerprints(found.authorities.certificates) == [new.authority] != [trust.rotation.signs.fingerprint]
        assert (list(known), names) == ([new.id], {})
        assert not found.first_token()  # the operator's is good
        kept = [one.key.split("/")[-2:] for one in await all_of_them.kept()]
        assert sorted(kept) == [["token", new.id], ["trust", "authority"]]
        enroll = m.Enroll(PROTOCOL_VERSION, new.id, new.secret, "0", request(new_key()))  # the name is free
        enrolled = found.answer(enroll, None)
        assert isinstance(enrolled, m.Enrolled)
        assert enrolled.certificate


@pytest.mark.parametrize("what", [*later("at once"), *at_night("a token")])
async def test_what_was_never_written_is_not_so_and_nobody_is_sent_away(tmp_path: Path, what: str) -> None:
    """etcd dies at that moment: the master leads no more, and goes on with what etcd has once that is back."""
    with Etcd() as etcd:
        async with a_and_b(etcd.url, tmp_path) as (_, a, b, token):
            wallet = await join(a, "d", token)
            old = fingerprints(authority_of(a))
            async with a.dial(wallet.papers) as daemon:
                await daemon.say(hello("d"))
                await daemon.expect(m.Welcome)
                await trio.to_thread.run_sync(etcd.kill)
                rotate, revoke = m.Rotate(PROTOCOL_VERSION, 0.0, True), m.RevokeToken(PROTOCOL_VERSION, token.id)
                answer = await a.ask(rotate if what == "at once" else revoke, a.papers)
                for said in (answer, await daemon.expect(m.Bye)):
                    assert "this master leads no more: " in said.reason
                    assert not said.final
            for master in (a, b):  # while it stands by
                told = await master.ask(m.AskAuthority(PROTOCOL_VERSION), None, believe_anybody=True)
                assert fingerprints(told.certificates) == fingerprints(authority_of(master)) == old
            await trio.to_thread.run_sync(etcd.start)
            leader = await either_leads(a, b)
            assert isinstance(await leader.ask(hello("d"), wallet.papers), m.Welcome)
            await join(leader, "e", token)
            assert [one.revoked for one in (await leads(leader)).tokens] == [False]


async def either_leads(*masters: Master) -> Master:
    with trio.fail_after(PATIENCE):
        while True:
            for one in masters:
                if isinstance(await one.ask(m.StatusRequest(PROTOCOL_VERSION), one.papers), m.Status):
                    return one
            await trio.sleep(0.05)


@contextlib.asynccontextmanager
async def that_writes_later(folder: Path) -> AsyncIterator[tuple[Server, Gate, Later, Master, Token]]:
    """A master that leads, one of several, and its first token."""
    rotation, store = Rotation((Authority.make(time.time()),)), Later()
    trust = SharedTrust("p/", Seal.make(str(folder / "key")), "id", rotation)
    gate, journal = Gate(str(folder / "state"), None, shared=rotation), Journal("")
    found = Server(MasterConfig(limits=PATIENT, first=True), journal, gate)
    async with trio.open_nursery() as nursery:
        [listener] = await trio.open_tcp_listeners(0, host="127.0.0.1")
        gate.address = join_address(*listener.socket.getsockname()[:2])
        nursery.start_soon(found.keep_trust, gate)
        nursery.start_soon(trio.serve_listeners, found.accept, [listener])
        gate.lead(Rows(trust, store, {"token": {}, "name": {}}))  # type: ignore[arg-type]
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
    """Meanwhile who is there stays, who comes is let in, and who asks for another change is to ask again."""
    async with that_writes_later(tmp_path) as (server, gate, store, master, token):

        async def written(since: int, rows: int = 1) -> None:
            await in_hand(store, since + rows - 1)
            store.written = store.asked
            server.release()

        old = fingerprints(authority_of(master))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(join, master, "d", token)
            await written(store.asked, 2)  # the token's row and the name's
        wallet, admin = Wallet(str(tmp_path / "of-d"), token), master.papers
        assert admin is not None
        async with (
            master.dial(wallet.papers) as daemon,
            master.dial(admin) as one,
            master.dial(admin) as next,
            master.dial(wallet.papers) as late,
        ):
            await daemon.say(hello("d"))
            assert isinstance(await daemon.hear(), m.Welcome)
            assert isinstance(await daemon.hear(), m.AuthorityIs)
            asked, revoke = store.asked, m.RevokeToken(PROTOCOL_VERSION, token.id)
            await one.say(m.Rotate(PROTOCOL_VERSION, 0.0, True) if what == "at once" else revoke)
            await in_hand(store, asked)
            asked, make = store.asked, m.MakeToken(PROTOCOL_VERSION, "peer", "", [], 0, 60.0)
            again = "this master: writes another change of its tokens or authority; "
            assert (await master.ask(make, admin)).refused.startswith(again)
            told = await master.ask(m.AskAuthority(PROTOCOL_VERSION), None, believe_anybody=True)
            assert fingerprints(told.certificates) == old
            with pytest.raises(ProtocolError, match=again):  # neither Refused nor WrongMaster: it asks again
                await join(master, "e", token)
            await daemon.say(m.Renew(wallet.request()), m.Heartbeat(7))
            assert (await daemon.hear()).refused.startswith(again)
            assert (await daemon.hear()).number == 7
            await next.say(m.ListTokens(PROTOCOL_VERSION))
            async with master.dial(wallet.papers) as comes_in:  # who comes is let in
                await comes_in.say(m.StatusRequest(PROTOCOL_VERSION))
                assert isinstance(await comes_in.hear(), m.Status)
            assert store.asked == asked
            assert fingerprints(authority_of(master)) == old
            if comes == "deposed":
                server.step_down("the test says so")
                for peer in (daemon, one, next, late):
                    assert await peer.hear() == m.Bye("this master leads no more: the test says so")
                assert fingerprints(authority_of(master)) == old
                gate.check(gate.renewed(Identity("d", "peer", (), token.id)))
                return
            await written(asked, 0)
            answer, why = await one.hear(), "authority that was replaced" if what == "at once" else "is revoked"
            for peer in (daemon, late):
                bye = await peer.hear()
                assert bye.final
                assert why in bye.reason
            assert [one.revoked for one in (await next.hear()).tokens] == [False], "as it was when it was asked"
            if what == "at once":
                assert fingerprints(authority_of(master)) == [parse(answer.made).authority]
                return
            assert [one.revoked for one in answer.tokens] == [True]
            async with master.dial(admin) as last:
                await last.say(make)
                await written(asked)
                assert [one.revoked for one in (await last.hear()).tokens] == [True, False]
            rows = [json.loads(Seal.read(str(tmp_path / "key")).open(k, v)) for k, v in store.kept.items() if v]
            assert [row["revoked"] for row in rows if "revoked" in row] == [True, False]


async def test_a_certificate_is_given_once_it_is_written_and_not_again_over_the_next_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No daemon counts it among what it has heard: said again it would stand for another word."""
    monkeypatch.setattr("wancoll_master.gate._LEAST_RENEWED", 0.0)
    async with that_writes_later(tmp_path) as (server, _, store, master, token):

        async def written(since: int) -> None:
            await in_hand(store, since)
            store.written = store.asked
            server.release()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(join, master, "d", token)
            await written(store.asked + 1)  # the token's row and the name's
        wallet = Wallet(str(tmp_path / "of-d"), token)
        async with master.dial(wallet.papers) as daemon, master.dial(wallet.papers) as next:
            await daemon.say(but(hello("d"), dial=1))
            welcome = await daemon.expect(m.Welcome)
            assert isinstance(await daemon.hear(), m.AuthorityIs)
            asked = store.asked
            await daemon.say(m.Renew(wallet.request()), m.Heartbeat(7))
            assert (await daemon.hear()).number == 7
            await written(asked)
            assert (await daemon.expect(m.Enrolled)).certificate
            again = but(hello("d"), dial=2, session=welcome.session, master=welcome.master)
            await next.say(again, m.Heartbeat(8))
            assert (await next.hear()).resumed
            assert [type(await next.hear()) for _ in range(2)] == [m.AuthorityIs, m.Pong]


async def test_a_folder_that_cannot_be_written_ends_neither_a_lead_nor_a_rotation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead = [0.0]
    monkeypatch.setattr("time.time", partial(lambda now: now() + ahead[0], time.time))
    async with that_writes_later(tmp_path) as (server, gate, store, master, _):
        monkeypatch.setattr(gate, "_clock", time.time)

        async def phase(then: str, since: int) -> None:
            await in_hand(store, since)
            store.written = store.asked
            server.release()
            assert gate.rotating[0] == then

        [old], admin = fingerprints(authority_of(master)), master.papers
        assert admin is not None
        async with master.dial(admin) as operator, master.dial(admin) as daemon:
            await daemon.say(hello("admin"))
            await daemon.expect(m.AuthorityIs)
            asked = store.asked
            await operator.say(m.Rotate(PROTOCOL_VERSION, 0.0, False))
            await phase("spreading", asked)
            new = (await operator.expect(m.RotationIs)).authorities[1].sha256
            assert fingerprints((await daemon.expect(m.AuthorityIs)).certificates) == [old, new]
            in_the_way = tmp_path / "state" / "authority.pem.new"
            in_the_way.mkdir()
            for then in ("retiring", ""):
                asked, ahead[0] = store.asked, gate._rotation.until - time.time() + ahead[0] + 1  # type: ignore[union-attr]
                gate._wake()
                await phase(then, asked)
                if then:
                    assert fingerprints((await daemon.expect(m.AuthorityIs)).certificates) == [new, old]
            assert "of an authority that was replaced" in (await daemon.expect(m.Bye)).reason  # it has not renewed it
            assert server.state is not None
            assert fingerprints(authority_of(master)) == [old, new]
            assert gate.authorities is not None
            assert fingerprints(gate.authorities.certificates) == [new]
            shown = ssl.DER_cert_to_PEM_cert(shown_by(gate.context())).encode()  # to daemons, whatever the folder has
            assert issuer_of(shown, gate.authorities.certificates) == 0
            newest = Rotation((Authority.make(time.time()),))
            gate.lead(SimpleNamespace(rotation=newest, trust=lambda kind: {}))  # type: ignore[arg-type]
            in_the_way.rmdir()
            ahead[0] += 60
            gate.context()
            assert fingerprints(authority_of(master)) == [newest.signs.fingerprint]


def shown_by(context: ssl.SSLContext) -> bytes:
    """The certificate (DER) of who listens with it."""
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    dials, listens = unverified().wrap_bio(down, up), context.wrap_bio(up, down, server_side=True)
    for end in (dials, listens, dials):
        with contextlib.suppress(ssl.SSLWantReadError):
            end.do_handshake()
    found = dials.getpeercert(binary_form=True)
    assert found is not None
    return found


async def follows(master: Master, believed: list[str]) -> None:
    """Return once its folder has these."""
    with trio.fail_after(PATIENCE):
        while fingerprints(authority_of(master)) != believed:  # noqa: ASYNC110 - of a master
            await trio.sleep(0.02)
