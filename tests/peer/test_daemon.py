"""The whole daemon against a master that is played: it is sent away for good, and when it says that it is ready."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest
import trio
import trio.testing
from msgspec.structs import replace

from tests.client.tools import until as stand_still_until  # engines go on meanwhile, daemons do not
from tests.keyed import admitted, token_of
from wancoll.collective import Descriptor, DType, Kind, ReduceOp
from wancoll.errors import ConfigError
from wancoll.limits import DEFAULT, PROTOCOL_VERSION
from wancoll.local import join_address
from wancoll.native.engine import Done, Engine
from wancoll.net import clock
from wancoll.net.ask import ask
from wancoll.peer import daemon as daemon_module
from wancoll.peer.config import PeerConfig
from wancoll.peer.daemon import Daemon, serve
from wancoll.peer.daemon import _wallet as wallet_of
from wancoll.trust.keys import Key
from wancoll.trust.token import Token
from wancoll.wire import messages as m
from wancoll.wire.framing import Decoder, encode
from wancoll.wire.note import unpack

SILENCE = 60.0  # seconds: the master that is played answers no heartbeat
TWIN = "another daemon is named d, and answers"
ALONE = m.Epoch(
    group="g",
    to=1,
    term=1,
    epoch=1,
    members=[m.MemberInfo(1, "busy", "d", ["127.0.0.1:1"], "")],
    plan=m.Plan(1, 1 << 20, False, {}, [], 0, ""),
    key=b"k" * 16,
    min_world=1,
    committed_upto=0,
    voids=[],
    reason="",
)

T = TypeVar("T")


class Talk:
    """One connection: what is said, and what is heard."""

    def __init__(self, stream: trio.SocketStream, kind: Any) -> None:
        self.stream = stream
        self._decoder: Decoder[object] = Decoder(kind, DEFAULT.message_bytes)
        self._heard: list[object] = []

    async def say(self, *messages: m.Message) -> None:
        await self.stream.send_all(b"".join(encode(each) for each in messages))

    async def hear(self, kind: type[T]) -> T:
        """The next message of this type; others are dropped."""
        while True:
            while self._heard:
                if isinstance(message := self._heard.pop(0), kind):
                    return message
            data = await self.stream.receive_some()
            assert data, f"the connection ended before a {kind.__name__}"
            self._heard += self._decoder.feed(data)


class Stage:
    """A daemon's settings; its connections to the master, and those of its clients."""

    def __init__(self, config: PeerConfig) -> None:
        self.config = config
        self.opened, self.connections = trio.open_memory_channel[Talk](10)
        self._clients: list[Talk] = []

    async def welcome(self) -> Talk:
        """The master's connection with the daemon, once it is welcome."""
        master = await self.connections.receive()
        await master.hear(m.Hello)
        await master.say(m.Welcome(PROTOCOL_VERSION, 1, 1.0, SILENCE, 1))
        return master

    async def attach(self, name: str) -> Talk:
        client = Talk(await trio.open_unix_socket(self.config.socket), m.FromDaemon)
        self._clients.append(client)
        await client.say(m.Attach(PROTOCOL_VERSION, "g", name, 1, 1, 1))
        return client

    async def busy(self, master: Talk) -> tuple[Talk, int]:
        """A client whose one call is finished here, and not committed; and the call's seq."""
        client = await self.attach("busy")
        await master.hear(m.Join)
        await master.say(m.Joined("g", "busy", 1, ""), ALONE)
        epoch = (await client.hear(m.EpochInfo)).epoch
        await client.say(m.Post(1, Descriptor(Kind.barrier), 0, 0, epoch))
        return client, (await master.hear(m.Vote)).seq

    async def close(self) -> None:
        for client in self._clients:
            await client.stream.aclose()


@contextlib.asynccontextmanager
async def stage(tmp_path: Path) -> AsyncIterator[Stage]:
    async def master(stream: trio.SocketStream) -> None:
        await made.opened.send(Talk(stream, m.FromPeer))
        await trio.sleep_forever()

    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    address = join_address(*listeners[0].socket.getsockname()[:2])
    made = Stage(PeerConfig(socket=str(tmp_path / "s"), listen="127.0.0.1:0", master=address, name="d"))
    with trio.fail_after(50):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.serve_listeners, master, listeners)
            yield made
            await made.close()
            nursery.cancel_scope.cancel()


