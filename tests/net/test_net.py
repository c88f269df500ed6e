"""Streams that never wait, the bound on handshakes, dialling."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import socket
import stat
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.owned import as_if_owned
from wancoll import local
from wancoll.errors import ConfigError
from wancoll.local import join_address
from wancoll.net.dial import DialFailed, dial
from wancoll.net.listen import (
    Handshakes,
    Sparing,
    claim_socket,
    is_loopback,
    open_listeners,
    serve_connections,
    whose,
    why_ended,
)
from wancoll.net.stream import Queues, Stream, round_trip
from wancoll.net.unix import connect_local


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


async def test_of_streams_that_share_a_bound_the_one_with_most_is_given_up() -> None:
    queues = Queues(10_000)
    pairs = [socket.socketpair() for _ in range(4)]
    lazy, slow, *more = [Stream(near, "far", 1 << 20, queues=queues) for near, _ in pairs]
    for stream in (lazy, slow, *more):
        while not stream.queued:  # until the kernel takes no more
            stream.send(bytes(500))
        assert stream.queued <= 500
    more.pop().close()  # what waited there is in nobody's way
    lazy.send(bytes(5000))
    slow.send(bytes(4000 - slow.queued))
    assert not lazy.overflow
    slow.send(bytes(1000))
    assert (lazy.overflow, lazy.queued, slow.overflow, slow.queued) == (True, 0, False, 5000)
    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(slow.drain)
            reader = Stream(pairs[1][1], "near", 1)
            while slow.queued:
                await reader.receive()
    more[0].send(bytes(9000))  # in the room of both
    assert not more[0].overflow
    for stream in (lazy, slow, *more):
        stream.close()
    for _, far in pairs:
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


async def test_the_end_wakes_who_reads_and_leaves_who_writes() -> None:
    near, far = socket.socketpair()
    stream, other = Stream(near, "far", 8 << 20), Stream(far, "near", 1)
    stream.send(bytes(2_000_000))
    assert stream.queued > 0
    received, heard = 0, [b"nothing yet"]
    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:

            async def read() -> None:
                heard.append(await stream.receive())

            nursery.start_soon(read)
            nursery.start_soon(stream.write_queue)
            await trio.testing.wait_all_tasks_blocked()
            stream.end()
            await trio.testing.wait_all_tasks_blocked()
            assert heard.pop() == b""
            assert stream.ended == ""
            while received < 2_000_000:
                received += len(await other.receive())
            stream.close()
    assert stream.queued == 0
    other.close()


async def test_handshakes_are_bounded_in_number_and_time(autojump_clock: trio.testing.MockClock) -> None:
    handshakes = Handshakes(2, 5.0)
    left: list[tuple[str, float, str]] = []

    async def idle(name: str) -> None:
        with handshakes.one() as scope:
            await trio.sleep_forever()
        left.append((name, trio.current_time() - start, why_ended(scope)))

    async def introduced() -> None:
        with handshakes.one():
            assert len(handshakes) == 2
        await trio.sleep(60)
        left.append(("introduced", trio.current_time() - start, ""))

    start = trio.current_time()
    async with trio.open_nursery() as nursery:
        for name in "abc":
            nursery.start_soon(idle, name)
            await trio.sleep(1)
            assert len(handshakes) <= 2
        nursery.start_soon(introduced)
        await trio.sleep(1)
    late, gave_way = "was not done in time", "gave way to another connection"
    assert left == [("a", 2.0, gave_way), ("b", 3.0, gave_way), ("c", 7.0, late), ("introduced", 63.0, "")]


@pytest.mark.parametrize(
    ("came", "least", "left", "most"),
    [
        ("aaaabb", 0, "a3 a2", 4),  # the busiest pays, with its newest
        ("aaaabbb", 0, "a3 a2 b0", 4),  # nobody is busier than the newcomer's own: its oldest
        ("aaaabaa", 0, "a3 a0 a1", 4),  # who has few is never disturbed
        ("abcde", 0, "a0", 4),
        ("aaaaaa", 10, "a3 a4", 4),  # the others have not had their time yet: any of them, here the newest
        ("abcde", 10, "d0", 4),
        ("aaaab", 10, "a3", 4),
        ("bcdefgaap", 0, "b0", 8),  # nobody has more than a share: the oldest, not who opens lanes at once
        ("bcdefaaap", 0, "a2", 8),
        ("bcdefgaaa", 0, "a0", 8),
        ("bcdefgaap", 99, "a1", 8),
    ],
)
async def test_the_busiest_address_gives_way(
    came: str,
    least: float,
    left: str,
    most: int,
    autojump_clock: trio.testing.MockClock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("random.choice", lambda these: these[-1])
    handshakes, numbers = Handshakes(most, 60.0, least), dict.fromkeys(came, 0)
    gone: list[str] = []

    async def idle(address: str, number: int) -> None:
        with handshakes.one(address):
            await trio.sleep_forever()
        gone.append(f"{address}{number}")

    async with trio.open_nursery() as nursery:
        for address in came:
            nursery.start_soon(idle, address, numbers[address])
            numbers[address] += 1
            await trio.sleep(1)
            assert len(handshakes) <= most
        assert " ".join(gone) == left
        nursery.cancel_scope.cancel()
    assert len(handshakes) == 0


@pytest.mark.parametrize(("address", "rate", "at_least"), [("a", 1500, 72), ("a", 5000, 45), ("", 5000, 75)])
async def test_of_a_crowd_that_comes_fast_most_come_through(
    address: str, rate: int, at_least: int, autojump_clock: trio.testing.MockClock
) -> None:
    """A handshake takes 5 ms, strangers stay: of its own address, which has a share of 64, or of many others."""
    handshakes, through = Handshakes(256, 5.0, 0.25), 0

    async def stranger(number: int) -> None:
        with handshakes.one(address or str(number)):
            await trio.sleep_forever()

    async def honest() -> None:
        nonlocal through
        with handshakes.one("a"):
            await trio.sleep(0.005)
            through += 1

    async with trio.open_nursery() as nursery:
        for number in range(1000):
            nursery.start_soon(stranger, number)
            if number >= 500 and number % 5 == 0:
                nursery.start_soon(honest)
            await trio.sleep(1 / rate)
        nursery.cancel_scope.cancel()
    assert through >= at_least  # of 100; chance decides, and takes five standard deviations for that


async def test_so_many_strangers_a_second_are_let_in(autojump_clock: trio.testing.MockClock) -> None:
    handshakes = Handshakes(4, 5.0, strangers=2.0)
    assert [handshakes.lets_in(str(number)) for number in range(6)] == [True] * 4 + [False] * 2
    handshakes.know("daemon")
    assert all(handshakes.lets_in("daemon") for _ in range(100))
    await trio.sleep(1.01)
    assert [handshakes.lets_in("stranger") for _ in range(3)] == [True, True, False]
    await trio.sleep(3600)
    assert sum(handshakes.lets_in("stranger") for _ in range(10)) == 4
    assert all(Handshakes(4, 5.0).lets_in("stranger") for _ in range(100))  # in clear


async def test_whoever_is_let_in_does_not_wait_behind_others_in_the_kernels_queue() -> None:
    [listener] = open_listeners("127.0.0.1:0")
    at, served = listener.getsockname(), trio.Event()

    async def handler(stream: trio.SocketStream) -> None:
        await stream.send_all(b"hello")
        served.set()

    with contextlib.ExitStack() as stack:
        stack.callback(listener.close)
        others = [stack.enter_context(socket.create_connection(at)) for _ in range(500)]
        known = stack.enter_context(socket.create_connection(at, source_address=("127.0.0.2", 0)))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve_connections, [listener], handler, lambda one: whose(one) == "127.0.0.2")
            for _ in range(3):
                await trio.testing.wait_all_tasks_blocked()
            assert served.is_set()
            nursery.cancel_scope.cancel()
        known.settimeout(5)
        assert known.recv(10) == b"hello"
        assert known.recv(10) == b""  # closed after its handler
        for one in others:
            one.settimeout(5)
            assert one.recv(1) == b""


async def test_a_process_without_descriptors_takes_connections_when_it_has_some(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    [listener] = open_listeners("127.0.0.1:0")
    answers: list[OSError | None] = [OSError(errno.EMFILE, "too many"), OSError(errno.ECONNABORTED, "gone"), None]
    accept, served = socket.socket.accept, trio.Event()

    def accept_or_fail(one: socket.socket) -> Any:
        if (bad := answers.pop(0) if answers else None) is not None:
            raise bad
        return accept(one)

    async def handler(stream: trio.SocketStream) -> None:
        served.set()

    monkeypatch.setattr(socket.socket, "accept", accept_or_fail)
    with listener, socket.create_connection(listener.getsockname()):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve_connections, [listener], handler)
            await served.wait()
            nursery.cancel_scope.cancel()
    assert answers == []


async def test_strangers_of_however_many_addresses_put_out_nobody_where_somebody_known_came_from(
    autojump_clock: trio.testing.MockClock,
) -> None:
    handshakes, gone = Handshakes(4, 60.0), list[str]()

    async def idle(address: str) -> None:
        with handshakes.one(address):
            await trio.sleep_forever()
        gone.append(address)

    handshakes.know("daemon")
    for number in range(1022):
        handshakes.know(f"other {number}")
    async with trio.open_nursery() as nursery:
        for address in ("daemon", "daemon", "s0", "s1", "s2", "s3", "s4", "s5", "s6"):
            nursery.start_soon(idle, address)
            await trio.sleep(1)
        assert (gone, len(handshakes)) == (["s0", "s1", "s2"], 6)
        for number in range(1022, 1024):  # the newest are known: it is none of them any more
            handshakes.know(f"other {number}")
        nursery.start_soon(idle, "daemon")
        await trio.sleep(1)
        assert (gone[3:], len(handshakes)) == (["s3"], 6)
        for _ in range(3):  # of known ones, too, there is no more than that
            nursery.start_soon(idle, "other 1023")
            await trio.sleep(1)
        assert (gone[4:], len(handshakes)) == (["other 1023"], 8)
        nursery.cancel_scope.cancel()
    assert len(handshakes) == 0


@pytest.mark.parametrize(("host", "here"), [("127.0.0.1", True), ("::1", True), ("192.0.2.1", False), ("::2:1", False)])
def test_what_comes_from_this_machine(host: str, here: bool) -> None:
    class Connected:
        family = socket.AF_INET6

        def getpeername(self) -> tuple[str, int]:
            return host, 1

    assert is_loopback(whose(Connected())) == here


@pytest.mark.parametrize(
    ("family", "host", "who"),
    [
        (socket.AF_INET, "203.0.113.7", "203.0.113.7"),
        (socket.AF_INET6, "::ffff:203.0.113.7", "203.0.113.7"),
        (socket.AF_INET6, "2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        (socket.AF_INET6, "fe80::1%eth0", "fe80::/64"),
        (socket.AF_INET, "", "somebody"),
    ],
)
def test_a_connection_counts_for_its_address(family: int, host: str, who: str) -> None:
    class Connected:
        def __init__(self) -> None:
            self.family = family

        def getpeername(self) -> tuple[str, int]:
            return host, 1

    assert whose(Connected()) == who


def test_a_connection_of_this_machine_counts_for_its_user(tmp_path: Path) -> None:
    with claim_socket(str(tmp_path / "s")) as listener, connect_local(str(tmp_path / "s"), 1):
        near = listener.accept()[0]
        assert whose(near) == f"user {os.getuid()}, process {os.getpid()}"
        near.close()


async def test_strangers_do_not_fill_the_log(autojump_clock: trio.testing.MockClock) -> None:
    lines: list[dict[str, object]] = []
    sparing = Sparing()
    for _ in range(2):
        for number in range(25):
            sparing.say(lambda event, **fields: lines.append(fields), "nonsense", number=number)
        await trio.sleep(1)
    assert [line["number"] for line in lines] == [*range(10)] * 2
    assert [line.get("left_out") for line in lines if "left_out" in line] == [15]
    assert sparing.count == 50


async def test_one_task_writes_and_others_wait_for_it() -> None:
    near, far = socket.socketpair()
    stream, other = Stream(near, "far", 8 << 20), Stream(far, "near", 1)
    stream.send(bytes(2_000_000))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(stream.write_queue)
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(stream.drain)
        with trio.move_on_after(0):
            await stream.drain()
        await trio.testing.wait_all_tasks_blocked()
        received = 0
        while received < 2_000_000:
            received += len(await other.receive())
        await stream.drain()
        assert stream.queued == 0
        nursery.cancel_scope.cancel()
    stream.close()
    other.close()


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


async def test_a_stream_knows_its_round_trip_also_when_it_was_reset() -> None:
    """By what the kernel has measured; of what is no TCP connection it knows none."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        stream = Stream(server.accept()[0], "the test", 1 << 20)
    before = round_trip(stream.socket)
    assert 0 < before < 1
    one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    one.close()
    assert await stream.receive() == b""
    assert 0 < round_trip(stream.socket) < 1
    stream.close()
    pair = socket.socketpair()
    assert round_trip(pair[0]) == 0.0
    for each in pair:
        each.close()


