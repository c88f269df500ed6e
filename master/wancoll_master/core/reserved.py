"""For how long a group's name is reserved for members of before, which may still run and commit (C8). Pure.

A group whose members were all lost, or that an earlier master ran, does not form anew while they may go on among
themselves: until they were silent for long enough, or are heard, or somebody says that they have stopped.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from math import ceil, inf

from wancoll.limits import WITHOUT_END, few
from wancoll_master.core.state import Group, State, Step


def wanted(step: Step, group: Group) -> int:
    """Members that make its first epoch: start_world, but where the group ran before and may start anew with fewer."""
    anew = step.limits.restart_with_min_world and group.name in step.state.used
    return group.min_world if anew else group.start_world


def held(step: Step, group: Group) -> bool:
    """Whether the group may exist already: this master has started lately, and members may be about to report."""
    return not group.members and step.now < held_until(step.state, group.name)


def held_until(state: State, name: str) -> float:
    """Until when its members of before may come back; where members commit they may even go on among themselves."""
    known = state.holds or name in state.inherited
    return max(state.alone.get(name, -inf), state.rejoin_until if known else -inf)


def alone(step: Step, master_grace: float) -> int:
    """Seconds for which daemons to which this master has said its heartbeat_timeout may go on without it (C8)."""
    return ceil(master_grace + step.limits.heartbeat_timeout)


def alone_until(step: Step, name: str, since: float) -> float:
    """Until when members of its newest epoch may commit among themselves, if they were heard last then (C8)."""
    used = step.state.used.get(name)
    if used is None:  # forgotten, since groups are many
        return since + alone(step, step.limits.master_grace)
    # Where an earlier master wrote it down this one's heartbeat_timeout, of which it knows nothing, may be longer.
    more = step.limits.heartbeat_timeout if name in step.state.inherited else 0.0
    return since + more + used.alone if used.alone else -inf


def missing(state: State, name: str) -> dict[int, str]:
    """Members of before that have not said that they stop: names by mid. None where the group runs, or rebuilds."""
    used, group = state.used.get(name), state.groups.get(name)
    if used is None or (group is not None and (group.members or group.rebuild is not None)):
        return {}
    return {mid: one.name for mid, one in used.former.items()}


def waited_for(state: State, name: str, now: float) -> dict[int, str]:
    """Members of before that the group's name waits for: names by mid (C8)."""
    return missing(state, name) if state.alone.get(name, -inf) > now else {}


def who_may_go_on(state: State, name: str, now: float) -> str:
    """For whom the group's name waits, until when, and what ends that; "": for nobody."""
    waits = sorted(waited_for(state, name, now).values())
    if not waits:
        return ""
    seconds = held_until(state, name) - now
    long = f"{seconds:.0f} s more" if seconds < WITHOUT_END / 2 else "without end"
    return (
        f"{few(waits)} of before were lost without a word, and may still run and commit: the name waits for them "
        f"{long}, or until they are heard, or a daemon is started again on their machines; if you know that they have "
        f"stopped, free it at once: `wancoll evict --group {name} --all`"
    )


def why_held(state: State, name: str, now: float) -> str:
    """What keeps the group's name from forming, for people; "": nothing."""
    if alone := who_may_go_on(state, name, now):
        return alone
    if now >= held_until(state, name):
        return ""
    return (
        f"the master has just started: for {held_until(state, name) - now:.0f} s more it waits for members of an "
        "earlier one, which may run this group already"
    )


def stopped(step: Step, name: str, mids: Collection[int]) -> None:
    """These members of before commit nothing any more; if the group's name waited for them alone it is free (C8)."""
    used, group = step.state.used.get(name), step.state.groups.get(name)
    if used is None or used.former.keys().isdisjoint(mids):
        return
    left = {mid: one for mid, one in used.former.items() if mid not in mids}
    used = step.state.used[name] = replace(used, former=left)
    if group is not None and group.members:
        return  # written down with the next epoch, or when nobody is left
    step.persist().groups[name] = used
    if not left and step.state.alone.pop(name, None) is not None and group is not None:
        step.touch(group)


def heard_last(step: Step, name: str) -> None:
    """A member of before was heard until now: it may go on by itself as long from now on (C8)."""
    if name in step.state.alone:
        until = step.state.alone[name] = max(step.state.alone[name], alone_until(step, name, step.now))
        step.alarm(until)
