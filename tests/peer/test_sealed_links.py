"""Lanes over TLS: who gets in, who does not, and what each end is told."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import trio
import trio.testing
from msgspec.structs import replace
from structlog.testing import capture_logs

from tests.keyed import admit, admitted, token_of
from tests.peer.test_hub import LANES, ends_of
from tests.peer.test_member import KEY
from wancoll.errors import ProtocolError
from wancoll.limits import DEFAULT, PROTOCOL_VERSION
from wancoll.local import join_address
from wancoll.native.engine import LaneDown
from wancoll.net import proof
from wancoll.net.dial import DialFailed, read_frame
from wancoll.net.proof import Proof, make_receipt
from wancoll.net.stream import Stream
from wancoll.net.tls import Listening, Tls
from wancoll.net.wallet import Wallet
from wancoll.peer.core import links as core
from wancoll.peer.links import connections
from wancoll.peer.links.connections import Connection, Connector
from wancoll.peer.links.lanes import greet
from wancoll.peer.links.probes import probe
from wancoll.relay.switch import Switch
from wancoll.trust.identity import Identity
from wancoll.trust.keys import Key
from wancoll.wire import messages as m
from wancoll.wire.framing import Decoder, encode

MASTER = Key.new()


@pytest.fixture
def d1(tmp_path: Path) -> Wallet:
    return admitted(tmp_path, "d1", MASTER)


@pytest.fixture
def d2(tmp_path: Path) -> Wallet:
    return admitted(tmp_path, "d2", MASTER)


async def test_notes_pass_over_a_sealed_link_and_it_is_made_anew(d1: Wallet, d2: Wallet) -> None:
    async with ends_of(d1, d2) as (a, b):
        for _ in range(2):
            for end in (a, b):
                await end.hears(core.LinksUp)
            for i in range(300):  # more than one record holds
                a.hub.send_note(a.owner, 2, b"%d" % i)
                if i % 50 == 49:
                    for j in range(i - 49, i + 1):
                        assert await b.hears(core.Noted) == core.Noted(b.owner, 1, b"%d" % j)
            b.hub.send_note(b.owner, 1, b"and back")
            assert (await a.hears(core.Noted)).note == b"and back"
            a.hub.lane_down(LaneDown(a.link.number, LANES, 0, "it broke"))
            for end in (a, b):
                await end.hears(core.LinkLost)


async def test_a_burst_that_has_seen_enough_is_no_handshake_that_failed(d1: Wallet, d2: Wallet) -> None:
    """It ends in the middle of what it announced, and takes back what has not left."""
    with capture_logs() as said:
        async with ends_of(d1, d2) as (_, b):
            connection = await Connector(d1).dial([b.address], d2.key.public, 5.0)
            with closing(connection):
                connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                await connection.say(m.ProbeHello(PROTOCOL_VERSION, "d2", 1 << 20))
                await connection.send_all(bytes(1000))
                await trio.testing.wait_all_tasks_blocked(0.05)  # it is answered
            await trio.testing.wait_all_tasks_blocked(0.05)
    assert [one for one in said if "handshake" in one["event"]] == []


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("another key", "it has the key|another daemon answers there; is that address its own"),
        ("not a peer's", "no master of this daemon has given you a peer's receipt"),
        ("another master's", "no master of this daemon has given you a peer's receipt"),
        ("no receipt", "no master of this daemon has given you a peer's receipt"),
        ("in clear", "does not speak TLS|speaks TLS only"),
    ],
)
async def test_who_is_not_the_epochs_is_refused_and_both_ends_say_why(
    d1: Wallet, d2: Wallet, tmp_path: Path, what: str, reason: str
) -> None:
    other: Wallet | None = d2
    match what:
        case "not a peer's":
            admit(d2, "d2", MASTER, role="observer")
        case "another master's":
            admit(d2, "d2", Key.new())
        case "no receipt":
            other = Wallet(str(tmp_path / "new"), token_of(MASTER))
        case "in clear":
            other = None
    keys = (d1.key.public, Key.new().public) if what == "another key" else ()
    async with ends_of(d1, other, keys=keys) as (a, b):
        seen = ""
        while not seen:  # each dials in turn, and each has its own word for it
            await trio.sleep(0.02)
            said = [end.link.reason for end in (a, b) if end.link.reason and "has not dialled" not in end.link.reason]
            seen = next((one for one in said if any(word in one for word in reason.split("|"))), "")
        assert not a.link.up
        assert not b.link.up


@pytest.mark.parametrize(
    ("openssl", "ours"),
    [
        ("TLS: wrong version number", "it does not speak TLS: that daemon was started in clear"),
        ("TLS: packet length too long", "it does not speak TLS: that daemon was started in clear"),
        ("TLS: http request", "it does not speak TLS: that daemon was started in clear"),
        ("cut off: the connection ended without a close notify", "the connection was cut: that daemon has ended"),
        ("Connection refused", "Connection refused"),
    ],
)
def test_what_tls_says_between_daemons_says_what_to_do(openssl: str, ours: str) -> None:
    told = connections._explained(OSError(5, openssl))
    assert told.startswith(ours)
    assert told == ours or told.endswith(f" ({openssl})")


async def test_ends_of_a_link_may_have_receipts_by_two_keys_of_their_master_until_one_is_dropped(
    d1: Wallet, d2: Wallet
) -> None:
    new = Key.new()
    admit(d1, "d1", MASTER, new)  # d2 has not heard of it yet
    async with ends_of(d1, d2) as (a, b):
        for wallet in (d2, d1, None):
            for end in (a, b):
                await end.hears(core.LinksUp)
            a.hub.lane_down(LaneDown(a.link.number, LANES, 0, "it broke"))
            for end in (a, b):
                await end.hears(core.LinkLost)
            if wallet is not None:  # first all have both, then the new one alone
                admit(wallet, f"d{1 + (wallet is d2)}", MASTER, new)
                admit(wallet, f"d{1 + (wallet is d2)}", *((MASTER, new) if wallet is d2 else (new,)))
    believed = Connector(admitted(Path(d2.folder).parent, "d3", MASTER))  # by the old one alone
    async with Door(d1).open() as door:
        connection = await believed.dial([door.address], d1.key.public, 5.0)
        with closing(connection), pytest.raises(DialFailed, match="no master of this daemon has given you"):
            await greet(connection, m.ProbeHello(PROTOCOL_VERSION, "d1"), "d1")


async def test_a_live_link_is_replaced_only_by_the_daemon_whose_member_it_leads_to(
    d1: Wallet, d2: Wallet, tmp_path: Path
) -> None:
    async with ends_of(d1, d2) as (a, b):
        for end in (a, b):
            await end.hears(core.LinksUp)
        number, epoch = a.link.number, a.owner.epoch
        assert epoch is not None
        plan = core.wire_plan(epoch)
        hello = m.LaneHello(PROTOCOL_VERSION, "g", KEY, 2, 1, core.COLLECTIVES, plan, 0, 1000)
        thief = admitted(tmp_path, "d2-too", MASTER)  # a peer that was admitted, and was a member, or never
        connection = await Connector(thief).dial([a.address], d1.key.public, 5.0)
        says = f"a member of d2, whose key is {d2.key.public.hex()}; yours is {thief.key.public.hex()}"
        with closing(connection), pytest.raises(DialFailed, match=says):
            await greet(connection, hello, "a")
        with closing(Connection(await _tcp(a.address))) as plain:
            await plain.say(hello)
            answer = await read_frame(plain, m.LaneAnswer, who="a")
            assert isinstance(answer, m.LaneRefused)
            assert "speaks TLS only" in answer.reason
        assert (a.link.up, a.link.number) == (True, number)


async def _tcp(address: str) -> trio.SocketStream:
    host, port = address.rsplit(":", 1)
    return await trio.open_tcp_stream(host, int(port))


async def test_probes_prove_who_answers(d1: Wallet, d2: Wallet) -> None:
    async with Door(d1).open() as door:
        connector = Connector(d2)
        assert await probe(connector, [door.address], "d1", d1.key.public, DEFAULT) is None
        for key, words in ((d2.key.public, d2.key.public.hex()), (b"", "any that the master knows")):
            failed = await probe(connector, [door.address], "d1", key, DEFAULT)
            assert f"it has the key {d1.key.public.hex()}, and not {words}" in str(failed)


# ---- attacks --------------------------------------------------------------------------------------------

WELCOME = m.LaneWelcome("d1")
HELLO = m.LaneHello(PROTOCOL_VERSION, "g", KEY, 2, 1, core.COLLECTIVES, 0, 0, 1)


class Door:
    """A daemon's data port, that says whom it let in, and why it did not."""

    def __init__(self, wallet: Wallet) -> None:
        self._connector = Connector(wallet)
        self.let_in: list[tuple[bytes | None, m.LaneFirst]] = []
        self.refused: list[str] = []
        self.address = ""

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[Door]:
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        self.address = join_address(*listeners[0].socket.getsockname()[:2])
        with trio.fail_after(30):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(trio.serve_listeners, self._accept, listeners)
                yield self
                nursery.cancel_scope.cancel()

    async def _accept(self, stream: trio.SocketStream) -> None:
        try:
            connection, first = await self._connector.accept(stream, "somebody")
            self.let_in.append((connection.key, first))
            await connection.say(WELCOME)
            connection.close()
        except (DialFailed, ProtocolError, trio.BrokenResourceError) as bad:
            self.refused.append(str(bad))
        finally:
            stream.socket.close()