@pytest.mark.parametrize("host", ["a..b", ".", "x" * 64 + ".org", "a\0b", "\ud800"])
async def test_a_dial_to_what_is_no_name_says_so(host: str) -> None:
    with pytest.raises(DialFailed):
        await dial([f"{host}:80"], 5.0, near_only=False)


async def test_a_dial_that_nobody_answers_says_where() -> None:
    with open_listeners("127.0.0.1:0")[0] as listener:
        address = join_address(*listener.getsockname())
    with pytest.raises(DialFailed, match=f"{address}.*refused"):
        await dial([address], 2.0, near_only=False)


async def test_uplinks_are_tried_in_order_and_none_for_this_machine() -> None:
    with open_listeners("127.0.0.1:0")[0] as listener:
        address = join_address(*listener.getsockname())
        stream = await dial([address], 5.0, near_only=False, uplinks=["no_such0"])
        await stream.aclose()
    with pytest.raises(DialFailed, match=r"192\.0\.2\.1:9: .*No such device"):
        await dial(["192.0.2.1:9"], 5.0, near_only=False, uplinks=["no_such0", "no_such1"])
    began = trio.current_time()
    with pytest.raises(DialFailed, match=r"192\.0\.2\.1:9: "):  # loopback takes what it does not lead to, or refuses it
        await dial(["192.0.2.1:9"], 1.0, near_only=False, uplinks=["no_such0", "lo"])
    assert trio.current_time() - began < 0.9, "an uplink that does not answer leaves time for others"


