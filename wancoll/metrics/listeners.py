"""Whether metrics are told: the listeners for the port, once that is settled."""

from __future__ import annotations

import socket

from wancoll.errors import without_package
from wancoll.metrics.guard import guarded


def listeners(where: str, token: str) -> list[socket.socket]:
    """For `--metrics WHERE`; none where that is "". Raises ConfigError: see guarded(); or a package is missing."""
    if not where:
        return []
    try:
        import wancoll.metrics.port  # noqa: F401 - loads prometheus_client, which takes a tenth of a second
    except ImportError as missing:
        raise without_package("--metrics", "metrics", missing) from missing
    return guarded(where, token, "metrics")
