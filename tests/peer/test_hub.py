"""Links over real sockets and engines: two daemons' hubs, and what their members are told."""

from __future__ import annotations

import math
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from types import SimpleNamespace
from typing import TypeVar

import pytest
import trio
import trio.testing

from tests.peer.test_member import KEY
from wancoll.limits import DEFAULT, Limits
from wancoll.local import join_address
from wancoll.native.engine import Engine, LaneDown
from wancoll.net.dial import DialFailed, read_frame
from wancoll.net.wallet import Wallet
from wancoll.peer.config import PeerConfig
from wancoll.peer.core import links as core
from wancoll.peer.links.connections import Connection, WatchedSocket
from wancoll.peer.links.hub import LinkHub
from wancoll.wire import messages as m
from wancoll.wire.framing import encode

LANES = 2
T = TypeVar("T")


class End:
    """Member *mid* of two, with a daemon's worth of links."""

    address = ""  # where it listens

    def __init__(self, mid: int, nursery: trio.Nursery, wallet: Wallet | None = None, limits: Limits = DEFAULT) -> None:
        self.mid, self.engine = mid, Engine()
        config = PeerConfig(lanes=LANES, limits=limits)
        self.hub = LinkHub(self.engine, config, f"d{mid}", nursery, wallet)
        self.told, self._heard = trio.open_memory_channel[core.Told](math.inf)
        self.owner = self.hub.member(self.told.send_nowait)
        nursery.start_soon(self.hub.keep_time)
        nursery.start_soon(self.hub.watch_notes, lambda: None, lambda: None)
        nursery.start_soon(self._watch_engine)

    async def _watch_engine(self) -> None:
        while True:
            await trio.lowlevel.wait_readable(self.engine.fd)
            for event in self.engine.events():
                assert isinstance(event, LaneDown)
                self.hub.lane_down(event)

    async def hears(self, kind: type[T]) -> T:
        """The next thing that the member is told, which is of this kind.

        Links that are lost lose one lane after the other: that of the lane for notes is passed over.
        """
        told = await self._heard.receive()
        while isinstance(told, core.NotesLost | core.LinkBroken) and kind is not type(told):
            told = await self._heard.receive()
        assert isinstance(told, kind), told
        return told

    @property
    def link(self) -> core.Link:
        return self.owner.links[3 - self.mid, core.COLLECTIVES]


@asynccontextmanager
async def ends_of(*wallets: Wallet | None, keys: Sequence[bytes] = ()) -> AsyncIterator[list[End]]:
    """Two daemons' ends, which try to make a link. *keys*: that the epoch lists; none: theirs."""
    keys = keys or [b"" if wallet is None else wallet.key.public for wallet in wallets]
    with trio.fail_after(50):
        async with trio.open_nursery() as nursery:
            ends = [End(mid, nursery, wallets[mid - 1]) for mid in (1, 2)]
            infos = []
            for end, key in zip(ends, keys, strict=True):
                listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
                nursery.start_soon(partial(trio.serve_listeners, end.hub.accept, listeners))
                end.address = join_address(*listeners[0].socket.getsockname()[:2])
                infos.append(m.MemberInfo(end.mid, f"m{end.mid}", f"d{end.mid}", [end.address], "", key))
            plan = m.Plan(LANES, 1 << 20, False, {}, [], 0, "")
            for end in ends:
                epoch = m.Epoch("g", end.mid, 1, 1, infos, plan, KEY, 1, 0, [], "")
                end.hub.ask(end.owner, core.Enter(epoch, frozenset({3 - end.mid})))
            yield ends
            for end in ends:
                end.hub.ask(end.owner, core.Leave())
            nursery.cancel_scope.cancel()
    for end in ends:
        end.engine.close()


