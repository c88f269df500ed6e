"""What `wancoll evict` asks: to put a member out, or to believe that one that nobody hears has stopped (C8). Pure."""

from __future__ import annotations

from wancoll.limits import few
from wancoll.wire import messages as m
from wancoll_master.core import epochs, losses, reserved
from wancoll_master.core.paths import probing
from wancoll_master.core.state import Step, clip, names

_NAMED = 16


def evict(step: Step, conn: int, ask: m.Evict) -> None:
    """Do what *ask* says, and answer; the answer leaves once it is written down, as all that follows from it."""
    waits = reserved.waited_for(step.state, ask.group, step.now)
    missing = reserved.missing(step.state, ask.group)
    told = _unheard(step, ask, waits) or _members(step, ask) or _unheard(step, ask, missing) or _nobody(step, ask)
    step.send(conn, told)
    step.close(conn, "")


def _members(step: Step, ask: m.Evict) -> m.EvictAnswer | None:
    """Put out who is here: a member, all members, or a joiner by name; None: nobody."""
    group = step.state.groups.get(ask.group)
    if group is None:
        return None
    found = list(group.members)
    if not ask.everyone:
        found = [one for one in group.members + group.joining if one.name == ask.member]
    if not found:
        return None
    why = clip(f"evicted by an operator{': ' + ask.reason if ask.reason else ''}")
    members = [one for one in found if one.in_epoch]
    for joiner in found:
        if not joiner.in_epoch:
            probing.refuse(step, joiner, why, evicted=True)
    losses.lose(step, dict.fromkeys(members, why), "evicted", tell=True, cause="operator")
    step.touch(group)
    epochs.settle(step)  # the answer says what came of it
    told = f"{names(found)} of group {ask.group}: {why}"
    if reserved.waited_for(step.state, ask.group, step.now):
        told += "; its name is free once each has heard that: evict --all again says that those who do not have stopped"
    return m.EvictAnswer(True, told)


def _unheard(step: Step, ask: m.Evict, waits: dict[int, str]) -> m.EvictAnswer | None:
    """Members that nobody hears, such as those that the group's name *waits* for, have stopped; None: it is others.

    A joiner by the name of one for whom the group waits, waits for its own former life: so this comes first.
    """
    found = {mid for mid, name in waits.items() if ask.everyone or name == ask.member}
    if not found:
        return None
    group = step.state.groups.get(ask.group)
    reason = f": {ask.reason}" if ask.reason else ""
    whom = "all of its members" if ask.everyone else ask.member
    step.record(group, "stopped", f"an operator says that {whom} stopped{reason}", once=ask.group)
    reserved.stopped(step, ask.group, found)
    left = len(waits) - len(found)
    then = f"still missing: {left}" if left else "its name is free"
    return m.EvictAnswer(True, f"group {ask.group} counts {whom} as stopped; {then}")


def _nobody(step: Step, ask: m.Evict) -> m.EvictAnswer:
    group, waits = step.state.groups.get(ask.group), reserved.missing(step.state, ask.group)
    who = [one.name for one in group.members + group.joining] if group is not None else []
    if waits:
        who += sorted(waits.values())
    elif group is not None and group.rebuild is not None:
        who = ["members that are reporting to this master, which has just started: try again soon"]
    if not who:
        groups = ", ".join(list(step.state.groups)[:_NAMED])
        return m.EvictAnswer(
            False, "has no such group", f"a group of this master: {groups or 'it has none'}", f"group {ask.group}"
        )
    wanted = "anybody" if ask.everyone else ask.member
    return m.EvictAnswer(False, f"has no such member of group {ask.group}", f"one of {few(who, _NAMED)}", wanted)
