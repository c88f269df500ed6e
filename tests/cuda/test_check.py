"""`make gpu-check` runs from end to end on the stand-in: what it says of a device is then a matter of the device."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_the_check_runs_without_a_device(standin: Any) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.cuda", "--stand-in"], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    path = Path(done.stdout.splitlines()[-1])
    text = path.read_text(encoding="utf-8")
    assert "stand-in" in path.name
    assert text.count("PASS") == 5
    assert "MISS" not in text
    for part in ("staging of 1.00 MiB", "all_reduce of 1.00 MiB on the device", "gloo on", "nccl on", "not judged"):
        assert part.replace(".00", "") in text.replace(".00", "")
