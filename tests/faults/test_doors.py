"""A client or a stranger at a daemon's doors who means harm, or dies at the worst moment: nobody waits for it."""

from __future__ import annotations

import socket
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import trio

from tests.faults.support import new_group, wait_until
from tests.faults.test_hostile_bytes import dial
from wancoll.chaos import Cluster
from wancoll.collective import Descriptor, Kind
from wancoll.limits import DEFAULT, PROTOCOL_VERSION
from wancoll.peer.config import PeerConfig
from wancoll.peer.daemon import serve
from wancoll.wire import messages as m
from wancoll.wire.framing import Decoder, encode


def attached(cluster: Cluster, group: str) -> socket.socket:
    """A client by hand on daemon 3, which waits for one more."""
    rogue = dial(cluster, "unix", 3)
    rogue.sendall(encode(m.Attach(PROTOCOL_VERSION, group, "rogue", 2, 1, 1)))
    return rogue


def members(cluster: Cluster, group: str) -> list[str]:
    """As the master knows them."""
    return [one.name for found in cluster.status().groups if found.name == group for one in found.members]


def epoch_of(connection: socket.socket) -> int:
    decoder: Decoder[m.FromDaemon] = Decoder(m.FromDaemon, DEFAULT.message_bytes)
    while True:
        for message in decoder.feed(connection.recv(65536)):
            if isinstance(message, m.EpochInfo):
                return message.epoch


@pytest.mark.parametrize("how", ["dies", "hears no more", "says no more"])
def test_a_client_with_its_hands_full_is_missed_at_once(cluster: Cluster, how: str) -> None:
    """It has as many calls open as the daemon takes, so that it is not read from: its end is a leave all the same."""
    group = new_group()
    rogue = attached(cluster, group)
    with rogue, cluster.connect(0, group=group, name="other", start_world=2, min_world=1) as other:
        epoch = epoch_of(rogue)
        call = Descriptor(Kind.barrier)
        posts = [encode(m.Post(number, call, 0, 0, epoch)) for number in range(1, DEFAULT.ops_in_flight + 100)]
        rogue.sendall(b"".join(posts))
        mine = lambda: [one for one in cluster.peer_status(3)["members"] if one["group"] == group]  # noqa: E731
        wait_until(lambda: mine()[0]["ops"] == DEFAULT.ops_in_flight, 10, "its hands are full")
        began = time.monotonic()
        if how == "dies":
            rogue.close()
        elif how == "says no more":
            rogue.shutdown(socket.SHUT_WR)
        else:
            rogue.shutdown(socket.SHUT_RD)
            other.barrier()  # its commit cannot be told to the rogue
        wait_until(lambda: members(cluster, group) == ["other"], 10, "it has left")
        assert time.monotonic() - began < 5.0


async def test_one_client_too_many_is_told_which_limit_it_met(tmp_path: Path) -> None:
    """And leaves nothing behind: once there is room, the next one is taken."""
    path, stop = str(tmp_path / "socket"), trio.Event()
    config = PeerConfig(socket=path, listen="127.0.0.1:0", master="127.0.0.1:1", limits=replace(DEFAULT, clients=2))
    attach = encode(m.Attach(PROTOCOL_VERSION, "g", "", 1, 1, 1))

    opened: list[trio.SocketStream] = []

    async def knocks() -> tuple[trio.SocketStream, m.FromDaemon]:
        stream = await trio.open_unix_socket(path)
        opened.append(stream)
        await stream.send_all(attach)
        return stream, Decoder(m.FromDaemon, DEFAULT.message_bytes).feed(await stream.receive_some())[0]

    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            await nursery.start(partial(serve, config, stop=stop))
            held = [await knocks() for _ in range(2)]
            assert all(isinstance(answer, m.Attached) for _, answer in held)
            late, answer = await knocks()
            assert isinstance(answer, m.Failure)
            assert "at most 2" in answer.expected
            assert await late.receive_some() == b""
            await held[0][0].aclose()
            while not isinstance((await knocks())[1], m.Attached):  # noqa: ASYNC110 - it asks
                await trio.sleep(0.05)
            stop.set()
    for stream in opened:
        await stream.aclose()


def test_a_second_client_of_a_name_does_not_take_the_first_one_along(cluster: Cluster) -> None:
    """It is refused at its daemon. Let in, it would leave under the name of both, and the first would wait for ever."""
    group = new_group()
    rogue = attached(cluster, group)
    with rogue, cluster.connect(0, group=group, name="other", start_world=2, min_world=1):
        epoch_of(rogue)
        with dial(cluster, "unix", 3) as twin:
            twin.sendall(encode(m.Attach(PROTOCOL_VERSION, group, "rogue", 2, 1, 1)) + encode(m.Detach()))
            (answer,) = Decoder[m.FromDaemon](m.FromDaemon, DEFAULT.message_bytes).feed(twin.recv(65536))
            assert isinstance(answer, m.Failure)
            assert "unique" in answer.what
        assert sorted(members(cluster, group)) == ["other", "rogue"]
