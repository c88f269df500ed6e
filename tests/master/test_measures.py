"""What is known of paths: the kernel's structure on a real connection, windows and reports, the master's matrix."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import AsyncIterator
from functools import partial
from types import SimpleNamespace

import pytest
import trio

from wancoll.errors import ProtocolError
from wancoll.limits import PROTOCOL_VERSION, Limits
from wancoll.net.dial import read_frame
from wancoll.peer.config import PeerConfig
from wancoll.peer.core.paths.tcpinfo import (
    BACKLOG,
    BUSY,
    TCP_INFO_BYTES,
    Observer,
    TcpInfo,
    burst_rate,
    parse_tcp_info,
    saturated,
    window,
)
from wancoll.peer.links import probes
from wancoll.peer.links.connections import Connection, Connector
from wancoll.peer.links.probes import answer_probe
from wancoll.peer.watch import measure
from wancoll.peer.watch.measure import Measurer
from wancoll.wire import messages as m
from wancoll.wire.framing import encode
from wancoll_master.plan.measures import DOWN, MAX_LANE_COUNTS, RTT_WINDOW, Measures

MB = 1e6


# ---- struct tcp_info --------------------------------------------------------------------------------


def tcp_info(sock: socket.socket) -> TcpInfo:
    found = parse_tcp_info(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_BYTES))
    assert found is not None
    return found


def test_tcp_info_of_a_real_connection():
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as one:
        other, _ = listener.accept()
        with other:
            nbytes, got = 3_000_000, 0
            other.settimeout(10)
            one.setblocking(False)
            before = tcp_info(one)
            view = memoryview(bytes(nbytes))
            while got < nbytes:
                with contextlib.suppress(BlockingIOError):
                    view = view[one.send(view) :]
                got += len(other.recv(1 << 16))
            deadline = time.monotonic() + 10
            while tcp_info(one).bytes_acked < nbytes and time.monotonic() < deadline:
                pass
            after = tcp_info(one)
    assert after.bytes_acked - before.bytes_acked == nbytes
    assert 0 < after.min_rtt <= 10
    assert 0 < after.rtt < 10
    assert after.delivery_rate > 0
    assert after.segments - before.segments >= nbytes / 65536
    assert 0 <= after.retransmitted < 10  # a probe for a lost tail may be sent needlessly
    assert after.busy < 10


def test_an_old_kernels_answer_says_nothing():
    assert parse_tcp_info(b"") is None
    assert parse_tcp_info(bytes(104)) is None
    assert parse_tcp_info(bytes(192)) == TcpInfo(0, 0, 0, False, 0, 0, 0, 0, 0)


def test_a_round_trip_that_is_not_known():
    raw = bytearray(192)
    raw[148:152] = b"\xff" * 4  # the kernel's "no sample yet"
    raw[7] = 0x81  # a flag beside app_limited
    assert parse_tcp_info(bytes(raw)) == TcpInfo(0, 0, 0, True, 0, 0, 0, 0, 0)


# ---- windows ----------------------------------------------------------------------------------------


def info(
    acked: float, busy: float, rate: float = 0.0, *, limited=True, rtt: float = 0.08, sent=0, again=0, backlog=BACKLOG
):
    return TcpInfo(rtt * 1.5, rtt, rate, limited, int(acked), sent, again, busy, backlog)


def test_a_window_adds_lanes_that_worked_at_the_same_time():
    before = {0: info(0, 0.0), 1: info(5 * MB, 1.0)}
    after = {
        0: info(10 * MB, 0.2, 40 * MB, limited=False, sent=100, again=3),
        1: info(15 * MB, 1.2, 60 * MB, limited=False, sent=50),
    }
    assert window(before, after) == (20 * MB, pytest.approx(0.2), 2, 150, 3, 100 * MB, True)


def test_a_lane_that_hardly_worked_is_not_counted_and_one_without_offers_spoils_the_peak():
    before = {0: info(0, 0), 1: info(0, 0)}
    seen = window(before, {0: info(10 * MB, 0.2, 50 * MB, limited=False), 1: info(1000, 0.01, 90 * MB, limited=True)})
    assert (seen.acked, seen.lanes, seen.peak) == (10 * MB + 1000, 2, 50 * MB)
    seen = window(before, {0: info(10 * MB, 0.2, 50 * MB, limited=False), 1: info(1000, 0.15, 90 * MB, limited=True)})
    assert (seen.lanes, seen.peak, seen.full) == (2, 0.0, True)
    assert not window(before, {0: info(10 * MB, 0.2), 1: info(10 * MB, 0.2, backlog=BACKLOG - 1)}).full
    assert window({}, {}).lanes == 0
    assert window(before, before).lanes == 0


# ---- reports ----------------------------------------------------------------------------------------


class Lanes:
    """Links whose lanes work for a while, as an Observer sees them."""

    def __init__(self, links: dict[int, str], lanes: int = 2) -> None:
        self.observer, self.links, self.lanes = Observer(), links, lanes
        self.backlog = 0
        self.acked = dict.fromkeys(links, 0.0)
        self.busy = dict.fromkeys(links, 0.0)
        self.sent = dict.fromkeys(links, 0)
        self.again = dict.fromkeys(links, 0)
        self.look()

    def work(self, seconds: float, rates: dict[int, float], again: float = 0.0, backlog: int = BACKLOG) -> None:
        """*rates*: bytes per second of each link."""
        self.backlog = backlog
        for link, rate in rates.items():
            self.acked[link] += rate * seconds
            self.busy[link] += seconds
            self.sent[link] += 1000
            self.again[link] += int(1000 * again)
        self.look()

    def look(self) -> None:
        n = self.lanes
        self.observer.look(
            {
                link: (
                    daemon,
                    {
                        lane: info(
                            self.acked[link] / n,
                            self.busy[link],
                            sent=self.sent[link] // n,
                            again=self.again[link] // n,
                            backlog=self.backlog,
                        )
                        for lane in range(n)
                    },
                )
                for link, daemon in self.links.items()
            }
        )


def test_round_trips_are_reported_once_and_bandwidth_after_three_windows():
    lanes = Lanes({1: "b"})
    assert lanes.observer.report() == m.LinkReport([m.LinkMeasure("b", 0.08, 0, 0, 0)], 0, 0)
    assert lanes.observer.report() is None
    for _ in range(2):
        lanes.work(0.25, {1: 60 * MB})
    assert lanes.observer.report() is None
    lanes.work(0.25, {1: 60 * MB})
    report = lanes.observer.report()
    assert report.links == [m.LinkMeasure("b", 0.08, pytest.approx(60 * MB), 2, 0)]
    assert (report.uplink, report.lanes) == (pytest.approx(60 * MB), 2)
    lanes.work(0.25, {1: 61 * MB})
    assert lanes.observer.report() is None  # not material
    for _ in range(8):
        lanes.work(0.25, {1: 30 * MB})
    assert lanes.observer.report().links[0].bandwidth == pytest.approx(30 * MB)


def test_short_bursts_are_added_up_until_they_say_something():
    lanes = Lanes({1: "b"})
    lanes.observer.report()
    for _ in range(12):
        lanes.work(BUSY / 2.5, {1: 50 * MB})  # three make a window
    assert lanes.observer.report().links[0].bandwidth == pytest.approx(50 * MB)


def test_links_that_share_the_uplink_tell_lower_bounds_and_the_uplink():
    lanes = Lanes({1: "b", 2: "c"})
    for _ in range(3):
        lanes.work(0.25, {1: 60 * MB})
    lanes.observer.report()
    for _ in range(8):
        lanes.work(0.25, {1: 30 * MB, 2: 40 * MB})
    report = lanes.observer.report()
    assert (report.links, report.uplink) == ([], pytest.approx(70 * MB))
    for _ in range(8):
        lanes.work(0.25, {1: 80 * MB, 2: 80 * MB})
    assert [(link.daemon, link.bandwidth) for link in lanes.observer.report().links] == [("b", pytest.approx(80 * MB))]


def test_small_operations_say_nothing_of_the_bandwidth():
    """One flight in each round trip: busy all the time, with nothing left to send."""
    lanes = Lanes({1: "b"})
    lanes.observer.report()
    for _ in range(20):
        lanes.work(0.25, {1: 0.2 * MB}, backlog=0)
    assert lanes.observer.report() is None
    for _ in range(3):
        lanes.work(0.25, {1: 60 * MB})
    assert lanes.observer.report().links[0].bandwidth == pytest.approx(60 * MB)
    for _ in range(20):
        lanes.work(0.25, {1: 0.2 * MB}, backlog=0)
    assert lanes.observer.report() is None


def test_lost_segments_are_reported():
    lanes = Lanes({1: "b"})
    lanes.observer.report()
    lanes.work(0.25, {1: 60 * MB}, again=0.01)
    assert lanes.observer.report().links[0].loss == pytest.approx(0.01)
    for _ in range(20):
        lanes.work(0.25, {1: 60 * MB})
    assert lanes.observer.report().links[0].loss < 1e-4


def test_links_that_are_gone_are_forgotten():
    lanes = Lanes({1: "b"})
    lanes.observer.look({})
    assert lanes.observer.report() is None
    assert lanes.observer._paths == {}
    assert lanes.observer._before == {}


def test_the_rate_of_a_burst_is_taken_over_round_trips_and_its_end_is_seen():
    """Windows that double until 50 MB/s are reached; acknowledgements come in heaps of 10 ms."""
    samples, acked, ended, rates = [], 0.0, 0.0, {}
    for step in range(200):
        when = step * 0.01
        acked += min(50 * MB, 14_600 * 2 ** (when / 0.08) / 0.08) * 0.01 * (2 if step % 2 else 0)
        samples.append((when, int(acked)))
        rates[when] = burst_rate(samples, 0.08)
        if not ended and saturated(samples, 0.08):
            ended = when
    assert burst_rate(samples, 0.08) == pytest.approx(50 * MB, rel=0.15)
    assert rates[ended] == pytest.approx(50 * MB, rel=0.15)
    assert 0.8 < ended < 1.2  # 50 MB/s from 0.65 s on, and three round trips of it
    assert burst_rate([(5.0, 100), (5.02, 300)], 0.08) == pytest.approx(10_000)  # over before a round trip was
    assert burst_rate([(5.0, 100)], 0.08) == 0
    frozen = [(when + 1.0 * (when > 0.1), acked) for when, acked in samples[:40]]
    assert burst_rate(frozen, 0.08) == 0  # whoever looked stood still for a second
    assert burst_rate([], 0.08) == 0
    assert not saturated([], 0.08)


# ---- probes -----------------------------------------------------------------------------------------


class Probed:
    """A daemon's data port, as far as probes go, and a Measurer that reports to this list."""

    def __init__(self, port: int) -> None:
        self.ask = m.MeasureLink("b", [f"127.0.0.1:{port}"], 1 << 20)
        self.reports: list[m.LinkMeasure] = []
        self.busy = False
        daemon = SimpleNamespace(
            config=PeerConfig(master="h:1", limits=Limits(probe_timeout=30.0)),
            control=SimpleNamespace(send=lambda report: self.reports.extend(report.links)),
            links=SimpleNamespace(connector=Connector()),
            sessions=[],
            measuring=False,
            settle=lambda: None,
        )
        self.measurer = Measurer(daemon, lambda: self.busy)

    async def wait_for(self, count: int) -> None:
        with trio.fail_after(30):
            while len(self.reports) < count:  # noqa: ASYNC110
                await trio.sleep(0.005)


