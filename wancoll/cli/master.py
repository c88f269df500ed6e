"""`wancoll master`: options to MasterConfig, and the service around it."""

from __future__ import annotations

import dataclasses
import os
from functools import partial
from typing import Annotated

from cyclopts import Parameter

from wancoll.cli.options import DEFAULT_MASTER, MASTER_PORT, LogFormat, LogLevel, Seconds, address
from wancoll.limits import DEFAULT

HEARTBEATS_PER_TIMEOUT = 4  # so that a few late ones evict nobody


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
        str, Parameter(help="Path of the sqlite file with the epoch counter and the event log. Empty: kept in memory.")
    ] = "",
    heartbeat_timeout: Annotated[
        Seconds, Parameter(help="Seconds of silence after which a peer is evicted.")
    ] = DEFAULT.heartbeat_timeout,
    probe_timeout: Annotated[
        Seconds, Parameter(help="Seconds for a joiner's data addresses to answer before it is refused.")
    ] = DEFAULT.probe_timeout,
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

    Prints "wancoll master ready HOST:PORT" when it accepts peers. SIGTERM or SIGINT stops it, a second one at once.
    """
    from wancoll.cli import logs, service
    from wancoll_master.config import MasterConfig
    from wancoll_master.server import serve

    logs.configure(log_level, log_format)
    limits = dataclasses.replace(
        DEFAULT,
        heartbeat_timeout=heartbeat_timeout,
        heartbeat_interval=min(DEFAULT.heartbeat_interval, heartbeat_timeout / HEARTBEATS_PER_TIMEOUT),
        probe_timeout=probe_timeout,
        rejoin_grace=rejoin_grace,
        handshake_timeout=handshake_timeout,
    )
    config = MasterConfig(
        listen=address(listen, what="--listen", default_port=MASTER_PORT),
        journal=journal,
        failpoint_token=os.environ.get("WANCOLL_FAILPOINTS", ""),
        limits=limits,
    )

    service.run("master", partial(service.serve_until, partial(serve, config)), " ".join)
    return 0
