"""The master's listening sockets."""

from __future__ import annotations

import errno
import socket

from wancoll.errors import ConfigError
from wancoll.local import split_address

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
