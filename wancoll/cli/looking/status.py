"""`wancoll status`: asks a master how its groups are, and prints it: in one line first, then as tables, or as JSON."""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import msgspec
from cyclopts import Parameter

from wancoll.cli.asking import Asking, fetch
from wancoll.errors import MasterUnreachable, ProtocolError, WancollError
from wancoll.health import Health, health, of_group
from wancoll.options import DEFAULT_MASTER, NO_MASTER, AsJson, Flat, Seconds, SecondsOrNone, between
from wancoll.peer.core.liveness.masters import two_masters
from wancoll.wire.messages import StandsBy, Status

if TYPE_CHECKING:
    from rich.console import Console

OTHERS_TIMEOUT = 1.0  # seconds for the other masters, once the leader has answered
EVENTS = 10  # shown, unless more are asked for
MOST_EVENTS = 50  # that a master tells of
EXIT_NOT_WELL = 3

_MASTER = "HOST:PORT of the master; with standby masters HOST:PORT,HOST:PORT."
_OWN = "Empty: as --join says, else as the daemon at WANCOLL_SOCKET or the default path, with its key"
Master = Annotated[str, Parameter(help=f"{_MASTER} {NO_MASTER}")]
MasterOrOwn = Annotated[str, Parameter(help=f"{_MASTER} {_OWN}, else {DEFAULT_MASTER}.")]
OfGroup = Annotated[str, Parameter(help="Of this group alone. Empty: all.")]
LastEvents = Annotated[int, Parameter(validator=between(0, MOST_EVENTS), help="How many of the last events to show.")]


def status(
    *,
    master: MasterOrOwn = "",
    group: OfGroup = "",
    events: LastEvents = EVENTS,
    watch: Annotated[
        SecondsOrNone, Parameter(help="Seconds between answers; shows the newest until Ctrl-C. 0: one.")
    ] = 0.0,
    as_json: AsJson = False,
    bundle: Annotated[
        str,
        Parameter(help="A JSON file to write, too: this, the last events, a trace of 2 s, and `wancoll doctor`."),
    ] = "",
    socket: Annotated[
        tuple[str, ...], Parameter(help="With --bundle: of a daemon here to trace; repeat it. Empty: the default one.")
    ] = (),
    asking: Annotated[Asking, Flat] = Asking(),
) -> int:
    """Say in one line whether all is well; then show groups, members, plans, measured paths and last events.

    Exit code 0 if all is well, 3 if the master says that it is not, 1 if it cannot be reached.
    """
    masters, asking = asking.found(master)
    shown = Shown(group, events, as_json)
    if watch:
        _watch(masters, watch, asking, shown)
    answer, roles = find(masters, asking)
    found = print_json(answer, roles, shown) if as_json else print_tables(answer, roles, shown)
    if bundle:
        from wancoll.cli.looking.bundle import write

        told = as_dict(answer, roles, Shown(group, MOST_EVENTS))
        print(write(bundle, told, answer, masters, socket, asking), file=sys.stderr)
    return 0 if found.well else EXIT_NOT_WELL


def top(
    *,
    master: MasterOrOwn = "",
    group: OfGroup = "",
    events: LastEvents = EVENTS,
    watch: Annotated[Seconds, Parameter(help="Seconds between answers.")] = 1.0,
    asking: Annotated[Asking, Flat] = Asking(),
) -> NoReturn:
    """Watch groups until Ctrl-C: whether all is well, the members, for whom operations wait, the last events.

    It is `wancoll status --watch` without plans and paths. A master that goes away is waited for.
    """
    masters, asking = asking.found(master)
    _watch(masters, watch, asking, Shown(group, events, brief=True))


@dataclass(frozen=True)
class Shown:
    """Which part of an answer is shown, and how: of one group, so many events, as JSON, without plans and paths."""

    group: str = ""
    events: int = EVENTS
    as_json: bool = False
    brief: bool = False

    def part(self, answer: Status) -> Status:
        """The part of *answer* that these options ask for."""
        part = of_group(answer, self.group)
        return msgspec.structs.replace(part, events=part.events[max(0, len(part.events) - self.events) :])

    def health(self, answer: Status, roles: Sequence[Role]) -> Health:
        """Whether all is well by *answer*: all of its events count."""
        mute = [role.address for role in roles if not role.there]
        apart = two_masters([(role.address, role.elected_by) for role in roles if role.elected_by])
        found = health(answer, time.time(), group=self.group, mute=mute)
        return Health(False, apart, found.note) if apart else found


@dataclass(frozen=True)
class Role:
    """What one master is, in words: it leads, stands by, or why that is not known. *elected_by* is Welcome's."""

    address: str
    state: str
    elected_by: str = ""

    @property
    def there(self) -> bool:
        """Whether it has said what it is."""
        return self.state.startswith(("leads", "stands by"))


