"""Tells a service manager how we are: systemd's sd_notify datagrams, without its library.

The protocol is described in sd_notify(3): "KEY=VALUE" lines in one datagram to the socket that $NOTIFY_SOCKET names;
a leading "@" stands for the zero byte of Linux's abstract names.
"""

from __future__ import annotations

import os
import socket

import structlog

log = structlog.get_logger("wancoll.notify")


def notify(*states: str) -> None:
    """Send states such as "READY=1", where there is a manager. One that cannot be reached is logged, not an error."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
            sock.setblocking(False)
            sock.sendto("\n".join(states).encode(), "\0" + address[1:] if address[0] == "@" else address)
    except OSError as error:
        log.warning("the service manager could not be told", states=states, address=address, error=str(error))


def watchdog_interval() -> float | None:
    """Seconds between keepalives for the manager, half of what $WATCHDOG_USEC says; None: it wants none."""
    microseconds = os.environ.get("WATCHDOG_USEC", "")
    for_us = os.environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
    wanted = "NOTIFY_SOCKET" in os.environ and for_us and microseconds.isascii() and microseconds.isdigit()
    return int(microseconds) / 1e6 / 2 or None if wanted else None
