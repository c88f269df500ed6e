"""A token as text: what a master prints and a daemon is started with: the master's key, and a secret."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from wancoll.errors import ConfigError
from wancoll.local import split_addresses

_FORM = re.compile(r"WC2([0-9a-f]{64})::([0-9a-z]{4,32})\.([0-9A-Za-z_-]{32,64})@(\S+)")
_LOOKS_LIKE = "WC2<the master's public key>::<id>.<secret>@HOST:PORT, in one piece"


@dataclass(frozen=True, slots=True)
class Token:
    """What a master prints, and a daemon is started with.

    Attributes:
        master: public key (32 bytes) that the master has to prove.
        id: names the token; no secret.
        secret: whoever knows it may come in.
        address: of the master, "host:port", or several, with commas.
    """

    master: bytes
    id: str
    secret: str = field(repr=False)
    address: str

    def __str__(self) -> str:
        return f"WC2{self.master.hex()}::{self.shown}@{self.address}"

    @property
    def shown(self) -> str:
        """What the master is shown of it."""
        return f"{self.id}.{self.secret}"


def parse(text: str, *, what: str = "--join") -> Token:
    """The token that *text* is.

    Raises:
        ConfigError: it is none. What it says shows no secret.
    """
    found = _FORM.fullmatch(text.strip())
    if found is None:
        old = text.strip().startswith("WC1")
        raise ConfigError(
            "is a token of an earlier version" if old else "is no token", who=what, expected=_LOOKS_LIKE,
            got=f"{len(text)} characters that are not of this form",
            hint="run the same wancoll version everywhere, and make a new token there (`wancoll token create`)" if old
            else "paste the whole line that `wancoll master` or `wancoll token create` printed",
        )  # fmt: skip
    split_addresses(found[4], what=f"the address in {what}")
    return Token(bytes.fromhex(found[1]), found[2], found[3], found[4])
