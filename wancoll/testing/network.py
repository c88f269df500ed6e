"""Where the parts of a cluster run when they are not all on loopback."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Literal, Protocol

Host = int | Literal["master"]  # the index of a peer, or the master's host


class Network(Protocol):
    """Hosts with addresses of their own, such as network namespaces on this machine."""

    def address(self, host: Host) -> str:
        """The IP address of a host."""

    def inside(self, host: Host) -> AbstractContextManager[None]:
        """While entered, the calling thread is on that host, and with it the sockets and processes that it makes."""


def inside(network: Network | None, host: Host) -> AbstractContextManager[None]:
    """On that host of the network; here, if there is none."""
    return nullcontext() if network is None else network.inside(host)
