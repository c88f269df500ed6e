"""The whole daemon against a master that is played: it is sent away for good, and when it says that it is ready."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest
import trio
import trio.testing

from wancoll.collective import Descriptor, Kind
from wancoll.errors import ConfigError
from wancoll.limits import DEFAULT, PROTOCOL_VERSION
from wancoll.local import join_address
from wancoll.peer.config import PeerConfig
from wancoll.peer.daemon import serve
from wancoll.wire import messages as m
from wancoll.wire.framing import Decoder, encode

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
        self.opened, self._connections = trio.open_memory_channel[Talk](10)
        self._clients: list[Talk] = []

    async def welcome(self) -> Talk:
        """The master's connection with the daemon, once it is welcome."""
        master = await self._connections.receive()
        await master.hear(m.Hello)
        await master.say(m.Welcome(PROTOCOL_VERSION, 1, 1.0, 5.0, 1))
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
    with trio.fail_after(20):
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
                assert (ended.id, ended.error) == (1, "OutcomeUnknown")
                assert TWIN in ended.got
                for client in (busy, waiting):
                    last = await client.hear(m.Failure)
                    assert (last.id, last.error) == (0, "ConfigError")
                    assert TWIN in last.got
        assert time.monotonic() - began < 2.0
        assert not await trio.Path(played.config.socket).exists()


async def test_who_waits_for_a_place_is_told_that_there_is_no_master(tmp_path: Path) -> None:
    config = PeerConfig(socket=str(tmp_path / "s"), listen="127.0.0.1:0", master="127.0.0.1:1", name="d")
    stop, played = trio.Event(), Stage(config)
    with trio.fail_after(20):
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
