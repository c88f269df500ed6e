"""Connecting to others, and the single frames that a handshake is made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import trio

from wancoll.errors import ConfigError
from wancoll.local import split_address
from wancoll.wire.framing import HEADER_BYTES, body_length, decode_body

_HELLO_BYTES = 4096  # handshake frames are small


class DialFailed(Exception):
    """A dial or handshake that did not come through, with the reason. An event, told to whoever wanted it.

    *refused*: nobody listens at any of the addresses.
    """

    def __init__(self, reason: str, *, refused: bool = False) -> None:
        super().__init__(reason)
        self.refused = refused


async def dial(addresses: Sequence[str], within: float) -> trio.SocketStream:
    """Connect to the first address that answers; DNS names are tried with all their addresses.

    Raises:
        DialFailed: none answered within *within* seconds.
    """
    reasons, refused = [], True
    with trio.move_on_after(within):
        for address in addresses:
            try:
                return await trio.open_tcp_stream(*split_address(address))
            except (OSError, ValueError, ConfigError) as bad:  # ValueError: no name that can be looked up
                cause = bad.__cause__
                inner = cause.exceptions if isinstance(cause, BaseExceptionGroup) else (cause or bad,)
                refused &= all(isinstance(one, ConnectionRefusedError) for one in inner)
                reasons.append(f"{address}: {inner[0]}")
    if not reasons:
        reasons.append(f"{', '.join(addresses)}: no answer within {within:.1f} s")
    raise DialFailed("; ".join(reasons), refused=refused and len(reasons) == len(addresses))


async def read_frame(sock: Any, kind: Any, *, who: str) -> Any:
    """One handshake frame, and not a byte more: what follows may belong to somebody else.

    Raises:
        ProtocolError: malformed or oversized.
        DialFailed: the connection ended.
    """
    header = await _exactly(sock, HEADER_BYTES, who)
    body = await _exactly(sock, body_length(header, _HELLO_BYTES, who=who), who)
    return decode_body(body, kind, who=who)


async def _exactly(sock: Any, count: int, who: str) -> bytes:
    data = b""
    while len(data) < count:
        try:
            more = await sock.recv(count - len(data))
        except OSError as bad:
            raise DialFailed(f"{who}: {bad}") from bad
        if not more:
            raise DialFailed(f"{who} closed the connection during the handshake")
        data += more
    return data
