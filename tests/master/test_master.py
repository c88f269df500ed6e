"""The real master over real sockets: values, hostile bytes, silence, status, its journal and its end."""

from __future__ import annotations

import contextlib
import itertools
import os
import pathlib
import random
import shutil
import socket
import sqlite3
import struct
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from tests.full_disk import full_disk
from wancoll.errors import ConfigError
from wancoll.limits import DEFAULT, PROTOCOL_VERSION, Limits
from wancoll.local import split_address
from wancoll.net import clock
from wancoll.wire import messages as m
from wancoll.wire.epochs import applied
from wancoll.wire.framing import Decoder, encode
from wancoll_master.config import MasterConfig
from wancoll_master.core.ready import JUMP, Persist, Ready, Used, encode_for_each
from wancoll_master.serve import serve
from wancoll_master.server import Server
from wancoll_master.store import journal as journal_module
from wancoll_master.store.facts import Facts
from wancoll_master.store.journal import Journal

# The master commits: these daemons answer no Abort, and are away without a word that their members commit nothing.
# What nobody waits for in a test lasts longer than a busy machine stands still.
PATIENT = Limits(
    voters=0,
    heartbeat_interval=0.05,
    heartbeat_timeout=60.0,
    handshake_timeout=60.0,
    handshake_least=0.0,
    rejoin_grace=60.0,
    probe_timeout=60.0,
)


class Peer:
    """A daemon's control connection."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self.stream = stream
        self._decoder: Decoder[Any] = Decoder(m.FromMaster, 1 << 20)
        self._ready: list[Any] = []
        self._epochs: dict[int, m.Epoch] = {}  # as told last, by member
        self.ended = False

    async def say(self, *messages: Any) -> None:
        await self.stream.send_all(b"".join(map(encode, messages)))

    async def hear(self) -> Any:
        """The next message; None at the end of the stream. What changed in an epoch is put together."""
        with trio.fail_after(30):
            while not self._ready:
                try:
                    data = await self.stream.receive_some()
                except trio.BrokenResourceError:
                    data = b""
                if not data:
                    return None
                self._ready = self._decoder.feed(data)
        message = self._ready.pop(0)
        if isinstance(message, m.EpochChange):
            message = applied(self._epochs[message.to], message)
        if isinstance(message, m.Epoch):
            self._epochs[message.to] = message
        return message

    async def expect(self, kind: Any) -> Any:
        """The next message of *kind*; others are skipped."""
        while True:
            message = await self.hear()
            assert message is not None, f"the connection ended before {kind}"
            if isinstance(message, kind):
                return message


def hello(name: str, incarnation: int = 1) -> m.Hello:
    return m.Hello(PROTOCOL_VERSION, name, incarnation, ["127.0.0.1:9"], 4, "", "0.1.0")


class Connect:
    """Connects to a running master.

    Args:
        address: its own, as it says.
    """

    def __init__(self, address: str) -> None:
        self.host, self.port = split_address(address)
        self.peers: list[Peer] = []

    async def __call__(self) -> Peer:
        peer = Peer(await trio.open_tcp_stream("::1" if self.host == "::" else self.host, self.port))
        self.peers.append(peer)
        return peer


@contextlib.asynccontextmanager
async def master(limits: Limits = PATIENT, **config: Any) -> AsyncIterator[Connect]:
    """A running master; its clients' connections are closed before it stops."""
    async with trio.open_nursery() as nursery:
        (address, *_) = await nursery.start(
            serve, MasterConfig(**{"listen": "127.0.0.1:0", "limits": limits, "first": True, **config})
        )
        connect = Connect(address)
        try:
            yield connect
        finally:
            for peer in connect.peers:
                peer.stream.socket.close()
            nursery.cancel_scope.cancel()


async def member(connect: Connect, name: str, start: int, group: str = "g") -> tuple[Peer, int]:
    """A daemon with one member of the same name; returns its mid."""
    peer = await connect()
    await peer.say(hello(name), m.Join(group, name, start, 1))
    return peer, (await peer.expect(m.Joined)).mid


async def join_and_commit(connect: Connect, group: str) -> None:
    """Two fresh daemons form *group* and commit an op: what must always work."""
    with trio.fail_after(20):
        peers = [await member(connect, f"{group}{i}", 2, group) for i in range(2)]
        for peer, mid in peers:
            epoch = await peer.expect(m.Epoch)
            assert epoch.to == mid
            await peer.say(m.Vote(group, mid, epoch.epoch, 1, 7, 9))
        for peer, _ in peers:
            assert (await peer.expect(m.Commit)).upto == 1
            await peer.stream.aclose()


