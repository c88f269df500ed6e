"""The daemon's smaller parts: arenas, addresses, probes, fault injection."""

from __future__ import annotations

import fcntl
import mmap
import os
import socket
from contextlib import nullcontext

import pytest
import trio
from msgspec.structs import replace

from wancoll.errors import ConfigError
from wancoll.failpoints import Failpoints
from wancoll.limits import DEFAULT, PROTOCOL_VERSION
from wancoll.local import join_address, split_address
from wancoll.net.dial import DialFailed, read_frame
from wancoll.net.listen import advertised, open_listeners
from wancoll.peer.arena import Arena
from wancoll.peer.links.connections import Connection, Connector
from wancoll.peer.links.lanes import check_congestion_control, greet
from wancoll.peer.links.probes import probe
from wancoll.wire import messages as m
from wancoll.wire.framing import encode


def test_an_arena_is_shared_and_its_size_is_sealed() -> None:
    arena = Arena(10 * mmap.PAGESIZE + 1)
    assert arena.nbytes == 11 * mmap.PAGESIZE
    os.pwrite(arena.fd, b"hello", 4096)
    with mmap.mmap(arena.fd, arena.nbytes) as other:
        assert other[4096:4101] == b"hello"
    for size in (0, 1 << 30):
        with pytest.raises(PermissionError):
            os.ftruncate(arena.fd, size)
    assert fcntl.fcntl(arena.fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SEAL
    assert arena.holds(0, arena.nbytes)
    assert arena.holds(arena.nbytes, 0)
    assert not arena.holds(1, arena.nbytes)
    assert not arena.holds(-1, 1)
    arena.close()


@pytest.mark.parametrize(
    ("text", "expected"), [("h:1", ("h", 1)), ("[::1]:7400", ("::1", 7400)), (":0", ("", 0)), ("*:5", ("*", 5))]
)
def test_addresses_round_trip(text: str, expected: tuple[str, int]) -> None:
    assert split_address(text) == expected
    assert join_address(*expected) == text


@pytest.mark.parametrize("text", ["", "h", "h:", "h:x", "h:70000", "::1:80", "::1"])
def test_bad_addresses_say_what_is_expected(text: str) -> None:
    with pytest.raises(ConfigError, match="IPv6 in brackets"):
        split_address(text)


@pytest.mark.parametrize("default_port", [None, 0, 7400])
def test_a_port_alone_is_no_host(default_port: int | None) -> None:
    """It would be one of number-and-dots notation, and nobody means that."""
    with pytest.raises(ConfigError, match="got '7600', a port alone; write 127"):
        split_address("7600", what="--listen", default_port=default_port)
    assert split_address("10.1", default_port=7400) == ("10.1", 7400)


def test_listeners_bind_and_refuse_clearly() -> None:
    with open_listeners("127.0.0.1:0")[0] as taken:
        port = taken.getsockname()[1]
        assert port > 0
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}: cannot listen there"):
            open_listeners(f"127.0.0.1:{port}")
        assert advertised((), taken, "10.0.0.9") == [f"127.0.0.1:{port}"]
        assert advertised(("example.org", "h:9"), taken, "") == [f"example.org:{port}", "h:9"]
    with open_listeners("*:0")[0] as wild:
        assert advertised((), wild, "10.0.0.9") == [f"10.0.0.9:{wild.getsockname()[1]}"]
        assert advertised((), wild, "::ffff:10.0.0.9") == [f"10.0.0.9:{wild.getsockname()[1]}"]


def test_unknown_congestion_control_names_the_choices() -> None:
    with pytest.raises(ConfigError, match=r"expected .*reno.*; got 'warp'"):
        check_congestion_control("warp")


async def _answer_once(listener: socket.socket, answer: bytes) -> None:
    accepting = trio.socket.from_stdlib_socket(listener)
    connection, _ = await accepting.accept()
    hello = await read_frame(connection, m.LaneFirst, who="dialler")
    assert hello == m.ProbeHello(PROTOCOL_VERSION, "bob")
    await connection.send(answer)
    connection.close()


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        (encode(m.LaneWelcome("bob")), ""),
        (encode(m.LaneWelcome("eve")), "expected daemon bob, got eve"),
        (b"", "closed the connection during the handshake"),
        (b"\xff\xff\xff\xff", "oversized"),
        (b"\x00\x00\x00\x02\xc1\xc1", "cannot be read"),
    ],
)
async def test_a_probe_tells_who_answers(answer: bytes, outcome: str) -> None:
    with open_listeners("127.0.0.1:0")[0] as listener:
        address = join_address(*listener.getsockname())
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_answer_once, listener, answer)
            failed = await probe(Connector(), [address], "bob", b"", DEFAULT)
    assert (failed is None) == (outcome == "")
    assert outcome in str(failed or "")
    assert failed is None or not failed.refused


async def test_a_probe_tells_that_nobody_listens() -> None:
    with open_listeners("127.0.0.1:0")[0] as listener:
        address = join_address(*listener.getsockname())
    for addresses, refused in (([address], True), ([address, "no.such.host.invalid:1"], False)):
        failed = await probe(Connector(), addresses, "bob", b"", DEFAULT)
        assert failed is not None
        assert failed.refused is refused, failed


async def test_a_probe_of_a_process_that_just_ends_tells_that_nobody_listens() -> None:
    """The kernel takes connections for it until its sockets are closed, one after the other."""

    async def end() -> None:
        connection, _ = await trio.socket.from_stdlib_socket(listener).accept()
        listener.close()
        connection.close()

    (listener,) = open_listeners("127.0.0.1:0")
    address = join_address(*listener.getsockname())
    async with trio.open_nursery() as nursery:
        nursery.start_soon(end)
        failed = await probe(Connector(), [address], "bob", b"", DEFAULT)
    assert failed is not None
    assert failed.refused, failed


async def test_a_lane_that_shall_have_checksums_is_not_opened_without() -> None:
    hello = m.LaneHello(PROTOCOL_VERSION, "g", b"0" * 16, 1, 2, 0, 0, 0, 1)
    for wanted, given, refused in ((True, False, True), (True, True, False), (False, True, False)):
        ours, theirs = trio.socket.socketpair()
        await theirs.send(encode(m.LaneWelcome("bob", given)))
        asked = replace(hello, checksums=wanted)
        with pytest.raises(DialFailed, match="refused checksums") if refused else nullcontext():
            assert (await greet(Connection(trio.SocketStream(ours)), asked, "bob")).checksums == given
        assert await read_frame(theirs, m.LaneFirst, who="dialler") == asked
        ours.close()
        theirs.close()


def test_failpoints_need_the_token() -> None:
    assert not Failpoints("").allows("")
    points = Failpoints("secret")
    assert points.allows("secret")
    assert not points.allows("guess")
    points.arm("after_done", "kill")
    points.arm("after_done", "clear")
    assert not points.armed
    points.hit("after_done")  # disarmed: we are still here
