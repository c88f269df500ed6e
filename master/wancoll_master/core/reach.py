"""Who could not reach whom, since when, why, and what was done about it: kept for a while for people. Pure."""

from __future__ import annotations

from wancoll.wire import messages as m
from wancoll_master.core.state import Group, Member, Step, Trouble, clip

KEPT = 64  # pairs of a group
KEPT_SECONDS = 600.0  # after they were last told of


def note(step: Step, group: Group, source: Member, target: Member, kind: str, why: str) -> None:
    """*source* says that its link to *target* is down."""
    key = source.name, target.name
    known = group.troubles.pop(key, None)
    if known is None or step.now - known.last > KEPT_SECONDS:
        known = Trouble(kind, why, step.now, step.now)
    known.kind, known.why, known.last = kind, clip(why, 300), step.now
    known.times += 1
    group.troubles[key] = known  # the newest last
    while len(group.troubles) > KEPT:
        del group.troubles[next(iter(group.troubles))]


def acted(group: Group, pairs: set[tuple[str, str]], what: str) -> None:
    """The master did *what* about these pairs of names, in whichever direction they were told."""
    for (source, target), trouble in group.troubles.items():
        if (source, target) in pairs or (target, source) in pairs:
            trouble.done = what


def same_as_other_end(group: Group, source: Member, target: Member) -> None:
    """What the master did when *target* told of the pair, it did for *source*, too."""
    other = group.troubles.get((target.name, source.name))
    if other is not None:
        group.troubles[source.name, target.name].done = other.done


def statuses(group: Group, now: float) -> list[m.PairStatus]:
    """For `wancoll status`, newest first."""
    return [
        m.PairStatus(*ends, one.kind, one.why, now - one.since, now - one.last, one.times, one.done)
        for ends, one in reversed(group.troubles.items())
        if now - one.last <= KEPT_SECONDS
    ]


def words(step: Step, group: Group, pairs: set[tuple[str, str]]) -> str:
    """What was told of these pairs, in either direction, in a sentence."""
    told = [
        f"{source} cannot reach {target} for {step.now - one.since:.1f} s ({one.why})"
        if one.kind == "unreachable"
        else f"{source} lost its link to {target} {step.now - one.since:.1f} s ago ({one.why})"
        for (source, target), one in group.troubles.items()
        if (source, target) in pairs or (target, source) in pairs
    ]
    return clip("; ".join(told), 600)
