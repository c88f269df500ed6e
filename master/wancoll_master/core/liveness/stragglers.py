"""Straggler deadlines: a call with a grace time goes on with zeros for the members that are late with it (R20). Pure.

The master only says when. All of this belongs to the epoch (R12): in the next one members say again what they have
called, and the time begins anew.
"""

from __future__ import annotations

from math import inf

from wancoll.collective import Descriptor
from wancoll.errors import ProtocolError
from wancoll.limits import WINDOW_FACTOR
from wancoll.wire import messages as m
from wancoll_master.core.state import Group, Member, Step, StragglerDeadline, names


def called(step: Step, member: Member, message: m.CalledWithGrace) -> None:
    """A member has called an operation with a grace time, which begins with the first member that says so."""
    group, seq, call = member.group, message.seq, message.call
    if group.stopped or seq <= group.heard or seq in group.voids or group.small or group.shards > 1:
        return
    if not has_deadline(call):
        raise ProtocolError("gives a grace time to what has none", expected="all_reduce of a sum", got=str(call)[:300])
    deadlines = group.current.straggler_deadlines
    deadlines.setdefault(seq, StragglerDeadline(step.now)).called(member.mid, call)
    if len(deadlines) > WINDOW_FACTOR * step.limits.ops_in_flight:  # honest members are nearer; the lowest counts
        del deadlines[max(deadlines)]
    look(step, group)


def has_deadline(call: Descriptor) -> bool:
    """Whether zeros can stand for a member's tensor, and the call asks for it."""
    return call.takes_grace and call.grace > 0 and not call.counts


def look(step: Step, group: Group) -> None:
    """Tell the daemons of late members to take part, if the grace time of the first open operation is over.

    Only the first open operation counts: a member that is late with it has called all below, or its daemon has
    contributed zeros there. Where members commit, one member's word that all below is committed is enough: the daemons
    that are told know it.
    """
    current, first = group.current, group.first_unheard
    current.grace_until = inf
    entry = current.straggler_deadlines.get(first)
    if entry is None or entry.over or group.stopped or group.small:
        return
    call, until = entry.call, entry.until
    if step.now < until:
        current.grace_until = until
        step.alarm(until)
        return
    entry.over = True
    late = [member for member in group.members if member.mid not in entry.calls]
    for member in late:
        step.send(member.daemon.conn, m.ContributeZeros(group.name, member.mid, group.epoch, first, call))
    if late:
        text = f"operation {first} goes on without {names(late)}: not called within {call.grace:g} s"
        step.record(group, "late", text, kept=False)


def forget(group: Group, upto: int) -> None:
    """Drop the deadlines of operations that are committed."""
    for seq in [seq for seq in group.current.straggler_deadlines if seq <= upto]:
        del group.current.straggler_deadlines[seq]
