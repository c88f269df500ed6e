"""`wancoll doctor`: gathers facts of this machine, a master and the ways to its daemons; advice.py judges them."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import platform
import resource
import shutil
import socket
import struct
import sys
import termios
import textwrap
import time
from collections.abc import Iterator
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from wancoll import resources
from wancoll.cli.asking import Asking, fetch
from wancoll.cli.looking import advice
from wancoll.cli.looking.advice import Finding, Plans, Way
from wancoll.cli.looking.tables import pair_rate
from wancoll.errors import ConfigError, WancollError
from wancoll.limits import PROTOCOL_VERSION, counted, package_version
from wancoll.local import split_address
from wancoll.options import Flat, between
from wancoll.units import parse_duration, parse_rate
from wancoll.wire import messages as m
from wancoll.wire.framing import encode

_SYS = "/proc/sys/net"
_UNSYNC = 0x40  # STA_UNSYNC of adjtimex
PLANS = Plans(members=8, lanes=8, rate=125e6, rtt=0.1)  # by default
_MOST_WAYS = 64  # that are dialled
_MOST_PATHS = 16  # that are told
_PACKET_SECONDS = 2.0  # for a full packet to come through, and back
_PACKETS = (8000, 4000, 1500, 1492, 1480, 1450, 1420, 1400, 1280, 576)  # bytes, that are tried where none does


def doctor(
    *,
    master: Annotated[
        str, Parameter(help="HOST:PORT of a master to look at, too, with the daemons that it knows.")
    ] = "",
    members: Annotated[int, Parameter(validator=between(2, 1024), help="Of the group that is planned.")] = 8,
    lanes: Annotated[int, Parameter(validator=between(1, 256), help="TCP connections to each member.")] = 8,
    rate: Annotated[str, Parameter(help="Of the slowest path, such as 500Mbit/s.")] = "1Gbit/s",
    rtt: Annotated[str, Parameter(help="Round trip of the longest path, such as 80ms.")] = "100ms",
    as_json: Annotated[bool, Parameter(name="--json", negative=(), help="Print one JSON array instead.")] = False,
    asking: Annotated[Asking, Flat] = Asking(),
) -> int:
    """Look at this machine's settings, and say what to change: a line each, ok, warn or fail.

    With --master or --join also at that master, its clock and version, and at the lanes of every daemon that it knows,
    which are dialled from here and sent a full packet each way. Run it on each machine: of each two one has to reach
    the other. Changes nothing.

    Exit code 1: something fails.
    """
    plans = Plans(members=members, lanes=lanes, rate=parse_rate(rate, "--rate"), rtt=parse_duration(rtt, "--rtt"))
    found: list[Finding] = []
    for one in findings(plans, asking.masters(master) if master or asking.join else [], asking):
        found.append(one)
        if not as_json:
            _print(one)
    if as_json:
        print(json.dumps([asdict(one) for one in found], indent=1))
    return 1 if any(one.level == advice.FAIL for one in found) else 0


def findings(plans: Plans, masters: list[str], asking: Asking) -> Iterator[Finding]:
    """What there is to say of this machine, and of *masters*, each "host:port"."""
    met: list[tuple[str, str]] = []
    return chain(machine(plans), *(_of_master(each, asking, met) for each in masters), advice.masters(met))


def _print(one: Finding) -> None:
    columns = max(40, shutil.get_terminal_size((80, 24)).columns)
    head = f"{one.level:4}  {one.topic:13} "
    text = one.found + (f". Do: {one.advice}" if one.advice else "")
    text = "".join(c if c.isprintable() else "?" for c in text)
    lines = textwrap.wrap(text, columns - len(head), break_on_hyphens=False)
    print("\n".join((head if not i else " " * len(head)) + line for i, line in enumerate(lines)), flush=True)


# ---- this machine --------------------------------------------------------------------------------------


def machine(plans: Plans) -> Iterator[Finding]:
    """What there is to say of it."""
    release = platform.release()
    numbers = [int("0" + "".join(filter(str.isdigit, part))) for part in [*release.split("."), "0", "0"][:2]]
    packages, problem = f"{package_version()}, Python {platform.python_version()}", None
    try:
        from wancoll.native.engine import kernel_name

        packages += f", {kernel_name()}"
    except ConfigError as bad:
        problem = bad
    yield Finding(advice.OK, "wancoll", packages)
    if problem is not None:
        yield advice.engine(problem)
    yield advice.kernel((numbers[0], numbers[1]), release)
    yield advice.files(resource.getrlimit(resource.RLIMIT_NOFILE)[1], plans)
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]
    yield advice.locked_memory(locked, devices=os.path.exists("/dev/nvidiactl"))
    yield advice.shared_memory(resources.free_memory())
    available, used = _words("ipv4/tcp_available_congestion_control"), _words("ipv4/tcp_congestion_control")
    yield advice.congestion(available, " ".join(used))
    receive, send = _words("ipv4/tcp_rmem"), _words("ipv4/tcp_wmem")
    yield advice.buffers(int(receive[-1]) if receive else 0, int(send[-1]) if send else 0, plans)
    if len(span := _words("ipv4/ip_local_port_range")) == 2:
        yield advice.ports(int(span[0]), int(span[1]), plans)
    if problem is None:
        from wancoll.native.seal import check_possible

        try:
            check_possible()
            yield Finding(advice.OK, "OpenSSL", "libssl.so.3 is there, for encrypted lanes")
        except ConfigError as bad:
            yield Finding(advice.FAIL, "OpenSSL", str(bad), "install libssl3; without it only --insecure works")
    yield advice.synchronised(_synchronised())


def _words(name: str) -> list[str]:
    with contextlib.suppress(OSError):
        return Path(_SYS, name).read_text().split()
    return []


def _synchronised() -> bool | None:
    """By adjtimex, which asks only."""
    room = ctypes.create_string_buffer(512)  # struct timex: modes 0, so nothing is set
    with contextlib.suppress(AttributeError, OSError):
        if ctypes.CDLL(None, use_errno=True).adjtimex(room) >= 0:
            status = struct.unpack_from("=i", room, 40 if sys.maxsize > 2**32 else 20)[0]
            return not status & _UNSYNC
    return None


# ---- a master and its daemons --------------------------------------------------------------------------


def _of_master(address: str, asking: Asking, met: list[tuple[str, str]]) -> Iterator[Finding]:
    """What there is to say of it. Where it answers *met* gets its address, and what elects it."""
    before, began = time.time(), time.monotonic()
    try:
        answer = fetch(address, asking)
    except WancollError as bad:
        advised = bad.hint or "what it says: it answers, so address and port are right"
        yield Finding(advice.FAIL, "master", str(bad).removesuffix(f"; {bad.hint}"), advised)
        return
    took = time.monotonic() - began
    yield Finding(advice.OK, "master", f"{address} answers in {1e3 * took:.1f} ms")
    if answer.elected_by:
        met.append((address, answer.elected_by))
    if isinstance(answer, m.StandsBy):
        yield Finding(advice.OK, "master", f"{address} stands by; {answer.leader or 'nobody'} leads")
        return
    yield advice.clock_offset(answer.clock - (before + took / 2), took / 2)
    yield advice.version("the master", answer.version, package_version())
    for host in answer.hosts:
        if host.version != answer.version:
            yield advice.version(host.name, host.version, answer.version)
    for host in answer.hosts[:_MOST_WAYS]:
        yield from advice.ways([_dial(host.name, where, asking.timeout) for where in host.addresses])
    if len(answer.hosts) > _MOST_WAYS:
        yield Finding(advice.OK, "lanes", f"not dialled: {counted(len(answer.hosts) - _MOST_WAYS, 'more daemon')}")
    for group in answer.groups:
        for broken in group.pairs:
            yield advice.pair(broken.source, broken.target, broken.kind, broken.why)
        for pair in group.punched:
            yield Finding(advice.OK, "members", f"{pair_rate(pair)}, punched: both dial at once, through their NATs")
        for pair in group.relayed:
            yield advice.relayed(pair_rate(pair), answer.relays)
    worst = sorted(answer.links, key=lambda link: (-link.loss, -link.rtt))
    for link in worst[:_MOST_PATHS]:
        yield advice.measured(link.source, link.target, link.rtt, link.loss)


def _dial(daemon: str, where: str, timeout: float) -> Way:
    """Connect, ask the kernel what it has found out on the way, and exchange full packets with who listens there."""
    try:
        with socket.create_connection(split_address(where), timeout) as connection:
            mss, mtu, rtt = _kernel_view(connection)
            family, address = connection.family, connection.getpeername()
            swallowed, passes = _swallowed(connection, daemon, mss), 0
        head = 40 if family == socket.AF_INET else 60
        for size in _PACKETS if swallowed else ():
            with socket.socket(family) as smaller:
                smaller.settimeout(timeout)
                smaller.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, size - head)  # of both ends' packets
                smaller.connect(address)
                if (less := _kernel_view(smaller)[0]) < mss and not _swallowed(smaller, daemon, less):
                    passes = size
                    break
        return Way(daemon, where, "", rtt=rtt, mtu=mtu, mss=mss, swallowed=swallowed, passes=passes)
    except (OSError, ValueError) as bad:
        return Way(daemon, where, getattr(bad, "strerror", None) or str(bad) or type(bad).__name__)


def _kernel_view(connection: socket.socket) -> tuple[int, int, float]:
    """Bytes of a segment, and of a packet on this path; seconds of a round trip."""
    # linux/tcp.h: eight bytes, then numbers, of which snd_mss is the third, pmtu the 14th, rtt the 16th.
    numbers = struct.unpack_from("=24I", connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104), 8)
    return numbers[2], numbers[13], numbers[15] * 1e-6


def _swallowed(connection: socket.socket, daemon: str, mss: int) -> str:
    """Which of two segments of *mss* bytes does not come through: "there", "back"; "": both do."""
    hello = encode(m.ProbeHello(PROTOCOL_VERSION, daemon, mss, mss))
    connection.sendall(hello + bytes(mss))
    connection.settimeout(_PACKET_SECONDS)
    left = mss
    try:
        while left > 0 and (data := connection.recv(left)):
            left -= len(data)
    except TimeoutError:
        waiting = struct.unpack("i", fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(4)))[0]
        return "there" if waiting else "back"
    except ConnectionError:
        pass  # a daemon that refuses such a probe has heard it
    return ""
