"""The report of a chaos run as one HTML page that needs nothing else: a timeline in SVG. Pure."""

from __future__ import annotations

import math
from html import escape
from typing import Any

from wancoll.chaos.core.chaos_report import lines
from wancoll.chaos.core.faults import KINDS
from wancoll.limits import counted
from wancoll.units import format_rate

_WIDTH, _LEFT, _RIGHT, _ROW, _CHART = 1200, 70, 24, 22, 100  # pixels
_COLOURS = {kind: f"hsl({360 * i // len(KINDS)},55%,45%)" for i, kind in enumerate(KINDS)}
_STEPS = (0.1, 0.2, 0.5, 1, 2, 3, 5, 10, 20, 30, 60, 120, 300, 600)  # seconds between two lines
_STYLE = """
:root { color-scheme: light dark; --ink: #222; --paper: #fff; --quiet: #666; --edge: #ccc; --panel: #f4f4f4;
  --member: #ccc; --bytes: #6fa3c7; --bad: #c0392b; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e4e4; --paper: #16181d; --quiet: #a5a5a5; --edge: #444; --panel: #22252c;
    --member: #555; --bytes: #4d84ab; --bad: #ff7b6b; }
}
body { font: 14px sans-serif; margin: 1.5em auto; padding: 0 1em; max-width: 1300px; color: var(--ink);
  background: var(--paper); }
.wide { overflow-x: auto; }
pre { background: var(--panel); padding: 1em; white-space: pre-wrap; overflow-wrap: anywhere; }
.bad { color: var(--bad); }
.key { display: flex; flex-wrap: wrap; gap: .3em 1.5em; padding: 0; list-style: none; }
.key svg { vertical-align: -2px; margin-right: .4em; }
.timeline { width: 100%; min-width: 1100px; height: auto; }
svg text { font: 12px sans-serif; fill: var(--ink); }
svg .quiet { fill: var(--quiet); }
.member { fill: var(--member); }
.bytes { fill: var(--bytes); }
.violation { stroke: var(--bad); stroke-width: 2; }
.grid { stroke: var(--edge); }
"""


def page(report: dict[str, Any]) -> str:
    """The page, as text in UTF-8."""
    bad = "bad" if report["violations"] else ""
    body = [
        f"<h1>wancoll chaos: <span class='{bad}'>{counted(len(report['violations']), 'violation')}</span></h1>",
        f"<pre>{escape(report['command'])}</pre>",
        f"<pre>{escape(chr(10).join(lines(report)))}</pre>",
        "<h2>Timeline</h2>",
        _legend(report),
        f"<div class='wide'>{timeline(report)}</div>",
    ]
    return (
        "<!DOCTYPE html>\n<html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'><title>wancoll chaos</title>"
        f"<style>{_STYLE}</style></head>\n<body>\n" + "\n".join(body) + "\n</body></html>\n"
    )


def _legend(report: dict[str, Any]) -> str:
    """What rows, bars and colours are; of faults those that came."""
    keys = [
        ("<rect class='bytes' width='14' height='12'/>", "bytes committed per second"),
        ("<rect class='member' y='3' width='14' height='6'/>", "in the group"),
    ]
    came = {fault["kind"] for fault in report["faults"]}
    keys += [
        (f"<rect width='14' height='12' fill='{_COLOURS[kind]}'/>", f"{kind.replace('_', ' ')}: {means}")
        for kind, (_, _, means) in KINDS.items()
        if kind in came
    ]
    if not all(fault["hit"] for fault in report["faults"]):
        keys.append(
            ("<rect x='1' y='1' width='12' height='10' fill='none' stroke='#7f8c8d'/>", "it found nothing to break")
        )
    if report["violations"]:
        keys.append(("<line class='violation' x1='7' x2='7' y2='12'/>", "a promise was broken"))
    items = "".join(f"<li><svg width='14' height='12'>{mark}</svg>{escape(text)}</li>" for mark, text in keys)
    return (
        "<p>A row is a member (m0) with its daemon (peer-0). A fault between two members is on both rows; one of the "
        "master, or of those who join, is on the master's. A bar is as long as the fault lasts: point at it to read "
        f"it.</p><ul class='key'>{items}</ul>"
    )


