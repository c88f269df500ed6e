"""A daemon's key, its receipt, and its masters: no file, and nobody without the masters' key, ends a daemon."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import structlog
import trio

from tests.full_disk import full_disk
from tests.keyed import TOKEN, admit, admitted, token_of
from wancoll.errors import ConfigError, ProtocolError
from wancoll.limits import PROTOCOL_VERSION
from wancoll.local import join_address
from wancoll.net.proof import check_first, make_receipt, read_receipt
from wancoll.net.stream import Stream
from wancoll.net.tls import Listening, Tls, TlsFailed
from wancoll.net.wallet import Wallet
from wancoll.peer.config import PeerConfig
from wancoll.peer.control import Control
from wancoll.peer.core.liveness import masters
from wancoll.trust.identity import Identity
from wancoll.trust.keys import Key
from wancoll.trust.token import Token
from wancoll.wire import messages as m
from wancoll.wire.framing import Decoder, encode

WELCOME = m.Welcome(PROTOCOL_VERSION, 1, 0.02, 60.0, session=7)


async def until(condition: Callable[[], object]) -> None:
    while not condition():  # noqa: ASYNC110 - of other tasks
        await trio.sleep(0.001)


# ---- the folder ---------------------------------------------------------------------------------------


def test_what_a_master_told_is_there_at_the_next_start(tmp_path: Path) -> None:
    key, newer = Key.new(), Key.new()
    wallet = Wallet(str(tmp_path / "d"), token_of(key))
    assert (wallet.masters, wallet.receipt, wallet.name) == ([key.public], b"", "")
    proof = wallet.proof("d")
    assert (proof.acceptors, proof.name, proof.token) == ((key.public,), "d", token_of(key).shown)
    admit(wallet, "d", key, newer)
    for again in (wallet, Wallet(wallet.folder, token_of(key)), Wallet(wallet.folder, None)):
        assert (again.masters, again.name) == ([key.public, newer.public], "d")
        assert again.key.public == wallet.key.public
        who = Identity("d", "peer", (), TOKEN, wallet.key.public)
        assert read_receipt(again.receipt, wallet.key.public, [newer.public]) == who
    assert sorted(os.listdir(wallet.folder)) == ["admitted", "key"]
    for file in ("admitted", "key"):
        assert os.stat(f"{wallet.folder}/{file}").st_mode & 0o777 == 0o600
    with pytest.raises(ProtocolError, match="is a receipt for another key"):
        admitted(tmp_path, "e", key).keep(m.Admitted(wallet.receipt, [key.public]))


def test_a_token_of_another_master_makes_a_receipt_worth_nothing_and_a_newer_one_does_not(tmp_path: Path) -> None:
    key, other = Key.new(), Key.new()
    folder = admitted(tmp_path, "d", key).folder
    assert Wallet(folder, token_of(other)).masters == [key.public], "the token of before, whose key was replaced since"
    newer = Wallet(folder, Token(key.public, "new1", "s" * 43, "h:1"))
    assert newer.name == "d"
    wallet = Wallet(folder, Token(other.public, "new1", "s" * 43, "h:1"))
    assert (wallet.masters, wallet.receipt, wallet.name) == ([other.public], b"", "")


def test_a_receipt_that_is_damaged_anywhere_is_none_or_not_good(tmp_path: Path) -> None:
    """Never an error, and never somebody else's."""
    key = Key.new()
    wallet = admitted(tmp_path, "d", key)
    path, good = Path(wallet.folder) / "admitted", (Path(wallet.folder) / "admitted").read_bytes()
    for at in range(len(good)):
        path.write_bytes(good[:at] + bytes([good[at] ^ 7]) + good[at + 1 :])
        found = Wallet(wallet.folder, token_of(key))
        who = read_receipt(found.receipt, wallet.key.public, [key.public])
        assert who is None or found.masters != [key.public], at
    for length in (0, 1, len(good) - 1):
        path.write_bytes(good[:length])
        assert Wallet(wallet.folder, token_of(key)).receipt == b""


