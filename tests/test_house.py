"""What a reader finds where: how many files a folder of product code has at one level."""

from __future__ import annotations

import subprocess
from collections import Counter
from pathlib import Path, PurePath

ROOT = Path(__file__).parent.parent
PRODUCT = ("wancoll", "master", "native", "deploy")

MOST_FILES = 14
LONGER = {  # flat lists that read better, and how long they may become
    "native/tests/corpus": 40,  # inputs of a fuzzer
    # Not split yet:
    "master/wancoll_master/core": 29,
    "native/engine": 42,
    "wancoll/peer/core": 20,
}


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
