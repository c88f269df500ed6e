"""A master's answer as people read it: lines and tables that fit a terminal of 80 columns. Pure, but for rich."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.segment import Segment, SegmentLines
from rich.table import Table
from rich.text import Text

from wancoll.limits import counted, format_size
from wancoll.units import format_bytes, format_duration, format_rate
from wancoll.wire.messages import (
    EventRecord,
    GroupStatus,
    LinkStatus,
    PairStatus,
    PlanStatus,
    Status,
    WaitStatus,
)

if TYPE_CHECKING:
    from rich.console import RenderableType

MATRIX = 12  # daemons up to which paths are shown as a matrix if that fits, beyond as a list
LISTED = 50  # paths in that list
WHOLE_ADDRESS = 30  # characters: no cell breaks an address of at most that many
NEWEST = 8  # lines of a screen that the last events have at least
_TIME = "%Y-%m-%d %H:%M:%S"


def terminal() -> Console:
    """Standard output: as wide as the terminal, or as COLUMNS; else 80 columns."""
    return Console(markup=False, highlight=False)


def render(
    answer: Status, masters: Iterable[str], console: Console, *, brief: bool = False, whole: Status | None = None
) -> Iterator[RenderableType]:
    """All of *answer*, as wide as *console*; *brief*: without plans, failed links and measured paths.

    Of several *masters*: what each is. *whole*: what the master said, of which *answer* is the part of one group.
    """
    whole = whole or answer
    yield Text(
        f"master: version {clean(answer.version)}, term {answer.term}, up {duration(answer.uptime)}, "
        f"{counted(len(whole.daemons), 'daemon')}, {counted(len(whole.groups), 'group')}"
    )
    if answer.rotating:
        yield Text("two keys of the master are good: `wancoll key rotate --finish` drops the old one")
    if masters := list(masters):
        yield Text(f"masters: {'; '.join(map(clean, masters))}")
    for group in answer.groups:
        yield Text()
        yield from _group(group, answer.relays, brief=brief)
    if answer.links and not brief:
        yield Text()
        yield _links(answer.links, console)
    yield from _last(answer.events)


def screen(first: Iterable[RenderableType], rest: Status, others: Iterable[RenderableType], console: Console) -> Group:
    """What fits on one screen: the lines *first*, then *others*, what render() makes of *rest* without events.

    Below stand the events of *rest*, the newest of them in any case.
    """
    above = console.render_lines(Group(*first, *others), pad=False)
    events: Sequence[EventRecord] = rest.events
    room = max(console.height - len(above), min(NEWEST, console.height // 2))
    while len(below := console.render_lines(Group(*_last(events)), pad=False)) > room and events:
        events = events[1:]
    if len(above) + len(below) > console.height:
        keep = max(0, console.height - len(below) - 1)
        more = f"... {counted(len(above) - keep, 'more line')}: on a higher screen, or with `wancoll status`"
        above = [*above[:keep], [Segment(more[: console.width])]]
    return Group(SegmentLines([*above, *below][: console.height], new_lines=True))


def _last(events: Sequence[EventRecord]) -> Iterator[RenderableType]:
    if events:
        yield Text("\nlast events (UTC)")
        yield event_table(events)


def _group(group: GroupStatus, relays: Sequence[str], *, brief: bool) -> Iterator[RenderableType]:
    yield Text(
        f"group {clean(group.name)}: {clean(group.phase)}, epoch {group.epoch}, committed up to "
        f"{group.committed_upto}, start_world {group.start_world}, min_world {group.min_world}, lanes {group.lanes}"
    )
    if group.waiting_for:
        yield Text(f"waiting for: {clean(group.waiting_for)}")
    for wait in group.waits:
        yield from map(Text, map(clean, wait_lines(wait)))
    yield _members(group)
    if brief:
        return
    if group.pairs:
        yield Text("links that failed between members")
        yield from map(Text, map(clean, map(pair_line, group.pairs)))
    if group.punched:
        yield Text("punched: both dial at once")
        yield from (Text(clean(f"  {pair_rate(pair)}")) for pair in group.punched)
    if group.relayed:
        yield Text(clean(f"through a relay ({' or else '.join(relays) or 'none is here now'})"))
        yield from (Text(clean(f"  {pair_rate(pair)}")) for pair in group.relayed)
    if group.plan is not None:
        yield from map(Text, map(clean, plan_lines(group.plan)))


def _members(group: GroupStatus) -> Table:
    """Daemons have no column where each is called as its member, as it is unless one is named."""
    named = any(member.name != member.daemon for member in group.members)
    table = _table("rank", "member", "done up to", "silent", *(["daemon"] if named else []), "addresses")
    for member in sorted(group.members, key=lambda m: (m.state != "member", m.rank, m.mid)):
        table.add_row(
            str(member.rank) if member.state == "member" else clean(member.state),
            clean(member.name),
            str(member.done_upto),
            f"{member.silent_for:.1f} s",
            *([clean(member.daemon)] if named else []),
            "\n".join(_address(clean(one)) for one in member.addresses),
        )
    table.columns[-1].no_wrap = all(len(one) <= WHOLE_ADDRESS for each in group.members for one in each.addresses)
    return table


def _address(text: str) -> str:
    """A line of its own, and the port another one where it is so long that a column may have to break it."""
    host, _, port = text.rpartition(":")
    return text if len(text) <= WHOLE_ADDRESS else f"{host}\n:{port}"


def _table(*names: str) -> Table:
    """Empty, with lines between columns; what does not fit into one goes on below: nothing is cut."""
    table = Table(title_justify="left", title_style="")
    for name in names:
        table.add_column(name, overflow="fold")
    return table


def wait_lines(wait: WaitStatus) -> list[str]:
    """A slow operation and whom it waits for, in words."""
    what = f", {wait.what}" if wait.what and wait.seq else ""
    lines = [f"{wait.op}{what}, epoch {wait.epoch}: not ended after {wait.seconds:.1f} s, "]
    lines[0] += f"done by {counted(wait.done, 'member')}"
    for cause in wait.causes:
        ends = f"{cause.member} (rank {cause.rank})"
        if cause.other_rank >= 0:
            ends = f"link {ends} -> {cause.other} (rank {cause.other_rank})"
        lines.append(f"  waits for {ends}: {cause.why}, since {cause.seconds:.1f} s ago")
    if not wait.causes:
        lines.append("  no member or link stands out")
    return lines


def pair_line(one: PairStatus) -> str:
    """A link that failed, and what was done about it, in words."""
    often = f", {one.times} times, last {duration(one.last)} ago" if one.times > 1 else ""
    done = f"; {one.done}" if one.done else ""
    return f"  {one.source} -> {one.target}: {one.kind} {duration(one.seconds)} ago{often}: {one.why}{done}"


def plan_lines(status: PlanStatus) -> list[str]:
    """What the master decided for the group's epoch, in words."""
    plan = status.plan
    ring = [f"slowest edge {format_rate(status.bottleneck, 3)}"] if status.bottleneck else []
    ring += [f"once around {format_duration(status.round, 3)}"] if status.round else []
    lines = [f"ring: {', '.join(ring)}"] if ring else []
    lines.append(f"operations are committed by the {plan.collectors}")
    lines.append(
        f"plan: lanes {plan.lanes}, lane groups {plan.lane_groups}, parts from {format_size(plan.stripe, 3)}, "
        f"pacing {format_rate(plan.pacing, 3) + ' per lane' if plan.pacing else 'none'}, "
        f"congestion control {plan.congestion or 'as each daemon is set'}"
    )
    if plan.shares:
        owned = ", ".join(f"{100 * share / sum(plan.shares):.3g}" for share in plan.shares)
        lines.append(f"  a direct all_reduce's tensor is owned to {owned} %, by rank")
    for kind, entries in sorted(plan.choices.items()):
        chosen = [f"{name} up to {format_size(most, 3)}" if most else name for most, name in entries]
        lines.append(f"  {kind}: {', '.join(chosen)}")
    return lines


