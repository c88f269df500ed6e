"""Listening sockets, TCP and unix, and the bound on connections that have not said yet who they are."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
from collections.abc import Iterator

import trio

from wancoll.errors import ConfigError
from wancoll.local import split_address
from wancoll.net.unix import is_served

_BACKLOG = 1024


def open_listeners(listen: str) -> list[socket.socket]:
    """Listening TCP sockets, one for each address of the host; host "" or "*" takes IPv6 and IPv4 on one port.

    Raises:
        ConfigError: the address cannot be read or bound.
    """
    host, port = split_address(listen, what="listen address")
    sockets: list[socket.socket] = []
    refusals: list[OSError] = []
    try:
        if host in ("", "*"):
            both = socket.has_dualstack_ipv6()
            family = socket.AF_INET6 if both else socket.AF_INET
            return [socket.create_server(("", port), family=family, dualstack_ipv6=both, backlog=_BACKLOG)]
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, where in dict.fromkeys((family, str(address[0])) for family, *_, address in found):
            bound = sockets[0].getsockname()[1] if sockets else port
            try:
                sockets.append(socket.create_server((where, bound), family=family, backlog=_BACKLOG))
            except OSError as bad:
                if bad.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                    raise
                refusals.append(bad)  # "localhost" means ::1 too, also where there is no IPv6
        if not sockets:
            raise refusals[0]
        return sockets
    except OSError as bad:
        for one in sockets:
            one.close()
        raise ConfigError(
            "cannot listen there",
            who=listen,
            expected="an address of this machine and a free port",
            got=str(bad),
            hint="port 0 picks a free one; '*' takes all interfaces",
        ) from bad


def trio_listeners(sockets: list[socket.socket]) -> list[trio.SocketListener]:
    """For trio.serve_listeners."""
    return [trio.SocketListener(trio.socket.from_stdlib_socket(one)) for one in sockets]


def claim_socket(path: str) -> socket.socket:
    """A listening unix socket at *path*, for this user alone; a leftover of a dead daemon is replaced.

    Raises:
        ConfigError: a daemon is alive there, or the path cannot be used.
    """
    hint = "choose another with --socket or WANCOLL_SOCKET"
    try:
        os.makedirs(os.path.dirname(path) or ".", mode=0o700, exist_ok=True)
        if os.path.exists(path):
            if not stat.S_ISSOCK(os.stat(path).st_mode):
                raise ConfigError("is not a socket", who=path, hint=hint)
            if is_served(path, timeout=1):
                raise ConfigError("another daemon serves this socket", who=path, hint=hint)
            os.unlink(path)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(path)
        os.chmod(path, 0o600)
        listener.listen(_BACKLOG)
        return listener
    except OSError as bad:
        raise ConfigError("cannot be used as client socket", who=path, got=str(bad), hint=hint) from bad


class Handshakes:
    """Connections that have not said yet who they are: so many at most, each for so long.

    Args:
        most: when one more comes, the oldest gives way, so that idle connections block nobody.
        seconds: for each.
    """

    def __init__(self, most: int, seconds: float) -> None:
        self._most, self._seconds = most, seconds
        self._open: dict[trio.CancelScope, None] = {}  # oldest first

    def __len__(self) -> int:
        return len(self._open)

    @contextlib.contextmanager
    def one(self) -> Iterator[trio.CancelScope]:
        """One connection, until it has said who it is: what runs inside is cancelled when its time is over."""
        if len(self._open) >= self._most:
            oldest = next(iter(self._open))
            del self._open[oldest]
            oldest.cancel()
        with trio.move_on_after(self._seconds) as scope:
            self._open[scope] = None
            try:
                yield scope
            finally:
                self._open.pop(scope, None)
