"""Blame: which member or link a slow operation waits for, by what members say and by who says nothing. Pure.

    a member says (Waits)                     blamed
    an operation is slow, and another member  that member: its daemon is silent; its client has not called the
    has not finished it                       operation, or has not filled its input
    a link is down, or nothing that is sent   the link, in the direction in which packets are lost
    on it is acknowledged
    the other end of a link takes nothing     the link, unless the other end holds bytes back for an operation of its
                                              own (parked)

In a chain of waiters only the last one is to blame. If all members run an operation, nobody is to blame and nothing has
moved for stall_timeout, links are made anew; after STALLS times the operation is given up: nothing waits for ever.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from math import inf

from wancoll.limits import Limits
from wancoll.wire import messages as m
from wancoll_master.core.counting import window_end
from wancoll_master.core.liveness.suspicion import BLAMED
from wancoll_master.core.losses import end_epoch
from wancoll_master.core.state import Group, Member, Slow, Step, Told, clip, names

FRESH = 3.5  # heartbeat intervals during which what a member said counts
HEARD = 0.3  # seconds after the last progress from which packets that still come show which direction is dead
MOST = 8  # operations, and causes of each, that are told
NO_INPUT = "its client has not filled its input"
_STALE = 1.0  # seconds that links must have been up to be made anew
STALLS = 2  # times that links are made anew for one operation before it is given up
SAID_AGAIN = 30.0  # seconds between two waits of a group that are logged
_WHY = {
    "down": "it is down",
    "dead": "its packets do not arrive",
    "blocked": "its other end takes nothing",
}


def take(step: Step, member: Member, message: m.Waits) -> None:
    """A member says what its slow operations wait for: tell it what is to blame, and act if nothing moves."""
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
        _log(step, group, oldest)
        _act_if_stalled(step, group, oldest, message)


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


# ---- what waits, and for which members and links ------------------------------------------------------


def statuses(limits: Limits, group: Group, now: float) -> list[m.WaitStatus]:
    """The group's slow operations, oldest first, then its slow sends and recvs, each with what it waits for."""
    if not group.members or group.stopped:
        return []
    look = _Look(limits, group, now)
    return ([look.collective(seq) for seq in sorted(look.slow())[:MOST]] + list(look.sends_and_recvs()))[: 2 * MOST]


def _current(step: Step, group: Group) -> list[m.WaitStatus]:
    """statuses(), found at most twice in a heartbeat's time: large groups have many reporters."""
    grain = step.limits.heartbeat_interval / 2
    known = group.current.waits
    if known is None or step.now - known[0] >= grain:
        known = group.current.waits = step.now, statuses(step.limits, group, step.now)
    return known[1]


def _fresh(limits: Limits, group: Group, now: float) -> dict[int, Told]:
    """What members have said lately in this epoch, by mid."""
    since = now - FRESH * limits.heartbeat_interval
    told = ((member.mid, member.told) for member in group.members)
    return {mid: one for mid, one in told if one is not None and one.message.epoch == group.epoch and one.at >= since}


def _said(member: Member) -> list[m.OpWait]:
    """The member's slow operations, as it has last said in this epoch."""
    told = member.told
    return told.message.ops if told is not None and told.message.epoch == member.group.epoch else []


def lacks_input(member: Member, seq: int) -> bool:
    """Whether the member has last said that its own client still fills the input of *seq*."""
    return any(op.seq == seq and op.stage == "input" for op in _said(member))


