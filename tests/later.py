"""Cases for which `make test` has no time: `make check` runs them, or `make nightly`."""

from typing import Any

import pytest


def later(*cases: Any) -> list[Any]:
    """The cases, marked; one that has several arguments is a tuple."""
    return _marked(pytest.mark.check, cases)


def at_night(*cases: Any) -> list[Any]:
    """Mark cases for `make nightly`, as later() does for `make check`."""
    return _marked(pytest.mark.nightly, cases)


def _marked(mark: pytest.MarkDecorator, cases: tuple[Any, ...]) -> list[Any]:
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=mark) for case in cases]
