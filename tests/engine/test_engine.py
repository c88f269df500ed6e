"""Real engines in one process over loopback TCP: bits, lanes, epochs, cancels, mismatches and hostile bytes."""

import itertools
import os
import select
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.engines import (
    DEADLINE,
    FINGERPRINT,
    KIB,
    Mesh,
    hand_over,
    mesh_of,
    random_bits,
    same,
    statistics,
    tcp_pair,
    wait_for,
    wait_until,
)
from tests.later import at_night
from tests.schedule import numbers, reference
from wancoll._native import ffi
from wancoll.collective import Codec, Descriptor, DType, Kind, ReduceOp
from wancoll.errors import ConfigError
from wancoll.native.engine import Cancelled, Done, Engine, LaneDown, Mismatch, hash_at, kernel_name
from wancoll.schedule.choose import make
from wancoll.schedule.steps import Action, Buffer, Direction, Place, Schedule, Step

HEADER = struct.Struct("<QBBHIQQQQQQ")
HEAD = HEADER.size
VERSION = 4


def hash64(data: bytes) -> int:
    return hash_at(int(ffi.cast("uintptr_t", ffi.from_buffer(data))), len(data))


# ---- values ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("world", "count"),
    [
        *((world, count) for world in range(1, 6) for count in (0, 1, 2, 3, 1025)),
        (1, 203530),
        (2, 203530),
        *at_night((3, 203530), (4, 203530), (5, 203530)),
    ],
)
def test_every_bit_equals_the_reference(world: int, count: int) -> None:
    with mesh_of(world) as ring:
        for dtype in DType:
            inputs = [random_bits(dtype, count, seed=world * 10 + rank) for rank in range(world)]
            untouched = [input_buffer.copy() for input_buffer in inputs]
            for op in ReduceOp:
                call = Descriptor(Kind.all_reduce, dtype, op, count)
                schedules = [make(call, "ring", rank, world) for rank in range(world)]
                expected = reference.execute(schedules, inputs, dtype, op)
                result_buffers, done = ring.all_reduce(inputs, dtype, op)
                for result_buffer, want in zip(result_buffers, expected, strict=True):
                    assert same(result_buffer, want), (dtype, op)
                assert {d.digest for d in done} == {numbers.digest(expected[0].tobytes())}
            assert all(same(input_buffer, before) for input_buffer, before in zip(inputs, untouched, strict=True))


def test_bits_do_not_depend_on_lanes_workers_or_segment() -> None:
    world, count = 3, 401_233
    inputs = [random_bits(DType.float32, count, seed=rank) for rank in range(world)]
    results = set()
    for lanes in (1, 3, 8):
        for workers in (1, 2):
            for segment in (64 * KIB, 256 * KIB):
                with mesh_of(world, lanes, workers=workers, segment=segment) as ring:
                    result_buffers, done = ring.all_reduce(inputs, DType.float32, ReduceOp.avg)
                    results |= {
                        (result_buffer.tobytes(), d.digest)
                        for result_buffer, d in zip(result_buffers, done, strict=True)
                    }
    assert len(results) == 1


@pytest.mark.parametrize("world", [2, 4])
def test_bytes_on_the_wire(world: int) -> None:
    count = 4_000_000
    inputs = [np.full(count, rank, np.float32) for rank in range(world)]
    with mesh_of(world, segment=256 * KIB, stripe=256 * KIB) as ring:
        result_buffers, done = ring.all_reduce(inputs, DType.float32, ReduceOp.sum)
        assert all((result_buffer == sum(range(world))).all() for result_buffer in result_buffers)
        least, received = 2 * (world - 1) / world * count * 4, 0
        for rank, d in enumerate(done):
            assert least <= d.bytes_sent < least * 1.001
            lanes = [
                statistics(ring.engines[rank], 100 + other, lane)
                for other in range(world)
                if other != rank
                for lane in range(ring.lanes)
            ]
            assert sum(lane.bytes_sent for lane in lanes) == d.bytes_sent
            received += sum(lane.bytes_received for lane in lanes)
        assert received == sum(d.bytes_sent for d in done)


@pytest.mark.parametrize(
    ("seq", "stripe", "turns", "busy"),
    [
        (2, 64 * KIB, 1, [0, 1, 2]),
        (2, 1 << 20, 1, [0, 2]),
        (2, 2 << 20, 1, [2]),
        (2, 4 << 20, 1, [2]),
        (4, 4 << 20, 1, [1]),
        (4, 1 << 20, 0, [0, 1]),
        (4, 4 << 20, 0, [0]),
    ],
)
def test_an_op_uses_the_lanes_that_its_plan_says(seq: int, stripe: int, turns: int, busy: list[int]) -> None:
    """Chunks of 2 MiB over 3 lanes; the first part goes to the lane whose turn it is, or to lane 0.

    Of the lane groups {0, 2} and {1}: where there are turns, lane 0 may help lane 2 and the other way round.
    """
    input_buffers = [np.full(1 << 20, rank + 1, np.float32) for rank in range(2)]
    result_buffers = [np.zeros_like(input_buffer) for input_buffer in input_buffers]
    with mesh_of(2) as ring:
        for rank in range(2):
            ring.post(
                rank,
                seq,
                input_buffers[rank],
                result_buffers[rank],
                DType.float32,
                ReduceOp.sum,
                stripe=stripe,
                turns=turns,
            )
        for engine in ring.engines:
            wait_for(engine, Done)
        assert all((result_buffer == 3).all() for result_buffer in result_buffers)
        for rank, engine in enumerate(ring.engines):
            used = {lane for lane in range(3) if statistics(engine, 101 - rank, lane).bytes_sent}
            helpers = {2 - lane for lane in busy if turns and lane != 1}
            assert set(busy) <= used <= set(busy) | helpers


