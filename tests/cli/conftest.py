"""Commands that run within the test's process."""

from __future__ import annotations

from typing import Any

import pytest

from wancoll.cli.main import run


@pytest.fixture
def call(request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs the module's COMMAND; what it prints, or with a code the one line that it fails with."""

    def command(*args: str, code: int = 0) -> str:
        with pytest.raises(SystemExit) as ended:
            run([*request.module.COMMAND, *args])
        out, err = capsys.readouterr()
        assert ended.value.code == code, err
        if code:
            assert out == ""
            assert err.startswith("wancoll: ")
            assert err.count("\n") == 1, err
            return err
        assert err == ""
        return out

    return command
