"""Connecting to others, and the single frames that a handshake is made of."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Sequence
from typing import Any

import trio

from wancoll.errors import ConfigError
from wancoll.limits import KIB
from wancoll.local import split_address
from wancoll.net.listen import is_loopback_host
from wancoll.wire.framing import HEADER_BYTES, body_length, decode_body

_HELLO_BYTES = 16 * KIB  # the largest has a receipt


class DialFailed(Exception):
    """A dial or handshake that did not come through, with the reason. An event, told to whoever wanted it.

    *refused*: nobody listens at any of the addresses.
    """

    def __init__(self, reason: str, *, refused: bool = False) -> None:
        super().__init__(reason)
        self.refused = refused


async def dial(
    addresses: Sequence[str], within: float, *, near_only: bool, uplinks: Sequence[str] = ()
) -> trio.SocketStream:
    """Connect to the first "host:port" that answers *within* seconds; DNS names are tried with all their addresses.

    *near_only*: addresses that are not of loopback are not dialled. *uplinks*: the network interfaces to go over, the
    first one that comes through. Raises DialFailed: none answered in time.
    """
    reasons, refused = [], True
    with trio.move_on_after(within):
        for address in addresses:
            try:
                if uplinks and not near_only:
                    return await _open_over(uplinks, *split_address(address), within / (len(uplinks) + 1))
                return await (_open_near if near_only else trio.open_tcp_stream)(*split_address(address))
            # ValueError: no name that can be looked up; RuntimeError: no thread to look it up in.
            except (OSError, ValueError, ConfigError, RuntimeError) as bad:
                cause = bad.__cause__
                inner = cause.exceptions if isinstance(cause, BaseExceptionGroup) else (cause or bad,)
                refused &= all(isinstance(one, ConnectionRefusedError) for one in inner)
                reasons.append(f"{address}: {inner[0]}")
    if not reasons:
        reasons.append(f"{', '.join(addresses)}: no answer within {within:.1f} s")
    raise DialFailed("; ".join(reasons), refused=refused and len(reasons) == len(addresses))


async def _open_near(host: str, port: int) -> trio.SocketStream:
    """Do trio.open_tcp_stream to loopback. The addresses that were checked are dialled: a name may resolve anew."""
    found = await trio.socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    hosts = list(dict.fromkeys(str(where[0]) for *_, where in found))
    if not all(map(is_loopback_host, hosts)):
        raise ConfigError(
            "is not dialled: it is beyond this machine, where all would be in clear", expected="an address of loopback",
            got=", ".join(hosts), hint="start the daemon with --join TOKEN, or with --insecure",
        )  # fmt: skip
    for one in hosts[:-1]:
        with contextlib.suppress(OSError):
            return await trio.open_tcp_stream(one, port)
    return await trio.open_tcp_stream(hosts[-1], port)


async def _open_over(uplinks: Sequence[str], host: str, port: int, each: float) -> trio.SocketStream:
    """Do trio.open_tcp_stream over the first of the *uplinks* that comes through, *each* within so many seconds."""
    failed: OSError = OSError(f"{host} has no address")
    for family, *_, where in await trio.socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        with socket.socket(family, socket.SOCK_DGRAM) as asking:
            with contextlib.suppress(OSError):
                asking.connect(where)  # sends nothing, and finds the source
            if asking.getsockname()[0] == where[0] or is_loopback_host(str(where[0])):  # this machine: over no uplink
                return await trio.open_tcp_stream(str(where[0]), port)
        for uplink in uplinks:
            sock = trio.socket.socket(family, socket.SOCK_STREAM)
            try:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, uplink.encode())
                with trio.fail_after(each):
                    await sock.connect(where)
                return trio.SocketStream(sock)
            except (OSError, trio.TooSlowError) as bad:
                sock.close()
                failed = bad if isinstance(bad, OSError) else OSError(f"no answer over {uplink} within {each:.1f} s")
            except BaseException:
                sock.close()
                raise
    raise failed


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
