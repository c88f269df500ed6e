"""What tests with torch share: they skip where it is missing, and a cluster whose daemons many worlds use in turn."""

import pytest

pytest.importorskip("torch")

from collections.abc import Iterator
from pathlib import Path

from wancoll.testing import Cluster


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The first test with ranks has torch loaded for all: seconds of processor time, a minute on a busy machine.

    What is nightly may take as long as in `make nightly`.
    """
    for item in items:
        if Path(__file__).parent in item.path.parents and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(1800 if item.get_closest_marker("nightly") else 200))


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Four daemons, lanes of two connections."""
    with Cluster(peers=4, lanes=2, fork=True) as running:
        yield running


@pytest.fixture
def sockets(cluster: Cluster) -> list[dict[str, str]]:
    """For Ranks(env=...): each rank has a daemon of its own."""
    return [{"WANCOLL_SOCKET": cluster.socket(i)} for i in range(4)]
