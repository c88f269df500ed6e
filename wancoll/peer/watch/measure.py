"""Measures this daemon's paths: watches the lanes of operations, and probes when the master asks. A trio shell."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import structlog
import trio

from wancoll.errors import ProtocolError
from wancoll.limits import KIB, MIB, PROTOCOL_VERSION, Limits
from wancoll.local import split_address
from wancoll.net.dial import DialFailed, dial, read_frame
from wancoll.peer.core.tcpinfo import TCP_INFO_BYTES, Observer, TcpInfo, burst_rate, parse_tcp_info, saturated
from wancoll.peer.links.lanes import TCP_NOTSENT_LOWAT, greet
from wancoll.wire import messages as m
from wancoll.wire.framing import encode

log = structlog.get_logger("wancoll.measure")

_LOOK = 0.25  # seconds between looks at the lanes
_REPORT = 1.0  # seconds between reports to the master
_ROUNDS = 2  # small exchanges of a probe; the handshake of TCP is one more
_BURST_SECONDS = 2.0  # at most
_BURST_TRIES = 3  # a burst that an operation interrupted is tried again
_IDLE_WAIT = 30.0  # seconds that a burst waits for the daemon to have no operation under way
_GRAIN = 0.004  # seconds between looks at a burst
_STRETCH = 0.05  # seconds over which the speed of a burst is taken, or a round trip if that is longer
_FLOWS = 4  # of a burst: the buffers of one would be the limit of long paths
_PART = 512 * KIB  # bytes of a burst that are announced, and answered, at a time
_CHUNK = 64 * KIB
_ANSWERED_BYTES = 64 * MIB  # that one connection may make this daemon read
_ANSWERED_ROUNDS = 256


class OpenLink(NamedTuple):
    """A link whose lanes are in the engine.

    Args:
        engine_id: never used again.
        daemon: at the other end.
        addresses: of that daemon.
        lanes: how many there are.
    """

    engine_id: int
    daemon: str
    addresses: list[str]
    lanes: int


class Measurer:
    """What operations and probes tell of this daemon's paths, on its way to the master.

    Args:
        limits: timeouts.
        links: gives the links that are open now.
        look: gives the newest struct tcp_info of a link's lane, b"" if there is none.
        send: to the master.
        busy: whether an operation is under way.
        here: gives this daemon's addresses; paths within one machine are not measured.
    """

    def __init__(
        self,
        limits: Limits,
        links: Callable[[], Iterable[OpenLink]],
        look: Callable[[int, int], bytes],
        send: Callable[[m.FromPeer], None],
        busy: Callable[[], bool],
        here: Callable[[], Iterable[str]],
    ) -> None:
        self._limits, self._links, self._look, self._send = limits, links, look, send
        self._busy, self._here = busy, here
        self._observer = Observer()
        self._asked, self._asks = trio.open_memory_channel[m.MeasureLink](1024)
        self._burst = trio.CancelScope()

    # ---- what operations tell ------------------------------------------------------------------------

    async def watch(self) -> None:
        """Task: look at the lanes, and report what is new."""
        report_at = trio.current_time()
        while True:
            await trio.sleep(_LOOK)
            self._observer.look({link.engine_id: (link.daemon, self._lanes(link)) for link in self._remote_links()})
            if trio.current_time() >= report_at:
                report = self._observer.report()
                if report is not None:
                    self._send(report)
                    report_at = trio.current_time() + _REPORT

    def retell(self) -> None:
        """There is a new connection to the master: it knows nothing yet."""
        self._observer.retell()

    def _remote_links(self) -> list[OpenLink]:
        hosts = {split_address(address)[0] for address in self._here()}
        return [
            link for link in self._links() if hosts.isdisjoint(split_address(address)[0] for address in link.addresses)
        ]

    def _lanes(self, link: OpenLink) -> dict[int, TcpInfo]:
        found = ((lane, parse_tcp_info(self._look(link.engine_id, lane))) for lane in range(link.lanes))
        return {lane: info for lane, info in found if info is not None}

    # ---- probes --------------------------------------------------------------------------------------

    def measure(self, ask: m.MeasureLink) -> None:
        """The master wants to know the path to a daemon: its round trip soon, its bandwidth when there is time."""
        try:
            self._asked.send_nowait(ask)
        except trio.WouldBlock:
            log.warning("too many paths to measure", daemon=ask.daemon)

    def op_started(self) -> None:
        """An operation begins: a burst that is under way gives way at once."""
        self._burst.cancel()

    async def probe(self) -> None:
        """Task: do what measure() was asked, round trips side by side, bursts one after the other."""
        bursts, wanted = trio.open_memory_channel[m.MeasureLink](1024)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._send_bursts, wanted)
            async for ask in self._asks:
                nursery.start_soon(self._measure_round_trip, ask, bursts)

    async def _measure_round_trip(self, ask: m.MeasureLink, bursts: trio.MemorySendChannel[m.MeasureLink]) -> None:
        rtt = 0.0
        try:
            with trio.fail_after(self._limits.probe_timeout):
                rtt = await round_trip(ask, self._limits.probe_timeout)
        except (DialFailed, trio.TooSlowError) as bad:
            log.info("round trip not measured", daemon=ask.daemon, reason=str(bad))
        self._send(m.LinkReport([m.LinkMeasure(ask.daemon, rtt, 0.0, 0, 0.0)]))
        if rtt and ask.nbytes:
            try:
                bursts.send_nowait(ask)
            except trio.WouldBlock:
                log.warning("too many bursts to send", daemon=ask.daemon)

    async def _send_bursts(self, wanted: trio.MemoryReceiveChannel[m.MeasureLink]) -> None:
        async for ask in wanted:
            rate = 0.0
            for _ in range(_BURST_TRIES):
                if not await self._idle():
                    break
                self._burst = trio.CancelScope()
                try:
                    with self._burst:
                        rate = await burst(ask, self._limits.probe_timeout)
                except DialFailed as bad:
                    log.info("bandwidth not measured", daemon=ask.daemon, reason=str(bad))
                    break
                if rate:
                    log.info("bandwidth measured", daemon=ask.daemon, megabytes_per_second=round(rate / 1e6, 3))
                    break
            self._send(m.LinkReport([m.LinkMeasure(ask.daemon, 0.0, rate, 0, 0.0)]))

    async def _idle(self) -> bool:
        """Wait until no operation is under way; False if there was always one."""
        with trio.move_on_after(_IDLE_WAIT):
            while self._busy():  # noqa: ASYNC110 - operations come and go by the thousand, a probe is rare
                await trio.sleep(0.02)
            return True
        return False


# ---- the dialler's side of a probe ------------------------------------------------------------------


async def round_trip(ask: m.MeasureLink, within: float) -> float:
    """Seconds there and back, as the kernel saw them: the least of TCP's handshake and some small exchanges.

    Raises:
        DialFailed: *ask.daemon* does not answer there.
    """
    stream = await dial(ask.addresses, within)
    async with stream:
        for _ in range(_ROUNDS):
            await _expect(stream, m.ProbeHello(PROTOCOL_VERSION, ask.daemon), ask)
        info = kernel_view(stream.socket)
    return max(info.min_rtt, 1e-6) if info is not None else 0.0


async def burst(ask: m.MeasureLink, within: float) -> float:
    """Bytes per second that up to *ask.nbytes* showed the path to have; 0: too few.

    It ends as soon as the speed grows no more. Then, as when it is cancelled or fails, what the network does not have
    yet is taken back.

    Raises:
        DialFailed: *ask.daemon* does not answer there, or no longer.
    """
    streams: list[trio.SocketStream] = []
    samples: list[tuple[float, int]] = []
    stretch = _STRETCH
    failed: list[str] = []
    try:
        with trio.move_on_after(_BURST_SECONDS):
            async with trio.open_nursery() as nursery:
                for _ in range(_FLOWS):
                    nursery.start_soon(_send_burst, streams, samples, ask, within)
                while not saturated(samples, stretch) and nursery.child_tasks:
                    await trio.sleep(_GRAIN)
                    infos = [info for stream in streams if (info := kernel_view(stream.socket)) is not None]
                    if infos:
                        samples.append((trio.current_time(), sum(info.bytes_acked for info in infos)))
                        stretch = max(_STRETCH, *(info.min_rtt for info in infos))
                nursery.cancel_scope.cancel()
    except* DialFailed as several:
        failed += map(str, several.exceptions)  # what is raised in here would be wrapped into a group
    finally:
        for stream in streams:
            stream.socket.close()
    if failed:
        raise DialFailed(failed[0])
    return burst_rate(samples, stretch)


async def _send_burst(
    streams: list[trio.SocketStream], samples: list[tuple[float, int]], ask: m.MeasureLink, within: float
) -> None:
    """One flow's share. The connection is added to *streams*, whose owner closes it, its start to *samples*."""
    stream = await dial(ask.addresses, within)
    streams.append(stream)
    samples.append((trio.current_time(), samples[-1][1] if samples else 0))
    sock, nbytes, zeros = stream.socket, ask.nbytes // _FLOWS, bytes(_CHUNK)
    sock.setsockopt(socket.IPPROTO_TCP, TCP_NOTSENT_LOWAT, 0x7FFFFFFF)  # trio sets 16 KiB, which would be the limit
    with contextlib.suppress(OSError):  # a lost packet must not be the limit
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"bbr")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    try:
        for start in range(0, nbytes, _PART):
            part = min(_PART, nbytes - start)
            await stream.send_all(encode(m.ProbeHello(PROTOCOL_VERSION, ask.daemon, part)))
            for at in range(0, part, _CHUNK):
                await stream.send_all(zeros[: min(_CHUNK, part - at)])
        for _ in range(0, nbytes, _PART):
            answer = await read_frame(stream.socket, m.LaneAnswer, who=ask.daemon)
            if isinstance(answer, m.LaneRefused):
                raise DialFailed(f"{ask.daemon} refused: {answer.reason}")
    except (trio.BrokenResourceError, trio.ClosedResourceError, ProtocolError) as bad:
        raise DialFailed(f"{ask.daemon}: {bad}") from bad


