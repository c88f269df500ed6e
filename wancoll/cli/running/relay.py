"""`wancoll relay`: its options, checked, and the service around it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Annotated, Any

from wancoll.errors import ConfigError
from wancoll.limits import DEFAULT
from wancoll.local import MASTER_PORT, split_address
from wancoll.options import DEFAULT_MASTER, Flat, LogFormat, LogLevel, addresses, join_text
from wancoll.relay.config import RelayConfig
from wancoll.resources import affordable
from wancoll.trust.token import parse
from wancoll.units import parse_rate


def relay(
    *,
    config: Annotated[RelayConfig, Flat] = RelayConfig(),
    log_level: LogLevel = "info",
    log_format: LogFormat = "auto",
) -> int:
    """Run a relay: daemons of which neither can dial the other, as behind NAT, reach each other through it.

    It runs where all can dial it, and carries their data in and out: encrypted from end to end, unless --insecure.
    `wancoll token create --role relay` makes its token. `wancoll master --relay RATE` is a relay in the master itself.
    Prints "wancoll relay ready data=HOST:PORT name=NAME" once a master knows it. SIGTERM or SIGINT ends it.
    """
    from wancoll.cli.running import logs, service
    from wancoll.cli.running.peer import hide_token
    from wancoll.relay.joining import serve

    hide_token(config.join)
    logs.configure(log_level, log_format)
    for each in config.advertise:
        split_address(each, what="--advertise", default_port=0)
    config = replace(config, join=join_text(config.join))
    if bool(config.join) == config.insecure:
        raise ConfigError(
            "has to know whether all is in clear", who="wancoll relay", expected="--join TOKEN or --insecure",
            got="both" if config.join else "neither", hint="`wancoll token create --role relay` makes a token",
        )  # fmt: skip
    master = config.master or (parse(config.join).address if config.join else DEFAULT_MASTER)
    config = replace(
        config,
        master=addresses(master, what="--master", default_port=MASTER_PORT),
        limits=affordable(DEFAULT),
    )

    def _waits(started: Any) -> service.Wait:
        return service.Wait(f"its master at {started.master}", started.answered)

    rate = parse_rate(config.rate, "--rate") if config.rate else 0.0
    service.run("relay", partial(serve, config, rate), _describe, _waits)
    return 0


def _describe(started: Any) -> str:
    return f"data={','.join(started.data)} name={started.name}"
