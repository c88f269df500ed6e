"""What makes product code quick to read: few files at one level, docstrings that begin with what a thing is or does."""

from __future__ import annotations

import ast
import re
import subprocess
from collections import Counter
from pathlib import Path, PurePath

ROOT = Path(__file__).parent.parent
PRODUCT = ("wancoll", "master", "native", "deploy")

MOST_FILES = 14
LONGER = {"native/tests/corpus": 40}  # flat lists that read better, and how long they may become: inputs of a fuzzer

# A docstring begins with what the thing is or does: no riddle whose noun the reader has to find.
RIDDLE = re.compile(r"(?:Who|Whose|Whom|Of|That|So|As)\b|See the module")
C_COMMENT = re.compile(r"^[ \t]*/\*\s*(.*)", re.MULTILINE)  # that begins its line
C_ELSEWHERE = ("native/vendor/",)  # not ours


def product_files() -> list[str]:
    """All files of the product that git keeps or would keep."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", *PRODUCT],
        cwd=ROOT, capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    return [name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]


def crowded(names: list[str]) -> list[str]:
    """Folders with more files at one level than a reader takes in at a look."""
    sizes = Counter(PurePath(name).parent.as_posix() for name in names)
    return [
        f"{folder} has {n} files at one level, more than {most}"
        for folder, n in sorted(sizes.items())
        if n > (most := LONGER.get(folder, MOST_FILES))
    ]


def test_no_folder_has_more_files_at_one_level_than_a_reader_takes_in():
    found = crowded(product_files())
    assert not found, "\n" + "\n".join(found)


def test_a_crowded_folder_is_found():
    assert crowded([f"wancoll/new/{i}.py" for i in range(15)] + ["wancoll/new/core/a.py"]) == [
        "wancoll/new has 15 files at one level, more than 14"
    ]


def riddles(name: str, text: str) -> list[str]:
    """Docstrings of a file that begin with a pronoun or a preposition, or that have nothing to say."""
    if name.endswith((".c", ".h")):
        found = (match for match in C_COMMENT.finditer(text) if RIDDLE.match(match[1]))
        return [
            f"{name}:{text.count(chr(10), 0, one.start()) + 1}: a comment begins with {one[1][:40]!r}" for one in found
        ]
    return [
        f"{name}:{getattr(node, 'lineno', 1)}: a docstring begins with {said[:40]!r}: say what it is or does"
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and RIDDLE.match(said := ast.get_docstring(node) or "")
    ]


def test_docstrings_begin_with_what_a_thing_is_or_does():
    names = [name for name in product_files() if name.endswith((".py", ".pyi", ".c", ".h"))]
    names = [name for name in names if not name.startswith(C_ELSEWHERE)]
    found = [each for name in names for each in riddles(name, (ROOT / name).read_text())]
    assert not found, "\n" + "\n".join(found)


def test_a_docstring_that_is_a_riddle_is_found():
    text = '"""As it was."""\n\ndef f():\n    """See the module."""\n\nclass C:\n    """Assets of a group."""\n'
    assert [each[:40] for each in riddles("wancoll/a.py", text)] == [
        "wancoll/a.py:1: a docstring begins with ",
        "wancoll/a.py:3: a docstring begins with ",
    ]
    assert riddles("native/a.c", "int a;\n/* Of one op. */\n/* One op. */\n") == [
        "native/a.c:2: a comment begins with 'Of one op. */'"
    ]
