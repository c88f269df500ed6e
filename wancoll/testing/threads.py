"""Runs one function in several threads at once: a blocking client per thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
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
    indices = list(range(which)) if isinstance(which, int) else list(which)
    results: dict[int, T] = {}
    failures: dict[int, BaseException] = {}
    changed = threading.Condition()

    def call(place: int, index: int) -> None:
        try:
            result = fn(index)
        except BaseException as bad:
            with changed:
                failures[place] = bad
                changed.notify_all()
        else:
            with changed:
                results[place] = result
                changed.notify_all()

    for place, index in enumerate(indices):
        threading.Thread(target=call, args=(place, index), name=f"in_threads-{index}", daemon=True).start()
    deadline = time.monotonic() + timeout
    with changed:
        while len(results) + len(failures) < len(indices):
            if failures:
                deadline = min(deadline, time.monotonic() + _GRACE)
            if not changed.wait(max(0.0, deadline - time.monotonic())) and time.monotonic() >= deadline:
                break
        missing = [index for place, index in enumerate(indices) if place not in results and place not in failures]
        late = f"calls {missing} had not returned in time" if missing else ""
        if failures:
            first = failures[min(failures)]
            for place in sorted(failures):
                first.add_note(f"in_threads: call {indices[place]} raised {failures[place]!r}")
            if late:
                first.add_note(f"in_threads: {late}")
            raise first
        if late:
            raise TimeoutError(late)
        return [results[place] for place in range(len(indices))]
