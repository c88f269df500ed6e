"""The map of `wancoll model --plot`: which algorithm wins at which size and world."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from wancoll.cli.model.question import Question
from wancoll.limits import format_size
from wancoll.units import format_duration, format_rate

WIDTH, HEIGHT, DPI = 9.0, 5.6, 150  # inches, inches, dots per inch
INK = "#333333"
COLORS = {
    "naive": "#b8b8b8",
    "tree": "#f2c14e",
    "ring": "#6bb3d3",
    "halving_doubling": "#b497d6",
    "double_tree": "#c9a27a",
    "direct": "#8fc78a",
    "full_exchange": "#ef8f7a",
    "hierarchical": "#d9a6c6",
}
LOW_SIZE, HIGH_SIZE = 6, 32  # powers of two: 64 B to 4 GiB
LOW_WORLD, HIGH_WORLD = 1, 10  # powers of two: 2 to 1024 members
WIDE = 1 / 8  # octaves on each side of a power of two that are drawn as it
FINE = 24  # cells of the map to an octave of size, and of world
EQUAL = 1 + 1e-9


def cells(low: int, high: int) -> NDArray[np.float64]:
    """Middles of the map's cells between two powers of two, as powers."""
    return low + (np.arange(FINE * (high - low)) + 0.5) / FINE


def worlds(question: Question) -> NDArray[np.int64]:
    """Members of each row of cells. halving_doubling is fastest with powers of two only: these have rows to be seen."""
    powers = cells(LOW_WORLD, HIGH_WORLD)
    if "halving_doubling" in question.names:
        near = np.round(powers)
        powers = np.where(np.abs(powers - near) < WIDE, near, powers)
    return np.round(2.0**powers).astype(int)


def winners(question: Question) -> NDArray[np.int64]:
    """[world, size] of a cell is the index in question.names of the fastest; of equal ones the first."""
    sizes, members = 2.0 ** cells(LOW_SIZE, HIGH_SIZE), worlds(question)
    best = {}
    for k in map(int, np.unique(members)):
        times = np.array([[question.seconds(name, n, k) for n in sizes] for name in question.names])
        best[k] = np.argmax(times <= times.min(axis=0) * EQUAL, axis=0)
    return np.array([best[int(k)] for k in members])


def draw(question: Question, path: str) -> None:
    """Write the map to *path*, in the format that its suffix says."""
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure  # without pyplot: no global state, no display

    best = winners(question)
    figure = Figure(figsize=(WIDTH, HEIGHT), layout="constrained")
    axes = figure.subplots()
    axes.pcolormesh(
        2.0 ** np.linspace(LOW_SIZE, HIGH_SIZE, best.shape[1] + 1),
        2.0 ** np.linspace(LOW_WORLD, HIGH_WORLD, best.shape[0] + 1),
        best,
        cmap=ListedColormap([COLORS[name] for name in question.names]),
        vmin=-0.5,
        vmax=len(question.names) - 0.5,
        rasterized=True,
    )
    _name_regions(axes, question, best)
    _scales(axes)
    extra = f", overhead {format_duration(question.cost.gamma)} a message" if question.cost.gamma else ""
    axes.set_title(
        f"Fastest {question.kind.replace('_', '-')} by the classic model: "
        f"alpha {format_duration(question.cost.alpha)}, bandwidth {format_rate(question.bandwidth)}{extra}",
        color=INK,
        fontsize=12,
    )
    figure.savefig(path, dpi=DPI, facecolor="white")


def _name_regions(axes: Any, question: Question, best: NDArray[np.int64]) -> None:
    """Edges between the regions, and a legend: who wins there, and who nowhere."""
    from matplotlib.patches import Patch

    sizes, worlds = 2.0 ** cells(LOW_SIZE, HIGH_SIZE), 2.0 ** cells(LOW_WORLD, HIGH_WORLD)
    handles = []
    for i, name in enumerate(question.names):
        mask = best == i
        if mask.any() and not mask.all():
            axes.contour(sizes, worlds, mask, levels=[0.5], colors="white", linewidths=1.2)
        text = name.replace("_", " ") + ("" if mask.any() else ": fastest nowhere")
        handles.append(Patch(color=COLORS[name], label=text))
    axes.legend(handles=handles, loc="upper left", fontsize=9, framealpha=0.9, edgecolor="white", labelcolor=INK)


def _scales(axes: Any) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    sizes = [2**power for power in range(LOW_SIZE + 2, HIGH_SIZE + 1, 4)]
    axes.set_xticks(sizes, [format_size(size) for size in sizes])
    worlds = [2**power for power in range(LOW_WORLD, HIGH_WORLD + 1)]
    axes.set_yticks(worlds, [str(world) for world in worlds])
    axes.minorticks_off()
    axes.set_xlabel("tensor", color=INK)
    axes.set_ylabel("members, K", color=INK)
    axes.tick_params(colors=INK, labelsize=9)
    axes.grid(visible=True, color="white", linewidth=0.5, alpha=0.5)
    axes.spines[["top", "right"]].set_visible(False)