async def test_notes_pass_between_members_and_lanes_that_break_are_dialled_again() -> None:
    async with ends_of(None, None) as ends:
        a, b = ends
        a.hub.send_note(a.owner, 2, b"not up yet: dropped")
        for end in ends:
            await end.hears(core.LinksUp)
            assert end.link.attached == set(range(LANES + 1))
            assert end.hub.counts()["lanes"] == len(end.hub.looks()[end.link.number]) == LANES + 1
        for _ in range(2):
            for i in range(100):
                a.hub.send_note(a.owner, 2, b"%d" % i)
            for i in range(100):
                assert await b.hears(core.Noted) == core.Noted(b.owner, 1, b"%d" % i)
            b.hub.send_note(b.owner, 1, b"and back")
            assert (await a.hears(core.Noted)).note == b"and back"
            # once more over another set, since bytes are lost
            a.hub.lane_down(LaneDown(a.link.number, LANES, 0, "it broke"))
            assert "it broke" in (await a.hears(core.LinkLost)).reason
            assert "a set that is not up here" in (await b.hears(core.LinkLost)).reason, "it did not wait for more"
            for end in ends:
                await end.hears(core.LinksUp)
        for nth, end in zip((3, 5), ends, strict=True):  # a lane that carries data is dialled again, and nobody is told
            watched = end.hub._watched[end.link.number][0]
            assert isinstance(watched, WatchedSocket)
            watched._socket.shutdown(socket.SHUT_RDWR)
            while any(one.link.connections.get(0) != nth or 0 not in one.link.attached for one in ends):  # noqa: ASYNC110
                await trio.sleep(0.01)
            assert all(one.link.up for one in ends)
            a.hub.send_note(a.owner, 2, b"as before")
            assert (await b.hears(core.Noted)).note == b"as before"
        watched = a.hub._watched[a.link.number][LANES]
        assert isinstance(watched, WatchedSocket)
        watched._socket.shutdown(socket.SHUT_RDWR)  # that for notes: members are told what they cannot say
        for end in ends:
            await end.hears(core.NotesLost)
            await end.hears(core.LinksUp)
            assert end.link.up
            assert end.link.connections[LANES] == 3
        b.hub.send_note(b.owner, 1, b"said again")
        assert (await a.hears(core.Noted)).note == b"said again"
        while a.engine.send_note(a.link.number, bytes(128)):
            pass  # as if the other end's daemon stood still: no task has run
        a.hub.send_note(a.owner, 2, b"one too many")
        assert "takes no notes" in (await a.hears(core.LinkLost)).reason


async def test_a_lane_that_is_welcome_gives_way_to_no_stranger(monkeypatch: pytest.MonkeyPatch) -> None:
    said, stranger_came = trio.Event(), trio.Event()

    async def slowly(connection: Connection, data: bytes) -> None:
        said.set()
        await stranger_came.wait()
        await connection._stream.send_all(data)

    monkeypatch.setattr(Connection, "send_all", slowly)
    with trio.fail_after(50):
        async with trio.open_nursery() as nursery:
            end = End(1, nursery, limits=Limits(pending_connections=1, handshake_least=0.0))
            [listener] = await trio.open_tcp_listeners(0, host="127.0.0.1")
            nursery.start_soon(partial(trio.serve_listeners, end.hub.accept, [listener]))
            host, port = listener.socket.getsockname()[:2]
            infos = [m.MemberInfo(mid, f"m{mid}", f"d{mid}", [join_address(host, port)], "") for mid in (1, 2)]
            epochs = [
                m.Epoch("g", mid, 1, 1, infos, m.Plan(LANES, 1 << 20, False, {}, [], 0, ""), KEY, 1, 0, [], "")
                for mid in (1, 2)
            ]
            end.hub.ask(end.owner, core.Enter(epochs[0], frozenset({2})))
            links = core.Links(DEFAULT)
            commands = links.ask(links.member(), core.Enter(epochs[1], frozenset({1})), 0.0)
            [dial] = [one for one in commands if isinstance(one, core.Dial)]
            lane = await trio.open_tcp_stream(host, port, local_address="127.0.0.1")
            await lane.send_all(encode(dial.hellos[0]))
            await said.wait()
            stranger = await trio.open_tcp_stream(host, port, local_address="127.0.0.2")
            await trio.testing.wait_all_tasks_blocked()
            assert end.hub.counts()["handshakes"] == 1
            stranger_came.set()
            assert isinstance(await read_frame(Connection(lane), m.LaneAnswer, who="it"), m.LaneWelcome)
            await lane.aclose()
            await stranger.aclose()
            nursery.cancel_scope.cancel()
    end.hub.ask(end.owner, core.Leave())
    end.engine.close()


async def test_a_bug_of_one_lane_ends_no_daemon_where_the_dial_is_given_up_in_the_same_moment() -> None:
    """The link is closed by another lane's failure, a third one is still dialling, and the group has both of it."""
    told, all_dial = list[core.Event](), trio.Event()

    class Fails:
        dials = 0

        async def dial(self, *_: object, near: bool, **__: object) -> Connection:
            self.dials += 1
            number = self.dials
            if number == 3:
                all_dial.set()
                await trio.sleep_forever()
            await all_dial.wait()
            raise DialFailed("refused") if number == 1 else NotImplementedError

    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            end, given_up = End(1, nursery), trio.CancelScope()

            def step(event: core.Event) -> None:
                told.append(event)
                given_up.cancel()

            end.hub.connector, end.hub.step = Fails(), step  # type: ignore[assignment, method-assign]
            other = m.MemberInfo(2, "m2", "d2", ["127.0.0.1:1"], "")
            hellos = tuple(SimpleNamespace(lane=lane, connection=1) for lane in range(3))
            await end.hub._dial(core.Dial(1, other, hellos), given_up)  # type: ignore[arg-type]
            nursery.cancel_scope.cancel()
    assert [event.reason for event in told if isinstance(event, core.NotAttached)][:1] == ["refused"]
