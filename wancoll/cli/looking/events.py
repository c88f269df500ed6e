"""`wancoll events`: what a master has recorded, a line each, and what it records from now on."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Sequence
from typing import Annotated

from wancoll.cli.asking import Asking
from wancoll.cli.looking.status import EXIT_NOT_WELL, MOST_EVENTS, MasterOrOwn, OfGroup, find
from wancoll.errors import MasterUnreachable, ProtocolError
from wancoll.health import no_group
from wancoll.options import Flat, Switch
from wancoll.wire.messages import EventRecord

LOOK = 1.0  # seconds between questions
KEPT = 1000  # events, to know them again where a master comes back that led before


def events(
    *,
    master: MasterOrOwn = "",
    group: OfGroup = "",
    follow: Switch = False,
    asking: Annotated[Asking, Flat] = Asking(),
) -> int:
    """Show the last 50 events that a master has recorded, oldest first: time (UTC), group, epoch, and what happened.

    Exit code 3 if --group names one of which it has recorded nothing and that it does not have; --follow waits for it.

    Args:
        follow: Go on until Ctrl-C, also after a master's restart.
    """
    masters, asking = asking.found(master)
    answer, _ = find(masters, asking)
    told = answer.events
    _print(told, group)
    others = sorted(each.name for each in answer.groups)
    unknown = bool(group) and group not in {*others, *(event.group for event in told)}
    if unknown:
        _note(no_group(group, others) + ("; waiting for its events" if follow else ""))
    seen, there = deque(told, KEPT), True
    while follow:
        time.sleep(LOOK)
        try:
            told = find(masters, asking)[0].events
        except (MasterUnreachable, ProtocolError) as failed:
            if there:
                _note(f"no master answers, asking again: {failed}")
            there = False
            continue
        if not there:
            _note("a master answers again")
        there = True
        fresh, gap = later(seen, told)
        if gap:
            _note("the master does not tell what came directly before: more happened at once, or it is another one")
        _print(fresh, group)
        seen.extend(fresh)
    return EXIT_NOT_WELL if unknown else 0


def later(seen: Sequence[EventRecord], told: Sequence[EventRecord]) -> tuple[list[EventRecord], bool]:
    """Those of *told* that came after what was *seen* until now, and whether some between may be missing.

    Another master, or one without its journal, may not know the last one that was seen. Times do not decide: its clock
    is another one, too.
    """
    for i in range(len(told) - 1, -1, -1):
        if told[i] in seen:
            fresh = list(told[i + 1 :])
            return fresh, bool(fresh) and told[i] != seen[-1]
    return list(told), bool(told) and (bool(seen) or len(told) >= MOST_EVENTS)


def _print(told: Sequence[EventRecord], group: str) -> None:
    from wancoll.cli.looking.tables import event_table, terminal, what, when

    shown, console = [event for event in told if group in ("", event.group)], terminal()
    if console.is_terminal and shown:
        console.print(event_table(shown))
    else:  # a line each, as grep takes them
        for event in shown:
            print(f"{when(event)} {what(event)}")
    sys.stdout.flush()


def _note(text: str) -> None:
    print(f"wancoll: {' '.join(text.split())}", file=sys.stderr, flush=True)
