"""Who is lost while it is asked to leave has not left, and `wancoll leave` says so."""

from __future__ import annotations

import time

import pytest

from tests.faults.support import (
    Background,
    attempt,
    check_agreed,
    close_all,
    contribution,
    join,
    reduce_all,
    untouched,
    wait_until,
)
from wancoll.chaos import Cluster
from wancoll.cli.main import app
from wancoll.errors import Evicted, OutcomeUnknown, PeerDaemonLost
from wancoll.process import is_stopped


def leave(cluster: Cluster, *options: str) -> int:
    asked = ["leave", *options, "--master", cluster.master_option]
    code: int = app(asked, result_action="return_value", exit_on_error=False)
    return code


@pytest.mark.check
@pytest.mark.parametrize("member", [False, True])
def test_who_stands_still_has_not_left_and_who_comes_in_its_place_can(
    member: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    with Cluster(2, fork=True, lanes=1, heartbeat_timeout=2) as cluster:
        comm = cluster.connect(1, group="g", name="m1", start_world=1)
        whom = ["m1", "--group", "g"] if member else ["peer-1"]
        who = "m1 of group g" if member else "daemon peer-1"
        cluster.pause(1)
        with pytest.raises(Evicted if member else PeerDaemonLost, match=f"{who}: was lost before it left; it may"):
            leave(cluster, *whom)
        assert capsys.readouterr().out == f"{who} was asked to leave\n"
        cluster.restart_peer(1)  # it is killed first: awake, it might take in what it was asked, after all
        comm.close()
        wait_until(lambda: "peer-1" in cluster.status().daemons, 60, "the daemon is here")
        assert leave(cluster, "peer-1") == 0
        assert capsys.readouterr().out == "daemon peer-1 was asked to leave\ndaemon peer-1 has left\n"


@pytest.mark.check
def test_what_others_may_commit_with_its_share_is_not_denied() -> None:
    """It leaves when the time is over in which what runs may end; then the one that it waited for goes on."""
    with Cluster(3, fork=True, lanes=1, heartbeat_timeout=20, peer_args=["--drain-timeout=1"]) as cluster:
        comms = join(cluster, range(3), group="g")
        reduce_all(comms, range(3))
        tensors = [contribution(k, 1000) for k in range(3)]
        cluster.failpoint(1, "before_done", "pause")
        calls = Background(lambda k: attempt(lambda: comms[k].all_reduce(tensors[k], op="sum")), 3)
        wait_until(lambda: is_stopped(cluster.pid(1)), 30, "m1's daemon has finished, and has not said so")
        time.sleep(0.3)  # m2 has finished, and said so: then too nobody tells it what m1 has done
        assert leave(cluster, "m2", "--group", "g", "--within", "0.1") == 0
        cluster.resume(1)
        first, second, third = calls.results()
        assert isinstance(third.error, OutcomeUnknown), third
        assert "an operator asked this member to leave" in str(third.error)
        assert untouched(tensors[2], 2)
        check_agreed([first, second], tensors[:2])
        close_all(comms)
