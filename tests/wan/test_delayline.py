"""What the delay line promises: delays, rates, queues and losses as asked, data as sent, and nothing left behind."""

from __future__ import annotations

import functools
import hashlib
import os
import signal
import socket
import statistics
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from itertools import pairwise
from pathlib import Path as FilePath
from typing import Any

import pytest

from tests.wan.network import Host, Path, Wan
from tests.wan.units import BITS, BYTES, RATIO, SECONDS, parse

pytestmark = pytest.mark.wan

ROOT = FilePath(__file__).parents[2]
SO_RCVBUFFORCE = 33  # beyond net.core.rmem_max: who reads late loses nothing
SO_TIMESTAMPNS = 35  # the kernel says when the delay line delivered a datagram, however late we read it
HEADERS = 28  # bytes of IP and UDP headers
EARLY = 10e-6  # seconds that the delay line may be early, and clocks differ
PAYLOAD_SHARE = 1448 / 1500  # of a TCP packet with timestamps


def patient(test: Callable[..., None]) -> Callable[..., None]:
    """Try a test up to five times: a machine that stalls is late now and then, a wrong rate is wrong each time.

    What a stall does not excuse is not tried again: see must().
    """

    @functools.wraps(test)
    def tries(**arguments: Any) -> None:
        for _ in range(4):
            with suppress(AssertionError):
                return test(**arguments)
        return test(**arguments)

    return tries


def must(holds: bool, what: str) -> None:
    """An assertion that patient() does not try again."""
    if not holds:
        pytest.fail(what)


@contextmanager
def udp(wan: Wan, *hosts: Host) -> Iterator[list[socket.socket]]:
    """A bound datagram socket on each host."""
    with ExitStack() as stack:
        sockets = []
        for host in hosts:
            made = wan.call(host, socket.socket, socket.AF_INET, socket.SOCK_DGRAM)
            stack.enter_context(closing(made))
            made.bind((wan.address(host), 0))
            made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
            with suppress(PermissionError):  # of another user namespace's root: then net.core.rmem_max is the bound
                made.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, 4 << 20)
            made.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
            made.settimeout(60.0)
            sockets.append(made)
        yield sockets


@contextmanager
def tcp(wan: Wan, client: Host, server: Host, congestion_control: str = "") -> Iterator[tuple[socket.socket, ...]]:
    """A connection: the client's end, the server's end."""
    with wan.call(server, socket.create_server, (wan.address(server), 0)) as listener:
        listener.settimeout(60.0)
        with wan.call(client, socket.socket) as near:
            near.settimeout(60.0)
            if congestion_control:
                near.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, congestion_control.encode())
            near.connect(listener.getsockname())
            far, _ = listener.accept()
            with far:
                far.settimeout(60.0)
                yield near, far


def transfer(near: socket.socket, far: socket.socket, data: bytes) -> tuple[str, float]:
    """Send *data*; the digest of what arrived, and the seconds that it took."""
    begin = time.perf_counter()
    sender = threading.Thread(target=near.sendall, args=(data,))
    sender.start()
    digest, rest, buffer = hashlib.sha256(), len(data), memoryview(bytearray(1 << 20))
    while rest:
        got = far.recv_into(buffer)
        assert got, "the connection ended early"
        digest.update(buffer[:got])
        rest -= got
    seconds = time.perf_counter() - begin
    sender.join()
    return digest.hexdigest(), seconds


def flood(sender: socket.socket, receiver: socket.socket, count: int, size: int, pause: float = 0.0) -> None:
    """Send *count* numbered datagrams of *size* bytes of IP packet each."""
    for i in range(count):
        sender.sendto(struct.pack("=Qd", i, time.time()).ljust(size - HEADERS, b"x"), receiver.getsockname())
        if pause and i % 16 == 15:
            time.sleep(pause)


@contextmanager
def flooding(*arguments: Any, **options: Any) -> Iterator[None]:
    """flood() in a thread."""
    thread = threading.Thread(target=flood, args=arguments, kwargs=options)
    thread.start()
    try:
        yield
    finally:
        thread.join()


def receive(receiver: socket.socket) -> tuple[bytes, float]:
    """A datagram, and when it was delivered."""
    data, ancillary, _, _ = receiver.recvmsg(2048, 64)
    seconds, nanoseconds = struct.unpack("=qq", ancillary[0][2])
    return data, seconds + nanoseconds * 1e-9


