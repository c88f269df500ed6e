"""What must hold in a chaos run, checked on what clients, master and daemons said. Pure. Times are in seconds."""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from wancoll.chaos.core.faults import LOSE_JOURNALS, MASTER_SLOT, Fault
from wancoll.chaos.core.records import Called

LOST = frozenset({"Evicted", "MasterUnreachable", "OutcomeUnknown", "PeerDaemonLost"})  # the membership is over
LONGEST_GAP = 5.0  # seconds between two commits beside stated detection times
_SEQS_KEPT = 20_000
_SHOWN = 1.0  # seconds from which on a gap is worth a line
_AFTERMATH = 3.0  # seconds that what a fault has set off may take beside stated times
_FILES_OF_A_LANE = 2  # the engine's, and the one by which the daemon looks at it
_LEAK_SLACK = {"fds": 1, "tasks": 1, "threads": 0, "arenas": 0, "sessions": 0, "ops": 0}
_MEMORY_SLACK = 48 << 20  # bytes beside what the workload's tensors need


@dataclass(frozen=True, slots=True)
class Violation:
    """One thing that did not hold. *at* is on the machine's monotonic clock."""

    at: float
    rule: str
    who: str
    what: str
    expected: str = ""
    got: str = ""

    def __str__(self) -> str:
        expected = f"; expected {self.expected}" if self.expected else ""
        return f"{self.rule}: {self.who}: {self.what}{expected}" + (f"; got {self.got}" if self.got else "")


@dataclass(slots=True)
class Injected:
    """A fault, and when it was there."""

    fault: Fault  # as it was drawn, with the slots that were really hit
    armed: float  # when it was prepared: nothing can have come of it before
    began: float = 0.0  # when it was there
    ended: float = float("inf")  # when it was healed, or what was killed had been started again; inf: not yet
    hit: bool = False  # whether it found something to break
    phase: str = ""  # what its target was doing
    note: str = ""  # why it did not hit, for people


@dataclass(frozen=True, slots=True)
class Times:
    """Stated detection times of the cluster, and the deadline of a call."""

    heartbeat: float
    lane: float
    link: float
    rejoin: float
    deadline: float


# ---- agreement --------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Outcome:
    """What members said of one seq: one of these must be all."""

    first: int  # epochs in which they said so
    last: int
    said: dict[str, list[str]] = field(default_factory=dict)  # outcome -> who


class Agreement:
    """Members' records of the same operation must say the same; each member's records must have no holes.

    *small*: worlds may be below min_world: then calls may fail for that.
    """

    def __init__(self, small: bool) -> None:
        self._small = small
        self._outcomes: dict[int, _Outcome] = {}  # by seq, newest last
        self._last: dict[str, int] = {}  # member -> its last seq, 0: it has just joined
        # First and last epoch, where what was said of one seq in two differs: wrong unless the group was formed anew.
        self._twice: list[tuple[int, int, Violation]] = []

    def joined(self, member: str) -> None:
        """The member begins anew."""
        self._last[member] = 0

    def add(self, member: str, call: Called) -> list[Violation]:
        """Take in a record."""
        found: list[Violation] = []

        def wrong(rule: str, what: str, expected: str, got: str) -> None:
            found.append(Violation(call.ended, rule, member, f"{call.what}: {what}", expected, got))

        if call.wrong:
            wrong("value", "wrong bytes" + (f" after {call.error}" if call.error else ""), "the reference", call.wrong)
        if call.error == "TimeoutError":
            wrong("deadline", f"still pending after {call.ended - call.begun:.1f} s", "its end", call.text)
        elif call.error and call.error not in LOST and not self._may_fail(call):
            wrong("outcome", call.error, "a commit", call.text)
        last = self._last.get(member, 0)
        if call.error in LOST or call.error == "TimeoutError":
            return found
        seq = call.seq or (last + 1 if last else 0)
        if last and seq != last + 1:
            wrong("order", "an operation is missing", f"operation {last + 1}", f"operation {seq}")
        if seq:
            self._last[member] = seq
            # update_membership tells where this member is now. One that had not heard of the epoch before the master
            # died, and others had, comes to the next one.
            passed = call.kind == "update_membership" and not call.error
            committed = f"{', '.join(call.contributors)} in epoch {call.epoch}: {call.result}"
            found += self._compare(member, call, seq, "passed" if passed else call.error or committed)
        return found

    def _may_fail(self, call: Called) -> bool:
        if call.error == "OperationAborted":
            return call.may_abort
        return self._small and call.error in ("WorldTooSmall", "CollectiveMismatch")

    def _compare(self, member: str, call: Called, seq: int, outcome: str) -> list[Violation]:
        known = self._outcomes.get(seq)
        found = []
        if known is not None and not known.first <= call.epoch <= known.last and outcome not in known.said:
            first, last = min(known.last, call.epoch), max(known.first, call.epoch)
            others = "; ".join(f"{', '.join(who)}: {said}" for said, who in known.said.items())
            violation = Violation(call.ended, "agreement", member, f"{call.what}, operation {seq}", others, outcome)
            self._twice.append((first, last, violation))
            if known.first > call.epoch:
                return []
            known = None
        if known is None:
            known = self._outcomes[seq] = _Outcome(call.epoch, call.epoch)
            if len(self._outcomes) > _SEQS_KEPT:
                del self._outcomes[next(iter(self._outcomes))]
        known.first, known.last = min(known.first, call.epoch), max(known.last, call.epoch)
        who = known.said.setdefault(outcome, [])
        who.append(member)
        if len(known.said) > 1 and len(who) == 1:
            others = "; ".join(f"{', '.join(w)}: {said}" for said, w in known.said.items() if said != outcome)
            found.append(Violation(call.ended, "agreement", member, f"{call.what}, operation {seq}", others, outcome))
        return found

    def committed_twice(self, formed: Collection[int]) -> list[Violation]:
        """All of those but where the group was formed anew in between (*formed*: its first epochs)."""
        return [bad for first, last, bad in self._twice if not any(first < epoch <= last for epoch in formed)]


