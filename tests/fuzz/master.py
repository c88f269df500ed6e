"""The master's state machine under messages that mean nothing, in all its states: no exception, no growth, no poison.

A sequence is said by one stranger, or by a member that has gone mad, while the others live on. Whatever it says: `step`
raises nothing, what comes out can be read by daemons, what is to be persisted can be counted on, no structure grows
beyond its bound, and a group to which the speaker does not belong goes on as if nobody had spoken.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec

from tests.fuzz.absurd import Absurd, Chance, kinds
from wancoll.limits import PROTOCOL_VERSION, Limits
from wancoll.wire import messages as m
from wancoll_master.core import membership
from wancoll_master.core.ready import Announce, Broadcast, Disconnected, Ready, Received, Send, Tick, frames
from wancoll_master.core.state import State
from wancoll_master.plan.planning import propose

GROUP, HONEST = "g", ("d0", "d1", "d2")
LIMITS = Limits(
    ops_in_flight=4, group_members=8, daemons=8, groups=6, members=24, heartbeat_timeout=3.0, rejoin_grace=1.0
)
SPOKEN = [kind for kind in kinds(m.FromPeer) if kind is not m.Arm]  # that one never comes to step
_DECODER = msgspec.msgpack.Decoder(m.FromMaster)
_COUNTED = 1 << 50  # no number of the master's own comes near MOST


class Master:
    """A room with a group of three, a speaker, and what must hold.

    Args:
        chance: says everything.
        inside: whether the speaker is a daemon of the group; else it may not touch it.
        voters: as in Limits; 0: the master collects all votes.
    """

    def __init__(self, chance: Chance, *, inside: bool, voters: int = 32) -> None:
        self.chance, self.inside = chance, inside
        self.limits = replace(LIMITS, voters=voters)
        self.now = 100.0
        self.state = membership.new_state(self.limits, b"secret", term=3, now=self.now, next_mid=1)
        self.conns: dict[str, int] = {}  # of honest daemons
        self.mids: dict[str, int] = {}
        self.epoch = self.seq = 0
        self.next_conn = 1
        self.speaker = 0
        self.closed: set[int] = set()
        names = ("g", "h", "m0", "m1", "m2", "evil", "m9", "lost", "unreachable", "moving", "x" * 128)
        self.mine: list[int] = []  # mids that the speaker may speak for
        self.theirs: list[int] = []
        self.epochs: list[int] = []
        self.seqs: list[int] = []
        self.absurd = Absurd(
            (*names, *HONEST) if inside else names,
            protocol=[PROTOCOL_VERSION],
            group=["g"] if inside else ["h", "i", "g"],
            mid=self.mine,
            other=self.theirs,
            joiner=self.theirs,
            prober=self.theirs,
            target=self.theirs,
            epoch=self.epochs,
            seq=self.seqs,
            order=self.seqs,
            number=list(range(1, 40)),
            tag=[0],
            dtype=[0],
            count=[1],
            kind=["lost", "unreachable"],
            stage=["moving"],
            state=["down", "dead", "blocked", "parked"],
            daemon=["d0", "d1", "d2"] if inside else ["evil", "d0"],
            addresses=[["evil:7000"]],
            start_world=[3] if inside else [1, 2, 3],
            min_world=[1] if inside else [1, 2],
        )
        self.form()

    # ---- the honest ----------------------------------------------------------------------------------

    def form(self) -> None:
        """Three members in one epoch."""
        for place, name in enumerate(HONEST):
            if name not in self.conns:
                self.greet(name)
                self.say(name, m.Join(GROUP, f"m{place}", 3, 1))
                self.say(name, m.Heartbeat(0))

    def greet(self, name: str) -> None:
        conn = self.conns[name] = self.connect()
        self.step(Received(conn, m.Hello(PROTOCOL_VERSION, name, 1, [f"{name}:7000"], 4, "", "0")))

    def say(self, name: str, message: Any) -> None:
        if name in self.conns:
            self.step(Received(self.conns[name], message))

    def reduce(self) -> None:
        """One operation of all: it commits, unless the speaker is one of them."""
        group = self.state.groups.get(GROUP)
        if group is None or not group.members:
            return
        for member in list(group.members):
            if member.daemon.name in self.conns:
                head = GROUP, member.mid, group.epoch, group.committed + 1
                self.say(member.daemon.name, m.Vote(*head, 7, 7))

    # ---- steps ---------------------------------------------------------------------------------------

    def connect(self) -> int:
        self.next_conn += 1
        return self.next_conn - 1

    def step(self, event: Any) -> Ready:
        ready = membership.step(self.state, self.now, event, propose)
        told: list[bytes] = []
        for message in [*ready.messages, *(one for one in ready.answers if isinstance(one, Send))]:
            assert isinstance(message, Send | Broadcast | Announce)
            told += [frame for _, frame in frames(message)]
        for frame in told:
            assert len(frame) <= LIMITS.message_bytes
            _DECODER.decode(memoryview(frame)[4:])
        if ready.persist is not None:
            assert max(ready.persist.epoch, ready.persist.next_mid) < _COUNTED
            for used in ready.persist.groups.values():
                assert max(used.epoch, used.base, *used.mids) < _COUNTED
        for close in ready.closes:
            self.closed.add(close.conn)
            self.conns = {name: conn for name, conn in self.conns.items() if conn != close.conn}
        return ready

    # ---- the speaker ---------------------------------------------------------------------------------

    def sequence(self, length: int) -> None:
        """Say *length* things, most of them on one connection that has introduced itself."""
        chance = self.chance
        for _ in range(length):
            what = chance.pick(32)
            if what == 0:
                self.now += (0.05, 0.5, 1.2, 3.1)[chance.pick(4)]
                for name in list(self.conns):
                    self.say(name, m.Heartbeat(1))
                self.step(Tick())
            elif what == 1 and self.speaker:
                self.step(Disconnected(self.speaker, "gone"))
                self.forget_speaker()
            elif what == 2:
                self.reduce()
            elif what == 3 and chance.pick(4) == 0:
                self.restart()
            else:
                self.speak()
        self.check()

    def look(self) -> None:
        """What an informed speaker knows."""
        state, group = self.state, self.state.groups.get(GROUP)
        daemon = state.connections.get(self.speaker)
        self.mine[:] = daemon.members if daemon is not None else ()
        self.theirs[:] = sorted(state.members)
        self.epochs[:] = {one.epoch for one in state.groups.values()}
        upto = group.committed if group is not None else 0
        self.seqs[:] = range(upto + 1, upto + 4)

    def speak(self) -> None:
        chance = self.chance
        name = HONEST[chance.pick(len(HONEST))] if self.inside else ("evil", "evil2")[chance.pick(2)]
        if self.inside:
            self.speaker = self.conns.get(name, 0)
        if not self.speaker or self.speaker in self.closed:
            self.speaker = self.connect()
            if chance.pick(8):
                self.introduce(name)
                return
        self.look()
        message = self.absurd.message(SPOKEN[chance.pick(len(SPOKEN))], chance)
        if not self.inside and isinstance(message, m.Hello) and message.daemon in HONEST:
            return
        if isinstance(message, m.Report) and chance.pick(8):
            message = self.likely(name, message)
        self.step(Received(self.speaker, message))

    def introduce(self, name: str) -> None:
        """A Hello that is taken, of a daemon that may have seen anything."""
        hello = self.absurd.message(m.Hello, self.chance)
        plain: dict[str, Any] = {"protocol": PROTOCOL_VERSION, "daemon": name, "addresses": ["evil:7000"]}
        if self.chance.pick(4):
            plain |= {"term": 0, "master": 0}
        if self.inside:
            self.conns[name] = self.speaker
        self.step(Received(self.speaker, msgspec.structs.replace(hello, **plain)))

    def likely(self, name: str, report: m.Report) -> m.Report:
        """A Report that comes through the first checks."""
        fields: dict[str, Any] = {"plan": m.Plan(1, 1, True, {}, [], 0, "")}
        if self.inside:
            mid = 1 + HONEST.index(name)
            members = [(1 + place, f"m{place}", daemon) for place, daemon in enumerate(HONEST)]
            fields |= {"mid": mid, "members": members, "key": b"k" * 16, "start_world": 3, "min_world": 1}
        else:
            others = [one for one in report.members if one[0] != report.mid and self.chance.pick(2)]
            fields |= {"members": [(report.mid, "m7", name), *others]}
        if self.chance.pick(4):
            upto = self.chance.pick(3)
            done = [(upto + 1 + place, 7, 7) for place in range(self.chance.pick(3))]
            fields |= {"base": 0, "finished": m.EpochReport(upto, done, [], []), "voids": []}
        return msgspec.structs.replace(report, **fields)

    def forget_speaker(self) -> None:
        self.conns = {name: conn for name, conn in self.conns.items() if conn != self.speaker}
        self.speaker = 0

    def anew(self) -> None:
        """Another world: a member that has gone mad is out at once, and would not come in again."""
        self.state = membership.new_state(self.limits, b"secret", term=3, now=self.now, next_mid=1)
        self.conns.clear()
        self.closed.clear()
        self.speaker = 0
        self.form()

    def restart(self) -> None:
        """Another master, of the same journal; nobody is connected, and the honest come back as they may."""
        state = self.state
        self.state = membership.new_state(
            self.limits,
            b"secret",
            term=state.term + 1,
            floor=state.highest_epoch,
            next_mid=state.next_mid,
            used=dict(state.used),
            now=self.now,
        )
        self.conns.clear()
        self.closed.clear()
        self.speaker = 0

    # ---- what must hold ------------------------------------------------------------------------------

    def check(self) -> None:
        """After a sequence; then the honest are made whole again."""
        state = self.state
        assert state.term < _COUNTED
        check_bounds(state)
        if not self.inside:
            before = state.groups.get(GROUP)
            if len(self.conns) == len(HONEST) and before is not None and len(before.members) == len(HONEST):
                committed = before.committed
                self.reduce()
                assert before.committed == committed + 1, "a stranger kept a group from its work"
                assert len(before.members) == len(HONEST)
        group = state.groups.get(GROUP)
        whole = group is not None and (len(group.members) == len(HONEST) or group.rebuild is not None)
        if self.inside and not whole and self.chance.pick(4):
            self.anew()
        elif not self.inside and len(self.conns) < len(HONEST):
            self.form()


def check_bounds(state: State) -> None:
    """No structure holds more than its bound."""
    limits = state.limits
    assert len(state.daemons) <= limits.daemons
    assert len(state.connections) == len(state.daemons)
    assert len(state.groups) <= limits.groups
    assert len(state.members) <= limits.members
    for daemon in state.daemons.values():
        assert len(daemon.members) <= limits.group_members
    window = 4 * limits.ops_in_flight
    for group in state.groups.values():
        assert len(group.members) + len(group.joining) <= limits.group_members
        assert len(group.current.tally.open) <= window
        assert len(group.digest_failures) <= window
        assert len(group.stalls) <= 2 * window
        assert len(group.losses) <= limits.bad_pairs
        assert group.committed < _COUNTED
        assert group.epoch < _COUNTED


def run(chance: Chance, sequences: int, length: int = 12, *, voters: int = 32) -> None:
    """As many sequences; every two hundred in a new room, every other one of a mad member."""
    for begin in range(0, sequences, 200):
        room = Master(chance, inside=begin // 200 % 2 == 1, voters=voters)
        for _ in range(min(200, sequences - begin)):
            room.sequence(length)
