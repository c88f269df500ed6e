"""What came out of a demo, what it has to be, and how it is shown. PURE: no process, no clock."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby

from rich.table import Table

from wancoll.demo.data import BATCH
from wancoll.demo.reports import Finished, Stepped

ALLOWED_POINTS = 1.0  # of accuracy between the elastic run and the single process, in percent


@dataclass(slots=True)
class Outcome:
    """Filled while the demo runs."""

    steps: int  # how many were planned
    reports: dict[str, list[Stepped]] = field(default_factory=dict)  # by member, one per step that it took part in
    finished: dict[str, Finished] = field(default_factory=dict)  # by member, its last report
    alone: list[Stepped] = field(default_factory=list)  # of the single process
    alone_finished: Finished | None = None
    victim: str = ""  # the member that was killed
    killed_in: int = 0  # the step whose all-reduce it was killed in, so the first one without it
    killed_at: float = 0.0  # time.monotonic() of the SIGKILL, seconds
    newcomer: str = ""  # the member that joined

    @property
    def members(self) -> list[str]:
        """Those that were alive at the end."""
        return [name for name in self.reports if name != self.victim]

    @property
    def history(self) -> list[Stepped]:
        """The steps as a member saw them that was there all the time."""
        return next((self.reports[name] for name in self.members if name != self.newcomer), [])

    @property
    def joined_in(self) -> int:
        """The first step with the newcomer; 0 if there is none."""
        return next((step.step for step in self.history if self.newcomer in step.contributors), 0)

    @property
    def hit(self) -> list[Stepped]:
        """What the survivors report of the step that the kill fell into."""
        return [step for name in self.members for step in self.reports[name] if step.step == self.killed_in]

    @property
    def recovery(self) -> float:
        """Seconds from the kill until the last survivor had its commit; 0 if nobody was hit."""
        return max((step.committed for step in self.hit), default=self.killed_at) - self.killed_at

    @property
    def missed_samples(self) -> int:
        """Samples that were due and did not take part, because they were lost with a member."""
        return sum(BATCH - step.samples for step in self.history)

    def due_steps(self, name: str) -> list[int]:
        """The steps that *name* was a member for, if it was one to the end."""
        first = self.joined_in if name == self.newcomer else 1
        return list(range(first, self.steps + 1)) if first else []

    def lost_steps(self, name: str) -> int:
        """How many of its due steps *name* has no receipt for."""
        return len(set(self.due_steps(name)) - {step.step for step in self.reports[name]})

    @property
    def most_lost_steps(self) -> int:
        """How many steps the member lost that lost most."""
        return max((self.lost_steps(name) for name in self.members), default=self.steps)

    def reasons_to_fail(self) -> Iterator[str]:
        """Why this is no success; nothing if it is one."""
        if self.alone_finished is None or any(name not in self.finished for name in self.members):
            yield "not all processes have finished"
            return
        for name in self.members:
            if [step.step for step in self.reports[name]] != self.due_steps(name):
                yield f"{name} did not take each of its steps once; {self.lost_steps(name)} were lost"
        digests = {name: self.finished[name].digest for name in self.members}
        if len(set(digests.values())) != 1:
            yield f"the replicas differ: {', '.join(f'{name} {digest}' for name, digest in digests.items())}"
        for name in self.members:
            apart = 100 * abs(self.finished[name].accuracy - self.alone_finished.accuracy)
            if apart > ALLOWED_POINTS + 1e-9:
                yield (
                    f"{name}'s test accuracy is {apart:.2f} points away from the single process's "
                    f"(allowed: {ALLOWED_POINTS:g})"
                )
        if not self.victim or any(self.victim in step.contributors for step in self.hit):
            yield "no member was killed in the middle of an all-reduce"
        if not self.joined_in:
            yield "no member joined"

    def world_sizes(self) -> str:
        """The sizes of the world, one after the other: "4 -> 3 -> 4"."""
        return " -> ".join(str(size) for size, _ in groupby(len(step.contributors) for step in self.history))

    def table(self) -> Table:
        """The comparison, for a terminal."""
        table = Table(show_edge=False, pad_edge=False)
        table.add_column("")
        table.add_column("elastic", justify="right")
        table.add_column("single process", justify="right")
        finished = [self.finished[name] for name in self.members]
        assert self.alone_finished is not None
        digests = {one.digest for one in finished}
        table.add_row("test accuracy", percent(finished[0].accuracy), percent(self.alone_finished.accuracy))
        table.add_row("loss of the last step", f"{self.history[-1].loss:.4f}", f"{self.alone[-1].loss:.4f}")
        table.add_row("processes", self.world_sizes(), "1")
        table.add_row("steps", str(len(self.history)), str(self.alone_finished.steps))
        table.add_row("steps lost", str(self.most_lost_steps) if self.most_lost_steps else "none", "")
        table.add_row("samples lost with the killed peer", f"{self.missed_samples} of {self.steps * BATCH}", "")
        table.add_row("from the kill to the next commit", f"{1000 * self.recovery:.1f} ms", "")
        table.add_row("attempts of that operation", str(max((s.attempts for s in self.hit), default=0)), "")
        same = f"yes, {len(finished)} x {finished[0].digest}" if len(digests) == 1 else "NO"
        table.add_row("replicas hold the same bytes", same, "")
        return table


def percent(share: float) -> str:
    """0.975 as "97.50 %"."""
    return f"{100 * share:.2f} %"
