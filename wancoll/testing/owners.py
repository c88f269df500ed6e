"""Which process has the other end of a connection on this machine: lanes over TLS do not say who dials them. Linux."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Sequence

Address = tuple[str, int]

_SOCK_DIAG, _SOCK_DIAG_BY_FAMILY, _REQUEST = 4, 20, 1  # of netlink
_ANYBODY: Address = ("0.0.0.0", 0)
_INODE_AT = 16 + 68  # in the answer: a header, and what the kernel says of a socket before its inode
_ERROR = 2
GONE = -2  # it has closed its end


class Owners:
    """Daemons, known by where they listen, and what they have dialled. It reads no process of other users."""

    def __init__(self, listeners: Sequence[Address]) -> None:
        self._listeners = list(listeners)
        self._pids: dict[int, int] = {}  # index -> pid as of the last time

    def dialler(self, here: Address, there: Address) -> int:
        """Index of the daemon whose end of the connection is at *there*; -1: it is of none; GONE: it is closed."""
        wanted = _inode(there, here)
        known = [pid for pid in self._pids.values() if wanted in _sockets(pid)] if wanted else []
        for pid in known or (self._owners(wanted) if wanted else []):
            held = _sockets(pid)
            for index, listener in enumerate(self._listeners):
                if _inode(listener, _ANYBODY) in held:
                    self._pids[index] = pid
                    return index
        return -1 if wanted and _inode(there, here) == wanted else GONE

    @staticmethod
    def _owners(inode: int) -> list[int]:
        pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
        return [pid for pid in pids if inode in _sockets(pid)]


def _inode(local: Address, remote: Address) -> int:
    """The inode of the socket between these; 0: there is none."""
    ends = struct.pack(">HH", local[1], remote[1])
    ends += b"".join(socket.inet_aton(host).ljust(16, b"\0") for host, _ in (local, remote))
    question = struct.pack("BBBBI", socket.AF_INET, socket.IPPROTO_TCP, 0, 0, 0xFFFFFFFF) + ends
    question += struct.pack("III", 0, 0xFFFFFFFF, 0xFFFFFFFF)  # any interface, no cookie
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _SOCK_DIAG) as diag:
        diag.send(struct.pack("IHHII", 16 + len(question), _SOCK_DIAG_BY_FAMILY, _REQUEST, 1, 0) + question)
        answer = diag.recv(4096)
    if struct.unpack_from("H", answer, 4)[0] == _ERROR:
        return 0
    return int(struct.unpack_from("I", answer, _INODE_AT)[0])


def _sockets(pid: int) -> set[int]:
    """Inodes of what sockets the process has open; none if it is gone or of another user."""
    found = set()
    with contextlib.suppress(OSError):
        for entry in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                what = os.readlink(f"/proc/{pid}/fd/{entry}")
                if what.startswith("socket:["):
                    found.add(int(what[8:-1]))
    return found
