"""What `wancoll perf` prints: nccl-tests' columns and ours to the right of them, variants side by side, or JSON."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable
from dataclasses import asdict

from wancoll.cli.perf.run import Row, Settings, Variant
from wancoll.cli.perf.values import COLLECTIVES


def report_table(settings: Settings, peers: int, groups: Iterable[list[Row]]) -> list[Row]:
    """Print the rows of each size when they are there, then all variants side by side and the footer."""
    rooted, coded = COLLECTIVES[settings.collective].rooted, any(each.codec != "none" for each in settings.variants)
    _header(settings, peers)
    print(_line("#size count type redop root time algbw busbw #wrong asked algorithm codec error saved", rooted, coded))
    print(_line("#(B) (elements) - - - (us) (GB/s) (GB/s) - - - - - (B)", rooted, coded), flush=True)
    sizes = []
    for rows in groups:
        sizes.append(rows)
        for row in rows:
            cells = (
                f"{row.size} {row.count} {row.type} {row.redop} {row.root} {row.time * 1e6:.1f} {row.algbw:.3f} "
                f"{row.busbw:.3f} {row.wrong} {row.asked} {row.algorithm} {row.codec} {row.error:.2e} {row.bytes_saved}"
            )
            print(_line(cells, rooted, coded), flush=True)
    if len(settings.variants) > 1:
        _side_by_side(settings.variants, sizes)
    done = [row for rows in sizes for row in rows]
    wrong = sum(row.wrong for row in done)
    print(f"# Out of bounds values : {wrong} {'FAILED' if wrong else 'OK'}")
    print(f"# Avg bus bandwidth    : {statistics.fmean(row.busbw for row in done):g}")
    return done


def report_json(settings: Settings, peers: int, groups: Iterable[list[Row]]) -> list[Row]:
    """Print one object: the settings and a list of rows. Times are seconds, sizes bytes, bandwidths GB/s."""
    done = [row for rows in groups for row in rows]
    print(json.dumps({"peers": peers, "settings": asdict(settings), "rows": [asdict(row) for row in done]}, indent=2))
    return done


def _header(settings: Settings, peers: int) -> None:
    place = "in place" if COLLECTIVES[settings.collective].in_place else "out of place"
    memory = "arrays in the arena" if settings.arena else "arrays outside the arena"
    where = f"{place}, {memory}" if COLLECTIVES[settings.collective].given else "no data"
    print(f"# wancoll perf {settings.collective}: {peers} ranks, {where}")
    turns = ", variants in turns" if len(settings.variants) > 1 else ""
    if settings.in_flight == 1:
        print(f"# time: median of {settings.iterations} operations after {settings.warmup} to warm up{turns}")
    else:
        print(
            f"# time: of an operation with {settings.in_flight} in flight: median of {settings.runs} runs of "
            f"{settings.run_length} operations{turns}"
        )


def _line(cells: str, rooted: bool, coded: bool) -> str:
    """One line of the table from its words; "-" is an empty cell."""
    widths = (14, 13, 9, 6, 5, 10, 8, 8, 8, 17, 17, 6, 9, 11)
    columns = ["" if cell == "-" else cell for cell in cells.split()]
    shown = [True] * 4 + [rooted] + [True] * 6 + [coded] * 3
    padded = [f"{cell:>{width}}" for cell, width, wanted in zip(columns, widths, shown, strict=True) if wanted]
    if padded[0].lstrip().startswith("#"):
        padded[0] = f"#{padded[0].replace('#', '', 1):>13}"
    return " ".join(padded).rstrip()


def _side_by_side(variants: tuple[Variant, ...], sizes: list[list[Row]]) -> None:
    """Times of all variants, one line for each, one column for each size."""
    print("#\n# time (us) side by side, * the fastest")
    names = [each.algorithm + (f" {each.codec}" if each.codec != "none" else "") for each in variants]
    fastest = [min(row.time for row in rows) for rows in sizes]
    print(f"#{'size (B)':>23}" + "".join(f" {rows[0].size:>11}" for rows in sizes))
    for i, name in enumerate(names):
        times = [rows[i].time for rows in sizes]
        cells = (
            f" {time * 1e6:>10.1f}{'*' if time == least else ' '}" for time, least in zip(times, fastest, strict=True)
        )
        print(f"#{name:>23}{''.join(cells)}".rstrip())
    print("#")
