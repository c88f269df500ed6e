"""One chaos run: a cluster with proxies and clients, a quiet time, the faults, the healing, and what was found."""

from __future__ import annotations

import contextlib
import os
import random
import sqlite3
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from wancoll import resources
from wancoll.chaos.clients import Client, Clients
from wancoll.chaos.core import faults, invariants
from wancoll.chaos.core.chaos_report import Commit, Findings, goodput
from wancoll.chaos.core.invariants import LOST, Agreement, Injected, Times, Violation
from wancoll.chaos.core.records import Called, Held, Joined, NotJoined, Record
from wancoll.chaos.inject import Injector
from wancoll.chaos.member import LAST, Settings
from wancoll.chaos.watch import StallWatch, StatusWatch
from wancoll.errors import WancollError
from wancoll.limits import DEFAULT, counted
from wancoll.testing import Cluster, Proxies
from wancoll.testing.proxy import proxied_cluster
from wancoll.units import format_rate

QUIET, HOLD, FAULTS, HOLD_AGAIN = range(LAST)
_GROUP = "chaos"
_TICK = 0.05  # seconds
_SAY_EVERY = 10.0  # seconds until a line says how far it is
_WINDOW = 3.0  # seconds of the goodput that it names
_SETTLE = 12.0  # seconds that counts of resources may take to become what they were
_AFTER = 20  # commits that must follow the last fault's end

TIMES = Times(heartbeat=3.0, lane=4.0, link=3.0, rejoin=4.0, deadline=45.0)


@dataclass(frozen=True, slots=True)
class ChaosOptions:
    """The options of a run; see `wancoll chaos --help`."""

    shape: faults.Shape
    seed: int
    largest: int
    min_world: int
    quiet: float = 4.0
    times: Times = TIMES
    command: str = ""
    keep_logs: str = ""
    voters: int = DEFAULT.voters
    secure: bool = False
    spoil: bool = False


