"""`wancoll token`: what daemons join a master with, made, shown and revoked."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Literal

from cyclopts import App, Parameter

from wancoll.cli.asking import Asking, OneMaster
from wancoll.errors import ConfigError
from wancoll.limits import DEFAULT, PROTOCOL_VERSION
from wancoll.options import Flat, SecondsOrNone, between
from wancoll.trust.registry import MOST_USES
from wancoll.wire import messages as m

DAY = 24 * 3600.0
LONGEST = 3650 * DAY
MOST_GROUPS = 64

token = App(name="token", help="Make, show and revoke the tokens that daemons join with.")


@token.command
def create(
    *,
    role: Literal["peer", "relay", "observer", "chaos", "admin"] = "peer",
    name: str = "",
    group: Annotated[tuple[str, ...], Parameter(negative=())] = (),
    uses: Annotated[int, Parameter(validator=between(0, MOST_USES))] = 0,
    expires: SecondsOrNone = DAY,
    master: OneMaster = "",
    asking: Annotated[Asking, Flat] = Asking(),
) -> int:
    """Make a token and print it. Its secret is shown this once; the master keeps a hash.

    Args:
        role: What it is for: a daemon, `wancoll relay`, `wancoll status`, `wancoll chaos`, or looking after tokens.
        name: The only name that its daemon may have. Empty: any that is free.
        group: A group that it may join. Repeat it; none: all groups.
        uses: How many daemons may join with it; one that comes back is not counted again. 0: any number.
        expires: Seconds for which it is good. 0: for ever.
    """
    for option, each in (*(("--group", one) for one in group), *([("--name", name)] if name else [])):
        if not 0 < len(each) <= DEFAULT.name_chars or not each.isprintable():
            raise ConfigError(
                "cannot be used", who=option, expected=f"1 to {DEFAULT.name_chars} printable characters",
                got=repr(each)[:200], hint=f"leave {option} out for a token that is good for all",
            )  # fmt: skip
    if len(group) > MOST_GROUPS:
        raise ConfigError("is given too often", who="--group", expected=f"{MOST_GROUPS} times", got=str(len(group)))
    if expires > LONGEST:
        raise ConfigError(
            "is too long", who="--expires", expected=f"at most {LONGEST:.0f} s, ten years, or 0: for ever",
            got=f"{expires:g}",
        )  # fmt: skip
    made = m.MakeToken(PROTOCOL_VERSION, role, name, list(group), uses, expires)
    print(asking.ask_as_admin(made, m.Tokens, master).made)
    return 0


@token.command(name="list")
def show(
    *, master: OneMaster = "", asking: Annotated[Asking, Flat] = Asking(),
) -> int:  # fmt: skip
    """Show all tokens, one a line, without their secrets.

    USES: how many daemons have come with it, of how many that may. "replaced" instead of a time: it names a key
    of the master that `wancoll key rotate` has replaced, and lets nobody new in.
    """
    from wancoll.cli.looking.tables import columns, terminal

    found = asking.ask_as_admin(m.ListTokens(PROTOCOL_VERSION), m.Tokens, master).tokens
    rows = []
    for one in found:
        until = datetime.fromtimestamp(one.expires, UTC).strftime("%Y-%m-%dT%H:%MZ") if one.expires else "never"
        until = "revoked" if one.revoked else "replaced" if one.replaced else until
        uses = f"{one.used}/{one.uses}" if one.uses else "unlimited"
        rows.append([one.id, one.role, one.name or "any", ",".join(one.groups) or "all", uses, until])
    columns(["ID", "ROLE", "NAME", "GROUPS", "USES", "EXPIRES"], rows, terminal(), wide=["NAME", "GROUPS"])
    return 0


@token.command
def revoke(
    id: str,
    /,
    *,
    master: OneMaster = "",
    asking: Annotated[Asking, Flat] = Asking(),
) -> int:
    """Revoke a token: nobody joins with it any more, and the daemons that did are sent away.

    Args:
        id: Of the token, as `wancoll token list` shows it.
    """
    if not id:
        raise ConfigError("is no token", who="wancoll token revoke", expected="an id", got="nothing")
    asking.ask_as_admin(m.RevokeToken(PROTOCOL_VERSION, id), m.Tokens, master)
    print(f"token {id} is revoked; who came in with it is sent away")
    return 0
