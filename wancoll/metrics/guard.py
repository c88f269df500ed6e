"""Guards the ports that tell of a process, metrics and the page: one rule for addresses and tokens."""

from __future__ import annotations

import ipaddress
import socket
from importlib import import_module

from wancoll.errors import ConfigError, without_package
from wancoll.net.listen import open_listeners

_LEAST_TOKEN = 16  # characters


def listeners_for(what: str, where: str, token: str, module: str) -> list[socket.socket]:
    """Open the listeners of the option --*what* WHERE, such as "metrics"; none where that is "".

    What is told there is for all of this machine, and beyond it for who shows a token: one rule for all such. Raises
    ConfigError: the address cannot be used, or others could read there, and no token (WANCOLL_METRICS_TOKEN) keeps them
    off; or *module*, which serves them, needs a package that is not installed.
    """
    if not where:
        return []
    try:
        import_module(module)  # only now: it may take a tenth of a second
    except ImportError as missing:
        raise without_package(f"--{what}", what, missing) from missing
    variable = f"WANCOLL_{what.upper()}_TOKEN"
    if token and (len(token) < _LEAST_TOKEN or not token.isascii() or not token.isprintable() or " " in token):
        expected = f"{_LEAST_TOKEN} printable ASCII characters or more, no spaces"
        raise ConfigError("is no token to rely on", who=variable, expected=expected, got="another text")
    sockets = open_listeners(where)
    if not token and not all(ipaddress.ip_address(one.getsockname()[0]).is_loopback for one in sockets):
        for one in sockets:
            one.close()
        raise ConfigError(
            "would tell everybody who reaches it", who=f"--{what} {where}",
            expected=f"a token in {variable}, which who reads shows, or a loopback address",
            got="no token", hint=f"127.0.0.1:{where.rpartition(':')[2]} is for this machine alone",
        )  # fmt: skip
    return sockets
