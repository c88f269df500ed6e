"""What the demo prints while it runs."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from wancoll.demo.outcome import Outcome
from wancoll.demo.reports import Started, Stepped
from wancoll.limits import counted

_LINES = 10  # of plain progress in a whole run


class Show:
    """Lines, some a run."""

    def __init__(self, console: Console, steps: int) -> None:
        self._console, self._steps = console, steps
        self._last: Stepped | None = None
        self._victim = ""

    def started(self, report: Started) -> None:
        """A member is ready to take part."""
        if self._last is None and report.rank == 0:
            self._line(f"epoch {report.epoch}: {_members(report.members)}")

    def stepped(self, report: Stepped) -> None:
        """A member reports a step; the first one to do so is shown."""
        if self._last is not None and report.step <= self._last.step:
            return
        before, self._last = self._last, report
        if before is not None and before.contributors != report.contributors:
            self._change(before.contributors, report)
        if report.step % max(1, self._steps // _LINES) == 0:
            size = counted(len(report.contributors), "member")
            self._line(f"step {report.step:4} of {self._steps}: loss {report.loss:.4f}, {size}")

    def killed(self, outcome: Outcome) -> None:
        """The SIGKILL has been sent."""
        self._victim = outcome.victim
        self._line(
            f"step {outcome.killed_in:4}: SIGKILL in mid all-reduce: {outcome.victim}'s daemon and training process",
            "red",
        )

    def recovered(self, outcome: Outcome) -> None:
        """All survivors have the commit of the operation that was hit."""
        attempts = max(step.attempts for step in outcome.hit)
        self._line(
            f"step {outcome.killed_in:4}: {counted(len(outcome.hit), 'survivor')} committed it on attempt {attempts}, "
            f"{1000 * outcome.recovery:.1f} ms after the kill"
        )

    def called(self, newcomer: str) -> None:
        """The newcomer's daemon runs."""
        self._line(f"           {newcomer} is started while the others train")

    def _change(self, before: tuple[str, ...], report: Stepped) -> None:
        names = report.contributors
        left = [name for name in before if name not in names]
        joined = [name for name in names if name not in before]
        gone = [f"{name} {'died' if name == self._victim else 'is out'}" for name in left]
        what = "; ".join(gone + [f"{name} joined" for name in joined])
        self._line(f"step {report.step:4}: {what}; epoch {report.epoch}: {_members(names)}", "red" if left else "green")
        for name in joined:
            self._line(f"           {name} was handed parameters, momentum and step number")

    def _line(self, text: str, style: str | None = None) -> None:
        self._console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def _members(names: Sequence[str]) -> str:
    return f"{counted(len(names), 'member')} ({', '.join(names)})"
