"""The control connection against masters of all sorts: which of them a daemon obeys."""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import pytest
import trio
import trio.testing

from tests.keyed import admitted
from wancoll.limits import PROTOCOL_VERSION
from wancoll.local import join_address
from wancoll.net import clock
from wancoll.peer.config import PeerConfig
from wancoll.peer.control import Control
from wancoll.trust.keys import Key
from wancoll.wire import kept
from wancoll.wire import messages as m
from wancoll.wire.framing import Decoder, encode


class Losses:
    """What a control connection says of its losses; *over* is set at the one with the number *last*, if not before."""

    def __init__(self, last: int = 0) -> None:
        self.over, self._last = trio.Event(), last
        self.reasons: list[str] = []
        self.lives: list[bool] = []  # whether the session may go on

    def __call__(self, reason: str, *, live: bool) -> None:
        self.reasons.append(reason)
        self.lives.append(live)
        if len(self.reasons) == self._last:
            self.over.set()


async def controlled(
    master: Callable[[trio.SocketStream], Awaitable[None]],
    lost: Losses,
    obey: Callable[[m.FromMaster], None] = lambda _: None,
    *,
    insecure: bool = False,
) -> Control:
    """A daemon's control connection, which *master* serves until that is over."""
    listener = await trio.open_tcp_listeners(0, host="127.0.0.1")
    config = PeerConfig(master=join_address(*listener[0].socket.getsockname()[:2]), insecure=insecure)
    with socket.create_server(("127.0.0.1", 0)) as lanes:
        control = Control(config, "d", 1, [], lanes, obey, lambda: None, lost, lambda: None, m.Heartbeat)
        with trio.fail_after(40):
            async with trio.open_nursery() as nursery:
                await nursery.start(trio.serve_listeners, master, listener)
                nursery.start_soon(control.run)
                await lost.over.wait()
                nursery.cancel_scope.cancel()
    return control


@pytest.mark.parametrize(("terms", "obeyed"), [((5, 4, 5), [5, 5]), ((5, 6, 5, 7), [5, 6, 7])])
async def test_a_master_of_an_older_term_is_not_obeyed(terms: tuple[int, ...], obeyed: list[int]) -> None:
    """R6. Each master welcomes the daemon, says that a member is evicted, and goes away."""
    heard: list[int] = []
    left = iter(terms)
    lost = Losses()

    async def master(stream: trio.SocketStream) -> None:
        term = next(left, None)
        if term is None:
            lost.over.set()
            await trio.sleep_forever()
        async with stream:
            await stream.receive_some()
            evicted = m.Evicted("g", term, "for the test", 0)
            await stream.send_all(encode(m.Welcome(PROTOCOL_VERSION, term, 1.0, 5.0, term)) + encode(evicted))

    def obey(message: m.FromMaster) -> None:
        assert isinstance(message, m.Evicted)
        heard.append(message.mid)

    control = await controlled(master, lost, obey)
    assert heard == obeyed
    assert control.term == max(terms)
    assert sum("an old master answers" in reason for reason in lost.reasons) == len(terms) - len(obeyed)


@pytest.mark.parametrize("insecure", [False, True])
async def test_a_daemon_in_clear_follows_a_standby_beyond_its_machine_only_if_that_was_asked_for(
    monkeypatch: pytest.MonkeyPatch, *, insecure: bool
) -> None:
    dialled: list[str] = []
    lost, really = Losses(3), trio.open_tcp_stream

    async def connect(host: str, port: int) -> trio.SocketStream:
        dialled.append(host)
        if host != "127.0.0.1":
            raise OSError("nothing goes there in tests")
        return await really(host, port)

    async def master(stream: trio.SocketStream) -> None:
        async with stream:
            await stream.receive_some()
            await stream.send_all(encode(m.StandsBy("192.0.2.1:7400", 1)))

    monkeypatch.setattr(trio, "open_tcp_stream", connect)
    await controlled(master, lost, insecure=insecure)
    assert ("192.0.2.1" in dialled) == insecure
    first, second, third = lost.reasons
    assert first == third
    assert first.endswith("stands by; 192.0.2.1:7400 leads"), "what it says is no reason to stay away from it"
    assert ("192.0.2.1:7400: is not dialled: it is beyond this machine" in second) == (not insecure)


@pytest.mark.parametrize("sealed", [True, False])
@pytest.mark.parametrize("leader", ["h" * 64 + ":1", ".:1", "h\0:1", "[:1", "nowhere"])
async def test_a_leader_that_nobody_can_look_up_is_left_alone(tmp_path: Path, leader: str, *, sealed: bool) -> None:
    """A standby names whom etcd names."""
    lost, wallet = Losses(2), admitted(tmp_path, "d", Key.new()) if sealed else None
    config = PeerConfig(master="127.0.0.1:9", insecure=True)
    with socket.create_server(("127.0.0.1", 0)) as lanes, trio.fail_after(20):
        some = config, "d", 1, [], lanes, lambda _: None, lambda: None, lost, lambda: None, m.Heartbeat
        control = Control(*some, wallet)
        control._masters.failed(leader)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(control.run)
            await lost.over.wait()
            nursery.cancel_scope.cancel()
    assert leader in lost.reasons[0]
    assert not control.refused


