"""The authority is replaced while operations run: nothing is lost by it, also where the master dies on the way.

The phases by themselves, and each refusal's words: tests/master/test_rotation.py.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.faults.support import wait_until
from tests.later import at_night
from wancoll.chaos import Cluster, Etcd, in_threads
from wancoll.limits import PROTOCOL_VERSION
from wancoll.local import split_address
from wancoll.net.ask import ask
from wancoll.trust.authority import issuer_of, times
from wancoll.trust.papers import Papers, fingerprints
from wancoll.wire import messages as m

pytestmark = pytest.mark.check

LIFETIME = 5.0  # seconds, of a certificate, and of a phase
MEMBERS = 3
PATIENCE = 60.0  # seconds


@contextmanager
def cluster_of(peers: int, **options: Any) -> Iterator[Cluster]:
    more = options | {"master_args": [f"--certificate-lifetime={LIFETIME}"], "peer_args": ["--master-grace=30"]}
    with Cluster(peers, fork=True, secure=True, listen="127.0.0.{i}:0", **more) as cluster:
        yield cluster


def asked(cluster: Cluster, question: m.AskRotation | m.Rotate | m.ListTokens) -> Any:
    where, papers = split_address(cluster.master_option), cluster.papers
    return ask(where, question, m.FromMaster, timeout=10, who="the master", papers=papers)


def phase(cluster: Cluster) -> str:
    """ "": no master is there."""
    try:
        answer = asked(cluster, m.AskRotation(PROTOCOL_VERSION))
    except OSError:
        return ""
    return answer.phase if isinstance(answer, m.RotationIs) else ""


def state(cluster: Cluster, i: int, file: str) -> bytes:
    return Path(os.path.dirname(cluster.socket(i)), f"state-{i}", file).read_bytes()


def believed(cluster: Cluster, i: int) -> list[str]:
    return fingerprints(state(cluster, i, "authority.pem"))


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


def test_operations_run_while_the_authority_is_replaced() -> None:
    """Peers 3 and 4 are away when it begins: one comes back by its token, the other one is told what to do."""
    with cluster_of(MEMBERS + 2) as cluster:
        comms = in_threads(lambda i: cluster.connect(i, group="g", start_world=MEMBERS), MEMBERS, 30)
        [old] = believed(cluster, 0)
        for i in (MEMBERS, MEMBERS + 1):
            cluster.kill(i)
        told = asked(cluster, m.Rotate(PROTOCOL_VERSION, LIFETIME, False))
        assert told.phase == "spreading", told.refused
        new = told.authorities[1].sha256
        seen, back = [told.phase], False

        def goes_on() -> bool:
            nonlocal back
            found = phase(cluster)
            if found != seen[-1]:
                seen.append(found)
            if found == "retiring" and not back:
                cluster.restart_peer(MEMBERS)
                back = True
            return found != "steady" or any(believed(cluster, i) != [new] for i in range(MEMBERS))

        wait_until(lambda: believed(cluster, 0) == [old, new], PATIENCE, "daemons are told at once")
        [(epoch, *outcome)] = work(comms, goes_on)
        assert outcome == [MEMBERS, 1, sum(10.0**i for i in range(MEMBERS))]
        assert (seen, cluster.status().groups[0].epoch) == (["spreading", "retiring", "steady"], epoch)
        assert back
        wait_until(lambda: believed(cluster, MEMBERS) == [new], PATIENCE, "who came back is told, too")
        for i in range(MEMBERS + 1):
            assert issuer_of(state(cluster, i, "certificate.pem"), state(cluster, i, "authority.pem")) == 0
            assert cluster.running(i)
        cluster.cut(0, 1)
        cluster.heal(0, 1)
        for _ in range(3):  # over lanes by new certificates
            assert {(one[1], one[3]) for one in work(comms, lambda: False)} == {(MEMBERS, 111.0)}
        cluster.restart_peer(MEMBERS + 1)
        known = f"expected an authority with SHA-256 {old}"
        wait_until(lambda: known in cluster.logs(MEMBERS + 1), PATIENCE, "it says what is wrong")
        assert "make a new token (`wancoll token create`)" in cluster.logs(MEMBERS + 1)
        assert cluster.running(MEMBERS + 1)  # somebody else may play the master
        assert all(one.replaced for one in asked(cluster, m.ListTokens(PROTOCOL_VERSION)).tokens)
        late = cluster.add_peer(f"--join={cluster.token()}")
        wait_until(lambda: cluster.name(late) in cluster.status().daemons, PATIENCE, "a new token is good")
        assert "renews its certificate too often" not in cluster.master_logs(1000)


BEFORE, AFTER = "before_rotation", "after_rotation"


@pytest.mark.parametrize("points", [(BEFORE, AFTER), *at_night(((AFTER, BEFORE),))])
def test_a_master_that_is_killed_at_each_change_of_phase_goes_on_with_it(points: tuple[str, str]) -> None:
    with cluster_of(2) as cluster:
        comms = in_threads(lambda i: cluster.connect(i, group="g", start_world=2), 2, 30)
        told = asked(cluster, m.Rotate(PROTOCOL_VERSION, LIFETIME, False))
        new = told.authorities[1].sha256
        for expected, point in zip(("retiring", "steady"), points, strict=True):
            cluster.master_failpoint(point, "kill")
            outcomes = work(comms, cluster.master_running)
            assert {one[1:] for one in outcomes} == {(2, 1, 11.0)}
            assert not cluster.master_running()
            cluster.start_master()
            if point == "after_rotation":  # what it had kept counts
                assert phase(cluster) == expected
            outcomes = work(comms, lambda expected=expected: phase(cluster) != expected)  # type: ignore[misc]
            assert {one[1:] for one in outcomes} == {(2, 1, 11.0)}
        wait_until(
            lambda: [believed(cluster, i) for i in range(2)] == [[new]] * 2, PATIENCE, "the old one is forgotten"
        )
        assert {one[1:] for one in work(comms, lambda: False)} == {(2, 1, 11.0)}


def test_a_daemon_whose_certificate_ended_in_a_rotation_while_the_master_was_away_comes_back() -> None:
    """It has its key, a token of before and what it was told; the old authority is gone when it finds a master."""
    with cluster_of(1) as cluster:
        new = asked(cluster, m.Rotate(PROTOCOL_VERSION, LIFETIME, False)).authorities[1].sha256
        wait_until(lambda: believed(cluster, 0)[0] == new, PATIENCE, "the new one signs, and the daemon is told")
        cluster.kill_master()
        cluster.pause(0)  # longer than the phase goes on for those who come back
        cluster.start_master()
        wait_until(lambda: phase(cluster) == "steady", PATIENCE, "the old one is dropped")
        ended = times(state(cluster, 0, "certificate.pem"))[1]
        wait_until(lambda: time.time() > ended, PATIENCE, "its certificate ends")
        assert cluster.name(0) not in cluster.status().daemons
        cluster.resume(0)
        wait_until(lambda: cluster.name(0) in cluster.status().daemons, PATIENCE, "it is let in")
        assert believed(cluster, 0) == [new]
        assert "a certificate was got with the token" in cluster.logs(0)


def test_a_leader_that_is_killed_before_etcd_has_the_next_phase_leaves_it_to_the_other_one(etcd: Etcd) -> None:
    with cluster_of(2, masters=2, etcd=etcd.url) as cluster:
        comms = in_threads(lambda i: cluster.connect(i, group="g", start_world=2), 2, 30)
        first = cluster.leader
        told = phase_at(cluster, first, m.Rotate(PROTOCOL_VERSION, LIFETIME, False))
        new = told.authorities[1].sha256
        cluster.master_failpoint("after_rotation", "kill", first)
        assert {one[1:] for one in work(comms, lambda: cluster.master_running(first))} == {(2, 1, 11.0)}
        assert not cluster.master_running(first)
        seen = [told.phase]

        def goes_on() -> bool:
            with suppress(OSError):  # its files may be others in between
                found = phase_at(cluster, 1 - first, m.AskRotation(PROTOCOL_VERSION))
                if isinstance(found, m.RotationIs) and found.phase != seen[-1]:
                    seen.append(found.phase)
            return seen[-1] != "steady"

        assert {one[1:] for one in work(comms, goes_on)} == {(2, 1, 11.0)}
        assert seen == ["spreading", "retiring", "steady"]
        wait_until(
            lambda: [believed(cluster, i) for i in range(2)] == [[new]] * 2, PATIENCE, "the old one is forgotten"
        )


def phase_at(cluster: Cluster, k: int, question: m.AskRotation | m.Rotate) -> Any:
    folder = Path(cluster._authority(k))
    papers = Papers(str(folder / "authority.pem"), str(folder / "admin.pem"))
    where = split_address(cluster.master_option.split(",")[k])
    return ask(where, question, m.FromMaster, timeout=10, who="the master", papers=papers)


def test_at_once_all_are_sent_away_and_told_what_to_do() -> None:
    with cluster_of(2) as cluster:
        told = asked(cluster, m.Rotate(PROTOCOL_VERSION, 0.0, True))
        assert told.phase == "steady"
        for i in range(2):
            assert cluster.wait(i) == 2
            assert "certificate of an authority that was replaced" in cluster.logs(i)
            assert "start it with a new token: --join" in cluster.logs(i)
        new = cluster.add_peer(f"--join={told.made}")
        wait_until(lambda: cluster.status().daemons == [cluster.name(new)], PATIENCE, "it joins with the new token")
