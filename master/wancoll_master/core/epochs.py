"""The life of a group: epochs, commits, admissions and voids (docs/protocol.md, R1 to R5). Pure.

Functions that handle what was said record facts, of which end_epoch() is the weightiest; settle() decides, once in each
step. Whatever was collected in an epoch (Done, calls, complaints) is dropped with it. Where the master commits, it
knows what has happened, and the next epoch begins at once. Where members commit (docs/protocol.md,
C1 to C10), they are told to stop, and say what they have finished; from that follows what has happened, and only then
the next epoch is written down, and told.

    an epoch where members commit   from                                     until
    runs                            it begins                                end_epoch(), or calls are asked for
    closing                         Abort: each member freezes and reports   all who go on have reported
    decided                         what all of them have is committed       written down, then told: the next one runs

Who is lost while it closes is not waited for. What it had reported counts only where somebody says that an operation is
committed and another report is against that: then all reports are counted (borne.py).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from itertools import islice, zip_longest
from math import ceil, inf
from typing import Any

from msgspec.structs import replace as structs_replace

from wancoll.errors import ProtocolError
from wancoll.limits import WITHOUT_END, counted, few
from wancoll.wire import messages as m
from wancoll.wire.epochs import brief
from wancoll_master.core import borne, graces, measuring, probing
from wancoll_master.core.ready import CAUSES, Announce, Former, Used
from wancoll_master.core.state import (
    Asking,
    Closing,
    Daemon,
    Group,
    Member,
    Out,
    Pending,
    Slow,
    State,
    Step,
    clip,
    names,
    several,
    weight,
)
from wancoll_master.plan import planning
from wancoll_master.plan.planning import Planned, Proposal, Request

WINDOW_FACTOR = 4  # times ops_in_flight: how far above what is committed or void a member may be
_CALL_CHARS = 200
_CALLS_TOLD = 32  # of a mismatch
_VOID_CHARS, _FEW_VOIDS = 300, 16
_VOID_CHARS_OF_MANY = 100
_VOTERS = 32  # members that may commit among themselves: each tells all others of each operation
_DIGESTS_TOLD = 2048
DOUBTED = "it was finished, the master's journal is lost, and members that did not come back may know more of it"
TIED = "members contradict each other in whether it is committed, as many on one side as on the other"

# ---- epochs -----------------------------------------------------------------------------------------


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
    return not group.stopped and (_commit_counted(step, group) or _pass_update(step, group))


def end_epoch(step: Step, group: Group, reason: str, voids: Collection[m.Void] = ()) -> None:
    """The epoch has to end: what is not committed has not happened and runs again (R2), but for *voids* (R14)."""
    current = group.current
    current.asking = None
    if current.closing is not None:
        current.closing.update, current.closing.able = 0, []  # it is called again in the next epoch
    current.voids.update({one.seq: one for one in voids})
    current.ends.append(clip(reason))
    step.touch(group)


def _stop(step: Step, group: Group, reason: str, ask: int = 0) -> Closing:
    """Where members commit: let them freeze, once."""
    if group.current.closing is None:
        until = step.now + step.limits.heartbeat_timeout
        group.current.closing = Closing(step.now, until)
        step.alarm(until)
        step.broadcast(group, m.Abort(group.name, group.epoch, ask, clip(reason)))
    return group.current.closing


def close_after_restart(step: Step, group: Group, reason: str, out: list[Out], *, doubted: bool) -> None:
    """Members commit, and not all of them are here: what has happened follows from what the others have (C6)."""
    closing = _stop(step, group, reason)
    closing.restarted, closing.doubted = True, doubted
    group.current.out = out
    end_epoch(step, group, reason)


def frozen(step: Step, member: Member, message: m.Frozen) -> None:
    """A member has stopped, and says what it has finished."""
    group = member.group
    closing = group.current.closing
    if closing is None:
        return
    seqs = [seq for seq, _, _ in message.done + message.told] + message.updates
    if len(set(seqs)) < len(seqs) or max([*seqs, *message.alone, message.committed_upto]) > window_end(step, group):
        raise ProtocolError("reports impossible operations", got=f"up to {max(seqs, default=0)}, of them some twice")
    closing.held[member.daemon.name] += weight(message)
    closing.reports[member.mid], closing.of[member.mid] = message, member.daemon.name
    step.touch(group)


def differs(step: Step, member: Member, message: m.Differs) -> None:
    """A member has another result than another one: nobody commits that (R13)."""
    group, seq = member.group, message.seq
    if group.stopped or not group.current.votes or seq <= group.committed or seq in group.voids:
        return
    check_window(step, member, seq)
    other = step.state.members.get(message.other)
    whose = other.name if other is not None and other.group is group else f"member {message.other}"
    told = f"{message.digest:016x} on {member.name}; {message.theirs:016x} on {whose}"
    _try_again(step, group, seq, "digest", clip(f"results of operation {seq} differ: {told}"))


def written(step: Step, member: Member, message: m.Written) -> None:
    """A member's client changes the input of a call that runs: the others go on without it (R13).

    Its own daemon says so. On another member's word for it nobody is out.
    """
    why = f"the tensor was written to during the call: {message.call}; wait for a call before its tensor is used again"
    lose(step, {member: clip(why)}, "evicted", tell=True, cause="trainer")


def _close(step: Step, group: Group) -> bool:
    """Once all who go on have stopped: what all of them have finished is committed, nothing else has happened (C3)."""
    current = group.current
    closing = _stop(step, group, current.ends[0])
    if not all(one.mid in closing.reports for one in group.members):
        return False
    known, members = group.committed, {member.mid: member for member in group.members}
    doubtful = {seq for mid in members for seq in closing.reports[mid].apart}
    words, base = _words(closing, members), max(known, closing.sure)
    found = borne.judge(words, members.keys(), base, doubtful.__contains__, group.voids.keys())
    closing.sure, closing.results = found.sure, closing.results + found.results
    if found.out:  # below that their reports have counted, and what was found stands
        closing.results = [one for one in closing.results if one[0] <= found.sure]
        for mid in found.out:
            closing.drop(mid)
        lose(step, {members[mid]: why for mid, why in found.out.items()}, "evicted", tell=True, cause="nonsense")
        return True
    contradicted = max(closing.claimed, *(one.committed_upto for one in closing.reports.values())) > found.upto
    unknown_upto = m.MOST if contradicted or closing.doubted else found.upto
    digests = [] if closing.doubted else closing.results[-_DIGESTS_TOLD:]
    upto = found.sure if closing.doubted else found.upto
    if found.tied:
        current.voids |= tied(step, found.tied, group.voids)
        current.ends.append(f"operation {found.tied[0]}: {TIED}")
    if closing.doubted:
        group.voids |= unknown(seq for seq, _, _ in found.results if seq > found.sure)
    if upto > group.committed:
        _set_committed(step, group, upto)
    _tell_out(step, group, known, {"unknown_upto": unknown_upto, "digests": digests})
    current.votes = False  # all is known of it
    closing.passed = closing.update <= found.upto or bool(found.tied)
    if not closing.passed:
        _set_committed(step, group, closing.update)
        able = [joiner for joiner in closing.able if joiner in group.joining]
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
    lose(step, dict.fromkeys(group.members, clip(why)), "evicted", tell=True)
    return True


def _words(closing: Closing, members: Collection[int]) -> dict[int, borne.Word]:
    """What all who have reported say, those who are lost meanwhile too."""
    passed = set[int]()
    if closing.restarted:  # an earlier master may have committed those at which all stood; C11 is another way
        told = [{*closing.reports[mid].updates} for mid in members]
        passed = set[int]().union(*told).intersection(*told)
    return {
        mid: borne.word(
            one.committed_upto, one.done, one.told, updates=[*one.updates, *one.alone],
            only_claimed={
                *(() if closing.restarted else (seq for seq, _, _ in one.told)),
                *(seq for seq in one.updates if seq not in passed and seq not in one.alone),
            },
        )
        for mid, one in closing.reports.items()
    }  # fmt: skip


def unknown(seqs: Iterable[int], why: str = DOUBTED) -> dict[int, m.Void]:
    """Nobody can say what became of these."""
    return {seq: m.Void(seq, "OutcomeUnknown", why, {}) for seq in seqs}


def tied(step: Step, seqs: range, voids: Collection[int]) -> dict[int, m.Void]:
    """Void, since as many say that they are committed as say the contrary. Nobody honest lacks more."""
    most = step.limits.ops_in_flight + step.limits.covers
    return unknown(islice((seq for seq in seqs if seq not in voids), most), TIED)


def _tell_out(step: Step, group: Group, known: int, fate: dict[str, Any]) -> None:
    """Tell members that are out what became of their calls (C5); up to *known* they have committed them."""
    for out in group.current.out:
        evicted = m.Evicted(group.name, out.mid, clip(out.why), known, epoch=group.epoch, **fate)
        if out.daemon is None:
            remember(step, evicted)
            continue
        _keep_fate(step, out.daemon, evicted)
        if step.state.connections.get(out.daemon.conn) is out.daemon:
            step.send(out.daemon.conn, evicted)
    group.current.out.clear()


def remember(step: Step, fate: m.Evicted) -> None:
    """What the member is told should it report."""
    step.state.missing[fate.group, fate.mid] = fate
    if len(step.state.missing) > step.limits.members_missing:
        del step.state.missing[next(iter(step.state.missing))]


def _next_epoch(step: Step, group: Group, reason: str, *, free: bool = False) -> None:
    """Begin the group's next epoch with the members it has.

    *free*: nothing is void and nobody is in a hurry, so the plan may change what links are made with.
    """
    group.epoch = max(group.epoch, group.used) + 1
    _forget_bad_pairs(step, group)
    passed = group.current.closing is not None and group.current.closing.passed
    plan = _plan(step, group, free=free)
    group.begin(reason, votes=plan.commit == "members")
    persist(step, group)
    members = group.members
    epoch = m.Epoch(
        group=group.name,
        to=0,
        term=step.state.term,
        epoch=group.epoch,
        members=[
            m.MemberInfo(one.mid, one.name, one.daemon.name, one.daemon.addresses, one.daemon.site) for one in members
        ],
        plan=plan,
        key=group.key,
        min_world=group.min_world,
        committed_upto=group.committed,
        voids=list(group.voids.values()),
        reason=group.current.reason,
        passed=passed,
        goodbyes=group.goodbyes,
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
    present = {member.mid: member for member in group.members}
    group.members = [present[mid] for mid in found.order]
    group.planned = found.planned
    return structs_replace(found.planned.plan, commit="members" if _may_vote(step, group) else "master")


def _may_vote(step: Step, group: Group) -> bool:
    """Whether members commit among themselves: all can talk to all, and they are not too many for that."""
    wanted = step.limits.commit == "members" and not group.small and len(group.members) <= _VOTERS
    return wanted and not group.bad_pairs


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
    bad = [ends for ends, until in group.bad_pairs.items() if until > step.now]
    return step.planner(Request(step.state.measures, group.members, before, bad, step.now, free))


def persist(step: Step, group: Group) -> None:
    """Have the group's epoch written down before anybody hears of it."""
    state = step.state
    state.highest_epoch = max(state.highest_epoch, group.epoch)
    voids = {seq: void.error for seq, void in group.voids.items()}
    alone = _alone(step, max(one.daemon.master_grace for one in group.members)) if group.current.votes else 0
    former = {one.mid: Former(one.name, one.daemon.incarnation) for one in group.members[:_VOTERS]}
    used = Used(group.epoch, frozenset(member.mid for member in group.members), group.committed, voids, alone, former)
    state.inherited.discard(group.name)
    state.alone.pop(group.name, None)
    state.used.pop(group.name, None)
    state.used[group.name] = step.persist().groups[group.name] = used
    if len(state.used) > step.limits.groups_known:
        del state.used[next(iter(state.used))]


