"""Runs a command on a machine that stands still now and then, as one that others share does.

    python -m tests.freeze PAUSE EVERY COMMAND...

All of the command's processes stop (SIGSTOP) for PAUSE seconds, about every EVERY seconds. What it stopped itself
stays stopped. The exit status is the command's.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36  # whose parent died becomes our child, and is found


def processes() -> dict[int, tuple[int, str]]:
    """Of this machine: the parent and the state of each."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = stat.read_text()
        except OSError:  # it has ended
            continue
        state, parent = text.rpartition(")")[2].split()[:2]
        found[int(stat.parent.name)] = int(parent), state
    return found


def stop(root: int) -> list[int]:
    """All that come from *root* and run; parents first, so that no test stops or wakes its children meanwhile."""
    stopped: list[int] = []
    while True:
        known, new = processes(), []
        row = [root]
        while row:
            row = [pid for pid, (parent, _) in known.items() if parent in row]
            new += [pid for pid in row if pid not in stopped and known[pid][1] not in "TtZX"]
        if not new:
            return stopped
        for pid in new:
            send(pid, signal.SIGSTOP)
        stopped += new


def wake(stopped: list[int]) -> None:
    for pid in reversed(stopped):  # as they were when their parents look
        send(pid, signal.SIGCONT)


def send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has ended
        os.kill(pid, number)


def main(pause: float, every: float, command: list[str]) -> int:
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    running = subprocess.Popen(command)
    stopped: list[int] = []
    try:
        while True:
            try:
                return running.wait(random.expovariate(1 / every))
            except subprocess.TimeoutExpired:
                stopped = stop(os.getpid())
                time.sleep(pause)
                wake(stopped)
    finally:
        wake(stopped)


if __name__ == "__main__":
    if len(sys.argv) < 4:
        sys.exit(__doc__)
    sys.exit(main(float(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]))
