"""The master's rules (docs/protocol.md, R1 to R8), told as scripts: see script.py for how to read and rewrite them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.master.script import FILES, Scenario, common, play, read, write

CASES = [
    pytest.param(path, scenario, id=f"{path.stem}: {scenario.name}") for path in FILES for scenario in read(path)[1]
]


@pytest.mark.parametrize(("path", "scenario"), CASES)
def test_script(path: Path, scenario: Scenario, request: pytest.FixtureRequest) -> None:
    head, scenarios = read(path)
    came = play(scenario.lines, common(head))
    if request.config.getoption("rewrite"):
        write(path, head, [Scenario(s.name, s.lines, came if s.name == scenario.name else s.shown) for s in scenarios])
    else:
        assert came == scenario.shown


def test_names_are_given_once() -> None:
    assert len({case.id for case in CASES}) == len(CASES) > 100
