"""A port of a service that comes and goes: while it is down, no connection of this machine gets it as its own."""

from __future__ import annotations

import socket


def reserve(host: str = "127.0.0.1") -> socket.socket:
    """A socket that is bound to a free port of *host* and does not listen: close it to let the port go.

    A service that sets SO_REUSEADDR, as all do that are started again, listens there all the same. The kernel gives
    the port to no connection meanwhile: it would keep the service out until a minute after its end, and one in some
    hundred starts on a busy machine met that.
    """
    made = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(("" if host == "*" else host, 0))
    except OSError:
        made.close()
        raise
    return made


def port_of(reserved: socket.socket) -> int:
    """The port that is kept."""
    return int(reserved.getsockname()[1])
