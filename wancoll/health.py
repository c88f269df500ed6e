"""Whether all is well, in one line, from what a master answers: what `wancoll status` says first. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import msgspec

from wancoll.limits import DEFAULT, counted, few
from wancoll.wire.messages import EventRecord, GroupStatus, Status

RECENT = 300.0  # seconds for which a loss is told of
REFUSED = 60.0  # seconds after its last refusal for which a daemon counts, or a joiner that was refused more than once
SILENT = DEFAULT.heartbeat_timeout / 2  # seconds: three heartbeats are missing
LOSSES = ("client died", "daemon died", "evicted")  # kinds of events
ENDS = ("left", "stopped")  # those that say that who is gone is not missed: it, or an operator, said so
_CURE = ". Start them again; if they are gone for good: `wancoll evict --group {} --all`"


@dataclass(frozen=True, slots=True)
class Health:
    """*line* says whether all is well, or else what is not; *note* whom a group that goes on has lost lately."""

    well: bool
    line: str
    note: str = ""


def health(status: Status, now: float, *, group: str = "", mute: Iterable[str] = ()) -> Health:
    """What to say first of *status*, a master's answer, or of its one *group*; "": of all.

    *now*, seconds since 1970, tells how long ago events were. *mute* are addresses of masters that give no status.
    """
    others = sorted(each.name for each in status.groups)
    status = of_group(status, group)
    tally = HealthSum(status.events, now, status.gone)
    for each in status.groups:
        tally.add(each)
    return tally.health(len(status.daemons), wanted=group, others=others, mute=mute)


class HealthSum:
    """health(), of groups that are taken in one by one: a master of very many does other things in between."""

    def __init__(self, events: Sequence[EventRecord], now: float, gone: Iterable[tuple[str, int, str]] = ()) -> None:
        self._now, self._gone = now, {name: (members, who) for name, members, who in gone}
        recent = _recent(events, now)
        last = {event.group: event for event in recent}
        self._lost = {name: event for name, event in last.items() if event.kind in LOSSES}  # and nobody of it is here
        self._loss = max((one for one in recent if one.kind in LOSSES), key=lambda one: one.time, default=None)
        self._back = False
        self._refused = _refusals(events, now)
        self._groups = self._members = 0
        self._slow: list[str] = []
        self._troubles: list[str] = []

    def add(self, group: GroupStatus) -> None:
        """One more."""
        self._groups += 1
        self._members += sum(member.rank >= 0 for member in group.members)
        self._slow += _slow(group)
        self._troubles += _troubles(group)
        self._lost.pop(group.name, None)
        who = self._refused.get(group.name, ("", ""))[0]
        if any(member.name == who and member.rank >= 0 for member in group.members):  # it is in now
            del self._refused[group.name]
        if self._loss is not None and group.name == self._loss.group:
            self._back = _is_back(group, self._loss)

    def health(self, daemons: int, *, wanted: str = "", others: Sequence[str] = (), mute: Iterable[str] = ()) -> Health:
        """What to say first, of so many *daemons*; *wanted* is the one group that was asked for, "": all were.

        *others* are names of all groups, and *mute* is as health() has it.
        """
        cures = {name: _CURE.format(name) for name in self._gone}
        lost = self._lost.items()
        troubles = [f"{_loss(one, self._now)}; nobody is left{cures.get(name, '')}" for name, one in lost]  # the worst
        troubles += [_gone(name, *about) for name, about in self._gone.items() if name not in self._lost]
        troubles += [line for _, line in self._refused.values()]
        troubles += self._slow + self._troubles
        if wanted and not self._groups and wanted not in self._lost | self._gone:
            troubles.append(no_group(wanted, others))
        troubles += [f"master {address} gives no status" for address in mute]
        note = _loss(self._loss, self._now, back=self._back) if self._loss is not None else ""
        if troubles:
            more = f" (and {len(troubles) - 1} more)" if len(troubles) > 1 else ""
            return Health(False, troubles[0] + more, "" if note and note in troubles[0] else note)
        if not self._groups:
            return Health(True, f"all is well: no group, {counted(daemons, 'daemon')}", note)
        here = f"{counted(self._groups, 'group')}, {counted(self._members, 'member')}"
        return Health(True, f"all is well{' again' if note else ''}: {here}", note)


def no_group(wanted: str, others: Sequence[str]) -> str:
    """Say that a master has no group *wanted*, and which *others* it has."""
    return f"there is no group {wanted}; the master has {few(others) or 'none'}"


def of_group(status: Status, name: str) -> Status:
    """The part of *status* for the group *name*, with its daemons' links; "": all."""
    if not name:
        return status
    groups = [group for group in status.groups if group.name == name]
    daemons = {member.daemon for group in groups for member in group.members}
    return msgspec.structs.replace(
        status,
        groups=groups,
        daemons=sorted(daemons),
        events=[event for event in status.events if event.group == name],
        gone=[one for one in status.gone if one[0] == name],
        links=[link for link in status.links if {link.source, link.target} <= daemons],
    )


