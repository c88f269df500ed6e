"""`wancoll key`: the keys of a master and of daemons, shown, replaced and revoked."""

from __future__ import annotations

from typing import Annotated

from cyclopts import App, Parameter

from wancoll.cli.asking import Asking, OneMaster
from wancoll.cli.looking.status import find
from wancoll.errors import ConfigError, WancollError
from wancoll.limits import PROTOCOL_VERSION, counted
from wancoll.local import MASTER_PORT
from wancoll.options import Flat, address
from wancoll.wire import messages as m

_COST = (
    "all daemons are sent away at once, what they are in the middle of ends, and all tokens and keys are good for "
    "nothing: each daemon has to be started again with the new token that this prints"
)
_NEXT = "make new tokens for daemons to come; once all daemons were connected since, `wancoll key rotate --finish`"
_Switch = Parameter(negative=(), show_env_var=False)

key = App(name="key", help="Show and replace the key of a master, and revoke keys of daemons.")


@key.command
def show(*, master: OneMaster = "", asking: Annotated[Asking, Flat] = Asking()) -> int:
    """Show the public key of the master; while it is rotated the old one and the new one."""
    _print(asking.ask_as_admin(m.AskKeys(PROTOCOL_VERSION), m.KeysAre, master))
    return 0


@key.command
def rotate(
    *,
    finish: Annotated[bool, _Switch] = False,
    now: Annotated[bool, _Switch] = False,
    yes: Annotated[bool, _Switch, Parameter(help=f"Do it with --now, though {_COST}.")] = False,
    master: OneMaster = "",
    asking: Annotated[Asking, Flat] = Asking(),
) -> int:
    """Replace the key of the master by a new one, without a stop.

    Daemons that are connected learn of the new key at once, others when they come back; both keys are good until
    --finish. Tokens of before are good until then, too. A daemon that was away all the time needs a new token.

    Args:
        finish: Drop the old key.
        now: Drop the old key at once, since it was stolen. Needs --yes; no variable sets either.
    """
    if now and finish:
        raise ConfigError("exclude each other", who="--now and --finish", expected="one of them", got="both")
    if now and not yes:
        raise ConfigError(
            "is not done without --yes", who="wancoll key rotate --now", expected="--now --yes", got="--now alone",
            hint=f"with it {_COST}. {_whom(master, asking)}Without --now nothing stops",
        )  # fmt: skip
    if yes and not now:
        raise ConfigError("says nothing here", who="--yes", expected="--now --yes, or neither", got="--yes alone")
    done = asking.ask_as_admin(m.RotateKey(PROTOCOL_VERSION, finish, now), m.KeysAre, master)
    _print(done)
    if done.made:
        print(f"wancoll peer --join {done.made}")
    return 0


@key.command
def revoke(name: str, /, *, master: OneMaster = "", asking: Annotated[Asking, Flat] = Asking()) -> int:
    """Revoke the key of a daemon: it is sent away, its members are out, and its name is free.

    Args:
        name: Of the daemon, as `wancoll status` shows it; or the key itself, 64 hex digits.
    """
    if not 0 < len(name) <= 128:
        raise ConfigError("is no daemon", who="wancoll key revoke", expected="1 to 128 characters", got=str(len(name)))
    asking.ask_as_admin(m.RevokeKey(PROTOCOL_VERSION, name), m.KeysAre, master)
    print(f"the key of {name} is revoked: it needs another key, and a token that is good for newcomers")
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


def _print(found: m.KeysAre) -> None:
    if len(found.keys) == 1:
        print(found.keys[0].hex())
        return
    print("\n".join([f"{found.keys[0].hex()} until the rotation is finished", f"{found.keys[-1].hex()} new", _NEXT]))
