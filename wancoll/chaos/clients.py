"""The clients of a chaos run: started, heard, killed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass

from wancoll.chaos.core.records import Record
from wancoll.chaos.member import Settings, churn
from wancoll.errors import ConfigError
from wancoll.testing import ClientProcess, Cluster


@dataclass(eq=False)
class Client:
    """One client process."""

    slot: int
    process: ClientProcess
    killed: bool = False

    @property
    def name(self) -> str:
        """The member's name."""
        return f"m{self.slot}"


class Clients:
    """The clients of a run, by slot. Faults start and kill them in threads of their own; the main thread hears them."""

    def __init__(self, cluster: Cluster, settings: Settings) -> None:
        self._cluster, self._settings = cluster, settings
        self._lock = threading.Lock()
        self._of_slot: dict[int, Client] = {}
        self._heard: dict[ClientProcess, Client] = {}  # killed ones, too, until all that they said is heard

    def start(self, slot: int, daemon: int) -> None:
        """Start the client of *slot* at a daemon."""
        client = Client(slot, self._cluster.client(daemon, churn, self._settings, slot))
        with self._lock:
            self._of_slot[slot] = self._heard[client.process] = client

    def kill(self, slot: int) -> None:
        """SIGKILL it."""
        with self._lock:
            client = self._of_slot.pop(slot)
        client.killed = True
        client.process.kill()

    def alive(self) -> list[Client]:
        """Those that have not been killed and have not ended."""
        with self._lock:
            return [client for client in self._of_slot.values() if not client.process.ended]

    def hear(self, timeout: float) -> Iterator[tuple[Client, Record | BaseException | None]]:
        """What clients say, if any does within *timeout* seconds; at a client's end its error, or None."""
        with self._lock:
            heard = dict(self._heard)
        for process in ClientProcess.heard(heard, timeout):
            client = heard[process]
            try:
                yield client, process.next(0.0)
                continue
            except ConfigError as end:
                expected = client.killed or "its end" in end.got
                last: BaseException | None = None if expected else end
            except BaseException as bad:
                last = bad
            with self._lock:
                del self._heard[process]
            process.close()
            yield client, last
