"""The real master over TLS: who gets a certificate, who is let in with it, and what it says to all others."""

from __future__ import annotations

import contextlib
import socket
import sqlite3
import ssl
import time
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import structlog
import trio
import trustme

from tests.master.test_master import PATIENT, Peer
from wancoll.cli.asking import Asking, ask_leader
from wancoll.errors import ConfigError
from wancoll.health import health
from wancoll.limits import PROTOCOL_VERSION
from wancoll.local import split_address
from wancoll.net.ask import ask
from wancoll.net.enroll import Refused, Wallet, WrongMaster
from wancoll.net.hot import Hot
from wancoll.peer.config import PeerConfig
from wancoll.peer.control import Control
from wancoll.peer.daemon import _wallet as wallet_of
from wancoll.trust.authority import Authority, Request, new_key, owner, request
from wancoll.trust.identity import Identity
from wancoll.trust.papers import Papers, write_secret
from wancoll.trust.token import Token, parse
from wancoll.wire import messages as m
from wancoll.wire.kept import counts
from wancoll_master.config import MasterConfig
from wancoll_master.gate import Gate
from wancoll_master.serve import serve
from wancoll_master.store.authorities import from_text
from wancoll_master.store.journal import Journal


def hello(name: str) -> m.Hello:
    return m.Hello(PROTOCOL_VERSION, name, 1, ["127.0.0.1:9"], 4, "", "0.1.0")


class Master:
    """A secure master, and how to ask it from another thread."""

    def __init__(self, address: str, folder: Path, token: str) -> None:
        self.address, self.folder = address, folder
        self.token = parse(token) if token else None

    async def ask(self, question: Any, papers: Papers | None, **more: Any) -> Any:
        where = split_address(self.address)
        call = partial(ask, where, question, m.FromMaster, timeout=20, who="the master", papers=papers, **more)
        return await trio.to_thread.run_sync(call)

    @contextlib.asynccontextmanager
    async def dial(self, papers: Papers) -> AsyncIterator[Peer]:
        """A connection that stays, on which nothing was said."""
        context, (host, port) = papers.to_dial(), split_address(self.address)
        stream: Any = trio.SSLStream(await trio.open_tcp_stream(host, port), context, server_hostname=host)
        try:
            await stream.do_handshake()
            yield Peer(stream)
        finally:
            await trio.aclose_forcefully(stream)

    @property
    def papers(self) -> Papers | None:
        """Those of its admin, as commands on its machine find them."""
        return Asking(state=str(self.folder / "state"), timeout=1).papers(self.address)

    async def admin(self, question: Any) -> m.Tokens:
        answer = await self.ask(question, self.papers)
        assert isinstance(answer, m.Tokens)
        return answer

    async def make(self, **more: Any) -> Token:
        asked = {"role": "peer", "name": "", "groups": [], "uses": 0, "seconds": 3600.0, **more}
        answer = await self.admin(m.MakeToken(PROTOCOL_VERSION, **asked))
        assert not answer.refused
        return parse(answer.made)

    async def join(self, name: str, token: Token | None = None) -> Wallet:
        assert self.token is not None
        wallet = Wallet(str(self.folder / f"of-{name}"), token or self.token)
        await trio.to_thread.run_sync(wallet.enroll, self.address, name, 20.0)
        return wallet


@contextlib.asynccontextmanager
async def secure(folder: Path, **config: Any) -> AsyncIterator[Master]:
    tokens: list[str] = []
    more = {"secure": True, "state": str(folder / "state"), "journal": str(folder / "journal"), "limits": PATIENT}
    async with trio.open_nursery() as nursery:
        found = MasterConfig(**{"listen": "127.0.0.1:0", "first": True, **more, **config})
        (address, *_) = await nursery.start(serve, found, tokens.append)
        with trio.fail_after(50):
            yield Master(address, folder, tokens[0] if tokens else "")
        nursery.cancel_scope.cancel()


