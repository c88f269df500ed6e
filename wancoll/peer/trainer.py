"""A client's process as this machine shows it: one that is stopped, or dead with its socket open, keeps others waiting.

Who is at the other end the kernel says (SO_PEERCRED), not the client. A pidfd holds the process fast, so that another
one with its number is not taken for it. In another pid namespace, or where /proc hides it, nothing is seen of it.
"""

from __future__ import annotations

import os
import select
import socket

from wancoll.net.unix import peer_credentials

_STAT_BYTES = 4096  # more than there are


class Trainer:
    """The process at the other end of *sock*, a client's unix socket, as this machine shows it."""

    def __init__(self, sock: socket.socket) -> None:
        self.unseen = ""  # why nothing can be seen of it
        self.state = ""  # when it was looked at last: "stopped", "dead", or ""
        self._since = 0.0
        self._busy = b""  # processor time that it had used then
        self._pidfd = self._stat_fd = -1
        try:
            pid, _, _ = peer_credentials(sock)
            if pid <= 0:
                raise ProcessLookupError("it runs in another pid namespace")
            self._pidfd = os.pidfd_open(pid)
            self._exited = select.poll()
            self._exited.register(self._pidfd, select.POLLIN)
            self._stat_fd = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
            self._stat()
        except OSError as bad:
            self.unseen = str(bad)

    def look(self, now: float) -> tuple[str, float]:
        """How it stands, and since how many seconds as far as is known: "stopped", "dead", or "" for all else."""
        if self.unseen:
            return "", 0.0
        try:
            state, busy = self._stat()
        except OSError:
            state, busy = b"X", b""
        if state in b"ZX" and self._exited.poll(0):
            found = "dead"
        else:
            found = "stopped" if state in b"Tt" else ""
        if found != self.state or busy != self._busy:  # one that is traced stops often, and runs in between
            self._since = now
        self.state, self._busy = found, busy
        return found, now - self._since

    def _stat(self) -> tuple[bytes, bytes]:
        """Its state letter, and its processor time."""
        fields = os.pread(self._stat_fd, _STAT_BYTES, 0).rpartition(b")")[2].split()
        return fields[0], b" ".join(fields[11:13])

    def close(self) -> None:
        """Let go of it."""
        for fd in (self._pidfd, self._stat_fd):
            if fd >= 0:
                os.close(fd)
        self._pidfd, self._stat_fd, self.unseen = -1, -1, self.unseen or "the connection is closed"
