"""Settings of a master, as `wancoll master` collects them."""

from __future__ import annotations

from dataclasses import dataclass, field

from wancoll.limits import DEFAULT, Limits


@dataclass(frozen=True, slots=True)
class EtcdConfig:
    """How several masters choose the one that leads.

    Args:
        endpoints: "http://host:port", or several of them with commas between: etcd's members.
        prefix: of all keys; masters with the same one are one master's standbys.
        lease_ttl: seconds after which a leader that is not heard of is replaced; rounded up.
    """

    endpoints: str
    prefix: str
    lease_ttl: float


@dataclass(frozen=True, slots=True)
class MasterConfig:
    """See `wancoll master --help`.

    Args:
        listen: "host:port" for daemons and `wancoll status`; port 0 lets the kernel choose; host "" or "*" means all
            interfaces, IPv4 and IPv6.
        journal: path of the sqlite file with term, epoch counter and event log; "" or ":memory:" keeps it in memory.
            With *etcd* it is for the event log only.
        etcd: None: this is the only master.
        advertise: "host:port" or "host" where peers reach this master, for standbys to name; "": what *listen* says, or
            the interface that reaches etcd.
        failpoint_token: from WANCOLL_FAILPOINTS; empty: fault injection is off.
        limits: bounds and timeouts.
    """

    listen: str = "*:7400"
    journal: str = ""
    etcd: EtcdConfig | None = None
    advertise: str = ""
    failpoint_token: str = ""
    limits: Limits = field(default=DEFAULT)
