"""Connections between daemons before the engine has them, in clear or sealed: who is at the other end, what is said."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import msgspec
import trio

from wancoll.errors import ProtocolError
from wancoll.limits import KIB
from wancoll.native.engine import Engine
from wancoll.native.seal import READS, Sealed, Seals
from wancoll.net.dial import DialFailed, dial, read_frame
from wancoll.net.proof import NONCE_BYTES, Proof, check_first, read_receipt
from wancoll.net.threads import in_thread
from wancoll.net.tls import explained
from wancoll.net.wallet import Wallet
from wancoll.peer.core.paths.tcpinfo import TCP_INFO_BYTES, TcpInfo, parse_tcp_info
from wancoll.peer.links import beside
from wancoll.peer.links.relays import Relays
from wancoll.wire import messages as m
from wancoll.wire.framing import begins_tls, encode

_PLAIN_THERE = "it does not speak TLS: that daemon was started in clear, and this one with --join"
_PLAIN_HERE = "this daemon was started in clear, and speaks no TLS: start it with --join, or none with it"
_SEALED_HERE = "this daemon speaks TLS only: start yours with --join and a token of the same master"
_NO_PEER = "no master of this daemon has given you a peer's receipt: start yours with a token of the same master"
_WHY = {  # of the engine's and OpenSSL's words between daemons, what there is to do; net/tls.py has the others
    **dict.fromkeys(("wrong version number", "packet length too long", "record layer failure"), _PLAIN_THERE),
    "http request": _PLAIN_THERE,
    "without a close notify": "the connection was cut: that daemon has ended, or its log says why",
}
_HELLO_BYTES = 4096  # more than TLS begins with
_NEARBY_SECONDS = 0.5  # for a daemon in the same local network, if it is in that one, to answer
_QUEUED = 1024  # messages that wait for one daemon at this relay
SO_MAX_PACING_RATE = 47  # Linux
MOST_PACE = (1 << 31) - 1  # bytes per second: Python takes an int of C there
_FULL_PACKET = 64 * KIB  # bytes that are read of it, at most


class Watched(Protocol):
    """What is seen of a lane that the engine has."""

    def view(self, sent: int, received: int) -> TcpInfo | None:
        """The kernel's view of it, or what stands for that, by bytes that the engine counts; None: there is none."""

    def close(self) -> None:
        """Look no more."""


class WatchedSocket:
    """A lane's socket, its *nth* connection, by a descriptor of its own."""

    ends: tuple[str, str] | None = None  # addresses of this end and the other one; None: it has none, or has ended

    def __init__(self, fd: int, nth: int) -> None:
        self._socket, self.nth = socket.socket(fileno=fd), nth
        self.close = self._socket.close
        if self._socket.family != socket.AF_UNIX:
            with contextlib.suppress(OSError):
                self.ends = self._socket.getsockname()[0], self._socket.getpeername()[0]

    def view(self, sent: int, received: int) -> TcpInfo | None:
        """See Watched."""
        return kernel_view(self._socket)

    def uplink(self) -> str:
        """The network interface that it was bound to; "": to none, or it is closed."""
        with contextlib.suppress(OSError):
            return self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, 16).rstrip(b"\0").decode()
        return ""

    def pace(self, rate: int) -> None:
        """Send at most *rate* bytes per second from now on."""
        with contextlib.suppress(OSError):
            self._socket.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, min(rate, MOST_PACE))

    def cut(self) -> None:
        """End the connection at both ends, unless it has ended."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)


def kernel_view(sock: Any) -> TcpInfo | None:
    """The kernel's view of a connected TCP socket; None if it has none."""
    try:
        return parse_tcp_info(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_BYTES))
    except OSError:
        return None


class Connection:
    """One in clear: nobody has proved anything."""

    key: bytes | None = None  # public, that the other end has proved
    sealed = False

    @property
    def checks(self) -> bool:
        """Whether it finds by itself what is changed on the way: TLS does, as long as bytes go through it."""
        return self.sealed and not beside.is_beside(self.socket)

    def __init__(self, stream: trio.SocketStream) -> None:
        self.socket = stream.socket
        self._stream = stream
        self._memory: beside.Memory | None = None

    async def say(self, message: msgspec.Struct) -> None:
        """Send it."""
        await self.send_all(encode(message))

    async def send_all(self, data: bytes) -> None:
        """Send these bytes."""
        await self._stream.send_all(data)

    async def recv(self, most: int) -> bytes:
        """Some bytes; b"" at the end."""
        return await self._stream.receive_some(most)

    async def share(self, half: int) -> None:
        """Where both ends are on one machine, for who dialled, after the last message: see beside.share."""
        if beside.is_beside(self.socket):
            self._memory = await beside.share(self.socket, half)

    async def take_share(self, who: str, *, wanted: bool) -> None:
        """The same for who was dialled: see beside.take_share."""
        if beside.is_beside(self.socket):
            self._memory = await beside.take_share(self.socket, wanted=wanted, who=who)

    def attach(self, engine: Engine, number: int, lane: int, nth: int, checksums: bool) -> Watched | None:
        """Give it to the engine, as the *nth* connection of the lane.

        Returns a look at it, if there is a descriptor left.

        Raises:
            ConfigError, MemoryError, OSError: the engine refuses it; it is closed.
        """
        memory, near, fd = self._memory, beside.is_beside(self.socket), self.socket.detach()
        watched: Watched | None = memory
        try:
            if memory is not None:
                engine.attach_pipe(number, lane, fd, memory.fd, first=memory.first, checksums=checksums, connection=nth)
                memory.watch()
                return memory
            with contextlib.suppress(OSError):
                watched = WatchedSocket(os.dup(fd), nth)
            if near:
                engine.attach_lane(number, lane, fd, checksums, connection=nth)
            else:
                self._give(engine, number, lane, nth, fd, checksums)
        except BaseException:
            if watched is not None:
                watched.close()
            raise
        return watched

    def _give(self, engine: Engine, number: int, lane: int, nth: int, fd: int, checksums: bool) -> None:
        engine.attach_lane(number, lane, fd, checksums, connection=nth)

    def close(self) -> None:
        """Close it, unless the engine has it. Idempotent."""
        self.socket.close()
        if self._memory is not None:
            self._memory.close()


