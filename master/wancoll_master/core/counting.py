"""What members say about operations: done with one, calling another one than the others, giving one up. Pure.

These functions record facts, and count; epochs.settle() commits what is complete, and ends the epoch where one has to.
"""

from __future__ import annotations

from itertools import zip_longest
from math import inf

from wancoll.collective import same_kind
from wancoll.commit.tally import UPDATE
from wancoll.errors import ProtocolError
from wancoll.limits import WINDOW_FACTOR
from wancoll.wire import messages as m
from wancoll_master.core import losses
from wancoll_master.core.liveness import stragglers
from wancoll_master.core.state import Asking, Group, Member, Slow, Step, clip, names
from wancoll_master.plan import planning

_CALL_CHARS = 200
_CALLS_TOLD = 32  # of a mismatch
_VOID_CHARS, _FEW_VOIDS = 300, 16
_VOID_CHARS_OF_MANY = 100


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
    why = f"the tensor was written to during the call, or a block that its client encoded is not valid: {message.call}"
    why += "; wait for a call before its tensor is used again"
    losses.lose(step, {member: clip(why)}, "evicted", tell=True, cause="trainer")


def vote(step: Step, member: Member, message: m.Vote) -> None:
    """A member has finished an op, or stands at an update_membership (R5); the last one commits it (R1)."""
    group, seq = member.group, message.seq
    tally, result = group.current.tally, (message.digest, message.fingerprint)
    if group.stopped:
        return
    learn(step, member, message.committed)
    update = message.fingerprint == UPDATE[1]
    if seq <= group.committed or seq in group.voids or (group.small and not update):
        return
    count = tally.open.get(seq)
    if count is None:
        check_window(step, member, seq)
    elif not tally.alike(member.mid, seq, message.fingerprint):
        ask_calls(step, group, seq)
        return
    if update and result != UPDATE:
        raise ProtocolError("stands at an update_membership with a result", got=f"operation {seq}")
    if not tally.vote(member.mid, seq, result, step.now) and tally.open[seq].votes[member.mid] != result:
        raise ProtocolError("is done twice with one operation, differently", got=f"operation {seq}")
    member.done_upto = max(member.done_upto, seq)
    if tally.complete(seq):
        if tally.agreed(seq) is None:
            _digests_differ(step, group, seq)
        step.touch(group)
    elif update and group.small:
        _void_strayed_updates(step, group)


def learn(step: Step, member: Member, upto: int) -> None:
    """Where members commit: a member says that it has committed so much. What all say is so.

    What one says is no more than information: who is late with what, and whether a link came up.
    """
    group = member.group
    tally = group.current.tally
    if not group.current.votes or group.stopped or upto <= tally.claims[member.mid]:
        return
    if upto > window_end(step, group):
        raise ProtocolError("has committed more than there can be", got=str(upto))
    tally.claim(member.mid, upto)
    known = min(tally.claims.values())
    if known > group.committed:
        set_committed(step, group, known)
    if group.current.straggler_deadlines:
        stragglers.forget(group, group.heard)
        stragglers.look(step, group)


def called_with_grace(step: Step, member: Member, message: m.CalledWithGrace) -> None:
    """A member has called an op that does not wait for ever for the others (R20)."""
    learn(step, member, message.committed)
    if message.seq > member.group.committed:
        check_window(step, member, message.seq)
    stragglers.called(step, member, message)


def commit_counted(step: Step, group: Group) -> bool:
    """Commit whatever all members are done with, in seq order, but for an update_membership at which more is to do."""
    tally = group.current.tally
    if group.small:
        return False
    upto = tally.prefix(lambda seq: tally.open[seq].update and _held_at_update(step, group))
    if upto > group.committed:
        commit(step, group, upto)
        return True
    return False


def _held_at_update(step: Step, group: Group) -> bool:
    return bool(group.joining) or planning.due(group.planned, step.state.measures, step.now)


def commit(step: Step, group: Group, upto: int) -> None:
    """All up to *upto* is committed: tell the members."""
    set_committed(step, group, upto)
    step.broadcast(group, m.Commit(group.name, group.epoch, upto, step.state.term))
    if group.current.straggler_deadlines:
        stragglers.forget(group, upto)
        stragglers.look(step, group)


def set_committed(step: Step, group: Group, upto: int) -> None:
    """All up to *upto* is committed: nothing that was known of it is needed any more."""
    group.committed = upto
    group.current.tally.advance(upto)
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


def window(step: Step) -> int:
    """How many operations a member can have said that are open."""
    return WINDOW_FACTOR * step.limits.ops_in_flight


def window_end(step: Step, group: Group) -> int:
    """The highest seq that a member can have reached: what is void is behind it like what is committed."""
    bound = group.first_open - 1 + window(step)
    # In a small world members fail what they like themselves; where they commit, the master hears of it now and then.
    return max(bound, step.state.believable) if group.small or group.current.votes else bound