# ---- the ordinary -----------------------------------------------------------------------------------


async def test_commits_are_quick():
    """Generous, since machines differ: the bound catches something that waits, such as a delayed ACK."""
    async with master() as connect:
        peers = [await member(connect, f"m{i}", 2) for i in range(2)]
        for peer, _ in peers:
            await peer.expect(m.Epoch)
        took = []
        for seq in range(1, 301):
            started = time.perf_counter()
            for peer, mid in peers:
                await peer.say(m.Vote("g", mid, 1, seq, 7, 9))
            for peer, _ in peers:
                assert (await peer.expect(m.Commit)).upto == seq
            took.append(time.perf_counter() - started)
        assert sorted(took)[75] < 0.02  # what waits does so each time, a busy machine now and then


@pytest.mark.parametrize("listen", ["127.0.0.1", "nowhere.invalid:0", "127.0.0.1:99999", "192.0.2.1:0"])
async def test_a_bad_listen_address_is_a_clear_error(listen):
    with pytest.raises(ConfigError, match=r"expected (host:port|an address of this machine)"):
        await serve(MasterConfig(listen=listen))


async def test_a_port_in_use_is_a_clear_error():
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ConfigError, match="cannot listen there"):
        await serve(MasterConfig(listen=f"127.0.0.1:{taken.getsockname()[1]}"))


async def test_stopping_says_bye_to_all():
    async with trio.open_nursery() as outer:
        (address,) = await outer.start(serve, MasterConfig(listen="127.0.0.1:0", limits=PATIENT))
        connect = Connect(address)
        greeted, idle = await connect(), await connect()
        await greeted.say(hello("d0"))
        await greeted.expect(m.Welcome)
        outer.cancel_scope.cancel()
    for peer in (greeted, idle):
        assert (await peer.expect(m.Bye)).reason == "the master is stopping"
        assert await peer.hear() is None
        await peer.stream.aclose()
    with pytest.raises(OSError, match="connect"):
        await connect()


# ---- hostile ----------------------------------------------------------------------------------------


def frame(body: bytes) -> bytes:
    return struct.pack("!I", len(body)) + body


HOSTILE = {
    "zeros": b"\0" * 100_000,
    "random": random.Random(1).randbytes(100_000),
    "oversized": struct.pack("!I", DEFAULT.handshake_bytes + 1) + b"x" * 100_000,
    "huge": b"\xff" * 8,
    "no msgpack": frame(b"\xc1" * 50),
    "deep": frame(b"\x91" * 5000),
    "another protocol": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "wrong type": frame(msgspec.msgpack.encode(["Hello", "one", "d", 1, ["a:1"], 1, "v"])),
    "unknown message": frame(msgspec.msgpack.encode(["Explode", 1])),
    "negative": frame(msgspec.msgpack.encode(["Vote", "g", -1, 1, 1, 1, 1])),
    "a map": frame(msgspec.msgpack.encode({"type": "Hello"})),
    "not first": encode(m.Heartbeat(1)),
    "hello twice": encode(hello("evil")) * 2,
    "nonsense later": encode(hello("evil")) + encode(m.Join("evil", "x", 1, 1)) + b"\xff" * 50,
}


@pytest.mark.parametrize("kind", HOSTILE)
async def test_hostile_bytes_end_their_own_connection_only(kind):
    async with master() as connect:
        hostile = await connect()
        with trio.move_on_after(5):
            with contextlib.suppress(trio.BrokenResourceError):  # the master has had enough already
                await hostile.stream.send_all(HOSTILE[kind])
        bye = await hostile.expect(m.Bye)
        assert ("oversized" in bye.reason) == (
            kind in ("oversized", "huge", "random", "another protocol", "nonsense later")
        )
        assert await hostile.hear() is None
        await join_and_commit(connect, "g")


async def test_what_follows_nonsense_does_not_destroy_its_answer():
    """Closing with unread bytes resets a connection; the reset would overtake the Bye."""
    async with master() as connect:
        hostile = await connect()
        for _ in range(20):
            await hostile.stream.send_all(encode(m.Heartbeat(1)) * 1000)
        assert "expected Hello first" in (await hostile.expect(m.Bye)).reason
        assert await hostile.hear() is None


