"""Connections of lanes that end at any byte, in every collective, algorithm and codec: no bit of a result changes."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.engine.engines import Mesh, hand_over
from tests.engine.test_schedules import PAIRS, run
from tests.later import later
from tests.schedule.schedules import SPARSE
from wancoll.collective import ROOTED, Codec, Descriptor, Kind

COUNT = 1025
CUTS = 3  # of each connection and direction


@dataclass(eq=False)
class Wire:
    """One connection: what goes from ends[0] to ends[1], and back, until one direction has had *left* bytes."""

    rank: int
    other: int
    lane: int
    number: int
    ends: tuple[socket.socket, socket.socket]
    left: list[int] = field(default_factory=lambda: [1 << 60, 1 << 60])
    passed: list[int] = field(default_factory=lambda: [0, 0])


class BreakingMesh(Mesh):
    """Engines whose lanes go through a pump, which closes connections, and attaches others in their place."""

    def __init__(self, world: int, lanes: int) -> None:
        self.wires: dict[tuple[int, int, int], Wire] = {}
        self.broken = 0
        self._lock, self._stop = threading.Lock(), False
        super().__init__(world, lanes)
        self._thread = threading.Thread(target=self._pump)
        self._thread.start()

    def link(self, rank: int, other: int, pairs: Sequence[tuple[socket.socket, socket.socket]]) -> None:
        ends = (self.engines[rank], 100 + other), (self.engines[other], 100 + rank)
        for engine, link in ends:
            engine.open_link(link, self.lanes, self.epoch, self.lane_groups)
        for (engine, link), end in zip(ends, socket.socketpair(), strict=True):
            engine.attach_lane(link, self.lanes, hand_over(end))
        for pair in pairs:
            for end in pair:
                end.close()
        for lane in range(self.lanes):
            self._connect(rank, other, lane, 1)

    def _connect(self, rank: int, other: int, lane: int, number: int) -> None:
        (ours, here), (theirs, there) = socket.socketpair(), socket.socketpair()
        self.wires[rank, other, lane] = Wire(rank, other, lane, number, (here, there))
        self.engines[rank].attach_lane(100 + other, lane, hand_over(ours), connection=number)
        self.engines[other].attach_lane(100 + rank, lane, hand_over(theirs), connection=number)

    def _pump(self) -> None:
        while not self._stop:
            with self._lock:
                for wire in list(self.wires.values()):
                    if not min(wire.left):
                        self._break(wire)
                wires = list(self.wires.values())
            fds = {wire.ends[i].fileno(): (wire, i) for wire in wires for i in (0, 1)}
            notes = {engine.notes_fd: engine for engine in self.engines}
            ready, _, _ = select.select([*fds, *notes], [], [], 0.05)
            with self._lock:
                for fd in ready:
                    if fd in notes:
                        notes[fd].notes()
                    elif self.wires[(wire := fds[fd][0]).rank, wire.other, wire.lane] is wire:
                        self._pass_on(*fds[fd])

    def _pass_on(self, wire: Wire, i: int) -> None:
        data = wire.ends[i].recv(min(1 << 16, wire.left[i]))
        wire.ends[1 - i].sendall(data)
        wire.left[i] -= len(data)
        wire.passed[i] += len(data)
        if not data or not wire.left[i]:
            self._break(wire)

    def _break(self, wire: Wire) -> None:
        self.broken += 1
        self._connect(wire.rank, wire.other, wire.lane, wire.number + 1)
        for end in wire.ends:
            end.close()

    def cut(self, where: tuple[int, int, int], i: int, after: int) -> None:
        """Let the connection end when so many more bytes have gone in this direction."""
        with self._lock:
            wire = self.wires[where]
            wire.left[i] = after
        while not after and self.wires[where] is wire:  # the pump alone closes what it may be waiting for
            time.sleep(0.001)

    def passed(self) -> dict[tuple[int, int, int], list[int]]:
        with self._lock:
            return {where: list(wire.passed) for where, wire in self.wires.items()}

    def release(self) -> None:
        for engine in self.engines:
            engine.release(1000 * self.epoch + self.seq)
            with contextlib.suppress(BlockingIOError):
                engine.events()

    def close(self) -> None:
        self._stop = True
        self._thread.join()
        super().close()
        for wire in self.wires.values():
            for end in wire.ends:
                end.close()


def break_everywhere(kind: Kind, algorithm: str, codec: Codec, every: int) -> None:
    call = Descriptor(kind, count=COUNT, codec=codec, root=1 if kind in ROOTED else -1)
    mesh: Any = BreakingMesh(3, 2)
    try:
        before = mesh.passed()
        run(mesh, call, algorithm, 1)
        mesh.release()
        after, tries = mesh.passed(), 0
        for where, counts in after.items():
            for i in (0, 1):
                total = counts[i] - before[where][i]
                for at in range(0, total, every or max(1, total // CUTS)):
                    mesh.cut(where, i, at)
                    run(mesh, call, algorithm, 1)
                    mesh.release()
                    tries += 1
        assert mesh.broken >= tries // 2, "lanes take what there is: some carried less than before"
    finally:
        mesh.close()


BY_DAY = (Kind.all_reduce, "ring"), (Kind.all_reduce, "direct")


@pytest.mark.parametrize(("kind", "algorithm"), [*BY_DAY, *later(*(pair for pair in PAIRS if pair not in BY_DAY))])
def test_lanes_that_end_at_any_byte_change_no_bit(kind: Kind, algorithm: str) -> None:
    break_everywhere(kind, algorithm, Codec.none, 0)


@pytest.mark.parametrize("codec", [Codec.int8, SPARSE[2], *later(*(each for each in Codec if each > Codec.int8))])
def test_encoded_bytes_go_on_in_the_middle_of_a_block(codec: Codec) -> None:
    for algorithm in ("ring", "direct"):
        break_everywhere(Kind.all_reduce, algorithm, codec, 0)


@pytest.mark.nightly
@pytest.mark.parametrize("codec", [Codec.none, Codec.int8])
@pytest.mark.parametrize("algorithm", ["ring", "direct"])
def test_lanes_that_end_at_every_byte_change_no_bit(algorithm: str, codec: Codec) -> None:
    break_everywhere(Kind.all_reduce, algorithm, codec, 1)
