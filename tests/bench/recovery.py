"""`python -m tests.bench.recovery`: what a lost member costs the others between hosts that are far apart."""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from cyclopts import App, Parameter

from tests.bench.__main__ import machine
from tests.bench.report import Bar, bar_table, table
from tests.wan.network import Wan, why_not
from tests.wan.units import BITS, RATIO, SECONDS, parse
from wancoll.chaos import Cluster, in_threads
from wancoll.errors import WancollError

MIB = 1 << 20
WARM_UP = 3  # operations of all members before a kill
CLEAN = 3  # timed operations of the survivors after it; the median counts
TRIES = 5  # kills that may come after the commit
CALL_TIMEOUT = 60.0
BAR = 1.0  # seconds beyond detection and a clean operation (issue 4)

app = App(name="python -m tests.bench.recovery", help=__doc__)


@dataclass(frozen=True)
class Phase:
    """When a member is lost, and how.

    Attributes:
        name: for the table.
        share: of an operation's time, after which the fault comes; None: at the failpoint.
        failpoint: the victim stops at this place and is killed once the others can do no more.
        pauses: SIGSTOP, which only the heartbeats tell, instead of SIGKILL.
    """

    name: str
    share: float | None = None
    failpoint: str = ""
    pauses: bool = False


PHASES = (
    Phase("killed between operations", share=0.0),
    Phase("killed after a tenth", share=0.1),
    Phase("killed in the middle", share=0.5),
    Phase("killed after four fifths", share=0.8),
    Phase("killed finished, not committed", failpoint="before_done"),
    Phase("stopped in the middle", share=0.5, pauses=True),
)


@dataclass(frozen=True)
class Recovery:
    """One lost member; times in seconds.

    Attributes:
        phase: name of the phase.
        detection: from the fault until the master noticed.
        mending: from there to the last survivor's commit.
        clean: a later operation of the survivors.
        fresh: the first operation of all members, on new connections.
        pace: bytes per second that a link may send, by the group's plan; far from a host's rate: measured in vain.
    """

    phase: str
    detection: float
    mending: float
    clean: float
    fresh: float
    pace: float

    @property
    def extra(self) -> float:
        """What the fault cost beyond detection and a clean operation."""
        return self.mending - self.clean


@dataclass
class Ended:
    """One member's call."""

    receipt: Any
    error: WancollError | None
    at: float  # time.time()


class Bench:
    """Members on a cluster, one of which is lost again and again.

    Args:
        peers: how many.
        cluster: of so many daemons.
        nbytes: of each operation's tensor.
    """

    def __init__(self, peers: int, cluster: Cluster, nbytes: int) -> None:
        self._peers, self._cluster, self._count = peers, cluster, nbytes // 4
        self._groups = 0
        self._pool = ThreadPoolExecutor(2 * peers)

    def lose_one(self, phase: Phase, victim: int) -> Recovery:
        """A fresh group loses *victim* in an operation; its daemon is there again afterwards. Values are checked.

        Raises:
            RuntimeError: an operation did not end as promised.
        """
        for _ in range(TRIES):
            found = self._try(phase, victim)
            if found is not None:
                return found
        raise RuntimeError(f"{phase.name}: {TRIES} operations were over before that")

    def _try(self, phase: Phase, victim: int) -> Recovery | None:
        """None: the operation was quicker than those before, and committed with all members."""
        cluster, everyone = self._cluster, range(self._peers)
        self._groups += 1
        group = f"recovery-{self._groups}"
        comms = in_threads(
            lambda i: cluster.connect(i, group=group, name=f"m{i}", start_world=len(everyone)), everyone, CALL_TIMEOUT
        )
        tensors = [comm.empty(self._count, np.float32) for comm in comms]
        survivors = [i for i in everyone if i != victim]
        warm = [self._operation(comms, tensors, list(everyone)) for _ in range(WARM_UP)]
        [plan] = [found.plan.plan for found in cluster.status().groups if found.name == group and found.plan]
        pace = float(plan.pacing * plan.lanes)
        if phase.failpoint:
            cluster.failpoint(victim, phase.failpoint, "pause")
        calls = self._post(comms, tensors, list(everyone))
        if phase.share is not None:
            time.sleep(phase.share * warm[-1])
        else:
            self._await_others(group, f"m{victim}", WARM_UP + 1)
        faulty = time.time()
        (cluster.pause if phase.pauses else cluster.kill)(victim)
        ended = self._results(calls, survivors)
        noticed = self._noticed(group, f"m{victim}", faulty)
        self._check(ended, tensors, survivors)
        mended = max(one.at for one in ended.values())
        clean = statistics.median(self._operation(comms, tensors, survivors) for _ in range(CLEAN))
        cluster.restart_peer(victim)
        for comm in comms:
            comm.close()
        if all(one.receipt.attempts == 1 for one in ended.values()):
            return None
        return Recovery(phase.name, noticed - faulty, mended - noticed, clean, warm[0], pace)

    def _post(self, comms: Sequence[Any], tensors: Sequence[Any], members: Sequence[int]) -> dict[int, Any]:
        for i in members:
            tensors[i][...] = 10**i
        return {i: comms[i].all_reduce(tensors[i], op="sum", async_op=True) for i in members}

    def _results(self, calls: dict[int, Any], members: Sequence[int]) -> dict[int, Ended]:
        def wait(i: int) -> Ended:
            try:
                receipt, error = calls[i].wait(timeout=CALL_TIMEOUT), None
            except WancollError as bad:
                receipt, error = None, bad
            return Ended(receipt, error, time.time())

        return dict(zip(members, self._pool.map(wait, members), strict=True))

    def _operation(self, comms: Sequence[Any], tensors: Sequence[Any], members: Sequence[int]) -> float:
        """Seconds of one by these members."""
        begin = time.time()
        ended = self._results(self._post(comms, tensors, members), members)
        self._check(ended, tensors, members)
        return max(one.at for one in ended.values()) - begin

    def _check(self, ended: dict[int, Ended], tensors: Sequence[Any], least: Sequence[int]) -> None:
        """All committed the same, and its value names its contributors."""
        for one in ended.values():
            if one.error is not None:
                raise RuntimeError(f"a survivor's operation failed: {one.error}")
        receipts = [one.receipt for one in ended.values()]
        facts = {(receipt.op_id, receipt.epoch, receipt.contributors, receipt.digest) for receipt in receipts}
        named = receipts[0].contributors
        total = np.float32(sum(10 ** int(name.removeprefix("m")) for name in named))
        right = all((tensors[i] == total).all() for i in ended)
        if len(facts) != 1 or not right or not {f"m{i}" for i in least} <= set(named):
            raise RuntimeError(f"survivors disagree, or the value is wrong: {facts}, right={right}")

    def _await_others(self, group: str, victim: str, seq: int) -> None:
        """Return when all but the victim are done with *seq*."""
        deadline = time.monotonic() + CALL_TIMEOUT
        while time.monotonic() < deadline:
            for found in self._cluster.status().groups:
                if found.name == group and all(x.done_upto >= seq for x in found.members if x.name != victim):
                    return
            time.sleep(0.05)
        raise RuntimeError(f"the others are not done with operation {seq}")

    def _noticed(self, group: str, victim: str, since: float) -> float:
        """When the master took the victim out, in seconds since 1970."""
        for event in self._cluster.status().events:
            if event.group == group and event.time >= since and victim in event.text and "lost" in event.text:
                return event.time
        raise RuntimeError(f"the master did not lose {victim}")