async def test_who_came_in_time_is_not_put_out_where_the_master_stood_still(mock_clock: MockClock):
    """Its Hello is there and its time is over when the master goes on."""
    async with master(replace(PATIENT, handshake_timeout=0.2)) as connect:
        for i in range(5):
            peer = await connect()
            await wait_all_tasks_blocked(0.01)  # the master waits for its Hello
            said = encode(hello(f"d{i}")) + encode(m.Join("g", f"m{i}", 5, 5))
            assert os.write(peer.stream.socket.fileno(), said) == len(said)  # the master has no turn meanwhile
            mock_clock.jump(0.3)
        for peer in connect.peers:
            assert [one.name for one in (await peer.expect(m.Epoch)).members] == [f"m{i}" for i in range(5)]
        assert "daemon died" not in [event.kind for event in (await status(connect)).events]


async def test_a_crowd_of_idle_connections_gives_way_to_newcomers():
    async with master(replace(PATIENT, pending_connections=8)) as connect:
        idle = [await connect() for _ in range(40)]
        await join_and_commit(connect, "g")
        for peer in idle[:32]:  # oldest first
            assert isinstance(await peer.hear(), m.Bye)


@pytest.mark.parametrize("resumed", [False, True], ids=["at once", "after it came back"])
async def test_who_takes_up_the_connection_that_it_has_is_cut_off_alone(resumed: bool):
    """Nobody else is told of another master."""
    async with master() as connect:
        peer, mid = await member(connect, "m0", 1)
        mad = await connect()
        again = msgspec.structs.replace(hello("mad"), dial=1)
        await mad.say(again)
        welcome = await mad.expect(m.Welcome)
        again = msgspec.structs.replace(again, dial=2, session=welcome.session, master=welcome.master)
        if resumed:
            mad = await connect()
            await mad.say(again)
            assert (await mad.expect(m.Welcome)).resumed
        await mad.say(msgspec.structs.replace(again, dial=3))
        assert "introduces itself twice" in (await mad.expect(m.Bye)).reason
        assert await mad.hear() is None
        await peer.say(m.Vote("g", mid, 1, 1, 7, 9))
        await peer.expect(m.Commit)
        assert (await status(connect)).term == welcome.term


async def test_the_largest_message_of_a_daemon_is_accepted():
    async with master() as connect:
        peer, mid = await member(connect, "m0", 1)
        await peer.expect(m.Epoch)
        await peer.say(m.LinkDown("g", mid, 1, 99, "lost", "\N{SNOWMAN}" * 4096))
        await peer.say(m.GiveUp("g", mid, 1, list(range(1, 1025)), "x" * 4096))
        assert len((await peer.expect(m.Epoch)).voids) == 1024


async def test_a_slow_reader_gets_everything_in_order():
    async with master(replace(PATIENT, send_queue_messages=10**6)) as connect:
        sock = trio.socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        await sock.connect((connect.host, connect.port))
        slow = Peer(trio.SocketStream(sock))
        connect.peers.append(slow)
        await slow.say(hello("d" * 100), *(m.Join("g" * 100, f"m{i}", 100, 1) for i in range(50)))
        count = 400
        for number in range(1, count + 1):
            await slow.say(m.StatusRequest(PROTOCOL_VERSION), m.Heartbeat(number))
        heard: list[Any] = []
        while len(heard) < 2 * count:
            message = await slow.hear()
            if isinstance(message, m.Status | m.Pong):
                heard.append(message)
        assert [pong.number for pong in heard[1::2]] == list(range(1, count + 1))
        assert sum(len(encode(message)) for message in heard) > 5_000_000  # more than the kernel keeps for us


async def test_all_connections_that_do_not_read_have_one_bound():
    async with master(replace(PATIENT, send_queue_bytes=1 << 20)) as connect:
        sock = trio.socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        await sock.connect((connect.host, connect.port))
        deaf = Peer(trio.SocketStream(sock))
        connect.peers.append(deaf)
        await deaf.say(hello("d" * 100), *(m.Join("g" * 100, f"m{i}", 101, 1) for i in range(100)))
        count = 12_000_000 // len(encode(await status(connect)))  # less than one connection may have alone
        await deaf.expect(m.Welcome)
        await deaf.say(*[m.StatusRequest(PROTOCOL_VERSION)] * count)
        await join_and_commit(connect, "k")
        heard = 0
        while (message := await deaf.hear()) is not None:
            heard += isinstance(message, m.Status)
        assert heard < count


# ---- status and journal -----------------------------------------------------------------------------


