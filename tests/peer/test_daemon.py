"""The whole daemon against a master that is played: it is sent away for good, and when it says that it is ready."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest
import trio
import trio.testing
from msgspec.structs import replace

from wancoll.collective import Descriptor, Kind
from wancoll.errors import ConfigError
from wancoll.limits import DEFAULT, PROTOCOL_VERSION
from wancoll.local import join_address
from wancoll.net import clock
from wancoll.peer.config import PeerConfig
from wancoll.peer.daemon import _wallet as wallet_of
from wancoll.peer.daemon import serve
from wancoll.trust.token import Token
from wancoll.wire import messages as m
from wancoll.wire.framing import Decoder, encode

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
        return client, (await master.hear(m.Done)).seq

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
    async with stage(tmp_path) as played, trio.open_nursery() as nursery:
        await nursery.start(partial(serve, played.config, stop=trio.Event()))
        master = await played.welcome()
        await master.stream.aclose()
        mistaken = await played.connections.receive()
        await mistaken.say(m.Bye("this master speaks TLS only", final=True))
        await mistaken.stream.aclose()
        await played.welcome()
        nursery.cancel_scope.cancel()


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
    async with stage(tmp_path) as played, trio.open_nursery() as nursery:
        await nursery.start(partial(serve, played.config, stop=trio.Event()))
        master = await played.welcome()
        busy, _ = await played.busy(master)
        await master.stream.aclose()
        told = await busy.hear(m.Slow)
        assert told.id == 1
        assert f"it is finished here and waits for the master at {played.config.master}, away for " in told.text
        asks = Talk(await trio.open_unix_socket(played.config.socket), m.FromDaemon)
        await asks.say(m.LocalStatusRequest())
        assert f"not there: the master at {played.config.master}" in (await asks.hear(m.LocalStatus)).text
        await asks.stream.aclose()
        nursery.cancel_scope.cancel()


async def test_who_commits_by_itself_and_slept_unheard_for_longer_than_its_name_waits_is_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C8, though the connection looks as it did before."""
    asleep, awake = [0.0], clock.awake_or_asleep
    monkeypatch.setattr(clock, "awake_or_asleep", lambda: awake() + asleep[0])
    async with stage(tmp_path) as played, trio.open_nursery() as nursery:
        await nursery.start(partial(serve, played.config, stop=trio.Event()))
        master = await played.welcome()
        client = await played.attach("busy")
        await master.hear(m.Join)
        await master.say(m.Joined("g", "busy", 1, ""), replace(ALONE, plan=replace(ALONE.plan, commit="members")))
        epoch = (await client.hear(m.EpochInfo)).epoch
        for number, slept in ((1, 0.0), (2, DEFAULT.master_grace), (3, DEFAULT.master_grace + SILENCE)):
            asleep[0] = slept
            await client.say(m.Post(number, Descriptor(Kind.barrier), 0, 0, epoch))
            if number < 3:
                assert (await client.hear(m.Result)).id == number
        assert (await client.hear(m.Failure)).error == "MasterUnreachable"
        await master.hear(m.Leave)
        nursery.cancel_scope.cancel()


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
    async with stage(tmp_path) as played, trio.open_nursery() as nursery:
        await nursery.start(partial(serve, played.config, stop=trio.Event()))
        master = await played.welcome()
        busy, seq = await played.busy(master)
        other = Talk(await trio.open_unix_socket(played.config.socket), m.FromDaemon)
        version = PROTOCOL_VERSION + 1
        asked = m.Attach(version, "h", "late", 1, 1, 1) if what == "attach" else m.AskToLeave(version, "", "", 0.0, "")
        await other.say(asked)
        said = await other.hear(m.Failure)
        assert (said.error, said.what) == ("ProtocolError", "speaks another protocol version")
        assert (said.expected, said.got) == (str(PROTOCOL_VERSION), str(version))
        await other.stream.aclose()
        await master.say(m.Commit("g", 1, seq, 1))
        assert (await busy.hear(m.Result)).id == 1
        nursery.cancel_scope.cancel()


async def test_a_state_folder_is_one_daemons(tmp_path: Path) -> None:
    """Two that share one would take each other's key and certificate."""
    token = str(Token("0" * 64, "abababab", "s" * 43, "127.0.0.1:9"))
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


def test_machines_that_share_a_home_have_folders_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    config, folders = PeerConfig(join=str(Token("0" * 64, "abababab", "s" * 43, "h:9"))), set()
    for host in ("one", "two", "one"):
        monkeypatch.setattr("socket.gethostname", lambda host=host: host)
        found = wallet_of(config, "/run/peer.sock")
        assert found is not None
        folders.add(found.folder)
    assert len(folders) == 2