@pytest.mark.parametrize("codec", [Codec.none, Codec.int8])
def test_other_lanes_carry_what_a_slow_one_has_no_room_for(codec: Codec) -> None:
    """Lane 0 carries nothing at all until the others have carried all that it had not taken."""
    count, lanes = 2 << 20, 4
    call = Descriptor(Kind.all_reduce, DType.float32, ReduceOp.sum, count, codec=codec)
    input_buffers = [np.random.default_rng(rank).standard_normal(count).astype(np.float32) for rank in range(2)]
    result_buffers = [np.zeros_like(input_buffer) for input_buffer in input_buffers]
    expected = reference.execute(
        [make(call, "ring", rank, 2) for rank in range(2)], input_buffers, call.dtype, call.op, codec=codec
    )
    carried = input_buffers[0].nbytes // (1 if codec is Codec.none else 4)  # and a little more, by each rank
    with mesh_of(2, lanes, workers=1) as ring, Relay(ring, lane=0) as relay:
        for rank in range(2):
            ring.run(rank, 1, call, "ring", input_buffers[rank], result_buffers[rank], stripe=8 * KIB)

        def by_others(rank: int) -> int:
            return sum(statistics(ring.engines[rank], 101 - rank, lane).bytes_sent for lane in range(1, lanes))

        wait_until(lambda: min(by_others(0), by_others(1)) > carried * 0.6)
        relay.open()
        for engine in ring.engines:
            wait_for(engine, Done)
        assert all(same(result_buffer, want) for result_buffer, want in zip(result_buffers, expected, strict=True))
        if codec is Codec.none:
            assert all(statistics(ring.engines[rank], 101 - rank, 0).bytes_sent < carried / 6 for rank in range(2))


def test_pipelined_ops_finish_in_any_size() -> None:
    world, ops = 3, 8
    with mesh_of(world) as ring:
        inputs = [
            [random_bits(DType.int32, 50_000 * k + k, seed=rank + k) for k in range(ops)] for rank in range(world)
        ]
        result_buffers = [[np.zeros_like(input_buffer) for input_buffer in input_buffers] for input_buffers in inputs]
        for rank in range(world):
            for k in range(ops):
                ring.post(rank, k + 1, inputs[rank][k], result_buffers[rank][k], DType.int32, ReduceOp.sum)
        for engine in ring.engines:
            found: list[Any] = []
            while len(found) < ops:
                assert select.select([engine.fd], [], [], DEADLINE)[0]
                found += engine.events()
            assert sorted(d.op for d in found) == [1001 + k for k in range(ops)]
        for k in range(ops):
            want = sum(inputs[rank][k] for rank in range(world))
            assert all(same(result_buffers[rank][k], want) for rank in range(world))


# ---- epochs ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("moment", [0.0, 0.001, 0.003, 0.01])
def test_survivors_retry_in_the_same_memory_while_a_neighbour_does_not_read(moment: float) -> None:
    count, lanes = 1_500_000, 3
    with mesh_of(2, lanes) as ring:
        silent = []  # rank 2's ends: nobody ever reads them
        for engine in ring.engines:
            engine.open_link(102, lanes, 1, ring.lane_groups)
            for lane in range(lanes):
                a, b = tcp_pair()
                engine.attach_lane(102, lane, hand_over(a))
                silent.append(b)
        inputs = [random_bits(DType.int32, count, seed=rank) for rank in range(2)]
        result_buffers = [np.zeros_like(input_buffer) for input_buffer in inputs]
        for rank in range(2):
            ring.post(rank, 1, inputs[rank], result_buffers[rank], DType.int32, ReduceOp.sum, ring=[0, 1, 2])
            ring.post(rank, 2, inputs[rank], result_buffers[rank], DType.int32, ReduceOp.sum, ring=[0, 1, 2], op_id=77)
        time.sleep(moment)  # the point is that any moment will do
        ring.epoch = 2
        for rank, engine in enumerate(ring.engines):
            engine.set_epoch(100 + 1 - rank, 2)
            engine.set_epoch(102, 2)
            engine.cancel(1001)
            engine.cancel(77)
            ring.post(rank, 1, inputs[rank], result_buffers[rank], DType.int32, ReduceOp.sum)
        want = inputs[0] + inputs[1]
        for rank, engine in enumerate(ring.engines):
            found: list[Any] = []
            while len(found) < 3:
                assert select.select([engine.fd], [], [], DEADLINE)[0]
                found += engine.events()
            assert sorted(e.op for e in found if isinstance(e, Cancelled)) == [77, 1001]
            assert [e for e in found if isinstance(e, Done)] == [
                Done(2001, numbers.digest(want.tobytes()), found[-1].bytes_sent)
            ]
            assert same(result_buffers[rank], want)
        for sock in silent:
            sock.close()


