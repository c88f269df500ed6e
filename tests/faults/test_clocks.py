"""Clocks that differ: of a master, and of daemons that are ahead of it and behind it; joining, lanes, a new start.

libfaketime shows each process a clock of its own, which the test moves; what measures durations is as it was. Its
"fix" of waits with a timeout is off: by it threads of one interpreter waited for each other for seconds. It keeps no
copy of the file: a master that still had the old time gave out a token that had expired when it was shown.
"""

from __future__ import annotations

import glob
from pathlib import Path

import numpy as np
import pytest

import wancoll
from tests.faults.support import wait_until
from wancoll.chaos import Cluster, in_threads

LIBRARY = next((path for at in ("lib*", "lib/*") for path in glob.glob(f"/usr/{at}/faketime/libfaketimeMT.so.1")), "")
YEAR = 365 * 24 * 3600
PATIENCE = 60.0  # seconds
TAKEN_IN = "connected to the master"
OFF = {0: 0, 1: YEAR, 2: -YEAR}  # of daemons, against the master's

pytestmark = [
    pytest.mark.check,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not LIBRARY, reason="there is no libfaketime here; Debian's package is called faketime"),
]


class Clocks:
    """By file: how far each process's clock is off this machine's."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._off = folder, dict[str, int]()

    def env(self, name: str, off: int) -> dict[str, str]:
        """For a process whose clock is so many seconds ahead."""
        self._off[name] = off
        self.go_on(0)
        file = str(self._folder / name)
        return {
            "LD_PRELOAD": LIBRARY, "FAKETIME_TIMESTAMP_FILE": file, "FAKETIME_NO_CACHE": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1", "FAKETIME_FORCE_MONOTONIC_FIX": "0",
        }  # fmt: skip

    def go_on(self, seconds: int) -> None:
        """All show so much later."""
        for name in self._off:
            self._off[name] += seconds
            new = self._folder / f"{name}.new"
            new.write_text(f"{self._off[name]:+d}\n")
            new.rename(self._folder / name)


def total(comms: list[wancoll.Communicator]) -> set[tuple[int, float]]:
    def work(i: int) -> tuple[int, float]:
        x = np.full(1000, 10.0**i, np.float32)
        return comms[i].all_reduce(x, op="sum").world_size, float(x[0])

    return set(in_threads(work, len(comms), 30))


def test_clocks_that_are_a_year_off_change_nothing(tmp_path: Path) -> None:
    """Keys have no dates: daemons join, make their lanes anew and come back, whatever their clocks say."""
    clocks = Clocks(tmp_path)
    env = {i: clocks.env(f"peer-{i}", off) for i, off in OFF.items()}
    with Cluster(len(OFF), secure=True, lanes=2, env=clocks.env("master", 0), peer_env=env) as cluster:
        comms = in_threads(lambda i: cluster.connect(i, group="g", start_world=len(OFF)), len(OFF), 30)
        assert total(comms) == {(3, 111.0)}
        clocks.go_on(2 * YEAR)
        for i, j in ((0, 1), (0, 2), (1, 2)):
            cluster.cut(i, j)
            cluster.heal(i, j)
        assert total(comms) == {(3, 111.0)}
        cluster.restart_peer(2)
        wait_until(lambda: cluster.logs(2).count(TAKEN_IN) == 2, PATIENCE, "the daemon that started again")
        late = cluster.add_peer(f"--join={cluster.token(seconds=YEAR)}", env=clocks.env("late", -YEAR))
        wait_until(lambda: TAKEN_IN in cluster.logs(late), PATIENCE, "whose token is good by the master's clock")