async def test_a_token_gives_a_certificate_and_that_lets_a_daemon_in(tmp_path: Path) -> None:
    async with secure(tmp_path) as master:
        assert master.token is not None
        assert master.token.address == master.address
        wallet = await master.join("d")
        assert wallet.name == "d"
        assert wallet.good("d", time.time())
        assert not wallet.good("d", time.time() + 86400)
        assert not wallet.good("e", time.time())
        assert 50_000 < wallet.renew_at() - time.time() < 60_000
        answer = await master.ask(hello("d"), wallet.papers)
        assert isinstance(answer, m.Welcome)
        answer = await master.ask(hello("another"), wallet.papers)
        assert isinstance(answer, m.Bye)
        assert "may not say Hello as another; expected the name d, by its certificate" in answer.reason
        assert [one.used for one in (await master.admin(m.ListTokens(PROTOCOL_VERSION))).tokens] == [0]
    assert not (tmp_path / "state" / "admin.pem").exists()
    async with secure(tmp_path) as master:  # again: the same authority, and the token is good still
        assert master.token is None
        assert isinstance(await master.ask(hello("d"), wallet.papers), m.Welcome)
        await trio.to_thread.run_sync(wallet.enroll, master.address, "d", 20.0)


async def test_who_asks_as_admin_takes_no_use_of_a_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """WANCOLL_JOIN may stand in the environment of the master's machine, too."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    async with secure(tmp_path) as master:
        state, mine = str(tmp_path / "state"), str(await master.make(uses=1))
        papers = Asking(state=state, join=mine, timeout=1).papers(master.address)
        assert papers is not None
        assert papers.certificate == str(tmp_path / "state" / "admin.pem")
        other = Asking(state=state, join=f"WC1{'0' * 64}::abab.{'s' * 43}@h:9", timeout=20)
        with pytest.raises(WrongMaster, match="is not the master that the token is of"):
            await trio.to_thread.run_sync(other.papers, master.address)


async def test_the_token_that_is_given_counts_not_the_certificate_of_before(tmp_path: Path) -> None:
    async with secure(tmp_path) as master:
        before = await master.join("d")
        other = Wallet(before.folder, await master.make(groups=["g"]))
        assert before.good("d", time.time())
        assert not other.good("d", time.time())
        await master.join("d", other.token)  # with the same key, so by its name
        assert other.good("d", time.time())
        assert not before.good("d", time.time())
        with pytest.raises(ConfigError, match=r"is a master's; expected a folder for this daemon alone"):
            wallet_of(PeerConfig(join=str(other.token), state=str(tmp_path / "state")), "socket")


@pytest.mark.parametrize("file", ["certificate.pem", "certificate.key", "authority.pem"])
@pytest.mark.parametrize("damaged", [b"", b"nonsense", "another's"])
async def test_a_damaged_file_of_a_daemon_is_as_good_as_none(tmp_path: Path, file: str, damaged: bytes | str) -> None:
    async with secure(tmp_path) as master:
        wallet = await master.join("d")
        stranger = damaged == "another's" and file == "authority.pem"
        if isinstance(damaged, str):
            damaged = {
                "certificate.pem": (Path((await master.join("e")).folder) / file).read_bytes(),
                "certificate.key": new_key(),
                "authority.pem": Authority.make(time.time()).certificate,
            }[file]
        (Path(wallet.folder) / file).write_bytes(damaged)
        assert not wallet.good("d", time.time())
        assert (wallet.renew_at() == 0.0) == stranger  # by the connection that it has, if any
        assert wallet.name in ("", "d", "e")
        name = "d2" if file == "certificate.key" else "d"  # the name is the lost key's
        await trio.to_thread.run_sync(wallet.enroll, master.address, name, 20.0)
        assert wallet.good(name, time.time())
        assert isinstance(await master.ask(hello(name), wallet.papers), m.Welcome)


async def test_a_state_folder_is_one_masters(tmp_path: Path) -> None:
    async with secure(tmp_path) as master:
        admin = master.folder / "state" / "admin.pem"
        for options in ({"secure": True}, {}):
            other = MasterConfig(listen="127.0.0.1:0", journal="", state=str(master.folder / "state"), **options)
            with pytest.raises(ConfigError, match="is the state folder of another master, which runs"):
                await serve(other)
            assert admin.exists()


@pytest.mark.parametrize("role", ["observer", "admin"])
async def test_a_daemon_with_a_token_for_others_ends(tmp_path: Path, role: str) -> None:
    async with secure(tmp_path) as master:
        wallet = Wallet(str(tmp_path / "d"), await master.make(role=role))
        no = lambda *_, **__: None  # noqa: E731
        for _ in range(2):  # with the token, and with the certificate that it got
            with socket.create_server(("127.0.0.1", 0)) as lanes, trio.fail_after(20):
                config = PeerConfig(master=master.address)
                control = Control(config, "d", 1, [], lanes, Hot(), no, no, no, no, m.Heartbeat, wallet)
                await control.run()
            assert f"is not for daemons; expected a token of role peer; got {role}" in control.refused


async def test_without_a_certificate_nothing_is_read_or_changed(tmp_path: Path) -> None:
    async with secure(tmp_path) as master:
        joined = await master.join("d")
        known = Papers(joined.papers.authorities)
        for question in (
            m.StatusRequest(PROTOCOL_VERSION), m.Evict(PROTOCOL_VERSION, "g", "x", False, ""), hello("d"),
            m.Arm("t", "before_commit", "kill"),
        ):  # fmt: skip
            answer = await master.ask(question, known)
            assert isinstance(answer, m.Bye | m.EvictAnswer)
            assert f"may not say {type(question).__name__}" in str(answer)
            assert "a certificate of this master's authority" in str(answer)
        answer = await master.ask(m.StatusRequest(PROTOCOL_VERSION), None)  # in clear
        assert answer == m.Bye(
            "this master speaks TLS only; give --join or WANCOLL_JOIN a token: `wancoll token create` makes one", True
        )
        for admin in (m.ListTokens(PROTOCOL_VERSION), m.RevokeToken(PROTOCOL_VERSION, joined.token.id)):  # type: ignore[union-attr]
            for papers in (known, joined.papers):
                answer = await master.ask(admin, papers)
                assert isinstance(answer, m.Bye)
                assert f"may not say {type(admin).__name__}" in answer.reason
        assert "may not say Renew" in (await master.ask(m.Renew(b""), known)).reason
        assert "may not say Renew before Hello" in (await master.ask(m.Renew(b""), joined.papers)).reason
        token = await master.make(role="admin", groups=["g"])
        admin_of_g = await master.join("admin-of-g", token)
        answer = await master.ask(m.ListTokens(PROTOCOL_VERSION), admin_of_g.papers)
        assert "may not look after tokens; expected an admin of all groups" in answer.refused
        assert (await master.admin(m.ListTokens(PROTOCOL_VERSION))).tokens[0].revoked is False
        status = await master.ask(m.StatusRequest(PROTOCOL_VERSION), master.papers)
        assert status.resources["messages_refused"] == 9  # also the five about trust


async def test_an_answer_about_trust_is_not_said_again_to_who_comes_back(tmp_path: Path) -> None:
    """Daemons do not count it among what they have heard, so a master that did would say something twice."""
    async with secure(tmp_path) as master, contextlib.AsyncExitStack() as connections:
        wallet = await master.join("d")

        async def talk(last: type, *words: Any) -> list[Any]:
            """All that is heard over a new connection up to one that is the *last*."""
            peer, heard = await connections.enter_async_context(master.dial(wallet.papers)), list[Any]()
            await peer.say(*words)
            while not (heard and isinstance(heard[-1], last)):
                heard.append(await peer.hear())
            return heard

        first = await talk(m.Enrolled, hello("d"), m.Join("g", "m", 2, 1), m.Renew(wallet.request()))
        (welcome,) = (one for one in first if isinstance(one, m.Welcome))
        known = {"term": welcome.term, "master": welcome.master, "session": welcome.session}
        heard = sum(map(counts, first))
        assert heard  # of the member that it named
        again = await talk(m.Pong, msgspec.structs.replace(hello("d"), **known, heard=heard, dial=1), m.Heartbeat(1))
        assert [(one.resumed, one.session) for one in again if isinstance(one, m.Welcome)] == [(True, welcome.session)]
        assert not [one for one in again if isinstance(one, m.Enrolled) or counts(one)]


async def test_a_token_of_another_master_is_told_from_the_right_one(tmp_path: Path) -> None:
    async with secure(tmp_path) as master:
        assert master.token is not None
        wrong = Token("ab" * 32, master.token.id, master.token.secret, master.address)
        with pytest.raises(
            WrongMaster, match="is not the master that the token is of; expected an authority with SHA-256 abab"
        ):
            await master.join("d", wrong)
        assert not (tmp_path / "of-d" / "authority.pem").exists()  # and no secret was said: it is good still
        await master.join("d")


@pytest.mark.parametrize(
    ("more", "name", "says"),
    [
        ({"seconds": 0.02}, "d", "has expired"),
        ({"name": "e"}, "d", "is for another name; expected e"),
        ({"uses": 1}, "d", "is used up; expected at most 1 daemons"),
    ],
)
async def test_a_token_that_is_not_good_is_refused(tmp_path: Path, more: dict[str, Any], name: str, says: str) -> None:
    async with secure(tmp_path) as master:
        token = await master.make(**more)
        if "uses" in more:
            await master.join("first", token)
        await trio.sleep(0.03)
        with pytest.raises(Refused, match=says):
            await master.join(name, token)


@pytest.mark.parametrize(
    ("groups", "name", "good"),
    [
        ([f"{i:02}" + "g" * 126 for i in range(64)], "", True),  # as many as a token may have
        (["\xe9" * 100 + str(i) for i in range(15)], "", True),
        (["\xe9" * 100 + str(i) for i in range(17)], "", False),
        (["\xe9" * 100 + str(i) for i in range(17)], "d", True),  # it knows the name, and that it is short
        (["\xe9" * 100 + str(i) for i in range(20)], "d", False),
    ],
)
async def test_a_token_whose_certificate_would_not_fit_its_message_is_refused_when_it_is_made(
    tmp_path: Path, groups: list[str], name: str, *, good: bool
) -> None:
    async with secure(tmp_path) as master:
        answer = await master.admin(m.MakeToken(PROTOCOL_VERSION, "peer", name, groups, 1, 3600.0))
        if not good:
            says = (
                "wancoll token create --group: asks for a certificate that is too large; expected at most 16384 bytes"
            )
            assert says in answer.refused
            assert len((await master.admin(m.ListTokens(PROTOCOL_VERSION))).tokens) == 1, "the first one alone"
            return
        longest = name or chr(0x10FFFF) * 128
        wallet = Wallet(str(tmp_path / "d"), parse(answer.made))
        await trio.to_thread.run_sync(wallet.enroll, master.address, longest, 20.0)
        assert wallet.good(longest, time.time())
        assert isinstance(await master.ask(hello(longest), wallet.papers), m.Welcome)


async def test_who_came_with_a_revoked_token_is_sent_away(tmp_path: Path) -> None:
    async with secure(tmp_path) as master:
        token = await master.make()
        wallet = await master.join("d", token)
        other = await master.join("o")
        async with master.dial(wallet.papers) as daemon:
            await daemon.say(hello("d"), m.Join("g", "m", 1, 1))
            assert isinstance(await daemon.hear(), m.Welcome)
            await daemon.expect(m.Epoch)
            answer = await master.admin(m.RevokeToken(PROTOCOL_VERSION, token.id))
            assert [one.revoked for one in answer.tokens if one.id == token.id] == [True]
            bye = await daemon.expect(m.Bye)
            assert bye.final
            assert f"token {token.id}: by which it came in is revoked" in bye.reason
            assert await daemon.hear() is None
        why = f"lost m: daemon d was sent away: token {token.id} by which it came in is revoked"
        told = await master.ask(m.StatusRequest(PROTOCOL_VERSION), master.papers)
        assert [(one.group, one.kind, one.text) for one in told.events[-2:]] == [
            ("", "revoked", f"an operator has revoked token {token.id}: who came in with it is sent away"),
            ("g", "evicted", why),
        ]
        found = health(told, told.events[-1].time + 4)
        assert found.line.startswith(f"group g lost m 4 s ago: {why.removeprefix('lost m: ')}; nobody is left. Start ")
        answer = await master.ask(hello("d"), wallet.papers)
        assert answer.final
        assert "by which it came in is revoked" in answer.reason
        with pytest.raises(Refused, match="is revoked"):
            await master.join("d", token)
        assert isinstance(await master.ask(hello("o"), other.papers), m.Welcome)


@pytest.mark.parametrize(("late", "says"), [(-90_000.0, "has expired"), (90_000.0, "not valid yet there: look at the")])
async def test_certificates_of_another_time_are_refused_with_what_to_do(tmp_path: Path, late: float, says: str) -> None:
    async with secure(tmp_path) as master:
        state, key = tmp_path / "state", new_key()
        authority = from_text((state / "authority.key").read_bytes())[0].signs
        pem = authority.sign(Request.read(request(key)), Identity("d", "peer"), time.time() + late, 3600)
        write_secret(str(tmp_path / "d"), pem + key)
        with pytest.raises(ConnectionError, match=says):
            await master.ask(hello("d"), Papers(str(state / "authority.pem"), str(tmp_path / "d")))


async def test_a_daemon_does_not_pass_for_the_master(tmp_path: Path) -> None:
    async with secure(tmp_path) as master:
        wallet = await master.join("d")
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        context = wallet.papers.to_listen()
        serving = [trio.SSLListener(one, context) for one in listeners]
        heard: list[bytes] = []
        told = trio.Event()

        async def pose(stream: trio.SSLStream[trio.SocketStream]) -> None:
            with contextlib.suppress(trio.BrokenResourceError):
                heard.append(bytes(await stream.receive_some()))
            await trio.aclose_forcefully(stream)

        def lost(reason: str, *, live: bool) -> None:
            assert "its certificate is not a master's: somebody else answers there" in reason
            assert not live
            told.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.serve_listeners, pose, serving)
            master.address = f"127.0.0.1:{listeners[0].socket.getsockname()[1]}"
            with pytest.raises(ConnectionError, match="its certificate is not a master's: somebody else answers"):
                await master.ask(hello("d"), wallet.papers)
            with socket.create_server(("127.0.0.1", 0)) as lanes, trio.fail_after(20):  # and a daemon looks, too
                config = PeerConfig(master=master.address)
                no = lambda *_: None  # noqa: E731
                nursery.start_soon(Control(config, "d", 1, [], lanes, Hot(), no, no, lost, no, m.Heartbeat, wallet).run)
                await told.wait()
            nursery.cancel_scope.cancel()
        assert not any(heard)  # no Hello


async def test_a_master_in_clear_and_a_daemon_over_tls_say_what_is_wrong(tmp_path: Path) -> None:
    admin = tmp_path / "state" / "admin.pem"  # of a master that was killed: commands would ask this one as its admin
    admin.parent.mkdir()
    admin.touch()
    async with secure(tmp_path, secure=False) as master:
        assert not admin.exists()
        with pytest.raises(ConnectionError, match="it does not speak TLS: either it was started without certificates"):
            await master.ask(m.AskAuthority(PROTOCOL_VERSION), None, believe_anybody=True)
        answer = await master.ask(m.AskAuthority(PROTOCOL_VERSION), None)
        assert (
            "asks for a certificate of a master without TLS; start the master with --secure (the default"
            in answer.reason
        )


async def test_certificates_of_ones_own(tmp_path: Path) -> None:
    def issue(ca: trustme.CA, name: str, label: str, **more: str) -> Papers:
        made = ca.issue_cert(name, **more)
        write_secret(str(tmp_path / label), made.private_key_and_cert_chain_pem.bytes())
        write_secret(str(tmp_path / "ca"), ca.cert_pem.bytes())
        return Papers(str(tmp_path / "ca"), str(tmp_path / label), by_host=True)

    ca = trustme.CA()
    issue(ca, "127.0.0.1", "master")
    daemon = issue(ca, "node-1", "daemon")
    assert Wallet("", None, daemon).name == "node-1"
    own = {"secure": False, "ca": str(tmp_path / "ca"), "cert": str(tmp_path / "master")}
    async with secure(tmp_path, **own) as master:
        assert isinstance(await master.ask(hello("node-1"), daemon), m.Welcome)
        assert "expected the name node-1, by its" in (await master.ask(hello("node-2"), daemon)).reason
        answer = await master.ask(m.AskAuthority(PROTOCOL_VERSION), daemon)
        assert "takes certificates of its operator's own authority only" in answer.refused
        master.address = master.address.replace("127.0.0.1", "localhost")
        with pytest.raises(ConnectionError, match=r"Hostname mismatch|certificate is not valid for"):
            await master.ask(hello("node-1"), daemon)


def gate(folder: Path, clock: list[float], **more: Any) -> Gate:
    return Gate(str(folder / "state"), Journal(""), clock=lambda: clock[0], **more)


async def test_a_certificate_is_renewed_and_the_next_one_says_the_same(tmp_path: Path) -> None:
    clock = [1_700_000_000.0]
    found = gate(tmp_path, clock)
    token = parse(found.first_token().removesuffix("@") + "@h:1")
    key = request(new_key())
    first = found.answer(m.Enroll(PROTOCOL_VERSION, token.id, token.secret, "d", key), None)
    assert isinstance(first, m.Enrolled)
    owns = owner(first.certificate)
    assert owns == Identity("d", "peer", (), token.id)
    who = found.renewed(owns)
    clock[0] += 57_600
    again = found.answer(m.Renew(key), who)
    assert isinstance(again, m.Enrolled)
    assert owner(again.certificate) == owns
    clock[0] += 9.9
    too_often = found.answer(m.Renew(key), who)
    assert isinstance(too_often, m.Enrolled)
    assert "renews its certificate too often; got again within 9.9 s" in too_often.refused
    clock[0] -= 9.9
    clock[0] += 57_600  # the token has expired by now: the certificate is what counts
    assert isinstance(found.answer(m.Renew(key), who), m.Enrolled)
    refused = found.answer(m.Enroll(PROTOCOL_VERSION, token.id, token.secret, "d", key), None)
    assert isinstance(refused, m.Enrolled)
    assert not refused.certificate
    assert (
        f"token {token.id}: has expired; expected a token that is good; got one that ended 28800 s ago"
        in refused.refused
    )
    assert "`wancoll token create` makes a new one, on the master's machine" in refused.refused


async def test_another_authority_knows_no_tokens_and_names_of_before(tmp_path: Path) -> None:
    """One whose journal is lost takes certificates of before, and none of the tokens."""
    async with secure(tmp_path) as master:
        wallet, former = await master.join("d"), master.token
        assert former is not None
    (tmp_path / "journal").unlink()
    async with secure(tmp_path) as master:
        assert isinstance(await master.ask(hello("d"), wallet.papers), m.Welcome)
        await master.join("d")
        tokens = {one.id: one for one in (await master.admin(m.ListTokens(PROTOCOL_VERSION))).tokens}
        assert master.token is not None
        assert tokens.keys() == {former.id, master.token.id}
        assert 0 < tokens[former.id].expires <= time.time()  # nobody comes with it, and it can be revoked
        await master.admin(m.RevokeToken(PROTOCOL_VERSION, former.id))
    for file in (tmp_path / "state").iterdir():
        file.unlink()
    async with secure(tmp_path) as master:
        assert master.token is not None  # it is made, and printed
        [known] = (await master.admin(m.ListTokens(PROTOCOL_VERSION))).tokens
        assert known.id == master.token.id
        wallet = Wallet(str(tmp_path / "elsewhere"), master.token)
        await trio.to_thread.run_sync(wallet.enroll, master.address, "d", 20.0)  # the name is free


async def test_what_came_of_tokens_is_known_to_the_next_master(tmp_path: Path) -> None:
    def start() -> tuple[Journal, Gate]:
        journal = Journal(str(tmp_path / "journal"))
        return journal, Gate(str(tmp_path / "state"), journal)

    def come(found: Gate, token: Token, name: str, key: bytes) -> str:
        answer = found.answer(m.Enroll(PROTOCOL_VERSION, token.id, token.secret, name, request(key)), None)
        assert isinstance(answer, m.Enrolled)
        return answer.refused

    def make(found: Gate, uses: int) -> Token:
        found.address = "h:1"
        asked = m.MakeToken(PROTOCOL_VERSION, "peer", "", [], uses, 60.0)
        return parse(found.answer(asked, found.renewed(Identity("admin", "admin"))).made)  # type: ignore[union-attr]

    journal, found = start()
    once, revoked, free, keys = make(found, 1), make(found, 0), make(found, 0), [new_key() for _ in range(2)]
    assert not come(found, once, "a", keys[0])
    found.answer(m.RevokeToken(PROTOCOL_VERSION, revoked.id), found.renewed(Identity("admin", "admin")))
    journal.close()
    journal, found = start()
    assert "is used up" in come(found, once, "b", keys[1])
    assert "is revoked" in come(found, revoked, "b", keys[1])
    assert "which is another daemon's" in come(found, free, "a", keys[1])
    journal.close()


def test_the_masters_own_certificate_is_made_anew_in_time(tmp_path: Path) -> None:
    clock = [time.time()]
    found = gate(tmp_path, clock)
    before, own = found.context(), (tmp_path / "state" / "master.pem").read_bytes()
    clock[0] += 43_000
    assert found.context() is before
    clock[0] += 300
    assert isinstance(found.context(), ssl.SSLContext)
    assert found.context() is not before
    assert (tmp_path / "state" / "master.pem").read_bytes() != own


def test_where_the_folder_cannot_be_written_the_masters_certificate_is_made_anew_all_the_same(tmp_path: Path) -> None:
    clock = [time.time()]
    found = gate(tmp_path, clock)
    before, away = found.context(), tmp_path / "away"
    (tmp_path / "state").rename(away)
    clock[0] += 43_201
    with structlog.testing.capture_logs() as lines:
        assert len({id(found.context()) for _ in range(100)}) == 1
    assert found.context() is not before
    said = "certificates for commands on this machine cannot be written; it is tried again"
    assert [line["event"] for line in lines] == [said]
    away.rename(tmp_path / "state")
    admin = (tmp_path / "state" / "admin.pem").read_bytes()
    clock[0] += 31
    found.context()
    assert (tmp_path / "state" / "admin.pem").read_bytes() != admin


async def test_a_token_for_one_group_reads_and_changes_nothing_of_another(tmp_path: Path) -> None:
    """Over TLS, as a daemon and as an observer; the other group's member is there meanwhile."""
    async with secure(tmp_path) as master, contextlib.AsyncExitStack() as connections:
        theirs = await master.join("b", await master.make(groups=["theirs"]))
        mine = await master.join("a", await master.make(groups=["mine"]))
        eyes = await master.join("eyes", await master.make(role="observer", groups=["mine"]))
        daemon = await connections.enter_async_context(master.dial(theirs.papers))
        await daemon.say(hello("b"), m.Join("theirs", "m", 2, 1))
        await daemon.expect(m.Joined)
        for papers in (mine.papers, eyes.papers):
            answer = await master.ask(m.StatusRequest(PROTOCOL_VERSION), papers)
            assert isinstance(answer, m.Status)
            seen = answer.groups, answer.daemons, answer.links, answer.resources
            assert seen == ([], [], [], {})
            assert all(event.group == "mine" for event in answer.events)
        evict = m.Evict(PROTOCOL_VERSION, "theirs", "m", False, "")
        for papers in (mine.papers, eyes.papers):
            assert not (await master.ask(evict, papers)).done
        answer = await master.ask(m.Arm("t", "before_commit", "kill"), mine.papers)
        assert "may not say Arm" in answer.reason
        answer = await master.ask(hello("eyes"), eyes.papers)
        assert "may not say Hello; expected the role peer" in answer.reason
        elsewhere = msgspec.structs.replace(hello("a"), addresses=["192.0.2.1:22"])
        assert "not its own" in (await master.ask(elsewhere, mine.papers)).reason
        known = await master.ask(m.StatusRequest(PROTOCOL_VERSION), master.papers)
        [group] = known.groups
        assert [one.name for one in group.members] == ["m"]
        assert known.resources["messages_refused"] == 4


