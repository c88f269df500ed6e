"""A wide area network on one machine: namespaces joined by the delay line (delayline/)."""

from __future__ import annotations

import functools
import hashlib
import math
import os
import shutil
import socket
import struct
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path as FilePath
from typing import Any, Literal, Self, TypeVar

from tests.wan import namespace

T = TypeVar("T")
Host = int | Literal["master"]  # the index of a peer, or the master's host

DEVICE = "wan0"  # of each host
SECOND = "wan1"  # of those that have two
SOURCES = FilePath(__file__).with_name("delayline")
BUILD = FilePath(__file__).parents[2] / "build" / "wan"
MAX_HOSTS = 64
LEAST_QUEUE = 256 << 10  # bytes: some super-packets
LEAST_QUEUE_SECONDS = 0.01
ANSWER_TIMEOUT = 60.0


@dataclass(frozen=True)
class Path:
    """The way from one host to another, in one direction.

    Attributes:
        delay: seconds of propagation; a round trip takes the sum of both directions'.
        jitter: seconds; the delay wanders within delay +- jitter, and packets keep their order (see reorder).
        loss: the ratio of packets (of at most the MTU, never super-packets) that get lost; 1.0 cuts the path.
        burst: mean number of packets lost in a row. 1: each packet by itself; more: the model of Gilbert and Elliott,
            with the same ratio on the whole.
        burst_loss: the ratio of packets that get lost within a burst.
        rate: bits per second of IP packets, for this path alone, after the sender's uplink; 0: without limit.
        queue: bytes that wait for this path's rate at most; None: see Wan.
        reorder: each packet draws its own jitter, so that they overtake each other.
    """

    delay: float = 0.0
    jitter: float = 0.0
    loss: float = 0.0
    burst: float = 1.0
    burst_loss: float = 1.0
    rate: float = 0.0
    queue: int | None = None
    reorder: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.jitter <= self.delay < 1000:
            raise ValueError(f"expected 0 <= jitter <= delay, in seconds, got jitter={self.jitter}, delay={self.delay}")
        if not 0 <= self.loss <= 1 or self.burst < 1 or not 0 < self.burst_loss <= 1:
            raise ValueError(f"expected loss 0 to 1, burst from 1, burst_loss up to 1, got {self}")
        if self.burst > 1 and 0 < self.loss < 1 and self.loss >= self.burst_loss:
            raise ValueError(f"expected loss below burst_loss, got {self.loss} and {self.burst_loss}")

    def chances(self) -> tuple[float, float, float, float]:
        """For each packet: lost in the good state, in the bad state; to become bad, to become good."""
        if self.burst == 1 or self.loss in (0, 1):
            return self.loss, self.loss, 0.0, 0.0
        bad = self.loss / self.burst_loss  # the share of packets in the bad state
        return 0.0, self.burst_loss, bad / (1 - bad) / self.burst, 1 / self.burst


@dataclass(frozen=True)
class Port:
    """A host's access to the network: bits per second of IP packets (0: without limit), and bytes that wait for it."""

    up: float = 0.0
    down: float = 0.0
    up_queue: int | None = None
    down_queue: int | None = None


@dataclass(frozen=True)
class PathCounters:
    """What a path has seen so far, in packets of at most the MTU, and in bytes of such packets.

    Attributes:
        offered: packets that the sender's device has given.
        lost: by Path.loss.
        dropped_up, dropped_path, dropped_down: for lack of room in the queue of the uplink, path or downlink.
        delivered: to the receiver's device.
        sent_bytes: that left the uplink.
        delivered_bytes: to the receiver's device.
    """

    offered: int
    lost: int
    dropped_up: int
    dropped_path: int
    dropped_down: int
    delivered: int
    sent_bytes: int
    delivered_bytes: int


@dataclass(frozen=True)
class Counters:
    """What the delay line has seen so far.

    Attributes:
        unroutable: packets to an address that nobody has.
        overflow: packets lost since Wan.memory was in use; must be 0.
        failed: packets that a device did not take.
        deliveries: writes to devices.
        late: seconds that deliveries came later than asked, in sum.
        late_max: the latest one; more than a millisecond or so says that the machine is too busy to be trusted.
        paths: (from, to) -> counters, with indices as in Wan.hosts.
    """

    unroutable: int
    overflow: int
    failed: int
    deliveries: int
    late: float
    late_max: float
    paths: dict[tuple[int, int], PathCounters]

    def sent_bytes(self, host: int) -> int:
        """Bytes that have left the uplink of a host."""
        return sum(path.sent_bytes for (sender, _), path in self.paths.items() if sender == host)


