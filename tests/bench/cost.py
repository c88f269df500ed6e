"""What a daemon costs: processor time while idle and while it waits, and memory for a large tensor."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from tests.bench.contenders import wancoll_ranks
from tests.bench.ranks import Ranks
from tests.bench.report import Bar
from wancoll.chaos import Cluster

MIB = 1 << 20
IDLE_SECONDS = 10.0
TENSOR = 512 * MIB
SETTLE_SECONDS = 0.5
SAMPLE_SECONDS = 0.005


@dataclass
class Peak:
    """The most that a process used while it was watched, bytes: own memory without shared pages, and arenas."""

    own: int = 0
    arena: int = 0


def cpu_seconds(pid: int) -> float:
    """Processor time of all threads of a process."""
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        total += int((task / "schedstat").read_text().split()[0])
    return total / 1e9


def shares(pids: dict[str, int], seconds: float) -> dict[str, float]:
    """Percent of one core that each process uses during the next *seconds*."""
    before = {name: cpu_seconds(pid) for name, pid in pids.items()}
    begin = time.monotonic()
    time.sleep(seconds)
    elapsed = time.monotonic() - begin
    return {name: (cpu_seconds(pid) - before[name]) / elapsed * 100 for name, pid in pids.items()}


def processor(voters: int) -> list[Bar]:
    """Idle daemons with attached clients; then daemons while rank 1 is late for an operation."""
    with Cluster(peers=2, master_args=[f"--voters={voters}"]) as cluster:
        ranks = wancoll_ranks(cluster, "wancoll", 2)
        try:
            ranks.measure("arena", MIB, 3)
            pids = {"daemon 0": cluster.pid(0), "daemon 1": cluster.pid(1), "master": cluster.master_pid}
            time.sleep(SETTLE_SECONDS)
            idle = shares(pids, IDLE_SECONDS)
            ranks.send(0, "arena", MIB, 1)
            time.sleep(SETTLE_SECONDS)
            waiting = shares({**pids, "client of rank 0": ranks.pid(0)}, IDLE_SECONDS)
            ranks.send(1, "arena", MIB, 1)
            for rank in range(2):
                ranks.receive(rank)
        finally:
            ranks.close()
    return [
        *(Bar(f"idle {name}, % of a core", share, most=0.5) for name, share in idle.items()),
        *(Bar(f"{name} while rank 1 is late, % of a core", share, most=0.5) for name, share in waiting.items()),
    ]


def memory() -> list[Bar]:
    """A 512 MiB tensor between two ranks: the daemon's own memory and its arena, at their highest."""
    with Cluster(peers=2) as cluster:
        ranks = wancoll_ranks(cluster, "wancoll", 2)
        try:
            ranks.measure("arena", MIB, 3)
            pid = cluster.pid(0)
            own, arena = own_bytes(pid), arena_bytes(pid)
            peak = _watch(pid, ranks)
        finally:
            ranks.close()
    return [
        Bar("512 MiB tensor: growth of the daemon's own memory, MiB", (peak.own - own) / MIB, most=64),
        Bar("512 MiB tensor: arena memory, times the tensor", (peak.arena - arena) / TENSOR, most=2.01),
    ]


def _watch(pid: int, ranks: Ranks) -> Peak:
    peak = Peak()
    over = threading.Event()

    def watch() -> None:
        while not over.wait(SAMPLE_SECONDS):
            peak.own, peak.arena = max(peak.own, own_bytes(pid)), max(peak.arena, arena_bytes(pid))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        ranks.measure("arena", TENSOR, 2)
    finally:
        over.set()
        watcher.join()
    return peak


def own_bytes(pid: int) -> int:
    """Resident memory of a process, without shared memory (the arena)."""
    kib = 0
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name in ("RssAnon", "RssFile"):
            kib += int(value.split()[0])
    return kib << 10


def arena_bytes(pid: int) -> int:
    """Memory that the arenas of a daemon take: the blocks of its memfds."""
    found: dict[int, int] = {}  # by inode: a file may be open twice
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        try:
            if os.readlink(fd).startswith("/memfd:"):
                stat = os.stat(fd)
                found[stat.st_ino] = stat.st_blocks * 512
        except FileNotFoundError:
            continue
    return sum(found.values())