@contextlib.asynccontextmanager
async def probed(answers: str = "b") -> AsyncIterator[Probed]:
    async def accept(stream: trio.SocketStream) -> None:
        async with stream:
            first = await read_frame(stream.socket, m.LaneFirst, who="test")
            await answer_probe(Connection(stream), first, answers, "test")

    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(partial(trio.serve_tcp, accept, 0, host="127.0.0.1"))
        room = Probed(listeners[0].socket.getsockname()[1])
        nursery.start_soon(room.measurer.probe)
        yield room
        nursery.cancel_scope.cancel()


async def test_a_probe_measures_the_round_trip_and_then_the_bandwidth(monkeypatch):
    monkeypatch.setattr(probes, "_BURST_SECONDS", 30.0)
    monkeypatch.setattr(measure, "_BURST_TRIES", 100)  # the machine may stand still in any of them
    async with probed() as room:
        room.measurer.measure(room.ask)
        await room.wait_for(2)
    trip, bandwidth, *_ = room.reports
    assert (trip.daemon, trip.bandwidth, trip.lanes, bandwidth.rtt, bandwidth.lanes) == ("b", 0, 0, 0, 0)
    assert 0 < trip.rtt < 30  # seconds; the machine may stand still meanwhile
    assert bandwidth.bandwidth >= 0.1 * MB


