"""An operator has a daemon, or one member, leave in order: the others run nothing again, and nobody is lost."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

import wancoll
from tests.faults.support import cluster_fixture, wait_until
from wancoll.chaos import Cluster, in_threads
from wancoll.cli.main import app
from wancoll.cli.running.peer import EXIT_ASKED_TO_LEAVE
from wancoll.errors import ConfigError
from wancoll.testing import ClientProcess

MEMBERS = 3
cluster = cluster_fixture(MEMBERS, scope="function", lanes=1, heartbeat_timeout=30)


def train(socket: str, member: int, updates: bool) -> Iterator[tuple[int, tuple[str, ...], int]]:
    """A training loop: of each step the number of contributors' ones, who they were, and the attempts."""
    with wancoll.connect(socket=socket, group="g", name=f"m{member}", start_world=MEMBERS, min_world=1) as comm:
        for step in range(1, 100_000):
            tensor = np.ones(64, np.float32)
            try:
                receipt = comm.all_reduce(tensor, op="sum", async_op=True).wait()
                if updates and step % 5 == 0:
                    comm.update_membership()
            except wancoll.AskedToLeave as bad:
                yield 0, (str(bad),), 0
                return
            assert (tensor == tensor[0]).all()
            yield int(tensor[0]), receipt.contributors, receipt.attempts


def trainers(cluster: Cluster, *, updates: bool = True) -> list[ClientProcess]:
    found = [cluster.client(k, train, k, updates) for k in range(MEMBERS)]
    for one in found:
        assert one.next(timeout=60)[0] == MEMBERS
    return found


