"""What `wancoll perf` prints: nccl-tests' columns and what is ours beside them, variants side by side, or JSON."""

from __future__ import annotations

import json
import statistics
import textwrap
from collections.abc import Iterable
from dataclasses import asdict

from wancoll.cli.perf.run import Row, Settings, Variant
from wancoll.cli.perf.values import COLLECTIVES
from wancoll.limits import counted
from wancoll.schedule.cost import AVAILABLE

_WIDTH = 80  # of a terminal


def report_table(settings: Settings, peers: int, where: str, groups: Iterable[list[Row]]) -> list[Row]:
    """Print the rows of each size when they are there, then all variants side by side and the footer.

    Nothing is wider than 80 columns but sizes and times that are very large. What is to be said of a row beside
    nccl-tests' columns stands behind them where there is room, else in a comment below.
    """
    columns, behind = _columns(settings)
    _header(settings, peers, where, behind)
    for head in (0, 1):
        names = " ".join(f"{column[head]:>{column[2]}}" for column in columns)
        print(f"#{names[1:]}{' algorithm' if behind and not head else ''}".rstrip(), flush=True)
    sizes = []
    for rows in groups:
        sizes.append(rows)
        for row in rows:
            cells = {
                "size": f"{row.size}", "count": f"{row.count}", "type": row.type, "redop": row.redop,
                "root": f"{row.root}", "time": f"{row.time * 1e6:.1f}",
                "algbw": _shown(row.algbw), "busbw": _shown(row.busbw), "#wrong": f"{row.wrong}",
            }  # fmt: skip
            line = " ".join(f"{cells[name]:>{width}}" for name, _, width in columns)
            print(line + (f" {row.algorithm}" if behind else f"\n#   {_more(row)}"), flush=True)
    if len(settings.variants) > 1:
        _side_by_side(settings.variants, sizes)
    done = [row for rows in sizes for row in rows]
    wrong = sum(row.wrong for row in done)
    print(f"# Out of bounds values : {wrong} {'FAILED' if wrong else 'OK'}")
    print(f"# Avg bus bandwidth    : {statistics.fmean(row.busbw for row in done):g}")
    return done


def report_json(settings: Settings, peers: int, where: str, groups: Iterable[list[Row]]) -> list[Row]:
    """Print one object: the settings and a list of rows. Times are seconds, sizes bytes, bandwidths GB/s."""
    done = [row for rows in groups for row in rows]
    facts = {"peers": peers, "where": where, "settings": asdict(settings), "rows": [asdict(row) for row in done]}
    print(json.dumps(facts, indent=2))
    return done


def _header(settings: Settings, peers: int, where: str, behind: bool) -> None:
    place = "in place" if COLLECTIVES[settings.collective].in_place else "out of place"
    memory = "arrays in the arena" if settings.arena else "arrays outside the arena"
    data = f"{place}, {memory}" if COLLECTIVES[settings.collective].given else "no data"
    _comment(f"wancoll perf {settings.collective}: {counted(peers, 'rank')}, {data}")
    _comment(where)
    several = len(settings.variants) > 1
    turns = ", variants in turns" if several else f", algorithm {settings.variants[0].algorithm}"
    if settings.in_flight == 1:
        _comment(f"time: median of {settings.iterations} operations after {settings.warmup} to warm up{turns}")
    else:
        _comment(
            f"time: of an operation with {settings.in_flight} in flight: median of {counted(settings.runs, 'run')} of "
            f"{settings.run_length} operations{turns}"
        )
    if not behind:
        _comment("below each line: the algorithm that ran (the one asked for), and the codec")


def _columns(settings: Settings) -> tuple[list[tuple[str, str, int]], bool]:
    """Name, unit and width of nccl-tests' columns; whether the algorithm's has room behind them."""
    digits = max(len(str(size)) for size in settings.sizes)
    columns = [("size", "(B)", max(6, digits)), ("count", "(elem)", max(6, digits)), ("type", "", len(settings.dtype))]
    columns += [("redop", "", 5), *([("root", "", 4)] if COLLECTIVES[settings.collective].rooted else [])]
    columns += [("time", "(us)", 8), ("algbw", "(GB/s)", 7), ("busbw", "(GB/s)", 7), ("#wrong", "", 6)]
    longest = max(len(name) for name in ("algorithm", *AVAILABLE.get(settings.collective, ())))
    fits = sum(width + 1 for _, _, width in columns) + longest <= _WIDTH
    return columns, fits and len(settings.variants) == 1 and settings.variants[0].codec == "none"


def _shown(rate: float) -> str:
    """GB/s in 7 characters; what is small has two digits, too."""
    return f"{rate:.{3 if rate >= 1 else 5}f}" if rate >= 1e-3 or not rate else f"{rate:.1e}"


def _more(row: Row) -> str:
    """The rest of it."""
    asked = "" if row.asked == row.algorithm else f" ({row.asked})"
    coded = f", {row.codec}: error {row.error:.2e}, saved {row.bytes_saved} B" if row.codec != "none" else ""
    return f"{row.algorithm}{asked}{coded}"


def _name(variant: Variant, ran: list[str]) -> str:
    """What was asked for, behind what ran where that is another algorithm: hierarchical without sites is none."""
    asked, others = variant.algorithm, "/".join(dict.fromkeys(ran))
    name = asked if asked in ("auto", *ran) else f"{others} ({asked})"
    return name + (f" {variant.codec}" if variant.codec != "none" else "")


def _side_by_side(variants: tuple[Variant, ...], sizes: list[list[Row]]) -> None:
    """Times of all variants, one line for each, one column for each size, as many as fit."""
    print("#\n# time (us) side by side, * the fastest")
    names = [_name(each, [rows[i].algorithm for rows in sizes]) for i, each in enumerate(variants)]
    width = max(23, *map(len, names))
    left = [f"#{name:>{width}}" for name in ("size (B)", *names)]
    blocks: list[list[str]] = []
    for rows in sizes:
        least = min(row.time for row in rows)
        times = (f"{row.time * 1e6:.1f}{'*' if row.time == least else ' '}" for row in rows)
        column = [f"{rows[0].size} ", *times]
        wide = max(12, *(len(cell) + 2 for cell in column))
        if not blocks or len(blocks[-1][0]) + wide > _WIDTH:
            blocks.append(list(left))
        blocks[-1] = [f"{line}{cell:>{wide}}" for line, cell in zip(blocks[-1], column, strict=True)]
    print("\n#\n".join("\n".join(line.rstrip() for line in block) for block in blocks))
    print("#")


def _comment(text: str) -> None:
    """Print a comment, whose words stay whole."""
    wrapped = textwrap.TextWrapper(_WIDTH, "# ", "#   ", break_long_words=False, break_on_hyphens=False)
    print(wrapped.fill(text), flush=True)
