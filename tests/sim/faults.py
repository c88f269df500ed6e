"""What can go wrong, as functions of a world: each draws where and for how long, and undoes itself in time."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from wancoll.peer.core.links import COLLECTIVES, P2P
from wancoll.wire import messages as m
from wancoll_master.core.ready import Announce, Broadcast

if TYPE_CHECKING:
    from tests.sim.client import Client
    from tests.sim.daemon import Daemon
    from tests.sim.network import End
    from tests.sim.world import World


class Faults:
    """See the module; every method is a fault."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._random = world.random

    def inflict(self, kind: str) -> None:
        self._world.note("fault", kind)
        self._world.inflicted.append(kind)
        getattr(self, kind)()

    # ---- what to choose from -------------------------------------------------------------------------

    def _daemon(self) -> Daemon | None:
        found = [daemon for daemon in self._world.daemons if daemon.alive]
        return self._random.choice(found) if found else None

    def _client(self) -> Client | None:
        found = [client for client in self._world.clients if client.alive]
        return self._random.choice(found) if found else None

    def _length(self) -> float:
        """Seconds that a fault lasts: some are over before anybody can notice, some everybody does."""
        limits = self._world.limits
        longest = self._random.choice((0.1, limits.heartbeat_timeout, limits.lane_timeout, limits.master_grace + 1.0))
        return self._random.uniform(0.0, longest)

    def _short(self) -> float:
        """Shorter than what costs anybody its membership."""
        return self._random.uniform(0.0, self._world.limits.heartbeat_timeout / 2)

    # ---- daemons -------------------------------------------------------------------------------------

    def kill_daemon(self) -> None:
        if daemon := self._daemon():
            self._world.kill_daemon(daemon, silent=False)
            self._world.start_again(daemon, self._length())

    def lose_host(self) -> None:
        if daemon := self._daemon():
            self._world.kill_daemon(daemon, silent=True)
            self._world.start_again(daemon, self._length())

    def lose_site(self) -> None:
        """About half of all at the same time."""
        living = [daemon for daemon in self._world.daemons if daemon.alive]
        silent = self._random.random() < 0.5
        for daemon in self._random.sample(living, len(living) // 2):
            self._world.kill_daemon(daemon, silent=silent)
            self._world.start_again(daemon, self._length())

    def restart_twice(self) -> None:
        if daemon := self._daemon():
            for _ in range(2):
                self._world.kill_daemon(daemon, silent=self._random.random() < 0.5)
                daemon = self._world.start_daemon(daemon.name, daemon.host)

    def twin(self) -> None:
        """A second daemon with the same name, elsewhere, at the same time."""
        if daemon := self._daemon():
            self._world.blame(daemon.name)
            twin = self._world.start_daemon(daemon.name, f"{daemon.host}t", twin=True)
            self._world.later(self._length(), lambda: self._world.kill_daemon(twin, silent=False))

    def pause_daemon(self) -> None:
        if daemon := self._daemon():
            self._world.blame(daemon.name)
            daemon.sleep()
            self._world.later(self._length(), daemon.wake)

    def only_one_left(self) -> None:
        """A member is evicted and does not hear of it; then the master and all others die, and it alone comes back."""
        daemon = self._daemon()
        if daemon is None:
            return
        world = self._world
        network, limits = world.network, world.limits
        cut = [(daemon.host, host) for host in world.master_hosts] + [
            (host, daemon.host) for host in world.master_hosts
        ]
        world.blame(daemon.name)
        for ends in cut:
            network.block(*ends)

        def turn() -> None:
            if world.healed:
                return
            for other in list(world.daemons):
                if other is not daemon and other.alive:
                    world.kill_daemon(other, silent=False)
                    world.start_again(other, self._length())
            if world.master is not None:
                world.kill_master(world.master)
            for ends in cut:
                network.unblock(*ends)

        world.later(limits.heartbeat_timeout + self._random.uniform(0.1, 1.0), turn)

    # ---- the network ---------------------------------------------------------------------------------

    def _cut(self, pairs: list[tuple[str, str]], seconds: float | None = None) -> None:
        network = self._world.network
        for ends in pairs:
            network.block(*ends)
        length = self._length() if seconds is None else seconds
        self._world.later(length, lambda: [network.unblock(*ends) for ends in pairs])

    def _pair(self) -> tuple[str, str] | None:
        daemons = [daemon for daemon in self._world.daemons if daemon.alive]
        if len(daemons) < 2:
            return None
        one, other = self._random.sample(daemons, 2)
        self._world.blame(one.name)
        self._world.blame(other.name)
        return one.host, other.host

    def cut_pair(self) -> None:
        if ends := self._pair():
            self._cut([ends, ends[::-1]])

    def cut_one_way(self) -> None:
        if ends := self._pair():
            self._cut([ends])

    def cut_master(self) -> None:
        """One way or both."""
        if daemon := self._daemon():
            self._world.blame(daemon.name)
            both = [(daemon.host, host) for host in self._world.master_hosts]
            back = [ends[::-1] for ends in both]
            self._cut(self._random.choice((both, back, both + back)))

    def cut_members(self) -> None:
        """All who have members are cut off from the masters, not all from each other; others are there, and join."""
        world = self._world
        cut = [daemon for daemon in world.daemons if daemon.alive]
        there = [(daemon.host, master) for daemon in cut for master in world.master_hosts]
        fresh = []
        for daemon in [*cut, None]:
            if daemon is not None:
                world.blame(daemon.name)
            number = len(world.hosts)
            world.hosts.append(f"h{number}")
            fresh.append(world.start_daemon(f"d{number}", world.hosts[-1]))
        silent = world.limits.heartbeat_timeout
        length = silent + self._random.uniform(0.3, world.limits.master_grace)

        def later(delay: float, call: Callable[[], object]) -> None:
            world.later(delay, lambda: None if world.healed else call())

        later(0.2, lambda: self._cut(there + [ends[::-1] for ends in there], length))
        if len(cut) > 1 and self._random.random() < 0.5:
            one, other = self._random.sample(cut, 2)
            later(self._random.uniform(0.2, length), lambda: self._cut([(one.host, other.host)], length))
        for daemon in fresh:
            later(silent + 0.3, partial(world.start_client, daemon))

    def cut_off_master(self) -> None:
        """The network of all masters is down, for all daemons; one way or both."""
        world = self._world
        self._too_much_with("reset_control")
        known = world.master.state.daemons if world.master is not None else {}
        if min(world.odd.daemons, len(known)) <= 1:  # nothing tells it from the end of the one daemon (R11)
            for daemon in world.daemons:
                world.blame(daemon.name)
        there = [(host, master) for host in world.hosts for master in world.master_hosts]
        back = [ends[::-1] for ends in there]
        self._cut(self._random.choice((there, back, there + back)), self._random.uniform(0.5, 5.0))

    def isolate(self) -> None:
        """One way or both."""
        if daemon := self._daemon():
            self._world.blame(daemon.name)
            for other in self._world.daemons:  # its neighbours may be blamed for links to it
                self._world.blame(other.name)
            others = [*self._world.hosts, *self._world.master_hosts]
            pairs = [(daemon.host, host) for host in others if host != daemon.host]
            back = [ends[::-1] for ends in pairs]
            self._cut(self._random.choice((pairs, back, pairs + back)))

    def _end(self, kind: str) -> bool:
        return any(end.kind == kind for end in self._world.network.ends)

    def clog(self) -> None:
        """A connection delivers nothing, in one direction, for a while."""
        if ends := list(self._world.network.ends):
            end = self._random.choice(ends)
            self._world.blame(end.process.name)
            self._world.blame(end.other.process.name)
            end.clogged += 1

            def free() -> None:
                end.clogged = max(0, end.clogged - 1)
                end.kick()

            self._world.later(self._length(), free)

    def late_dials(self) -> None:
        """For a while what is said first on new lanes comes late, some of it after the dialler has tried again."""
        world, network = self._world, self._world.network
        for daemon in world.daemons:
            world.blame(daemon.name)
        longest = 2 * world.limits.connect_timeout

        def delay(end: End) -> None:
            end.clogged += 1

            def free() -> None:
                end.clogged = max(0, end.clogged - 1)
                end.kick()

            world.later(self._random.uniform(0.0, longest), free)

        network.late = delay

        def punctual() -> None:
            network.late = None

        world.later(self._length(), punctual)
        self._break("lane")

    def _filter(self, channel: int) -> None:
        """Lanes of one channel of a pair cannot be made any more, by one end or by either; those that are up break."""
        if ends := self._pair():
            network, silent = self._world.network, self._random.random() < 0.5
            for one, other in (ends, ends[::-1])[: self._random.randint(1, 2)]:
                network.filter(one, other, channel, silent=silent)
            for end in list(network.ends):
                if end.kind == "lane" and {end.process.host, end.other.process.host} == set(ends):
                    end.process.run(lambda end=end: end.broken("connection reset"))

    def filter_sends(self) -> None:
        """It outlasts the healing: a send or recv ends whether its link can be made or not."""
        self._filter(P2P)
        for wait in (0.0, 0.3):
            self._world.later(wait, self._world.exchange)

    def filter_collectives(self) -> None:
        self._filter(COLLECTIVES)
        self._world.later(self._length(), lambda: self._world.network.unfilter(COLLECTIVES))

    def _too_much_with(self, other: str) -> None:
        """Who cannot come back in time since the network is cut just then may be evicted."""
        if other in self._world.inflicted:
            for daemon in self._world.daemons:
                self._world.blame(daemon.name)

    def _break(self, kind: str, *, blame: bool = True) -> None:
        found = [end for end in self._world.network.ends if end.kind == kind]
        if found:
            end = self._random.choice(found)
            for process in (end.process, end.other.process):
                if blame:
                    self._world.blame(process.name)
            end.process.run(lambda: end.broken("connection reset"))

    def break_unheard(self) -> None:
        """One end of a link loses it and the other one does not, unless it has something to send."""
        found = [end for end in self._world.network.ends if end.kind == "lane"]
        if found:
            end = self._random.choice(found)
            self._world.blame(end.process.name)
            self._world.blame(end.other.process.name)
            end.process.run(lambda: end.broken_unheard("timed out"))

    def reset_link(self) -> None:
        """All lanes of a pair break, heard by both ends or by one; perhaps none comes through for a while."""
        if ends := self._pair():
            if self._random.random() < 0.5:
                self._cut([ends, ends[::-1]], self._random.uniform(0.0, 1.5 * self._world.limits.link_timeout))
            unheard = self._random.random() < 0.4
            for end in list(self._world.network.ends):
                if end.kind == "lane" and (end.process.host, end.other.process.host) == ends:
                    how = end.broken_unheard if unheard else end.broken
                    end.process.run(lambda how=how: how("connection reset"))

    def break_lane(self) -> None:
        self._break("lane")

    def break_control(self) -> None:
        self._break("control")

    def reset_control(self) -> None:
        """Control connections break, one or many or one again and again: nobody is evicted for it."""
        self._too_much_with("cut_off_master")
        for wait in self._random.choice(((0.0,), (0.0, 0.0, 0.0), (0.0, 0.05, 0.1, 0.3, 0.31))):
            self._world.later(wait, lambda: self._break("control", blame=False))

    def reset_all(self) -> None:
        """All connections of one daemon, of some or of all break at once, and all live: nobody is evicted for it."""
        living = [daemon for daemon in self._world.daemons if daemon.alive]
        chosen = self._random.sample(living, self._random.choice((1, (len(living) + 1) // 2, len(living))))
        for end in list(self._world.network.ends):
            if end.kind in ("control", "lane") and (end.process in chosen or end.other.process in chosen):
                end.process.run(lambda end=end: end.broken("connection reset"))

    # ---- clients -------------------------------------------------------------------------------------

    def kill_client(self) -> None:
        if client := self._client():
            self._world.client_dies(client)

    def leave(self) -> None:
        if client := self._client():
            self._world.client_dies(client)

    def join(self) -> None:
        self._world.start_client()

    def slow_client(self) -> None:
        if client := self._client():
            client.slow = self._random.choice((3.0, 10.0))

            def quick() -> None:
                client.slow = 1.0

            self._world.later(self._length(), quick)

    def exchange(self) -> None:
        self._world.exchange()

    def differ(self) -> None:
        """A member calls something else than the others, once."""
        if client := self._client():
            seq, what = client.next_seq + self._random.randint(0, 2), self._random.randint(0, 2)
            whole = self._world.shards > 1 and self._random.random() < 0.5  # a column, alike in itself
            for one in [one for one in self._world.clients if whole and one.shard == client.shard] or [client]:
                self._world.differs[one.name, seq] = what

    def flip(self) -> None:
        """A result that is not what it should be, once or more often."""
        if daemon := self._daemon():
            daemon.engine.flip = self._random.randint(1, 4)

    # ---- masters -------------------------------------------------------------------------------------

    def kill_master(self) -> None:
        if (master := self._world.master) is not None:
            self._world.kill_master(master)

    def master_away(self) -> None:
        """For longer than it takes members to go on without it; they may be told of an epoch while it dies."""
        world = self._world
        if (master := world.master) is None:
            return
        away = world.limits.heartbeat_timeout + self._random.uniform(0.2, world.limits.master_grace)
        if self._random.random() < 0.5:
            world.start_client()
        if self._random.random() < 0.5:
            self._world.later(self._random.uniform(0.0, away), lambda: world.healed or self.kill_client())
        self._world.later(self._random.uniform(0.0, 1.0), lambda: world.healed or world.kill_master(master, away))

    def unheard_master(self) -> None:
        """It hears all, and nobody hears it, for longer than it takes members to go on without it."""
        world = self._world
        for daemon in world.daemons:
            world.blame(daemon.name)
        back = [(master, host) for host in world.hosts for master in world.master_hosts]
        away = world.limits.heartbeat_timeout + self._random.uniform(0.2, 2.0)
        world.start_client()
        wait = self._random.uniform(0.0, 1.0)
        world.later(wait, lambda: world.healed or self._cut(back, away))

    def cut_short_master(self) -> None:
        """It dies in the middle of what it does next, between the journal and the network, or between two members."""
        if (master := self._world.master) is not None:
            if self._random.random() < 0.5:
                master.fuse = self._random.randint(0, 12)
            else:
                master.trap = self._random.choice((Announce, Broadcast, m.Settled))
                if master.trap is m.Settled:  # which one half may hear of
                    for wait in (0.0, 0.1, 0.2):  # all is called before all is healed
                        self._world.later(wait, self._world.exchange)

    def full_disk(self) -> None:
        """For a while what a master writes into its file is lost."""
        journal = self._world.journal
        if not self._world.odd.elected:
            journal.full = True
            self._world.later(self._length(), journal.mend)

    def store_away(self) -> None:
        """For a while the store that fences answers nobody."""
        journal = self._world.journal
        if self._world.odd.elected:
            journal.away = True
            self._world.later(self._length(), journal.mend)

    def refuse_write(self) -> None:
        """The store refuses the next write: its master leads no more."""
        if self._world.odd.elected:
            self._world.journal.refuses = 1

    def lose_journal(self) -> None:
        """With its lock or without it; a daemon that has never seen a master may be the first to come to the next."""
        world = self._world
        if (master := world.master) is None or not world.nobody_is_out_unheard():
            return
        all_of_it = world.odd.elected or self._random.random() < 0.5
        world.journal.lose(lock_too=all_of_it)
        world.judge.forgets(all_of_it=all_of_it)
        world.kill_master(master)
        if self._random.random() < 0.5:
            number = len(world.hosts)
            world.hosts.append(f"h{number}")
            world.start_client(world.start_daemon(f"d{number}", world.hosts[-1]))

    def pause_master(self) -> None:
        if (master := self._world.master) is not None and not master.asleep:
            master.sleep()
            self._world.later(self._length_of_pause(), lambda: self._world.wake_master(master))

    def _length_of_pause(self) -> float:
        """Where nobody may be evicted, not as long as members look for a master at most."""
        longest = self._world.limits.master_grace / 3 if self._world.only_masters else self._length()
        return self._random.uniform(0.0, longest)

    def takeover(self) -> None:
        """The master is stopped, another one takes over, and the first wakes up."""
        master = self._world.master
        if master is not None and not master.asleep and self._world.odd.elected:
            master.sleep()
            self._world.later(self._short(), self._world.start_master)
            self._world.later(self._length_of_pause() + 1.0, lambda: self._world.wake_master(master))
