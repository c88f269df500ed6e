"""Ways between members that are not as others: which end dials, which pairs need a relay; the relays. Pure.

Probes find out who can dial whom (probing.py). A pair whose younger end can dial needs no word. Else the plan has it:
the elder dials, or both go through a relay.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import product

from wancoll.wire import messages as m
from wancoll_master.core.state import Daemon, Group, Member, State, Step
from wancoll_master.plan.measures import MAX_PATHS

MOST = 4096  # that a Plan can carry
_OWN = m.RelayInfo("the master")

# ---- relays -------------------------------------------------------------------------------------------


def relays(state: State) -> list[m.RelayInfo]:
    """Those that are here; the master's own, which costs its operator most, as the last."""
    found = [m.RelayInfo(one.name, tuple(one.addresses), one.key) for one in state.relays]
    return found + ([_OWN] if state.own_relay else [])


def comes(step: Step, daemon: Daemon, *, is_relay: bool) -> None:
    """A daemon is new here, or a relay."""
    if is_relay:
        step.state.relays[daemon] = None
        _tell(step)
    elif found := relays(step.state):
        step.send(daemon.conn, m.Relays(found))


def forget(step: Step, gone: Collection[Daemon]) -> None:
    """These daemons are gone."""
    here = len(step.state.relays)
    for daemon in gone:
        step.state.relays.pop(daemon, None)
    step.state.dials.forget(daemon.name for daemon in gone)
    if len(step.state.relays) < here:
        _tell(step)


def _tell(step: Step) -> None:
    found = relays(step.state)
    for daemon in step.state.daemons.values():
        if daemon not in step.state.relays:
            step.send(daemon.conn, m.Relays(found))


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


def found(step: Step, prober: Daemon, target: Daemon, *, ok: bool) -> None:
    """A probe has shown whether *prober* can dial *target*."""
    dials = step.state.dials
    ends = prober.name, target.name
    if ends in dials:
        dials[ends] = ok
    elif prober is not target and len(dials) < MAX_PATHS:
        dials.add(ends, ok)


def way(step: Step, source: Daemon, target: Daemon) -> bool | None:
    """How *source* reaches *target*: False: it dials; True: through a relay; None: the other one dials."""
    dials = step.state.dials
    if dials.get((source.name, target.name), True):
        return False
    return None if dials.get((target.name, source.name)) else bool(relays(step.state))


def of(step: Step, members: Sequence[Member], before: m.Plan | None) -> list[tuple[int, int, bool]]:
    """The pairs that the plan has to name, as Plan.ways: by probes, or else as the plan *before* had it."""
    dials, here = step.state.dials, bool(relays(step.state))
    at: dict[str, list[int]] = {}
    for member in members:
        at.setdefault(member.daemon.name, []).append(member.mid)
    daemons = {mid: name for name, mids in at.items() for mid in mids}
    probed = {(min(ends), max(ends)) for ends, _ in dials.among(at)}
    ways = []
    for mids in (sorted(pair) for one, other in probed for pair in product(at[one], at[other])):
        elder, younger = mids
        if not dials.get((daemons[younger], daemons[elder])):
            if dials.get((daemons[elder], daemons[younger])):
                ways.append((elder, younger, False))
            elif here:
                ways.append((elder, younger, True))
    for one, other, relayed in before.ways if before is not None else ():  # by an earlier master's probes
        if one in daemons and other in daemons:
            ends = daemons[one], daemons[other]
            if (min(ends), max(ends)) not in probed:
                ways.append((one, other, relayed))
    return sorted(ways)[:MOST]
