"""A group on a wide area network whose members come and go: each sums and records, faults come in between."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.faults.support import total, untouched, wait_until
from tests.wan.network import Wan
from wancoll.chaos import Cluster
from wancoll.collective import Receipt
from wancoll.errors import Evicted, MasterUnreachable, OutcomeUnknown, PeerDaemonLost, WancollError

OPS = 2  # sums between two calls of update_membership
DEADLINE = 60.0  # seconds for any call
HEALED = 60.0  # seconds for the group to be whole again after a fault
REFUSED = (PeerDaemonLost, Evicted, MasterUnreachable, OutcomeUnknown)  # what a lost member's calls may end with
Facts = tuple[int, tuple[str, ...], str]  # epoch, contributors, digest


@dataclass
class Churn:
    """Member m{i} at peer i sums 10**i in a loop, joins again when it was lost, and checks what comes back.

    Args:
        wan: the network.
        cluster: on it.
        count: elements of each sum.
        rng: picks faults and victims.
        group: name of a new group.
    """

    wan: Wan
    cluster: Cluster
    count: int
    rng: random.Random
    group: str
    committed: dict[str, Facts] = field(default_factory=dict)  # by op_id
    failed: list[tuple[int, int, str]] = field(default_factory=list)  # member, seq of the call, error
    done: Counter[int] = field(default_factory=Counter)  # sums of each member
    faults: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    commits: list[float] = field(default_factory=list)  # time.monotonic() of each op's first receipt

    def run(self, seconds: float) -> None:
        """Let it go on for so long, then until the group is whole; raises AssertionError where a promise was broken."""
        self._stop, self._lock = threading.Event(), threading.Lock()
        threads = [threading.Thread(target=self._member, args=(i,), daemon=True) for i in range(self.wan.peers)]
        for thread in threads:
            thread.start()
        try:
            self._await_whole()
            end = time.monotonic() + seconds
            while time.monotonic() < end and not self.wrong:
                self._fault()
                self._await_whole()
        finally:
            self._stop.set()
            for thread in threads:
                thread.join(DEADLINE)
        assert not any(thread.is_alive() for thread in threads), "a call did not end"
        assert not self.wrong, self.wrong
        for member, seq, error in self.failed:
            epoch, contributors, _ = self.committed.get(f"{self.group}/{seq}", (0, (), ""))
            told = error in ("PeerDaemonLost", "OutcomeUnknown")  # this member cannot know; the others may have
            assert told or f"m{member}" not in contributors, f"m{member}: {error} at {seq}, committed in {epoch}"

    @property
    def longest_gap(self) -> float:
        """Seconds between two commits."""
        return max(later - earlier for earlier, later in zip(self.commits, self.commits[1:], strict=False))

    # ---- members -------------------------------------------------------------------------------------

    def _member(self, i: int) -> None:
        tensor = np.empty(self.count, np.float32)
        while not self._stop.is_set():
            try:
                with self.cluster.connect(
                    i, group=self.group, name=f"m{i}", start_world=self.wan.peers, min_world=1, timeout=DEADLINE
                ) as comm:
                    self._work(i, comm, tensor)
            except (WancollError, OSError):  # not admitted: its daemon is not there, or the old member still is
                self._stop.wait(0.05)
            except BaseException as bad:
                self.wrong.append(f"m{i}: {bad!r}")
                raise

    def _work(self, i: int, comm: Any, tensor: np.ndarray) -> None:
        seq = 0
        while not self._stop.is_set():
            for _ in range(OPS):
                tensor[...] = 10**i
                try:
                    receipt = comm.all_reduce(tensor, op="sum", timeout=DEADLINE)
                except REFUSED as bad:
                    if not untouched(tensor, i):
                        self.wrong.append(f"m{i}: its tensor changed, though {bad!r}")
                    self.failed.append((i, seq + 1, type(bad).__name__))
                    return
                except (WancollError, TimeoutError) as bad:
                    self.wrong.append(f"m{i} after operation {seq}: {bad!r}")
                    return
                seq = receipt.seq
                self._record(i, receipt, tensor)
            try:
                seq = comm.update_membership(timeout=DEADLINE).seq
            except REFUSED:
                return

    def _record(self, i: int, receipt: Receipt, tensor: np.ndarray) -> None:
        facts = receipt.epoch, receipt.contributors, receipt.digest
        with self._lock:
            if receipt.op_id not in self.committed:
                self.commits.append(time.monotonic())
            known = self.committed.setdefault(receipt.op_id, facts)
            self.done[i] += 1
        if known != facts:
            self.wrong.append(f"m{i} {receipt.op_id}: {facts}, another member has {known}")
        if not (tensor == np.float32(total(receipt.contributors))).all():
            self.wrong.append(f"m{i} {receipt.op_id}: {np.unique(tensor)[:9]} from {receipt.contributors}")

    # ---- faults --------------------------------------------------------------------------------------

    def _fault(self) -> None:
        """One fault at a random moment; returns when its cause is gone."""
        one, other = self.rng.sample(range(self.wan.peers), 2)
        names: dict[str, Callable[[], None]] = {
            "kill": lambda: self._kill(one),
            "kill two": lambda: self._kill(one, other),
            "pause": lambda: self._pause(one),
            "cut": lambda: self._cut(one, other),
            "silent path": lambda: self._silent(one, other),
            "master": self._master,
        }
        name = self.rng.choice(list(names))
        self.faults[name] += 1
        time.sleep(self.rng.uniform(0, 1.0))  # the moment is the test
        names[name]()

    def _kill(self, *victims: int) -> None:
        for i in victims:
            self.cluster.kill(i)
        for i in victims:
            self.cluster.restart_peer(i)

    def _pause(self, i: int) -> None:
        """Long enough to be evicted."""
        self.cluster.pause(i)
        try:
            wait_until(lambda: f"m{i}" not in self._members(), 20, f"m{i}, which stands still, is out")
        finally:
            self.cluster.resume(i)

    def _cut(self, i: int, j: int) -> None:
        self.cluster.cut(i, j)
        time.sleep(self.rng.uniform(0, 1.0))  # how long is the test
        self.cluster.heal(i, j)

    def _silent(self, i: int, j: int) -> None:
        """All packets between two peers are lost for a while; their lanes stand it."""
        before = self.wan.path(i, j).loss
        for pair in ((i, j), (j, i)):
            self.wan.change_path(*pair, loss=1.0)
        time.sleep(self.rng.uniform(0, 2.0))  # how long is the test
        for pair in ((i, j), (j, i)):
            self.wan.change_path(*pair, loss=before)

    def _master(self) -> None:
        self.cluster.kill_master()
        time.sleep(self.rng.uniform(0, 0.5))  # how long is the test
        self.cluster.start_master()

    def _members(self) -> set[str]:
        with suppress(WancollError):
            for found in self.cluster.status().groups:
                if found.name == self.group:
                    return {member.name for member in found.members if member.state == "member"}
        return set()

    def _await_whole(self) -> None:
        """All members are in, and have committed a sum together."""
        before = len(self.committed)

        def whole() -> bool:
            with self._lock:
                new = list(self.committed.values())[before:]
            return bool(self.wrong) or any(len(contributors) == self.wan.peers for _, contributors, _ in new)

        wait_until(whole, HEALED, f"the group is whole after {dict(self.faults)}")
