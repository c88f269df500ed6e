"""Attacks on sealed lanes: TLS records as whoever sits on the path sees them, and what can be done to them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from wancoll.testing.forwarding import Lane, Proxy, Rule, forward

_HEADER = 5  # type, version, length


class Records:
    """Cuts one direction of a connection where records end."""

    def __init__(self) -> None:
        self._rest = b""

    def whole(self, data: bytes) -> bytes:
        """The records that *data* completes; the rest is kept."""
        data = self._rest + data
        end = sum(map(len, split(data)))
        self._rest = data[end:]
        return data[:end]


def split(data: bytes) -> Iterator[bytes]:
    """The whole records that *data* begins with."""
    at = 0
    while at + _HEADER <= len(data):
        end = at + _HEADER + int.from_bytes(data[at + 3 : at + 5], "big")
        if end > len(data):
            return
        yield data[at:end]
        at = end


def tampered(data: bytes, kind: str, where: float, other: bytes) -> bytes:
    """Whole records after an attack: "flip" (a bit), "drop", "repeat", "reorder", or "splice" (of *other*, or b"").

    *where*, from 0 to 1: the bit's byte, or the record.
    """
    if kind == "flip":
        at = int(where * (len(data) - 1))
        return data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :]
    records = list(split(data))
    at = int(where * (len(records) - 1))
    match kind:
        case "drop":
            del records[at : at + 1]
        case "repeat":
            records[at:at] = records[at : at + 1]
        case "reorder":
            records[at : at + 2] = reversed(records[at : at + 2])
        case "splice" if other:
            records.insert(at, other)
    return b"".join(records)


class Attacker(Proxy):
    """Proxies that know records: whole ones of sealed lanes are forwarded."""

    attacks = ("flip", "drop", "repeat", "reorder", "splice")

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._records: defaultdict[tuple[Lane, bool], Records] = defaultdict(Records)
        self._overheard: dict[Lane, bytes] = {}  # the last record of each sealed lane

    async def _receive(self, lane: Lane, inward: bool, source: Any) -> bytes:
        while data := await super()._receive(lane, inward, source):
            if whole := self._records[lane, inward].whole(data) if lane.sealed else data:
                return whole
        return b""

    def attacked(self, lane: Lane, attack: Rule, data: bytes) -> bytes:
        if not lane.sealed:
            return super().attacked(lane, attack, data) if attack.kind == "flip" else data
        others = (record for other, record in reversed(self._overheard.items()) if other is not lane)
        return tampered(data, attack.kind, attack.at, next(others, b""))

    async def _send_slowly(self, lane: Lane, inward: bool, to: Any, data: bytes) -> None:
        if lane.sealed and (found := list(split(data))):
            self._overheard[lane] = found[-1]
        await super()._send_slowly(lane, inward, to, data)


def attack(*arguments: Any) -> None:
    """What the process of Proxies runs."""
    forward(*arguments, kind=Attacker)