async def test_who_may_dial_loopback_alone_dials_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that has an address beyond is not tried at all; one of loopback is looked up once."""
    known = {"here": ["::1", "127.0.0.1"], "both": ["127.0.0.1", "192.0.2.1"]}
    dialled: list[str] = []

    async def look(host: str, port: int, **_: object) -> list[Any]:
        return [(0, 0, 0, "", (address, port)) for address in known.get(host, [host])]

    async def connect(host: str, port: int) -> None:
        dialled.append(host)
        raise ConnectionRefusedError("refused")

    monkeypatch.setattr(trio.socket, "getaddrinfo", look)
    monkeypatch.setattr(trio, "open_tcp_stream", connect)
    far = ["192.0.2.1:9", "[2001:db8::1]:9", "[::ffff:192.0.2.1]:9", "0.0.0.0:9", "both:9"]
    for address in far:
        with pytest.raises(DialFailed, match=r"it is beyond this machine.*expected an address of loopback"):
            await dial([address], 5.0, near_only=True)
    assert dialled == []
    with pytest.raises(DialFailed) as failed:
        await dial([*far, "[::ffff:127.0.0.1]:9", "here:9"], 5.0, near_only=True)
    assert not failed.value.refused, "nobody knows whether somebody listens there"
    assert dialled == ["::ffff:127.0.0.1", "::1", "127.0.0.1"]
    with pytest.raises(DialFailed):
        await dial(["192.0.2.1:9"], 5.0, near_only=False)
    assert dialled[3:] == ["192.0.2.1"]


@pytest.fixture
def full_queue(tmp_path: Path) -> Iterator[tuple[str, socket.socket]]:
    """(path, listener) of a unix socket whose queue of connections is full."""
    path = str(tmp_path / "full.sock")
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(path)
        listener.listen(1)
        while True:
            one = stack.enter_context(socket.socket(socket.AF_UNIX))
            one.setblocking(False)
            try:
                one.connect(path)
            except BlockingIOError:
                break
        yield path, listener


def test_who_connects_waits_while_the_queue_is_full(full_queue: tuple[str, socket.socket]) -> None:
    path, listener = full_queue
    connected: list[socket.socket] = []
    thread = threading.Thread(target=lambda: connected.append(connect_local(path, timeout=30)))
    thread.start()
    while thread.is_alive():
        with contextlib.suppress(BlockingIOError):
            listener.setblocking(False)
            listener.accept()[0].close()
    assert connected[0].gettimeout() == 30
    connected[0].close()


def test_who_connects_does_not_wait_for_ever(full_queue: tuple[str, socket.socket]) -> None:
    path, _ = full_queue
    start = time.monotonic()
    with pytest.raises(TimeoutError, match=r"its queue of connections was full for 0.05 s"):
        connect_local(path, timeout=0.05)
    assert time.monotonic() - start >= 0.05


def test_a_busy_daemon_keeps_its_socket(full_queue: tuple[str, socket.socket]) -> None:
    path, listener = full_queue
    with pytest.raises(ConfigError, match="another daemon serves this socket"):
        claim_socket(path)
    assert listener.getsockname() == path
    assert Path(path).exists()


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o1777, 0o755])
def test_a_socket_in_a_folder_where_others_may_replace_it_is_refused(mode: int, tmp_path: Path) -> None:
    """As in /tmp they may not, though they may write there."""
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(mode)
    if mode in (0o1777, 0o755):
        with claim_socket(str(folder / "s")):
            assert (folder / "s").stat().st_mode & 0o777 == 0o600
    else:
        with pytest.raises(ConfigError, match="others may replace"):
            claim_socket(str(folder / "s"))
        assert list(folder.iterdir()) == []


@pytest.mark.parametrize(("owner", "good"), [(0, True), (7, True), (8, False)])
def test_a_folder_for_the_socket_is_its_users_or_roots(
    owner: int, good: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "s").mkdir(mode=0o700)
    with monkeypatch.context() as patch:
        as_if_owned(patch, owner, user=7)
        if good:
            claim_socket(str(tmp_path / "s" / "s")).close()
            return
        with pytest.raises(ConfigError, match=r"one of user 7 or root, .*got drwx------ of user 8; choose"):
            claim_socket(str(tmp_path / "s" / "s"))
    assert list((tmp_path / "s").iterdir()) == []


def test_a_link_where_the_socket_should_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "s").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="is not a socket"):
        claim_socket(str(tmp_path / "s"))


@pytest.mark.parametrize("how", ["open to others", "a link", "a file", "another's"])
def test_a_folder_in_tmp_that_others_could_wait_in_is_refused(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The default place without a runtime directory: whoever made it first could answer to clients there."""
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr(local, "_SHARED", str(tmp_path))
    path = tmp_path / f"wancoll-{os.getuid()}"
    assert local.default_socket() == str(path / "peer.sock")
    assert path.stat().st_mode & 0o777 == 0o700
    assert local.default_socket() == str(path / "peer.sock")
    path.rmdir()
    if how == "open to others":
        path.mkdir()
        path.chmod(0o777)
    elif how == "a link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        path.symlink_to("elsewhere")
    elif how == "a file":
        path.touch(mode=0o600)
    else:
        (tmp_path / "wancoll-7").mkdir(mode=0o700)
    with monkeypatch.context() as patch:
        if how == "another's":
            as_if_owned(patch, 8, user=7)
        with pytest.raises(ConfigError, match=r"not for this user alone.* of user \d+; set WANCOLL_SOCKET"):
            local.default_socket()


