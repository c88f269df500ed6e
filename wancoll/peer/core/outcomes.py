"""What a client is told of a call that ended: receipts and failures of a member's operations. Pure."""

from __future__ import annotations

from wancoll.collective import DATALESS
from wancoll.peer.core.ops import Op, failure
from wancoll.wire import messages as m


def result(op: Op, epoch: m.Epoch, now: float) -> m.Result:
    """*op* was committed in *epoch*; *now* is on the clock of op.posted_at."""
    return m.Result(
        id=op.client_id,
        seq=op.seq,
        epoch=epoch.epoch,
        contributors=[member.name for member in epoch.members],
        digest=op.digest,
        attempts=op.attempts,
        algorithm="none" if op.kind in DATALESS or op.meaning is None else op.meaning.algorithm,
        bytes_sent=op.bytes_sent,
        seconds=now - op.posted_at,
        bytes_saved=op.bytes_saved,
        codec_error=op.codec_error,
    )


def voided(op: Op, void: m.Void, epoch: m.Epoch, here: str) -> m.Failure:
    """The master gave *op* up for all members; *here* says what this one called."""
    hint = "make the same calls in the same order on every member" if void.calls else "the tensor is untouched"
    return failure(
        op.client_id,
        void.error,
        void.text,
        who=f"op {op.seq} of group {epoch.group}",
        got=f"here {here}" if void.calls else "",
        hint=hint,
        calls=dict(void.calls),
    )


def too_small(call: int, who: str, epoch: m.Epoch) -> m.Failure:
    """The client's *call* cannot run, since *epoch* has fewer than min_world members."""
    names = ", ".join(member.name for member in epoch.members)
    return failure(
        call,
        "WorldTooSmall",
        f"too few members are left in group {epoch.group} ({epoch.reason}); tensors are untouched",
        who=who,
        expected=f"at least min_world={epoch.min_world} members",
        got=f"{len(epoch.members)}: {names}",
        hint="call update_membership() to wait for joiners",
    )
