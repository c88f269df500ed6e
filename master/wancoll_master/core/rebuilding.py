"""After a restart of the master: members report, then their epoch goes on, or a new one begins without some. Pure.

R7 of the protocol. No report decides alone what may have been committed (wancoll/commit/close.py). Whoever reports too
late was not asked: what it has counts where it is equal to what those have who were (R8).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from math import inf
from typing import NamedTuple

import msgspec

from wancoll.commit import close
from wancoll.commit.tally import UPDATE
from wancoll.errors import ProtocolError
from wancoll.limits import format_size
from wancoll.wire import messages as m
from wancoll.wire.islands import in_order
from wancoll_master.core import counting, epochs, losses, p2p, reserved
from wancoll_master.core.liveness.link_faults import BAD_PAIR_SECONDS
from wancoll_master.core.paths import probing
from wancoll_master.core.ready import MID_BLOCK, Used, jumped
from wancoll_master.core.state import Closing, Daemon, Group, Member, Out, Rebuild, Reported, State, Step, names, weight
from wancoll_master.plan import planning
from wancoll_master.plan.planning import Planned
from wancoll_master.plan.topology import pair

_TEXTS = {
    "": "",
    "CollectiveMismatch": p2p.MISFIT,
    "OperationAborted": p2p.APART,
    "OutcomeUnknown": "it was finished here, and nobody can say whether it was on the other side",
}
_VOID_BEFORE = "the members had given it up; an earlier master logged why"
_NOTHING = m.EpochReport(0, [], [], [])
_WHY_VOID = frozenset({"CollectiveMismatch", "OperationAborted", "ProtocolError", "OutcomeUnknown"})

# ---- ids --------------------------------------------------------------------------------------------


def take_mid(step: Step) -> int:
    """A mid that was never given out."""
    mid = step.state.next_mid
    step.state.next_mid += 1
    if mid % MID_BLOCK == 1:
        step.persist(mid + MID_BLOCK)
    return mid


def raise_mids(step: Step, known: int) -> None:
    """An earlier master, whose journal may be lost, gave out mids up to *known*."""
    if step.state.next_mid <= known <= step.state.believable:
        step.state.next_mid = known + 1
        step.persist((known // MID_BLOCK + 1) * MID_BLOCK + 1)


def lose_journal(step: Step, term: int) -> None:
    """A daemon has seen a master of this *term*: the journal that this one began with lacks what was told since."""
    state = step.state
    term, state.highest_epoch, state.next_mid = jumped(term, max(state.floor, state.highest_epoch), state.next_mid)
    state.term, state.floor = term + 1, state.highest_epoch
    for group in state.groups.values():
        group.used = max(group.used, state.floor)
    if not state.lost_journal:
        state.lost_journal = state.holds = True
        state.rejoin_until = step.now + step.limits.rejoin_grace
        step.alarm(state.rejoin_until)
    step.persist()


# ---- what members say -------------------------------------------------------------------------------


def take(step: Step, daemon: Daemon, report: m.Report) -> None:
    """A member of an earlier master reports."""
    group = step.state.groups.get(report.group)
    known = group.rebuild.epochs.get(report.epoch) if group is not None and group.rebuild is not None else None
    bare = msgspec.structs.replace(report, finished=_NOTHING, voids=[], p2p=[], settled=[], failed=[], updated=None)
    epoch = known or Reported(bare, {mid: name for mid, _, name in report.members})
    _check(step, daemon, report, epoch, first=known is None)
    ended = (report.updated.seq, report.updated.epoch) if report.updated is not None else ()
    numbers = report.epoch, report.finished.committed, report.heard, *ended, *(epoch.daemons if known is None else ())
    if max(numbers) > step.state.believable:
        _evict_reporter(step, daemon, report, "it reports numbers that no master can have come to")
        return
    if unfit := _too_many(step, daemon, report):
        _evict_reporter(step, daemon, report, unfit)
        return
    if known is None:
        raise_mids(step, max(epoch.daemons))
    used = step.state.used.get(report.group) if known is None else None
    if used is not None and used.epoch == report.epoch and used.mids != epoch.daemons.keys():
        why = "a journal was lost, and the number of this member's epoch was given to others"
        _evict_reporter(step, daemon, report, why)
        return
    if (whose := _claimed(step, report)) is not None:
        _evict_reporter(step, daemon, report, f"member {report.mid} is one of group {whose}")
        return
    fate = step.state.missing.get((report.group, report.mid))
    if fate is not None:
        step.send(daemon.conn, fate)
        return
    if known is None:
        _give_way(step, report)
    if group is not None and group.rebuild is None and not _may_have_existed(step, group):
        _evict_reporter(step, daemon, report, "the group forms anew, and this master knows of no earlier one")
        return
    if group is not None and any(out.mid == report.mid for out in group.current.out):  # it is decided just now (C4)
        outs = group.current.out
        group.current.out = [replace(out, daemon=daemon) if out.mid == report.mid else out for out in outs]
        return
    if report.mid in step.state.members or (group is not None and group.members):
        _evict_reporter(step, daemon, report, "this member came back after the group had gone on without it")
        return
    if group is None and len(step.state.groups) >= step.limits.groups:
        raise ProtocolError("reports a group too many", expected=f"at most {step.limits.groups}", got=report.group)
    if group is None:
        group = Group(report.group, report.start_world, report.min_world, report.key, step.state.floor)
        group.shards = report.shards
        step.state.groups[group.name] = group
    if group.rebuild is None:
        group.rebuild = Rebuild(step.now + step.limits.rejoin_grace)
        step.alarm(group.rebuild.deadline)
    again = report.mid in group.rebuild.reports
    members, said = report.members if known is None else [], report.finished
    report = _shared(report, epoch)
    own = msgspec.structs.replace(report, members=members, finished=said if report.finished is said else _NOTHING)
    group.rebuild.held[daemon.name] += weight(own)  # also where it comes again
    group.rebuild.epochs[report.epoch] = epoch
    group.rebuild.reports[report.mid] = daemon, report
    group.rebuild.lost.pop(report.mid, None)
    daemon.reported.add(report.mid)
    if known is None or again:
        _look_anew(group.rebuild)
    consider(step, group)


def _claimed(step: Step, report: m.Report) -> str | None:
    """Another group that the member is of, by the journal or else by an earlier report (R19)."""
    state, group, mid = step.state, report.group, report.mid
    for name in state.inherited:
        if name != group and name in state.used and mid in state.used[name].mids:
            return name
    for other in state.groups.values():
        if other.name != group and other.rebuild is not None and mid in other.rebuild.reports:
            return other.name
    return None


def _too_many(step: Step, daemon: Daemon, report: m.Report) -> str:
    """Which limit the member would go beyond, "" if none: those that hold for who joins."""
    limits = step.limits
    if report.mid in daemon.reported:
        return ""
    if len(report.members) > limits.group_members:
        return f"it reports a group of {len(report.members)}; expected at most {limits.group_members} members"
    if max(len(daemon.members), len(daemon.reported)) >= limits.group_members:
        return f"expected at most {limits.group_members} members of one daemon"
    waiting = sum(len(one.rebuild.reports) for one in step.state.groups.values() if one.rebuild is not None)
    if len(step.state.members) + waiting >= limits.members:
        return f"expected at most {limits.members} members of one master"
    return ""


def _shared(report: m.Report, epoch: Reported) -> m.Report:
    """The report, without what it says like the others: a thousand times a thousand members take memory."""
    said = report.finished
    known = epoch.finished.setdefault((said.committed, len(said.done)), said)
    said = known if known == said else said
    return msgspec.structs.replace(report, members=epoch.report.members, plan=epoch.report.plan, finished=said)


def make_room(step: Step, daemon: Daemon) -> None:
    """Evict a daemon whose reports take too much memory: *daemon*, which has just reported, or the one with most."""
    most, groups = step.limits.report_bytes, list(step.state.groups.values())
    places = [place for group in groups for place in (group.rebuild, group.current.closing) if place is not None]
    of = daemon.name
    if sum(place.held[of] for place in places) <= most // 8:
        if sum(place.held.total() for place in places) <= most:
            return
        held = sum((place.held for place in places), Counter[str]())
        of = max(held, key=held.__getitem__)
    why = f"reports of daemon {of} take more memory than they may; expected at most {format_size(most // 8)} of one"
    for group in groups:
        rebuild, closing = group.rebuild, group.current.closing
        if rebuild is not None and rebuild.held.pop(of, 0):
            for mid in [mid for mid, (one, _) in rebuild.reports.items() if one.name == of]:
                _evict_reporter(step, *rebuild.reports.pop(mid), why)
            for mid in [mid for mid, one in rebuild.lost.items() if (mid, of) in {(n, d) for n, _, d in one.members}]:
                del rebuild.lost[mid]
            for epoch in rebuild.epochs.values():  # others report it, too
                epoch.finished.clear()
            _look_anew(rebuild)
            consider(step, group)
        if closing is not None and closing.held.pop(of, 0):
            for mid in [mid for mid, name in closing.of.items() if name == of]:
                closing.drop(mid)
            out = [member for member in group.members if member.daemon.name == of]
            losses.lose(step, dict.fromkeys(out, why), "evicted", tell=True, cause="nonsense")


def _look_anew(rebuild: Rebuild) -> None:
    """Other members or epochs than before are reported."""
    rebuild.here = 0
    told = {report.epoch for _, report in rebuild.reports.values()}
    for number in [number for number in rebuild.epochs if number not in told]:
        del rebuild.epochs[number]


def _may_have_existed(step: Step, group: Group) -> bool:
    """Whether members of an earlier master may come back to the *group*, as far as this one can know."""
    return bool(group.members) or reserved.held(step, group) or group.name in step.state.used


def _terms(report: m.Report) -> int:
    numbers = report.start_world, report.min_world, report.call_timeout, report.shards
    return epochs.terms(report.members, report.key, numbers, report.base, report.plan)


def _check(step: Step, daemon: Daemon, report: m.Report, epoch: Reported, *, first: bool) -> None:
    used = step.state.used.get(report.group)  # every epoch is there before a member is told of it (R9)
    if used is not None and not step.state.lost_journal and (report.epoch, report.base) > (used.epoch, used.base):
        expected, got = f"epoch {used.epoch} above {used.base}", f"epoch {report.epoch} above {report.base}"
        raise ProtocolError("reports an epoch that no master made", expected=expected, got=got)
    same = used is not None and used.epoch == report.epoch and used.mids == epoch.daemons.keys()
    if used is not None and same and used.terms not in (0, _terms(report)):
        raise ProtocolError("reports another epoch than the journal's", got=f"epoch {report.epoch}")
    if epoch.daemons.get(report.mid) != daemon.name or len(epoch.daemons) < len(epoch.report.members):
        raise ProtocolError("reports for a member that is not its own", got=f"member {report.mid}")
    if first:
        named = [name for _, name, _ in report.members]
        whole = len(set(named)) == len(named) and in_order(named, report.shards)
        if not whole or not planning.possible(report.plan, len(named) // report.shards):
            raise ProtocolError("reports an epoch that no master made", got=f"epoch {report.epoch}")
    elif _terms(epoch.report) != _terms(report):
        raise ProtocolError("reports another epoch than the others", got=f"epoch {report.epoch}")
    finished = report.finished
    close.check(finished)
    seqs = [seq for seq, _, _ in finished.done]
    low, high = min(seqs, default=report.base + 1), max(seqs, default=0)
    bound = finished.committed + counting.window(step)
    small = len(epoch.daemons) // report.shards < report.min_world
    if finished.committed < report.base or low <= report.base:
        raise ProtocolError("reports impossible operations", got=f"operations from {low}, before the epoch")
    if not _WHY_VOID.issuperset(void.error for void in report.voids):
        raise ProtocolError("reports impossible operations", expected=f"void for one of {sorted(_WHY_VOID)}")
    bound = max(bound, step.state.believable) if small else bound
    if max(high, *(void.seq for void in report.voids), 0) > bound:
        raise ProtocolError("reports impossible operations", expected=f"up to {bound}", got=str(high))


def _give_way(step: Step, report: m.Report) -> None:
    """Joiners that were given mids of members that come back, since the journal was lost, get others.

    Those of other groups only where it was: else nobody has to make way for what another group's members say.
    """
    for mid, _, _ in report.members:
        joiner = step.state.members.get(mid)
        own = joiner is not None and joiner.group.name == report.group
        if joiner is not None and not joiner.in_epoch and (own or step.state.lost_journal):
            _rename(step, joiner, take_mid(step))


def _rename(step: Step, joiner: Member, mid: int) -> None:
    del step.state.members[joiner.mid], joiner.daemon.members[joiner.mid]
    joiner.mid = mid
    step.state.members[mid] = joiner.daemon.members[mid] = joiner
    reason = "another id than before, since members of an earlier master came back"
    step.send(joiner.daemon.conn, m.Joined(joiner.group.name, joiner.name, mid, reason))


def synced(step: Step, daemon: Daemon) -> None:
    """The daemon has named all the members that it has: those that it has not are gone."""
    daemon.synced = True
    for group in list(step.state.groups.values()):
        if group.rebuild is not None and daemon.name in _awaits(group.rebuild):
            consider(step, group)


def left(step: Step, daemon: Daemon, name: str, member: str, reason: str) -> None:
    """A member that has reported leaves; *reason* "": in peace."""
    group = step.state.groups.get(name)
    if group is None or group.rebuild is None:
        return
    for mid, (of, report) in list(group.rebuild.reports.items()):
        if of is daemon and (mid, member, daemon.name) in report.members:
            _lose(step, group.rebuild, mid)
            if not reason:
                group.rebuild.epochs[report.epoch].goodbyes.add(mid)
            reserved.stopped(step, name, {mid})
    _look_anew(group.rebuild)
    consider(step, group)


def _lose(step: Step, rebuild: Rebuild, mid: int) -> None:
    _, report = rebuild.reports.pop(mid)
    if len(rebuild.lost) < step.limits.group_members:
        rebuild.lost[mid] = report


def drop(step: Step, daemon: Daemon) -> None:
    """The daemon's connection is over: what it reported counts only against what others report (close.py)."""
    for group in list(step.state.groups.values()):
        if group.rebuild is not None:
            reports = group.rebuild.reports
            for mid in [mid for mid, (of, _) in reports.items() if of is daemon]:
                _lose(step, group.rebuild, mid)
                reserved.heard_last(step, group.name)
            _look_anew(group.rebuild)


