"""The types that a user of the library sees: mypy --strict accepts and refuses what public.py says."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
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
    "broadcast": communicator.Options,
    "gather": communicator.Options,
    "scatter": communicator.Options,
    "all_gather": communicator.Blocks,
    "all_to_all": communicator.Options,
}
CALLS = (*OPTIONS, "send", "recv", "barrier", "update_membership", "sync_state")


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
    assert get_args(known.CodecName) == tuple(Codec.__members__)
    assert get_args(known.OnFailure) == ON_FAILURE
    assert get_args(known.Strategy) == STRATEGIES
    assert set(get_args(known.Algorithm)) == {name for names in ALGORITHMS.values() for name in names}


@pytest.mark.parametrize("name", CALLS)
def test_help_tells_everything(name: str) -> None:
    """Every argument once, what is returned, what is raised; nothing is left to be filled in."""
    call = getattr(Communicator, name)
    text = inspect.cleandoc(call.__doc__)
    arguments = text[text.index("\nArgs:\n") : text.index("\nReturns:\n")]
    said = re.findall(r"^    (\w+): \S", arguments, re.MULTILINE)
    assert sorted(said) == sorted(list(inspect.signature(call).parameters)[1:])
    raised = text[text.index("\nRaises:\n") :]
    assert all(f"    {error}: " in raised for error in ("ConfigError", "TimeoutError", "WancollError"))
    assert "{" not in text
    assert max(map(len, text.splitlines())) <= 120


def test_help_names_the_algorithms() -> None:
    assert 'by name: "ring" or "tree" or "double_tree" or "direct"; "auto" for' in str(Communicator.broadcast.__doc__)


@pytest.mark.parametrize("name", CALLS)
def test_a_wrong_keyword_is_named(name: str) -> None:
    with pytest.raises(TypeError, match=rf"{name}\(\) got an unexpected keyword argument 'algoritm'"):
        getattr(Communicator, name)(None, None, algoritm="ring")
