"""Single lanes: socket options and the handshake that precedes the engine's frames."""

from __future__ import annotations

import contextlib
import socket
from typing import Any

import trio

from wancoll.errors import ConfigError, ProtocolError
from wancoll.limits import KIB, Limits
from wancoll.net.dial import DialFailed, read_frame
from wancoll.peer.links.beside import is_beside
from wancoll.peer.links.connections import Connection
from wancoll.wire import messages as m

TCP_NOTSENT_LOWAT = 25  # of Linux; the socket module has no name for it
_NO_LIMIT = 0x7FFFFFFF
_UNSENT = 64 * KIB  # to begin with; the engine keeps it at about half of the lane's window
PREFERRED = ("bbr", "cubic")  # congestion controls that a plan may ask for


class SetIsOver(DialFailed):
    """The other end has no use for this set of lanes any more."""


def tune(sock: Any, congestion_control: str, limits: Limits, planned_congestion_control: str = "") -> None:
    """Set the options of a connected lane's socket.

    This daemon's *congestion_control* is "" where the system's is kept. Between machines the planned one, if there is
    one and this kernel offers it, goes before that. A unix socket has none.
    """
    if is_beside(sock):
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # No TCP_USER_TIMEOUT: it takes an end whose client calls late, and leaves bytes in the socket, for a broken one.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    idle = max(1, int(limits.lane_timeout))
    for option, value in (
        (socket.TCP_KEEPIDLE, idle),
        (socket.TCP_KEEPINTVL, max(1, idle // 3)),
        (socket.TCP_KEEPCNT, 3),
    ):
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
    local = sock.getsockname()[0] == sock.getpeername()[0]
    # What a slow lane has taken, no other lane can take over. Within one machine there are no slow ones.
    sock.setsockopt(socket.IPPROTO_TCP, TCP_NOTSENT_LOWAT, _NO_LIMIT if local else _UNSENT)
    if local:
        # Both ends on one machine: bbr's pacing timer costs a third of the speed there, and reno is always allowed.
        congestion_control = congestion_control or "reno"
    elif planned_congestion_control:
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, planned_congestion_control.encode())
            congestion_control = ""
    if congestion_control:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, congestion_control.encode())


def check_congestion_control(name: str) -> None:
    """Raise ConfigError where this kernel does not offer *name*."""
    if _offers(name):
        return
    try:
        with open("/proc/sys/net/ipv4/tcp_available_congestion_control") as offered:
            choices = offered.read().strip()
    except OSError:
        choices = "what the kernel offers"
    raise ConfigError("unknown congestion control", who="--congestion-control", expected=choices, got=repr(name))


def check_interface(name: str) -> None:
    """Raise ConfigError where this machine has no network interface *name*."""
    known = [one for _, one in socket.if_nameindex()]
    if name not in known:
        raise ConfigError("unknown network interface", who="--uplink", expected=", ".join(known), got=repr(name))


def offered_congestion_controls(setting: str) -> list[str]:
    """What the lanes may be told to use: what the user has set, else what the master may prefer and this kernel has."""
    if setting:
        return [setting]
    return [name for name in PREFERRED if _offers(name)]


def _offers(name: str) -> bool:
    with socket.socket() as probe:
        try:
            probe.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name.encode())
        except OSError:
            return False
    return True


async def greet(connection: Connection, hello: m.LaneHello | m.ProbeHello, who: str) -> m.LaneWelcome:
    """Dialler's half of the handshake; returns the answer. Raises DialFailed: refused, closed or not understood."""
    try:
        await connection.say(hello)
        answer: m.LaneAnswer = await read_frame(connection, m.LaneAnswer, who=who)
    except (trio.BrokenResourceError, trio.ClosedResourceError, ProtocolError) as bad:
        raise DialFailed(f"{who}: {bad}") from bad
    if isinstance(answer, m.LaneRefused):
        raise (SetIsOver if answer.over else DialFailed)(f"{who} refused: {answer.reason}")
    if isinstance(hello, m.LaneHello) and hello.checksums and not answer.checksums:
        raise DialFailed(f"{who} refused checksums")
    return answer
