"""The master's key is replaced, and daemons' keys are revoked, while operations run: nothing is lost by it.

Each refusal's words, and a crash at each write: tests/master/test_rotation.py.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.faults.support import wait_until
from wancoll.chaos import Cluster, Etcd, in_threads
from wancoll.limits import PROTOCOL_VERSION
from wancoll.local import split_address
from wancoll.net.ask import ask
from wancoll.wire import messages as m
from wancoll.wire.framing import decode_body

pytestmark = pytest.mark.check

MEMBERS = 3
PATIENCE = 60.0  # seconds


def cluster_of(peers: int, **options: Any) -> Cluster:
    return Cluster(peers, fork=True, secure=True, listen="127.0.0.{i}:0", peer_args=["--master-grace=30"], **options)


def asked(cluster: Cluster, question: Any, k: int = 0) -> Any:
    where = split_address(cluster.master_option.split(",")[k])
    return ask(where, question, m.FromMaster, timeout=10, who="the master", proof=cluster.proof(k))


def keys_of(cluster: Cluster, k: int = 0) -> list[bytes]:
    """Those that master *k* shows; []: it is not there, or does not lead."""
    with contextlib.suppress(OSError, ValueError):
        answer = asked(cluster, m.AskKeys(PROTOCOL_VERSION), k)
        return list(answer.keys) if isinstance(answer, m.KeysAre) else []
    return []


def told(cluster: Cluster, i: int) -> list[bytes]:
    """The master's keys that daemon *i* was told."""
    path = Path(os.path.dirname(cluster.socket(i)), f"state-{i}", "admitted")
    return list(decode_body(path.read_bytes(), m.Admitted).keys)


def work(comms: list[Any], goes_on: Callable[[], bool]) -> set[tuple[int, int, int, float]]:
    """Operations of all, until it need not go on: epoch, members, attempts and result of each."""
    ends = time.monotonic() + PATIENCE

    def member(i: int) -> set[tuple[int, int, int, float]]:
        x, found = np.ones(1000, np.float32), set()
        while True:
            x[:] = 10**i
            more = np.array([i == 0 and time.monotonic() < ends and goes_on()], np.float32)
            receipt = comms[i].all_reduce(x, op="sum")
            comms[i].all_reduce(more, op="max")
            found.add((receipt.epoch, receipt.world_size, receipt.attempts, float(x[0])))
            if not more[0]:
                return found
            time.sleep(0.02)

    return set().union(*in_threads(member, len(comms), PATIENCE + 30))


def test_operations_run_while_the_masters_key_is_replaced() -> None:
    """Peers 3 and 4 are away when it begins: one is back before it is finished, the other one needs a token."""
    with cluster_of(MEMBERS + 2) as cluster:
        comms = in_threads(lambda i: cluster.connect(i, group="g", start_world=MEMBERS), MEMBERS, 30)
        [old] = told(cluster, 0)
        for i in (MEMBERS, MEMBERS + 1):
            cluster.kill(i)
        new = asked(cluster, m.RotateKey(PROTOCOL_VERSION)).keys[1]
        everybody = lambda keys, count: lambda: any(told(cluster, i) != keys for i in range(count))  # noqa: E731
        [(epoch, *outcome)] = work(comms, everybody([old, new], MEMBERS))
        assert outcome == [MEMBERS, 1, 111.0]
        cluster.restart_peer(MEMBERS)
        wait_until(lambda: told(cluster, MEMBERS) == [old, new], PATIENCE, "the daemon that is back is told, too")
        assert asked(cluster, m.RotateKey(PROTOCOL_VERSION, finish=True)).keys == [new]
        assert work(comms, everybody([new], MEMBERS + 1)) == {(epoch, MEMBERS, 1, 111.0)}
        cluster.cut(0, 1)
        cluster.heal(0, 1)
        for _ in range(3):  # over new lanes, by new receipts
            assert {(one[1], one[3]) for one in work(comms, lambda: False)} == {(MEMBERS, 111.0)}
        cluster.restart_peer(MEMBERS + 1)
        wait_until(lambda: f"and not {old.hex()}" in cluster.logs(MEMBERS + 1), PATIENCE, "it says what is wrong")
        assert cluster.running(MEMBERS + 1)  # somebody else may play the master
        assert all(one.replaced for one in asked(cluster, m.ListTokens(PROTOCOL_VERSION)).tokens)
        late = cluster.add_peer(f"--join={cluster.token()}")
        wait_until(lambda: cluster.name(late) in cluster.status().daemons, PATIENCE, "a new token is good")