# ---- who is there -----------------------------------------------------------------------------------


def absent(group: Group) -> list[str]:
    """Names of members whose reports are waited for."""
    newest = _newest(group)
    here = {*(group.rebuild.reports if group.rebuild is not None else ()), *(joiner.was for joiner in group.joining)}
    return [name for mid, name, _ in newest.members if mid not in here] if newest is not None else ["members"]


def _newest(group: Group) -> m.Report | None:
    """The first report of the newest epoch that is reported."""
    known = group.rebuild.epochs if group.rebuild is not None else {}
    return known[max(known)].report if known else None


def _awaits(rebuild: Rebuild) -> tuple[str, ...]:
    """The daemon that is waited for first, if one is."""
    if not rebuild.epochs:
        return ()
    members = rebuild.epochs[max(rebuild.epochs)].report.members
    return (members[rebuild.here][2],) if rebuild.here < len(members) else ()


def _awaited(step: Step, group: Group, newest: m.Report) -> bool:
    """Whether somebody may still report who knows more, or is a member of the newest epoch."""
    rebuild = group.rebuild
    assert rebuild is not None
    was = {joiner.was for joiner in group.joining}
    while rebuild.here < len(newest.members):  # those before need not be looked at again
        mid, _, name = newest.members[rebuild.here]
        of = step.state.daemons.get(name)
        if mid not in rebuild.reports and mid not in was and (of is None or not of.synced):
            return True
        rebuild.here += 1
    used = step.state.used.get(group.name)
    if used is None or used.epoch <= newest.epoch:
        return False
    return not used.mids <= was.union(*(epoch.daemons for epoch in rebuild.epochs.values()))


