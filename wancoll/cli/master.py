"""`wancoll master`: options to MasterConfig, and the service around it."""

from __future__ import annotations

import dataclasses
import os
from functools import partial
from typing import Annotated

from cyclopts import Parameter

from wancoll.cli.options import DEFAULT_MASTER, MASTER_PORT, LogFormat, LogLevel, Seconds, address
from wancoll.errors import ConfigError
from wancoll.limits import DEFAULT
from wancoll.local import split_address

HEARTBEATS_PER_TIMEOUT = 4  # so that a few late ones evict nobody
DEFAULT_LEASE_TTL = 2.0
DEFAULT_PREFIX = "wancoll/"


def master(
    *,
    listen: Annotated[
        str,
        Parameter(
            help="HOST:PORT for peers and `wancoll status`. Port 0 lets the system choose. '*' as host: all "
            "interfaces. Peers are not authenticated: keep the port inside your own network."
        ),
    ] = DEFAULT_MASTER,
    journal: Annotated[
        str,
        Parameter(
            help="Path of the sqlite file with the epoch counter (with --etcd it is there) and the event log. "
            "Empty: kept in memory."
        ),
    ] = "",
    etcd: Annotated[
        str,
        Parameter(
            help="URLs of etcd's members, http://HOST:PORT[,http://HOST:PORT]: with it several masters may run, one "
            "leads, and the others stand by. Empty: this is the only master."
        ),
    ] = "",
    advertise: Annotated[
        str,
        Parameter(
            help="HOST or HOST:PORT where peers reach this master, for standbys to name, where it differs from "
            "--listen. Empty: what --listen says; for all interfaces the address of the one that reaches etcd."
        ),
    ] = "",
    lease_ttl: Annotated[
        Seconds,
        Parameter(
            help="Seconds after which a leader that etcd does not hear of is replaced, rounded up. etcd's own least "
            "is 1.5 of its --election-timeout, 2 by default."
        ),
    ] = DEFAULT_LEASE_TTL,
    etcd_prefix: Annotated[
        str, Parameter(help="Prefix of all keys in etcd. Masters with the same prefix stand by for each other.")
    ] = DEFAULT_PREFIX,
    heartbeat_timeout: Annotated[
        Seconds, Parameter(help="Seconds of silence after which a peer is evicted.")
    ] = DEFAULT.heartbeat_timeout,
    probe_timeout: Annotated[
        Seconds, Parameter(help="Seconds for a joiner's data addresses to answer before it is refused.")
    ] = DEFAULT.probe_timeout,
    slow_after: Annotated[
        Seconds, Parameter(help="Seconds after which an operation is shown with what it waits for.")
    ] = DEFAULT.slow_after,
    stall_timeout: Annotated[
        Seconds,
        Parameter(
            help="Seconds that an operation which all members run may move nothing, with no link to blame, before "
            "their links are made anew; the third time it is given up."
        ),
    ] = DEFAULT.stall_timeout,
    rejoin_grace: Annotated[
        Seconds,
        Parameter(
            help="Seconds that a restarted master waits for members it hears of to report; keep it below the peers' "
            "--master-grace."
        ),
    ] = DEFAULT.rejoin_grace,
    handshake_timeout: Annotated[
        Seconds, Parameter(help="Seconds for a new connection to introduce itself before it is closed.")
    ] = DEFAULT.handshake_timeout,
    log_level: LogLevel = "info",
    log_format: LogFormat = "auto",
) -> int:
    """Run the master: it tracks membership and decides commit and abort.

    Prints "wancoll master ready HOST:PORT" when it accepts peers, also while it stands by.
    SIGTERM or SIGINT stops it, a second one at once.
    """
    from wancoll.cli import logs, service
    from wancoll_master.config import EtcdConfig, MasterConfig
    from wancoll_master.serve import serve

    logs.configure(log_level, log_format)
    limits = dataclasses.replace(
        DEFAULT,
        heartbeat_timeout=heartbeat_timeout,
        heartbeat_interval=min(DEFAULT.heartbeat_interval, heartbeat_timeout / HEARTBEATS_PER_TIMEOUT),
        probe_timeout=probe_timeout,
        rejoin_grace=rejoin_grace,
        slow_after=slow_after,
        stall_timeout=stall_timeout,
        handshake_timeout=handshake_timeout,
    )
    if etcd and not etcd_prefix:
        raise ConfigError(
            "--etcd-prefix cannot be empty", expected="text that no other keys in etcd begin with", got="''"
        )
    if advertise:
        split_address(advertise, what="--advertise", default_port=0)
    config = MasterConfig(
        listen=address(listen, what="--listen", default_port=MASTER_PORT),
        journal=journal,
        etcd=EtcdConfig(etcd, etcd_prefix, lease_ttl) if etcd else None,
        advertise=advertise,
        failpoint_token=os.environ.get("WANCOLL_FAILPOINTS", ""),
        limits=limits,
    )

    service.run("master", partial(service.serve_until, partial(serve, config)), " ".join)
    return 0
