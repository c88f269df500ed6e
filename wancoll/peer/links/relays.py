"""This daemon at the relays that its master knows, and at the switch of the master: there it meets other daemons.

They are spliced, or told of each other: then each dials the other at the same time, and their NATs let that through.
"""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing, closing
from itertools import count
from typing import Any

import structlog
import trio

from wancoll.errors import ProtocolError
from wancoll.limits import PROTOCOL_VERSION, Limits
from wancoll.local import split_address
from wancoll.net.contain import contained
from wancoll.net.dial import DialFailed, dial, read_frame
from wancoll.net.listen import is_loopback_host
from wancoll.net.stream import Stream
from wancoll.net.tls import Tls, TlsFailed
from wancoll.net.wallet import Wallet
from wancoll.relay.switch import BEATS, MAGIC, messages
from wancoll.wire import messages as m
from wancoll.wire.framing import encode

log = structlog.get_logger("wancoll.links")

_POLL = 0.05  # seconds between looks for a relay at which the other daemon is
_QUEUE_BYTES = 1 << 20  # that wait for a relay
_PUNCH = 1.5  # seconds for two that dial each other: their kernels dial twice, at 0 and 1 s
_PAUSES = 0.1, 2.0  # seconds between dials of a relay: first, longest; twice as long each time


class _Relay:
    """One relay: the connection to it, while there is one, and what it was asked."""

    def __init__(self, info: m.RelayInfo) -> None:
        self.info, self.scope, self.begun = info, trio.CancelScope(), False
        self.stream: Stream | None = None
        self.answers: dict[int, trio.MemorySendChannel[m.RelayDialled]] = {}  # to questions, by number

    def answer(self, number: int, answer: m.RelayDialled) -> None:
        """The answer to a question has come, if it is still waited for."""
        if (waits := self.answers.pop(number, None)) is not None:
            waits.send_nowait(answer)

    def lost(self) -> None:
        """The connection is gone: nothing is answered any more."""
        self.stream = None
        for number in list(self.answers):
            self.answer(number, m.RelayDialled(number, reason=f"relay {self.info.name} is lost"))


