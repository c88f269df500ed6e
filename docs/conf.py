"""The documentation as a site: `make docs`. Its source folder is the project's, so links on a forge are the site's."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx

sys.path.insert(0, str(Path(__file__).parent / "site"))

# ---- what it is of -----------------------------------------------------------------------------------

project = "wancoll"
author = "wancoll authors"
project_copyright = author
release = version = importlib.metadata.version("wancoll")

root_doc = "docs/index"
include_patterns = ["*.md", "docs/*.md"]
exclude_patterns = [".*", "build", "tests", "native", "wancoll", "master", "deploy"]

extensions = [
    "commands",  # from the command itself
    "myst_parser",
    "sequences",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
]

# ---- Markdown ----------------------------------------------------------------------------------------

myst_heading_anchors = 4  # as forges make them
myst_fence_as_directive = ["mermaid"]  # site/sequences.py
highlight_language = "text"  # of blocks that say none
suppress_warnings = ["misc.highlighting_failure"]  # what comes out of a shell is no shell

# ---- docstrings --------------------------------------------------------------------------------------

smartquotes = False  # `--join` is no dash
default_role = "code"  # `x` means what it means in Markdown
autodoc_member_order = "groupwise"
autodoc_typehints = "none"  # the text says dtypes, shapes and units
autodoc_mock_imports = [] if importlib.util.find_spec("torch") else ["torch"]
napoleon_use_ivar = True
nitpicky = True
nitpick_ignore_regex = [("py:.*", r"(?!wancoll).*"), ("py:obj", r"wancoll\..*")]

# ---- HTML --------------------------------------------------------------------------------------------

html_theme = "furo"
html_title = f"wancoll {release}"
html_extra_path = ["site/root"]  # index.html, which leads to docs/
html_static_path = ["site/static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
html_theme_options = {"footer_icons": []}


def setup(sphinx: Sphinx) -> None:
    """No dashes of two characters between an argument and what it means."""

    def colons(_: Sphinx, tree: nodes.document) -> None:
        for node in [each for each in tree.findall(nodes.Text) if each == " -- "]:
            node.parent.replace(node, nodes.Text(": "))

    sphinx.connect("doctree-read", colons)
