"""Settings of a relay: the options of `wancoll relay`, with their defaults and their help."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from cyclopts import Parameter

from wancoll.limits import DEFAULT, Limits
from wancoll.options import NO_MASTER, Switch, Unseen


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayConfig:
    """The settings of a relay; "" has the meaning that the option's help gives for Empty.

    Attributes:
        listen: HOST:PORT for daemons, which have to be able to dial it. '*' as host: all interfaces.
        advertise: HOST or HOST:PORT that daemons shall dial, where it differs from what is bound. Repeat it, or
            separate by spaces in the variable. Empty: the address of the interface that reaches the master.
        name: This relay's name, unique among those of its master. Empty: the host name and a random part.
        join: Token of the master, for a relay: `wancoll token create --role relay`. WANCOLL_JOIN shows it to fewer.
        insecure: In clear, for groups in clear: whoever reaches the port may use it, and nobody proves anything.
        state: Folder of this relay's key, for this user and this relay alone. Empty: relay-PORT in wancoll in
            $XDG_STATE_HOME or ~/.local/state.
        rate: Rate, such as 500Mbit/s, up to which it carries data, all pairs together. Empty: no limit.
    """

    listen: str = "*:7401"
    master: Annotated[
        str, Parameter(help=f"HOST:PORT of the master; with standby masters HOST:PORT,HOST:PORT. {NO_MASTER}")
    ] = ""
    advertise: Annotated[tuple[str, ...], Parameter(negative=())] = ()
    name: str = ""
    join: str = ""
    insecure: Switch = False
    state: str = ""
    rate: str = ""
    limits: Annotated[Limits, Unseen] = DEFAULT