@contextlib.asynccontextmanager
async def welcomed(tmp_path: Path) -> AsyncIterator[tuple[Stage, Talk]]:
    """A daemon that a played master has welcomed, and that master's connection."""
    async with stage(tmp_path) as played, trio.open_nursery() as nursery:
        await nursery.start(partial(serve, played.config, stop=trio.Event()))
        yield played, await played.welcome()
        nursery.cancel_scope.cancel()


async def test_a_daemon_that_is_sent_away_ends_at_once_and_says_why(tmp_path: Path) -> None:
    """Its clients hear the reason, also of what is running, and nobody waits for operations."""
    async with stage(tmp_path) as played:
        with pytest.RaisesGroup(pytest.RaisesExc(ConfigError, match=TWIN), flatten_subgroups=True):
            async with trio.open_nursery() as nursery:
                await nursery.start(partial(serve, played.config, stop=trio.Event()))
                master = await played.welcome()
                busy, _ = await played.busy(master)
                waiting = await played.attach("waiting")
                await master.hear(m.Join)
                began = time.monotonic()
                await master.say(m.Bye(TWIN, final=True))
                ended = await busy.hear(m.Failure)
                assert (ended.id, ended.error, ended.cause) == (1, "OutcomeUnknown", "ConfigError")
                assert TWIN in ended.got
                for client in (busy, waiting):
                    last = await client.hear(m.Failure)
                    assert (last.id, last.error) == (0, "ConfigError")
                    assert TWIN in last.got
        assert time.monotonic() - began < DEFAULT.drain_timeout
        assert not await trio.Path(played.config.socket).exists()


async def test_a_daemon_that_was_here_outlives_a_master_that_is_started_with_tls_by_mistake(tmp_path: Path) -> None:
    """Such a master refuses everything in clear, for good, before any Welcome."""
    async with welcomed(tmp_path) as (played, master):
        await master.stream.aclose()
        mistaken = await played.connections.receive()
        await mistaken.say(m.Bye("this master speaks TLS only", final=True))
        await mistaken.stream.aclose()
        await played.welcome()


async def test_a_daemon_that_goes_down_says_so_and_not_that_its_clients_died(tmp_path: Path) -> None:
    """As where a bug ends it: nothing is drained, and the master is told why by what is still there."""
    async with stage(tmp_path) as played, trio.open_nursery() as nursery:
        await nursery.start(partial(serve, played.config, stop=trio.Event()))
        master = await played.welcome()
        client, _ = await played.busy(master)
        nursery.cancel_scope.cancel()
        with trio.CancelScope(shield=True), trio.fail_after(50):
            left = await master.hear(m.Leave)
            assert (left.group, left.member, left.reason, left.died) == ("g", "busy", "its daemon goes down", False)
            ended = await client.hear(m.Failure)
            assert (ended.id, ended.error, ended.cause) == (1, "OutcomeUnknown", "PeerDaemonLost")
            assert ended.got == "its daemon goes down"


async def test_who_waits_for_a_place_is_told_that_there_is_no_master(tmp_path: Path) -> None:
    config = PeerConfig(socket=str(tmp_path / "s"), listen="127.0.0.1:0", master="127.0.0.1:1", name="d")
    stop, played = trio.Event(), Stage(config)
    with trio.fail_after(50):
        async with trio.open_nursery() as nursery:
            await nursery.start(partial(serve, config, stop=stop))
            client = await played.attach("early")
            told = ""
            while "refused" not in told:
                told = (await client.hear(m.Slow)).text
                assert told.startswith("for the master at 127.0.0.1:1: ")
            stop.set()
        await played.close()


async def test_while_the_master_is_away_the_daemon_says_that_it_is_what_a_call_waits_for(tmp_path: Path) -> None:
    async with welcomed(tmp_path) as (played, master):
        busy, _ = await played.busy(master)
        await master.stream.aclose()
        told = await busy.hear(m.Slow)
        assert told.id == 1
        assert f"it is finished here and waits for the master at {played.config.master}, away for " in told.text
        asks = Talk(await trio.open_unix_socket(played.config.socket), m.FromDaemon)
        await asks.say(m.LocalStatusRequest())
        assert f"not there: the master at {played.config.master}" in (await asks.hear(m.LocalStatus)).text
        await asks.stream.aclose()


