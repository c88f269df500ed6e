"""The report of a chaos run as one HTML page that needs nothing else: numbers, and a timeline in SVG. Pure."""

from __future__ import annotations

from html import escape
from typing import Any

from wancoll.chaos.core.report import lines

_WIDTH, _LEFT, _ROW, _CHART = 1400, 80, 20, 90  # pixels
_COLOURS = {
    "kill": "#c0392b",
    "client_kill": "#e67e22",
    "stop": "#8e44ad",
    "point": "#e74c3c",
    "twin": "#d35400",
    "cut": "#2980b9",
    "oneway": "#3498db",
    "slow": "#16a085",
    "delay": "#1abc9c",
    "flip": "#2c3e50",
    "truncate": "#7f8c8d",
    "join_storm": "#27ae60",
    "master_kill": "#000000",
    "master_pause": "#555555",
    "master_point": "#333333",
}
_LEGEND = (
    "Above: bytes committed per second. Each line is a daemon with its member; grey while it is one. "
    "Point at a fault to read it; those that found nothing to break are hollow."
)
_STYLE = """
body { font: 14px sans-serif; margin: 2em; max-width: 1500px; color: #222; }
table { border-collapse: collapse; margin: 1em 0; }
td, th { border: 1px solid #ccc; padding: 2px 8px; text-align: right; }
td:first-child, th:first-child { text-align: left; }
pre { background: #f4f4f4; padding: 1em; white-space: pre-wrap; }
.bad { color: #c0392b; }
svg text { font: 11px sans-serif; }
"""


def page(report: dict[str, Any]) -> str:
    """The page, as text in UTF-8."""
    bad = "bad" if report["violations"] else ""
    body = [
        f"<h1>wancoll chaos: <span class='{bad}'>{len(report['violations'])} violations</span></h1>",
        f"<pre>{escape(report['command'])}</pre>",
        f"<pre>{escape(chr(10).join(lines(report)))}</pre>",
        "<h2>Timeline</h2>",
        f"<p>{_LEGEND}</p>",
        timeline(report),
        "<h2>Faults by phase</h2>",
        _phases(report),
        "<h2>Recoveries</h2>",
        _recoveries(report),
        "<h2>Resources before and after</h2>",
        _resources(report),
    ]
    return (
        "<!DOCTYPE html>\n<html lang='en'><head><meta charset='utf-8'><title>wancoll chaos</title>"
        f"<style>{_STYLE}</style></head>\n<body>\n" + "\n".join(body) + "\n</body></html>\n"
    )


def timeline(report: dict[str, Any]) -> str:
    """Faults, memberships, commits and violations over time, as SVG."""
    seconds = max(1e-9, float(report["seconds"]))
    slots = 1 + max([fault["slot"] for fault in report["faults"]] + [_slot(who) for who, _, _ in report["lives"]] + [0])
    height = _CHART + (slots + 2) * _ROW + 30

    def x(at: float) -> float:
        return _LEFT + (_WIDTH - _LEFT) * min(max(at / seconds, 0.0), 1.0)

    def y(slot: int) -> float:
        return _CHART + (slot + 1) * _ROW  # the master's line is above the members'

    parts = [f"<svg width='{_WIDTH}' height='{height}' viewBox='0 0 {_WIDTH} {height}'>"]
    line = report["timeline"]
    most = max(line["bytes"], default=0) or 1
    for index, nbytes in enumerate(line["bytes"]):
        left, tall = x(index * line["width"]), (_CHART - 10) * nbytes / most
        wide = max(0.5, x((index + 1) * line["width"]) - left)
        parts.append(
            f"<rect x='{left:.1f}' y='{_CHART - tall:.1f}' width='{wide:.1f}' height='{tall:.1f}' fill='#9bc'>"
            f"<title>{nbytes / line['width'] / 1e6:.1f} MB/s, {line['operations'][index]} operations, "
            f"{line['world'][index]} members</title></rect>"
        )
    parts += [
        f"<text x='0' y='{y(slot) + 14}'>{'master' if slot < 0 else f'm{slot}'}</text>" for slot in range(-1, slots)
    ]
    for who, begin, end in report["lives"]:
        parts.append(
            f"<rect x='{x(begin):.1f}' y='{y(_slot(who)) + 8}' width='{max(0.5, x(end) - x(begin)):.1f}' height='6' "
            "fill='#ddd'/>"
        )
    for fault in report["faults"]:
        colour = _COLOURS.get(fault["kind"], "#c0392b")
        fill = colour if fault["hit"] else "none"
        wide = max(3.0, x(fault["ended"]) - x(fault["began"]))
        what = escape(f"{fault['began']:.2f} s: {fault['text']}; {fault['phase']} {fault['note']}", quote=True)
        parts += [
            f"<rect x='{x(fault['began']):.1f}' y='{y(slot) + 3}' width='{wide:.1f}' height='{_ROW - 6}' fill='{fill}' "
            f"stroke='{colour}' opacity='0.8'><title>{what}</title></rect>"
            for slot in {fault["slot"], fault["other"] if fault["other"] >= 0 else fault["slot"]}
        ]
    for violation in report["violations"]:
        at = x(violation["at"])
        parts.append(
            f"<line x1='{at:.1f}' x2='{at:.1f}' y1='0' y2='{height - 20}' stroke='red' stroke-width='2'>"
            f"<title>{escape(violation['text'], quote=True)}</title></line>"
        )
    parts += [f"<text x='{x(seconds * tenth / 10):.0f}' y='{height - 5}' text-anchor='middle'>"
              f"{seconds * tenth / 10:.0f} s</text>" for tenth in range(11)]  # fmt: skip
    return "\n".join([*parts, "</svg>"])


def _slot(who: str) -> int:
    return int(who[1:])


def _table(head: list[str], rows: list[list[str]]) -> str:
    cells = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>\n" for row in rows)
    return f"<table><tr>{cells}</tr>\n{body}</table>"


def _phases(report: dict[str, Any]) -> str:
    phases = sorted({phase for counts in report["phases"].values() for phase in counts})
    rows = [[kind, *(str(counts.get(phase, "")) for phase in phases)] for kind, counts in report["phases"].items()]
    return _table(["fault", *phases], rows)


def _recoveries(report: dict[str, Any]) -> str:
    rows = [
        [kind, str(each["count"]), f"{each['p50']:.3f} s", f"{each['p99']:.3f} s"]
        for kind, each in report["recoveries"]["by_kind"].items()
    ]
    return _table(["fault", "recoveries", "p50", "p99"], rows)


def _resources(report: dict[str, Any]) -> str:
    before, after = report["resources"].get("before", {}), report["resources"].get("after", {})
    names = sorted({name for held in (*before.values(), *after.values()) for name in held})
    rows = [
        [who, *(f"{before.get(who, {}).get(name, '')} / {after.get(who, {}).get(name, '')}" for name in names)]
        for who in sorted({*before, *after})
    ]
    return _table(["process", *names], rows)