class Wan:
    """Hosts in network namespaces of their own, joined by links with delay, loss and finite rates. A context manager.

    Nothing has a name that could be left behind: when this object is closed or its process dies, however it dies,
    processes on the hosts are killed, and the kernel removes namespaces and devices. Hosts have the addresses
    10.77.0.1, 10.77.0.2, ... on the device "wan0"; they share everything but the network with the rest of the machine.

        with Wan(peers=4, delay=0.040, rate=500e6, loss=0.001) as wan:
            with wan.inside(0):
                server = socket.create_server((wan.address(0), 0))   # stays there, may be used from anywhere
            wan.popen(1, ["ping", "-c1", wan.address(0)]).wait()
            wan.change_path(0, 1, loss=1.0)                          # cut

    Args:
        peers: number of peers, hosts 0, 1, ...
        delay, jitter, loss, burst, reorder: of every path, see Path.
        rate: bits per second of IP packets, of every peer's uplink and, separately, of its downlink; 0: without
            limit. TCP's payload is 1448 of each 1500 bytes.
        queue: bytes that wait for each rate at most; None: what it carries in one round trip (2 * delay), or in 10 ms
            if that is more, and at least 256 KiB.
        paths: (from, to) -> what is different on this path, e.g. {(0, 1): {"delay": 0.1}}.
        ports: host -> what is different there, e.g. {2: {"up": 100e6}}. The master's port is without limit.
        master: "own": the master has a host of its own, as far from all peers as they are from each other; an index:
            it lives on that peer's host.
        second: peers that have a second device, SECOND, on the same host. To paths and ports each is a host of its own:
            the first of them has the index after the last host's.
        mtu: of all devices, bytes.
        segmentation_offload: let the hosts' TCP send super-packets of up to 64 KiB. Loss, rates and queues treat them
            as the MTU-sized packets that they stand for; without it, every packet costs a system call, and the
            network carries a third or a fifth.
        quantum: seconds of link time that are delivered together at most, as network cards do to save interrupts.
        congestion_control: of the hosts' TCP unless a program asks otherwise: "cubic", "bbr", "reno", ...; "": as here.
        sysctls: other settings of the hosts, e.g. {"net.ipv4.tcp_slow_start_after_idle": 0}.
        seed: of loss and jitter.
        memory: bytes for packets on their way.

    Raises:
        OSError: the machine does not allow it; see why_not().
    """

    def __init__(
        self,
        peers: int = 2,
        *,
        delay: float = 0.0,
        rate: float = 0.0,
        loss: float = 0.0,
        queue: int | None = None,
        jitter: float = 0.0,
        burst: float = 1.0,
        reorder: bool = False,
        paths: Mapping[tuple[Host, Host], Mapping[str, Any]] | None = None,
        ports: Mapping[Host, Mapping[str, Any]] | None = None,
        master: int | Literal["own"] = "own",
        second: Sequence[int] = (),
        mtu: int = 1500,
        segmentation_offload: bool = True,
        quantum: float = 200e-6,
        congestion_control: str = "",
        sysctls: Mapping[str, Any] | None = None,
        seed: int = 0,
        memory: int = 1 << 30,
    ) -> None:
        self.peers, self.rate = peers, rate
        self._master = peers if master == "own" else master
        self._path = Path(delay=delay, jitter=jitter, loss=loss, burst=burst, reorder=reorder)
        self._port = Port(rate, rate, queue, queue)
        hosts = peers + (master == "own")
        if not 0 < peers or hosts > MAX_HOSTS or not 0 <= self._master < hosts:
            raise ValueError(f"expected up to {MAX_HOSTS} hosts, got peers={peers}, master={master}")
        settings = dict(sysctls or {})
        if congestion_control:
            settings["net.ipv4.tcp_congestion_control"] = congestion_control
        self._namespaces: list[int] = []
        self._control: socket.socket | None = None
        devices: list[int] = []
        try:
            for i in range(hosts):
                device, made = namespace.make_host(
                    DEVICE, self._address(i), mtu=mtu, segmentation_offload=segmentation_offload, sysctls=settings
                )
                devices.append(device)
                self._namespaces.append(made)
            for i in second:
                with self.inside(i):
                    address = self._address(len(self._namespaces))
                    devices.append(
                        namespace.make_device(SECOND, address, mtu=mtu, segmentation_offload=segmentation_offload)
                    )
                self._namespaces.append(os.dup(self._namespaces[i]))
            hosts = len(self._namespaces)
            self._start(devices, seed, quantum, memory)
            self._paths = {(i, j): self._path for i in range(hosts) for j in range(hosts) if i != j}
            self._ports = {i: self._port if i < peers else Port() for i in range(hosts)}
            special_paths = {(self.index(i), self.index(j)): changes for (i, j), changes in (paths or {}).items()}
            special_ports = {self.index(i): changes for i, changes in (ports or {}).items()}
            for pair in self._paths:
                self.change_path(*pair, **special_paths.get(pair, {}))
            for i in self._ports:
                self.change_port(i, **special_ports.get(i, {}))
        except BaseException:
            self.close()
            raise
        finally:
            for device in devices:
                os.close(device)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- hosts ---------------------------------------------------------------------------------------

    @property
    def hosts(self) -> range:
        """All hosts' indices; the last one is the master's, if it has its own."""
        return range(len(self._namespaces))

    def index(self, host: Host) -> int:
        """The index of a host."""
        i = self._master if host == "master" else host
        if i not in self.hosts:
            raise ValueError(f"expected a host 0 to {len(self.hosts) - 1} or 'master', got {host!r}")
        return i

    def address(self, host: Host) -> str:
        """A host's IPv4 address."""
        return self._address(self.index(host))

    def namespace(self, host: Host) -> str:
        """The path of a host's namespace, for `nsenter --net=PATH`, as long as this process lives."""
        return f"/proc/{os.getpid()}/fd/{self._namespaces[self.index(host)]}"

    def inside(self, host: Host) -> AbstractContextManager[None]:
        """While entered, the calling thread is on that host.

        A socket stays on the host where it was made, a thread or process where it was started.
        """
        return namespace.inside(self._namespaces[self.index(host)])

    def popen(self, host: Host, command: list[str], **options: Any) -> subprocess.Popen[Any]:
        """`subprocess.Popen` on that host."""
        with self.inside(host):
            return subprocess.Popen(command, **options)

    def call(self, host: Host, do: Callable[..., T], *arguments: Any) -> T:
        """What *do* returns, called on that host."""
        with self.inside(host):
            return do(*arguments)

    def configure(self, host: Host, sysctls: Mapping[str, Any]) -> None:
        """Change kernel settings of one host, by name, e.g. {"net.ipv4.tcp_congestion_control": "cubic"}."""
        self.call(host, namespace.set_sysctls, sysctls)

    # ---- links ---------------------------------------------------------------------------------------

    def path(self, sender: Host, receiver: Host) -> Path:
        """The way from one host to another."""
        return self._paths[self.index(sender), self.index(receiver)]

    def port(self, host: Host) -> Port:
        """A host's access."""
        return self._ports[self.index(host)]

    def change_path(self, sender: Host, receiver: Host, **changes: Any) -> None:
        """Change the way from one host to another (one direction) for packets that come from now on; see Path."""
        i, j = self.index(sender), self.index(receiver)
        path = self._paths[i, j] = replace(self._paths[i, j], **changes)
        numbers = [
            path.delay * 1e9,
            path.jitter * 1e9,
            int(path.reorder),
            path.rate,
            self._queue(path.rate, path.queue),
        ]
        self._ask(f"path {i} {j} " + " ".join(f"{number:.17g}" for number in [*numbers, *path.chances()]))

    def change_port(self, host: Host, **changes: Any) -> None:
        """Change a host's access; see Port."""
        i = self.index(host)
        port = self._ports[i] = replace(self._ports[i], **changes)
        numbers = [port.up, self._queue(port.up, port.up_queue), port.down, self._queue(port.down, port.down_queue)]
        self._ask(f"port {i} " + " ".join(f"{number:.17g}" for number in numbers))

    def counters(self) -> Counters:
        """What the delay line has seen so far."""
        answer = struct.iter_unpack("=Q", self._exchange("counters"))
        line = [next(answer)[0] for _ in range(6)]
        size = len(PathCounters.__dataclass_fields__)
        paths = {}
        for i in self.hosts:
            for j in self.hosts:
                paths[i, j] = PathCounters(*(next(answer)[0] for _ in range(size)))
        return Counters(*line[:4], line[4] / 1e9, line[5] / 1e9, paths)

    # ---- the end -------------------------------------------------------------------------------------

    def close(self) -> None:
        """Kill what runs on the hosts, and remove them. Idempotent."""
        if self._control is not None:
            self._control.close()
            self._control = None
            try:
                self._line.wait(ANSWER_TIMEOUT)
            except subprocess.TimeoutExpired:
                self._line.kill()
                self._line.wait()
        while self._namespaces:
            os.close(self._namespaces.pop())

    # ---- inside --------------------------------------------------------------------------------------

    @staticmethod
    def _address(i: int) -> str:
        return f"10.77.0.{i + 1}"

    def _queue(self, rate: float, queue: int | None) -> float:
        if queue is None:
            return max(rate / 8 * max(2 * self._path.delay, LEAST_QUEUE_SECONDS), LEAST_QUEUE)
        return queue

    def _start(self, devices: list[int], seed: int, quantum: float, memory: int) -> None:
        control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        control.settimeout(ANSWER_TIMEOUT)
        pairs = [f"{device}:{made}" for device, made in zip(devices, self._namespaces, strict=True)]
        numbers = [theirs.fileno(), seed, math.floor(quantum * 1e9), memory]
        with theirs:
            self._line = subprocess.Popen(
                [delay_line(), *map(str, numbers), *pairs],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno(), *devices, *self._namespaces],
            )
        self._control = control

    def _ask(self, command: str) -> None:
        answer = self._exchange(command)
        if answer != b"ok":
            raise ValueError(f"the delay line did not take {command!r}: {answer.decode()}")

    def _exchange(self, command: str) -> bytes:
        if self._control is None:
            raise ValueError("the network is closed")
        try:
            self._control.send(command.encode())
            answer = self._control.recv(1 << 20)
        except OSError as bad:
            raise RuntimeError(f"the delay line does not answer: {bad}; exit code {self._line.poll()}") from bad
        if not answer:
            raise RuntimeError(f"the delay line ended with code {self._line.wait()}")
        return answer


