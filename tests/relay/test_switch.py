"""The switch of a relay and the daemons at it, over loopback in clear: splices, tickets, bounds."""

from __future__ import annotations

import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import pytest
import trio
from structlog.testing import capture_logs

from wancoll.limits import DEFAULT, PROTOCOL_VERSION
from wancoll.native.engine import Engine
from wancoll.net.dial import DialFailed, read_frame
from wancoll.net.listen import open_listeners, serve_connections
from wancoll.peer.config import PeerConfig
from wancoll.peer.links.hub import LinkHub
from wancoll.peer.links.relays import Relays
from wancoll.relay import switch
from wancoll.relay.switch import MAGIC
from wancoll.wire import messages as m
from wancoll.wire.framing import encode

LIMITS = replace(DEFAULT, connect_timeout=1.0, heartbeat_timeout=0.5, lane_timeout=1.0)


@dataclass
class End:
    """A daemon at the relay, and the connections that others have asked for."""

    relays: Relays
    came: Any


class Rig:
    """A relay, and daemons at it."""

    def __init__(self, nursery: trio.Nursery, port: LinkHub, address: str, streams: list[trio.SocketStream]) -> None:
        self._nursery, self.port, self.address = nursery, port, address
        self.info = m.RelayInfo("r", (address,))
        self.streams = streams

    def kept(self, stream: trio.SocketStream) -> trio.SocketStream:
        """The same, closed at the end."""
        self.streams.append(stream)
        return stream

    @property
    def switch(self) -> switch.Switch:
        assert self.port.switch is not None
        return self.port.switch

    async def connect(self) -> trio.SocketStream:
        """Somebody at the relay's port."""
        host, port = self.address.split(":")
        return self.kept(await trio.open_tcp_stream(host, int(port)))

    async def join(self, a: End, b: End) -> tuple[trio.SocketStream, trio.SocketStream]:
        """Both ends of a splice."""
        near = self.kept(await a.relays.dial("b", 5.0))
        return near, self.kept(await b.came.receive())

    def daemon(self, name: str) -> End:
        put, get = trio.open_memory_channel[trio.SocketStream](100)

        async def accept(stream: trio.SocketStream) -> None:
            await put.send(stream)

        made = Relays(name, None, LIMITS, self._nursery, lambda: self.address, accept, near_only=True)
        made.told([self.info])
        return End(made, get)

    async def pair(self) -> tuple[trio.SocketStream, trio.SocketStream]:
        """Both ends of a splice between two new daemons."""
        return await self.join(self.daemon("a"), self.daemon("b"))


@asynccontextmanager
async def rig(rate: str = "1000GB/s") -> AsyncIterator[Rig]:
    listeners = open_listeners("127.0.0.1:0")
    streams: list[trio.SocketStream] = []
    try:
        with trio.fail_after(30):
            async with trio.open_nursery() as nursery:
                config = PeerConfig(limits=LIMITS, relay=rate)
                port = LinkHub(cast(Engine, None), config, "r", nursery)  # it raises no links
                nursery.start_soon(serve_connections, listeners, port.accept, port.lets_in)
                yield Rig(nursery, port, f"127.0.0.1:{listeners[0].getsockname()[1]}", streams)
                nursery.cancel_scope.cancel()
    finally:
        for one in (*listeners, *(stream.socket for stream in streams)):
            one.close()


async def all_of(stream: trio.SocketStream) -> bytes:
    data = b""
    while more := await stream.receive_some(65536):
        data += more
    return data


async def test_bytes_and_half_closes_pass_both_ways() -> None:
    async with rig() as relay:
        near, far = await relay.pair()
        sent = bytes(range(256)) * 4096

        async def send() -> None:
            await near.send_all(sent)
            await near.send_eof()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(send)
            assert await all_of(far) == sent
        await far.send_all(b"answer")  # the other half is open yet
        await far.send_eof()
        assert await all_of(near) == b"answer"
        assert relay.switch.carried == len(sent) + 6


