"""A `wancoll relay` on a host of a test's network, which can be killed and started again."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.relay.nat import Nats
from wancoll.limits import PROTOCOL_VERSION
from wancoll.net.ask import ask
from wancoll.process import Child, end, start
from wancoll.testing.cluster import Cluster
from wancoll.testing.network import Host
from wancoll.wire import messages as m


def token(cluster: Cluster, nats: Nats, role: str) -> str:
    """A new token for that role."""
    made = m.MakeToken(PROTOCOL_VERSION, role, "", [], 0, 0.0)  # type: ignore[arg-type]
    with nats.inside("master"):
        answer = ask(cluster.master_address, made, m.FromMaster, timeout=5, who="the master", proof=cluster.proof())
    return str(answer.made)


class RelayProcess:
    """One on *host*, at port 7402 there. *program*: and its first arguments, which take those of a relay."""

    def __init__(
        self, cluster: Cluster, nats: Nats, host: Host, folder: Path, program: Sequence[str] = ("wancoll", "relay")
    ) -> None:
        self._program = program
        self._nats, self._host, self._folder, self.name = nats, host, str(folder), f"relay-{host}"
        self._options = [f"--join={token(cluster, nats, 'relay')}", f"--name={self.name}"]
        self._options += [f"--state={folder}/{self.name}", f"--listen={nats.address(host)}:7402"]
        self._child: Child | None = None
        self.start()

    def start(self) -> None:
        """Start it, and wait until the master knows it."""
        environment = {name: text for name, text in os.environ.items() if not name.startswith("WANCOLL_")}
        place = self._nats.inside(self._host)
        command = [*self._program, *self._options]
        self._child = start(self.name, command, self._folder, environment=environment, place=place)
        self._child.said("ready", 30)

    def kill(self) -> None:
        """SIGKILL it."""
        assert self._child is not None
        self._child.kill()

    def close(self) -> None:
        """End it."""
        if self._child is not None:
            end([self._child], 2)

    def log(self) -> str:
        """The end of its log."""
        assert self._child is not None
        return self._child.log_tail(50)


@contextmanager
def relays(
    cluster: Cluster, nats: Nats, folder: Path, *hosts: Host, program: Sequence[str] = ("wancoll", "relay")
) -> Iterator[list[RelayProcess]]:
    """A relay on each of these hosts."""
    running: list[RelayProcess] = []
    try:
        running += (RelayProcess(cluster, nats, host, folder, program) for host in hosts)
        yield running
    finally:
        for one in running:
            one.close()