def deadline(state: State, rebuild: Rebuild) -> float:
    """When it is decided without those who have not reported: they cannot, while the master hears nobody."""
    return max(rebuild.deadline, state.deaf_until)


def consider(step: Step, group: Group) -> None:
    """Decide, once all have reported or had the time to."""
    assert group.rebuild is not None
    newest = _newest(group)
    if deadline(step.state, group.rebuild) > step.now and (newest is None or _awaited(step, group, newest)):
        return
    rebuild, group.rebuild = group.rebuild, None
    used = step.state.used.get(group.name)
    if newest is not None and used is not None and used.epoch > newest.epoch and not used.mids & rebuild.reports.keys():
        newest = None  # all who report were evicted, and others may have gone on
    if newest is not None:
        _decide(step, group, rebuild, newest)
        return
    for daemon, report in rebuild.reports.values():
        _evict_reporter(step, daemon, report, "the group went on without it")
    step.touch(group)


# ---- the decision -----------------------------------------------------------------------------------


def _decide(step: Step, group: Group, rebuild: Rebuild, newest: m.Report) -> None:
    reports = rebuild.reports
    top = {mid: report for mid, (_, report) in reports.items() if report.epoch == newest.epoch}
    stated = newest.start_world, newest.min_world, newest.call_timeout, newest.shards
    if (group.start_world, group.min_world, group.call_timeout, group.shards) != stated:
        for joiner in list(group.joining):
            numbers = "start_world={}, min_world={}, call_timeout={:g}, shards={}".format(*stated)
            probing.refuse(step, joiner, f"the group that came back has {numbers}")
    (group.start_world, group.min_world, group.call_timeout, group.shards), group.key = stated, newest.key
    group.epoch = newest.epoch
    used = step.state.used.get(group.name)
    group.used = max(step.state.floor, used.epoch if used is not None else 0)
    votes, unheard = newest.plan.collectors == "members", used is not None and used.epoch > newest.epoch
    group.committed = newest.base
    named = Counter(void.seq for report in top.values() for void in report.voids)
    voids = {void.seq: void for report in top.values() for void in report.voids if 2 * named[void.seq] > len(top)}
    group.voids = {seq: void for seq, void in voids.items() if seq > newest.base}
    group.p2p_count = max(report.heard for _, report in reports.values())
    # daemons tell again what they measured: nothing new is known
    group.planned = Planned(newest.plan, seen_version=step.state.measures.version, seen_at=step.now)
    _tell_outsiders(step, rebuild, newest)
    put_out = _put_out_by(used, reports) if votes and unheard and used is not None else {}
    top = {mid: report for mid, report in top.items() if mid not in put_out}
    group.members = _members(step, group, rebuild, newest)
    back = {member.name for member in group.members}
    for joiner in list(group.joining):
        if joiner.name in back:
            probing.refuse(step, joiner, "that name is taken by a member that came back; choose another name")
    moving = _settle_p2p(step, group, rebuild)
    bound = m.MOST
    columns = {mid: at % newest.shards for at, (mid, _, _) in enumerate(newest.members)}
    if used is not None and unheard and used.base >= newest.base:
        above = sum(report.finished.committed > used.base for report in top.values())
        # Those that it left out were told that no more was committed. If most say more, it is of another history.
        bound = used.base if 2 * above <= len(top) else m.MOST
    if len(columns) // newest.shards < newest.min_world:  # nothing but what a member was told by name (R1, R5)
        bound = min(bound, max(report.finished.committed for report in top.values()))
    lost = {mid: one for mid, one in rebuild.lost.items() if one.epoch == newest.epoch}
    lost = {mid: one for mid, one in lost.items() if used is None or not unheard or mid in used.mids}
    closing = Closing(step.now, step.now + step.limits.heartbeat_timeout, columns)
    for mid, report in (top | lost).items():
        closing.reports[mid] = _below(report.finished, bound)
    for member in group.members:  # who had not heard of the epoch: nothing was committed in it
        nothing = msgspec.structs.replace(_NOTHING, committed=group.committed)
        closing.reports.setdefault(member.mid, nothing)
    if len(top) == len(newest.members) and not moving and not any(report.aborted for report in top.values()):
        found = epochs.verdict(group, closing)
        agreed = not found.out and not found.tied
        if (agreed or (votes and not unheard)) and (not votes or len(top) <= step.limits.voters):
            group.committed = found.sure if votes else found.upto
            _go_on(step, group, newest, {mid: report.finished for mid, report in top.items()}, votes=votes)
            claim = max(report.committed for report in closing.reports.values())
            if claim > found.sure:  # members commit on while they report: the others are to say as much soon
                group.current.claim = claim, step.now + step.limits.heartbeat_timeout
                step.alarm(group.current.claim[1])
            return
    if used is not None and unheard:  # the last master may have told it, to those who are not here
        told_before = {seq: m.Void(seq, error, _VOID_BEFORE, {}) for seq, error in used.voids.items()}
        group.voids |= {seq: void for seq, void in told_before.items() if seq > max(used.base, newest.base)}
    for ends in newest.plan.avoid:
        group.bad_pairs[pair(*ends)] = step.now + BAD_PAIR_SECONDS
    _tell_updates(step, group, rebuild, epochs.verdict(group, closing).sure)
    present = {member.mid for member in group.members}
    gone = {mid: name for mid, name, _ in newest.members if mid not in present}
    group.goodbyes = [name for mid, name in gone.items() if mid in rebuild.epochs[newest.epoch].goodbyes]
    no_journal = used is None or used.epoch < newest.epoch  # or a part of it: this epoch was told, so it was in it
    missing = f"; {', '.join(list(gone.values())[:16])} did not report" if gone else "; not all knew the same epoch"
    reason = f"the master was restarted{missing if gone or len(top) < len(present) else ''}"
    late = f"did not report within {step.limits.rejoin_grace:g} s after the master's restart"
    group.begin(newest.reason, votes=True, window=counting.window(step))
    group.current.out = [
        Out(mid, why, daemon, column=columns[mid])
        for mid, name in gone.items()
        for daemon, why in [put_out.get(mid, (None, f"{name} {late}"))]
    ]
    whole = set(group.whole(group.members))
    torn = {one: f"other shards of its island {late}" for one in group.members if one not in whole}
    losses.lose(step, torn, "evicted", tell=True, cause="silent")
    alike = all(one.mid in top for one in group.members)
    if votes and not unheard and alike:  # members commit on until they are told to stop (C6)
        closing = losses.stop(step, group, reason)
        closing.restarted = True
    else:
        group.current.closing, closing.told = closing, True
        closing.of = {mid: rebuild.epochs[newest.epoch].daemons[mid] for mid in closing.reports}
    closing.doubted = no_journal and bool(gone)  # who reports may have been evicted by those who do not
    losses.end_epoch(step, group, reason)


