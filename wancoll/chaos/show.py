"""What `wancoll chaos` prints while it runs: a live table on a terminal, else plain lines."""

from __future__ import annotations

import time
from typing import Any, Self

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from wancoll.chaos.core.report import goodput
from wancoll.chaos.run import Run
from wancoll.limits import counted
from wancoll.units import format_rate

_EVERY = 0.25  # seconds between pictures
_PLAIN_EVERY = 10.0  # seconds between plain lines
_RECENT = 8
_WINDOW = 3.0  # seconds of the goodput that is shown


class Show:
    """A Watcher, and a context manager.

    Args:
        console: where to.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None
        self._recent: list[str] = []
        self._next = 0.0
        self._began = time.monotonic()

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def said(self, text: str) -> None:
        """Something worth a line."""
        line = f"{time.monotonic() - self._began:7.2f} s  {text}"
        if self._live is None:
            self._console.print(line, soft_wrap=True)
        self._recent = [*self._recent, line][-_RECENT:]

    def tick(self, run: Run) -> None:
        """Some time has passed."""
        now = time.monotonic()
        if now < self._next:
            return
        if self._live is None:
            self._next = now + _PLAIN_EVERY
            self._console.print(f"{now - self._began:7.2f} s  {_summary(run, now)}", soft_wrap=True)
        else:
            self._next = now + _EVERY
            self._live.update(self._picture(run, now), refresh=True)

    def _picture(self, run: Run, now: float) -> Any:
        table = Table("member", "rank", "state", "done up to", "last fault", title=_summary(run, now), expand=True)
        table.title_justify = "left"
        group = run.status.group
        known = {member.name: member for member in group.members} if group is not None else {}
        last = {slot: one for one in run.injected for slot in one.fault.touches}
        for slot in range(run.peers):
            name = f"m{slot}"
            member, fault = known.get(name), last.get(slot)
            table.add_row(
                name,
                str(member.rank) if member is not None and member.rank >= 0 else "-",
                member.state if member is not None else "away",
                str(member.done_upto) if member is not None else "",
                "" if fault is None else f"{fault.fault}{'' if fault.ended < float('inf') else ' (now)'}",
            )
        return Group(table, Text("\n".join(self._recent)))


def _summary(run: Run, now: float) -> str:
    group = run.status.group
    recent = [one for one in run.commits[-5000:] if one.at >= now - _WINDOW]
    passed = now - run.started
    where = f"{passed:.0f} of {run.options.shape.seconds:.0f} s" if passed > 0 else "without faults"
    return (
        f"{where}, epoch {group.epoch if group is not None else 0}, {counted(len(run.status.members), 'member')}, "
        f"{counted(len(run.commits), 'operation')}, {format_rate(goodput(recent, now - _WINDOW, now), 3)}, "
        f"{counted(len(run.injected), 'fault')}, {counted(len(run.violations), 'violation')}"
    )
