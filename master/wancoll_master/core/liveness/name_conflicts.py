"""Name conflicts with daemons that may be dead: a second daemon of a name, and joins. Both wait for the first's fate.

So a job that was killed whole is started again while the master still waits for its daemons (R18). Pure.
"""

from __future__ import annotations

from typing import cast

from wancoll.wire import messages as m
from wancoll_master.core.liveness import presence
from wancoll_master.core.liveness.suspicion import suspected
from wancoll_master.core.ready import Received
from wancoll_master.core.state import Daemon, State, Step

# ---- a second daemon of a name ------------------------------------------------------------------------


def admits(step: Step, event: Received, hello: m.Hello) -> bool:
    """Whether the daemon that says *hello*, in *event*, may be taken in as a new one now."""
    state, conn = step.state, event.conn
    presence.hears(step)
    first = state.daemons.get(hello.daemon)
    if first is None:
        return True
    if first.incarnation == hello.incarnation and first.key == (event.identity.key if event.identity else b""):
        if hello.dial < first.dial:
            step.close(conn, f"a newer connection of daemon {first.name} is here")
            return False
        presence.end(step, {first: f"daemon {first.name} connected again"}, "evicted", close=True)
        return True
    known = state.twins.pop(first.name, None)
    if known is not None:
        step.close(known.conn, f"another connection asks for the name {first.name}")
    state.twins[first.name] = event
    step.alarm(presence.due(step, first))
    return False


def first_is_heard(step: Step, first: Daemon) -> None:
    """Send the second daemon of the name away, if there is one."""
    if first.name not in step.state.twins:
        return
    twin = step.state.twins.pop(first.name)
    hello = cast(m.Hello, twin.message)
    where, there = ", ".join(first.addresses), ", ".join(hello.addresses)
    why = (
        f"another daemon is named {first.name}, and answers: it is at {where}, this one at {there}; "
        "give each daemon a --name of its own"
    )
    # A second daemon that has known a master may be the one whose name was taken. One at the same address is the same
    # daemon, started anew while its last words were on their way.
    newcomer = not (hello.master or hello.term) and hello.addresses != first.addresses
    step.close(twin.conn, why, final=newcomer)
    text = f"a second daemon {first.name} at {there}: the one at {where} answers"
    step.record(None, "refused", text, kept=newcomer)


def waits(state: State, conn: int) -> bool:
    """Whether a daemon waits for a name over this connection."""
    return any(twin.conn == conn for twin in state.twins.values())


def unopposed(state: State) -> list[Received]:
    """Take out the second daemons whose name is free now."""
    free = [name for name in state.twins if name not in state.daemons]
    return [state.twins.pop(name) for name in free]


# ---- joins --------------------------------------------------------------------------------------------


def may_postpone(state: State) -> bool:
    """Whether there is room for another join that waits."""
    return sum(map(len, state.postponed.values())) < state.limits.members


def postpone(step: Step, opponent: Daemon, daemon: Daemon, join: m.Join, text: str) -> None:
    """Let the join wait until its suspected *opponent* is heard or evicted."""
    step.state.postponed.setdefault(opponent, []).append((daemon, join))
    step.alarm(presence.due(step, opponent))
    step.record(step.state.groups.get(join.group), "postponed", text)


def decided(step: Step) -> list[tuple[Daemon, m.Join]]:
    """Take out the joins that wait no longer."""
    state = step.state
    over = [one for one in state.postponed if state.connections.get(one.conn) is not one or not suspected(step, one)]
    joins = [join for opponent in over for join in state.postponed.pop(opponent)]
    return [(daemon, join) for daemon, join in joins if state.connections.get(daemon.conn) is daemon]


def withdraw(state: State, daemon: Daemon, group: str, name: str) -> None:
    """Drop the join of a client that waits no longer."""
    for opponent, joins in list(state.postponed.items()):
        left = [(of, join) for of, join in joins if of is not daemon or (join.group, join.member) != (group, name)]
        state.postponed[opponent] = left
        if not left:
            del state.postponed[opponent]
