"""The lint rule of the house: which file may import what. Reads the source, runs none of it."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# No clock, no network, no chance, no threads, no engine: a state machine gets all of these as arguments.
COMPUTED = "(a module by computed name)"
IMPURE = {
    COMPUTED,
    "asyncio",
    "cffi",
    "concurrent",
    "multiprocessing",
    "random",
    "secrets",
    "select",
    "selectors",
    "signal",
    "socket",
    "ssl",
    "subprocess",
    "threading",
    "time",
    "trio",
    "wancoll._native",
    "wancoll.native.engine",
    "wancoll.native",
}

# Pure: what lies in a folder called core or plan, and these. One rule, so that a new file has its law from birth.
PURE_FOLDERS = ("core", "plan")
PURE = (
    "wancoll.chaos.core",
    "wancoll.cli.looking.advice",
    "wancoll.cli.looking.timeline",
    "wancoll.health",
    "wancoll.collective",
    "wancoll.commit",
    "wancoll.errors",
    "wancoll.limits",
    "wancoll.schedule",
    "wancoll.sync",
    "wancoll.torch.training.fragments",
    "wancoll.trust.identity",
    "wancoll.trust.registry",
    "wancoll.trust.token",
    "wancoll.wire",
)

# What of the project a room may import directly. One that is not named may import any.
BASE = ("wancoll.errors", "wancoll.limits", "wancoll.collective")
MAY_IMPORT = {
    "wancoll.errors": (),
    "wancoll.limits": (),
    "wancoll.collective": ("wancoll.errors", "wancoll.limits"),
    "wancoll.examples.shared": (
        *BASE,
        "wancoll.client",
        "wancoll.examples.shared",
        "wancoll.process",
        "wancoll.testing",
        "wancoll.torch",
        "wancoll.units",
    ),
    "wancoll.chaos.core": (*BASE, "wancoll.chaos.core", "wancoll.units"),
    "wancoll.schedule": (*BASE, "wancoll.schedule"),
    "wancoll.sync": (*BASE, "wancoll.sync"),
    "wancoll.commit": (*BASE, "wancoll.commit", "wancoll.wire"),
    "wancoll.wire": (*BASE, "wancoll.wire"),
    "wancoll.process": ("wancoll.errors",),
    "wancoll.trust": (*BASE, "wancoll.local", "wancoll.trust"),
    "wancoll.units": ("wancoll.errors",),
    "wancoll.metrics": (*BASE, "wancoll.local", "wancoll.metrics", "wancoll.net", "wancoll.trust"),
    "wancoll.metrics.core": (*BASE, "wancoll.metrics.core"),
    "wancoll.net": (*BASE, "wancoll.local", "wancoll.net", "wancoll.trust", "wancoll.wire"),
    "wancoll.relay": (
        *BASE,
        "wancoll.local",
        "wancoll.net",
        "wancoll.relay",
        "wancoll.trust",
        "wancoll.wire",
    ),
    "wancoll.peer.links": (
        *BASE,
        "wancoll.native.engine",
        "wancoll.local",
        "wancoll.net",
        "wancoll.peer.config",
        "wancoll.peer.core",
        "wancoll.peer.links",
        "wancoll.native.seal",
        "wancoll.relay",
        "wancoll.trust",
        "wancoll.wire",
    ),
    "wancoll.peer.core": (*BASE, "wancoll.commit", "wancoll.peer.core", "wancoll.schedule", "wancoll.wire"),
    "wancoll.torch.backend.anysource": (*BASE, "wancoll.client", "wancoll.torch"),
    "wancoll.torch.backend.buckets": (*BASE, "wancoll.client"),
    "wancoll.torch.training.diloco": (
        *BASE,
        "wancoll.client",
        "wancoll.schedule.build",
        "wancoll.torch.training.fragments",
    ),
    "wancoll.torch.training.elastic": (
        *BASE,
        "wancoll.client",
        "wancoll.schedule.build",
        "wancoll.torch.training.sampler",
    ),
    "wancoll.torch.training.sampler": (*BASE, "wancoll.client"),
    "wancoll.torch.entry": ("wancoll.torch.names", "wancoll.torch.backend.process_group"),
    "wancoll.torch.training.fragments": (),
    "wancoll.torch.names": (),
    "wancoll.torch.backend.process_group": (*BASE, "wancoll.client", "wancoll.torch", "wancoll.wire"),
    "wancoll.torch.backend.reconfigure": (
        *BASE,
        "wancoll.local",
        "wancoll.torch.backend.torch_errors",
        "wancoll.torch.backend.rendezvous",
    ),
    "wancoll.torch.backend.rendezvous": (*BASE, "wancoll.client", "wancoll.local"),
    "wancoll.torch.backend.torch_tensors": (
        *BASE,
        "wancoll.client.memory.tensors",
        "wancoll.torch.backend.torch_errors",
    ),
    "wancoll.torch.backend.untraced": (),
    "wancoll.torch.backend.handle": (*BASE, "wancoll.client", "wancoll.torch.backend.untraced"),
    "wancoll_master.core": (
        *BASE,
        "wancoll.commit",
        "wancoll.health",
        "wancoll.local",
        "wancoll.metrics.core",
        "wancoll.schedule.cost",
        "wancoll.trust.identity",
        "wancoll.units",
        "wancoll.wire",
        "wancoll_master.core",
        "wancoll_master.plan",
    ),
    "wancoll_master.plan": (
        *BASE,
        "wancoll.local",
        "wancoll.schedule.cost",
        "wancoll.units",
        "wancoll.wire",
        "wancoll_master.plan",
    ),
    "wancoll_master": (
        *BASE,
        "wancoll.commit",
        "wancoll.failpoints",
        "wancoll.health",
        "wancoll.local",
        "wancoll.metrics",
        "wancoll.net",
        "wancoll.options",
        "wancoll.relay",
        "wancoll.resources",
        "wancoll.schedule.cost",
        "wancoll.trust",
        "wancoll.units",
        "wancoll.wire",
        "wancoll_master",
    ),
}

# Packages whose own __init__ loads what it names at first use: importing what lies in them runs nothing of it.
LAZY = ("wancoll.chaos",)
# Who may import what stands at the top.
ONLY = {"wancoll_master": ("wancoll.cli", "wancoll_master"), "wancoll.cli": ("wancoll.cli", "wancoll.__main__")}
WITHOUT_TRIO = ("wancoll.client",)


@dataclass(frozen=True)
class Import:
    """Line *line* of *path* imports *target*."""

    path: Path
    line: int
    target: str


class Project:
    """The import graph of a source tree that has the packages wancoll and wancoll_master."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.files: dict[str, Path] = {}
        for base, package in ((root, "wancoll"), (root / "master", "wancoll_master")):
            for path in sorted((base / package).rglob("*.py")):
                parts = path.relative_to(base).with_suffix("").parts
                self.files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
        self.imports = {name: list(self._imports(name, path)) for name, path in self.files.items()}

    def _imports(self, module: str, path: Path) -> Iterator[Import]:
        package = module if path.name == "__init__.py" else module.rpartition(".")[0]
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
            targets: list[str] = []
            if isinstance(node, ast.Import):
                targets = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
                source = ".".join([*above, *([node.module] if node.module else [])])
                # "from package import name": of a module of that name, or of what the package itself holds.
                for alias in node.names:
                    inner = f"{source}.{alias.name}"
                    targets.append(inner if inner in self.files or inner in IMPURE else source)
            elif isinstance(node, ast.Call):
                name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                if name in ("__import__", "import_module"):
                    first = node.args[0] if node.args else None
                    targets = [str(first.value) if isinstance(first, ast.Constant) else COMPUTED]
            for target in targets:
                yield Import(path, node.lineno, target)

    def below(self, *names: str) -> list[str]:
        """The modules called *names* and all that lie in them."""
        return [module for module in self.files if within(module, names)]

    def pure(self) -> list[str]:
        """The modules of which the rule speaks."""
        return [name for name in self.files if within(name, PURE) or not set(PURE_FOLDERS).isdisjoint(name.split("."))]

    def reach(self, start: str, forbidden: set[str]) -> Iterator[tuple[list[str], Import]]:
        """Imports of *forbidden* by *start*, directly or through modules of the project, with the way there."""
        ways = [[start]]
        seen = {start}
        while ways:
            way = ways.pop(0)
            for found in self.imports[way[-1]]:
                if within(found.target, forbidden):
                    yield way, found
                for module in self._loads(found.target):
                    if module not in seen:
                        seen.add(module)
                        ways.append([*way, module])

    def _loads(self, target: str) -> list[str]:
        """Modules of the project that importing *target* runs, without the __init__ of lazy packages."""
        parts = target.split(".")
        names = [".".join(parts[: i + 1]) for i in range(len(parts))]
        lazy = ("wancoll", "wancoll_master", *LAZY)
        return [name for name in names if name in self.files and (name not in lazy or name == target)]

    def where(self, found: Import) -> str:
        return f"{found.path.relative_to(self.root)}:{found.line}"


