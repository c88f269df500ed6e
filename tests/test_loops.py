"""No function of a pure core calls itself by way of others: handlers write facts, and one place decides."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CORES = [
    "wancoll/commit", "wancoll/peer/core", "wancoll/metrics/core", "wancoll/chaos/core", "master/wancoll_master/core",
    "master/wancoll_master/plan",
]  # fmt: skip
KNOWN = {
    "state.weight",  # goes through what a message holds
}  # fmt: skip


class Core:
    """The files of one folder: their functions, and which of them each one calls, as far as names say it.

    Args:
        files: the source of each, by module.
    """

    def __init__(self, files: dict[str, str]) -> None:
        self.modules = set(files)
        self.bases: dict[str, list[str]] = {}  # by class, whose names are unique in a folder
        self.functions: dict[str, tuple[str, str, ast.FunctionDef]] = {}  # by owner.name: module, owner, source
        for module, text in files.items():
            for node in ast.parse(text).body:
                if isinstance(node, ast.FunctionDef):
                    self.functions[f"{module}.{node.name}"] = module, module, node
                elif isinstance(node, ast.ClassDef):
                    self.bases[node.name] = [base.id for base in node.bases if isinstance(base, ast.Name)]
                    for each in node.body:
                        if isinstance(each, ast.FunctionDef):
                            self.functions[f"{node.name}.{each.name}"] = module, node.name, each

    def _method(self, owner: str, name: str) -> str | None:
        """The method *name* of a class, perhaps from one of its bases."""
        own = f"{owner}.{name}"
        if own in self.functions:
            return own
        return next((found for base in self.bases.get(owner, ()) if (found := self._method(base, name))), None)

    def _as_self(self, owner: str) -> list[str]:
        """The class and those that are made from it: self may be of any."""
        below = [name for name, bases in self.bases.items() if owner in bases]
        return [owner, *(each for name in below for each in self._as_self(name))]

    def calls(self, function: str) -> set[str]:
        """Functions of this folder that *function* calls."""
        module, owner, body = self.functions[function]
        local = {node.arg for node in ast.walk(body) if isinstance(node, ast.arg)}
        found: set[str | None] = set()
        for node in ast.walk(body):
            match node:
                case ast.Name(id=name, ctx=ast.Load()) if name not in local:
                    found.add(f"{module}.{name}")
                case ast.Attribute(value=ast.Name(id="self"), attr=name):
                    found |= {self._method(each, name) for each in self._as_self(owner)}
                case ast.Attribute(value=ast.Name(id=other), attr=name) if other in self.modules - local:
                    found.add(f"{other}.{name}")
                case ast.Attribute(value=ast.Call(func=ast.Name(id="super")), attr=name):
                    found |= {self._method(base, name) for base in self.bases.get(owner, ())}
        return {each for each in found if each in self.functions}

    def loops(self) -> set[str]:
        """Functions that come back to themselves."""
        graph = {function: self.calls(function) for function in self.functions}
        return {function for function in graph if function in _reached(graph, graph[function])}


def _reached(graph: dict[str, set[str]], start: Iterable[str]) -> set[str]:
    seen, todo = set[str](), list(start)
    while todo:
        each = todo.pop()
        if each not in seen:
            seen.add(each)
            todo += graph[each]
    return seen


@pytest.mark.parametrize("folder", CORES)
def test_no_function_of_a_core_comes_back_to_itself(folder: str) -> None:
    core = Core({path.stem: path.read_text() for path in (ROOT / folder).rglob("*.py")})
    assert core.functions
    assert core.loops() - KNOWN == set()


def test_loops_are_found_where_they_hide() -> None:
    one = "def f():\n    g()\ndef g():\n    two.h()\ndef alone(g):\n    g()\n"
    two = """
def h():
    one.f()
class Base:
    def end(self):
        self.close()
class Book(Base):
    def close(self):
        super().end()
    def twice(self):
        self.close()
"""
    assert Core({"one": one, "two": two}).loops() == {"one.f", "one.g", "two.h", "Base.end", "Book.close"}