class ChaosRun:
    """One chaos run; *say* is given lines about it. Made anew for each; do() is called once, in the main thread."""

    def __init__(self, options: ChaosOptions, say: Callable[[str], None]) -> None:
        self.options, self._say_line = options, say
        self._began = self._said_at = time.monotonic()
        self.peers = options.shape.peers
        self.faults = faults.draw(random.Random(options.seed).random, options.shape)
        self.injected: list[Injected] = []
        self.violations: list[Violation] = []
        self.commits: list[Commit] = []
        self.calls: Counter[str] = Counter()
        self.lives: list[tuple[str, float, float]] = []
        self.started = float("inf")
        self.status: StatusWatch
        self._injector: Injector | None = None
        self._agreement = Agreement(options.min_world > 1)
        self._lost: list[tuple[int, Called]] = []
        self._newest = (0, 0)  # epoch and seq of the newest commit
        self._life_began: dict[int, float] = {}
        self._members: set[int] = set()  # slots whose client has a communicator
        self._held: set[int] = set()  # slots whose client stands still
        self._resources: dict[str, dict[str, dict[str, int]]] = {}
        self._log: list[tuple[float, int, str, str]] = []  # the master's events
        self._gaps: list[invariants.Gap] = []
        self._whole = 0.0  # when all members were back
        self._clock = time.time() - time.monotonic()

    def do(self) -> Findings:
        """Run it all. Raises WancollError: the cluster did not even start."""
        options = self.options
        with contextlib.ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="wancoll-chaos-"))
            self._phase_file = os.path.join(folder, "phase")
            self._go(QUIET)
            self._cluster, self._proxies = stack.enter_context(self._start_cluster())
            self._start_relays()
            settings = Settings(
                _GROUP, options.seed, self.peers + faults.STORM, options.largest, self.peers, options.min_world,
                options.times.deadline, self._phase_file, options.spoil,
            )  # fmt: skip
            self._clients = Clients(self._cluster, settings)
            self.status = stack.enter_context(StatusWatch(self._cluster, self.peers))
            stalls = stack.enter_context(StallWatch(self._pids))
            quiet = self._be_quiet()
            self._take_stock("before", HOLD)
            self._break()
            stopped = time.monotonic()
            self._come_back()
            self._take_stock("after", HOLD_AGAIN)
            self._go(LAST)
            self._until(lambda: not self._clients.alive(), options.times.deadline, "the clients end")
            if not (self.status.alive and stalls.alive and self._proxies.alive):
                what = "a thread that watches the run has died, or the proxies have"
                self._violated("tool", "wancoll chaos", what, got="see above")
            self._judge(stalls.stalls)
            if self.violations or options.keep_logs:
                self._cluster.save_logs(options.keep_logs or f"wancoll-chaos-{options.seed}-logs")
        return Findings(
            options.command, self.started, stopped, quiet, self.commits, self.injected,
            sorted(self.violations, key=lambda one: one.at), self.calls, self.lives, self._resources, self._log,
            self._gaps, sum(seconds for _, seconds in stalls.stalls), options.secure,
        )  # fmt: skip

    # ---- phases --------------------------------------------------------------------------------------

    def _start_cluster(self) -> AbstractContextManager[tuple[Cluster, Proxies]]:
        times, lanes = self.options.times, self.options.shape.lanes
        return proxied_cluster(
            self.peers,
            fork=True,
            secure=self.options.secure,
            lanes=lanes,
            heartbeat_timeout=times.heartbeat,
            master_args=[f"--rejoin-grace={times.rejoin}", f"--voters={self.options.voters}"],
            peer_args=[
                f"--max-lanes={lanes}",
                f"--lane-timeout={times.lane}",
                f"--link-timeout={times.link}",
                f"--connect-timeout={times.link}",
                "--master-grace=20",
            ],
        )

    def _start_relays(self) -> None:
        """Beside the proxies; then peers 0 and 1, 2 and 3, ... have no other way to each other."""
        relays = self.options.shape.relays
        for k in range(relays):
            self._cluster.add_peer(
                "--listen=127.0.0.1:0", "--advertise=127.0.0.1", "--relay=10Gbit/s", name=f"relay-{k}"
            )
        for i in range(0, self.peers - 1 if relays else 0, 2):
            for ends in ((i, i + 1), (i + 1, i)):
                self._proxies.add("refuse", *ends)

    def _be_quiet(self) -> tuple[float, float]:
        """Start the clients, and let them work in peace for a while; returns from when to when."""
        for slot in range(self.peers):
            self._clients.start(slot, slot)
        everyone = set(range(self.peers))
        if not self._until(lambda: self._members >= everyone and bool(self.commits), 60.0, "all clients take part"):
            raise WancollError("the group did not start", who="wancoll chaos", got=self._cluster.master_logs(20))
        begin = time.monotonic()
        self._run_for(self.options.quiet)
        return begin, time.monotonic()

    def _break(self) -> None:
        """Inject the faults, each at its time."""
        self._go(FAULTS)
        stopping = threading.Event()
        self._injector = Injector(
            self._cluster, self._proxies, self._clients, self.status.right_of, stopping, self.peers,
            self.options.shape.keep,
        )  # fmt: skip
        self.started = time.monotonic()
        under_way: list[Future[None]] = []
        with ThreadPoolExecutor(max_workers=16, thread_name_prefix="fault") as pool:
            for fault in self.faults:
                self._run_until(self.started + fault.at)
                one = Injected(fault, time.monotonic())
                self.injected.append(one)
                self._say(str(fault))
                under_way.append(pool.submit(self._injector.carry_out, one))
            self._run_until(self.started + self.options.shape.seconds)
            stopping.set()
            self._until(lambda: all(each.done() for each in under_way), 60.0, "the faults are healed")
            repaired = pool.submit(self._injector.repair)
            self._until(repaired.done, 60.0, "what is left is repaired")
        under_way.append(repaired)
        for each in under_way:
            if bad := each.exception():
                self._violated("tool", "wancoll chaos", f"a fault could not be carried out: {bad!r}")

    def _come_back(self) -> None:
        """All members have to be in one epoch again, and to commit."""
        everyone = {f"m{slot}" for slot in range(self.peers)}
        times = self.options.times
        limit = times.deadline + times.heartbeat + times.lane + times.link + times.rejoin
        if not self._until(lambda: everyone <= set(self.status.members), limit, "all members are back"):
            missing = everyone - set(self.status.members)
            group = self.status.group
            waiting = group.waiting_for if group is not None else ""
            got = f"not back: {', '.join(sorted(missing))}; the master waits for: {waiting or 'nothing'}"
            self._violated("comeback", "the group", "not whole after all was healed", f"within {limit:.0f} s", got)
        before = len(self.commits)
        self._whole = time.monotonic()
        if not self._until(lambda: len(self.commits) > before + _AFTER, times.deadline, "commits go on"):
            self._violated("next op", "the group", "no commits after all was healed", "the next ones work")

    def _take_stock(self, when: str, phase: int) -> None:
        """Let the clients stand still and count what every process holds; until it is right, for a while."""
        self._held.clear()
        self._go(phase)
        everyone = set(range(self.peers))
        held = self._until(lambda: everyone <= self._held, self.options.times.deadline, "all clients stand still")
        if not held:
            missing = ", ".join(f"m{slot}" for slot in sorted(everyone - self._held))
            self._violated("deadline", missing, "did not come to the hold", "all members there")
        deadline = time.monotonic() + _SETTLE
        while True:
            self._resources[when] = self._count()
            if when == "before" or not self._leaks() or time.monotonic() > deadline:
                return
            self._run_for(0.5)

    def _count(self) -> dict[str, dict[str, int]]:
        found: dict[str, dict[str, int]] = {}
        for i in range(self.peers):
            with contextlib.suppress(WancollError):
                found[f"peer-{i}"] = self._cluster.peer_status(i)["resources"]
        with contextlib.suppress(WancollError):
            found["master"] = self._cluster.status().resources
        for client in self._clients.alive():
            with contextlib.suppress(OSError):
                found[client.name] = resources.of_process(client.process.pid)
        return found

    def _leaks(self) -> list[Violation]:
        before, after = self._resources["before"], self._resources["after"]
        return invariants.leaks(before, after, self.options.largest, time.monotonic())

    # ---- what is heard -------------------------------------------------------------------------------

    def _go(self, phase: int) -> None:
        """Tell the clients the phase; they agree on it when they meet."""
        new = f"{self._phase_file}.new"
        with open(new, "w", encoding="ascii") as file:
            file.write(str(phase))
        os.replace(new, self._phase_file)

    def _run_for(self, seconds: float) -> None:
        self._run_until(time.monotonic() + seconds)

    def _run_until(self, when: float) -> None:
        self._until(lambda: time.monotonic() >= when, float("inf"), "")

    def _until(self, condition: Callable[[], bool], timeout: float, what: str) -> bool:
        """Listen to the clients until the condition holds; False if it does not in time."""
        deadline = time.monotonic() + timeout
        if what:
            self._say(f"waiting until {what}")
        while not condition():
            if time.monotonic() > deadline:
                return False
            for client, record in self._clients.hear(_TICK):
                self._hear(client, record)
            if time.monotonic() >= self._said_at + _SAY_EVERY:
                self._say(self._summary())
        return True

    def _say(self, text: str) -> None:
        self._said_at = time.monotonic()
        self._say_line(f"{self._said_at - self._began:7.2f} s  {text}")

    def _summary(self) -> str:
        now, group = time.monotonic(), self.status.group
        passed = now - self.started
        where = f"{passed:.0f} of {self.options.shape.seconds:.0f} s" if passed > 0 else "without faults"
        rate = format_rate(goodput(self.commits[-5000:], now - _WINDOW, now), 3)
        return (
            f"{where}, epoch {group.epoch if group is not None else 0}, {counted(len(self.status.members), 'member')}, "
            f"{counted(len(self.commits), 'operation')}, {rate}, "
            f"{counted(len(self.injected), 'fault')}, {counted(len(self.violations), 'violation')}"
        )

    def _hear(self, client: Client, record: Record | BaseException | None) -> None:
        match record:
            case Called():
                self._called(client, record)
            case Joined():
                self._members.add(client.slot)
                self._is_back(client.slot)
                self._life_began[client.slot] = record.at
                self._agreement.joined(client.name)
            case Held():
                self._held.add(client.slot)
            case NotJoined():
                self.calls[f"connect: {record.error}"] += 1
            case None:
                self._left(client, time.monotonic())
            case BaseException():
                self._left(client, time.monotonic())
                self._violated("client", client.name, "ended", "a client that runs", repr(record))
                if not client.killed:
                    self._clients.start(client.slot, client.slot)

    def _called(self, client: Client, call: Called) -> None:
        self.calls[call.error or "committed"] += 1
        for found in self._agreement.add(client.name, call):
            self._violation(found)
        if call.error in LOST:
            self._lost.append((client.slot, call))
        if call.error in LOST or call.error == "TimeoutError":
            self._left(client, call.ended)
        elif not call.error:
            self._is_back(client.slot)
        if not call.error and (call.epoch, call.seq) > self._newest:
            self._newest = call.epoch, call.seq
            self.commits.append(Commit(call.ended, call.epoch, call.nbytes))

    def _is_back(self, slot: int) -> None:
        if self._injector is not None:
            self._injector.back(slot)

    def _left(self, client: Client, at: float) -> None:
        self._members.discard(client.slot)
        began = self._life_began.pop(client.slot, None)
        if began is not None:
            self.lives.append((client.name, began, at))

    def _violated(self, rule: str, who: str, what: str, expected: str = "", got: str = "") -> None:
        self._violation(Violation(time.monotonic(), rule, who, what, expected, got))

    def _violation(self, violation: Violation) -> None:
        self.violations.append(violation)
        self._say(f"VIOLATION {violation}")

    # ---- the verdict ---------------------------------------------------------------------------------

    def _judge(self, stalls: list[tuple[float, float]]) -> None:
        times = self.options.times
        events = self._log = self._events()
        formed = {epoch for _, epoch, _, text in events if "the group has formed" in text}
        found = self._agreement.committed_twice(formed)
        for slot, call in self._lost:
            slack = sum(seconds for at, seconds in stalls if call.begun - times.heartbeat <= at <= call.ended)
            reason = invariants.unexplained_loss(slot, call, self.injected, times, slack)
            if reason and slot < self.peers:
                got = f"{call.error}: {call.text}"
                found.append(Violation(call.ended, "loss", f"m{slot}", f"{call.what}: {reason}", "no loss", got))
        within = sorted(one.at for one in self.commits if self.started <= one.at <= self._whole)
        self._gaps = invariants.gaps(within, invariants.blind(self.injected, times), stalls)
        found += invariants.too_long(self._gaps)
        found += invariants.culprits(self.injected, [(at, kind, text) for at, _, kind, text in events], times)
        if "after" in self._resources:
            found += self._leaks()
        for violation in found:
            self._violation(violation)

    def _events(self) -> list[tuple[float, int, str, str]]:
        """The master's event log: (time on the monotonic clock, epoch, kind, text)."""
        rows = []
        for path in Path(self._cluster.journal).parent.glob("journal*.sqlite"):  # those that were lost, too
            with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as journal:
                rows += journal.execute("select time, epoch, kind, text from events order by time, id").fetchall()
        rows.sort(key=lambda row: float(row[0]))
        return [(at - self._clock, epoch, kind, text) for at, epoch, kind, text in rows]

    def _pids(self) -> list[int]:
        pids = [*(client.process.pid for client in self._clients.alive()), self._proxies.pid]
        pids += [self._cluster.pid(i) for i in range(len(self._cluster)) if self._cluster.running(i)]
        with contextlib.suppress(WancollError):
            pids.append(self._cluster.master_pid)
        return pids