def find(masters: list[str], asking: Asking = Asking(), *, named: Mapping[str, str] = {}) -> tuple[Status, list[Role]]:
    """Ask all *masters*, each "host:port", at once; the leader's answer, and what each one is.

    *named*: leaders beside *masters*, by whom of these each was named; none: they are asked, too, where only standbys
    answer.

    Raises:
        MasterUnreachable: none says in time that it leads.
        ProtocolError: the only one gives no status.
    """
    masters = [*masters, *named]
    answers: dict[str, Status | StandsBy | WancollError] = {}
    news = threading.Condition()

    def ask(address: str) -> None:
        try:
            answer: Status | StandsBy | WancollError = fetch(address, asking, named_by=named.get(address, ""))
        except WancollError as failed:
            answer = failed
        with news:
            answers[address] = answer
            news.notify()

    for address in masters:
        threading.Thread(target=ask, args=(address,), daemon=True).start()
    with news:
        news.wait_for(lambda: len(answers) == len(masters) or _leader(answers) != "", asking.timeout)
        news.wait_for(lambda: len(answers) == len(masters), min(asking.timeout, OTHERS_TIMEOUT))
        known = dict(answers)
    hints = {answer.leader: address for address, answer in known.items() if isinstance(answer, StandsBy)}
    others = {leader: hints[leader] for leader in sorted(hints.keys() - {"", *masters})}
    found = known.get(_leader(known))
    if found is None and others and not named:
        return find(masters, asking, named=others)
    if isinstance(found, Status):
        each = ((address, known.get(address)) for address in masters)
        return found, [Role(address, _role(said), getattr(said, "elected_by", "")) for address, said in each]
    only = known.get(masters[0])
    if len(masters) == 1 and isinstance(only, WancollError):
        raise only
    raise MasterUnreachable(
        "no master leads",
        who=",".join(masters) + asking.way,
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
            return f"stands by{answer.why and ': ' + answer.why}"
        case None:
            return "no answer yet"
        case _:
            return f"gives no status: {answer.got}"


def plain(value: Any) -> Any:
    """A message as dicts and lists with the fields' names (on the wire they are positional)."""
    if isinstance(value, msgspec.Struct):
        return {name: plain(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    return value


def print_json(answer: Status, roles: Sequence[Role] = (), shown: Shown = Shown()) -> Health:
    """One JSON object on stdout. Returns what it says of health."""
    print(json.dumps(as_dict(answer, roles, shown), indent=2), flush=True)
    return shown.health(answer, roles)


def as_dict(answer: Status, roles: Sequence[Role], shown: Shown) -> dict[str, Any]:
    """What is said as JSON."""
    found = shown.health(answer, roles)
    first = {"well": found.well, "says": found.line, "note": found.note}
    masters = [{"address": role.address, "state": role.state} for role in roles]
    return {**first, "masters": masters, **plain(shown.part(answer))}


def print_tables(
    answer: Status, roles: Sequence[Role] = (), shown: Shown = Shown(), console: Console | None = None
) -> Health:
    """Whether all is well, which it returns, too; a table per group, then the measured paths and the last events."""
    from wancoll.cli.looking.tables import render, terminal

    console = terminal() if console is None else console
    found = shown.health(answer, roles)
    for line in _first(found):
        console.print(line, soft_wrap=not console.is_terminal)  # else it is for a program, such as grep: one line
    for each in render(shown.part(answer), _several(roles), console, brief=shown.brief, whole=answer):
        console.print(each)
    return found


def _first(found: Health) -> list[Any]:
    from rich.text import Text

    from wancoll.cli.looking.tables import clean

    lines = [Text(clean(found.line), style="bold green" if found.well else "bold red")]
    return [*lines, Text(clean(found.note))] if found.note else lines


def _several(roles: Sequence[Role]) -> list[str]:
    return [f"{role.address} {role.state}" for role in roles] if len(roles) > 1 else []


# ---- again and again ---------------------------------------------------------------------------------


def _watch(masters: list[str], seconds: float, asking: Asking, shown: Shown) -> NoReturn:
    """Show the newest until Ctrl-C: in place on a terminal, else one after the other.

    The first answer has to come; a master that goes away later is waited for.
    """
    from rich.live import Live
    from rich.text import Text

    from wancoll.cli.looking.tables import render, screen, terminal

    console = terminal()
    answer, roles = find(masters, asking)
    missing = ""
    in_place = console.is_terminal and not shown.as_json
    with Live(console=console, screen=True, auto_refresh=False) if in_place else contextlib.nullcontext() as live:
        while True:
            if live is not None:
                first = [Text(missing, style="bold red")] if missing else _first(shown.health(answer, roles))
                part = shown.part(answer)
                others = render(
                    msgspec.structs.replace(part, events=[]), _several(roles), console, brief=shown.brief, whole=answer
                )
                live.update(screen(first, part, others, console), refresh=True)
            elif missing:
                print(missing, file=sys.stderr, flush=True)
            elif shown.as_json:
                print_json(answer, roles, shown)
            else:
                print_tables(answer, roles, shown, console)
                print(flush=True)
            time.sleep(seconds)
            try:
                (answer, roles), missing = find(masters, asking), ""
            except (MasterUnreachable, ProtocolError) as failed:
                missing = " ".join(f"no master answers, asking again: {failed}".split())