async def test_a_challenge_in_clear_is_not_answered() -> None:
    """Nobody has proved to be the acceptor that it would be signed for; and there is no key."""
    said: list[m.FromPeer] = []
    lost = Losses(1)

    async def master(stream: trio.SocketStream) -> None:
        decoder = Decoder[m.FromPeer](m.FromPeer, 1 << 20)
        async with stream:
            await stream.send_all(encode(m.Challenge(bytes(32))))
            said.extend(decoder.feed(await stream.receive_some()))
            with trio.move_on_after(0.1):
                said.extend(decoder.feed(await stream.receive_some()))

    await controlled(master, lost)
    assert [type(one) for one in said] == [m.Hello]


@pytest.mark.parametrize(
    ("by", "at_start"), [("journal {}", True), ("journal {}", False), ("etcd 7 under wancoll/", True)]
)
async def test_of_two_masters_that_nothing_elects_a_daemon_obeys_one(by: str, at_start: bool) -> None:
    """Where both answer at its start it ends; else it goes on to look for the one that it knows.

    Two etcds that were started alike have the same id: there two masters lead at once.
    """
    hellos: list[int] = []
    lost, there = Losses(3), {0, 1} if at_start else {0}

    async def master(number: int, stream: trio.SocketStream) -> None:
        async with stream:
            [said] = Decoder[m.FromPeer](m.FromPeer, 1 << 20).feed(await stream.receive_some())
            if number not in there:
                return
            if isinstance(said, m.Hello):
                hellos.append(number)
                there.symmetric_difference_update({0, 1} if len(hellos) == 1 else {0})  # 0 goes, and comes back
            answer = m.Welcome(PROTOCOL_VERSION, 1, 1.0, 5.0, 7 + number, 3, elected_by=by.format(number))
            await stream.send_all(encode(answer))

    listeners = [(await trio.open_tcp_listeners(0, host="127.0.0.1"))[0] for _ in range(2)]
    addresses = [join_address(*one.socket.getsockname()[:2]) for one in listeners]
    with socket.create_server(("127.0.0.1", 0)) as lanes, trio.fail_after(20):
        some = "d", 1, [], lanes, lambda _: None, lambda: None, lost, lambda: None, m.Heartbeat
        control = Control(PeerConfig(master=",".join(addresses)), *some)
        async with trio.open_nursery() as nursery:
            for k, listener in enumerate(listeners):
                nursery.start_soon(trio.serve_listeners, partial(master, k), [listener])
            if at_start:
                await control.run()
            else:
                nursery.start_soon(control.run)
                await lost.over.wait()
            nursery.cancel_scope.cancel()
    refusal = "two masters, and nothing elects one of them: " if by.startswith("journal") else "masters of two etcds: "
    told = [reason.startswith(refusal) for reason in lost.reasons]
    assert (hellos, told) == (([0], [True]) if at_start else ([0, 1, 0], [False, True, False]))
    assert control.refused == (lost.reasons[0] if at_start else "")


async def test_a_master_that_is_silent_is_asked_again_to_take_the_daemon_back() -> None:
    """The grace time begins when it fell silent, however old the daemon is, and nothing of the session is lost."""
    hellos: list[m.Hello] = []
    lost = Losses()

    async def master(stream: trio.SocketStream) -> None:
        decoder = Decoder[m.FromPeer](m.FromPeer, 1 << 20)
        async with stream:
            for hello in decoder.feed(await stream.receive_some()):
                assert isinstance(hello, m.Hello)
                hellos.append(hello)
            if len(hellos) == 2:
                lost.over.set()
            else:
                await stream.send_all(encode(m.Welcome(PROTOCOL_VERSION, 1, 0.02, 0.1, session=7)))
            await trio.sleep_forever()

    await controlled(master, lost)
    assert lost.lives == [True]
    assert lost.reasons[0].startswith("the master: it was silent for ")
    assert [hello.session for hello in hellos] == [0, 7]