def _form(step: Step, group: Group) -> bool:
    """The group's first epoch, once as many have joined as it takes. A group of nobody is forgotten."""
    if not group.joining:
        step.state.floor = max(step.state.floor, group.epoch)  # later groups' epochs go on above its own
        del step.state.groups[group.name]
        return False
    if held(step, group) or len(group.joining) < wanted(step, group) or measuring.waits_until(step, group) > step.now:
        return False
    if any(joiner.daemon.away for joiner in group.joining):
        return False  # it comes back or is put out, soon
    if measuring.ask_uplinks(step, group):
        return False
    group.members, group.joining = group.joining, []
    step.state.alone = {name: until for name, until in step.state.alone.items() if until > step.now}
    for member in group.members:
        member.in_epoch = True
    _next_epoch(step, group, f"the group has formed: {names(group.members)}", free=True)
    return True


def wanted(step: Step, group: Group) -> int:
    """Members that make its first epoch: start_world, but where the group ran before and may start anew with fewer."""
    anew = step.limits.restart_with_min_world and group.name in step.state.used
    return group.min_world if anew else group.start_world


def held(step: Step, group: Group) -> bool:
    """Whether the group may exist already: this master has started lately, and members may be about to report."""
    return not group.members and step.now < held_until(step.state, group.name)


