"""Cases for which `make test` has no time: `make check` runs them."""

from typing import Any

import pytest


def later(*cases: Any) -> list[Any]:
    """The cases, marked; one that has several arguments is a tuple."""
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.check) for case in cases]