def within(module: str, names: tuple[str, ...] | set[str]) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in names)


def impure_imports(project: Project) -> list[str]:
    """Pure modules that reach something impure."""
    return [
        f"{project.where(found)}: imports {found.target}, but {way[0]} is pure" + through(way)
        for module in project.pure()
        for way, found in project.reach(module, IMPURE)
    ]


def wrong_direction(project: Project) -> list[str]:
    """Imports against the direction of the house."""
    return [
        f"{project.where(found)}: imports {found.target}, but {owner} may import only {', '.join(allowed) or 'nothing'}"
        for owner, allowed in MAY_IMPORT.items()
        for module in project.below(owner)
        for found in project.imports[module]
        if within(found.target, ("wancoll", "wancoll_master")) and not within(found.target, allowed)
    ]


def upward(project: Project) -> list[str]:
    """Modules that import the master or the commands, and may not."""
    return [
        f"{project.where(found)}: imports {found.target}, which only {', '.join(users)} may"
        for top, users in ONLY.items()
        for module in project.files
        if not within(module, users)
        for found in project.imports[module]
        if within(found.target, (top,))
    ]


def circles(project: Project) -> list[str]:
    """Files that import each other, also late or for types alone, however far round: one line for each circle."""
    files = {module: {found.target for found in project.imports[module]} for module in project.files}

    def reached(start: str) -> set[str]:
        seen, ahead = set(), [start]
        while ahead:
            new = files.get(ahead.pop(), set()) - seen
            seen |= new
            ahead += new
        return seen

    after = {module: reached(module) for module in files}
    around = {module: {other for other in after[module] if module in after.get(other, ())} for module in files}
    return [
        next(
            f"{project.where(found)}: imports {found.target}, a circle of {', '.join(sorted(those))}"
            for found in project.imports[module]
            if found.target in those - {module}
        )
        for module, those in around.items()
        if len(those) > 1 and module == min(those)
    ]


