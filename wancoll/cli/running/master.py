"""`wancoll master`: its options, checked, and the service around the server."""

from __future__ import annotations

import contextlib
import os
from dataclasses import asdict, replace
from functools import partial
from typing import Annotated

from wancoll.errors import ConfigError
from wancoll.limits import DEFAULT
from wancoll.local import MASTER_PORT, OwnFolder, default_journal, default_state, split_address
from wancoll.net.listen import is_loopback_host
from wancoll.options import Flat, LogFormat, LogLevel, address
from wancoll.resources import affordable
from wancoll_master.config import MasterConfig, MasterLimits
from wancoll_master.core.paths.announced import networks

HEARTBEATS_PER_TIMEOUT = 4  # so that a few late ones evict nobody


def master(
    *,
    config: Annotated[MasterConfig, Flat] = MasterConfig(),
    limits: Annotated[MasterLimits, Flat] = MasterLimits(),
    log_level: LogLevel = "info",
    log_format: LogFormat = "auto",
) -> int:
    """Run the master: it tracks membership and decides commit and abort.

    Prints "wancoll master ready HOST:PORT" when it accepts peers, also while it stands by. Beyond loopback, or with
    --secure, it prints before that the line to start daemons with, if no token is good: "wancoll peer --join TOKEN".
    That one is good for a day.
    SIGTERM or SIGINT stops it, a second one at once.
    """
    from wancoll.cli.running import logs, service
    from wancoll_master.serve import serve

    logs.configure(log_level, log_format)
    if config.etcd and config.etcd.endpoints and not config.etcd.prefix:
        raise ConfigError(
            "--etcd-prefix cannot be empty", expected="text that no other keys in etcd begin with", got="''"
        )
    if config.advertise:
        split_address(config.advertise, what="--advertise", default_port=0)
    networks(config.announce)
    often = min(DEFAULT.heartbeat_interval, limits.heartbeat_timeout / HEARTBEATS_PER_TIMEOUT)
    listen = address(config.listen, what="--listen", default_port=MASTER_PORT)
    host, port = split_address(listen)
    secure, state = _is_secure(config, host), config.state
    own_folder: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
    if secure and not state:
        if port:
            state = default_state(f"master-{port}")
        elif config.end_when_unused:  # for one run: nobody looks for its key later
            made = OwnFolder()
            own_folder, state = contextlib.closing(made), os.path.join(made.path, "state")
        else:
            raise ConfigError(
                "a master that speaks TLS needs --state where its port is 0", who=f"--listen {config.listen}",
                expected="a folder in which it finds its key again", got="none",
            )  # fmt: skip
    elif not state and port:
        with contextlib.suppress(ConfigError):
            state = default_state(f"master-{port}")  # a secure one may have been there before
    etcd = config.etcd if config.etcd and config.etcd.endpoints else None
    if etcd is not None:
        etcd = replace(etcd, password=os.environ.get("WANCOLL_ETCD_PASSWORD", ""))
    config = replace(
        config,
        listen=listen,
        secure=secure,
        state=state,
        journal=_journal(config.journal, port, alone=etcd is None),
        etcd=etcd,
        failpoint_token=os.environ.get("WANCOLL_FAILPOINTS", ""),
        limits=affordable(replace(DEFAULT, heartbeat_interval=often, **asdict(limits))),
    )

    def invite(token: str) -> None:
        service.say(f"wancoll peer --join {token}")

    with own_folder:
        service.run("master", partial(service.serve_until, partial(serve, config, invite)), " ".join)
    return 0


def _is_secure(config: MasterConfig, host: str) -> bool:
    """Whether it is --secure, which is the default where it listens beyond loopback.

    Raises:
        ConfigError: options that exclude each other.
    """
    if config.secure and config.insecure:
        raise ConfigError(
            "--secure and --insecure exclude each other", who="wancoll master", expected="one of them", got="both",
            hint="each may come from the environment, too: WANCOLL_SECURE, WANCOLL_INSECURE",
        )  # fmt: skip
    return config.secure or not (config.insecure or is_loopback_host(host))


def _journal(path: str, port: int, *, alone: bool) -> str:
    """Path of the journal; "": in memory, which is enough where etcd has the numbers, or nobody can come back."""
    if path == "none" or (not path and not (alone and port)):
        return ""
    return path or default_journal(port)