@pytest.mark.parametrize(("most", "session"), [(1, 7), (0, 0)])
async def test_no_session_is_asked_for_of_which_a_word_is_not_kept_any_more(
    monkeypatch: pytest.MonkeyPatch, most: int, session: int
) -> None:
    """The master could go on with it, and never know of that word."""
    monkeypatch.setattr(kept, "DEFAULT", dataclasses.replace(kept.DEFAULT, unconfirmed_messages=most))
    hellos: list[m.Hello] = []
    lost = Losses()

    async def master(stream: trio.SocketStream) -> None:
        decoder = Decoder[m.FromPeer](m.FromPeer, 1 << 20)
        async with stream:
            while not lost.over.is_set():
                for message in decoder.feed(await stream.receive_some()):
                    if isinstance(message, m.Hello):
                        hellos.append(message)
                        await stream.send_all(encode(m.Welcome(PROTOCOL_VERSION, 1, 1.0, 60.0, session=7)))
                    elif message == m.Heartbeat(0) and len(hellos) == 1:
                        return  # it has been said, and is not confirmed
                if len(hellos) == 2:
                    lost.over.set()

    await controlled(master, lost)
    assert [hello.session for hello in hellos] == [0, session]


@pytest.mark.parametrize("last", [b"\0\0\0\1\xc1", encode(m.Bye("reports an epoch that no master made"))])
async def test_nonsense_of_a_master_that_was_good_starts_the_grace_time_and_its_repetition_does_not(
    autojump_clock: trio.testing.MockClock, last: bytes
) -> None:
    """Nor does being sent away again and again: members would never hear that they have no master."""
    autojump_clock.autojump_threshold = 0.01  # of sockets
    lost = Losses(2)

    async def master(stream: trio.SocketStream) -> None:
        async with stream:
            await stream.receive_some()
            await stream.send_all(encode(m.Welcome(PROTOCOL_VERSION, 1, 0.1, 0.5, session=7)))
            await trio.testing.wait_all_tasks_blocked(0.001)  # it is in
            for number in range(0 if lost.lives else 7):
                await trio.sleep(0.1)
                await stream.send_all(encode(m.Pong(number, 1)))
            await stream.send_all(last)
            await trio.sleep(1)

    control = await controlled(master, lost)
    assert lost.lives == [True, False]
    assert control.heartbeat_timeout == 0.5


async def test_an_answer_counts_from_when_its_heartbeat_was_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """C8. The daemon slept between the two; tests/peer/test_commit_lease.py has the rest."""
    lost, now = Losses(), [0.0]
    monkeypatch.setattr(clock, "awake_or_asleep", lambda: now[0])

    async def master(stream: trio.SocketStream) -> None:
        decoder = Decoder[m.FromPeer](m.FromPeer, 1 << 20)
        async with stream:
            await stream.receive_some()
            now[0] = 50.0
            await stream.send_all(encode(m.Welcome(PROTOCOL_VERSION, 1, 0.02, 60.0, session=7)))
            beats: list[m.Heartbeat] = []
            while not beats:
                heard = decoder.feed(await stream.receive_some())
                beats = [one for one in heard if isinstance(one, m.Heartbeat) and one.number]
            now[0] = 150.0
            pong = m.Pong(beats[0].number, 1, 1)
            await stream.send_all(encode(pong) + encode(m.Evicted("g", 1, "for the test", 0)))
            await trio.sleep_forever()

    control = await controlled(master, lost, lambda _: lost.over.set())
    assert control.commit_lease.unheard(now[0]) == 100.0


async def test_clocks_are_compared_by_the_answer_to_the_newest_heartbeat_alone() -> None:
    """An older one was said at another time."""
    lost = Losses()

    async def master(stream: trio.SocketStream) -> None:
        decoder = Decoder[m.FromPeer](m.FromPeer, 1 << 20)
        async with stream:
            await stream.receive_some()
            await stream.send_all(encode(m.Welcome(PROTOCOL_VERSION, 1, 0.02, 60.0, session=7)))
            beats: list[int] = []
            while len(beats) < 2:
                heard = decoder.feed(await stream.receive_some())
                beats += [one.number for one in heard if isinstance(one, m.Heartbeat) and one.number]
            late = m.Pong(beats[0], 1, 1, clock=5.0)
            await stream.send_all(encode(late) + encode(m.Evicted("g", 1, "for the test", 0)))
            await trio.sleep_forever()

    assert list((await controlled(master, lost, lambda _: lost.over.set())).clocks) == []


async def test_what_was_heard_is_counted_anew_in_each_session() -> None:
    """By that the master knows what to say again."""
    hellos: list[m.Hello] = []
    lost = Losses()

    async def master(stream: trio.SocketStream) -> None:
        decoder = Decoder[m.FromPeer](m.FromPeer, 1 << 20)
        async with stream:
            [hello] = decoder.feed(await stream.receive_some())
            assert isinstance(hello, m.Hello)
            hellos.append(hello)
            if len(hellos) == 3:
                lost.over.set()
            await stream.send_all(encode(m.Welcome(PROTOCOL_VERSION, 1, 60.0, 60.0, session=6 + len(hellos))))
            await stream.send_all(encode(m.Evicted("g", 1, "one", 0)))
            if len(hellos) == 1:
                await stream.send_all(encode(m.Commit("g", 1, 2, 3)))

    await controlled(master, lost)
    assert [hello.heard for hello in hellos] == [0, 2, 1]