def test_on_a_full_disk_a_receipt_is_good_until_the_next_start(tmp_path: Path) -> None:
    key, newer = Key.new(), Key.new()
    wallet = admitted(tmp_path, "d", key)
    with full_disk(), pytest.raises(OSError, match=f"File too large: '{wallet.folder}/admitted"):
        admit(wallet, "d", key, newer)
    assert wallet.masters == [key.public, newer.public]
    assert Wallet(wallet.folder, token_of(key)).masters == [key.public]
    fresh = Wallet(str(tmp_path / "e"), token_of(key))
    with full_disk(), pytest.raises(ConfigError, match=r"cannot be written to.*choose another --state"):
        fresh.key.sign(b"")


# ---- masters that are played ----------------------------------------------------------------------------


class Daemon:
    """A control connection, and what it says."""

    def __init__(self, addresses: list[str], wallet: Wallet) -> None:
        self.beats, self.lost = 0, list[str]()
        self._lanes = socket.create_server(("127.0.0.1", 0))
        self.control = Control(
            PeerConfig(master=",".join(addresses), join="x"), "d", 1, [], self._lanes, self._no, self._no,
            self._on_lost, self._no, self._beat, wallet,
        )  # fmt: skip

    def _no(self, *_: object) -> None: ...

    def _on_lost(self, reason: str, *, live: bool) -> None:
        self.lost.append(f"live: {reason}" if live else reason)

    def _beat(self, number: int) -> m.Heartbeat:
        self.beats += 1
        return m.Heartbeat(number)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Daemon]:
        with self._lanes, trio.fail_after(50):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.control.run)
                yield self
                nursery.cancel_scope.cancel()


class Master:
    """A master that has *keys*, challenges whoever comes, checks the proof, and says what a test tells it to.

    Attributes:
        says: to the next ones, after their proof; bytes go out as they are, and b"" ends the connection.
        firsts: what came: proofs, and the messages that they hold.
        refused: why proofs were.
    """

    def __init__(self, *keys: Key) -> None:
        self.keys = keys
        self.says: list[m.FromMaster | bytes] = [WELCOME]
        self.firsts: list[tuple[m.Signed, Any]] = []
        self.refused: list[str] = []
        self.streams: list[Stream] = []
        self.address = ""

    async def serve(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        self.address = join_address(*listeners[0].socket.getsockname()[:2])
        task_status.started()
        await trio.serve_listeners(self._accept, listeners)

    def admits(self, daemon: m.Signed, *keys: Key) -> m.Admitted:
        """What it says to whom it has admitted as d, with these keys; none: its own."""
        receipt = make_receipt(keys or self.keys, Identity("d", "peer", (), TOKEN, daemon.key))
        return m.Admitted(receipt, [key.public for key in keys or self.keys])

    async def _accept(self, raw: trio.SocketStream) -> None:
        stream = Stream(socket.socket(fileno=raw.socket.detach()), "d", 1 << 20, tls=Tls(Listening(self.keys)))
        self.streams.append(stream)
        try:
            with contextlib.suppress(TlsFailed):
                await stream.shake_hands()
                await self._talk(stream)
        finally:
            stream.close()

    async def _talk(self, stream: Stream) -> None:
        assert stream.tls is not None
        nonce = os.urandom(32)
        stream.send(encode(m.Challenge(nonce)))
        decoder = Decoder[Any](m.SaidToMaster, 1 << 20)
        while data := await stream.receive():
            for message in decoder.feed(data):
                if isinstance(message, m.Signed):
                    try:
                        first = check_first(message, stream.tls.key, nonce, m.FromPeer)
                    except ProtocolError as bad:
                        self.refused.append(str(bad))
                        return
                    self.firsts.append((message, first))
                    for one in self.says:
                        stream.send(one if isinstance(one, bytes) else encode(one))
                        if one == b"":
                            return


@contextlib.asynccontextmanager
async def playing(*made: Any) -> AsyncIterator[None]:
    async with trio.open_nursery() as nursery:
        for one in made:
            await nursery.start(one.serve)
        yield
        nursery.cancel_scope.cancel()


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masters, "LONGEST_PAUSE", 0.02)


