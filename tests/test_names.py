"""One name for one thing: files and classes that several rooms use have names of their own."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = ((ROOT, "wancoll"), (ROOT / "master", "wancoll_master"))
MESSAGES = "wancoll.wire.messages"  # its files are one name to those that import it

# Not renamed yet.
FILES = {"config", "seal"}
CLASSES = {"Done", "Evicted", "Mismatch", "Refused", "Request", "Story"}


def modules(*packages: tuple[Path, str]) -> dict[str, Path]:
    """Modules of the product by name; that of a package is its __init__.py."""
    found = {}
    for base, package in packages:
        for path in sorted((base / package).rglob("*.py")):
            parts = path.relative_to(base).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


class Uses:
    """What rooms use of each other: files, and public classes."""

    def __init__(self, *packages: tuple[Path, str]) -> None:
        self._paths = modules(*packages)
        self._trees = {name: ast.parse(path.read_text()) for name, path in self._paths.items()}
        self._classes = {
            name: {node.name for node in tree.body if isinstance(node, ast.ClassDef) and node.name[0] != "_"}
            for name, tree in self._trees.items()
        }
        self.files: dict[str, set[str]] = defaultdict(set)  # by name: the modules that other rooms import
        self.classes: dict[str, set[str]] = defaultdict(set)  # by name: the modules that other rooms have it from
        for user, tree in self._trees.items():
            for module, name in self._used(tree):
                for source in self._sources(module):
                    if self._room(source) != self._room(user):
                        if self._paths[source].name != "__init__.py":
                            self.files[source.rpartition(".")[2]].add(source)
                        if name in self._classes[source]:
                            self.classes[name].add(source)

    def _room(self, module: str) -> str:
        """The first folder below the package; "" for what lies at its top."""
        parts = module.split(".")
        return ".".join(parts[:2]) if len(parts) > 2 or self._paths[module].name == "__init__.py" else parts[0]

    def _sources(self, module: str) -> list[str]:
        inner = [name for name in self._paths if name.startswith(f"{MESSAGES}.")] if module == MESSAGES else []
        return [module, *inner] if module in self._paths else []

    def _used(self, tree: ast.Module) -> Iterator[tuple[str, str]]:
        """Modules and what is used of each by name, as `from module import name` or as `module.name`."""
        called: dict[str, str] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    inner = f"{node.module}.{alias.name}"
                    if inner in self._paths:
                        called[alias.asname or alias.name] = inner
                    yield (inner, "") if inner in self._paths else (node.module, alias.name)
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in called:
                yield called[node.value.id], node.attr


def twice(found: dict[str, set[str]]) -> dict[str, list[str]]:
    return {name: sorted(where) for name, where in found.items() if len(where) > 1}


def test_files_and_classes_that_rooms_share_have_names_of_their_own() -> None:
    uses = Uses(*PACKAGES)
    assert len(uses.files) > 50, "it sees what rooms import"
    assert len(uses.classes) > 100
    assert {name: where for name, where in twice(uses.files).items() if name not in FILES} == {}
    assert {name: where for name, where in twice(uses.classes).items() if name not in CLASSES} == {}


def test_a_name_that_stands_for_two_things_is_found(tmp_path: Path) -> None:
    for name, text in {
        "a/__init__.py": "",
        "a/page.py": "class Port: pass\nclass Own: pass\n",
        "b/__init__.py": "",
        "b/page.py": "from wancoll.a.page import Port\nclass Port: pass\nclass Own: pass\n",
        "c/__init__.py": "",
        "c/user.py": "from wancoll.b import page as p\nx = p.Port\n",
    }.items():
        path = tmp_path / "wancoll" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    uses = Uses((tmp_path, "wancoll"))
    assert twice(uses.files) == {"page": ["wancoll.a.page", "wancoll.b.page"]}
    assert twice(uses.classes) == {"Port": ["wancoll.a.page", "wancoll.b.page"]}
