"""Connections between daemons before the engine has them, in clear or sealed: who is at the other end, what is said."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import trio

from wancoll.errors import ConfigError
from wancoll.limits import KIB, keep_newest
from wancoll.native.engine import Engine
from wancoll.native.seal import READS, Sealed, Seals
from wancoll.net.dial import DialFailed, dial, read_frame
from wancoll.net.listen import whose
from wancoll.net.tls import explained
from wancoll.net.turns import Turns
from wancoll.trust.papers import Papers, identity_of
from wancoll.wire import messages as m
from wancoll.wire.framing import begins_tls, encode

if TYPE_CHECKING:
    from wancoll.trust.identity import Identity

_HELLO_BYTES = 4096  # more than TLS begins with
_MOST_KEYS = 4096  # of daemons, the newest: more than any epoch has
_EXPIRED = (
    "its certificate has expired, and its key was not known here while it was good: it gets the next one as soon as it "
    "reaches the master; if it does reach it, look at the clocks of both machines"
)
_PLAIN_THERE = "it does not speak TLS: that daemon was started without certificates, and this one with them"
_PLAIN_HERE = "this daemon was started without certificates, and speaks no TLS: start it with --join, or none with it"
_SOMEBODY_ELSE = "is that address its own (--advertise), and its token one for peers?"
_WHY = {  # of the engine's and OpenSSL's words between daemons, what there is to do; net/tls.py has the others
    **dict.fromkeys(("wrong version number", "packet length too long", "record layer failure"), _PLAIN_THERE),
    "http request": _PLAIN_THERE,
    "unknown ca": "it does not believe this daemon's certificate: both have to come with tokens of one master, new "
    "ones where its authority was replaced",
    "without a close notify": "the connection was cut: that daemon has ended, or its log says why",
}
_SEALED_HERE = "this daemon speaks TLS only: start yours with --join and a token of the same master"
_FULL_PACKET = 64 * KIB  # bytes that are read of it, at most


class Connection:
    """One in clear: nobody has proved anything."""

    identity: Identity | None = None  # who is at the other end, as its certificate says
    expired = False  # that has ended: good for members of an epoch alone, who know it from before
    sealed = False

    def __init__(self, stream: trio.SocketStream) -> None:
        self.socket = stream.socket
        self._stream = stream

    async def send_all(self, data: bytes) -> None:
        """Send it."""
        await self._stream.send_all(data)

    async def recv(self, most: int) -> bytes:
        """Some bytes; b"" at the end."""
        return await self._stream.receive_some(most)

    def attach(self, engine: Engine, number: int, lane: int, checksums: bool) -> socket.socket | None:
        """Give it to the engine. Returns a look at its socket, if there is a descriptor left.

        Raises:
            ConfigError, MemoryError, OSError: the engine refuses it; it is closed.
        """
        fd = self.socket.detach()
        try:
            watched = socket.socket(fileno=os.dup(fd))
        except OSError:
            watched = None
        try:
            self._give(engine, number, lane, fd, checksums)
        except BaseException:
            if watched is not None:
                watched.close()
            raise
        return watched

    def _give(self, engine: Engine, number: int, lane: int, fd: int, checksums: bool) -> None:
        engine.attach_lane(number, lane, fd, checksums)

    def close(self) -> None:
        """Close it, unless the engine has it. Idempotent."""
        self.socket.close()


class SealedConnection(Connection):
    """One over TLS 1.3, whose other end has proved who it is. *accepts*: it was dialled by the other end."""

    sealed = True

    def __init__(self, stream: trio.SocketStream, seals: Seals, *, accepts: bool) -> None:
        super().__init__(stream)
        self._tls: Sealed = seals.begin(self.socket.fileno(), accepts=accepts)
        self.key = b""  # hash of the other end's public key

    async def shake_hands(self, turns: Turns) -> None:
        """Raise DialFailed if the other end does not prove who it is.

        What it sends may take long to judge: in a thread, by *turns*. What has begun there ends there, also for who is
        cancelled.
        """
        from wancoll.trust.presented import key_of, presented  # loads `cryptography`

        address = whose(self.socket)
        try:
            while waits := await turns.run(address, self._tls.handshake):
                await self._wait(reads=waits == READS)
            der = self._tls.certificate()
            self.identity, self.key, self.expired = identity_of(presented(der)), key_of(der), self._tls.expired
        except (OSError, ValueError, trio.ClosedResourceError) as bad:
            raise DialFailed(_explained(bad)) from bad
        if self.identity is None:
            raise DialFailed("its certificate names no daemon")

    async def _wait(self, *, reads: bool) -> None:
        wait = trio.lowlevel.wait_readable if reads else trio.lowlevel.wait_writable
        await wait(self.socket)

    async def send_all(self, data: bytes) -> None:
        """See Connection."""
        try:
            while data:
                data = data[self._tls.write(data) :]
                while not self._tls.flush():
                    await self._wait(reads=False)
        except OSError as bad:
            raise trio.BrokenResourceError(_explained(bad)) from bad
        await trio.lowlevel.checkpoint()

    async def recv(self, most: int) -> bytes:
        """See Connection."""
        await trio.lowlevel.checkpoint()
        try:
            while (data := self._tls.read(most)) is None:
                await self._wait(reads=True)
        except OSError as bad:
            raise trio.BrokenResourceError(_explained(bad)) from bad
        return data

    def _give(self, engine: Engine, number: int, lane: int, fd: int, checksums: bool) -> None:
        engine.attach_sealed(number, lane, self._tls)

    def close(self) -> None:
        """See Connection."""
        self._tls.close()
        super().close()


class Connector:
    """Makes connections, all in clear or all sealed.

    *papers* says where this daemon's certificates are now; None: it has none. *near_only*: to loopback alone, whatever
    address a master or a daemon names.
    """

    def __init__(self, papers: Callable[[], Papers] | None = None, *, near_only: bool = False) -> None:
        self._papers, self._near_only = papers, near_only
        self._read: object = None  # the files that the seals are of, as they were
        self._seals: Seals | None = None
        self._accepting, self._dialling = Turns(), Turns()  # handshakes
        self._keys: dict[str, bytes] = {}  # by daemon: of its newest certificate that was good when it was shown

    def seals(self) -> Seals | None:
        """Seals made of the certificates as they are now; None: nothing is sealed.

        Raises:
            ConfigError: they cannot be used.
        """
        if self._papers is None:
            return None
        papers = self._papers()
        paths = (papers.authorities, papers.certificate, papers.key or papers.certificate)
        try:
            stats = [os.stat(path) for path in paths]
            read = [(path, one.st_ino, one.st_mtime_ns) for path, one in zip(paths, stats, strict=True)]
            if read != self._read:
                texts = []
                for path in paths:
                    with open(path, "rb") as file:
                        texts.append(file.read())
                self._seals, self._read = Seals(texts[0], texts[1], texts[2]), read
        except OSError as bad:
            raise ConfigError("certificates cannot be read", who=", ".join(paths), got=str(bad)) from bad
        return self._seals

    async def open(self, addresses: Sequence[str], within: float) -> trio.SocketStream:
        """Connect, and no more: nobody has said who is there. Raises DialFailed: nobody answers."""
        return await dial(addresses, within, near_only=self._near_only)

    async def dial(self, addresses: Sequence[str], daemon: str, within: float) -> Connection:
        """Connect to *daemon*, which proves that it is this one where connections are sealed.

        Raises:
            DialFailed: it did not come through.
        """
        try:
            seals = self.seals()
        except ConfigError as bad:
            raise DialFailed(str(bad)) from bad
        stream = await self.open(addresses, within)
        if seals is None:
            return Connection(stream)
        made = SealedConnection(stream, seals, accepts=False)
        where = ", ".join(addresses)
        try:
            await made.shake_hands(self._dialling)
            found = made.identity
            if found is None or (found.name, found.role) != (daemon, "peer"):
                said = f"{found.role} {found.name}" if found is not None else "nobody"
                raise DialFailed(f"expected peer {daemon}, its certificate is of {said}: {_SOMEBODY_ELSE}")
            if not self._may_be(made, found.name):
                raise DialFailed(_EXPIRED)
        except DialFailed as bad:
            made.close()
            raise DialFailed(f"{where}: {bad}") from bad
        except BaseException:
            made.close()
            raise
        return made

    async def accept(self, stream: trio.SocketStream, who: str) -> Connection:
        """A connection of somebody who dialled.

        Raises:
            DialFailed: that is not proved, or one end seals and the other one does not: then both are told.
            ConfigError: this end's certificates cannot be used.
        """
        seals = self.seals()
        first = await stream.socket.recv(1, socket.MSG_PEEK)
        plain = Connection(stream)
        if first and begins_tls(first) != (seals is not None):
            refused = m.LaneRefused(_PLAIN_HERE if seals is None else _SEALED_HERE)
            if seals is not None:
                hello = await read_frame(plain, m.LaneFirst, who=who)  # a reset would take the answer along
                if isinstance(hello, m.ProbeHello) and hello.fill:  # `wancoll doctor`, which has no peer's certificate
                    await plain.recv(_FULL_PACKET)  # a reset would also hide that the answer was swallowed
                    refused = m.LaneRefused(refused.reason, bytes(hello.fill))
            else:
                await plain.recv(_HELLO_BYTES)
            await plain.send_all(encode(refused))
            raise DialFailed(f"{who} " + ("speaks TLS, and this daemon has no certificates" if seals is None else
                             "does not speak TLS, as this daemon does"))  # fmt: skip
        if seals is None:
            return plain
        made = SealedConnection(stream, seals, accepts=True)
        try:
            await made.shake_hands(self._accepting)
            if made.identity is None or made.identity.role != "peer":
                raise DialFailed(f"{who}: its certificate is not a peer's")
            if not self._may_be(made, made.identity.name):
                await read_frame(made, m.LaneFirst, who=who)
                await made.send_all(encode(m.LaneRefused(f"{made.identity.name}: {_EXPIRED}")))
                raise DialFailed(f"{who}, {made.identity.name}: {_EXPIRED}")
        except BaseException:
            made.close()
            raise
        return made

    def _may_be(self, made: SealedConnection, name: str) -> bool:
        """Whether its certificate is good, or was when its key was seen last: then the epoch says who is in it."""
        if made.expired:
            return self._keys.get(name) == made.key
        keep_newest(self._keys, name, made.key, _MOST_KEYS)
        return True


def _explained(bad: Exception) -> str:
    text = bad.strerror if isinstance(bad, OSError) and bad.strerror else str(bad)
    return explained(text, _WHY)
