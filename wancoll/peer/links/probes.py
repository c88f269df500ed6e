"""Probes of a path, both ends: who answers there, how far away it is, how much the path carries.

A probe is a connection to the data port that begins with ProbeHello and never becomes a lane.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Sequence
from contextlib import closing
from math import inf

import trio

from wancoll.errors import ProtocolError
from wancoll.limits import KIB, MIB, PROTOCOL_VERSION, Limits
from wancoll.net.dial import DialFailed, read_frame
from wancoll.peer.core.paths.tcpinfo import burst_rate, saturated
from wancoll.peer.links.connections import MOST_PACE, SO_MAX_PACING_RATE, Connection, Connector, kernel_view
from wancoll.peer.links.lanes import TCP_NOTSENT_LOWAT, greet
from wancoll.wire import messages as m

_ROUNDS = 2  # small exchanges of a probe; the handshake of TCP is one more
_ENDING_SECONDS = 0.05  # a process that ends may take a connection yet, and drop it: soon after nobody listens there
_BURST_SECONDS = 2.0  # at most
_GRAIN = 0.004  # seconds between looks at a burst
_STRETCH = 0.05  # seconds over which the speed of a burst is taken, or a round trip if that is longer
_FLOWS = 8  # of a burst, as many as lanes: the buffers of fewer would be the limit of long paths
_PART = 512 * KIB  # bytes of a burst that are announced, and answered, at a time
_CHUNK = 64 * KIB
_ANSWERED_BYTES = 64 * MIB  # that one connection may make this daemon read
_ANSWERED_ROUNDS = 256

# ---- the dialler's side -----------------------------------------------------------------------------


async def probe(
    connector: Connector, addresses: Sequence[str], daemon: str, key: bytes, limits: Limits, way: m.Way = m.Way.direct
) -> DialFailed | None:
    """Why *daemon*, of this public *key*, does not answer at *addresses*, or this *way*; None: it does."""
    if way is m.Way.relayed and not connector.relays:
        return DialFailed("no relay is known here")
    within = way.probed_within(limits)
    try:
        with trio.fail_after(within):
            connection = await connector.dial(addresses, key, within, daemon=daemon, way=way)
            with closing(connection):
                try:
                    await _expect(connection, addresses, daemon)
                except DialFailed:
                    if way:
                        raise
                    await trio.sleep(_ENDING_SECONDS)
                    async with await connector.open(addresses, limits.probe_timeout):  # does somebody still listen?
                        raise
    except DialFailed as bad:
        return bad
    except trio.TooSlowError:
        return DialFailed(f"{', '.join(addresses)}: no answer within {within:.1f} s")
    return None


async def round_trip(connector: Connector, ask: m.MeasureLink, within: float) -> float:
    """Seconds there and back, as the kernel saw them: the least of TCP's handshake and some small exchanges.

    Raises:
        DialFailed: *ask.daemon* does not answer there.
    """
    connection = await connector.dial(ask.addresses, ask.key, within, daemon=ask.daemon, way=ask.way)
    with closing(connection):
        took = []
        for _ in range(_ROUNDS):
            began = trio.current_time()
            await _expect(connection, ask.addresses, ask.daemon)
            took.append(trio.current_time() - began)
        if ask.way is m.Way.relayed:  # the kernel knows the way to the relay alone
            return max(min(took), 1e-6)
        info = kernel_view(connection.socket)
    return max(info.min_rtt, 1e-6) if info is not None else 0.0


async def burst(connector: Connector, ask: m.MeasureLink, within: float, most: float) -> float:
    """Bytes per second that up to *ask.nbytes* showed the path to have, sent no faster than *most*; 0: it is not known.

    It ends as soon as the speed grows no more. Then, as when it is cancelled or fails, what the network does not have
    yet is taken back.

    Raises:
        DialFailed: *ask.daemon* does not answer there, or no longer.
    """
    flows: list[Connection] = []
    samples: list[tuple[float, int]] = []
    stretch = _STRETCH
    failed: list[str] = []
    try:
        with trio.move_on_after(_BURST_SECONDS):
            async with trio.open_nursery() as nursery:
                for _ in range(_FLOWS):
                    nursery.start_soon(_send_burst, connector, flows, samples, ask, within, most)
                while not saturated(samples, stretch) and nursery.child_tasks:
                    await trio.sleep(_GRAIN)
                    infos = [info for flow in flows if (info := kernel_view(flow.socket)) is not None]
                    if infos:
                        samples.append((trio.current_time(), sum(info.bytes_acked for info in infos)))
                        stretch = max(_STRETCH, *(info.min_rtt for info in infos))
                nursery.cancel_scope.cancel()
    except* DialFailed as several:
        failed += map(str, several.exceptions)  # what is raised in here would be wrapped into a group
    finally:
        for flow in flows:
            flow.close()
    if failed:
        raise DialFailed(failed[0])
    return min(most, burst_rate(samples, stretch))


async def _send_burst(
    connector: Connector,
    flows: list[Connection],
    samples: list[tuple[float, int]],
    ask: m.MeasureLink,
    within: float,
    most: float,
) -> None:
    """One flow's share. The connection is added to *flows*, whose owner closes it, its start to *samples*."""
    stream = await connector.dial(ask.addresses, ask.key, within, daemon=ask.daemon, way=ask.way)
    flows.append(stream)
    samples.append((trio.current_time(), samples[-1][1] if samples else 0))
    sock, nbytes, zeros = stream.socket, ask.nbytes // _FLOWS, bytes(_CHUNK)
    sock.setsockopt(socket.IPPROTO_TCP, TCP_NOTSENT_LOWAT, 0x7FFFFFFF)  # trio sets 16 KiB, which would be the limit
    if most < inf:
        sock.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, min(int(most / _FLOWS), MOST_PACE))
    with contextlib.suppress(OSError):  # a lost packet must not be the limit
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"bbr")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    try:
        for start in range(0, nbytes, _PART):
            part = min(_PART, nbytes - start)
            await stream.say(m.ProbeHello(PROTOCOL_VERSION, ask.daemon, part))
            for at in range(0, part, _CHUNK):
                await stream.send_all(zeros[: min(_CHUNK, part - at)])
        for _ in range(0, nbytes, _PART):
            answer = await read_frame(stream, m.LaneAnswer, who=ask.daemon)
            if isinstance(answer, m.LaneRefused):
                raise DialFailed(f"{ask.daemon} refused: {answer.reason}")
    except (OSError, trio.BrokenResourceError, trio.ClosedResourceError, ProtocolError) as bad:
        raise DialFailed(f"{ask.daemon}: {bad}") from bad


