"""Tells a service manager how we are: systemd's sd_notify datagrams, without its library.

The protocol is described in sd_notify(3): "KEY=VALUE" lines in one datagram to the socket that $NOTIFY_SOCKET names;
a leading "@" stands for the zero byte of Linux's abstract names.
"""

from __future__ import annotations

import os
import socket

import structlog

log = structlog.get_logger("wancoll.notify")


class Notifier:
    """Sends states to the manager at *address*, the value of $NOTIFY_SOCKET; does nothing where there is none, "".

    *watchdog_interval*: seconds between keepalives that the manager wants, None for no keepalives.
    """

    def __init__(self, address: str, watchdog_interval: float | None = None) -> None:
        self.watchdog_interval = watchdog_interval if address else None
        self._socket: socket.socket | None = None
        if not address:
            return
        if address[0] not in "/@":
            log.warning("NOTIFY_SOCKET is not a unix socket; the service manager is not told", address=address)
            return
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        self._socket.setblocking(False)
        self._target = "\0" + address[1:] if address[0] == "@" else address

    @classmethod
    def from_environment(cls) -> Notifier:
        """Read $NOTIFY_SOCKET, $WATCHDOG_USEC and $WATCHDOG_PID; half the watchdog's time is the interval."""
        interval = None
        microseconds = os.environ.get("WATCHDOG_USEC", "")
        for_us = os.environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        if for_us and microseconds.isascii() and microseconds.isdigit() and int(microseconds) > 0:
            interval = int(microseconds) / 1e6 / 2
        return cls(os.environ.get("NOTIFY_SOCKET", ""), interval)

    def send(self, *states: str) -> None:
        """Send states such as "READY=1" as one datagram. A manager that cannot be reached is logged, not an error."""
        if self._socket is None:
            return
        try:
            self._socket.sendto("\n".join(states).encode(), self._target)
        except OSError as error:
            log.warning("the service manager could not be told", states=states, error=str(error))

    def close(self) -> None:
        """Close the socket; later sends do nothing."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