def check_window(step: Step, member: Member, seq: int) -> None:
    """Refuse a seq that no member can have reached, so that nobody fills the master's memory.

    A member can have said so many that are open: who says more is to blame, not who speaks next.
    """
    bound = window_end(step, member.group)
    if not 0 < seq <= bound or member.group.current.tally.is_full(member.mid):
        raise ProtocolError("names an impossible operation", expected=f"1 to {bound}", got=str(seq))


def _digests_differ(step: Step, group: Group, seq: int) -> None:
    by_digest: dict[tuple[int, int], list[Member]] = {}
    for member in group.members:
        digest = group.current.tally.open[seq].votes[member.mid][0]
        by_digest.setdefault((member.shard, digest), []).append(member)
    told = "; ".join(f"{digest:016x} on {names(members)}" for (_, digest), members in by_digest.items())
    _try_again(step, group, seq, "digest", clip(f"results of operation {seq} differ: {told}"))


def _try_again(step: Step, group: Group, seq: int, kind: str, text: str) -> None:
    """Members that call the same have come apart at *seq*: it runs again, but not for ever (R13)."""
    failures = group.digest_failures[seq] = group.digest_failures.get(seq, 0) + 1
    step.record(group, kind, text)
    if failures > step.limits.digest_retries:
        what = m.Void(seq, "ProtocolError", clip(f"{text}; it was tried {failures} times"), {})
        losses.end_epoch(step, group, f"{text}; given up", [what])
    else:
        losses.end_epoch(step, group, text)


def _void_strayed_updates(step: Step, group: Group) -> None:
    """In a small world members fail ops by themselves; if that led them to different seqs, the one behind is told."""
    counts = group.current.tally.open
    posted = {mid for count in counts.values() for mid in count.votes}
    if len(posted) < len(group.members):
        return
    seq = min(counts)
    calls = {
        member.name: "update_membership()" if member.mid in counts[seq].votes else "an earlier operation"
        for member in group.members
    }
    set_committed(step, group, seq - 1)
    _void_mismatch(step, group, seq, calls)


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
        asking.fingerprints[member.mid] = message.fingerprint
        if len(asking.calls) == len(group.members):
            conclude_asking(step, group)


def has_called(step: Step, member: Member, message: m.Vote | m.Mismatch | m.GiveUp) -> None:
    """Note how far the member has called, also where its word is too late for anything else (R12)."""
    epoch, seq, at = member.called
    told = max(message.seqs, default=0) if isinstance(message, m.GiveUp) else message.seq
    member.called = epoch, max(seq, min(told, window_end(step, member.group))), at


def ask_calls(step: Step, group: Group, seq: int) -> None:
    """Abort the epoch: no commit follows in it. Every member tells what it calls at *seq*."""
    group.current.asking = Asking(seq, step.now + step.limits.mismatch_wait)
    step.alarm(group.current.asking.deadline)
    reason = f"members call different collectives at operation {seq}"
    if group.current.votes:
        losses.stop(step, group, reason, seq)
    else:
        step.broadcast(group, m.Abort(group.name, group.epoch, seq, reason))


def conclude_asking(step: Step, group: Group) -> None:
    """All have answered, or had the time to: the op fails on every member, with all calls named.

    If they all call the same, somebody misread somebody: it runs again.
    """
    asking = group.current.asking
    if asking is None:
        return
    called = {(one.shard, asking.calls.get(one.mid), asking.fingerprints.get(one.mid, 0)) for one in group.members}
    kinds = all(same_kind(one, other) for _, _, one in called for _, _, other in called)
    if kinds and len(called) == group.shards and len(asking.calls) == len(group.members):
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
    losses.end_epoch(step, group, text, [m.Void(seq, "CollectiveMismatch", f"{text}{more}", told)])


def _few(calls: dict[str, str]) -> dict[str, str]:
    """A few of each kind of *calls* where they are many, the rarest first: each member is told of all of them."""
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
        losses.lose(step, {member: why}, "evicted", tell=True, cause="nonsense")
        return
    chars = _VOID_CHARS if len(seqs) <= _FEW_VOIDS else _VOID_CHARS_OF_MANY
    text = clip(message.reason or f"the membership changed: {group.current.reason}", chars)
    voids = [m.Void(seq, "OperationAborted", text, {}) for seq in seqs]
    which = f"operations {seqs[0]} to {seqs[-1]}" if len(seqs) > 1 else f"operation {seqs[0]}"
    because = f": {clip(message.reason, 300)}" if message.reason else ""
    losses.end_epoch(step, group, f"{member.name} gave up {which}{because}", voids)


def _runs_away(step: Step, member: Member, seqs: list[int]) -> str:
    """Why a member that gives up *seqs* is evicted, "" if it is not: alone it must not use up the group's voids (R14).

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