async def status(connect: Connect) -> m.Status:
    peer = await connect()
    await peer.say(m.StatusRequest(PROTOCOL_VERSION))
    answer = await peer.expect(m.Status)
    assert await peer.hear() is None
    return answer  # type: ignore[no-any-return]


async def test_who_asks_for_status_is_told_what_was_so_when_it_asked():
    async with master() as connect:
        for number in range(20):
            peer = await connect()
            await peer.say(hello(f"d{number}"))
            await peer.expect(m.Welcome)
            assert len((await status(connect)).daemons) == number + 1


async def test_names_that_daemons_announce_are_looked_up_by_the_master(monkeypatch):
    """Members are told addresses; a name that is not found in time ends the connection, and holds nobody up."""
    asked, late, really = [], threading.Event(), socket.getaddrinfo

    def look(host, port, *what, **more):
        if not str(host).endswith(".example"):
            return really(host, port, *what, **more)
        asked.append(host)
        if host == "late.example":
            late.wait(30)
        if host != "two.example":
            raise socket.gaierror("nobody of that name")
        found = ("2001:db8::7", port, 0, 0), ("192.0.2.7", port), ("192.0.2.7", port)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", where) for where in found]

    def says(name, *addresses):
        return msgspec.structs.replace(hello(name), addresses=list(addresses)), m.Join(f"g-{name}", name, 1, 1)

    async with master(replace(PATIENT, handshake_timeout=0.5)) as connect:
        monkeypatch.setattr(socket, "getaddrinfo", look)
        try:
            slow = await connect()
            await slow.say(*says("slow", "late.example:9"))
            peer = await connect()
            await peer.say(*says("quick", "two.example:9", "127.0.0.1:8"))
            (me,) = (await peer.expect(m.Epoch)).members
            assert me.addresses == ["192.0.2.7:9", "[2001:db8::7]:9", "127.0.0.1:8"]
            none = await connect()
            await none.say(*says("none", "none.example:9"))
            for each, name in ((none, "none"), (slow, "late")):
                told = (await each.hear()).reason
                assert "announces a name that this master cannot look up, or that leads elsewhere than to it; " in told
                assert f"got {name}.example:9; give its daemon --advertise with an address" in told
        finally:
            late.set()
        assert sorted(asked) == ["late.example", "none.example", "two.example"]


async def test_slow_names_hold_up_only_the_daemon_that_announces_them(monkeypatch):
    """One lookup at a time for each daemon; its thread goes on when nobody waits for it any more."""
    late, really, asked = threading.Event(), socket.getaddrinfo, []

    def look(host, port, *what, **more):
        if not str(host).endswith(".example"):
            return really(host, port, *what, **more)
        asked.append(host)
        if host.startswith("late"):
            late.wait(30)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("192.0.2.7", port))]

    def says(name, address):
        return msgspec.structs.replace(hello(name), addresses=[address])

    async with master(replace(PATIENT, handshake_timeout=0.5)) as connect:
        monkeypatch.setattr(socket, "getaddrinfo", look)
        try:
            slow = [await connect() for _ in range(20)]
            for k, each in enumerate(slow):
                await each.say(says(f"slow-{k // 2}", f"late{k}.example:9"))
            quick = [await connect() for _ in range(10)]
            for k, each in enumerate(quick):
                await each.say(says(f"quick-{k}", "two.example:9"))
                await each.expect(m.Welcome)
            for each in slow:
                assert "cannot look up, or that leads elsewhere" in (await each.hear()).reason
            assert sorted(asked) == sorted([f"late{k}.example" for k in range(0, 20, 2)] + 10 * ["two.example"])
            late.set()
            again = await connect()
            await again.say(says("slow-0", "two.example:9"))
            await again.expect(m.Welcome)
        finally:
            late.set()


async def test_a_restarted_master_has_a_higher_term_and_higher_numbers(tmp_path):
    path = str(tmp_path / "journal")
    seen = []
    for _ in range(3):
        async with master(replace(PATIENT, rejoin_grace=0.1), journal=path) as connect:
            peer = await connect()
            await peer.say(hello("d0"), m.Join("g", "m0", 1, 1))
            term = (await peer.expect(m.Welcome)).term
            mid = (await peer.expect(m.Joined)).mid
            seen.append((term, mid, (await peer.expect(m.Epoch)).epoch))
            events = len((await status(connect)).events)
    for before, after in itertools.pairwise(seen):
        assert all(a < b for a, b in zip(before, after, strict=True))
    assert events > 3  # of all terms


