"""The blocks of code in documents: which there are, and what a shell would be asked to run."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
MARK = re.compile(r"<!-- not run: (.+?) -->")
_FENCE = re.compile(r"^( *)```(.*)$")


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
        document: its path from the root.
        line: of the fence.
        language: after the fence; "sh" where there is none.
        text: without the fences and their indentation.
        why_not: the reason in `<!-- not run: reason -->` above it; "" without one.
    """

    document: str
    line: int
    language: str
    text: str
    why_not: str

    def __str__(self) -> str:
        return f"{self.document}:{self.line}"

    @property
    def key(self) -> tuple[str, str]:
        """What a list of tests calls it: document and first line."""
        return self.document, self.text.split("\n", 1)[0]


def blocks_of(path: Path, root: Path = ROOT) -> Iterator[Block]:
    """All blocks of a document."""
    lines = iter(enumerate(path.read_text(encoding="utf-8").splitlines(), start=1))
    above = ""
    for number, line in lines:
        if not (fence := _FENCE.match(line)):
            above = line if line.strip() else above
            continue
        text = []
        for _, inner in lines:
            if inner.strip() == "```":
                break
            text.append(inner.removeprefix(fence[1]))
        mark = MARK.search(above)
        name, why_not = path.relative_to(root).as_posix(), mark[1] if mark else ""
        yield Block(name, number, fence[2] or "sh", "\n".join(text) + "\n", why_not)
        above = ""


def all_blocks() -> list[Block]:
    """Of all documents."""
    return [block for path in DOCUMENTS for block in blocks_of(path)]


def shell(block: Block) -> str:
    """What is typed: of a session (`$ command`, then what it says) the commands alone."""
    if block.language == "console":
        return "".join(line[2:] + "\n" for line in block.text.splitlines() if line.startswith("$ "))
    return block.text


def commands(text: str) -> Iterator[list[str]]:
    """The simple commands of a script, each as its words, without variables before it and redirections."""
    for line in re.sub(r"\\\n\s*", " ", text).splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        words: list[str] = []
        for word in [*lexer, ";"]:
            if not set(word) <= set("();<>|&"):
                words.append(word)
                continue
            while words and (re.fullmatch(r"\w+=.*", words[0]) or words[0] in ("do", "then", "export")):
                words.pop(0)
            if words:
                yield words
            words = [":"] if set(word) & set("<>") else []  # what follows is a file


def wancoll(words: list[str]) -> list[str] | None:
    """What `wancoll` is called with, if it is: by itself, or in a container."""
    for i, word in enumerate(words):
        if word.rsplit("/", 1)[-1] == "wancoll" and (i == 0 or not words[i - 1].startswith("-")):
            return words[i + 1 :]
    return None
