"""Which faults a chaos run injects, and when: drawn from a seed. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

MASTER_SLOT = -1
STORM = 3  # extra clients of a join storm, at most
_RETURN = 3.0  # seconds that a member is given to be back before it is hit again
_TWICE = 0.12  # share of faults that come with another one at the same moment

# kind -> (weight, what it hits)
KINDS: dict[str, tuple[float, str]] = {
    "kill": (3, "member"),  # a daemon is killed
    "client_kill": (2, "member"),  # a training process is killed
    "stop": (2, "member"),  # a daemon is stopped, and goes on later
    "point": (4, "member"),  # a daemon is killed or stopped at a named place of its code
    "twin": (0.5, "member"),  # a second daemon with the same name
    "cut": (1.5, "pair"),  # all connections between two members end, both ways
    "oneway": (1, "pair"),  # what one member sends to another is lost
    "slow": (1, "pair"),  # one connection carries little
    "delay": (1, "pair"),  # what one member sends to another comes late
    "flip": (1, "pair"),  # one bit is flipped on the way
    "truncate": (1, "pair"),  # a connection ends in the middle of a frame
    "relay_kill": (2, "relay"),  # a relay is killed, and started again
    "relay_stop": (1, "relay"),  # a relay is stopped, and goes on later
    "join_storm": (1, "extra"),  # several join at once, and die later
    "master_kill": (1, "master"),  # the master is killed, and started again
    "master_pause": (0.7, "master"),  # the master is stopped, and goes on later
    "master_point": (1.5, "master"),  # the master is killed at a named place of its code
    "master_full_disk": (0.7, "master"),  # the master's journal takes no write for a while
    "master_lost_journal": (0.7, "master"),  # the master comes back without its journal
}
_AT_POINTS = ("master_point", "master_full_disk")
LOSE_JOURNALS = ("master_full_disk", "master_lost_journal")


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault."""

    number: int  # counts from 1
    at: float  # seconds from the start
    kind: str  # of KINDS
    slot: int  # whose daemon or client; MASTER_SLOT; a relay's: counted from 0
    other: int = -1  # the other end of a link, else -1
    seconds: float = 0.0  # until it is healed, or what was killed is started again
    lane: int = -1  # of the link; -1: all
    point: str = ""  # failpoint, with the kinds that have one
    action: str = "kill"  # "kill" or "pause" at the failpoint
    amount: float = 0.0  # delay: seconds; slow: bytes per second; truncate: bytes until then; join_storm: clients

    def __str__(self) -> str:
        if self.kind == "join_storm":
            return f"{self.kind} of {self.amount:.0f} clients for {self.seconds:.1f} s"
        who = "" if self.slot == MASTER_SLOT else f" {'relay' if self.of_relay else 'peer'}-{self.slot}"
        where = f" to peer-{self.other}" if self.other >= 0 else ""
        lane = f" lane {self.lane}" if self.lane >= 0 else ""
        at = f" {self.action} at {self.point}" if self.point else ""
        how = f" for {self.seconds:.1f} s" if self.seconds else ""
        return f"{self.kind}{who}{where}{lane}{at}{how}"

    @property
    def of_relay(self) -> bool:
        """Whether it hits a relay."""
        return KINDS[self.kind][1] == "relay"

    @property
    def touches(self) -> frozenset[int]:
        """Slots whose membership it may cost; those that a relay joins are not known here."""
        return frozenset() if self.of_relay else frozenset({self.slot, self.other} - {-1})


@dataclass(frozen=True, slots=True)
class Shape:
    """What a schedule is drawn for."""

    peers: int  # members that are always to come back; their slots are 0 to peers - 1
    seconds: float  # of the run; the last faults start early enough to be seen
    interval: tuple[float, float] = (0.5, 2.0)  # least and most seconds between two faults
    kinds: tuple[str, ...] = tuple(KINDS)  # that may be drawn
    lanes: int = 2  # of a link
    keep: int = 2  # members that are left alone at any time
    master_every: float = 30.0  # seconds between kills of the master beside the drawn ones; 0: none
    heartbeat_timeout: float = 3.0  # seconds; stops are shorter or longer than that
    points: tuple[str, ...] = ()  # failpoints of daemons
    master_points: tuple[str, ...] = ()  # of the master
    relays: int = 0


def draw(chance: Callable[[], float], shape: Shape) -> tuple[Fault, ...]:
    """The faults, in order of time. The same numbers from *chance*, which are in [0, 1), give the same faults."""
    return _Drawing(chance, shape).draw()


