"""`wancoll chaos` as a user runs it: on a product that holds, and on one that does not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

WANCOLL = [sys.executable, "-m", "wancoll"]


def chaos(tmp_path: Path, *options: str, timeout: float = 150.0) -> tuple[subprocess.CompletedProcess[str], Any]:
    """The finished command, and its report."""
    report = tmp_path / "report.json"
    done = subprocess.run(
        [*WANCOLL, "chaos", f"--json={report}", *options],
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd=tmp_path,
        env={name: value for name, value in os.environ.items() if not name.startswith("WANCOLL_CHAOS_")},
        check=False,
    )
    return done, json.loads(report.read_text()) if report.exists() else None


def check_held(done: subprocess.CompletedProcess[str], report: Any, tmp_path: Path) -> None:
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == "", "the terminal is the table's: what clients say of a daemon that is away is in their logs"
    assert report["violations"] == []
    assert "violations: 0" in done.stdout
    assert report["calls"]["committed"] > 30
    assert not list(tmp_path.glob("*-logs")), "logs are kept where something was violated"


@pytest.mark.check
@pytest.mark.timeout(180)
def test_some_seconds(tmp_path: Path) -> None:
    """Kills, stops, joiners, the master's death: everything agrees, nothing leaks."""
    done, report = chaos(
        tmp_path, "--peers=4", "--seconds=9", "--seed=8", "--interval=0.4:0.9", "--quiet=2", "--master-every=4"
    )
    check_held(done, report, tmp_path)
    hit = [fault for fault in report["faults"] if fault["hit"]]
    assert len(hit) >= 5
    assert len({fault["kind"] for fault in hit}) >= 3
    assert report["recoveries"]["count"] >= 1
    assert set(report["resources"]["after"]) == {
        "master",
        *(f"peer-{i}" for i in range(4)),
        *(f"m{i}" for i in range(4)),
    }


@pytest.mark.check
@pytest.mark.timeout(120)
def test_a_few_seconds_over_tls(tmp_path: Path) -> None:
    """Daemons come back with their keys, the master with its own, and lanes are sealed while they break."""
    kinds = "--faults=kill,client_kill,join_storm,twin,flip,truncate,oneway,master_kill"
    options = ["--peers=3", "--seconds=8", "--quiet=1", "--interval=0.5:1", "--seed=3", "--master-every=0", kinds]
    done, report = chaos(tmp_path, "--secure", *options, timeout=110)
    check_held(done, report, tmp_path)
    assert report["secure"]
    assert "over TLS" in done.stdout
    assert "--secure" in report["command"]
    hit = [fault["kind"] for fault in report["faults"] if fault["hit"]]
    assert len(hit) >= 3
    assert "kill" in hit


@pytest.mark.check
@pytest.mark.timeout(120)
def test_a_few_seconds_without_relays(tmp_path: Path) -> None:
    """Peers 0 and 1 reach each other by the relay only, which is killed twice."""
    options = "--peers=3", "--relays=1", "--seconds=6", "--seed=7", "--faults=relay_kill,relay_stop", "--quiet=1"
    kept = tmp_path / "kept"
    done, report = chaos(tmp_path, *options, "--interval=0.5:1", "--master-every=0", f"--keep-logs={kept}")
    check_held(done, report, tmp_path)
    assert report["command"].endswith("--relays=1")
    assert any(fault["hit"] and fault["text"].startswith("relay_") for fault in report["faults"])
    lost = [line for line in (kept / "peer-1.log").read_text().splitlines() if '"LinkBroken"' in line]
    assert sum('"m0"' in line for line in lost) > 1


@pytest.mark.check
@pytest.mark.parametrize(
    "more", [[], pytest.param(["--secure"], marks=pytest.mark.nightly)], ids=["in clear", "sealed"]
)
@pytest.mark.timeout(120)
def test_a_few_seconds_of_lost_journals_and_full_disks(tmp_path: Path, more: list[str]) -> None:
    kinds = "--faults=master_lost_journal,master_full_disk,kill,client_kill"
    options = ["--peers=3", "--seconds=10", "--quiet=1", "--interval=0.4:0.9", "--seed=3", "--master-every=0", kinds]
    done, report = chaos(tmp_path, *more, *options, timeout=110)
    check_held(done, report, tmp_path)
    assert {fault["kind"] for fault in report["faults"] if fault["hit"]} > {"master_lost_journal", "master_full_disk"}


SECURE = pytest.mark.parametrize("secure", [[], ["--secure"]], ids=["in clear", "sealed"])


@pytest.mark.nightly
@SECURE
@pytest.mark.timeout(400)
def test_a_minute_of_churn_with_ten_peers(tmp_path: Path, secure: list[str]) -> None:
    """Every 0.5 to 2 s a fault, the master killed in between."""
    options = ["--peers=10", "--seconds=60", "--seed=1", "--master-every=20", *secure]
    done, report = chaos(tmp_path, *options, timeout=380)
    check_held(done, report, tmp_path)
    hit = [fault for fault in report["faults"] if fault["hit"]]
    assert len(hit) >= 20
    assert sum(fault["kind"].startswith("master") for fault in hit) >= 3


@pytest.mark.nightly
@SECURE
@pytest.mark.timeout(300)
def test_lanes_that_fail_while_their_peers_live(tmp_path: Path, secure: list[str]) -> None:
    """One-way cuts, slow and late lanes, flipped bits, connections that end in mid frame: nobody is evicted."""
    options = ["--peers=5", "--seconds=45", "--seed=2", "--master-every=0", *secure]
    done, report = chaos(tmp_path, *options, "--faults=oneway,slow,delay,flip,truncate", timeout=280)
    check_held(done, report, tmp_path)
    assert {fault["kind"] for fault in report["faults"] if fault["hit"]} >= {"oneway", "flip"}


@pytest.mark.check
@pytest.mark.timeout(120)
def test_a_wrong_result_is_found(tmp_path: Path) -> None:
    """Exit code 1, who and what, the logs, and the one command that does it again."""
    done, report = chaos(tmp_path, "--peers=3", "--seconds=2", "--quiet=1", "--seed=5", "--faults=kill", "--spoil")
    assert done.returncode == 1
    assert {violation["rule"] for violation in report["violations"]} >= {"value", "agreement"}
    assert all(violation["who"] == "m1" for violation in report["violations"] if violation["rule"] == "value")
    again = done.stderr.splitlines()[-1]
    assert again.startswith("wancoll chaos --peers=3 --seconds=2 --seed=5")
    assert "--faults=kill" in again
    assert (tmp_path / "wancoll-chaos-5-logs" / "master.log").stat().st_size > 0


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ("--faults=kill,nothing", "nothing"),
        ("--interval=2:1", "--interval"),
        ("--interval=x", "--interval"),
        ("--size=1GiB2", "--size"),
        ("--min-world=3", "--min-world"),
        ("--peers=2", "--peers"),
        ("--master-every=-1", "--master-every"),
    ],
)
def test_options_that_cannot_be(tmp_path: Path, option: str, says: str) -> None:
    done, _ = chaos(tmp_path, option)
    assert done.returncode == 2
    assert says in done.stderr
    assert len(done.stderr.splitlines()) == 1
