"""Settings of a peer daemon: the options of `wancoll peer`, with their defaults and their help."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from cyclopts import Parameter

from wancoll.limits import DEFAULT, Limits
from wancoll.options import DEFAULT_MASTER, Seconds, SecondsOrEver, Unseen, between

MAX_WORKERS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerConfig:
    """Of a daemon; "" is what the option's help says of Empty.

    Attributes:
        failpoint_token: from WANCOLL_FAILPOINTS; empty: fault injection is off.
        limits: bounds and timeouts.
    """

    master: Annotated[str, Parameter(help="HOST:PORT of the master; with standby masters HOST:PORT,HOST:PORT.")] = (
        DEFAULT_MASTER
    )
    socket: Annotated[
        str,
        Parameter(
            help="Path of the unix socket for training processes. Empty: $XDG_RUNTIME_DIR/wancoll/peer.sock, or "
            "/tmp/wancoll-UID/peer.sock where that variable is unset."
        ),
    ] = ""
    listen: Annotated[
        str,
        Parameter(
            help="HOST:PORT for other peers' lanes. Port 0 lets the system choose. '*' as host: all interfaces, "
            "IPv4 and IPv6."
        ),
    ] = "*:0"
    advertise: Annotated[
        tuple[str, ...],
        Parameter(
            negative=(),
            help="HOST or HOST:PORT that other peers shall dial, where it differs from what is bound (NAT, port "
            "forwarding). Repeat it, or separate by spaces in the variable. Empty: the address of the interface "
            "that reaches the master.",
        ),
    ] = ()
    name: Annotated[
        str, Parameter(help="This daemon's id, unique under its master. Empty: the host name and a random part.")
    ] = ""
    site: Annotated[
        str,
        Parameter(
            help="A label that peers close to each other share (a data centre, a rack): hierarchical algorithms reduce "
            "within a site before bytes cross to others. Empty: a site of its own."
        ),
    ] = ""
    lanes: Annotated[
        int,
        Parameter(
            validator=between(1, DEFAULT.max_lanes),
            help="TCP connections to each other peer. A group uses the smallest number that a member states.",
        ),
    ] = 8
    max_lanes: Annotated[
        int,
        Parameter(
            validator=between(0, DEFAULT.max_lanes),
            help="TCP connections to each other peer up to which the master may go where more of them carry more. "
            "A group uses the smallest number that a member states; not above --lanes: never.",
        ),
    ] = 32
    measure: Annotated[
        bool,
        Parameter(help="Measure paths to other machines, for the master's plans. Short probes while nothing runs."),
    ] = True
    workers: Annotated[
        int,
        Parameter(validator=between(0, MAX_WORKERS), help="Engine threads. 0: one for two processor cores, at most 4."),
    ] = 0
    congestion_control: Annotated[
        str, Parameter(help="TCP congestion control of the lanes (cubic, bbr, ...). Empty: the system's.")
    ] = ""
    checksum: Annotated[
        bool,
        Parameter(help="Checksums (XXH3) over all data. A connection goes without only if both ends want that."),
    ] = True
    arena_bytes: Annotated[
        int,
        Parameter(
            validator=between(0, 1 << 46),
            help="Bytes of address space for a client's shared memory; only touched pages take memory. "
            "0: the machine's memory, or what its control group allows.",
        ),
    ] = 0
    ready_without_master: Annotated[
        bool,
        Parameter(
            negative=(),
            help="Say that it is ready, to systemd too, as soon as clients can attach. Without this: once a master has "
            "answered.",
        ),
    ] = False
    watch_stdin: Annotated[
        bool,
        Parameter(negative=(), help="Stop when standard input closes, so that the daemon ends with its parent."),
    ] = False
    failpoint_token: Annotated[str, Unseen] = ""
    limits: Annotated[Limits, Unseen] = DEFAULT


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerLimits:
    """The limits that users tune."""

    master_grace: Annotated[
        SecondsOrEver,
        Parameter(
            help="Seconds to look for a lost master before operations fail; inf: without end. Where members commit "
            "they go on for so long without one; if all are lost the group's name waits as long, or until "
            "`wancoll evict`."
        ),
    ] = DEFAULT.master_grace
    connect_timeout: Annotated[Seconds, Parameter(help="Seconds for one dial of the master or of a lane.")] = (
        DEFAULT.connect_timeout
    )
    link_timeout: Annotated[
        Seconds,
        Parameter(
            help="Seconds to (re)dial another peer before it is reported unreachable; a dial that is under way, of "
            "--connect-timeout at most, ends first."
        ),
    ] = DEFAULT.link_timeout
    lane_timeout: Annotated[
        Seconds,
        Parameter(
            help="Seconds that data may stay unacknowledged, or be left in its socket by a peer that should take it, "
            "before the link is made anew."
        ),
    ] = DEFAULT.lane_timeout
    slow_after: Annotated[
        Seconds, Parameter(help="Seconds after which an operation is reported, with what it waits for.")
    ] = DEFAULT.slow_after
    drain_timeout: Annotated[Seconds, Parameter(help="Seconds for running operations to finish after SIGTERM.")] = (
        DEFAULT.drain_timeout
    )