def test_a_runtime_directory_that_is_too_long_for_sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "_SHARED", str(tmp_path))
    for length, path in ((107, ""), (108, str(tmp_path / f"wancoll-{os.geteuid()}" / "peer.sock"))):
        runtime = "/" + "x" * (length - len("/" + "/wancoll/peer.sock"))
        monkeypatch.setenv("XDG_RUNTIME_DIR", runtime)
        assert local.default_socket() == (path or f"{runtime}/wancoll/peer.sock")


def test_folders_of_processes_that_were_killed_are_removed_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    code = f"import tempfile; tempfile.tempdir = {str(tmp_path)!r}; from wancoll.local import OwnFolder; "
    living = "made = OwnFolder(); print(made.path, flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code + living], stdin=-1, stdout=-1, text=True) as process:
        assert process.stdout is not None
        theirs = Path(process.stdout.readline().strip())
        (theirs / "peer.log").write_text("it is gone")
        (tmp_path / "wancoll-logs").mkdir()  # made by somebody else, as is the next
        for other in ("wancoll-logs", "wancoll-12345678"):
            (tmp_path / other).mkdir(exist_ok=True)
        (tmp_path / "wancoll-logs" / "held").touch()
        mine, alive = local.OwnFolder(), {"wancoll-logs", "wancoll-12345678", theirs.name}
        assert set(os.listdir(tmp_path)) == {*alive, Path(mine.path).name}
        process.kill()
        process.wait()
    evidence = tmp_path / "wancoll-evidence"  # a copy of what a process left behind
    shutil.copytree(theirs, evidence)
    with monkeypatch.context() as patch:
        as_if_owned(patch, 8, user=7)
        theirs_too = tmp_path / "wancoll-projects"  # a folder of the user's own, with a file of that name
        theirs_too.mkdir()
        (theirs_too / "held").write_text("a list\n")
        (tmp_path / "wancoll-pipeline").mkdir()
        os.mkfifo(tmp_path / "wancoll-pipeline" / "held")
        alive |= {theirs_too.name, evidence.name, "wancoll-pipeline"}
        local.OwnFolder().close()
        assert theirs.exists()
    local.OwnFolder().close()
    assert set(os.listdir(tmp_path)) == {*alive, Path(mine.path).name} - {theirs.name}
    mine.close()
    mine.close()
    assert set(os.listdir(tmp_path)) == alive - {theirs.name}


