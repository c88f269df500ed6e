"""The life of a group: what is decided about its epochs (docs/protocol.md, R1 to R5, C1 to C11). Pure.

What members say of operations (counting.py) and who is out (losses.py) are facts; settle() decides, in each step.
Whatever was collected in an epoch (votes, calls, complaints) is dropped with it.

Who is lost while an epoch closes is not waited for. What it had reported counts only where somebody says that an
operation is committed and another report is against that: then all reports are counted (wancoll/commit/close.py).
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable
from dataclasses import replace
from itertools import islice
from math import inf
from typing import Any

import msgspec
from msgspec.structs import replace as structs_replace

from wancoll.commit import close
from wancoll.errors import ProtocolError
from wancoll.limits import DEFAULT, counted, keep_newest
from wancoll.wire import messages as m
from wancoll.wire.epochs import brief
from wancoll_master.core import counting, losses, reserved
from wancoll_master.core.paths import measuring, probing, ways
from wancoll_master.core.ready import Announce, Former, Used
from wancoll_master.core.state import Closing, Group, Member, Step, clip, names, several, weight
from wancoll_master.plan import planning
from wancoll_master.plan.planning import Planned, Proposal, Request, sites_of

_DIGESTS_TOLD = 2048
DOUBTED = "it was finished, the master's journal is lost, and members that did not come back may know more of it"
TIED = "members contradict each other in whether it is committed, as many on one side as on the other"


def settle(step: Step) -> None:
    """Decide what the facts of this step call for, in each group that they touch: one decision at a time."""
    while step.touched:
        name = step.touched.popitem()[0]
        while (group := step.state.groups.get(name)) is not None and _decide(step, group):
            pass


def _decide(step: Step, group: Group) -> bool:
    """Take the first decision that is due; False: none is."""
    if group.rebuild is not None:
        return False  # what its members report comes first
    if not group.members:
        return _end_group(step, group) if group.current.conns else _form(step, group)
    if group.current.ends:
        return _close(step, group) if group.current.votes else _go_on(step, group)
    return not group.stopped and (counting.commit_counted(step, group) or _pass_update(step, group))


def frozen(step: Step, member: Member, message: m.Frozen) -> None:
    """A member has stopped, and says what it has finished."""
    group = member.group
    closing = group.current.closing
    if closing is None:
        return
    report = message.finished
    close.check(report)
    top = max([*(seq for seq, _, _ in report.done), *report.collected, report.committed])
    if top > counting.window_end(step, group):
        raise ProtocolError("reports impossible operations", got=f"up to {top}")
    closing.held[member.daemon.name] += weight(report)
    closing.reports[member.mid], closing.of[member.mid] = report, member.daemon.name
    step.touch(group)


def _close(step: Step, group: Group) -> bool:
    """Once all who go on have stopped: what all of them have finished is committed, nothing else has happened (C3)."""
    current = group.current
    closing = losses.stop(step, group, current.ends[0])
    if not all(one.mid in closing.reports for one in group.members):
        return False
    known, members = group.committed, {member.mid: member for member in group.members}
    found = verdict(group, closing)
    closing.sure, closing.results = found.sure, closing.results + found.results
    if found.out:  # below that their reports have counted, and what was found stands: all of it is sure
        for mid in found.out:
            closing.drop(mid)
        losses.lose(step, {members[mid]: why for mid, why in found.out.items()}, "evicted", tell=True, cause="nonsense")
        return True
    contradicted = max(closing.claimed, *(one.committed for one in closing.reports.values())) > found.upto
    unknown_upto = m.MOST if contradicted or closing.doubted else found.upto
    digests = [] if closing.doubted else closing.results
    upto = found.sure if closing.doubted else found.upto
    if found.tied:
        current.voids |= tied(step, found.tied, group.voids)
        current.ends.append(f"operation {found.tied[0]}: {TIED}")
    if closing.doubted:
        group.voids |= unknown(seq for seq, *_ in found.results if seq > found.sure)
    if upto > group.committed:
        counting.set_committed(step, group, upto)
    _tell_out(step, group, known, {"unknown_upto": unknown_upto, "digests": digests})
    current.votes = False  # all is known of it
    closing.passed = not closing.told and (closing.update <= found.upto or bool(found.tied))
    if not closing.passed and not closing.told:
        counting.set_committed(step, group, closing.update)
        able = group.whole(joiner for joiner in closing.able if joiner in group.joining)
        reason = _let_in(group, able, closing.update) if able else several(current.ends)
        _next_epoch(step, group, reason, free=True)
    return True


def _go_on(step: Step, group: Group) -> bool:
    """The next epoch begins, and says what is void, as long as that does not become too much (R14)."""
    current, reason = group.current, several(group.current.ends)
    voids = {seq: one for seq, one in current.voids.items() if seq > group.committed}
    group.voids.update(voids)
    if not voids or len(group.voids) <= step.limits.voids:
        _next_epoch(step, group, reason)
        return True
    first, last = min(group.voids), max(group.voids)
    why = (
        f"{len(group.voids)} operations from {first} to {last} were given up and none of them was committed; expected "
        f"at most {step.limits.voids} in a row; the last: {reason}; see that all members make the same calls"
    )
    losses.lose(step, dict.fromkeys(group.members, clip(why)), "evicted", tell=True)
    return True


def verdict(group: Group, closing: Closing) -> close.EpochOutcome:
    """What has happened in the group's epoch, by the reports of its members and of those who are lost meanwhile."""
    members = [member.mid for member in group.members]
    doubtful = {seq for mid in members for seq in closing.reports[mid].divergent}
    reports = {(id(report), closing.columns[mid]): report for mid, report in closing.reports.items()}
    words = {key: close.word(report, key[1], restarted=closing.restarted) for key, report in reports.items()}
    said = {mid: words[id(report), closing.columns[mid]] for mid, report in closing.reports.items()}
    base = max(group.committed, closing.sure)
    return close.close_epoch(said, members, base, doubtful.__contains__, group.voids.keys())


