"""A daemon and its certificate: neither files that cannot be used for a moment nor anybody without a secret end it."""

from __future__ import annotations

import base64
import contextlib
import errno
import os
import socket
import ssl
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import structlog
import trio

from tests.master.test_gate import secure
from tests.master.test_leadership import Later
from tests.master.test_shared_trust import in_hand, join, that_writes_later
from tests.peer.test_daemon import until
from wancoll.limits import PROTOCOL_VERSION
from wancoll.local import join_address
from wancoll.net import enroll
from wancoll.net.enroll import Wallet
from wancoll.net.hot import Hot
from wancoll.peer import control as of_control
from wancoll.peer.config import PeerConfig
from wancoll.peer.control import Control
from wancoll.peer.core.liveness import masters
from wancoll.trust import registry
from wancoll.trust.authority import Authority, Request, new_key, request
from wancoll.trust.identity import Identity
from wancoll.trust.papers import Papers, write_secret
from wancoll.trust.token import Token
from wancoll.wire import messages as m
from wancoll.wire.framing import encode
from wancoll_master import gate
from wancoll_master.server import Server

SECRET = "s" * 43


class Daemon:
    """A control connection, and what it says."""

    def __init__(self, addresses: list[str], wallet: Wallet) -> None:
        self.beats, self.lost = 0, list[str]()
        self._lanes = socket.create_server(("127.0.0.1", 0))
        self.control = Control(
            PeerConfig(master=",".join(addresses)), "d", 1, [], self._lanes, Hot(), self._no, self._no,
            self._on_lost, self._no, self._beat, wallet,
        )  # fmt: skip

    def _no(self, *_: object) -> None: ...

    def _on_lost(self, reason: str, *, live: bool) -> None:
        self.lost.append(f"live: {reason}" if live else reason)

    def _beat(self, number: int) -> m.Heartbeat:
        self.beats += 1
        return m.Heartbeat(number)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Daemon]:
        with self._lanes, trio.fail_after(50):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.control.run)
                yield self
                nursery.cancel_scope.cancel()


# ---- files --------------------------------------------------------------------------------------------


def no_descriptor(_: str) -> bytes:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        ("folder", "is a folder in which others may replace the keys"),
        ("certificate.pem", "Is a directory"),
        ("certificate.key", "Is a directory"),
        ("descriptors", "Too many open files"),
    ],
)
async def test_files_that_cannot_be_used_now_end_no_daemon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str, says: str
) -> None:
    monkeypatch.setattr(enroll, "_RENEW_AFTER", 0)  # it is due at any time
    monkeypatch.setattr(of_control, "_RENEW_AGAIN", 0.02)
    monkeypatch.setattr(gate, "_LEAST_RENEWED", 0.0)

    def renewals() -> int:
        return sum(one["event"] == "the certificate is renewed" for one in lines)

    with structlog.testing.capture_logs() as lines:
        async with secure(tmp_path) as master:
            wallet = await master.join("d")
            folder, aside = Path(wallet.folder), tmp_path / "aside"
            async with Daemon([master.address], wallet).running() as daemon:
                await until(renewals)
                if broken == "descriptors":
                    monkeypatch.setattr(enroll, "_read", no_descriptor)
                elif broken == "folder":
                    os.chmod(folder, 0o770)
                else:
                    (folder / broken).rename(aside)
                    (folder / broken).mkdir()
                said = {"event": "the certificate is not renewed; that is tried again", "log_level": "warning"}
                await until(lambda: any(one.items() >= said.items() and says in one["reason"] for one in lines))
                beats = daemon.beats
                await until(lambda: daemon.beats > beats + 2)
                if broken == "descriptors":
                    monkeypatch.undo()
                elif broken == "folder":
                    os.chmod(folder, 0o700)
                else:
                    (folder / broken).rmdir()
                    aside.rename(folder / broken)
                before = renewals()
                if broken != "descriptors":  # of which undo() leaves none due
                    await until(lambda: renewals() > before)
                assert daemon.control.connected
                assert daemon.lost == []
            assert wallet.good("d", time.time())


async def test_a_heartbeat_reads_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    really = enroll._read

    def counted(path: str) -> bytes:
        read.append(path)
        return really(path)

    async with secure(tmp_path) as master:
        wallet = await master.join("d")
        async with Daemon([master.address], wallet).running() as daemon:
            await until(lambda: daemon.beats > 2)
            monkeypatch.setattr(enroll, "_read", counted)
            await until(lambda: daemon.beats > 20)
            assert daemon.control.connected
    assert read == []