def _links(links: list[LinkStatus], console: Console) -> Table:
    """A matrix where that fits, else a list."""
    title = "paths: round trip, bandwidth, share of segments sent again, bytes sent"
    daemons = sorted({link.source for link in links} | {link.target for link in links})
    if len(daemons) <= MATRIX:
        matrix = _table("from \\ to", *map(clean, daemons))
        matrix.title = title
        found = {(link.source, link.target): link for link in links}
        for source in daemons:
            matrix.add_row(clean(source), *(path(found.get((source, target))) for target in daemons))
        if console.measure(matrix, options=console.options.update(max_width=10000)).maximum <= console.width:
            return matrix
    table = _table("from", "to", title)
    table.title = f"the first {LISTED} of {len(links)}" if len(links) > LISTED else None
    for link in links[:LISTED]:
        table.add_row(clean(link.source), clean(link.target), path(link))
    return table


def pair_rate(pair: tuple[str, str, float, str]) -> str:
    """Two members that do not just dial each other, how fast that is, and why they do not."""
    one, other, rate, why = pair
    return f"{one} - {other}" + (f": {format_rate(rate, 3)}" if rate else "") + (f" ({why})" if why else "")


def path(link: LinkStatus | None) -> str:
    """What is known of a path, in a few words."""
    if link is None:
        return ""
    known = [format_duration(link.rtt, 3)] if link.rtt else []
    known += [format_rate(link.bandwidth, 3) + ("" if link.lanes else " (probe)")] if link.bandwidth else []
    known += [f"{100 * link.loss:.2g} %"] if link.loss else []
    known += [f"sent {format_bytes(link.sent)}"] if link.sent else []
    return ", ".join(known)


def event_table(events: Iterable[EventRecord]) -> Table:
    """Times, and beside them what happened, on as many lines as it takes."""
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for event in events:
        table.add_row(when(event), what(event))
    return table


def columns(names: Sequence[str], rows: Iterable[Sequence[str]], console: Console, *, wide: Sequence[str]) -> None:
    """Print a row a line; a terminal that is too narrow breaks what the *wide* columns hold, and cuts nothing."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="")
    for name in names:
        table.add_column(name, overflow="fold", no_wrap=name not in wide)
    for row in rows:
        table.add_row(*map(Text, map(clean, row)))
    if not console.is_terminal:  # it is for a program, such as grep
        console.width = console.measure(table, options=console.options.update(max_width=100000)).maximum
    console.print(table)


def when(event: EventRecord) -> str:
    """Its time, UTC, to the second."""
    return datetime.fromtimestamp(event.time, UTC).strftime(_TIME)


def what(event: EventRecord) -> str:
    """The rest of it: "g, epoch 3: evicted: lost m2: ..."."""
    where = f"{clean(event.group)}, epoch {event.epoch}: " if event.group else ""
    return f"{where}{clean(event.kind)}: {clean(event.text)}"


def clean(text: str) -> str:
    """*text* without characters that would steer the terminal: it comes from the network."""
    return "".join(c if c.isprintable() else "?" for c in text)


def duration(seconds: float) -> str:
    """Seconds as "1 d 2 h", "2 h 3 min", "3 min 4 s" or "4 s"."""
    whole = int(seconds)
    units = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))
    parts = []
    for unit, size in units:
        count, whole = divmod(whole, size)
        if count:
            parts.append(f"{count} {unit}")
    return " ".join(parts[:2]) or "0 s"