def unknown(seqs: Iterable[int], why: str = DOUBTED) -> dict[int, m.Void]:
    """Nobody can say what became of these."""
    return {seq: m.Void(seq, "OutcomeUnknown", why, {}) for seq in seqs}


def tied(step: Step, seqs: range, voids: Collection[int]) -> dict[int, m.Void]:
    """Void, since as many say that they are committed as say the contrary. Nobody honest lacks more."""
    most = step.limits.ops_in_flight + step.limits.zero_contributions
    return unknown(islice((seq for seq in seqs if seq not in voids), most), TIED)


def _tell_out(step: Step, group: Group, known: int, fate: dict[str, Any]) -> None:
    """Tell members that are out what became of their calls (C5); up to *known* they have committed them."""
    results = fate.pop("digests", [])
    for out in group.current.out:
        digests = [tuple(one) for *one, column in results if column == out.column][-_DIGESTS_TOLD:]
        upto = max(known, out.committed)
        evicted = m.Evicted(group.name, out.mid, clip(out.why), upto, epoch=group.epoch, digests=digests, **fate)
        if out.daemon is None:
            losses.remember(step, evicted)
            continue
        losses.keep_fate(step, out.daemon, evicted)
        here = step.state.daemons.get(out.daemon.name)  # perhaps over another connection by now
        if here is not None and here.incarnation == out.daemon.incarnation:
            step.send(here.conn, evicted)
    group.current.out.clear()


def _next_epoch(step: Step, group: Group, reason: str, *, free: bool = False) -> None:
    """Begin the group's next epoch with the members it has.

    *free*: nothing is void and nobody is in a hurry, so the plan may change what links are made with.
    """
    group.epoch = max(group.epoch, group.used) + 1
    _forget_bad_pairs(step, group)
    passed = group.current.closing is not None and group.current.closing.passed
    plan = _plan(step, group, free=free)
    group.begin(reason, votes=plan.collectors == "members", window=counting.window(step))
    members = group.members
    places = [(one.mid, one.name, one.daemon.name) for one in members]
    numbers = group.start_world, group.min_world, group.call_timeout, group.shards
    persist(step, group, terms(places, group.key, numbers, group.committed, plan))
    epoch = m.Epoch(
        group=group.name,
        to=0,
        term=step.state.term,
        epoch=group.epoch,
        members=[
            m.MemberInfo(one.mid, one.name, one.daemon.name, one.daemon.addresses, site, one.daemon.key)
            for one, site in zip(members, sites_of([one.daemon for one in members]), strict=True)
        ],
        plan=plan,
        key=group.key,
        min_world=group.min_world,
        committed_upto=group.committed,
        voids=list(group.voids.values()),
        reason=group.current.reason,
        passed=passed,
        goodbyes=group.goodbyes,
        shards=group.shards,
    )
    group.goodbyes = []
    to = tuple((member.daemon.conn, member.mid) for member in members)
    step.ready.messages.append(Announce(to, epoch, group.told))
    group.told = epoch
    group.voids = {seq: brief(void) for seq, void in group.voids.items()}  # texts are sent once
    step.record(group, "epoch", f"{group.current.reason}; {counted(len(members), 'member')}: {names(members)}")
    probing.ensure_probes(step, group)
    measuring.ask_bandwidths(step, group)