# ---- causes -----------------------------------------------------------------------------------------


def detection(injected: Injected, times: Times) -> float:
    """Seconds until the cluster is stated to have noticed, or until it is over."""
    fault = injected.fault
    lasts = injected.ended - injected.began
    match fault.kind:
        case "stop":
            return min(lasts, times.heartbeat)
        case "point" if fault.action == "pause":
            return min(lasts, times.heartbeat)
        case "cut":
            return min(lasts, times.link) + 1.0  # the longest pause between dials
        case "oneway" | "relay_kill" | "relay_stop":
            return min(lasts, times.lane + times.link) + 1.0
        case "slow" | "master_kill" | "master_pause" | "master_point" | "master_full_disk" | "master_lost_journal":
            return lasts
        case _:
            return 0.0


def blind(faults: Sequence[Injected], times: Times) -> list[tuple[float, float]]:
    """Intervals in which nobody is promised a commit: from each fault until it is noticed or over.

    What happens while the master is away is noticed when it is back: by who does not report.
    """
    intervals = []
    masters = [one for one in faults if one.fault.slot == MASTER_SLOT and one.fault.kind.startswith("master")]
    for one in faults:
        if not one.hit:
            continue
        end = one.began + detection(one, times)
        if one.fault.touches:
            for master in masters:
                if master.hit and one.began - times.heartbeat <= master.ended and master.began <= end:
                    end = max(end, master.ended + max(times.rejoin, times.heartbeat))
        intervals.append((one.began, end))
    return intervals


def unexplained_loss(slot: int, call: Called, faults: Iterable[Injected], times: Times, slack: float) -> str:
    """Why nothing that was injected explains that member *slot* was evicted; "" if something does.

    A master that dies explains nothing: nobody is to be evicted for its absence. But where its journal is lost, what
    members finished is unknown if one of them is missing. A machine explains it that let processes wait meanwhile for
    as long as it takes to give up a link (*slack*, seconds).
    """
    if slack >= times.link:
        return ""
    for one in faults:
        doubted = one.fault.kind in LOSE_JOURNALS and call.error == "OutcomeUnknown"
        if one.hit and (doubted or one.fault.of_relay or slot in one.fault.touches) and one.armed <= call.ended:
            until = min(one.ended, call.ended) + times.heartbeat + times.link + times.lane + times.rejoin
            if call.begun - slack <= until + _AFTERMATH:
                return ""
    return f"nothing was injected at peer-{slot} lately"


# ---- gaps -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Gap:
    """A time between two commits, and how much of it is excused."""

    at: float  # its end
    seconds: float
    detection: float  # seconds of it that are stated detection times
    stalled: float  # seconds for which a process had to wait for a processor

    @property
    def excess(self) -> float:
        """Seconds that nothing excuses."""
        return self.seconds - self.detection - self.stalled


def gaps(
    commits: Sequence[float], excused: Iterable[tuple[float, float]], stalls: Sequence[tuple[float, float]]
) -> list[Gap]:
    """The times between *commits* (when a member first knew of each, in order) of a second and more, longest first.

    *excused* intervals may overlap. *stalls* (when, seconds) are the machine's: a process of it was late at waking up.
    """
    found = []
    merged = _merged(excused)
    for before, after in itertools.pairwise(commits):
        if after - before < _SHOWN:
            continue
        told = sum(max(0.0, min(after, end) - max(before, begin)) for begin, end in merged)
        late = sum(seconds for at, seconds in stalls if before <= at <= after)
        found.append(Gap(after, after - before, told, late))
    return sorted(found, key=lambda gap: -gap.seconds)


