"""Who is lost while it is asked to leave has not left, and `wancoll leave` says so."""

from __future__ import annotations

import time

import pytest

from wancoll.chaos import Cluster
from wancoll.cli.main import app
from wancoll.errors import Evicted, PeerDaemonLost


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
        end = time.monotonic() + 60
        while "peer-1" not in cluster.status().daemons:
            assert time.monotonic() < end
            time.sleep(0.05)
        assert leave(cluster, "peer-1") == 0
        assert capsys.readouterr().out == "daemon peer-1 was asked to leave\ndaemon peer-1 has left\n"
