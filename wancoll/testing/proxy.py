"""Proxies in front of daemons' data ports that break lanes, sealed or not, and clusters that stand behind them."""

from __future__ import annotations

import itertools
import multiprocessing
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from socket import create_server
from typing import Any

from wancoll.errors import ConfigError
from wancoll.testing.cluster import Cluster
from wancoll.testing.processes import ClientProcess

_START_SECONDS = 20.0
_POLL = 0.005


class Proxies(AbstractContextManager["Proxies"]):
    """Proxies in front of the data ports of daemons 0, 1, ...: 127.0.0.1 for the first, 127.0.0.2 for the next.

    They forward in one process, which ends with this object. A context manager.

    Args:
        targets: where the daemons' data ports are, as (host, port).
        forward: what runs there; None: wancoll.testing.forwarding.forward.

    Attributes:
        port: of all proxies.
    """

    def __init__(self, targets: Sequence[tuple[str, int]], forward: Callable[..., None] | None = None) -> None:
        self._numbers = itertools.count(1)
        self._fired: set[int] = set()
        self._saying, self._hearing = threading.Lock(), threading.Lock()
        self._pipe, theirs = multiprocessing.Pipe()
        hosts = [f"127.0.0.{i + 1}" for i in range(len(targets))]
        self._process = ClientProcess("the proxies", forward or _forward, (theirs, hosts, list(targets)))
        theirs.close()
        try:
            self.port: int = self._hear(_START_SECONDS)
        except BaseException:
            self.close()
            raise

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the process."""
        self._process.close()
        self._pipe.close()

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process.running

    def add(
        self,
        kind: str,
        source: int,
        to: int,
        lane: int = -1,
        amount: float = 0.0,
        *,
        at: float = 0.5,
        sends: bool | None = None,
    ) -> int:
        """Add a rule, which holds when this returns; returns its number.

        Args:
            kind: "oneway" (bytes are lost, acknowledgements too), "slow", "delay", "freeze" (nothing more is read from
                the lanes that there are), "reset" (those end), "refuse" (new lanes that *source* dials, as a
                firewall), "truncate" (the connection ends), "flip" (a bit). The last two apply once.
            source: index of the daemon whose bytes are concerned; -1: any.
            to: index of the one that they are for; -1: any.
            lane: its number, of sealed lanes as they were dialled; -1: all.
            amount: slow: bytes per second; delay: seconds; truncate: bytes until the connection is closed.
            at: where in what is forwarded at once, from 0 to 1, the bit is.
            sends: only lanes for sends and recvs, or (False) only those for collectives; None: both, and sealed ones,
                of which that is not known.
        """
        with self._saying:
            number = next(self._numbers)
            self._pipe.send(("rule", (number, kind, source, to, lane, amount, at, sends)))
        self.fired(-number, _START_SECONDS)
        return number

    def fired(self, number: int, timeout: float) -> bool:
        """Whether the rule has met a lane, waiting for that at most *timeout* seconds."""
        deadline = time.monotonic() + timeout
        while number not in self._fired:
            with self._hearing:
                if self._pipe.poll(_POLL):
                    self._fired.add(self._hear(_POLL))
                elif time.monotonic() > deadline:
                    return False
        return True

    def throttle(self, rate: float) -> None:
        """Let each lane carry *rate* bytes per second, each way."""
        self.add("slow", -1, -1, amount=rate)

    def clear(self, number: int) -> None:
        """Take the rule away."""
        with self._saying:
            self._pipe.send(("clear", number))

    def clear_all(self) -> None:
        """Take all rules away."""
        with self._saying:
            self._pipe.send(("clear all", 0))

    def _hear(self, timeout: float) -> int:
        try:
            if self._pipe.poll(timeout):
                return int(self._pipe.recv())
        except EOFError:
            self._process.result(timeout)  # raises what it raised
        raise ConfigError("do not answer", who="the proxies", got=f"exit code {self._process.exit_code}")


def _forward(*arguments: Any) -> None:
    from wancoll.testing.forwarding import forward  # only that process needs trio

    forward(*arguments)


@contextmanager
def proxied_cluster(
    peers: int, *, peer_args: Sequence[str] = (), forward: Callable[..., None] | None = None, **options: Any
) -> Iterator[tuple[Cluster, Proxies]]:
    """A Cluster whose lanes go through proxies; *options* are the Cluster's."""
    with create_server(("127.0.1.1", 0)) as probe:
        port = probe.getsockname()[1]
    with Proxies([(f"127.0.1.{i + 1}", port) for i in range(peers)], forward) as proxies:
        places = [f"--listen=127.0.1.{{i}}:{port}", f"--advertise=127.0.0.{{i}}:{proxies.port}"]
        with Cluster(peers, peer_args=[*places, *peer_args], **options) as cluster:
            yield cluster, proxies