async def test_who_commits_by_itself_and_slept_unheard_for_longer_than_its_name_waits_is_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C8, though the connection looks as it did before."""
    asleep, awake = [0.0], clock.awake_or_asleep
    monkeypatch.setattr(clock, "awake_or_asleep", lambda: awake() + asleep[0])
    async with welcomed(tmp_path) as (played, master):
        client = await played.attach("busy")
        await master.hear(m.Join)
        await master.say(m.Joined("g", "busy", 1, ""), replace(ALONE, plan=replace(ALONE.plan, collectors="members")))
        epoch = (await client.hear(m.EpochInfo)).epoch
        for number, slept in ((1, 0.0), (2, DEFAULT.master_grace), (3, DEFAULT.master_grace + SILENCE)):
            asleep[0] = slept
            await client.say(m.Post(number, Descriptor(Kind.barrier), 0, 0, epoch))
            if number < 3:
                assert (await client.hear(m.Result)).id == number
        assert (await client.hear(m.Failure)).error == "MasterUnreachable"
        await master.hear(m.Leave)


@contextlib.asynccontextmanager
async def running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **limits: float
) -> AsyncIterator[tuple[Stage, list[Daemon]]]:
    """A daemon, which is in the list."""
    made: list[Daemon] = []

    class Kept(Daemon):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            made.append(self)

    monkeypatch.setattr(daemon_module, "Daemon", Kept)
    async with stage(tmp_path) as played, trio.open_nursery() as nursery:
        config = dataclasses.replace(played.config, limits=dataclasses.replace(DEFAULT, **limits))
        await nursery.start(partial(serve, config, stop=trio.Event()))
        yield played, made
        nursery.cancel_scope.cancel()


async def test_who_comes_while_the_connection_is_broken_joins_over_the_one_that_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The master that takes the daemon back does not ask for its members again."""
    async with running(tmp_path, monkeypatch) as (played, _):
        welcome = m.Welcome(PROTOCOL_VERSION, 1, 1.0, SILENCE, 1, session=7)
        master = await played.connections.receive()
        await master.hear(m.Hello)
        await master.say(welcome)
        await master.hear(m.Heartbeat)  # all members have been named
        await master.stream.aclose()
        again = await played.connections.receive()
        await again.hear(m.Hello)
        client = await played.attach("late")
        await client.hear(m.Attached)
        await again.say(replace(welcome, resumed=True, heard=1))
        with trio.fail_after(20):
            assert (await again.hear(m.Join)).member == "late"


async def test_a_client_that_comes_without_a_master_has_all_the_time_that_one_may_be_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(tmp_path, monkeypatch, master_grace=0.5) as (played, [daemon]):
        master = await played.welcome()
        await master.stream.aclose()
        await played.connections.receive()  # which says nothing
        while daemon.control.connected:  # noqa: ASYNC110 - nobody tells
            await trio.sleep(0.001)
        daemon._no_master_since -= 100
        began = trio.current_time()
        client = await played.attach("late")
        assert (await client.hear(m.Failure)).error == "MasterUnreachable"
        assert trio.current_time() - began >= 0.5