def _below(report: m.EpochReport, bound: int) -> m.EpochReport:
    """The *report* without what lies above *bound*: nothing there has happened."""
    if bound == m.MOST:
        return report
    return m.EpochReport(min(report.committed, bound), [one for one in report.done if one[0] <= bound], [], [])


def _put_out_by(used: Used, reports: dict[int, tuple[Daemon, m.Report]]) -> dict[int, tuple[Daemon, str]]:
    """Where members commit: who the newest epoch that was written down left out may lack what it takes for committed.

    Taken out of the *reports*.
    """
    why = "evicted by the master before this one"
    return {mid: (reports.pop(mid)[0], why) for mid in list(reports) if mid not in used.mids}


def _members(step: Step, group: Group, rebuild: Rebuild, newest: m.Report) -> list[Member]:
    """Members of the newest epoch that are here, in its order; joiners too, that have not heard of it yet."""
    members = []
    waiting = {joiner.was: joiner for joiner in group.joining if joiner.was}
    taken = step.state.members.keys()
    for mid, name, daemon_name in newest.members:
        joiner = waiting.get(mid)
        if mid in rebuild.reports:
            member = Member(mid, name, rebuild.reports[mid][0], group, done_upto=group.committed)
            step.state.members[mid] = member.daemon.members[mid] = member
        elif joiner is not None and (joiner.name, joiner.daemon.name) == (name, daemon_name) and mid not in taken:
            group.joining.remove(joiner)
            _rename(step, joiner, mid)
            member = joiner
            member.probes.clear()
        else:
            continue
        member.in_epoch = True
        members.append(member)
    return members


