"""Building the extension."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_without_a_compiler_the_build_says_so_in_one_line(tmp_path: Path) -> None:
    pytest.importorskip("setuptools")
    command = [sys.executable, "setup.py", "build_ext", f"--build-temp={tmp_path}", f"--build-lib={tmp_path}"]
    environment = {**os.environ, "CC": "no-such-compiler"}
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    said = "wancoll: there is no C compiler (no-such-compiler): install gcc or clang, or name yours in CC"
    assert (ran.returncode, ran.stderr.splitlines()[-1:]) == (1, [said])
    assert "Traceback" not in ran.stderr