def _troubles(group: GroupStatus) -> Iterator[str]:
    """What else is not well there."""
    for member in group.members:
        if member.silent_for >= SILENT:
            yield f"group {group.name}: {member.name} has been silent for {member.silent_for:.1f} s"
    members = len({member.rank for member in group.members if member.rank >= 0})  # islands
    if group.phase != "running":
        yield f"group {group.name} is {group.phase}, and waits for {group.waiting_for or 'its members'}"
    elif members < group.min_world:
        yield f"group {group.name} waits for joiners: {members} of min_world={group.min_world} members are here"


def _slow(group: GroupStatus) -> Iterator[str]:
    """Its oldest operation that takes long."""
    for wait in group.waits[:1]:
        if not wait.causes:
            yield f"group {group.name}: {wait.op} has not ended after {wait.seconds:.0f} s"
            return
        cause = wait.causes[0]
        who = cause.member if cause.other_rank < 0 else f"the link {cause.member} -> {cause.other}"
        yield f"group {group.name} waits for {who} ({wait.seconds:.0f} s): {cause.why}"


def _recent(events: Sequence[EventRecord], now: float) -> list[EventRecord]:
    """Those of the last minutes that say that somebody of a group went, lost or not, or that its others went on."""
    kinds = (*LOSSES, *ENDS, "epoch", "resumed")
    return [event for event in events if event.group and event.kind in kinds and now - event.time < RECENT]


def _refusals(events: Sequence[EventRecord], now: float) -> dict[str, tuple[str, str]]:
    """Joiners that are refused again and again: by group, the last one's name and the line. "" is of daemons: once.

    They are counted by group: a private daemon may have another name each time.
    """
    times: dict[str, list[float]] = {}
    found = {}
    for event in events:
        if event.kind == "refused" and now - event.time < RECENT:
            before = times.setdefault(event.group, [])
            before.append(event.time)
            about, _, why = event.text.partition(": ")
            who = about.partition(" of daemon ")[0]
            again = f", refusal {len(before)} in {now - before[0]:.0f} s" if len(before) > 1 else ""
            when = f"{max(0.0, now - event.time):.0f} s ago{again}"
            where = f"group {event.group}" if event.group else "the master"
            if (len(before) > 1 or not event.group) and now - event.time < REFUSED:
                found[event.group] = who, f"{where} refused {who} {when}: {why}"
    return found


def _loss(event: EventRecord, now: float, *, back: bool = False) -> str:
    who, _, why = event.text.partition(": ")
    when = f"{max(0.0, now - event.time):.0f} s ago{', now back' if back else ''}"
    return f"group {event.group} {who} {when}" + (f": {why}" if why else "")


def _gone(group: str, members: int, who: str) -> str:
    ran = f"group {group} of {counted(members, 'member')} was running, and none has come back"
    return f"{ran}: {who} did not say that they stop{_CURE.format(group)}"


def _is_back(group: GroupStatus, loss: EventRecord) -> bool:
    """Whether all who were lost are members again."""
    who = loss.text.partition(": ")[0].removeprefix("lost ").split(", ")
    return {member.name for member in group.members if member.rank >= 0}.issuperset(who)  # no joiners
