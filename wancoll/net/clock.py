"""A clock that goes on while the machine sleeps, for leases and for questions whether it stood still (R10, R11, C8)."""

from __future__ import annotations

import time


def awake_or_asleep() -> float:
    """Seconds, since the machine was started."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
