"""A data port before the engine has a connection: a daemon waits for no records without data, nor dear handshakes."""

from __future__ import annotations

import contextlib
import errno
import socket
import ssl
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from tests.dear import Dear, LongestStep
from tests.keyed import admitted
from tests.records import ALERT, HANDSHAKE, NEW_KEYS, ByHand, in_pieces
from wancoll.local import join_address
from wancoll.native.seal import Sealed, Seals
from wancoll.net.dial import DialFailed
from wancoll.net.tls import to_dial
from wancoll.peer.links.connections import Connector
from wancoll.trust.keys import Key


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[tuple[Sealed, socket.socket, ByHand]]:
    """A daemon's end; the socket, and what to send there, of who has dialled it."""
    key = Key.new()
    near, far = socket.socketpair()
    with near, far, contextlib.closing(Seals(key.certificate(), key.pem).begin(near.fileno(), accepts=True)) as sealed:
        near.setblocking(False)
        yield sealed, far, ByHand(to_dial(), tmp_path)


def read(sealed: Sealed) -> bytes | None:
    """What has come; the first look may say that the socket was found empty before."""
    first = sealed.read(100)
    return sealed.read(100) if first is None else first


def shake(sealed: Sealed, far: socket.socket, other: ByHand) -> None:
    far.send(other.shake())
    while sealed.handshake():
        far.send(other.shake(far.recv(65536)))


def test_new_keys_before_any_data_end_it(ends: tuple[Sealed, socket.socket, ByHand]) -> None:
    sealed, far, other = ends
    shake(sealed, far, other)
    far.send(other.record(b"hello" * 10))
    assert read(sealed) == b"hello" * 10
    far.send(other.record(NEW_KEYS, HANDSHAKE))
    with pytest.raises(OSError, match="far more records than data") as bad:
        read(sealed)
    assert bad.value.errno == errno.EPROTO


@pytest.mark.parametrize(("content", "most"), [(b"", 33), (b"x", 1000)])
def test_records_with_next_to_nothing_end_it(
    ends: tuple[Sealed, socket.socket, ByHand], content: bytes, most: int
) -> None:
    sealed, far, other = ends
    shake(sealed, far, other)

    def sends() -> None:
        for _ in range(most):
            far.send(other.record(content))
            read(sealed)

    with pytest.raises(OSError, match=r"far more records than data|record too small"):
        sends()


def test_it_ends_in_order_all_the_same(ends: tuple[Sealed, socket.socket, ByHand]) -> None:
    sealed, far, other = ends
    shake(sealed, far, other)
    far.send(other.record(b"hello") + other.record(b"\1\0", ALERT))
    assert (read(sealed), read(sealed)) == (b"hello", b"")


def test_a_handshake_has_few_records(ends: tuple[Sealed, socket.socket, ByHand]) -> None:
    sealed, far, other = ends
    far.send(in_pieces(other.shake(), 1))
    with pytest.raises(OSError, match="far more records than data"):
        sealed.handshake()


def test_a_handshake_has_few_bytes(ends: tuple[Sealed, socket.socket, ByHand], tmp_path: Path) -> None:
    sealed, far, _ = ends
    context = to_dial()
    context.set_alpn_protocols([f"{k:0200}" for k in range(24)])
    far.send(ByHand(context, tmp_path).shake())
    with pytest.raises(OSError, match=r"far more|goes on and on|too long"):
        sealed.handshake()


@pytest.mark.parametrize("group", ["ffdhe8192", "ffdhe2048", "X448", "secp521r1"])
def test_a_group_that_is_dear_is_refused(
    ends: tuple[Sealed, socket.socket, ByHand], tmp_path: Path, group: str
) -> None:
    sealed, far, _ = ends
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.set_ecdh_curve(group)
    far.send(ByHand(context, tmp_path).shake())
    with pytest.raises(OSError, match="no suitable key share"):
        sealed.handshake()


@pytest.mark.parametrize("count", [1, 2])
async def test_certificates_that_are_dear_to_read_hold_up_nobody(tmp_path: Path, count: int) -> None:
    """They are shown where a daemon is expected; of more than 1 KiB none is read."""
    stranger, longest, wallet = Dear(count), LongestStep(), admitted(tmp_path, "d1", Key.new())
    with trio.fail_after(60), socket.create_server(("127.0.0.1", 0)) as door:
        address, before = join_address(*door.getsockname()), time.process_time()
        async with trio.open_nursery() as nursery:
            connector = Connector(wallet)
            nursery.start_soon(answers, door, stranger)
            trio.lowlevel.add_instrument(longest)
            with pytest.raises(DialFailed, match=f"^{address}: "):
                await connector.dial([address], bytes(32), 50.0)
        assert (time.process_time() - before < stranger.cost / 2) == (count == 2)
    assert 0 < longest.seconds < stranger.cost / 4


async def answers(door: socket.socket, stranger: Dear) -> None:
    """The first one who dials."""
    sock, _ = await trio.to_thread.run_sync(door.accept)
    with sock:
        await stranger.answer(sock)
