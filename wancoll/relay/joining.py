"""A relay of its own: its port, and the connection by which a master knows it. A trio shell."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from dataclasses import dataclass

import structlog
import trio

from wancoll.errors import ConfigError, ProtocolError
from wancoll.limits import PROTOCOL_VERSION
from wancoll.local import default_state, join_address, split_addresses
from wancoll.net.contain import contained
from wancoll.net.dial import DialFailed, dial
from wancoll.net.listen import Handshakes, Sparing, advertised, open_listeners, serve_connections, whose, why_ended
from wancoll.net.proof import NONCE_BYTES, check_first
from wancoll.net.stream import Stream
from wancoll.net.tls import Listening, Tls, TlsFailed
from wancoll.net.wallet import Wallet
from wancoll.relay.config import RelayConfig
from wancoll.relay.switch import Switch, may_be_here
from wancoll.trust.token import parse
from wancoll.wire import messages as m
from wancoll.wire.framing import Decoder, encode

log = structlog.get_logger("wancoll.relay")

_PAUSES = 0.1, 2.0  # seconds between tries to come to a master: first, longest
_SILENCES = 2  # times heartbeat_timeout without a Pong, after which a master is given up
_QUEUE_BYTES = 1 << 20  # that wait for one connection


@dataclass(frozen=True, slots=True)
class Started:
    """What the relay is bound to; *answered* is set once a master has taken it in."""

    name: str
    data: list[str]
    master: str
    answered: trio.Event


class Relay:
    """One relay process. *wallet*: what proves its key; None: all is in clear."""

    def __init__(
        self, config: RelayConfig, name: str, rate: float, bound: socket.socket, wallet: Wallet | None
    ) -> None:  # fmt: skip
        self._config, self._limits, self._name, self._bound, self._wallet = config, config.limits, name, bound, wallet
        self._listening = Listening([wallet.key]) if wallet is not None else None
        self.switch = Switch(config.limits, rate)
        self._strangers = Sparing()
        self.handshakes = Handshakes.of_port(config.limits, sealed=wallet is not None)
        self.answered = trio.Event()
        self.refused = ""  # why no master takes it
        self._hint = ""  # who leads, in the words of a standby

    # ---- its port ------------------------------------------------------------------------------------

    def lets_in(self, sock: socket.socket) -> bool:
        """Whether a connection is worth a handshake."""
        return self.handshakes.lets_in(whose(sock))

    async def accept(self, stream: trio.SocketStream) -> None:
        """Handler of the port: whatever arrives, the relay stays up."""
        who = whose(stream.socket)
        if await self.switch.takes(stream, who):
            return
        tls = Tls(self._listening) if self._listening is not None else None
        try:
            connection = Stream(socket.socket(fileno=stream.socket.detach()), who, _QUEUE_BYTES, tls=tls)
        except OSError:
            return  # gone already
        try:
            with contained("a port of the relay", lambda: connection.newest):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(connection.write_queue)
                    try:
                        await self._hear(connection, who)
                    except (TlsFailed, ProtocolError) as bad:
                        self._strangers.say(log.info, "connection ended", who=who, reason=str(bad))
                        connection.send(encode(m.Bye(str(bad)[:1000])))
                    nursery.cancel_scope.cancel()
        finally:
            connection.close()

    async def _hear(self, connection: Stream, who: str) -> None:
        nonce, first = os.urandom(NONCE_BYTES), None
        decoder: Decoder[m.Signed | m.AtRelay] = Decoder(m.Signed | m.AtRelay, self._limits.handshake_bytes, who)
        with self.handshakes.one(who) as scope:
            await connection.shake_hands()
            if connection.tls is not None:
                connection.send(encode(m.Challenge(nonce)))
            while first is None and (data := await connection.receive()):
                first = next(iter(decoder.feed(data)), None)
        if first is None:
            raise ProtocolError(f"did not say who it is: it {why_ended(scope) if scope.cancelled_caught else 'left'}")
        if isinstance(first, m.Signed) and self._wallet is not None:
            said = check_first(first, self._wallet.key.public, nonce, m.AtRelay, who=who)
            may_be_here(first, said, self._wallet.masters)
            self.handshakes.know(who)
        elif isinstance(first, m.AtRelay) and self._wallet is None:
            said = first
        else:
            raise ProtocolError("proves no key, or one to a relay in clear", who=who)
        m.check_protocol(said, who)
        await self.switch.serve(said.daemon, connection)

    # ---- the master ----------------------------------------------------------------------------------

    async def stay_known(self, addresses: list[str], stop: trio.Event) -> None:
        """Task: be known to the master that leads; *stop* is set where none may ever take this relay."""
        pause, at = _PAUSES[0], 0
        while not self.refused:
            address, self._hint = self._hint or addresses[at % len(addresses)], ""
            since = trio.current_time()
            reason = await self._once(address)
            log.warning("no master takes this relay", master=address, reason=reason)
            at += 1
            pause = min(2 * pause, _PAUSES[1]) if trio.current_time() - since < _PAUSES[1] else _PAUSES[0]
            await trio.sleep(0 if self._hint else pause)
        stop.set()

    async def _once(self, address: str) -> str:
        """Until the connection ends, and why it has."""
        wallet, within = self._wallet, self._limits.connect_timeout
        tls = Tls(expects=wallet.masters) if wallet is not None else None
        stream, reason = None, "it met a bug"
        try:
            with trio.fail_after(within):
                raw = await dial([address], within, near_only=False)
                local = str(raw.socket.getsockname()[0])
                stream = Stream(socket.socket(fileno=raw.socket.detach()), address, _QUEUE_BYTES, tls=tls)
                await stream.shake_hands()
            here = m.RelayHere(PROTOCOL_VERSION, self._name, advertised(self._config.advertise, self._bound, local))
            if tls is None:
                stream.send(encode(here))
            with contained("the master", lambda: address):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(stream.write_queue)
                    nursery.start_soon(self._beat, stream)
                    try:
                        reason = await self._hear_master(stream, here)
                    except ProtocolError as bad:
                        reason = str(bad)
                    nursery.cancel_scope.cancel()
            return reason
        except (DialFailed, TlsFailed, ConfigError, OSError, trio.TooSlowError) as bad:
            return str(bad) or "no answer in time"
        finally:
            if stream is not None:
                stream.close()

    async def _beat(self, stream: Stream) -> None:
        number = 0
        while True:
            await trio.sleep(self._limits.heartbeat_interval)
            if self.answered.is_set():
                number += 1
                stream.send(encode(m.Heartbeat(number)))

    async def _hear_master(self, stream: Stream, here: m.RelayHere) -> str:
        decoder: Decoder[m.FromMaster] = Decoder(m.FromMaster, self._limits.message_bytes, stream.who)
        while True:
            data = b""
            with trio.move_on_after(_SILENCES * self._limits.heartbeat_timeout):
                data = await stream.receive()
            if not data:
                return stream.ended or "it is silent"
            for message in decoder.feed(data):
                match message:
                    case m.Challenge(nonce) if self._wallet is not None and stream.tls is not None:
                        proof = self._wallet.proof(self._name)
                        stream.send(encode(proof.first(stream.tls.key, nonce, here)))
                    case m.Admitted() if self._wallet is not None:
                        self._wallet.keep(message)
                    case m.Welcome():
                        log.info("known to the master", master=stream.who, addresses=here.addresses)
                        self.answered.set()
                    case m.StandsBy(leader):
                        self._hint = leader
                        return f"it stands by; {leader or 'nobody'} leads"
                    case m.Bye(reason, final):
                        self.refused = reason if final else ""
                        return reason


def _wallet(config: RelayConfig, port: int) -> Wallet | None:
    """The relay's key, and what it is good for; None: it has none, and nothing is encrypted."""
    if not config.join:
        return None
    return Wallet(os.path.abspath(config.state or default_state(f"relay-{port}")), parse(config.join))


async def serve(
    config: RelayConfig,
    rate: float,
    *,
    stop: trio.Event,
    task_status: trio.TaskStatus[Started] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Run a relay until *stop* is set. Started value: Started.

    Raises:
        ConfigError: a setting cannot be used, or no master takes this relay.
    """
    masters = [join_address(*one) for one in split_addresses(config.master, what="--master")]
    listeners = open_listeners(config.listen)
    try:
        wallet = _wallet(config, listeners[0].getsockname()[1])
        name = config.name or (wallet.name if wallet is not None else "")
        name = name or f"{socket.gethostname()[:60]}-{secrets.token_hex(3)}"
        relay = Relay(config, name, rate, listeners[0], wallet)
        with contextlib.nullcontext() if wallet is None else wallet.held(f"process {os.getpid()}"):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(serve_connections, listeners, relay.accept, relay.lets_in)
                nursery.start_soon(relay.stay_known, masters, stop)
                data = [join_address(*one.getsockname()[:2]) for one in listeners]
                task_status.started(Started(name, data, config.master, relay.answered))
                await stop.wait()
                nursery.cancel_scope.cancel()
        if relay.refused:
            raise ConfigError("no master takes this relay", who=name, got=relay.refused)
    finally:
        for one in listeners:
            one.close()
