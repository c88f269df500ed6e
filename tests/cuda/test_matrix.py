"""Every collective with tensors of devices, through real daemons: the same bytes as with tensors in host memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.client.tools import joined_worlds, numpy_kind
from wancoll.chaos import Cluster, in_threads
from wancoll.collective import DType

WORLD = 4
INTERFACE, DLPACK = ("interface", "legacy", "per thread"), ("dlpack", "managed")
FOUR_MIB_AND_ONE = (4 << 20) + 1

Array = np.ndarray[Any, np.dtype[Any]]


@pytest.fixture(scope="module")
def worlds(standin: Any) -> Iterator[dict[int, list[Any]]]:
    with Cluster(WORLD, fork=True) as cluster, joined_worlds(cluster, WORLD) as groups:
        yield groups


def numbers(dtype: DType, count: int, rank: int) -> Array:
    rng = np.random.default_rng((int(dtype), count, rank))
    return (rng.integers(0, 256, count).astype(np.float32) / 4).astype(numpy_kind(dtype))


class Member:
    """One member's calls: with host tensors where *gpu* is None."""

    def __init__(self, comm: Any, gpu: Any, dtype: DType, number: int) -> None:
        self.comm, self.gpu, self.dtype, self.number = comm, gpu, dtype, number

    def tensor(self, values: Array) -> Any:
        if self.gpu is None:
            return values.copy()
        from tests.cuda.gpu import DeviceArray, WithInterface

        self.number += 1
        interface = self.number % 2 == 0 and self.dtype is not DType.bfloat16
        kind, styles = (WithInterface, INTERFACE) if interface else (DeviceArray, DLPACK)
        style = styles[self.number // 2 % len(styles)]
        x = kind(self.gpu, np.zeros_like(values), style, device=self.number % 2, skip=1 + self.number % 5)
        x.put(values)
        return x

    def bytes(self, x: Any) -> bytes:
        return b"" if x is None else (x.get() if self.gpu is not None else x).tobytes()

    def run(self, count: int) -> list[bytes]:
        """Every collective, in place and into out; what all tensors have in the end."""
        comm, world, rank = self.comm, self.comm.world_size, self.comm.rank
        mine = numbers(self.dtype, count, rank)
        blocks = np.concatenate([numbers(self.dtype, count, 10 * rank + k) for k in range(world)])
        root, at_root = world - 1, rank == world - 1

        def new(n: int) -> Any:
            return self.tensor(np.zeros(n, numpy_kind(self.dtype)))

        x, a, b, c = self.tensor(mine), new(count), new(count * world), new(count * world)
        d, e, f, g = self.tensor(mine), self.tensor(mine), self.tensor(blocks), self.tensor(blocks)
        h, i, j = new(count), new(count), new(count)
        calls: list[tuple[Any, ...]] = [
            (comm.all_reduce, x, a),
            (comm.all_reduce, d),
            (comm.all_gather, x, b),
            (comm.all_to_all, f, f),
            (comm.all_to_all, g, c),
            (comm.reduce_scatter, g, h),
            (comm.scatter, g if at_root else None, i, root),
            (comm.reduce, x, j if at_root else None, root),
            (comm.broadcast, e, root),
        ]
        works = [call(*arguments, async_op=True) for call, *arguments in calls]
        for work in works:
            work.wait(60)
        k = new(count * world if at_root else 0)
        comm.gather(x, k if at_root else None, root)
        y, z = self.tensor(mine), self.tensor(blocks)
        comm.all_reduce_many([y, z])
        n = new(count)
        if world > 1:
            sending = comm.send(x, (rank + 1) % world, async_op=True)
            comm.recv(n, (rank - 1) % world)
            sending.wait(60)
        return [self.bytes(each) for each in (x, a, b, c, d, e, f, g, h, i, j, k, y, z, n)]


def check(worlds: dict[int, list[Any]], shared: Any, world: int, dtype: DType, count: int) -> None:
    comms = worlds[world]
    host = in_threads(lambda rank: Member(comms[rank], None, dtype, 0).run(count), world, 60)
    device = in_threads(
        lambda rank: Member(comms[rank], shared if (rank + count) % 3 != 1 else None, dtype, rank).run(count), world, 60
    )
    assert host == device
    assert any(any(part) for part in host[0]) or not count


@pytest.mark.parametrize("dtype", DType)
def test_dtypes(worlds: dict[int, list[Any]], shared: Any, dtype: DType) -> None:
    check(worlds, shared, 3, dtype, 1023)


@pytest.mark.parametrize("count", [0, 1, 1024])
@pytest.mark.parametrize("world", range(1, WORLD + 1))
def test_worlds_and_sizes(worlds: dict[int, list[Any]], shared: Any, world: int, count: int) -> None:
    check(worlds, shared, world, DType.float32, count)


@pytest.mark.check
@pytest.mark.parametrize("seed", [0], indirect=True)
def test_more_than_a_piece(worlds: dict[int, list[Any]], shared: Any) -> None:
    check(worlds, shared, 2, DType.uint8, FOUR_MIB_AND_ONE)
