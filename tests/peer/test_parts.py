"""The daemon's smaller parts: streams that never wait, arenas, listeners, addresses, probes, fault injection."""

from __future__ import annotations

import fcntl
import mmap
import os
import socket

import pytest
import trio

from wancoll.errors import ConfigError
from wancoll.failpoints import Failpoints
from wancoll.limits import DEFAULT, PROTOCOL_VERSION
from wancoll.local import join_address, split_address
from wancoll.net.dial import DialFailed, dial, read_frame
from wancoll.net.listen import Handshakes, open_listeners
from wancoll.net.stream import Stream
from wancoll.peer.arena import Arena
from wancoll.peer.links.lanes import advertised, check_congestion_control, probe
from wancoll.wire import messages as m
from wancoll.wire.framing import encode


async def test_a_stream_keeps_order_when_the_kernel_does_not_take_all() -> None:
    near, far = socket.socketpair()
    stream = Stream(near, "far", 8 << 20)
    pieces = [bytes([i]) * 100_000 for i in range(40)]
    for piece in pieces:
        stream.send(piece)
    assert stream.queued > 0
    other = Stream(far, "near", 1)
    received = bytearray()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(stream.drain)
        while len(received) < 4_000_000:
            received += await other.receive()
    assert bytes(received) == b"".join(pieces)
    stream.close()
    assert await other.receive() == b""
    other.close()


@pytest.mark.parametrize(("max_messages", "last"), [(0, bytes(1000)), (3, bytes(1))])
async def test_a_stream_does_not_queue_without_bound(max_messages: int, last: bytes) -> None:
    near, far = socket.socketpair()
    stream = Stream(near, "the lazy one", 1000, max_messages)
    while not stream.queued:  # until the kernel takes no more
        stream.send(bytes(500))
    assert not stream.overflow
    async with trio.open_nursery() as nursery:

        async def read() -> None:
            assert await stream.receive() == b""

        nursery.start_soon(read)
        await trio.testing.wait_all_tasks_blocked()
        for _ in range(3):
            stream.send(last)
    assert stream.overflow
    assert stream.queued == 0
    assert stream.ended == "it does not read what it is sent"
    stream.send(b"more")
    assert stream.queued == 0
    stream.close()
    far.close()


async def test_what_was_sent_arrives_before_the_end() -> None:
    near, far = socket.socketpair()
    stream, other = Stream(near, "far", 8 << 20), Stream(far, "near", 1)
    stream.send(bytes(2_000_000))
    assert stream.queued > 0
    stream.end()
    assert await stream.receive() == b""
    received = 0
    async with trio.open_nursery() as nursery:
        nursery.start_soon(stream.close_delivered)
        while data := await other.receive():
            received += len(data)
        other.close()
    assert received == 2_000_000
    assert other.ended == "the connection was closed by the other end"


async def test_handshakes_are_bounded_in_number_and_time(autojump_clock: trio.testing.MockClock) -> None:
    handshakes = Handshakes(2, 5.0)
    left: list[tuple[str, float]] = []

    async def idle(name: str) -> None:
        with handshakes.one():
            await trio.sleep_forever()
        left.append((name, trio.current_time() - start))

    async def introduced() -> None:
        with handshakes.one() as scope:
            assert handshakes.over(scope)
            assert not handshakes.over(scope)
            await trio.sleep(60)
        left.append(("introduced", trio.current_time() - start))

    start = trio.current_time()
    async with trio.open_nursery() as nursery:
        for name in "abc":
            nursery.start_soon(idle, name)
            await trio.sleep(1)
            assert len(handshakes) <= 2
        nursery.start_soon(introduced)
        await trio.sleep(1)
    assert left == [("a", 2.0), ("b", 3.0), ("c", 7.0), ("introduced", 63.0)]


async def test_closing_a_stream_wakes_its_reader() -> None:
    near, far = socket.socketpair()
    stream = Stream(near, "far", 1000)
    async with trio.open_nursery() as nursery:

        async def read() -> None:
            assert await stream.receive() == b""

        nursery.start_soon(read)
        await trio.testing.wait_all_tasks_blocked()
        stream.close()
    far.close()


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
            ok, reason = await probe([address], "bob", DEFAULT)
    assert ok == (outcome == "")
    assert outcome in reason


async def test_a_dial_that_nobody_answers_says_where() -> None:
    with open_listeners("127.0.0.1:0")[0] as listener:
        address = join_address(*listener.getsockname())
    with pytest.raises(DialFailed, match=f"{address}.*refused"):
        await dial([address], 2.0)


def test_failpoints_need_the_token() -> None:
    assert not Failpoints("").allows("")
    points = Failpoints("secret")
    assert points.allows("secret")
    assert not points.allows("guess")
    points.arm("after_done", "kill")
    points.arm("after_done", "clear")
    assert not points.armed
    points.hit("after_done")  # disarmed: we are still here
