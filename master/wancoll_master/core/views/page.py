"""What the live page shows of the state: made when somebody looks, in sections that are told when they change. Pure.

GroupTimeline keeps what the state does not: the last events, epochs with what they cost, and throughput while
somebody looks.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from heapq import heappush, heapreplace
from math import inf
from typing import Any

from wancoll.health import LOSSES, RECENT, SILENT, HealthSum
from wancoll.limits import format_size, package_version
from wancoll.units import format_duration, format_rate
from wancoll.wire import messages as m
from wancoll_master.core.liveness import blame
from wancoll_master.core.paths import flows
from wancoll_master.core.state import Group, State
from wancoll_master.core.views import report

EVENTS = 200  # that are kept
_TOLD = 60  # events that are shown
_EPOCHS = 400  # that are kept, of all groups together
_EPOCHS_TOLD = 50  # of a group
MOST_GROUPS = 64  # that are shown; those that wait come first
_MOST_GROUPS_KNOWN = 4 * MOST_GROUPS
_SAMPLES = 600
_SAMPLE_SECONDS = 1.0
_LATELY = 5  # samples that are averaged where operations per second are shown
_MOST_CHORDS = 600  # links beside the ring that are drawn, those that carry most
_WORTH = 0.02  # of what the busiest link carries: beside the ring, what carries less is not drawn
_NAMED = 8
_AT_ONCE = 200  # members without a pause
_FLOWS_AT_ONCE = 2000  # likewise
_WEIGHT = 8  # of a group, in members, and of a member, in flows
_WORLD = re.compile(r".*; (\d+) members: .*", re.DOTALL)

Section = tuple[str, Any]  # its name, and what is to be told: for JSON


@dataclass(slots=True)
class Epoch:
    """One that began, and what it cost."""

    group: str
    number: int
    at: float  # seconds since 1970
    world: int  # 0: not known
    reason: str
    kind: str  # "lost": members were; "joined"; "first"; "other"
    gap: float = 0.0  # from when the master knew of the loss to the new epoch
    recovery: float = 0.0  # from the first sign of it until members went on, as they say; 0: not known


@dataclass(slots=True)
class _Throughput:
    """Throughput of a group, while somebody looks."""

    at: float  # of the newest sample
    heard: int  # operations that were committed then
    samples: deque[tuple[float, float | None, float]] = field(default_factory=lambda: deque(maxlen=_SAMPLES))
    seq: int = 0  # that runs
    since: float = 0.0  # as long as this page has seen it run, seconds since 1970


class GroupTimeline:
    """What the live page shows of the state."""

    def __init__(self) -> None:
        self.events: deque[m.EventRecord] = deque(maxlen=EVENTS)
        self.epochs: deque[Epoch] = deque(maxlen=_EPOCHS)
        self._lost_at: dict[str, float] = {}  # by group: the first loss since its epoch began
        self._throughput: dict[str, _Throughput] = {}  # by group

    def note(self, event: m.EventRecord) -> None:
        """One line of the event log."""
        self.events.append(event)
        if event.kind in LOSSES and event.group:
            self._lost_at.setdefault(event.group, event.time)
            if len(self._lost_at) > _MOST_GROUPS_KNOWN:
                del self._lost_at[next(iter(self._lost_at))]
        elif event.kind in ("epoch", "resumed"):
            self._begins(event)

    def _begins(self, event: m.EventRecord) -> None:
        before = next((one for one in reversed(self.epochs) if one.group == event.group), None)
        found = _WORLD.fullmatch(event.text)
        world = int(found[1]) if found else 0
        reason = event.text.rpartition("; ")[0] if found else event.text
        lost = self._lost_at.pop(event.group, None)
        kind = "lost" if lost is not None else "first" if before is None else "other"
        if before is not None and world > before.world and lost is None:
            kind = "joined"
        gap = max(0.0, event.time - lost) if lost is not None else 0.0
        self.epochs.append(Epoch(event.group, event.epoch, event.time, world, reason, kind, gap))

    # ---- looking -------------------------------------------------------------------------------------

    def look(self, state: State, now: float, wall: float, *, since: float) -> Iterator[Section | None]:
        """The sections as they are *now* on the shell's clock, *wall* and *since* (the start) in seconds since 1970.

        None is a pause, in which the state may change. Of all groups only what the first line needs is kept: collecting
        the garbage of a thousand groups takes longer than any piece.
        """
        events = list(self.events)
        tally, order, weight = HealthSum(events, wall, report.gone(state)), [], 0
        for name in sorted(state.groups):
            for one in report.groups(state, now, (name,)):
                tally.add(one)
                order.append((one.phase == "running" and not one.waits, name))
                weight += _WEIGHT + len(one.members)
            if weight >= _AT_ONCE:
                weight = 0
                yield None
        shown = [name for _, name in sorted(order)[:MOST_GROUPS]]
        well = tally.health(len(state.daemons))
        yield (
            "top",
            {
                "well": well.well,
                "line": well.line,
                "note": well.note,
                "term": state.term,
                "version": package_version(),
                "since": since,
                "daemons": len(state.daemons),
                "groups": sorted(shown),
                "more": len(order) - len(shown),
            },
        )
        yield "events", [[one.time, one.group, one.epoch, one.kind, one.text] for one in events[-_TOLD:]]
        self._throughput = {name: one for name, one in self._throughput.items() if name in shown}
        for name in shown:
            yield None
            for one in report.groups(state, now, (name,)):
                yield from self._of_group(state, state.groups[name], one, now, wall)

    def _of_group(
        self, state: State, group: Group, status: m.GroupStatus, now: float, wall: float
    ) -> Iterator[Section | None]:
        head = f"g/{group.name}/"
        links, rate = yield from _links(state, group, now)
        throughput = self._sample(group, rate, now, wall)
        yield None
        yield head + "members", {"here": _members(status, group), "lost": self._lost(group, wall)}
        yield head + "links", links
        yield head + "now", _now(group, status, throughput, rate, wall)
        yield head + "plan", _plan(status, [one for one in self.events if one.group == group.name])
        yield head + "epochs", self._epochs(group)
        yield head + "history", list(throughput.samples)

    def _sample(self, group: Group, rate: float | None, now: float, wall: float) -> _Throughput:
        """Throughput up to now, with another sample where it is time."""
        known = self._throughput.get(group.name)
        if known is None:
            known = self._throughput[group.name] = _Throughput(now, group.heard)
        elif now - known.at >= _SAMPLE_SECONDS:
            often = max(0, group.heard - known.heard) / (now - known.at)
            known.samples.append((round(wall, 1), _number(rate), round(often, 2)))
            known.at, known.heard = now, group.heard
        seq = group.first_unheard if group.members and group.current.called >= group.first_unheard else 0
        if seq != known.seq:
            known.seq, known.since = seq, wall
        return known

    def _epochs(self, group: Group) -> list[list[Any]]:
        mine = [one for one in self.epochs if one.group == group.name][-_EPOCHS_TOLD:]
        if mine and mine[-1].number == group.epoch:
            mine[-1].recovery = max(mine[-1].recovery, group.current.recovery)
        return [
            [one.number, one.at, one.world, one.kind, one.reason, round(one.gap, 4), round(one.recovery, 4)]
            for one in mine
        ]

    def _lost(self, group: Group, wall: float) -> list[list[Any]]:
        """The members that were lost lately and are not back: name, when, why."""
        back = {member.name for member in [*group.members, *group.joining]}
        found: dict[str, list[Any]] = {}
        for event in self.events:
            if event.group == group.name and event.kind in LOSSES and wall - event.time < RECENT:
                who, _, why = event.text.removeprefix("lost ").partition(": ")
                for name in who.split(", ")[:_NAMED]:
                    found[name] = [name, event.time, why]
        return [one for name, one in found.items() if name not in back][-_NAMED:]


# ---- parts of a group's picture ------------------------------------------------------------------------


def _members(status: m.GroupStatus, group: Group) -> list[list[Any]]:
    """Name, daemon, site, first address, rank, for how many seconds it is silent, and why operations wait for it."""
    sites = {member.mid: member.daemon.site for member in [*group.members, *group.joining]}
    why: dict[str, str] = {}
    for wait in status.waits:
        for cause in wait.causes:
            link = f"its link to {cause.other}: " if cause.other_rank >= 0 else ""
            why.setdefault(cause.member, link + cause.why)
    return [
        [
            one.name,
            one.daemon,
            sites.get(one.mid, ""),
            one.addresses[0] if one.addresses else "",
            one.rank,
            int(one.silent_for) if one.silent_for >= SILENT else 0,
            why.get(one.name, ""),
        ]
        for one in status.members
    ]


def _links(state: State, group: Group, now: float) -> Generator[None, None, tuple[dict[str, Any], float | None]]:
    """What is drawn, and the sum of all rates. It pauses.

    drawn: [from, to (ranks), bytes per second, loss, round trip], null: not known; the ring's come first. sends: by
    rank, what its daemon sends to all members together.
    """
    members = list(group.members)
    first: dict[str, int] = {}  # a daemon may have several members: the first stands for it
    for rank, member in enumerate(members):
        first.setdefault(member.daemon.name, rank)
    ring: list[list[Any]] = []
    busiest: list[tuple[float, float, int, int]] = []  # a heap of rate, loss, from, to
    sends: list[float | None] = [None] * len(members)
    most, work = 0.0, 0
    for rank, member in enumerate(members):
        source, after = member.daemon, members[(rank + 1) % len(members)].daemon
        if first[source.name] == rank:
            for name, flow in source.flows.items():
                if not flow.known or now - flow.at > flows.FRESH or name not in first:
                    continue
                sends[rank], most = (sends[rank] or 0.0) + flow.rate, max(most, flow.rate)
                if name == after.name or not flow.rate:
                    continue
                if len(busiest) < _MOST_CHORDS:
                    heappush(busiest, (flow.rate, flow.loss, rank, first[name]))
                elif flow.rate > busiest[0][0]:
                    heapreplace(busiest, (flow.rate, flow.loss, rank, first[name]))
        if after is not source:
            mine = source.flows.get(after.name)
            here = mine is not None and mine.known and now - mine.at <= flows.FRESH
            seen = (mine.rate, mine.loss) if mine is not None and here else None
            ring.append(_link(state, rank, (rank + 1) % len(members), source.name, after.name, seen))
        work += _WEIGHT + len(source.flows)
        if work >= _FLOWS_AT_ONCE:
            work = 0
            yield
    yield
    busy = sorted((one for one in busiest if one[0] >= _WORTH * most), reverse=True)
    chords = [
        _link(state, source, target, members[source].daemon.name, members[target].daemon.name, (rate, loss))
        for rate, loss, source, target in busy
    ]
    known = [rate for rate in sends if rate is not None]
    return {"drawn": ring + chords, "sends": list(map(_number, sends))}, sum(known) if known else None


def _link(state: State, source: int, target: int, one: str, other: str, seen: tuple[float, float] | None) -> list[Any]:
    path = state.measures.paths.get((one, other))
    loss = seen[1] if seen is not None else path.loss if path is not None else None
    rtt = state.measures.rtt(one, other)
    return [source, target, _number(seen[0]) if seen else None, _number(loss), _number(rtt or None)]


def _number(value: float | None) -> float | None:
    """To three digits: more is not seen, and would be told anew all the time."""
    return float(f"{value:.3g}") if value else value


def _now(
    group: Group, status: m.GroupStatus, throughput: _Throughput, rate: float | None, wall: float
) -> dict[str, Any]:
    late = list(throughput.samples)[-_LATELY:]
    often = sum(one[2] for one in late) / len(late) if late else None
    here = {member.name for member in group.members}
    pairs = [one for one in status.pairs if one.source in here and one.target in here]
    lacks = [one.name for one in group.members if one.called[1] < throughput.seq] if throughput.seq else []
    return {
        "phase": status.phase,
        "epoch": status.epoch,
        "world": len(group.members),
        "joining": len(group.joining),
        "start_world": status.start_world,
        "min_world": status.min_world,
        "committed": group.heard,
        "ops": _number(often),
        "sample": throughput.samples[-1] if throughput.samples else None,
        "rate": _number(rate),
        "runs": throughput.seq,
        "since": round(throughput.since, 1),
        "lacks": lacks[:_NAMED],
        "lacking": len(lacks),
        "waiting": status.waiting_for,
        "waits": [[blame.words(one), one.nbytes, round(wall - one.seconds)] for one in status.waits],
        "pairs": [[one.source, one.target, one.kind, one.why, one.times, one.done] for one in pairs[:_NAMED]],
    }


def _plan(status: m.GroupStatus, events: list[m.EventRecord]) -> dict[str, Any]:
    """What was decided, in words, and why, newest first."""
    facts: list[list[str]] = []
    if status.plan is not None:
        plan, found = status.plan.plan, status.plan
        facts = [
            ["commit", f"by the {plan.collectors}"],
            ["lanes", f"{plan.lanes} a link, in {plan.lane_groups} lane group{'s' * (plan.lane_groups != 1)}"],
            ["parts", f"from {format_size(plan.stripe, 3)}"],
            ["pacing", f"{format_rate(plan.pacing, 3)} a lane" if plan.pacing else "none"],
            ["congestion control", plan.congestion or "as each daemon is set"],
        ]
        if found.beta:
            facts.append(
                ["chosen for", f"{format_duration(found.alpha, 3)} a message, {format_rate(1 / found.beta, 3)}"]
            )
        if found.bottleneck and found.bottleneck < inf:
            facts.append(["slowest edge", format_rate(found.bottleneck, 3)])
        if found.round:
            facts.append(["once around", format_duration(found.round, 3)])
        for kind, entries in sorted(plan.choices.items()):
            facts.append([kind, ", ".join(f"{name} up to {format_size(most, 3)}" if most else name
                                          for most, name in entries)])  # fmt: skip
    why = [[one.time, one.epoch, one.text] for one in events if one.kind == "plan"]
    return {"facts": facts, "why": why[-_NAMED:][::-1]}
