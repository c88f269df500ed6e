"""A daemon's metrics: read from its parts when somebody asks, each family at once, so that none takes long."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator

import trio

from wancoll.metrics.core import families as f
from wancoll.metrics.core.operations import Operations
from wancoll.peer.door import FrontDoor
from wancoll.peer.links.traffic import Now
from wancoll.peer.session import Host, Session

_LINKS_AT_ONCE = 16  # that are looked at without a pause


class DaemonMetrics:
    """A daemon's metrics: read from it and its *door* for clients, and counted in *operations*."""

    def __init__(self, daemon: Host, operations: Operations, door: FrontDoor) -> None:
        self._daemon, self._links, self._operations, self._door = daemon, daemon.links, operations, door

    def families(self) -> Iterator[f.Family | None]:
        """All of them; None is a pause."""
        yield from self._operations.families()
        now = trio.current_time()
        yield f.Family(f.CLIENTS, [((), len(self._daemon.sessions))])
        yield f.Family(f.CONNECTED, [((), int(self._daemon.control.connected))])
        yield self._of_groups(f.IN_FLIGHT, lambda one: one.member.in_flight, sum)
        yield self._of_groups(f.OLDEST, lambda one: one.waits_since(now), max)
        yield self._of_groups(f.EPOCH, lambda one: one.member.epoch_number, max)
        yield self._of_groups(f.MEMBERS, lambda one: len(one.member.member_names), max)
        yield self._of_groups(f.ARENA_USED, lambda one: one.arena.used, sum)
        yield self._of_groups(f.ARENA_SIZE, lambda one: one.arena.nbytes, sum)
        yield from self._of_links()
        clients = sum(session.queued for session in self._daemon.sessions)
        yield f.Family(f.QUEUED, [(("master",), self._daemon.control.queued), (("clients",), clients)])
        data = self._links.counts()
        doors = {"data": (data["handshakes"], data["strangers_refused"]), "clients": self._door.counts}
        yield f.Family(f.HANDSHAKES, [((name,), pending) for name, (pending, _) in doors.items()])
        yield f.Family(f.REFUSED, [((name,), refused) for name, (_, refused) in doors.items()])

    def _of_groups(
        self, spec: f.Spec, value: Callable[[Session], float], join: Callable[[list[float]], float]
    ) -> f.Family:
        """Join the values of this daemon's members, for each group."""
        found = defaultdict(list)
        for session in self._daemon.sessions:
            if not session.member.over:
                found[session.member.group].append(value(session))
        return f.Family(spec, [((group,), join(values)) for group, values in found.items()])

    def _of_links(self) -> Iterator[f.Family | None]:
        """A look at a thousand links takes long, so that there are pauses."""
        now: dict[str, list[Now]] = defaultdict(list)
        for i, number in enumerate(self._links.numbers()):
            if (found := self._links.look_at(number)) is not None:
                now[found[0]].append(found[1])
            if i % _LINKS_AT_ONCE == _LINKS_AT_ONCE - 1:
                yield None
        lanes = [((daemon,), sum(one.lanes for one in looks)) for daemon, looks in now.items()]
        yield f.Family(f.LANES, lanes)
        trips = [
            ((daemon,), min(filter(None, (one.round_trip for one in looks)), default=0.0))
            for daemon, looks in now.items()
        ]
        yield f.Family(f.ROUND_TRIP, [(daemon, seconds) for daemon, seconds in trips if seconds])
        for i, spec in enumerate((f.LINK_SENT, f.LINK_RECEIVED, f.SEGMENTS, f.RESENT, f.CORRUPT)):
            totals = self._links.traffic.totals if self._links.traffic is not None else {}
            yield f.Family(spec, [((daemon,), counts[i]) for daemon, counts in totals.items()])
