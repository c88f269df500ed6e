"""Training processes that stand still, or do not call what others have called: put out, so that nobody waits. Pure.

A process that is stopped, or dead while something holds its socket open, counts like a stopped daemon, after
heartbeat_timeout: its daemon can see it. One that computes may do so for an hour, and only the group can say how long
is too long: call_timeout, counted from when the master hears that another member has called more, and only while
nothing that this one has called is open: who waits in an operation waits for its peers or for a link.
"""

from __future__ import annotations

from wancoll.wire import messages as m
from wancoll_master.core import epochs, probing
from wancoll_master.core.state import Daemon, Member, Step

_STATES = {"stopped": "is stopped (SIGSTOP, or a debugger)", "dead": "has ended, and left its socket open"}


def heard(step: Step, daemon: Daemon, beat: m.Heartbeat) -> None:
    """How far the daemon's members are in their programs, and how their processes are."""
    for mid, epoch, seq in beat.called:
        member = daemon.members.get(mid)
        if member is not None:
            seq = min(seq, epochs.window_end(step, member.group))
            member.called = epoch, seq, step.now
            if epoch == member.group.epoch:
                member.group.current.called = max(member.group.current.called, seq)
    for mid, seconds, state in beat.still:
        member = daemon.members.get(mid)
        if member is not None and seconds >= step.limits.heartbeat_timeout:
            _put_out(step, member, f"its training process {_STATES.get(state, state)}, for {seconds:.1f} s")
    for member in list(daemon.members.values()):
        late = _late(step, member)
        if late >= (member.group.call_timeout or step.limits.call_timeout or late + 1):
            what = f"others called operation {member.called[1] + 1} {late:.1f} s ago, and it has not (call_timeout)"
            _put_out(step, member, what)


def _late(step: Step, member: Member) -> float:
    """Seconds since another member has called more, while nothing that this one has called is open."""
    epoch, seq, _ = member.called
    here = member.in_epoch and epoch == member.group.epoch
    if not here or seq >= member.group.current.called or _waits(member):
        member.behind = 0, 0, step.now
    elif member.behind[:2] != (epoch, seq):
        member.behind = epoch, seq, step.now
    return step.now - member.behind[2]


def _waits(member: Member) -> bool:
    """Whether something that it has called is open: an operation, a send or a recv."""
    group = member.group
    if group.current.p2p.open.get(member.mid):
        return True
    if group.small:  # there members fail all but update_membership by themselves
        return any(member.mid in entry.done for entry in group.current.pending.values())
    return any(seq not in group.voids for seq in range(group.committed + 1, member.called[1] + 1))


def _put_out(step: Step, member: Member, why: str) -> None:
    if member.in_epoch:
        epochs.lose(step, {member: why}, "evicted", tell=True)
    else:
        probing.refuse(step, member, why)
        epochs.consider_update(step, member.group)
        epochs.forget_if_empty(step, member.group)
