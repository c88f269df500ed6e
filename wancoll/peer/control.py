"""The control connection to the master that leads: kept up, watched by heartbeats, given up after master_grace."""

from __future__ import annotations

import contextlib
import socket
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

import structlog
import trio
from msgspec.structs import replace

from wancoll import resources
from wancoll.errors import ConfigError, ProtocolError
from wancoll.limits import PROTOCOL_VERSION, WITHOUT_END, package_version
from wancoll.local import split_address
from wancoll.net import clock
from wancoll.net.ask import ask
from wancoll.net.contain import contained
from wancoll.net.dial import DialFailed, dial
from wancoll.net.listen import advertised, is_loopback_host
from wancoll.net.stream import Stream
from wancoll.net.threads import in_thread
from wancoll.net.tls import Tls, TlsFailed, WrongKey
from wancoll.net.wallet import Wallet
from wancoll.peer.config import PeerConfig
from wancoll.peer.core.grid import next_on_grid
from wancoll.peer.core.liveness.commit_lease import CommitLease
from wancoll.peer.core.liveness.masters import Masters
from wancoll.peer.links.lanes import offered_congestion_controls
from wancoll.wire import messages as m
from wancoll.wire.framing import Decoder, encode
from wancoll.wire.kept import Kept, counts

log = structlog.get_logger("wancoll.control")

_NOBODY = "; is `wancoll master` running there, and is the port right?"
_CLOCKS = 8  # comparisons with the master's that are kept: the newest


class OnLost(Protocol):
    """See Control's on_lost."""

    def __call__(self, reason: str, *, live: bool) -> None:
        """The connection or the try to make one is over."""


