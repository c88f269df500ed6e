"""Daemons that join with a token: they work as others do, through a new start and a token's end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import wancoll
from wancoll.chaos import Cluster, in_threads


@pytest.mark.check
def test_a_token_for_two_is_good_for_them_whenever_they_and_the_master_start_again() -> None:
    with Cluster(0, fork=True, secure=True) as cluster:
        token = cluster.token(uses=2, seconds=60)
        for _ in range(2):
            cluster.add_peer(f"--join={token}")
        comms = in_threads(lambda i: cluster.connect(i, group="g", start_world=2), 2, 30)

        def work(i: int) -> tuple[int, int, float]:
            x = np.full(1000, i + 1, np.float32)
            receipt = comms[i].all_reduce(x, op="sum")
            return receipt.world_size, receipt.attempts, float(x[0])

        assert set(in_threads(work, 2, 30)) == {(2, 1, 3.0)}
        cluster.kill_master()
        cluster.cut(0, 1)  # their lanes are made anew while nobody can be asked
        cluster.heal(0, 1)
        assert {(size, sum) for size, _, sum in in_threads(work, 2, 30)} == {(2, 3.0)}
        assert not cluster.master_running()
        cluster.start_master()
        assert set(in_threads(work, 2, 30)) == {(2, 1, 3.0)}
        for comm in comms:
            comm.close()
        cluster.restart_peer(0)
        refused = cluster.add_peer(f"--join={token}")
        assert cluster.wait(refused) == 2
        assert "is used up" in cluster.logs(refused)
        comms[0] = cluster.connect(0, group="h", start_world=1)
        assert work(0) == (1, 1, 1.0)


@pytest.mark.check
@pytest.mark.parametrize("secure", [False, True])
def test_status_and_events_ask_as_the_daemon_at_the_socket(tmp_path: Path, *, secure: bool) -> None:
    with Cluster(2, fork=True, secure=secure) as cluster:
        comms = in_threads(lambda i: cluster.connect(i, group="seen", start_world=2), 2, 30)
        clean = {name: value for name, value in os.environ.items() if not name.startswith("WANCOLL_")}
        env = clean | {"WANCOLL_SOCKET": cluster.socket(1), "COLUMNS": "160"}

        def run(command: str) -> tuple[int, str, str]:
            command_line = [sys.executable, "-m", "wancoll", command]
            done = subprocess.run(  # in a folder of its own: what the daemon says has to be good there
                command_line, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
            )
            return done.returncode, done.stdout, done.stderr

        code, shown, wrong = run("status")
        assert (code, wrong) == (0, "")
        assert "group seen" in shown
        code, shown, wrong = run("events")
        assert (code, wrong) == (0, "")
        assert any("seen" in line and "epoch" in line for line in shown.splitlines()), shown
        cluster.kill_master()
        code, shown, wrong = run("status")
        assert (code, shown) == (1, "")
        assert f"named by the daemon at {cluster.socket(1)}: the master gives no status" in wrong
        for comm in comms:
            comm.close()


def test_a_private_daemon_joins_with_a_token() -> None:
    with Cluster(1, fork=True, secure=True) as cluster:
        ways: list[dict[str, str]] = [{"socket": cluster.socket(0)}, {"token": cluster.token(uses=1)}]

        def member(i: int) -> float:
            x = np.full(1000, i + 1, np.float32)
            with wancoll.connect("g", start_world=2, timeout=30, **ways[i]) as comm:  # type: ignore[arg-type]
                comm.all_reduce(x, op="sum")
            return float(x[0])

        assert in_threads(member, 2, 45) == [3.0, 3.0]