def test_a_cancelled_op_leaves_its_memory_alone() -> None:
    with mesh_of(2) as ring:
        input_buffer = random_bits(DType.int32, 2_000_000, seed=1)
        result_buffer = np.zeros_like(input_buffer)
        ring.post(0, 1, input_buffer, result_buffer, DType.int32, ReduceOp.sum)
        ring.post(1, 1, input_buffer, np.zeros_like(input_buffer), DType.int32, ReduceOp.sum)
        ring.engines[0].cancel(1001)
        wait_for(ring.engines[0], Cancelled)
        result_buffer[:] = 7
        ring.engines[0].cancel(4711)
        assert wait_for(ring.engines[0], Cancelled) == Cancelled(4711)
        ring.close()
        assert (result_buffer == 7).all()


def test_an_epoch_may_begin_again_with_an_earlier_op() -> None:
    """What was finished and is not committed runs again, over lanes that have carried later ones."""
    with mesh_of(2, lanes=1) as ring:
        inputs = [random_bits(DType.int32, 40_000, seed=rank) for rank in range(2)]
        for epoch in (1, 2):
            if epoch == 2:
                for rank, engine in enumerate(ring.engines):
                    engine.set_epoch(100 + 1 - rank, epoch)
            ring.epoch, ring.seq = epoch, 4
            for _ in range(3):
                result_buffers, _ = ring.all_reduce(inputs, DType.int32, ReduceOp.sum)
                assert all(same(result_buffer, inputs[0] + inputs[1]) for result_buffer in result_buffers)


@pytest.mark.parametrize("lanes", [1, 3, 8])  # calls of different size use different lanes, but share one
def test_a_mismatch_is_reported_once_and_ends_with_the_epoch(lanes: int) -> None:
    with mesh_of(2, lanes) as ring:
        input_buffers = [random_bits(DType.int32, n, seed=n) for n in (70_000, 300)]
        result_buffers = [np.zeros_like(input_buffer) for input_buffer in input_buffers]
        for rank in range(2):
            ring.post(
                rank, 4, input_buffers[rank], result_buffers[rank], DType.int32, ReduceOp.sum, fingerprint=50 + rank
            )
        for rank, engine in enumerate(ring.engines):
            assert wait_for(engine, Mismatch) == Mismatch(100 + 1 - rank, 1004, 4, 51 - rank)
            assert not select.select([engine.fd], [], [], 0.05)[0]
        ring.epoch, ring.seq = 2, 4
        for rank, engine in enumerate(ring.engines):
            engine.set_epoch(100 + 1 - rank, 2)
            engine.cancel(1004)
            wait_for(engine, Cancelled)
        result_buffers, _ = ring.all_reduce([input_buffers[0], input_buffers[0]], DType.int32, ReduceOp.sum)
        assert same(result_buffers[0], input_buffers[0] * 2)


def test_a_lane_takes_one_socket_in_its_life() -> None:
    with mesh_of(2, 2) as ring:
        a, b = tcp_pair()
        with b:
            with pytest.raises(ConfigError):
                ring.engines[0].attach_lane(101, 1, hand_over(a))
            assert b.recv(1) == b"", "it was the engine's all the same, and is closed"
        inputs = [random_bits(DType.int32, 300_000, seed=rank) for rank in range(2)]
        result_buffers, _ = ring.all_reduce(inputs, DType.int32, ReduceOp.sum)
        assert same(result_buffers[1], inputs[0] + inputs[1])
        assert ring.engines[0].statistics(101, 2) is None
        ring.engines[0].close_link(101)
        downs: list[Any] = []
        wait_until(lambda: downs.extend(ring.engines[1].events()) or len(downs) == 2)
        assert {(down.link, down.lane) for down in downs if isinstance(down, LaneDown)} == {(100, 0), (100, 1)}
        a, b = tcp_pair()
        with b, pytest.raises(ConfigError):
            ring.engines[1].attach_lane(100, 1, hand_over(a))


def test_lanes_keep_the_pace_that_they_are_told() -> None:
    most = socket.SOL_SOCKET, 47, 8  # SO_MAX_PACING_RATE
    with Engine() as engine:
        engine.open_link(5, 2, 1)
        ends = [tcp_pair() for _ in range(2)]
        watched = [socket.socket(fileno=os.dup(mine.fileno())) for mine, _ in ends]

        def rates() -> list[int]:
            return [int.from_bytes(sock.getsockopt(*most), sys.byteorder) for sock in watched]

        engine.attach_lane(5, 0, hand_over(ends[0][0]))
        engine.pace_link(5, 3_000_000)
        engine.attach_lane(5, 1, hand_over(ends[1][0]))  # one that comes later
        wait_until(lambda: rates() == [3_000_000] * 2)
        engine.pace_link(5, 0)
        wait_until(lambda: rates() == [2**64 - 1] * 2)
        with pytest.raises(ConfigError, match="link 6 cannot be paced"):
            engine.pace_link(6, 1)
        for sock in [*watched, *(theirs for _, theirs in ends)]:
            sock.close()


