"""What documents and comments name must exist: rules, documents, headings, files. And prose fits a screen."""

from __future__ import annotations

import ast
import importlib.util
import io
import re
import tokenize
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import wancoll
from wancoll.client.communicator import Communicator

ROOT = Path(__file__).parent.parent
SOURCES = ("wancoll", "master", "native", "tests", "deploy")
LAW = "docs/protocol.md"
MESSAGES = "wancoll/wire/messages"
WIDTH = 120

RULE = re.compile(r"\bR(\d{1,2})\b(?!\.py)")  # R2
DOCUMENT = re.compile(r"(?<![\w/.-])((?:[\w-]+/)*[\w-]+\.md)\b")  # ARCHITECTURE.md, docs/engine.md
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
CODE = re.compile(r"`([^`\n]+)`")
FILE = re.compile(r"[\w@.*-]*(?:/[\w@.*-]+)*(?:\.(?:py|pyi|c|h|service|env)|/)")
OTHERS = {"PERFORMANCE.md"}  # of nccl-tests
FILES = {("wancoll", "env"), ("wancoll", "sqlite")}  # and no names


def documents(root: Path) -> list[Path]:
    return sorted([*root.glob("*.md"), *root.glob("docs/*.md")])


def comments(path: Path) -> Iterator[tuple[int, str]]:
    """(line number, text) of a file's comments and docstrings; of what is not Python or C every line."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT:
                yield token.start[0], token.string
        for node in ast.walk(ast.parse(text)):
            body = getattr(node, "body", None)
            first = body[0] if isinstance(body, list) and body else None
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                for i, line in enumerate(first.value.value.splitlines()):
                    yield first.lineno + i, line
    elif path.suffix in (".c", ".h"):
        for match in re.finditer(r"/\*.*?\*/|//[^\n]*", text, re.DOTALL):
            line = text.count("\n", 0, match.start()) + 1
            yield from enumerate(match[0].splitlines(), start=line)
    else:
        yield from enumerate(text.splitlines(), start=1)


def sources(root: Path) -> Iterator[Path]:
    for folder in SOURCES:
        for path in sorted((root / folder).rglob("*")):
            known = path.suffix in (".py", ".c", ".h", ".service", ".env") and "vendor" not in path.parts
            if known and path.is_file() and path.name not in ("_native.c", Path(__file__).name):
                yield path


def cited(root: Path, pattern: re.Pattern[str]) -> Iterator[tuple[Path, int, str]]:
    """Lines where a rule or a document may be cited. Few files have any: the others are not parsed."""
    for path in [*documents(root), *sources(root)]:
        if pattern.search(path.read_text(encoding="utf-8")):
            for line, text in comments(path):
                yield path, line, text


def rules(root: Path) -> set[int]:
    law = root / LAW
    return (
        {int(found) for found in re.findall(r"^\*\*R(\d+)\. ", law.read_text(), re.MULTILINE)}
        if law.exists()
        else set()
    )


def unknown_rules(root: Path) -> list[str]:
    known = rules(root)
    return [
        f"{path.relative_to(root)}:{line}: R{number} is no rule of {LAW}"
        for path, line, text in cited(root, RULE)
        for number in map(int, RULE.findall(text))
        if number not in known
    ]


def uncited_rules(root: Path) -> list[str]:
    """A rule that no line of the product says that it keeps."""
    said = {
        int(number)
        for path, _, text in cited(root, RULE)
        if path.relative_to(root).parts[0] in ("wancoll", "master", "native")
        for number in RULE.findall(text)
    }
    return [f"{LAW}: no code cites R{number}" for number in sorted(rules(root) - said)]


def unknown_documents(root: Path) -> list[str]:
    """Documents by name: from the root, from beside the file, or from docs/."""
    return [
        f"{path.relative_to(root)}:{line}: there is no {name}"
        for path, line, text in cited(root, DOCUMENT)
        for name in DOCUMENT.findall(re.sub(r"https?://\S+", "", text))
        if name not in OTHERS and not any((base / name).is_file() for base in (root, path.parent, root / "docs"))
    ]


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """Lines of a document outside blocks of code."""
    fenced = False
    for line, text in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if text.lstrip().startswith("```"):
            fenced = not fenced
        elif not fenced:
            yield line, text


def anchors(path: Path) -> set[str]:
    """Of a document's headings, as browsers of repositories make them."""
    titles = (text.lstrip("#").strip() for _, text in prose(path) if text.startswith("#"))
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def dead_links(root: Path) -> list[str]:
    found = []
    for path in documents(root):
        for line, text in prose(path):
            for link in LINK.findall(text):
                target, _, anchor = link.partition("#")
                if re.match(r"\w+:", link):
                    continue
                file = (path.parent / target).resolve() if target else path
                if not file.exists() or (anchor and anchor not in anchors(file)):
                    found.append(f"{path.relative_to(root)}:{line}: {link} leads nowhere")
    return found


def unknown_files(root: Path) -> list[str]:
    """Files and folders in `code` of a document: a path, or the end of one path only."""
    there = [f"/{path.relative_to(root).as_posix()}" for folder in SOURCES for path in (root / folder).rglob("*")]
    there += [f"{path}/" for path in there] + [f"/{folder}/" for folder in (*SOURCES, "docs")]
    return [
        f"{path.relative_to(root)}:{line}: {name} is the end of {ends} paths"
        for path in documents(root)
        for line, text in prose(path)
        for name in CODE.findall(text)
        if FILE.fullmatch(name) and not name.startswith("/") and "*" not in name
        and f"/{name}" not in there and (ends := sum(one.endswith(f"/{name}") for one in there)) != 1
    ]  # fmt: skip


