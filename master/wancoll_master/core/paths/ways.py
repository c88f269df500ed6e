"""Ways between members that are not as others: which end dials, which pairs punch or need a relay; the relays. Pure.

Probes find out who reaches whom, and how (probing.py). A pair whose younger end can dial needs no word. Else the plan
has it: the elder dials, or both dial at the same time (punched), or both go through a relay.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import product

from wancoll.wire import messages as m
from wancoll_master.core.state import Daemon, Group, Member, State, Step, clip
from wancoll_master.plan.measures import MAX_PATHS

MOST = 4096  # that a Plan can carry

# ---- relays -------------------------------------------------------------------------------------------


def relays(state: State) -> list[m.RelayInfo]:
    """Those that are here; the master's own, which costs its operator most, as the last."""
    found = [m.RelayInfo(one.name, tuple(one.addresses), one.key) for one in state.relays]
    return found + ([m.AT_MASTER] if state.own_relay else [])


def comes(step: Step, daemon: Daemon, *, is_relay: bool) -> None:
    """A daemon is new here, and *is_relay*: it is one, too, unless it is behind a NAT."""
    if is_relay and not daemon.hints:
        step.state.relays[daemon] = None
        _tell(step)
    elif relays(step.state):
        _tell_one(step, daemon)


def forget(step: Step, gone: Collection[Daemon]) -> None:
    """These daemons are gone."""
    here = len(step.state.relays)
    for daemon in gone:
        step.state.relays.pop(daemon, None)
    for known in (step.state.reached, step.state.failed):
        known.forget(daemon.name for daemon in gone)
    if len(step.state.relays) < here:
        _tell(step)


def _tell(step: Step) -> None:
    for daemon in step.state.daemons.values():
        _tell_one(step, daemon)


def _tell_one(step: Step, daemon: Daemon) -> None:
    step.send(daemon.conn, m.Relays([one for one in relays(step.state) if one.name != daemon.name]))


# ---- behind one NAT -----------------------------------------------------------------------------------


def tell_nearby(step: Step, group: Group, newcomer: Daemon) -> None:
    """Tell the newcomer and the group's daemons behind the same NAT each other's local addresses. Nobody else is."""
    if not newcomer.hints:
        return
    for other in {member.daemon: None for member in group.members + group.joining if member.daemon is not newcomer}:
        if other.hints and other.source == newcomer.source:
            step.send(newcomer.conn, m.Nearby(other.name, other.hints))
            step.send(other.conn, m.Nearby(newcomer.name, newcomer.hints))


# ---- pairs --------------------------------------------------------------------------------------------


def found(step: Step, prober: Daemon, target: Daemon, way: m.Way, *, ok: bool, why: str = "") -> None:
    """A probe has shown whether *prober* reaches *target* that *way*, or *why* not: then only a relay is left."""
    reached = step.state.reached
    ends = prober.name, target.name
    shown = way if ok else m.Way.relayed
    if ends not in reached:
        if prober is not target and len(reached) < MAX_PATHS:
            reached.add(ends, shown)
            step.state.failed.add(ends, {})
    elif ok or reached[ends] == way:
        reached[ends] = shown
    if not ok and ends in step.state.failed:
        step.state.failed[ends][way] = clip(why, 200)


def way(step: Step, source: Daemon, target: Daemon) -> m.Way | None:
    """How *source* reaches *target*; None: the other one dials."""
    reached = step.state.reached
    there = reached.get((source.name, target.name), m.Way.direct)
    back = reached.get((target.name, source.name), m.Way.relayed)
    if m.Way.direct in (there, back):
        return there if there is m.Way.direct else None
    return min(there, back) if m.Way.punched in (there, back) or relays(step.state) else m.Way.direct


def of(step: Step, members: Sequence[Member], before: m.Plan | None) -> list[tuple[int, int, m.Way]]:
    """The pairs that the plan has to name, as Plan.ways: by probes, or else as the plan *before* had it."""
    reached, here = step.state.reached, bool(relays(step.state))
    at: dict[str, list[int]] = {}
    for member in members:
        at.setdefault(member.daemon.name, []).append(member.mid)
    daemons = {mid: name for name, mids in at.items() for mid in mids}
    probed = {(min(ends), max(ends)) for ends, _ in reached.among(at)}
    ways = []
    for mids in (sorted(pair) for one, other in probed for pair in product(at[one], at[other])):
        elder, younger = mids
        ends = daemons[younger], daemons[elder]
        best = reached.get(ends, m.Way.relayed), reached.get(ends[::-1], m.Way.relayed)
        if best[0] is not m.Way.direct and (here or min(best) < m.Way.relayed):
            ways.append((elder, younger, min(best)))
    for one, other, way in before.ways if before is not None else ():  # by an earlier master's probes
        if one in daemons and other in daemons:
            ends = daemons[one], daemons[other]
            if (min(ends), max(ends)) not in probed:
                ways.append((one, other, way))
    return sorted(ways)[:MOST]
