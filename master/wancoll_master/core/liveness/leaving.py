"""What `wancoll leave` asks: that a member, or a daemon with all of its members, leaves in order. Pure.

The master passes it on: the daemon knows what its clients have called, and finds the place in their programs. Of those
who were asked it keeps who has left in order: who is lost first is gone, too, but may come back, and was not heard.
"""

from __future__ import annotations

from wancoll.limits import few
from wancoll.wire import messages as m
from wancoll_master.core.state import Daemon, Step, names

_NAMED = 16
MOST_ASKED = 1024  # of whom it is kept what they did then


def ask_to_leave(step: Step, conn: int, ask: m.AskToLeave) -> None:
    """Tell the daemon, and answer whether there is one to tell."""
    step.send(conn, _member(step, ask) if ask.group else _daemon(step, ask))
    step.close(conn, "")


def _member(step: Step, ask: m.AskToLeave) -> m.EvictAnswer:
    group = step.state.groups.get(ask.group)
    if group is None:
        groups = ", ".join(list(step.state.groups)[:_NAMED])
        expected = f"a group of this master: {groups or 'it has none'}"
        return m.EvictAnswer(False, "has no such group", expected, f"group {ask.group}")
    here = group.members + group.joining
    for one in here:
        if one.name == ask.name:
            step.record(group, "asked", f"an operator asks {one.name} to leave{_why(ask)}")
            return _pass_on(step, one.daemon, ask, f"{one.name} of group {ask.group}")
    expected = f"one of {names(here)}" if here else "a member"
    return m.EvictAnswer(False, f"has no such member of group {ask.group}", expected, ask.name)


def _daemon(step: Step, ask: m.AskToLeave) -> m.EvictAnswer:
    daemon = step.state.daemons.get(ask.name)
    if daemon is None:
        here = sorted(step.state.daemons)
        expected = f"one of {few(here, _NAMED)}" if here else "a daemon that is here; none is"
        return m.EvictAnswer(False, "has no such daemon", expected, ask.name)
    step.record(None, "asked", f"an operator asks daemon {daemon.name} to leave{_why(ask)}")
    return _pass_on(step, daemon, ask, f"daemon {daemon.name}")


def _pass_on(step: Step, daemon: Daemon, ask: m.AskToLeave, whom: str) -> m.EvictAnswer:
    leaves = step.state.leaves
    leaves.pop((ask.group, ask.name), None)
    leaves[ask.group, ask.name] = False
    if len(leaves) > MOST_ASKED:
        del leaves[next(iter(leaves))]
    step.send(daemon.conn, ask)
    return m.EvictAnswer(True, f"{whom} was asked to leave", master=step.state.identity)


def _why(ask: m.AskToLeave) -> str:
    return f": {ask.reason}" if ask.reason else ""