@pytest.mark.check
def test_lanes_of_bbr_begin_it_anew_in_turns() -> None:
    """Else all would look for the path's delay together, 10 s after they began: 4 packets a round trip."""
    lanes, first_gain, watched, stack = 3, 739, [], ExitStack()

    def pair() -> tuple[socket.socket, socket.socket]:
        ends = tcp_pair()
        for sock in ends:
            with suppress(OSError):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"bbr")
            sock.setsockopt(socket.IPPROTO_TCP, 25, 32 * KIB)  # TCP_NOTSENT_LOWAT
        watched.append(stack.enter_context(socket.socket(fileno=os.dup(ends[0].fileno()))))
        return ends

    def congestion_control(sock: socket.socket) -> bytes:
        return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0")

    def begins(sock: socket.socket) -> bool:
        info = sock.getsockopt(socket.IPPROTO_TCP, 26, 20)  # TCP_CC_INFO; short between the two changes of it
        return len(info) == 20 and struct.unpack("5I", info)[3] == first_gain

    began = time.monotonic()
    with stack, mesh_of(2, lanes, pair, workers=1) as ring:
        if {congestion_control(sock) for sock in watched} != {b"bbr"}:
            pytest.skip("this kernel has no bbr")
        for engine, link in zip(ring.engines, (101, 100), strict=True):
            engine.pace_link(link, 1_000_000)
        input_buffer = np.zeros(9_000_000, np.int32)
        for rank in range(2):
            ring.post(rank, 1, input_buffer, np.empty_like(input_buffer), DType.int32, ReduceOp.sum)
        wait_until(lambda: all(begins(sock) for sock in watched))
        wait_until(lambda: not any(begins(sock) for sock in watched))
        anew: dict[int, tuple[float, float]] = {}  # by lane: when it had not begun anew yet, and when it had
        looked = 0.0

        def all_begun() -> bool:
            nonlocal looked
            before, looked = looked, time.monotonic() - began
            seen = [i for i in range(lanes) if i not in anew and begins(watched[i])]
            anew.update({i: (before, time.monotonic() - began) for i in seen})
            return len(anew) == lanes

        wait_until(all_begun)
        times = sorted(anew.values(), key=lambda span: span[1])
        assert times[0][1] > 5.9, times
        assert all(after[1] - before[0] > 0.9 for before, after in itertools.pairwise(times)), times
        assert {congestion_control(sock) for sock in watched} == {b"bbr"}


class Relay:
    """A new link between the ranks 0 and 1, one lane of which passes bytes on only once it is opened."""

    def __init__(self, ring: Mesh, lane: int) -> None:
        self._opened = threading.Event()
        (mine, far), (theirs, also_far) = tcp_pair(), tcp_pair()
        for near in (mine, theirs):
            near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 64 * KIB)
        self._ends = ends = [far, also_far]
        for end in ends:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 * KIB)
        for rank in range(2):
            ring.engines[rank].close_link(101 - rank)
        ring.link(0, 1, [(mine, theirs) if i == lane else tcp_pair() for i in range(ring.lanes)])
        self._threads = [threading.Thread(target=self._pass_on, args=way) for way in (ends, ends[::-1])]

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        self._opened.wait()
        with suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)

    def open(self) -> None:
        self._opened.set()

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        for end in self._ends:
            end.shutdown(socket.SHUT_RDWR)
        self.open()
        for thread in self._threads:
            thread.join()
        for end in self._ends:
            end.close()


# ---- the wire, with this test as the neighbour -----------------------------------------------------------


def frame(payload: bytes, *, epoch: int = 5, seq: int = 1, number: int = 0, offset: int = 0, **other: int) -> bytes:
    """A frame with its check words; *other*: version, fingerprint, length."""
    length, version = other.get("length", len(payload)), other.get("version", VERSION)
    fingerprint = other.get("fingerprint", FINGERPRINT)
    what = version, 0, number, length, epoch, seq, fingerprint, offset, checksum_of(payload, offset), 0
    head = HEADER.pack(0, *what)[8:]
    return struct.pack("<Q", hash64(head)) + head + payload


def checksum_of(payload: bytes, offset: int = 0) -> int:
    """As native/engine.h has it: in pieces that end at blocks of the digest."""
    total, at = 0, 0
    while at < len(payload):
        piece = payload[at : at + 64 * KIB - (offset + at) % (64 * KIB)]
        total = hash64(struct.pack("<QQ", total, hash64(piece)))
        at += len(piece)
    return total


