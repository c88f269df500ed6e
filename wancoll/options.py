"""Types of options: how a field of a config says its bounds and its help to the command line. Checked once."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from wancoll.errors import ConfigError
from wancoll.local import MASTER_PORT, join_address, split_address, split_addresses
from wancoll.trust.folder import read_secret

DEFAULT_MASTER = f"127.0.0.1:{MASTER_PORT}"
NO_MASTER = f"Empty: as --join says, or else {DEFAULT_MASTER}."
_MOST_TOKEN = 65536  # bytes of a file
Flat = Parameter(name="*")  # of a dataclass whose fields are options
Unseen = Parameter(parse=False)  # of a field that is none


@functools.cache
def join_text(text: str) -> str:
    """The token that --join means: *text* itself; "@FILE": what the file holds; "-": a line of standard input.

    Raises:
        ConfigError: the file cannot be read, or others may read it.
    """
    if text == "-":
        return sys.stdin.readline().strip()
    if not text.startswith("@"):
        return text
    hint = "write there what `wancoll master` or `wancoll token create` printed, mode 0600"
    again = "if others may have read it, make a new one (`wancoll token create`); else chmod 600"
    try:
        found = read_secret(text[1:], _MOST_TOKEN, what="a token", hint=again, broken=hint)
    except FileNotFoundError as bad:
        raise ConfigError(
            "cannot be read", who=f"--join {text}", expected="a file with a token", got=str(bad.strerror), hint=hint
        ) from bad
    return found.decode(errors="replace").strip()


def _seconds(expected: str, fits: Callable[[float], bool]) -> Any:
    """A validator that takes seconds where *fits* says so; *expected* says to people which these are."""

    def check(_type: Any, value: float) -> None:
        if not fits(value):
            raise ValueError(f"Expected a number of seconds{expected}, got {value}.")

    return check


def between(low: int, high: int) -> Any:
    """A validator for whole numbers from *low* to *high*."""

    def check(_type: Any, value: int) -> None:
        if not low <= value <= high:
            raise ValueError(f"Expected a whole number from {low} to {high}, got {value}.")

    return check


def address(text: str, *, what: str, default_port: int | None = None) -> str:
    """*text* as "host:port", the port filled in. Raises ConfigError: it is not an address."""
    return join_address(*split_address(text, what=what, default_port=default_port))


def addresses(text: str, *, what: str, default_port: int | None = None) -> str:
    """*text* as "host:port,host:port", the ports filled in. Raises ConfigError: one is not an address."""
    return ",".join(join_address(*each) for each in split_addresses(text, what=what, default_port=default_port))


Seconds = Annotated[float, Parameter(validator=_seconds(" above 0", lambda value: 0 < value < math.inf))]
# inf: without end
SecondsOrEver = Annotated[float, Parameter(validator=_seconds(" above 0, or inf", lambda value: value > 0))]
# 0: not at all
SecondsOrNone = Annotated[float, Parameter(validator=_seconds(", 0 or above", lambda value: 0 <= value < math.inf))]
Switch = Annotated[bool, Parameter(negative=())]  # --option, without a --no-option
Seed = Annotated[int, Parameter(validator=between(0, 2**63 - 1))]
AsJson = Annotated[bool, Parameter(name="--json", negative=(), help="Print one JSON object instead of tables.")]

Metrics = Annotated[
    str,
    Parameter(
        help="HOST:PORT where Prometheus gets metrics: /metrics, beside /healthz and /readyz. Port 0 lets the system "
        "choose; the log says which. Beyond loopback only with a --metrics-token. Empty: nowhere."
    ),
]
MetricsToken = Annotated[
    str,
    Parameter(
        help="What a reader of --metrics has to show as bearer, 16 characters or more. Give it by the variable: others "
        "on this machine can read command lines. Empty: nothing."
    ),
]

Page = Annotated[
    str,
    Parameter(
        help="HOST:PORT of a live page for browsers: groups, links, operations, epochs, events. Port 0 lets the system "
        "choose; the log says which. Beyond loopback only with a --page-token. Empty: nowhere."
    ),
]
PageToken = Annotated[
    str,
    Parameter(
        help="What who looks at --page has to give as password, of any user name; 16 characters or more. Give it by "
        "the variable: others on this machine can read command lines. Empty: nothing."
    ),
]

LogLevel = Annotated[
    Literal["debug", "info", "warning", "error"],
    Parameter(help="Least severe log line that is written to stderr."),
]
LogFormat = Annotated[
    Literal["auto", "console", "json"],
    Parameter(help="Form of log lines. auto: console on a terminal, else one JSON object a line."),
]
