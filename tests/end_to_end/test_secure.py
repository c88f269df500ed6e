"""Daemons that join with a token: they work as others do, through renewals, a new master and a token's end."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import wancoll
from wancoll.chaos import Cluster, in_threads

LIFETIME = 6.0  # seconds, of a certificate
RENEWED, ENROLLED = "the certificate is renewed", "a certificate was got with the token"


@pytest.mark.check
def test_operations_run_while_certificates_are_renewed_and_the_master_is_started_again() -> None:
    with Cluster(2, fork=True, secure=True, master_args=[f"--certificate-lifetime={LIFETIME}"]) as cluster:
        comms = in_threads(lambda i: cluster.connect(i, group="g", start_world=2), 2, 30)

        def work(i: int, wanted: str, times: int) -> set[tuple[int, int, float]]:
            """Operations until each daemon's log says what is wanted: what came of them."""
            x, found, until = np.ones(1000, np.float32), set(), time.monotonic() + 30
            while True:
                time.sleep(0.05)
                x[:] = i + 1
                more = np.array([cluster.logs(i).count(wanted) < times and time.monotonic() < until], np.float32)
                receipt = comms[i].all_reduce(x, op="sum")
                comms[i].all_reduce(more, op="max")
                found.add((receipt.world_size, receipt.attempts, float(x[0])))
                if not more[0]:
                    return found

        for found in in_threads(lambda i: work(i, RENEWED, 1), 2, 45):
            assert found == {(2, 1, 3.0)}
        for i in range(2):
            assert RENEWED in cluster.logs(i)
            assert cluster.logs(i).count(ENROLLED) == 1
        cluster.kill_master()
        time.sleep(LIFETIME)  # what was good for so long has expired: the daemons use their tokens again
        cluster.start_master()
        for found in in_threads(lambda i: work(i, ENROLLED, 2), 2, 45):
            assert found == {(2, 1, 3.0)}
        for i in range(2):
            assert cluster.logs(i).count(ENROLLED) == 2


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


@pytest.mark.check
def test_what_expires_while_no_master_is_there_is_good_within_its_epoch() -> None:
    """Members commit by themselves, and make their lanes anew by certificates that nobody could renew."""
    with Cluster(2, fork=True, secure=True, master_args=[f"--certificate-lifetime={LIFETIME}"]) as cluster:
        comms = in_threads(lambda i: cluster.connect(i, group="g", start_world=2), 2, 30)

        def work(i: int) -> tuple[int, float]:
            x = np.full(1000, i + 1, np.float32)
            return comms[i].all_reduce(x, op="sum").world_size, float(x[0])

        assert set(in_threads(work, 2, 30)) == {(2, 3.0)}
        cluster.kill_master()
        time.sleep(LIFETIME + 1)  # the last certificates have ended
        cluster.cut(0, 1)
        cluster.heal(0, 1)
        assert set(in_threads(work, 2, 30)) == {(2, 3.0)}
        assert not cluster.master_running()
        cluster.start_master()
        assert set(in_threads(work, 2, 30)) == {(2, 3.0)}
