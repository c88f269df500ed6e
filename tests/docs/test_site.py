"""The documentation as a site: no warning, no dead link, and all commands, options, errors and public names."""

from __future__ import annotations

import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote
from xml.etree import ElementTree

import pytest

import wancoll
import wancoll.testing
from tests.docs.blocks import DOCUMENTS, ROOT
from wancoll.cli.main import app

PICTURES = sorted((ROOT / "docs" / "pictures").glob("*.svg"))


class Page(HTMLParser):
    """What a page has, and what it asks for."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.asked: list[str] = []
        self.loaded: list[str] = []  # by who only looks
        self.sequences = 0
        self.text = ""
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id" and value:
                self.ids.add(value)
            elif name in ("href", "src") and value:
                self.asked.append(value)
                self.loaded += [value] if tag != "a" else []
            elif name == "class" and value == "sequence":
                self.sequences += 1

    def handle_data(self, data: str) -> None:
        self.text += f" {data}"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Page]:
    """All pages, by their paths."""
    pytest.importorskip("sphinx", reason="the extra docs is not installed")
    pytest.importorskip("torch", exc_type=ImportError)  # a stand-in for it has no docstrings
    out = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", "--quiet", "--nitpicky", "--fail-on-warning", "--jobs", "auto",
         "--conf-dir", "docs", "--doctree-dir", out / "doctrees", "--builder", "html", ".", out / "html"],
        cwd=ROOT, capture_output=True, text=True, timeout=170, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return {path.relative_to(out / "html").as_posix(): Page(path) for path in (out / "html").rglob("*.html")}


@pytest.mark.check
@pytest.mark.timeout(200)
def test_the_site_is_whole(site: dict[str, Page]) -> None:
    """Nothing on it leads nowhere; commands, errors and public names are there. One test: the site is built once."""
    pages = {*site, "docs/index.html"}
    for name, page in site.items():
        assert not [one for one in page.loaded if "//" in one], f"{name} cannot be looked at offline"
        for asked in page.asked:
            target, _, anchor = asked.partition("#")
            if ":" in asked or asked.startswith("//") or (target and not target.split("?")[0].endswith(".html")):
                continue
            there = (Path("/", name).parent / unquote(target)).resolve().as_posix()[1:] if target else name
            assert there in pages, f"{name} leads to {asked}"
            if anchor and there in site and name not in ("genindex.html", "search.html"):
                assert anchor in site[there].ids, f"{name} leads to {asked}"
    assert site["docs/protocol.html"].sequences == (ROOT / "docs" / "protocol.md").read_text().count("```mermaid\n") > 0
    commands = site["docs/reference.html"]
    said = {*commands.text.split()}
    for path in every_command(app, []):
        assert "-".join(["wancoll", *path]) in commands.ids
        arguments = resolved(path).assemble_argument_collection() if resolved(path).default_command else []
        missing = {name for each in arguments if each.show for name in each.names} - said
        assert not missing, path
    errors = {name for name in wancoll.__all__ if isinstance(getattr(wancoll, name), type)
              and issubclass(getattr(wancoll, name), wancoll.WancollError)}  # fmt: skip
    assert len(errors) > 10
    assert {f"wancoll.errors.{name}" for name in errors} <= site["docs/reference.html"].ids
    named = {f"wancoll.{name}" for name in set(wancoll.__all__) - errors}
    named |= {f"wancoll.testing.{name}" for name in wancoll.testing.__all__}
    named |= {f"wancoll.torch.{name}" for name in ("DiLoCo", "ElasticDataParallel", "ElasticSampler", "OuterStep")}
    named.add("wancoll.Communicator.all_reduce")
    assert named <= site["docs/reference.html"].ids


def every_command(command: Any, path: list[str]) -> list[list[str]]:
    below = [name for name in command if not name.startswith("-")]
    return [each for name in below for each in ([*path, name], *every_command(command[name], [*path, name]))]


def resolved(path: list[str]) -> Any:
    command = app
    for name in path:
        command = command[name]
    return command


@pytest.mark.parametrize("picture", PICTURES, ids=lambda path: path.stem)
def test_pictures_say_what_they_show_and_are_read_in_the_dark(picture: Path) -> None:
    tree = ElementTree.parse(picture).getroot()
    tags = [element.tag.rpartition("}")[2] for element in tree.iter()]
    assert tags.count("title") == tags.count("desc") == 1
    assert not {"script", "image", "foreignObject"} & set(tags)
    assert "@media (prefers-color-scheme:dark)" in picture.read_text()
    assert any(f"pictures/{picture.name})" in path.read_text(encoding="utf-8") for path in DOCUMENTS)
    width = float(tree.attrib["width"])
    assert width <= 480  # on a phone text of 14 shrinks to no less than 10
