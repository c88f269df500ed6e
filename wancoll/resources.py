"""What a process holds, by /proc: descriptors, threads, memory, arenas. And what memory the machine has for it."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from wancoll.limits import Limits

ARENA = "memfd:wancoll-arena"
_ROOT = Path("/")  # of the file system that is looked at
FILES_OF_A_CLIENT = 5  # its socket, its arena and bell, and what watches its process; lanes come on top
_OWN_FILES = 64  # listeners, the engine's, the journal's


def affordable(limits: Limits) -> Limits:
    """*limits*, with no more daemons and clients than this process may have files open for.

    It may have as many as the system lets it have: the soft limit is raised to the hard one.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
    if soft == resource.RLIM_INFINITY:
        return limits
    room = max(1, soft - limits.pending_connections - _OWN_FILES)
    return replace(limits, daemons=min(limits.daemons, room), clients=min(limits.clients, room // FILES_OF_A_CLIENT))


def of_this_process() -> dict[str, int]:
    """See of_process; empty where there is no descriptor left to look."""
    try:
        return of_process()
    except OSError:
        return {}


def of_process(pid: int | None = None) -> dict[str, int]:
    """Counts of process *pid*, None for this one.

    Returns:
        fds: open descriptors.
        threads: of the kernel.
        arenas: mapped ones (an arena that has exchanged pages with arrays is many mappings of one file).
        memory: bytes of private memory in use.
        shared: bytes of shared memory in use, arenas for the most part.

    Raises:
        OSError: no such process, or not ours.
    """
    proc = f"/proc/{pid or 'self'}"
    fds = len(os.listdir(f"{proc}/fd")) - (pid is None)  # less the one that reads the list
    status: dict[str, int] = {}
    with open(f"{proc}/status", encoding="ascii", errors="replace") as lines:
        for line in lines:
            name, _, value = line.partition(":")
            with contextlib.suppress(ValueError, IndexError):
                status[name] = int(value.split()[0])
    arenas = set()
    with open(f"{proc}/maps", encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if ARENA in line:
                arenas.add(line.split()[4])  # its inode
    return {
        "fds": fds,
        "threads": status.get("Threads", 0),
        "arenas": len(arenas),
        "memory": 1024 * status.get("RssAnon", 0),
        "shared": 1024 * status.get("RssShmem", 0),
    }


def cores() -> int:
    """Cores of processors that this process may use: those that it may run on, or what a control group lets it have."""
    found = [len(os.sched_getaffinity(0))]
    for folder, first in _folders("cpu"):
        with contextlib.suppress(OSError, ValueError):  # none here, or "max"
            names = ("cpu.cfs_quota_us", "cpu.cfs_period_us") if first else ("cpu.max",)
            quota, period = (int(word) for name in names for word in (folder / name).read_text().split())
            if quota > 0:
                found.append(max(1, quota // period))
    return min(found)


def _folders(controller: str) -> Iterator[tuple[Path, bool]]:
    """Folders of the control groups that this process is in, its own first; whether they are of version 1."""
    with contextlib.suppress(OSError):
        for line in (_ROOT / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            first = controller in controllers.split(",")
            if controllers and not first:
                continue
            top = _ROOT / "sys/fs/cgroup" / (controller if first else "")
            folder = top / path.strip("/")
            yield from ((each, first) for each in (folder, *folder.parents) if each.is_relative_to(top))


# ---- memory ---------------------------------------------------------------------------------------------


def total_memory() -> int:
    """Bytes that this process can ever have: the machine's, or what a control group above it allows."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([machine, *(limit for limit, _ in _groups())])


def free_memory() -> int:
    """Bytes that this process can still have, swap included: of the machine, and of each control group above it."""
    machine = _numbers(_ROOT / "proc/meminfo")
    free = [limit - used for limit, used in _groups()]
    if "MemAvailable:" in machine:
        free.append(1024 * (machine["MemAvailable:"] + machine.get("SwapFree:", 0)))
    return max(0, min(free, default=total_memory()))


def _groups() -> Iterator[tuple[int, int]]:
    """(limit, bytes in use that cannot be taken back) of the control groups that have a limit, version 2 and 1."""
    for folder, first in _folders("memory"):
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if first else ("memory.max", "memory.current")
        with contextlib.suppress(OSError, ValueError):  # none here, or "max"
            limit, used = (int((folder / name).read_text()) for name in names)
            cache = _numbers(folder / "memory.stat")
            prefix = "total_" if first else ""
            yield limit, used - sum(cache.get(f"{prefix}{kind}_file", 0) for kind in ("active", "inactive"))


def _numbers(path: Path) -> dict[str, int]:
    """Read lines with a name and a number."""
    found = {}
    with contextlib.suppress(OSError):
        for line in path.read_text().splitlines():
            name, number, *_ = line.split()
            found[name] = int(number)
    return found
