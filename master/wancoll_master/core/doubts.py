"""A daemon whose connection broke, and a link of it, too: was it killed, or were all its connections reset? Pure (R18).

Its host knows: where the process has ended nobody listens any more. So some who are here are asked to dial it:

    one of them finds nobody there     it has ended
    one of them is answered by it      it lives, and has return_grace to come back
    neither, within doubt_grace        it has ended

As long as nobody else's connection is broken, and all who were asked have answered, it is put out at once. Else others
may have been killed with it: all wait for the end of its doubt_grace, and for those who came into doubt meanwhile at
most as long again. So they cost one epoch, not one each.
"""

from __future__ import annotations

from math import inf

from wancoll.wire import messages as m
from wancoll_master.core.state import Daemon, Group, Member, Step

_WITNESSES = (
    8  # that are asked of the first in doubt, beside its ring neighbours: some who may have been killed with it
)


def doubt(step: Step, daemon: Daemon) -> None:
    """A member has lost its link to one of this daemon: if that is away, it was not only its connection that broke."""
    if not daemon.away or daemon.doubted_at < inf or daemon.answers:
        return
    first = not _doubted(step)
    daemon.doubted_at = step.now
    step.alarm(step.now + step.limits.doubt_grace)
    for member in daemon.members.values():
        if member.in_epoch:
            _ask(step, member, _WITNESSES if first else 0)


def believe(daemon: Daemon) -> None:
    """It is back, or answers."""
    daemon.doubted_at, daemon.answers = inf, True if daemon.away else None
    daemon.asked.clear()


def answered(step: Step, witness: Daemon, message: m.ProbeResult) -> None:
    """Somebody who was asked has dialled it."""
    member = step.state.members.get(message.target)
    if member is None or witness not in member.daemon.asked:
        return
    daemon = member.daemon
    daemon.asked.discard(witness)
    if message.refused:
        daemon.answers = False
    if message.ok and daemon.name not in step.state.twins:  # else it may be the other one that answers
        believe(daemon)
    step.alarm(step.now)


def until(step: Step, group: Group) -> float:
    """When it will have turned out whether those of the group's daemons that are in doubt have ended; -inf: none is."""
    doubted = [member.daemon.doubted_at for member in group.members if member.daemon.doubted_at < inf]
    return max(doubted) + step.limits.doubt_grace if doubted else -inf


def ended(step: Step) -> tuple[set[Daemon], float]:
    """Daemons that have ended, to be put out together, and when to look again."""
    _doubt_those_between(step)
    doubted, grace = _doubted(step), step.limits.doubt_grace
    if not doubted:
        return set(), inf
    dues = {daemon: daemon.doubted_at + grace for daemon in doubted}
    wait = min(dues.values())
    if wait <= step.now:  # only for those who came into doubt after the first
        wait = min(wait + grace, max((due for one, due in dues.items() if one.answers is None), default=0.0))
    if wait > step.now and not _is_plain(step, doubted):
        return set(), wait
    found = {one for one, due in dues.items() if one.answers is False or due <= step.now}
    return found, min((due for due in dues.values() if due > step.now), default=inf)


def neighbours(ring: list[Member], at: int) -> tuple[Member, Member]:
    """Those before and after the one at this place."""
    return ring[at - 1], ring[(at + 1) % len(ring)]


def _doubted(step: Step) -> list[Daemon]:
    return [daemon for daemon in step.state.daemons.values() if daemon.doubted_at < inf]


def _ask(step: Step, member: Member, more: int) -> None:
    """Ask its ring neighbours, and *more* members from all around the ring."""
    ring, daemon = member.group.members, member.daemon
    at = ring.index(member)
    spread = [ring[(at + len(ring) * k // more) % len(ring)] for k in range(1, more)]
    for other in (*neighbours(ring, at), *spread):
        if not other.daemon.away and other.daemon not in daemon.asked:
            daemon.asked.add(other.daemon)
            ask = m.Probe(member.group.name, 0, other.mid, member.mid, daemon.name, daemon.addresses)
            step.send(other.daemon.conn, ask)


def _is_plain(step: Step, doubted: list[Daemon]) -> bool:
    """Whether all that are away have ended, and those who were asked say so: they are all there, nothing else broke."""
    connections = step.state.connections
    silent = any(connections.get(one.conn) is one for daemon in doubted for one in daemon.asked)
    return bool(doubted) and not silent and all(one.answers is False for one in connections.values() if one.away)


def _doubt_those_between(step: Step) -> None:
    """Of a daemon nobody tells whose ring neighbours are away, too: if one of its group is in doubt, so is this one."""
    since: dict[Group, float] = {}
    for daemon in _doubted(step):
        for group in daemon.groups:
            since[group] = min(since.get(group, inf), daemon.doubted_at)
    for group, first in since.items():
        for at, member in enumerate(group.members):
            daemon = member.daemon
            if daemon.away and daemon.answers is None and daemon.doubted_at == inf:
                around = [other.daemon for other in neighbours(group.members, at) if other.daemon is not daemon]
                if around and all(other.away and other.answers is not True for other in around):
                    daemon.doubted_at = max(daemon.away_since, first)
