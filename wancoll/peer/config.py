"""Settings of a peer daemon, as `wancoll peer` collects them."""

from __future__ import annotations

from dataclasses import dataclass, field

from wancoll.limits import DEFAULT, Limits


@dataclass(frozen=True, slots=True)
class PeerConfig:
    """See `wancoll peer --help`.

    Args:
        master: "host:port" of the master; with standby masters "host:port,host:port".
        socket: path of the unix socket for clients ("" picks wancoll.local.default_socket()).
        listen: "host:port" for lanes; port 0 lets the kernel choose; host "" or "*" means all interfaces.
        advertise: addresses that others shall dial, "host:port" ("host" alone: the bound port); empty: the address
            of the interface that reaches the master, with the bound port.
        name: the daemon's id, unique under its master ("" makes one from the host name and a random part).
        site: a label that members close to each other share; "" is nobody's.
        lanes: TCP connections per link; a group uses the smallest number any member states.
        max_lanes: up to which the master may raise that number, where more carry more.
        measure: report what operations tell of paths to other machines, and probe them when the master asks.
        workers: engine threads (0: one per two cores, at most 4).
        congestion_control: of the lanes, "" for the system's.
        checksum: checksum outgoing frames.
        arena_bytes: address space of one client's arena (sparse: only touched pages take memory); 0 picks twice
            the machine's memory.
        failpoint_token: from WANCOLL_FAILPOINTS; empty: fault injection is off.
        watch_stdin: stop when standard input closes (a private daemon ends with its parent).
    """

    master: str
    socket: str = ""
    listen: str = "*:0"
    advertise: tuple[str, ...] = ()
    name: str = ""
    site: str = ""
    lanes: int = 8
    max_lanes: int = 32
    measure: bool = True
    workers: int = 0
    congestion_control: str = ""
    checksum: bool = True
    arena_bytes: int = 0
    failpoint_token: str = ""
    watch_stdin: bool = False
    limits: Limits = field(default=DEFAULT)
