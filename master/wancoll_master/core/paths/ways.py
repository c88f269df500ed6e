"""Ways between members that are not as others: which end dials, which pairs need a relay; the relays. Pure.

Probes find out who can dial whom (probing.py). A pair whose younger end can dial needs no word. Else the plan has it:
the elder dials, or both go through a relay.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

from wancoll.errors import ProtocolError
from wancoll.limits import PROTOCOL_VERSION
from wancoll.wire import messages as m
from wancoll_master.core.paths import announced
from wancoll_master.core.ready import Send
from wancoll_master.core.state import Daemon, Group, Member, Relay, Step
from wancoll_master.plan.measures import MAX_PATHS

MOST = 4096  # that a Plan can carry
_OWN = m.RelayInfo("the master")

# ---- relays -------------------------------------------------------------------------------------------


def relay_here(step: Step, conn: int, here: m.RelayHere, source: str, key: bytes) -> None:
    """A relay has come. Raises ProtocolError: it is of another version, or not at its own address, or one too many."""
    state = step.state
    m.check_protocol(here)
    announced.check(here.addresses, source, state.announce)
    for known, relay in list(state.relays.items()):
        if relay.info.name == here.name:  # in clear, whoever says so
            step.close(known, f"another relay has come as {here.name}")
            del state.relays[known]
    if len(relays(step)) >= m.MOST_RELAYS:
        raise ProtocolError("is one relay too many for this master", expected=f"at most {m.MOST_RELAYS}")
    info = m.RelayInfo(here.name, tuple(here.addresses), key)
    state.relays[conn] = Relay(info, step.now)
    limits = step.limits
    times = limits.heartbeat_interval, limits.heartbeat_timeout
    step.send(conn, m.Welcome(PROTOCOL_VERSION, state.term, *times, state.identity, elected_by=state.elected_by))
    step.record(None, "relay", f"relay {here.name} is here, at {', '.join(here.addresses)}")
    step.alarm(step.now + limits.heartbeat_timeout)
    _tell(step)


def relay_says(step: Step, conn: int, message: m.FromPeer) -> None:
    """What a relay says after its first message. Raises ProtocolError: it is no Heartbeat."""
    if not isinstance(message, m.Heartbeat):
        raise ProtocolError("is a relay, and said something else", expected="Heartbeat", got=type(message).__name__)
    step.state.relays[conn].heard_at = step.now
    step.ready.answers.append(Send(conn, m.Pong(message.number, step.state.term)))


def relay_gone(step: Step, conn: int, reason: str) -> None:
    """The relay's connection is over, if it is one's."""
    if (relay := step.state.relays.pop(conn, None)) is not None:
        step.record(None, "relay", f"relay {relay.info.name} is gone: {reason}")
        _tell(step)


def judge(step: Step) -> Iterator[float]:
    """End relays that are silent; yields when to look again."""
    timeout = step.limits.heartbeat_timeout
    for conn, relay in list(step.state.relays.items()):
        if relay.heard_at + timeout <= step.now:
            reason = f"it was silent for {step.now - relay.heard_at:.1f} s"
            step.close(conn, reason)
            relay_gone(step, conn, reason)
        else:
            yield relay.heard_at + timeout


def relays(step: Step) -> list[m.RelayInfo]:
    """Those that are here; the master's own, which costs its operator most, as the last."""
    return [relay.info for relay in step.state.relays.values()] + ([_OWN] if step.state.own_relay else [])


def tell_relays(step: Step, daemon: Daemon) -> None:
    """The daemon is new here."""
    if found := relays(step):
        step.send(daemon.conn, m.Relays(found))


def _tell(step: Step) -> None:
    found = relays(step)
    for daemon in step.state.daemons.values():
        step.send(daemon.conn, m.Relays(found))


# ---- behind one NAT -----------------------------------------------------------------------------------


def tell_nearby(step: Step, group: Group, newcomer: Daemon) -> None:
    """Tell the newcomer and the group's daemons behind the same NAT each other's local addresses. Nobody else is."""
    others = {member.daemon: None for member in group.members + group.joining if member.daemon is not newcomer}
    for other in others if newcomer.hints else ():
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
    elif len(dials) < MAX_PATHS:
        dials.add(ends, ok)


def way(step: Step, source: Daemon, target: Daemon) -> bool | None:
    """How *source* reaches *target*: False: it dials; True: through a relay; None: the other one dials."""
    dials = step.state.dials
    if dials.get((source.name, target.name), True):
        return False
    return None if dials.get((target.name, source.name)) else bool(relays(step))


def of(step: Step, members: Sequence[Member], before: m.Plan | None) -> list[tuple[int, int, bool]]:
    """The pairs that the plan has to name, as Plan.ways: by probes, or else as the plan *before* had it."""
    dials, here = step.state.dials, bool(relays(step))
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
