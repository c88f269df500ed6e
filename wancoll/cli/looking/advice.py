"""What is to be said of a machine's settings, its clock, a master and the ways to daemons: facts to findings. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from wancoll.errors import ConfigError
from wancoll.limits import GIB, MIB, counted, format_size
from wancoll.peer.core.liveness.masters import two_masters

OK, WARN, FAIL = "ok", "warn", "fail"

OWN_FILES = 128  # of a daemon: listeners, clients, handshakes
LEAST_ARENA = 256 * MIB  # of shared memory, with which one can begin
SMALL_ARENA = 2 * GIB
LEAST_PORTS = 1024
OLDEST_KERNEL = (4, 10)  # whose tcp_info says enough
FAST_CLOCK = 1.0  # seconds off, from which ages in status and ends of tokens mislead
SMALL_MSS = 1220  # bytes of a segment: below, something on the way leaves little room
USUAL_MSS = 1340


@dataclass(frozen=True, slots=True)
class Finding:
    """One line: how bad, about what, what was found, and what to change ("": nothing)."""

    level: str
    topic: str
    found: str
    advice: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plans:
    """What the machine shall do."""

    members: int  # of a group
    lanes: int  # TCP connections to each
    rate: float  # bytes per second of the slowest path
    rtt: float  # seconds, of the longest path


def files(hard: int, plans: Plans) -> Finding:
    """Open files, by the hard limit, to which a daemon raises its soft one; below 0 there is none."""
    need = OWN_FILES + (plans.members - 1) * 2 * (plans.lanes + 1)
    wanted = f"{plans.members} members with {counted(plans.lanes, 'lane')} want {need}"
    if hard < 0 or hard >= need:
        return Finding(OK, "open files", f"{'no limit' if hard < 0 else hard}; {wanted}")
    return Finding(
        FAIL, "open files", f"at most {hard}; {wanted}",
        f"LimitNOFILE={need} in the service, or `ulimit -Hn {need}` as root",
    )  # fmt: skip


def locked_memory(limit: int, *, devices: bool) -> Finding:
    """How much may be pinned, bytes; below 0: all of it. It matters where there are CUDA devices."""
    told = "no limit" if limit < 0 else format_size(limit)
    if limit < 0 or limit >= GIB or not devices:
        return Finding(OK, "locked memory", told + ("" if devices else "; no CUDA device is here to need it"))
    return Finding(
        WARN, "locked memory", f"{told}: copies from and to CUDA devices will be slower",
        "LimitMEMLOCK=infinity in the service, or `ulimit -l unlimited`",
    )  # fmt: skip


def shared_memory(free: int) -> Finding:
    """Bytes that arenas may take; they are memfds, for which /dev/shm's size does not count."""
    told = f"{format_size(free)} free"
    if free >= SMALL_ARENA:
        return Finding(OK, "shared memory", told)
    if free >= LEAST_ARENA:
        return Finding(WARN, "shared memory", f"{told}: a tensor takes twice its size", "more memory, or --arena-bytes")
    return Finding(FAIL, "shared memory", told, "give the machine, or the control group, more memory")


def congestion(available: Sequence[str], used: str) -> Finding:
    """TCP's congestion control: what the kernel offers, and what it uses unless told."""
    if "bbr" in available:
        return Finding(OK, "congestion", f"bbr is there, for lanes that need it; the default here is {used}")
    return Finding(
        WARN, "congestion", f"bbr is not loaded ({', '.join(available) or 'nothing is told'})",
        "`modprobe tcp_bbr`: over long, lossy paths it makes the difference",
    )  # fmt: skip


def buffers(receive: int, send: int, plans: Plans) -> Finding:
    """The largest that TCP makes them, bytes, against what is under way on a lane; 0: not known."""
    under_way = plans.rate * plans.rtt / plans.lanes
    need = 2 * under_way
    told = f"{format_size(min(receive, send), 3)}; a lane of {plans.lanes} has {format_size(under_way, 3)} under way"
    if not receive or not send:
        return Finding(WARN, "TCP buffers", "not known: /proc/sys/net does not tell", "look at them on the host")
    if min(receive, send) >= need:
        return Finding(OK, "TCP buffers", told)
    wanted = int(need)
    return Finding(
        WARN, "TCP buffers", told,
        f"`sysctl net.ipv4.tcp_rmem='4096 131072 {wanted}' net.ipv4.tcp_wmem='4096 65536 {wanted}'`, or more lanes",
    )  # fmt: skip


def ports(low: int, high: int, plans: Plans) -> Finding:
    """Those that a dialler may take."""
    count, need = high - low + 1, max(LEAST_PORTS, (plans.members - 1) * 2 * (plans.lanes + 1))
    if count >= need:
        return Finding(OK, "local ports", f"{count}")
    return Finding(
        WARN, "local ports", f"{count} ({low} to {high})", "`sysctl net.ipv4.ip_local_port_range='32768 60999'`"
    )


def kernel(version: tuple[int, int], text: str) -> Finding:
    """Linux's."""
    if version >= OLDEST_KERNEL:
        return Finding(OK, "kernel", text)
    return Finding(
        FAIL, "kernel", f"{text}: it does not tell enough of its connections",
        f"{OLDEST_KERNEL[0]}.{OLDEST_KERNEL[1]} or newer",
    )  # fmt: skip


