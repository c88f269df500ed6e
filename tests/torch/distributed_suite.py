"""torch's own DistributedTest from the installed wheel, with the backend that UNDER_TEST names.

`python -m tests.torch` runs it. torch lets the tests choose by BACKEND what they expect; with "gloo" most of them run
on CPU tensors.
"""

import os
import tempfile
from datetime import timedelta
from pathlib import Path
from unittest import mock

# torch's test modules read these when they are imported.
os.environ.setdefault("BACKEND", "gloo")
os.environ.setdefault("WORLD_SIZE", "2")
if "TEMP_DIR" not in os.environ:
    os.environ["TEMP_DIR"] = tempfile.mkdtemp(prefix="torch-suite-")
for _folder in ("barrier", "test_dir", "init_dir"):
    (Path(os.environ["TEMP_DIR"]) / _folder).mkdir(exist_ok=True)

from torch.testing._internal import common_distributed  # noqa: E402
from torch.testing._internal.distributed import distributed_test  # noqa: E402

UNDER_TEST = os.environ.get("UNDER_TEST", "wancoll")
if UNDER_TEST == "wancoll":
    import wancoll.torch  # noqa: F401
for _feature in ("plugin", "subgroup", "ddp"):
    common_distributed.DistTestCases.backend_feature[_feature].add(UNDER_TEST)


class TestDistributed(
    common_distributed.MultiProcContinuousTest,  # type: ignore[misc]
    distributed_test.DistributedTest._DistTestBase,  # type: ignore[misc]
):
    """All tests in one set of processes, and in a new one after whatever may have left gloo's connections broken."""

    world_size = int(os.environ["WORLD_SIZE"])
    timeout = timedelta(seconds=120)
    _last = ""

    @classmethod
    def backend_str(cls) -> str:
        return UNDER_TEST

    @classmethod
    def device_type(cls) -> str:
        return "cpu"

    def setUp(self) -> None:
        cls = type(self)
        if cls._processes_spawned and (cls.poison_pill or cls._last.startswith("test_monitored_barrier")):
            for process in cls.processes:
                process.kill()
                process.join()
            cls._processes_spawned = False
            for left in Path(os.environ["TEMP_DIR"]).glob("*/*"):  # torch's barriers count on from what they find there
                left.unlink()
        cls.poison_pill = False
        cls._last = self._testMethodName
        super().setUp()

    def test_get_backend(self) -> None:
        """BACKEND chooses the tests, and is the name that this one expects."""
        with mock.patch.object(distributed_test, "BACKEND", UNDER_TEST):
            super().test_get_backend()