async def test_no_burst_while_an_operation_runs():
    async with probed() as room:
        room.busy = True
        room.measurer.measure(room.ask)
        await room.wait_for(1)
        with trio.move_on_after(0.3):
            await room.wait_for(2)
        assert len(room.reports) == 1
        room.busy = False
        await room.wait_for(2)


async def test_an_operation_ends_a_burst_at_once_and_it_runs_again(monkeypatch):
    began, ended = [], []

    async def slow(connector: Connector, ask: m.MeasureLink, within: float, most: float) -> float:
        began.append(ask)
        if len(began) >= 2:
            return 7 * MB
        try:
            await trio.sleep(60)
        finally:
            ended.append(ask)
        return 1.0

    monkeypatch.setattr(measure, "burst", slow)
    async with probed() as room:
        room.measurer.measure(room.ask)
        with trio.fail_after(30):
            while not began:  # noqa: ASYNC110
                await trio.sleep(0.005)
        assert ended == []
        room.measurer.op_started()
        await room.wait_for(2)
    assert len(ended) == 1
    assert room.reports[1].bandwidth == 7 * MB


async def test_of_two_bursts_the_better_one_counts(monkeypatch):
    """The machine may have been busy during the first."""
    speeds = {"b": [30 * MB, 60 * MB], "c": [60 * MB, 30 * MB], "d": [40 * MB, 50 * MB]}

    async def faster(connector: Connector, ask: m.MeasureLink, within: float, most: float) -> float:
        return speeds[ask.daemon].pop(0)

    monkeypatch.setattr(measure, "burst", faster)
    monkeypatch.setattr(measure, "round_trip", _known)
    async with probed() as room:
        for daemon in speeds:
            room.measurer.measure(m.MeasureLink(daemon, room.ask.addresses, 1))
        await room.wait_for(3 + 5)
    told = [(one.daemon, one.bandwidth) for one in room.reports if one.bandwidth]
    assert sorted(told) == [("b", 30 * MB), ("b", 60 * MB), ("c", 60 * MB), ("d", 40 * MB), ("d", 50 * MB)]