class Stranger:
    """A connection to a door, by hand.

    Attributes:
        nonce: of the challenge.
    """

    def __init__(self, stream: Stream, nonce: bytes) -> None:
        self._stream, self.nonce = stream, nonce

    @classmethod
    async def dial(cls, door: Door, key: bytes) -> Stranger:
        raw = await _tcp(door.address)
        stream = Stream(socket.socket(fileno=raw.socket.detach()), "door", 1 << 20, tls=Tls(expects=[key]))
        await stream.shake_hands()
        [challenge] = Decoder[Any](m.Challenge, 1000).feed(await stream.receive())
        return cls(stream, challenge.nonce)

    async def say(self, first: m.Signed | bytes) -> m.LaneAnswer | None:
        """What the door answers; None: nothing."""
        self._stream.send(first if isinstance(first, bytes) else encode(first))
        answers = Decoder[Any](m.LaneAnswer, 1000).feed(await self._stream.receive())
        self._stream.close()
        return answers[0] if answers else None


async def test_who_has_a_receipt_is_let_in_once_for_what_it_signed(d1: Wallet, d2: Wallet) -> None:
    async with Door(d1).open() as door:
        stranger, later = [await Stranger.dial(door, d1.key.public) for _ in range(2)]
        first = Proof(d2.key, (), d2.receipt).first(d1.key.public, stranger.nonce, HELLO)
        assert await stranger.say(first) == WELCOME
        assert await later.say(first) is None, "the same again, by who has listened to it at its end"
        assert door.let_in == [(d2.key.public, HELLO)]
        assert "somebody: has not signed its first message with its key" in door.refused[0]


