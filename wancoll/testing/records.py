"""TLS records as whoever sits on the path sees them: where each ends, and what can be done to them. Pure."""

from __future__ import annotations

from collections.abc import Iterator

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

    @staticmethod
    def last(data: bytes) -> bytes:
        """The last one of whole records."""
        *_, last = split(data)
        return last


def split(data: bytes) -> Iterator[bytes]:
    """The whole records that *data* begins with."""
    at = 0
    while at + _HEADER <= len(data):
        end = at + _HEADER + int.from_bytes(data[at + 3 : at + 5], "big")
        if end > len(data):
            return
        yield data[at:end]
        at = end


def tampered(data: bytes, kind: str, where: float, other: bytes, *, sealed: bool) -> bytes:
    """*data*, forwarded at once, after an attack; as it was if that cannot be done to it.

    *kind* is "flip" (a bit), "drop", "repeat", "reorder" or "splice" (of the *other* lane's record, or b""); of a lane
    in clear only the first. *where*, from 0 to 1: the bit's byte, or the record.
    """
    if kind == "flip":
        at = int(where * (len(data) - 1))
        return data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :]
    records = list(split(data)) if sealed else []
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
    return b"".join(records) if sealed else data
