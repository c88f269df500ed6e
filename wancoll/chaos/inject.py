"""Carries out the faults of a chaos run on its cluster, each in a thread of its own, and heals what they broke."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

from wancoll.chaos.clients import Clients
from wancoll.chaos.core.faults import STORM, Fault
from wancoll.chaos.core.invariants import Injected
from wancoll.errors import ConfigError, WancollError
from wancoll.process import is_stopped
from wancoll.testing import Cluster, Proxies

_ARMED = 5.0  # seconds that a failpoint or a lane's fault has to find something
_MASTER_UP = 3.0  # seconds between two faults of the master
_FRESH = 3.0  # seconds that a daemon stays which comes to a master without its journal
_POLL = 0.005
_PHASES = {  # words of what a member's daemon says that it waits for
    "links": "links",
    "moving": "moving data",
    "finished": "finished, not committed",
    "given up": "given up",
}


class Injector:
    """Carry out faults, each in a thread, and heal what they broke; at once when *stopping* is set, since the run ends.

    *neighbour* gives the right neighbour in the ring of a slot's member, -1: not known. *peers* members are to come
    back, and *keep* are to be whole at any time.
    """

    twins: frozenset[int] = frozenset()  # daemons that only were somebody's twin

    def __init__(
        self,
        cluster: Cluster,
        proxies: Proxies,
        crew: Clients,
        neighbour: Callable[[int], int],
        stopping: threading.Event,
        peers: int,
        keep: int,
    ) -> None:
        self._cluster, self._proxies, self._crew = cluster, proxies, crew
        self._neighbour, self._stopping = neighbour, stopping
        self._peers, self._keep = peers, keep
        self._master = threading.Lock()  # one fault of the master at a time
        self._master_since = 0.0  # it runs, or the last fault's end
        self._changed = threading.Condition()
        self._busy: set[int] = set()  # slots at which something is broken
        self._away: set[int] = set()  # slots whose member has not been heard of since
        self._stormed: set[int] = set()  # slots that join storms have in use: two may be under way

    def carry_out(self, one: Injected) -> None:
        """Inject the fault, wait, heal it. Returns when it is over; *one* says what came of it."""
        fault = one.fault
        lane_fault = fault.kind in ("oneway", "slow", "delay", "flip", "truncate", "cut")
        if not self._take(fault.touches):
            one.note = "too few members were back"
            one.began = one.ended = time.monotonic()
            return
        try:
            beside = self._neighbour(fault.slot) if lane_fault else -1
            if beside != -1 and beside not in self._busy | self._away:
                self._swap(fault.other, beside)
                fault = one.fault = dataclasses.replace(fault, other=beside)  # a pair that has lanes
            one.began = time.monotonic()
            if fault.touches:
                one.phase = self._phase(fault.slot)
            getattr(self, f"_{'lanes' if lane_fault and fault.kind != 'cut' else fault.kind}")(one, fault)
        except (ConfigError, OSError) as bad:
            one.note = str(bad)[:300]
        finally:
            one.ended = time.monotonic()
            with self._changed:
                self._busy -= fault.touches
                self._changed.notify_all()

    def back(self, slot: int) -> None:
        """The member of *slot* takes part, as far as anybody knows."""
        if slot in self._away and slot not in self._busy:
            with self._changed:
                self._away.discard(slot)
                self._changed.notify_all()

    def _take(self, slots: frozenset[int]) -> bool:
        """Break only what is whole, and only while enough others are; waits for that a while."""
        deadline = time.monotonic() + _ARMED
        with self._changed:
            while slots & (broken := self._busy | self._away) or (
                slots and self._peers - len(broken | slots) < self._keep
            ):
                left = deadline - time.monotonic()
                if left <= 0 or self._stopping.is_set():
                    return False
                self._changed.wait(left)
            self._busy |= slots
            self._away |= slots
        return True

    def _swap(self, other: int, beside: int) -> None:
        with self._changed:
            for each in (self._busy, self._away):
                each.discard(other)
                each.add(beside)

    def repair(self) -> None:
        """Start and continue whatever is down."""
        for i in range(len(self._cluster)):
            if i in self.twins:
                continue
            if not self._cluster.running(i):
                self._cluster.restart_peer(i)
            with contextlib.suppress(WancollError):
                self._cluster.resume(i)
        with contextlib.suppress(WancollError):
            self._cluster.resume_master()
        if not self._cluster.master_running():  # one that does not start is this tool's failure, not the product's
            self._cluster.start_master()

    # ---- members -------------------------------------------------------------------------------------

    def _kill(self, one: Injected, fault: Fault) -> None:
        self._for_a_while(one, lambda: self._cluster.kill(fault.slot), lambda: self._cluster.restart_peer(fault.slot))

    def _client_kill(self, one: Injected, fault: Fault) -> None:
        slot = fault.slot
        self._for_a_while(one, lambda: self._crew.kill(slot), lambda: self._crew.start(slot, slot))

    def _stop(self, one: Injected, fault: Fault) -> None:
        self._for_a_while(one, lambda: self._cluster.pause(fault.slot), lambda: self._cluster.resume(fault.slot))

    def _relay_kill(self, one: Injected, fault: Fault) -> None:
        relay = self._peers + fault.slot  # they are started after the peers
        self._for_a_while(one, lambda: self._cluster.kill(relay), lambda: self._cluster.restart_peer(relay))

    def _relay_stop(self, one: Injected, fault: Fault) -> None:
        relay = self._peers + fault.slot
        self._for_a_while(one, lambda: self._cluster.pause(relay), lambda: self._cluster.resume(relay))

    def _point(self, one: Injected, fault: Fault) -> None:
        """Armed until it is hit; then as kill and stop."""
        slot, pid = fault.slot, self._cluster.pid(fault.slot)
        arm = partial(self._cluster.failpoint, slot, fault.point)
        if not self._is_hit(one, arm, lambda: is_stopped(pid) or not self._cluster.running(slot)):
            return
        if fault.action == "pause":
            self._cluster.resume(slot)
        else:
            self._cluster.restart_peer(slot)

    def _twin(self, one: Injected, fault: Fault) -> None:
        one.hit, one.began = True, time.monotonic()
        at = "127.0.0.1"
        twin = self._cluster.add_twin(fault.slot, f"--listen={at}:0", f"--advertise={at}")
        self.twins |= {twin}
        self._wait(fault.seconds)
        self._cluster.kill(twin)

    def _unused(self, most: int) -> list[int]:
        """Slots of extra clients, taken."""
        with self._changed:
            slots = [slot for slot in range(self._peers, self._peers + STORM) if slot not in self._stormed][:most]
            self._stormed |= set(slots)
        return slots

    def _join_storm(self, one: Injected, fault: Fault) -> None:
        free = [i for i in range(self._peers) if i not in self._busy]
        slots = self._unused(min(int(fault.amount), len(free)))
        if not slots:
            one.note = "another join storm was under way"
            return
        one.hit, one.began, one.phase = True, time.monotonic(), "joining"
        for k, slot in enumerate(slots):
            self._crew.start(slot, free[k])
        self._wait(fault.seconds)
        for slot in slots:
            self._crew.kill(slot)
        with self._changed:
            self._stormed -= set(slots)

    # ---- links ---------------------------------------------------------------------------------------

    def _cut(self, one: Injected, fault: Fault) -> None:
        one.hit, one.began = True, time.monotonic()
        self._cluster.cut(fault.slot, fault.other)
        self._wait(fault.seconds)
        for i, j in ((fault.slot, fault.other), (fault.other, fault.slot)):
            with contextlib.suppress(ConfigError):  # a daemon that was started anew is not cut off
                self._cluster.heal(i, j)

    def _lanes(self, one: Injected, fault: Fault) -> None:
        rule = self._proxies.add(fault.kind, fault.slot, fault.other, fault.lane, fault.amount)
        try:
            one.hit = self._until(lambda: self._proxies.fired(rule, _POLL))
            if not one.hit:
                one.note = "there was nothing on these lanes"
                return
            one.began = max(one.began, time.monotonic() - 0.1)
            self._wait(fault.seconds)
        finally:
            self._proxies.clear(rule)

    # ---- the master ----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _only_fault(self) -> Iterator[None]:
        """The master is hit when it has been up for a while."""
        deadline = time.monotonic() + _ARMED
        if not self._master.acquire(timeout=_ARMED):
            raise ConfigError("the fault before it lasts too long")
        try:
            self._wait(min(deadline, self._master_since + _MASTER_UP) - time.monotonic())
            yield
        finally:
            self._master_since = time.monotonic()
            self._master.release()

    def _master_kill(self, one: Injected, fault: Fault) -> None:
        with self._only_fault():
            one.phase = "any"
            self._for_a_while(one, self._cluster.kill_master, self._cluster.start_master)

    def _master_pause(self, one: Injected, fault: Fault) -> None:
        with self._only_fault():
            one.phase = "any"
            self._for_a_while(one, self._cluster.pause_master, self._cluster.resume_master)

    def _master_point(self, one: Injected, fault: Fault) -> None:
        with self._only_fault():
            if self._is_hit(one, partial(self._cluster.master_failpoint, fault.point), self._no_master):
                self._cluster.start_master()

    def _master_full_disk(self, one: Injected, fault: Fault) -> None:
        with self._only_fault():
            self._cluster.master_failpoint(fault.point, "fail")
            one.hit, one.began, one.phase = True, time.monotonic(), fault.point
            self._wait(fault.seconds)
            self._cluster.kill_master()
            self._cluster.start_master()

    def _master_lost_journal(self, one: Injected, fault: Fault) -> None:
        with self._only_fault():
            one.hit, one.began, one.phase = True, time.monotonic(), "any"
            self._cluster.kill_master()
            self._wait(fault.seconds)
            self._cluster.start_master(lose_journal=True)
            fresh = self._cluster.add_peer("--listen=127.0.0.1:0", "--advertise=127.0.0.1")
            self.twins |= {fresh}
            slots = self._unused(1)
            for slot in slots:
                self._crew.start(slot, fresh)
            self._wait(_FRESH)
            for slot in slots:
                self._crew.kill(slot)
            self._stormed -= set(slots)
            self._cluster.kill(fresh)

    def _no_master(self) -> bool:
        return not self._cluster.master_running()

    # ---- inside --------------------------------------------------------------------------------------

    def _is_hit(self, one: Injected, arm: Callable[[str], None], down: Callable[[], bool]) -> bool:
        """Arm the fault's failpoint until a process is down; then wait. False: nothing came there."""
        fault = one.fault
        arm(fault.action)
        if not self._until(down):
            with contextlib.suppress(ConfigError):
                arm("clear")
        one.hit = down()  # perhaps at the last moment
        if one.hit:
            one.began, one.phase = time.monotonic(), fault.point
            self._wait(fault.seconds)
        else:
            one.note = f"{fault.point} was not reached"
        return one.hit

    def _for_a_while(self, one: Injected, breaks: Callable[[], object], heals: Callable[[], object]) -> None:
        one.hit, one.began = True, time.monotonic()
        breaks()
        self._wait(one.fault.seconds)
        heals()

    def _wait(self, seconds: float) -> None:
        self._stopping.wait(max(0.0, seconds))

    def _until(self, condition: Callable[[], bool]) -> bool:
        deadline = time.monotonic() + _ARMED
        while not (met := condition()) and time.monotonic() < deadline and not self._stopping.is_set():
            time.sleep(_POLL)
        return met

    def _phase(self, slot: int) -> str:
        """What the member is doing."""
        try:
            members = self._cluster.peer_status(slot)["members"]
        except ConfigError:
            return "unknown"
        for member in members:
            if member["name"] == f"m{slot}":
                waits = str(member["waiting_for"])
                return next((phase for word, phase in _PHASES.items() if word in waits), "between calls")
        return "not a member"
