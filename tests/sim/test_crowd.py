"""Hundreds of members in one group, and hundreds of groups, from forming to a commit after the master's restart.

At night they are a thousand.

The bounds are what a busy machine cannot change: events that the master takes in, and bytes that it says.
"""

from __future__ import annotations

import pytest

from tests.later import at_night, later
from tests.sim.crowd import Crowd
from wancoll.collective import Kind


@pytest.mark.timeout(600)
@pytest.mark.parametrize("world", [60, *later(300), *at_night(1000)])
def test_one_group(world: int) -> None:
    crowd = Crowd(world)
    crowd.form()
    assert crowd.epochs() == {1}
    steps, nbytes = crowd.counted()
    assert steps == 3 * world, "each says Hello, Heartbeat(0) and Join"
    assert nbytes < world * (500 + 150 * world), "each is told of each once"

    crowd.call(Kind.barrier)
    assert crowd.told["g0", 1] == world
    steps, nbytes = crowd.counted()
    assert (steps, nbytes < 100 * world) == (world, True)

    apart = world // 60
    ten = crowd.peers[3 : 3 + 10 * apart : apart]
    crowd.call(Kind.barrier, [peer for peer in crowd.peers if peer not in ten])
    crowd.counted()
    crowd.kill(ten)
    assert crowd.epochs() == {2}, "lost together: one epoch"
    assert crowd.told["g0", 2] == world - 10
    assert crowd.counted()[1] < 1000 * world

    site = crowd.peers[: len(crowd.peers) // 2 - 1]
    crowd.call(Kind.barrier, [peer for peer in crowd.peers if peer not in site])
    crowd.counted()
    crowd.silence(site)
    left = len(crowd.peers)
    assert crowd.epochs() == {3}, "a site that falls silent: one epoch"
    assert crowd.told["g0", 3] == left
    assert crowd.counted()[1] < left * (1000 + 20 * world), "who left is named by number"

    crowd.call(Kind.barrier, crowd.peers[1:])
    crowd.restart()
    assert crowd.epochs() == {3}, "all report: the epoch goes on"
    crowd.counted()
    crowd.call(Kind.barrier, crowd.peers[:1])
    assert crowd.told["g0", 4] == left
    steps, nbytes = crowd.counted()
    assert (steps, nbytes < 100 * left) == (1, True), "the others' word was taken from their reports"

    joiner = crowd.join("g0", world)
    crowd.call(Kind.update_membership, crowd.peers[:-1])
    crowd.call(Kind.barrier)
    assert crowd.epochs() == {4}
    assert joiner.member.rank == left
    assert crowd.outcomes["g0", 6] == (4, tuple(joiner.member.member_names))
    assert crowd.told["g0", 6] == left + 1
    assert crowd.counted()[0] < 12 * left, "probes of two directions, what was called, and done"
    assert not any(peer.failures for peer in crowd.peers)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("groups", [20, *later(300), *at_night(1000)])
def test_many_groups(groups: int) -> None:
    crowd = Crowd(4, groups)
    crowd.form()
    crowd.call(Kind.barrier)
    steps, nbytes = crowd.counted()
    assert (steps, nbytes < 4 * groups * 2000) == (16 * groups, True)

    crowd.kill(crowd.peers[::4])
    crowd.call(Kind.barrier)
    assert set(crowd.told.values()) == {4, 3}
    assert len(crowd.epochs()) <= groups + 1

    before = {peer.name: peer.member.epoch_number for peer in crowd.peers}
    crowd.counted()
    crowd.restart()
    assert {peer.name: peer.member.epoch_number for peer in crowd.peers} == before
    crowd.call(Kind.barrier)
    assert crowd.counted()[0] == 4 * 3 * groups, "each says Hello, Report, Heartbeat(0) and Vote"
    assert [crowd.told[f"g{number}", 3] for number in range(groups)] == [3] * groups
    assert not any(peer.failures for peer in crowd.peers)