def engine(problem: ConfigError) -> Finding:
    """Why the C engine does not run: it is not built, or WANCOLL_CPU names what this machine does not have."""
    found = f"{problem.who}: {problem.what}" if problem.who else problem.what
    return Finding(FAIL, "engine", f"{found} ({problem.got})", problem.hint or problem.expected)


def synchronised(state: bool | None) -> Finding:
    """Whether the kernel's clock follows others; None: it does not say."""
    if state:
        return Finding(OK, "clock", "synchronised")
    told = "the kernel does not say" if state is None else "not synchronised"
    return Finding(WARN, "clock", told, "run chrony or systemd-timesyncd: tokens' ends and logs go by it")


# ---- a master ------------------------------------------------------------------------------------------


def masters(met: Collection[tuple[str, str]]) -> Iterator[Finding]:
    """Whether those that have answered are one, by what elects each."""
    if problem := two_masters(met):
        yield Finding(FAIL, "masters", *problem.split("; ", 1))


def clock_offset(offset: float, uncertain: float) -> Finding:
    """Seconds that the master's clock is ahead, known to within *uncertain*."""
    told = f"the master's is {abs(offset):.3f} s {'ahead' if offset >= 0 else 'behind'}, +- {uncertain:.3f} s"
    surely = abs(offset) - uncertain
    if surely >= FAST_CLOCK:
        return Finding(WARN, "clock offset", told, "set the clocks: ages in `wancoll status` are wrong by as much")
    return Finding(OK, "clock offset", told)


def version(who: str, theirs: str, ours: str) -> Finding:
    """Compare the version of a master or a daemon with ours."""
    if theirs == ours:
        return Finding(OK, "version", f"{who} has {theirs}, as here")
    return Finding(FAIL, "version", f"{who} has {theirs or '(unknown)'}, here is {ours}", "install the same everywhere")


# ---- daemons -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Way:
    """A connection from here to a daemon's lanes was tried."""

    daemon: str  # its name
    address: str  # "host:port"
    problem: str  # why there is no connection; "": there is one
    rtt: float = 0.0  # seconds
    mtu: int = 0  # bytes of a packet, as the kernel has found out; 0: not known
    mss: int = 0  # bytes of a segment
    swallowed: str = ""  # the direction in which a full packet was lost without a word, "there" or "back"; "": none
    passes: int = 0  # bytes of a smaller packet that came through both ways; 0: none did


def ways(tried: Sequence[Way]) -> Iterator[Finding]:
    """To all addresses of one daemon, which others dial in turn: one that works is enough."""
    works = next((one.address for one in tried if not one.problem), "")
    for one in tried:
        yield way(one, instead=works)


def way(one: Way, *, instead: str = "") -> Finding:
    """Whether it can be dialled, and how large its packets are; *instead*: another address that works."""
    if one.problem and instead:
        return Finding(OK, "lanes", f"{one.daemon} at {one.address}: {one.problem}; {instead} works instead")
    if one.problem:
        return Finding(
            WARN, "lanes", f"{one.daemon} at {one.address}: {one.problem}",
            "nothing, if its pairs are punched, a relay is here, or `wancoll doctor` there reaches the daemon here; "
            "else open that port (--listen), or let it announce another address (--advertise)",
        )  # fmt: skip
    told = f"{one.daemon} at {one.address}: {1e3 * one.rtt:.1f} ms, MTU {one.mtu or '?'}, MSS {one.mss}"
    if one.swallowed:
        smaller = f"packets of {one.passes} bytes pass" if one.passes else "no smaller one passes either"
        return Finding(
            FAIL, "lanes", f"{told}; no full packet comes {one.swallowed}, {smaller}",
            f"set the interfaces' MTU to {one.passes or 'what the path carries'} at both ends, or there and here "
            "`sysctl net.ipv4.tcp_mtu_probing=1`: a tunnel or firewall on the way drops what is larger without a word",
        )  # fmt: skip
    if 0 < one.mss < SMALL_MSS:
        return Finding(WARN, "lanes", told, "packets are small: look for a tunnel on the way and its MTU")
    if 0 < one.mss < USUAL_MSS:
        return Finding(OK, "lanes", f"{told} (a tunnel, it seems)")
    return Finding(OK, "lanes", told)


def pair(source: str, target: str, kind: str, why: str) -> Finding:
    """Two members have told the master that their link failed."""
    return Finding(
        FAIL if kind == "unreachable" else WARN, "members", f"{source} -> {target} {kind}: {why}",
        "one of the two must reach the other: run `wancoll doctor` on both machines",
    )  # fmt: skip


def relayed(pair: str, relays: Sequence[str]) -> Finding:
    """Two members that need a relay, which costs a detour and somebody's line."""
    ways = "forward a port to one of them (--advertise), for a direct way"
    if relays:
        return Finding(OK, "members", f"{pair}, relayed by {' or else '.join(relays)}", ways)
    return Finding(FAIL, "members", f"{pair}: they need a relay, and none is here", f"start it again; or {ways}")


def measured(source: str, target: str, rtt: float, loss: float) -> Finding:
    """What the daemons know of a path between them."""
    told = f"{source} -> {target}: {1e3 * rtt:.1f} ms, {100 * loss:.2g} % sent again"
    if loss > 0.02:
        return Finding(WARN, "path", told, "so much loss slows TCP: is the line full, or bbr missing?")
    return Finding(OK, "path", told)
