"""Operators' requests: `wancoll evict` and `wancoll leave`. Each is answered, and its connection closed. Pure.

State.leaves keeps which of those that were asked to leave have left in order: a lost one may come back, and was not
heard.
"""

from __future__ import annotations

from wancoll.limits import few, keep_newest
from wancoll.wire import messages as m
from wancoll_master.core import epochs, losses, reserved
from wancoll_master.core.paths import probing
from wancoll_master.core.state import Daemon, Group, Member, Step, clip, names

_NAMED = 16
MOST_ASKED = 1024  # to leave, whose outcome is kept


def evict(step: Step, conn: int, ask: m.Evict) -> None:
    """Do what *ask* says, and answer; the answer leaves once it is written down, as all that follows from it."""
    waits = reserved.waited_for(step.state, ask.group, step.now)
    missing = reserved.missing(step.state, ask.group)
    told = _unheard(step, ask, waits) or _members(step, ask) or _unheard(step, ask, missing) or _nobody(step, ask)
    step.send(conn, told)
    step.close(conn, "")


def ask_to_leave(step: Step, conn: int, ask: m.AskToLeave) -> None:
    """Tell the daemon, and answer whether there is one to tell."""
    step.send(conn, _ask_member(step, ask) if ask.group else _ask_daemon(step, ask))
    step.close(conn, "")


# ---- evict --------------------------------------------------------------------------------------------


def _members(step: Step, ask: m.Evict) -> m.EvictAnswer | None:
    """Evict who is here: a member, all members, or a joiner by name; None: nobody."""
    group = step.state.groups.get(ask.group)
    if group is None:
        return None
    found = list(group.members) if ask.everyone else [one for one in _here(group) if one.name == ask.member]
    if not found:
        return None
    why = clip(f"evicted by an operator{_because(ask.reason)}")
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
    who = "all of its members" if ask.everyone else ask.member
    text = f"an operator says that {who} stopped{_because(ask.reason)}"
    step.record(step.state.groups.get(ask.group), "stopped", text, once=ask.group)
    reserved.stopped(step, ask.group, found)
    left = len(waits) - len(found)
    then = f"still missing: {left}" if left else "its name is free"
    return m.EvictAnswer(True, f"group {ask.group} counts {who} as stopped; {then}")


def _nobody(step: Step, ask: m.Evict) -> m.EvictAnswer:
    group, waits = step.state.groups.get(ask.group), reserved.missing(step.state, ask.group)
    who = [one.name for one in _here(group)] if group is not None else []
    if waits:
        who += sorted(waits.values())
    elif group is not None and group.rebuild is not None:
        who = ["members that are reporting to this master, which has just started: try again soon"]
    if not who:
        return _no_group(step, ask.group)
    return _no_member(ask.group, "anybody" if ask.everyone else ask.member, f"one of {few(who, _NAMED)}")


# ---- leave --------------------------------------------------------------------------------------------


def _ask_member(step: Step, ask: m.AskToLeave) -> m.EvictAnswer:
    group = step.state.groups.get(ask.group)
    if group is None:
        return _no_group(step, ask.group)
    here = _here(group)
    for one in here:
        if one.name == ask.name:
            step.record(group, "asked", f"an operator asks {one.name} to leave{_because(ask.reason)}")
            return _pass_on(step, one.daemon, ask, f"{one.name} of group {ask.group}")
    return _no_member(ask.group, ask.name, f"one of {names(here)}" if here else "a member")


def _ask_daemon(step: Step, ask: m.AskToLeave) -> m.EvictAnswer:
    daemon = step.state.daemons.get(ask.name)
    if daemon is None:
        here = sorted(step.state.daemons)
        expected = f"one of {few(here, _NAMED)}" if here else "a daemon that is here; none is"
        return m.EvictAnswer(False, "has no such daemon", expected, ask.name)
    step.record(None, "asked", f"an operator asks daemon {daemon.name} to leave{_because(ask.reason)}")
    return _pass_on(step, daemon, ask, f"daemon {daemon.name}")


def _pass_on(step: Step, daemon: Daemon, ask: m.AskToLeave, who: str) -> m.EvictAnswer:
    keep_newest(step.state.leaves, (ask.group, ask.name), False, MOST_ASKED)
    step.send(daemon.conn, ask)
    return m.EvictAnswer(True, f"{who} was asked to leave", master=step.state.identity)


# ---- both ---------------------------------------------------------------------------------------------


def _here(group: Group) -> list[Member]:
    return group.members + group.joining


def _no_group(step: Step, name: str) -> m.EvictAnswer:
    groups = ", ".join(list(step.state.groups)[:_NAMED])
    expected = f"a group of this master: {groups or 'it has none'}"
    return m.EvictAnswer(False, "has no such group", expected, f"group {name}")


def _no_member(group: str, wanted: str, expected: str) -> m.EvictAnswer:
    return m.EvictAnswer(False, f"has no such member of group {group}", expected, wanted)


def _because(reason: str) -> str:
    return f": {reason}" if reason else ""
