"""Somebody kills a peer, then the master, and sees in `wancoll status` and `events` who it was and that it goes on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.faults.support import cluster_fixture
from wancoll.chaos import Cluster, in_threads

WANCOLL = [sys.executable, "-m", "wancoll"]


def until(look: Callable[[], str], good: Callable[[str], bool]) -> str:
    """The first look that is good."""
    end = time.monotonic() + 30
    while not good(found := look()):
        assert time.monotonic() < end, f"still {found}"
        time.sleep(0.05)
    return found


class Watching:
    """Commands that run until the test is over; what they have said is in files."""

    def __init__(self, folder: Path, master: str) -> None:
        self._folder, self._master = folder, master
        self._running: list[subprocess.Popen[bytes]] = []

    def start(self, name: str, *options: str) -> Callable[[], str]:
        with (self._folder / name).open("wb") as file:
            command = [*WANCOLL, *options, "--master", self._master]
            self._running.append(
                subprocess.Popen(command, stdout=file, stderr=file, env=os.environ | {"COLUMNS": "160"})
            )
        return (self._folder / name).read_text

    def once(self, *options: str) -> tuple[int, str]:
        done = subprocess.run(
            [*WANCOLL, *options, "--master", self._master], capture_output=True, text=True, timeout=30, check=False
        )
        return done.returncode, done.stdout

    def until(self, code: int, text: str, *options: str) -> None:
        """It ends with *code*, and says *text*: a busy machine may answer later than a command waits."""
        until(
            lambda: " ".join("{} {}".format(*self.once(*options)).split()),
            lambda said: said.startswith(f"{code} ") and text in said,
        )

    def end(self) -> None:
        for one in self._running:
            one.kill()
            one.wait()


@pytest.mark.check
@pytest.mark.parametrize("voters", [32, 0])
def test_a_master_that_is_started_again_says_what_was_running(voters: int, tmp_path: Path) -> None:
    """All were killed, the master too: the first line says so until a daemon is back, or somebody says they stopped."""
    with Cluster(2, fork=True, lanes=1, master_args=[f"--voters={voters}"]) as cluster:
        watching = Watching(tmp_path, cluster.master_option)
        comms = in_threads(lambda i: cluster.connect(i, group="g", name=f"m{i}", start_world=2), 2, 30)
        in_threads(lambda i: comms[i].all_reduce(np.ones(8, np.float32)), 2, 30)
        cluster.kill_master()
        for i in range(2):
            cluster.kill(i)
            comms[i].close()
        cluster.start_master()
        code, said = watching.once("status")
        line = "group g of 2 members was running, and none has come back: m0, m1 did not say that they stop. "
        line += "Start them again; if they are gone for good: `wancoll evict --group g --all`"
        assert (code, said.splitlines()[0]) == (3, line)
        cluster.restart_peer(0)
        code, said = watching.once("status")
        assert (code, "none has come back: m1 did not say" in said.splitlines()[0]) == (3, True)
        cluster.restart_peer(1)
        code, said = watching.once("status")
        assert (code, said.splitlines()[0].startswith("group g lost m1 ")) == (3, True)
        assert said.splitlines()[0].endswith("; nobody is left")


@pytest.mark.check
def test_two_masters_that_nothing_elects_are_named(tmp_path: Path) -> None:
    """Also where all is well at each of them."""
    with Cluster(1, fork=True) as here, Cluster(0, fork=True) as there:
        both = Watching(tmp_path, f"{there.master_option},{here.master_option}")
        of = {one.master_option: one.status().elected_by for one in (there, here)}
        problem = "two masters, and nothing elects one of them: " + ", ".join(
            f"{at} is of {by}" for at, by in of.items()
        )
        both.until(3, f"{problem};", "status", "--events", "0")
        line = "fail masters " + problem + ". Do: expected one master, or masters of one etcd; start them with --etcd, "
        both.until(1, line, "doctor")
        at = here.master_option
        same = Watching(tmp_path, f"{at},localhost:{at.rpartition(':')[2]}")
        same.until(0, "all is well: no group, 1 daemon", "status", "--events", "0")
        assert "masters" not in same.once("doctor")[1]


cluster = cluster_fixture(3, scope="function", lanes=1, heartbeat_timeout=15)


@pytest.fixture
def watching(cluster: Cluster, tmp_path: Path) -> Iterator[Watching]:
    found = Watching(tmp_path, cluster.master_option)
    yield found
    found.end()


@pytest.mark.check
def test_who_died_and_that_all_is_well_again(cluster: Cluster, watching: Watching) -> None:
    comms = in_threads(lambda k: cluster.connect(k, group="g", name=f"m{k}", start_world=3), 3, 30)
    followed = watching.start("events", "events", "--follow", "--group", "g")
    watched = watching.start("status", "status", "--watch", "0.2", "--events", "0")
    # Where the machine stood still, they may have been told to be silent by then.
    before = len(until(watched, lambda text: "all is well: 1 group, 3 members\n" in text))
    until(followed, lambda text: "joined: m2" in text)

    cluster.pause(1)
    until(watched, lambda text: "\ngroup g: m1 has been silent for " in text[before - 1 :])
    cluster.resume(1)
    cluster.kill(2)
    in_threads(lambda k: comms[k].all_reduce(np.ones(4, np.float32)), 2, 30)
    text = until(watched, lambda text: "\nall is well again: 1 group, 2 members\ngroup g lost m2 " in text)[before:]
    assert text.index("m1 has been silent") < text.index("all is well again: 1 group, 2 members")
    until(followed, lambda text: "daemon died: lost m2: " in text)
    code, said = watching.once("status", "--json", "--group", "g")
    told = json.loads(said)
    assert (code, told["well"], told["note"].startswith("group g lost m2 ")) == (0, True, True)
    code, said = watching.once("status", "--group", "h")
    assert (code, said.splitlines()[0]) == (3, "there is no group h; the master has g")

    cluster.kill_master()
    until(followed, lambda text: "wancoll: no master answers, asking again: " in text)
    until(watched, lambda text: "no master answers, asking again: " in text)
    cluster.start_master()
    until(followed, lambda text: "wancoll: a master answers again\n" in text)
    cluster.kill(1)
    lines = until(followed, lambda text: "lost m1" in text).splitlines()
    told = [line for line in lines if not line.startswith("wancoll: ")]
    assert len(set(told)) == len(told), "nothing is told twice"
    assert sum("daemon died: lost" in line for line in lines) == 2
    assert all(line.startswith("wancoll: ") or " g, epoch " in line for line in lines)
    for comm in comms:
        comm.close()
