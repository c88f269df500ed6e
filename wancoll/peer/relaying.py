"""A relay: a daemon without clients that carries what other daemons say to each other. A trio shell."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket

import structlog
import trio

from wancoll.errors import ConfigError, ProtocolError
from wancoll.local import default_state, join_address
from wancoll.net.contain import contained
from wancoll.net.listen import Handshakes, Sparing, open_listeners, serve_connections, whose, why_ended
from wancoll.net.proof import NONCE_BYTES, check_first, read_receipt
from wancoll.net.stream import Stream
from wancoll.net.tls import Listening, Tls, TlsFailed
from wancoll.net.wallet import Wallet
from wancoll.peer.config import PeerConfig
from wancoll.peer.control import Control
from wancoll.peer.daemon import Started
from wancoll.relay.switch import Switch
from wancoll.trust.token import parse
from wancoll.wire import messages as m
from wancoll.wire.framing import Decoder, encode

log = structlog.get_logger("wancoll.relay")

_QUEUE_BYTES = 1 << 20  # that wait for one daemon


class Port:
    """The port of a relay. *wallet*: what proves its key; None: all is in clear."""

    def __init__(self, config: PeerConfig, rate: float, wallet: Wallet | None) -> None:
        self._limits, self._wallet = config.limits, wallet
        self._listening = Listening([wallet.key]) if wallet is not None else None
        self.switch = Switch(config.limits, rate)
        self._strangers = Sparing()
        self._handshakes = Handshakes.of_port(config.limits, sealed=wallet is not None)

    def lets_in(self, sock: socket.socket) -> bool:
        """Whether a connection is worth a handshake."""
        return self._handshakes.lets_in(whose(sock))

    async def accept(self, stream: trio.SocketStream) -> None:
        """Handler of the port: whatever arrives, the relay stays up."""
        who = whose(stream.socket)
        ticket: bytes | None = b""  # where it is not done in time
        with self._handshakes.one(who):
            ticket = await self.switch.shown(stream.socket)
        if ticket is not None:
            await self.switch.carry(ticket, stream.socket, who)
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
                        await self.switch.serve(await self._who(connection, who), connection)
                    except (TlsFailed, ProtocolError) as bad:
                        self._strangers.say(log.info, "connection ended", who=who, reason=str(bad))
                        connection.send(encode(m.Bye(str(bad)[:1000])))
                    nursery.cancel_scope.cancel()
        finally:
            connection.close()

    async def _who(self, connection: Stream, who: str) -> str:
        """The daemon at the other end, which has proved it. Raises ProtocolError, TlsFailed: it has not."""
        nonce, first = os.urandom(NONCE_BYTES), None
        decoder: Decoder[m.Signed | m.AtRelay] = Decoder(m.Signed | m.AtRelay, self._limits.handshake_bytes, who)
        with self._handshakes.one(who) as scope:
            await connection.shake_hands()
            if connection.tls is not None:
                connection.send(encode(m.Challenge(nonce)))
            while first is None and (data := await connection.receive()):
                first = next(iter(decoder.feed(data)), None)
        if first is None:
            raise ProtocolError(f"did not say who it is: it {why_ended(scope) if scope.cancelled_caught else 'left'}")
        if isinstance(first, m.AtRelay) and self._wallet is None:
            m.check_protocol(first, who)
            return first.daemon
        if isinstance(first, m.AtRelay) or self._wallet is None:
            raise ProtocolError("proves a key to a relay in clear, or none to one with keys", who=who)
        said = check_first(first, self._wallet.key.public, nonce, m.AtRelay, who=who)
        m.check_protocol(said, who)
        found = read_receipt(first.receipt, first.key, self._wallet.masters)
        if found is None or (found.role, found.name) != ("peer", said.daemon):
            raise ProtocolError(
                "is no daemon that this relay knows", who=said.daemon, expected="a peer's receipt by the same master",
                got="another one, or none", hint="start it with --join and a token of that master",
            )  # fmt: skip
        self._handshakes.know(who)
        return str(said.daemon)


async def serve(
    config: PeerConfig,
    rate: float,
    *,
    stop: trio.Event,
    task_status: trio.TaskStatus[Started] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Run a relay until *stop* is set. Started value: Started. *rate*: bytes per second that it carries; 0: no limit.

    Raises:
        ConfigError: a setting cannot be used, or no master takes this relay.
    """
    listeners = open_listeners(config.listen)
    try:
        wallet = _wallet(config, listeners[0].getsockname()[1])
        name = config.name or (wallet.name if wallet is not None else "")
        name = name or f"relay-{socket.gethostname()[:60]}-{secrets.token_hex(3)}"
        port, answered = Port(config, rate, wallet), trio.Event()
        control = Control(
            config, name, secrets.randbits(63), [], listeners[0],
            on_message=lambda message: None,
            on_connected=answered.set,
            on_lost=lambda reason, *, live: None,
            on_synced=lambda: None,
            beat=m.Heartbeat,
            wallet=wallet,
            relays=True,
        )  # fmt: skip
        with contextlib.nullcontext() if wallet is None else wallet.held(f"process {os.getpid()}"):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(serve_connections, listeners, port.accept, port.lets_in)

                async def talk_to_master() -> None:
                    await control.run()
                    stop.set()

                nursery.start_soon(talk_to_master)
                data = [join_address(*one.getsockname()[:2]) for one in listeners]
                task_status.started(Started(name, "", data, config.master, answered))
                await stop.wait()
                nursery.cancel_scope.cancel()
        if control.refused:
            raise ConfigError("no master takes this relay", who=name, got=control.refused)
    finally:
        for one in listeners:
            one.close()


def _wallet(config: PeerConfig, port: int) -> Wallet | None:
    """The relay's key, and what it is good for; None: it has none, and nothing is encrypted."""
    if not config.join:
        return None
    return Wallet(os.path.abspath(config.state or default_state(f"relay-{port}")), parse(config.join))
