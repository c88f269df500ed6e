"""TLS from who means no good: records without data, many small ones, more after a goodbye, names that are none."""

from __future__ import annotations

import contextlib
import ctypes
import socket
import ssl
import sys
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from tests.dear import Dear, LongestStep
from tests.records import ALERT, DATA, HANDSHAKE, NEW_KEYS, ByHand, in_pieces
from wancoll.native.seal import Seals
from wancoll.net.stream import Stream
from wancoll.net.tls import Tls, TlsFailed, ignore_strange_names
from wancoll.net.turns import Turns
from wancoll.trust.papers import Papers, unverified, write_secret

GOODBYE = b"\1\0"
SMALL = 200  # records of a byte


@pytest.fixture
def listens(papers: Papers) -> Callable[[], ssl.SSLContext]:
    """Its context."""
    return papers.to_listen


@pytest.fixture
def ends(listens: Callable[[], ssl.SSLContext], tmp_path: Path) -> tuple[Tls, ByHand]:
    """The master's end, and a stranger's, after their handshake."""
    master, stranger = Tls(listens(), listens=True), ByHand(unverified(), tmp_path)
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


def test_a_handshake_has_few_records(listens: Callable[[], ssl.SSLContext], tmp_path: Path) -> None:
    master, stranger = Tls(listens(), listens=True), ByHand(unverified(), tmp_path)
    hello = stranger.shake()
    with pytest.raises(TlsFailed, match="its handshake goes on and on"):
        Tls(listens(), listens=True).shake(in_pieces(hello, 1))
    master.shake(in_pieces(hello, len(hello) // 20))
    master.shake(stranger.shake(master.outgoing()))
    assert master.done


@pytest.mark.parametrize(("copies", "refused"), [(26, False), (42, True)])
def test_a_handshake_has_few_bytes(
    papers: Papers, listens: Callable[[], ssl.SSLContext], tmp_path: Path, copies: int, refused: bool
) -> None:
    """A chain that is longer than three certificates of RSA-4096, and one that is too long."""
    certificate, authority = Path(papers.certificate).read_bytes(), Path(papers.authorities).read_bytes()
    write_secret(str(tmp_path / "long"), certificate + authority * copies)
    shows = Papers(papers.authorities, str(tmp_path / "long"))
    master, stranger = Tls(listens(), listens=True), ByHand(shows.to_dial(), tmp_path)
    master.shake(stranger.shake())
    last = stranger.shake(master.outgoing())
    assert (len(last) > 16 * 1024) == refused
    if refused:
        with pytest.raises(TlsFailed, match="its handshake goes on and on"):
            master.shake(last)
    else:
        master.shake(last)
    assert master.done != refused


def test_no_end_sends_or_takes_compressed_certificates(papers: Papers) -> None:
    """SSL_OP_NO_TX_ and NO_RX_CERTIFICATE_COMPRESSION."""
    for context in papers.to_dial(), papers.to_listen(), unverified():
        assert context.options & (1 << 32 | 1 << 33) == 1 << 32 | 1 << 33


@pytest.mark.skipif(ssl.OPENSSL_VERSION_INFO < (3, 2), reason="OpenSSL compresses no certificates before 3.2")
@pytest.mark.parametrize("engine", [False, True])
def test_certificates_that_would_be_small_when_compressed_are_too_long(
    papers: Papers, tmp_path: Path, engine: bool
) -> None:
    own = Path(papers.certificate).read_bytes()
    certificate, key = own[: own.index(b"-----BEGIN PRIVATE")], own[own.index(b"-----BEGIN PRIVATE") :]
    write_secret(str(tmp_path / "many"), certificate * 60 + key)
    stranger = Papers(papers.authorities, str(tmp_path / "many")).to_dial()
    stranger.options &= ~(1 << 32 | 1 << 33)
    library = ctypes.CDLL("libssl.so.3")
    library.SSL_CTX_compress_certs.argtypes = [ctypes.c_void_p, ctypes.c_int]
    pointer = ctypes.cast(id(stranger) + 16, ctypes.POINTER(ctypes.c_void_p))[0]
    library.SSL_CTX_compress_certs(pointer, 0)  # makes the short form
    far = ByHand(stranger, tmp_path)
    if not engine:
        master = Tls(papers.to_listen(), listens=True)
        master.shake(far.shake())
        with pytest.raises(TlsFailed, match="its handshake goes on and on"):
            master.shake(far.shake(master.outgoing()))
        return
    near, other = socket.socketpair()
    with near, other:
        near.setblocking(False)
        sealing = Seals(Path(papers.authorities).read_bytes(), certificate, key).begin(near.fileno(), accepts=True)
        other.sendall(far.shake())
        assert sealing.handshake() == 1
        other.sendall(far.shake(other.recv(1 << 16)))
        with pytest.raises(OSError, match="far more records than data"):
            sealing.handshake()


@pytest.mark.parametrize("group", ["ffdhe8192", "ffdhe2048", "X448", "secp521r1"])
def test_a_group_that_is_dear_is_refused(listens: Callable[[], ssl.SSLContext], tmp_path: Path, group: str) -> None:
    context = unverified()
    context.set_ecdh_curve(group)
    with pytest.raises(TlsFailed, match=r"(?i)no.suitable.key.share"):
        Tls(listens(), listens=True).shake(ByHand(context, tmp_path).shake())


def test_who_dials_offers_no_group_that_is_dear(papers: Papers) -> None:
    for context in papers.to_dial(), unverified():
        other = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        other.load_cert_chain(papers.certificate)
        other.set_ecdh_curve("ffdhe8192")
        hello = Tls(context, listens=False, host="h")
        hello.shake(b"")
        with pytest.raises(TlsFailed):
            Tls(other, listens=True).shake(hello.outgoing())


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


async def test_what_is_dear_to_read_holds_up_nobody(listens: Callable[[], ssl.SSLContext], tmp_path: Path) -> None:
    """The loop runs meanwhile: else one step of it would be as long as all that."""
    stranger, longest = Dear(tmp_path), LongestStep()
    near, far = socket.socketpair()
    made = Stream(near, "d", 1 << 20, tls=Tls(listens(), listens=True))
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(stranger.call, far)
            trio.lowlevel.add_instrument(longest)
            with pytest.raises(TlsFailed, match="its certificate is of another authority"):
                await made.shake_hands()
            made.close()
    assert 0 < longest.seconds < stranger.cost / 4


@pytest.mark.check
async def test_strangers_of_one_address_do_not_keep_out_another(
    listens: Callable[[], ssl.SSLContext], papers: Papers, tmp_path: Path
) -> None:
    """Who comes while eight of them wait has its two turns after one step of theirs each, not after all of them."""
    stranger, turns, ended, first = Dear(tmp_path), Turns(), list[str](), trio.Event()

    async def shake(near: socket.socket, who: str) -> None:
        made = Stream(near, who, 1 << 20, tls=Tls(listens(), listens=True))
        with contextlib.suppress(TlsFailed):
            await made.shake_hands(turns)
            assert who == "daemon"
        ended.append(who)
        first.set()
        made.close()

    def joins(far: socket.socket) -> None:
        with papers.to_dial().wrap_socket(far) as sealed:
            sealed.recv(1)

    with socket.create_server(("127.0.0.1", 0)) as door, trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            for k in range(9):
                far = socket.create_connection(door.getsockname(), source_address=(f"127.0.0.{1 + (k < 8)}", 0))
                if k < 8:
                    nursery.start_soon(stranger.call, far)
                else:
                    await first.wait()
                    nursery.start_soon(trio.to_thread.run_sync, joins, far)
                nursery.start_soon(shake, door.accept()[0], "daemon" if k == 8 else "stranger")
    assert sorted(ended) == ["daemon", *["stranger"] * 8]
    assert ended.index("daemon") <= 4


async def test_who_waits_for_its_turn_to_shake_hands_is_in_time_all_the_same(
    listens: Callable[[], ssl.SSLContext], tmp_path: Path
) -> None:
    """And says nothing before, and goodbye."""
    near, far = socket.socketpair()
    made, turns, ends = Stream(near, "d", 1 << 20, tls=Tls(listens(), listens=True)), Turns(), threading.Event()
    far.send(ByHand(unverified(), tmp_path).shake())
    async with trio.open_nursery() as nursery:
        nursery.start_soon(turns.run, "somebody else", ends.wait, 60)  # takes long
        await trio.testing.wait_all_tasks_blocked()
        with trio.move_on_after(0.05) as scope:
            await made.shake_hands(turns)
        assert scope.cancelled_caught
        ends.set()
        made.send(b"bye")
        with trio.fail_after(30):
            far.shutdown(socket.SHUT_WR)
            await made.close_delivered()
    with far:
        assert far.recv(100) == b""
    assert await turns.run("another", str) == ""


async def test_after_a_goodbye_nothing_is_read(stream: tuple[Stream, socket.socket], ends: tuple[Tls, ByHand]) -> None:
    master, far = stream
    far.send(ends[1].record(b"last") + ends[1].record(GOODBYE, ALERT))
    with trio.fail_after(30):
        assert await master.receive() == b"last"
        far.send(b"more")
        assert await master.receive() == b""  # though the other end has not closed it
    assert master.ended == "the connection was closed by the other end"
    assert master.look() == b""
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


@pytest.mark.parametrize("last", [False, True])
async def test_who_waits_is_told_of_what_a_look_has_left(
    stream: tuple[Stream, socket.socket], ends: tuple[Tls, ByHand], last: bool
) -> None:
    """The socket has nothing any more."""
    master, far = stream
    found: list[bytes] = []

    async def receive() -> None:
        while not last and b"the last" not in found:
            found.append(await master.receive())
        if last:
            found.append(await master.receive())

    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(receive)
            await trio.testing.wait_all_tasks_blocked()
            if last:
                far.send(ends[1].record(GOODBYE, ALERT))
                assert master.look() == b""
            else:
                far.send(b"".join(ends[1].record(bytes([i])) for i in range(SMALL)))
                assert master.look() == bytes(range(64))
                far.send(ends[1].record(b"the last"))
                assert master.look() == b""  # it is who receives whose turn it is
    assert b"".join(found) == (b"" if last else bytes(range(64, SMALL)) + b"the last")


# ---- names ----------------------------------------------------------------------------------------------


def test_a_name_that_is_no_ascii_is_no_traceback(
    listens: Callable[[], ssl.SSLContext], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CPython would write one for each connection, past the log, where a context looks at names."""
    written: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", written.append)
    ignore_strange_names.__wrapped__()
    context = listens()
    asked: list[str | None] = []

    def choose(_: object, name: str | None, __: object) -> None:
        asked.append(name)
        if len(asked) > 1:
            raise RuntimeError("a bug")

    context.sni_callback = choose
    hello = ByHand(unverified(), tmp_path).shake()
    at = hello.index(b"\0\x01h") + 2  # "h" is its name
    with pytest.raises(TlsFailed, match="the name that it asks for is no host's name"):
        Tls(context, listens=True).shake(hello[:at] + b"\xff" + hello[at + 1 :])
    assert (asked, written) == ([], [])
    Tls(context, listens=True).shake(hello)
    assert (asked, written) == (["h"], [])
    with pytest.raises(TlsFailed):
        Tls(context, listens=True).shake(hello)
    assert [type(one.exc_value) for one in written] == [RuntimeError]  # ours are told


def test_a_long_step_keeps_nobody_waiting(listens: Callable[[], ssl.SSLContext], tmp_path: Path) -> None:
    """Handshakes run in several threads: one that is in the middle of a step lets the others go on."""
    context = listens()
    hello = ByHand(unverified(), tmp_path).shake()
    others: list[bool] = []

    def choose(*_: object) -> None:
        if not others:  # the long step
            others.append(False)
            other = threading.Thread(target=Tls(context, listens=True).shake, args=(hello,), daemon=True)
            other.start()
            other.join(30)
            others.append(not other.is_alive())

    context.sni_callback = choose
    Tls(context, listens=True).shake(hello)
    assert others == [False, True]
