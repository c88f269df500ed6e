"""`wancoll peer`: its options, checked, and the service around the daemon."""

from __future__ import annotations

import os
from dataclasses import asdict, replace
from functools import partial
from typing import Annotated, Any

from wancoll.errors import ConfigError
from wancoll.limits import DEFAULT
from wancoll.local import MASTER_PORT, split_address
from wancoll.options import Flat, LogFormat, LogLevel, addresses
from wancoll.peer.config import PeerConfig, PeerLimits
from wancoll.resources import affordable


def peer(
    *,
    config: Annotated[PeerConfig, Flat] = PeerConfig(),
    limits: Annotated[PeerLimits, Flat] = PeerLimits(),
    log_level: LogLevel = "info",
    log_format: LogFormat = "auto",
) -> int:
    """Run this machine's peer daemon: it moves and reduces the data of its clients.

    Prints "wancoll peer started socket=PATH data=HOST:PORT name=NAME and waits for its master at HOST:PORT" when
    clients can attach, and "wancoll peer ready socket=PATH data=HOST:PORT name=NAME" once a master has answered.
    SIGTERM or SIGINT drains and leaves, a second one ends it at once.
    """
    from wancoll.cli import logs, service
    from wancoll.peer.daemon import serve

    logs.configure(log_level, log_format)
    split_address(config.listen, what="--listen")
    for each in config.advertise:
        split_address(each, what="--advertise", default_port=0)
    _check_name("--name", config.name)
    _check_name("--site", config.site)
    config = replace(
        config,
        master=addresses(config.master, what="--master", default_port=MASTER_PORT),
        failpoint_token=os.environ.get("WANCOLL_FAILPOINTS", ""),
        limits=affordable(replace(DEFAULT, **asdict(limits))),
    )

    def _waits(started: Any) -> service.Wait:
        return service.Wait(
            f"its master at {started.master}", None if config.ready_without_master else started.answered
        )

    service.run("peer", partial(serve, config), _describe, _waits)
    return 0


def _describe(started: Any) -> str:
    return f"socket={started.socket} data={','.join(started.data)} name={started.name}"


def _check_name(option: str, name: str) -> None:
    if len(name) > DEFAULT.name_chars or not name.isprintable() or any(c.isspace() for c in name):
        raise ConfigError(
            f"{option} cannot be used",
            expected=f"at most {DEFAULT.name_chars} printable characters without spaces",
            got=repr(name[: DEFAULT.name_chars]),
        )