@pytest.mark.parametrize(
    ("mode", "owner", "open_to"),  # "write", "read too", "write, but as to /tmp": which rules it breaks
    [
        (0o700, 7, ""), (0o700, 0, ""), (0o700, 8, "wrs"), (0o755, 7, "r"), (0o710, 0, "r"), (0o720, 7, "wrs"),
        (0o702, 0, "wrs"), (0o1777, 0, "wr"), (0o1777, 8, "wrs"),
    ],
)  # fmt: skip
def test_who_may_change_what_is_one_rule(mode: int, owner: int, open_to: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 7)
    found = os.stat_result((stat.S_IFDIR | mode, 1, 1, 1, owner, 1, 0, 0, 0, 0))
    broken = {"w": {}, "r": {"reads": True}, "s": {"sticky": True}}
    assert "".join(name for name, rule in broken.items() if local.open_to_others(found, **rule)) == open_to
    assert local.standing(found).endswith(f" of user {owner}")


async def test_a_dial_for_which_no_thread_can_be_started_fails_for_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name is looked up in one, and a container may have all the processes that it may."""

    async def none_left(*_: object, **__: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(trio.to_thread, "run_sync", none_left)
    with pytest.raises(DialFailed, match="can't start new thread"):
        await dial(["some.name.invalid:1"], 5.0, near_only=False)
