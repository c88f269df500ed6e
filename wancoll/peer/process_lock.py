"""Which daemons of this machine have ended: each holds a lock as long as its process lives, and a later one looks.

A daemon that was killed told nobody that its members commit nothing any more, and where members commit their group's
name waits for that (C8). So each keeps a file in the user's state folder, named by host and incarnation, and a lock on
it (flock) that the kernel lets go of when the process ends, however it ends, also with the machine. Who can take that
lock knows. Daemons of any name and socket vouch for each other so, if they are one user's on one machine; where
several machines share a folder their host names tell them apart. Without such a folder nobody vouches, and names wait.

A file has its name only once it is locked, and who looks takes a lock that others who look may share. So daemons that
start at the same moment take nothing from each other. What is not such a file says nothing.

A file says how long a group's name may wait for that daemon (its --master-grace). Once it was found ended for so long
no name waits, and the next daemon that starts removes it. Those of daemons that wait without end stay.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import socket
import stat
import time

import structlog

from wancoll.local import state_folder

MOST = 256  # that are told of; older files go
_FOUND = 0o400  # mode of a file whose daemon was found ended; when its mode changed says when

log = structlog.get_logger("wancoll.peer")


def begin(incarnation: int, grace: float) -> tuple[int | None, list[int]]:
    """A daemon starts, whose members commit for *grace* seconds at most without a master.

    Returns:
        The lock, to be kept as long as the process lives, and who has ended, newest first.
    """
    lock, ended = None, list[int]()
    try:
        folder = state_folder("lives")
        lock = _claim(folder, f"{socket.gethostname()}-{incarnation:016x}", grace)
        ended = look(folder)
    except OSError as bad:
        log.info("daemons of this machine cannot all tell which of them have ended", reason=str(bad))
    return lock, ended


def _claim(folder: str, name: str, grace: float) -> int:
    new = os.path.join(folder, f".{name}")
    lock = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with contextlib.ExitStack() as undo:
        undo.callback(os.close, lock)
        undo.callback(os.unlink, new)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(lock, f"{os.getpid()} {grace}\n".encode())
        os.rename(new, os.path.join(folder, name))
        undo.pop_all()
    return lock


def look(folder: str) -> list[int]:
    """Incarnations of this machine's daemons that have ended, newest first. Removes files that nobody needs."""
    ours, found = re.compile(re.escape(socket.gethostname()) + "-([0-9a-f]{16})"), list[tuple[float, str, int]]()
    over = []
    with os.scandir(folder) as entries:
        for one in entries:
            named = ours.fullmatch(one.name)
            began, until = _ended(one.path) if named and int(named[1], 16) else (0.0, 0.0)
            if named and until > time.time():
                found.append((began, one.path, int(named[1], 16)))
            elif until:
                over.append(one.path)
    found.sort(reverse=True)
    for path in over + [path for _, path, _ in found[MOST:]]:
        with contextlib.suppress(OSError):
            os.unlink(path)
    return [number for _, _, number in found[:MOST]]


def _ended(path: str) -> tuple[float, float]:
    """When a daemon that has ended wrote this, and until when its end is to be told.

    Zeros: it has not ended, or this is no daemon's file. The first one who finds it notes when that was.
    """
    with contextlib.suppress(OSError, ValueError):
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            status = os.fstat(file)
            if stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid() and status.st_size > 0:
                grace = os.read(file, 100).split()[1:2] or [b"inf"]  # files of earlier versions do not say
                if stat.S_IMODE(status.st_mode) != _FOUND:
                    os.fchmod(file, _FOUND)
                return status.st_mtime, os.fstat(file).st_ctime + float(grace[0])
        finally:
            os.close(file)
    return 0.0, 0.0
