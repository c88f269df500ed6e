"""Loss against wall time of several runs as a PNG, with kills and joins marked, and their speed and bytes beside it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from wancoll.demo.picture import DPI, ELASTIC, HEIGHT, INK, JOIN, KILL, WIDTH, trailing_means

if TYPE_CHECKING:
    from wancoll.demo.transformer import Run

COLORS = ("#8e6c8a", ELASTIC)


def draw(runs: Sequence[Run], title: str, path: str) -> None:
    """Write the picture of finished runs to *path*."""
    from matplotlib.figure import Figure  # without pyplot: no global state, no display

    figure = Figure(figsize=(WIDTH, HEIGHT), layout="constrained")
    parts: Any = figure.subplot_mosaic([["loss", "speed"], ["loss", "sent"]], width_ratios=[3, 1])
    left, speed, sent = parts["loss"], parts["speed"], parts["sent"]
    figure.suptitle(title, color=INK, fontsize=12)
    _losses(left, runs)
    _bars(speed, "tokens per second", runs, [run.tokens / run.seconds for run in runs])
    _bars(sent, "bytes sent a token", runs, [run.sent / run.tokens for run in runs])
    for axes in (left, speed, sent):
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(colors=INK, labelsize=9)
    figure.savefig(path, format="png", dpi=DPI, facecolor="white")


def _losses(axes: Any, runs: Sequence[Run]) -> None:
    for run, color in zip(runs, COLORS, strict=True):
        at, losses = (np.array(each) for each in run.curve)
        means = trailing_means(losses, max(1, len(losses) // 10))
        axes.plot(at, losses, color=color, linewidth=0.7, alpha=0.35)
        axes.plot(at, means, color=color, linewidth=2.5, label=f"{run.name}: {len(run.story.losses)} steps")
        for when, mark, fill in ((run.killed, "X", KILL), (run.joined, "^", JOIN)):
            axes.plot(
                when, np.interp(when, at, means), mark, color=fill, markersize=11, markeredgecolor=color, zorder=3
            )
    axes.plot([], [], "X", color=KILL, markersize=9, label="a member and its daemon killed")
    axes.plot([], [], "^", color=JOIN, markersize=9, label="another one has joined")
    axes.set_xlim(left=0)
    axes.set_xlabel("wall time, seconds", color=INK)
    axes.set_ylabel("training loss, nats a byte (thick: mean)", color=INK)
    axes.grid(visible=True, color="#e6e6e6", linewidth=0.7)
    axes.legend(loc="upper right", frameon=True, framealpha=1.0, edgecolor="white", fontsize=9)


def _bars(axes: Any, title: str, runs: Sequence[Run], values: Sequence[float]) -> None:
    names = [run.name.replace(" ", "\n", 1) for run in runs]
    bars = axes.bar(names, values, color=COLORS, width=0.6)
    axes.bar_label(bars, labels=[f"{value:,.0f}" for value in values], fontsize=9, color=INK, padding=2)
    axes.set_title(title, color=INK, fontsize=10)
    axes.margins(y=0.15)
    axes.set_yticks([])