@functools.cache
def delay_line() -> str:
    """Path of the delay line's program, compiled here unless it was.

    Raises:
        OSError: there is no compiler.
    """
    digest = hashlib.sha256()
    for file in sorted(SOURCES.iterdir()):
        digest.update(file.read_bytes())
    name = f"delayline-{digest.hexdigest()[:16]}"
    binary = BUILD / name
    if not binary.exists():
        compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("cc") or "cc"
        BUILD.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=BUILD) as folder:
            made = FilePath(folder) / name
            flags = ["-std=c11", "-O2", "-g", "-Wall", "-Wextra", "-Werror"]
            subprocess.run([compiler, *flags, "-o", str(made), *map(str, sorted(SOURCES.glob("*.c")))], check=True)
            made.rename(binary)
    return str(binary)


@functools.cache
def why_not() -> str:
    """Why this machine can have no Wan, "" if it can."""
    try:
        device, made = namespace.make_host(DEVICE, "10.77.0.1", mtu=1500, segmentation_offload=True, sysctls={})
        os.close(device)
        os.close(made)
    except FileNotFoundError as bad:
        return f"no {bad.filename}: this kernel has no TUN devices or no network namespaces"
    except PermissionError as bad:
        return f"needs root, or CAP_SYS_ADMIN and CAP_NET_ADMIN and access to {namespace.TUN}: {bad}"
    except OSError as bad:
        return f"no network namespace with a TUN device: {bad}"
    try:
        delay_line()
    except OSError as bad:
        return f"no C compiler: {bad}"
    return ""