async def test_what_cannot_be_read_now_is_no_reason_for_another_certificate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a token that is over its master would refuse it, and the daemon end."""
    wallet = papers(tmp_path, Authority.make(time.time()))
    assert wallet.good("d", time.time())

    def none_left(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(ssl.SSLContext, "load_cert_chain", none_left)
    daemon = Daemon(["127.0.0.1:9"], wallet)
    async with daemon.running():
        await until(lambda: len(daemon.lost) > 2)
    assert all("127.0.0.1:9: no certificate: " in one and "Too many open files" in one for one in daemon.lost)


@pytest.mark.parametrize("joins", [True, False])
async def test_where_nobody_listens_it_says_what_to_look_at(tmp_path: Path, *, joins: bool) -> None:
    """A newcomer, which asks for a certificate first, and a daemon that has one."""
    made = Authority.make(time.time())
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # nobody listens, and nobody else gets it
        address = join_address(*closed.getsockname())
        wallet = Wallet(str(tmp_path / "new"), token_of(made, address)) if joins else papers(tmp_path, made)
        os.makedirs(wallet.folder, exist_ok=True)
        daemon = Daemon([address], wallet)
        async with daemon.running():
            await until(lambda: daemon.lost)
    assert daemon.lost[0].startswith(f"{address}: {'no certificate: ' if joins else ''}[Errno 111] ")
    assert daemon.lost[0].endswith("Connection refused; is `wancoll master` running there, and is the port right?")


@pytest.mark.parametrize("file", ["certificate.pem", "certificate.key", "authority.pem"])
def test_a_file_that_is_damaged_anywhere_is_as_good_as_none(tmp_path: Path, file: str) -> None:
    wallet, now = papers(tmp_path, Authority.make(time.time())), time.time()
    path = Path(wallet.folder) / file
    der = bytearray(base64.b64decode(b"".join(path.read_bytes().splitlines()[1:-1])))
    what = b"PRIVATE KEY" if file.endswith("key") else b"CERTIFICATE"
    found = []
    for at in range(0, len(der), 4):  # all of them would take long
        bad = bytes([*der[:at], der[at] ^ 7, *der[at + 1 :]])
        path.write_bytes(b"-----BEGIN %b-----\n%b-----END %b-----\n" % (what, base64.encodebytes(bad), what))
        found.append(wallet.good("d", now))
        assert wallet.renew_at() >= 0
        wallet.came_before()
    assert found.count(False) > len(der) / 10


# ---- a master whose store is slow ---------------------------------------------------------------------


async def writes(server: Server, store: Later) -> None:
    """Task: all at once."""
    while True:
        if store.written < store.asked:
            store.written = store.asked
            server.release()
        await trio.sleep(0.005)


@pytest.mark.parametrize("came", [True, False])
async def test_while_a_change_of_trust_is_written_a_daemon_waits_and_is_heard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, came: bool
) -> None:
    monkeypatch.setattr(enroll, "_RENEW_AFTER", 0)  # it is due at any time
    monkeypatch.setattr(of_control, "_RENEW_AGAIN", 0.02)
    monkeypatch.setattr(gate, "_LEAST_RENEWED", 0.0)
    monkeypatch.setattr(masters, "LONGEST_PAUSE", 0.05)
    again = "this master: writes another change of its tokens or authority; "
    with structlog.testing.capture_logs() as lines:
        async with that_writes_later(tmp_path) as (server, _, store, master, token), trio.open_nursery() as nursery:
            write = trio.CancelScope()

            async def begin_to_write() -> None:
                with write:
                    await writes(server, store)

            nursery.start_soon(begin_to_write)
            other = await master.make()
            wallet = await join(master, "d", token) if came else Wallet(str(tmp_path / "d"), token)
            daemon = Daemon([master.address], wallet)
            if came:
                await nursery.start(is_running, daemon)
                await until(lambda: any(one["event"] == "the certificate is renewed" for one in lines))
            write.cancel()
            asked = store.asked
            admin = master.papers
            assert admin is not None
            async with master.dial(admin) as operator:
                await operator.say(m.RevokeToken(PROTOCOL_VERSION, other.id))
                await in_hand(store, asked)
                if came:
                    since, beats = len(lines), daemon.beats
                    await until(lambda: any(again in one.get("reason", "") for one in lines[since:]))
                    await until(lambda: daemon.beats > beats + 4)
                    assert daemon.control.connected
                else:
                    await nursery.start(is_running, daemon)
                    await until(lambda: len(daemon.lost) > 2)
                    assert all(again in one for one in daemon.lost)
                    assert daemon.control.refused == ""
                since = len(lines)
                nursery.start_soon(writes, server, store)
                assert [one.revoked for one in (await operator.expect(m.Tokens)).tokens] == [False, True]
            await until(lambda: any(one["event"] == "the certificate is renewed" for one in lines[since:]))
            assert not came or daemon.lost == []
            nursery.cancel_scope.cancel()


async def is_running(daemon: Daemon, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
    async with daemon.running():
        task_status.started()
        await trio.sleep_forever()


async def test_where_all_names_are_taken_a_newcomer_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "MOST_NAMES", 1)
    monkeypatch.setattr(masters, "LONGEST_PAUSE", 0.05)
    async with secure(tmp_path) as master:
        await master.join("a")
        wallet = Wallet(str(tmp_path / "d"), master.token)
        async with Daemon([master.address], wallet).running() as daemon:
            await until(lambda: len(daemon.lost) > 2)
            assert all("expected at most 1 names with certificates" in one for one in daemon.lost)
            assert daemon.control.refused == ""
            monkeypatch.setattr(registry, "MOST_NAMES", 2)
            await until(lambda: daemon.control.connected)


# ---- whoever answers ----------------------------------------------------------------------------------


def papers(folder: Path, authority: Authority, *, until: float = 3600.0) -> Wallet:
    """A daemon's, with a certificate that ends in *until* seconds."""
    wallet, key, now = Wallet(str(folder / "d"), token_of(authority, "h:1")), new_key(), time.time()
    (folder / "d").mkdir(mode=0o700)
    who = Identity("d", "peer", (), "k3v9")
    certificate = authority.sign(Request.read(request(key)), who, now + until - 3600, 3600)
    write_secret(wallet.papers.key, key)
    wallet.keep(certificate, authority.certificate)
    return wallet


