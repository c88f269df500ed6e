"""Finds what slow operations wait for, by what members say of them and of their links, and by silence. Pure.

In a chain of waiters the fault is with whoever waits for nobody: a silent daemon, a member that has not called the
operation, a link that is down, on which nothing is acknowledged, or from which the other end takes nothing without
holding it back for an operation of its own (it is parked). If all members run an operation, nobody of these is there
and nothing moves, links are made anew, and at last the operation is given up: nothing waits for ever.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

from wancoll.limits import Limits
from wancoll.wire import messages as m
from wancoll_master.core.counting import window_end
from wancoll_master.core.losses import end_epoch
from wancoll_master.core.state import Group, Member, Pending, Slow, Step, Told, clip, names

FRESH = 3.5  # heartbeat intervals during which what a member said counts
SILENT = 2.5  # heartbeat intervals without a word after which a daemon is suspected
HEARD = 0.3  # seconds after the last progress from which packets that still come show which direction is dead
MOST = 8  # operations, and causes of each, that are told
NO_INPUT = "its client has not filled its input"
_STALE = 1.0  # seconds that links must have been up to be made anew
STALLS = 2  # times that links are made anew for one operation before it is given up
SAID_AGAIN = 30.0  # seconds between two waits of a group that are logged


def take(step: Step, member: Member, message: m.Waits) -> None:
    """A member says what its slow operations wait for: tell it whose fault that is, and act if nothing moves."""
    group = member.group
    _note_parked(step, group, member, message)
    member.told = Told(message, step.now)
    waits = _current(step, group)
    oldest = waits[0] if waits else None
    text = words(oldest) if oldest is not None and oldest.causes else ""
    parked = _parked(step, group, member)
    head = group.name, member.mid, group.epoch
    step.send(member.daemon.conn, m.Waited(*head, oldest.seq if oldest else 0, text, parked))
    if oldest is not None:
        _note(step, group, oldest)
        _stalled(step, group, oldest, message)


# ---- what waits, and for whom ------------------------------------------------------------------------


def statuses(limits: Limits, group: Group, now: float) -> list[m.WaitStatus]:
    """The group's slow operations, oldest first, each with whom it waits for."""
    if not group.members or group.stopped:
        return []
    found = []
    for seq in sorted(_slow(limits, group, now))[:MOST]:
        entry = group.current.pending.get(seq)
        told = [op for _, told in _fresh(limits, group, now) for op in told.message.ops if op.seq == seq]
        age = max([op.age for op in told] + ([now - entry.since] if entry is not None else []))
        what = next((op.what for op in told if op.what), "update_membership()" if entry and entry.update else "")
        nbytes = max((op.nbytes for op in told), default=0)
        done = len(entry.done) if entry is not None else 0
        causes = _causes(limits, group, seq, entry, age, now)[:MOST]
        found.append(m.WaitStatus(f"{group.name}/{seq}", seq, group.epoch, what, nbytes, age, done, causes))
    return (found + list(_p2p(limits, group, now)))[: 2 * MOST]


def words(wait: m.WaitStatus) -> str:
    """The wait in a sentence, without what changes all the time."""
    what = f"operation {wait.seq}" + (f", {wait.what}" if wait.what else "") if wait.seq else wait.op
    if not wait.causes:
        return f"{what}, of epoch {wait.epoch}: no member or link stands out"
    return clip(f"{what}, of epoch {wait.epoch}, waits for " + "; ".join(cause_words(cause) for cause in wait.causes))


def cause_words(cause: m.WaitCause) -> str:
    """One member or link that is waited for."""
    if cause.other_rank < 0:
        return f"{cause.member} (rank {cause.rank}): {cause.why}"
    ends = f"{cause.member} (rank {cause.rank}) to {cause.other} (rank {cause.other_rank})"
    return f"the link from {ends}: {cause.why}"


def _current(step: Step, group: Group) -> list[m.WaitStatus]:
    """statuses(), found at most twice in a heartbeat's time: large groups have many reporters."""
    grain = step.limits.heartbeat_interval / 2
    known = group.current.waits
    if known is None or step.now - known[0] >= grain:
        known = group.current.waits = step.now, statuses(step.limits, group, step.now)
    return known[1]


def _fresh(limits: Limits, group: Group, now: float) -> Iterator[tuple[Member, Told]]:
    for member in group.members:
        told = member.told
        if told is None or told.message.epoch != group.epoch:
            continue
        if now - told.at <= FRESH * limits.heartbeat_interval:
            yield member, told


