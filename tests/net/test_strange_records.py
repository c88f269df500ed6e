"""TLS from who means no good: records without data, many small ones, more after a goodbye, names that are none."""

from __future__ import annotations

import contextlib
import ctypes
import socket
import ssl
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from tests.dear import Dear, LongestStep
from tests.keyed import showing
from tests.records import ALERT, DATA, HANDSHAKE, NEW_KEYS, ByHand, in_pieces
from wancoll.net import tls
from wancoll.net.stream import Stream
from wancoll.net.tls import Listening, Tls, TlsFailed, WrongKey, to_dial
from wancoll.trust.keys import Key

GOODBYE = b"\1\0"
SMALL = 200  # records of a byte


@pytest.fixture
def ends(listening: Listening, tmp_path: Path) -> tuple[Tls, ByHand]:
    """The master's end, and a stranger's, after their handshake."""
    master, stranger = Tls(listening), ByHand(to_dial(), tmp_path)
    answer = b""
    while not (master.done and stranger.done):
        master.shake(stranger.shake(answer))
        answer = master.outgoing()
    return master, stranger


@pytest.mark.parametrize(("kind", "content"), [(HANDSHAKE, NEW_KEYS), (DATA, b"")])
@pytest.mark.parametrize("at_once", [False, True])
def test_few_records_may_hold_no_data(ends: tuple[Tls, ByHand], kind: int, content: bytes, at_once: bool) -> None:
    master, stranger = ends
    for _ in range(8):
        assert master.open(stranger.record(content, kind)) == b""
        assert master.open(stranger.record(b"x")) == b"x"
    more = [stranger.record(content, kind) for _ in range(100 if at_once else 1)]
    with pytest.raises(TlsFailed, match="without data again and again"):
        master.open(b"".join(more))


def test_one_call_opens_few_records_and_says_that_there_is_more(ends: tuple[Tls, ByHand]) -> None:
    master, stranger = ends
    text = bytes(range(SMALL))
    sealed = b"".join(stranger.record(text[i : i + 1]) for i in range(SMALL)) + stranger.record(b"the last")
    found, came = [], sealed[:-1]
    while not found or master.more:
        found.append(master.open(came))
        came = b""
    assert max(map(len, found)) == 64
    assert b"".join(found) == text
    assert master.open(sealed[-1:]) == b"the last"
    assert not master.more


@pytest.mark.parametrize("size", [1, 3, 24, 10_000])
def test_records_are_opened_wherever_they_are_cut(ends: tuple[Tls, ByHand], size: int) -> None:
    master, stranger = ends
    text = [b"x" * length for length in (1, 16384, 5, 300)]
    sealed, found = b"".join(map(stranger.record, text)), b""
    for at in range(0, len(sealed), size):
        found += master.open(sealed[at : at + size])
    assert found == b"".join(text)