async def test_a_newcomer_shows_its_token_and_its_receipt_from_then_on(tmp_path: Path) -> None:
    key = Key.new()
    master, wallet = Master(key), Wallet(str(tmp_path / "d"), token_of(key))
    async with playing(master), Daemon([master.address], wallet).running() as daemon:
        await until(lambda: daemon.control.connected)
        [(signed, hello)] = master.firsts
        assert (signed.key, signed.name, signed.token, signed.receipt) == (
            wallet.key.public, "d", token_of(key).shown, b"",
        )  # fmt: skip
        assert isinstance(hello, m.Hello)
        told = master.admits(signed)
        master.streams[-1].send(encode(told))
        await until(lambda: wallet.receipt)
        assert (wallet.receipt, wallet.masters) == (told.receipt, [key.public])
        master.streams[-1].close()
        await until(lambda: len(master.firsts) > 1 and daemon.control.connected)
        signed, hello = master.firsts[1]
        assert (signed.receipt, signed.name, hello.session, hello.heard) == (told.receipt, "d", 7, 0)
    assert Wallet(wallet.folder, token_of(key)).receipt == told.receipt


async def test_a_daemon_follows_its_masters_new_key_and_never_the_one_that_was_dropped(tmp_path: Path) -> None:
    old, new = Key.new(), Key.new()
    master, wallet = Master(old, new), admitted(tmp_path, "d", old)
    async with playing(master), Daemon([master.address], wallet).running() as daemon:
        await until(lambda: daemon.control.connected)
        assert master.streams[-1].tls is not None
        assert master.streams[-1].tls.key == old.public, "it does not know the other one yet"
        for keys, shown in (((old, new), new), ((new,), new)):
            told = master.admits(master.firsts[-1][0], *keys)
            master.streams[-1].send(encode(told))
            await until(lambda told=told: wallet.receipt == told.receipt)
            count = len(master.firsts)
            master.streams[-1].close()
            await until(lambda count=count: len(master.firsts) > count and daemon.control.connected)
            assert master.streams[-1].tls.key == shown.public
        master.keys = (old,)
        tries = len(daemon.lost)
        master.streams[-1].close()
        await until(lambda: len(daemon.lost) > tries + 2)
        assert f"it has the key {old.public.hex()}, and not {new.public.hex()}" in daemon.lost[-1]
        assert not daemon.control.refused, "it was admitted: whoever plays a master there does not end it"
    assert Wallet(wallet.folder, token_of(old)).masters == [new.public], "its token is the one of before"


async def test_a_folder_that_cannot_be_written_to_ends_nothing(tmp_path: Path) -> None:
    key = Key.new()
    master, wallet = Master(key), Wallet(str(tmp_path / "d"), token_of(key))
    with structlog.testing.capture_logs() as lines:
        async with playing(master), Daemon([master.address], wallet).running() as daemon:
            await until(lambda: daemon.control.connected)
            os.mkdir(f"{wallet.folder}/admitted")  # root may write anywhere
            told = master.admits(master.firsts[0][0])
            master.streams[-1].send(encode(told))
            await until(lambda: wallet.receipt == told.receipt)
            beats = daemon.beats
            await until(lambda: daemon.beats > beats + 2)
            assert (daemon.control.connected, daemon.lost) == (True, [])
    [line] = [one for one in lines if one["event"] == "the receipt cannot be kept for the next start"]
    assert "Is a directory" in line["reason"]


@pytest.mark.parametrize("newcomer", [True, False])
@pytest.mark.parametrize("final", [True, False])
async def test_its_own_master_may_send_a_daemon_away_before_and_after_the_challenge(
    tmp_path: Path, *, newcomer: bool, final: bool
) -> None:
    key = Key.new()
    wallet = Wallet(str(tmp_path / "d"), token_of(key)) if newcomer else admitted(tmp_path, "d", key)
    master = Master(key)
    master.says = [m.Bye("token k3v9: is revoked", final)]
    async with playing(master), Daemon([master.address], wallet).running() as daemon:
        said = "the master said: token k3v9: is revoked"
        await until(lambda: daemon.lost.count(said) > (0 if final else 2))
        assert daemon.control.refused == ("token k3v9: is revoked" if final else "")