async def test_commands_that_come_together_with_a_token_of_one_use_are_one(tmp_path: Path) -> None:
    """They share a folder: one that took the key of another's certificate away would be nobody."""
    async with secure(tmp_path) as master:
        token = await master.make(role="observer", uses=1)
        asking, names = Asking(join=str(token), timeout=20), []

        async def ask() -> None:
            papers = await trio.to_thread.run_sync(asking.papers, master.address)
            assert papers is not None
            answer = await master.ask(m.StatusRequest(PROTOCOL_VERSION), papers)
            assert isinstance(answer, m.Status), answer
            names.append(await trio.Path(papers.certificate).read_bytes())

        async with trio.open_nursery() as nursery:
            for _ in range(6):
                nursery.start_soon(ask)
        assert len(names) == 6
        assert len(set(names)) == 1


async def test_where_another_master_answers_at_one_of_the_addresses_the_next_one_is_asked(tmp_path: Path) -> None:
    question = m.Evict(PROTOCOL_VERSION, "g", "nobody", False, "")
    for one in ("a", "b"):
        (tmp_path / one).mkdir()
    async with secure(tmp_path / "a") as other, secure(tmp_path / "b") as master:
        asking = Asking(join=str(await master.make(role="admin")), timeout=20)

        async def ask_at(*addresses: str) -> m.EvictAnswer:
            return await trio.to_thread.run_sync(ask_leader, question, list(addresses), asking)

        with pytest.raises(WrongMaster, match="is not the master that the token is of"):
            await ask_at(other.address)
        answer = await ask_at(other.address, master.address)
        assert (answer.done, answer.what) == (False, "has no such group"), answer


