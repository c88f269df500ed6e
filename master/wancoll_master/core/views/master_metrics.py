"""A master's metrics: what is counted of its event log, and what its state says when somebody asks. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator

from wancoll.metrics.core import families as f
from wancoll.metrics.core.operations import LabelCounts
from wancoll_master.core.liveness.blame import FRESH
from wancoll_master.core.ready import Record
from wancoll_master.core.state import Group, State

_GROUPS_AT_ONCE = 64  # that are looked at without a pause


class Events:
    """What the log of this master's time has told."""

    def __init__(self) -> None:
        self._events, self._evictions = LabelCounts(), LabelCounts()

    def count(self, record: Record) -> None:
        """One more."""
        self._events.add((record.group, record.kind))
        if record.lost:
            self._evictions.add((record.group, record.cause), record.lost)

    def families(self) -> Iterator[f.Family]:
        """The counts as they are now."""
        yield self._events.family(f.EVENTS)
        yield self._evictions.family(f.EVICTIONS)


def of(state: State, now: float) -> Iterator[f.Family | None]:
    """What the state says; None is a pause."""
    yield f.Family(f.TERM, [((), state.term)])
    yield f.Family(f.DAEMONS, [((), len(state.daemons))])
    yield f.Family(f.MESSAGES_REFUSED, [((kind,), times) for kind, times in state.refused.items()])
    yield _of_groups(state, f.GROUP_EPOCH, lambda group: group.epoch if group.members else 0)
    yield _of_groups(state, f.GROUP_MEMBERS, lambda group: len(group.members))
    yield _of_groups(state, f.JOINING, lambda group: len(group.joining))
    yield _of_groups(state, f.COMMITTED, lambda group: group.heard)
    counts: list[tuple[f.Labels, float | f.Bins]] = []
    seconds: list[tuple[f.Labels, float | f.Bins]] = []
    for i, group in enumerate(list(state.groups.values())):
        for name, waits in _waited_for(state, group, now).items():
            counts.append(((group.name, name), len(waits)))
            seconds.append(((group.name, name), max(waits)))
        if i % _GROUPS_AT_ONCE == _GROUPS_AT_ONCE - 1:
            yield None
    yield f.Family(f.WAITED_FOR, counts)
    yield f.Family(f.WAITED_SECONDS, seconds)


def _of_groups(state: State, spec: f.Spec, value: Callable[[Group], float]) -> f.Family:
    return f.Family(spec, [((name,), value(group)) for name, group in state.groups.items()])


def _waited_for(state: State, group: Group, now: float) -> dict[str, list[float]]:
    """By member: for how long each slow operation has waited for it, as was found lately when members told."""
    found, limits = group.current.waits, state.limits
    if found is None or group.stopped or now - found[0] > FRESH * limits.heartbeat_interval:
        return {}
    by_name: dict[str, list[float]] = defaultdict(list)
    for wait in found[1]:
        for cause in wait.causes:
            by_name[cause.member].append(cause.seconds + now - found[0])
    return by_name
