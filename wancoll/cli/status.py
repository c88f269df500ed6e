"""`wancoll status`: asks a master how its groups are, and prints it as tables or as JSON."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from cyclopts import Parameter

from wancoll.errors import MasterUnreachable, ProtocolError, WancollError
from wancoll.limits import DEFAULT, PROTOCOL_VERSION, format_size
from wancoll.local import MASTER_PORT, split_address
from wancoll.net.ask import ask
from wancoll.options import DEFAULT_MASTER, Seconds, addresses
from wancoll.units import format_duration, format_rate
from wancoll.wire.messages import (
    Bye,
    FromMaster,
    GroupStatus,
    LinkStatus,
    PairStatus,
    PlanStatus,
    StandsBy,
    Status,
    StatusRequest,
    WaitStatus,
)

if TYPE_CHECKING:
    from rich.table import Table

OTHERS_TIMEOUT = 1.0  # seconds for the other masters, once the leader has answered
PLAIN_WIDTH = 160  # columns where stdout is no terminal
MATRIX = 12  # daemons up to which paths are shown as a matrix, beyond as a list
LISTED = 50  # paths in that list


def status(
    *,
    master: Annotated[
        str, Parameter(help="HOST:PORT of the master; with standby masters HOST:PORT,HOST:PORT.")
    ] = DEFAULT_MASTER,
    timeout: Annotated[Seconds, Parameter(help="Seconds for the whole answer.")] = DEFAULT.connect_timeout,
    as_json: Annotated[
        bool, Parameter(name="--json", negative=(), help="Print one JSON object instead of tables.")
    ] = False,
) -> int:
    """Show a master's groups, members, plans, measured paths and last events. Exit code 1 if it cannot be reached."""
    answer, roles = find(addresses(master, what="--master", default_port=MASTER_PORT).split(","), timeout)
    if as_json:
        print_json(answer, roles)
    else:
        print_tables(answer, roles)
    return 0


@dataclass(frozen=True)
class Role:
    """What one master is, in words: it leads, stands by, or why that is not known."""

    address: str
    state: str


def find(masters: list[str], timeout: float, *, follow: bool = True) -> tuple[Status, list[Role]]:
    """Ask all masters at once; the leader's answer, and what each one is.

    Args:
        masters: "host:port" of each.
        timeout: seconds for the whole answer.
        follow: whether to ask a leader that is none of *masters*, where only standbys answer.

    Raises:
        MasterUnreachable: none says within *timeout* seconds that it leads.
        ProtocolError: the only one gives no status.
    """
    answers: dict[str, Status | StandsBy | WancollError] = {}
    news = threading.Condition()

    def ask(address: str) -> None:
        try:
            answer: Status | StandsBy | WancollError = fetch(address, timeout)
        except WancollError as failed:
            answer = failed
        with news:
            answers[address] = answer
            news.notify()

    for address in masters:
        threading.Thread(target=ask, args=(address,), daemon=True).start()
    with news:
        news.wait_for(lambda: len(answers) == len(masters) or _leader(answers) != "", timeout)
        news.wait_for(lambda: len(answers) == len(masters), min(timeout, OTHERS_TIMEOUT))
        known = dict(answers)
    named = {answer.leader for answer in known.values() if isinstance(answer, StandsBy)} - {"", *masters}
    found = known.get(_leader(known))
    if found is None and named and follow:
        return find([*masters, *sorted(named)], timeout, follow=False)
    if isinstance(found, Status):
        return found, [Role(address, _role(known.get(address))) for address in masters]
    only = known.get(masters[0])
    if len(masters) == 1 and isinstance(only, WancollError):
        raise only
    raise MasterUnreachable(
        "no master leads",
        who=",".join(masters),
        expected="a leader among them",
        got="; ".join(f"{address}: {_role(known.get(address))}" for address in masters),
        hint="one takes over soon if etcd can be reached; the masters' logs say why not",
    )


