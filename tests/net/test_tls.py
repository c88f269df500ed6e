"""A stream over TLS: sends that never wait, looks without a round of trio, and whom it does not talk to."""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import trio
from cryptography.x509.oid import ExtendedKeyUsageOID

from wancoll.net.hot import glance
from wancoll.net.stream import Stream
from wancoll.net.tls import Tls, TlsFailed
from wancoll.trust import authority
from wancoll.trust.authority import Authority, Request, new_key, request
from wancoll.trust.identity import Identity
from wancoll.trust.papers import Papers, identity_of, unverified, write_secret
from wancoll.wire import messages as m
from wancoll.wire.framing import Decoder, encode


@pytest.fixture(scope="module")
def papers(tmp_path_factory: pytest.TempPathFactory) -> tuple[Papers, Papers]:
    """Of a master and of a daemon called "d"."""
    folder, now, found = tmp_path_factory.mktemp("papers"), time.time(), []
    authority = Authority.make(now)
    write_secret(str(folder / "ca"), authority.certificate)
    for name in ("m", "d"):
        key = new_key()
        wanted = Request.read(request(key))
        who = Identity(name, "peer")
        pem = authority.sign(wanted, who, now, 3600) if name == "d" else authority.sign_master(wanted, now, 3600)
        write_secret(str(folder / name), pem + key)
        found.append(Papers(str(folder / "ca"), str(folder / name)))
    return found[0], found[1]


def streams(master: ssl.SSLContext, daemon: ssl.SSLContext, most: int = 8 << 20) -> tuple[Stream, Stream]:
    near, far = socket.socketpair()
    listens, dials = Tls(master, listens=True), Tls(daemon, listens=False, host="h")
    return Stream(near, "d", most, tls=listens), Stream(far, "m", most, tls=dials)


async def both(*todo: Callable[[], Awaitable[object]]) -> list[object]:
    """What came of each, or what it failed with."""
    found: list[object] = [None] * len(todo)

    async def one(i: int) -> None:
        try:
            found[i] = await todo[i]()
        except TlsFailed as failed:
            found[i] = str(failed)

    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            for i in range(len(todo)):
                nursery.start_soon(one, i)
    return found


async def test_what_is_sent_before_anybody_reads_arrives_whole(papers: tuple[Papers, Papers]) -> None:
    master, daemon = streams(papers[0].to_listen(), papers[1].to_dial())
    assert await both(master.shake_hands, daemon.shake_hands) == [None, None]
    assert master.tls is not None
    assert identity_of(master.tls.certificate()) == Identity("d", "peer")
    pieces = [bytes([i]) * 100_000 for i in range(40)]
    for piece in pieces:
        master.send(piece)  # returns, though nobody reads
    assert master.queued > 0
    received = bytearray()

    async def read() -> None:
        while data := await daemon.receive():
            received.extend(data)

    await both(master.close_delivered, read)
    assert bytes(received) == b"".join(pieces)
    assert daemon.ended == "the connection was closed by the other end"
    daemon.close()


async def test_who_does_not_read_is_given_up(papers: tuple[Papers, Papers]) -> None:
    master, daemon = streams(papers[0].to_listen(), papers[1].to_dial(), 50_000)
    await both(master.shake_hands, daemon.shake_hands)
    while not master.overflow:
        assert master.queued <= 50_000
        master.send(bytes(20_000))
    assert master.ended == "it does not read what it is sent"
    master.close()
    daemon.close()


async def test_a_look_opens_what_is_there_and_leaves_nothing_behind(papers: tuple[Papers, Papers]) -> None:
    """epoll says nothing of what TLS would hold back: so it must not."""
    master, daemon = streams(papers[0].to_listen(), papers[1].to_dial())
    await both(master.shake_hands, daemon.shake_hands)
    decoder: Decoder[m.FromMaster] = Decoder(m.FromMaster, 1 << 20)
    assert glance(daemon, decoder, m.Pong) is None
    master.send(encode(m.Pong(7, 0)))
    assert glance(daemon, decoder, m.Pong) == m.Pong(7, 0)
    master.send(encode(m.Pong(8, 0)))
    master.send(encode(m.Bye("x" * 3000)))  # a record of its own
    assert glance(daemon, decoder, m.Pong) is None  # two: for who receives
    assert decoder.feed(await daemon.receive()) == [m.Pong(8, 0), m.Bye("x" * 3000)]
    assert daemon.look() == b""
    master.close()
    daemon.close()


@pytest.mark.parametrize("looks", [False, True])
async def test_a_changed_byte_ends_the_connection(papers: tuple[Papers, Papers], looks: bool) -> None:
    master, daemon = streams(papers[0].to_listen(), papers[1].to_dial())
    await both(master.shake_hands, daemon.shake_hands)
    assert master.tls is not None
    sealed = bytearray(master.tls.seal(encode(m.Pong(7, 0))))
    sealed[-1] ^= 1
    master.socket.send(sealed)
    if looks:
        assert daemon.look() == b""
    assert await daemon.receive() == b""
    assert "decryption failed or bad record mac" in daemon.ended.lower().replace("_", " ")
    master.close()
    daemon.close()


