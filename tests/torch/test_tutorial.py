"""The two scripts of docs/training.md, "From DDP to elastic", as printed: before, and after with a kill and a join."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.torch.ranks import ROOT, free_port
from wancoll.testing import Cluster

EPOCHS = range(4)


def scripts() -> tuple[str, str]:
    page = (ROOT / "docs" / "training.md").read_text()
    section = page.partition("## From DDP to elastic")[2].partition("\n## ")[0]
    before, after = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    return before, after


def start(folder: Path, name: str, script: str, **variables: str) -> subprocess.Popen[str]:
    (folder / name).write_text(script)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    command = [sys.executable, name]
    return subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True)


def losses(printed: str) -> dict[int, float]:
    return {int(epoch): float(loss) for epoch, loss in (line.split() for line in printed.splitlines())}


@pytest.mark.nightly
@pytest.mark.parametrize("backend", ["wancoll", "gloo"])
def test_before(tmp_path: Path, backend: str) -> None:
    script = scripts()[0].replace('"gloo"', f'"{backend}"')
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [start(tmp_path, "before.py", script, RANK=str(rank), **common) for rank in range(2)]
    told = [each.communicate(timeout=120)[0] for each in ranks]
    assert [each.returncode for each in ranks] == [0, 0]
    found = losses(told[0])
    assert list(found) == list(EPOCHS)
    assert found[3] < found[0] / 2
    assert told[1] == ""


@pytest.mark.nightly
def test_after(tmp_path: Path) -> None:
    """One is killed, and started again; then all have stopped, and one goes on from the checkpoint."""
    script = scripts()[1]
    slow = script.replace(
        "            step += 1\n", "            step += 1\n            __import__('time').sleep(0.12)\n"
    )
    assert slow != script
    with Cluster(2, fork=True) as cluster:
        folders = [tmp_path / name for name in "ab"]
        for folder in folders:
            folder.mkdir()
        first, second = (start(folders[k], "after.py", slow, WANCOLL_SOCKET=cluster.socket(k)) for k in range(2))
        deadline = time.monotonic() + 60
        while not any((folder / "elastic.pt").exists() for folder in folders):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        second.send_signal(signal.SIGKILL)
        told = second.communicate(timeout=120)[0]
        third = start(folders[1], "after.py", slow, WANCOLL_SOCKET=cluster.socket(1))
        told += first.communicate(timeout=120)[0] + third.communicate(timeout=60)[0]
        assert (first.returncode, third.returncode) == (0, 0)
        found = losses(told)
        assert sorted(found) == list(EPOCHS)  # each by one member
        assert len(told.splitlines()) == len(EPOCHS)
        assert found[3] < found[0] / 2
        saved = max((torch.load(each) for each in tmp_path.glob("*/elastic.pt")), key=lambda each: each["step"])
        again = script.replace("EPOCHS, BATCH = 4, 32", "EPOCHS, BATCH = 5, 32").replace(
            "start_world=2", "start_world=1"
        )
        more = tmp_path / "c"
        more.mkdir()
        torch.save(saved, more / "elastic.pt")
        last = start(more, "after.py", again, WANCOLL_SOCKET=cluster.socket(0))
        told = last.communicate(timeout=120)[0]
        assert last.returncode == 0
        assert list(losses(told)) == [4]