def arrivals(receiver: socket.socket, last: float = 0.2) -> list[tuple[int, float, float]]:
    """(number, seconds on the way, when) of each datagram; ends when none came for *last* seconds, and again."""
    got: list[tuple[int, float, float]] = []
    receiver.settimeout(last)
    quiet = 0
    while True:
        try:
            data, when = receive(receiver)
        except TimeoutError:
            quiet += 1
            if quiet == 2:  # the first time we may have stood still, with all who send
                return got
            continue
        quiet = 0
        number, sent = struct.unpack_from("=Qd", data)
        got.append((number, when - sent, when))


def one_way(sender: socket.socket, receiver: socket.socket, count: int = 10) -> list[float]:
    """Seconds that single datagrams need."""
    times = []
    for _ in range(count):
        begin = time.time()
        sender.sendto(b"x", receiver.getsockname())
        times.append(receive(receiver)[1] - begin)
    return times


def pace(got: list[tuple[int, float, float]]) -> float:
    """Seconds from one arrival to the next: the slope, so that single late ones do not matter."""
    return statistics.linear_regression(range(len(got)), [when for _, _, when in got]).slope


# ---- delay -------------------------------------------------------------------------------------------------


@patient
def test_each_direction_has_its_own_delay() -> None:
    paths = {(1, 0): {"delay": 0.005}, (0, "master"): {"delay": 0.1}}
    with Wan(2, delay=0.040, paths=paths) as wan, udp(wan, 0, 1, "master") as (a, b, master):
        for sender, receiver, asked in ((a, b, 0.040), (b, a, 0.005), (a, master, 0.1), (master, a, 0.040)):
            times = one_way(sender, receiver)
            assert asked - EARLY < min(times) < asked + 0.002


def test_hosts_hear_only_those_they_are_joined_with() -> None:
    with Wan(2, master=1) as wan, udp(wan, 0) as (a,):
        assert list(wan.hosts) == [0, 1]
        assert wan.address("master") == wan.address(1)
        a.sendto(b"x", ("10.77.0.77", 9))
        deadline = time.monotonic() + 60
        while not wan.counters().unroutable and time.monotonic() < deadline:
            time.sleep(0.001)
        assert wan.counters().unroutable == 1


@patient
def test_jitter_wanders_and_keeps_the_order() -> None:
    with (
        Wan(2, delay=0.020, jitter=0.010, seed=1) as wan,
        udp(wan, 0, 1) as (a, b),
        flooding(a, b, 1500, 100, pause=0.002),
    ):
        got = arrivals(b)
    numbers = [number for number, _, _ in got]
    must(numbers == sorted(numbers), f"out of order: {numbers}")
    assert numbers == list(range(1500))
    times = [seconds for _, seconds, _ in got]
    must(min(times) > 0.010 - EARLY, f"one came after {min(times)} s")
    assert statistics.quantiles(times, n=20)[0] < 0.018
    assert statistics.quantiles(times, n=20)[-1] > 0.022


def test_reordering_where_asked_for() -> None:
    with Wan(2, delay=0.010, jitter=0.005, reorder=True) as wan, udp(wan, 0, 1) as (a, b):
        flood(a, b, 300, 100)
        numbers = [number for number, _, _ in arrivals(b)]
    assert sorted(numbers) == list(range(300))
    assert sum(x > y for x, y in pairwise(numbers)) > 50


# ---- rates and queues --------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["uplink", "downlink", "path"])
@patient
def test_a_rate_is_kept(where: str) -> None:
    rate, size, count = 40e6, 1250, 1200
    wan = Wan(2, delay=0.005)
    with wan, udp(wan, 0, 1) as (a, b):
        if where == "path":
            wan.change_path(0, 1, rate=rate, queue=10_000_000)
        else:
            wan.change_port(0 if where == "uplink" else 1, up=rate, down=rate, up_queue=10**7, down_queue=10**7)
        with flooding(a, b, count, size):
            got = arrivals(b)
    assert [number for number, _, _ in got] == list(range(count))
    assert size * 8 / pace(got) == pytest.approx(rate, rel=0.02)