def held_until(state: State, name: str) -> float:
    """Until when its members of before may come back; where members commit they may even go on among themselves."""
    known = state.holds or name in state.inherited
    return max(state.alone.get(name, -inf), state.rejoin_until if known else -inf)


def _alone(step: Step, master_grace: float) -> int:
    """Seconds for which daemons to which this master has said its heartbeat_timeout may go on without it (C8)."""
    return ceil(master_grace + step.limits.heartbeat_timeout)


def _alone_until(step: Step, name: str, since: float) -> float:
    """Until when members of its newest epoch may commit among themselves, if they were heard last then (C8)."""
    used = step.state.used.get(name)
    if used is None:  # forgotten, since groups are many
        return since + _alone(step, step.limits.master_grace)
    # Where an earlier master wrote it down this one's heartbeat_timeout, of which it knows nothing, may be longer.
    more = step.limits.heartbeat_timeout if name in step.state.inherited else 0.0
    return since + more + used.alone if used.alone else -inf


def missing(state: State, name: str) -> dict[int, str]:
    """Members of before that have not said that they stop: names by mid. None where the group runs, or rebuilds."""
    used, group = state.used.get(name), state.groups.get(name)
    if used is None or (group is not None and (group.members or group.rebuild is not None)):
        return {}
    return {mid: one.name for mid, one in used.former.items()}