async def test_a_master_that_stood_still_takes_its_members_back(mock_clock: MockClock, monkeypatch):
    """Its daemons have given it up by then: their connections end, and none of their members is evicted for that."""
    async with master() as connect:
        peers = [await member(connect, f"m{i}", 2) for i in range(2)]
        epochs = [await peer.expect(m.Epoch) for peer, _ in peers]
        before = (await status(connect)).term
        asked = clock.awake_or_asleep
        monkeypatch.setattr(clock, "awake_or_asleep", lambda: asked() + 1.1 * PATIENT.heartbeat_timeout)
        mock_clock.jump(PATIENT.heartbeat_interval)  # the server's, too: it looks
        for peer, _ in peers:
            assert "stood still" in (await peer.expect(m.Bye)).reason
        for number, (_, mid) in enumerate(peers):
            peer, epoch = await connect(), epochs[number]
            await peer.say(msgspec.structs.replace(hello(f"m{number}"), term=before, master=1))
            assert (await peer.expect(m.Welcome)).term == before + 1
            who = [(one.mid, one.name, one.daemon) for one in epoch.members]
            head = ("g", mid, epoch.epoch, who, epoch.plan, epoch.key, 2, epoch.min_world, epoch.reason)
            finished = m.EpochReport(0, [(1, 7, 9)], [], [])
            await peer.say(m.Report(*head, 0, [], False, finished, [], 0, [], []), m.Heartbeat(0))
            peers[number] = peer, mid
        for peer, _ in peers:
            assert (await peer.expect(m.Resumed)).epoch == 1
            assert (await peer.expect(m.Commit)).upto == 1


def test_the_journal_keeps_numbers_that_never_fall(tmp_path):
    path, voids = str(tmp_path / "journal"), {41: "ProtocolError", 42: "OperationAborted", 44: "OperationAborted"}
    journal = Journal(path)
    journal.persist(Persist(7, 1025, groups={"a": Used(6, frozenset({1}), 40)}))
    journal.persist(Persist(7, 1025, groups={"a": Used(7, frozenset({1, 300}), 40, voids)}))
    journal.persist(Persist(3, 9, groups={"b": Used(3, frozenset({4}), 40)}))
    journal.close()
    journal = Journal(path)
    assert (journal.facts.term, journal.facts.highest_epoch, journal.facts.next_mid) == (2, 7, 1025)
    assert journal.facts.used == {"b": Used(3, frozenset({4}), 40), "a": Used(7, frozenset({1, 300}), 40, voids)}
    journal.close()


def test_a_journal_is_for_one_master(tmp_path):
    path = str(tmp_path / "journal")
    journal = Journal(path)
    (tmp_path / "link").symlink_to("journal")
    (tmp_path / "hard").hardlink_to(tmp_path / "journal")
    for same in (path, str(tmp_path / "link")):
        with pytest.raises(ConfigError, match="the journal is used by another master") as told:
            Journal(same)
        assert str(tmp_path) in str(told.value)
        assert "--journal" in str(told.value)
    journal.persist(Persist(7, 1025))
    journal.close()
    journal = Journal(path)
    assert journal.facts.highest_epoch == 7
    journal.close()
    journal = Journal(str(tmp_path / "hard"))  # it has another lock beside it, so nobody knows how new it is
    assert journal.facts.lost
    journal.close()


def test_what_fences_is_synced_to_disk_and_events_are_not(tmp_path):
    """One sync for an epoch, however many groups begin one."""
    journal = Journal(str(tmp_path / "journal"))
    ran: list[str] = []
    journal._db.set_trace_callback(lambda text: ran.append(text.lower()))
    journal.add(m.EventRecord(1.0, "g", 1, "kind", "text"))
    assert not any("full" in text for text in ran)
    ran.clear()
    journal.persist(Persist(7, 1025, 3, {name: Used(7, frozenset({1}), 40) for name in "abc"}))
    assert ran[0] == "pragma synchronous = full"
    assert [text for text in ran if text.startswith(("begin", "commit"))] == ["begin immediate", "commit"]
    assert ran.index("commit") < ran.index("pragma synchronous = normal") == len(ran) - 1
    journal.close()


