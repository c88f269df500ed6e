"""`wancoll model`: what the alpha-beta model says an all-reduce or a half of it takes: tables, JSON or a map."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import App, Parameter
from cyclopts.config import Env

from wancoll.cli.columns import print_columns
from wancoll.cli.model.question import (
    EXTRA,
    Alpha,
    Bandwidth,
    Question,
    column_names,
    named_columns,
    shown,
)
from wancoll.errors import ConfigError
from wancoll.limits import format_size
from wancoll.options import AsJson, Switch, between, check_picture
from wancoll.schedule.cost import ALGORITHMS, HALVED, LinkCost
from wancoll.units import format_duration, format_rate, parse_duration, parse_rate, parse_size

CLASSIC = ("naive", "tree", "ring")
WORLDS = (2, 8, 32, 128, 512, 1024)
SIZES = tuple(1 << power for power in (8, 12, 16, 20, 24, 28))  # bytes: 256 B to 256 MiB
SIZE, WORLD = 64 << 20, 64  # what stays the same in each of the two tables
MOST_MEMBERS = 1 << 20
SUFFIXES = (".png", ".svg", ".pdf")

model = App(
    name="model",
    config=Env("WANCOLL_MODEL_", command=False),  # names like size and world are too common for WANCOLL_SIZE
    help_epilogue=(
        "The classic model: messages x alpha + bytes x beta, step after step. Without --size and --world: 64 MiB over "
        "2 to 1024 members, and 64 members over 256 B to 256 MiB. The winner is the fastest of the columns. Sizes: K "
        "and KiB are 1024 bytes, KB 1000. Rates: GB/s is 10^9 bytes a second."
    ),
)
model.command(
    "wancoll.cli.model.training:training",
    name="training",
    help="Print what a step of training takes with DP, ZeRO, tensor and pipeline parallel, 3D and DiLoCo.",
)


@dataclass(frozen=True)
class Row:
    """One line of a table."""

    size: int  # bytes
    world: int
    times: dict[str, float]  # seconds
    extra: dict[str, float] = field(default_factory=dict)  # the columns that are no algorithm

    @property
    def winner(self) -> str:
        """The fastest; of equal ones the first column; "" without an algorithm."""
        return min(self.times, key=self.times.__getitem__, default="")


@model.default
def run(
    *,
    alpha: Alpha = "5us",
    bandwidth: Bandwidth = "100GB/s",
    overhead: str = "0us",
    size: str = "",
    world: Annotated[int, Parameter(validator=between(0, MOST_MEMBERS))] = 0,
    algorithms: Switch = False,
    sites: Annotated[int, Parameter(validator=between(0, MOST_MEMBERS))] = 0,
    inside_alpha: str = "5us",
    inside_bandwidth: str = "100GB/s",
    kind: Annotated[
        Literal["all_reduce", "reduce_scatter", "all_gather"], Parameter(name="--collective")
    ] = "all_reduce",
    columns: Annotated[
        str,
        Parameter(
            help="Columns, with commas between: algorithms, "
            + ", ".join(f"{name} ({meaning})" for name, meaning in EXTRA.items())
            + ", and, as in ring/bound, how many times the bound an algorithm takes. Empty: the algorithms."
        ),
    ] = "",
    root_bandwidth: str = "",
    crossing: Annotated[str, Parameter(name="--crossover")] = "",
    plot: str = "",
    as_json: AsJson = False,
) -> int:
    """Print what an all-reduce takes by the alpha-beta model, for each algorithm.

    Args:
        overhead: CPU time of a member for each message it sends or receives, unit ns, us, ms or s.
        size: Tensor, bytes (K, M, G; KB, MB, GB): only the table over worlds, for this size.
        world: Members: only the table over sizes, for this world. With --size one row. 0: not given.
        algorithms: Compare all algorithms, not only naive, tree and ring.
        sites: Sites of about equal size, for the column hierarchical of --algorithms. 0: leave it out.
        inside_alpha: As --alpha, of links within a site.
        inside_bandwidth: As --bandwidth, of links within a site.
        kind: The whole of it, or one of its halves by itself: those of the ring.
        root_bandwidth: As --bandwidth, of the root of naive, through which all pass. Empty: as the others.
        crossing: Two algorithms, as in tree,ring: print the size at which they take the same time instead of tables.
        plot: Path of a PNG, SVG or PDF to draw: which algorithm wins at which size and world.
    """
    cost, given = _cost(alpha, bandwidth, overhead, "")
    inside = _cost(inside_alpha, inside_bandwidth, overhead, "inside-")[0] if sites else None
    known = tuple(name for name in ALGORITHMS if name != "hierarchical" or sites)
    classic = known if algorithms else CLASSIC if kind == "all_reduce" else HALVED
    chosen = named_columns(columns, column_names(kind, known)) or [
        name for name in classic if kind == "all_reduce" or name in HALVED
    ]
    names = tuple(name for name in chosen if name in known)
    root = parse_rate(root_bandwidth, "--root-bandwidth") if root_bandwidth else 0.0
    question = Question(names, cost, given, sites, inside, kind, root)
    nbytes = parse_size(size, "--size") if size else 0
    pair = _pair(crossing, sites) if crossing else None
    if pair and (kind != "all_reduce" or root):
        expected = "no --collective and no --root-bandwidth with it"
        raise ConfigError("only all_reduce over links that are alike", who="--crossover", expected=expected)
    if plot:
        _check_plot(plot)
        if not names:
            raise ConfigError("the map shows algorithms", who="--plot", expected="one at least in --columns")
    crossings = {k: question.crossover(pair, k) for k in ([world] if world else WORLDS)} if pair else {}
    tables = [] if pair else _tables(question, chosen, nbytes, world)
    if plot:
        from wancoll.cli.model.regions import draw

        draw(question, plot)
    if as_json:
        _print_json(question, tables, pair, crossings, plot)
        return 0
    print(f"# {kind}, milliseconds: {_links(question)}")
    for table in tables:
        _print_table(chosen, table)
    if pair:
        _print_crossings(pair, crossings, question)
    if plot:
        print(f"\nregions: {plot}")
    return 0


# ---- options -------------------------------------------------------------------------------------------


def _cost(alpha: str, bandwidth: str, overhead: str, prefix: str) -> tuple[LinkCost, float]:
    rate = parse_rate(bandwidth, f"--{prefix}bandwidth")
    return LinkCost(parse_duration(alpha, f"--{prefix}alpha"), 1 / rate, parse_duration(overhead, "--overhead")), rate


def _pair(text: str, sites: int) -> tuple[str, str]:
    names = [name.strip().replace("-", "_") for name in text.split(",")]
    if len(names) != 2 or names[0] == names[1] or not set(names) <= set(ALGORITHMS):
        raise ConfigError(
            "not two algorithms",
            who="--crossover",
            expected=f"two of {', '.join(ALGORITHMS)} with a comma between, such as tree,ring",
            got=repr(text),
        )
    if "hierarchical" in names and not sites:
        raise ConfigError("hierarchical needs to know the sites", who="--crossover", expected="--sites, 1 or more")
    return names[0], names[1]


def _check_plot(plot: str) -> None:
    """Now, not after the tables."""
    from wancoll.demo.data import check_extra

    path = Path(plot)
    if path.suffix.lower() not in SUFFIXES:
        raise ConfigError(
            "no kind of picture", who="--plot", expected=f"a name that ends in {', '.join(SUFFIXES)}", got=plot
        )
    check_picture(path, what="--plot")
    check_extra("--plot")


# ---- answers -------------------------------------------------------------------------------------------


def _tables(question: Question, columns: list[str], nbytes: int, world: int) -> list[list[Row]]:
    extra = [name for name in columns if name not in question.names]

    def rows(places: list[tuple[int, int]]) -> list[Row]:
        return [
            Row(n, k, question.times(n, k), {name: question.extra(name, n, k) for name in extra}) for n, k in places
        ]

    if nbytes and world:
        return [rows([(nbytes, world)])]
    over_worlds = [(nbytes or SIZE, k) for k in WORLDS]
    over_sizes = [(n, world or WORLD) for n in SIZES]
    if nbytes or world:
        return [rows(over_worlds if nbytes else over_sizes)]
    return [rows(over_worlds), rows(over_sizes)]


def _links(question: Question) -> str:
    text = f"alpha {format_duration(question.cost.alpha)}, bandwidth {format_rate(question.bandwidth)}"
    text += f", overhead {format_duration(question.cost.gamma)} a message" if question.cost.gamma else ""
    if question.inside:
        text += f"; {question.sites} sites: inside {format_duration(question.inside.alpha)}"
        text += f", {format_rate(1 / question.inside.beta)}"
    return text


def _print_table(columns: list[str], rows: list[Row]) -> None:
    varies_world = len(rows) == 1 or rows[0].world != rows[1].world
    title = format_size(rows[0].size) + (f", K = {rows[0].world}" if len(rows) == 1 else "")
    print(f"\n{title if varies_world else f'K = {rows[0].world}'}")
    left = [f"{row.world if varies_world else format_size(row.size):>8}" for row in rows]
    values = [{**row.times, **row.extra} for row in rows]
    table = [[name, *(shown(name, each[name]) for each in values)] for name in columns]
    winners = ["winner", *(row.winner for row in rows)]
    table += [[f"{name:<{max(10, *map(len, winners))}}" for name in winners]] if rows[0].times else []
    print_columns([f"{'K' if varies_world else 'size':>8}", *left], table, least=12)


def _print_crossings(pair: tuple[str, str], crossings: dict[int, float | None], question: Question) -> None:
    print(f"\n{pair[0]} and {pair[1]} take the same time at")
    print(f"{'K':>8}{'bytes':>16}{'':>12}{'time':>12}")
    for world, size in crossings.items():
        if size is None:
            first, second = (question.seconds(name, SIZE, world) for name in pair)
            faster = pair[0] if first < second else pair[1]
            alike = math.isclose(first, second, rel_tol=1e-9)
            print(f"{world:>8}{'none':>16}  {'they are alike' if alike else f'{faster} is never slower'}")
        else:
            time = 1e3 * question.seconds(pair[0], size, world)
            print(f"{world:>8}{size:>16.0f}{format_size(size):>12}{time:>12.3f}")


def _print_json(
    question: Question,
    tables: list[list[Row]],
    pair: tuple[str, str] | None,
    crossings: dict[int, float | None],
    plot: str,
) -> None:
    """One object. Times are seconds, sizes bytes, the bandwidth bytes per second."""
    answer: dict[str, Any] = {
        "collective": question.kind,
        "alpha": question.cost.alpha,
        "bandwidth": question.bandwidth,
        "overhead": question.cost.gamma,
        "algorithms": question.names,
        "tables": [
            [
                {"size": row.size, "world_size": row.world, "seconds": row.times, "winner": row.winner}
                | ({"columns": row.extra} if row.extra else {})
                for row in table
            ]
            for table in tables
        ],
    }
    if pair:
        answer["crossover"] = {
            "between": pair,
            "at": [{"world_size": world, "size": size} for world, size in crossings.items()],
        }
    if plot:
        answer["plot"] = plot
    print(json.dumps(answer, indent=2))