class _Look:
    """What is known of a group's slow operations at one moment."""

    def __init__(self, limits: Limits, group: Group, now: float) -> None:
        self._limits, self._group, self._now = limits, group, now
        self._told = _fresh(limits, group, now)
        self._places = {member.mid: at for at, member in enumerate(group.members)}
        quiet = BLAMED * limits.heartbeat_interval
        self._silent = {member.mid for member in group.members if now - member.daemon.heard_at > quiet}

    def slow(self) -> set[int]:
        """Collectives that are slow, by the master's own count or by a member's word."""
        group, after = self._group, self._limits.slow_after
        slow = {seq for seq, entry in group.current.tally.open.items() if self._now - entry.since >= after}
        told = {op.seq for told in self._told.values() for op in told.message.ops}
        return slow | {seq for seq in told if seq > group.committed and seq not in group.voids}

    def collective(self, seq: int) -> m.WaitStatus:
        """The collective *seq* and what it waits for."""
        group, entry = self._group, self._group.current.tally.open.get(seq)
        told = [op for told in self._told.values() for op in told.message.ops if op.seq == seq]
        age = max([op.age for op in told] + ([self._now - entry.since] if entry is not None else []))
        what = next((op.what for op in told if op.what), "update_membership()" if entry and entry.update else "")
        nbytes = max((op.nbytes for op in told), default=0)
        done = entry.votes if entry is not None else {}
        found = [self._absent(member, seq, age) for member in group.members if member.mid not in done]
        causes = [cause for cause in found if cause is not None] + self._bad_links
        causes.sort(key=lambda cause: -cause.seconds)
        return m.WaitStatus(f"{group.name}/{seq}", seq, group.epoch, what, nbytes, age, len(done), causes[:MOST])

    def _absent(self, member: Member, seq: int, age: float) -> m.WaitCause | None:
        """Whether it is *member* that the others wait for, which has not finished *seq*."""
        if member.mid in self._silent:
            return self._silence(member)
        if lacks_input(member, seq):
            return self._cause(member, NO_INPUT, age)
        epoch, called, said_at = member.called
        if epoch != self._group.epoch or called >= seq or self._now - said_at >= age:
            return None
        grace = self._group.current.straggler_deadlines.get(seq)
        if grace is None or not grace.over or member.mid in grace.calls:
            return self._cause(member, "it has not called the operation", age)
        if any(op.seq == seq for op in _said(member)):
            return None  # its daemon takes part for it (R20)
        return self._cause(member, "it has not called the operation; its daemon was told to take part for it", age)

    def sends_and_recvs(self) -> Iterator[m.WaitStatus]:
        """Sends and recvs that are slow, and what they wait for."""
        members = self._group.members
        calls = [
            (members[self._places[mid]], members[self._places[op.other]], op, op.age + self._now - told.at)
            for mid, told in self._told.items()
            for op in told.message.ops
            if op.seq == 0 and op.other in self._places
        ]
        shut = {(member.mid, other.mid) for member, other, op, _ in calls if op.stage == "input"}
        for member, other, op, age in calls:
            ends = {member.name, other.name}
            if other.mid in self._silent:
                causes = [self._silence(other)]
            elif op.stage == "input":
                causes = [self._cause(member, NO_INPUT, age)]
            elif (other.mid, member.mid) in shut:
                causes = [self._cause(other, NO_INPUT, age)]
            elif op.stage == "alone":
                causes = [self._cause(other, "it has not called its half", age)]
            else:
                causes = [cause for cause in self._bad_links if {cause.member, cause.other} == ends]
            head = f"{member.name}: {op.what}", 0, self._group.epoch, op.what, op.nbytes
            yield m.WaitStatus(*head, age, int(op.stage == "done"), causes)

    def _cause(self, member: Member, why: str, seconds: float) -> m.WaitCause:
        return m.WaitCause(member.name, self._places[member.mid] // self._group.shards, "", -1, why, seconds)

    def _silence(self, member: Member) -> m.WaitCause:
        why = f"its daemon {member.daemon.name} has said nothing"
        return self._cause(member, why, self._now - member.daemon.heard_at)

    @cached_property
    def _bad_links(self) -> list[m.WaitCause]:
        """Links that are down or do not move, in the direction that is to blame; not those of silent members."""
        found: dict[tuple[int, int], m.WaitCause] = {}
        live = self._places.keys() - self._silent
        for mid, told in self._told.items():
            for link in told.message.links:
                since = link.since + self._now - told.at
                if mid not in live or link.other not in live or since < min(self._limits.slow_after, 1.0):
                    continue
                theirs = self._told.get(link.other)
                if link.state == "blocked" and (theirs is None or not theirs.message.ops or _parks(theirs, mid)):
                    continue  # it runs nothing that would take these bytes, or not yet
                source, target, why = mid, link.other, _WHY.get(link.state, "")
                if link.state == "dead" and theirs is not None and self._still_hears(theirs, mid, since):
                    source, target = target, source  # what was sent arrives: it is the answers that are lost
                if link.state == "down":
                    if (target, source) in found:
                        continue
                    why = f"{why}: {link.reason}" if link.reason else why
                if why and ((source, target) not in found or found[source, target].seconds < since):
                    places = self._places[source], self._places[target]
                    ends = [self._group.members[at].name for at in places]
                    one, other = (at // self._group.shards for at in places)
                    found[source, target] = m.WaitCause(ends[0], one, ends[1], other, clip(why, 300), since)
        return list(found.values())

    def _still_hears(self, told: Told, mid: int, since: float) -> bool:
        """Whether packets of member *mid* came well after its link made its last progress, *since* seconds ago."""
        links = (link for link in told.message.links if link.other == mid and link.state != "down")
        heard = min((link.heard + self._now - told.at for link in links), default=inf)
        return heard < since - HEARD


# ---- which ends hold bytes back for good reason -------------------------------------------------------


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
    """Mids of the members that have lately said that they hold this member's bytes back."""
    oldest = step.now - FRESH * step.limits.heartbeat_interval
    found = group.current.parks.get(member.mid, {}).items()
    return sorted(mid for mid, other in found if other.told is not None and other.told.at >= oldest)


def _parks(told: Told, mid: int) -> bool:
    return any(link.other == mid and link.state == "parked" for link in told.message.links)


# ---- what follows ------------------------------------------------------------------------------------


def _log(step: Step, group: Group, wait: m.WaitStatus) -> None:
    """One line in the log when a wait begins, not too often: training may be slow by nature."""
    known_after = step.limits.slow_after + BLAMED * step.limits.heartbeat_interval  # then silence shows, too
    if group.slow is not None or wait.seconds < known_after or step.now - group.slow_at < SAID_AGAIN:
        return
    group.slow, group.slow_at = Slow(wait.seq, step.now - wait.seconds), step.now
    since = f"{max((cause.seconds for cause in wait.causes), default=wait.seconds):.1f} s"
    step.record(group, "waits", f"{words(wait)} (for {since})", kept=False)


def _act_if_stalled(step: Step, group: Group, wait: m.WaitStatus, message: m.Waits) -> None:
    """If nothing moves and nothing is to blame, make links anew; after some times give the operation up for all."""
    if wait.causes or not wait.seq or group.small or group.stopped or group.current.settle_at < inf:
        return
    if wait.seq > window_end(step, group):
        return  # no member can have called it
    if not _stands_still(step, group, wait, message):
        return  # nobody has to look at the others
    tally = group.current.tally
    done = {mid for mid, upto in tally.claims.items() if upto >= wait.seq}.union(
        tally.open[wait.seq].votes if wait.seq in tally.open else ()
    )
    absent = [one for one in group.members if one.mid not in done]
    told = _fresh(step.limits, group, step.now)
    if not absent or not all(
        one.mid in told and _stands_still(step, group, wait, told[one.mid].message) for one in absent
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


def _stands_still(step: Step, group: Group, wait: m.WaitStatus, message: m.Waits) -> bool:
    """Whether a member runs the operation, or waits for others' votes for it, and nothing has moved there for long."""
    op = next((op for op in message.ops if op.seq == wait.seq), None)
    if op is None or min(op.still, op.age) < step.limits.stall_timeout:
        return False
    return op.stage == "moving" or (op.stage == "done" and group.current.votes)
