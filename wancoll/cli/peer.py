"""`wancoll peer`: options to PeerConfig, and the service around it."""

from __future__ import annotations

import dataclasses
import os
from functools import partial
from typing import Annotated, Any

from cyclopts import Parameter

from wancoll.cli.options import DEFAULT_MASTER, MASTER_PORT, LogFormat, LogLevel, Seconds, addresses, between
from wancoll.errors import ConfigError
from wancoll.limits import DEFAULT, Limits
from wancoll.local import split_address
from wancoll.peer.config import PeerConfig

MAX_WORKERS = 64


def peer(
    *,
    master: Annotated[
        str, Parameter(help="HOST:PORT of the master; with standby masters HOST:PORT,HOST:PORT.")
    ] = DEFAULT_MASTER,
    socket: Annotated[
        str,
        Parameter(
            help="Path of the unix socket for training processes. Empty: $XDG_RUNTIME_DIR/wancoll/peer.sock, or "
            "/tmp/wancoll-UID/peer.sock where that variable is unset."
        ),
    ] = "",
    listen: Annotated[
        str,
        Parameter(
            help="HOST:PORT for other peers' lanes. Port 0 lets the system choose. '*' as host: all interfaces, "
            "IPv4 and IPv6."
        ),
    ] = "*:0",
    advertise: Annotated[
        tuple[str, ...],
        Parameter(
            negative=(),
            help="HOST or HOST:PORT that other peers shall dial, where it differs from what is bound (NAT, port "
            "forwarding). Repeat it, or separate by spaces in the variable. Empty: the address of the interface "
            "that reaches the master.",
        ),
    ] = (),
    name: Annotated[
        str, Parameter(help="This daemon's id, unique under its master. Empty: the host name and a random part.")
    ] = "",
    site: Annotated[
        str,
        Parameter(
            help="A label that peers close to each other share (a data centre, a rack): hierarchical algorithms reduce "
            "within a site before bytes cross to others. Empty: a site of its own."
        ),
    ] = "",
    lanes: Annotated[
        int,
        Parameter(
            validator=between(1, DEFAULT.max_lanes),
            help="TCP connections to each other peer. A group uses the smallest number that a member states.",
        ),
    ] = 8,
    max_lanes: Annotated[
        int,
        Parameter(
            validator=between(0, DEFAULT.max_lanes),
            help="TCP connections to each other peer up to which the master may go where more of them carry more. "
            "A group uses the smallest number that a member states; not above --lanes: never.",
        ),
    ] = 32,
    measure: Annotated[
        bool,
        Parameter(help="Measure paths to other machines, for the master's plans. Short probes while nothing runs."),
    ] = True,
    workers: Annotated[
        int,
        Parameter(validator=between(0, MAX_WORKERS), help="Engine threads. 0: one for two processor cores, at most 4."),
    ] = 0,
    congestion_control: Annotated[
        str, Parameter(help="TCP congestion control of the lanes (cubic, bbr, ...). Empty: the system's.")
    ] = "",
    checksum: Annotated[bool, Parameter(help="Send a checksum (crc32c) with every frame.")] = True,
    arena_bytes: Annotated[
        int,
        Parameter(
            validator=between(0, 1 << 46),
            help="Bytes of address space for a client's shared memory; only touched pages take memory. "
            "0: twice the machine's memory.",
        ),
    ] = 0,
    watch_stdin: Annotated[
        bool,
        Parameter(negative=(), help="Stop when standard input closes, so that the daemon ends with its parent."),
    ] = False,
    master_grace: Annotated[
        Seconds, Parameter(help="Seconds to look for a lost master before operations fail.")
    ] = DEFAULT.master_grace,
    connect_timeout: Annotated[
        Seconds, Parameter(help="Seconds for one dial of the master or of a lane.")
    ] = DEFAULT.connect_timeout,
    link_timeout: Annotated[
        Seconds,
        Parameter(
            help="Seconds to (re)dial another peer before it is reported unreachable; a dial that is under way, of "
            "--connect-timeout at most, ends first."
        ),
    ] = DEFAULT.link_timeout,
    lane_timeout: Annotated[
        Seconds,
        Parameter(
            help="Seconds that data may stay unacknowledged, or be left in its socket by a peer that should take it, "
            "before the link is made anew."
        ),
    ] = DEFAULT.lane_timeout,
    slow_after: Annotated[
        Seconds, Parameter(help="Seconds after which an operation is reported, with what it waits for.")
    ] = DEFAULT.slow_after,
    drain_timeout: Annotated[
        Seconds, Parameter(help="Seconds for running operations to finish after SIGTERM.")
    ] = DEFAULT.drain_timeout,
    log_level: LogLevel = "info",
    log_format: LogFormat = "auto",
) -> int:
    """Run this machine's peer daemon: it moves and reduces the data of its clients.

    Prints "wancoll peer ready socket=PATH data=HOST:PORT name=NAME" when clients can attach. SIGTERM or SIGINT drains
    and leaves, a second one ends it at once.
    """
    from wancoll.cli import logs, service
    from wancoll.peer.daemon import serve

    logs.configure(log_level, log_format)
    split_address(listen, what="--listen")
    for each in advertise:
        split_address(each, what="--advertise", default_port=0)
    limits = dataclasses.replace(
        DEFAULT,
        master_grace=master_grace,
        connect_timeout=connect_timeout,
        link_timeout=link_timeout,
        lane_timeout=lane_timeout,
        slow_after=slow_after,
        drain_timeout=drain_timeout,
    )
    _check_name("--name", name, limits)
    _check_name("--site", site, limits)
    config = PeerConfig(
        master=addresses(master, what="--master", default_port=MASTER_PORT),
        socket=socket,
        listen=listen,
        advertise=advertise,
        name=name,
        site=site,
        lanes=lanes,
        max_lanes=max_lanes,
        measure=measure,
        workers=workers,
        congestion_control=congestion_control,
        checksum=checksum,
        arena_bytes=arena_bytes,
        failpoint_token=os.environ.get("WANCOLL_FAILPOINTS", ""),
        watch_stdin=watch_stdin,
        limits=limits,
    )
    service.run("peer", partial(serve, config), _describe)
    return 0


def _describe(started: Any) -> str:
    return f"socket={started.socket} data={','.join(started.data)} name={started.name}"


def _check_name(option: str, name: str, limits: Limits) -> None:
    if len(name) > limits.name_chars or not name.isprintable() or any(c.isspace() for c in name):
        raise ConfigError(
            f"{option} cannot be used",
            expected=f"at most {limits.name_chars} printable characters without spaces",
            got=repr(name[: limits.name_chars]),
        )
