"""The clients of a chaos run: started, listened to, killed. Their records arrive in one queue."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from wancoll.chaos.clients import ClientProcess
from wancoll.chaos.cluster import Cluster
from wancoll.chaos.member import Settings, churn
from wancoll.churn.records import Record
from wancoll.errors import ConfigError

_QUEUED = 20_000  # records that are not read yet; then clients wait


@dataclass(eq=False)
class Client:
    """One client process."""

    slot: int
    process: ClientProcess
    killed: bool = False
    ended: bool = False
    heard_at: float = field(default_factory=time.monotonic)

    @property
    def name(self) -> str:
        """Of the member."""
        return f"m{self.slot}"


class Clients:
    """See the module.

    Args:
        cluster: whose daemons they use.
        settings: of all of them.
    """

    def __init__(self, cluster: Cluster, settings: Settings) -> None:
        self._cluster, self._settings = cluster, settings
        self._lock = threading.Lock()
        self._of_slot: dict[int, Client] = {}
        self._threads: list[threading.Thread] = []
        self.heard: queue.Queue[tuple[Client, Record | BaseException | None]] = queue.Queue(_QUEUED)

    def start(self, slot: int, daemon: int) -> None:
        """Start the client of *slot* at a daemon."""
        process = self._cluster.client(daemon, churn, self._settings, slot)
        client = Client(slot, process)
        thread = threading.Thread(target=self._read, args=(client,), name=f"reads m{slot}", daemon=True)
        with self._lock:
            self._of_slot[slot] = client
            self._threads.append(thread)
        thread.start()

    def kill(self, slot: int) -> None:
        """SIGKILL it."""
        with self._lock:
            client = self._of_slot.pop(slot)
        client.killed = True
        client.process.kill()

    def alive(self) -> list[Client]:
        """Those that have not been killed and have not ended."""
        with self._lock:
            return [client for client in self._of_slot.values() if not client.ended]

    def pids(self) -> Iterable[int]:
        """Process ids of the live ones."""
        return [client.process.pid for client in self.alive()]

    def _read(self, client: Client) -> None:
        """Task of a thread: hand on what the client says; None at its end."""
        last: BaseException | None = None
        try:
            while True:
                record = client.process.next(timeout=3600.0)
                client.heard_at = time.monotonic()
                self.heard.put((client, record))
        except ConfigError as end:
            if not client.killed and "its end" not in end.got:
                last = end
        except BaseException as bad:
            last = bad
        client.ended = True
        if client.killed:
            with contextlib.suppress(OSError):
                client.process.close()
        self.heard.put((client, last))
