"""Looks at a chaos run from outside: the master's status, and how long this machine lets processes wait. Threads."""

from __future__ import annotations

import contextlib
import pathlib
import threading
import time
from collections.abc import Callable, Iterable
from typing import Self

from wancoll.chaos.cluster import Cluster
from wancoll.chaos.middle import Middle
from wancoll.errors import WancollError
from wancoll.wire import messages as m

_STATUS_EVERY = 0.25  # seconds
_STALLS_EVERY = 0.5
_STALLED = 0.02  # seconds of waiting for a processor in that time from which on they are noted


class StatusWatch:
    """Asks the master how its group is, again and again, and tells the proxies who is where. A context manager.

    Args:
        cluster: whose master.
        middle: its proxies.
        daemons: how many there are; those of further slots are not known by their members' names.
    """

    def __init__(self, cluster: Cluster, middle: Middle, daemons: int) -> None:
        self._cluster, self._middle, self._daemons = cluster, middle, daemons
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="status", daemon=True)
        self.group: m.GroupStatus | None = None  # as last seen
        self.members: list[str] = []  # in rank order
        self.formed: set[int] = set()  # epochs that began with a group formed anew

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def right_of(self, slot: int) -> int:
        """The slot to the right of this one in the ring; -1: not known."""
        name, members = f"m{slot}", self.members
        if name not in members or len(members) < 3:
            return -1
        other = int(members[(members.index(name) + 1) % len(members)][1:])
        return other if other < self._daemons else -1

    @property
    def alive(self) -> bool:
        """Whether it still looks."""
        return self._thread.is_alive()

    def _run(self) -> None:
        told: dict[int, int] = {}
        while not self._stop.wait(_STATUS_EVERY):
            try:
                status = self._cluster.status()
            except WancollError:
                continue
            group = next(iter(status.groups), None)
            if group is None:
                continue
            self.group = group
            ranked = sorted((one for one in group.members if one.state == "member"), key=lambda one: one.rank)
            self.members = [one.name for one in ranked]
            here = {one.mid: int(one.daemon[5:]) for one in group.members if one.daemon.startswith("peer-")}
            if here != told:
                told = here
                with contextlib.suppress(OSError, ValueError):  # the proxy is being stopped
                    self._middle.members(here)


class StallWatch:
    """Measures for how long processes that could run have to wait for a processor. A context manager.

    Args:
        pids: gives the processes to look at.
    """

    def __init__(self, pids: Callable[[], Iterable[int]]) -> None:
        self._pids = pids
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stalls", daemon=True)
        self.stalls: list[tuple[float, float]] = []  # (when, seconds that the process that waited longest did)

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
        before: dict[int, float] = {}
        while not self._stop.wait(_STALLS_EVERY):
            now: dict[int, float] = {}
            for pid in self._pids():
                with contextlib.suppress(OSError, ValueError, IndexError):
                    now[pid] = int(pathlib.Path(f"/proc/{pid}/schedstat").read_text("ascii").split()[1]) / 1e9
            longest = max((waited - before[pid] for pid, waited in now.items() if pid in before), default=0.0)
            before = now
            if longest > _STALLED:
                self.stalls.append((time.monotonic(), longest))
