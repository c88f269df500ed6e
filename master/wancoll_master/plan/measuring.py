"""Asks daemons to measure the paths between them, and says how long it is worth to wait for the answers. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from wancoll.limits import MIB
from wancoll.wire import messages as m
from wancoll_master.core.state import Asked, Daemon, Group, Send, State
from wancoll_master.plan.topology import one_machine

WAIT = 1.0  # seconds that a group's start, or an admission, waits for a round trip
BURST_WAIT = 2.5  # seconds more that the start of a group whose members are far apart waits for their uplinks
FAR = 0.005  # seconds of round trip from which a path counts as long
SMALL = 8  # daemons up to which all paths are measured; beyond, those to 1, 2, 4, 8, ... places away
BURST_BYTES = 32 * MIB
BURST_BYTES_OF_MANY = 4 * MIB  # where there are more than SMALL
AGAIN = 60.0  # seconds until a burst that told nothing is asked for again


def ask_round_trips(state: State, group: Group, newcomer: Daemon) -> None:
    """A member of *newcomer* has joined: ask for its round trips to the others, where they are not known."""
    daemons = _daemons(group)
    if newcomer not in daemons:
        return
    at = daemons.index(newcomer)
    for steps in _steps(len(daemons)):
        other = daemons[at - steps]
        if state.measures.rtt(newcomer.name, other.name) or not _measurable(newcomer, other):
            continue
        source, target = (newcomer, other) if newcomer.measures else (other, newcomer)
        if not source.measures:
            continue
        asked = state.asked.setdefault((source.name, target.name), Asked())
        if asked.deadline <= state.now:
            asked.deadline = state.now + WAIT
            state.alarm(asked.deadline)
            state.out.append(Send(source.conn, m.MeasureLink(target.name, target.addresses, 0)))


def ask_uplinks(state: State, group: Group) -> bool:
    """The group is about to start: where members are far apart, ask each daemon for the bandwidth to the next one.

    Returns whether there is something to wait for.
    """
    daemons = [daemon for daemon in _daemons(group) if daemon.measures]
    waits = False
    if any(state.measures.rtt(one.name, other.name) > FAR for one in daemons for other in daemons):
        for at, source in enumerate(daemons):
            target = daemons[(at + 1) % len(daemons)]
            if _ask_bandwidth(state, source, target, BURST_BYTES):
                state.asked[source.name, target.name].burst_deadline = state.now + BURST_WAIT
                state.alarm(state.now + BURST_WAIT)
                waits = True
    return waits


def ask_bandwidths(state: State, group: Group) -> None:
    """A new epoch: ask for the bandwidth of paths where it is not known.

    Every daemon sends its bursts one after the other. Each begins with the path to the next member, so that not all of
    them send to the same one at the same time.
    """
    daemons = _daemons(group)
    nbytes = BURST_BYTES if len(daemons) <= SMALL else BURST_BYTES_OF_MANY
    for at, source in enumerate(daemons):
        for steps in _steps(len(daemons)):
            _ask_bandwidth(state, source, daemons[(at + steps) % len(daemons)], nbytes)


def _ask_bandwidth(state: State, source: Daemon, target: Daemon, nbytes: int) -> bool:
    known = state.measures.bandwidth(source.name, target.name)
    if known or not source.measures or not _measurable(source, target):
        return False
    asked = state.asked.setdefault((source.name, target.name), Asked())
    if asked.burst_at + AGAIN > state.now:
        return False
    asked.burst_at = state.now
    state.out.append(Send(source.conn, m.MeasureLink(target.name, target.addresses, nbytes)))
    return True


def take(state: State, daemon: Daemon, report: m.LinkReport) -> list[Group]:
    """Take in a report. Returns groups in which something may have waited for it.

    Raises:
        ProtocolError: it cannot be true.
    """
    state.measures.take(daemon.name, report, state.daemons, state.now)
    answered = False
    for seen in report.links:
        asked = state.asked.get((daemon.name, seen.daemon))
        if asked is not None and max(asked.deadline, asked.burst_deadline) > state.now:
            asked.deadline = state.now
            if seen.bandwidth or not seen.rtt:  # the round trip is told first
                asked.burst_deadline = state.now
            answered = True
    return [group for group in state.groups.values() if group.joining] if answered else []


def forget(state: State, daemon: Daemon) -> None:
    """The daemon is gone."""
    state.measures.forget(daemon.name)
    for ends in [ends for ends in state.asked if daemon.name in ends]:
        del state.asked[ends]


def waits_until(state: State, group: Group) -> float:
    """When the last measurement that the group waits for must have come; not above now: there is none."""
    names = {daemon.name for daemon in _daemons(group)}
    return max(
        (
            max(asked.deadline, asked.burst_deadline)
            for (one, other), asked in state.asked.items()
            if one in names and other in names
        ),
        default=0.0,
    )


def _daemons(group: Group) -> list[Daemon]:
    return list(dict.fromkeys(member.daemon for member in group.members + group.joining))


def _steps(count: int) -> Sequence[int]:
    return range(1, count) if count <= SMALL else [1 << i for i in range((count - 1).bit_length())]


def _measurable(one: Daemon, other: Daemon) -> bool:
    return one is not other and not one_machine([*one.addresses, *other.addresses])