async def test_once_the_master_is_back_its_members_ask_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also over a connection that goes on: what waits at an update_membership is not passed by without it (C11)."""
    async with running(tmp_path, monkeypatch, heartbeat_interval=0.02) as (played, [daemon]):
        welcome = m.Welcome(PROTOCOL_VERSION, 1, 0.02, SILENCE, 1, session=7)
        master = await played.connections.receive()
        await master.hear(m.Hello)
        await master.say(welcome)
        client = await played.attach("busy")
        await master.hear(m.Join)
        await master.say(m.Joined("g", "busy", 1, ""), ALONE)
        await client.hear(m.EpochInfo)
        collectives = daemon.sessions[0].member.collectives
        await master.stream.aclose()
        again = await played.connections.receive()
        await again.hear(m.Hello)
        daemon.control.heartbeat_timeout = 0.0  # that is over
        await until(lambda: collectives.master_away)
        await again.say(replace(welcome, resumed=True, heard=2))
        with trio.fail_after(20):
            await until(lambda: not collectives.master_away)


async def test_a_daemon_that_stops_takes_no_new_clients(tmp_path: Path) -> None:
    async with stage(tmp_path) as played, trio.open_nursery() as nursery:
        stop = trio.Event()
        await nursery.start(partial(serve, played.config, stop=stop))
        master = await played.welcome()
        busy, seq = await played.busy(master)
        stop.set()
        await trio.testing.wait_all_tasks_blocked()
        late = await (await played.attach("late")).hear(m.Failure)
        assert (late.error, late.what) == ("PeerDaemonLost", "the peer daemon is stopping")
        await master.say(m.Commit("g", 1, seq, 1))
        assert (await busy.hear(m.Result)).id == 1


@pytest.mark.parametrize("what", ["attach", "leave"])
async def test_who_speaks_another_version_is_refused_and_nobody_leaves_for_it(tmp_path: Path, what: str) -> None:
    async with welcomed(tmp_path) as (played, master):
        busy, seq = await played.busy(master)
        other = Talk(await trio.open_unix_socket(played.config.socket), m.FromDaemon)
        version = PROTOCOL_VERSION + 1
        asked = m.Attach(version, "h", "late", 1, 1, 1) if what == "attach" else m.AskToLeave(version, "", "", 0.0, "")
        await other.say(asked)
        said = await other.hear(m.Failure)
        assert (said.error, said.what) == ("ProtocolError", "speaks another version of the protocol")
        assert (said.expected, said.got) == (f"version {PROTOCOL_VERSION}", str(version))
        await other.stream.aclose()
        await master.say(m.Commit("g", 1, seq, 1))
        assert (await busy.hear(m.Result)).id == 1


async def test_a_state_folder_is_one_daemons(tmp_path: Path) -> None:
    """Two that share one would take each other's receipt."""
    token = str(Token(bytes(32), "abababab", "s" * 43, "127.0.0.1:9"))
    made = {"listen": "127.0.0.1:0", "join": token, "state": str(tmp_path / "state"), "measure": False}
    first, second = (PeerConfig(master="127.0.0.1:9", socket=str(tmp_path / name), **made) for name in "ab")
    stop = trio.Event()
    async with trio.open_nursery() as nursery:
        await nursery.start(partial(serve, first, stop=stop))
        running = rf"another daemon, which runs.*got at {tmp_path}/a, process {os.getpid()}; give each .* --state"
        with trio.fail_after(50), pytest.raises(ConfigError, match=running):
            await serve(second, stop=trio.Event())
        assert not (tmp_path / "b").exists()
        stop.set()
    async with trio.open_nursery() as nursery:  # nobody has it any more
        await nursery.start(partial(serve, second, stop=(stop := trio.Event())))
        stop.set()


async def test_a_daemon_keeps_the_name_that_it_was_admitted_by_and_says_where_its_key_is(tmp_path: Path) -> None:
    key = Key.new()
    folder = admitted(tmp_path, "d7", key).folder
    for name, called in (("", "d7"), ("other", "other")):
        config = PeerConfig(
            master="127.0.0.1:9", socket=str(tmp_path / "s"), listen="127.0.0.1:0", join=str(token_of(key)),
            state=folder, name=name, measure=False,
        )  # fmt: skip
        async with trio.open_nursery() as nursery:
            started = await nursery.start(partial(serve, config, stop=(stop := trio.Event())))
            question = partial(ask, started.socket, m.LocalStatusRequest(), m.LocalStatus, timeout=30, who="d")
            found = json.loads((await trio.to_thread.run_sync(question)).text)
            assert (started.name, found["name"], found["state"]) == (called, called, folder)
            stop.set()


def test_a_masters_folder_is_no_daemons(tmp_path: Path) -> None:
    (tmp_path / "master.key").touch()
    config = PeerConfig(join=str(token_of(Key.new())), state=str(tmp_path))
    with pytest.raises(ConfigError, match=f"--state {tmp_path}: is a master's; .*got one with master.key"):
        wallet_of(config, "/run/peer.sock")


def test_machines_that_share_a_home_have_folders_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    config, folders = PeerConfig(join=str(Token(bytes(32), "abababab", "s" * 43, "h:9"))), set()
    for host in ("one", "two", "one"):
        monkeypatch.setattr("socket.gethostname", lambda host=host: host)
        found = wallet_of(config, "/run/peer.sock")
        assert found is not None
        folders.add(found.folder)
    assert len(folders) == 2


# ---- what a daemon does before it lets a member hear that its operations stop -----------------------------------

SUM = Descriptor(Kind.all_reduce, DType.float32, ReduceOp.sum, 4)
QUICK = dataclasses.replace(DEFAULT, drain_timeout=0.1)  # nobody takes the end of what still runs
FILLED = 8192  # in the arena: a byte for each block of the input that is there