def too_long(found: Iterable[Gap]) -> list[Violation]:
    """Gaps with more than LONGEST_GAP that nothing excuses."""
    violations = []
    for gap in found:
        if gap.excess > LONGEST_GAP:
            got = f"{gap.seconds:.1f} s: {gap.detection:.1f} s of detection times, {gap.stalled:.1f} s of stalls"
            violations.append(Violation(gap.at, "gap", "the group", "no commit", f"one within {LONGEST_GAP:g} s", got))
    return violations


def _merged(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    merged: list[tuple[float, float]] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged


# ---- the event log ----------------------------------------------------------------------------------


def tells_of_loss(kind: str, text: str) -> bool:
    """Whether an event of the master's log is about somebody who is gone, not about who came or stayed."""
    return kind not in ("joined", "daemon", "plan", "resumed") and not text.startswith(("admitted", "the group has"))


def culprits(faults: Iterable[Injected], log: Sequence[tuple[float, str, str]], times: Times) -> list[Violation]:
    """Losses of hit members that the master's event *log* (time on the faults' clock, kind, text) does not name.

    Who was no member when it was hit, of the newest epoch that the log knows, has lost nothing that it had to name.
    """
    found = []
    for one in faults:
        fault = one.fault
        loses = fault.kind in ("kill", "client_kill") or (fault.kind == "point" and fault.action == "kill")
        stopped = fault.kind == "stop" and one.ended - one.began > times.heartbeat + _AFTERMATH
        if not one.hit or not (loses or stopped):
            continue
        named = re.compile(rf"\b(m|peer-){fault.slot}\b")
        since, until = one.armed - 0.1, one.ended + times.heartbeat + times.rejoin + times.link
        events = [(at, text) for at, kind, text in log if since <= at <= until and tells_of_loss(kind, text)]
        if not any(named.search(text) for _, text in events) and _was_member(fault.slot, log, since, one.began):
            got = f"{sum(one.began <= at for at, _ in events)} other events in that time"
            what, expected = f"{fault} is not in the event log", f"an event with m{fault.slot} or peer-{fault.slot}"
            found.append(Violation(one.began, "event log", "the master", what, expected, got))
    return found


def _was_member(slot: int, log: Sequence[tuple[float, str, str]], since: float, until: float) -> bool:
    """Whether the member of *slot* was one at some time in between, as far as the log says; true if it says nothing."""
    name, gone = re.compile(rf"\bm{slot}\b"), re.compile(rf"\blost .*\bm{slot}\b")
    known, was = True, False
    for at, kind, text in log:
        if at > since:
            was |= known
        if at > until:
            return was
        if kind in ("epoch", "resumed"):
            known = name.search(re.split(" members?: " if kind == "epoch" else " with ", text)[-1]) is not None
        elif gone.search(text):
            known = False
    return was or known


# ---- leaks ------------------------------------------------------------------------------------------


def leaks(
    before: Mapping[str, Mapping[str, int]], after: Mapping[str, Mapping[str, int]], largest: int, at: float
) -> list[Violation]:
    """What processes hold after the run and did not before it, both while nothing was under way.

    Each process has what it held: wancoll.resources, and the daemon's own counts. One that is not in *before* is
    compared with the one of its sort that held most. *largest*: bytes of the workload's largest tensor.
    """
    found = []
    for who, now in after.items():
        sort = who.rstrip("0123456789")
        like = [held for name, held in before.items() if name == who or name.rstrip("0123456789") == sort]
        for what, slack in _LEAK_SLACK.items():
            if what in now:
                most = max((_own(held, what) for held in like), default=0) + slack
                if _own(now, what) > most:
                    expected = f"at most {most}"
                    found.append(Violation(at, "leak", who, what, expected, f"{_own(now, what)} ({dict(now)})"))
        most = max((held.get("memory", 0) for held in like), default=0) + _MEMORY_SLACK + 8 * largest
        if now.get("memory", 0) > most:
            found.append(Violation(at, "leak", who, "memory", f"at most {most} bytes", f"{now['memory']} bytes"))
    return found


def _own(held: Mapping[str, int], what: str) -> int:
    """A count without what open links and connections explain."""
    value = held.get(what, 0)
    if what == "fds":
        lanes = _FILES_OF_A_LANE * held.get("lanes", 0)
        return value - lanes - held.get("connections", 0) - held.get("handshakes", 0)
    if what == "tasks":
        return value - held.get("raising", 0) - 2 * (held.get("connections", 0) + held.get("handshakes", 0))
    return value
