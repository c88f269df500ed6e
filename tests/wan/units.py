"""Times, rates, ratios and sizes as people write them: 40ms, 500Mbit, 0.1%, 2MB."""

from __future__ import annotations

import re
from collections.abc import Mapping

SECONDS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}
BITS = {"bit": 1.0, "kbit": 1e3, "Mbit": 1e6, "Gbit": 1e9}
RATIO = {"": 1.0, "%": 0.01}
BYTES = {"": 1.0, "B": 1.0, "KB": 1e3, "MB": 1e6, "GB": 1e9, "KiB": 1024.0, "MiB": 1024.0**2, "GiB": 1024.0**3}


def parse(text: str, units: Mapping[str, float]) -> float:
    """A number with one of the units; 0 needs none.

    Raises:
        ValueError: it is not of that form.
    """
    match = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)([a-zA-Z%]*)", text.strip(), re.ASCII)
    if match and float(match[1]) == 0 and not match[2]:
        return 0.0
    if not match or match[2] not in units:
        raise ValueError(f"expected a number and one of {', '.join(repr(unit) for unit in units)}, got {text!r}")
    return float(match[1]) * units[match[2]]
