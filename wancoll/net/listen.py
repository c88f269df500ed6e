"""Listening sockets, TCP and unix, and the bounds on those who connect and have not said yet who they are."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import math
import os
import random
import socket
import stat
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import Any

import structlog
import trio

from wancoll.errors import ConfigError
from wancoll.limits import Limits, keep_newest
from wancoll.local import join_address, open_to_others, split_address, standing
from wancoll.net.unix import is_served, peer_credentials

log = structlog.get_logger("wancoll.net")

_BACKLOG = 1024
_AT_ONCE = 4  # connections that one round takes
_FULL, _FULL_PAUSE = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS), 0.1  # seconds
_UNUSABLE = errno.EBADF, errno.EINVAL, errno.ENOTSOCK
_IPV6_NETWORK_BITS = 64  # what one host, or one customer, has at least
_LINES_A_SECOND = 10
_FORGOTTEN_BYTES, _PIECE_BYTES = 65536, 8192  # behind a request; at once
_KNOWN = 1024  # addresses from which somebody known came last
_SHARES = 4  # of the room for handshakes; one holds all lanes of a link, as many as a master plans by default


def open_listeners(listen: str) -> list[socket.socket]:
    """Listening TCP sockets, one for each address of the host; host "", "*" or "::" takes IPv6 and IPv4 on one port.

    Raises:
        ConfigError: the address cannot be read or bound.
    """
    host, port = split_address(listen, what="listen address")
    sockets: list[socket.socket] = []
    refusals: list[OSError] = []
    try:
        if host in ("", "*", "::"):
            both = socket.has_dualstack_ipv6()
            family = socket.AF_INET6 if both else socket.AF_INET
            return [socket.create_server(("", port), family=family, dualstack_ipv6=both, backlog=_BACKLOG)]
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, where in dict.fromkeys((family, str(address[0])) for family, *_, address in found):
            bound = sockets[0].getsockname()[1] if sockets else port
            try:
                sockets.append(socket.create_server((where, bound), family=family, backlog=_BACKLOG))
            except OSError as bad:
                if bad.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                    raise
                refusals.append(bad)  # "localhost" means ::1 too, also where there is no IPv6
        if not sockets:
            raise refusals[0]
        return sockets
    except OSError as bad:
        for one in sockets:
            one.close()
        raise ConfigError(
            "cannot listen there",
            who=listen,
            expected="an address of this machine and a free port",
            got=str(bad),
            hint="port 0 picks a free one; '*' takes all interfaces",
        ) from bad


def advertised(advertise: Sequence[str], bound: socket.socket, local_host: str) -> list[str]:
    """Addresses for others to dial: what the user said, else what is bound, else the interface towards the master."""
    host, port = bound.getsockname()[:2]
    if advertise:
        return [join_address(*split_address(text, what="--advertise", default_port=port)) for text in advertise]
    wildcard = host in ("0.0.0.0", "::", "")
    return [join_address(local_host.removeprefix("::ffff:") if wildcard else host, port)]


async def serve_connections(
    listeners: Iterable[socket.socket],
    handler: Callable[[trio.SocketStream], Awaitable[None]],
    lets_in: Callable[[socket.socket], bool] = lambda _: True,
) -> None:
    """Task: give each connection to *handler*, in a task of its own, and close it after that; until cancelled.

    Who is not let in is closed at once, before anything is made for it: else whoever is known waits behind strangers in
    the kernel's queue, of which no rule of ours knows. Of the others a few are taken in each round of trio: the queue
    holds those who dial back while others are in their handshakes.
    """
    async with trio.open_nursery() as nursery:
        for one in listeners:
            one.setblocking(False)
            nursery.start_soon(_serve_one, one, handler, lets_in, nursery)


async def _serve_one(
    listener: socket.socket,
    handler: Callable[[trio.SocketStream], Awaitable[None]],
    lets_in: Callable[[socket.socket], bool],
    nursery: trio.Nursery,
) -> None:
    while True:
        await trio.lowlevel.wait_readable(listener)
        taken = 0
        for _ in range(_BACKLOG):
            if taken == _AT_ONCE:
                break
            try:
                connection, _ = listener.accept()
            except BlockingIOError:
                break
            except OSError as bad:
                if bad.errno in _UNUSABLE:
                    raise
                if bad.errno in _FULL:
                    log.error("a connection cannot be taken", reason=str(bad), hint="see `ulimit -n`")
                    await trio.sleep(_FULL_PAUSE)
                    break
                continue  # that one is gone
            if lets_in(connection):
                taken += 1
                nursery.start_soon(_handle, trio.SocketStream(trio.socket.from_stdlib_socket(connection)), handler)
            else:
                connection.close()


async def _handle(stream: trio.SocketStream, handler: Callable[[trio.SocketStream], Awaitable[None]]) -> None:
    try:
        await handler(stream)
    finally:
        await trio.aclose_forcefully(stream)


def claim_socket(path: str) -> socket.socket:
    """A listening unix socket at *path*, for this user alone; a leftover of a dead daemon is replaced.

    Nobody else may be able to put another one in its place, to which training processes would hand their tensors.

    Raises:
        ConfigError: a daemon is alive there, the path cannot be used, or others may change its folder.
    """
    hint = "choose another with --socket or WANCOLL_SOCKET"
    folder = os.path.dirname(path) or "."
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        found = os.stat(folder)
        if open_to_others(found, sticky=True):
            raise ConfigError(
                "is a folder in which others may replace the client socket",
                who=folder,
                expected=f"one of user {os.geteuid()} or root, that others may not write to, or only as to /tmp",
                got=standing(found),
                hint=hint,
            )
        if os.path.lexists(path):
            if not stat.S_ISSOCK(os.lstat(path).st_mode):
                raise ConfigError("is not a socket", who=path, hint=hint)
            if is_served(path, timeout=1):
                raise ConfigError("another daemon serves this socket", who=path, hint=hint)
            os.unlink(path)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(path)
        os.chmod(path, 0o600)  # nobody can connect before it listens
        listener.listen(_BACKLOG)
        return listener
    except OSError as bad:
        raise ConfigError("cannot be used as client socket", who=path, got=str(bad), hint=hint) from bad


def whose(sock: Any) -> str:
    """The name a connection counts under, in bounds and in the log: an address, a local user, or "somebody".

    With IPv6 it is the network, since one host may have all its addresses. "somebody" has already gone.
    """
    try:
        if sock.family == socket.AF_UNIX:
            pid, uid, _ = peer_credentials(sock)
            return f"user {uid}, process {pid}"
        host = ipaddress.ip_address(sock.getpeername()[0].partition("%")[0])
    except (OSError, ValueError):
        return "somebody"
    if isinstance(host, ipaddress.IPv6Address) and not host.is_loopback:
        if host.ipv4_mapped is None:
            return str(ipaddress.ip_network((host, _IPV6_NETWORK_BITS), strict=False))
        return str(host.ipv4_mapped)
    return str(host)


def is_loopback(who: str) -> bool:
    """Whether that is what whose() says of a connection from this machine."""
    return who.startswith("127.") or who == "::1"


def is_loopback_host(host: str) -> bool:
    """Whether *host* means this machine alone. A name is looked up: each of its addresses has to be of loopback."""
    if host in ("", "*"):  # all interfaces
        return False
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        addresses = [ipaddress.ip_address(str(where[0]).partition("%")[0]) for *_, where in found]
    except (OSError, ValueError):  # nobody knows it, or it is no name
        return False
    return all((getattr(one, "ipv4_mapped", None) or one).is_loopback for one in addresses)


class Handshakes:
    """Connections that have not said yet who they are: the one rule for them at all listeners.

    So many at most, each for so long. Addresses from which somebody known came before have as much room again, of
    their own: however many strangers come, they put nobody out there.

    Args:
        most: open at once, of strangers' addresses and of known ones.
        seconds: for each.
        least: seconds that each has as long as fewer come, whoever comes.
        strangers: that may come in a second, of addresses that are not known, and *most* at once.
    """

    def __init__(self, most: int, seconds: float, least: float = 0.0, strangers: float = math.inf) -> None:
        self._seconds = seconds
        self._most, self._strangers_a_second = most, strangers
        self._credit, self._credit_at = float(most), 0.0  # when it was so much
        self._strangers, self._acquainted = _Room(most, least), _Room(most, least)
        self._known: dict[str, None] = {}  # addresses, the newest last

    @classmethod
    def of_port(cls, limits: Limits, *, sealed: bool) -> Handshakes:
        """Those at a port of a master or for lanes: over TLS so many strangers a second."""
        strangers = limits.strangers if sealed else math.inf
        return cls(limits.pending_connections, limits.handshake_timeout, limits.handshake_least, strangers)

    def __len__(self) -> int:
        return self._strangers.count + self._acquainted.count

    def know(self, address: str) -> None:
        """Somebody of this address has said who it is, and is known."""
        keep_newest(self._known, address, None, _KNOWN)

    def lets_in(self, address: str) -> bool:
        """Whether a connection of *address* is worth a handshake, which takes a millisecond, also of a stranger."""
        if address in self._known or self._strangers_a_second == math.inf:
            return True
        now = trio.current_time()
        earned = (now - self._credit_at) * self._strangers_a_second
        self._credit, self._credit_at = min(self._most, self._credit + earned), now
        if self._credit < 1:
            return False
        self._credit -= 1
        return True

    @contextlib.contextmanager
    def one(self, address: str = "") -> Iterator[trio.CancelScope]:
        """One connection of *address*, until it has said who it is.

        What runs inside is cancelled when its time is over, or where it has to give way.
        """
        room = self._acquainted if address in self._known else self._strangers
        with trio.move_on_after(self._seconds) as scope:
            room.enter(address, scope)
            try:
                yield scope
            finally:
                room.leave(scope)

    def leave(self, scope: trio.CancelScope) -> None:
        """It has said who it is, or is gone: it gives way to nobody, but its time goes on until its end."""
        self._strangers.leave(scope)
        self._acquainted.leave(scope)


class _Room:
    """Room for *most* connections; docs/security.md has the rule which of them gives way to one more.

    In a crowd that comes so fast that none has had *least* seconds most who need a few milliseconds come through.
    """

    def __init__(self, most: int, least: float) -> None:
        self._most, self._least = most, least
        self._share = max(most // _SHARES, 1)
        self._since: dict[trio.CancelScope, tuple[str, float]] = {}  # address, since when; oldest first
        self._open: dict[str, dict[trio.CancelScope, None]] = {}  # by address, oldest first
        self._busy: dict[str, None] = {}  # addresses with more than a share: few, so a crowd costs no search

    @property
    def count(self) -> int:
        """Connections in it."""
        return len(self._since)

    def enter(self, address: str, scope: trio.CancelScope) -> None:
        """Let it in, if need be in place of another one, which is cancelled."""
        if self.count >= self._most:
            self._make_room(address)
        self._since[scope] = address, trio.current_time()
        these = self._open.setdefault(address, {})
        these[scope] = None
        if len(these) > self._share:
            self._busy[address] = None

    def leave(self, scope: trio.CancelScope) -> None:
        """It is gone, if it was here."""
        if scope not in self._since:
            return
        address, _ = self._since.pop(scope)
        these = self._open[address]
        del these[scope]
        if len(these) <= self._share:
            self._busy.pop(address, None)
        if not these:
            del self._open[address]

    def _make_room(self, newcomer: str) -> None:
        """Put one out."""
        own = self._open.get(newcomer, {})
        busiest = max((self._open[one] for one in self._busy), key=len, default=own)
        if len(busiest) > max(len(own) + 1, self._share):
            scope = next(reversed(busiest))
        else:
            these = own if len(own) >= self._share else self._since
            scope = next(iter(these))
            _, since = self._since[scope]
            if trio.current_time() - since < self._least:
                scope = random.choice(list(these))
        self.leave(scope)
        scope.cancel()


async def forget(stream: trio.abc.ReceiveStream) -> None:
    """Read what comes, to its end or until it is too much: to close with it unread would take the answer away again."""
    left = _FORGOTTEN_BYTES
    while left > 0 and (data := await stream.receive_some(_PIECE_BYTES)):
        left -= len(data)


def why_ended(scope: trio.CancelScope) -> str:
    """Say why a cancelled handshake ended."""
    late = trio.current_time() >= scope.deadline
    return "was not done in time" if late else "gave way to another connection"


class Sparing:
    """Lines of the log that others can cause: so many in a second, and the next one says how many were left out.

    Args:
        at_once: that many more where there were few before.

    Attributes:
        count: of all, written or not.
    """

    def __init__(self, at_once: int = _LINES_A_SECOND) -> None:
        self.count = 0
        self._left_out = 0
        self._most = self._credit = float(at_once)
        self._at = 0.0

    def say(self, line: Callable[..., object], event: str, **fields: object) -> bool:
        """Write it, with what *line* is: a level of a log. False: it is left out."""
        self.count += 1
        now = trio.current_time()
        self._credit, self._at = min(self._most, self._credit + (now - self._at) * _LINES_A_SECOND), now
        if self._credit < 1:
            self._left_out += 1
            return False
        self._credit -= 1
        if self._left_out:
            fields["left_out"], self._left_out = self._left_out, 0
        line(event, **fields)
        return True
