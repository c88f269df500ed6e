"""Whether a joiner and the members reach each other, asked before it is admitted. Pure."""

from __future__ import annotations

from wancoll.errors import ProtocolError
from wancoll.wire import messages as m
from wancoll_master.core.state import Daemon, Group, Member, ProbePair, Step, clip

_HINT = "start its daemon with --advertise HOST:PORT, an address that the others can dial"


def ensure_probes(step: Step, group: Group) -> None:
    """Ask about every pair of joiner and member's daemon that is not asked about yet; drop pairs that ended."""
    if not group.members:
        return
    present = {member.mid for member in group.members}
    for joiner in group.joining:
        joiner.probes = {mid: pair for mid, pair in joiner.probes.items() if mid in present}
        covered = {joiner.daemon.name, *(pair.member.daemon.name for pair in joiner.probes.values())}
        for member in group.members:
            if member.daemon.name not in covered:
                covered.add(member.daemon.name)
                joiner.probes[member.mid] = pair = ProbePair(member)
                _ask(step, joiner, pair)


def result(step: Step, daemon: Daemon, message: m.ProbeResult) -> Group | None:
    """Take in a probe's result. Returns the joiner's group where its admission has to be looked at again."""
    joiner = step.state.members.get(message.joiner)
    if joiner is None or joiner.in_epoch or joiner.group.name != message.group:
        return None
    outward = message.prober == joiner.mid
    pair = joiner.probes.get(message.target if outward else message.prober)
    if pair is None or not pair.asked or (not outward and message.target != joiner.mid):
        return None
    prober, target = (joiner, pair.member) if outward else (pair.member, joiner)
    if prober.daemon is not daemon:
        raise ProtocolError("answered a probe of another daemon", expected=f"daemon {prober.daemon.name}")
    if message.ok:
        if outward:
            pair.from_joiner = True
        else:
            pair.to_joiner = True
    else:
        _failed(step, joiner, pair, f"{_cannot_reach(prober, target)}: {message.reason}")
    return joiner.group


def overdue(step: Step, group: Group) -> None:
    """Act on pairs whose deadline has passed: no answer counts as unreachable."""
    for joiner in list(group.joining):
        for pair in list(joiner.probes.values()):
            if pair.ok or pair.deadline > step.now:
                continue
            if not pair.asked and not _silent(step, pair.member.daemon):
                _ask(step, joiner, pair)
                continue
            prober, target = (pair.member, joiner) if pair.to_joiner is None else (joiner, pair.member)
            waited = f"daemon {prober.daemon.name} gave no answer within {step.limits.probe_timeout:g} s"
            if _failed(step, joiner, pair, f"{_cannot_reach(prober, target)}: {waited}"):
                break


def deadline(group: Group) -> float:
    """When overdue() has something to do."""
    return min(
        (pair.deadline for joiner in group.joining for pair in joiner.probes.values() if not pair.ok),
        default=float("inf"),
    )


def refuse(step: Step, joiner: Member, reason: str, *, evicted: bool = False) -> None:
    """The joiner is out, for good; *evicted*: an operator says so."""
    group = joiner.group
    group.joining.remove(joiner)
    del step.state.members[joiner.mid], joiner.daemon.members[joiner.mid]
    step.send(joiner.daemon.conn, m.Refused(group.name, joiner.name, clip(reason, 2000), evicted))
    step.record(group, "refused", f"{joiner.name} of daemon {joiner.daemon.name}: {reason}")


def _ask(step: Step, joiner: Member, pair: ProbePair) -> None:
    pair.asked, pair.to_joiner, pair.from_joiner = True, None, None
    # The daemons themselves give up after probe_timeout; their word says more than their silence.
    pair.deadline = step.now + step.limits.probe_timeout + step.limits.heartbeat_interval
    step.alarm(pair.deadline)
    for prober, target in ((pair.member, joiner), (joiner, pair.member)):
        ask = m.Probe(
            joiner.group.name, joiner.mid, prober.mid, target.mid, target.daemon.name, target.daemon.addresses
        )
        step.send(prober.daemon.conn, ask)


def _failed(step: Step, joiner: Member, pair: ProbePair, text: str) -> bool:
    """Refuse the joiner, unless the member is about to be found dead. Returns whether it is refused."""
    if _silent(step, pair.member.daemon):
        pair.asked = False
        pair.deadline = step.now + step.limits.heartbeat_interval
        step.alarm(pair.deadline)
        return False
    refuse(step, joiner, f"{text}; {_HINT}")
    return True


def _silent(step: Step, daemon: Daemon) -> bool:
    return daemon.away or step.now - daemon.heard_at > 2 * step.limits.heartbeat_interval


def _cannot_reach(prober: Member, target: Member) -> str:
    ends = f"{prober.name} (daemon {prober.daemon.name}) cannot reach {target.name} (daemon {target.daemon.name})"
    return f"{ends} at {', '.join(target.daemon.addresses)}"