def waited_for(state: State, name: str, now: float) -> dict[int, str]:
    """Members of before that the group's name waits for: names by mid (C8)."""
    return missing(state, name) if state.alone.get(name, -inf) > now else {}


def who_may_go_on(state: State, name: str, now: float) -> str:
    """For whom the group's name waits, until when, and what ends that; "": for nobody."""
    waits = sorted(waited_for(state, name, now).values())
    if not waits:
        return ""
    seconds = held_until(state, name) - now
    long = f"{seconds:.0f} s more" if seconds < WITHOUT_END / 2 else "without end"
    return (
        f"{few(waits)} of before were lost without a word, and may still run and commit: the name waits for them "
        f"{long}, or until they are heard, or a daemon is started again on their machines; if you know that they have "
        f"stopped, free it at once: `wancoll evict --group {name} --all`"
    )


def why_held(state: State, name: str, now: float) -> str:
    """What keeps the group's name from forming, for people; "": nothing."""
    if alone := who_may_go_on(state, name, now):
        return alone
    if now >= held_until(state, name):
        return ""
    return (
        f"the master has just started: for {held_until(state, name) - now:.0f} s more it waits for members of an "
        "earlier one, which may run this group already"
    )


def stopped(step: Step, name: str, mids: Collection[int]) -> None:
    """These members of before commit nothing any more; if the group's name waited for them alone it is free (C8)."""
    used, group = step.state.used.get(name), step.state.groups.get(name)
    if used is None or used.former.keys().isdisjoint(mids):
        return
    left = {mid: one for mid, one in used.former.items() if mid not in mids}
    used = step.state.used[name] = replace(used, former=left)
    if group is not None and group.members:
        return  # written down with the next epoch, or when nobody is left
    step.persist().groups[name] = used
    if not left and step.state.alone.pop(name, None) is not None and group is not None:
        step.touch(group)


def heard_last(step: Step, name: str) -> None:
    """A member of before was heard until now: it may go on by itself as long from now on (C8)."""
    if name in step.state.alone:
        until = step.state.alone[name] = max(step.state.alone[name], _alone_until(step, name, step.now))
        step.alarm(until)


def _forget_bad_pairs(step: Step, group: Group) -> None:
    present = {member.mid: member for member in group.members}
    group.bad_pairs = {
        ends: until
        for ends, until in group.bad_pairs.items()
        if until > step.now and ends[0] in present and ends[1] in present
    }
    group.losses = {key: n for key, n in group.losses.items() if key[0] in present and key[1] in present}


# ---- losses -----------------------------------------------------------------------------------------