async def test_a_reset_passes_at_once() -> None:
    async with rig() as relay:
        near, far = await relay.pair()
        near.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        near.socket.close()
        with pytest.raises(trio.BrokenResourceError):
            await all_of(far)
        while relay.switch.splices:  # noqa: ASYNC110 - it has no event
            await trio.sleep(0.01)


async def test_a_slow_reader_stops_the_sender() -> None:
    async with rig() as relay:
        near, far = await relay.pair()
        sent = 0
        with trio.move_on_after(1.0):
            while True:
                sent += await near.socket.send(bytes(1 << 20))
        assert sent < 64 << 20  # what the kernel's buffers and the relay's hold
        assert relay.switch.carried < 64 << 20
        del far


async def test_an_end_that_breaks_off_ends_the_splice_although_the_other_takes_nothing() -> None:
    async with rig() as relay:
        near, far = await relay.pair()
        with trio.move_on_after(0.5):
            while True:
                await near.socket.send(bytes(1 << 20))
        assert relay.switch.splices == 1
        near.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        near.socket.close()
        while relay.switch.splices:  # noqa: ASYNC110 - it has no event
            await trio.sleep(0.01)
        del far


async def test_a_rate_holds_for_all_splices_together() -> None:
    async with rig("4MB/s") as relay:
        ends = [await relay.pair() for _ in range(2)]
        began = trio.current_time()
        async with trio.open_nursery() as nursery:
            for near, far in ends:
                nursery.start_soon(near.send_all, bytes(1_000_000))

                async def take(far: trio.SocketStream = far) -> None:
                    left = 1_000_000
                    while left:
                        left -= len(await far.receive_some(left))

                nursery.start_soon(take)
        assert 0.35 < trio.current_time() - began < 5


async def test_a_ticket_is_good_once_and_another_one_for_nothing() -> None:
    async with rig() as relay:
        near, _ = await relay.pair()
        for shown in (MAGIC + bytes(32), b"W" + bytes(39)):
            stranger = await relay.connect()
            await stranger.send_all(shown)
            assert await stranger.receive_some(1) == b""
        await near.send_all(b"x")


async def test_who_is_not_there_is_named_and_one_that_comes_is_reached() -> None:
    async with rig() as relay:
        a = relay.daemon("a")
        with pytest.raises(DialFailed, match="daemon b is not at this relay"):
            await a.relays.dial("b", 0.3)
        b = relay.daemon("b")
        await relay.join(a, b)


async def test_the_second_of_two_relays_is_taken_where_the_first_is_gone() -> None:
    async with rig() as one, rig() as two:
        a, b = one.daemon("a"), one.daemon("b")
        for end in (a, b):
            end.relays.told([one.info, m.RelayInfo("r2", (two.address,))])
        await one.join(a, b)
        for end in (a, b):
            end.relays.told([m.RelayInfo("r2", (two.address,))])
        near, far = await one.join(a, b)
        await near.send_all(b"x")
        assert await far.receive_some(1) == b"x"
        assert (one.switch.carried, two.switch.carried) == (0, 1)


async def test_a_relay_that_has_died_unheard_leaves_time_for_another_one() -> None:
    async with rig() as one:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            a, b = one.daemon("a"), one.daemon("b")
            await one.join(a, b)  # both are there
            dead = m.RelayInfo("dead", (f"127.0.0.1:{silent.getsockname()[1]}",))
            for end in (a, b):
                end.relays.told([dead, one.info])
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_says_that_it_is_one, silent)
                while next(iter(a.relays._relays.values())).stream is None:  # noqa: ASYNC110 - it has no event
                    await trio.sleep(0.01)
                one.kept(await a.relays.dial("b", 1.0))
                one.kept(await b.came.receive())
                nursery.cancel_scope.cancel()


async def _says_that_it_is_one(listener: socket.socket) -> None:
    """Play a relay that beats, and answers no question."""

    async def play(stream: trio.SocketStream) -> None:
        await stream.send_all(encode(m.RelayBeat()))
        await trio.sleep_forever()

    await serve_connections([listener], play)


