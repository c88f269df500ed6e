"""Which daemons of this machine have ended: each holds a lock as long as its process lives, and a later one looks.

A daemon that was killed told nobody that its members commit nothing any more, and where members commit their group's
name waits for that (C8). So each keeps a file in the user's state folder, named by host and incarnation, and a lock on
it (flock) that the kernel lets go of when the process ends, however it ends, also with the machine. Who can take that
lock knows. Daemons of any name and socket vouch for each other so, if they are one user's on one machine; where
several machines share a folder their host names tell them apart. Without such a folder nobody vouches, and names wait.

A file has its name only once it is locked, and who looks takes a lock that others who look may share. So daemons that
start at the same moment take nothing from each other. What is not such a file says nothing.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import socket
import stat

import structlog

from wancoll.local import state_folder

MOST = 256  # that are told of; older files go

log = structlog.get_logger("wancoll.peer")


def begin(incarnation: int) -> tuple[int | None, list[int]]:
    """A daemon starts. Returns the lock, to be kept as long as the process lives, and who has ended, newest first."""
    lock, ended = None, list[int]()
    try:
        folder = state_folder("lives")
        lock = _claim(folder, f"{socket.gethostname()}-{incarnation:016x}")
        ended = look(folder)
    except OSError as bad:
        log.info("daemons of this machine cannot all tell which of them have ended", reason=str(bad))
    return lock, ended


def _claim(folder: str, name: str) -> int:
    new = os.path.join(folder, f".{name}")
    lock = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with contextlib.ExitStack() as undo:
        undo.callback(os.close, lock)
        undo.callback(os.unlink, new)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(lock, f"{os.getpid()}\n".encode())
        os.rename(new, os.path.join(folder, name))
        undo.pop_all()
    return lock


def look(folder: str) -> list[int]:
    """Incarnations of this machine's daemons that have ended, newest first; what is beyond MOST is removed."""
    ours, found = re.compile(re.escape(socket.gethostname()) + "-([0-9a-f]{16})"), list[tuple[float, str, int]]()
    with os.scandir(folder) as entries:
        for one in entries:
            named = ours.fullmatch(one.name)
            ended_at = _ended(one.path) if named and int(named[1], 16) else None
            if named and ended_at is not None:
                found.append((ended_at, one.path, int(named[1], 16)))
    found.sort(reverse=True)
    for _, path, _ in found[MOST:]:
        with contextlib.suppress(OSError):
            os.unlink(path)
    return [number for _, _, number in found[:MOST]]


def _ended(path: str) -> float | None:
    """When a daemon whose process has ended wrote this; None: it has not, or it is not a daemon's file."""
    with contextlib.suppress(OSError):
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            status = os.fstat(file)
            ours = stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid() and status.st_size > 0
            return status.st_mtime if ours else None
        finally:
            os.close(file)
    return None