def trio_in_client(project: Project) -> list[str]:
    """Ways from the client, or from `import wancoll`, to trio."""
    starts = [*project.below(*WITHOUT_TRIO), *(["wancoll"] if "wancoll" in project.files else [])]
    return [
        f"{project.where(found)}: imports {found.target}, but {way[0]} must not" + through(way)
        for module in starts
        for way, found in project.reach(module, {"trio"})
    ]


def through(way: list[str]) -> str:
    return f" (through {' -> '.join(way)})" if len(way) > 1 else ""


CHECKS = (impure_imports, wrong_direction, upward, circles, trio_in_client)


@pytest.fixture(scope="module")
def project() -> Project:
    return Project(ROOT)


@pytest.mark.parametrize("check", CHECKS)
def test_every_import_is_allowed(project, check):
    found = check(project)
    assert not found, "\n" + "\n".join(found)


def test_the_named_modules_exist(project):
    """A rule about a module that was renamed would hold for nothing."""
    named = {*PURE, *MAY_IMPORT, *LAZY, *ONLY, *(user for users in ONLY.values() for user in users), *WITHOUT_TRIO}
    assert sorted(name for name in named if name not in project.files) == []


def test_every_package_has_an_init(project):
    """setuptools leaves out folders without one, and says nothing."""
    folders = {path.parent for path in project.files.values()}
    assert [str(f.relative_to(ROOT)) for f in sorted(folders) if not (f / "__init__.py").exists()] == []


def write(root: Path, files: dict[str, str]) -> Project:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Project(root)


