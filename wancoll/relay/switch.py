"""The switch of a relay or a master: which daemons are here, who wants to reach whom, and the splices between them.

A daemon keeps one connection here, over which it has proved its key (or, in a group in clear, said its name). Whoever
wants to reach it asks for it; both get a ticket, and open a connection each that begins with it. The two are spliced:
their ends shake hands through the relay as if one had dialled the other, so it can read, change or fake nothing where
lanes are sealed. A master's switch also tells the two where the other one comes from, for them to dial each other.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
from collections import Counter, deque
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any, Protocol

import structlog
import trio

from wancoll.errors import ProtocolError
from wancoll.limits import KIB, Limits
from wancoll.local import join_address
from wancoll.net.listen import Sparing
from wancoll.net.stream import round_trip
from wancoll.wire import messages as m
from wancoll.wire.framing import Decoder, encode

log = structlog.get_logger("wancoll.relay")

MAGIC = b"WCRELAY1"  # begins a connection with a ticket: neither TLS, nor a frame
TICKET_BYTES = 32
BEATS = 3  # a daemon beats so often within the silence after which it is given up
_BUFFER = 256 * KIB  # of a splice, each way
_MOST_TICKETS = 8192  # whose connections have not come; beyond, the oldest are void
_MOST_SPLICES = 4096
_MOST_ASKED = 256  # tickets, and splices, of one daemon: its oldest ticket is void then, or it is refused
_PAUSE = 0.001  # seconds between two of its wishes
_RESET = struct.pack("ii", 1, 0)
_TCP_NOTSENT_LOWAT = 25  # of Linux


class Talk(Protocol):
    """A connection whose sends do not wait, such as Stream: *who* is at the other end, why it *ended*."""

    who: str
    ended: str

    def end(self) -> None:
        """Read no more."""

    def send(self, frame: bytes) -> None:
        """Send now what fits, queue the rest, within bounds."""

    async def receive(self) -> bytes:
        """Some bytes; b"" at the end."""


async def messages(stream: Talk, kind: Any, most: int, silence: float) -> AsyncGenerator[Any, None]:
    """What comes, of *kind* and up to *most* bytes each, until the stream ends or is silent for so many seconds.

    Raises:
        ProtocolError: something else comes.
    """
    decoder: Decoder[Any] = Decoder(kind, most, stream.who)
    while True:
        data = b""
        with trio.move_on_after(silence):
            data = await stream.receive()
        if not data:
            stream.ended = stream.ended or f"it was silent for {silence:g} s"
            return
        for message in decoder.feed(data):
            yield message


@dataclass(slots=True, eq=False)
class _Pair:
    """Two connections to be spliced: *other* is the one that came second."""

    until: float
    by: str  # the daemon that has asked for it
    punched: bool  # they are told of each other, and not spliced
    other: Any = None  # a trio socket
    met: trio.Event = field(default_factory=trio.Event)
    over: trio.Event = field(default_factory=trio.Event)


class Switch:
    """Daemons that can be reached here, and the splices.

    *rate*: bytes per second of all splices; 0: no limit. It *splices*, and *introduces* those who dial each other.
    """

    def __init__(self, limits: Limits, rate: float = 0.0, *, splices: bool = True, introduces: bool = False) -> None:
        self._limits, self._rate, self._due = limits, rate, 0.0
        self._does = splices, introduces  # by RelayDial.punched
        self._here: dict[str, Talk] = {}  # daemons, by name
        self._tickets: dict[bytes, _Pair] = {}  # oldest first
        self._spliced: Counter[str] = Counter()  # by who has asked
        self._strangers = Sparing()
        self.splices = 0  # that there are now
        self.carried = 0  # bytes

    # ---- daemons -------------------------------------------------------------------------------------

    async def serve(self, daemon: str, stream: Talk) -> None:
        """Carry out what *daemon*, which has said and proved who it is, says over *stream*, to the end of that.

        Raises:
            ProtocolError: it says what makes no sense.
        """
        if (before := self._here.pop(daemon, None)) is not None:
            before.end()
        if len(self._here) >= self._limits.daemons:
            raise ProtocolError("is one daemon too many for this relay", who=daemon, expected=f"{self._limits.daemons}")
        self._here[daemon] = stream
        log.info("a daemon can be reached here", daemon=daemon)
        beat, silence = encode(m.RelayBeat()), BEATS * self._limits.heartbeat_timeout
        stream.send(beat)
        own: deque[bytes] = deque(maxlen=_MOST_ASKED)  # its newest tickets: older ones are void
        try:
            said = messages(stream, m.ToRelay, self._limits.handshake_bytes, silence)
            async with contextlib.aclosing(said):
                async for message in said:
                    if isinstance(message, m.RelayDial):
                        self._dialled(daemon, stream, message, own)
                        await trio.sleep(_PAUSE)
                    else:
                        stream.send(beat)
        finally:
            if self._here.get(daemon) is stream:
                del self._here[daemon]
                log.info("a daemon is gone", daemon=daemon, reason=stream.ended)

    def _dialled(self, daemon: str, stream: Talk, dial: m.RelayDial, own: deque[bytes]) -> None:
        """Give both ends a ticket, each its own."""
        to, now, reason = self._here.get(dial.to), trio.current_time(), ""
        if not self._does[dial.punched]:
            reason = "this relay does not do that"
        elif self.splices >= _MOST_SPLICES or self._spliced[daemon] >= _MOST_ASKED:
            reason = "this relay has no room"
        if to is None or to is stream or reason:
            reason = reason or f"daemon {dial.to} is not at this relay"
            stream.send(encode(m.RelayDialled(dial.number, reason=reason)))
            return
        while self._tickets and (len(self._tickets) >= _MOST_TICKETS or next(iter(self._tickets.values())).until < now):
            del self._tickets[next(iter(self._tickets))]
        pair = _Pair(now + self._limits.connect_timeout, daemon, dial.punched)
        mine, theirs = (os.urandom(TICKET_BYTES) for _ in range(2))
        for ticket in (mine, theirs):
            if len(own) == own.maxlen:
                self._tickets.pop(own[0], None)
            own.append(ticket)
            self._tickets[ticket] = pair
        stream.send(encode(m.RelayDialled(dial.number, mine)))
        to.send(encode(m.RelayCalled(theirs, dial.punched)))

    # ---- splices -------------------------------------------------------------------------------------

    async def shown(self, sock: Any) -> bytes | None:
        """The ticket that a connection begins with, of which nothing was read; None: it begins with something else."""
        try:
            if await sock.recv(1, socket.MSG_PEEK) != MAGIC[:1]:
                return None
            head, size = b"", len(MAGIC) + TICKET_BYTES
            while len(head) < size and (more := await sock.recv(size - len(head))):
                head += more
            return head.removeprefix(MAGIC)
        except (OSError, trio.ClosedResourceError):
            return None  # who reads on finds out

    async def carry(self, ticket: bytes, sock: Any, who: str) -> None:
        """Do what the ticket is for, to the end."""
        try:
            if (pair := self._tickets.pop(ticket, None)) is not None:
                await self._meet(pair, sock)
                return
            reason = "no ticket of this relay's, or an old one"
        except OSError as bad:
            reason = str(bad)
        self._strangers.say(log.info, "not met", who=who, reason=reason)

    async def _meet(self, pair: _Pair, sock: Any) -> None:
        if pair.until < trio.current_time():
            return
        if pair.other is None:
            pair.other = sock
            with trio.move_on_at(pair.until):
                await pair.met.wait()
            if pair.met.is_set():
                await pair.over.wait()
            return
        pair.met.set()
        self.splices += 1
        self._spliced[pair.by] += 1
        try:
            await (self._introduce if pair.punched else self._splice)(sock, pair.other)
        finally:
            self.splices -= 1
            self._spliced[pair.by] -= 1
            self._spliced += Counter()  # those at nothing leave
            pair.over.set()

    async def _introduce(self, one: Any, other: Any) -> None:
        """Tell each end where the other one comes from, so that both hear it at once, and wait until they have met.

        The connections here keep the holes in their NATs open until then.
        """
        ahead = (round_trip(other) - round_trip(one)) / 2  # by how much *one* would hear it earlier
        with trio.move_on_after(self._limits.connect_timeout):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._tell, one, other, max(0.0, ahead))
                nursery.start_soon(self._tell, other, one, max(0.0, -ahead))

    async def _tell(self, sock: Any, other: Any, later: float) -> None:
        await trio.sleep(later)
        with contextlib.suppress(OSError):
            host, port = other.getpeername()[:2]
            await sock.send(encode(m.Met(join_address(host.removeprefix("::ffff:"), port))))
            await sock.recv(1)  # its end

    async def _splice(self, one: Any, other: Any) -> None:
        """Carry bytes both ways until both have ended, or one is broken: then the other is reset, too."""
        patience = max(3, int(self._limits.lane_timeout))
        keepalive = ((socket.TCP_KEEPIDLE, patience), (socket.TCP_KEEPINTVL, patience // 3), (socket.TCP_KEEPCNT, 3))
        for sock in (one, other):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in ((socket.TCP_NODELAY, 1), (_TCP_NOTSENT_LOWAT, _BUFFER), *keepalive):
                sock.setsockopt(socket.IPPROTO_TCP, option, value)
        with contextlib.closing(select.epoll()) as gone:
            for sock in (one, other):
                gone.register(sock.fileno(), select.EPOLLRDHUP)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._end_soon, gone.fileno(), nursery.cancel_scope)
                async with trio.open_nursery() as both:
                    for source, to in ((one, other), (other, one)):
                        both.start_soon(self._carry, source, to, nursery.cancel_scope)
                nursery.cancel_scope.cancel()

    async def _end_soon(self, gone: int, splice: trio.CancelScope) -> None:
        """Once one end has closed, the other has a while to take what is left, which it may never do."""
        await trio.lowlevel.wait_readable(gone)
        splice.deadline = trio.current_time() + self._limits.lane_timeout

    async def _carry(self, source: Any, to: Any, splice: trio.CancelScope) -> None:
        buffer = memoryview(bytearray(_BUFFER))
        try:
            while count := await source.recv_into(buffer):
                if self._rate:
                    await self._wait_for_turn(count)
                self.carried += count
                left = buffer[:count]
                while left:
                    left = left[await to.send(left) :]
            to.shutdown(socket.SHUT_WR)
        except OSError:
            for sock in (source, to):
                with contextlib.suppress(OSError):
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            splice.cancel()

    async def _wait_for_turn(self, count: int) -> None:
        """The rate is that of all splices together: each waits behind what others have read before."""
        at = max(self._due, trio.current_time())
        self._due = at + count / self._rate
        await trio.sleep_until(at)