def lose(step: Step, gone: Mapping[Member, str], kind: str, *, tell: bool, cause: str = "") -> None:
    """Members and joiners are out, each for its reason: one new epoch of the survivors in each group concerned.

    *tell*: send Evicted, since the daemon may still be listening. *kind* is the event log's.
    *cause*: see CAUSES; "": as *kind* says.
    """
    cause = cause or (kind if kind in CAUSES else "other")
    groups: dict[str, list[Member]] = {}
    for member, why in gone.items():
        groups.setdefault(member.group.name, []).append(member)
        del step.state.members[member.mid], member.daemon.members[member.mid]
        if not member.in_epoch or not (tell or member.daemon.conn not in step.state.connections):
            if member.in_epoch:  # else it said so itself
                stopped(step, member.group.name, {member.mid})
            continue
        if member.group.current.votes:  # what it has finished may be committed by others, or not
            member.group.current.out.append(Out(member.mid, clip(why), member.daemon, tell))
        else:
            evicted = m.Evicted(member.group.name, member.mid, clip(why), member.group.committed)
            _keep_fate(step, member.daemon, evicted)
            if tell:
                step.send(member.daemon.conn, evicted)
    for name, lost in groups.items():
        group = step.state.groups[name]
        group.members = [member for member in group.members if member not in gone]
        group.joining = [joiner for joiner in group.joining if joiner not in gone]
        why = several(gone[member] for member in lost)
        if in_peace := why == "left":
            group.goodbyes += [member.name for member in lost if member.in_epoch]
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
    idle = [why for daemon, why in ended.items() if not daemon.members]  # no group's event tells of them
    gone = {member: why for daemon, why in ended.items() for member in daemon.members.values()}
    lose(step, gone, kind, tell=close, cause=cause)
    if close:
        for daemon, why in ended.items():
            step.close(daemon.conn, why)
    for why in idle:
        step.record(None, kind, why)


def _keep_fate(step: Step, daemon: Daemon, evicted: m.Evicted) -> None:
    """A message may be lost with its connection: the daemon is told again when it introduces itself again (R8)."""
    gone = step.state.gone
    fates = gone.pop((daemon.name, daemon.incarnation), [])
    gone[daemon.name, daemon.incarnation] = [*fates, evicted][-step.limits.group_members :]
    if len(gone) > step.limits.daemons_gone:
        del gone[next(iter(gone))]


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
            stopped(step, group, {mid})


def _end_group(step: Step, group: Group) -> bool:
    """Nobody is left who knows what was done, or could ask what was void: who waits to join may form it anew."""
    _nobody_left(step, group)
    _tell_out(step, group, group.committed, {"unknown_upto": m.MOST})
    if used := step.state.used.get(group.name):
        step.state.used[group.name] = replace(used, voids={})
    step.state.groups[group.name] = group.afresh()
    return True


def _nobody_left(step: Step, group: Group) -> None:
    """Who has not said that it stops may go on, and commit, where it still hears the others (C8)."""
    name, out, used = group.name, group.current.out, step.state.used.get(group.name)
    if (used is None or used.epoch < group.epoch) and out:  # the journal was lost
        former = {one.mid: Former(f"member {one.mid}", one.daemon.incarnation if one.daemon else 0) for one in out}
        used = Used(group.epoch, frozenset(former), group.committed, {}, _alone(step, step.limits.master_grace), former)
    if used is None:
        return
    step.state.used[name] = step.persist().groups[name] = used  # with who has stopped since it began
    if used.former and used.alone:
        heard = [one.daemon.heard_at if one.daemon else step.now for one in out]
        until = step.state.alone[name] = _alone_until(step, name, max(heard, default=step.now))
        step.alarm(until)
        if len(step.state.alone) > step.limits.groups_known:
            del step.state.alone[next(iter(step.state.alone))]


# ---- done and commit --------------------------------------------------------------------------------


def done(step: Step, member: Member, message: m.Done) -> None:
    """A member is done with an op; the last one to be so commits it (R1). The hot path."""
    group, seq = member.group, message.seq
    pending = group.current.pending
    if group.stopped:
        return
    learn(step, member, message.committed_upto)
    if seq <= group.committed or seq in group.voids or group.small:
        return
    entry = pending.get(seq)
    if entry is None:
        check_window(step, member, seq)
        entry = pending[seq] = Pending(step.now, False, message.digest, message.fingerprint)
    elif entry.update or entry.fingerprint != message.fingerprint:
        ask_calls(step, group, seq)
        return
    elif member.mid in entry.done:
        if entry.done[member.mid] == message.digest:
            return
        raise ProtocolError("is done twice with one operation, differently", got=f"operation {seq}")
    entry.done[member.mid] = message.digest
    if seq > member.done_upto:
        member.done_upto = seq
    if message.digest != entry.digest:
        entry.differs = True
    if len(entry.done) == len(group.members):
        if entry.differs:
            _digests_differ(step, group, seq, entry)
        step.touch(group)


