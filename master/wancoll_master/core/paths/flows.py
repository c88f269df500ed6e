"""What moves over links, as heartbeats tell while somebody looks at the page: rates, and what was sent again. Pure."""

from __future__ import annotations

from wancoll.limits import keep_newest
from wancoll.wire import messages as m
from wancoll_master.core.state import Daemon, Flow, Step

_WINDOW = 0.9  # seconds over which a rate is taken, at least
_NEWEST = 0.3  # weight of the last second's losses: of few segments one that is sent again is no bad link
FRESH = 3.0  # seconds for which a rate counts
MOST = 64  # of one daemon


def heard(step: Step, daemon: Daemon, beat: m.Heartbeat) -> None:
    """A heartbeat of a daemon that has been told that somebody looks."""
    for name, *counts in beat.moved:
        _take(daemon.flows, name, counts, step.now)
    for mid, epoch, seconds in beat.recovered:
        member = daemon.members.get(mid)
        if member is not None and member.in_epoch and epoch == member.group.epoch:
            member.group.current.recovery = max(member.group.current.recovery, seconds)


def _take(flows: dict[str, Flow], name: str, counts: list[int], now: float) -> None:
    sent, segments, resent = counts
    known = flows.get(name)
    fell = known is not None and (sent < known.sent or segments < known.segments or resent < known.resent)
    if known is None or fell or now - known.at > FRESH:  # the first word of it, or of another process
        keep_newest(flows, name, Flow(sent, segments, resent, now), MOST)
    elif now - known.at >= _WINDOW:
        known.rate = (sent - known.sent) / (now - known.at)
        more = segments - known.segments
        share = min(1.0, (resent - known.resent) / more) if more else 0.0
        known.loss += _NEWEST * (share - known.loss)
        known.sent, known.segments, known.resent, known.at = sent, segments, resent, now
        known.known = True