def _tell_outsiders(step: Step, rebuild: Rebuild, newest: m.Report) -> None:
    """Members of earlier epochs that the newest one left out."""
    inside = {mid for mid, _, _ in newest.members}
    for mid, (daemon, report) in list(rebuild.reports.items()):
        if mid not in inside:
            # So nothing was committed above what it began with. Another group that formed since has no member of it.
            follows = report.epoch + 1 == newest.epoch and any(one in inside for one, _, _ in report.members)
            unknown_upto = newest.base if follows else m.MOST  # by an earlier restart, perhaps, to which it was late
            _evict_reporter(step, daemon, report, f"evicted before epoch {newest.epoch}", unknown_upto)
            del rebuild.reports[mid]


def _evict_reporter(step: Step, daemon: Daemon, report: m.Report, why: str, unknown_upto: int = m.MOST) -> None:
    step.send(daemon.conn, m.Evicted(report.group, report.mid, why, report.finished.committed, unknown_upto))
    step.record(None, "evicted", f"member {report.mid} of daemon {daemon.name}, group {report.group}: {why}")


def _tell_updates(step: Step, group: Group, rebuild: Rebuild, sure: int) -> None:
    """Tell members that stand at an update_membership how it has ended for others (R5), as most of these say.

    One above *sure* is not known to be committed: nobody is told so on one member's word. Nor where as many say this as
    that.
    """
    known = [report.updated for _, report in rebuild.reports.values() if report.updated is not None]
    told = Counter((one.seq, one.epoch, tuple(one.members)) for one in known if one.seq <= sure)
    best = {one[0]: one for one in sorted(told, key=told.__getitem__)}
    tied = {one[0] for one in told if one != best[one[0]] and told[one] == told[best[one[0]]]}
    for mid, (daemon, report) in rebuild.reports.items():
        said = report.finished
        stands = [seq for seq, *result in said.done if seq > said.committed and (*result,) == UPDATE]
        for seq, epoch, members in [best[seq] for seq in stands if seq in best and seq not in tied]:
            step.send(daemon.conn, m.Updated(group.name, mid, m.UpdateOutcome(seq, epoch, list(members))))


