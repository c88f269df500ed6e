"""A limit of what all lanes of an engine send: values, the rate, fairness, and that nothing else is held up."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from tests.engine.engines import Mesh, hand_over, mesh_of, same, statistics, tcp_pair, wait_for, wait_until
from tests.engine.test_notes import next_notes
from wancoll.collective import Descriptor, DType, Kind, ReduceOp
from wancoll.native.engine import Cancelled, Done

MB = 1_000_000
LATE = 0.015  # seconds: what a worker that woke late may make up for, and a piece
SECONDS = 0.8


def sent(mesh: Mesh, rank: int) -> int:
    """Bytes that the lanes of *rank* have given to their sockets."""
    others = [other for other in range(mesh.world) if other != rank]
    return sum(statistics(mesh.engines[rank], 100 + other, i).bytes_sent for other in others for i in range(mesh.lanes))


@contextmanager
def broadcasting(mesh: Mesh, nbytes: int) -> Iterator[list[Any]]:
    """Rank 0 sends so many bytes to each other rank; yields the results, which are checked if all is through."""
    mesh.seq += 1
    call = Descriptor(Kind.broadcast, DType.uint8, count=nbytes, root=0)
    tensor = np.frombuffer(np.random.default_rng(nbytes).bytes(nbytes), np.uint8)
    results = [np.zeros(nbytes, np.uint8) for _ in range(mesh.world)]
    for rank in range(mesh.world):
        mesh.run(rank, mesh.seq, call, "direct", tensor if rank == 0 else tensor[:0], results[rank])
    yield results
    for engine in mesh.engines:
        wait_for(engine, Done)
    assert all(same(result, tensor) for result in results)


@pytest.mark.parametrize("lanes", [1, 4])
def test_all_lanes_together_keep_to_the_limit(lanes: int) -> None:
    """Never faster, and no link has to wait until another one is done. A processor that is not there sends less."""
    with mesh_of(3, lanes, workers=2, uplink=4 * MB) as mesh:
        nbytes = int(SECONDS * 2 * MB)
        began, used = time.monotonic(), time.process_time()
        with broadcasting(mesh, nbytes):
            wait_until(lambda: sent(mesh, 0) > nbytes)  # half of it
            halves = [sum(statistics(mesh.engines[0], link, i).bytes_sent for i in range(lanes)) for link in (101, 102)]
            assert sent(mesh, 0) <= 4 * MB * (time.monotonic() - began + LATE)
        took = time.monotonic() - began
        assert took >= sent(mesh, 0) / (4 * MB) - LATE
        assert min(halves) > 0.6 * max(halves)
        assert time.process_time() - used < 0.5 * took, "somebody spins"


@pytest.mark.check
@pytest.mark.parametrize("rate", [1, 20, 100])
def test_what_the_limit_allows_is_sent(rate: int) -> None:
    with mesh_of(2, 3, workers=2, uplink=rate * MB) as mesh, broadcasting(mesh, int(2 * rate * MB)):
        began = time.monotonic()
        wait_until(lambda: sent(mesh, 0) > 2 * rate * MB)
        assert time.monotonic() - began < 2.5, "2 s are enough"


def test_sums_keep_their_bits() -> None:
    rng = np.random.default_rng(8)
    inputs = [rng.standard_normal(70_001).astype(np.float32) for _ in range(3)]
    with mesh_of(3) as mesh:
        expected, _ = mesh.all_reduce(inputs, DType.float32, ReduceOp.sum)
    with mesh_of(3, uplink=4 * MB) as mesh:
        for _ in range(2):
            got, _ = mesh.all_reduce(inputs, DType.float32, ReduceOp.sum)
            assert all(same(one, other) for one, other in zip(got, expected, strict=True))


def test_memory_does_not_count() -> None:
    with mesh_of(2, 2, memory=1 << 16, uplink=1000) as mesh, broadcasting(mesh, 2 * MB):
        pass  # it would take half an hour


def test_notes_pass_lanes_that_wait() -> None:
    with mesh_of(2, 2, uplink=1000) as mesh:
        for engine, link, end in zip(mesh.engines, (101, 100), tcp_pair(), strict=True):
            engine.attach_lane(link, mesh.lanes, hand_over(end))
        mesh.seq += 1
        call = Descriptor(Kind.all_reduce, count=100_000)
        for rank in range(2):
            mesh.run(rank, 1, call, "direct", np.ones(100_000, np.float32), np.zeros(100_000, np.float32))
        began = time.monotonic()
        assert mesh.engines[0].send_note(101, b"yes")
        assert [note.note for note in next_notes(mesh.engines[1], 1)] == [b"yes"]
        assert time.monotonic() - began < 4  # of the many minutes that the sum takes
        assert sent(mesh, 0) <= 2 * 8 * 1024


def test_lanes_that_wait_can_be_cancelled_and_closed() -> None:
    with mesh_of(3, 2, workers=1, uplink=20_000) as mesh:
        numbers = [np.ones(50_000, np.float32) for _ in range(3)]
        results = [np.zeros(50_000, np.float32) for _ in range(3)]
        for rank in range(3):
            mesh.post(rank, 1, numbers[rank], results[rank], DType.float32, ReduceOp.sum)
        wait_until(lambda: sent(mesh, 0))
        mesh.engines[0].close_link(101)
        mesh.engines[0].cancel(1001)
        wait_for(mesh.engines[0], Cancelled)
        mesh.engines[0].close_link(102)
