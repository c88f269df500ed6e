"""A small transformer is trained twice over slow links, each time with a kill and a join; what came of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from wancoll.examples import diloco, elastic
from wancoll.examples.shared.arguments import Options
from wancoll.examples.shared.play import Train, play
from wancoll.examples.shared.story import Story
from wancoll.units import format_bytes

LEAST_STEPS = 3 * diloco.H  # a round each before the kill, without the victim and with the newcomer
SETTLED = 2  # steps of a run that are not measured: links are set up in them
WAYS: dict[str, Train] = {"data parallel": elastic.train, "DiLoCo, int8": diloco.train}
_LINES = 8  # of progress in a run


@dataclass(frozen=True, slots=True)
class Run:
    """One way to train, and what happened. Seconds count from the end of step SETTLED."""

    name: str
    story: Story
    began: float  # time.monotonic()

    @property
    def curve(self) -> tuple[list[float], list[float]]:
        """Seconds and losses, of each measured step."""
        return [at - self.began for at in self.story.times[SETTLED - 1 :]], self.story.losses[SETTLED - 1 :]

    @property
    def seconds(self) -> float:
        """In all."""
        return self.curve[0][-1]

    @property
    def killed(self) -> float:
        """Seconds until the kill."""
        return self.story.killed_at - self.began

    @property
    def joined(self) -> float:
        """Seconds until the newcomer had taken its first step."""
        return self.story.joined_at - self.began

    @property
    def tokens(self) -> int:
        """Tokens that all members trained on."""
        return sum(told.tokens for told in self.story.told if told.step > SETTLED)

    @property
    def sent(self) -> int:
        """Bytes, of all members."""
        return sum(told.sent for told in self.story.told if told.step > SETTLED)

    @property
    def ends(self) -> tuple[float, float]:
        """Mean losses of the first and of the last eighth of the steps."""
        losses = self.story.losses
        some = max(1, len(losses) // 8)
        return sum(losses[:some]) / some, sum(losses[-some:]) / some

    def reasons_to_fail(self, steps: int) -> Iterator[str]:
        """Why this is no success; nothing if it is one."""
        for fault in self.story.faults:
            yield f"{self.name}: {fault}"
        if len(self.story.losses) != steps:
            yield f"{self.name}: {len(self.story.losses)} steps were taken instead of {steps}"
        if not self.ends[1] < self.ends[0]:  # no number is no fall either
            yield f"{self.name}: the loss did not fall: {self.ends[0]:.4f} at first, {self.ends[1]:.4f} at last"


def train(options: Options, rate: float, console: Console) -> list[Run]:
    """Train in all WAYS, one after the other, and say what happens; links carry *rate* bytes per second, each way."""
    runs = []
    for name, way in WAYS.items():
        console.print(f"\n{name}")
        story = play(way, options, rate=rate, watch=_say(options, console))
        runs.append(Run(name, story, story.times[SETTLED - 1]))
    return runs


def _say(options: Options, console: Console) -> Callable[[Story], None]:
    """What play() calls: prints some of the steps, and each change of the members."""
    seen: set[int | str] = set()

    def say(story: Story) -> None:
        told = story.told[-1]
        if story.victim and "killed" not in seen:
            seen.add("killed")
            console.print(f"step {told.step:4}: SIGKILL: {story.victim}'s daemon and training process", style="red")
        if story.newcomer in told.contributors and "joined" not in seen:
            seen.add("joined")
            console.print(f"step {told.step:4}: {story.newcomer} joined, and was handed the state", style="green")
        if told.step % max(1, options.steps // _LINES) == 0 and told.step not in seen:
            seen.add(told.step)
            members = len(told.contributors)
            console.print(f"step {told.step:4} of {options.steps}: loss {told.loss:.4f}, {members} members")

    return say


def table(runs: Sequence[Run]) -> Table:
    """The comparison, for a terminal."""
    shown = Table(show_edge=False, pad_edge=False)
    shown.add_column("")
    for run in runs:
        shown.add_column(run.name, justify="right")

    def row(name: str, cell: Callable[[Run], str]) -> None:
        shown.add_row(name, *(cell(run) for run in runs))

    row("tokens per second", lambda run: f"{run.tokens / run.seconds:,.0f}")
    row("bytes sent a token", lambda run: f"{run.sent / run.tokens:,.0f}")
    row("bytes sent in all", lambda run: format_bytes(run.sent))
    row("seconds", lambda run: f"{run.seconds:.1f}")
    row("steps", lambda run: str(len(run.story.losses)))
    row("loss, first and last eighth", lambda run: f"{run.ends[0]:.3f} -> {run.ends[1]:.3f}")
    row("members", lambda run: run.story.worlds)
    row("replicas hold the same bytes", lambda run: "NO" if "the replicas differ" in run.story.faults else "yes")
    return shown
