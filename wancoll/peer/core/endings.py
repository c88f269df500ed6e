"""What a client is told of its calls when the member is out of the group, however it came to that. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from wancoll.peer.core.ops import failure
from wancoll.wire import messages as m

_UNKNOWN = "the operation was finished here and its commit cannot be learnt; input and result are kept"
_ELSEWHERE = "others have committed the operation, and it was not finished here; the tensor is untouched"
_AGAIN = "connect again to rejoin as a new member"


class Ending(NamedTuple):
    """What is told.

    Args:
        call: of a call, by its number and whether it was done here.
        last: of the connection as a whole; None: nothing.
    """

    call: Callable[[int, bool], m.Failure]
    last: m.Failure | None = None


def left(name: str, reason: str) -> Ending:
    """The client detached or died, or the daemon stops."""
    return Ending(lambda call, _: failure(call, "PeerDaemonLost", reason, who=name))


def refused(name: str, reason: str) -> Ending:
    """The master does not let the member in."""
    what = f"the master refused the join: {reason}"
    last = failure(0, "ConfigError", what, who=name)
    return Ending(lambda call, _: failure(call, "ConfigError", what, who=name), last)


def evicted(
    name: str, reason: str, unknown: bool, exchanges: Collection[int], elsewhere: Collection[int] = ()
) -> Ending:
    """The master put the member out. What is done here has not committed, unless nobody can say (*unknown*).

    Args:
        name: the member's.
        reason: the master's.
        unknown: of Evicted.
        exchanges: numbers of sends and recvs, of which the master does not say what has committed.
        elsewhere: numbers of what the others have committed and this member has not finished.
    """

    def end(call: int, done: bool) -> m.Failure:
        if call in elsewhere:
            return failure(call, "OutcomeUnknown", _ELSEWHERE, who=name, got=reason, hint=_AGAIN)
        if done and (unknown or call in exchanges):
            return failure(call, "OutcomeUnknown", _UNKNOWN, who=name, got=reason, hint=_AGAIN)
        return failure(call, "Evicted", reason, who=name, hint=_AGAIN)

    return Ending(end, failure(0, "Evicted", reason, who=name, hint=_AGAIN))


def forgotten(name: str, cause: str) -> Ending:
    """The control connection was lost, and the master that answers now does not know the member any more."""
    text: dict[str, Any] = {"who": name, "got": f"the control connection was lost: {cause}", "hint": _AGAIN}

    def end(call: int, done: bool) -> m.Failure:
        if done:
            return failure(call, "OutcomeUnknown", _UNKNOWN, **text)
        return failure(call, "Evicted", "out of the group; tensors are untouched", **text)

    return Ending(end, failure(0, "Evicted", "out of the group", **text))


def master_unreachable(name: str, address: str, waited: float, cause: str) -> Ending:
    """No master within master_grace."""
    text: dict[str, Any] = {
        "who": name,
        "expected": f"the master at {address} to answer within {waited:.1f} s",
        "got": cause,
        "hint": "start the master, or check the address and the network, then connect again",
    }

    def end(call: int, done: bool) -> m.Failure:
        if done:
            return failure(call, "OutcomeUnknown", _UNKNOWN, **text)
        return failure(call, "MasterUnreachable", "lost the master; tensors are untouched", **text)

    return Ending(end, failure(0, "MasterUnreachable", "lost the master", **text))