class _Drawing:
    def __init__(self, chance: Callable[[], float], shape: Shape) -> None:
        self._chance, self._shape = chance, shape
        self._free_at = [0.0] * shape.peers
        self._master_free_at = 0.0
        self._relay_free_at = [0.0] * shape.relays
        self._faults: list[Fault] = []

    def draw(self) -> tuple[Fault, ...]:
        shape = self._shape
        now = self._between(*shape.interval)
        next_master = shape.master_every or float("inf")
        while now < shape.seconds:
            if now >= next_master:
                next_master += shape.master_every
                self._add(now, "master_kill", MASTER_SLOT, seconds=self._between(0.1, 1.5))
                self._master_free_at = now + 1.5 + _RETURN
            self._one(now)
            if self._chance() < _TWICE:
                self._one(now)
            now += self._between(*shape.interval)
        return tuple(self._faults)

    def _one(self, now: float) -> None:
        free = self._free(now, self._free_at)
        may_lose = len(free) - self._shape.keep
        possible = [kind for kind in self._shape.kinds if self._possible(kind, now, may_lose)]
        if not possible:
            return
        kind = self._weighted(possible)
        hits = KINDS[kind][1]
        if hits == "member":
            self._member(now, kind, self._pick(free))
        elif hits == "pair":
            slot = self._pick(free)
            self._pair(now, kind, slot, self._pick([other for other in free if other != slot]))
        elif hits == "relay":
            relay = self._pick(self._free(now, self._relay_free_at))
            most = 1.8 * self._shape.heartbeat_timeout if kind == "relay_stop" else 2.0
            self._add(now, kind, relay, seconds=self._between(0.2, most))
            self._relay_free_at[relay] = now + self._faults[-1].seconds + _RETURN
        elif hits == "extra":
            self._add(now, kind, MASTER_SLOT, seconds=self._between(2, 6), amount=2 + self._below(STORM - 1))
        else:
            self._master(now, kind)

    def _free(self, now: float, free_at: list[float]) -> list[int]:
        return [slot for slot, at in enumerate(free_at) if at <= now]

    def _possible(self, kind: str, now: float, may_lose: int) -> bool:
        hits = KINDS[kind][1]
        if not (self._shape.points if kind == "point" else self._shape.master_points or kind not in _AT_POINTS):
            return False
        if hits == "master":
            return self._master_free_at <= now
        if hits == "relay":
            return bool(self._free(now, self._relay_free_at))
        if hits == "extra":
            return not any(f.kind == kind and f.at + f.seconds + _RETURN > now for f in self._faults)
        return may_lose >= 1 and len(self._free(now, self._free_at)) > (hits == "pair")

    def _member(self, now: float, kind: str, slot: int) -> None:
        point, action = "", "kill"
        seconds = self._between(0.2, 2.0)
        if kind == "point":
            point = self._shape.points[self._below(len(self._shape.points))]
            action = "kill" if self._chance() < 0.7 else "pause"
        if kind == "stop" or action == "pause":
            seconds = self._between(0.2, 1.8) * self._shape.heartbeat_timeout
        elif kind == "twin":
            seconds = self._between(0.5, 2.0)
        self._add(now, kind, slot, seconds=seconds, point=point, action=action)
        self._free_at[slot] = now + seconds + _RETURN

    def _pair(self, now: float, kind: str, slot: int, other: int) -> None:
        seconds, lane, amount = 0.0, -1, 0.0
        if kind in ("cut", "oneway"):
            seconds = self._between(0.3, 8.0)
        elif kind == "slow":
            seconds, lane, amount = self._between(1.0, 3.0), self._below(self._shape.lanes), self._between(2e4, 2e5)
        elif kind == "delay":
            seconds, amount = self._between(1.0, 4.0), self._between(0.02, 0.2)
        elif kind == "truncate":
            amount = float(self._below(100_000))
        self._add(now, kind, slot, other=other, seconds=seconds, lane=lane, amount=amount)
        for end in (slot, other):
            self._free_at[end] = now + seconds + _RETURN

    def _master(self, now: float, kind: str) -> None:
        points = self._shape.master_points
        if kind == "master_full_disk":
            points = tuple(point for point in points if point.startswith("store"))
        point = points[self._below(len(points))] if kind in _AT_POINTS else ""
        pause = kind == "master_pause"
        seconds = self._between(0.2, 1.5) * self._shape.heartbeat_timeout if pause else self._between(0.1, 1.5)
        self._add(now, kind, MASTER_SLOT, seconds=seconds, point=point)
        self._master_free_at = now + seconds + _RETURN + 2

    def _add(self, now: float, kind: str, slot: int, **more: float | str) -> None:
        self._faults.append(Fault(len(self._faults) + 1, round(now, 3), kind, slot, **more))  # type: ignore[arg-type]

    def _between(self, low: float, high: float) -> float:
        return round(low + (high - low) * self._chance(), 3)

    def _below(self, count: int) -> int:
        return min(int(self._chance() * count), count - 1)

    def _pick(self, of: list[int]) -> int:
        return of[self._below(len(of))]

    def _weighted(self, kinds: Collection[str]) -> str:
        left = self._chance() * sum(KINDS[kind][0] for kind in kinds)
        for kind in kinds:
            left -= KINDS[kind][0]
            if left < 0:
                return kind
        return next(iter(kinds))