def start_leave(*options: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "wancoll", "leave", *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def leave(*options: str) -> int:
    code: int = app(["leave", *options], result_action="return_value", exit_on_error=False)
    return code


def said(running: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = running.communicate(timeout=90)
    return running.returncode, out, err


def until(client: ClientProcess, good: Callable[[tuple[int, tuple[str, ...], int]], bool]) -> list[int]:
    """Attempts of the steps up to the first that is good."""
    attempts = []
    end = time.monotonic() + 90
    while True:
        step = client.next(timeout=60)
        assert time.monotonic() < end, step
        attempts.append(step[2])
        if good(step):
            return attempts


def check_gone(cluster: Cluster, clients: list[ClientProcess], left: int) -> None:
    """The one hears of it by name; the others go on without it, and have run nothing twice."""
    names = sorted(f"m{k}" for k in range(MEMBERS) if k != left)
    in_threads(
        lambda k: until(clients[k], lambda step: not step[0] if k == left else sorted(step[1]) == names), MEMBERS, 90
    )
    (group,) = cluster.status().groups
    assert sorted(member.name for member in group.members) == names


@pytest.mark.check
def test_a_daemon_leaves_by_the_masters_word_and_nothing_runs_again(cluster: Cluster) -> None:
    clients = trainers(cluster)
    leaving = start_leave("peer-1", "--master", cluster.master_option, "--reason", "new disk")
    ended: list[str] = []

    def watch(k: int) -> list[int]:
        names = sorted(f"m{i}" for i in range(MEMBERS) if i != 1)
        if k == 1:

            def told(step: tuple[int, tuple[str, ...], int]) -> bool:
                ended.extend(step[1] if not step[0] else ())
                return not step[0]

            return until(clients[1], told)
        return until(clients[k], lambda step: sorted(step[1]) == names and step[0] == len(names))

    attempts = in_threads(watch, MEMBERS, 90)
    assert set(attempts[0] + attempts[2]) == {1}
    assert ended == [
        (
            "m1: an operator asked this daemon to leave: new disk; what was committed counts; end here, or start "
            "`wancoll peer` again and connect again to rejoin as a new member"
        )
    ]
    assert cluster.wait(1, 60) == EXIT_ASKED_TO_LEAVE
    assert said(leaving) == (0, "daemon peer-1 was asked to leave\ndaemon peer-1 has left\n", "")
    kinds = [event.kind for event in cluster.status().events if event.group == "g"]
    assert "left" in kinds
    assert not [kind for kind in kinds if "died" in kind or kind in ("lost", "evicted")]
    status = subprocess.run(
        [sys.executable, "-m", "wancoll", "status", "--master", cluster.master_option, "--events", "0"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert status.stdout.splitlines()[0] == "all is well: 1 group, 2 members"


@pytest.mark.check
def test_a_daemon_leaves_by_its_socket_and_refuses_who_comes(cluster: Cluster) -> None:
    clients = trainers(cluster)
    leaving = start_leave("--socket", cluster.socket(2))
    check_gone(cluster, clients, 2)
    assert said(leaving) == (0, f"the daemon at {cluster.socket(2)} has left its groups and stopped\n", "")
    assert cluster.wait(2, 60) == EXIT_ASKED_TO_LEAVE
    code, _, err = said(start_leave("--socket", cluster.socket(2)))
    assert code == 1
    assert "PeerDaemonLost" in err
    assert "is `wancoll peer` running there?" in err


def test_one_member_leaves_and_who_is_not_there_cannot(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    clients = trainers(cluster)
    assert leave("m0", "--group", "g", "--master", cluster.master_option) == 0
    assert capsys.readouterr().out == "m0 of group g was asked to leave\nm0 of group g has left\n"
    check_gone(cluster, clients, 0)
    assert cluster.running(0)
    with cluster.connect(0, group="other", start_world=1) as comm:
        assert comm.members == ("peer-0-2",)
    with pytest.raises(ConfigError, match="has no such daemon; expected one of peer-0, peer-1, peer-2; got peer-9; "):
        leave("peer-9", "--master", cluster.master_option)
    with pytest.raises(ConfigError, match=r"has no such group; expected a group of this master: .*; got group h"):
        leave("m1", "--group", "h", "--master", cluster.master_option)
    with pytest.raises(ConfigError, match=r"has no such member of group g; expected one of .*; got m0"):
        leave("m0", "--group", "g", "--master", cluster.master_option)


@pytest.mark.check
def test_who_never_calls_update_membership_leaves_between_two_calls(cluster: Cluster) -> None:
    clients = trainers(cluster, updates=False)
    leaving = start_leave("peer-1", "--master", cluster.master_option, "--within", "0.2")
    check_gone(cluster, clients, 1)
    assert said(leaving)[0] == 0


@pytest.mark.check
def test_a_master_that_was_started_again_is_not_taken_for_a_leave(cluster: Cluster) -> None:
    """It has yet to hear of who shall leave, which is stopped until then."""
    comms = in_threads(lambda k: cluster.connect(k, group="g", name=f"m{k}", start_world=MEMBERS), MEMBERS, 60)
    leaving = start_leave("m1", "--group", "g", "--master", cluster.master_option, "--within", "90")
    try:
        assert leaving.stdout is not None
        assert leaving.stdout.readline() == "m1 of group g was asked to leave\n"
        cluster.pause(1)
        cluster.kill_master()
        cluster.start_master()
        with pytest.raises(subprocess.TimeoutExpired):
            leaving.wait(1)
        cluster.resume(1)
        whole = lambda: any(len(group.members) == MEMBERS for group in cluster.status().groups)  # noqa: E731
        wait_until(whole, 60, "all are members again")
        with pytest.raises(subprocess.TimeoutExpired):
            leaving.wait(1)

        def update(k: int) -> tuple[str, ...]:
            with contextlib.suppress(wancoll.AskedToLeave):
                return comms[k].update_membership().contributors
            return ()

        assert [sorted(one) for one in in_threads(update, MEMBERS, 60)][1] == []
        assert said(leaving) == (0, "m1 of group g has left\n", "")
    finally:
        leaving.kill()
    cluster.disconnect()


@pytest.mark.check
def test_sigterm_is_a_leave_in_order_too(cluster: Cluster) -> None:
    comms = in_threads(lambda k: cluster.connect(k, group="g", name=f"m{k}", start_world=MEMBERS), MEMBERS, 60)
    in_threads(lambda k: comms[k].all_reduce(np.ones(4, np.float32)), MEMBERS, 60)
    cluster.terminate(1)
    assert cluster.wait(1, 60) == 0
    receipts = in_threads(lambda k: comms[2 * k].all_reduce(np.ones(4, np.float32)), 2, 60)
    assert [sorted(receipt.contributors) for receipt in receipts] == [["m0", "m2"]] * 2
    kinds = [event.kind for event in cluster.status().events if event.group == "g"]
    assert kinds.count("left") == 1
    assert not [kind for kind in kinds if "died" in kind]
    cluster.disconnect()
