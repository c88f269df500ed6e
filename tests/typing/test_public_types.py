"""The types that a user of the library sees: mypy --strict accepts and refuses what public.py says."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from wancoll.client import communicator
from wancoll.client.checks import ALGORITHMS
from wancoll.client.communicator import Communicator
from wancoll.collective import ON_FAILURE, Codec, ReduceOp
from wancoll.sync.strategy import STRATEGIES

PUBLIC = Path(__file__).parent / "public.py"
OPTIONS = {
    "all_reduce": communicator.Graced,
    "all_reduce_many": communicator.Many,
    "reduce_scatter": communicator.ReducedBlocks,
    "reduce": communicator.Reducing,
    "broadcast": communicator.Dense,
    "gather": communicator.Options,
    "scatter": communicator.Options,
    "all_gather": communicator.Blocks,
    "all_to_all": communicator.Dense,
}
CALLS = (*OPTIONS, "send", "recv", "barrier", "update_membership", "sync_state")


def exported(package: str) -> Iterator[tuple[str, ast.AST]]:
    """Public functions and methods of what *package* exports, by name, as an editor reads them: nothing is run."""
    root = PUBLIC.parents[2]
    for node in ast.walk(ast.parse((root / package / "__init__.py").read_text())):
        if not isinstance(node, ast.ImportFrom) or not node.module or not node.module.startswith("wancoll."):
            continue
        names = {alias.name for alias in node.names}
        for found in ast.parse((root / f"{node.module.replace('.', '/')}.py").read_text()).body:
            if isinstance(found, ast.FunctionDef) and found.name in names:
                yield found.name, found
            elif isinstance(found, ast.ClassDef) and found.name in names:
                yield found.name, found
                for inner in found.body:
                    if isinstance(inner, ast.FunctionDef) and "overload" not in map(ast.unparse, inner.decorator_list):
                        yield f"{found.name}.{inner.name}", inner


EXPORTED = {
    name: (ast.get_docstring(node) or "", any(isinstance(each, ast.Raise) for each in ast.walk(node)))
    for package in ("wancoll", "wancoll/torch")
    for name, node in exported(package)
    if not name.rpartition(".")[2].startswith("_")
}


@pytest.mark.timeout(300)  # the first time it reads numpy's types
def test_what_mypy_says() -> None:
    pytest.importorskip("mypy")
    command = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", "--hide-error-context", str(PUBLIC)]
    ran = subprocess.run(command, cwd=PUBLIC.parents[2], capture_output=True, text=True, check=False)
    said = re.findall(r"public\.py:(\d+): error: .*\[(.*)\]$", ran.stdout, re.MULTILINE)
    lines = enumerate(PUBLIC.read_text().splitlines(), 1)
    refused = [(str(number), code) for number, line in lines for code in re.findall(r"# refused: (.*)$", line)]
    assert len(refused) > 20
    assert list(dict.fromkeys(said)) == refused, ran.stdout + ran.stderr


@pytest.mark.parametrize("name", OPTIONS)
def test_type_checkers_see_the_options_that_there_are(name: str) -> None:
    """The TypedDict has what the call takes by keyword, with the same types."""
    call = getattr(Communicator, name)
    hints = get_type_hints(call)
    keywords = {each.name for each in inspect.signature(call).parameters.values() if each.kind is each.KEYWORD_ONLY}
    taken = keywords - {"async_op", "out"}
    assert get_type_hints(OPTIONS[name]) == {each: hints[each] for each in taken}


def test_the_names_that_a_type_checker_knows_are_those_that_there_are() -> None:
    known = communicator
    assert get_args(known.OpName) == tuple(ReduceOp.__members__)
    names, plain = get_args(known.CodecName), tuple(Codec.__members__)
    assert names[: len(plain)] == plain
    assert all((codec := Codec.named(name)) is not None and codec.name == name for name in names)
    assert get_args(known.OnFailure) == ON_FAILURE
    assert get_args(known.Strategy) == STRATEGIES
    assert set(get_args(known.Algorithm)) == {name for names in ALGORITHMS.values() for name in names}


@pytest.mark.parametrize("name", CALLS)
def test_help_tells_everything(name: str) -> None:
    """Every argument once, what is returned, what is raised; nothing is left to be filled in."""
    call = getattr(Communicator, name)
    text, _ = EXPORTED[f"Communicator.{name}"]
    arguments = text[text.index("\nArgs:\n") : text.index("\nReturns:\n")]
    said = re.findall(r"^    (\w+): \S", arguments, re.MULTILINE)
    assert sorted(said) == sorted(list(inspect.signature(call).parameters)[1:])
    raised = text[text.index("\nRaises:\n") :]
    assert all(f"    {error}: " in raised for error in ("ConfigError", "TimeoutError", "WancollError"))
    assert "{" not in text
    assert max(map(len, text.splitlines())) <= 120


@pytest.mark.parametrize("name", OPTIONS)
def test_help_names_the_algorithms(name: str) -> None:
    text, _ = EXPORTED[f"Communicator.{name}"]
    known = " or ".join(f'"{each}"' for each in ALGORITHMS[name][1:])
    assert f'the schedule, by name: {known}; "auto" for the group\'s choice.' in " ".join(text.split())


def test_an_editor_shows_each_public_docstring_with_its_errors() -> None:
    functions = {"connect", "run", "all_reduce_gradients", "Work.wait", "ManyWork.wait", "DiLoCo.step"}
    assert set(EXPORTED) >= functions
    assert [name for name, (text, _) in EXPORTED.items() if not text] == []
    classes = {name for name in EXPORTED if name[0].isupper() and "." not in name}
    assert [
        name for name, (text, raises) in EXPORTED.items()
        if (raises or name in functions) and name not in classes and "\nRaises:\n" not in text
    ] == []  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_a_wrong_keyword_is_named(name: str) -> None:
    with pytest.raises(TypeError, match=rf"{name}\(\) got an unexpected keyword argument 'algoritm'"):
        getattr(Communicator, name)(None, None, algoritm="ring")