async def _expect(stream: trio.SocketStream, hello: m.ProbeHello, ask: m.MeasureLink) -> None:
    found = await greet(stream, hello, ", ".join(ask.addresses))
    if found != ask.daemon:
        raise DialFailed(f"{', '.join(ask.addresses)}: expected daemon {ask.daemon}, got {found}")


def kernel_view(sock: Any) -> TcpInfo | None:
    """The kernel's view of a connected TCP socket; None if it has none."""
    try:
        return parse_tcp_info(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_BYTES))
    except OSError:
        return None


# ---- the listener's side ----------------------------------------------------------------------------


async def answer_probe(stream: trio.SocketStream, hello: m.ProbeHello, daemon: str, who: str) -> None:
    """Answer a connection that began with *hello*, and whatever probes follow on it, within bounds.

    Raises:
        ProtocolError: something else than a probe follows.
    """
    total = 0
    try:
        for _ in range(_ANSWERED_ROUNDS):
            total += hello.nbytes
            if total > _ANSWERED_BYTES:
                await stream.send_all(encode(m.LaneRefused(f"probes of more than {_ANSWERED_BYTES} bytes")))
                return
            left = hello.nbytes
            while left:
                data = await stream.receive_some(min(left, _CHUNK))
                if not data:
                    return
                left -= len(data)
            await stream.send_all(encode(m.LaneWelcome(daemon)))
            hello = await read_frame(stream.socket, m.ProbeHello, who=who)
    except (DialFailed, trio.BrokenResourceError, trio.ClosedResourceError):
        return  # the dialler has seen enough