async def _expect(connection: Connection, addresses: Sequence[str], daemon: str) -> None:
    where = ", ".join(addresses)
    found = (await greet(connection, m.ProbeHello(PROTOCOL_VERSION, daemon), where)).daemon
    if found != daemon:
        raise DialFailed(f"{where}: expected daemon {daemon}, got {found}")


# ---- the listener's side ----------------------------------------------------------------------------


async def answer_probe(connection: Connection, hello: m.ProbeHello, daemon: str, who: str) -> None:
    """Answer a connection that began with *hello*, and whatever probes follow on it, within bounds.

    Raises:
        ProtocolError: something else than a probe follows.
    """
    total = 0
    try:
        for _ in range(_ANSWERED_ROUNDS):
            total += hello.nbytes
            if total > _ANSWERED_BYTES:
                await connection.say(m.LaneRefused(f"probes of more than {_ANSWERED_BYTES} bytes"))
                return
            left = hello.nbytes
            while left:
                data = await connection.recv(min(left, _CHUNK))
                if not data:
                    return
                left -= len(data)
            await connection.say(m.LaneWelcome(daemon, filler=bytes(hello.fill)))
            hello = await read_frame(connection, m.ProbeHello, who=who)
    except (DialFailed, trio.BrokenResourceError, trio.ClosedResourceError):
        return  # the dialler has seen enough
