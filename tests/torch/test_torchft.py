"""torchft's own tests, which its wheel brings along, with gloo and with wancoll in gloo's place. torchft is no extra of
ours: `pip install torchft` first, or this is skipped."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

torchft = pytest.importorskip("torchft")

FILES = (
    "ddp_test", "lighthouse_test", "parameter_server_test", "fsdp_test", "local_sgd_test", "optim_test",
    "manager_integ_test",
)  # fmt: skip
PLUGIN = """
import torchft.process_group
from wancoll.torch.torchft import ProcessGroupWancoll
torchft.process_group.ProcessGroupGloo = ProcessGroupWancoll
"""


def counts(tmp_path: Path, *options: str) -> list[tuple[str, str]]:
    files = [str(Path(torchft.__file__).with_name(f"{name}.py")) for name in FILES]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "ignore", *options, *files]
    path = f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"
    env = {**os.environ, "PYTHONPATH": path, "WANCOLL_INSECURE": "true"}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False, timeout=900)
    print(done.stdout[-3000:])
    return re.findall(r"(\d+) (passed|skipped|failed|error)", done.stdout.splitlines()[-1])


@pytest.mark.nightly
def test_what_passes_with_gloo_passes_with_wancoll(tmp_path: Path) -> None:
    (tmp_path / "in_place_of_gloo.py").write_text(PLUGIN)
    expected = counts(tmp_path)
    assert expected[0][1] == "passed"
    assert counts(tmp_path, "-p", "in_place_of_gloo") == expected