class Relays:
    """All relays.

    Args:
        daemon: name of this one.
        wallet: what proves its key; None: all is in clear.
        limits: timeouts and bounds.
        nursery: for the tasks.
        master: where the master is.
        near_only: to dial loopback alone.
        accept: takes a connection that another daemon has asked for.
    """

    def __init__(
        self, daemon: str, wallet: Wallet | None, limits: Limits, nursery: trio.Nursery, master: Callable[[], str],
        accept: Callable[[trio.SocketStream], Awaitable[None]], *, near_only: bool,
    ) -> None:  # fmt: skip
        self._daemon, self._wallet, self._limits, self._nursery = daemon, wallet, limits, nursery
        self._master, self._accept, self._near_only = master, accept, near_only
        self._told: tuple[m.RelayInfo, ...] = ()
        self._meets = False  # it is at the master's switch, too: it has to punch
        self._relays: dict[m.RelayInfo, _Relay] = {}
        self._numbers = count(1)
        self._accepting = 0

    def __bool__(self) -> bool:
        return bool(self._told)

    def told(self, relays: Sequence[m.RelayInfo]) -> None:
        """These are all that there are now. Lanes through one that is gone stay as long as they can."""
        self._told = tuple(relays)
        before, self._relays = self._relays, {}
        for info in [*relays, m.AT_MASTER] if self._meets else relays:
            if info in self._relays:
                continue
            self._relays[info] = relay = before.pop(info, None) or _Relay(info)
            if not relay.begun:
                relay.begun = True
                self._nursery.start_soon(self._stay, relay)
        for gone in before.values():
            gone.scope.cancel()

    # ---- to reach others -----------------------------------------------------------------------------

    async def dial(self, daemon: str, within: float, way: m.Way = m.Way.relayed) -> trio.SocketStream:
        """A connection to another daemon, through the first relay at which both are, or *punched*.

        Raises:
            DialFailed: there is none *within* seconds.
        """
        reasons: dict[str, str] = {}
        punched = way is m.Way.punched
        if punched and not self._meets:
            self._meets = True
            self.told(self._told)
        with trio.move_on_after(within):
            while True:
                relays = [self._relays[info] for info in ([m.AT_MASTER] if punched else self._told)]
                for relay in relays:
                    try:
                        with trio.fail_after(within / len(relays)):  # one may be dead, and nobody knows yet
                            ticket = await self._ticket(relay, daemon, punched=punched)
                            if not punched:
                                return await self._splice(relay, ticket, within)
                    except (DialFailed, trio.TooSlowError) as bad:
                        reasons[relay.info.name] = str(bad) or "no answer"
                    else:
                        return await self._punch(relay, ticket, within)
                await trio.sleep(_POLL)
        tried = "; ".join(f"{name}: {why}" for name, why in reasons.items())
        raise DialFailed(f"daemon {daemon} is not {way.name} within {within:.1f} s ({tried or 'no relay is known'})")

    async def _ticket(self, relay: _Relay, daemon: str, *, punched: bool) -> bytes:
        if relay.stream is None:
            raise DialFailed("this daemon is not there")
        number, (waits, came) = next(self._numbers), trio.open_memory_channel[m.RelayDialled](1)
        relay.answers[number] = waits
        try:
            relay.stream.send(encode(m.RelayDial(number, daemon, punched)))
            answer = await came.receive()
        finally:
            relay.answers.pop(number, None)
        if answer.reason:
            raise DialFailed(answer.reason)
        return answer.ticket

    async def _splice(self, relay: _Relay, ticket: bytes, within: float) -> trio.SocketStream:
        stream = await dial(self._addresses(relay), within, near_only=self._near_only)
        try:
            await stream.send_all(MAGIC + ticket)
        except trio.BrokenResourceError as bad:
            raise DialFailed(f"relay {relay.info.name}: {bad}") from bad
        except trio.Cancelled:
            stream.socket.close()
            raise
        return stream

    async def _punch(self, relay: _Relay, ticket: bytes, within: float) -> trio.SocketStream:
        """Dial whom the master's switch names, from the port that it has seen. Raises DialFailed: not met in time."""
        at_switch = await self._splice(relay, ticket, within)
        with closing(at_switch.socket) as seen:
            address = "no other end"
            with trio.move_on_after(within):
                met = await read_frame(seen, m.Met, who=relay.info.name)
                address = met.address
                host, port = split_address(address)
                if self._near_only and not is_loopback_host(host):
                    raise DialFailed(f"{address} is beyond this machine, where all would be in clear")
                seen.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                with trio.move_on_after(_PUNCH):
                    while True:
                        if (stream := await _dial_from(seen, host, port)) is not None:
                            return stream
                        await trio.sleep(_POLL)
        raise DialFailed(f"{address} does not come through, though both ends dialled at the same time")

    def _addresses(self, relay: _Relay) -> list[str]:
        return list(relay.info.addresses) or [self._master()]

    # ---- to be reached -------------------------------------------------------------------------------

    async def _stay(self, relay: _Relay) -> None:
        """Task: keep a connection to the relay, until it is gone."""
        pause, longest = _PAUSES
        with relay.scope:
            while True:
                since = trio.current_time()
                reason = await self._visit(relay)
                if relay.stream is not None or trio.current_time() - since > longest:
                    log.info("not at a relay", relay=relay.info.name, reason=reason)
                relay.lost()
                pause = min(2 * pause, longest) if trio.current_time() - since < longest else _PAUSES[0]
                await trio.sleep(pause)

    async def _visit(self, relay: _Relay) -> str:
        """Until the connection ends, and why it has."""
        stream, reason, within = None, "it met a bug", self._limits.connect_timeout
        masters = self._wallet.masters if self._wallet is not None else []
        tls = None if self._wallet is None else Tls(expects=[relay.info.key] if relay.info.key else masters)
        try:
            with trio.fail_after(within):
                raw = await dial(self._addresses(relay), within, near_only=self._near_only)
                sock = socket.socket(fileno=raw.socket.detach())
                stream = Stream(sock, f"relay {relay.info.name}", _QUEUE_BYTES, tls=tls)
                await stream.shake_hands()
            with contained("a relay", lambda: relay.info):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(stream.write_queue)
                    nursery.start_soon(self._beat, stream)
                    try:
                        reason = await self._hear(relay, stream)
                    except ProtocolError as bad:
                        reason = str(bad)
                    nursery.cancel_scope.cancel()
            return reason
        except (DialFailed, TlsFailed, OSError) as bad:
            return str(bad)
        except trio.TooSlowError:
            return f"no answer within {within:.1f} s"
        finally:
            if stream is not None:
                stream.close()

    async def _beat(self, stream: Stream) -> None:
        while True:
            await trio.sleep(self._limits.heartbeat_timeout)
            stream.send(encode(m.RelayBeat()))

    async def _hear(self, relay: _Relay, stream: Stream) -> str:
        hello, kind = m.AtRelay(PROTOCOL_VERSION, self._daemon), m.FromRelay | m.Challenge | m.Bye
        if stream.tls is None:
            stream.send(encode(hello))
        silence = BEATS * self._limits.heartbeat_timeout
        said = messages(stream, kind, self._limits.handshake_bytes, silence)
        async with aclosing(said):
            async for message in said:
                match message:
                    case m.RelayBeat():
                        if relay.stream is None:
                            log.info("at a relay", relay=relay.info.name)
                        relay.stream = stream
                    case m.RelayDialled(number=number):
                        relay.answer(number, message)
                    case m.RelayCalled():
                        lets = not message.punched or relay.info == m.AT_MASTER  # no other one may have daemons dial
                        if lets and self._accepting < self._limits.pending_connections:
                            self._nursery.start_soon(self._called, relay, message)
                    case m.Challenge(nonce) if self._wallet is not None and stream.tls is not None:
                        stream.send(encode(self._wallet.proof(self._daemon).first(stream.tls.key, nonce, hello)))
                    case m.Bye(reason):
                        return str(reason)
        return stream.ended

    async def _called(self, relay: _Relay, call: m.RelayCalled) -> None:
        """Task: meet whoever wants to reach this daemon, and take it for one that has come to its port."""
        self._accepting += 1
        stream = None  # where it meets a bug
        try:
            with contained("a relay", lambda: relay.info, expected=(DialFailed,)):
                meet = self._punch if call.punched else self._splice
                stream = await meet(relay, call.ticket, self._limits.connect_timeout)
        except DialFailed as bad:
            log.info("not met", relay=relay.info.name, reason=str(bad))
            return
        finally:
            self._accepting -= 1
        if stream is not None:
            await self._accept(stream)


async def _dial_from(seen: Any, host: str, port: int) -> trio.SocketStream | None:
    """A connection from the port of another one; None: it was refused, and may not be a moment later.

    Raises:
        DialFailed: no dial from there can succeed.
    """
    sock = trio.socket.socket(seen.family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        await sock.bind(seen.getsockname())
        await sock.connect((host, port))
    except ConnectionError:
        sock.close()
        return None
    except OSError as bad:
        sock.close()
        raise DialFailed(f"{host}: {bad}") from bad
    except BaseException:
        sock.close()
        raise
    return trio.SocketStream(sock)
