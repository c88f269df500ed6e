"""What tests with torch share: they skip where it is missing, and a cluster whose daemons many worlds use in turn."""

import pytest

pytest.importorskip("torch")

from collections.abc import Iterator

from wancoll.testing import Cluster


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Four daemons, lanes of two connections."""
    with Cluster(peers=4, lanes=2, fork=True) as running:
        yield running


@pytest.fixture
def sockets(cluster: Cluster) -> list[dict[str, str]]:
    """For Ranks(env=...): each rank has a daemon of its own."""
    return [{"WANCOLL_SOCKET": cluster.socket(i)} for i in range(4)]
