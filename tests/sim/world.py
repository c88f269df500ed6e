"""One simulated world: made from a seed, broken for a while, healed, and watched until everyone agrees."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import permutations
from math import inf
from random import Random
from typing import Any

import msgspec
from msgspec.structs import replace

from tests.sim import odd as odds
from tests.sim.client import Called, Client, sum_op
from tests.sim.clock import Clock
from tests.sim.daemon import Daemon, Session
from tests.sim.faults import Faults
from tests.sim.judge import Judge, Violation
from tests.sim.master import Journal, Master
from tests.sim.network import Network
from wancoll.collective import DATALESS, P2P_KINDS, ROOTED, Descriptor, DType, Kind
from wancoll.limits import Limits
from wancoll.peer.core.calls import UNEVEN
from wancoll.peer.core.links import COLLECTIVES
from wancoll.schedule.choose import ALGORITHMS
from wancoll.wire import messages as m
from wancoll.wire.framing import encode

DATA = sorted(set(Kind) - DATALESS - P2P_KINDS)  # kinds of collectives that move elements
FOR_EVER = 1 << 40
HEALED_FOR = 60.0  # seconds by which all must have ended after the last fault
MOST_EVENTS = 400_000
MOST_IN_A_SECOND = 40_000  # events


class World:
    """See the module.

    Args:
        seed: of everything that is drawn.
        trace: takes lines (time, who, what); None: nothing is written.
        faults: instead of those that the seed draws.
        graces: seconds that some calls have, instead of those that the seed draws; (): all wait for whoever is late.
        voters: as in Limits; 0: the master collects all votes.
        shards: of each island.
    """

    group = "g"

    def __init__(
        self,
        seed: int,
        trace: Callable[[str], None] | None = None,
        faults: tuple[str, ...] | None = None,
        graces: tuple[float, ...] | None = None,
        voters: int = 0,
        shards: int = 1,
    ) -> None:
        self.seed, self._trace, self.shards = seed, trace, shards
        self.random = Random(seed)
        self.odd = odds.draw(self.random, calm=faults)
        if shards > 1:
            start = min(self.odd.start_world, 4)
            clients, least = min(self.odd.clients, 4), min(self.odd.min_world, start)
            self.odd = dataclasses.replace(self.odd, clients=clients, start_world=start, min_world=least)
            graces = ()
        self.sums = voters and seed % 4 == 3
        self.lends = bool(voters) and seed % 2 == 0  # members are lent to their engines, whose law is the one in C
        if self.sums:
            self.odd = dataclasses.replace(self.odd, update_every=15)
        self.behind = seed % 3 == 1  # calls do not wait for an update_membership to end
        self.limits = dataclasses.replace(self.odd.limits, voters=voters)
        self.clock = Clock(Random(seed + 1), shuffled=self.odd.shuffled)
        self.network = Network(self.clock, Random(seed + 2), self.odd.delays, self.odd.spikes)
        self._pace = Random(seed + 3)
        self._late = Random(seed + 4)
        self._copies = Random(seed + 5)
        self._options = Random(seed + 6)
        self._islands = Random(seed + 8)
        drawn = self._late.choice(((), (0.05,), (0.05, 0.5)))
        self.graces: tuple[float, ...] = () if self.sums else drawn if graces is None else graces
        self.judge = Judge(self)
        self.journal = Journal()
        self.masters: list[Master] = []
        self.masters_started = 0
        self.master_hosts = ("ma", "mb")
        self.daemons: list[Daemon] = []
        self.hosts = [f"h{i}" for i in range(self.odd.daemons)]
        self._put_up_walls(Random(seed + 7))
        self.clients: list[Client] = []
        self.clients_started = 0
        self._arriving: Counter[int] = Counter()  # by island: shards of it that have yet to come
        self._replaced: set[int] = set()  # islands that were lost, and others follow
        self.blamed: set[str] = set()  # daemons that a fault may have evicted
        self.inflicted: list[str] = []
        self.differs: dict[tuple[str, int], int] = {}
        self.only_masters = self.odd.patient
        self.healed, self.healed_at = False, 0.0
        self.last_seq = FOR_EVER
        self._most_events = MOST_EVENTS
        self._counted = 0.0, 0  # time, and events until then
        self._talks = 0
        self._incarnations = 0
        self._ended: dict[str, list[int]] = {}  # by host: daemons that were killed there
        self._programs: dict[int, Descriptor] = {}
        self._faults = Faults(self)

    # ---- drawn on the way ----------------------------------------------------------------------------

    def engine_delay(self) -> float:
        return self.odd.engine_delay * self._pace.random()

    def copies(self) -> int:
        """Of a note: a member may say it again."""
        return 2 if self._copies.random() < 0.05 else 1

    def limits_of_daemon(self) -> Limits:
        """Where members commit, a daemon may have been given another master_grace than its master."""
        longer = self._options.choice((1.0, 1.0, 2.5)) if self.limits.voters else 1.0
        return dataclasses.replace(self.limits, master_grace=self.limits.master_grace * longer)

    def limits_of_master(self) -> Limits:
        """A master may have been started again to commit itself."""
        itself = self._options.random() < 0.1
        return dataclasses.replace(self.limits, voters=0) if itself else self.limits

    def write_delay(self) -> float:
        return self.odd.write_delay * self._pace.random()

    def store_loses(self) -> bool:
        """Whether a write to a store that does not answer is not even carried out."""
        return self._pace.random() < 0.5

    def local_delay(self) -> float:
        return 0.0

    def think(self) -> float:
        return self.odd.think * self._pace.random()

    def site(self, host: str) -> str:
        return f"s{int(host[1:].rstrip('t')) % self.odd.sites}" if self.odd.sites else ""

    def measured(self, one: str, other: str, nbytes: int) -> tuple[float, float]:
        near = (int(one[1:]) + int(other[1:])) % 3
        return (0.001, 0.02, 0.05)[near], (1e8, 2e7, 5e6)[near] if nbytes else 0.0

    def program(self, seq: int, client: Client) -> Descriptor:
        """What every member calls at *seq*, but for those that differ."""
        what = self._programs.get(seq)
        if what is None:
            what = self._programs[seq] = self._draw_call(seq)
        if client.shard and what.count:
            what = replace(what, count=max(0, what.count - client.shard))  # empty in some columns
        if (client.name, seq) in self.differs and not self.healed:
            return (sum_op(9, "auto", "retry"), Descriptor(Kind.update_membership), Descriptor(Kind.barrier))[
                self.differs[client.name, seq]
            ]
        return what

    def _draw_call(self, seq: int) -> Descriptor:
        if seq % self.odd.update_every == 0:
            return Descriptor(Kind.update_membership)
        random = Random(self.seed * 1_000_003 + seq * 7 % 5)  # training repeats its calls
        on_failure = "raise" if random.random() < self.odd.raises else "retry"
        count = random.choice((0, 1, 2, 3, 5))
        kind = random.choice((*(Kind.all_reduce,) * 5, *DATA, Kind.barrier))
        if self.sums and kind is not Kind.barrier:  # the master hears of none of them
            kind, count = Kind.all_reduce, max(count, 1)
        if kind is Kind.barrier:
            return Descriptor(kind, on_failure=on_failure)
        algorithm = random.choice(("auto", "auto", "ring", *ALGORITHMS[kind]))
        root = random.randint(0, 1) if kind in ROOTED else -1  # the oldest member, or the newest
        uneven = kind in UNEVEN and random.random() < 0.5
        call = Descriptor(
            kind, DType.int64, count=count, counts=(1,) if uneven else (), root=root, algorithm=algorithm,
            on_failure=on_failure,
        )  # fmt: skip
        graces = Random(self.seed * 7 + seq % 5)
        if self.graces and kind is Kind.all_reduce and graces.random() < 0.7:
            return replace(call, grace=graces.choice(self.graces))
        return call

    # ---- the trace -----------------------------------------------------------------------------------

    def note(self, who: str, text: str) -> None:
        if self._trace is not None:
            self._trace(f"{self.clock.now:10.4f}  {who:<6}  {text}")

    def said(self, who: str, whom: str, message: Any) -> None:
        if self._trace is not None:
            self.note(who, f"-> {whom:<6} {brief(message)}")

    def heard(self, who: str, whom: str, message: Any) -> None:
        if self._trace is not None and not isinstance(message, m.Heartbeat | m.Pong):
            self.note(who, f"<- {whom:<6} {brief(message)}")

    def told(self, session: Session, message: m.FromDaemon) -> None:
        """A daemon tells its client."""
        self.note(session.client.name, f"is told {brief(message)}")
        ended = isinstance(message, m.Failure) and not message.id
        if ended and session.client.alive and (untold := session.untold):  # who is dead reads nothing
            raise Violation(f"{session.client.name} hears of the end before it does of calls {untold} (R8): {message}")
        session.client.hear(message, session.called + 1)

    def wire(self, message: Any, kind: Any) -> Any:
        """*message* as it comes out of the wire."""
        return msgspec.msgpack.decode(encode(message)[4:], type=kind) if self.odd.wire else message

    # ---- who lives -----------------------------------------------------------------------------------

    @property
    def master(self) -> Master | None:
        """The newest that lives."""
        return next((master for master in reversed(self.masters) if master.alive), None)

    def master_address(self, last: str) -> str:
        """Where a daemon dials that has dialled *last*: daemons know all masters' addresses and try them in turn."""
        living = [master.address for master in self.masters if master.alive]
        found = self.random.choice(living) if living else f"{self.master_hosts[0]}:7400"
        return found if found != last else next((other for other in living if other != last), found)

    def members_at(self, name: str) -> list[str]:
        """Who the members are by that master's word."""
        group = next(master for master in self.masters if master.name == name).state.groups.get(self.group)
        return [member.name for member in group.members] if group is not None else []

    def all_out(self, name: str, mids: frozenset[int]) -> bool:
        """By that master's word: then nobody is left who could go on with their epoch."""
        state = next(master for master in self.masters if master.name == name).state
        return not mids & state.members.keys()

    def another_has(self, name: str, conn: int, mid: int) -> bool:
        """By that master's word. Where a journal was lost, who comes late may find its id given to another one."""
        member = next(master for master in self.masters if master.name == name).state.members.get(mid)
        return self.judge.forgotten and member is not None and member.daemon.conn != conn

    def _put_up_walls(self, random: Random) -> None:
        """The first hosts are behind NATs: nobody can dial them; two may punch, or have to meet at the master."""
        behind = {host: random.random() < 0.5 for host in self.hosts[: self.odd.natted]}  # whether it is symmetric
        for one, other in permutations(self.hosts, 2):
            if other in behind:
                punched = one in behind and not (behind[one] or behind[other])
                self.network.walls[one, other] = m.Way.punched if punched else m.Way.relayed
        self.network.relay = lambda: self.master

    def start_master(self) -> None:
        living = {master.host for master in self.masters if master.alive}
        free = [host for host in self.master_hosts if host not in living]
        if not free or (living and self.healed):
            return
        if self.journal.full or (self.journal.away and not living):  # it cannot take a term
            self.later(0.1, lambda: None if self.master else self.start_master())
            return
        name = f"M{len(self.masters) + 1}"
        self.note(name, "starts")
        self.masters.append(Master(self, name, free[0], self.journal))

    def kill_master(self, master: Master, at_least: float = 0.0) -> None:
        """It is gone; if it was the only one, another one follows, *at_least* so many seconds later."""
        if not master.alive:
            return
        self.note(master.name, "dies")
        master.alive = False
        self.network.crash(master)
        if self.master is None:
            longest = 1.0 if self.only_masters else self.limits.master_grace * 1.5
            away = self._pace.uniform(0.0, self._pace.choice((0.2, longest)))
            self.later(max(away, at_least), self.start_master)

    def alone_with_the_news(self, told: list[str], untold: list[str]) -> None:
        """The master died while it told its members something: one that has heard may die, too, or another be late."""
        if untold and not self.only_masters and self.random.random() < 0.5:
            name = self.random.choice(untold)
            late = next((one for one in self.daemons if one.name == name and one.alive and not one.asleep), None)
            if late is not None:
                self.blame(name)
                late.sleep()
                self.later(self.limits.rejoin_grace + self.random.uniform(0.3, 3.0), late.wake)
        if told and not self.only_masters and self.random.random() < 0.5:
            name = self.random.choice(told)
            daemon = next((one for one in self.daemons if one.name == name and one.alive), None)
            if daemon is not None:
                self.later(0.1, lambda: None if self.healed else self.kill_daemon(daemon, silent=False))
                self.start_again(daemon, self.limits.rejoin_grace + 1.0)

    def wake_master(self, master: Master) -> None:
        """A stopped master goes on; where another one has taken over it soon finds out."""
        if master is self.master or not master.alive:
            master.wake()
        elif self.odd.exact_leases:
            self.kill_master(master)
            master.wake()
        else:
            master.wake()
            self.later(self._pace.uniform(0.0, 0.5), lambda: self.kill_master(master))

    def start_daemon(self, name: str, host: str, *, twin: bool = False) -> Daemon:
        alive = [one for one in self.daemons if one.alive and one.host == host]
        if alive:
            return alive[0]
        self._incarnations += 1
        self.note(name, f"starts on {host}")
        self.network.revive(host)
        ended = self._ended.get(host, []) if self.seed % 3 else []
        daemon = Daemon(self, name, host, self._incarnations, ended[-256:])
        self.daemons = [one for one in self.daemons if one.alive]
        self.daemons.append(daemon)
        if twin and self.random.random() < 0.5:
            self.start_client(daemon)
        return daemon

    def turned_away(self, daemon: Daemon) -> None:
        """Another daemon has its name: the process ends, and is started again where it belongs."""
        self.judge.check("twin" in self.inflicted, f"{daemon.name} is sent away, and has no twin")
        self.kill_daemon(daemon, silent=False)
        if daemon.host in self.hosts:
            self.start_again(daemon, 1.0)

    def start_again(self, daemon: Daemon, delay: float) -> None:
        """Later, as another process; not a twin, once all is healed."""
        name, host = daemon.name, daemon.host
        self.later(delay, lambda: self.start_daemon(name, host) if host in self.hosts or not self.healed else None)

    def kill_daemon(self, daemon: Daemon, *, silent: bool) -> None:
        if not daemon.alive:
            return
        self.note(daemon.name, "loses power" if silent else "is killed")
        self.blame(daemon.name)
        self._ended.setdefault(daemon.host, []).append(daemon.incarnation)
        daemon.alive = False
        if silent:
            self.network.vanish(daemon)
        else:
            self.network.crash(daemon)
        for client in self.clients:
            if client.daemon is daemon:
                client.lose_daemon()

    def start_client(self, daemon: Daemon | None = None) -> None:
        living = [one for one in self.daemons if one.alive and not one.asleep]
        if not living or len({one.index for one in self.clients if one.alive}) >= (8 if self.shards == 1 else 5):
            return
        if daemon is None or not daemon.alive:
            daemon = self.random.choice(living)
        index = self.clients_started
        self.clients_started += 1
        self._attach(index, 0, daemon)
        for shard in range(1, self.shards):
            self._arriving[index] += 1
            late = self._islands.choice((0.0, 0.01, 0.3, 0.3, 0.3, 4.0)) * self._islands.random()
            beside = daemon if self._islands.random() < 0.5 else None
            self.later(late, partial(self._arrive, index, shard, beside))

    def _arrive(self, index: int, shard: int, daemon: Daemon | None) -> None:
        """Another shard of an island comes, if that is still there."""
        self._arriving[index] -= 1
        living = [one for one in self.daemons if one.alive and not one.asleep]
        if index in self._replaced or not living or not any(one.index == index for one in self.clients if one.alive):
            return
        self._attach(index, shard, daemon if daemon in living else self._islands.choice(living))

    def _attach(self, index: int, shard: int, daemon: Daemon) -> None:
        client = Client(self, index, daemon, shard)
        self.note(client.name, f"attaches to {daemon.name}")
        self.clients = [one for one in self.clients if one.alive]
        self.clients.append(client)

    def client_over(self, client: Client, error: str) -> None:
        """The client's communicator is of no use any more: its script starts over, as a new member."""
        self.note(client.name, f"is over: {error}")
        client.alive = False
        client.daemon.run(lambda: client.session.end("the client closed the connection"))
        self._follow(client, self._pace.uniform(0.0, 0.5))

    def client_dies(self, client: Client) -> None:
        self.blame(client.daemon.name)
        self.note(client.name, "dies")
        client.die()
        if self._pace.random() < 0.7 or self.shards > 1:
            self._follow(client, self._pace.uniform(0.0, 2.0))

    def _follow(self, client: Client, delay: float) -> None:
        """Another one comes after it, with an island of its own."""
        if client.index not in self._replaced:
            self.later(delay, self.start_client)
        if self.shards > 1:
            self._replaced.add(client.index)
            self.later(delay, lambda: self._clear(client.index))

    def _clear(self, index: int) -> None:
        """What is left of an island that never was admitted gives up; a member hears that it is out."""
        for one in self.clients:
            if one.index == index and one.alive and not one.next_seq:
                self.blame(one.daemon.name)
                one.die()

    def blame(self, name: str) -> None:
        self.blamed.add(name)

    def later(self, delay: float, call: Callable[[], Any]) -> None:
        self.clock.after(delay, call)

    def exchange(self) -> None:
        """Two members that know each other: the one sends, the other receives; or one of them does not."""
        living = [client for client in self.clients if client.member]
        if self.limits.ops_in_flight < 16:
            return  # calls that wait for their turn may wait for each other
        pairs = [(a, b) for a in living for b in living if a is not b and b.name in a.members and a.name in b.members]
        if not pairs:
            return
        one, other = self.random.choice(pairs)
        self._talks += 1
        tag, count = self._talks, self.random.choice((0, 1, 3))
        one.exchange(other.name, tag, sends=True, count=count)
        wrong = self.random.random() < 0.1
        if self.random.random() < 0.9:
            delay = self.random.choice((0.0, 0.2))

            def receive() -> None:
                if other.alive and one.name in other.members:
                    other.exchange(one.name, tag, sends=False, count=count + wrong)

            self.later(delay, receive)

    def nobody_is_out_unheard(self) -> bool:
        """Whether all who think that they are members are: without a journal the next master would believe them."""
        members = [one.peek for daemon in self.daemons if daemon.alive for one in daemon.sessions]
        living = [master for master in self.masters if master.alive] or self.masters[-1:]
        known = living[0].state.members if len(living) == 1 else {}
        return all(one.mid in known and known[one.mid].in_epoch for one in members if one.epoch and not one.over)

    # ---- the judge's questions -----------------------------------------------------------------------

    def judge_failure(self, client: Client, called: Called, failure: m.Failure) -> None:
        """Calls fail only for what was done to them."""
        error = failure.error
        uneven = called.what.kind in ROOTED or "differ" in self.inflicted  # roots may be lost, or named apart
        late = "joined the group after", "an earlier master logged why"  # the latter where a master forgot the words
        uneven = uneven or (self.behind and any(words in failure.what for words in late))
        if error == "OperationAborted" and called.what.on_failure == "retry" and not uneven:
            raise Violation(f"{client.name}: op {called.seq} asked to be retried, and ended in {failure.what}")
        if error == "ProtocolError" and "flip" not in self.inflicted:
            raise Violation(f"{client.name}: op {called.seq}: {failure.what}, and nothing was flipped")
        if error == "CollectiveMismatch" and not uneven:
            raise Violation(f"{client.name}: op {called.seq}: {failure.what}, and nobody called another one: {failure}")

    def judge_out(self, client: Client, failure: m.Failure) -> None:
        """Nobody is evicted for a fault that is not its own, nor because the master was away, nor for nonsense."""
        if "impossible" in failure.what + failure.got:
            raise Violation(f"{client.name} is out for what it may say: {failure}")
        if (
            failure.error in ("Evicted", "MasterUnreachable")
            and self.only_masters
            and client.daemon.name not in self.blamed
        ):
            raise Violation(f"{client.name} is out for nothing: {failure}")
        limits = self.limits
        late = (
            self.clock.now - self.healed_at > limits.lane_timeout + limits.heartbeat_timeout + limits.master_grace + 5.0
        )
        if self.healed and late and failure.error == "ConfigError":
            raise Violation(f"{client.name} was refused after all was healed: {failure}")

    # ---- the story -----------------------------------------------------------------------------------

    def run(self, spans: int = 1, after_each: Callable[[], None] = lambda: None) -> None:
        """The whole story: *spans* of faults, each of which is healed and ended.

        Raises:
            Violation: something that must be true is not.
        """
        self.begin()
        for _ in range(spans):
            self._break()
            self._heal()
            self._finish(self.clock.now + HEALED_FOR)
            self._look_back()
            after_each()

    def begin(self) -> None:
        """Start everyone."""
        self.note("world", repr(self.odd))
        self.start_master()
        for number, host in enumerate(self.hosts):
            self.start_daemon(f"d{number}", host)
        for number in range(self.odd.clients):
            daemon = self.daemons[number % len(self.daemons)]
            self.later(self._pace.choice((0.0, 0.3)) * self._pace.random(), lambda d=daemon: self.start_client(d))

    def _break(self) -> None:
        """A span of faults."""
        self.healed, self.last_seq = False, FOR_EVER
        self._most_events = self.clock.events + MOST_EVENTS
        for client in self.clients:
            client.kick()
        begin = self.clock.now + self.random.choice((0.0, 0.5, 1.0))
        for _ in range(self.odd.fault_count if self.odd.faults else 0):
            at = begin + self.random.uniform(0.0, self.odd.chaos_seconds)
            kind = self.random.choice(self.odd.faults)
            self.clock.at(at, lambda kind=kind: None if self.healed else self._faults.inflict(kind))
        for _ in range(3 if self.graces else 0):
            self.clock.at(begin + self._late.uniform(0.0, self.odd.chaos_seconds), self._be_late)
        self.until(begin + self.odd.chaos_seconds + 0.5)

    def _be_late(self) -> None:
        """A client calls nothing for a while; some operations go on without it."""
        living = [client for client in self.clients if client.alive]
        if living and not self.healed:
            client = self._late.choice(living)
            client.late_until = self.clock.now + self._late.choice((0.1, 0.6, 3.0)) * self._late.random()
            self.note(client.name, f"computes until {client.late_until:.3f}")

    def until(self, when: float) -> None:
        """Let it run."""
        clock = self.clock
        while clock.step(when):
            if clock.events > self._most_events:
                raise Violation(f"{MOST_EVENTS} events, and no end: {self._what_repeats()}")
            if clock.events - self._counted[1] >= MOST_IN_A_SECOND:
                if clock.now - self._counted[0] < 1.0:
                    raise Violation(f"{MOST_IN_A_SECOND} events in a second: {self._what_repeats()}")
                self._counted = clock.now, clock.events
        clock.now = max(clock.now, when)

    def _what_repeats(self) -> str:
        lines: list[str] = []
        self._trace = lambda line: lines.append(line[12:80])
        for _ in range(1000):
            self.clock.step(inf)
        return "; ".join(f"{count} times {line}" for line, count in Counter(lines).most_common(5))

    def _heal(self) -> None:
        """All faults end."""
        self.note("world", "is healed")
        self.healed, self.healed_at = True, self.clock.now
        self.network.heal()
        self.network.unfilter(COLLECTIVES)
        self.journal.mend()
        for master in self.masters[:-1]:
            self.kill_master(master)
        for master in self.masters:
            master.fuse, master.trap = -1, None
            self.wake_master(master)
        if self.master is None:
            self.start_master()
        for daemon in list(self.daemons):
            daemon.engine.flip = 0
            daemon.wake()
            if daemon.host not in self.hosts:
                self.kill_daemon(daemon, silent=False)
        for number, host in enumerate(self.hosts):
            self.start_daemon(f"d{number}", host)
        for client in self.clients:
            client.slow, client.late_until = 1.0, 0.0
        self._fill_up()

    def _fill_up(self) -> None:
        """Start clients until there are enough; where no daemon lives the next round does."""
        there = Counter(client.index for client in self.clients if client.alive)
        for index in [index for index, count in there.items() if count + self._arriving[index] < self.shards]:
            self._replaced.add(index)
            self._clear(index)
        alive = len(set(there) - self._replaced)
        for _ in range(alive, max(self.odd.start_world, self.odd.min_world, 2)):
            self.start_client()

    def _finish(self, by: float) -> None:
        """Go on until everyone that lives is a member and has nothing left to do."""
        since = self.clock.now
        rounds = 0
        while True:
            self.until(self.clock.now + 0.25)
            self._fill_up()
            self._call_missing_halves()
            living = [client for client in self.clients if client.alive]
            settled = self.clock.now - since > 1.0 and all(client.member for client in living)
            settled = settled and self.master is not None  # where members commit they end without
            if settled and self.last_seq == FOR_EVER:
                self.last_seq = max(client.next_seq for client in living) + 2
                for client in living:
                    client.kick()
            elif self.last_seq < FOR_EVER and settled:
                epochs = {client.epoch for client in living}
                if all(client.idle for client in living) and len(epochs) == 1:
                    rounds += 1
                    if rounds == 3:
                        return
                else:
                    rounds = 0
            elif (
                self.last_seq < FOR_EVER
                and min((one.next_seq for one in living if one.member), default=0) > self.last_seq
            ):
                self.last_seq += 2 * self.odd.update_every  # somebody new waits to be admitted
                for client in living:
                    client.kick()
            if self.clock.now > by:
                raise Violation("no end: " + "; ".join(self._states()))

    def _states(self) -> list[str]:
        found = [f"last seq {self.last_seq}"]
        for client in self.clients:
            if client.alive:
                core = client.session.member
                waits = (
                    f"epoch {core.epoch_number}, next {client.next_seq}, open {[c.seq for c in client.open.values()]}"
                )
                found.append(f"{client.name} on {client.daemon.name}: {waits}, {core.waiting_for()}")
        return found

    def _call_missing_halves(self) -> None:
        """Whoever is waited for in a send or recv calls it."""
        by_name = {client.name: client for client in self.clients if client.member}
        for client in list(by_name.values()):
            for called in list(client.open.values()):
                other = by_name.get(called.other)
                if called.seq or other is None or client.name not in other.members:
                    continue
                mine = [
                    theirs for theirs in other.open.values() if (theirs.other, theirs.tag) == (client.name, called.tag)
                ]
                if not mine and not self._has_ended(client, called):
                    sends = called.what.kind is not Kind.send
                    key = (other.name, client.name, called.tag) if sends else (client.name, other.name, called.tag)
                    self.judge.exchanged.get(key, {}).pop(other.name, None)
                    other.exchange(client.name, called.tag, sends=sends, count=called.what.count)

    def _has_ended(self, client: Client, called: Called) -> bool:
        """Whether the other half of a send or recv has its result: this one must end, too."""
        sends = called.what.kind is Kind.send
        key = (client.name, called.other, called.tag) if sends else (called.other, client.name, called.tag)
        return self.judge.exchanged.get(key, {}).get(called.other) == ""

    def _look_back(self) -> None:
        """Everything has ended: nothing is left behind."""
        master = self.master
        assert master is not None
        for _ in range(20):  # daemons without clients may be on their way back
            self.until(self.clock.now + 2 * self.limits.heartbeat_interval)
            if master.sizes()["connections"] == len(self.hosts):
                break
        # The newest call is void, or was, and where members commit sums the master has yet to hear of it.
        while master.sizes()["voids"] or (self.sums and master.sizes()["digest_failures"]):
            self.last_seq += 1
            for client in self.clients:
                client.kick()
            self._finish(self.clock.now + HEALED_FOR)
        living = [client for client in self.clients if client.alive]
        for client in living:
            links = client.session.links
            down = (links.neighbours | links.spares) - links.up(COLLECTIVES)
            self.judge.check(not down, f"{client.name}'s links to {sorted(down)} are down, and nothing is broken")
        sizes = master.sizes()
        self.note("world", f"ends; {sizes}; {self.judge.results} results, failures {self.judge.errors}")
        connections = sizes.pop("connections")
        self.judge.check(connections == len(self.hosts), f"{connections} connections of {len(self.hosts)} daemons")
        self.judge.check(sizes.pop("members") == len(living), f"members of {len(living)} clients: {sizes}")
        sizes.pop("asked")
        self.judge.check(not any(sizes.values()), f"the master keeps {sizes}")
        for daemon in self.daemons:
            if daemon.alive:
                self.judge.check(not daemon.engine.works, f"{daemon.name}'s engine keeps {list(daemon.engine.works)}")
        kept = {client.name: client.session.member.in_flight for client in living}
        self.judge.check(not any(kept.values()), f"members keep calls: {kept}")


def brief(message: Any) -> str:
    """A message for the trace, without what is the same in all."""
    match message:
        case m.Epoch():
            names = ", ".join(member.name for member in message.members)
            voids = "".join(f", void {void.seq} ({void.error})" for void in message.voids)
            return f"Epoch {message.epoch} of {names}; committed {message.committed_upto}{voids}; {message.reason}"
        case m.Report():
            return (
                f"Report of {message.mid}: epoch {message.epoch}, committed {message.finished.committed}, "
                f"done {[one[0] for one in message.finished.done]}"
            )
        case m.Probe() | m.ProbeResult():
            return f"{type(message).__name__} of joiner {message.joiner}: {message.prober} to {message.target}"
        case m.EpochInfo():
            return f"epoch {message.epoch}: rank {message.rank} of {', '.join(message.members)}"
        case m.Result():
            return f"result of op {message.seq}, epoch {message.epoch}, over {', '.join(message.contributors)}"
        case m.Failure():
            return f"failure of call {message.id}: {message.error}, {message.what}; {message.got}"
    return str(message)
