"""Links that break: they come up again in the same round, or members that commit by themselves begin another (C12)."""

from __future__ import annotations

from random import Random

import pytest

from tests.sim import mistakes
from tests.sim.world import World
from wancoll.peer.core.links import Broken

AWAY = 14.0  # seconds without a master; members would wait for 15


def breaks_without_master(seed: int, times: int = 8) -> int:
    """A world in which links break again and again, heard by both ends or by one.

    Returns:
        Rounds that were begun. 0: too few members.

    Raises:
        Violation: a result that must not be; or somebody has none for long after a link broke.
    """
    world, random = World(seed, faults=(), voters=32), Random(seed)
    world.begin()
    world.until(5.0)
    members = [client.session.member for client in world.clients if client.alive]
    if len(members) < 2 or any(one.collectives.tally is None for one in members) or world.network.walls:
        return 0
    assert world.master is not None
    for daemon in world.daemons:  # a lane that breaks in a handshake may make a link late
        world.blame(daemon.name)
    epochs = {one.epoch_number for one in members}
    world.kill_master(world.master, AWAY)
    world.until(world.clock.now + world.limits.heartbeat_timeout + 0.2)  # from here on they pass updates, too (C11)
    for _ in range(times):
        world.until(world.clock.now + random.choice((0.0, 0.05, 0.3)))
        lanes = [end for end in world.network.ends if end.kind == "lane"]
        if not lanes:
            continue
        chosen, unheard = random.choice(lanes), random.random() < 0.3
        if random.random() < 0.5:  # bytes were wrong: they cannot be had again
            hub, daemon = chosen.process.links, chosen.other.process.name
            for number in [number for number, link in hub.core.open().items() if link.other.daemon == daemon]:
                chosen.process.run(lambda number=number, hub=hub: hub.step(Broken(number, "checksum")))
            continue
        whole = random.random() < 0.7  # all that is between the two
        for end in [one for one in lanes if whole and one.other.process is chosen.other.process] or [chosen]:
            if end.process is chosen.process:
                how = end.broken_unheard if unheard else end.broken
                end.process.run(lambda how=how: how("connection reset"))
    reached = {one.name: one.collectives.committed for one in members}
    world.until(world.clock.now + 2.0 + world.limits.link_timeout / 2)
    for one in members:
        upto = one.collectives.committed
        world.judge.check(upto > reached[one.name] + 1, f"{one.name} stands at op {upto}: {one.waiting_for()}")
    assert {one.epoch_number for one in members} == epochs
    rounds = max(one.collectives.round for one in members)
    world._heal()
    world._finish(world.clock.now + 60.0)
    return rounds


def resets(seed: int, away: float, voters: int) -> int:
    """A world with a master in which all lanes of a pair break, and others come through after *away* link_timeouts.

    One end may notice long before the other. Below 1 that costs no epoch, no round and no attempt.

    Returns:
        Times that a pair was broken. 0: too few members.

    Raises:
        Violation: it cost more; or somebody has no result for long afterwards.
    """
    world, random = World(seed, faults=(), voters=voters), Random(seed)
    world.begin()
    world.until(5.0)
    members = [client.session.member for client in world.clients if client.alive]
    if len(members) < 2 or len(world.daemons) < 2 or world.odd.measures or any(not one.epoch for one in members):
        return 0
    for daemon in world.daemons:
        world.blame(daemon.name)
    network, timeout = world.network, world.limits.link_timeout
    before = {one.name: (one.epoch_number, one.collectives.round) for one in members}
    for _ in range(4):
        one, other = random.sample(world.daemons, 2)
        ends, unheard = (one.host, other.host), random.random() < 0.4
        if random.random() < 0.7:
            for way in (ends, ends[::-1]):
                network.block(*way)
        for end in [end for end in network.ends if end.kind == "lane" and end.process is one]:
            if end.other.process is other:
                how = end.broken_unheard if unheard else end.broken
                end.process.run(lambda how=how: how("connection reset"))
        world.until(world.clock.now + away * timeout)
        for way in (ends, ends[::-1]):
            network.unblock(*way)
        world.until(world.clock.now + 1.0 + timeout + world.limits.connect_timeout)
        reached = {one.name: one.collectives.committed for one in members}
        world.until(world.clock.now + 2.0)
        for member in members:
            name, now = member.name, (member.epoch_number, member.collectives.round)
            went_on = member.collectives.committed > reached[name] or now[0] > before[name][0]
            world.judge.check(went_on, f"{name} stands still: {member.waiting_for()}")
            world.judge.check(away > 1 or now == before[name], f"{name} is in {now}, not {before[name]}")
    world._heal()
    world._finish(world.clock.now + 60.0)
    return 4


@pytest.mark.parametrize("voters", [0, 32])
@pytest.mark.parametrize("away", [0.0, 0.5, 1.6])
def test_all_lanes_of_a_link_break_and_come_back(away: float, voters: int) -> None:
    assert sum(resets(seed, away, voters) for seed in SUMS[:5]) > 4


SUMS = range(3, 800, 4)  # seeds whose programs call nothing that waits for a master


def test_links_that_break_without_a_master() -> None:
    assert sum(breaks_without_master(seed) for seed in SUMS[:8]) > 8


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_links_that_break_without_a_master_in_many_worlds() -> None:
    assert sum(breaks_without_master(seed) for seed in SUMS) > 200


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", ["rounds_said_to_nobody", "running_again_in_place", "frames_of_an_older_round"])
def test_mistakes_about_rounds_are_found(name: str) -> None:
    """Others show in small worlds."""
    with getattr(mistakes, name)(), pytest.raises(AssertionError):
        sum(map(breaks_without_master, SUMS))
