"""sync_state: a joiner with stale state catches up, next to one plain transfer and beside another group's calls."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

import wancoll
from tests.bench.report import Bar, table
from wancoll.chaos import Cluster

GIB, MIB = 1 << 30, 1 << 20
STATE = GIB
TENSORS = 40  # of the state: most of them no multiple of a stripe
OTHERS_BYTES = 16 * MIB
QUIET = 3.0  # seconds of all-reduce with nothing beside
TRANSFER, WARM = "one send and recv", "the same, warm memory"
SYNC, OVERWRITE = "sync_state", "sync_state that overwrites"
LEAST = 0.7


@dataclass
class Result:
    """Of a joiner and its holders.

    Attributes:
        holders: how many.
        seconds: of each round: what -> seconds at the joiner.
        beside: the same while another group reduces.
        rate: all-reduces per second of the other group: alone, and beside the syncs.
        wrong: rounds after which the joiner's state was not the holders'.
    """

    holders: int
    seconds: dict[str, list[float]] = field(default_factory=dict)
    beside: dict[str, list[float]] = field(default_factory=dict)
    rate: tuple[float, float] = (0.0, 0.0)
    wrong: int = 0

    def ratio(self, seconds: dict[str, list[float]], what: str, against: str) -> float:
        """Speed of a sync against that of a transfer: the median of the rounds."""
        return statistics.median(a / b for a, b in zip(seconds[against], seconds[what], strict=True))


def run(holders: int, rounds: int, nbytes: int = STATE) -> Result:
    """Measure with this many holders."""
    result = Result(holders)
    world = holders + 1
    with tempfile.TemporaryDirectory() as folder, Cluster(world, heartbeat_timeout=20.0) as cluster:
        result.seconds, _ = _round_trips(cluster, world, rounds, nbytes, result)
        stop = os.path.join(folder, "stop")
        others = [cluster.client(i, others_member, world, stop) for i in range(world)]
        for other in others:
            other.next()
        begin = time.monotonic()
        time.sleep(QUIET)
        quiet = (begin, time.monotonic())
        result.beside, spans = _round_trips(cluster, world, rounds, nbytes, result)
        Path(stop).touch()
        ends = others[0].result()
        for other in others:
            other.close()
        result.rate = (_rate(ends, [quiet]), _rate(ends, spans))
    return result


def _rate(ends: list[float], spans: list[tuple[float, float]]) -> float:
    done = sum(begin <= at < end for at in ends for begin, end in spans)
    return done / sum(end - begin for begin, end in spans)


def _round_trips(
    cluster: Cluster, world: int, rounds: int, nbytes: int, result: Result
) -> tuple[dict[str, list[float]], list[tuple[float, float]]]:
    members = [cluster.client(i, sync_member, world, i, rounds, nbytes) for i in range(world)]
    found = [member.result(600.0) for member in members]
    for member in members:
        member.close()
    seconds, spans, wrong = found[0]
    result.wrong += wrong
    return seconds, spans


def sync_member(socket: str, world: int, number: int, rounds: int, nbytes: int) -> Any:
    """One member; number 0 is the joiner. Returns seconds of each round, when its syncs were, how many were wrong."""
    os.setsid()  # the scheduler shares a core between sessions: every process gets its own
    with wancoll.connect("state", socket=socket, name=f"s{number}", start_world=world, timeout=60) as comm:
        plain = comm.zeros(nbytes, np.uint8)
        state = {f"tensor {i:02}": comm.empty(nbytes // TENSORS // 4, np.float32) for i in range(TENSORS)}
        seconds: dict[str, list[float]] = {TRANSFER: [], WARM: [], SYNC: [], OVERWRITE: []}
        spans, wrong = [], 0
        joiner, sender = comm.members.index("s0"), comm.members.index("s1")

        def transfer() -> None:
            if number == 0:
                comm.recv(plain, sender)
            elif number == 1:
                comm.send(plain, joiner)

        def timed(what: str, call: Callable[[], Any]) -> Any:
            comm.barrier()
            begin = time.monotonic()
            found = call()
            end = time.monotonic()
            seconds[what].append(end - begin)
            if what in (SYNC, OVERWRITE):
                spans.append((begin, end))
            return found

        for turn in range(rounds):
            for i, x in enumerate(state.values()):
                x.fill(i + turn if number else -1)
            give_back(comm)
            timed(TRANSFER, transfer)
            timed(WARM, transfer)
            give_back(comm)
            for what in (SYNC, OVERWRITE):
                strategy = "overwrite" if what == OVERWRITE and number == 0 else "majority"
                receipt = timed(what, partial(comm.sync_state, state, revision=turn + (number > 0), strategy=strategy))
                wrong += not all((x == i + turn).all() for i, x in enumerate(state.values()))
                assert receipt.bytes_moved == sum(x.nbytes for x in state.values())
                if number == 0:
                    for x in state.values():
                        x.fill(-1)
        return seconds, spans, wrong


def give_back(comm: Any) -> None:
    """Let the arena forget what it keeps warm: a joiner's first receipt finds no memory either."""
    arena = comm._connection.arena
    with arena._lock:
        arena._settle()
        arena._trim(0)


def others_member(socket: str, world: int, stop: str) -> Generator[str, None, list[float]]:
    """One member of the other group: reduces until the file *stop* is there. Returns when each operation was done.

    It yields once, when it has begun: what nobody reads would fill its pipe, and stop it.
    """
    os.setsid()
    ends: list[float] = []
    with wancoll.connect("others", socket=socket, start_world=world, timeout=60) as comm:
        x = comm.zeros(OTHERS_BYTES // 4, np.float32)
        while not os.path.exists(stop):
            comm.all_reduce(x, op="sum")
            if not ends:
                yield "begun"
            ends.append(time.monotonic())
    return ends


def tables(result: Result) -> str:
    """Speeds in GB/s, medians of the rounds."""
    head = [f"1 joiner, {result.holders} holders", "GB/s", "beside all-reduce"]
    rows = []
    for what in (TRANSFER, WARM, SYNC, OVERWRITE):
        both = (result.seconds[what], result.beside[what])
        rows.append([what, *(f"{STATE / statistics.median(each) / 1e9:.2f}" for each in both)])
    for what, against in product((SYNC, OVERWRITE), (TRANSFER, WARM)):
        both = [f"{result.ratio(each, what, against):.2f}" for each in (result.seconds, result.beside)]
        rows.append([f"{what} / {against}", *both])
    quiet, busy = result.rate
    other = (
        f"the other group's all-reduce of {OTHERS_BYTES >> 20} MiB: {quiet:.1f}/s alone, {busy:.1f}/s beside the sync"
    )
    return f"{table(head, rows)}\n{other} ({busy / quiet:.2f})"


def bars(result: Result) -> list[Bar]:
    """What is promised."""
    text = "of 1 GiB from {} holders, in speeds of a transfer to warm memory"
    return [
        Bar(f"{what} {text.format(result.holders)}", result.ratio(result.seconds, what, WARM), least=LEAST)
        for what in (SYNC, OVERWRITE)
    ]
