"""The faults' hands: what two faults under way at once may not share."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any, cast

from wancoll.chaos.clients import Clients
from wancoll.chaos.core.faults import MASTER_SLOT, STORM, Fault
from wancoll.chaos.core.invariants import Injected
from wancoll.chaos.inject import Injector
from wancoll.testing import Cluster, Proxies


class Crew:
    """Clients by slot; a slot is one client's."""

    def __init__(self) -> None:
        self.alive: dict[int, int] = {}

    def start(self, slot: int, daemon: int) -> None:
        assert slot not in self.alive
        self.alive[slot] = daemon

    def kill(self, slot: int) -> None:
        del self.alive[slot]


def test_join_storms_that_meet_have_clients_of_their_own() -> None:
    crew, stopping = Crew(), threading.Event()
    cluster = cast("Cluster", cast("Any", [None] * 10))
    injector = Injector(
        cluster, cast("Proxies", SimpleNamespace()), cast("Clients", crew), lambda _: -1, stopping, 10, 3
    )
    storms = [Injected(Fault(k, 0.0, "join_storm", MASTER_SLOT, seconds=30.0, amount=2), 0.0) for k in range(3)]
    threads = [threading.Thread(target=injector.carry_out, args=[storm]) for storm in storms]
    for k, thread in enumerate(threads):
        thread.start()
        while not (storms[k].hit or storms[k].note):
            stopping.wait(0.001)
    while len(crew.alive) < STORM:
        stopping.wait(0.001)
    stopping.set()  # ends the 30 seconds
    for thread in threads:
        thread.join(10.0)
    assert not crew.alive
    assert [storm.hit for storm in storms] == [True, True, False]
    assert storms[2].note == "another join storm was under way"