class SealedConnection(Connection):
    """One over TLS 1.3. *accepts*: it was dialled by the other end."""

    sealed = True

    def __init__(self, stream: trio.SocketStream, seals: Seals, *, accepts: bool) -> None:
        super().__init__(stream)
        self._tls: Sealed = seals.begin(self.socket.fileno(), accepts=accepts)
        self._sign: Callable[[msgspec.Struct], m.Signed] | None = None  # what is said first

    async def dialled(self, wallet: Wallet, key: bytes, who: str) -> None:
        """Raise DialFailed if it is not the owner of the public *key* who answers.

        The certificate may take long to read: in a thread. What has begun there ends there, also for who is cancelled.
        """
        try:
            while waits := await in_thread(self._tls.handshake):
                await self._wait(reads=waits == READS)
            found = self._tls.key()
        except (OSError, trio.ClosedResourceError) as bad:
            raise DialFailed(_explained(bad)) from bad
        if found != key:
            raise DialFailed(
                f"it has the key {found.hex()}, and not {key.hex() or 'any that the master knows'}: another daemon "
                "answers there; is that address its own (--advertise)?"
            )
        challenge = await read_frame(self, m.Challenge, who=who)
        self.key, proof = found, Proof(wallet.key, (key,), wallet.receipt)
        self._sign = partial(proof.first, key, challenge.nonce)

    async def accepted(self, wallet: Wallet, who: str) -> m.LaneFirst:
        """What a peer that is known says first.

        Raises:
            DialFailed, ProtocolError: nobody has proved to be one.
        """
        try:
            while waits := self._tls.handshake():  # it costs little: no certificate is asked for
                await self._wait(reads=waits == READS)
        except OSError as bad:
            raise DialFailed(_explained(bad)) from bad
        nonce = os.urandom(NONCE_BYTES)
        await self.say(m.Challenge(nonce))
        signed = await read_frame(self, m.Signed, who=who)
        first: m.LaneFirst = check_first(signed, wallet.key.public, nonce, m.LaneFirst, who=who)
        found = read_receipt(signed.receipt, signed.key, wallet.masters)
        says = first.daemon if isinstance(first, m.AtRelay) else ""
        if found is None or found.role != "peer" or says not in ("", found.name):
            await self.say(m.Bye(_NO_PEER) if says else m.LaneRefused(_NO_PEER))
            raise DialFailed(f"{who} has shown no peer's receipt by a master of this daemon")
        self.key = signed.key
        return first

    async def say(self, message: msgspec.Struct) -> None:
        """See Connection."""
        sign, self._sign = self._sign, None
        await super().say(message if sign is None else sign(message))

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

    def _give(self, engine: Engine, number: int, lane: int, nth: int, fd: int, checksums: bool) -> None:
        engine.attach_sealed(number, lane, self._tls, connection=nth)

    def close(self) -> None:
        """See Connection."""
        self._tls.close()
        super().close()


class Queued:
    """A connection of a daemon at this relay, whose sends do not wait: see relay.switch.Talk. *end* reads no more."""

    def __init__(self, connection: Connection, who: str, end: Callable[[], None]) -> None:
        self._connection, self.who, self.ended, self.end = connection, who, "", end
        self._put, self._get = trio.open_memory_channel[bytes](_QUEUED)

    def send(self, frame: bytes) -> None:
        """See Talk."""
        try:
            self._put.send_nowait(frame)
        except trio.WouldBlock:
            self.ended = "it does not read what it is sent"
            self.end()

    async def write(self) -> None:
        """Task: send what is queued, until cancelled."""
        async for frame in self._get:
            try:
                await self._connection.send_all(frame)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                self.end()

    async def receive(self) -> bytes:
        """See Talk."""
        try:
            return await self._connection.recv(_FULL_PACKET)
        except (OSError, trio.BrokenResourceError, trio.ClosedResourceError) as bad:
            self.ended = self.ended or str(bad)
            return b""


