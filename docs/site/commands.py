"""A directive that turns the help of a command, and of all below it, into sections: what `--help` prints, no less."""

from __future__ import annotations

import io
import re
from typing import Any

from cyclopts import App
from docutils import nodes
from docutils.parsers.rst import Directive
from rich.console import Console
from sphinx.application import Sphinx

from wancoll.cli.main import app

_PANEL = re.compile(r"╭─ (.+?) ─*╮")
_ENTRY = re.compile(r"│ (\*?) *(.+?)(?: {2,}(.*?))? *│$")
_BRACKETS = re.compile(r"(?: \[(?:choices|env var|default|required)\b[^\]]*\])+$")


def help_of(words: list[str]) -> str:
    """What `--help` prints, so wide that each entry is one line."""
    out = io.StringIO()
    app.help_print(words, console=Console(file=out, width=20_000))
    return out.getvalue()


def parts(text: str) -> tuple[str, str, dict[str, list[tuple[str, str]]]]:
    """Usage; what the command does; for each panel its entries: (names, what they mean)."""
    panels: dict[str, list[tuple[str, str]]] = {}
    prose: list[str] = []
    for line in map(str.rstrip, text.splitlines()):
        if panel := _PANEL.match(line):
            entries = panels.setdefault(panel[1], [])
        elif entry := _ENTRY.match(line):
            entries.append((entry[2], entry[3] or ""))
        elif not line.startswith("╰"):
            prose.append(line)
    usage, _, does = "\n".join(prose).strip().partition("\n")
    return usage.removeprefix("Usage: "), " ".join(does.split()), panels


def section(words: list[str], of: App) -> nodes.section:
    """A command, and those below it."""
    usage, does, panels = parts(help_of(words))
    name = " ".join(["wancoll", *words])
    made = nodes.section("", nodes.title("", name), ids=[name.replace(" ", "-")], names=[])
    made += [nodes.literal_block("", usage, language="text"), nodes.paragraph("", does)]
    for panel, entries in panels.items():
        if panel == "Commands":
            continue
        listed = nodes.definition_list()
        for names, means in entries:
            said = _BRACKETS.sub("", means)
            item = nodes.definition_list_item("", nodes.term("", "", nodes.literal("", names)))
            item += nodes.definition(
                "", nodes.paragraph("", "", *_options(said)), nodes.paragraph("", "", *_quiet(means[len(said) :]))
            )
            listed += item
        made += [nodes.rubric("", panel), listed]
    made += [section([*words, below], of[below]) for below in of if not below.startswith("-")]
    return made


def _options(text: str) -> list[nodes.Node]:
    """Text whose `--options` are code."""
    return [
        nodes.literal("", part) if part.startswith("--") else nodes.Text(part)
        for part in re.split(r"((?<![\w-])--[a-z][a-z-]*)", text)
        if part
    ]


def _quiet(text: str) -> list[nodes.Node]:
    """Default, environment variable and choices, in small."""
    return [nodes.inline("", text.strip(), classes=["quiet"])] if text else []


class Commands(Directive):
    """All commands of the program."""

    def run(self) -> list[nodes.Node]:
        """One section each."""
        return [section([name], app[name]) for name in app if not name.startswith("-")]


def setup(sphinx: Sphinx) -> dict[str, Any]:
    """Sphinx's entry."""
    sphinx.add_directive("commands", Commands)
    return {"parallel_read_safe": True}
