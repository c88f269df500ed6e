"""What the delay line sustains on this machine: throughput without limits, and how precise its delays are."""

from __future__ import annotations

import socket
import statistics
import struct
import subprocess
import sys
import time
from contextlib import ExitStack

from tests.wan.network import Wan

SO_TIMESTAMPNS = 35
# One process each, so that no interpreter lock is shared: read or write until told to stop by the connection's end.
RECEIVE = "import socket,sys; s=socket.socket(fileno=int(sys.argv[1])); b=bytearray(1<<20)\nwhile s.recv_into(b): pass"
SEND = (
    "import socket,sys,time; s=socket.socket(fileno=int(sys.argv[1])); b=bytes(1<<20)\n"
    "end=time.monotonic()+float(sys.argv[2])\n"
    "while time.monotonic()<end: s.sendall(b)"
)


def throughput(
    pairs: list[tuple[int, int]], *, segmentation_offload: bool, seconds: float = 4.0, delay: float = 0.0
) -> tuple[float, float]:
    """Bits of IP packets per second, in sum of all (sender, receiver) pairs, and the packets of a mean delivery."""
    hosts = 1 + max(max(pair) for pair in pairs)
    with Wan(hosts, delay=delay, segmentation_offload=segmentation_offload) as wan, ExitStack() as stack:
        senders = []
        for sender, receiver in pairs:
            with wan.call(receiver, socket.create_server, (wan.address(receiver), 0)) as listener:
                near = stack.enter_context(wan.call(sender, socket.socket))
                near.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")  # no pacing
                near.connect(listener.getsockname())
                far, _ = listener.accept()
                stack.enter_context(far)
            for code, end in ((RECEIVE, far), (SEND, near)):
                process = subprocess.Popen(
                    [sys.executable, "-c", code, str(end.fileno()), str(seconds)], pass_fds=[end.fileno()]
                )
                stack.callback(process.wait)
                stack.callback(process.kill)
                if code is SEND:
                    senders.append(process)
        time.sleep(seconds / 4)  # the start is not counted
        before, begin = wan.counters(), time.monotonic()
        time.sleep(seconds / 2)
        after, end = wan.counters(), time.monotonic()
        moved, packets = (
            sum(getattr(c, what) for c in after.paths.values()) - sum(getattr(c, what) for c in before.paths.values())
            for what in ("delivered_bytes", "delivered")
        )
        for process in senders:
            process.kill()
        return moved * 8 / (end - begin), packets / max(1, after.deliveries - before.deliveries)


def lateness(delay: float, count: int = 200) -> list[float]:
    """Seconds that single datagrams came later than *delay* after they were sent, by the kernel's time stamps."""
    with Wan(2, delay=delay) as wan, ExitStack() as stack:
        a, b = (stack.enter_context(wan.call(i, socket.socket, socket.AF_INET, socket.SOCK_DGRAM)) for i in range(2))
        b.bind((wan.address(1), 0))
        b.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
        times = []
        for _ in range(count):
            begin = time.time()
            a.sendto(b"x", b.getsockname())
            seconds, nanoseconds = struct.unpack("=qq", b.recvmsg(1, 64)[1][0][2])
            times.append(seconds - begin + nanoseconds * 1e-9 - delay)
        return times


def report() -> None:
    """Print it all."""
    ring = [(0, 1), (1, 2), (2, 3), (3, 0)]
    for name, offload in (("super-packets", True), ("1500-byte packets", False)):
        for what, pairs in (("one way", [(0, 1)]), ("both ways", [(0, 1), (1, 0)]), ("ring of 4", ring)):
            speed, merged = throughput(pairs, segmentation_offload=offload)
            print(f"{name}, {what}: {speed / 1e9:.1f} Gbit/s in sum, {merged:.1f} packets a delivery", flush=True)
    late = sorted(lateness(0.040))
    print(
        f"40 ms one way: {late[0] * 1e6:.0f} us late at least, {statistics.median(late) * 1e6:.0f} in the middle, "
        f"{late[len(late) * 95 // 100] * 1e6:.0f} for 95 %, {late[-1] * 1e6:.0f} at most"
    )
