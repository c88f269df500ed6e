"""What the client's tests share."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from wancoll.chaos import Cluster, in_threads
from wancoll.client.memory.arena import SWAP_BYTES
from wancoll.client.memory.tensors import region
from wancoll.collective import DType
from wancoll.errors import ConfigError

BIG = 2 * SWAP_BYTES // 4  # float32 elements of a tensor whose pages are swapped


def address(x: Any) -> int:
    return region(x, "x").address


def numpy_kind(dtype: DType) -> np.dtype[Any]:
    return np.dtype(ml_dtypes.bfloat16 if dtype is DType.bfloat16 else dtype.name)


@contextmanager
def refused(*words: str, error: type[Exception] = ConfigError) -> Iterator[pytest.ExceptionInfo[Exception]]:
    """What runs inside raises *error*, which says all these words."""
    with pytest.raises(error) as caught:
        yield caught
    for word in words:
        assert word in str(caught.value)


def until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    """Return when *condition* holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.005)


def in_thread(f: Callable[[], Any]) -> Callable[[], Any]:
    """Start f in a thread; call what is returned to join it and get its result, or what it raised."""
    box: list[Any] = []

    def run() -> None:
        try:
            box.append(f())
        except BaseException as bad:
            box.append(bad)

    thread = threading.Thread(target=run)
    thread.start()

    def join() -> Any:
        thread.join(20)
        assert not thread.is_alive()
        return box[0]

    return join


@contextmanager
def joined_worlds(cluster: Cluster, most: int) -> Iterator[dict[int, list[Any]]]:
    """World sizes up to *most*, each to its members in rank order; peer k's is mK."""
    groups = {}
    for world in range(1, most + 1):
        comms = in_threads(
            lambda k, world=world: cluster.connect(k, group=f"w{world}", name=f"m{k}", start_world=world), world, 30
        )
        groups[world] = sorted(comms, key=lambda comm: comm.rank)
    yield groups
    for comms in groups.values():
        for comm in comms:
            comm.close()
