"""What a member's slow operations wait for, as seen here: for the master, for status and for the log. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from wancoll.peer.core.calls import EpochView
from wancoll.peer.core.liveness.stalls import LinkView
from wancoll.peer.core.member import Member
from wancoll.peer.core.op import Op, OpState
from wancoll.wire import messages as m

MOST_OPS = 8
MOST_LINKS = 64
_NAMED = 4  # members, in a sentence
SAID_AGAIN = 30.0  # seconds between two waits that are logged
_STAGES = {
    OpState.waiting: "links",  # of a send or recv: "alone"
    OpState.matched: "links",
    OpState.running: "moving",
    OpState.done: "done",
    OpState.given_up: "done",
}


class Seen(NamedTuple):
    """A link of the member: to whom, for what, how it is. *reason*: why it is down."""

    other: int
    p2p: bool
    view: LinkView
    reason: str = ""


def report(
    member: Member,
    links: list[Seen],
    now: float,
    slow_after: float,
    lacks_input: Callable[[Op], bool] = lambda _: False,
) -> m.Waits | None:
    """What the master is to know now of *member*, and all *links* that it has, or needs; None if nothing is slow.

    *now* is on the clock of Op.posted_at; *lacks_input* says whether an op of the engine's waits for its own client.
    """
    view = member.view
    if view is None:
        return None
    slow = list(_slow(member, now, slow_after))
    ops = [_op(member, view, op, links, now, lacks_input) for op in slow]
    needed = {(mid, op.p2p) for op in slow for mid in _needs(member, view, op)}
    told = []
    for seen in links:
        state = seen.view.state
        if (seen.other, seen.p2p) in needed or (state == "parked" and seen.view.since >= slow_after):
            link = seen.view
            told.append(
                m.LinkWait(seen.other, seen.p2p, state, link.since, link.heard, link.backlog, seen.reason[:256])
            )
    if not ops and not told:
        return None
    told.sort(key=lambda link: (_ORDER.index(link.state), -link.since))
    return m.Waits(*view.head, ops, told[:MOST_LINKS])


_ORDER = ("down", "dead", "blocked", "parked", "busy", "idle")  # what matters comes first


def _slow(member: Member, now: float, slow_after: float) -> Iterator[Op]:
    """The oldest that are slow, at most MOST_OPS of them."""
    count = 0
    for table in (member.collectives, member.p2p):
        for op in table.open.values():
            if now - op.posted_at < slow_after or count >= MOST_OPS:
                break  # in the order of the calls
            if op.outcome is None:
                count += 1
                yield op


def _needs(member: Member, view: EpochView, op: Op) -> frozenset[int]:
    """Mids of the members whose links it needs."""
    if op.state is OpState.waiting:
        if op.p2p:
            return frozenset()
        return member.resolved(op).needs | view.neighbours  # operations start when the neighbours' links are up
    return member.resolved(op).needs


def _op(
    member: Member, view: EpochView, op: Op, links: list[Seen], now: float, lacks_input: Callable[[Op], bool]
) -> m.OpWait:
    needs = _needs(member, view, op)
    still = min((seen.view.still for seen in links if seen.p2p is op.p2p and seen.other in needs), default=0.0)
    stage, age, what = _STAGES[op.state], now - op.posted_at, member.resolved(op).descriptor
    if stage == "moving" and lacks_input(op):
        stage = "input"
    if op.p2p:
        stage = "alone" if op.state is OpState.waiting else stage
        return m.OpWait(0, str(op), what.nbytes, stage, age, still, op.other)
    return m.OpWait(op.seq, str(what)[:1000], what.nbytes, stage, age, still)


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


def local_words(
    waits: m.Waits, names: Callable[[int], str], unheard: frozenset[int] | None = None, master: str = ""
) -> str:
    """What *waits*, in a sentence, while the master has not said more; "" without an operation.

    *unheard* has not said that the first operation is finished there; None: the master commits it. *master* says which
    one is away, and for how long; "": it is here.
    """
    if not waits.ops:
        return ""
    op = waits.ops[0]
    what = f"operation {op.seq} ({op.what})" if op.seq else op.what
    text = f"{what} has not ended {op.age:.1f} s after it was called"
    bad = next((link for link in waits.links if link.state in ("down", "dead", "blocked")), None)
    if op.stage == "alone":
        text += f": {names(op.other)} has not called its half"
    elif op.stage == "input":
        text += ": its own client has not filled its input"
    elif op.stage == "done" and unheard is None and master:
        return f"{text}: it is finished here and waits for {master}"
    elif op.stage == "done":
        others = ", ".join(names(mid) for mid in sorted(unheard or ())[:_NAMED])
        text += f": it is finished here and waits for {others or 'the others'}"
    elif bad is not None:
        text += f": the link to {names(bad.other)} is {bad.state} for {bad.since:.1f} s {bad.reason}".rstrip()
    else:
        text += f": its last byte moved {op.still:.1f} s ago"
    return f"{text}; not there: {master}" if master else text


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