def _leader(answers: dict[str, Status | StandsBy | WancollError]) -> str:
    """Address of the leader with the highest term, "" if there is none."""
    leaders = {address: answer.term for address, answer in answers.items() if isinstance(answer, Status)}
    return max(leaders, key=lambda address: leaders[address], default="")


def _role(answer: Status | StandsBy | WancollError | None) -> str:
    match answer:
        case Status():
            return f"leads, term {answer.term}"
        case StandsBy():
            return "stands by"
        case None:
            return "no answer yet"
        case _:
            return f"gives no status: {answer.got}"


def fetch(master: str, timeout: float) -> Status | StandsBy:
    """Ask the master at "host:port"; the whole exchange takes at most *timeout* seconds.

    Raises:
        MasterUnreachable: no connection, or no answer in time.
        ProtocolError: the answer is no status.
    """
    who = f"master {master}"
    try:
        answer = ask(split_address(master), StatusRequest(PROTOCOL_VERSION), FromMaster, timeout=timeout, who=who)
    except OSError as error:
        raise MasterUnreachable(
            "the master gives no status",
            who=master,
            got=str(error) or type(error).__name__,
            hint="is `wancoll master` running there, and is --master right?",
        ) from error
    if isinstance(answer, Status | StandsBy):
        return answer
    reason = answer.reason if isinstance(answer, Bye) else ""
    got = f"{type(answer).__name__} {reason}".strip()
    raise ProtocolError("did not answer a status request", who=who, expected="Status", got=got)