class Control:
    """The daemon's side of the master's protocol.

    Args:
        config: settings of the daemon.
        daemon: its id.
        incarnation: random, fresh at each start.
        ended: incarnations of daemons of this machine whose processes have ended.
        data_socket: the lanes' listener, for the advertised addresses.
        on_message: called with every message of a live connection but Welcome and Pong.
        on_connected: called after each Welcome of a master that knows nothing of this daemon.
        on_lost: called with the reason when a try failed (live=False) or a good connection is gone (live=True).
        on_synced: called once the master has sent all that it knew of this daemon when it was welcomed.
        beat: gives the heartbeat of a number, with what it tells of the members.
        wallet: the daemon's key, and what it is good for; None: all is in clear.
    """

    def __init__(
        self,
        config: PeerConfig,
        daemon: str,
        incarnation: int,
        ended: list[int],
        data_socket: socket.socket,
        on_message: Callable[[m.FromMaster], None],
        on_connected: Callable[[], None],
        on_lost: OnLost,
        on_synced: Callable[[], None],
        beat: Callable[[int], m.Heartbeat],
        wallet: Wallet | None = None,
    ) -> None:
        self._config, self._daemon, self._incarnation = config, daemon, incarnation
        self._ended = ended
        self._masters = Masters(config.master.split(","))
        self._hint = ""  # who leads, in the words of the standby that was asked last
        self._data_socket, self._wallet = data_socket, wallet
        self._others: dict[str, str] = {}  # addresses where another master has answered: its words, if it was the last
        self._on_message, self._on_connected = on_message, on_connected
        self._on_lost, self._on_synced, self._beat = on_lost, on_synced, beat
        self._stream: Stream | None = None
        self.connected = False
        self._session, self._dials = 0, 0  # Welcome.session; Hello.dial
        self._kept: Kept[bytes] = Kept()  # what this session's master was told and has not confirmed
        self._heard = 0  # messages of it that were taken in
        self._silent_tries = 0  # since it was connected last
        self.refused = ""  # why this daemon must not come back
        self.watched = False  # somebody looks at the master's page
        self.clocks: deque[m.Clock] = deque(maxlen=_CLOCKS)  # the master's beside this machine's, by heartbeats
        self._said = 0, 0.0, 0.0  # newest heartbeat: number, when by this machine's clock, by one that runs even
        self.number = 0  # of the session, counted from 1
        self.term = 0  # highest seen
        self.master = 0  # identity of the master that welcomed this daemon last
        self._nonsense = False
        self.lost = trio.Event()  # set while there is no master
        self.lost.set()
        self.addresses: list[str] = []
        self._heard_at = self._welcomed_at = 0.0
        self.commit_lease = CommitLease(clock.awake_or_asleep())
        self.interval = config.limits.heartbeat_interval  # seconds between heartbeats
        self.heartbeat_timeout = config.limits.heartbeat_timeout  # seconds; the master's, once it has welcomed this one

    @property
    def master_address(self) -> str:
        """Address of the master that is connected, or is tried next."""
        return self._masters.address

    @property
    def queued(self) -> int:
        """Bytes that wait to be sent."""
        return self._stream.queued if self._stream is not None else 0

    @property
    def open(self) -> bool:
        """Whether what is said reaches the master that knows the members: now, or once it takes this daemon back."""
        return self.connected or (self._session > 0 and not self._kept.lost)

    def send(self, message: m.FromPeer) -> None:
        """Send if there is a master, or if one may take this daemon back. Else it is dropped: all begins anew then."""
        if not self.open:
            return
        frame = encode(message)
        if counts(message):
            self._kept.add(frame, len(frame))
        if self.connected and self._stream is not None:
            self._stream.send(frame)

    async def flush(self) -> None:
        """Return once what was sent has left, or the connection is gone."""
        if self._stream is not None:
            await self._stream.drain()

    async def run(self) -> None:
        """Task: connect, serve, reconnect, until cancelled."""
        while True:
            self._nonsense, self._hint = False, ""
            reason = await self._serve_once()
            was_connected, self.connected = self.connected, False
            self.lost.set()
            if was_connected:
                log.warning("lost the master", master=self._masters.address, reason=reason)
                self._silent_tries = 0
            elif not self._hint:
                self._silent_tries += 1
                if self._silent_tries & (self._silent_tries - 1) == 0:  # the 1st, 2nd, 4th, 8th, ...
                    log.warning(
                        "no master takes this daemon in",
                        master=self._masters.address,
                        reason=reason,
                        tries=self._silent_tries,
                    )
            good = not self._nonsense or trio.current_time() - self._welcomed_at >= self.heartbeat_timeout
            self._on_lost(reason, live=was_connected and good)
            if self.refused:
                return
            await trio.sleep(self._masters.failed(self._hint))

    async def _serve_once(self) -> str:
        limits, address = self._config.limits, self._masters.address
        patience = self._masters.patience(limits.connect_timeout, soon=self._session > 0)
        self._dials += 1
        stream = None
        if address in self._others:
            self._others[address] = ""  # what it says now counts
        try:
            tls = None if self._wallet is None else Tls(expects=self._wallet.masters)
            if len(self._masters.addresses) > 1 and not self._masters.followed:
                await self._ask_all(patience)
            with trio.fail_after(patience):
                raw = (await dial([address], patience, near_only=self._config.near_only)).socket
                local_host = raw.getsockname()[0]
                sock, most = socket.socket(fileno=raw.detach()), limits.message_bytes * 16
                stream = Stream(sock, f"master at {address}", most, tls=tls)
                await stream.shake_hands()
            self.addresses = advertised(self._config.advertise, self._data_socket, local_host)
            self._stream = stream
            if tls is None:
                self._say_hello(stream)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(stream.write_queue)
                nursery.start_soon(self._heartbeat, stream)
                reason = await self._read(stream)
                nursery.cancel_scope.cancel()
            return reason
        except WrongKey as bad:
            return self._met_another(address, str(bad))
        except DialFailed as bad:
            return f"{bad}{_NOBODY if bad.refused else ''}"
        except (TlsFailed, ConfigError, OSError) as bad:
            return f"{address}: {bad}"
        except trio.TooSlowError:
            return f"{address}: no answer within {patience:.1f} s{_NOBODY}"
        finally:
            self._stream = None
            if stream is not None:
                stream.close()

    def _met_another(self, address: str, reason: str) -> str:
        """Another master answers, which says nothing: anybody may be one. Why it is none.

        Only a newcomer whose token fits none of the masters that it was given ends by it, since most likely they were
        mixed up.
        """
        assert self._wallet is not None
        reason = f"{address} is not the master that the token is of: {reason}"
        if address in self._masters.addresses:
            if address not in self._others:
                log.warning("another master answers, or somebody who plays one", reason=reason)
            self._others[address] = reason
        answers = [self._others.get(one, "") for one in self._masters.addresses]
        if not self._wallet.receipt and all(answers):
            self.refused = "; ".join(answers)
        return reason

    def _say_hello(self, stream: Stream, challenge: m.Challenge | None = None) -> None:
        """Say who this is, and prove it where the master has asked for that."""
        self.commit_lease.said_hello(clock.awake_or_asleep())
        first: m.Hello | m.Signed = self._hello()
        if self._wallet is not None and challenge is not None and stream.tls is not None:
            first = self._wallet.proof(self._daemon).first(stream.tls.key, challenge.nonce, first)
        stream.send(encode(first))

    def _hello(self) -> m.Hello:
        config = self._config
        return m.Hello(
            PROTOCOL_VERSION, self._daemon, self._incarnation, self.addresses, config.lanes, config.site,
            package_version(), config.max_lanes, offered_congestion_controls(config.congestion_control),
            config.measure, self.term, self.master, self._dials, self._session if self.open else 0, self._heard,
            min(config.limits.master_grace, WITHOUT_END), self._ended, 2 * config.workers or resources.cores(),
            [] if config.advertise else self.addresses,  # hints: none where a user has said how to dial it
            bool(config.relay),
        )  # fmt: skip

    async def _ask_all(self, patience: float) -> None:
        """What elects the masters at all addresses. Who does not answer in time is not waited for."""
        proof = self._wallet.proof(self._daemon) if self._wallet is not None else None

        def asked(address: str) -> m.FromMaster | None:
            where, question = split_address(address), m.AskElection(PROTOCOL_VERSION)
            if self._config.near_only and not is_loopback_host(where[0]):
                return None
            answer: m.FromMaster = ask(where, question, m.FromMaster, timeout=patience, who=address, proof=proof)
            return answer

        answers: dict[str, m.Welcome | m.StandsBy] = {}

        async def look(address: str) -> None:
            with contextlib.suppress(ConfigError, ProtocolError, OSError):
                answer = await in_thread(asked, address)
                if isinstance(answer, m.Welcome | m.StandsBy) and answer.elected_by:
                    answers[address] = answer

        for _ in range(2):  # between two answers of the first round one master may have taken over from another
            answers.clear()
            async with trio.open_nursery() as nursery:
                for address in self._masters.addresses:
                    nursery.start_soon(look, address)
            if len({answer.master for answer in answers.values() if isinstance(answer, m.Welcome)}) < 2:
                break
        self._masters.meet(
            {
                address: (answer.elected_by, answer.master if isinstance(answer, m.Welcome) else 0)
                for address, answer in answers.items()
            }
        )

    def _keep(self, wallet: Wallet, admitted: m.Admitted) -> None:
        if admitted.keys != wallet.masters:
            log.info("the master has other keys", keys=[key.hex() for key in admitted.keys])
        try:
            wallet.keep(admitted)
        except OSError as bad:
            log.warning("the receipt cannot be kept for the next start", reason=str(bad))

    async def _read(self, stream: Stream) -> str:
        timeout = self._config.limits.handshake_timeout
        patience = self._masters.patience(timeout, soon=self._session > 0, welcome=True)
        try:
            with trio.move_on_after(patience) as scope:
                with contained("the master", lambda: stream.newest, expected=(ProtocolError,)):
                    return await self._hear(stream, scope)
            if scope.cancelled_caught:
                return f"{stream.who}: no welcome within {patience:.1f} s"
            self._nonsense, self._session = True, 0
            return "what the master said met a bug here"
        except ProtocolError as bad:
            self._session = 0
            self._nonsense = True  # it would do so again: a try that ends so must not start the grace time anew
            return str(bad)

    async def _hear(self, stream: Stream, welcome: trio.CancelScope) -> str:
        """Until the end, and why it is; *welcome* bounds the wait for that."""
        decoder: Decoder[m.FromMaster] = Decoder(m.FromMaster, self._config.limits.message_bytes, stream.who)
        while True:
            data = await stream.receive()
            if not data:
                return f"the master: {stream.ended}"
            for message in decoder.feed(data):
                if isinstance(message, m.Bye):
                    self._session, self._nonsense = 0, True  # it may say so again, too
                    # In clear the master before may be back in a moment, once this one is started as that one was.
                    came_before = self._wallet is None and self.master and welcome.deadline < float("inf")
                    self.refused = message.reason if message.final and not came_before else ""
                    return f"the master said: {message.reason}"
                if isinstance(message, m.StandsBy):
                    self._hint = message.leader
                    return f"{stream.who} stands by; {message.leader or 'nobody'} leads"
                self._heard_at = trio.current_time()
                self._heard += counts(message)
                if isinstance(message, m.Welcome):
                    if message.term < self.term:  # R6
                        return f"an old master answers: its term is {message.term}, {self.term} was seen"
                    if refusal := self._masters.refuses(message.elected_by):
                        self.refused = "" if self._masters.followed else refusal
                        return refusal
                    welcome.deadline, self._welcomed_at = float("inf"), self._heard_at
                    self.commit_lease.answered()
                    if message.master != self.master:
                        self.clocks.clear()
                    self.term, self.master = message.term, message.master
                    self.interval = message.heartbeat_interval
                    self.heartbeat_timeout = message.heartbeat_timeout
                    self._masters.welcomed()
                    self._others.clear()
                    if not message.resumed:
                        self._begin(message)
                    elif not self._go_on(message, stream):
                        return "the master has lost count of what was said"
                elif isinstance(message, m.Pong):
                    self.watched = message.watched
                    if message.number:
                        self._compare_clocks(message)
                        self.commit_lease.answered(message.number)
                        self._kept.confirmed(message.heard)
                    else:  # whatever the master had to say at the start came before this
                        self._on_synced()
                elif isinstance(message, m.Admitted) and self._wallet is not None:
                    self._keep(self._wallet, message)
                elif isinstance(message, m.Challenge) and self._wallet is not None and not self.connected:
                    self._say_hello(stream, message)
                elif self.connected:
                    self._on_message(message)

    def _compare_clocks(self, pong: m.Pong) -> None:
        """The master took the heartbeat in between when it was said and now."""
        number, at, said = self._said
        if pong.number == number and pong.clock:
            half = (time.monotonic() - said) / 2
            self.clocks.append(m.Clock(pong.clock - at - half, half, f"{self.master:x}"))

    def _begin(self, welcome: m.Welcome) -> None:
        """The master knows nothing of this daemon: name all members."""
        self._session, self._kept, self._heard = welcome.session, Kept(), 0
        self.connected, self.lost = True, trio.Event()
        self.number += 1
        self._on_connected()
        self.send(m.Heartbeat(0))  # all members have been named

    def _go_on(self, welcome: m.Welcome, stream: Stream) -> bool:
        """The master has taken this daemon back: say again what was lost on the way. False: that is not known here."""
        again = self._kept.again(welcome.heard)
        if again is None:
            self._session = 0
            return False
        log.info("the master goes on with this daemon", again=len(again))
        for frame in again:
            stream.send(frame)
        self.connected, self.lost = True, trio.Event()
        return True

    async def _heartbeat(self, stream: Stream) -> None:
        number = 0
        self._heard_at = trio.current_time()
        while True:
            await trio.sleep_until(next_on_grid(trio.current_time(), self.interval))
            if not self.connected:
                continue
            silent = trio.current_time() - self._heard_at
            if silent > max(self.heartbeat_timeout, 2 * self.interval):
                stream.ended = f"it was silent for {silent:.1f} s"
                stream.end()  # who reads closes it
                return
            number += 1
            self.commit_lease.said(number, clock.awake_or_asleep())
            self._said = number, time.time(), time.monotonic()
            self.send(replace(self._beat(number), heard=self._heard))
