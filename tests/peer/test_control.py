"""The control connection against masters of all sorts: which of them a daemon obeys."""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable
from typing import Protocol

import pytest
import trio

from wancoll.limits import PROTOCOL_VERSION
from wancoll.local import join_address
from wancoll.net.hot import Hot
from wancoll.peer.config import PeerConfig
from wancoll.peer.control import Control
from wancoll.wire import messages as m
from wancoll.wire.framing import Decoder, encode


class Lost(Protocol):
    def __call__(self, reason: str, *, live: bool) -> None: ...


async def controlled(
    master: Callable[[trio.SocketStream], Awaitable[None]],
    over: trio.Event,
    lost: Lost,
    obey: Callable[[m.FromMaster], None] = lambda _: None,
) -> Control:
    """A daemon's control connection, which *master* serves until *over*."""
    listener = await trio.open_tcp_listeners(0, host="127.0.0.1")
    config = PeerConfig(master=join_address(*listener[0].socket.getsockname()[:2]))
    with socket.create_server(("127.0.0.1", 0)) as lanes:
        control = Control(config, "d", 1, lanes, Hot(), obey, lambda: None, lost, lambda: None, m.Heartbeat)
        with trio.fail_after(20):
            async with trio.open_nursery() as nursery:
                await nursery.start(trio.serve_listeners, master, listener)
                nursery.start_soon(control.run)
                await over.wait()
                nursery.cancel_scope.cancel()
    return control


@pytest.mark.parametrize(("terms", "obeyed"), [((5, 4, 5), [5, 5]), ((5, 6, 5, 7), [5, 6, 7])])
async def test_a_master_of_an_older_term_is_not_obeyed(terms: tuple[int, ...], obeyed: list[int]) -> None:
    """R6. Each master welcomes the daemon, says that a member is put out, and goes away."""
    heard: list[int] = []
    reasons: list[str] = []
    left = iter(terms)
    over = trio.Event()

    async def master(stream: trio.SocketStream) -> None:
        term = next(left, None)
        if term is None:
            over.set()
            await trio.sleep_forever()
        async with stream:
            await stream.receive_some()
            evicted = m.Evicted("g", term, "for the test", 0)
            await stream.send_all(encode(m.Welcome(PROTOCOL_VERSION, term, 1.0, 5.0, term)) + encode(evicted))

    def obey(message: m.FromMaster) -> None:
        assert isinstance(message, m.Evicted)
        heard.append(message.mid)

    def lost(reason: str, *, live: bool) -> None:
        reasons.append(reason)

    control = await controlled(master, over, lost, obey)
    assert heard == obeyed
    assert control.term == max(terms)
    assert sum("an old master answers" in reason for reason in reasons) == len(terms) - len(obeyed)


async def test_a_master_that_is_silent_is_asked_again_to_take_the_daemon_back() -> None:
    """The grace time begins when it fell silent, however old the daemon is, and nothing of the session is lost."""
    hellos: list[m.Hello] = []
    losses: list[tuple[str, bool]] = []
    over = trio.Event()

    async def master(stream: trio.SocketStream) -> None:
        decoder = Decoder[m.FromPeer](m.FromPeer, 1 << 20)
        async with stream:
            for hello in decoder.feed(await stream.receive_some()):
                assert isinstance(hello, m.Hello)
                hellos.append(hello)
            if len(hellos) == 2:
                over.set()
            else:
                await stream.send_all(encode(m.Welcome(PROTOCOL_VERSION, 1, 0.02, 0.1, session=7)))
            await trio.sleep_forever()

    def lost(reason: str, *, live: bool) -> None:
        losses.append((reason, live))

    await controlled(master, over, lost)
    ((reason, live),) = losses
    assert live
    assert reason.startswith("the master: it was silent for ")
    assert [hello.session for hello in hellos] == [0, 7]


async def test_nonsense_of_a_master_that_was_good_starts_the_grace_time_and_its_repetition_does_not() -> None:
    losses: list[bool] = []
    over = trio.Event()

    async def master(stream: trio.SocketStream) -> None:
        async with stream:
            await stream.receive_some()
            await stream.send_all(encode(m.Welcome(PROTOCOL_VERSION, 1, 0.1, 0.5, session=7)))
            for number in range(0 if losses else 7):
                await trio.sleep(0.1)
                await stream.send_all(encode(m.Pong(number, 1)))
            await stream.send_all(b"\0\0\0\1\xc1")
            await trio.sleep(1)

    def lost(reason: str, *, live: bool) -> None:
        losses.append(live)
        if len(losses) == 2:
            over.set()

    control = await controlled(master, over, lost)
    assert losses == [True, False]
    assert control.heartbeat_timeout == 0.5