async def test_oldest_tickets_are_void_where_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(switch, "_MOST_TICKETS", 4)
    async with rig() as relay:
        both = [await relay.connect() for _ in range(2)]
        for name, stream in zip("xy", both, strict=True):
            await stream.send_all(encode(m.AtRelay(PROTOCOL_VERSION, name)))
        await both[0].receive_some(1000)
        for number in range(10):
            await both[0].send_all(encode(m.RelayDial(number, "y")))
        heard = 0
        while heard < 10:
            heard += (await both[0].receive_some(10000)).count(b"RelayDialled")
        assert len(relay.switch._tickets) <= 5


async def test_a_silent_daemon_is_given_up() -> None:
    async with rig() as relay:
        silent = await relay.connect()
        await silent.send_all(encode(m.AtRelay(PROTOCOL_VERSION, "x")))
        assert b"RelayBeat" in await silent.receive_some(1000)
        began = trio.current_time()
        assert await all_of(silent) == b""
        assert 0.9 < trio.current_time() - began < 10
        assert not relay.switch._here


async def test_a_relay_that_calls_and_cannot_be_dialled_costs_no_more_than_that_call() -> None:
    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    [listener] = listeners
    accepted: list[trio.SocketStream] = []

    async def accept(stream: trio.SocketStream) -> None:
        accepted.append(stream)

    with capture_logs() as logs, trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            address = f"127.0.0.1:{listener.socket.getsockname()[1]}"
            relays = Relays("d", None, LIMITS, nursery, lambda: address, accept, near_only=True)
            relays.told([m.RelayInfo("r", (address,))])
            stream = await listener.accept()
            await listener.aclose()
            await stream.send_all(encode(m.RelayBeat()) + encode(m.RelayCalled(b"x" * 32)))
            while not any(entry["event"] == "not met" for entry in logs):  # noqa: ASYNC110
                await trio.sleep(0.01)
            assert not accepted
            await stream.aclose()
            nursery.cancel_scope.cancel()


async def test_a_daemon_voids_its_own_tickets_and_reaches_not_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(switch, "_MOST_ASKED", 4)
    async with rig() as relay:
        streams = {name: await relay.connect() for name in "xyz"}
        for name, stream in streams.items():
            await stream.send_all(encode(m.AtRelay(PROTOCOL_VERSION, name)))
            await stream.receive_some(1000)
        await streams["z"].send_all(encode(m.RelayDial(0, "y")))
        honest = await streams["z"].receive_some(1000)
        for number in range(10):
            await streams["x"].send_all(encode(m.RelayDial(number, "y")))
        heard = b""
        while heard.count(b"RelayDialled") < 10:
            heard += await streams["x"].receive_some(10000)
        pairs = list(dict.fromkeys(relay.switch._tickets.values()))
        assert [pair.by for pair in pairs].count("z") == 1
        assert [pair.by for pair in pairs].count("x") <= 3
        assert b"RelayDialled" in honest
        await streams["x"].send_all(encode(m.RelayDial(99, "x")))
        assert b"is not at this relay" in await streams["x"].receive_some(1000)


# ---- two that dial each other --------------------------------------------------------------------------


async def met(relay: Rig) -> tuple[list[trio.SocketStream], list[tuple[float, m.Met]]]:
    """Both ends of a pair that the switch introduces: their connections, and what each was told, when."""
    here = {name: await relay.connect() for name in "xy"}
    for name, stream in here.items():
        await stream.send_all(encode(m.AtRelay(PROTOCOL_VERSION, name)))
        assert await read_frame(stream.socket, m.FromRelay, who="it") == m.RelayBeat()
    await here["x"].send_all(encode(m.RelayDial(7, "y", punched=True)))
    dialled = await read_frame(here["x"].socket, m.RelayDialled, who="it")
    called = await read_frame(here["y"].socket, m.RelayCalled, who="it")
    assert (dialled.number, dialled.reason, called.punched) == (7, "", True)
    ends = [await relay.connect() for _ in range(2)]
    told: list[Any] = [None, None]

    async def hear(i: int) -> None:
        word = await read_frame(ends[i].socket, m.Met, who="it")
        told[i] = trio.current_time(), word

    await ends[0].send_all(MAGIC + dialled.ticket)
    while relay.switch._tickets[called.ticket].other is None:  # noqa: ASYNC110 - it has no event
        await trio.sleep(0.01)
    await ends[1].send_all(MAGIC + called.ticket)
    async with trio.open_nursery() as nursery:
        for i in range(2):
            nursery.start_soon(hear, i)
    return ends, told