async def test_a_term_that_was_raised_is_durable_before_it_is_told(tmp_path):
    """The journal was lost, and a daemon has seen a higher term. Killed at once, the next master's is above both."""
    path = str(tmp_path / "journal")
    async with master(journal=path) as connect:
        peer = await connect()
        await peer.say(msgspec.structs.replace(hello("d"), term=40, master=99))
        assert (await peer.expect(m.Welcome)).term == 41 + JUMP
        with contextlib.closing(sqlite3.connect(path)) as db:
            assert db.execute("select value from facts where name = 'term'").fetchone() == (41 + JUMP,)
    async with master(journal=path) as connect:
        peer = await connect()
        await peer.say(hello("d"))
        assert (await peer.expect(m.Welcome)).term == 42 + JUMP


def test_the_journal_keeps_the_newest_events(monkeypatch):
    monkeypatch.setattr(journal_module, "EVENTS_KEPT", 20)
    monkeypatch.setattr(journal_module, "_TRIM_EVERY", 5)
    journal = Journal(":memory:")
    for i in range(103):
        journal.add(m.EventRecord(float(i), "g", i, "kind", f"text {i}"))
    found = journal.events(1000)
    assert 20 <= len(found) <= 25
    assert [event.epoch for event in found] == list(range(103 - len(found), 103))
    assert journal.events(2) == found[-2:]
    journal.close()


def test_a_journal_on_a_full_disk_is_named(tmp_path):
    says = f"{tmp_path}/journal: the journal cannot be used; .* disk I/O error"
    with full_disk(), pytest.raises(ConfigError, match=says):
        Journal(str(tmp_path / "journal"))


@pytest.mark.parametrize("kind", ["a folder", "no database", "another format", "nowhere", "no number", "no group"])
def test_a_journal_that_cannot_be_used_is_a_clear_error(tmp_path, kind):
    path = tmp_path / "journal"
    if kind == "a folder":
        path.mkdir()
    elif kind == "no database":
        path.write_bytes(os.urandom(5000))
    elif kind == "nowhere":
        path = path / "deeper"
    else:
        journal = Journal(str(path))
        journal.persist(Persist(7, 9, groups={"g": Used(7, frozenset({1}), 40)}))
        journal.close()
        with sqlite3.connect(path) as db:
            db.execute({
                "another format": "update facts set value = 99 where name = 'format'",
                "no number": "update facts set value = 1e999 where name = 'term'",
                "no group": "update groups set mids = 'x'",
            }[kind])  # fmt: skip
        db.close()
    with pytest.raises(ConfigError, match="the journal cannot be used"):
        Journal(str(path))


@pytest.mark.parametrize("how", ["missed", "an older copy", "no lock beside it", "the file alone is gone"])
def test_a_journal_that_lacks_an_epoch_knows_no_group_and_gives_no_number_again(tmp_path, how):
    """An old epoch that it still has is believed no more; its numbers jump, once."""
    path = str(tmp_path / "journal")
    journal = Journal(path)
    assert (journal.facts.term, journal.facts.lost, journal.facts.highest_epoch) == (1, False, 0)
    journal.persist(Persist(3, 1025, 1, {"g": Used(3, frozenset({1, 2}), 5)}))
    journal.close()
    shutil.copy(path, tmp_path / "copy")
    journal = Journal(path)
    assert (journal.facts.term, journal.facts.lost, journal.facts.highest_epoch) == (2, False, 3)
    with contextlib.ExitStack() as stack:
        if how == "missed":
            stack.enter_context(pytest.raises(sqlite3.Error))
            stack.enter_context(full_disk())
        journal.persist(Persist(4, 2049, 2, {"g": Used(4, frozenset({1}), 6)}))
    journal.close()
    if how == "an older copy":
        shutil.copy(tmp_path / "copy", path)
    elif how == "no lock beside it":
        os.unlink(f"{path}.lock")
    elif how == "the file alone is gone":
        os.unlink(path)
    term, highest, next_mid = {
        "missed": (2, 3, 1025),
        "an older copy": (2, 3, 1025),  # the newest term is the lock's
        "no lock beside it": (2, 4, 2049),
        "the file alone is gone": (2, 2, 1025),  # all that is known is the term
    }[how]
    for again in range(2):
        journal = Journal(path)
        elected_by = journal.facts.elected_by
        facts = Facts(term + JUMP + 1 + again, highest + JUMP, next_mid + JUMP, {}, elected_by, not again)
        assert journal.facts == facts
        journal.close()
    journal = Journal(path)
    journal.persist(Persist(highest + JUMP + 1, 8, 1, {"g": Used(highest + JUMP + 1, frozenset({1}), 6)}))
    journal.close()
    journal = Journal(path)
    assert journal.facts.used == {"g": Used(highest + JUMP + 1, frozenset({1}), 6)}
    journal.close()


