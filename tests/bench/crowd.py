"""What a thousand members cost the master: processor time of its real core, and bytes of what it tells.

    python -m tests.bench.crowd [MEMBERS] [GROUPS]

Daemons are played: what they would say is made beforehand and decoded from bytes where the master would, and every
frame that the master sends is encoded as its shell does. No sockets, no trio.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from tests.bench.report import Bar, bar_table
from wancoll.limits import PROTOCOL_VERSION, Limits
from wancoll.wire import messages as m
from wancoll.wire.framing import decode_body, encode
from wancoll_master.core import membership
from wancoll_master.core.ready import Announce, Disconnected, Event, Received, Send, Tick, frames
from wancoll_master.core.state import Group, Member
from wancoll_master.plan.planning import propose

MEMBERS, GROUPS = 1000, 1000
SMALL = 4  # members of each of many groups
FAR = 0.08  # seconds of round trip


@dataclass
class Cost:
    """Of what was played: seconds of processor time in all and in the longest step, frames and their bytes, epochs."""

    step: float = 0.0
    longest: float = 0.0
    encode: float = 0.0
    messages: int = 0
    nbytes: int = 0
    epochs: int = 0

    @property
    def all(self) -> float:
        """Steps and encoding."""
        return self.step + self.encode


@dataclass
class Crowd:
    """A master's state, and who talks to it.

    Args:
        far: daemons measure, and find each other far apart.
    """

    far: bool = False
    now: float = 100.0
    cost: Cost = field(default_factory=Cost)
    conns: dict[int, int] = field(default_factory=dict)  # by the daemon's number

    def __post_init__(self) -> None:
        self.limits = Limits(voters=0)
        self.state = membership.new_state(self.limits, b"s" * 32, now=-1000.0)
        self.inbox: dict[int, list[Any]] = {}
        self._next = 1

    def measured(self) -> Cost:
        """What it cost since the last look."""
        cost, self.cost = self.cost, Cost()
        return cost

    def step(self, event: Event) -> None:
        begin = time.process_time()
        ready = membership.step(self.state, self.now, event, propose)
        done = time.process_time()
        self.cost.step += done - begin
        self.cost.longest = max(self.cost.longest, done - begin)
        for answer in ready.answers:
            assert isinstance(answer, Send)
            self._sent(((answer.conn, encode(answer.message)),))
        for message in ready.messages:
            self.cost.epochs += isinstance(message, Announce)
            self._sent(frames(message))
            if isinstance(message, Send):
                self.inbox.setdefault(message.conn, []).append(message.message)
        assert not ready.closes or isinstance(event, Tick), ready.closes
        self.cost.encode += time.process_time() - done

    def _sent(self, told: Iterable[tuple[int, bytes]]) -> None:
        for _, frame in told:
            self.cost.messages += 1
            self.cost.nbytes += len(frame)

    def say(self, conn: int, message: Any) -> None:
        """The message comes as bytes."""
        body = encode(message)[4:]
        begin = time.process_time()
        heard = decode_body(body, m.FromPeer)
        self.cost.step += time.process_time() - begin
        self.step(Received(conn, heard))

    def hello(self, number: int, *, term: int = 0, master: int = 0) -> int:
        conn, self._next = self._next, self._next + 1
        self.conns[number] = conn
        where = [f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}:7401"]
        site = f"site-{number % 8}" if self.far else ""
        name = f"daemon-{number:04}"
        hello = m.Hello(
            PROTOCOL_VERSION, name, 1, where, 8, site, "0.1.0", 32, ["bbr", "cubic"], self.far, term, master
        )
        self.say(conn, hello)
        return conn

    def measure(self) -> None:
        """Daemons answer what they were asked to measure."""
        for conn, inbox in self.inbox.items():
            asked = [one for one in inbox if isinstance(one, m.MeasureLink)]
            inbox.clear()
            for one in asked:
                speed = 10e6 if one.nbytes else 0.0
                self.say(conn, m.LinkReport([m.LinkMeasure(one.daemon, FAR, speed, 0, 0.0)]))

    def form(self, members: int, groups: int = 1) -> None:
        """Each group's members join."""
        for number in range(members * groups):
            self.hello(number)
        for number, conn in self.conns.items():
            self.say(conn, m.Join(f"group-{number // members}", f"member-{number:04}", members, 1))
            if self.far:
                self.measure()
        if self.far:  # round trips, then uplinks
            self.measure()
            for seconds in (1.1, 2.6):
                self.now += seconds
                self.beat()
                self.step(Tick())
                self.measure()
        assert all(len(group.members) == members for group in self.state.groups.values()), "not all have formed"

    @property
    def group(self) -> Group:
        """The first one."""
        return next(iter(self.state.groups.values()))

    def beat(self, numbers: Iterable[int] | None = None) -> None:
        for number in self.conns if numbers is None else numbers:
            conn = self.conns[number]
            called = [(one.mid, one.group.epoch, 1, 0) for one in self.state.connections[conn].members.values()]
            self.say(conn, m.Heartbeat(1, called))

    def lose(self, number: int) -> None:
        self.step(Disconnected(self.conns.pop(number), "connection reset"))

    def commit(self, seq: int) -> None:
        """One operation."""
        group = self.group
        for member in list(group.members):
            self.say(member.daemon.conn, m.Vote(group.name, member.mid, group.epoch, seq, 1, 2))
        assert group.committed == seq

    def slow(self, member: Member, seq: int) -> m.Waits:
        """What the member says while *seq* is slow: it waits for the one before it, and moves towards the next."""
        group = member.group
        rank = group.members.index(member)
        sides = {group.members[rank - 1].mid, group.members[(rank + 1) % len(group.members)].mid}
        op = m.OpWait(seq, "all_reduce(1000000 x float32, op=sum)", 4000000, "moving", 1.5, 0.1)
        links = [m.LinkWait(mid, False, "busy", 0.1, 0.1, 1000) for mid in sides]
        return m.Waits(group.name, member.mid, group.epoch, [op], links)


