"""Types of the messages' fields, with their bounds, and the base of all messages."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

U64 = Annotated[int, Meta(ge=0)]  # msgpack carries no more than 64 bits; msgspec takes no bound above 2^63 - 1
Count = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Name = Annotated[str, Meta(min_length=1, max_length=128)]
Text = Annotated[str, Meta(max_length=4096)]
Address = Annotated[str, Meta(min_length=3, max_length=300)]  # "host:port", IPv6 in brackets
Addresses = Annotated[list[Address], Meta(min_length=1, max_length=8)]
World = Annotated[int, Meta(ge=1, le=1024)]
Site = Annotated[str, Meta(max_length=128)]  # a label that members close to each other share; "" is nobody's
Rank = Annotated[int, Meta(ge=-1, le=1023)]  # -1: none


class Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """Base: a positional msgpack array whose first item is the type's name."""