async def test_a_master_of_another_version_says_so_without_a_challenge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = Key.new()
    master = Master(key)

    async def talk(stream: Stream) -> None:
        stream.send(encode(m.Bye("speaks another version", True)))
        await stream.receive()

    monkeypatch.setattr(master, "_talk", talk)
    wallet = Wallet(str(tmp_path / "d"), token_of(key))
    async with playing(master), Daemon([master.address], wallet).running() as daemon:
        await until(lambda: daemon.control.refused)
        assert daemon.control.refused == "speaks another version"


@pytest.mark.parametrize("cut", [1, 3, 20])
async def test_a_challenge_that_is_cut_is_a_loss_like_any_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut: int
) -> None:
    key = Key.new()
    master, wallet, really = Master(key), Wallet(str(tmp_path / "d"), token_of(key)), Master._talk
    cuts = [cut]

    async def talk(stream: Stream) -> None:
        if cuts:
            stream.send(encode(m.Challenge(bytes(32)))[: cuts.pop()])
        else:
            await really(master, stream)

    monkeypatch.setattr(master, "_talk", talk)
    async with playing(master), Daemon([master.address], wallet).running() as daemon:
        await until(lambda: daemon.control.connected)
        assert len(daemon.lost) == 1
        assert "the connection was closed by the other end" in daemon.lost[0]


async def test_what_was_signed_for_a_master_is_good_at_no_other(tmp_path: Path) -> None:
    """Another one, which a daemon has believed, hands it the challenge of the first, and that one its answer."""
    real, other = Key.new(), Key.new()
    master, middle, wallet = Master(real), Master(other), admitted(tmp_path, "d", other)

    async def talk(stream: Stream) -> None:
        host, port = master.address.split(":")
        raw = await trio.open_tcp_stream(host, int(port))
        far = Stream(socket.socket(fileno=raw.socket.detach()), "m", 1 << 20, tls=Tls(expects=[real.public]))
        await far.shake_hands()
        stream.send(await far.receive())
        far.send(await stream.receive())
        assert await far.receive() == b""
        far.close()

    middle._talk = talk  # type: ignore[method-assign]
    async with playing(master, middle), Daemon([middle.address], wallet).running():
        await until(lambda: master.refused)
    assert "has not signed its first message with its key" in master.refused[0]
    assert master.firsts == []


# ---- whoever answers ----------------------------------------------------------------------------------