async def test_a_record_that_is_sent_again_ends_the_connection(papers: tuple[Papers, Papers]) -> None:
    master, daemon = streams(papers[0].to_listen(), papers[1].to_dial())
    await both(master.shake_hands, daemon.shake_hands)
    assert master.tls is not None
    sealed = master.tls.seal(b"once")
    master.socket.send(sealed)
    assert await daemon.receive() == b"once"
    master.socket.send(sealed)
    assert await daemon.receive() == b""
    assert daemon.ended
    master.close()
    daemon.close()


@pytest.mark.parametrize("said", [b"\0\0\0\x10hello in clear..", b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\0\x05hello"])
async def test_who_does_not_speak_tls_is_told_apart(papers: tuple[Papers, Papers], said: bytes) -> None:
    near, far = socket.socketpair()
    master = Stream(near, "d", 1 << 20, tls=Tls(papers[0].to_listen(), listens=True))
    far.send(said)
    (why,) = await both(master.shake_hands)
    assert isinstance(why, str)
    assert master.tls is not None
    assert master.tls.plain == (said[:1] == b"\0")
    master.send(b"secret")  # nothing leaves before the handshake
    near.close()
    assert b"secret" not in far.recv(1000)
    far.close()


async def test_a_handshake_that_is_cut_ends(papers: tuple[Papers, Papers]) -> None:
    near, far = socket.socketpair()
    master = Stream(near, "d", 1 << 20, tls=Tls(papers[0].to_listen(), listens=True))
    hello = Tls(papers[1].to_dial(), listens=False, host="h")
    hello.shake(b"")
    far.send(hello.outgoing()[:50])
    far.shutdown(socket.SHUT_WR)
    (why,) = await both(master.shake_hands)
    assert why == "the connection was closed by the other end, in the middle of TLS's handshake"
    master.close()
    far.close()


async def test_an_older_tls_is_refused(papers: tuple[Papers, Papers]) -> None:
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    old.check_hostname, old.verify_mode, old.maximum_version = False, ssl.CERT_NONE, ssl.TLSVersion.TLSv1_2
    master, daemon = streams(papers[0].to_listen(), old)
    why, _ = await both(master.shake_hands, daemon.shake_hands)
    assert "it speaks an older TLS than 1.3" in str(why)
    master.close()
    daemon.close()


async def test_a_wrong_certificate_is_told_to_both_ends(papers: tuple[Papers, Papers], tmp_path: Path) -> None:
    """In TLS 1.3 who dialled learns of it after its own handshake."""
    other, now, key = Authority.make(time.time()), time.time(), new_key()
    mine = other.sign(Request.read(request(key)), Identity("d", "peer"), now, 60)
    write_secret(str(tmp_path / "d"), mine + key)
    master, daemon = streams(papers[0].to_listen(), Papers(papers[0].authorities, str(tmp_path / "d")).to_dial())

    async def dial() -> str:
        await daemon.shake_hands()
        assert await daemon.receive() == b""
        return daemon.ended

    why, told = await both(master.shake_hands, dial)
    assert "certificate is of another authority" in str(why)
    assert "the certificate shown is of another authority: join with a token" in str(told)
    assert unverified().verify_mode == ssl.CERT_NONE
    master.close()
    daemon.close()


@pytest.mark.parametrize(
    ("usage", "says"), [("SERVER_AUTH", "its certificate is"), ("CLIENT_AUTH", "certificate shown is")]
)
async def test_a_certificate_for_other_purposes_is_told_to_both_ends(
    papers: tuple[Papers, Papers], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, usage: str, says: str
) -> None:
    """Of the dialler that may only be dialled; of the master that may only dial."""
    found = getattr(ExtendedKeyUsageOID, usage)
    monkeypatch.setattr(authority, "ExtendedKeyUsageOID", SimpleNamespace(CLIENT_AUTH=found, SERVER_AUTH=found))
    made, key = Authority.make(time.time()), new_key()
    write_secret(str(tmp_path / "ca"), made.certificate)
    wanted = Request.read(request(key))
    write_secret(str(tmp_path / "c"), made.sign(wanted, Identity("d", "peer"), time.time(), 60) + key)
    mine = Papers(str(tmp_path / "ca"), str(tmp_path / "c"))
    monkeypatch.undo()
    good = made.sign_master(wanted, time.time(), 60) + key
    write_secret(str(tmp_path / "good"), good)
    other = Papers(str(tmp_path / "ca"), str(tmp_path / "good"))
    ends = (other.to_listen(), mine.to_dial()) if usage == "SERVER_AUTH" else (mine.to_listen(), other.to_dial())
    master, daemon = streams(*ends)
    why, _ = await both(master.shake_hands, daemon.shake_hands)
    assert f"{says} for other purposes: where it lists extended key usages it needs serverAuth and clientAuth" in str(
        why
    )
    master.close()
    daemon.close()
