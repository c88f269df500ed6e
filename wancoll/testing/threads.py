"""Runs one function in several threads at once: a blocking client per thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from typing import TypeVar

T = TypeVar("T")

_GRACE = 10.0  # seconds that the other threads get after one has failed


def in_threads(fn: Callable[[int], T], which: int | Iterable[int], timeout: float = 120.0) -> list[T]:
    """Call *fn* with each index, each call in a thread of its own; results in the order of the indices.

    Args:
        fn: called with one index.
        which: the indices, or how many (0, 1, ...).
        timeout: seconds for all of them.

    Raises:
        BaseException: what the first failing call raised, in the order of the indices; a note names the others.
        TimeoutError: some had not returned in time (their threads are left behind).
    """
    deadline = time.monotonic() + timeout
    calls: list[tuple[int, Future[T]]] = []
    for index in range(which) if isinstance(which, int) else which:
        future: Future[T] = Future()
        calls.append((index, future))
        # No pool's thread: the end of the process would wait for one that is left behind.
        threading.Thread(target=_call, args=(fn, index, future), name=f"in_threads-{index}", daemon=True).start()
    _, running = wait([future for _, future in calls], timeout, FIRST_EXCEPTION)
    wait(running, min(_GRACE, max(0.0, deadline - time.monotonic())))
    failures = [(index, bad) for index, future in calls if future.done() and (bad := future.exception()) is not None]
    missing = [index for index, future in calls if not future.done()]
    late = f"calls {missing} had not returned in time"
    if failures:
        first = failures[0][1]
        for index, bad in failures:
            first.add_note(f"in_threads: call {index} raised {bad!r}")
        if missing:
            first.add_note(f"in_threads: {late}")
        raise first
    if missing:
        raise TimeoutError(late)
    return [future.result() for _, future in calls]


def _call(fn: Callable[[int], T], index: int, future: Future[T]) -> None:
    try:
        future.set_result(fn(index))
    except BaseException as bad:
        future.set_exception(bad)
