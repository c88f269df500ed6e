"""A test double of the peer daemon for test_communicator.py: real unix socket, real protocol, real memfd, one client.

It checks what only the daemon can see: that no memory of a pending call is handed to another one.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import socket
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import numpy as np

from wancoll.collective import DType, Kind, ReduceOp
from wancoll.wire import messages as m
from wancoll.wire.framing import Decoder, encode

ARENA = 1 << 30


class FakeDaemon:
    """Every other member contributes the same as the client, so a sum is world_size times the input.

    Args:
        path: of the socket.
        world: names of the members; the client is the first.
        manual: keep the calls in `posts` until answer() is called.
    """

    def __init__(self, path: str, world: tuple[str, ...] = ("me", "other"), manual: bool = False) -> None:
        self.path, self.world, self.manual = path, world, manual
        self.posts: list[m.Post] = []
        self.seen: list[m.Post] = []
        self.attach: m.Attach | None = None
        self.detached = False
        self.goodbye = False
        self.errors: list[str] = []
        self.on_attach: Callable[[m.Attach], list[m.FromDaemon] | None] = lambda attach: None
        self.changed = threading.Condition()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(path)
        self._listener.listen()
        self.fd = os.memfd_create("arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, ARENA)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        self.map = mmap.mmap(self.fd, ARENA)
        self.bytes = np.frombuffer(self.map, np.uint8)
        self.client: socket.socket | None = None
        self._thread = threading.Thread(target=self._serve, name="fake daemon")
        self._thread.start()

    # ---- what tests do -------------------------------------------------------------------------------

    def send(self, *messages: Any) -> None:
        assert self.client is not None
        self.client.sendall(b"".join(encode(message) for message in messages))

    def wait_for(self, condition: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, 10), "the fake daemon waited in vain"

    def wait_for_posts(self, count: int) -> None:
        self.wait_for(lambda: len(self.posts) >= count)

    def epoch(self, number: int, members: tuple[str, ...]) -> None:
        self.world = members
        self.send(m.EpochInfo(number, 0, members[0], list(members)))

    def answer(self, post: m.Post) -> None:
        """Build the result in back and say so."""
        self.compute(post)
        self.drop(post)
        self.send(self.result(post))

    def compute(self, post: m.Post) -> None:
        if post.kind == Kind.all_reduce:
            self.back(post)[:] = reduced(self.front(post).copy(), DType(post.dtype), ReduceOp(post.op), len(self.world))

    def drop(self, post: m.Post) -> None:
        with self.changed:
            self.posts.remove(post)

    def result(self, post: m.Post) -> m.Result:
        return m.Result(post.id, post.id, 1, list(self.world), 0xABC, 1, "ring", 100 + post.id, 0.5)

    def fail(self, post: m.Post, error: str = "WorldTooSmall", calls: dict[str, str] | None = None) -> None:
        self.back(post)[:] = 0xEE  # it had begun
        self.drop(post)
        self.send(m.Failure(post.id, error, "what", "who", "expected", "got", "hint", calls or {}))

    def front(self, post: m.Post) -> np.ndarray[Any, Any]:
        return self.bytes[post.front : post.front + post.count * DType(post.dtype).itemsize]

    def back(self, post: m.Post) -> np.ndarray[Any, Any]:
        return self.bytes[post.back : post.back + post.count * DType(post.dtype).itemsize]

    def hang_up(self) -> None:
        assert self.client is not None
        self.client.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        if self.client is not None:
            self.hang_up() if not self.detached else None
        self._thread.join(10)
        assert not self._thread.is_alive()
        if self.client is not None:
            self.client.close()
        del self.bytes
        self.map.close()
        os.close(self.fd)
        assert not self.errors, self.errors

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    # ---- its thread ----------------------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            self.client, _ = self._listener.accept()
        except OSError:
            return
        decoder: Decoder[Any] = Decoder(m.FromClient, 1 << 20)
        try:
            while data := self.client.recv(65536):
                for message in decoder.feed(data):
                    self._take(message)
        except OSError:
            pass
        with self.changed:
            self.detached = True
            self.changed.notify_all()

    def _take(self, message: Any) -> None:
        if isinstance(message, m.Attach):
            self.attach = message
            instead = self.on_attach(message)
            if instead is None:
                assert self.client is not None
                socket.send_fds(self.client, [encode(m.Attached("fake", ARENA))], [self.fd])
                self.epoch(1, self.world)
            else:
                self.send(*instead)
        elif isinstance(message, m.Post):
            with self.changed:
                self._check(message)
                self.posts.append(message)
                self.seen.append(message)
                self.changed.notify_all()
            if not self.manual:
                self.answer(message)
        elif isinstance(message, m.Detach):
            with self.changed:
                self.detached = self.goodbye = True
                self.changed.notify_all()

    def _check(self, post: m.Post) -> None:
        """Nobody may write what another pending call reads or writes."""
        if post.id != len(self.seen) + 1:
            self.errors.append(f"id {post.id} is out of order")
        for other in [post, *self.posts]:
            pairs = [(post.back, other.front), (post.front, other.back)]
            if other is not post:
                pairs.append((post.back, other.back))
            size, other_size = (p.count * DType(p.dtype).itemsize for p in (post, other))
            sizes = {post.back: size, post.front: size}
            for mine, theirs in pairs:
                if size and other_size and mine < theirs + other_size and theirs < mine + sizes[mine]:
                    self.errors.append(f"{post} and {other} share memory")


def reduced(raw: np.ndarray[Any, Any], dtype: DType, op: ReduceOp, world: int) -> np.ndarray[Any, Any]:
    """Bytes of the result when *world* members contribute the same."""
    if dtype is DType.bfloat16:
        wide = (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        return (
            np.ascontiguousarray((wide * (world if op is ReduceOp.sum else 1)).view(np.uint32) >> 16)
            .astype(np.uint16)
            .view(np.uint8)
        )
    x = raw.view(dtype.name)
    with np.errstate(over="ignore"):
        if op is ReduceOp.sum:
            x = x * np.array(world).astype(dtype.name)
        elif op is ReduceOp.prod:
            x = x**world
    return np.ascontiguousarray(x.astype(dtype.name)).reshape(-1).view(np.uint8)