@pytest.mark.parametrize(
    ("check", "files", "where", "what"),
    [
        (impure_imports, {"wancoll/collective.py": "import re\nimport time\n"}, "wancoll/collective.py:2", "time"),
        (impure_imports, {"wancoll/limits.py": "def f():\n    from trio import run\n"}, "wancoll/limits.py:2", "trio"),
        (impure_imports, {"wancoll/wire/new.py": "import os, socket\n"}, "wancoll/wire/new.py:1", "socket"),
        (impure_imports, {"wancoll/errors.py": "import concurrent.futures\n"}, "wancoll/errors.py:1", "concurrent"),
        (
            impure_imports,
            {"wancoll/schedule/a.py": "from wancoll import native\n"},
            "wancoll/schedule/a.py:1",
            "wancoll.native",
        ),
        (impure_imports, {"wancoll/schedule/a.py": "from wancoll._native import lib\n"}, "a.py:1", "wancoll._native"),
        (impure_imports, {"wancoll/schedule/a.py": "from .._native import lib\n"}, "a.py:1", "wancoll._native"),
        (impure_imports, {"wancoll/errors.py": "x = __import__('random')\n"}, "wancoll/errors.py:1", "random"),
        (impure_imports, {"wancoll/errors.py": "import_module(x)\n"}, "wancoll/errors.py:1", "computed"),
        (
            impure_imports,
            {
                "master/wancoll_master/core/membership.py": "from wancoll.local import join_address\n",
                "wancoll/local.py": "import os\n\nimport threading\n",
            },
            "wancoll/local.py:3",
            "through wancoll_master.core.membership -> wancoll.local",
        ),
        (
            impure_imports,
            {"wancoll/peer/__init__.py": "import trio\n", "wancoll/schedule/a.py": "import wancoll.peer.config\n"},
            "wancoll/peer/__init__.py:1",
            "through wancoll.schedule.a -> wancoll.peer",
        ),
        (
            wrong_direction,
            {"wancoll/errors.py": "from wancoll import limits\n", "wancoll/limits.py": ""},
            "wancoll/errors.py:1",
            "wancoll.limits",
        ),
        (
            wrong_direction,
            {"master/wancoll_master/server.py": "import trio\nfrom wancoll.peer.config import PeerConfig\n"},
            "master/wancoll_master/server.py:2",
            "wancoll.peer.config",
        ),
        (upward, {"wancoll/peer/daemon.py": "import wancoll_master.server\n"}, "wancoll/peer/daemon.py:1", "only"),
        (upward, {"wancoll/demo/show.py": "from wancoll.cli.main import app\n"}, "wancoll/demo/show.py:1", "only"),
        (
            circles,
            {
                "wancoll/a.py": "def late():\n    import wancoll.b\n",
                "wancoll/b.py": "import wancoll.c\n",
                "wancoll/c.py": "from wancoll.a import late\n",
            },
            "wancoll/a.py:2",
            "imports wancoll.b, a circle of wancoll.a, wancoll.b, wancoll.c",
        ),
        (trio_in_client, {"wancoll/client/a.py": "\nimport trio\n"}, "wancoll/client/a.py:2", "trio"),
        (
            trio_in_client,
            {
                "wancoll/__init__.py": "from wancoll.native.engine import Engine\n",
                "wancoll/native/engine.py": "import trio.lowlevel\n",
            },
            "wancoll/native/engine.py:1",
            "through wancoll -> wancoll.native.engine",
        ),
    ],
)
def test_each_check_finds_an_offender_and_says_where(tmp_path, check, files, where, what):
    found = check(write(tmp_path, files))
    assert len(found) == 1
    assert where in found[0]
    assert what in found[0]


@pytest.mark.parametrize("check", CHECKS)
def test_allowed_imports_pass(tmp_path, check):
    project = write(
        tmp_path,
        {
            "wancoll/__init__.py": "from wancoll.client import connect\n",
            "wancoll/client/__init__.py": "import socket\nfrom wancoll.wire import messages\n",
            "wancoll/wire/__init__.py": "",
            "wancoll/wire/messages.py": "import msgspec\nfrom wancoll import errors\n",
            "wancoll/errors.py": "import timeit_like_name\n",
            "wancoll/cli/main.py": "import trio\nimport wancoll_master.server\n",
            "master/wancoll_master/__init__.py": "",
            "master/wancoll_master/server.py": "import trio\nfrom wancoll.wire.messages import Hello\n",
        },
    )
    assert check(project) == []


def test_import_wancoll_loads_neither_trio_nor_torch():
    # The names of the public surface are loaded at first use: use them all.
    code = (
        "import sys, wancoll\n[getattr(wancoll, name) for name in wancoll.__all__]\n"
        "print([m for m in ('trio', 'torch', 'wancoll_master') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
