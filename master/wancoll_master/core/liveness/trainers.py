"""Training processes: evict one that stands still, or does not call what others have called (R11). Pure.

An open collective excuses a member that is late: it waits for its peers, or for a link. An open send or recv excuses it
only while another member can end it.
"""

from __future__ import annotations

from wancoll.wire import messages as m
from wancoll_master.core import counting, losses
from wancoll_master.core.liveness import blame
from wancoll_master.core.paths import probing
from wancoll_master.core.state import Daemon, Member, Step

_STATES = {"stopped": "is stopped (SIGSTOP, or a debugger)", "dead": "has ended, and left its socket open"}


def heard(step: Step, daemon: Daemon, beat: m.Heartbeat) -> None:
    """A daemon tells how far its members are in their programs, and which processes stand still."""
    for mid, epoch, seq, committed in beat.called:
        member = daemon.members.get(mid)
        if member is not None and member.in_epoch:
            seq = min(seq, counting.window_end(step, member.group))
            member.called = epoch, seq, step.now
            if epoch == member.group.epoch:
                member.group.current.called = max(member.group.current.called, seq)
                counting.learn(step, member, committed)
    for mid, seconds, state in beat.still:
        member = daemon.members.get(mid)
        if member is not None and seconds >= step.limits.heartbeat_timeout:
            _evict(step, member, f"its training process {_STATES.get(state, state)}, for {seconds:.1f} s")
    for mid in list(daemon.members):
        member = daemon.members.get(mid)
        if member is None:  # out with its island
            continue
        bound = member.group.call_timeout or step.limits.call_timeout
        if bound and (late := _late(step, member)) >= bound:
            seq = member.called[1] + 1
            what = f"others called operation {seq} {late:.1f} s ago, and it has not"
            what += " filled its input (call_timeout)" if blame.lacks_input(member, seq) else " (call_timeout)"
            alone = member.group.current.p2p.alone.get(member.mid)
            _evict(step, member, f"{what}; what it sends or receives waits for them" if alone else what)


def _late(step: Step, member: Member) -> float:
    """Seconds for which others have waited for this member."""
    epoch, seq, _ = member.called
    here = member.in_epoch and epoch == member.group.epoch
    if not here or not _keeps_others(member) or _is_excused(step, member):
        member.behind = 0, 0, step.now
    elif member.behind[:2] != (epoch, seq):
        member.behind = epoch, seq, step.now
    return step.now - member.behind[2]


def _keeps_others(member: Member) -> bool:
    """Whether others have called more, and no operation that this one has called is open."""
    group = member.group
    if member.called[1] >= group.current.called:
        return False
    if group.small:  # there members fail all but update_membership by themselves
        return not any(member.mid in count.votes for count in group.current.tally.open.values())
    claimed = group.current.tally.claims.get(member.mid, 0)  # its own word is enough, where members collect votes
    upto = max(group.committed, claimed)
    return all(seq in group.voids for seq in range(upto + 1, member.called[1] + 1))


def _is_excused(step: Step, member: Member) -> bool:
    """Whether a send or recv of the member is open that can end without it: see above."""
    calls = member.group.current.p2p
    todo, seen = [member], {member}
    for one in todo:
        alone = calls.alone.get(one.mid, {})
        if calls.open.get(one.mid, 0) > sum(alone.values()):
            return True  # the bytes of one move
        others = (step.state.members.get(mid) for mid in alone)  # None: it is out, and the epoch closes
        late = [other for other in others if other is not None and _keeps_others(other)]
        if not late and one is not member:
            return True  # it is the last of the chain
        fresh = [other for other in late if other not in seen]
        seen.update(fresh)
        todo += fresh
    return False


def _evict(step: Step, member: Member, why: str) -> None:
    if member.in_epoch:
        losses.lose(step, {member: why}, "evicted", tell=True, cause="trainer")
    else:
        probing.refuse(step, member, why)
        step.touch(member.group)