class Pair:
    """Two daemons with their engines and the links between them, and a member of one group at each.

    Attributes:
        daemons: the real ones.
        masters: the played one's connections with them.
        clients: of the members.
        epoch: that the members are in.
        did: what the first daemon's engine was told or asked, in order.
    """

    def __init__(self) -> None:
        self.daemons: list[Daemon] = []
        self.masters: list[Talk] = []
        self.clients: list[Talk] = []
        self.epoch = ALONE
        self.did: list[str] = []
        self.waiting: list[Any] = []  # the first engine's events that a test has seen, and its daemon has not
        self.take = Engine.events

    async def post(self, which: int, call: Descriptor = SUM, filled: int = -1) -> None:
        await self.clients[which].say(m.Post(1, call, 0, 4096, 1, filled=filled))

    @property
    def first(self) -> Engine:
        return self.daemons[0].engine

    def runs(self, daemon: Daemon) -> bool:
        """Whether its engine has an operation."""
        return bool(daemon._by_engine_id)

    def finished(self) -> bool:
        """Whether the first engine has finished an operation; the daemon has not heard of it."""
        self.waiting += self.take(self.first)
        return any(isinstance(one, Done) for one in self.waiting)

    def fill(self) -> None:
        """The first client's input is there."""
        arena = self.daemons[0].sessions[0].arena
        arena._map[FILLED] = 1
        os.eventfd_write(arena.bell, 1)


async def silent(*_: object) -> None:
    await trio.sleep_forever()


async def until(condition: Callable[[], object]) -> None:
    while not condition():  # noqa: ASYNC110 - the engine has no event for this
        await trio.sleep(0.001)


@contextlib.asynccontextmanager
async def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deaf: tuple[int, ...] = ()) -> AsyncIterator[Pair]:
    """What engine and notes say lies there until something else makes a daemon look, of those that are *deaf*."""
    made = Pair()

    class Kept(Daemon):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            made.daemons.append(self)
            if len(made.daemons) - 1 in deaf:
                monkeypatch.setattr(self, "watch_engine", trio.sleep_forever)
                monkeypatch.setattr(self.links, "watch_notes", silent)

    def record(name: str) -> None:
        real = getattr(Engine, name)

        def recorded(self: Engine, *args: Any) -> Any:
            if not made.daemons or self is not made.first:
                return real(self, *args)
            made.did.append(name)
            seen, made.waiting = (made.waiting, []) if name == "events" else ([], made.waiting)
            return seen + real(self, *args) if name == "events" else real(self, *args)

        monkeypatch.setattr(Engine, name, recorded)

    monkeypatch.setattr(daemon_module, "Daemon", Kept)
    for name in ("withhold_vote", "events", "cancel"):
        record(name)
    async with stage(tmp_path) as played, trio.open_nursery() as nursery:
        infos = []
        for mid, name in enumerate("ab", 1):
            path = str(tmp_path / name)
            config = dataclasses.replace(
                played.config, socket=path, name=f"d{name}", lanes=1, arena_bytes=1 << 20, limits=QUICK
            )
            started = await nursery.start(partial(serve, config, stop=trio.Event()))
            made.masters.append(await played.welcome())
            made.clients.append(Talk(await trio.open_unix_socket(path), m.FromDaemon))
            await made.clients[-1].say(m.Attach(PROTOCOL_VERSION, "g", name, 2, 1, 1))
            infos.append(m.MemberInfo(mid, name, f"d{name}", list(started.data), ""))
        made.epoch = replace(ALONE, members=infos, plan=replace(ALONE.plan, collectors="members"))
        for mid, (master, client) in enumerate(zip(made.masters, made.clients, strict=True), 1):
            await master.hear(m.Join)
            await master.say(m.Joined("g", "ab"[mid - 1], mid, ""), replace(made.epoch, to=mid))
            await client.hear(m.EpochInfo)
        yield made
        for client in made.clients:
            await client.stream.aclose()
        nursery.cancel_scope.cancel()


