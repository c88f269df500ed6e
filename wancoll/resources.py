"""What a process holds, by /proc: descriptors, threads, memory, arenas."""

from __future__ import annotations

import contextlib
import os

ARENA = "memfd:wancoll-arena"


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