async def _known(connector: Connector, ask: m.MeasureLink, within: float) -> float:
    return 0.1


async def test_whoever_does_not_answer_or_is_someone_else_is_reported_as_not_known():
    async with probed(answers="c") as room:
        room.measurer.measure(room.ask)
        await room.wait_for(1)
        with socket.create_server(("127.0.0.1", 0)) as gone:
            address = f"127.0.0.1:{gone.getsockname()[1]}"
        room.measurer.measure(m.MeasureLink("d", [address], 1))
        await room.wait_for(2)
    assert room.reports == [m.LinkMeasure("b", 0, 0, 0, 0), m.LinkMeasure("d", 0, 0, 0, 0)]


async def test_one_connection_makes_a_daemon_read_no_more_than_its_bound():
    async with probed() as room:
        stream = await trio.open_tcp_stream("127.0.0.1", int(room.ask.addresses[0].rpartition(":")[2]))
        async with stream:
            answer = None
            for _ in range(3):
                await stream.send_all(encode(m.ProbeHello(PROTOCOL_VERSION, "b", 30 << 20)))
                with contextlib.suppress(trio.BrokenResourceError):
                    await stream.send_all(bytes(30 << 20))
                answer = await read_frame(stream.socket, m.LaneAnswer, who="test")
                if isinstance(answer, m.LaneRefused):
                    break
            assert isinstance(answer, m.LaneRefused)


# ---- the matrix -------------------------------------------------------------------------------------

KNOWN = {"a", "b", "c"}


def told(daemon: str, rtt=0.0, bandwidth=0.0, lanes=0, loss=0.0) -> m.LinkReport:
    return m.LinkReport([m.LinkMeasure(daemon, rtt, bandwidth, lanes, loss)])


