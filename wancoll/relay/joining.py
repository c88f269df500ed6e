"""A relay of its own: its port, and the connection by which a master knows it. A trio shell."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from dataclasses import dataclass
from itertools import cycle

import structlog
import trio

from wancoll.errors import ConfigError, ProtocolError
from wancoll.limits import PROTOCOL_VERSION
from wancoll.local import default_state, join_address, split_addresses
from wancoll.net.contain import contained
from wancoll.net.listen import Handshakes, Sparing, advertised, open_listeners, serve_connections, whose, why_ended
from wancoll.net.proof import NONCE_BYTES, check_first
from wancoll.net.stream import Stream
from wancoll.net.tls import Listening, Tls, TlsFailed
from wancoll.net.visit import again_and_again, messages, visit
from wancoll.net.wallet import Wallet
from wancoll.relay.config import RelayConfig
from wancoll.relay.switch import Switch, may_be_here
from wancoll.trust.token import parse
from wancoll.wire import messages as m
from wancoll.wire.framing import Decoder, encode

log = structlog.get_logger("wancoll.relay")

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
        self._leader = ""  # in the words of a standby
        self._welcome = False  # at the master that is connected

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
        turns = cycle(addresses)

        async def once() -> bool:
            address, self._leader = self._leader or next(turns), ""
            expects = self._wallet.masters if self._wallet is not None else None
            every = self._limits.heartbeat_interval
            reason = await visit(address, [address], expects, self._limits, self._hear_master, self._beat, every=every)
            log.warning("no master knows this relay", master=address, reason=reason)
            return not self.refused

        await again_and_again(once)
        stop.set()

    def _beat(self, stream: Stream) -> None:
        if self._welcome:
            stream.send(encode(m.Heartbeat(1)))

    async def _hear_master(self, stream: Stream) -> str:
        local, self._welcome = str(stream.socket.getsockname()[0]), False
        here = m.RelayHere(PROTOCOL_VERSION, self._name, advertised(self._config.advertise, self._bound, local))
        if stream.tls is None:
            stream.send(encode(here))
        silence = _SILENCES * self._limits.heartbeat_timeout
        async for message in messages(stream, m.FromMaster, self._limits.message_bytes, silence):
            match message:
                case m.Challenge(nonce) if self._wallet is not None and stream.tls is not None:
                    stream.send(encode(self._wallet.proof(self._name).first(stream.tls.key, nonce, here)))
                case m.Admitted() if self._wallet is not None:
                    self._wallet.keep(message)
                case m.Welcome():
                    log.info("known to the master", master=stream.who, addresses=here.addresses)
                    self._welcome = True
                    self.answered.set()
                case m.StandsBy(leader):
                    self._leader = leader
                    return f"it stands by; {leader or 'nobody'} leads"
                case m.Bye(reason, final):
                    self.refused = reason if final else ""
                    return str(reason)
        return stream.ended


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
