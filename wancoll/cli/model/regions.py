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
LABEL_DEPTH = 14  # cells around a name that must be its own; smaller regions have their name in the legend
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


def deepest(mask: NDArray[np.bool_]) -> tuple[int, int, int]:
    """(row, column, depth) of the cell of *mask* that is farthest from its edge and, a bit, from the map's."""
    depth, last = 0, mask
    while mask.any():
        depth, last = depth + 1, mask
        around = np.pad(mask, 1)
        mask = mask & around[:-2, 1:-1] & around[2:, 1:-1] & around[1:-1, :-2] & around[1:-1, 2:]
    rows, columns = np.nonzero(last)
    middle = len(rows) // 2
    return (int(rows[middle]), int(columns[middle]), depth) if depth else (0, 0, 0)


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
    """Names in the regions that have room for them, edges between all, a legend and a note for the rest."""
    from matplotlib.patches import Patch

    sizes, worlds = 2.0 ** cells(LOW_SIZE, HIGH_SIZE), 2.0 ** cells(LOW_WORLD, HIGH_WORLD)
    small, never = [], []
    for i, name in enumerate(question.names):
        mask = best == i
        if not mask.any():
            never.append(name.replace("_", " "))
            continue
        if not mask.all():
            axes.contour(sizes, worlds, mask, levels=[0.5], colors="white", linewidths=1.2)
        row, column, depth = deepest(mask)
        if depth >= LABEL_DEPTH:
            shown = name.replace("_", "\n")
            axes.text(
                sizes[column], worlds[row], shown, ha="center", va="center", fontsize=15, fontweight="bold", color=INK
            )
        else:
            small.append(Patch(color=COLORS[name], label=name.replace("_", " ")))
    if never:
        axes.annotate(
            f"fastest nowhere: {', '.join(never)}",
            xy=(1, 0),
            xycoords="axes fraction",
            xytext=(0, -38),  # below the label of the axis
            textcoords="offset points",
            ha="right",
            va="top",
            fontsize=9,
            color=INK,
        )
    if small:
        axes.legend(handles=small, loc="upper left", fontsize=9, framealpha=0.9, edgecolor="white", labelcolor=INK)


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
