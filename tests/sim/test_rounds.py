"""Links that break while no master is there: members that commit among themselves go on, in another round (C12)."""

from __future__ import annotations

from random import Random

import pytest

from tests.sim import mistakes
from tests.sim.world import World

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
        whole = random.random() < 0.7  # all that is between the two: else the link goes on without that lane
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