class Neighbour:
    """One engine whose link 9 ends here, at epoch 5. *socket*: of lane 0."""

    def __init__(self, buffers: int = 0, lanes: int = 1, **config: Any) -> None:
        self.engine = Engine(**{"segment": 64 * KIB, **config})
        self.engine.open_link(9, lanes, 5)
        self.sockets = []
        for lane in range(lanes):
            mine, theirs = tcp_pair()
            if buffers:
                theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffers)
                mine.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffers)
            mine.settimeout(DEADLINE)
            self.sockets.append(mine)
            self.engine.attach_lane(9, lane, hand_over(theirs))
        self.socket = self.sockets[0]
        self.kept: list[Any] = []

    def close(self) -> None:
        for sock in self.sockets:
            sock.close()
        self.engine.close()

    def post(
        self, schedule: Schedule, input_buffer: Any, result_buffer: Any, *, op_id: int = 1, epoch: int = 5, seq: int = 1
    ) -> None:
        self.kept += [input_buffer, result_buffer]
        prepared = self.engine.prepare(
            schedule,
            {1: 9},
            dtype=DType.int32,
            op=ReduceOp.sum,
            input_bytes=input_buffer.nbytes,
            result_bytes=result_buffer.nbytes,
            world_size=2,
            lanes=len(self.sockets),
        )
        self.engine.post(prepared, op_id, epoch, seq, FINGERPRINT, input_buffer.ctypes.data, result_buffer.ctypes.data)

    def read(self, n: int) -> bytes:
        data = b""
        while len(data) < n:
            data += self.socket.recv(n - len(data))
        return data


@pytest.fixture
def neighbour(request: pytest.FixtureRequest) -> Iterator[Neighbour]:
    one = Neighbour(**getattr(request, "param", {}))
    yield one
    one.close()


def send_and_end(sock: socket.socket, data: bytes) -> None:
    with suppress(OSError):  # the engine may reset the connection before it has been told all
        sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)


INPUT, RESULT = Place(Buffer.input, 0), Place(Buffer.result, 0)


def send(nbytes: int) -> Schedule:
    return Schedule((Step(Direction.send, Action.copy, 0, nbytes, 1, left=INPUT),))


def receive(nbytes: int, action: Action = Action.copy) -> Schedule:
    return Schedule((Step(Direction.recv, action, 0, nbytes, 1, to=RESULT, left=INPUT, result=True),))


def exchange(nbytes: int) -> Schedule:
    """Both ranks' bytes are reduced here and sent back."""
    result_buffer = Step(Direction.send, Action.copy, 0, nbytes, 1, number=1, left=RESULT, after=(1,))
    return Schedule((*send(nbytes).steps, *receive(nbytes, Action.final).steps, result_buffer))


def test_frames_as_the_header_says(neighbour: Neighbour) -> None:
    input_buffer = random_bits(DType.int32, 50_000, seed=3)
    result_buffer = np.zeros_like(input_buffer)
    neighbour.post(send(input_buffer.nbytes), input_buffer, result_buffer)
    data, offset = input_buffer.tobytes(), 0
    while offset < len(data):
        head = neighbour.read(HEAD)
        check, version, reserved, number, length, epoch, seq, fingerprint, at, checksum, _ = HEADER.unpack(head)
        assert (check, version, reserved, number, epoch, seq, fingerprint, at) == (
            hash64(head[8:]),
            VERSION,
            0,
            0,
            5,
            1,
            FINGERPRINT,
            offset,
        )
        assert 0 < length <= 64 * KIB
        payload = neighbour.read(length)
        assert payload == data[at : at + length]
        assert checksum == checksum_of(payload, at)
        offset += length
    assert wait_for(neighbour.engine, Done).bytes_sent == len(data) + HEAD * 4


def test_a_send_runs_as_far_as_its_source_is_reduced(neighbour: Neighbour) -> None:
    input_buffer = random_bits(DType.int32, 48 * KIB, seed=3)  # three frames
    result_buffer = np.zeros_like(input_buffer)
    other = random_bits(DType.int32, 48 * KIB, seed=4)
    neighbour.post(exchange(input_buffer.nbytes), input_buffer, result_buffer)
    neighbour.read(3 * (HEAD + 64 * KIB))  # step 0
    result = (input_buffer + other).tobytes()
    for offset in range(0, 3 * 64 * KIB, 64 * KIB):
        neighbour.socket.sendall(frame(other.tobytes()[offset : offset + 64 * KIB], offset=offset))
        assert HEADER.unpack(neighbour.read(HEAD))[3] == 1
        assert neighbour.read(64 * KIB) == result[offset : offset + 64 * KIB]
    wait_for(neighbour.engine, Done)


def test_frames_split_anywhere_and_old_ones_are_dropped(neighbour: Neighbour) -> None:
    values = random_bits(DType.int32, 3000, seed=5)
    input_buffer, result_buffer = np.zeros_like(values), np.zeros_like(values)
    neighbour.post(receive(result_buffer.nbytes), input_buffer, result_buffer, seq=2)
    stream = frame(b"old epoch", epoch=4, seq=9) + frame(b"given up", seq=1) + frame(values.tobytes(), seq=2)
    neighbour.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for at in range(0, len(stream), 997):
        neighbour.socket.sendall(stream[at : at + 997])
    wait_for(neighbour.engine, Done)
    assert same(result_buffer, values)
    lane = statistics(neighbour.engine, 9)
    assert (lane.frames_dropped, lane.frames_received, lane.bytes_received) == (2, 1, len(stream))