async def test_both_ends_are_told_where_the_other_is_and_the_switch_closes_neither_before_they_do() -> None:
    async with rig() as relay:
        relay.port.switch = switch.Switch(LIMITS, splices=False, introduces=True)
        ends, told = await met(relay)
        hosts = ["{}:{}".format(*end.socket.getsockname()) for end in ends]
        assert [one.address for _, one in told] == hosts[::-1]
        with trio.move_on_after(0.2) as waited:
            await ends[0].receive_some(1)
        assert waited.cancelled_caught
        assert relay.switch.splices == 1
        for end in ends:
            await end.send_eof()
        while relay.switch.splices:  # noqa: ASYNC110 - it has no event
            await trio.sleep(0.01)


async def test_who_is_nearer_is_told_later_by_half_the_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    trips = iter([0.0, 0.8])  # of the one that came first, of the other
    monkeypatch.setattr(switch, "round_trip", lambda _: next(trips))
    async with rig() as relay:
        relay.port.switch = switch.Switch(LIMITS, introduces=True)
        _, [(nearer, _), (farther, _)] = await met(relay)
        assert 0.3 < nearer - farther < 0.8


async def test_ends_that_never_meet_are_let_go_of_in_time() -> None:
    async with rig() as relay:
        relay.port.switch = switch.Switch(LIMITS, introduces=True)
        ends, _ = await met(relay)
        began = trio.current_time()
        assert await all_of(ends[0]) == b""
        assert 0.5 < trio.current_time() - began < 5


@pytest.mark.parametrize("punched", [True, False])
async def test_a_switch_does_what_it_is_there_for_alone(punched: bool) -> None:
    async with rig() as relay:
        relay.port.switch = switch.Switch(LIMITS, splices=punched, introduces=not punched)
        streams = [await relay.connect() for _ in range(2)]
        for name, stream in zip("xy", streams, strict=True):
            await stream.send_all(encode(m.AtRelay(PROTOCOL_VERSION, name)))
            await read_frame(stream.socket, m.RelayBeat, who="it")
        await streams[0].send_all(encode(m.RelayDial(1, "y", punched)))
        answer = await read_frame(streams[0].socket, m.RelayDialled, who="it")
        assert (answer.ticket, answer.reason) == (b"", "this relay does not do that")


@pytest.mark.parametrize("info", [m.RelayInfo("r", ("127.0.0.1:1",)), m.AT_MASTER], ids=["a relay", "the master"])
async def test_only_a_master_may_have_a_daemon_dial_and_one_in_clear_dials_this_machine_alone(
    info: m.RelayInfo,
) -> None:
    [listener] = await trio.open_tcp_listeners(0, host="127.0.0.1")
    address = "{}:{}".format(*listener.socket.getsockname())
    with capture_logs() as logs, trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            relays = Relays("d", None, LIMITS, nursery, lambda: address, trio.aclose_forcefully, near_only=True)
            told = m.RelayInfo("r", (address,)) if info.addresses else info
            relays.told([told])
            stream = await listener.accept()
            streams = [stream]
            await read_frame(stream.socket, m.AtRelay, who="it")
            await stream.send_all(encode(m.RelayBeat()) + encode(m.RelayCalled(b"x" * 32, punched=True)))
            with trio.move_on_after(0.5) as silent:
                end = await listener.accept()
            assert silent.cancelled_caught is bool(info.addresses)
            if not info.addresses:
                streams.append(end)
                assert await end.receive_some(100) == MAGIC + b"x" * 32
                await end.send_all(encode(m.Met("203.0.113.9:22")))
                assert await end.receive_some(1) == b""
                assert (
                    "203.0.113.9:22 is beyond this machine"
                    in next(e for e in logs if e["event"] == "not met")["reason"]
                )
            nursery.cancel_scope.cancel()
    for one in (listener, *streams):
        one.socket.close()
