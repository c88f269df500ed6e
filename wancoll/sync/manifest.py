"""What a member's state is, in few bytes: keys, shapes, dtypes, and a digest of each stripe. Pure.

A tensor is cut into stripes of STRIPE bytes, the last one may be shorter. A stripe's digest is what the engine reports
of a tensor with those bytes, so the receipt of a stripe that was received says whether it is the right one.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from wancoll.errors import ProtocolError
from wancoll.limits import MIB
from wancoll.sync.strategy import STRATEGIES

STRIPE = 16 * MIB  # a multiple of the digest's block, 64 KiB

_MAGIC = b"wcstate1"
_HEADER = struct.Struct("<8sQ16sQB7x")
HEADER_BYTES = _HEADER.size
_MOST = 1 << 62  # bytes of a tensor, or of an encoded content: what counts in bytes can hold


class Entry(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One tensor."""

    key: str
    dtype: str  # name of the element type
    shape: tuple[int, ...]  # in elements
    nbytes: int
    shares: int = -1  # index of an earlier tensor that has the very same memory; -1: it has its own
    spread: str = ""  # of which DTensor it is a part; "": of none

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}" + (f", a part of {self.spread}" if self.spread else "")


class Thing(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Something that has tensors and plain values, such as a model or an optimizer."""

    name: str  # of it; its tensors' keys begin with this and a slash
    loose: bool  # what it holds may differ from member to member: it takes the state that won as a whole
    plain: bytes  # what it has beside the bytes of its tensors; see plain.py

    def holds(self, entry: Entry) -> bool:
        """Whether a tensor is this one's."""
        return entry.key.startswith(f"{self.name}/")


class Content(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What a member holds."""

    entries: tuple[Entry, ...]  # all tensors, ascending by key
    digests: bytes  # of all stripes in that order, 8 bytes each, little endian
    things: tuple[Thing, ...] = ()  # what the tensors belong to; empty: to a plain mapping


@dataclass(frozen=True, slots=True)
class Header:
    """What is compared first, of fixed size."""

    revision: int  # of the state
    strategy: str  # of the member
    fingerprint: bytes  # of the content; equal ones mean equal bytes in equal tensors
    nbytes: int  # size of the encoded content


@dataclass(frozen=True, slots=True)
class Stripe:
    """Bytes [offset, offset + nbytes) of tensor number *entry*."""

    entry: int
    offset: int
    nbytes: int


def stripe_count(nbytes: int) -> int:
    """How many stripes a tensor of *nbytes* bytes has."""
    return -(-nbytes // STRIPE)


def lengths(nbytes: int) -> list[int]:
    """Sizes of the stripes of a tensor of *nbytes* bytes."""
    whole, rest = divmod(nbytes, STRIPE)
    return [STRIPE] * whole + ([rest] if rest else [])


def stripes(entries: Sequence[Entry]) -> list[Stripe]:
    """All stripes, in the order of the digests."""
    return [
        Stripe(number, index * STRIPE, nbytes)
        for number, entry in enumerate(entries)
        if entry.shares < 0
        for index, nbytes in enumerate(lengths(entry.nbytes))
    ]


def encode(content: Content) -> bytes:
    """The content as bytes."""
    return msgspec.msgpack.encode(content)


def decode(data: bytes, who: str) -> Content:
    """The content that *who* sent. Raises ProtocolError: it is none."""
    try:
        content = msgspec.msgpack.decode(data, type=Content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as bad:
        raise ProtocolError("sent no manifest of its state", who=who, got=str(bad)) from bad
    if problem := _contradiction(content.entries):
        raise ProtocolError("sent a manifest that contradicts itself", who=who, got=problem)
    expected = 8 * sum(stripe_count(entry.nbytes) for entry in content.entries if entry.shares < 0)
    if len(content.digests) != expected:
        raise ProtocolError(
            "sent a manifest that contradicts itself", who=who, expected=f"{expected} bytes of digests",
            got=str(len(content.digests)),
        )  # fmt: skip
    return content


def _contradiction(entries: Sequence[Entry]) -> str:
    """What is wrong with them, before anything of their size is made; empty: nothing."""
    for number, entry in enumerate(entries):
        if number and entry.key <= entries[number - 1].key:
            return f"key {entry.key!r} after {entries[number - 1].key!r}"
        if not 0 <= entry.nbytes <= _MOST:
            return f"{entry.nbytes} bytes of {entry.key!r}"
        if not -1 <= entry.shares < number or (entry.shares >= 0 and entries[entry.shares].shares >= 0):
            return f"{entry.key!r} shares the memory of number {entry.shares}"
    return ""


def fingerprint(encoded: bytes) -> bytes:
    """16 bytes for an encoded content."""
    return hashlib.blake2b(encoded, digest_size=16).digest()


def pack_header(header: Header) -> bytes:
    """HEADER_BYTES bytes."""
    strategy = STRATEGIES.index(header.strategy)
    return _HEADER.pack(_MAGIC, header.nbytes, header.fingerprint, header.revision, strategy)


def unpack_header(data: bytes, who: str) -> Header:
    """The header that *who* sent. Raises ProtocolError: it is none."""
    magic, nbytes, print_, revision, strategy = _HEADER.unpack(data)
    if magic != _MAGIC or strategy >= len(STRATEGIES) or nbytes > _MOST:
        raise ProtocolError(
            "did not call sync_state here", who=who, expected="the header of a state", got=data[:16].hex(),
            hint="all members make the same calls in the same order, with the same version of wancoll",
        )  # fmt: skip
    return Header(revision, STRATEGIES[strategy], print_, nbytes)