def token_of(authority: Authority, address: str) -> Token:
    return Token(authority.fingerprint, "k3v9", SECRET, address)


def of_no_version(certificate: bytes) -> bytes:
    """Of version 8, which there is not."""
    der = ssl.PEM_cert_to_DER_cert(certificate.decode())
    at = der.index(bytes.fromhex("a003020102")) + 4
    return ssl.DER_cert_to_PEM_cert(der[:at] + b"\7" + der[at + 1 :]).encode()


class Rogue:
    """Answers at an address, and has no secret of anybody's: one answer after the other, and the first again.

    Args:
        folder: for its own authority's files.
        answers: that it gives over TLS; bytes: at once, without TLS.
    """

    def __init__(self, folder: Path, answers: list[m.FromMaster | bytes]) -> None:
        authority, key = Authority.make(time.time()), new_key()
        mine = authority.sign_master(Request.read(request(key)), time.time(), 3600)
        folder.mkdir()
        (folder / "ca").write_bytes(authority.certificate)
        (folder / "own").write_bytes(mine + key)
        self.authority = authority
        self._tls = Papers(str(folder / "ca"), str(folder / "own")).to_listen()
        self.answers, self.given = answers, list[m.FromMaster | bytes]()
        self.address = ""

    async def serve(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        self.address = join_address(*listeners[0].socket.getsockname()[:2])
        task_status.started()
        await trio.serve_listeners(self._accept, listeners)

    async def _accept(self, stream: trio.SocketStream) -> None:
        answer = self.answers[len(self.given) % len(self.answers)]
        with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            if isinstance(answer, bytes):
                await stream.receive_some()
                self.given.append(answer)
                await stream.send_all(answer)
            else:
                tls = trio.SSLStream(stream, self._tls, server_side=True, https_compatible=True)
                await tls.receive_some()  # it fails where somebody looks at the certificate
                self.given.append(answer)
                await tls.send_all(encode(answer))
                await tls.aclose()
        await trio.aclose_forcefully(stream)


@contextlib.asynccontextmanager
async def rogue(folder: Path, *answers: m.FromMaster | bytes) -> AsyncIterator[Rogue]:
    found = Rogue(folder, [*answers])
    found.answers = found.answers or [m.AuthorityIs(found.authority.certificate)]
    async with trio.open_nursery() as nursery:
        await nursery.start(found.serve)
        yield found
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("has", ["a certificate", "one that is over", "nothing"])
async def test_nobody_without_a_secret_ends_a_daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has: str) -> None:
    monkeypatch.setattr(masters, "LONGEST_PAUSE", 0.01)
    real, other = Authority.make(time.time()), Authority.make(time.time()).certificate
    if has == "nothing":
        wallet = Wallet(str(tmp_path / "d"), token_of(real, "h:1"))
    else:
        wallet = papers(tmp_path, real, until=3600 if has == "a certificate" else -60)
    answers: list[m.FromMaster | bytes] = [
        m.AuthorityIs(b"nonsense"),
        m.AuthorityIs(b"-----BEGIN CERTIFICATE-----\nAAAAA\n-----END CERTIFICATE-----\n"),
        m.AuthorityIs(real.certificate),  # which is public; it has no certificate of it
        m.Enrolled(b"", "the token is revoked"),
        m.Bye("go away", True),
        m.StandsBy("127.0.0.1:9", 7),
        m.Evicted("g", 1, "for the test", 0),
        encode(m.Bye("go away", True)),
        encode(m.Enrolled(b"", "no")),
        b"\x15\x03\x03\0\2\2\x28",  # a fatal alert, handshake_failure
        b"\x15\x03\x03\0\2\2\x2d",  # certificate_expired
        b"\x15\x03\x03\0\2\2\x30",  # unknown_ca
        b"HTTP/1.1 200 OK\r\n\r\n",
    ]
    if has != "nothing":
        answers += [m.AuthorityIs(other), m.AuthorityIs(of_no_version(other))]
    with structlog.testing.capture_logs() as lines:
        async with rogue(tmp_path / "r", *answers) as found, Daemon([found.address], wallet).running() as daemon:
            await until(lambda: len(found.given) > len(answers))
            tries = len(daemon.lost)
            await until(lambda: len(daemon.lost) > tries)
            assert daemon.control.refused == ""
    assert sum(one["event"].startswith("another master answers") for one in lines) == (has != "nothing")
    assert not any(one.startswith("live") for one in daemon.lost)