def _plan(step: Step, group: Group, *, free: bool) -> m.Plan:
    """Put the members into order, and take the epoch's plan."""
    found = _propose(step, group, group.planned, free=free)
    for line in found.changes:
        step.record(group, "plan", line)
    places = {member.mid: at for at, member in enumerate(group.members)}
    starts = [places[mid] for mid in found.order]
    group.members = [member for at in starts for member in group.members[at : at + group.shards]]
    before = group.planned.plan if group.planned is not None else None
    plan = structs_replace(found.planned.plan, ways=ways.of(step, group.members, before))
    group.planned = replace(found.planned, plan=plan)
    return structs_replace(plan, collectors="members" if _may_vote(step, group) else "master")


def _may_vote(step: Step, group: Group) -> bool:
    """Whether members collect votes themselves: all can talk to all, and they are not too many for that."""
    return len(group.members) <= step.limits.voters and not group.small and not group.bad_pairs


def _better_plan(step: Step, group: Group) -> str:
    """What a new epoch of the same members would make better; "" if nothing much."""
    measures, before = step.state.measures, group.planned
    if before is None or not planning.due(before, measures, step.now) or planning.is_local(group.members):
        return ""
    before = replace(before, looks=before.looks + 1)
    changes = _propose(step, group, before, free=True).changes
    replans = before.replans + bool(changes)
    group.planned = replace(before, seen_version=measures.version, seen_at=step.now, replans=replans)
    return "; ".join(changes)


def _propose(step: Step, group: Group, before: Planned | None, *, free: bool) -> Proposal:
    """The plan is made for the first column; pairs of another one are those of the same islands there."""
    members, apart = group.members[:: group.shards], group.apart(step.now)
    found = step.planner(Request(step.state.measures, members, before, list(apart), step.now, free))
    plan = found.planned.plan
    avoid = [ends for first in plan.avoid for ends in apart[first]][: planning.MAX_AVOID]
    return replace(found, planned=replace(found.planned, plan=structs_replace(plan, avoid=avoid)))


def persist(step: Step, group: Group, terms: int) -> None:
    """Have the group's epoch written down before anybody hears of it; *terms*: see Used."""
    state = step.state
    state.highest_epoch = max(state.highest_epoch, group.epoch)
    voids = {seq: void.error for seq, void in group.voids.items()}
    alone = reserved.alone(step, max(one.daemon.master_grace for one in group.members)) if group.current.votes else 0
    former = {one.mid: Former(one.name, one.daemon.incarnation) for one in group.members[: DEFAULT.voters]}
    mids = frozenset(member.mid for member in group.members)
    used = Used(group.epoch, mids, group.committed, voids, alone, former, terms)
    state.inherited.discard(group.name)
    state.alone.pop(group.name, None)
    step.persist().groups[group.name] = used
    keep_newest(state.used, group.name, used, step.limits.groups_known)


def terms(
    members: list[tuple[int, str, str]], key: bytes, numbers: tuple[int, int, float, int], base: int, plan: m.Plan
) -> int:
    """Hash of what all members of an epoch report alike: 56 bits, of which a liar finds no second text."""
    text = msgspec.msgpack.encode((members, key, numbers, base, plan))
    return int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "big")


def _form(step: Step, group: Group) -> bool:
    """The group's first epoch, once as many have joined as it takes. A group of nobody is forgotten."""
    if not group.joining:
        step.state.floor = max(step.state.floor, group.epoch)  # later groups' epochs go on above its own
        del step.state.groups[group.name]
        return False
    members = group.whole(group.joining)  # one that has not arrived whole waits
    if reserved.held(step, group) or len(members) // group.shards < reserved.wanted(step, group):
        return False
    if not probing.settled(step, group) or measuring.waits_until(step, group) > step.now:
        return False
    if any(joiner.daemon.away for joiner in members):
        return False  # it comes back or is evicted, soon
    if measuring.ask_uplinks(step, group):
        return False
    taken = set(members)
    group.members, group.joining = members, [joiner for joiner in group.joining if joiner not in taken]
    step.state.alone = {name: until for name, until in step.state.alone.items() if until > step.now}
    for member in group.members:
        member.in_epoch = True
        member.probes.clear()
    _next_epoch(step, group, f"the group has formed: {names(group.members)}", free=True)
    return True


