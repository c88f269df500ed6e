"""Hostile messages, a short while of them: `python -m tests.fuzz` runs on for as many as one likes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz import decoders, guided, master, peer
from tests.fuzz.absurd import Absurd, Drawn, kinds, typed


@pytest.mark.parametrize("target", guided.TARGETS)
def test_what_a_fuzzer_found_worth_keeping(target: str) -> None:
    for path in sorted(Path(__file__).with_name("corpus").joinpath(target).iterdir()):
        guided.TARGETS[target](path.read_bytes())


def test_tampered_bytes_end_at_the_decoders() -> None:
    made, taken = decoders.run(1, 10_000)
    assert made >= 10_000
    assert taken > 50


@pytest.mark.parametrize("voters", [32, 0])
def test_the_master_survives_any_message_in_any_state(voters: int) -> None:
    master.run(Drawn(1), 400, voters=voters)


@pytest.mark.parametrize("seed", range(2))
def test_a_member_and_its_links_survive_any_message(seed: int) -> None:
    peer.run(Drawn(seed), 150)


@pytest.mark.parametrize("union", decoders.UNIONS, ids=str)
def test_absurd_messages_are_typed(union: object) -> None:
    """Else the tests above would end at the decoder and try nothing."""
    absurd, chance = Absurd(), Drawn(1)
    assert all(typed(absurd.message(kind, chance), union) for kind in kinds(union) for _ in range(20))