class Connector:
    """Makes connections, all in clear (*wallet* None) or all sealed.

    *near_only*: to loopback alone, whatever address a master or a daemon names. *uplinks*: network interfaces, which
    lanes take in turn, by their numbers.
    """

    def __init__(self, wallet: Wallet | None = None, *, near_only: bool = False, uplinks: Sequence[str] = ()) -> None:
        self._near_only, self._uplinks = near_only, tuple(uplinks)
        self.relays: Relays | None = None
        self.nearby: dict[str, list[str]] = {}  # by daemon: local addresses of those behind the same NAT
        self._sealing = (Seals(wallet.key.certificate(), wallet.key.pem), wallet) if wallet is not None else None

    def turn(self, lane: int) -> tuple[str, ...]:
        """The uplinks in the order in which *lane* tries them: its own first."""
        own = lane % max(1, len(self._uplinks))
        return self._uplinks[own:] + self._uplinks[:own]

    async def open(self, addresses: Sequence[str], within: float, uplinks: tuple[str, ...] = ()) -> trio.SocketStream:
        """Connect, and no more: nobody has said who is there. Raises DialFailed: nobody answers."""
        return await dial(addresses, within, near_only=self._near_only, uplinks=uplinks or self._uplinks)

    async def dial(
        self,
        addresses: Sequence[str],
        key: bytes,
        within: float,
        *,
        daemon: str = "",
        near: bool = False,
        way: m.Way = m.Way.direct,
        lane: int = 0,
    ) -> Connection:
        """Connect to *daemon*, which proves its public *key* where connections are sealed.

        *near*: beside its port, on this machine, and nowhere else.

        Raises:
            DialFailed: it did not come through.
        """
        if near:
            stream = await beside.connect_beside(daemon, addresses)
            if stream is None:
                raise DialFailed(f"{daemon} does not listen on this machine")
            return await self._shake_hands(stream, addresses, key)
        if way and self.relays is not None:
            return await self._shake_hands(await self.relays.dial(daemon, within, way), addresses, key)
        if local := self.nearby.get(daemon):
            with contextlib.suppress(DialFailed, trio.TooSlowError), trio.fail_after(_NEARBY_SECONDS):
                return await self._shake_hands(await self.open(local, within, self.turn(lane)), local, key)
        return await self._shake_hands(await self.open(addresses, within, self.turn(lane)), addresses, key)

    async def _shake_hands(self, stream: trio.SocketStream, addresses: Sequence[str], key: bytes) -> Connection:
        """The connection, once the other end has proved its key. Raises DialFailed: it has not."""
        if self._sealing is None:
            return Connection(stream)
        seals, wallet = self._sealing
        made, where = SealedConnection(stream, seals, accepts=False), ", ".join(addresses)
        try:
            await made.dialled(wallet, key, where)
        except (DialFailed, ProtocolError, trio.BrokenResourceError) as bad:
            made.close()
            raise DialFailed(str(bad) if str(bad).startswith(where) else f"{where}: {bad}") from bad
        except BaseException:
            made.close()
            raise
        return made

    async def accept(self, stream: trio.SocketStream, who: str) -> tuple[Connection, m.LaneFirst]:
        """A connection of somebody who dialled, and what it says first.

        Raises:
            DialFailed: that it is a peer is not proved, or one end seals and the other one does not: both are told.
            ProtocolError: it says something else.
        """
        first = await stream.socket.recv(1, socket.MSG_PEEK)
        plain = Connection(stream)
        if first and begins_tls(first) != (self._sealing is not None):
            refused = m.LaneRefused(_PLAIN_HERE if self._sealing is None else _SEALED_HERE)
            if self._sealing is not None:
                hello = await read_frame(plain, m.LaneFirst, who=who)  # a reset would take the answer along
                if isinstance(hello, m.ProbeHello) and hello.fill:  # `wancoll doctor`, which has no peer's receipt
                    await plain.recv(_FULL_PACKET)  # a reset would also hide that the answer was swallowed
                    refused = m.LaneRefused(refused.reason, bytes(hello.fill))
            else:
                await plain.recv(_HELLO_BYTES)
            await plain.say(refused)
            raise DialFailed(f"{who} " + ("speaks TLS, and this daemon was started in clear" if self._sealing is None
                             else "does not speak TLS, as this daemon does"))  # fmt: skip
        if self._sealing is None:
            return plain, await read_frame(plain, m.LaneFirst, who=who)
        seals, wallet = self._sealing
        made = SealedConnection(stream, seals, accepts=True)
        try:
            return made, await made.accepted(wallet, who)
        except BaseException:
            made.close()
            raise


def _explained(bad: Exception) -> str:
    text = bad.strerror if isinstance(bad, OSError) and bad.strerror else str(bad)
    return explained(text, _WHY)
