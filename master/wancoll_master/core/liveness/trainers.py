"""Training processes that stand still, or do not call what others have called: put out, so that nobody waits. Pure.

A process that is stopped, or dead while something holds its socket open, counts like a stopped daemon, after
heartbeat_timeout: its daemon can see it. One that computes may do so for an hour, and only the group can say how long
is too long: call_timeout, counted from when the master hears that another member has called more, and only while no
operation that this one has called is open, which would wait for its peers or for a link. A send or recv that is open
excuses it only as long as somebody can end it: its bytes move, or its other half is still to be called by a member that
is late, too (or waits so itself): the last one in this chain is put out. Where the chain ends with members who have
called what this one has not, or leads back, all that it waits for waits for it.
"""

from __future__ import annotations

from wancoll.wire import messages as m
from wancoll_master.core import counting, losses
from wancoll_master.core.liveness import blame
from wancoll_master.core.paths import probing
from wancoll_master.core.state import Daemon, Member, Step

_STATES = {"stopped": "is stopped (SIGSTOP, or a debugger)", "dead": "has ended, and left its socket open"}


def heard(step: Step, daemon: Daemon, beat: m.Heartbeat) -> None:
    """How far the daemon's members are in their programs, and how their processes are."""
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
            _put_out(step, member, f"its training process {_STATES.get(state, state)}, for {seconds:.1f} s")
    for member in list(daemon.members.values()):
        bound = member.group.call_timeout or step.limits.call_timeout
        if bound and (late := _late(step, member)) >= bound:
            seq = member.called[1] + 1
            what = f"others called operation {seq} {late:.1f} s ago, and it has not"
            what += " filled its input (call_timeout)" if blame.lacks_input(member, seq) else " (call_timeout)"
            alone = member.group.current.p2p.alone.get(member.mid)
            _put_out(step, member, f"{what}; what it sends or receives waits for them" if alone else what)


def _late(step: Step, member: Member) -> float:
    """Seconds since it is this one that others wait for."""
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
        return not any(member.mid in entry.done for entry in group.current.pending.values())
    upto = max(group.committed, member.committed)  # its own word is enough, where members commit
    return all(seq in group.voids for seq in range(upto + 1, member.called[1] + 1))


def _is_excused(step: Step, member: Member) -> bool:
    """Whether a send or recv of it is open that can end without it: see above."""
    book = member.group.current.p2p
    todo, seen = [member], {member}
    for one in todo:
        alone = book.alone.get(one.mid, {})
        if book.open.get(one.mid, 0) > sum(alone.values()):
            return True  # the bytes of one move
        late = [other for mid in alone if _keeps_others(other := step.state.members[mid])]
        if not late and one is not member:
            return True  # it is the last of the chain
        fresh = [other for other in late if other not in seen]
        seen.update(fresh)
        todo += fresh
    return False


def _put_out(step: Step, member: Member, why: str) -> None:
    if member.in_epoch:
        losses.lose(step, {member: why}, "evicted", tell=True, cause="trainer")
    else:
        probing.refuse(step, member, why)
        step.touch(member.group)
