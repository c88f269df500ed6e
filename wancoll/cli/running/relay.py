"""`wancoll relay`: its options, checked, and the service around it."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from cyclopts import Parameter

from wancoll.errors import ConfigError
from wancoll.limits import DEFAULT
from wancoll.local import MASTER_PORT, default_state, split_address
from wancoll.options import DEFAULT_MASTER, LogFormat, LogLevel, Switch, addresses, join_text
from wancoll.peer.config import PeerConfig
from wancoll.resources import affordable
from wancoll.trust.token import parse

_NO_LIMIT = "1000GB/s"  # more than a machine carries


def relay(
    *,
    listen: str = "*:7402",
    master: str = "",
    advertise: Annotated[tuple[str, ...], Parameter(negative=())] = (),
    name: str = "",
    join: str = "",
    insecure: Switch = False,
    state: str = "",
    rate: str = "",
    log_level: LogLevel = "info",
    log_format: LogFormat = "auto",
) -> int:
    """Run a relay: daemons of which neither can dial the other, as behind NAT, reach each other through it.

    It runs where all can dial it, and carries their data in and out: encrypted from end to end, unless --insecure.
    `wancoll master --relay RATE` is a relay in the master itself.
    Prints "wancoll relay ready data=HOST:PORT name=NAME" once a master knows it. SIGTERM or SIGINT ends it.

    Args:
        listen: HOST:PORT for daemons, which have to be able to dial it. '*' as host: all interfaces.
        master: HOST:PORT of the master; with standby masters HOST:PORT,HOST:PORT. Empty: as --join says.
        advertise: HOST or HOST:PORT that daemons shall dial, where it differs from what is bound. Repeat it, or
            separate by spaces in the variable. Empty: the address of the interface that reaches the master.
        name: This relay's name, unique under its master. Empty: the host name and a random part.
        join: Token of the master, for a relay: `wancoll token create --role relay`. WANCOLL_JOIN shows it to fewer.
        insecure: In clear, for groups in clear: whoever reaches the port may use it, and nobody proves anything.
        state: Folder of this relay's key, for this user and this relay alone. Empty: wancoll/relay-PORT in
            $XDG_STATE_HOME or ~/.local/state.
        rate: Rate, such as 500Mbit/s, up to which it carries data, all pairs together. Empty: no limit.
    """
    from wancoll.cli.running import logs, service
    from wancoll.cli.running.peer import hide_token
    from wancoll.peer.daemon import serve

    hide_token(join)
    logs.configure(log_level, log_format)
    for each in advertise:
        split_address(each, what="--advertise", default_port=0)
    join = join_text(join)
    if bool(join) == insecure:
        raise ConfigError(
            "has to know whether all is in clear", who="wancoll relay", expected="--join TOKEN or --insecure",
            got="both" if join else "neither", hint="`wancoll token create --role relay` makes a token",
        )  # fmt: skip
    master = master or (parse(join).address if join else DEFAULT_MASTER)
    config = PeerConfig(
        master=addresses(master, what="--master", default_port=MASTER_PORT), listen=listen, advertise=advertise,
        name=name, join=join, insecure=insecure, state=state or default_state(f"relay-{split_address(listen)[1]}"),
        relay=rate or _NO_LIMIT, clients=False, measure=False, shared_memory=False, workers=1,
        limits=affordable(DEFAULT),
    )  # fmt: skip

    service.run(
        "relay",
        partial(serve, config),
        lambda started: f"data={','.join(started.data)} name={started.name}",
        lambda started: (f"its master at {started.master}", started.answered),
    )
    return 0