def test_a_newer_frame_waits_until_this_end_has_learnt_of_it(neighbour: Neighbour) -> None:
    values = random_bits(DType.int32, 100, seed=5)
    result_buffer = np.zeros_like(values)
    neighbour.socket.sendall(frame(values.tobytes(), epoch=6, seq=3))
    wait_until(lambda: statistics(neighbour.engine, 9).parked)
    neighbour.engine.set_epoch(9, 6)
    neighbour.post(receive(values.nbytes), values, result_buffer, epoch=6, seq=3)
    wait_for(neighbour.engine, Done)
    assert same(result_buffer, values)


def test_a_frame_that_comes_first_waits_for_an_earlier_op_of_a_new_epoch(neighbour: Neighbour) -> None:
    values = random_bits(DType.int32, 100, seed=5)
    result_buffer = np.zeros_like(values)
    neighbour.post(receive(values.nbytes), values, result_buffer, seq=7)
    neighbour.socket.sendall(frame(values.tobytes(), seq=7))
    wait_for(neighbour.engine, Done)
    result_buffer[:] = 0
    neighbour.engine.set_epoch(9, 6)
    neighbour.socket.sendall(frame(values.tobytes(), epoch=6, seq=3))
    wait_until(lambda: statistics(neighbour.engine, 9).parked)
    neighbour.post(receive(values.nbytes), values, result_buffer, op_id=2, epoch=6, seq=3)
    wait_for(neighbour.engine, Done)
    assert same(result_buffer, values)


def test_a_later_op_need_not_wait_for_an_earlier_one(neighbour: Neighbour) -> None:
    values = random_bits(DType.int32, 100, seed=5)
    first, second = np.zeros_like(values), np.zeros_like(values)
    neighbour.post(receive(values.nbytes), values, first, op_id=1, seq=1)
    neighbour.post(receive(values.nbytes), values, second, op_id=2, seq=2)
    neighbour.socket.sendall(frame(values.tobytes(), seq=2))
    assert wait_for(neighbour.engine, Done).op == 2
    assert same(second, values)
    assert not first.any()
    neighbour.socket.sendall(frame(values.tobytes(), seq=3) + frame(values.tobytes(), seq=1))
    wait_until(lambda: statistics(neighbour.engine, 9).parked)  # not posted yet: what follows waits too
    assert not first.any()
    neighbour.post(receive(values.nbytes), values, np.zeros_like(values), op_id=3, seq=3)
    wait_until(lambda: statistics(neighbour.engine, 9).frames_received == 3)
    assert same(first, values)


@pytest.mark.parametrize("seed", range(8))
def test_parts_may_come_on_any_lane_in_any_order(seed: int) -> None:
    one = Neighbour(lanes=3, stripe=64 * KIB)
    try:
        values = random_bits(DType.int32, 200_000, seed=seed)
        other = random_bits(DType.int32, 200_000, seed=seed + 100)
        result_buffer = np.zeros_like(values)
        one.post(receive(values.nbytes, Action.final), other, result_buffer)
        data, rng = values.tobytes(), np.random.default_rng(seed)
        for at in rng.permutation(
            range(0, len(data), 64 * KIB)
        ):  # the cuts of its 12 parts, and one inside of the last
            if at + 128 * KIB > len(data):
                continue
            lane = one.sockets[rng.integers(3)]
            lane.sendall(frame(data[at : at + 64 * KIB], offset=int(at)))
        begin = 11 * 64 * KIB
        last = one.sockets[rng.integers(3)]  # two frames of one part: in order, on one lane
        last.sendall(frame(data[begin : begin + 64 * KIB], offset=begin))
        last.sendall(frame(data[begin + 64 * KIB :], offset=begin + 64 * KIB))
        wait_for(one.engine, Done)
        assert same(result_buffer, values + other)
    finally:
        one.close()


