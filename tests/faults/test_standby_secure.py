"""Two masters on etcd over TLS: the leader is killed, and the standby goes on with the same key and tokens."""

from __future__ import annotations

from typing import Any

import pytest

from tests.faults.support import join, reduce_all, wait_until
from wancoll.chaos import Cluster, Etcd
from wancoll.errors import ConfigError

PEERS = 2
PATIENCE = 60.0

pytestmark = pytest.mark.check


def test_a_standby_goes_on_with_the_same_key(etcd: Etcd) -> None:
    more = {"master_args": ["--rejoin-grace=4"], "peer_args": ["--master-grace=20"]}
    with Cluster(PEERS, fork=True, masters=2, etcd=etcd.url, secure=True, **more) as cluster:
        revoked = cluster.token()
        doomed = cluster.add_peer(f"--join={revoked}")
        comms = join(cluster, range(PEERS), min_world=PEERS)
        summed(comms)
        cluster.revoke(revoked)
        assert cluster.wait(doomed) == 2
        token = cluster.token()
        old = cluster.leader
        cluster.kill_master(old)
        summed(comms)
        wait_until(lambda: leads(cluster) == 1 - old, PATIENCE, "the standby leads")
        wait_until(lambda: len(cluster.status().daemons) == PEERS, PATIENCE, "all daemons are at the leader")
        late = cluster.add_peer(f"--join={token}")  # of the master that is dead
        wait_until(lambda: len(cluster.status().daemons) == PEERS + 1, PATIENCE, "a token of before is good")
        refused = cluster.add_peer(f"--join={revoked}")
        assert cluster.wait(refused) == 2
        assert "is revoked" in cluster.logs(refused)
        assert cluster.running(late)
        summed(comms)


def summed(comms: list[Any]) -> None:
    """All take part, and nothing runs twice."""
    outcomes = reduce_all(comms, range(PEERS))
    assert [one.receipt and one.receipt.attempts for one in outcomes] == [1] * PEERS


def leads(cluster: Cluster) -> int:
    try:
        return cluster.leader
    except ConfigError:
        return -1
