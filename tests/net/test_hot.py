"""What is served without a round of trio, for how long, and what is left to the task."""

from __future__ import annotations

import socket
from contextlib import closing
from types import SimpleNamespace

import pytest
import trio
import trio.testing

from wancoll.net import hot as hot_module
from wancoll.net.hot import Hot, glance
from wancoll.net.stream import Stream
from wancoll.wire import messages as m
from wancoll.wire.framing import Decoder, encode

COMMIT = m.Commit("g", 1, 2, 3)
ABORT = m.Abort("g", 1, "", 0)


def test_one_thing_after_another_is_served_until_nothing_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hot_module, "_LONGEST", 60.0)
    ones, others = socket.socketpair(), socket.socketpair()
    served: list[bytes] = []

    def serve(mine: socket.socket, answer: socket.socket) -> bool:
        served.append(mine.recv(100))
        if len(served) < 5:
            answer.send(b"%d" % len(served))
        return True

    with closing(Hot()) as hot, ones[0], ones[1], others[0], others[1]:
        hot.add(ones[0].fileno(), lambda: serve(ones[0], others[1]))
        hot.add(others[0].fileno(), lambda: serve(others[0], ones[1]))
        hot.stay()
        assert served == []
        ones[1].send(b"0")
        hot.stay()
        assert served == [b"0", b"1", b"2", b"3", b"4"]
        hot.remove(ones[0].fileno())
        ones[1].send(b"not looked at")
        hot.stay()
        assert len(served) == 5


def test_what_is_left_is_left_at_once_and_an_endless_flood_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time passes by a look each."""
    one, other = socket.socketpair()
    looks = 0
    monkeypatch.setattr(hot_module, "time", SimpleNamespace(monotonic=lambda: looks * hot_module._LONGEST / 10))

    def serve() -> bool:
        nonlocal looks
        looks += 1
        return more

    with closing(Hot()) as hot, one, other:
        hot.add(one.fileno(), serve)
        other.send(b"x")
        more = False
        hot.stay()
        assert looks == 1
        more = True
        hot.stay()
        assert looks == 11


def test_one_that_was_served_may_remove_the_next() -> None:
    ones, others = socket.socketpair(), socket.socketpair()
    served: list[int] = []
    with closing(Hot()) as hot, ones[0], ones[1], others[0], others[1]:
        fds = ones[0].fileno(), others[0].fileno()

        def serve(at: int) -> bool:
            served.append(at)
            hot.remove(fds[1 - at])
            return False

        hot.add(fds[0], lambda: serve(0))
        hot.add(fds[1], lambda: serve(1))
        ones[1].send(b"x")
        others[1].send(b"x")
        hot.stay()
        assert len(served) == 1


@pytest.mark.parametrize(
    "sent",
    [encode(ABORT), encode(COMMIT) + encode(COMMIT), encode(COMMIT)[:-1], encode(COMMIT)[:3], b"\0\0\0\1\xc1"],
    ids=["another kind", "two", "a part", "a part of the length", "nonsense"],
)
async def test_a_glance_takes_one_whole_message_and_leaves_all_else(sent: bytes) -> None:
    mine, theirs = socket.socketpair()
    with theirs:
        stream = Stream(mine, "somebody", 1 << 20)
        decoder: Decoder[m.Commit] = Decoder(m.Commit, 1 << 20)
        assert glance(stream, decoder, m.Commit | m.Settled) is None
        theirs.send(encode(COMMIT))
        assert glance(stream, decoder, m.Commit | m.Settled) == COMMIT
        came: list[bytes] = []

        async def receive() -> None:
            came.append(await stream.receive())

        with trio.fail_after(30):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(receive)
                await trio.testing.wait_all_tasks_blocked()
                theirs.send(sent)
                assert glance(stream, decoder, m.Commit | m.Settled) is None
                assert glance(stream, decoder, m.Commit | m.Settled) is None
        assert came == [sent]
        stream.close()


async def test_what_was_left_comes_before_what_came_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the task was woken already: another one that runs before it looks, and leaves it."""
    mine, theirs = socket.socketpair()
    stream, decoder = Stream(mine, "somebody", 1 << 20), Decoder[m.Commit](m.Commit, 1 << 20)
    first, second = encode(ABORT), encode(COMMIT)

    async def woken(_: int) -> None:
        monkeypatch.undo()
        theirs.send(first)
        assert glance(stream, decoder, m.Commit) is None
        theirs.send(second)
        assert glance(stream, decoder, m.Commit) is None

    monkeypatch.setattr(trio.lowlevel, "wait_readable", woken)
    with theirs, trio.fail_after(30):
        assert await stream.receive() == first
        assert await stream.receive() == second
    stream.close()
