"""Measures this daemon's paths: watches the lanes of operations, and probes when the master asks. A trio shell."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator

import structlog
import trio

from wancoll.local import hosts_of
from wancoll.net.contain import contained
from wancoll.net.dial import DialFailed
from wancoll.peer.core.grid import next_on_grid
from wancoll.peer.core.paths.pacing import Lane, Pacer, Way
from wancoll.peer.core.paths.tcpinfo import Observer, TcpInfo, parse_tcp_info
from wancoll.peer.links.hub import WatchedLink
from wancoll.peer.links.probes import burst, round_trip
from wancoll.peer.session import Host
from wancoll.wire import messages as m

log = structlog.get_logger("wancoll.measure")

_LOOK = 0.25  # seconds between looks at the lanes
_REPORT = 1.0  # seconds between reports to the master
_ASKS = 1024  # of the master, that may wait to be answered
_BURST_TRIES = 5  # a burst that an operation interrupted, or beside which this process stood still, is sent again
_IDLE_WAIT = 30.0  # seconds that a burst waits for the daemon to have no operation under way


class Measurer:
    """What operations and probes tell of this daemon's paths, on its way to the master.

    *busy* says whether an operation is under way.
    """

    def __init__(self, daemon: Host, busy: Callable[[], bool]) -> None:
        self._daemon, self._limits, self._busy = daemon, daemon.config.limits, busy
        self._observer, self._pacer = Observer(daemon.config.most_sent), Pacer()
        self._room = trio.Semaphore(self._limits.pending_connections)  # for round trips under way
        self._asked, self._asks = trio.open_memory_channel[m.MeasureLink](_ASKS)
        self._burst = trio.CancelScope()

    # ---- what operations tell ------------------------------------------------------------------------

    async def watch(self) -> None:
        """Task: look at the lanes, adapt their pace, and report what is new."""
        report_at = trio.current_time()
        while True:
            await trio.sleep_until(next_on_grid(trio.current_time(), _LOOK))
            looks = [(link, self._lanes(link)) for link in self._remote_links()]
            self._observer.look(
                {link.engine_id: (link.daemon, _to_relay(lanes) if link.relayed else lanes) for link, lanes in looks}
            )
            paced: dict[Way, tuple[int, dict[Lane, TcpInfo]]] = {}
            for link, lanes in looks:
                for lane, info in lanes.items() if link.pacing else ():
                    ends, nth = self._daemon.links.ends_of(link.engine_id, lane)
                    paced.setdefault((link.engine_id, ends), (link.pacing, {}))[1][lane, nth] = info
            for way, pace in self._pacer.look(trio.current_time(), paced).items():
                log.info("pace changed", link=way[0], ends=way[1], megabytes_per_second=round(pace / 1e6, 3))
                for lane, _ in paced[way][1]:
                    self._daemon.links.pace(way[0], lane, pace)
            if trio.current_time() >= report_at:
                report = self._observer.report()
                if report is not None:
                    self._daemon.control.send(report)
                    report_at = trio.current_time() + _REPORT

    def retell(self) -> None:
        """There is a new connection to the master: it knows nothing yet."""
        self._observer.retell()

    def _remote_links(self) -> list[WatchedLink]:
        """Paths within one machine are not measured."""
        hosts = hosts_of(self._daemon.control.addresses)
        return [link for link in self._daemon.links.open_links() if hosts.isdisjoint(hosts_of(link.addresses))]

    def _lanes(self, link: WatchedLink) -> dict[int, TcpInfo]:
        look = self._daemon.engine.tcp_info
        found = ((lane, parse_tcp_info(look(link.engine_id, lane))) for lane in range(link.lanes))
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
        if not self._burst.cancel_called:
            self._burst.cancel()

    async def probe(self) -> None:
        """Task: do what measure() was asked, round trips side by side, bursts one after the other."""
        bursts, wanted = trio.open_memory_channel[m.MeasureLink](_ASKS)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._send_bursts, wanted)
            async for ask in self._asks:
                await self._room.acquire()
                nursery.start_soon(self._measure_round_trip, ask, bursts)

    async def _measure_round_trip(self, ask: m.MeasureLink, bursts: trio.MemorySendChannel[m.MeasureLink]) -> None:
        rtt, known = 0.0, (DialFailed, trio.TooSlowError)
        try:
            with contained("a round trip", lambda: ask, expected=known), trio.fail_after(self._limits.probe_timeout):
                rtt = await round_trip(self._daemon.links.connector, ask, self._limits.probe_timeout)
        except known as bad:
            log.info("round trip not measured", daemon=ask.daemon, reason=str(bad))
        finally:
            self._room.release()
        self._daemon.control.send(m.LinkReport([m.LinkMeasure(ask.daemon, rtt, 0.0, 0, 0.0)]))
        if rtt and ask.nbytes:
            try:
                bursts.send_nowait(ask)
            except trio.WouldBlock:
                log.warning("too many bursts to send", daemon=ask.daemon)

    async def _send_bursts(self, wanted: trio.MemoryReceiveChannel[m.MeasureLink]) -> None:
        """Each path once, and only then a second time: the better one counts, since the machine may have been busy."""
        again: deque[tuple[m.MeasureLink, float]] = deque(maxlen=_ASKS)
        while True:
            try:
                ask, best = wanted.receive_nowait(), 0.0
            except trio.WouldBlock:
                ask, best = again.popleft() if again else (await wanted.receive(), 0.0)
            rate = await self._send_burst(ask)
            if rate > best or not best:
                self._daemon.control.send(m.LinkReport([m.LinkMeasure(ask.daemon, 0.0, rate, 0, 0.0)]))
            if rate and not best:
                again.append((ask, rate))

    async def _send_burst(self, ask: m.MeasureLink) -> float:
        """Bytes per second; 0: not known."""
        for _ in range(_BURST_TRIES):
            if not await self._idle():
                break
            self._burst = trio.CancelScope()
            rate = 0.0
            try:
                with contained("a burst", lambda: ask, expected=(DialFailed,)), self._alone(), self._burst:
                    rate = await burst(
                        self._daemon.links.connector, ask, self._limits.probe_timeout, self._daemon.config.most_sent
                    )
            except DialFailed as bad:
                log.info("bandwidth not measured", daemon=ask.daemon, reason=str(bad))
                break
            if rate:
                log.info("bandwidth measured", daemon=ask.daemon, megabytes_per_second=round(rate / 1e6, 3))
                return rate
        return 0.0

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Whatever begins inside is seen, so that a burst gives way to it."""
        self._daemon.measuring = True
        for session in self._daemon.sessions:
            session.hold()
        try:
            yield
        finally:
            self._daemon.measuring = False
            self._daemon.settle()

    async def _idle(self) -> bool:
        """Wait until no operation is under way; False if there was always one."""
        with trio.move_on_after(_IDLE_WAIT):
            while self._busy():  # noqa: ASYNC110 - operations come and go by the thousand, a probe is rare
                await trio.sleep(0.02)
            return True
        return False


def _to_relay(lanes: dict[int, TcpInfo]) -> dict[int, TcpInfo]:
    """Lanes whose round trips are not those to the other daemon."""
    return {lane: info._replace(min_rtt=0.0) for lane, info in lanes.items()}