def _go_on(step: Step, group: Group, newest: m.Report, reports: dict[int, m.EpochReport], *, votes: bool) -> None:
    """Everyone is here and knows the same: the epoch was never interrupted."""
    group.begin(newest.reason, votes=votes, window=counting.window(step))
    for ends in newest.plan.avoid:
        group.bad_pairs[pair(*ends)] = step.now + BAD_PAIR_SECONDS
    epochs.persist(step, group, _terms(newest))
    for member in group.members:
        told = m.Resumed(group.name, member.mid, group.epoch, step.state.term)
        step.send(member.daemon.conn, told)
    group.voids = {seq: void for seq, void in group.voids.items() if seq > group.committed}
    if any(report.committed < group.committed for report in reports.values()):
        step.broadcast(group, m.Commit(group.name, group.epoch, group.committed, step.state.term))
    text = f"the master was restarted; epoch {group.epoch} goes on with {names(group.members)}"
    step.record(group, "resumed", text)
    probing.ensure_probes(step, group)
    for mid, report in reports.items() if not votes else ():  # there members say again what the master collects
        last = counting.window_end(step, group)
        done = sorted(one for one in report.done if group.committed < one[0] <= last)
        for one in done[: counting.window(step)]:  # nobody honest has more; what is left out is as if it were not said
            counting.vote(step, step.state.members[mid], m.Vote(group.name, mid, group.epoch, *one))
    step.touch(group)


