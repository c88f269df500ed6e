"""The fields of messages with their bounds, and the two bases of all messages."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from wancoll.errors import ProtocolError
from wancoll.limits import PROTOCOL_VERSION

MOST = 1 << 62  # of all that is counted: ids, epochs, terms, operations, bytes (R19)
Number = Annotated[int, Meta(ge=0, le=MOST)]
Bits = Annotated[int, Meta(ge=0)]  # any 64: digests, identities, tags; they are compared, never counted
Real = Annotated[float, Meta(ge=-1e15, le=1e15)]  # finite; whether it can be is judged by who uses it
Name = Annotated[str, Meta(min_length=1, max_length=128)]
Text = Annotated[str, Meta(max_length=4096)]
Address = Annotated[str, Meta(min_length=3, max_length=300)]  # "host:port", IPv6 in brackets
Addresses = Annotated[list[Address], Meta(min_length=1, max_length=8)]
World = Annotated[int, Meta(ge=1, le=1024)]
SITE_LENGTH = 128
Site = Annotated[str, Meta(max_length=SITE_LENGTH)]  # a label that members close to each other share; "" is nobody's
Rank = Annotated[int, Meta(ge=-1, le=1023)]  # -1: none
Calls = Annotated[dict[Name, Text], Meta(max_length=1024)]  # by member: what it called
Seconds = Annotated[float, Meta(ge=0, le=1e9)]
Goodbyes = Annotated[list[Name], Meta(max_length=1024)]  # members of before that left in peace; others gone are lost


class Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """Base: a positional msgpack array whose first item is the type's name."""


class First(Message, frozen=True):
    """Base of what is said before anything else: in which version of the *protocol*."""

    protocol: int


def check_protocol(first: First, who: str = "") -> None:
    """Raise ProtocolError unless *first*, which *who* has sent, is of this version's protocol."""
    if first.protocol != PROTOCOL_VERSION:
        raise ProtocolError(
            "speaks another version of the protocol", who=who, expected=f"version {PROTOCOL_VERSION}",
            got=str(first.protocol), hint="run the same wancoll version everywhere",
        )  # fmt: skip
