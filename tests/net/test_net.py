"""Streams that never wait, the bound on handshakes, dialling."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from wancoll import local
from wancoll.errors import ConfigError
from wancoll.local import join_address
from wancoll.net.dial import DialFailed, dial
from wancoll.net.listen import Handshakes, claim_socket, open_listeners
from wancoll.net.stream import Stream
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
    with trio.fail_after(10):
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
    left: list[tuple[str, float]] = []

    async def idle(name: str) -> None:
        with handshakes.one():
            await trio.sleep_forever()
        left.append((name, trio.current_time() - start))

    async def introduced() -> None:
        with handshakes.one():
            assert len(handshakes) == 2
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


@pytest.mark.parametrize("host", ["a..b", ".", "x" * 64 + ".org", "a\0b", "\ud800"])
async def test_a_dial_to_what_is_no_name_says_so(host: str) -> None:
    with pytest.raises(DialFailed):
        await dial([f"{host}:80"], 5.0)


async def test_a_dial_that_nobody_answers_says_where() -> None:
    with open_listeners("127.0.0.1:0")[0] as listener:
        address = join_address(*listener.getsockname())
    with pytest.raises(DialFailed, match=f"{address}.*refused"):
        await dial([address], 2.0)


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
        path.mkdir(mode=0o700)
        uid = os.getuid()
        monkeypatch.setattr(os, "getuid", lambda: uid + 1)
        path.rename(tmp_path / f"wancoll-{uid + 1}")
    with pytest.raises(ConfigError, match="not for this user alone"):
        local.default_socket()
