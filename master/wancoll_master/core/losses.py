"""Losses: puts members and daemons out, keeps what they are told, and notes that an epoch has to end. Pure.

These functions record facts; epochs.settle() decides what follows from them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from wancoll.limits import keep_newest
from wancoll.wire import messages as m
from wancoll_master.core import reserved
from wancoll_master.core.paths import measuring, ways
from wancoll_master.core.ready import CAUSES
from wancoll_master.core.state import Closing, Daemon, Group, Member, Out, Step, clip, names, several


def end_epoch(step: Step, group: Group, reason: str, voids: Collection[m.Void] = ()) -> None:
    """The epoch has to end: what is not committed has not happened and runs again (R2), but for *voids* (R14)."""
    current = group.current
    current.asking = None
    if current.closing is not None:
        current.closing.update, current.closing.able = 0, []  # it is called again in the next epoch
    current.voids.update({one.seq: one for one in voids})
    current.ends.append(clip(reason))
    step.touch(group)


def stop(step: Step, group: Group, reason: str, ask: int = 0) -> Closing:
    """Where members commit: let them freeze, once."""
    if group.current.closing is None:
        until = step.now + step.limits.heartbeat_timeout
        group.current.closing = Closing(step.now, until, group.columns())
        step.alarm(until)
        step.broadcast(group, m.Abort(group.name, group.epoch, ask, clip(reason)))
    return group.current.closing


def remember(step: Step, fate: m.Evicted) -> None:
    """What the member is told should it report."""
    keep_newest(step.state.missing, (fate.group, fate.mid), fate, step.limits.members_missing)


def lose(step: Step, gone: dict[Member, str], kind: str, *, tell: bool, cause: str = "", committed: int = 0) -> None:
    """Members and joiners are out, each for its reason: one new epoch of the survivors in each group concerned.

    *tell*: send Evicted, since the daemon may still be listening; the others of their islands, who are out with them,
    are told. *kind* is the event log's.
    *cause*: see CAUSES; "": as *kind* says. *committed*: up to where the one that is lost says that all is.
    """
    cause = cause or (kind if kind in CAUSES else "other")
    groups: dict[str, list[Member]] = {}
    with_them = {
        other: f"{member.name} of its island is out: {why}"
        for member, why in gone.items()
        if member.in_epoch and member.group.shards > 1
        for other in member.group.mates(member)
        if other not in gone
    }
    for member, why in (gone | with_them).items():
        groups.setdefault(member.group.name, []).append(member)
        del step.state.members[member.mid], member.daemon.members[member.mid]
        told = tell or member in with_them
        if not member.in_epoch or not (told or member.daemon.conn not in step.state.connections):
            if member.in_epoch:  # else it said so itself
                reserved.stopped(step, member.group.name, {member.mid})
            continue
        if member.group.current.votes:  # what it has finished may be committed by others, or not
            known = committed if member in with_them else 0  # an island takes the word of its own
            member.group.current.out.append(Out(member.mid, clip(why), member.daemon, told, member.shard, known))
        else:
            evicted = m.Evicted(member.group.name, member.mid, clip(why), member.group.committed)
            keep_fate(step, member.daemon, evicted)
            if told:
                step.send(member.daemon.conn, evicted)
    for name, lost in groups.items():
        group = step.state.groups[name]
        group.members = [member for member in group.members if member not in gone and member not in with_them]
        group.joining = [joiner for joiner in group.joining if joiner not in gone]
        why = several(gone[member] for member in lost if member in gone)
        if in_peace := why == "left":
            group.goodbyes += [member.name for member in lost if member.in_epoch]
            for member in lost:
                step.state.has_left(name, member.name)
        text = clip(f"{names(lost)} left" if in_peace else f"lost {names(lost)}: {why}")
        out = sum(member.in_epoch for member in lost)
        step.record(group, kind, text, cause=cause, lost=0 if kind == "left" else out)
        if out:
            end_epoch(step, group, text)
        step.touch(group)


def end_daemons(step: Step, ended: Mapping[Daemon, str], kind: str, *, close: bool, cause: str = "") -> None:
    """The daemons' connections are over, each for its reason; so are their memberships, with one epoch for all.

    With *close* the master ends the connections and says why.
    """
    state = step.state
    for daemon in ended:
        del state.connections[daemon.conn], state.daemons[daemon.name]
        if daemon.stopping:
            state.has_left("", daemon.name)
    measuring.forget(step, ended)
    ways.forget(step, ended)
    idle = [why for daemon, why in ended.items() if not daemon.members]  # no group's event tells of them
    gone = {member: why for daemon, why in ended.items() for member in daemon.members.values()}
    lose(step, gone, kind, tell=close, cause=cause)
    if close:
        for daemon, why in ended.items():
            step.close(daemon.conn, why)
    for why in idle:
        step.record(None, kind, why)


def keep_fate(step: Step, daemon: Daemon, evicted: m.Evicted) -> None:
    """A message may be lost with its connection: the daemon is told again when it introduces itself again (R8)."""
    gone, told = step.state.gone, (daemon.name, daemon.incarnation)
    fates = [*gone.get(told, ()), evicted][-step.limits.group_members :]
    keep_newest(gone, told, fates, step.limits.daemons_gone)


def tell_fates(step: Step, daemon: Daemon) -> list[m.Evicted]:
    """The first that a daemon is told after its Welcome. Kept until it has heard them."""
    fates = step.state.gone.get((daemon.name, daemon.incarnation), [])
    for evicted in fates:
        step.send(daemon.conn, evicted)
    return fates


def ended(step: Step, daemon: Daemon, members: Collection[tuple[str, int]]) -> None:
    """The daemon says that these are out: it need not be told again, and they commit nothing any more."""
    gone, key, known = step.state.gone, (daemon.name, daemon.incarnation), set(members)
    if left := [one for one in gone.get(key, ()) if (one.group, one.mid) not in known]:
        gone[key] = left
    else:
        gone.pop(key, None)
    for group, mid in members:
        used = step.state.used.get(group)
        before = used.former.get(mid) if used is not None else None
        if before is not None and before.daemon == daemon.incarnation:  # nobody says so of another daemon's
            reserved.stopped(step, group, {mid})