def test_a_journal_that_is_lost_again_and_again_gives_no_number_twice(tmp_path):
    """From nothing each time: the lock beside it knows the newest term, and nothing else does."""
    path, begins = str(tmp_path / "journal"), list[tuple[int, int, int]]()
    for _ in range(4):
        journal = Journal(path)
        facts = journal.facts
        begins.append((facts.term, facts.highest_epoch, facts.next_mid))
        journal.persist(Persist(facts.highest_epoch + 900, facts.next_mid + 2048, facts.term))
        journal.close()
        os.unlink(path)
    for before, after in itertools.pairwise(begins):
        assert [now - then >= JUMP for then, now in zip(before, after, strict=True)] == [True] * 3
    assert {next_mid % 1024 for _, _, next_mid in begins} == {1}


async def test_numbers_are_new_after_two_losses_of_which_only_a_daemon_knows(tmp_path):
    """Journal and lock are gone. What daemons have seen is all that a master has, each time."""
    term, given = 0, list[tuple[int, int]]()
    for number in range(4):
        path = str(tmp_path / f"journal{number}")
        async with master(replace(PATIENT, rejoin_grace=0.05), journal=path) as connect:
            peer = await connect()
            await peer.say(msgspec.structs.replace(hello("d"), term=term, master=99 if term else 0))
            term = (await peer.expect(m.Welcome)).term
            await peer.say(m.Join("g", "m", 1, 1))
            mid = (await peer.expect(m.Joined)).mid
            given.append((mid, (await peer.expect(m.Epoch)).epoch))
            with contextlib.closing(sqlite3.connect(path)) as db:
                facts = dict(db.execute("select name, value from facts").fetchall())
            assert facts["term"] == term
            assert facts["next_mid"] > mid
    for before, after in itertools.pairwise(given):
        assert [now - then >= JUMP for then, now in zip(before, after, strict=True)] == [True] * 2


@pytest.mark.parametrize("text", ["9" * 40, "x" * 40, "1" * 39])
def test_a_lock_that_no_master_wrote_counts_as_a_missed_write(tmp_path, text):
    path = str(tmp_path / "journal")
    journal = Journal(path)
    journal.persist(Persist(3, 1025, 1, {"g": Used(3, frozenset({1, 2}), 5)}))
    journal.close()
    (tmp_path / "journal.lock").write_text(text)
    journal = Journal(path)
    assert journal.facts == Facts(1 + JUMP + 1, 3 + JUMP, 1025 + JUMP, {}, journal.facts.elected_by, True)
    journal.close()


@pytest.mark.parametrize("since", ["an epoch", "a token was revoked"])
def test_an_older_copy_of_the_same_term_counts_as_lost(tmp_path, since):
    path, copy = str(tmp_path / "journal"), str(tmp_path / "copy")
    journal = Journal(path)
    id = journal.facts.elected_by
    journal.persist(Persist(3, 1025, 1, {"g": Used(3, frozenset({1, 2}), 5)}))
    journal.keep_trust("token", {"t": "good"})
    with contextlib.closing(sqlite3.connect(path)) as now, contextlib.closing(sqlite3.connect(copy)) as then:
        now.backup(then)
    if since == "an epoch":
        journal.persist(Persist(4, 1025, 1, {"g": Used(4, frozenset({1}), 6)}))
    else:
        journal.keep_trust("token", {"t": "revoked"})
    journal.close()
    for end in ("-wal", "-shm"):
        pathlib.Path(path + end).unlink(missing_ok=True)
    shutil.copy(copy, path)
    journal = Journal(path)
    assert (journal.facts.lost, journal.facts.used, journal.facts.highest_epoch) == (True, {}, 3 + JUMP)
    assert journal.facts.elected_by != id  # the other copy may be in use elsewhere
    journal.close()


def test_a_journal_that_is_newer_than_its_lock_has_lost_nothing(tmp_path):
    """The master was killed after a write, and before that was noted."""
    path = str(tmp_path / "journal")
    journal = Journal(path)
    before = pathlib.Path(f"{path}.lock").read_bytes()
    journal.persist(Persist(3, 1025, 1, {"g": Used(3, frozenset({1, 2}), 5)}))
    journal.close()
    pathlib.Path(f"{path}.lock").write_bytes(before)
    journal = Journal(path)
    assert (journal.facts.lost, journal.facts.highest_epoch, list(journal.facts.used)) == (False, 3, ["g"])
    journal.close()