class Case(NamedTuple):
    """A proof that is good, and what there is to make another one of it."""

    good: m.Signed
    acceptor: bytes
    nonce: bytes
    peer: Wallet
    stranger: Key

    def anew(self, key: Key, receipt: bytes, token: str = "", purpose: str = "lane", **wrong: bytes) -> m.Signed:
        """The same message, proved by this."""
        made = replace(self.good, key=key.public, receipt=receipt, token=token)
        text = proof._text(made, wrong.get("acceptor", self.acceptor), wrong.get("nonce", self.nonce), purpose)
        return replace(made, signature=key.sign(text))

    def strange(self, receipt: bytes, token: str = "") -> m.Signed:
        """The stranger's."""
        return self.anew(self.stranger, receipt, token)

    def peers(self, **wrong: Any) -> m.Signed:
        """The peer's, but for what is *wrong*."""
        return self.anew(self.peer.key, self.peer.receipt, **wrong)


NO_PEER = m.LaneRefused(connections._NO_PEER)


@pytest.mark.parametrize(
    ("wrong", "answer"),
    [
        (lambda case: replace(case.good, body=case.good.body.replace(b"\xa1g", b"\xa1h", 1)), None),
        (lambda case: replace(case.good, key=case.stranger.public), None),
        (lambda case: replace(case.good, receipt=b""), None),
        (lambda case: case.strange(case.peer.receipt), NO_PEER),  # of another key
        (lambda case: case.strange(b""), NO_PEER),
        (lambda case: case.strange(receipt_of(case.stranger, case.stranger)), NO_PEER),  # signed by itself
        (lambda case: case.strange(receipt_of(Key.new(), case.stranger)), NO_PEER),  # by another master
        (lambda case: case.strange(receipt_of(MASTER, case.stranger, "observer")), NO_PEER),
        (lambda case: case.strange(b"", token_of(MASTER).shown), NO_PEER),  # tokens are for masters
        (lambda case: case.peers(purpose="probe"), None),
        (lambda case: case.peers(acceptor=case.peer.key.public), None),
        (lambda case: case.peers(nonce=bytes(32)), None),
        (lambda case: encode(case.good)[:-1] + b"\xc1", None),
        (lambda case: encode(HELLO), None),  # no proof at all
        (lambda case: encode(m.Challenge(bytes(32))), None),
        (lambda case: b"\0\1\0\0" + bytes(100), None),
    ],
)
async def test_whoever_proves_less_is_not_let_in(
    d1: Wallet, d2: Wallet, wrong: Callable[[Case], m.Signed | bytes], answer: m.LaneRefused | None
) -> None:
    async with Door(d1).open() as door:
        for is_wrong in (True, False):
            stranger = await Stranger.dial(door, d1.key.public)
            good = Proof(d2.key, (), d2.receipt).first(d1.key.public, stranger.nonce, HELLO)
            case = Case(good, d1.key.public, stranger.nonce, d2, Key.new())
            assert case.peers() == good
            assert await stranger.say(wrong(case) if is_wrong else good) == (answer if is_wrong else WELCOME)
        assert (len(door.let_in), len(door.refused)) == (1, 1)