class Rogue:
    """Answers at an address, and has no key of anybody's: one answer after the other, and the first again.

    Args:
        answers: that it gives over TLS; bytes: at once, without TLS.
    """

    def __init__(self, *answers: m.FromMaster | bytes) -> None:
        self.key = Key.new()
        self.answers: list[m.FromMaster | bytes] = [*(answers or (m.Challenge(bytes(32)),))]
        self.given, self.address = 0, ""
        self.heard = b""

    async def serve(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        self.address = join_address(*listeners[0].socket.getsockname()[:2])
        task_status.started()
        await trio.serve_listeners(self._accept, listeners)

    async def _accept(self, stream: trio.SocketStream) -> None:
        answer = self.answers[self.given % len(self.answers)]
        with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            if isinstance(answer, bytes):
                self.heard += await stream.receive_some()
                self.given += 1
                await stream.send_all(answer)
            else:
                self.given += 1
                tls = trio.SSLStream(stream, Listening([self.key]).context, server_side=True, https_compatible=True)
                await tls.send_all(encode(answer))
                self.heard += await tls.receive_some()
        await trio.aclose_forcefully(stream)


@pytest.mark.parametrize("came", [True, False])
async def test_nobody_without_the_masters_key_ends_a_daemon_or_hears_of_its_token(tmp_path: Path, came: bool) -> None:
    key, answers = Key.new(), list[m.FromMaster | bytes]()
    wallet = admitted(tmp_path, "d", key) if came else Wallet(str(tmp_path / "d"), token_of(key))
    if came:  # a newcomer ends by them
        answers = [
            m.Challenge(bytes(32)),
            m.Bye("go away", True),
            m.StandsBy("127.0.0.1:9", 7),
            m.Admitted(b"", [bytes(32)]),
            WELCOME,
        ]
    answers += [
        encode(m.Challenge(bytes(32))),
        encode(m.Bye("go away", True)),
        encode(WELCOME),
        b"\x15\x03\x03\0\2\2\x28",  # a fatal alert, handshake_failure
        b"\x15\x03\x03\0\2\2\x30",  # unknown_ca
        b"HTTP/1.1 200 OK\r\n\r\n",
    ]
    rogue = Rogue(*answers)
    with structlog.testing.capture_logs() as lines:
        async with playing(rogue), Daemon([rogue.address], wallet).running() as daemon:
            await until(lambda: rogue.given > 2 * len(answers))
            assert daemon.control.refused == ""
    assert sum(one["event"].startswith("another master answers") for one in lines) == came
    assert not any(one.startswith("live") for one in daemon.lost)
    assert wallet.masters == [key.public]
    for secret in (token_of(key).secret.encode(), wallet.key.public):
        assert secret not in rogue.heard


async def test_a_newcomer_whose_token_fits_none_of_its_masters_ends_and_says_which(tmp_path: Path) -> None:
    key = Key.new()
    wallet, first, second = Wallet(str(tmp_path / "d"), token_of(key)), Rogue(), Rogue()
    async with playing(first, second):
        for rogues in ([first], [first, second]):
            async with Daemon([one.address for one in rogues], wallet).running() as daemon:
                await until(lambda daemon=daemon: daemon.control.refused)
            assert len(daemon.lost) == len(rogues), "at the first answer of the last one"
            for one in rogues:
                says = f"{one.address} is not the master that the token is of: it has the key {one.key.public.hex()}, "
                assert f"{says}and not {key.public.hex()}" in daemon.control.refused


async def test_who_answers_otherwise_since_is_no_other_master(tmp_path: Path) -> None:
    """It was one that played a master; now nothing of use answers there, and another one plays at the second."""
    wallet = Wallet(str(tmp_path / "d"), token_of(Key.new()))
    first, second = Rogue(), Rogue(b"no TLS")
    async with playing(first, second), Daemon([first.address, second.address], wallet).running() as daemon:
        for says, one, then in (
            (f"{first.address} is not the master", first, b"no TLS"),
            (f"{first.address}: it does not speak TLS", second, m.Challenge(bytes(32))),
            (f"{second.address} is not the master", second, m.Challenge(bytes(32))),
        ):
            await until(lambda says=says: any(told.startswith(says) for told in daemon.lost))
            one.answers = [then]
        assert daemon.control.refused == ""


async def test_another_master_in_its_list_is_passed_over_and_named(tmp_path: Path) -> None:
    key = Key.new()
    wallet, master, other = Wallet(str(tmp_path / "d"), token_of(key)), Master(key), Rogue()
    with structlog.testing.capture_logs() as lines:
        async with playing(master, other), contextlib.AsyncExitStack() as running:
            three = [other.address, "127.0.0.1:9", master.address]
            daemon = await running.enter_async_context(Daemon(three, wallet).running())
            await until(lambda: daemon.control.connected)
            assert daemon.control.refused == ""
    said = [one["reason"] for one in lines if one["event"].startswith("another master answers")]
    assert len(said) == 1
    assert said[0].startswith(f"{other.address} is not the master that the token is of")


async def test_where_nobody_listens_it_says_what_to_look_at(tmp_path: Path) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # nobody listens, and nobody else gets it
        address = join_address(*closed.getsockname())
        async with Daemon([address], admitted(tmp_path, "d", Key.new())).running() as daemon:
            await until(lambda: daemon.lost)
    assert daemon.lost[0].startswith(f"{address}: [Errno 111] ")
    assert daemon.lost[0].endswith("Connection refused; is `wancoll master` running there, and is the port right?")
