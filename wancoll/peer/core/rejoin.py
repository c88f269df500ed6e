"""What a member tells the master of its work, and all of it at once to a master that was started anew. Pure."""

from __future__ import annotations

from typing import Protocol

from wancoll.collective import SAME_RESULT, Kind
from wancoll.peer.core.ops import Op, OpState
from wancoll.peer.core.p2p import Exchanges
from wancoll.wire import messages as m


class Member(Protocol):
    """What is told of a member."""

    group: str
    mid: int
    start_world: int
    committed: int
    aborted: bool
    ops: dict[int, Op]
    p2p: Exchanges

    @property
    def epoch_number(self) -> int:
        """The current epoch."""


def done(member: Member, op: Op) -> m.Done | m.UpdateMembership:
    """The member has finished *op*, or stands at its update_membership."""
    head = (member.group, member.mid, member.epoch_number, op.seq)
    if op.kind is Kind.update_membership:
        return m.UpdateMembership(*head)
    assert op.meaning is not None
    return m.Done(*head, op.digest if op.kind in SAME_RESULT else 0, op.meaning.fingerprint)


def finished(member: Member) -> list[Op]:
    """Ops that the member is done with and that are not known to be committed, in the order of their seqs."""
    return [op for op in member.ops.values() if op.state is OpState.done]


def report(member: Member, epoch: m.Epoch) -> m.Report:
    """What a master needs to go on with *epoch*, the member's current one, or to know what came of it."""
    told = [done(member, op) for op in finished(member)]
    return m.Report(
        group=member.group,
        mid=member.mid,
        epoch=epoch.epoch,
        members=[(one.mid, one.name, one.daemon) for one in epoch.members],
        plan=epoch.plan,
        key=epoch.key,
        start_world=member.start_world,
        min_world=epoch.min_world,
        reason=epoch.reason,
        base=epoch.committed_upto,
        committed_upto=member.committed,
        voids=[void for void in epoch.voids if void.seq > member.committed],
        aborted=member.aborted,
        done=[(one.seq, one.digest, one.fingerprint) for one in told if isinstance(one, m.Done)],
        updates=[one.seq for one in told if isinstance(one, m.UpdateMembership)],
        p2p=member.p2p.reported(),
        heard=member.p2p.heard,
        settled=list(member.p2p.settlements.items()),
        failed=list(member.p2p.misfits),
    )
