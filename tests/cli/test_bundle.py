"""`wancoll status --bundle` of real daemons, while an operation hangs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from wancoll.testing import Cluster, in_threads

MEMBERS = 3


def bundled(cluster: Cluster, file: Path, sockets: list[str]) -> tuple[subprocess.CompletedProcess[str], Any]:
    options = ["--bundle", str(file), "--master", cluster.master_option]
    options += [word for path in sockets for word in ("--socket", path)]
    command = [sys.executable, "-m", "wancoll", "status", "--json", *options]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return ran, json.loads(file.read_text()) if file.exists() else None


def test_it_has_all_of_all_members(tmp_path: Path) -> None:
    with Cluster(MEMBERS, fork=True) as cluster:
        comms = in_threads(lambda k: cluster.connect(k, name=f"m{k}", group="hangs", start_world=MEMBERS), MEMBERS, 30)
        in_threads(lambda k: comms[k].all_reduce(np.ones(3)), MEMBERS, 30)
        late = [comm.all_reduce(np.ones(5), async_op=True) for comm in comms[:2]]  # m2 does not call it
        sockets = [cluster.socket(k) for k in range(MEMBERS)]
        ran, found = bundled(cluster, tmp_path / "a.json", [*sockets, str(tmp_path / "nowhere")])
        assert ran.returncode in (0, 3), ran.stderr  # 3: an operation waits already for long
        assert json.loads(ran.stdout)["groups"] == found["status"]["groups"]
        [group] = found["status"]["groups"]
        assert {member["name"] for member in group["members"]} == {"m0", "m1", "m2"}
        assert [event["kind"] for event in found["status"]["events"]].count("joined") == MEMBERS
        assert {one["level"] for one in found["doctor"]} <= {"ok", "warn", "fail"}
        assert all(any(cluster.name(k) in one["found"] for one in found["doctor"]) for k in range(MEMBERS))
        events = found["trace"]["traceEvents"]
        names = {event["args"]["name"] for event in events if event["name"] == "process_name"}
        assert names == {cluster.name(k) for k in range(MEMBERS)}
        hangs = {event["args"]["member"] for event in events if event["args"].get("outcome") == "running"}
        assert hangs == {"m0", "m1"}
        [(path, why)] = found["not_traced"].items()
        assert (path, "cannot be traced" in why) == (str(tmp_path / "nowhere"), True)
        ran, found = bundled(cluster, tmp_path / "b.json", sockets[:1])
        assert list(found["not_traced"]) == [cluster.name(1), cluster.name(2)]
        assert cluster.name(0) in ran.stderr
        ran, found = bundled(cluster, tmp_path / "no" / "folder.json", sockets[:1])
        assert (ran.returncode, found) == (2, None)
        assert "cannot be written" in ran.stderr
        comms[2].all_reduce(np.ones(5))
        assert [work.wait(30).out.tolist() for work in late] == [[3.0] * 5] * 2
        for comm in comms:
            comm.close()
