"""Looks at a chaos run from outside: the master's status, and how long this machine lets processes wait. Threads."""

from __future__ import annotations

import contextlib
import pathlib
import threading
import time
from collections.abc import Callable, Iterable
from typing import Self

from wancoll.errors import WancollError
from wancoll.testing import Cluster
from wancoll.wire import messages as m

_STATUS_EVERY = 0.25  # seconds
_STALLS_EVERY = 0.5
_STALLED = 0.02  # seconds of waiting for a processor in that time from which on they are noted


class _Watch:
    """A thread that looks again and again. A context manager."""

    def __init__(self, every: float) -> None:
        self._every = every
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    @property
    def alive(self) -> bool:
        """Whether it still looks."""
        return self._thread.is_alive()

    def _run(self) -> None:
        while not self._stop.wait(self._every):
            self._look()

    def _look(self) -> None:
        raise NotImplementedError


class StatusWatch(_Watch):
    """Asks the master how its group is; of slots from *daemons* on members are not known by their names."""

    def __init__(self, cluster: Cluster, daemons: int) -> None:
        super().__init__(_STATUS_EVERY)
        self._cluster, self._daemons = cluster, daemons
        self.group: m.GroupStatus | None = None  # as last seen
        self.members: list[str] = []  # in rank order

    def right_of(self, slot: int) -> int:
        """The slot to the right of this one in the ring; -1: not known."""
        name, members = f"m{slot}", self.members
        if name not in members or len(members) < 3:
            return -1
        other = int(members[(members.index(name) + 1) % len(members)][1:])
        return other if other < self._daemons else -1

    def _look(self) -> None:
        try:
            group = next(iter(self._cluster.status().groups), None)
        except WancollError:
            return
        if group is None:
            return
        self.group = group
        ranked = sorted((one for one in group.members if one.state == "member"), key=lambda one: one.rank)
        self.members = [one.name for one in ranked]


class StallWatch(_Watch):
    """Measures how long processes that could run wait for a processor, or stand still, this one with them."""

    def __init__(self, pids: Callable[[], Iterable[int]]) -> None:
        super().__init__(_STALLS_EVERY)
        self._pids = pids
        self._before: dict[int, float] = {}
        self._at = time.monotonic()
        self.stalls: list[tuple[float, float]] = []  # (when, seconds that the process that waited longest did)

    def _look(self) -> None:
        now: dict[int, float] = {}
        for pid in self._pids():
            with contextlib.suppress(OSError, ValueError, IndexError):
                now[pid] = int(pathlib.Path(f"/proc/{pid}/schedstat").read_text("ascii").split()[1]) / 1e9
        longest = max((waited - self._before[pid] for pid, waited in now.items() if pid in self._before), default=0.0)
        self._before, began, self._at = now, self._at, time.monotonic()
        longest = max(longest, self._at - began - self._every)
        if longest > _STALLED:
            self.stalls.append((self._at, longest))
