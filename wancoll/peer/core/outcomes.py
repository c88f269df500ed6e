"""What a client is told of its calls: receipts, failures, and the end of all when the member is out. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from wancoll.collective import DATALESS, Kind
from wancoll.errors import ProtocolError
from wancoll.peer.core.op import Op, OpState
from wancoll.wire import messages as m

_FINISHED = "the operation was finished here and its commit cannot be learnt; input and result are kept"
_OPEN = "others may have committed the operation, which was not finished here; the tensor is untouched"
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
        algorithm="none" if op.kind in DATALESS or op.resolved is None else op.resolved.algorithm,
        bytes_sent=op.bytes_sent,
        seconds=now - op.posted_at,
        bytes_saved=op.bytes_saved,
        codec_error=op.codec_error,
        counted=not op.zeros,
        bytes_in_memory=op.bytes_in_memory,
        bytes_received=op.resolved.bytes_received if op.resolved is not None else 0,
        kept=(0, 0) if op.resolved is None else op.resolved.schedule.kept,
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
    names, islands = ", ".join(member.name for member in epoch.members), len(epoch.members) // epoch.shards
    return m.Failure(
        op.client_id,
        "WorldTooSmall",
        f"too few members are left in group {epoch.group} ({epoch.reason}); tensors are untouched",
        who=who,
        expected=f"at least min_world={epoch.min_world} {'members' if epoch.shards == 1 else 'islands'}",
        got=f"{islands}: {names}",
        hint="call update_membership() to wait for joiners",
    )


def differs(op: Op, client_id: int, here: str, name: str) -> m.Failure:
    """A client that is late calls something else than the others, with whom its daemon has taken part (R20)."""
    return m.Failure(
        client_id,
        "CollectiveMismatch",
        f"this member is late with operation {op.seq}, and calls something else than the others; tensors are untouched",
        who=name,
        expected=str(op.call.posted),
        got=here,
        hint="make the same calls in the same order on every member",
        calls={name: here},
    )


def over(client_id: int, name: str) -> m.Failure:
    """A call of a member that is out already."""
    return m.Failure(client_id, "Evicted", "this member is no longer in the group", who=name)


# ---- the member is out, however it came to that --------------------------------------------------------


class Ending(NamedTuple):
    """What is told."""

    of: Callable[[Op], m.Failure]  # an op that has not ended
    last: m.Failure | None = None  # of the connection as a whole, after all that is told of ops; None: nothing


def left(name: str, reason: str, last: m.Failure | None = None) -> Ending:
    """The client detached or died, or the daemon stops, which says *last*."""
    return _cut_off("PeerDaemonLost", reason, {"who": name})._replace(last=last)


def nonsense(bad: ProtocolError) -> Ending:
    """The client breaks the protocol."""
    return _cut_off("ProtocolError", bad.what, {"who": bad.who, "expected": bad.expected, "got": bad.got})


def asked_to_leave(name: str, reason: str, *, daemon: bool) -> Ending:
    """An operator wants the member, or all of its *daemon*, to leave in order.

    What it has begun and was not done with in time may be done with its share by those who stay.
    """
    what = f"an operator asked this {'daemon' if daemon else 'member'} to leave{f': {reason}' if reason else ''}"
    start = "start `wancoll peer` again and " if daemon else ""
    hint = f"what was committed counts; end here, or {start}connect again to rejoin as a new member"
    return _cut_off("AskedToLeave", what, {"who": name, "hint": hint})


def refused(name: str, reason: str, *, evicted: bool = False) -> Ending:
    """The master does not let the member in; *evicted*: an operator has sent it away while it waited for that."""
    if evicted:
        return _cut_off("Evicted", f"{reason}, while it waited for its place", {"who": name, "hint": _AGAIN})
    return _cut_off("ConfigError", f"the master refused the join: {reason}", {"who": name})


def evicted(name: str, evicted: m.Evicted) -> Ending:
    """The master put the member out. What has not committed by its word has not happened, but where it cannot say.

    Of sends and recvs it never says. Of collectives it does not where this member reported too late (R7): what others
    have committed meanwhile may be with its share, whether it has finished it or not, once it has begun it.
    """
    upto = max(evicted.committed_upto, evicted.unknown_upto)
    text = {"who": name, "hint": _AGAIN}
    return _cut_off("Evicted", evicted.reason, text, lambda op: _may_count(op) and (op.p2p or op.seq <= upto))


def forgotten(name: str, cause: str, *, votes: bool = False) -> Ending:
    """The control connection was lost, and the same master does not know the member any more.

    It has put the member out while it was away: of what is done here nobody says what became (R8), and nothing else
    can have committed. Where members commit among themselves they may go on with what it had only begun.
    """
    text = {"who": name, "got": f"the control connection was lost: {cause}", "hint": _AGAIN}
    return _cut_off(
        "Evicted", "out of the group", text, lambda op: (votes or op.state is OpState.done) and _may_count(op)
    )


def master_unreachable(name: str, address: str, waited: float, cause: str) -> Ending:
    """No master within master_grace.

    One that others have found may have committed whatever has begun here: they can be done with it while this member
    is not (R7).
    """
    text = {
        "who": name,
        "expected": f"the master at {address} to answer within {waited:.1f} s",
        "got": cause,
        "hint": "start the master, or check the address and the network, then connect again",
    }
    return _cut_off("MasterUnreachable", "lost the master", text)


def sent_away(daemon: str, reason: str) -> Ending:
    """The master wants nothing of the daemon any more, and says nothing of its members."""
    hint = "put that right, start the daemon again, then connect again"
    return _cut_off("ConfigError", "sent away by the master", {"who": f"daemon {daemon}", "got": reason, "hint": hint})


def _may_count(op: Op) -> bool:
    """Whether others may have its result.

    A send or recv needs both ends, and update_membership has none to lose. What proves that everyone took part did not
    happen where it never began in this epoch.
    """
    if op.p2p:
        return op.state is OpState.done
    return op.kind is not Kind.update_membership and (op.ran or not op.call.posted.proves_all)


def _cut_off(error: str, what: str, text: dict[str, Any], maybe: Callable[[Op], bool] = _may_count) -> Ending:
    """Nobody says what became of the ops that *maybe* have committed; all others have not happened."""

    def end(op: Op) -> m.Failure:
        if maybe(op):
            known = _FINISHED if op.state is OpState.done else _OPEN
            return m.Failure(op.client_id, "OutcomeUnknown", known, **{"got": what, **text}, cause=error)
        return m.Failure(op.client_id, error, f"{what}; tensors are untouched", **text)

    return Ending(end, m.Failure(0, error, what, **text))
