"""Asks daemons to measure the paths between them, and says how long it is worth to wait for the answers. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from wancoll.limits import MIB
from wancoll.wire import messages as m
from wancoll_master.core.paths import ways
from wancoll_master.core.state import Asked, Daemon, Group, Step
from wancoll_master.plan.planning import FAR, near
from wancoll_master.plan.topology import SEARCHED

WAIT = 1.0  # seconds that a group's start, or an admission, waits for a round trip
BURST_WAIT = 2.5  # seconds more that the start of a group whose members are far apart waits for their uplinks
SMALL = 8  # daemons up to which all paths are measured; beyond, those to 1, 2, 4, 8, ... (1, 4, 16, ...) places away
BURST_BYTES = 128 * MIB  # at most: a burst ends when its speed grows no more
BURST_BYTES_OF_MANY = 4 * MIB  # where there are more than SMALL
AGAIN = 60.0  # seconds until a burst that told nothing is asked for again


def ask_round_trips(step: Step, group: Group, newcomer: Daemon) -> None:
    """A member of *newcomer* has joined: ask for its round trips to the others, where they are not known."""
    daemons = _daemons(group)
    if newcomer not in daemons:
        return
    at = daemons.index(newcomer)
    for steps in _steps(len(daemons)):
        other = daemons[at - steps]
        if step.state.measures.rtt(newcomer.name, other.name) or near(newcomer, other):
            continue
        source, target = (newcomer, other) if newcomer.measures else (other, newcomer)
        if ways.way(step, source, target) is None:
            source, target = target, source
        if not source.measures:
            continue
        ends = source.name, target.name
        asked = step.state.asked.add(ends, Asked())
        if asked.until <= step.now:
            asked.until = step.now + WAIT
            step.alarm(asked.until)
            way = ways.way(step, source, target) or m.Way.direct
            step.send(source.conn, m.MeasureLink(target.name, target.addresses, 0, target.key, way))
        group.awaited[ends] = asked.until, False


def ask_uplinks(step: Step, group: Group) -> bool:
    """The group is about to start: where members are far apart, ask each daemon for the bandwidth to the next one.

    Returns whether there is something to wait for.
    """
    daemons = [daemon for daemon in _daemons(group) if daemon.measures]
    known = step.state.measures.paths.among({daemon.name for daemon in daemons})
    if not any(path.rtt > FAR for _, path in known):
        return False
    for at, source in enumerate(daemons):
        target = daemons[(at + 1) % len(daemons)]
        if _ask_bandwidth(step, source, target, BURST_BYTES):
            group.awaited[source.name, target.name] = step.now + BURST_WAIT, True
    if group.awaited:
        step.alarm(step.now + BURST_WAIT)
    return bool(group.awaited)


def ask_bandwidths(step: Step, group: Group) -> None:
    """A new epoch: ask for the bandwidth of paths where it is not known.

    Every daemon sends its bursts one after the other. Each begins with the path to the next member, so that not all of
    them send to the same one at the same time.
    """
    daemons = _daemons(group)
    count = len(daemons)
    nbytes = BURST_BYTES if count <= SMALL else BURST_BYTES_OF_MANY
    places = _steps(count) if count <= SEARCHED else (1,)  # no better ring is looked for among so many
    for at, source in enumerate(daemons):
        for steps in places:
            _ask_bandwidth(step, source, daemons[(at + steps) % count], nbytes)


def _ask_bandwidth(step: Step, source: Daemon, target: Daemon, nbytes: int) -> bool:
    known = step.state.measures.bandwidth(source.name, target.name)
    way = ways.way(step, source, target)
    if known or not source.measures or near(source, target) or way is None:
        return False
    ends = source.name, target.name
    asked = step.state.asked.add(ends, Asked())
    if asked.burst_at + AGAIN > step.now:
        return False
    asked.burst_at = step.now
    step.send(source.conn, m.MeasureLink(target.name, target.addresses, nbytes, target.key, way))
    return True


def take(step: Step, daemon: Daemon, report: m.LinkReport) -> list[Group]:
    """Take in a report. Returns groups that may have waited for it."""
    step.state.measures.take(daemon.name, report, step.state.daemons, step.now)
    answered = []
    for group in daemon.groups:
        before = len(group.awaited)
        for seen in report.links if before else ():
            ends = daemon.name, seen.daemon
            _, burst = group.awaited.get(ends, (0.0, False))
            if not burst or seen.bandwidth or not seen.rtt:  # the round trip is told first
                group.awaited.pop(ends, None)
        if len(group.awaited) < before:
            answered.append(group)
    return answered


def forget(step: Step, gone: Iterable[Daemon]) -> None:
    """The daemons are gone."""
    gone_names = {daemon.name: None for daemon in gone}
    step.state.measures.forget(gone_names)
    step.state.asked.forget(gone_names)
    for group in dict.fromkeys(group for daemon in gone for group in daemon.groups):
        for ends in [ends for ends in group.awaited if not gone_names.keys().isdisjoint(ends)]:
            del group.awaited[ends]


def waits_until(step: Step, group: Group) -> float:
    """Until when the group waits for a measurement, at least; not above now: for none."""
    while group.awaited:
        ends = next(iter(group.awaited))
        until, _ = group.awaited[ends]
        if until > step.now:
            return until
        del group.awaited[ends]
    return 0.0


def _daemons(group: Group) -> list[Daemon]:
    return list(dict.fromkeys(member.daemon for member in group.members + group.joining))


def _steps(count: int) -> Sequence[int]:
    if count <= SMALL:
        return range(1, count)
    grows = 1 if count <= SEARCHED else 2  # twice as far each time, or four times among very many
    return [1 << i for i in range(0, (count - 1).bit_length(), grows)]
