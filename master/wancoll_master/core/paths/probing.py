"""Whether a joiner and the members reach each other, asked before it is admitted. Pure.

Of each pair one has to reach the other: a dial that comes through shows that packets go both ways, and a link is
dialled by either end (R17).
"""

from __future__ import annotations

from math import inf

from wancoll.errors import ProtocolError
from wancoll.wire import messages as m
from wancoll_master.core.liveness.suspicion import UNPROBED, suspected
from wancoll_master.core.paths import measuring, ways
from wancoll_master.core.state import Daemon, Group, Member, ProbePair, Step, clip
from wancoll_master.plan.planning import near

HINT = (
    "let one go between that both can dial (`wancoll master --relay RATE`, `wancoll peer --relay RATE` of a third, or "
    "`wancoll relay`), forward a port to one of the daemons and start it with --advertise HOST:PORT, where the other "
    "can dial it (or connect(peer_options=[...])), or use a VPN"
)
_NOR = {m.Way.direct: "", m.Way.punched: "; nor both at once: ", m.Way.relayed: "; nor by a relay: "}
FEW = 8  # joiners of a group that forms, up to which all pairs are asked about


def ensure_probes(step: Step, group: Group) -> None:
    """Ask about every pair of joiner and member's daemon that is not asked about yet; drop pairs that ended.

    Of joiners about those pairs, too, that may not reach each other.
    """
    for at, joiner in list(enumerate(group.joining))[0 if group.members else -1 :]:  # others were asked when they came
        others = group.members + _doubtful(step, group.joining, at)
        joiner.probes = {mid: pair for mid, pair in joiner.probes.items() if mid in step.state.members}
        covered = {joiner.daemon.name, *(pair.member.daemon.name for pair in joiner.probes.values())}
        for member in others:
            if member.daemon.name not in covered:
                covered.add(member.daemon.name)
                joiner.probes[member.mid] = pair = ProbePair(member)
                _ask(step, joiner, pair)
    _part(step, group)


def _part(step: Step, group: Group) -> bool:
    """Refuse who cannot reach another one: a joiner only once both have come with their whole islands."""
    refused = False
    for joiner in list(group.joining):
        whole = group.whole(group.joining)
        for pair in joiner.probes.values() if joiner in group.joining else ():
            if pair.apart and (pair.member.in_epoch or (joiner in whole and pair.member in whole)):
                refuse(step, joiner, pair.apart)
                refused = True
                break
    return refused


def _doubtful(step: Step, joining: list[Member], at: int) -> list[Member]:
    """Joiners that came before the one *at* that place and may not be reached: behind a NAT, or where relays are.

    All of few, else those that came 1, 2, 4, 8, ... before.
    """
    places = range(at) if at < FEW else [at - (1 << i) for i in range(at.bit_length())]
    daemon, doubtful = joining[at].daemon, bool(ways.relays(step.state) or joining[at].daemon.hints)
    others = [joining[place] for place in places if not near(joining[place].daemon, daemon)]
    return [other for other in others if doubtful or other.daemon.hints]


def result(step: Step, daemon: Daemon, message: m.ProbeResult) -> Group | None:
    """Take in a probe's result. Returns the joiner's group where its admission has to be looked at again."""
    members = step.state.members
    one, other, joiner = (members.get(mid) for mid in (message.prober, message.target, message.joiner))
    if one is not None and other is not None and one.daemon is daemon and message.way is not m.Way.relayed:
        # Also where the joiner has come in.
        ways.found(step, daemon, other.daemon, message.way, ok=message.ok, why=message.reason)
    if joiner is None or joiner.in_epoch or joiner.group.name != message.group:
        return None
    group, outward = joiner.group, message.prober == joiner.mid
    pair = joiner.probes.get(message.target if outward else message.prober)
    if pair is None or not pair.asked or (not outward and message.target != joiner.mid):
        return None
    prober, target = (joiner, pair.member) if outward else (pair.member, joiner)
    if prober.daemon is not daemon:
        raise ProtocolError("answered a probe of another daemon", expected=f"daemon {prober.daemon.name}")
    if not message.ok and message.way is pair.way:
        _failed(step, joiner, pair, {prober.mid: f"{_cannot_reach(prober, target)}: {message.reason}"})
    elif message.ok and not pair.ok:
        pair.ok = True
        if pair.failed or pair.way:  # what was measured first went the wrong way
            measuring.ask_round_trips(step, group, joiner.daemon)
    return group


