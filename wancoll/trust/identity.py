"""The identity at the other end of a connection, by the key that it has proved to hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Role = Literal["peer", "relay", "observer", "chaos", "admin"]


@dataclass(frozen=True, slots=True)
class Identity:
    """One end of a connection. Where there is none (None) the other end has proved nothing.

    Attributes:
        name: of the daemon, or of the command that asks.
        role: what it is there for.
        groups: that it may join and ask about; empty: any.
        token: id of the token that it was admitted with; "": without one.
        key: its public key; b"" where connections are in clear.
    """

    name: str
    role: Role
    groups: tuple[str, ...] = ()
    token: str = ""
    key: bytes = b""