async def test_notes_are_said_by_the_engine_alone_whatever_failpoint_is_armed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault tests run what ships; but for the failpoints that strike between two notes."""
    said: list[int] = []  # of which operations
    real = Engine.send_note

    def send_note(self: Engine, link: int, data: bytes) -> bool:
        note = unpack(data, "g", 0)
        assert isinstance(note, m.Vote)
        said.append(note.seq)
        return real(self, link, data)

    monkeypatch.setattr(Engine, "send_note", send_note)
    async with pair(tmp_path, monkeypatch) as two:
        for daemon in two.daemons:
            daemon.failpoints.arm("on_epoch", "kill")
        for which in (0, 1):
            await two.post(which)
        for client in two.clients:
            result = await client.hear(m.Result)
            assert (result.seq, result.contributors) == (1, ["a", "b"])
        assert set(said) <= {0}  # 0: how far this one has committed, once a link is up
        for daemon in two.daemons:
            daemon.failpoints.arm("on_epoch", "clear")


async def test_what_the_engine_has_finished_is_in_the_report_of_who_freezes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C2: its note may have been heard. Here nobody has taken in that it is finished."""
    async with pair(tmp_path, monkeypatch, deaf=(0, 1)) as two:
        for which in (0, 1):
            await two.post(which)
        await until(two.finished)
        await two.masters[0].say(m.Abort("g", 1, 0, "somebody is lost"))
        frozen = await two.masters[0].hear(m.Frozen)
        assert [seq for seq, _, _ in frozen.finished.done] == [1]


async def freezes_with_nothing(two: Pair) -> None:
    """The first member is told to freeze: its report has no operation, and the other one has heard of none."""
    await two.masters[0].say(m.Abort("g", 1, 0, "somebody is lost"))
    frozen = await two.masters[0].hear(m.Frozen)
    assert (frozen.finished.done, frozen.finished.committed) == ([], 0)
    with trio.move_on_after(0.5):
        await two.clients[1].hear(m.Result)
        pytest.fail("the other member has heard a note of what the report lacks")


async def test_what_finishes_while_its_member_freezes_is_told_to_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C2: after what was finished is taken in, and before the operation is out of the engine, it ends there."""
    async with pair(tmp_path, monkeypatch, deaf=(0,)) as two:
        two.daemons[0].sessions[0].arena._map[FILLED] = 0
        await two.post(0, filled=FILLED)
        await two.post(1)
        for daemon in two.daemons:
            await until(partial(two.runs, daemon))
        take = two.daemons[0].take_events

        def and_then_it_ends() -> bool:
            found = take()
            two.fill()
            stand_still_until(two.finished)
            return found

        monkeypatch.setattr(two.daemons[0], "take_events", and_then_it_ends)
        await freezes_with_nothing(two)


async def test_what_begins_while_its_member_freezes_is_told_to_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C2: what is taken in before it freezes may begin an operation, such as one that a lost link had cut short."""
    async with pair(tmp_path, monkeypatch, deaf=(0,)) as two:
        await two.post(1)
        await until(partial(two.runs, two.daemons[1]))
        session, take = two.daemons[0].sessions[0], two.daemons[0].take_events

        def and_then_it_begins() -> bool:
            found = take()
            if not two.runs(two.daemons[0]) and session.member.epoch_number == 1:
                session._post(m.Post(1, SUM, 0, 4096, 1))
                stand_still_until(two.finished)
            return found

        monkeypatch.setattr(two.daemons[0], "take_events", and_then_it_begins)
        await freezes_with_nothing(two)


@pytest.mark.parametrize("what", ["abort", "epoch", "change", "evicted", "updated"])
async def test_before_a_member_stops_its_notes_are_withheld_and_events_taken_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    async with pair(tmp_path, monkeypatch) as two:
        await two.post(0)
        await until(partial(two.runs, two.daemons[0]))
        later = replace(two.epoch, epoch=2, key=b"l" * 16)
        said: dict[str, m.Message] = {
            "abort": m.Abort("g", 1, 0, "x"),
            "epoch": later,
            "change": m.EpochChange("g", 1, 1, 2, 1, [], [], [], None, 0, [], "x"),
            "evicted": m.Evicted("g", 1, "x", 0),
            "updated": m.Updated("g", 1, m.UpdateOutcome(1, 2, ["a"])),
        }
        two.did.clear()
        await two.masters[0].say(said[what])
        with trio.move_on_after(5):
            await until(lambda: {"withhold_vote", "updated" if what == "updated" else "cancel"} <= {*two.did, what})
        at = two.did.index("withhold_vote")
        assert "cancel" not in two.did[:at]
        assert two.did[at + 1 : at + 2] == ["events"]
