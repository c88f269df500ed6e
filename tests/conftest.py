"""What all tests share: a clean environment and hypothesis' profiles."""

import os

import pytest
from hypothesis import settings

# Options of the commands must come from the test, not from the shell that runs it. WANCOLL_CPU picks kernels for all.
for _name in [name for name in os.environ if name.startswith("WANCOLL_") and name != "WANCOLL_CPU"]:
    del os.environ[_name]

# Examples on a busy two-core machine take as long as they take; the test's own timeout is the bound.
settings.register_profile("default", deadline=None, print_blob=True)
settings.register_profile("chaos", settings.get_profile("default"), max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """A test that is marked "wan" says why it cannot run."""
    if item.get_closest_marker("wan"):
        from tests.wan.network import why_not

        if reason := why_not():
            pytest.skip(reason)
