"""What the engine says of OpenSSL's functions, which it finds when it runs, is what OpenSSL's headers say."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

NATIVE = Path(__file__).resolve().parents[2] / "native"
COMPILE = ["gcc", "-std=c11", "-Wall", "-Wextra", "-Werror", f"-I{NATIVE}", f"-I{NATIVE / 'engine'}", "-fsyntax-only"]


def test_prototypes_and_numbers(tmp_path: Path) -> None:
    probe = tmp_path / "probe.c"
    probe.write_text("#include <openssl/ssl.h>\n")
    if not shutil.which("gcc") or subprocess.run([*COMPILE, str(probe)], capture_output=True, check=False).returncode:
        pytest.skip("no gcc, or no headers of OpenSSL (libssl-dev)")
    done = subprocess.run([*COMPILE, str(NATIVE / "tests/prototypes.c")], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