def receipt_of(master: Key, owner: Key, role: Any = "peer") -> bytes:
    return make_receipt([master], Identity("d2", role, (), "", owner.public))


@pytest.mark.parametrize("target", ["another", "itself"])
async def test_what_a_daemon_signs_for_one_that_it_dials_opens_no_other_door(
    d1: Wallet, d2: Wallet, tmp_path: Path, target: str
) -> None:
    """A member in the middle hands it the challenge of another daemon, or its own, and passes the answer on."""
    d3 = admitted(tmp_path, "d3", MASTER)
    attacked = d1 if target == "another" else d2
    async with Door(attacked).open() as door:
        relayed = await Stranger.dial(door, attacked.key.public)
        near, far = socket.socketpair()
        middle = Stream(far, "d2", 1 << 20, tls=Tls(Listening([d3.key])))
        answers: list[m.LaneAnswer | None] = []

        async def relay() -> None:
            await middle.shake_hands()
            middle.send(encode(m.Challenge(relayed.nonce)))
            answers.append(await relayed.say(await middle.receive()))
            middle.close()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(relay)
            connector = Connector(d2)
            connector.open = lambda *_: _ready(near)  # type: ignore[method-assign]
            connection = await connector.dial(["d3:1"], d3.key.public, 5.0)
            with closing(connection), pytest.raises(DialFailed, match="the connection was cut"):
                await greet(connection, HELLO, "d3:1")
        assert (answers, door.let_in) == ([None], [])
        assert "has not signed" in door.refused[0]


async def _ready(sock: socket.socket) -> trio.SocketStream:
    return trio.SocketStream(trio.socket.from_stdlib_socket(sock))


@pytest.mark.parametrize(
    ("says", "why"),
    [
        (encode(m.Challenge(bytes(32))), "it does not speak TLS"),
        (encode(m.LaneWelcome("d1")), "it does not speak TLS"),
        (b"\x16\x03\x03", "closed|cut|ended"),
    ],
)
async def test_who_answers_in_clear_or_breaks_off_is_told_nothing(
    d1: Wallet, d2: Wallet, says: bytes, why: str
) -> None:
    near, far = socket.socketpair()
    connector = Connector(d2)
    connector.open = lambda *_: _ready(near)  # type: ignore[method-assign]
    far.send(says)
    far.shutdown(socket.SHUT_WR)
    with far, trio.fail_after(20):
        with pytest.raises(DialFailed, match=rf"^d1:1: .*({why})"):
            await connector.dial(["d1:1"], d1.key.public, 5.0)
        assert d2.key.public not in far.recv(1 << 16)


async def test_a_daemon_is_reached_through_a_member_that_relays_by_its_own_name_alone(d1: Wallet, d2: Wallet) -> None:
    async with ends_of(d1, d2) as (_, b):
        for wallet, name, relays, expected in (
            (d1, "d1", True, m.RelayBeat()),
            (d1, "d2", True, m.Bye(connections._NO_PEER)),
            (d1, "d1", False, m.Bye("this daemon is no relay")),
        ):
            b.hub.switch = Switch(DEFAULT) if relays else None
            connection = await Connector(wallet).dial([b.address], d2.key.public, 5.0)
            with closing(connection):
                await connection.say(m.AtRelay(PROTOCOL_VERSION, name))
                assert await read_frame(connection, m.FromRelay | m.Bye, who="it") == expected