def learn(step: Step, member: Member, upto: int) -> None:
    """Where members commit: a member says that it has committed so much. What all say is so.

    What one says is no more than information: who is late with what, and whether a link came up.
    """
    group = member.group
    if not group.current.votes or group.stopped or upto <= member.committed:
        return
    if upto > window_end(step, group):
        raise ProtocolError("has committed more than there can be", got=str(upto))
    member.committed = upto
    group.current.heard = max(group.current.heard, upto)
    known = min(one.committed for one in group.members)
    if known > group.committed:
        _set_committed(step, group, known)
        pending = group.current.pending
        for seq in [seq for seq in pending if seq <= known]:
            del pending[seq]
    if group.current.graces:
        graces.forget(group, group.heard)
        graces.look(step, group)


def grace(step: Step, member: Member, message: m.Grace) -> None:
    """A member has called an op that does not wait for ever for the others (R20)."""
    learn(step, member, message.committed_upto)
    if message.seq > member.group.committed:
        check_window(step, member, message.seq)
    graces.called(step, member, message)


def update(step: Step, member: Member, message: m.UpdateMembership) -> None:
    """A member has reached update_membership (R5)."""
    group, seq = member.group, message.seq
    if group.stopped:
        return
    learn(step, member, message.committed_upto)
    if seq <= group.committed or seq in group.voids:
        return
    entry = group.current.pending.get(seq)
    if entry is None:
        check_window(step, member, seq)
        entry = group.current.pending[seq] = Pending(step.now, True, 0, 0)
    elif not entry.update:
        ask_calls(step, group, seq)
        return
    entry.done[member.mid] = 0
    member.done_upto = max(member.done_upto, seq)
    if len(entry.done) == len(group.members):
        step.touch(group)
    elif group.small:
        _void_strayed_updates(step, group)


def _commit_counted(step: Step, group: Group) -> bool:
    """Commit whatever all members are done with, in seq order, but for an update_membership at which more is to do."""
    reach = seq = group.committed
    while not group.small:
        seq += 1
        if seq in group.voids:
            continue
        entry = group.current.pending.get(seq)
        complete = entry is not None and len(entry.done) == len(group.members) and not entry.differs
        if entry is None or not complete or (entry.update and _held_at_update(step, group)):
            break
        reach = seq
        del group.current.pending[seq]
    if reach > group.committed:
        _commit(step, group, reach)
        return True
    return False


def _held_at_update(step: Step, group: Group) -> bool:
    return bool(group.joining) or planning.due(group.planned, step.state.measures, step.now)


def _commit(step: Step, group: Group, upto: int) -> None:
    _set_committed(step, group, upto)
    step.broadcast(group, m.Commit(group.name, group.epoch, upto, step.state.term))
    if group.current.graces:
        graces.forget(group, upto)
        graces.look(step, group)


def _set_committed(step: Step, group: Group, upto: int) -> None:
    group.committed = upto
    group.current.hold_until, group.current.waited = inf, False
    if group.slow is not None and group.slow.seq <= upto:
        _wait_ended(step, group, group.slow)
    for known in (group.voids, group.digest_failures, group.stalls):
        for seq in [seq for seq in known if seq <= upto] if known else ():
            del known[seq]
    for key in [key for key in group.losses if not key[2]] if group.losses else ():
        del group.losses[key]


def _wait_ended(step: Step, group: Group, slow: Slow) -> None:
    """The log said that an operation waits, and it is over."""
    text = f"operation {slow.seq} ended {step.now - slow.since:.1f} s after it was called"
    step.record(group, "waits no more", text, kept=False)
    group.slow = None


def window_end(step: Step, group: Group) -> int:
    """The highest seq that a member can have reached: what is void is behind it like what is committed."""
    bound = group.first_open - 1 + WINDOW_FACTOR * step.limits.ops_in_flight
    # In a small world members fail what they like themselves; where they commit, the master hears of it now and then.
    return max(bound, step.state.believable) if group.small or group.current.votes else bound


def check_window(step: Step, member: Member, seq: int) -> None:
    """Refuse a seq that no member can have reached, so that nobody fills the master's memory.

    A member can have said so many that are open: who says more is to blame, not who speaks next.
    """
    window, bound = WINDOW_FACTOR * step.limits.ops_in_flight, window_end(step, member.group)
    pending = member.group.current.pending
    full = len(pending) >= window and sum(member.mid in entry.done for entry in pending.values()) >= window
    if not 0 < seq <= bound or full:
        raise ProtocolError("names an impossible operation", expected=f"1 to {bound}", got=str(seq))