def test_a_handshake_has_few_records(listening: Listening, tmp_path: Path) -> None:
    master, stranger = Tls(listening), ByHand(to_dial(), tmp_path)
    hello = stranger.shake()
    with pytest.raises(TlsFailed, match="its handshake goes on and on"):
        Tls(listening).shake(in_pieces(hello, 1))
    master.shake(in_pieces(hello, len(hello) // 12))
    master.shake(stranger.shake(master.outgoing()))
    assert master.done


@pytest.mark.parametrize(("copies", "refused"), [(3, False), (9, True)])
def test_a_handshake_has_few_bytes(key: Key, copies: int, refused: bool) -> None:
    """Both ends: here the one that answers shows more than its certificate, and too much."""
    context, daemon = showing([key.certificate()] * copies, key.pem), Tls(expects=[key.public])
    daemon.shake(b"")
    other = Acceptor(context)
    if refused:
        with pytest.raises(TlsFailed, match="its handshake goes on and on"):
            daemon.shake(other.shake(daemon.outgoing()))
    else:
        daemon.shake(other.shake(daemon.outgoing()))
    assert daemon.done != refused


class Acceptor:
    """One that shows what it likes, without our bounds."""

    def __init__(self, context: ssl.SSLContext) -> None:
        self._came, self._leaves = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._came, self._leaves, server_side=True)

    def shake(self, data: bytes) -> bytes:
        """What to send as the next part of the handshake."""
        self._came.write(data)
        with contextlib.suppress(ssl.SSLWantReadError):
            self._tls.do_handshake()
        return self._leaves.read()


def test_a_hello_of_a_stranger_has_few_bytes(listening: Listening, tmp_path: Path) -> None:
    context = to_dial()
    context.set_alpn_protocols([f"{k:0200}" for k in range(24)])
    hello = ByHand(context, tmp_path).shake()
    assert len(hello) > 4096
    with pytest.raises(TlsFailed, match="its handshake goes on and on"):
        Tls(listening).shake(hello)


def test_no_end_sends_or_takes_compressed_certificates(listening: Listening) -> None:
    """SSL_OP_NO_TX_ and NO_RX_CERTIFICATE_COMPRESSION."""
    for context in to_dial(), listening.context:
        assert context.options & (1 << 32 | 1 << 33) == 1 << 32 | 1 << 33


@pytest.mark.skipif(ssl.OPENSSL_VERSION_INFO < (3, 2), reason="OpenSSL compresses no certificates before 3.2")
def test_certificates_that_would_be_small_when_compressed_are_too_long(key: Key) -> None:
    context = showing([key.certificate()] * 60, key.pem)
    library = ctypes.CDLL("libssl.so.3")
    library.SSL_CTX_compress_certs.argtypes = [ctypes.c_void_p, ctypes.c_int]
    pointer = ctypes.cast(id(context) + 16, ctypes.POINTER(ctypes.c_void_p))[0]
    library.SSL_CTX_compress_certs(pointer, 0)  # makes the short form
    daemon = Tls(expects=[key.public])
    daemon.shake(b"")
    with pytest.raises(TlsFailed, match="its handshake goes on and on"):
        daemon.shake(Acceptor(context).shake(daemon.outgoing()))


@pytest.mark.parametrize("group", ["ffdhe8192", "ffdhe2048", "X448", "secp521r1"])
def test_a_group_that_is_dear_is_refused(listening: Listening, tmp_path: Path, group: str) -> None:
    context = to_dial()
    context.set_ecdh_curve(group)
    with pytest.raises(TlsFailed, match=r"(?i)no.suitable.key.share"):
        Tls(listening).shake(ByHand(context, tmp_path).shake())


def test_who_dials_offers_no_group_that_is_dear(key: Key) -> None:
    other, daemon = showing([key.certificate()], key.pem), Tls(expects=[key.public])
    other.set_ecdh_curve("ffdhe8192")
    daemon.shake(b"")
    with pytest.raises(ssl.SSLError, match=r"(?i)no.suitable.key.share"):
        Acceptor(other).shake(daemon.outgoing())


def test_what_follows_a_goodbye_is_dropped(ends: tuple[Tls, ByHand]) -> None:
    master, stranger = ends
    last = stranger.record(b"last") + stranger.record(GOODBYE, ALERT)
    assert master.open(last + stranger.record(b"more") + bytes(100_000)) == b"last"
    assert master.over
    for _ in range(3):
        assert master.open(bytes(100_000)) == b""
        assert not master.more
        assert not master._in.pending  # nothing of it waits anywhere


# ---- the stream -----------------------------------------------------------------------------------------


@pytest.fixture
async def stream(ends: tuple[Tls, ByHand]) -> AsyncIterator[tuple[Stream, socket.socket]]:
    """The master's, and the stranger's socket."""
    near, far = socket.socketpair()
    with far:
        made = Stream(near, "d", 1 << 20, tls=ends[0])
        yield made, far
        made.close()


@pytest.mark.parametrize(("count", "why"), [(1, WrongKey), (2, TlsFailed)])
async def test_what_is_dear_to_read_holds_up_nobody(count: int, why: type[TlsFailed]) -> None:
    """The loop runs meanwhile: else one step of it would be as long as all that. More than one are not read at all."""
    stranger, longest = Dear(count), LongestStep()
    near, far = socket.socketpair()
    made = Stream(near, "m", 1 << 20, tls=Tls(expects=[Key.new().public]))
    before = time.process_time()
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(stranger.answer, far)
            trio.lowlevel.add_instrument(longest)
            with pytest.raises(TlsFailed) as failed:
                await made.shake_hands()
            made.close()
    assert type(failed.value) is why
    assert 0 < longest.seconds < stranger.cost / 4
    assert (time.process_time() - before < stranger.cost / 2) == (count == 2)


def test_no_stranger_is_asked_for_a_certificate(listening: Listening) -> None:
    assert listening.context.verify_mode == ssl.CERT_NONE


async def test_after_a_goodbye_nothing_is_read(stream: tuple[Stream, socket.socket], ends: tuple[Tls, ByHand]) -> None:
    master, far = stream
    far.send(ends[1].record(b"last") + ends[1].record(GOODBYE, ALERT))
    with trio.fail_after(30):
        assert await master.receive() == b"last"
        far.send(b"more")
        assert await master.receive() == b""  # though the other end has not closed it
    assert master.ended == "the connection was closed by the other end"
    assert master.socket.recv(100) == b"more"


async def test_others_have_their_turn_between_small_records(
    stream: tuple[Stream, socket.socket], ends: tuple[Tls, ByHand]
) -> None:
    master, far = stream
    far.send(b"".join(ends[1].record(b"x") for _ in range(SMALL)))
    events: list[int] = []

    async def other() -> None:
        while sum(events) < SMALL:
            events.append(0)
            await trio.lowlevel.checkpoint()

    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(other)
            while sum(events) < SMALL:
                events.append(len(await master.receive()))
    came = [i for i, event in enumerate(events) if event]
    assert [events[i] for i in came] == [64, 64, 64, 8]
    assert events[: came[-1]].count(0) >= 2  # trio draws who is first in each round


# ---- names ----------------------------------------------------------------------------------------------


def test_a_name_that_is_no_ascii_is_no_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CPython would write one for each connection, past the log, where a context looks at names: with two keys."""
    written: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", written.append)
    tls._ignore_strange_names.cache_clear()
    two = Listening([Key.new(), Key.new()])
    hello = ByHand(to_dial(), tmp_path).shake()
    at = hello.index(b"\0\x01h") + 2  # "h" is its name
    with pytest.raises(TlsFailed, match="the name that it asks for is no host's name"):
        Tls(two).shake(hello[:at] + b"\xff" + hello[at + 1 :])
    assert written == []
    Tls(two).shake(hello)  # a name of nobody
    assert written == []
    two.context.sni_callback = lambda *_: 1 / 0
    with pytest.raises(TlsFailed):
        Tls(two).shake(hello)
    assert [type(one.exc_value) for one in written] == [ZeroDivisionError]  # ours are told
    tls._ignore_strange_names.cache_clear()