def judge_claim(step: Step, group: Group) -> None:
    """End the epoch where not all came as far as one had said at the restart: who said too much is found so (C3)."""
    claim, until = group.current.claim
    if until > step.now:
        return
    group.current.claim = 0, inf
    behind = [member for member in group.members if group.current.tally.claims[member.mid] < claim]
    if behind and not group.stopped:
        told = f"operation {claim} was said to be committed when the master was restarted"
        losses.end_epoch(step, group, f"{told}; {names(behind)} did not come that far")


# ---- sends and recvs --------------------------------------------------------------------------------


def _settle_p2p(step: Step, group: Group, rebuild: Rebuild) -> bool:
    """Tell what had come of sends and recvs where only one half has heard. Returns whether others are under way."""
    known, moving = {mid: _Halves.of(report) for mid, (_, report) in rebuild.reports.items()}, False
    for mid, (daemon, report) in rebuild.reports.items():
        for half in report.p2p:
            error, digest = _outcome(mid, half, known.get(half.other))
            if error is None:
                moving = moving or half.moving
                continue
            told = m.Settled(group.name, mid, report.epoch, half.number, digest, error, _TEXTS[error], {})
            step.send(daemon.conn, told)
    return moving


class _Halves(NamedTuple):
    """What a report says of sends and recvs, to be looked up: a report has thousands."""

    failed: dict[tuple[int, int], str]  # by the other's mid and number
    open: set[int]  # orders
    heard: int
    settled: dict[int, int]  # digests by order

    @classmethod
    def of(cls, report: m.Report) -> _Halves:
        failed = {(to, number): how for to, number, how in report.failed}
        return cls(failed, {half.order for half in report.p2p}, report.heard, dict(report.settled))


def _outcome(mid: int, half: m.OpenP2P, other: _Halves | None) -> tuple[str | None, int]:
    """An error or "" with a digest where the pair has ended for the *other* half; (None, 0) if it has not."""
    error = other.failed.get((mid, half.number), "") if other is not None else ""
    if error and error in _TEXTS:
        return error, 0
    if not half.done:
        return None, 0
    if other is None:
        return "OutcomeUnknown", 0
    if half.order in other.open or other.heard < half.order:
        return None, 0
    digest = other.settled.get(half.order)
    return ("OutcomeUnknown", 0) if digest is None else ("", digest)
