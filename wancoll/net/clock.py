"""A clock that goes on while the machine sleeps, for leases and for questions whether it stood still (R10, R11, C8)."""

from __future__ import annotations

import time
from functools import partial

awake_or_asleep = partial(time.clock_gettime, time.CLOCK_BOOTTIME)  # seconds since the machine was started