def test_the_journal_forgets_groups_with_the_oldest_epochs(tmp_path, monkeypatch):
    monkeypatch.setattr(journal_module, "GROUPS_KEPT", 2)
    path = str(tmp_path / "journal")
    journal = Journal(path)
    groups = {name: Used(epoch, frozenset({1}), 0) for epoch, name in ((4, "a"), (3, "m"), (2, "z"))}
    journal.persist(Persist(4, 1, 1, groups))
    journal.close()
    journal = Journal(path)
    assert list(journal.facts.used) == ["m", "a"]
    assert journal._db.execute("select name from groups order by epoch").fetchall() == [("m",), ("a",)]
    journal.close()


@pytest.mark.parametrize("what", ["a link to another file", "a pipe"])
def test_a_lock_that_is_no_plain_file_is_refused_and_left_alone(tmp_path, what):
    lock, other = tmp_path / "journal.lock", tmp_path / "other"
    other.write_text("precious")
    if what == "a pipe":
        os.mkfifo(lock)
    else:
        lock.symlink_to(other)
    with pytest.raises(ConfigError, match="the journal cannot be used"):
        Journal(str(tmp_path / "journal"))
    assert other.read_text() == "precious"


def test_where_not_even_a_missed_write_can_be_noted_nothing_may_be_told(tmp_path):
    journal = Journal(str(tmp_path / "journal"))
    journal._db.execute("pragma query_only = 1")
    os.close(journal._lock)
    journal._lock = os.open(tmp_path / "journal.lock", os.O_RDONLY)  # as where the file system takes no change
    with pytest.raises(OSError):
        journal.persist(Persist(4, 7, 1))
    journal.close()


async def test_who_stood_still_on_a_full_disk_leads_again_once_its_term_is_written(tmp_path):
    """Under old facts it would give numbers twice."""
    journal = Journal(str(tmp_path / "journal"))
    server = Server(MasterConfig(first=True), journal)
    server.lead(journal)
    assert server.state is not None
    journal.persist(Persist(5, 1025, 1))
    journal._db.execute("pragma query_only = 1")
    server._carry_out(server.state, Ready(persist=Persist(6, 2049, 1)))
    assert server.state is not None  # training goes on
    server._start_over("it stood still")
    server._lead_again()
    assert server.state is None
    journal._db.execute("pragma query_only = 0")
    server._lead_again()
    assert server.state is not None
    assert (server.state.floor, server.state.next_mid) == (5 + JUMP, 1025 + JUMP)
    assert server.state.term == 1 + JUMP + 1
    assert server.state.lost_journal
    journal.close()


async def test_what_can_be_neither_written_nor_marked_is_not_told(tmp_path, monkeypatch):
    def fail(*_: Any) -> None:
        raise OSError("read-only file system")

    journal = Journal(str(tmp_path / "journal"))
    server = Server(MasterConfig(first=True), journal)
    server.lead(journal)
    monkeypatch.setattr(Journal, "persist", fail)
    told: list[Ready] = []
    monkeypatch.setattr(server, "_tell", told.append)
    server._carry_out(server.state, Ready(persist=Persist(6, 2049, 1)))
    assert (server.state, told) == (None, [])
    journal.close()


async def test_a_journal_that_fails_later_stops_nobody(tmp_path, monkeypatch):
    def fail(*_: Any) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(Journal, "add", fail)
    monkeypatch.setattr(Journal, "persist", fail)
    async with master(journal=str(tmp_path / "journal")) as connect:
        await join_and_commit(connect, "g")


def test_epochs_for_many_are_what_each_would_have_been_sent():
    infos = [m.MemberInfo(i, f"m{i}", "d", ["a:1", "[::1]:2"], "here") for i in range(20)]
    plan = m.Plan(4, 1, True, {"all_reduce": [(0, "ring")]}, [(1, 2)], 0, "")
    void = m.Void(9, "CollectiveMismatch", "text", {"m0": "call"})
    fields = {
        name: {"group": "g", "members": infos, "plan": plan, "key": b"k" * 16, "voids": [void], "reason": "why"}.get(
            name, 3
        )
        for name in m.Epoch.__struct_fields__
    }
    epoch = m.Epoch(**fields)
    mids = [0, 5, 1 << 40]
    assert encode_for_each(epoch, mids) == [encode(msgspec.structs.replace(epoch, to=mid)) for mid in mids]
