"""Columns and comments of commands whose tables people and programs read, in lines of at most WIDTH characters."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence

WIDTH = 80  # of a terminal


def print_columns(left: Sequence[str], columns: Iterable[Sequence[str]], least: int = 0, between: str = "\n\n") -> None:
    """Print the *columns*, heads first, beside *left*: in blocks of at most WIDTH characters, with *between* them."""
    blocks: list[list[str]] = []
    for cells in columns:
        width = max(least, *(len(cell) + 2 for cell in cells))
        if not blocks or len(blocks[-1][0]) + width > WIDTH:
            blocks.append(list(left))
        blocks[-1] = [f"{line}{cell:>{width}}" for line, cell in zip(blocks[-1], cells, strict=True)]
    print(between.join("\n".join(line.rstrip() for line in block) for block in blocks))


def comment(text: str) -> None:
    """Print a comment, whose words stay whole."""
    wrapped = textwrap.TextWrapper(WIDTH, "# ", "#   ", break_long_words=False, break_on_hyphens=False)
    print(wrapped.fill(text), flush=True)
