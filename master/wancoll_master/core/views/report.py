"""Groups and links as `wancoll status` shows them, and in words what each group waits for. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import islice
from math import inf

from msgspec.structs import replace

from wancoll.limits import counted, few
from wancoll.wire import messages as m
from wancoll_master.core import rebuilding, reserved
from wancoll_master.core.liveness import blame
from wancoll_master.core.liveness.link_faults import pairs
from wancoll_master.core.state import Group, Member, State, clip, names
from wancoll_master.plan.measures import Measures
from wancoll_master.plan.planning import ring_of

MOST_LINKS = 1024  # in one status, which has to fit into a message
_MOST_GONE = 64  # groups, likewise
_MOST_NOT_DIRECT = 64  # pairs of a group


def groups(state: State, now: float, only: Collection[str] = ()) -> list[m.GroupStatus]:
    """Those groups, by name; empty: all."""
    found = (state.groups.get(name) for name in sorted(set(only) or state.groups))
    return [_group(state, group, now) for group in found if group is not None]


def daemons(state: State, only: Collection[str] = ()) -> list[str]:
    """Those that have members of these groups, by name; empty: all."""
    return sorted(
        name for name, daemon in state.daemons.items() if not only or any(group.name in only for group in daemon.groups)
    )


def hosts(state: State, only: Collection[str] = ()) -> list[m.DaemonStatus]:
    """The same, with where their lanes are; the first of many."""
    found = (state.daemons[name] for name in daemons(state, only)[:MOST_LINKS])
    return [m.DaemonStatus(daemon.name, daemon.addresses, daemon.version) for daemon in found]


def links(state: State, only: Collection[str] = ()) -> list[m.LinkStatus]:
    """The measured paths, by source and target; the first of many. Between daemons of these groups; empty: all."""
    here = set(daemons(state, only)) if only else None
    paths = (ends for ends in state.measures.paths.items() if here is None or here.issuperset(ends[0]))
    return [
        m.LinkStatus(source, target, path.rtt, path.bandwidth, path.lanes, path.loss, _sent(state, source, target))
        for (source, target), path in sorted(paths, key=lambda item: item[0])[:MOST_LINKS]
    ]


def _sent(state: State, source: str, target: str) -> int:
    daemon = state.daemons.get(source)
    flow = daemon.flows.get(target) if daemon is not None else None
    return flow.sent if flow is not None else 0


def left(state: State, only: Collection[str] = ()) -> list[tuple[str, str]]:
    """What was asked to leave and has left in order: members of the groups *only*; empty: all, and daemons."""
    return [who for who, in_order in state.leaves.items() if in_order and (not only or who[0] in only)]


def gone(state: State, only: Collection[str] = ()) -> list[tuple[str, int, str]]:
    """Groups of which nobody is here: name, members, and those that did not say that they stop; the first groups."""
    found = ((name, sorted(reserved.missing(state, name).values())) for name in sorted(set(only) or state.used))
    lost = [(name, len(state.used[name].mids), few(who)) for name, who in found if who and name not in state.groups]
    return lost[:_MOST_GONE]


def _group(state: State, group: Group, now: float) -> m.GroupStatus:
    slow = blame.statuses(state.limits, group, now)
    members = [_member(member, at // group.shards, now) for at, member in enumerate(group.members)]
    return m.GroupStatus(
        name=group.name,
        phase="running" if group.members else "rebuilding" if group.rebuild is not None else "forming",
        epoch=group.epoch if group.members else 0,
        start_world=group.start_world,
        min_world=group.min_world,
        lanes=_lanes(group),
        committed_upto=group.committed,
        members=members + [_member(joiner, -1, now) for joiner in group.joining],
        waiting_for=clip(waiting_for(state, group, now, slow)),
        plan=_plan(state.measures, group),
        waits=slow,
        pairs=pairs(group, now),
        punched=_not_direct(state, group, m.Way.punched),
        relayed=_not_direct(state, group, m.Way.relayed),
    )


def _not_direct(state: State, group: Group, way: m.Way) -> list[tuple[str, str, float, str]]:
    """Pairs of members that reach each other this *way*, how fast that is, and why not better; the first of many."""
    here, ways = {member.mid: member for member in group.members}, group.planned.plan.ways if group.planned else []
    found = ((here[one], here[other]) for one, other, by in ways if by is way and one in here and other in here)
    ends = list(islice(found, _MOST_NOT_DIRECT))
    return [(a.name, b.name, max(_rate(state, a, b), _rate(state, b, a)), _why_not(state, a, b, way)) for a, b in ends]


def _rate(state: State, one: Member, other: Member) -> float:
    return state.measures.bandwidth(one.daemon.name, other.daemon.name)


def _why_not(state: State, one: Member, other: Member, way: m.Way) -> str:
    """Which better ways failed, by whose dial, and how."""
    return "; ".join(
        f"{a.name} has {'punched' if tried else 'dialled'} {b.name}: {why or 'it gave no reason'}"
        for tried in (m.Way.direct, m.Way.punched)
        for a, b in ((one, other), (other, one))
        for why in [state.failed.get((a.daemon.name, b.daemon.name), {}).get(tried)]
        if why is not None and tried < way
    )


def _lanes(group: Group) -> int:
    if group.members and group.planned is not None:
        return group.planned.plan.lanes
    return min((joiner.daemon.lanes for joiner in group.joining), default=0)


def _plan(measures: Measures, group: Group) -> m.PlanStatus | None:
    if not group.members or group.planned is None:
        return None
    plan = replace(group.planned.plan, collectors="members" if group.current.votes else "master")
    ring, cost = ring_of(measures, group.members), group.planned.cost
    bottleneck = ring.bottleneck if ring.bottleneck < inf else 0.0
    alpha, beta = (cost.alpha, cost.beta) if cost is not None else (0.0, 0.0)
    return m.PlanStatus(plan, bottleneck, ring.latency, alpha, beta)


def _member(member: Member, rank: int, now: float) -> m.MemberStatus:
    return m.MemberStatus(
        name=member.name,
        mid=member.mid,
        daemon=member.daemon.name,
        state="member" if member.in_epoch else "joining",
        rank=rank,
        addresses=member.daemon.addresses,
        done_upto=max(member.done_upto, member.group.current.tally.claims.get(member.mid, 0)),
        silent_for=max(0.0, now - member.daemon.heard_at),
    )


def waiting_for(state: State, group: Group, now: float, slow: Sequence[m.WaitStatus] = ()) -> str:
    """What keeps the group from going on; "" if nothing is known to."""
    if group.rebuild is not None:
        awaited = rebuilding.absent(group)
        return f"{', '.join(awaited)} to report after the master's restart"
    if not group.members:
        here = len(group.joining)
        wanted = group.start_world * group.shards
        more = counted(wanted - here, "more member") if here < wanted else "its time"
        more += f" to start: {here} of {wanted} are here"
        return "; ".join(filter(None, (more, reserved.why_held(state, group.name, now))))
    if group.current.asking is not None:
        silent = [member for member in group.members if member.mid not in group.current.asking.calls]
        return f"what {names(silent)} called at operation {group.current.asking.seq}: the members' calls differ"
    if group.current.closing is not None:  # who is complained of may be out already
        silent = [member for member in group.members if member.mid not in group.current.closing.reports]
        return f"{names(silent)} to say what they have finished: the epoch ends"
    if group.current.settle_at < inf:
        ends = next(iter(group.current.complaints))
        who = {member.mid: member.name for member in group.members}
        return f"the link between {who[ends[0]]} and {who[ends[1]]}"
    world = len(group.members)
    if slow and slow[0].causes:
        return f"{blame.words(slow[0])}, for {slow[0].seconds:.1f} s"
    small = f"joiners: {world // group.shards} of min_world={group.min_world} members" if group.small else ""
    seq = min(group.current.tally.open, default=0)
    if not seq:
        return small
    entry = group.current.tally.open[seq]
    age = f"for {now - entry.since:.1f} s"
    if entry.update and len(entry.votes) == world:
        if group.small:
            return f"{small}, {age}"
        probed = [joiner for joiner in group.joining if not joiner.reachable]
        if probed:
            return f"the probes of {names(probed)} before update_membership at operation {seq} ends, {age}"
    absent = [member for member in group.members if member.mid not in entry.votes]
    if not absent:
        return f"operations below {seq}, {age}"
    what = f"update_membership at operation {seq}" if entry.update else f"operation {seq}"
    return f"{names(absent)} to be done with {what}, {age}"
