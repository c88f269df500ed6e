"""A stream over TLS: sends that never wait, looks without a round of trio, and whom it does not talk to."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Awaitable, Callable

import pytest
import trio

from tests.keyed import showing
from wancoll.net import tls
from wancoll.net.stream import Stream
from wancoll.net.tls import Listening, Tls, TlsFailed, WrongKey, server_name
from wancoll.trust.keys import Key
from wancoll.wire import messages as m
from wancoll.wire.framing import encode


def streams(listening: Listening, *expects: bytes, most: int = 8 << 20) -> tuple[Stream, Stream]:
    """A master's, and a daemon's that expects these keys; none: the master's own."""
    near, far = socket.socketpair()
    master, daemon = Tls(listening), Tls(expects=expects or [*listening.keys.values()])
    return Stream(near, "d", most, tls=master), Stream(far, "m", most, tls=daemon)


async def both(*todo: Callable[[], Awaitable[object]]) -> list[object]:
    """What came of each, or what it failed with."""
    found: list[object] = [None] * len(todo)

    async def one(i: int) -> None:
        try:
            found[i] = await todo[i]()
        except TlsFailed as failed:
            found[i] = failed

    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            for i in range(len(todo)):
                nursery.start_soon(one, i)
    return found


@pytest.fixture
async def ends(listening: Listening) -> tuple[Stream, Stream]:
    """A master's stream and a daemon's, after their handshake."""
    master, daemon = streams(listening)
    assert await both(master.shake_hands, daemon.shake_hands) == [None, None]
    return master, daemon


async def test_what_is_sent_before_anybody_reads_arrives_whole(ends: tuple[Stream, Stream], key: Key) -> None:
    master, daemon = ends
    for end in ends:
        assert end.tls is not None
        assert (end.tls.key, end.tls.speaks) == (key.public, True), "both know which of the master's keys it was"
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


async def test_who_does_not_read_is_given_up(listening: Listening) -> None:
    master, daemon = streams(listening, most=50_000)
    await both(master.shake_hands, daemon.shake_hands)
    while not master.overflow:
        assert master.queued <= 50_000
        master.send(bytes(20_000))
    assert master.ended == "it does not read what it is sent"
    master.close()
    daemon.close()


async def test_a_changed_byte_ends_the_connection(ends: tuple[Stream, Stream]) -> None:
    master, daemon = ends
    assert master.tls is not None
    sealed = bytearray(master.tls.seal(encode(m.Pong(7, 0))))
    sealed[-1] ^= 1
    master.socket.send(sealed)
    assert await daemon.receive() == b""
    assert "decryption failed or bad record mac" in daemon.ended.lower().replace("_", " ")
    master.close()
    daemon.close()


async def test_a_record_that_is_sent_again_ends_the_connection(ends: tuple[Stream, Stream]) -> None:
    master, daemon = ends
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
async def test_who_does_not_speak_tls_is_told_apart(listening: Listening, said: bytes) -> None:
    near, far = socket.socketpair()
    master = Stream(near, "d", 1 << 20, tls=Tls(listening))
    far.send(said)
    (why,) = await both(master.shake_hands)
    assert isinstance(why, TlsFailed)
    assert master.tls is not None
    assert master.tls.plain == (said[:1] == b"\0")
    master.send(b"secret")  # nothing leaves before the handshake
    near.close()
    assert b"secret" not in far.recv(1000)
    far.close()


async def test_a_handshake_that_is_cut_ends(listening: Listening, key: Key) -> None:
    near, far = socket.socketpair()
    master, hello = Stream(near, "d", 1 << 20, tls=Tls(listening)), Tls(expects=[key.public])
    hello.shake(b"")
    far.send(hello.outgoing()[:50])
    far.shutdown(socket.SHUT_WR)
    (why,) = await both(master.shake_hands)
    assert str(why) == "the connection was closed by the other end, in the middle of TLS's handshake"
    master.close()
    far.close()


# ---- who is there ---------------------------------------------------------------------------------------


def shake(master: Tls, daemon: Tls) -> None:
    """Let both shake hands, until one has failed."""
    daemon.shake(b"")
    while not (master.done and daemon.done):
        master.shake(daemon.outgoing())
        daemon.shake(master.outgoing())


def old() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode, context.maximum_version = False, ssl.CERT_NONE, ssl.TLSVersion.TLSv1_2
    return context


@pytest.mark.parametrize(
    ("context", "why"), [(old, "it speaks an older TLS than 1.3"), (ssl.create_default_context, "")]
)
def test_an_older_tls_is_refused_and_another_version_of_ours_is_known(
    listening: Listening, key: Key, monkeypatch: pytest.MonkeyPatch, context: Callable[[], ssl.SSLContext], why: str
) -> None:
    monkeypatch.setattr(tls, "to_dial", lambda: made)
    made = context()
    made.check_hostname, made.verify_mode = False, ssl.CERT_NONE
    master, daemon = Tls(listening), Tls(expects=[key.public])
    if why:
        with pytest.raises(TlsFailed, match=why):
            shake(master, daemon)
    else:
        shake(master, daemon)
        assert not master.speaks


@pytest.mark.parametrize("shows", ["another key", "P-256"])
def test_who_has_not_the_key_is_told_nothing(key: Key, shows: str) -> None:
    other = Key.new()
    listening = Listening([other])
    if shows == "P-256":
        listening.context = showing(*p256())
        listening.keys[listening.context] = b""
    master, daemon = Tls(listening), Tls(expects=[key.public, bytes(32)])
    says = f"it has the key {other.public.hex()}, and not {key.public.hex()} or 000" if shows == "another key" else ""
    with pytest.raises(WrongKey, match=says or "it has no key of this version of wancoll, and not"):
        shake(master, daemon)
    assert (daemon.done, daemon.key) == (False, b"")
    assert daemon.seal(b"secret") == b""


def p256() -> tuple[list[bytes], bytes]:
    """A certificate of another kind, and its key."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key, like = ec.generate_private_key(ec.SECP256R1()), x509.load_pem_x509_certificate(Key.new().certificate())
    made = x509.CertificateBuilder().subject_name(like.subject).issuer_name(like.issuer).serial_number(1)
    made = made.not_valid_before(like.not_valid_before_utc).not_valid_after(like.not_valid_after_utc)
    form = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    pem = made.public_key(key.public_key()).sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
    return [pem], key.private_bytes(serialization.Encoding.PEM, *form)


def test_of_two_keys_that_is_shown_which_the_dialler_expects() -> None:
    """While a master replaces its key: the newest of a dialler's counts, and who asks for none sees the first."""
    first, second = Key.new(), Key.new()
    listening = Listening([first, second])
    for expects in ([first], [second], [first, second], [second, first]):
        master, daemon = Tls(listening), Tls(expects=[one.public for one in expects])
        shake(master, daemon)
        assert daemon.key == master.key == expects[-1].public
    gone = Key.new()
    master, daemon = Tls(listening), Tls(expects=[first.public, gone.public])
    shake(master, daemon)
    assert daemon.key == master.key == first.public, "a dialler that knows of a newer one than the master"
    assert server_name(first.public) == f"{first.public.hex()[:32]}.wancoll"


def test_the_master_says_nothing_by_which_a_session_could_be_taken_up(listening: Listening, key: Key) -> None:
    """Tickets come with its first bytes after the handshake: each connection proves anew who is there."""
    master, daemon = Tls(listening), Tls(expects=[key.public])
    shake(master, daemon)
    assert daemon.open(master.seal(b"hello")) == b"hello"
    assert daemon._object.session is not None
    assert not daemon._object.session.has_ticket
