"""The loss curve as a PNG, with the kill and the join marked."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from wancoll.demo.outcome import Outcome, percent

WIDTH, HEIGHT, DPI = 9.0, 5.6, 150  # inches, inches, dots per inch
MEANS = 80  # how many means of neighbouring steps the picture has room for
ELASTIC, KILL, JOIN, INK = "#3a9bbf", "#c0392b", "#2e8b57", "#333333"


def draw(outcome: Outcome, path: str) -> None:
    """Write the picture of a finished run to *path*."""
    from matplotlib.figure import Figure  # without pyplot: no global state, no display

    figure = Figure(figsize=(WIDTH, HEIGHT), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[5, 1])
    _losses(upper, outcome)
    _world(lower, outcome)
    for axes in (upper, lower):
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(colors=INK, labelsize=9)
    figure.savefig(path, format="png", dpi=DPI, facecolor="white")


def _losses(axes: Any, outcome: Outcome) -> None:
    history, alone = outcome.history, outcome.alone
    assert outcome.alone_finished is not None
    score = outcome.finished[outcome.members[0]].accuracy
    window = max(1, outcome.steps // MEANS)
    for steps, color, width, style, label in (
        (history, ELASTIC, 3.2, "-", f"{outcome.world_sizes()} processes: {percent(score)} of the test digits right"),
        (alone, "black", 1.1, (0, (3, 2)), f"1 process: {percent(outcome.alone_finished.accuracy)}"),
    ):
        at, losses = np.array([step.step for step in steps]), np.array([step.loss for step in steps])
        if color == ELASTIC:
            axes.plot(at, losses, color=ELASTIC, linewidth=0.7, alpha=0.35)
        axes.plot(at, trailing_means(losses, window), color=color, linewidth=width, linestyle=style, label=label)
    axes.set_yscale("log")
    axes.set_ylabel(f"training loss (thin: each step; thick: mean of {window})", color=INK)
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


def trailing_means(values: NDArray[np.float64], window: int) -> NDArray[np.float64]:
    """[i] is the mean of the last *window* values up to i, or of as many as there are."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    end = np.arange(1, len(values) + 1)
    start = np.maximum(0, end - window)
    means: NDArray[np.float64] = (sums[end] - sums[start]) / (end - start)
    return means


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