@pytest.mark.parametrize(("point", "count"), [("before_rotation", 1), ("after_rotation", 2)])
def test_a_master_that_is_killed_in_a_rotation_has_begun_it_or_not(point: str, count: int) -> None:
    with cluster_of(2) as cluster:
        comms = in_threads(lambda i: cluster.connect(i, group="g", start_world=2), 2, 30)
        [old] = told(cluster, 0)
        cluster.master_failpoint(point, "kill")
        with pytest.raises(OSError, match=r".+"):
            asked(cluster, m.RotateKey(PROTOCOL_VERSION))
        assert {one[1:] for one in work(comms, cluster.master_running)} == {(2, 1, 11.0)}
        cluster.start_master()
        assert {one[1:] for one in work(comms, lambda: len(cluster.status().daemons) < 2)} == {(2, 1, 11.0)}
        found = keys_of(cluster)
        assert (found[0], len(found)) == (old, count)
        wait_until(lambda: [told(cluster, i) for i in range(2)] == [found] * 2, PATIENCE, "daemons are told")


def test_masters_of_one_etcd_rotate_as_one(etcd: Etcd) -> None:
    with cluster_of(2, masters=2, etcd=etcd.url) as cluster:
        comms = in_threads(lambda i: cluster.connect(i, group="g", start_world=2), 2, 30)
        first = cluster.leader
        new = asked(cluster, m.RotateKey(PROTOCOL_VERSION), first).keys[1]
        wait_until(lambda: all(told(cluster, i)[-1] == new for i in range(2)), PATIENCE, "daemons are told")
        cluster.kill_master(first)
        assert {one[1:] for one in work(comms, lambda: len(keys_of(cluster, 1 - first)) < 2)} == {(2, 1, 11.0)}
        assert asked(cluster, m.RotateKey(PROTOCOL_VERSION, finish=True), 1 - first).keys == [new]
        assert {one[1:] for one in work(comms, lambda: told(cluster, 0) != [new])} == {(2, 1, 11.0)}


def test_at_once_all_are_sent_away_and_told_what_to_do() -> None:
    with cluster_of(2) as cluster:
        answer = asked(cluster, m.RotateKey(PROTOCOL_VERSION, now=True))
        assert len(answer.keys) == 1
        for i in range(2):
            assert cluster.wait(i) == 2
            assert "is not known any more" in cluster.logs(i)
            assert "start it with a new token: --join" in cluster.logs(i)
        new = cluster.add_peer(f"--join={answer.made}")
        wait_until(lambda: cluster.status().daemons == [cluster.name(new)], PATIENCE, "it joins with the new token")


def test_a_daemon_whose_key_is_revoked_is_out_at_once_and_comes_back_with_no_receipt() -> None:
    with cluster_of(MEMBERS) as cluster:
        comms = in_threads(lambda i: cluster.connect(i, group="g", start_world=MEMBERS, min_world=1), MEMBERS, 30)
        work(comms, lambda: False)
        began = time.monotonic()
        asked(cluster, m.RevokeKey(PROTOCOL_VERSION, cluster.name(2)))
        outcome = {one[1:] for one in work(comms[:2], lambda: False)}
        assert (outcome <= {(2, 1, 11.0), (2, 2, 11.0)}, time.monotonic() - began < 1) == (True, True)
        assert cluster.wait(2) == 2
        assert "has a key that an operator has revoked" in cluster.logs(2)
        cluster.restart_peer(2)  # with its key, its receipt and its token, which is good for others
        assert cluster.wait(2) == 2
        assert cluster.name(2) not in cluster.status().daemons
        assert {one[1:] for one in work(comms[:2], lambda: False)} == {(2, 1, 11.0)}


def test_a_running_group_survives_a_master_that_lost_its_journal_and_kept_its_key() -> None:
    """Its daemons have receipts: nobody needs a token, and the tokens of before are good for nobody new."""
    with cluster_of(MEMBERS) as cluster:
        comms = in_threads(lambda i: cluster.connect(i, group="g", start_world=MEMBERS), MEMBERS, 30)
        [(epoch, *_)] = work(comms, lambda: False)
        before = cluster.token()
        cluster.kill_master()
        cluster.start_master(lose_journal=True)
        assert work(comms, lambda: len(cluster.status().daemons) < MEMBERS) == {(epoch, MEMBERS, 1, 111.0)}
        assert cluster.master_logs(1000).count("known by its receipt alone") == MEMBERS
        cluster.restart_peer(0)
        late = cluster.add_peer(f"--join={before}")
        assert cluster.wait(late) == 2
        assert "is not known, or its secret is wrong" in cluster.logs(late)
        wait_until(lambda: cluster.name(0) in cluster.status().daemons, PATIENCE, "a known one starts again")
