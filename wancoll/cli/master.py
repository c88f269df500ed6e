"""`wancoll master`: its options, checked, and the service around the server."""

from __future__ import annotations

import os
from dataclasses import asdict, replace
from functools import partial
from typing import Annotated

from wancoll.errors import ConfigError
from wancoll.limits import DEFAULT
from wancoll.local import MASTER_PORT, default_journal, split_address
from wancoll.options import Flat, LogFormat, LogLevel, address
from wancoll.resources import affordable
from wancoll_master.config import MasterConfig, MasterLimits

HEARTBEATS_PER_TIMEOUT = 4  # so that a few late ones evict nobody


def master(
    *,
    config: Annotated[MasterConfig, Flat] = MasterConfig(),
    limits: Annotated[MasterLimits, Flat] = MasterLimits(),
    log_level: LogLevel = "info",
    log_format: LogFormat = "auto",
) -> int:
    """Run the master: it tracks membership and decides commit and abort.

    Prints "wancoll master ready HOST:PORT" when it accepts peers, also while it stands by.
    SIGTERM or SIGINT stops it, a second one at once.
    """
    from wancoll.cli import logs, service
    from wancoll_master.serve import serve

    logs.configure(log_level, log_format)
    if config.etcd and config.etcd.endpoints and not config.etcd.prefix:
        raise ConfigError(
            "--etcd-prefix cannot be empty", expected="text that no other keys in etcd begin with", got="''"
        )
    if config.advertise:
        split_address(config.advertise, what="--advertise", default_port=0)
    often = min(DEFAULT.heartbeat_interval, limits.heartbeat_timeout / HEARTBEATS_PER_TIMEOUT)
    listen = address(config.listen, what="--listen", default_port=MASTER_PORT)
    etcd = config.etcd if config.etcd and config.etcd.endpoints else None
    config = replace(
        config,
        listen=listen,
        journal=_journal(config.journal, split_address(listen)[1], alone=etcd is None),
        etcd=etcd,
        failpoint_token=os.environ.get("WANCOLL_FAILPOINTS", ""),
        limits=affordable(replace(DEFAULT, heartbeat_interval=often, **asdict(limits))),
    )
    service.run("master", partial(service.serve_until, partial(serve, config)), " ".join)
    return 0


def _journal(path: str, port: int, *, alone: bool) -> str:
    """Path of the journal; "": in memory, which is enough where etcd has the numbers, or nobody can come back."""
    if path == "none" or (not path and not (alone and port)):
        return ""
    return path or default_journal(port)
