"""The loss curve as a PNG, with the kill and the join marked."""

from __future__ import annotations

from typing import Any

from wancoll.demo.outcome import Outcome, percent

WIDTH, HEIGHT, DPI = 9.0, 5.6, 150  # inches, inches, dots per inch
ELASTIC, ALONE, KILL, JOIN, INK = "#1f6f8b", "#9aa5ad", "#c0392b", "#2e8b57", "#333333"


def draw(outcome: Outcome, path: str) -> None:
    """Write the picture of a finished run to *path*."""
    from matplotlib.figure import Figure  # without pyplot: no global state, no display

    figure = Figure(figsize=(WIDTH, HEIGHT), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[5, 1])
    _losses(upper, outcome)
    _world(lower, outcome)
    for axes in (upper, lower):
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        axes.tick_params(colors=INK, labelsize=9)
    figure.savefig(path, format="png", dpi=DPI, facecolor="white")


def _losses(axes: Any, outcome: Outcome) -> None:
    history, alone = outcome.history, outcome.alone
    assert outcome.alone_finished is not None
    score = outcome.finished[outcome.members[0]].accuracy
    axes.plot(
        [step.step for step in history],
        [step.loss for step in history],
        color=ELASTIC,
        linewidth=1.8,
        label=f"{outcome.world_sizes()} processes: {percent(score)} of the test digits right",
    )
    axes.plot(
        [step.step for step in alone],
        [step.loss for step in alone],
        color="black",
        linewidth=0.8,
        linestyle=(0, (2, 2)),
        label=f"1 process: {percent(outcome.alone_finished.accuracy)}",
    )
    axes.set_yscale("log")
    axes.set_ylabel("training loss (cross entropy)", color=INK)
    axes.grid(visible=True, which="major", color="#e6e6e6", linewidth=0.7)
    axes.set_title("Training goes on when a peer is killed in the middle of an all-reduce", color=INK, fontsize=12)
    axes.legend(loc="upper right", frameon=True, framealpha=1.0, edgecolor="white", fontsize=9)
    later = f"others commit {1000 * outcome.recovery:.0f} ms later"
    marks = (
        (outcome.killed_in, KILL, f"{outcome.victim} killed in step {outcome.killed_in};\n{later}"),
        (outcome.joined_in, JOIN, f"{outcome.newcomer} joined\nbefore step {outcome.joined_in}"),
    )
    for step, color, text in marks:
        axes.axvline(step, color=color, linewidth=1.2)
        axes.annotate(
            text,
            xy=(step, 0.74),
            xycoords=("data", "axes fraction"),
            xytext=(-6, 0),
            textcoords="offset points",
            ha="right",
            va="top",
            fontsize=9,
            color=color,
        )


def _world(axes: Any, outcome: Outcome) -> None:
    history = outcome.history
    sizes = [len(step.contributors) for step in history]
    axes.step([step.step for step in history], sizes, where="post", color=ELASTIC, linewidth=1.8)
    axes.axvline(outcome.killed_in, color=KILL, linewidth=1.2)
    axes.axvline(outcome.joined_in, color=JOIN, linewidth=1.2)
    axes.set_ylim(0, max(sizes) + 0.8)
    axes.set_yticks(range(0, max(sizes) + 1, max(1, max(sizes) // 2)))
    axes.set_xlim(0, outcome.steps)
    axes.set_ylabel("members", color=INK)
    axes.set_xlabel("step", color=INK)