def timeline(report: dict[str, Any]) -> str:
    """Faults, memberships, commits and violations over time, as SVG."""
    seconds = max(1e-9, float(report["seconds"]))
    slots = 1 + max([fault["slot"] for fault in report["faults"]] + [_slot(who) for who, _, _ in report["lives"]] + [0])
    bottom = _CHART + (slots + 1) * _ROW
    height = bottom + 24

    def x(at: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * min(max(at / seconds, 0.0), 1.0)

    def y(slot: int) -> float:
        return _CHART + (slot + 1) * _ROW  # the master's line is above the members'

    line = report["timeline"]
    most = max(line["bytes"], default=0) or 1
    size = f"width='{_WIDTH}' height='{height}' viewBox='0 0 {_WIDTH} {height}'"
    parts = [
        f"<svg class='timeline' {size} role='img' aria-label='faults, members and bytes committed over time'>",
        f"<text x='0' y='12' class='quiet'>{format_rate(most / line['width'], 3)}</text>",
        f"<line class='grid' x1='{_LEFT}' x2='{_WIDTH - _RIGHT}' y1='8' y2='8'/>",
    ]
    step = next((each for each in _STEPS if seconds <= 12 * each), _STEPS[-1] * math.ceil(seconds / _STEPS[-1] / 12))
    for tick in range(int(seconds / step) + 1):
        at = x(tick * step)
        parts += [
            f"<line class='grid' x1='{at:.1f}' x2='{at:.1f}' y1='8' y2='{bottom}'/>",
            f"<text class='quiet' x='{at:.0f}' y='{height - 6}' text-anchor='middle'>{_clock(tick * step)}</text>",
        ]
    for index, nbytes in enumerate(line["bytes"]):
        left, tall = x(index * line["width"]), (_CHART - 8) * nbytes / most
        wide = max(0.5, x((index + 1) * line["width"]) - left)
        parts.append(
            f"<rect class='bytes' x='{left:.1f}' y='{_CHART - tall:.1f}' width='{wide:.1f}' height='{tall:.1f}'>"
            f"<title>{format_rate(nbytes / line['width'], 3)}, {counted(line['operations'][index], 'operation')}, "
            f"{counted(line['world'][index], 'member')}</title></rect>"
        )
    parts += [
        f"<text x='0' y='{y(slot) + 15}'>{'master' if slot < 0 else f'm{slot}'}</text>" for slot in range(-1, slots)
    ]
    for who, begin, end in report["lives"]:
        parts.append(
            f"<rect class='member' x='{x(begin):.1f}' y='{y(_slot(who)) + 8}' "
            f"width='{max(0.5, x(end) - x(begin)):.1f}' height='6'><title>{escape(who)} in the group, "
            f"{begin:.2f} to {end:.2f} s</title></rect>"
        )
    for fault in report["faults"]:
        colour = _COLOURS[fault["kind"]]
        fill = colour if fault["hit"] else "none"
        wide = max(3.0, x(fault["ended"]) - x(fault["began"]))
        what = escape(f"{fault['began']:.2f} s: {fault['text']}; {fault['phase']} {fault['note']}", quote=True)
        parts += [
            f"<rect x='{x(fault['began']):.1f}' y='{y(slot) + 4}' width='{wide:.1f}' height='{_ROW - 8}' fill='{fill}' "
            f"stroke='{colour}' opacity='0.8'><title>{what}</title></rect>"
            for slot in {fault["slot"], fault["other"] if fault["other"] >= 0 else fault["slot"]}
        ]
    for violation in report["violations"]:
        at = x(violation["at"])
        parts.append(
            f"<line class='violation' x1='{at:.1f}' x2='{at:.1f}' y1='0' y2='{bottom}'>"
            f"<title>{escape(violation['text'], quote=True)}</title></line>"
        )
    return "\n".join([*parts, "</svg>"])


def _clock(seconds: float) -> str:
    """Such as "12 s" or "3:20 min"."""
    whole = round(seconds)
    return f"{seconds:.3g} s" if seconds < 120 else f"{whole // 60}:{whole % 60:02} min"


def _slot(who: str) -> int:
    return int(who[1:])