def _note_parked(step: Step, group: Group, member: Member, message: m.Waits) -> None:
    """Keep by whom each member's bytes are held back, so that nobody looks through all members for it."""
    parks, before = group.current.parks, member.told
    if before is not None and before.message.epoch == group.epoch:
        for link in before.message.links:
            parks.get(link.other, {}).pop(member.mid, None)
    for link in message.links:
        other = step.state.members.get(link.other)
        if link.state == "parked" and other is not None and other.group is group:
            parks.setdefault(link.other, {})[member.mid] = member


def _parked(step: Step, group: Group, member: Member) -> list[int]:
    """The members that hold this one's bytes back for good reason, as it has said lately."""
    oldest = step.now - FRESH * step.limits.heartbeat_interval
    found = group.current.parks.get(member.mid, {}).items()
    return sorted(mid for mid, other in found if other.told is not None and other.told.at >= oldest)


def _parks(told: Told, mid: int) -> bool:
    return any(link.other == mid and link.state == "parked" for link in told.message.links)


def _slow(limits: Limits, group: Group, now: float) -> set[int]:
    after = limits.slow_after
    slow = {seq for seq, entry in group.current.pending.items() if now - entry.since >= after}
    for _, told in _fresh(limits, group, now):
        slow |= {op.seq for op in told.message.ops if op.seq > group.committed and op.seq not in group.voids}
    return slow


def _causes(limits: Limits, group: Group, seq: int, entry: Pending | None, age: float, now: float) -> list[m.WaitCause]:
    ranks = {member.mid: rank for rank, member in enumerate(group.members)}
    done = entry.done if entry is not None else {}
    absent = [member for member in group.members if member.mid not in done]
    silent = {member.mid for member in _silent(limits, group, now)}
    grace = group.current.graces.get(seq)
    found = []
    for member in absent:
        rank = ranks[member.mid]
        if member.mid in silent:
            quiet = now - member.daemon.heard_at
            why = f"its daemon {member.daemon.name} has said nothing"
            found.append(m.WaitCause(member.name, rank, "", -1, why, quiet))
        elif lacks_input(member, seq):
            found.append(m.WaitCause(member.name, rank, "", -1, NO_INPUT, age))
        elif member.called[0] == group.epoch and member.called[1] < seq and now - member.called[2] < age:
            covered = grace is not None and grace.over and member.mid not in grace.calls
            if covered and any(op.seq == seq for op in _said(member)):
                continue  # its daemon takes part for it (R20)
            why = "it has not called the operation" + ("; its daemon was told to take part for it" if covered else "")
            found.append(m.WaitCause(member.name, rank, "", -1, why, age))
    found += _bad_links(limits, group, silent, ranks, now)
    found.sort(key=lambda cause: -cause.seconds)
    return found


def lacks_input(member: Member, seq: int) -> bool:
    """Whether it has said, when it last said what it waits for, that its own client still fills the input of *seq*."""
    return any(op.seq == seq and op.stage == "input" for op in _said(member))


def _said(member: Member) -> list[m.OpWait]:
    """Its slow operations, as it has last said in this epoch."""
    told = member.told
    return told.message.ops if told is not None and told.message.epoch == member.group.epoch else []


def _silent(limits: Limits, group: Group, now: float) -> list[Member]:
    bound = SILENT * limits.heartbeat_interval
    return [member for member in group.members if now - member.daemon.heard_at > bound]


def _bad_links(limits: Limits, group: Group, silent: set[int], ranks: dict[int, int], now: float) -> list[m.WaitCause]:
    """Links that are down or do not move, in the direction that is to blame; not those of silent members."""
    told = {member.mid: each for member, each in _fresh(limits, group, now)}
    found: dict[tuple[int, int], m.WaitCause] = {}
    for mid, each in told.items():
        for link in each.message.links:
            other = link.other
            if other not in ranks or mid in silent or other in silent:
                continue
            since = link.since + now - each.at
            if since < min(limits.slow_after, 1.0):
                continue
            theirs = told.get(other)
            if link.state == "blocked" and (theirs is None or not theirs.message.ops or _parks(theirs, mid)):
                continue  # it runs nothing that would take these bytes, or not yet
            source, target, why = mid, other, _WHY.get(link.state, "")
            if link.state == "dead" and theirs is not None and _still_hears(theirs, mid, since, now):
                source, target = other, mid  # what was sent arrives: it is the answers that are lost
            if link.state == "down":
                if (other, mid) in found:
                    continue
                why = f"{why}: {link.reason}" if link.reason else why
            if why and ((source, target) not in found or found[source, target].seconds < since):
                ends = group.members[ranks[source]], group.members[ranks[target]]
                cause = m.WaitCause(ends[0].name, ranks[source], ends[1].name, ranks[target], clip(why, 300), since)
                found[source, target] = cause
    return list(found.values())


_WHY = {
    "down": "it is down",
    "dead": "its packets do not arrive",
    "blocked": "its other end takes nothing",
}


