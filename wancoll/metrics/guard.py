"""Who may read what a process tells about itself, metrics and the page: one rule for where, and for tokens."""

from __future__ import annotations

import base64
import binascii
import hmac
import ipaddress
import re
import socket

from wancoll.errors import ConfigError
from wancoll.net.http import Answer, Request
from wancoll.net.listen import open_listeners

_LEAST_TOKEN = 16  # characters


def guarded(where: str, token: str, what: str) -> list[socket.socket]:
    """Listeners for what is told to all of this machine, and beyond it to who shows a token: one rule for all such.

    Args:
        where: "host:port".
        token: "": none.
        what: of the option, such as "metrics"; its token is in WANCOLL_METRICS_TOKEN.

    Raises:
        ConfigError: the address cannot be used, or others could read there, and no token keeps them off.
    """
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


def shows(token: bytes, shown: list[str]) -> bool:
    """Whether that is among what a request has for Authorization: as bearer, or as password of any user."""
    scheme, _, what = (shown[0] if len(shown) == 1 else "").partition(" ")
    found = what.strip().encode()
    if scheme.lower() == "basic":
        try:
            found = base64.b64decode(found, validate=True).partition(b":")[2]
        except binascii.Error:
            return False
    return scheme.lower() in ("basic", "bearer") and hmac.compare_digest(found, token)


def refused(request: Request, token: bytes, variable: str) -> Answer | None:
    """The answer to a *request* that may not know; None: it may.

    Without a token the listeners are on loopback, where a browser may be led by a name of somebody else's (DNS
    rebinding): only this machine's own names count.

    Args:
        request: its Authorization and Host count.
        token: b"": none.
        variable: in which the process was given the token.
    """
    if token and not shows(token, request.headers.get("authorization", [])):
        said = f"needs the token of {variable}, as bearer or as password of any user\n"
        return Answer(401, said.encode(), headers={"WWW-Authenticate": 'Basic realm="wancoll", charset="UTF-8"'})
    if token or _is_local(request.headers.get("host", [])):
        return None
    return Answer(403, b"without a token only as localhost, 127.0.0.1 or [::1]: other names may be somebody else's\n")


def _is_local(hosts: list[str]) -> bool:
    name = re.sub(r":\d*$", "", hosts[0] if len(hosts) == 1 else "")
    if name.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(name.strip("[]")).is_loopback
    except ValueError:
        return False
