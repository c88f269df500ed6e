"""The groups as `wancoll status` shows them, and in words what each of them waits for. Pure."""

from __future__ import annotations

from math import inf

from wancoll.wire import messages as m
from wancoll_master.state import Group, Member, State, clip, names


def groups(state: State, now: float) -> list[m.GroupStatus]:
    """All groups, by name."""
    return [_group(state.groups[name], now) for name in sorted(state.groups)]


def _group(group: Group, now: float) -> m.GroupStatus:
    members = [_member(member, rank, now) for rank, member in enumerate(group.members)]
    return m.GroupStatus(
        name=group.name,
        phase="running" if group.members else "forming",
        epoch=group.epoch if group.members else 0,
        start_world=group.start_world,
        min_world=group.min_world,
        lanes=min((member.daemon.lanes for member in group.members or group.joining), default=0),
        committed_upto=group.committed,
        members=members + [_member(joiner, -1, now) for joiner in group.joining],
        waiting_for=clip(waiting_for(group, now)),
    )


def _member(member: Member, rank: int, now: float) -> m.MemberStatus:
    return m.MemberStatus(
        name=member.name,
        mid=member.mid,
        daemon=member.daemon.name,
        state="member" if member.in_epoch else "joining",
        rank=rank,
        addresses=member.daemon.addresses,
        done_upto=member.done_upto,
        silent_for=max(0.0, now - member.daemon.heard_at),
    )


def waiting_for(group: Group, now: float) -> str:
    """Who or what keeps the group from going on; "" if nothing is known to."""
    if not group.members:
        here = len(group.joining)
        return f"{group.start_world - here} more members to start: {here} of {group.start_world} are here"
    if group.asking is not None:
        silent = [member for member in group.members if member.mid not in group.asking.calls]
        return f"what {names(silent)} called at operation {group.asking.seq}: the members' calls differ"
    if group.settle_at < inf:
        ends = next(iter(group.complaints))
        who = {member.mid: member.name for member in group.members}
        return f"the link between {who[ends[0]]} and {who[ends[1]]}"
    world = len(group.members)
    small = f"joiners: {world} of min_world={group.min_world} members" if group.small else ""
    seq = min(group.pending, default=0)
    if not seq:
        return small
    entry = group.pending[seq]
    age = f"for {now - entry.since:.1f} s"
    if entry.update and len(entry.done) == world:
        if group.small:
            return f"{small}, {age}"
        probed = [joiner for joiner in group.joining if not joiner.reachable]
        if probed:
            return f"the probes of {names(probed)} before update_membership at operation {seq} ends, {age}"
    absent = [member for member in group.members if member.mid not in entry.done]
    if not absent:
        return f"operations below {seq}, {age}"
    what = f"update_membership at operation {seq}" if entry.update else f"operation {seq}"
    return f"{names(absent)} to be done with {what}, {age}"
