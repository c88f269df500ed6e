"""Tables, and bars that are reached or missed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Bar:
    """Something promised: a value that must be at least or at most a number. value None: not measured."""

    what: str
    value: float | None
    least: float | None = None
    most: float | None = None

    @property
    def verdict(self) -> str:
        """ "reached", "missed" or "not measured"."""
        if self.value is None:
            return "not measured"
        low = self.least is None or self.value >= self.least
        high = self.most is None or self.value <= self.most
        return "reached" if low and high else "missed"

    def row(self) -> list[str]:
        """As a line of a table."""
        bound = f"at least {self.least:g}" if self.least is not None else f"at most {self.most:g}"
        return [self.verdict, self.what, "-" if self.value is None else f"{self.value:.3g}", bound]


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as they need to be; the first one to the left, the others to the right."""
    widths = [max(len(line[i]) for line in [head, *rows]) for i in range(len(head))]

    def line(cells: Sequence[str]) -> str:
        rest = [cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True)]
        return "  ".join([cells[0].ljust(widths[0]), *rest]).rstrip()

    return "\n".join([line(head), "-" * (sum(widths) + 2 * len(widths) - 2), *(line(row) for row in rows)])


def bar_table(bars: Sequence[Bar]) -> str:
    """One line for each bar."""
    width = max(len(bar.what) for bar in bars)
    return "\n".join(
        f"{v:12}  {what:{width}}  {value:>8}  {bound}" for v, what, value, bound in (b.row() for b in bars)
    )


def size_name(size: int) -> str:
    """4096 as "4 KiB"."""
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"
