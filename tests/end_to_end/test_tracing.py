"""`wancoll trace`: phases of real operations in a file for Perfetto; who waited for whom, and what hangs."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.faults.support import cluster_fixture, wait_until
from wancoll.chaos import Cluster, in_threads
from wancoll.cli.looking.timeline import OPEN, SPANS
from wancoll.cli.main import app

MEMBERS = 3
Event = dict[str, Any]


cluster = cluster_fixture(MEMBERS, scope="function", lanes=1, heartbeat_timeout=30)


def start(cluster: Cluster, file: Path, seconds: float) -> Callable[[], list[Event]]:
    """Trace all daemons; returns once they do. The call gives the events when it is over."""
    sockets = [f"--socket={cluster.socket(k)}" for k in range(MEMBERS)]
    running = subprocess.Popen(
        [sys.executable, "-m", "wancoll", "trace", *sockets, "-o", str(file), "--seconds", str(seconds)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    wait_until(lambda: all(cluster.peer_status(k)["traced"] for k in range(MEMBERS)), 60, "all are traced")

    def events() -> list[Event]:
        said, _ = running.communicate(timeout=120)
        assert running.returncode == 0, said
        assert said.endswith(f" of {MEMBERS} daemons in {file}\n")
        found: list[Event] = json.loads(file.read_text())["traceEvents"]
        return found

    return events


def check_format(events: list[Event]) -> None:
    """As the trace event format has it, with phases that lie in their operation, in order, and add up to it."""
    operations = [one for one in events if one.get("cat") == "operation"]
    phases = [one for one in events if one.get("cat") == "phase"]
    assert len(operations) + len(phases) + sum(one["ph"] == "M" for one in events) == len(events)
    for one in operations:
        own = [
            each
            for each in phases
            if (each["pid"], each["tid"]) == (one["pid"], one["tid"])
            and one["ts"] <= each["ts"]
            and each["ts"] + each["dur"] <= one["ts"] + one["dur"]
        ]
        assert all(each["dur"] >= 0 for each in own)
        names = [each["name"] for each in own]
        order = [*SPANS.values(), OPEN["running"]]
        assert names == [name for name in order if name in names]
        assert sum(each["dur"] for each in own) == one["dur"]


def named(events: list[Event], what: str) -> dict[tuple[int, int], str]:
    return {(one["pid"], one["tid"]): one["args"]["name"] for one in events if one["name"] == what}


def rows(events: list[Event], seq: int) -> dict[str, list[Event]]:
    """The attempts of an operation, by member."""
    found: dict[str, list[Event]] = {}
    for one in events:
        if one.get("cat") == "operation" and one["args"]["seq"] == seq:
            found.setdefault(one["args"]["member"], []).append(one)
    return found


def trace(*options: str) -> None:
    assert app(["trace", *options], result_action="return_value", exit_on_error=False) == 0


def test_a_call_that_nobody_joins(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It began before the trace, and lasts longer."""
    file = tmp_path / "trace.json"
    with Cluster(2, fork=True, lanes=1) as cluster:
        comms = in_threads(lambda k: cluster.connect(k, group="g", name=f"m{k}", start_world=2), 2, 60)
        work = comms[0].all_reduce(np.ones(1000, np.float32), async_op=True)
        wait_until(lambda: cluster.peer_status(0)["resources"]["ops"], 60, "its links are up, the engine has it")
        trace("--seconds", "0.05", "--out", str(file), *(f"--socket={cluster.socket(k)}" for k in range(2)))
        assert capsys.readouterr().out == f"1 attempt of 2 daemons in {file}\n"
        comms[1].all_reduce(np.ones(1000, np.float32))
        seq = work.wait().seq
        cluster.disconnect()
    found = json.loads(file.read_text())["traceEvents"]
    check_format(found)
    ((only,),) = rows(found, seq).values()
    assert [only["args"][name] for name in ("member", "attempt", "outcome")] == ["m0", 1, "running"]
    assert [one["name"] for one in found if one.get("cat") == "phase"] == [SPANS["seen"], OPEN["running"]]


@pytest.mark.check
def test_phases_and_a_late_rank(cluster: Cluster, tmp_path: Path) -> None:
    comms = in_threads(lambda k: cluster.connect(k, group="g", name=f"m{k}", start_world=MEMBERS), MEMBERS, 60)

    def step(k: int, late: float) -> int:
        if k == 2:
            time.sleep(late)  # what the trace has to show
        tensor = np.ones(100_000, np.float32)
        receipt = comms[k].all_reduce(tensor, op="sum")
        assert (tensor == MEMBERS).all()
        return receipt.seq

    in_threads(lambda k: step(k, 0), MEMBERS, 60)
    events = start(cluster, tmp_path / "trace.json", 3.0)
    calm = in_threads(lambda k: step(k, 0), MEMBERS, 60)[0]
    late = in_threads(lambda k: step(k, 0.3), MEMBERS, 60)[0]
    hang = [comms[k].all_reduce(np.ones(100_000, np.float32), async_op=True) for k in range(2)]
    found = events()
    check_format(found)
    comms[2].all_reduce(np.ones(100_000, np.float32))
    (seq,) = {work.wait().seq for work in hang}
    by_member = rows(found, seq)
    assert sorted(by_member) == ["m0", "m1"]
    for (one,) in by_member.values():
        assert (one["args"]["outcome"], one["args"]["contributors"]) == ("running", 0)
    assert sorted(named(found, "process_name").values()) == ["peer-0", "peer-1", "peer-2"]
    assert sorted(named(found, "thread_name").values()) == ["g: m0", "g: m1", "g: m2"]
    for seq in (calm, late):
        by_member = rows(found, seq)
        assert sorted(by_member) == ["m0", "m1", "m2"]
        for (one,) in by_member.values():
            told = one["args"]
            assert (told["outcome"], told["contributors"], told["attempt"]) == ("committed", MEMBERS, 1)
            assert (told["bytes"], told["codec"], told["op"], told["group"]) == (400_000, "none", "all_reduce", "g")
            assert told["algorithm"]
    (first,), (second,), (last,) = (rows(found, late)[f"m{k}"] for k in range(MEMBERS))
    for one in (first, second):
        assert last["ts"] - one["ts"] > 200_000 < one["dur"]
        waits = [
            each["dur"]
            for each in found
            if (each["pid"], each.get("cat")) == (one["pid"], "phase")
            and each["name"] in (SPANS["first"], SPANS["last"])
            and one["ts"] <= each["ts"] <= one["ts"] + one["dur"]
        ]
        assert sum(waits) > 200_000  # for bytes of the late one
    assert not any(cluster.peer_status(k)["traced"] for k in range(MEMBERS))
    cluster.disconnect()


