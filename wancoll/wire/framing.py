"""Length-prefixed frames and msgpack bodies, sans I/O: bytes in, messages out, every size capped."""

from __future__ import annotations

import functools
import struct
from typing import Any, Generic, TypeVar

import msgspec

from wancoll.errors import ProtocolError

_LENGTH = struct.Struct("!I")
HEADER_BYTES = _LENGTH.size

T = TypeVar("T")


encode_body = msgspec.msgpack.Encoder().encode  # a message in msgpack, as that package would, at a tenth of its cost


@functools.cache
def _decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(kind)


def begins_tls(data: bytes) -> bool:
    """Whether what came first on a connection is TLS and no frame, which would be of 350 MB."""
    return data[:1] == b"\x16"


def encode(message: msgspec.Struct) -> bytes:
    """One message as a frame: four bytes of big-endian length, then msgpack."""
    body = encode_body(message)
    return _LENGTH.pack(len(body)) + body


def decode_body(body: bytes | memoryview, kind: Any, *, who: str = "") -> Any:
    """Turn a frame's body into one of the message types in *kind*.

    Raises:
        ProtocolError: not msgpack, or fields missing, of the wrong type or out of bounds.
    """
    try:
        return _decoder(kind).decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as bad:
        raise ProtocolError(
            "sent a message that cannot be read", who=who, expected="a known message", got=str(bad)[:200]
        ) from bad


class Decoder(Generic[T]):
    """Collects bytes until a whole frame is there, with a body of *max_bytes* at most.

    *kind* is a msgspec Struct type or a union of tagged ones; *who* names the sender in errors.
    """

    def __init__(self, kind: Any, max_bytes: int, who: str = "") -> None:
        self._kind, self._max, self.who = kind, max_bytes, who
        self._buffer = bytearray()

    def allow(self, max_bytes: int) -> None:
        """From the next feed() on frames of this size are accepted."""
        self._max = max_bytes

    def feed(self, data: bytes) -> list[T]:
        """Add bytes, return the messages that are complete.

        Raises:
            ProtocolError: an oversized or malformed frame; the connection cannot be used any more.
        """
        buffer = self._buffer
        buffer += data
        messages: list[T] = []
        start = 0
        while len(buffer) - start >= HEADER_BYTES:
            (length,) = _LENGTH.unpack_from(buffer, start)
            if length > self._max:
                raise ProtocolError(
                    "sent an oversized frame", who=self.who, expected=f"at most {self._max} bytes", got=f"{length}"
                )
            end = start + HEADER_BYTES + length
            if len(buffer) < end:
                break
            body = bytes(buffer[start + HEADER_BYTES : end])
            messages.append(decode_body(body, self._kind, who=self.who))
            start = end
        if start:
            del buffer[:start]
        return messages


def body_length(header: bytes, max_bytes: int, *, who: str = "") -> int:
    """Length of the body that follows the four bytes *header*. Raises ProtocolError: larger than *max_bytes*."""
    (length,) = _LENGTH.unpack(header)
    if length > max_bytes:
        raise ProtocolError("sent an oversized frame", who=who, expected=f"at most {max_bytes} bytes", got=f"{length}")
    return int(length)
