"""A data port before the engine has a connection: a daemon waits for no records without data, nor dear handshakes."""

from __future__ import annotations

import contextlib
import errno
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from tests.dear import Dear, LongestStep
from tests.peer.test_sealed_links import Office
from tests.records import ALERT, DATA, HANDSHAKE, NEW_KEYS, ByHand, in_pieces
from wancoll.native.seal import Sealed, Seals
from wancoll.net.dial import DialFailed
from wancoll.peer.links.connections import Connector
from wancoll.trust.papers import Papers, write_secret


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[tuple[Sealed, socket.socket, ByHand]]:
    """A daemon's end; the socket, and what to send there, of who has dialled it."""
    office = Office(tmp_path)
    mine, other = office.papers("d1"), office.papers("d2")
    texts = [Path(path).read_bytes() for path in (mine.authorities, mine.certificate, mine.key)]
    near, far = socket.socketpair()
    with near, far, contextlib.closing(Seals(*texts).begin(near.fileno(), accepts=True)) as sealed:
        near.setblocking(False)
        yield sealed, far, ByHand(other.to_dial(), tmp_path)


def read(sealed: Sealed) -> bytes | None:
    """What has come; the first look may say that the socket was found empty before."""
    first = sealed.read(100)
    return sealed.read(100) if first is None else first


def shake(sealed: Sealed, far: socket.socket, other: ByHand) -> None:
    far.send(other.shake())
    while sealed.handshake():
        far.send(other.shake(far.recv(65536)))


@pytest.mark.parametrize(
    ("kind", "content", "most"), [(HANDSHAKE, NEW_KEYS, 0), (DATA, b"", 0), (DATA, b"x", 12)],
)  # fmt: skip
def test_records_without_data_end_it(
    ends: tuple[Sealed, socket.socket, ByHand], kind: int, content: bytes, most: int
) -> None:
    sealed, far, other = ends
    shake(sealed, far, other)
    far.send(other.record(b"hello" * 10))
    assert read(sealed) == b"hello" * 10
    for _ in range(most):
        far.send(other.record(content, kind))
        assert read(sealed) == content
    far.send(other.record(content, kind))
    with pytest.raises(OSError, match="far more records than data") as bad:
        read(sealed)
    assert bad.value.errno == errno.EPROTO


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


@pytest.mark.parametrize(
    ("groups", "more", "why"),
    [(64, 0, ""), (0, 3, ""), (0, 4, "it shows more than 4 certificates"), (120, 0, "far more records than data")],
)
def test_a_handshake_has_few_bytes_and_certificates(tmp_path: Path, groups: int, more: int, why: str) -> None:
    """Those of all groups, or its authority and two in between, and no more."""
    papers = Office(tmp_path).papers("d1", groups=tuple(f"{k:03}" * 40 for k in range(groups)))
    texts = [Path(path).read_bytes() for path in (papers.authorities, papers.certificate, papers.key)]
    write_secret(str(tmp_path / "long"), texts[1] + texts[0] * more)
    other = ByHand(Papers(papers.authorities, str(tmp_path / "long"), papers.key).to_dial(), tmp_path)
    near, far = socket.socketpair()
    near.setblocking(False)
    with near, far, contextlib.closing(Seals(*texts).begin(near.fileno(), accepts=True)) as sealed:
        if why:
            with pytest.raises(OSError, match=why):
                shake(sealed, far, other)
        else:
            shake(sealed, far, other)


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


async def test_certificates_that_are_dear_to_read_hold_up_nobody(tmp_path: Path) -> None:
    stranger, longest = Dear(tmp_path, 3), LongestStep()
    papers = Office(tmp_path).papers("d1")
    near, far = socket.socketpair()
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(stranger.call, far)
            trio.lowlevel.add_instrument(longest)
            async with trio.SocketStream(trio.socket.from_stdlib_socket(near)) as stream:
                with pytest.raises(DialFailed, match="its certificate is of another authority"):
                    await Connector(lambda: papers).accept(stream, "somebody")
    assert 0 < longest.seconds < stranger.cost / 4