def _digests_differ(step: Step, group: Group, seq: int, entry: Pending) -> None:
    by_digest: dict[int, list[Member]] = {}
    for member in group.members:
        by_digest.setdefault(entry.done[member.mid], []).append(member)
    told = "; ".join(f"{digest:016x} on {names(members)}" for digest, members in by_digest.items())
    _try_again(step, group, seq, "digest", clip(f"results of operation {seq} differ: {told}"))


def _try_again(step: Step, group: Group, seq: int, kind: str, text: str) -> None:
    """Members that call the same have come apart at *seq*: it runs again, but not for ever (R13)."""
    failures = group.digest_failures[seq] = group.digest_failures.get(seq, 0) + 1
    step.record(group, kind, text)
    if failures > step.limits.digest_retries:
        what = m.Void(seq, "ProtocolError", clip(f"{text}; it was tried {failures} times"), {})
        end_epoch(step, group, f"{text}; given up", [what])
    else:
        end_epoch(step, group, text)


# ---- update_membership ------------------------------------------------------------------------------


def _pass_update(step: Step, group: Group) -> bool:
    """If all members stand at an update_membership: admit joiners, change the plan, let the members pass, or wait."""
    seq = _update_at_hand(group)
    if seq is None:
        return False
    able = [joiner for joiner in group.joining if joiner.reachable and not joiner.daemon.away]
    if len(able) < len(group.joining) and not group.current.waited:
        if group.current.hold_until == inf:
            group.current.hold_until = step.now + step.limits.probe_timeout + step.limits.heartbeat_interval
            step.alarm(group.current.hold_until)
        return False
    if len(group.members) + len(able) < group.min_world:
        return False  # held until enough joiners are there
    if able and measuring.waits_until(step, group) > step.now:
        return False  # a tick follows
    reason = f"{names(able)} can join" if able else _better_plan(step, group)
    if not reason:
        del group.current.pending[seq]
        _commit(step, group, seq)
    elif group.current.votes:
        _close_at_update(step, group, seq, able, reason if able else f"plan: {reason}")
    else:
        _set_committed(step, group, seq)
        _next_epoch(step, group, _let_in(group, able, seq) if able else f"plan: {reason}", free=True)
    return True


def _update_at_hand(group: Group) -> int | None:
    """The update_membership that all members have posted, with nothing open below it."""
    world = len(group.members)
    if group.small:  # members have failed everything below by themselves
        return min((s for s, e in group.current.pending.items() if e.update and len(e.done) == world), default=None)
    seq = group.first_open
    entry = group.current.pending.get(seq)
    return seq if entry is not None and entry.update and len(entry.done) == world else None


def _close_at_update(step: Step, group: Group, seq: int, able: list[Member], reason: str) -> None:
    """Where members commit they may be passing it without the master: who joins is known once all have stopped."""
    closing = _stop(step, group, reason)
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


def _void_strayed_updates(step: Step, group: Group) -> None:
    """In a small world members fail ops by themselves; if that led them to different seqs, the one behind is told."""
    posted = {mid for entry in group.current.pending.values() for mid in entry.done}
    if len(posted) < len(group.members):
        return
    seq = min(group.current.pending)
    calls = {
        member.name: "update_membership()" if member.mid in group.current.pending[seq].done else "an earlier operation"
        for member in group.members
    }
    _set_committed(step, group, seq - 1)
    _void_mismatch(step, group, seq, calls)


# ---- voids ------------------------------------------------------------------------------------------


def mismatch(step: Step, member: Member, message: m.Mismatch) -> None:
    """A member found that a neighbour calls something else, or answers what it calls itself."""
    group, seq = member.group, message.seq
    if group.current.asking is None:
        if group.stopped or seq <= group.committed or seq in group.voids:
            return
        check_window(step, member, seq)
        ask_calls(step, group, seq)
    has_called(step, member, message)
    asking = group.current.asking
    if asking is not None and asking.seq == seq:
        asking.calls[member.mid] = clip(message.call, _CALL_CHARS)
        asking.fingerprints.add(message.fingerprint)
        if len(asking.calls) == len(group.members):
            conclude_asking(step, group)


