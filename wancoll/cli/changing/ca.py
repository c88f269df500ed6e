"""`wancoll ca`: the certificate authority of a master, shown, and replaced by another one."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

from cyclopts import App, Parameter

from wancoll.cli.asking import Asking, OneMaster
from wancoll.cli.looking.status import find
from wancoll.errors import ConfigError, WancollError
from wancoll.limits import PROTOCOL_VERSION, counted
from wancoll.local import MASTER_PORT
from wancoll.options import Flat, SecondsOrNone, address
from wancoll.wire import messages as m

_SAYS = {
    "steady": "one authority is believed, and signs",
    "spreading": "a new authority is believed beside the old one, which signs",
    "retiring": "the new authority signs; what the old one has signed is believed still",
}
_MINUTE = "%Y-%m-%dT%H:%MZ"
_COST = (
    "all daemons are sent away at once, what they are in the middle of ends, and all tokens and certificates are good "
    "for nothing: each daemon has to be started again with the new token that this prints"
)

ca = App(name="ca", help="Show and replace the certificate authority of a master.")


@ca.command
def show(
    *, master: OneMaster = "", asking: Annotated[Asking, Flat] = Asking(),
) -> int:  # fmt: skip
    """Show the phase of a rotation, and the authorities that are believed: SHA-256, from when and until when."""
    _print(asking.ask_as_admin(m.AskRotation(PROTOCOL_VERSION), m.RotationIs, master))
    return 0


@ca.command
def rotate(
    *,
    phase: SecondsOrNone = 0.0,
    now: Annotated[bool, Parameter(negative=(), show_env_var=False)] = False,
    yes: Annotated[bool, Parameter(negative=(), show_env_var=False, help=f"Do it with --now, though {_COST}.")] = False,
    master: OneMaster = "",
    asking: Annotated[Asking, Flat] = Asking(),
) -> int:
    """Replace the authority by a new one, without a stop.

    First the new one is made known to all; a phase later it signs; another phase later the old one is forgotten.
    Nothing has to be done meanwhile. Tokens of before are good until the old one is forgotten: make new ones.

    Args:
        phase: Seconds of each of the two phases, a certificate's lifetime at least. 0: that and 10 minutes, by which
            clocks may differ.
        now: Drop the old authority at once, since its key was stolen. Needs --yes; no variable sets either.
    """
    if now and not yes:
        raise ConfigError(
            "is not done without --yes", who="wancoll ca rotate --now", expected="--now --yes", got="--now alone",
            hint=f"with it {_COST}. {_whom(master, asking)}Without --now nothing stops",
        )  # fmt: skip
    if now and phase:
        raise ConfigError("exclude each other", who="--now and --phase", expected="one of them", got="both")
    if yes and not now:
        raise ConfigError("says nothing here", who="--yes", expected="--now --yes, or neither", got="--yes alone")
    done = asking.ask_as_admin(m.Rotate(PROTOCOL_VERSION, phase, now), m.RotationIs, master)
    _print(done)
    if done.made:
        print(f"wancoll peer --join {done.made}")
    return 0


def _whom(master: str, asking: Asking) -> str:
    """How many it would send away now, as a sentence; "": the master does not say."""
    where = address(asking.where(master), what="--master", default_port=MASTER_PORT)
    try:
        status, _ = find([where], asking)
    except WancollError:
        return ""
    members = sum(len(group.members) for group in status.groups)
    has = [counted(len(status.daemons), "daemon"), counted(len(status.groups), "group")]
    return f"The master at {where} has {' and '.join(has)} with {counted(members, 'member')} now. "


def _print(found: m.RotationIs) -> None:
    from wancoll.cli.looking.tables import columns, terminal

    until = f", until {_time(found.until)} or soon after" if found.until else ""
    print(f"{found.phase}{until}: {_SAYS.get(found.phase, 'see docs/security.md')}")
    rows = [
        [one.sha256, _time(one.made, _MINUTE), _time(one.ends, _MINUTE), "yes" if one.signs else "no"]
        for one in found.authorities
    ]
    columns(["SHA256", "MADE", "ENDS", "SIGNS"], rows, terminal(), wide=["SHA256"])


def _time(seconds: float, form: str = "%Y-%m-%dT%H:%M:%SZ") -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime(form)
