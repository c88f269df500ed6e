"""Engines in one process, joined by loopback TCP: what the engine's tests share."""

import select
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from tests.schedule import numbers
from wancoll.collective import Descriptor, DType, Kind, ReduceOp
from wancoll.native.engine import Done, Engine, LaneStatistics
from wancoll.native.seal import Sealed, Seals
from wancoll.peer.links.beside import Memory
from wancoll.schedule.choose import make, sizes
from wancoll.schedule.steps import RAW_ENDS, Ends

KIB = 1024
DEADLINE = 60.0
FINGERPRINT = 0xF00D


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        a = socket.create_connection(listener.getsockname())
        b, _ = listener.accept()
    return a, b


def hand_over(sock: socket.socket) -> int:
    sock.setblocking(False)
    return sock.detach()


def seal(seals: Seals, pair: tuple[socket.socket, socket.socket]) -> list[tuple[socket.socket, Sealed]]:
    """Both ends, through their handshakes; the sockets are of no more use."""
    ends = [(sock, seals.begin(hand_over(sock), accepts=i == 1)) for i, sock in enumerate(pair)]
    left = [end for _, end in ends]
    while left:
        left = [end for end in left if end.handshake()]
    return ends


def wait_for(engine: Engine, kind: type, timeout: float = DEADLINE) -> Any:
    """The first event of that kind; everything that comes with it or before it is dropped."""
    end = time.monotonic() + timeout
    while (left := end - time.monotonic()) > 0:
        if select.select([engine.fd], [], [], left)[0]:
            for event in engine.events():
                if isinstance(event, kind):
                    return event
    raise TimeoutError(f"no {kind.__name__} within {timeout} s")


def wait_until(condition: Any) -> None:
    end = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < end, "the condition does not come true"
        time.sleep(0.001)


def statistics(engine: Engine, link: int, lane: int = 0) -> LaneStatistics:
    found = engine.statistics(link, lane)
    assert found is not None
    return found


class Mesh:
    """Engines that stand for the ranks of one group, all linked to all. Link ids are 100 + the other's rank."""

    def __init__(
        self,
        world: int,
        lanes: int = 3,
        pair: Any = tcp_pair,
        *,
        seals: Seals | None = None,
        memory: int = 0,
        **config: Any,
    ) -> None:
        self.seals = seals  # None: lanes are in clear
        self.memory = memory  # bytes of a lane each way; 0: through sockets
        self.memories: list[Memory] = []  # of the rank that made it, the higher one
        self.world, self.lanes, self.epoch, self.seq = world, lanes, 1, 0
        self.lane_groups = min(lanes, config.get("workers", 2))
        self.kept: list[Any] = []  # the engines know addresses only
        self.engines = [
            Engine(**{"segment": 64 * KIB, "stripe": 64 * KIB, "workers": 2, **config}) for _ in range(world)
        ]
        for rank in range(world):
            for other in range(rank):
                self.link(rank, other, [pair() for _ in range(lanes)])

    def link(self, rank: int, other: int, pairs: Sequence[tuple[socket.socket, socket.socket]]) -> None:
        """Open the link between two ranks; *pairs*: the ends that each has of every lane."""
        made = [Memory.new(self.memory) for _ in pairs] if self.memory else []
        self.memories += made
        sealed = {} if self.seals is None else {end: one for pair in pairs for end, one in seal(self.seals, pair)}
        for engine, link, ends in zip(
            (self.engines[rank], self.engines[other]), (100 + other, 100 + rank), zip(*pairs, strict=True), strict=True
        ):
            engine.open_link(link, self.lanes, self.epoch, self.lane_groups)
            for lane, end in enumerate(ends):
                if made:
                    fd = made[lane].fd
                    engine.attach_pipe(link, lane, hand_over(end), fd, first=engine is self.engines[rank])
                elif self.seals is None:
                    engine.attach_lane(link, lane, hand_over(end))
                else:
                    engine.attach_sealed(link, lane, sealed[end])

    def close(self) -> None:
        for engine in self.engines:
            engine.close()
        for memory in self.memories:
            memory.close()

    def post(
        self,
        rank: int,
        seq: int,
        input_buffer: Any,
        result_buffer: Any,
        dtype: DType,
        op: ReduceOp,
        *,
        ring: list[int] | None = None,
        **numbers: int,
    ) -> None:
        """A ring all-reduce, among the ranks of *ring*, in order."""
        call = Descriptor(Kind.all_reduce, dtype, op, input_buffer.size)
        self.run(rank, seq, call, "ring", input_buffer, result_buffer, members=ring or range(self.world), **numbers)

    def run(
        self,
        rank: int,
        seq: int,
        call: Descriptor,
        algorithm: str,
        input_buffer: Any,
        result_buffer: Any,
        *,
        members: Sequence[int] = (),
        sites: Sequence[str] = (),
        noise: tuple[int, int, int] = (0, 0, 0),
        filled: Any = None,
        shown: Any = None,
        ends: Ends = RAW_ENDS,
        shares: Sequence[int] = (),
        **numbers: int,
    ) -> None:
        """Post any call on one rank; an array that the call does not use may be empty."""
        self.kept += [input_buffer, result_buffer, filled, shown]
        members = list(members) or list(range(self.world))
        n, me = len(members), members.index(rank)
        input_bytes, result_bytes = sizes(call, me, n, ())
        prepared = self.engines[rank].prepare(
            make(call, algorithm, me, n, sites=sites, ends=ends, shares=shares),
            {place: 100 + other for place, other in enumerate(members)},
            dtype=call.dtype,
            op=call.op,
            input_bytes=input_bytes,
            result_bytes=result_bytes,
            world_size=n,
            lanes=self.lanes,
            lane_groups=self.lane_groups,
            stripe=numbers.get("stripe", 0),
            turns=bool(numbers.get("turns", 1)),
            codec=call.codec,
            stochastic=call.rounding == "stochastic",
        )
        self.engines[rank].post(
            prepared,
            numbers.get("op_id", 1000 * self.epoch + seq),
            self.epoch,
            seq,
            numbers.get("fingerprint", FINGERPRINT),
            input_buffer.ctypes.data,
            result_buffer.ctypes.data,
            noise,
            filled_address=0 if filled is None else filled.ctypes.data,
            shown_address=0 if shown is None else shown.ctypes.data,
            attempt=numbers.get("attempt", 0),
        )

    def all_reduce(self, inputs: list[Any], dtype: DType, op: ReduceOp) -> tuple[list[Any], list[Done]]:
        self.seq += 1
        result_buffers = [np.full_like(input_buffer, 0x55) for input_buffer in inputs]
        for rank, input_buffer in enumerate(inputs):
            self.post(rank, self.seq, input_buffer, result_buffers[rank], dtype, op)
        return result_buffers, [wait_for(engine, Done) for engine in self.engines]


@contextmanager
def mesh_of(world: int, lanes: int = 3, pair: Any = tcp_pair, **config: Any) -> Iterator[Mesh]:
    mesh = Mesh(world, lanes, pair, **config)
    try:
        yield mesh
    finally:
        mesh.close()


def random_bits(dtype: DType, count: int, seed: int) -> Any:
    """Any bit pattern: NaNs, infinities, denormals and both zeros among them."""
    bits = np.random.default_rng(seed).bytes(count * dtype.itemsize)
    return np.frombuffer(bits, numbers.storage(dtype)).copy()


def same(a: Any, b: Any) -> bool:
    return bool(a.tobytes() == b.tobytes())