def overdue(step: Step, group: Group) -> None:
    """Act on pairs whose deadline has passed: no answer counts as unreachable."""
    for joiner in list(group.joining):
        for pair in list(joiner.probes.values()):
            if pair.ok or pair.deadline > step.now:
                continue
            if pair.member.mid not in step.state.members:  # another joiner, which has left
                del joiner.probes[pair.member.mid]
                continue
            if not pair.asked and not suspected(step, pair.member.daemon, UNPROBED):
                _ask(step, joiner, pair)
                continue
            ends = (pair.member, joiner), (joiner, pair.member)
            waited = f"gave no answer within {pair.way.probed_within(step.limits):g} s"
            late = {a.mid: f"{_cannot_reach(a, b)}: daemon {a.daemon.name} {waited}" for a, b in ends}
            if _failed(step, joiner, pair, late):
                break
    step.touch(group)


def deadline(group: Group) -> float:
    """When overdue() has something to do."""
    pairs = (pair for joiner in group.joining for pair in joiner.probes.values())
    return min((pair.deadline for pair in pairs if not pair.ok), default=inf)


def settled(step: Step, group: Group) -> bool:
    """Whether all is known of the pairs of a group that forms."""
    pairs = (pair for joiner in group.joining for pair in joiner.probes.values())
    return all(pair.ok or pair.apart or pair.member.mid not in step.state.members for pair in pairs)


def refuse(step: Step, joiner: Member, reason: str, *, evicted: bool = False) -> None:
    """The joiner is out with its island, for good; *evicted*: an operator says so."""
    group = joiner.group
    for one in [one for one in group.joining if one.island == joiner.island]:
        why = reason if one is joiner else f"{joiner.name} of its island is refused: {reason}"
        group.joining.remove(one)
        del step.state.members[one.mid], one.daemon.members[one.mid]
        step.send(one.daemon.conn, m.Refused(group.name, one.name, clip(why, 2000), evicted))
        step.record(group, "refused", f"{one.name} of daemon {one.daemon.name}: {why}")


def _ask(step: Step, joiner: Member, pair: ProbePair) -> None:
    pair.asked, pair.ok, pair.failed = True, False, {}
    # Later than the daemons themselves give up: their word says more than their silence.
    pair.deadline = step.now + pair.way.probed_within(step.limits) + step.limits.heartbeat_interval
    step.alarm(pair.deadline)
    for prober, target in ((pair.member, joiner), (joiner, pair.member)):
        ask = m.Probe(
            joiner.group.name, joiner.mid, prober.mid, target.mid, target.daemon.name, target.daemon.addresses,
            target.daemon.key, pair.way,
        )  # fmt: skip
        step.send(prober.daemon.conn, ask)


def _failed(step: Step, joiner: Member, pair: ProbePair, why: dict[int, str]) -> bool:
    """Refuse the joiner if neither end reaches the other, unless the member is about to be found dead.

    Returns whether somebody is refused.
    """
    if pair.ok or pair.member.mid not in step.state.members:
        return False
    if suspected(step, pair.member.daemon, UNPROBED):
        pair.asked = False
        pair.deadline = step.now + step.limits.heartbeat_interval
        step.alarm(pair.deadline)
        return False
    for prober, text in why.items():
        pair.failed.setdefault(prober, text)
    if len(pair.failed) < 2:
        return False
    pair.before += _NOR[pair.way] + "; ".join(pair.failed.values())
    if pair.way is m.Way.direct and _may_punch(joiner.daemon, pair.member.daemon):
        pair.way = m.Way.punched
    elif pair.way is not m.Way.relayed and ways.relays(step.state):
        pair.way = m.Way.relayed
    else:
        pair.apart, pair.deadline = f"{pair.before}; {HINT}", inf
        return _part(step, joiner.group)
    _ask(step, joiner, pair)
    return False


def _may_punch(one: Daemon, other: Daemon) -> bool:
    """Whether there may be a hole for the two: not in a NAT that both are behind, nor on one machine."""
    return one.source != other.source if one.source else not near(one, other)


def _cannot_reach(prober: Member, target: Member) -> str:
    ends = f"{prober.name} (daemon {prober.daemon.name}) cannot reach {target.name} (daemon {target.daemon.name})"
    return f"{ends} at {', '.join(target.daemon.addresses)}"