def _forget_bad_pairs(step: Step, group: Group) -> None:
    present = {member.mid: member for member in group.members}
    group.bad_pairs = {
        ends: until
        for ends, until in group.bad_pairs.items()
        if until > step.now and ends[0] in present and ends[1] in present
    }
    group.losses = {key: n for key, n in group.losses.items() if key[0] in present and key[1] in present}


def _end_group(step: Step, group: Group) -> bool:
    """Nobody is left who knows what was done, or could ask what was void: who waits to join may form it anew."""
    _nobody_left(step, group)
    _tell_out(step, group, group.committed, {"unknown_upto": m.MOST})
    if used := step.state.used.get(group.name):
        step.state.used[group.name] = replace(used, voids={})
    step.state.groups[group.name] = group.afresh()
    return True


def _nobody_left(step: Step, group: Group) -> None:
    """Keep the name of a group whose last member was lost: members that never confirmed stopping may commit (C8)."""
    name, out, used = group.name, group.current.out, step.state.used.get(group.name)
    if (used is None or used.epoch < group.epoch) and out:  # the journal was lost
        former = {one.mid: Former(f"member {one.mid}", one.daemon.incarnation if one.daemon else 0) for one in out}
        used = Used(
            group.epoch, frozenset(former), group.committed, {}, reserved.alone(step, step.limits.master_grace), former
        )
    if used is None:
        return
    step.state.used[name] = step.persist().groups[name] = used  # with who has stopped since it began
    if used.former and used.alone:
        heard = [one.daemon.heard_at if one.daemon else step.now for one in out]
        until = reserved.alone_until(step, name, max(heard, default=step.now))
        keep_newest(step.state.alone, name, until, step.limits.groups_known)
        step.alarm(until)


def _pass_update(step: Step, group: Group) -> bool:
    """If all members stand at an update_membership: admit joiners, change the plan, let the members pass, or wait."""
    seq = _update_at_hand(group)
    if seq is None:
        return False
    here = group.whole(group.joining)
    able = group.whole(joiner for joiner in here if joiner.reachable and not joiner.daemon.away)
    if len(able) < len(here) and not group.current.waited:
        if group.current.hold_until == inf:
            group.current.hold_until = step.now + step.limits.probe_timeout + step.limits.heartbeat_interval
            step.alarm(group.current.hold_until)
        return False
    if (len(group.members) + len(able)) // group.shards < group.min_world:
        return False  # held until enough joiners are there
    if able and measuring.waits_until(step, group) > step.now:
        return False  # a tick follows
    reason = f"{names(able)} can join" if able else _better_plan(step, group)
    if not reason:
        counting.commit(step, group, seq)
    elif group.current.votes:
        _close_at_update(step, group, seq, able, reason if able else f"plan: {reason}")
    else:
        counting.set_committed(step, group, seq)
        _next_epoch(step, group, _let_in(group, able, seq) if able else f"plan: {reason}", free=True)
    return True


def _update_at_hand(group: Group) -> int | None:
    """The update_membership that all members have posted, with nothing open below it."""
    tally = group.current.tally
    if group.small:  # members have failed everything below by themselves
        return min((seq for seq, count in tally.open.items() if count.update and tally.complete(seq)), default=None)
    seq = group.first_open
    return seq if tally.complete(seq) and tally.open[seq].update else None


def _close_at_update(step: Step, group: Group, seq: int, able: list[Member], reason: str) -> None:
    """Where members commit they may be passing it without the master: who joins is known once all have stopped."""
    closing = losses.stop(step, group, reason)
    closing.update, closing.able = seq, able
    group.current.ends.append(reason)


def _let_in(group: Group, joiners: list[Member], seq: int) -> str:
    """They are members of the epoch that begins; its reason."""
    group.joining = [joiner for joiner in group.joining if joiner not in joiners]
    for joiner in joiners:
        joiner.in_epoch = True
        joiner.done_upto = seq
        joiner.probes.clear()
    group.members = group.members + joiners
    return f"admitted {names(joiners)}"
