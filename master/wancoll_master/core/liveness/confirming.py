"""A daemon whose connection broke, and a link of it, too: was it killed, or were all its connections reset? Pure (R18).

Its host knows: where the process has ended nobody listens any more. So some who are here are asked to dial it:

    one of them is answered by it      it lives
    one of them finds nobody there     it has ended: put out
    neither                            nothing is known: it has return_grace, as any whose connection broke

Others may have been killed with it. So it is put out once it is known of all that are away, and all who were asked have
answered, but no later than doubt_grace: those that are killed together cost one epoch, not one each. Of one whose ring
neighbours were killed with it nobody tells, so that all that are away in its groups are asked about.
"""

from __future__ import annotations

from math import inf

from wancoll.wire import messages as m
from wancoll_master.core.state import Daemon, Group, Member, Step

_WITNESSES = 8  # asked of the first in doubt, beside its ring neighbours: some who may have been killed with it
_MORE = 2  # of the others


def doubt(step: Step, daemon: Daemon) -> None:
    """A member has lost its link to one of this daemon: if that is away, it was not only its connection that broke."""
    if daemon.away and not daemon.doubted:
        first = not any(one.doubted for one in step.state.daemons.values())
        _ask(step, daemon, _WITNESSES if first else _MORE)
        step.alarm(step.now)


def believe(daemon: Daemon) -> None:
    """It is back."""
    daemon.doubted, daemon.answers, daemon.ended_at = False, False, inf
    daemon.asked.clear()


def answered(step: Step, witness: Daemon, message: m.ProbeResult) -> None:
    """Somebody who was asked has dialled it."""
    member = step.state.members.get(message.target)
    if member is None or witness not in member.daemon.asked:
        return
    daemon = member.daemon
    daemon.asked.discard(witness)
    if message.refused:
        daemon.ended_at = min(daemon.ended_at, step.now)
    if message.ok and daemon.name not in step.state.twins:  # else it may be the other one that answers
        daemon.answers, daemon.ended_at = True, inf
        daemon.asked.clear()
    step.alarm(step.now)


def open_in(step: Step, group: Group) -> bool:
    """Whether it may turn out yet that some of the group's daemons have ended."""
    return any(member.daemon.ended_at < inf or _is_asked(step, member.daemon) for member in group.members)


def found(step: Step) -> list[Daemon]:
    """Daemons of which somebody has said that they have ended."""
    return [daemon for daemon in step.state.connections.values() if daemon.ended_at < inf]


def ended(step: Step) -> tuple[set[Daemon], float]:
    """Daemons that have ended, to be put out together, and when to look again."""
    these = found(step)
    if not these:
        return set(), inf
    for group in {group: None for daemon in these for group in daemon.groups}:
        for daemon in {member.daemon: None for member in group.members}:
            unknown = daemon.away and not daemon.answers and daemon.ended_at == inf
            if unknown and (not daemon.doubted or (daemon.asked and not _is_asked(step, daemon))):
                daemon.asked.clear()  # those who were asked are away, too: others are asked once in their place
                _ask(step, daemon, _MORE)
    until = min(daemon.ended_at for daemon in these) + step.limits.doubt_grace
    away = [daemon for daemon in step.state.connections.values() if daemon.away and not daemon.answers]
    if until > step.now and (len(away) > len(these) or any(_is_asked(step, daemon) for daemon in these)):
        return set(), until
    return set(these), inf


def neighbours(ring: list[Member], at: int) -> tuple[Member, Member]:
    """Those before and after the one at this place."""
    return ring[at - 1], ring[(at + 1) % len(ring)]


def _is_asked(step: Step, daemon: Daemon) -> bool:
    """Whether somebody who is here has yet to say whether it has ended."""
    connections = step.state.connections
    return any(connections.get(one.conn) is one and not one.away for one in daemon.asked)


def _ask(step: Step, daemon: Daemon, more: int) -> None:
    """Ask its members' ring neighbours, and *more* daemons from all around the ring."""
    daemon.doubted = True
    for member in daemon.members.values():
        if not member.in_epoch:
            continue
        ring = member.group.members
        at, here = ring.index(member), [one for one in ring if not one.daemon.away]
        spread = [here[(at + len(here) * k // more) % len(here)] for k in range(more)] if here else []
        for other in (*neighbours(ring, at), *spread):
            if not other.daemon.away and other.daemon not in daemon.asked:
                daemon.asked.add(other.daemon)
                ask = m.Probe(member.group.name, 0, other.mid, member.mid, daemon.name, daemon.addresses)
                step.send(other.daemon.conn, ask)
