"""The identity at the other end of a verified connection, from its certificate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Role = Literal["peer", "observer", "chaos", "admin"]


@dataclass(frozen=True, slots=True)
class Identity:
    """One end of a verified connection. Where there is none (None) the connection is not verified.

    Attributes:
        name: of the daemon, or of whom else the certificate is for.
        role: what it is there for.
        groups: that it may join and ask about; empty: any.
        token: id of the token that it got its certificate with; "": without one.
        authority: SHA-256 of the one that has signed its certificate, where a master has looked; "": none that it
            believed.
    """

    name: str
    role: Role
    groups: tuple[str, ...] = ()
    token: str = ""
    authority: str = ""