@pytest.mark.check
def test_an_aborted_attempt_is_there_twice(cluster: Cluster, tmp_path: Path) -> None:
    comms = in_threads(lambda k: cluster.connect(k, group="g", name=f"m{k}", start_world=MEMBERS), MEMBERS, 60)
    in_threads(lambda k: comms[k].all_reduce(np.ones(1000, np.float32)), MEMBERS, 60)
    sockets = [f"--socket={cluster.socket(k)}" for k in range(2)]
    file = tmp_path / "trace.json"
    running = subprocess.Popen(
        [sys.executable, "-m", "wancoll", "trace", *sockets, "-o", str(file), "--seconds", "10"],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    wait_until(lambda: all(cluster.peer_status(k)["traced"] for k in range(2)), 60, "they are traced")
    works = [comms[k].all_reduce(np.ones(1000, np.float32), op="sum", async_op=True) for k in range(2)]
    wait_until(
        lambda: all(cluster.peer_status(k)["resources"]["ops"] for k in range(2)), 60, "their sums are under way"
    )
    cluster.kill(2)
    receipts = [work.wait() for work in works]
    assert all(receipt.attempts >= 2 for receipt in receipts)  # each counts its own
    running.communicate(timeout=120)
    found: list[Event] = json.loads(file.read_text())["traceEvents"]
    check_format(found)
    for member, attempts in rows(found, receipts[0].seq).items():
        told = [(one["args"]["attempt"], one["args"]["outcome"], one["args"]["contributors"]) for one in attempts]
        n = receipts[int(member.removeprefix("m"))].attempts
        assert told == [*((k, "aborted", 0) for k in range(1, n)), (n, "committed", 2)], member
    cluster.disconnect()


@pytest.mark.check
def test_files_of_daemons(cluster: Cluster, tmp_path: Path) -> None:
    """Each daemon as if it were on a machine of its own; all have one clock in truth."""
    files = [str(tmp_path / f"{k}.json") for k in range(2)]
    comms = in_threads(lambda k: cluster.connect(k, group="g", name=f"m{k}", start_world=2), 2, 60)
    works = [comms[0].all_reduce(np.ones(1000, np.float32), async_op=True)]
    in_threads(lambda k: trace("--seconds", "3", "-o", files[k], "--socket", cluster.socket(k)), 2, 60)
    clocks = [json.loads(Path(file).read_text())["metadata"]["clock"] for file in files]
    assert clocks[0]["master"] == clocks[1]["master"] == f"{cluster.status().master:x}"
    assert abs(clocks[0]["ahead"] - clocks[1]["ahead"]) <= clocks[0]["uncertain"] + clocks[1]["uncertain"]
    assert app(["trace", "merge", *files, "-o", str(tmp_path / "all.json")], result_action="return_value") == 0
    found = json.loads((tmp_path / "all.json").read_text())["traceEvents"]
    check_format(found)
    assert sorted(named(found, "process_name").values()) == ["peer-0", "peer-1"]
    works.append(comms[1].all_reduce(np.ones(1000, np.float32), async_op=True))
    assert [work.wait().attempts for work in works] == [1, 1]
    cluster.disconnect()


@pytest.mark.check
def test_who_is_not_there_and_who_is_traced_already(cluster: Cluster, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "wancoll", "trace", "-o", str(tmp_path / "trace.json"), "--seconds"]
    with subprocess.Popen([*command, "60", "--socket", cluster.socket(0)], stdout=subprocess.PIPE) as running:
        wait_until(lambda: cluster.peer_status(0)["traced"], 60, "it is traced")
        again = subprocess.run(
            [*command, "1", "--socket", cluster.socket(0)], capture_output=True, text=True, timeout=60, check=False
        )
        running.kill()
    assert again.returncode == 2
    assert "peer-0 at " in again.stderr
    assert "is being traced already; wait until that is over" in again.stderr
    wait_until(lambda: not cluster.peer_status(0)["traced"], 60, "who asked has gone")
    nobody = subprocess.run(
        [*command, "1", "--socket", str(tmp_path / "none.sock")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert nobody.returncode == 1
    assert "is `wancoll peer` running there?" in nobody.stderr
