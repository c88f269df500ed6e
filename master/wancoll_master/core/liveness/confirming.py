"""Failure confirmation: was a daemon whose connection broke killed, or was only its connection reset (R18)? Pure.

When a member tells of a lost link to a daemon that is away, some others (witnesses) are asked to dial that daemon. If a
daemon's ring neighbours were killed with it, nobody tells of a lost link: the others that are away in its groups are
asked about, too.
"""

from __future__ import annotations

from math import inf

from wancoll.wire import messages as m
from wancoll_master.core.state import Daemon, Group, Member, Step

_WITNESSES = 8  # for the first daemon, beside its ring neighbours: some of these may have been killed with it
_MORE = 2  # for the others


def link_lost(step: Step, daemon: Daemon) -> None:
    """A member has lost its link to one of this daemon: if that is away, more than its connection broke."""
    if daemon.away and not daemon.doubted:
        first = not any(one.doubted for one in step.state.daemons.values())
        _ask(step, daemon, _WITNESSES if first else _MORE)
        step.alarm(step.now)


def went_away(step: Step, daemon: Daemon) -> None:
    """Ask about a daemon whose connection broke, if a neighbour has lately lost its link, or another one has ended."""
    since = step.now - step.limits.return_grace
    lost = any(
        told is not None and told.lost_at >= since
        for member in daemon.members.values()
        if member.in_epoch
        for other in _neighbours(member)
        for told in [member.group.troubles.get((other.name, member.name))]
    )
    if lost or _found(step):
        link_lost(step, daemon)


def forget(daemon: Daemon) -> None:
    """The daemon is back: nothing that was asked about it counts."""
    daemon.doubted, daemon.answers, daemon.ended_at = False, False, inf
    daemon.witnesses.clear()


def answered(step: Step, witness: Daemon, message: m.ProbeResult) -> None:
    """A witness has dialled the daemon."""
    member = step.state.members.get(message.target)
    if member is None or witness not in member.daemon.witnesses:
        return
    daemon = member.daemon
    daemon.witnesses.discard(witness)
    # What a NAT refuses says nothing of who is behind it.
    known = step.state.reached.get((witness.name, daemon.name), m.Way.relayed if daemon.hints else m.Way.direct)
    if message.refused and known is m.Way.direct:
        daemon.ended_at = min(daemon.ended_at, step.now)
    if message.ok and daemon.name not in step.state.twins:  # else it may be the second of the name that answers
        daemon.answers, daemon.ended_at = True, inf
        daemon.witnesses.clear()
    step.alarm(step.now)


def open_in(step: Step, group: Group) -> bool:
    """Whether it may turn out yet that some of the group's daemons have ended."""
    return any(member.daemon.ended_at < inf or _is_asked(step, member.daemon) for member in group.members)


def ended(step: Step) -> tuple[set[Daemon], float]:
    """Daemons that have ended, to be evicted together, and when to look again."""
    these = _found(step)
    if not these:
        return set(), inf
    for group in {group: None for daemon in these for group in daemon.groups}:
        for daemon in {member.daemon: None for member in group.members}:
            unknown = daemon.away and not daemon.answers and daemon.ended_at == inf
            if unknown and (not daemon.doubted or (daemon.witnesses and not _is_asked(step, daemon))):
                daemon.witnesses.clear()  # these are away, too: others are asked once in their place
                _ask(step, daemon, _MORE)
    until = min(daemon.ended_at for daemon in these) + step.limits.doubt_grace
    away = [daemon for daemon in step.state.connections.values() if daemon.away and not daemon.answers]
    if until > step.now and (len(away) > len(these) or any(_is_asked(step, daemon) for daemon in these)):
        return set(), until
    return set(these), inf


def _found(step: Step) -> list[Daemon]:
    """Daemons that a witness found ended."""
    return [daemon for daemon in step.state.connections.values() if daemon.ended_at < inf]


def _neighbours(member: Member) -> tuple[Member, Member]:
    """The members before and after this one in its ring."""
    ring = member.group.members
    at = ring.index(member)
    return ring[at - 1], ring[(at + 1) % len(ring)]


def _is_asked(step: Step, daemon: Daemon) -> bool:
    """Whether a witness that is here has yet to answer."""
    connections = step.state.connections
    return any(connections.get(one.conn) is one and not one.away for one in daemon.witnesses)


def _ask(step: Step, daemon: Daemon, more: int) -> None:
    """Ask the ring neighbours of the daemon's members, and *more* daemons from all around the ring."""
    daemon.doubted = True
    for member in daemon.members.values():
        if not member.in_epoch:
            continue
        ring = member.group.members
        at, here = ring.index(member), [one for one in ring if not one.daemon.away]
        spread = [here[(at + len(here) * k // more) % len(here)] for k in range(more)] if here else []
        for other in (*_neighbours(member), *spread):
            if not other.daemon.away and other.daemon not in daemon.witnesses:
                daemon.witnesses.add(other.daemon)
                ask = m.Probe(member.group.name, 0, other.mid, member.mid, daemon.name, daemon.addresses, daemon.key)
                step.send(other.daemon.conn, ask)
