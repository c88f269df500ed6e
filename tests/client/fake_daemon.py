"""A test double of the peer daemon for the client's tests: real unix socket, real protocol, real memfd, one client.

It checks what only the daemon can see: that no memory of a pending call is handed to another one.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import socket
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import numpy as np

from tests.schedule import codec
from wancoll.collective import Codec, DType, Kind, ReduceOp
from wancoll.limits import BLOCK, WORD
from wancoll.peer.arena import RingMemory
from wancoll.schedule.numbers import storage
from wancoll.wire import messages as m
from wancoll.wire.framing import Decoder, encode

ARENA = 1 << 30


class FakeDaemon:
    """To a reduction every other member contributes the same as the client, so a sum is world_size times the input.

    Where blocks move, the other ranks' are made from the client's, see shifted(); what comes from a root or a sender
    is made(). Who is in `lost` contributes nothing.

    Args:
        path: of the socket.
        world: names of the members.
        manual: keep the calls in `posts` until answer() is called.
        rank: the client's.
    """

    def __init__(
        self, path: str, world: tuple[str, ...] = ("me", "other"), manual: bool = False, rank: int = 0
    ) -> None:
        self.path, self.world, self.manual, self.rank = path, world, manual, rank
        self.places: dict[int, tuple[tuple[str, ...], int]] = {}  # members and the client's rank, by epoch
        self.lost: set[str] = set()
        self.sent: dict[tuple[int, int], list[bytes]] = {}  # by receiver and tag
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
        self.bell = os.eventfd(0)
        self.ring = RingMemory()
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

    def epoch(self, number: int, members: tuple[str, ...], rank: int | None = None) -> None:
        self.world = members
        self.rank = self.rank if rank is None else rank
        self.places[number] = (members, self.rank)
        self.send(m.EpochInfo(number, self.rank, members[self.rank], list(members)))

    def answer(self, post: m.Post) -> None:
        """Build the result and say so."""
        self.compute(post)
        self.commit(post)

    def commit(self, post: m.Post, attempts: int = 1) -> None:
        """Say that the result is what is in back."""
        self.drop(post)
        self.send(self.result(post, attempts))

    def next_post(self) -> m.Post:
        """The oldest call that is not answered."""
        self.wait_for_posts(1)
        return self.posts[0]

    def answer_all(self, count: int) -> None:
        """Answer so many calls, in the order in which they came."""
        self.wait_for_posts(count)
        for post in list(self.posts):
            self.answer(post)

    def contributors(self, post: m.Post) -> list[str]:
        return [name for name in self.places[post.epoch][0] if name not in self.lost]

    def show(self, post: m.Post, attempt: int, first: int = 0, stop: int | None = None) -> None:
        """These blocks of the result are final in the attempt."""
        if post.shown >= 0:
            count = -(-self.sizes(post)[1] // BLOCK)
            words = self.bytes[post.shown : post.shown + WORD * count].view(np.uint32)
            words[first : count if stop is None else stop] = attempt

    def compute(self, post: m.Post) -> None:
        names, me = self.places[post.epoch]
        kind, dtype = post.call.kind, post.call.dtype
        input_buffer, result_buffer = self.input_buffer(post).copy(), self.result_buffer(post)
        ranks = [rank for rank, name in enumerate(names) if name not in self.lost]
        counts = [n * dtype.itemsize for n in post.call.counts] or [post.call.count * dtype.itemsize] * len(names)
        starts = [sum(counts[:rank]) for rank in range(len(names))]
        mine = slice(starts[me], starts[me] + counts[me])
        if kind in (Kind.all_reduce, Kind.reduce) and result_buffer.size:
            result = reduced(input_buffer, dtype, post.call.op, len(ranks))
            if post.result_coded:
                result = codec.encode(Codec(post.call.codec), DType(dtype), result.view(storage(dtype)))
            result_buffer[:] = result
        elif kind is Kind.reduce_scatter:
            result_buffer[:] = reduced(input_buffer[mine], dtype, post.call.op, len(ranks))
        elif kind in (Kind.all_gather, Kind.gather) and result_buffer.size:
            self._pack(result_buffer, [shifted(np.resize(input_buffer, counts[rank]), rank - me) for rank in ranks])
        elif kind is Kind.all_to_all:
            self._pack(result_buffer, [shifted(input_buffer[starts[r] : starts[r] + counts[r]], r - me) for r in ranks])
        elif kind is Kind.broadcast:
            result_buffer[:] = input_buffer if me == post.call.root else made(result_buffer.size, post.call.root)
        elif kind is Kind.scatter:
            result_buffer[:] = input_buffer[mine] if me == post.call.root else made(result_buffer.size, post.call.root)
        elif kind is Kind.recv:
            result_buffer[:] = made(result_buffer.size, post.peer + post.tag)
        elif kind is Kind.send:
            self.sent.setdefault((post.peer, post.tag), []).append(input_buffer.tobytes())
        self.show(post, 1)

    def _pack(self, result_buffer: np.ndarray[Any, Any], blocks: list[np.ndarray[Any, Any]]) -> None:
        packed = np.concatenate(blocks)
        result_buffer[: packed.size] = packed
        result_buffer[packed.size :] = 0xEE  # nobody's

    def drop(self, post: m.Post) -> None:
        with self.changed:
            self.posts.remove(post)

    def result(self, post: m.Post, attempts: int = 1) -> m.Result:
        names = self.contributors(post)
        return m.Result(
            post.id,
            post.id,
            post.epoch,
            names,
            0xABC,
            attempts,
            "direct" if post.call.bounded else "ring",
            100 + post.id,
            0.5,
            7 * post.call.codec,
            post.call.codec / 128,
        )

    def fail(self, post: m.Post, error: str = "WorldTooSmall", calls: dict[str, str] | None = None) -> None:
        self.result_buffer(post)[:] = 0xEE  # it had begun
        self.drop(post)
        self.send(m.Failure(post.id, error, "what", "who", "expected", "got", "hint", calls or {}))

    def sizes(self, post: m.Post) -> tuple[int, int]:
        """Bytes of the input and of the result."""
        names, me = self.places[post.epoch]
        size = post.call.dtype.itemsize
        n = post.call.count * size
        everything = (sum(post.call.counts) or post.call.count * len(names)) * size
        block = post.call.counts[me] * size if post.call.counts else n
        here = me == post.call.root
        return {
            Kind.all_reduce: (n, n),
            Kind.reduce_scatter: (everything, block),
            Kind.all_gather: (block, everything),
            Kind.broadcast: (n if here else 0, n),
            Kind.reduce: (n, n if here else 0),
            Kind.gather: (n, everything if here else 0),
            Kind.scatter: (everything if here else 0, n),
            Kind.all_to_all: (everything, everything),
            Kind.send: (n, 0),
            Kind.recv: (0, n),
        }.get(post.call.kind, (0, 0))

    def input_buffer(self, post: m.Post) -> np.ndarray[Any, Any]:
        """When all of it is there."""
        size = self.sizes(post)[0]
        if post.filled >= 0:
            deadline = time.monotonic() + 20
            while not self.bytes[post.filled : post.filled + -(-size // BLOCK)].all():
                assert time.monotonic() < deadline, f"the input of {post} was not filled"
                time.sleep(0.0002)
        data = self.bytes[post.input_buffer : post.input_buffer + self.memory(post)[0]]
        if post.input_coded:
            return codec.decode(Codec(post.call.codec), DType(post.call.dtype), data, post.call.count).view(np.uint8)
        return data

    def result_buffer(self, post: m.Post) -> np.ndarray[Any, Any]:
        return self.bytes[post.result_buffer : post.result_buffer + self.memory(post)[1]]

    def memory(self, post: m.Post) -> tuple[int, int]:
        """Bytes of memory for the input and the result."""
        sizes, coded = self.sizes(post), (post.input_coded, post.result_coded)
        reads, writes = (
            codec.coded_bytes(Codec(post.call.codec), post.call.count) if each else size
            for size, each in zip(sizes, coded, strict=True)
        )
        return reads, writes

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
        os.close(self.bell)
        self.ring.close()
        assert not self.errors, self.errors

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    # ---- its thread ----------------------------------------------------------------------------------

    def _serve(self) -> None:
        decoder: Decoder[Any] = Decoder(m.FromClient, 1 << 20)
        while self.attach is None:  # whoever only looks whether somebody is there is none
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if self.client is not None:
                self.client.close()
            self.client = client
            with contextlib.suppress(OSError):
                while data := client.recv(65536):
                    for message in decoder.feed(data):
                        self._take(message)
        with self.changed:
            self.detached = True
            self.changed.notify_all()

    def _take(self, message: Any) -> None:
        if isinstance(message, m.Attach):
            with self.changed:
                self.attach = message
                self.changed.notify_all()
            instead = self.on_attach(message)
            if instead is None:
                assert self.client is not None
                socket.send_fds(
                    self.client,
                    [encode(m.Attached("fake", ARENA))],
                    [self.fd, self.bell, self.ring.fd, self.ring.theirs],
                )
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

        def overlap(a: int, a_size: int, b: int, b_size: int) -> bool:
            return bool(a_size and b_size) and a < b + b_size and b < a + a_size

        input_buffer, result_buffer = self.memory(post)
        for other in [post, *self.posts]:
            other_input, other_result = self.memory(other)
            if (
                overlap(post.result_buffer, result_buffer, other.input_buffer, other_input)
                or overlap(post.input_buffer, input_buffer, other.result_buffer, other_result)
                or (other is not post and overlap(post.result_buffer, result_buffer, other.result_buffer, other_result))
            ):
                self.errors.append(f"{post} and {other} share memory")


def shifted(raw: np.ndarray[Any, Any], distance: int) -> np.ndarray[Any, Any]:
    """Bytes of the block of a rank that is so far from the client's whose block is *raw*."""
    return (np.frombuffer(raw.tobytes(), np.uint8).astype(np.int64) + 16 * distance).astype(np.uint8)


def made(nbytes: int, mark: int) -> np.ndarray[Any, Any]:
    """Bytes that came from elsewhere."""
    return ((np.arange(nbytes) + 1) * (mark % 256 + 3)).astype(np.uint8)


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
