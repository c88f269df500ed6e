"""Settings of a master, as `wancoll master` collects them."""

from __future__ import annotations

from dataclasses import dataclass, field

from wancoll.limits import DEFAULT, Limits


@dataclass(frozen=True, slots=True)
class MasterConfig:
    """See `wancoll master --help`.

    Args:
        listen: "host:port" for daemons and `wancoll status`; port 0 lets the kernel choose; host "" or "*" means all
            interfaces, IPv4 and IPv6.
        journal: path of the sqlite file with term, epoch counter and event log; "" or ":memory:" keeps it in memory.
        failpoint_token: from WANCOLL_FAILPOINTS; empty: fault injection is off.
        limits: bounds and timeouts.
    """

    listen: str = "*:7400"
    journal: str = ""
    failpoint_token: str = ""
    limits: Limits = field(default=DEFAULT)
