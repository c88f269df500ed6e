"""Settings of a peer daemon: the options of `wancoll peer`, with their defaults and their help."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Annotated

from cyclopts import Parameter

from wancoll.limits import DEFAULT, Limits
from wancoll.options import NO_MASTER, Metrics, MetricsToken, Seconds, SecondsOrEver, Switch, Unseen, between
from wancoll.units import parse_rate

MAX_WORKERS = 64
_PAYLOAD = 0.946  # of what a line carries: headers take 3.5 %, acknowledging as many bytes that come 2 %


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerConfig:
    """The settings of a daemon; "" has the meaning that the option's help gives for Empty.

    Attributes:
        socket: Path of the unix socket for training processes. Empty: $XDG_RUNTIME_DIR/wancoll/peer.sock, or
            /tmp/wancoll-UID/peer.sock where that variable is unset.
        listen: HOST:PORT for other peers' lanes. Port 0 lets the system choose. '*' as host: all interfaces, IPv4 and
            IPv6. Empty: *:0, or 127.0.0.1:0 in clear with a master on loopback.
        advertise: HOST or HOST:PORT that other peers shall dial, where it differs from what is bound (NAT, port
            forwarding). Repeat it, or separate by spaces in the variable. Empty: the address of the interface that
            reaches the master.
        name: This daemon's id, unique under its master. Empty: the host name and a random part.
        site: A label that peers close to each other share (a data centre, a rack): hierarchical algorithms reduce
            within a site before bytes cross to others. Empty: its machine.
        join: Token of the master, as it printed it: then all that this daemon says to it, and to other daemons, goes
            over TLS. It names the master, too, unless --master does. WANCOLL_JOIN shows it to fewer.
        insecure: In clear also with a master, or a --listen, beyond loopback: whoever reaches the ports can read and
            change everything. For a network that is private already. The master needs it, too.
        state: Folder of this daemon's key, for this user and this daemon alone. Empty: one for each
            machine's --socket, in wancoll in $XDG_STATE_HOME or ~/.local/state.
        lanes: TCP connections to each other peer; within a machine one for each thread of an operation. A group uses
            the smallest number that a member states.
        max_lanes: TCP connections to each other peer up to which the master may go where more of them carry more. A
            group uses the smallest number that a member states; not above --lanes: never.
        relay: Rate, such as 100Mbit/s, up to which this daemon carries what others say to each other that cannot reach
            each other, at its data port, which they have to be able to dial. It goes over this machine's line twice, in
            and out. Empty: nothing.
        measure: Measure paths to other machines, for the master's plans. Short probes while nothing runs.
        workers: Engine threads; plans are made as for twice as many processor cores. 0: one for two cores, at most 8.
        congestion_control: TCP congestion control of the lanes (cubic, bbr, ...). Empty: the system's.
        uplink: Network interface, such as eth0. With several (repeat it, or separate by spaces in the variable) the
            lanes that this daemon dials go over each of them in turn, or over the next one where one fails, until that
            one carries again. Empty: as the system routes them.
        uplink_limit: RATE, such as 20Mbit/s, at which this daemon's lanes together send at most, with TCP's headers and
            acknowledgements. Short messages, to other members and the master, do not count, nor what is sent again, or
            goes through memory. Empty: no limit.
        shared_memory: Lanes to daemons of the same user on this machine go through memory that the two share. Off: over
            TCP, as between machines.
        checksum: Checksums (XXH3) over all data. A connection goes without only if both ends want that.
        arena_bytes: Bytes of address space for a client's shared memory; only touched pages take memory. 0: the
            machine's memory, or what its control group allows.
        ready_without_master: Say that it is ready, to systemd too, as soon as clients can attach. Without this: once a
            master has answered.
        watch_stdin: Stop when standard input closes, so that the daemon ends with its parent.
        clients: whether it has any; a relay alone has none.
        failpoint_token: from WANCOLL_FAILPOINTS; empty: fault injection is off.
        limits: bounds and timeouts.
    """

    master: Annotated[
        str, Parameter(help=f"HOST:PORT of the master; with standby masters HOST:PORT,HOST:PORT. {NO_MASTER}")
    ] = ""
    socket: str = ""
    listen: str = ""
    advertise: Annotated[tuple[str, ...], Parameter(negative=())] = ()
    name: str = ""
    site: str = ""
    join: str = ""
    insecure: Switch = False
    state: str = ""
    lanes: Annotated[int, Parameter(validator=between(1, DEFAULT.max_lanes))] = 8
    max_lanes: Annotated[int, Parameter(validator=between(0, DEFAULT.max_lanes))] = 32
    relay: str = ""
    measure: bool = True
    workers: Annotated[int, Parameter(validator=between(0, MAX_WORKERS))] = 0
    congestion_control: str = ""
    uplink: Annotated[tuple[str, ...], Parameter(negative=())] = ()
    uplink_limit: str = ""
    shared_memory: bool = True
    checksum: bool = True
    arena_bytes: Annotated[int, Parameter(validator=between(0, 1 << 46))] = 0
    metrics: Metrics = ""
    metrics_token: MetricsToken = ""
    ready_without_master: Switch = False
    watch_stdin: Switch = False
    clients: Annotated[bool, Unseen] = True
    failpoint_token: Annotated[str, Unseen] = ""
    limits: Annotated[Limits, Unseen] = DEFAULT

    @property
    def most_sent(self) -> float:
        """Bytes per second that lanes together may give to their sockets; inf: without limit.

        Raises ConfigError: the limit is no rate.
        """
        return parse_rate(self.uplink_limit, "--uplink-limit") * _PAYLOAD if self.uplink_limit else inf

    @property
    def carries(self) -> float:
        """Bytes per second that it carries for others as a relay; 0: it is none. Raises ConfigError: it is no rate."""
        return parse_rate(self.relay, "--relay") if self.relay else 0.0

    @property
    def near_only(self) -> bool:
        """Whether it dials loopback alone: it speaks in clear, and nobody has said that it may do so beyond."""
        return not (self.insecure or self.join)


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerLimits:
    """The limits that users tune.

    Attributes:
        master_grace: Seconds to look for a lost master before operations fail; inf: without end. Where members commit
            they go on for so long without one; if all are lost the group's name waits as long, or until `wancoll
            evict`.
        connect_timeout: Seconds for one dial of the master or of a lane.
        link_timeout: Seconds to (re)dial another peer before it is reported unreachable; a dial that is under way, of
            --connect-timeout at most, ends first.
        lane_timeout: Seconds that data may stay unacknowledged, or be left in its socket by a peer that should take it,
            before the link is made anew.
        slow_after: Seconds after which an operation is reported, with what it waits for.
        drain_timeout: Seconds for running operations to finish after SIGTERM.
    """

    master_grace: SecondsOrEver = DEFAULT.master_grace
    connect_timeout: Seconds = DEFAULT.connect_timeout
    link_timeout: Seconds = DEFAULT.link_timeout
    lane_timeout: Seconds = DEFAULT.lane_timeout
    slow_after: Seconds = DEFAULT.slow_after
    drain_timeout: Seconds = DEFAULT.drain_timeout
