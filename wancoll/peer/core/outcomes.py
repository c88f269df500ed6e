"""What a client is told of its calls: receipts, failures, and the end of all when the member is out. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from wancoll.collective import DATALESS, Kind
from wancoll.peer.core.op import Op, OpState
from wancoll.wire import messages as m

_UNKNOWN = "the operation was finished here and its commit cannot be learnt; input and result are kept"
_ELSEWHERE = "others have committed the operation, and it was not finished here; the tensor is untouched"
_AGAIN = "connect again to rejoin as a new member"


def result(op: Op, epoch: int, contributors: list[str], digest: int, now: float) -> m.Result:
    """*op* was committed in *epoch*; *now* is on the clock of op.posted_at."""
    return m.Result(
        id=op.client_id,
        seq=op.seq,
        epoch=epoch,
        contributors=contributors,
        digest=digest,
        attempts=op.attempts,
        algorithm="none" if op.kind in DATALESS or op.meaning is None else op.meaning.algorithm,
        bytes_sent=op.bytes_sent,
        seconds=now - op.posted_at,
        bytes_saved=op.bytes_saved,
        codec_error=op.codec_error,
    )


def voided(op: Op, void: m.Void, group: str, here: str) -> m.Failure:
    """The master gave *op* up for all members; *here* says what this one called."""
    differ = void.error == "CollectiveMismatch"
    hint = "make the same calls in the same order on every member" if differ else "the tensor is untouched"
    got = f"here {here}" if differ else ""
    who = f"op {op.seq} of group {group}"
    return m.Failure(op.client_id, void.error, void.text, who=who, got=got, hint=hint, calls=dict(void.calls))


def too_small(op: Op, who: str, epoch: m.Epoch) -> m.Failure:
    """*op* cannot run, since *epoch* has fewer than min_world members."""
    names = ", ".join(member.name for member in epoch.members)
    return m.Failure(
        op.client_id,
        "WorldTooSmall",
        f"too few members are left in group {epoch.group} ({epoch.reason}); tensors are untouched",
        who=who,
        expected=f"at least min_world={epoch.min_world} members",
        got=f"{len(epoch.members)}: {names}",
        hint="call update_membership() to wait for joiners",
    )


def over(client_id: int, name: str) -> m.Failure:
    """A call of a member that is out already."""
    return m.Failure(client_id, "Evicted", "this member is no longer in the group", who=name)


# ---- the member is out, however it came to that --------------------------------------------------------


class Ending(NamedTuple):
    """What is told.

    Args:
        of: an op that has not ended.
        last: of the connection as a whole; None: nothing.
    """

    of: Callable[[Op], m.Failure]
    last: m.Failure | None = None


def left(name: str, reason: str) -> Ending:
    """The client detached or died, or the daemon stops."""
    return Ending(lambda op: m.Failure(op.client_id, "PeerDaemonLost", reason, who=name))


def refused(name: str, reason: str) -> Ending:
    """The master does not let the member in."""
    what = f"the master refused the join: {reason}"
    last = m.Failure(0, "ConfigError", what, who=name)
    return Ending(lambda op: m.Failure(op.client_id, "ConfigError", what, who=name), last)


def evicted(name: str, reason: str, committed_upto: int, unknown: bool) -> Ending:
    """The master put the member out. What is done here has not committed, unless nobody can say (*unknown*).

    Of sends and recvs the master does not say what has committed. What the others have committed and this member has
    not finished is of a report that came too late (R7).
    """

    def end(op: Op) -> m.Failure:
        if not op.p2p and op.seq <= committed_upto and op.state in (OpState.waiting, OpState.running):
            return m.Failure(op.client_id, "OutcomeUnknown", _ELSEWHERE, who=name, got=reason, hint=_AGAIN)
        if _done(op) and (unknown or op.p2p):
            return m.Failure(op.client_id, "OutcomeUnknown", _UNKNOWN, who=name, got=reason, hint=_AGAIN)
        return m.Failure(op.client_id, "Evicted", reason, who=name, hint=_AGAIN)

    return Ending(end, m.Failure(0, "Evicted", reason, who=name, hint=_AGAIN))


def forgotten(name: str, cause: str) -> Ending:
    """The control connection was lost, and the master that answers now does not know the member any more."""
    text: dict[str, Any] = {"who": name, "got": f"the control connection was lost: {cause}", "hint": _AGAIN}
    return _cut_off("Evicted", "out of the group", text)


def master_unreachable(name: str, address: str, waited: float, cause: str) -> Ending:
    """No master within master_grace."""
    text: dict[str, Any] = {
        "who": name,
        "expected": f"the master at {address} to answer within {waited:.1f} s",
        "got": cause,
        "hint": "start the master, or check the address and the network, then connect again",
    }
    return _cut_off("MasterUnreachable", "lost the master", text)


def _cut_off(error: str, what: str, text: dict[str, Any]) -> Ending:
    """Nobody says what became of that which is done here (R8)."""

    def end(op: Op) -> m.Failure:
        if _done(op):
            return m.Failure(op.client_id, "OutcomeUnknown", _UNKNOWN, **text)
        return m.Failure(op.client_id, error, f"{what}; tensors are untouched", **text)

    return Ending(end, m.Failure(0, error, what, **text))


def _done(op: Op) -> bool:
    """Whether it may have committed. An update_membership has no result of its own to lose."""
    return op.state is OpState.done and op.kind is not Kind.update_membership
