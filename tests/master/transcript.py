"""A room for the master's state machine: daemons with inboxes, a clock, and every command checked as it comes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from wancoll.commit.tally import UPDATE
from wancoll.limits import PROTOCOL_VERSION, Limits
from wancoll.wire import messages as m
from wancoll.wire.epochs import applied
from wancoll.wire.framing import encode
from wancoll_master.core import membership
from wancoll_master.core.liveness import presence
from wancoll_master.core.ready import (
    Announce,
    Broadcast,
    Disconnected,
    Event,
    Ready,
    Received,
    Record,
    Returned,
    Send,
    SentAway,
    Tick,
    Used,
    tellings,
)
from wancoll_master.plan.planning import propose

GROUP = "g"


def report_of(
    mid: int, epoch: int = 1, *, of: tuple[int, ...] = (1, 2, 3), collectors: str = "master", **fields: Any
) -> m.Report:
    """What member m<mid> of daemon d<mid> reports; in its epoch the "master" or the "members" are *collectors*."""
    upto, done = fields.pop("committed_upto", 0), list(fields.pop("done", ()))
    done += [(seq, *UPDATE) for seq in fields.pop("updates", ())]
    basis = m.Report(
        group=GROUP,
        mid=mid,
        epoch=epoch,
        members=[(each, f"m{each}", f"d{each}") for each in of],
        plan=m.Plan(4, 1024, True, {}, [], 0, "", collectors=collectors),
        key=b"k" * 16,
        start_world=3,
        min_world=1,
        reason="formed",
        base=0,
        voids=[],
        aborted=False,
        finished=m.EpochReport(upto, done, [], []),
        p2p=[],
        heard=0,
        settled=[],
        failed=[],
    )
    return msgspec.structs.replace(basis, **fields)


class Room:
    """A master's state and the daemons d0, d1, ... that talk to it. Member mI is on daemon dI unless said otherwise."""

    def __init__(self, limits: Limits | None = None, **state: Any) -> None:
        self.limits = limits or Limits(voters=0)
        self.state = membership.new_state(self.limits, b"secret", **state)
        self.now = 100.0
        self.conns: dict[str, int] = {}  # of connected daemons
        self.inbox: dict[int, list[Any]] = defaultdict(list)
        self.closed: dict[int, str] = {}
        self.records: list[Record] = []  # of the event log
        self.persisted = (0, 0)
        self.journal: dict[str, Used] = {}  # newest epochs, by group
        self.asleep: set[str] = set()  # daemons that send no heartbeats
        self.ready = Ready()  # of the last step
        self.watch: Callable[[Ready], None] = lambda ready: None  # called after each step
        self.starts = 1
        self._next_conn = 1

    # ---- events --------------------------------------------------------------------------------------

    def step(self, event: Event) -> None:
        self.ready = ready = membership.step(self.state, self.now, event, propose)
        assert ready.step_down is None or ready == Ready(step_down=ready.step_down)
        self.records += [record for record in ready.log if record.kept]
        for answer in ready.answers:
            self._deliver(answer.conn, answer.message if isinstance(answer, Send) else answer)
        if ready.persist is not None:
            self.journal |= ready.persist.groups
            write = ready.persist.epoch, ready.persist.next_mid
            self.persisted = max(self.persisted[0], write[0]), max(self.persisted[1], write[1])
        for message in ready.messages:
            match message:
                case Send(conn, said):
                    self._deliver(conn, said)
                case Broadcast(conns, said):
                    assert len(set(conns)) == len(conns)
                    for conn in conns:
                        self._deliver(conn, said)
                case Announce(to, epoch, base):
                    for told, _ in tellings(message):
                        if isinstance(told, m.EpochChange):
                            assert base is not None
                            assert applied(base, told) == epoch
                    assert self.persisted[0] >= epoch.epoch, "sent an epoch that the journal does not know"
                    assert [mid for _, mid in to] == [member.mid for member in epoch.members]
                    for conn, mid in to:
                        self._deliver(conn, msgspec.structs.replace(epoch, to=mid))
        for close in ready.closes:
            assert close.conn not in self.closed
            self.closed[close.conn] = close.reason
            self.conns = {daemon: other for daemon, other in self.conns.items() if other != close.conn}
        self.watch(ready)

    def _deliver(self, conn: int, message: Any) -> None:
        assert conn not in self.closed, f"sent {message} over a closed connection"
        if isinstance(message, m.Message):
            msgspec.msgpack.decode(encode(message)[4:], type=m.FromMaster)  # a peer would accept it
        if isinstance(message, m.Joined):
            assert self.persisted[1] > message.mid, "gave out a mid that the journal does not know"
        self.inbox[conn].append(message)

    def hello(
        self,
        daemon: str,
        *,
        incarnation: int = 1,
        lanes: int = 4,
        addresses: tuple[str, ...] = (),
        protocol: int = PROTOCOL_VERSION,
        site: str = "",
        term: int = 0,
        master: int = 0,
        master_grace: float = 0.0,
        ended: Sequence[int] = (),
        cores: int = 256,
    ) -> int:
        conn, self._next_conn = self._next_conn, self._next_conn + 1
        self.conns[daemon] = conn
        where = list(addresses or (f"{daemon}:7000",))
        knew: dict[str, Any] = {"term": term, "master": master, "master_grace": master_grace, "ended": list(ended)}
        knew["cores"] = cores
        self.step(Received(conn, m.Hello(protocol, daemon, incarnation, where, lanes, site, "0.1.0", **knew)))
        return conn

    def restart(self, *, lost: bool = False, first: bool = False) -> None:
        """The master dies and is started again with its journal, or without it. Nobody is connected."""
        term, floor, next_mid = self.state.term + 1, *self.persisted
        if lost:
            term, floor, self.persisted, self.journal, next_mid = 1, 0, (0, 0), {}, 1
        self.starts += 1
        self.state = membership.new_state(
            self.limits,
            b"secret %d" % self.starts,
            term=term,
            floor=floor,
            next_mid=max(1, next_mid),
            used={name: replace(one, terms=0) for name, one in self.journal.items()},  # scripts make reports up
            now=self.now,
            holds=lost and not first,
        )
        self.conns.clear()
        self.inbox.clear()
        self.closed.clear()

    def restarted(
        self, epoch: int = 1, mids: tuple[int, ...] = (1, 2, 3), base: int = 0, voids: dict[int, str] | None = None
    ) -> None:
        """A new master whose journal says that the newest epoch had these members, *base* committed, and these voids.

        *epoch* 0: the journal was lost, and knows no group.

        Daemons d1, d2 and d3 have introduced themselves, and will report().
        """
        self.restart()
        used = {GROUP: Used(epoch, frozenset(mids), base, voids or {})} if epoch else {}
        self.persisted, self.journal = (epoch, 1025), used
        self.restart()
        for mid in (1, 2, 3):
            self.hello(f"d{mid}")
        self.clear()

    def stranger(self, message: Any, source: str = "") -> int:
        """A connection, from *source*, whose first message is *message*."""
        conn, self._next_conn = self._next_conn, self._next_conn + 1
        self.step(Received(conn, message, source=source))
        return conn

    def say(self, daemon: str, message: Any) -> None:
        self.step(Received(self.conns[daemon], message))

    def drop(self, daemon: str, reason: str = "connection reset") -> None:
        self.step(Disconnected(self.conns.pop(daemon), reason))

    def sent_away(self, *whom: str | int, why: str = "its token is revoked") -> None:
        """These daemons, or connections, have no right to be here any more."""
        conns = [self.conns.pop(one) if isinstance(one, str) else one for one in whom]
        self.step(SentAway(dict.fromkeys(conns, why)))

    def breaks(self, daemon: str, reason: str = "connection reset", *, round_trip: float = 0.0) -> None:
        """Its connection is gone, and it may take it up again."""
        self.asleep.add(daemon)
        self.step(Disconnected(self.conns[daemon], reason, lasting=False, round_trip=round_trip))

    def returns(self, daemon: str, *, incarnation: int = 1, dial: int = 1) -> None:
        """It dials again, over another connection, and says which one it was."""
        self.asleep.discard(daemon)
        old = self.conns[daemon]
        known = {"master": self.state.identity, "session": old, "dial": dial, "cores": 256}
        hello = m.Hello(PROTOCOL_VERSION, daemon, incarnation, [f"{daemon}:7000"], 4, "", "0.1.0", **known)
        conn = presence.returning(self.state, hello)
        if conn is not None:
            self.step(Returned(conn, hello))
            return
        new, self._next_conn = self._next_conn, self._next_conn + 1
        self.conns[daemon] = new
        self.step(Received(new, hello))

    def dials(self, daemon: str, name: str, how: str) -> None:
        """It was asked whether the daemon of member *name* is there; how: "refused", "answers" or "fails"."""
        ends = self.state.groups[GROUP].members[0].mid, self.mid(name)
        self.say(daemon, m.ProbeResult(GROUP, 0, *ends, how == "answers", how, how == "refused"))

    def sleep(self, seconds: float) -> None:
        """Let time pass, with ticks when the master wants them and heartbeats from those that are awake."""
        until = self.now + seconds
        beat = self.now
        while True:
            tick = self.state.deadline
            at = min(tick, beat, until)
            self.now = max(self.now, at)
            if at == until:
                return
            if beat <= tick:
                for daemon in [d for d in self.conns if d not in self.asleep]:
                    self.say(daemon, m.Heartbeat(1))
                    self.inbox[self.conns[daemon]].pop()
                beat += self.limits.heartbeat_interval
            else:
                self.step(Tick())
                assert self.state.deadline > self.now, "a tick left something undone"

    # ---- members -------------------------------------------------------------------------------------

    def join(
        self,
        member: str,
        *,
        daemon: str = "",
        start: int = 1,
        least: int = 1,
        group: str = GROUP,
        call_timeout: float = 0.0,
        shards: int = 1,
        launch: str = "",
    ) -> None:
        daemon = daemon or "d" + member[1:]
        if daemon not in self.conns:
            self.hello(daemon)
        self.say(daemon, m.Join(group, member, start, least, 0, call_timeout, shards, launch))

    def form(self, count: int, *, least: int = 1) -> None:
        """Members m0, m1, ... with mids 1, 2, ... in epoch 1; inboxes are empty after it."""
        for i in range(count):
            self.join(f"m{i}", start=count, least=least)
        assert self.epoch == 1
        self.clear()

    def admit(self, *members: str) -> None:
        """All probes of *members* (which joined a running group) succeed."""
        for daemon in list(self.conns):
            for probe in self.take(daemon, m.Probe):
                self.answer_probe(daemon, probe)

    def answer_probe(self, daemon: str, probe: m.Probe, ok: bool = True, reason: str = "") -> None:
        self.say(daemon, m.ProbeResult(probe.group, probe.joiner, probe.prober, probe.target, ok, reason))

    @property
    def group(self) -> Any:
        return self.state.groups[GROUP]

    @property
    def epoch(self) -> int:
        return int(self.group.epoch)

    @property
    def names(self) -> list[str]:
        return [member.name for member in self.group.members]

    def mid(self, name: str) -> int:
        return next(mid for mid, member in self.state.members.items() if member.name == name)

    def _daemon(self, name: str) -> str:
        return self.state.members[self.mid(name)].daemon.name

    def done(self, name: str, seq: int, digest: int = 7, fingerprint: int = 9, epoch: int = 0) -> None:
        self.say(self._daemon(name), m.Vote(GROUP, self.mid(name), epoch or self.epoch, seq, digest, fingerprint))

    def all_done(self, seq: int) -> None:
        for name in self.names:
            self.done(name, seq)

    def update(self, name: str, seq: int) -> None:
        self.say(self._daemon(name), m.Vote(GROUP, self.mid(name), self.epoch, seq, *UPDATE))

    def all_update(self, seq: int) -> None:
        for name in self.names:
            self.update(name, seq)

    def mismatch(self, name: str, seq: int, call: str) -> None:
        self.say(self._daemon(name), m.Mismatch(GROUP, self.mid(name), self.epoch, seq, call))

    def give_up(self, name: str, *seqs: int, reason: str = "") -> None:
        self.say(self._daemon(name), m.GiveUp(GROUP, self.mid(name), self.epoch, list(seqs), reason))

    def link_down(self, name: str, other: str, kind: str = "lost", epoch: int = 0, *, sends: bool = False) -> None:
        ends = self.mid(name), epoch or self.epoch, self.mid(other)
        self.say(self._daemon(name), m.LinkDown(GROUP, *ends, kind, "timed out", sends))

    # ---- what came of it -----------------------------------------------------------------------------

    def clear(self) -> None:
        self.inbox.clear()

    def take(self, daemon: str, kind: Any = object, conn: int = 0) -> list[Any]:
        """Messages of *kind* to the daemon since the last look, removed from its inbox."""
        inbox = self.inbox[conn or self.conns[daemon]]
        found = [message for message in inbox if isinstance(message, kind)]
        inbox[:] = [message for message in inbox if not isinstance(message, kind)]
        return found

    def one(self, daemon: str, kind: Any) -> Any:
        found = self.take(daemon, kind)
        assert len(found) == 1, found
        return found[0]

    def epochs(self) -> list[m.Epoch]:
        """The new epoch that every member was just told, equal but for Epoch.to; [] if none was."""
        told = [message for member in self.group.members for message in self.take(member.daemon.name, m.Epoch)]
        for message in told[1:]:
            assert msgspec.structs.replace(message, to=told[0].to) == told[0]
        assert not told or sorted(message.to for message in told) == sorted(member.mid for member in told[0].members)
        return told

    def new_epoch(self) -> m.Epoch:
        """The one new epoch."""
        told = self.epochs()
        assert told, "no new epoch"
        return told[0]

    def no_epoch(self) -> None:
        assert self.epochs() == []