async def test_a_revocation_that_cannot_be_written_counts_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is written with what is written next; a new token is not given out at all."""
    journal = Journal(str(tmp_path / "journal"))
    found = Gate(str(tmp_path / "state"), journal)
    found.address = "h:1"
    admin = found.renewed(Identity("admin", "admin"))

    def ask(question: Any) -> m.Tokens:
        answer = found.answer(question, admin)
        found.settle()
        assert isinstance(answer, m.Tokens)
        return answer

    make = m.MakeToken(PROTOCOL_VERSION, "peer", "", [], 0, 60.0)
    token, other = parse(ask(make).made), parse(ask(make).made)

    def full(*_: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    with monkeypatch.context() as disk:
        disk.setattr(journal, "keep_trust", full)
        said = ask(m.RevokeToken(PROTOCOL_VERSION, token.id)).refused
        assert said.startswith(f"token {token.id}: is revoked only until this master ends: that cannot be written")
        assert "got database or disk is full" in said
        assert [one.id for one in ask(m.ListTokens(PROTOCOL_VERSION)).tokens if one.revoked] == [token.id]
        assert "a new token cannot be written; got database or disk is full" in ask(make).refused
        assert {one.id for one in ask(m.ListTokens(PROTOCOL_VERSION)).tokens} == {token.id, other.id}
    assert not ask(m.RevokeToken(PROTOCOL_VERSION, other.id)).refused
    journal.close()
    journal = Journal(str(tmp_path / "journal"))
    found = Gate(str(tmp_path / "state"), journal)
    assert {one.id for one in ask(m.ListTokens(PROTOCOL_VERSION)).tokens if one.revoked} == {token.id, other.id}
    journal.close()
