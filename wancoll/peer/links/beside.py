"""Lanes between daemons of one user on one machine: they meet at a unix socket, and bytes go through shared memory.

Beside each port for lanes a daemon listens at an abstract unix socket that is named after the daemon and the port: a
name that means this machine alone, or this container where it has a network of its own. Whoever dials a daemon with an
address of its own host tries that first, and TCP where nobody, or not that daemon, answers there. The handshake is the
same as over TCP, with TLS and proof of keys where lanes are sealed; after it the dialler sends one byte in clear, with
a memfd for a lane that carries data, and from then on the lane is not encrypted: who could read it could read the
daemons' memory.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import mmap
import os
import socket
from collections.abc import Iterable, Sequence
from typing import Any

import structlog
import trio

from wancoll.errors import ProtocolError
from wancoll.limits import KIB, MIB
from wancoll.local import split_address
from wancoll.native.engine import PIPE_HEAD, taken_from_pipe
from wancoll.net.unix import peer_credentials
from wancoll.peer.core.paths.tcpinfo import TcpInfo

log = structlog.get_logger("wancoll.links")

_OF_A_LINK, _OF_A_MEMBER = 4 * MIB, 32 * MIB  # memory that lanes share, at most, where there are few lanes
_HALF = 8 * KIB, 1 * MIB  # bytes of a lane each way: at least, with 256 lanes, and at most
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_DESCRIPTOR = 4  # bytes


def _name(daemon: str, port: int) -> bytes:
    named = hashlib.sha256(daemon.encode()).hexdigest()[:32]  # a name of a daemon may be longer than one of a socket
    return f"\0wancoll-lanes/{named}:{port}".encode()


def listeners_beside(daemon: str, data_sockets: Iterable[socket.socket]) -> list[socket.socket]:
    """A unix socket that listens for each of the *daemon*'s ports for lanes; where its name is taken, none."""
    made = []
    for name in dict.fromkeys(_name(daemon, one.getsockname()[1]) for one in data_sockets):
        listener = socket.socket(socket.AF_UNIX)
        try:
            listener.bind(name)
            listener.listen(socket.SOMAXCONN)
        except OSError as bad:
            listener.close()
            log.info("no lanes through shared memory", name=name[1:].decode(), reason=str(bad))
        else:
            made.append(listener)
    return made


def is_own(sock: Any) -> bool:
    """Whether a connection over a unix socket is of a process of this user."""
    _, user, _ = peer_credentials(sock)
    return user == os.geteuid()


async def connect_beside(daemon: str, addresses: Sequence[str]) -> trio.SocketStream | None:
    """A connection to the *daemon* at *addresses*, "host:port", if it listens beside one of these ports; else None."""
    for port in dict.fromkeys(split_address(address)[1] for address in addresses):
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            sock = stack.enter_context(trio.socket.socket(socket.AF_UNIX))
            await sock.connect(_name(daemon, port))
            if is_own(sock):
                stack.pop_all()
                return trio.SocketStream(sock)
    return None


def is_beside(sock: Any) -> bool:
    """Whether the other end is on this machine, and its lanes may go through memory."""
    return bool(sock.family == socket.AF_UNIX)


def half_of(lanes: int, members: int) -> int:
    """Bytes of a lane each way, in a group of so many *members*: a power of two."""
    share = min(_OF_A_LINK, _OF_A_MEMBER // members) // (2 * lanes)
    return min(max(1 << share.bit_length() >> 1, _HALF[0]), _HALF[1])


class Memory:
    """What the two ends of a lane share. *first*: this end made it.

    The engine maps it for itself: what is mapped here is the page from which the state of the lane is seen.
    """

    def __init__(self, fd: int, *, first: bool) -> None:
        self.fd, self.first = fd, first
        self._page: mmap.mmap | None = None
        self._half = 0

    @classmethod
    def new(cls, half: int) -> Memory:
        """One of so many bytes each way. Raises OSError: there is none."""
        made = cls(os.memfd_create("wancoll-lane", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING), first=True)
        try:
            os.ftruncate(made.fd, PIPE_HEAD + 2 * half)
            fcntl.fcntl(made.fd, fcntl.F_ADD_SEALS, _SEALS)
        except BaseException:
            made.close()
            raise
        return made

    def watch(self) -> None:
        """Keep the page, and one descriptor, that of mmap. Raises OSError: it is not to be had."""
        self._half = (os.fstat(self.fd).st_size - PIPE_HEAD) // 2
        self._page = mmap.mmap(self.fd, PIPE_HEAD)
        os.close(self.fd)
        self.fd = -1

    def view(self, sent: int, received: int) -> TcpInfo | None:
        """The lane, as the kernel tells of a TCP connection: bytes are held back while there is no room.

        *sent*, *received*: bytes, as the engine counts them; the other end may write anything into the page.
        """
        if self._page is None:
            return None
        taken = min(sent, taken_from_pipe(self._page, first=self.first))
        held_back = sent - taken if sent - taken >= self._half else 0
        return TcpInfo(0.0, 0.0, 0.0, True, taken, 0, 0, 0.0, held_back, segments_in=received + taken)

    def close(self) -> None:
        """Let go of it. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        if self._page is not None:
            self._page.close()
            self._page = None


async def share(sock: Any, half: int) -> Memory | None:
    """After the handshake, for who dialled: memory of *half* bytes each way (0: none), which the other end has, too.

    Raises:
        OSError: it is not to be had, or the other end is gone.
    """
    if not half:
        await sock.send(b"\0")
        return None
    made = Memory.new(half)
    try:
        await sock.sendmsg([b"\0"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, made.fd.to_bytes(_DESCRIPTOR, "little"))])
    except BaseException:
        made.close()
        raise
    return made


async def take_share(sock: Any, *, wanted: bool, who: str) -> Memory | None:
    """The same for who was dialled. The engine looks whether it is memory as it should be.

    Raises:
        ProtocolError: the other end sends memory where none is *wanted*, or none where it is.
        OSError: it is gone.
    """
    room = socket.CMSG_LEN(_DESCRIPTOR)
    data, ancillary, _, _ = await sock.recvmsg(1, room, socket.MSG_CMSG_CLOEXEC)
    found = [data for level, kind, data in ancillary if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS)]
    fds = [int.from_bytes(data[:_DESCRIPTOR], "little") for data in found if len(data) >= _DESCRIPTOR]
    if len(data) != 1 or len(fds) != int(wanted):
        for fd in fds:
            os.close(fd)
        raise ProtocolError(
            "a lane's memory is not as agreed", who=who, expected=f"a byte, {int(wanted)} descriptors",
            got=f"{len(data)} bytes, {len(fds)} descriptors",
        )  # fmt: skip
    return Memory(fds[0], first=False) if fds else None