def plain(value: Any) -> Any:
    """A message as dicts and lists with the fields' names (on the wire they are positional)."""
    if isinstance(value, msgspec.Struct):
        return {name: plain(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    return value


def print_json(answer: Status, roles: Sequence[Role] = ()) -> None:
    """One JSON object on stdout."""
    masters = [{"address": role.address, "state": role.state} for role in roles]
    print(json.dumps({"masters": masters, **plain(answer)}, indent=2))


def print_tables(answer: Status, roles: Sequence[Role] = ()) -> None:
    """A table per group, then the measured paths and the last events."""
    from rich.console import Console

    console = Console(markup=False, highlight=False)
    if not console.is_terminal:
        console = Console(markup=False, highlight=False, width=PLAIN_WIDTH)
    console.print(
        f"master: version {clean(answer.version)}, term {answer.term}, up {duration(answer.uptime)}, "
        f"{len(answer.daemons)} daemons, {len(answer.groups)} groups"
    )
    if len(roles) > 1:
        console.print(f"masters: {'; '.join(f'{role.address} {clean(role.state)}' for role in roles)}")
    for group in answer.groups:
        console.print()
        console.print(
            f"group {clean(group.name)}: {clean(group.phase)}, epoch {group.epoch}, committed up to "
            f"{group.committed_upto}, start_world {group.start_world}, min_world {group.min_world}, lanes {group.lanes}"
        )
        if group.waiting_for:
            console.print(f"waiting for: {clean(group.waiting_for)}")
        for wait in group.waits:
            for line in wait_lines(wait):
                console.print(clean(line))
        console.print(_members(group))
        if group.pairs:
            console.print(_pairs(group.pairs))
        if group.plan is not None:
            for line in plan_lines(group.plan):
                console.print(clean(line))
    if answer.links:
        console.print()
        console.print(_links(answer.links))
    if answer.events:
        console.print()
        console.print(_events(answer))


def _members(group: GroupStatus) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table("rank", "member", "state", "done up to", "silent for", "daemon", "addresses")
    for member in sorted(group.members, key=lambda m: (m.state != "member", m.rank, m.mid)):
        table.add_row(
            str(member.rank) if member.state == "member" else "-",
            Text(clean(member.name)),
            clean(member.state),
            str(member.done_upto),
            f"{member.silent_for:.1f} s",
            Text(clean(member.daemon)),
            Text(clean(" ".join(member.addresses))),
        )
    return table


def wait_lines(wait: WaitStatus) -> list[str]:
    """A slow operation and whom it waits for, in words."""
    what = f", {wait.what}" if wait.what and wait.seq else ""
    lines = [f"{wait.op}{what}, epoch {wait.epoch}: not ended after {wait.seconds:.1f} s, {wait.done} members are done"]
    for cause in wait.causes:
        ends = f"{cause.member} (rank {cause.rank})"
        if cause.other_rank >= 0:
            ends = f"link {ends} -> {cause.other} (rank {cause.other_rank})"
        lines.append(f"  waits for {ends}: {cause.why}, since {cause.seconds:.1f} s ago")
    if not wait.causes:
        lines.append("  no member or link stands out")
    return lines


def _pairs(pairs: list[PairStatus]) -> Table:
    from rich.table import Table
    from rich.text import Text

    title = "links that failed between members"
    table = Table("from", "to", "what", "began", "last", "times", "done about it", "why", title=title)
    table.title_justify = "left"
    for one in pairs:
        table.add_row(
            Text(clean(one.source)),
            Text(clean(one.target)),
            clean(one.kind),
            f"{duration(one.seconds)} ago",
            f"{duration(one.last)} ago",
            str(one.times),
            Text(clean(one.done)),
            Text(clean(one.why)),
        )
    return table


def plan_lines(status: PlanStatus) -> list[str]:
    """What the master decided for the group's epoch, in words."""
    plan = status.plan
    ring = [f"slowest edge {format_rate(status.bottleneck, 3)}"] if status.bottleneck else []
    ring += [f"once around {format_duration(status.round, 3)}"] if status.round else []
    lines = [f"ring: {', '.join(ring)}"] if ring else []
    lines.append(f"operations are committed by the {plan.commit}")
    lines.append(
        f"plan: lanes {plan.lanes}, tracks {plan.tracks}, parts from {format_size(plan.stripe, 3)}, "
        f"pacing {format_rate(plan.pacing, 3) + ' per lane' if plan.pacing else 'none'}, "
        f"congestion control {plan.congestion or 'as each daemon is set'}"
    )
    for kind, entries in sorted(plan.choices.items()):
        chosen = [f"{name} up to {format_size(most, 3)}" if most else name for most, name in entries]
        lines.append(f"  {kind}: {', '.join(chosen)}")
    return lines


def _links(links: list[LinkStatus]) -> Table:
    from rich.table import Table
    from rich.text import Text

    title = "paths: round trip, bandwidth, share of segments sent again"
    daemons = sorted({link.source for link in links} | {link.target for link in links})
    if len(daemons) > MATRIX:
        table = Table("from", "to", title, title=f"the first {LISTED} of {len(links)}" if len(links) > LISTED else None)
        for link in links[:LISTED]:
            table.add_row(Text(clean(link.source)), Text(clean(link.target)), path(link))
        return table
    table = Table("from \\ to", title=title, title_justify="left")
    for daemon in daemons:
        table.add_column(Text(clean(daemon)))
    found = {(link.source, link.target): link for link in links}
    for source in daemons:
        cells = [path(found.get((source, target))) for target in daemons]
        table.add_row(Text(clean(source)), *cells)
    return table


def path(link: LinkStatus | None) -> str:
    """What is known of a path, in a few words."""
    if link is None:
        return ""
    known = [format_duration(link.rtt, 3)] if link.rtt else []
    known += [format_rate(link.bandwidth, 3) + ("" if link.lanes else " (probe)")] if link.bandwidth else []
    known += [f"{100 * link.loss:.2g} %"] if link.loss else []
    return ", ".join(known)


def _events(answer: Status) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table("time (UTC)", "group", "epoch", "event", "what happened", title="last events", title_justify="left")
    for event in answer.events:
        when = datetime.fromtimestamp(event.time, UTC).strftime("%Y-%m-%d %H:%M:%S")
        table.add_row(when, Text(clean(event.group)), str(event.epoch), clean(event.kind), Text(clean(event.text)))
    return table


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