@patient
def test_a_queue_is_finite_and_what_waits_in_it_waits_as_long_as_it_is() -> None:
    rate, queue, size, count = 8e6, 50_000, 1000, 300
    with Wan(2, rate=rate, queue=queue) as wan, udp(wan, 0, 1) as (a, b):
        begin = time.monotonic()
        flood(a, b, count, size)
        drained = (time.monotonic() - begin) * rate / 8 / size
        got = arrivals(b)
        counters = wan.counters().paths[0, 1]
    assert queue / size <= len(got) <= queue / size + drained + 2
    assert counters.dropped_up == count - len(got)
    assert counters.delivered_bytes == len(got) * size
    assert max(seconds for _, seconds, _ in got) == pytest.approx(queue * 8 / rate, rel=0.1)


@patient
def test_a_downlink_is_shared_by_those_who_send_to_it() -> None:
    rate, size, count = 16e6, 1000, 400
    with Wan(3, ports={2: {"down": rate, "down_queue": 150_000}}) as wan, udp(wan, 0, 1, 2) as (a, b, c):
        with flooding(a, c, count, size), flooding(b, c, count, size):
            got = arrivals(c)
        paths = wan.counters().paths
    dropped = paths[0, 2].dropped_down + paths[1, 2].dropped_down
    assert len(got) + dropped == 2 * count
    assert 150 <= len(got) < 2 * count  # what the queue holds, at least
    assert size * 8 / pace(got) == pytest.approx(rate, rel=0.02)


@pytest.mark.parametrize("offload", [True, False])
@patient
def test_tcp_fills_a_link(offload: bool) -> None:
    rate, data = 200e6, os.urandom(1 << 20) * 24
    wan = Wan(2, delay=0.005, rate=rate, queue=8 << 20, segmentation_offload=offload)
    with wan, tcp(wan, 0, 1, "reno") as (near, far):
        transfer(near, far, data[: 8 << 20])  # slow start
        digest, seconds = transfer(near, far, data)
        counters = wan.counters().paths[0, 1]
    assert digest == hashlib.sha256(data).hexdigest()
    assert len(data) * 8 / seconds / rate > 0.95 * PAYLOAD_SHARE
    assert len(data) * 8 / seconds / rate < 1.01 * PAYLOAD_SHARE  # what was in the queue at the start is of the first
    assert counters.offered > len(data) / 1448  # packets, not super-packets


# ---- loss --------------------------------------------------------------------------------------------------


def lost_numbers(seed: int, **path: float) -> tuple[list[int], int]:
    count = 8000
    with Wan(2, seed=seed, **path) as wan, udp(wan, 0, 1) as (a, b):
        with flooding(a, b, count, 60, pause=0.0002):
            got = {number for number, _, _ in arrivals(b)}
        counters = wan.counters().paths[0, 1]
    lost = sorted(set(range(count)) - got)
    assert counters.lost == len(lost)
    return lost, count


def test_random_loss_and_its_seed() -> None:
    lost, count = lost_numbers(3, loss=0.2)
    sigma = (count * 0.2 * 0.8) ** 0.5
    assert abs(len(lost) - count * 0.2) < 4 * sigma
    assert lost == lost_numbers(3, loss=0.2)[0]
    assert lost != lost_numbers(4, loss=0.2)[0]


def test_bursts_of_loss() -> None:
    lost, count = lost_numbers(5, loss=0.1, burst=8.0)
    begins = sum(number - 1 not in set(lost) for number in lost)
    assert len(lost) / count == pytest.approx(0.1, rel=0.35)
    assert len(lost) / begins == pytest.approx(8, rel=0.35)


@pytest.mark.parametrize("congestion_control", ["bbr", "reno"])
@patient  # a sender that stands still sends again what was only late
def test_super_packets_lose_single_segments_and_the_data_stays_whole(congestion_control: str) -> None:
    data = os.urandom(1 << 20) * 16
    with Wan(2, delay=0.001, rate=1e9, loss=0.01) as wan, tcp(wan, 0, 1) as (near, far):
        if (
            congestion_control
            not in FilePath("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text().split()
        ):
            pytest.skip(f"this kernel has no {congestion_control}")
        near.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, congestion_control.encode())
        digest, _ = transfer(near, far, data)
        counters, line = wan.counters().paths[0, 1], wan.counters()
    must(digest == hashlib.sha256(data).hexdigest(), "what arrived is not what was sent")
    assert line.failed == line.overflow == 0
    assert abs(counters.lost - counters.offered * 0.01) < 4 * (counters.offered * 0.01) ** 0.5
    assert counters.offered < len(data) / 1448 * 1.05  # one lost segment does not cost its super-packet


