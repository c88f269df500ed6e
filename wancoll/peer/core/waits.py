"""What a member's slow operations wait for, as seen here: for the master, for status and for the log. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

from wancoll.collective import Descriptor
from wancoll.peer.core.calls import Call, Meaning
from wancoll.peer.core.ops import Exchange, ExchangeState, Op, OpState
from wancoll.peer.core.p2p import Exchanges
from wancoll.peer.core.stalls import LinkView
from wancoll.wire import messages as m

MOST_OPS = 8
MOST_LINKS = 64
SAID_AGAIN = 30.0  # seconds between two waits that are logged
_STAGES = {OpState.waiting: "links", OpState.running: "moving", OpState.done: "done", OpState.given_up: "done"}
_EXCHANGE_STAGES = {
    ExchangeState.told: "alone",
    ExchangeState.matched: "links",
    ExchangeState.running: "moving",
    ExchangeState.done: "done",
}


class Member(Protocol):
    """What is told of a member."""

    group: str
    mid: int
    epoch: m.Epoch | None
    ops: dict[int, Op]
    p2p: Exchanges

    def meaning(self, call: Call) -> Meaning:
        """What a call means in the current epoch."""


class Seen(NamedTuple):
    """A link of the member: to whom, for what, how it is. *reason*: why it is down."""

    other: int
    p2p: bool
    view: LinkView
    reason: str = ""


def report(member: Member, links: list[Seen], now: float, slow_after: float) -> m.Waits | None:
    """What the master is to know now; None if nothing is slow.

    Args:
        member: whose.
        links: all that it has, or needs.
        now: on the clock of Op.posted_at.
        slow_after: seconds, see Limits.
    """
    if member.epoch is None:
        return None
    ops = [_op(member, op, links, now) for op in _slow(member, now, slow_after)]
    needed = {(mid, channel) for op in _slow(member, now, slow_after) for mid, channel in _needs(member, op)}
    told = []
    for seen in links:
        state = seen.view.state
        if (seen.other, seen.p2p) in needed or (state == "parked" and seen.view.since >= slow_after):
            view = seen.view
            told.append(
                m.LinkWait(seen.other, seen.p2p, state, view.since, view.heard, view.backlog, seen.reason[:256])
            )
    if not ops and not told:
        return None
    told.sort(key=lambda link: (_ORDER.index(link.state), -link.since))
    return m.Waits(member.group, member.mid, member.epoch.epoch, ops, told[:MOST_LINKS])


_ORDER = ("down", "dead", "blocked", "parked", "busy", "idle")  # what matters comes first


def _slow(member: Member, now: float, slow_after: float) -> Iterator[Op | Exchange]:
    """The oldest that are slow, at most MOST_OPS of them."""
    count = 0
    for calls in (member.ops, member.p2p.open):
        for op in calls.values():
            if now - op.posted_at < slow_after or count >= MOST_OPS:
                break  # in the order of the calls
            if op.outcome is None:
                count += 1
                yield op


def _needs(member: Member, op: Op | Exchange) -> set[tuple[int, bool]]:
    """Its links: the other's mid, and whether it is one for sends and recvs."""
    if isinstance(op, Exchange):
        return {(op.other, True)} if op.state is not ExchangeState.told else set()
    mids = set(member.meaning(op.call).needs)
    if op.state is OpState.waiting and member.epoch is not None:  # operations start when the neighbours' are up
        order = [one.mid for one in member.epoch.members]
        place = order.index(member.mid)
        mids |= {order[place - 1], order[(place + 1) % len(order)]} - {member.mid}
    return {(mid, False) for mid in mids}


def _op(member: Member, op: Op | Exchange, links: list[Seen], now: float) -> m.OpWait:
    needs = _needs(member, op)
    still = min((seen.view.still for seen in links if (seen.other, seen.p2p) in needs), default=0.0)
    age = now - op.posted_at
    if isinstance(op, Exchange):
        return m.OpWait(0, str(op), op.nbytes, _EXCHANGE_STAGES[op.state], age, still, op.other)
    what: Descriptor = member.meaning(op.call).descriptor
    return m.OpWait(op.seq, str(what)[:1000], what.nbytes, _STAGES[op.state], age, still)


def plain(waits: m.Waits | None, names: Callable[[int], str]) -> dict[str, object]:
    """For the daemon's own status: which operations, since when, and how their links are."""
    if waits is None:
        return {"operations": [], "links": []}
    return {
        "operations": [
            {
                "seq": op.seq,
                "what": op.what,
                "nbytes": op.nbytes,
                "stage": op.stage,
                "seconds": round(op.age, 3),
                "still": round(op.still, 3),
            }
            for op in waits.ops
        ],
        "links": [
            {
                "member": names(link.other),
                "p2p": link.p2p,
                "state": link.state,
                "seconds": round(link.since, 3),
                "heard": round(link.heard, 3),
                "backlog": link.backlog,
                "reason": link.reason,
            }
            for link in waits.links
        ],
    }


def local_words(waits: m.Waits, names: Callable[[int], str]) -> str:
    """In a sentence, while the master has not said more: "" without an operation."""
    if not waits.ops:
        return ""
    op = waits.ops[0]
    what = f"operation {op.seq} ({op.what})" if op.seq else op.what
    text = f"{what} has not ended {op.age:.1f} s after it was called"
    if op.stage == "alone":
        return f"{text}: {names(op.other)} has not called its half"
    if op.stage == "done":
        return f"{text}: it is finished here and waits for the others"
    bad = [link for link in waits.links if link.state in ("down", "dead", "blocked")]
    if bad:
        link = bad[0]
        return f"{text}: the link to {names(link.other)} is {link.state} for {link.since:.1f} s {link.reason}".rstrip()
    return f"{text}: its last byte moved {op.still:.1f} s ago"


class WaitLog:
    """Which waits are worth a line in the log: one when a wait begins, one when it ends, not too often."""

    def __init__(self) -> None:
        self._key: object = None  # of the wait that was logged last and has not ended
        self._since = 0.0
        self._logged_at = -SAID_AGAIN

    def begins(self, key: object, since: float, now: float) -> bool:
        """Whether to log that the wait *key* began at *since*."""
        if self._key is not None or now - self._logged_at < SAID_AGAIN:
            return False
        self._key, self._since, self._logged_at = key, since, now
        return True

    def ended(self, still: object, now: float) -> float:
        """Seconds that the logged wait took, if it is over, since what waits now is *still* (None: nothing); else 0."""
        if self._key is None or self._key == still:
            return 0.0
        self._key = None
        return now - self._since