@pytest.fixture
def matrix() -> Measures:
    return Measures()


def test_the_smallest_round_trip_of_either_end_counts_for_a_while(matrix):
    assert matrix.rtt("a", "b") == 0
    matrix.take("a", told("b", rtt=0.08), KNOWN, 100)
    matrix.take("a", told("b", rtt=0.2), KNOWN, 110)
    assert matrix.rtt("a", "b") == matrix.rtt("b", "a") == 0.08
    matrix.take("b", told("a", rtt=0.07), KNOWN, 110)
    assert matrix.rtt("a", "b") == 0.07
    now = 110.0
    for _ in range(3):  # a longer way now
        now += RTT_WINDOW
        matrix.take("a", told("b", rtt=0.15), KNOWN, now)
        matrix.take("b", told("a", rtt=0.16), KNOWN, now)
    assert matrix.rtt("a", "b") == 0.15


def test_bandwidth_is_directed_rises_at_once_and_falls_slowly(matrix):
    matrix.take("a", told("b", bandwidth=100.0, lanes=4), KNOWN, 1)
    assert (matrix.bandwidth("a", "b"), matrix.bandwidth("b", "a")) == (100, 0)
    matrix.take("a", told("b", bandwidth=60.0, lanes=4), KNOWN, 2)
    assert matrix.bandwidth("a", "b") == 100 - DOWN * 40
    matrix.take("a", told("b", bandwidth=200.0, lanes=4), KNOWN, 3)
    assert matrix.bandwidth("a", "b") == 200


def test_a_path_is_as_good_as_operations_or_the_newest_probe_saw_it(matrix):
    matrix.take("a", told("b", bandwidth=500.0), KNOWN, 1)
    matrix.take("a", told("b", bandwidth=100.0, lanes=8, loss=0.01), KNOWN, 2)  # operations send no more than they have
    assert (matrix.bandwidth("a", "b"), matrix.paths["a", "b"].loss) == (500, 0.01)
    matrix.take("a", told("b", bandwidth=50.0), KNOWN, 3)
    assert (matrix.bandwidth("a", "b"), matrix.paths["a", "b"].loss) == (100, 0.01)


def test_uplinks_are_kept_by_the_number_of_lanes(matrix):
    matrix.take("a", m.LinkReport([], 100.0, 8), KNOWN, 1)
    matrix.take("a", m.LinkReport([], 150.0, 16), KNOWN, 1)
    assert [matrix.uplink("a", lanes) for lanes in (8, 16, 32, 0)] == [100, 150, 0, 150]
    for lanes in range(1, 200):
        matrix.take("a", m.LinkReport([], 1.0, lanes), KNOWN, 1)
    assert len(matrix.uplinks["a"]) == MAX_LANE_COUNTS


def test_strangers_and_lost_daemons_take_no_room(matrix):
    matrix.take("a", told("stranger", rtt=0.1), KNOWN, 1)
    matrix.take("a", told("a", rtt=0.1), KNOWN, 1)
    assert matrix.paths == {}
    for one, other in (("a", "b"), ("b", "a"), ("b", "c")):
        matrix.take(one, told(other, rtt=0.1), KNOWN, 1)
    matrix.take("a", m.LinkReport([], 5.0, 1), KNOWN, 1)
    matrix.forget("a")
    assert list(matrix.paths) == [("b", "c")]
    assert matrix.uplinks == {}


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf"), 1e300, 5e-324])
@pytest.mark.parametrize("field", ["rtt", "bandwidth", "loss", "uplink"])
def test_impossible_numbers_are_refused_whole(matrix, field, bad):
    if bad == 5e-324 and field in ("rtt", "loss"):
        return  # as good as none
    good = m.LinkMeasure("c", 0.1, 0, 0, 0)
    if field == "uplink":
        report = m.LinkReport([good], bad, 1)
    else:
        report = m.LinkReport(
            [good, m.LinkMeasure("b", **{"rtt": 0, "bandwidth": 0, "lanes": 1, "loss": 0, field: bad})]
        )
    with pytest.raises(ProtocolError, match="impossible measurements"):
        matrix.take("a", report, KNOWN, 1)
    assert matrix.paths == {}
