"""Whatever happens to a world again and again, what master and members remember does not grow."""

from __future__ import annotations

import pytest

from tests.later import later
from tests.sim.growth import census, grown
from tests.sim.odd import FAULTS
from tests.sim.world import World

CHECKED = ("lose_host", "twin", "break_lane", "lose_journal")


def look(kind: str, seed: int, spans: int) -> None:
    found = grown(seed, (kind, kind, "join"), spans)
    assert not found, f"seed {seed}: " + "\n".join(found)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", later(*CHECKED))
def test_nothing_grows(kind: str) -> None:
    look(kind, 5, 12)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", FAULTS)
def test_nothing_grows_for_long(kind: str) -> None:
    for seed in range(3, 9):
        look(kind, seed, 30)


def test_a_leak_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[int] = []
    monkeypatch.setattr(World, "_look_back", lambda world: kept.extend(range(3)))
    monkeypatch.setattr("tests.sim.growth.census", lambda world: census(world) | {"kept": len(kept)})
    assert [one.split(":")[0] for one in grown(1, (), 6)] == ["kept"]