def _still_hears(told: Told, mid: int, since: float, now: float) -> bool:
    """Whether packets of member *mid* came well after its link made its last progress, *since* seconds ago."""
    ages = [link.heard + now - told.at for link in told.message.links if link.other == mid and link.state != "down"]
    return bool(ages) and min(ages) < since - HEARD


def _p2p(limits: Limits, group: Group, now: float) -> Iterator[m.WaitStatus]:
    """Sends and recvs that are slow."""
    if not any(op.seq == 0 for _, told in _fresh(limits, group, now) for op in told.message.ops):
        return
    ranks = {member.mid: rank for rank, member in enumerate(group.members)}
    silent = {member.mid for member in _silent(limits, group, now)}
    links = _bad_links(limits, group, silent, ranks, now)
    shut = {
        (member.mid, op.other)
        for member, told in _fresh(limits, group, now)
        for op in told.message.ops
        if op.seq == 0 and op.stage == "input"
    }
    for member, told in _fresh(limits, group, now):
        for op in told.message.ops:
            if op.seq or op.other not in ranks:
                continue
            other = group.members[ranks[op.other]]
            age = op.age + now - told.at
            ends = {member.name, other.name}
            causes = [cause for cause in links if {cause.member, cause.other} == ends]
            if other.mid in silent:
                why = f"its daemon {other.daemon.name} has said nothing"
                causes = [m.WaitCause(other.name, ranks[other.mid], "", -1, why, now - other.daemon.heard_at)]
            elif op.stage == "input" or (other.mid, member.mid) in shut:
                sender = member if op.stage == "input" else other
                causes = [m.WaitCause(sender.name, ranks[sender.mid], "", -1, NO_INPUT, age)]
            elif op.stage == "alone":
                causes = [m.WaitCause(other.name, ranks[other.mid], "", -1, "it has not called its half", age)]
            done = int(op.stage == "done")
            yield m.WaitStatus(f"{member.name}: {op.what}", 0, group.epoch, op.what, op.nbytes, age, done, causes)


# ---- what follows ------------------------------------------------------------------------------------


def _note(step: Step, group: Group, wait: m.WaitStatus) -> None:
    """One line in the log when a wait begins, not too often: training may be slow by nature."""
    known_after = step.limits.slow_after + SILENT * step.limits.heartbeat_interval  # then silence shows, too
    if group.slow is not None or wait.seconds < known_after or step.now - group.slow_at < SAID_AGAIN:
        return
    group.slow, group.slow_at = Slow(wait.seq, step.now - wait.seconds), step.now
    since = f"{max((cause.seconds for cause in wait.causes), default=wait.seconds):.1f} s"
    step.record(group, "waits", f"{words(wait)} (for {since})", kept=False)


def _stalled(step: Step, group: Group, wait: m.WaitStatus, message: m.Waits) -> None:
    """Nothing moves and nothing is to blame: make links anew; after some times give the operation up for all."""
    if wait.causes or not wait.seq or group.small or group.stopped or group.current.settle_at < inf:
        return
    if wait.seq > window_end(step, group):
        return  # no member can have called it
    if not _still(step, group, wait, message):
        return  # nobody has to look at the others
    done = entry.done if (entry := group.current.pending.get(wait.seq)) is not None else {}
    absent = [one for one in group.members if one.mid not in done and not _has_committed(group, one, wait.seq)]
    fresh = {member.mid: told for member, told in _fresh(step.limits, group, step.now)}
    if not absent or not all(
        member.mid in fresh and _still(step, group, wait, fresh[member.mid].message) for member in absent
    ):
        return
    times = group.stalls[wait.seq] = group.stalls.get(wait.seq, 0) + 1
    text = f"operation {wait.seq} moved nothing for {step.limits.stall_timeout:g} s on {names(absent)}"
    step.record(group, "stall", text)
    if times > STALLS:
        what = m.Void(wait.seq, "OperationAborted", clip(f"{text}, {times} times", 300), {})
        end_epoch(step, group, f"{text}; given up", [what])
        return
    for member in group.members:
        step.send(member.daemon.conn, m.Redial(group.name, member.mid, group.epoch, [], _STALE, clip(text)))
    end_epoch(step, group, f"{text}; links are made anew")


def _has_committed(group: Group, member: Member, seq: int) -> bool:
    """Where members commit."""
    return group.current.votes and member.committed >= seq


def _still(step: Step, group: Group, wait: m.WaitStatus, message: m.Waits) -> bool:
    """Whether a member runs the operation, or waits for others' notes of it, and nothing has moved there for long."""
    op = next((op for op in message.ops if op.seq == wait.seq), None)
    if op is None or min(op.still, op.age) < step.limits.stall_timeout:
        return False
    return op.stage == "moving" or (op.stage == "done" and group.current.votes)
