"""A token as text: what a master prints and a daemon is started with. It proves the master, and who was invited."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from wancoll.errors import ConfigError
from wancoll.local import split_addresses

_FORM = re.compile(r"WC1([0-9a-f]{64})::([0-9a-z]{4,32})\.([0-9A-Za-z_-]{32,64})@(\S+)")
_LOOKS_LIKE = "WC1<sha256 of the authority>::<id>.<secret>@HOST:PORT, in one piece"


@dataclass(frozen=True, slots=True)
class Token:
    """What a master prints, and a daemon is started with.

    Attributes:
        authority: SHA-256 of the authority's certificate (DER), in hex: the master that answers must have it.
        id: names the token; no secret.
        secret: whoever knows it may come in.
        address: of the master, "host:port", or several, with commas.
    """

    authority: str
    id: str
    secret: str = field(repr=False)
    address: str

    def __str__(self) -> str:
        return f"WC1{self.authority}::{self.id}.{self.secret}@{self.address}"


def parse(text: str, *, what: str = "--join") -> Token:
    """The token that *text* is.

    Raises:
        ConfigError: it is none. What it says shows no secret.
    """
    found = _FORM.fullmatch(text.strip())
    if found is None:
        raise ConfigError(
            "is no token", who=what, expected=_LOOKS_LIKE, got=f"{len(text)} characters that are not of this form",
            hint="paste the whole line that `wancoll master` or `wancoll token create` printed",
        )  # fmt: skip
    split_addresses(found[4], what=f"the address in {what}")
    return Token(*found.groups())