@pytest.mark.parametrize(
    ("lane", "offset", "says"),
    [
        (1, 4000, "which lane 0 has begun"),  # its rest
        (1, 0, "which lane 0 has begun"),  # once more
        (0, 0, "offset 0"),
        (0, 2000, "offset 2000"),  # overlapping
        (0, 8000, "offset 8000"),  # a gap
        (0, 64 * KIB, "which is here"),  # a part that has arrived whole
        (1, 64 * KIB, "which is here"),
        (1, 64 * KIB + 4, "which is here"),
        (1, 128 * KIB, "offset 131072"),  # behind the end
        (1, 128 * KIB + 4, "expected none"),
    ],
)
def test_a_part_that_two_lanes_bring_closes_the_second(lane: int, offset: int, says: str) -> None:
    one = Neighbour(lanes=2, stripe=64 * KIB)
    try:
        memory = np.full(96 * KIB // 4 + 32 * KIB, 0x5A5A5A5A, np.int32)
        result_buffer = memory[16 * KIB // 4 :][: 128 * KIB // 4]
        one.post(receive(128 * KIB), result_buffer.copy(), result_buffer)  # two parts
        one.socket.sendall(frame(bytes(64 * KIB), offset=64 * KIB))
        one.socket.sendall(frame(bytes(4000)))
        wait_until(lambda: statistics(one.engine, 9).frames_received == 2)
        one.sockets[lane].sendall(frame(b"1234", offset=offset))
        down = wait_for(one.engine, LaneDown)
        assert (down.lane, says in down.text) == (lane, True), down
        one.engine.cancel(1)
        wait_for(one.engine, Cancelled)
        assert (memory[: 16 * KIB // 4] == 0x5A5A5A5A).all()
        assert (memory[16 * KIB // 4 + 128 * KIB // 4 :] == 0x5A5A5A5A).all()
        assert not result_buffer[16 * KIB :].any()
    finally:
        one.close()


@pytest.mark.parametrize("action", [Action.copy, Action.final])
@pytest.mark.parametrize("arrived", [HEAD, HEAD + 1, HEAD + 50, HEAD + 399])
def test_the_rest_of_a_given_up_frame_touches_nothing(neighbour: Neighbour, arrived: int, action: Action) -> None:
    values = random_bits(DType.int32, 100, seed=5)
    old, new = np.zeros_like(values), np.zeros_like(values)
    neighbour.post(receive(values.nbytes, action), values, old)
    given_up = frame(values.tobytes())
    neighbour.socket.sendall(given_up[:arrived])
    wait_until(lambda: statistics(neighbour.engine, 9).bytes_received == arrived)
    neighbour.engine.set_epoch(9, 6)
    neighbour.engine.cancel(1)
    wait_for(neighbour.engine, Cancelled)
    old[:] = 7
    neighbour.post(receive(values.nbytes), values, new, op_id=2, epoch=6)
    neighbour.socket.sendall(given_up[arrived:] + frame(values.tobytes(), epoch=6))
    wait_for(neighbour.engine, Done)
    assert same(new, values)
    assert (old == 7).all()
    assert statistics(neighbour.engine, 9).frames_dropped == 1


@pytest.mark.parametrize("neighbour", [{"segment": 1024 * KIB, "buffers": 64 * KIB}], indirect=True)
def test_a_half_sent_frame_is_completed_from_a_copy(neighbour: Neighbour) -> None:
    input_buffer = random_bits(DType.int32, 4_000_003, seed=3)
    before = input_buffer.tobytes()
    neighbour.post(send(input_buffer.nbytes), input_buffer, np.zeros_like(input_buffer))
    sent = -1
    while sent != (sent := statistics(neighbour.engine, 9).bytes_sent) or not sent:
        time.sleep(0.02)  # until the socket is full
    assert sent % (HEAD + 1024 * KIB), "no frame is half sent: this test proves nothing"
    neighbour.engine.set_epoch(9, 6)
    neighbour.engine.cancel(1)
    wait_for(neighbour.engine, Cancelled)
    input_buffer[:] = 7
    neighbour.post(send(4000), input_buffer[:1000], input_buffer[:1000].copy(), op_id=2, epoch=6)
    offset = 0
    while True:
        head = neighbour.read(HEAD)
        _, _, _, _, length, epoch, _, _, at, checksum, _ = HEADER.unpack(head)
        payload = neighbour.read(length)
        assert checksum == checksum_of(payload, at)
        if epoch == 6:
            break
        assert payload == before[at : at + length]
        assert at == offset
        offset += length
    assert offset < len(before)
    assert payload == input_buffer[:1000].tobytes()


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (b"\0" * HEAD, f"checksum: {hash64(bytes(HEAD - 8)):016x} over a header that says {0:016x}"),
        (frame(b"1234", length=0xFFFFFFFF), "4294967295 bytes"),
        (frame(b"1234", length=64 * KIB + 4), "at most 65536"),
        (frame(b"x" * 404, length=404), "404 bytes"),
        (frame(b"123", length=3), "3 bytes"),
        (frame(b"", length=0), "0 bytes"),
        (frame(b"1234", offset=4), "offset 4"),
        (frame(b"1234", offset=2**64 - 4), "offset 18446744073709551612"),
        (frame(b"1234", number=1), "step 1"),
        (frame(b"1234", version=1), "version 1"),
        (frame(b"1234")[:-1] + b"5", "checksum"),
        (frame(b"1234", epoch=4)[:-1] + b"5", "checksum"),
        (frame(b"x" * 400)[:100], "within a frame"),
        (b"GET / HTTP/1.1\r\n\r\n", "closed"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bytes_that_break_the_protocol_close_the_lane(neighbour: Neighbour, bad: bytes, says: str) -> None:
    input_buffer = np.zeros(100, np.int32)
    result_buffer = np.zeros(300, np.int32)
    neighbour.post(receive(400), input_buffer, result_buffer[100:200])
    send_and_end(neighbour.socket, bad)
    down = wait_for(neighbour.engine, LaneDown)
    assert says in down.text
    assert (down.link, down.lane) == (9, 0)
    assert not statistics(neighbour.engine, 9).attached
    neighbour.engine.cancel(1)
    assert wait_for(neighbour.engine, Cancelled) == Cancelled(1)
    assert not result_buffer[:100].any()
    assert not result_buffer[200:].any()


def test_a_bad_checksum_never_becomes_a_result(neighbour: Neighbour) -> None:
    values = np.arange(100, dtype=np.int32)
    result_buffer = np.zeros_like(values)
    neighbour.post(receive(values.nbytes), values, result_buffer)
    damaged = bytearray(frame(values.tobytes()))
    damaged[200] ^= 1
    neighbour.socket.sendall(damaged)
    assert "checksum" in wait_for(neighbour.engine, LaneDown).text
    assert statistics(neighbour.engine, 9).checksum_failures == 1
    assert not select.select([neighbour.engine.fd], [], [], 0.05)[0]


@settings(max_examples=60)
@given(
    st.binary(min_size=1, max_size=300),
    st.sampled_from(["raw", "after a good header", "one bit"]),
    st.integers(0, HEAD * 8 + 63),
)
def test_garbage_never_crashes_or_writes_elsewhere(garbage: bytes, how: str, bit: int) -> None:
    one = Neighbour()
    try:
        memory = np.full(300, 0x5A5A5A5A, np.int32)
        one.post(receive(400), memory[:100].copy(), memory[100:200])
        good = bytearray(frame(np.zeros(100, np.int32).tobytes()))
        if how == "after a good header":
            garbage = bytes(good[:HEAD]) + garbage
        elif how == "one bit":
            good[bit // 8] ^= 1 << bit % 8
            garbage = bytes(good)
        send_and_end(one.socket, garbage)
        wait_for(one.engine, LaneDown)
        assert (memory[:100] == 0x5A5A5A5A).all()
        assert (memory[200:] == 0x5A5A5A5A).all()
    finally:
        one.close()


# ---- arguments, idling, functions ------------------------------------------------------------------------


def test_arguments_are_refused_with_a_reason() -> None:
    for bad in ({"workers": 0}, {"segment": 1000}, {"stripe": 0}, {"segment": 1 << 30}, {"workers": -1}):
        with pytest.raises(ConfigError, match=f"{next(iter(bad))}="):
            Engine(**bad)
    with mesh_of(2) as ring:
        engine, input_buffer = ring.engines[0], np.zeros(10, np.int32)
        with pytest.raises(ConfigError, match="link 101 cannot be opened"):
            engine.open_link(101, 3, 1)
        with pytest.raises(ConfigError, match="link 555"):
            engine.set_epoch(555, 3)
        ring.epoch = 3
        with pytest.raises(ConfigError, match="epoch 3, seq 1"):
            ring.post(0, 1, input_buffer, input_buffer.copy(), DType.int32, ReduceOp.sum)
        with pytest.raises(ConfigError, match="rank 1"):
            engine.prepare(
                exchange(40),
                {},
                dtype=DType.int32,
                op=ReduceOp.sum,
                input_bytes=40,
                result_bytes=40,
                world_size=2,
                lanes=3,
            )
        a, b = tcp_pair()
        with pytest.raises(ConfigError, match="lane 4"):
            engine.attach_lane(101, 4, hand_over(a))
        assert b.recv(1) == b""  # the engine closed what it was given
        b.close()
    with pytest.raises(RuntimeError, match="closed"):
        engine.cancel(1)


def test_an_engine_at_rest_costs_no_time(neighbour: Neighbour) -> None:
    values = np.zeros(100, np.int32)
    neighbour.post(exchange(values.nbytes), values, values.copy())  # waits for the neighbour
    neighbour.socket.sendall(frame(b"1234", epoch=6))  # and holds a frame of a newer epoch
    wait_until(lambda: statistics(neighbour.engine, 9).parked)
    before = time.process_time()
    assert not select.select([neighbour.engine.fd], [], [], 0.3)[0]
    assert time.process_time() - before < 0.15  # who spins takes 0.3


def test_closing_lets_go_of_descriptors_and_of_ops_under_way() -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with mesh_of(3) as ring:
            input_buffer = np.zeros(500_000, np.int32)
            for rank in range(2):  # rank 2 never comes
                ring.post(rank, 1, input_buffer, np.zeros_like(input_buffer), DType.int32, ReduceOp.sum)
    assert len(os.listdir("/proc/self/fd")) == before


def test_an_engine_keeps_nothing_of_operations_that_are_over() -> None:
    """For each of them room is kept for the events that may come of it."""
    with Engine(workers=1) as engine:
        nothing = engine.prepare(
            Schedule(()), {}, dtype=DType.int32, op=ReduceOp.sum, input_bytes=0, result_bytes=0, world_size=1, lanes=1
        )
        pages: list[int] = []
        seq = 0
        for operations in (1000, 20_000):
            for _ in range(operations // 100):
                for _ in range(100):
                    seq += 1
                    engine.post(nothing, seq, 1, seq, FINGERPRINT, 0, 0)
                done = 0
                while done < 100:
                    assert select.select([engine.fd], [], [], DEADLINE)[0]
                    done += len(engine.events())
            pages.append(int(Path("/proc/self/statm").read_text().split()[0]))
        assert (pages[1] - pages[0]) * os.sysconf("SC_PAGE_SIZE") < 1 << 20


def test_hash() -> None:
    assert kernel_name() in ("generic", "avx2", "avx512", "neon")
    for size in (0, 1, 17, 240, 241, 65536):
        data = os.urandom(size)
        assert hash64(data) == xxhash.xxh3_64_intdigest(data)