def has_called(step: Step, member: Member, message: m.Done | m.Mismatch | m.GiveUp) -> None:
    """So much has the member called, also where its word is too late for anything else (R12)."""
    epoch, seq, at = member.called
    told = max(message.seqs, default=0) if isinstance(message, m.GiveUp) else message.seq
    member.called = epoch, max(seq, min(told, window_end(step, member.group))), at


def ask_calls(step: Step, group: Group, seq: int) -> None:
    """Abort the epoch: no commit follows in it. Every member tells what it calls at *seq*."""
    group.current.asking = Asking(seq, step.now + step.limits.mismatch_wait)
    step.alarm(group.current.asking.deadline)
    reason = f"members call different collectives at operation {seq}"
    if group.current.votes:
        _stop(step, group, reason, seq)
    else:
        step.broadcast(group, m.Abort(group.name, group.epoch, seq, reason))


def conclude_asking(step: Step, group: Group) -> None:
    """All have answered, or had the time to: the op fails on every member, with all calls named.

    If they all call the same, somebody misread somebody: it runs again.
    """
    asking = group.current.asking
    if asking is None:
        return
    alike = len(asking.fingerprints) == 1 and len(set(asking.calls.values())) == 1
    if alike and len(asking.calls) == len(group.members):
        text = f"members say that their calls differ at operation {asking.seq}, but they are equal"
        _try_again(step, group, asking.seq, "mismatch", text)
    else:
        calls = {member.name: asking.calls.get(member.mid, "not called yet") for member in group.members}
        _void_mismatch(step, group, asking.seq, calls)


def _void_mismatch(step: Step, group: Group, seq: int, calls: dict[str, str]) -> None:
    text = f"members called different collectives at operation {seq}"
    told = _few(calls)
    more = f"; of {len(calls)} members {len(told)} are named" if len(told) < len(calls) else ""
    step.record(group, "mismatch", f"{text}: " + "; ".join(f"{who}: {call}" for who, call in told.items()))
    end_epoch(step, group, text, [m.Void(seq, "CollectiveMismatch", f"{text}{more}", told)])


def _few(calls: dict[str, str]) -> dict[str, str]:
    """Of many members' calls a few of each, the rarest first: everyone is told of everyone who is named."""
    if len(calls) <= _CALLS_TOLD:
        return calls
    by_call: dict[str, list[str]] = {}
    for who, call in calls.items():
        by_call.setdefault(call, []).append(who)
    rarest = sorted(by_call.values(), key=len)[:_CALLS_TOLD]
    some = [who for one_of_each in zip_longest(*rarest) for who in one_of_each if who is not None][:_CALLS_TOLD]
    return {who: calls[who] for who in calls if who in some}


def give_up(step: Step, member: Member, message: m.GiveUp) -> None:
    """A member's ops cannot run, or its caller wants them to end: void for all, unless committed."""
    group = member.group
    seqs = sorted({seq for seq in message.seqs if seq > group.committed and seq not in group.voids})
    if not seqs or group.current.ends:
        return
    check_window(step, member, seqs[-1])
    has_called(step, member, message)
    if why := _runs_away(step, member, seqs):
        lose(step, {member: why}, "evicted", tell=True, cause="nonsense")
        return
    chars = _VOID_CHARS if len(seqs) <= _FEW_VOIDS else _VOID_CHARS_OF_MANY
    text = clip(message.reason or f"the membership changed: {group.current.reason}", chars)
    voids = [m.Void(seq, "OperationAborted", text, {}) for seq in seqs]
    which = f"operations {seqs[0]} to {seqs[-1]}" if len(seqs) > 1 else f"operation {seqs[0]}"
    because = f": {clip(message.reason, 300)}" if message.reason else ""
    end_epoch(step, group, f"{member.name} gave up {which}{because}", voids)


def _runs_away(step: Step, member: Member, seqs: list[int]) -> str:
    """Why a member that gives up *seqs* is put out, "" if it is not: alone it must not use up the group's voids (R14).

    The others are as far as they have said, in heartbeats or in words of which nothing else counts any more.
    """
    group, most = member.group, step.limits.voids // 2
    member.gave_up = {seq for seq in member.gave_up if seq in group.voids}.union(seqs)
    others = [max(one.called[1], one.done_upto) for one in group.members if one is not member]
    reach = max(others, default=inf)
    if sum(seq > reach for seq in member.gave_up) <= most:
        return ""
    return (
        f"{member.name} gave up operations up to {seqs[-1]}, and no other member has called more than {reach}; "
        f"expected at most {most} that only one member has called; see that all members make the same calls"
    )