def _ms(seconds: float) -> float:
    return 1e3 * seconds


def forming(members: int, *, far: bool) -> list[Bar]:
    crowd = Crowd(far=far)
    crowd.form(members)
    cost = crowd.measured()
    what = f"forming {members} {'far apart' if far else 'in one network'}"
    return [
        Bar(f"{what}: seconds of processor time", cost.all, most=2.0),
        Bar(f"{what}: longest step, ms", _ms(cost.longest), most=100),
        Bar(f"{what}: MB told", cost.nbytes / 1e6, most=200),
    ]


def losses(members: int, *, far: bool) -> list[Bar]:
    crowd = Crowd(far=far)
    crowd.form(members)
    where = "far apart" if far else "in one network"
    crowd.measured()
    crowd.lose(members // 3)
    one = crowd.measured()
    half_of_them = len(crowd.conns) // 2  # of more than half a master thinks that its own network is at fault
    site = list(crowd.conns)[:half_of_them]
    for _ in range(12):  # the others are heard, the site is not
        crowd.now += crowd.limits.heartbeat_interval
        crowd.beat(list(crowd.conns)[half_of_them:])
        if crowd.now >= crowd.state.deadline:
            crowd.measured()
            crowd.step(Tick())
            if crowd.cost.epochs:
                break
    half = crowd.measured()
    assert len(crowd.group.members) == members - 1 - len(site), "the site is still there"
    return [
        Bar(f"one of {members} lost {where}: ms in step", _ms(one.longest), most=50),
        Bar(f"one of {members} lost {where}: MB told", one.nbytes / 1e6, most=1.0),
        Bar(f"a site of {len(site)} lost {where}: epochs", half.epochs, most=1),
        Bar(f"a site of {len(site)} lost {where}: ms in step", _ms(half.longest), most=200),
    ]


def waiting(members: int) -> list[Bar]:
    """All members say that an operation is slow, twice a second."""
    crowd = Crowd()
    crowd.form(members)
    crowd.commit(1)
    for member in crowd.group.members:
        crowd.say(member.daemon.conn, m.Vote(member.group.name, member.mid, member.group.epoch, 2, 1, 2))
        break
    crowd.now += 1.5
    crowd.beat()
    crowd.measured()
    rounds = 4
    for _ in range(rounds):
        for member in crowd.group.members:
            crowd.now += crowd.limits.heartbeat_interval / members
            crowd.say(member.daemon.conn, crowd.slow(member, 2))
    cost = crowd.measured()
    return [
        Bar(f"{members} wait for an operation: us each", 1e6 * cost.all / rounds / members, most=200),
        Bar(f"{members} wait for an operation: longest step, ms", _ms(cost.longest), most=100),
    ]


def beating(members: int) -> list[Bar]:
    crowd = Crowd()
    crowd.form(members)
    crowd.measured()
    crowd.beat()
    share = crowd.measured().all / crowd.limits.heartbeat_interval
    crowd.commit(1)
    done = crowd.measured().all
    return [
        Bar(f"{members} heartbeats: percent of a core", 100 * share, most=20),
        Bar(f"an operation of {members}: us of each", 1e6 * done / members, most=50),
    ]


def reports(members: int) -> list[Bar]:
    """All members of an earlier master report, but for one."""
    crowd = Crowd()
    plan = m.Plan(8, 1 << 18, True, {}, [], 0, "")
    named = [(number + 1, f"member-{number:04}", f"daemon-{number:04}") for number in range(members)]
    for number in range(members):
        crowd.hello(number, term=0, master=99)
    hello = crowd.measured()
    for number, conn in crowd.conns.items():
        head = ("group-0", number + 1, 7, named, plan, b"k" * 16, members, 1, "", 0)
        crowd.say(conn, m.Report(*head, [], False, m.EpochReport(3, [(4, 1, 2)], [], []), [], 0, [], []))
        crowd.say(conn, m.Heartbeat(0))
    cost = crowd.measured()
    assert len(crowd.group.members) == members
    assert crowd.group.committed == 4
    return [
        Bar(f"{members} report after a restart: seconds", hello.all + cost.all, most=2.0),
        Bar(f"{members} report after a restart: longest step, ms", _ms(cost.longest), most=100),
    ]


def many(groups: int) -> list[Bar]:
    crowd = Crowd()
    crowd.form(SMALL, groups)
    formed = crowd.measured()
    for number in range(0, SMALL * groups, SMALL):
        crowd.lose(number)
    lost = crowd.measured()
    what = f"{groups} groups of {SMALL}"
    return [
        Bar(f"{what} form: seconds", formed.all, most=4.0),
        Bar(f"{what} form: longest step, ms", _ms(formed.longest), most=100),
        Bar(f"{what} lose one each: ms of each", _ms(lost.all) / groups, most=1),
    ]


def main(members: int = MEMBERS, groups: int = GROUPS) -> list[Bar]:
    """Play it all."""
    bars = []
    for far in (False, True):
        bars += forming(members, far=far)
        bars += losses(members, far=far)
    return bars + waiting(members) + beating(members) + reports(members) + many(groups)


if __name__ == "__main__":
    print(bar_table(main(*map(int, sys.argv[1:]))))
