"""Unix sockets: connecting, and who is at the other end, without trio: a client has no event loop."""

from __future__ import annotations

import os
import socket
import struct
import time
from typing import Any

from wancoll.errors import ConfigError

_FULL_QUEUE_SECONDS = 0.005  # between two tries at a socket whose queue is full


def peer_credentials(sock: Any) -> tuple[int, int, int]:
    """(pid, uid, gid) of whoever connected to a unix socket, or made the one that was connected to, as the kernel says.

    pid 0: of another pid namespace.
    """
    pid, uid, gid = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, uid, gid


def check_owner(sock: Any, who: str) -> None:
    """ConfigError if another user serves it, who could have bound the path first and would be handed the tensors."""
    pid, uid, _ = peer_credentials(sock)
    if uid not in (os.geteuid(), 0):
        raise ConfigError(
            "is another user's socket, who would be handed the tensors", who=who,
            expected=f"a daemon of user {os.geteuid()}, or of root", got=f"process {pid} of user {uid}",
            hint="run `wancoll peer` as this user, with the same --socket in a folder that no other user may write to",
        )  # fmt: skip


def is_served(path: str, timeout: float) -> bool:
    """Whether a process listens at *path*; one that is too busy to accept within *timeout* (seconds) does.

    Raises:
        OSError: that cannot be told.
    """
    try:
        connect_local(path, timeout).close()
    except TimeoutError:
        return True
    except ConnectionRefusedError:
        return False
    return True


def what_to_do(bad: OSError) -> str:
    """For a command that could not ask the daemon at a socket."""
    if isinstance(bad, PermissionError):
        return "it is another user's: run this as the daemon's user, or as root"
    return "is `wancoll peer` running there? --socket says where"


def connect_local(path: str, timeout: float) -> socket.socket:
    """A connection to the unix socket at *path*, with *timeout* (seconds) set.

    A unix socket whose queue of connections is full answers "try again" at once to anyone who has a timeout, where
    TCP would wait: so try again until the time is over.

    Raises:
        OSError: nobody listens there, or not within *timeout*.
    """
    deadline = time.monotonic() + timeout
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(timeout)
        while True:
            try:
                connection.connect(path)
                return connection
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise TimeoutError(f"its queue of connections was full for {timeout:g} s") from None
                time.sleep(_FULL_QUEUE_SECONDS)
    except BaseException:
        connection.close()
        raise