def test_a_path_can_be_cut_and_healed() -> None:
    with Wan(2, delay=0.001) as wan, udp(wan, 0, 1) as (a, b):
        wan.change_path(0, 1, loss=1.0)
        flood(a, b, 10, 100)
        one_way(b, a)  # the other direction is not cut
        wan.change_path(0, 1, loss=0.0)
        flood(a, b, 1, 100)
        assert len(arrivals(b)) == 1
        assert wan.counters().paths[0, 1].lost == 10
        assert wan.path(0, 1) == Path(delay=0.001)


# ---- hosts -------------------------------------------------------------------------------------------------


def test_congestion_control_of_the_hosts_and_of_a_socket() -> None:
    name = "net/ipv4/tcp_congestion_control"
    with Wan(2, congestion_control="reno") as wan:
        wan.configure(1, {"net.ipv4.tcp_slow_start_after_idle": 0})
        for i, idle in enumerate("10"):
            with wan.inside(i):
                assert FilePath("/proc/sys", name).read_text().strip() == "reno"
                assert FilePath("/proc/sys/net/ipv4/tcp_slow_start_after_idle").read_text().strip() == idle
    with Wan(1) as wan:
        here = FilePath("/proc/sys", name).read_text().strip()
        with wan.inside(0), socket.socket() as made:
            assert FilePath("/proc/sys", name).read_text().strip() == here
            for each in FilePath("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text().split():
                made.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, each.encode())
                got = made.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
                assert got.rstrip(b"\0").decode() == each


def test_what_cannot_be_is_refused() -> None:
    for wrong in (
        {"delay": 0.01, "jitter": 0.02},
        {"loss": 1.5},
        {"burst": 0.5},
        {"peers": 0},
        {"master": 7},
        {"ports": {5: {}}},
    ):
        with pytest.raises(ValueError, match="expected"):
            Wan(**{"peers": 2, **wrong})


# ---- the command, and the end ------------------------------------------------------------------------------


def command(*words: str, **options: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.wan", *words], cwd=ROOT, text=True, stdout=subprocess.PIPE, **options
    )


def test_the_command_runs_on_any_host_and_passes_the_exit_code() -> None:
    script = f"{sys.executable} -m tests.wan at 1 ls /sys/class/net >/dev/null && echo $WAN_ADDRESS_MASTER && exit 3"
    with command("up", "--peers=2", "--path=0,1,delay=10ms", "--loss=0.1%", "--", "sh", "-c", script) as process:
        output, _ = process.communicate()
    assert output == "10.77.0.3\n"
    assert process.returncode == 3


def test_nothing_outlives_a_command_that_is_killed() -> None:
    here = os.stat("/proc/self/ns/net").st_ino
    # A child that survives its parent, in a session of its own, deaf to SIGTERM and SIGHUP.
    script = "trap '' TERM HUP; setsid sh -c 'sleep 1000 & echo $$ $!; wait' & wait"
    with command("up", "--", "sh", "-c", script) as process:
        assert process.stdout is not None
        pids = [int(word) for word in process.stdout.readline().split()]
        assert all(os.stat(f"/proc/{pid}/ns/net").st_ino != here for pid in pids)
        process.send_signal(signal.SIGKILL)
        process.wait()
        deadline = time.monotonic() + 60
        while any(running(pid) for pid in pids) and time.monotonic() < deadline:
            time.sleep(0.005)
        assert not any(running(pid) for pid in pids)


def running(pid: int) -> bool:
    try:
        return FilePath(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_closing_ends_what_runs_on_the_hosts() -> None:
    with Wan(1) as wan:
        process = wan.popen(0, ["sleep", "1000"])
    assert process.wait(60) == -signal.SIGKILL


def test_units() -> None:
    assert parse("40ms", SECONDS) == 0.040
    assert parse("0", SECONDS) == 0
    assert parse("500Mbit", BITS) == 500e6
    assert parse("0.1%", RATIO) == pytest.approx(0.001)
    assert parse("2MiB", BYTES) == 2 << 20
    with pytest.raises(ValueError, match="expected a number and one of 'bit'"):
        parse("40", BITS)