async def test_a_newcomer_whose_token_fits_none_of_its_masters_ends_and_says_which(tmp_path: Path) -> None:
    real = Authority.make(time.time())
    wallet = Wallet(str(tmp_path / "d"), token_of(real, "h:1"))
    async with rogue(tmp_path / "r1") as first, rogue(tmp_path / "r2") as second:
        for rogues in ([first], [first, second]):
            addresses = [one.address for one in rogues]
            async with Daemon(addresses, wallet).running() as daemon:
                await until(lambda: daemon.control.refused)
            assert len(daemon.lost) == len(rogues), "at the first answer of the last one"
            for one in rogues:
                says = f"master {one.address}: is not the master that the token is of; expected an authority with "
                assert f"{says}SHA-256 {real.fingerprint}; got {one.authority.fingerprint}; see that the address" in (
                    daemon.control.refused
                )


async def test_who_answers_otherwise_since_is_no_other_master(tmp_path: Path) -> None:
    """It was one that played a master; now nobody answers there, and another one plays at the second address."""
    wallet = Wallet(str(tmp_path / "d"), token_of(Authority.make(time.time()), "h:1"))
    async with rogue(tmp_path / "r1") as first, rogue(tmp_path / "r2") as second:
        first.answers += [m.Bye("go away")]
        second.answers = [m.Bye("go away"), *second.answers]
        async with Daemon([first.address, second.address], wallet).running() as daemon:
            await until(lambda: len(daemon.lost) > 3)
            says = ["is not the master that the token is of", "go away", "go away", "is not the master"]
            assert [say in one for say, one in zip(says, daemon.lost, strict=False)] == [True] * 4
            assert daemon.control.refused == ""


async def test_another_master_in_its_list_is_passed_over_and_named(tmp_path: Path) -> None:
    with structlog.testing.capture_logs() as lines:
        async with secure(tmp_path) as master, rogue(tmp_path / "r") as other:
            wallet = Wallet(str(tmp_path / "d"), master.token)
            gone = "127.0.0.1:9"
            async with Daemon([other.address, gone, master.address], wallet).running() as daemon:
                await until(lambda: daemon.control.connected)
                assert daemon.control.refused == ""
    said = [one["reason"] for one in lines if one["event"].startswith("another master answers")]
    assert len(said) == 1
    assert said[0].startswith(f"master {other.address}: is not the master that the token is of")


async def test_who_plays_a_master_makes_no_good_certificate_depend_on_a_token_that_is_over(tmp_path: Path) -> None:
    async with secure(tmp_path) as master:
        good = (await master.join("d")).token
        assert good is not None
        over = Token(good.authority, good.id, SECRET, good.address)
        wallet = Wallet(str(tmp_path / "of-d"), over)
        assert wallet.good("d", time.time())
        daemon = Daemon([master.address], wallet)
        daemon.control._doubted.add(master.address)  # another one has answered there a moment ago
        async with daemon.running():
            await until(lambda: daemon.control.connected)
        assert len(daemon.lost) == 1
        assert "does not take the token" in daemon.lost[0]
        assert daemon.control.refused == ""
