"""Fixtures of the fault tests: one cluster for the tests that leave it whole, and a seeded source of chance."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from tests.faults.support import HEARTBEAT_TIMEOUT, PEERS, members_fixture, repair
from wancoll.chaos import Cluster
from wancoll.errors import WancollError

comms = members_fixture(PEERS)


@pytest.fixture(scope="session")
def shared_cluster() -> Iterator[Cluster]:
    """Daemons with an address each, as of several machines; where the master collects votes with one, as of one."""
    host = "127.0.0.1" if os.environ.get("WANCOLL_VOTERS") == "0" else "127.0.0.{i}"
    with Cluster(PEERS, fork=True, heartbeat_timeout=HEARTBEAT_TIMEOUT, listen=f"{host}:0") as cluster:
        yield cluster


@pytest.fixture
def cluster(shared_cluster: Cluster) -> Iterator[Cluster]:
    """Four daemons, all up, not cut off from each other, nothing armed; the master has been up all the time."""
    repair(shared_cluster)
    master = shared_cluster.master_pid
    yield shared_cluster
    shared_cluster.disconnect()  # of a test that failed: what is left would be the next one's fault
    assert shared_cluster.master_pid == master, shared_cluster.master_logs()
    for i in range(PEERS):  # nothing but SIGKILL ends a daemon in these tests
        if shared_cluster.running(i):
            shared_cluster.resume(i)
            try:
                shared_cluster.peer_status(i)
            except WancollError:
                pytest.fail(f"peer {i} is going down:\n{shared_cluster.logs(i, 200)}", pytrace=False)
        else:
            assert shared_cluster.exit_code(i) == -signal.SIGKILL, shared_cluster.logs(i)
