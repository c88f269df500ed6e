"""Blocks of Mermaid's sequences, which forges draw, as SVG in the page itself: nothing is loaded to look at them.

Of sequenceDiagram: participants, messages (->>, -->> and --x), notes over one participant or from one to another.
"""

from __future__ import annotations

import html
import itertools
import re
import textwrap
from dataclasses import dataclass

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

_CHARACTER, _LINE = 7.4, 17.0  # of 14 px text: the widest that is usual, and the step
_MOST = 32  # characters of a line of text
_SPACE, _HEAD = 14.0, 30.0
_PARTICIPANT = re.compile(r"participant (\w+) as (.+)")
_MESSAGE = re.compile(r"(\w+?)(->>|-->>|--x)(\w+): (.+)")
_NOTE = re.compile(r"Note over (\w+)(?:,(\w+))?: (.+)")


@dataclass(frozen=True, slots=True)
class _Row:
    """A message, or a note ("") between two columns, which may be one."""

    begin: int
    end: int
    arrow: str
    lines: list[str]

    @property
    def width(self) -> float:
        return max(map(len, self.lines)) * _CHARACTER + 2 * _SPACE


def _read(text: str) -> tuple[list[str], list[_Row]]:
    """Names of the columns, and the rows.

    Raises:
        ValueError: a line is none of these.
    """
    columns: dict[str, str] = {}
    rows = []
    kind, *lines = [line.strip() for line in text.strip().splitlines()]
    if kind != "sequenceDiagram":
        raise ValueError(f"{kind!r} is not drawn, sequenceDiagram alone is")
    for line in lines:
        if found := _PARTICIPANT.fullmatch(line):
            columns[found[1]] = found[2]
            continue
        if found := _NOTE.fullmatch(line):
            ends, arrow, said = (found[1], found[2] or found[1]), "", found[3]
        elif found := _MESSAGE.fullmatch(line):
            ends, arrow, said = (found[1], found[3]), found[2], found[4]
        if not found or not columns.keys() >= set(ends):
            raise ValueError(f"a line that is not drawn, or of somebody who is no participant: {line!r}")
        begin, end = map(list(columns).index, ends)
        rows.append(_Row(begin, end, arrow, textwrap.wrap(said, _MOST)))
    return list(columns.values()), rows


def _places(names: list[str], rows: list[_Row]) -> list[float]:
    """Where the columns are: so far apart that what is said between two has room."""
    widths = [len(name) * _CHARACTER + 2 * _SPACE for name in names]
    gaps = [(a + b) / 2 + _SPACE for a, b in itertools.pairwise(widths)]
    for row in sorted(rows, key=lambda row: abs(row.end - row.begin)):
        first, last = sorted((row.begin, row.end))
        if first < last:
            gaps[last - 1] += max(0.0, row.width - sum(gaps[first:last]))
    return [widths[0] / 2 + sum(gaps[:i]) for i in range(len(names))]


def _words(x: float, y: float, lines: list[str], sort: str = "named") -> str:
    at = ((y + i * _LINE, html.escape(line)) for i, line in enumerate(lines))
    return "".join(f'<text class="{sort}" x="{x:.0f}" y="{y:.0f}">{line}</text>' for y, line in at)


def _arrow(begin: float, end: float, y: float, kind: str) -> str:
    if begin == end:
        return f'<path class="{_class(kind)}" d="M{begin:.0f} {y - 8:.0f}h24v12h-16"/>' + _tip(begin, y + 4, 1, kind)
    way = 1 if end < begin else -1  # from the tip
    return f'<path class="{_class(kind)}" d="M{begin:.0f} {y:.0f}H{end + 6 * way:.0f}"/>' + _tip(end, y, way, kind)


def _class(kind: str) -> str:
    return "dashed" if kind.startswith("--") else "line"


def _tip(x: float, y: float, way: int, kind: str) -> str:
    if kind.endswith("x"):
        return f'<path class="line" d="M{x + 6 * way - 5:.0f} {y - 5:.0f}l10 10m0 -10l-10 10"/>'
    return f'<path class="tip" d="M{x:.0f} {y:.0f}l{9 * way} -5v10z"/>'


def drawn(text: str) -> str:
    """The SVG of a sequence.

    Raises:
        ValueError: it says more than is drawn here.
    """
    names, rows = _read(text)
    xs = _places(names, rows)
    parts, y = list[str](), _HEAD + _SPACE
    left, right = 0.0, xs[-1] + len(names[-1]) * _CHARACTER / 2 + _SPACE
    for row in rows:
        height, middle = len(row.lines) * _LINE, (xs[row.begin] + xs[row.end]) / 2
        if row.arrow:
            parts.append(_words(middle, y + _LINE - 4, row.lines, "said"))
            y += height + 6
            parts.append(_arrow(xs[row.begin], xs[row.end], y + (6 if row.begin == row.end else 0), row.arrow))
        else:
            wide = max(row.width, abs(xs[row.end] - xs[row.begin]) + 3 * _SPACE)
            box = f'x="{middle - wide / 2:.0f}" y="{y:.0f}" width="{wide:.0f}" height="{height + 10:.0f}"'
            parts.append(f'<rect class="box" {box}/>' + _words(middle, y + _LINE + 1, row.lines))
            left, right = min(left, middle - wide / 2), max(right, middle + wide / 2)
            y += height + 10
        left, right = min(left, middle - row.width / 2), max(right, middle + row.width / 2)
        y += _SPACE + (6 if row.arrow and row.begin == row.end else 0)
    lives = "".join(f'<path class="life" d="M{x:.0f} {_HEAD:.0f}V{y:.0f}"/>' for x in xs)
    for x, name in zip(xs, names, strict=True):
        wide = len(name) * _CHARACTER + 2 * _SPACE
        parts.append(f'<rect class="box" x="{x - wide / 2:.0f}" y="1" width="{wide:.0f}" height="{_HEAD:.0f}"/>')
        parts.append(_words(x, 21, [name]))
    size = f'width="{right - left + 4:.0f}" height="{y:.0f}" viewBox="{left - 2:.0f} 0 {right - left + 4:.0f} {y:.0f}"'
    return f'<div class="sequence"><svg xmlns="http://www.w3.org/2000/svg" {size}>{lives}{"".join(parts)}</svg></div>'


class Sequence(SphinxDirective):
    """A block."""

    has_content = True

    def run(self) -> list[nodes.Node]:
        """See Directive."""
        try:
            return [nodes.raw("", drawn("\n".join(self.content)), format="html")]
        except ValueError as bad:
            raise self.error(str(bad)) from bad


def setup(sphinx: Sphinx) -> dict[str, bool]:
    """See Sphinx."""
    sphinx.add_directive("mermaid", Sequence)
    return {"parallel_read_safe": True}