@app.default
def bench_recovery(
    *,
    kills: int = 5,
    peers: int = 4,
    delay: str = "40ms",
    rate: str = "500Mbit",
    loss: str = "0.1%",
    mib: int = 64,
    lanes: int = 8,
    phases: Annotated[tuple[str, ...], Parameter(name="--phase", negative=())] = (),
    as_json: Annotated[str, Parameter(name="--json")] = "",
) -> int:
    """Lose a member in each phase of an operation, print what it cost. Exit code 1 if a bar was missed.

    Args:
        kills: of each phase, each in a fresh group; the victims take turns.
        peers: daemons, each on a host of its own; the master is on another one, as far away.
        delay: one way.
        rate: of each host's uplink and downlink.
        loss: ratio of lost packets.
        mib: size of each member's tensor.
        lanes: connections of each link.
        phases: only those whose names contain one of these.
        as_json: also write all numbers to this file.
    """
    if reason := why_not():
        print(f"no WAN here: {reason}", file=sys.stderr)
        return 2
    begin = time.monotonic()
    print(machine(), flush=True)
    print(f"{peers} peers, {delay} one way, {rate} each, loss {loss}, {mib} MiB of float32", flush=True)
    chosen = [phase for phase in PHASES if not phases or any(part in phase.name for part in phases)]
    network = {"delay": parse(delay, SECONDS), "rate": parse(rate, BITS), "loss": parse(loss, RATIO)}
    results: list[Recovery] = []
    with Wan(peers, **network) as wan, Cluster(peers, lanes=lanes, network=wan) as cluster:
        bench = Bench(peers, cluster, mib * MIB)
        for turn in range(kills):
            for place, phase in enumerate(chosen):
                results.append(one := bench.lose_one(phase, (turn + place) % peers))
                print(
                    f"{phase.name}: noticed after {one.detection:.3f} s, mended in {one.mending:.3f} s, "
                    f"a clean operation {one.clean:.3f} s, the first {one.fresh:.3f} s, pace {one.pace / 1e6:.0f} MB/s",
                    flush=True,
                )
    print(f"\n{summary(results, chosen)}\n\n{time.monotonic() - begin:.0f} s")
    if as_json:
        Path(as_json).write_text(json.dumps([asdict(one) for one in results], indent=2))
    return 0 if all(bar.verdict == "reached" for bar in bars(results, chosen)) else 1


def summary(results: list[Recovery], phases: Sequence[Phase]) -> str:
    """The table of medians, and the bars."""
    rows = []
    for phase in phases:
        mine = [one for one in results if one.phase == phase.name]
        columns: list[Callable[[Recovery], float]] = [
            lambda one: one.detection,
            lambda one: one.mending,
            lambda one: one.clean,
            lambda one: one.extra,
        ]
        medians = [f"{statistics.median(column(one) for one in mine):.3f}" for column in columns]
        rows.append([phase.name, *medians, f"{max(one.extra for one in mine):.3f}", str(len(mine))])
    head = ["seconds, medians", "detection", "to the commit", "clean op", "beyond both", "worst", "kills"]
    fresh = statistics.median(one.fresh for one in results)
    return f"{table(head, rows)}\n\nfirst operation of a group: {fresh:.3f} s\n\n{bar_table(bars(results, phases))}"


def bars(results: list[Recovery], phases: Sequence[Phase]) -> list[Bar]:
    """One for each phase."""
    return [
        Bar(
            f"{phase.name}: s beyond detection and a clean op",
            statistics.median([one.extra for one in results if one.phase == phase.name] or [math.inf]),
            most=BAR,
        )
        for phase in phases
    ]


if __name__ == "__main__":
    sys.exit(app(result_action="return_value"))