def long_lines(root: Path) -> list[str]:
    """But for tables, code, and lines that are long for a link or a URL."""
    return [
        f"{path.relative_to(root)}:{line}: {len(text)} characters"
        for path in [*documents(root), *sorted((root / "deploy").rglob("*"))]
        if path.suffix != ".json" and path.is_file()
        for line, text in prose(path)
        if len(text) > WIDTH and not text.startswith("|") and not re.search(r"(https?://|\]\()\S{60,}", text)
    ]


def unknown_targets(root: Path) -> list[str]:
    """What documents tell people to make."""
    known = set(re.findall(r"^([a-z-]+):", (root / "Makefile").read_text(), re.MULTILINE))
    return [
        f"{path.relative_to(root)}:{line}: make knows no {target}"
        for path in documents(root)
        for line, text in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        for target in re.findall(r"(?:^|`)make ([a-z-]+)", text)
        if target not in known
    ]


def unknown_messages(root: Path) -> list[str]:
    """What the law says that processes say to each other, in its pictures and in its text."""
    texts = [path.read_text() for path in (root / MESSAGES).glob("*.py")]
    known = {name for text in texts for name in re.findall(r"^class (\w+)", text, re.MULTILINE)}
    text = (root / LAW).read_text()
    said = [re.sub(r"\(.*?\)", "(", match[1]) for match in re.finditer(r"-[->x]+\w+: (.*)", text)]
    names = {name for one in said for name in re.findall(r"\b([A-Z]\w+)(?=[(,]|$)", one)}
    names |= set(re.findall(r"`([A-Z][a-z]\w+)[(.][^`]*`", text))
    return [f"{LAW}: there is no message {name}" for name in sorted(names - known)]


CHECKS = (
    unknown_rules,
    uncited_rules,
    unknown_documents,
    dead_links,
    unknown_files,
    unknown_targets,
    unknown_messages,
    long_lines,
)


@pytest.mark.parametrize("check", CHECKS)
def test_documents_and_citations(check: Callable[[Path], list[str]]):
    found = check(ROOT)
    assert not found, "\n" + "\n".join(found)


def test_rules_are_numbered_without_gaps():
    assert sorted(rules(ROOT)) == list(range(1, len(rules(ROOT)) + 1))
    assert len(rules(ROOT)) >= 8


def blocks(path: Path) -> list[str]:
    """The Python in a document."""
    return re.findall(r"^```python\n(.*?)^```", path.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def test_python_in_documents_is_python_and_names_what_there_is():
    whole = {"comm": Communicator, "wancoll": wancoll}
    found = [block for path in documents(ROOT) for block in blocks(path)]
    assert found
    for block in found:
        compile(block, "a document", "exec")
    for path in documents(ROOT):
        for owner, name in re.findall(r"\b(comm|wancoll)\.([a-zA-Z_]+)\b(?!/)", path.read_text(encoding="utf-8")):
            if (owner, name) not in FILES:
                assert hasattr(whole[owner], name) or importlib.util.find_spec(f"wancoll.{name}"), (path.name, name)


@pytest.mark.parametrize(
    ("check", "files", "where"),
    [
        (unknown_rules, {"wancoll/a.py": '"""Fine (R1)."""\nx = "R7"  # as R9 says\n'}, "wancoll/a.py:2: R9"),
        (unknown_rules, {"native/a.c": "int R7; /* R1,\n   R9 */\n"}, "native/a.c:2: R9"),
        (uncited_rules, {"tests/a.py": "# R1\n", "wancoll/a.py": "R1 = 1\n"}, f"{LAW}: no code cites R1"),
        (unknown_documents, {"tests/a.py": "# protocol.md, docs/none.md\n"}, "tests/a.py:1: there is no docs/none.md"),
        (dead_links, {"docs/a.md": "[law](protocol.md#the-law)\n[x](protocol.md#no)\n"}, "docs/a.md:2: protocol.md#no"),
        (unknown_files, {"a.md": "`wancoll/`, `a.py`, `b.py`\n", "wancoll/a.py": ""}, "a.md:1: b.py is the end of 0"),
        (unknown_targets, {"a.md": "```\nmake test\nmake peace\n```\n"}, "a.md:3: make knows no peace"),
        (unknown_messages, {LAW: "`Hello(1)` `Fine`\nA->>B: Hello, Nope(e, f)\n"}, f"{LAW}: there is no message Nope"),
        (long_lines, {"a.md": f"| {'x' * 150} |\n```\n{'x' * 150}\n```\n{'x ' * 75}\n"}, "a.md:5: 150"),
    ],
)  # fmt: skip
def test_each_check_finds_an_offender_and_says_where(tmp_path, check, files, where):
    there = {
        LAW: "# The law\n**R1. One.** It is so.\n",
        f"{MESSAGES}/peer_messages.py": "class Hello:\n",
        "Makefile": "test: all\n",
    }
    for name, text in {**there, **files}.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    found = check(tmp_path)
    assert len(found) == 1, found
    assert found[0].startswith(where)
