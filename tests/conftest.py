"""What all tests share: a clean environment, hypothesis' profiles, and an etcd."""

import gc
import os
import random
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from wancoll import _native
from wancoll.chaos import Etcd
from wancoll.testing.cluster import KEPT_VARIABLES

# Ctrl-C in tests of it has to reach them also where a shell started us in the background, with SIGINT ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Options of the commands must come from the test, not from the shell that runs it.
for _name in [name for name in os.environ if name.startswith("WANCOLL_") and name not in KEPT_VARIABLES]:
    del os.environ[_name]
# A master without --journal keeps it in the user's state folder: not in this user's.
_state = tempfile.TemporaryDirectory(prefix="wancoll-tests-")
os.environ["XDG_STATE_HOME"] = _state.name
# So must the width of what they print: pytest-xdist sets one.
for _name in ("COLUMNS", "LINES"):
    os.environ.pop(_name, None)

# Examples on a busy two-core machine take as long as they take; the test's own timeout is the bound.
settings.register_profile("default", deadline=None, print_blob=True)
settings.register_profile("nightly", settings.get_profile("default"), max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


def pytest_configure() -> None:
    """An extension that is older than its sources fails in ways that look like anything else."""
    root, made = Path(__file__).parents[1], Path(_native.__file__)
    if made.is_relative_to(root):
        built = made.stat().st_mtime
        for source in sorted((root / "native").rglob("*.[ch]*")):
            if source.stat().st_mtime > built:
                raise pytest.UsageError(f"{made.name} is older than {source.relative_to(root)}: `pip install -e .`")


def pytest_collection_finish() -> None:
    """Garbage is looked for among what tests make, not among all that was imported: a tenth of a second each time."""
    gc.freeze()


@pytest.fixture(scope="session")
def etcd() -> Iterator[Etcd]:
    """One that tests leave running."""
    if shutil.which("etcd") is None:
        pytest.skip("there is no etcd here; Debian's package is called etcd-server")
    with Etcd() as running:
        yield running


@pytest.fixture
def rng() -> random.Random:
    """Chance that can be had again: CHAOS_SEED=... repeats what a failing test printed."""
    seed = int(os.environ.get("CHAOS_SEED") or random.SystemRandom().getrandbits(32))
    print(f"CHAOS_SEED={seed}")
    return random.Random(seed)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """A test that is marked "wan" says why it cannot run."""
    if item.get_closest_marker("wan"):
        from tests.wan.network import why_not

        if reason := why_not():
            pytest.skip(reason)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rewrite", action="store_true", help="write what comes of tests/master/scripts into them")
