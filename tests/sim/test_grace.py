"""Clients that are late with calls that have a grace time (R20): the others go on, whatever else breaks meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.sim.client import Client
from tests.sim.world import World
from wancoll.collective import Descriptor, DType, Kind

GRACE = 0.3
SUM = Descriptor(Kind.all_reduce, DType.int64, count=3, grace=GRACE)


class Graces(World):
    """All calls are sums with a grace time, and one client makes none of them for long."""

    def __init__(self, seed: int, zero_contributions: int = 1 << 20) -> None:
        super().__init__(seed, faults=(), graces=(GRACE,))
        self.limits = replace(self.limits, zero_contributions=zero_contributions)
        self.ends: dict[str, list[tuple[float, int, bool]]] = {}  # by client: when, which operation, whether it counts
        judge = self.judge.ends

        def note(client: Client, called: object, message: object) -> None:
            judge(client, called, message)  # type: ignore[arg-type]
            if hasattr(message, "counted"):
                self.ends.setdefault(client.name, []).append((self.clock.now, message.seq, message.counted))

        self.judge.ends = note  # type: ignore[method-assign]

    def _draw_call(self, seq: int) -> Descriptor:
        return Descriptor(Kind.update_membership) if self.healed and seq % 3 == 0 else SUM

    def someone_is_late(self, seconds: float, broken: Callable[[], None]) -> tuple[Client, list[Client], float]:
        """The late one, the others, and until when; *broken* happens in the middle."""
        self.begin()
        self.until(6.0)
        living = [client for client in self.clients if client.member]
        late, others = living[0], living[1:]
        begin = self.clock.now
        late.late_until = begin + seconds
        self.until(begin + seconds / 2)
        broken()
        self.until(begin + seconds - 0.01)
        return late, [client for client in others if client.alive], begin + seconds / 2


def worlds(least: int, **options: int) -> list[Graces]:
    found = [Graces(seed, **options) for seed in range(60)]
    return [world for world in found if world.odd.clients == world.odd.daemons == world.odd.start_world >= least][:3]


def check(world: Graces, late: Client, others: list[Client], since: float, most: float) -> None:
    """The others went on within *most* seconds after *since*; the late one gets the very same results afterwards."""
    assert others
    for client in others:
        times = [when for when, _, counted in world.ends[client.name] if when > since and counted]
        assert times, f"seed {world.seed}: {client.name} is told nothing; {world._states()}"
        pause = max(b - a for a, b in zip([since, *times], [*times, late.late_until], strict=False))
        assert pause < most, f"seed {world.seed}: {client.name} waited for {pause:.2f} s"
    reached = max(seq for client in others for _, seq, _ in world.ends[client.name])
    world.until(late.late_until + 0.5 + world.odd.think * (reached + 2))
    missed = [seq for when, seq, counted in world.ends[late.name] if not counted]
    assert len(missed) > 3, f"seed {world.seed}"
    assert world.ends[late.name][-1][1] >= reached  # the judge has compared what it holds with the others'
    world._heal()
    world._finish(world.clock.now + 60.0)
    world._look_back()


def test_the_others_go_on_and_the_late_one_gets_their_results() -> None:
    for world in worlds(2):
        late, others, since = world.someone_is_late(5.0, lambda: None)
        check(world, late, others, since, 2 * GRACE + world.odd.think + 1.0)


@pytest.mark.check
@pytest.mark.timeout(120)
def test_when_a_third_one_is_lost_meanwhile() -> None:
    for world in worlds(3):

        def lose(world: Graces = world) -> None:
            mine = {client.daemon.name for client in world.clients[:2]}
            victim = next(daemon for daemon in reversed(world.daemons) if daemon.name not in mine)
            world.kill_daemon(victim, silent=False)

        if world.odd.min_world >= world.odd.clients:
            continue
        late, others, since = world.someone_is_late(10.0, lose)
        check(world, late, others, since, 2 * GRACE + world.odd.think + 2.0 + world.limits.return_grace)


@pytest.mark.timeout(120)
def test_when_the_master_is_started_anew_meanwhile() -> None:
    for world in worlds(2):
        world.only_masters = True  # it comes back soon
        late, others, since = world.someone_is_late(12.0, lambda: world.kill_master(world.master))  # noqa: B023
        check(world, late, others, since, 2 * GRACE + world.odd.think + 5.0)


def test_results_are_kept_up_to_a_bound_and_then_the_late_one_is_waited_for() -> None:
    for world in worlds(2, zero_contributions=5):
        late, others, _ = world.someone_is_late(8.0, lambda: None)
        end = late.late_until
        assert len(late.session.member.collectives._late) == 5  # the bound
        for client in others:
            assert not [when for when, _, _ in world.ends[client.name] if end - 4.0 < when < end]
        world.until(end + 0.5 + 8 * world.odd.think)
        assert sum(not counted for _, _, counted in world.ends[late.name]) >= 5
        for client in others:
            assert [when for when, _, _ in world.ends[client.name] if when > end]
