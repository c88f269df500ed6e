"""Point to point: the k-th send from one member to another with a tag meets the k-th recv; both commit or none. Pure.

A recv that was called ahead is met by the first send that fits it, and passed by by all others.

What is here belongs to one epoch. When the next one begins members say again what is not settled, in the order of their
calls, so nothing is carried over.
"""

from __future__ import annotations

from collections import deque

from wancoll.collective import DType
from wancoll.errors import ProtocolError
from wancoll.wire import messages as m
from wancoll_master.core.state import Complaint, Group, Half, Match, Member, Step, clip
from wancoll_master.plan.topology import pair

MISFIT = "send and recv do not fit together"
APART = "the two members cannot reach each other for sends and recvs"
CALLS_PER_MEMBER = 4096  # that wait for their other half or run


def call(step: Step, member: Member, message: m.P2PCall) -> None:
    """A member called send or recv."""
    group, calls = member.group, member.group.current.p2p
    if group.stopped:
        return  # it is called again in the next epoch, and whom it names may be out already
    other = step.state.members.get(message.other)
    if other is None or other.group is not group or not other.in_epoch or other is member:
        raise ProtocolError("calls a stranger", expected="another member of its epoch", got=str(message.other))
    if message.ahead and message.sends:
        raise ProtocolError("sends ahead", expected="a recv", got=f"number {message.number}")
    if message.number <= calls.newest.get(member.mid, 0):
        raise ProtocolError("tells its sends and recvs out of order", got=f"number {message.number}")
    if calls.open.get(member.mid, 0) >= CALLS_PER_MEMBER:
        raise ProtocolError("has too many sends and recvs at once", expected=f"at most {CALLS_PER_MEMBER}")
    calls.newest[member.mid] = message.number
    calls.open[member.mid] = calls.open.get(member.mid, 0) + 1
    mine = Half(member, message)
    sender, receiver = (member, other) if message.sends else (other, member)
    key = (sender.mid, receiver.mid, message.tag)
    there = calls.waiting.get((*key, not message.sends), deque())
    at = next((i for i, half in enumerate(there) if _meets(half.call, message)), -1)
    if at < 0:
        calls.waiting.setdefault((*key, message.sends), deque()).append(mine)
        alone = calls.alone.setdefault(member.mid, {})
        alone[other.mid] = alone.get(other.mid, 0) + 1
        return
    theirs = there[at]
    del there[at]
    alone = calls.alone[other.mid]
    alone[member.mid] -= 1
    if not alone[member.mid]:
        del alone[member.mid]
    if not there:
        del calls.waiting[*key, not message.sends]
    send, recv = (mine, theirs) if message.sends else (theirs, mine)
    _meet(step, group, Match(send, recv))


def _meets(one: m.P2PCall, other: m.P2PCall) -> bool:
    return not (one.ahead or other.ahead) or _fit(one, other)


def _fit(one: m.P2PCall, other: m.P2PCall) -> bool:
    return (one.dtype, one.count, one.label) == (other.dtype, other.count, other.label)


def _meet(step: Step, group: Group, match: Match) -> None:
    if not _fit(match.send.call, match.recv.call):
        calls = {half.member.name: _described(half) for half in (match.send, match.recv)}
        _settle(step, group, match, "CollectiveMismatch", MISFIT, calls)
        return
    group.p2p_count += 1
    group.current.p2p.running[group.p2p_count] = match
    for half in (match.send, match.recv):
        told = m.Matched(group.name, half.member.mid, group.epoch, half.call.number, group.p2p_count)
        step.send(half.member.daemon.conn, told)


def done(step: Step, member: Member, message: m.P2PDone) -> None:
    """A member's half of a pair is done, and the second one commits it; or it cannot be, and both end."""
    group = member.group
    match = group.current.p2p.running.get(message.order)
    if match is None:
        return
    if member is match.send.member:
        match.sent = True
    elif member is match.recv.member:
        match.received, match.digest = True, message.digest
    else:
        raise ProtocolError("is done with a send or recv of others", got=f"pair {message.order}")
    if message.error:
        del group.current.p2p.running[message.order]
        _settle(step, group, match, "OperationAborted", clip(f"{member.name}: {message.error}"), {})
    elif match.sent and match.received:
        del group.current.p2p.running[message.order]
        _settle(step, group, match, "", "", {})


def part(step: Step, group: Group, told: Complaint, why: str) -> int:
    """The link of two for sends and recvs cannot be made: what waited for it ends, alike on both. Returns how many.

    What met after the complaint came has a try of its own.
    """
    found = concerned(group, told)
    for order in found:
        _settle(step, group, group.current.p2p.running.pop(order), "OperationAborted", f"{APART}: {why}", {})
    return len(found)


def concerned(group: Group, told: Complaint) -> list[int]:
    """Orders of the pair that had met when the complaint came, and run."""
    ends = {told.who.mid, told.whom.mid}
    theirs = [order for order in group.current.p2p.running if order <= told.matched]
    running = group.current.p2p.running
    return [order for order in theirs if {running[order].send.member.mid, running[order].recv.member.mid} == ends]


def _settle(step: Step, group: Group, match: Match, error: str, text: str, calls: dict[str, str]) -> None:
    group.losses.pop((*pair(match.send.member.mid, match.recv.member.mid), True), None)
    for half, other in ((match.send, match.recv), (match.recv, match.send)):
        member, number = half.member, half.call.number
        group.current.p2p.open[member.mid] -= 1
        head = (group.name, member.mid, group.epoch, number)
        told = m.Settled(*head, match.digest, error, text, calls, other.call.number)
        step.send(member.daemon.conn, told)


def _described(half: Half) -> str:
    how = "send" if half.call.sends else "recv"
    label = f", label={half.call.label}" if half.call.label else ""
    return f"{how}({half.call.count} x {DType(half.call.dtype).name}, tag={half.call.tag}{label})"
