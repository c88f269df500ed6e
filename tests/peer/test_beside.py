"""Unix sockets beside the ports for lanes, and the memory that two ends of a lane share."""

from __future__ import annotations

import os
import socket
from multiprocessing import get_context

import numpy as np
import pytest
import trio

from tests.engine.engines import Mesh, statistics, wait_until
from wancoll.collective import DType, ReduceOp
from wancoll.errors import ProtocolError
from wancoll.limits import DEFAULT, KIB, MIB
from wancoll.native.engine import PIPE_HEAD
from wancoll.peer.links.beside import (
    Memory,
    connect_beside,
    half_of,
    is_own,
    listeners_beside,
    share,
    take_share,
)

NOBODY = 65534


def test_a_link_shares_4_mib_at_most_and_a_member_32() -> None:
    for members in (2, 3, 8, 64, 1024):
        for lanes in range(1, DEFAULT.max_lanes + 1):
            half = half_of(lanes, members)
            assert half & (half - 1) == 0
            assert 8 * KIB <= half <= 1 * MIB
            assert 2 * half * lanes <= 4 * MIB
            assert 2 * half * lanes * members <= 32 * MIB or half == 8 * KIB
    assert [half_of(lanes, 2) for lanes in (1, 2, 8)] == [1 * MIB, 1 * MIB, 256 * KIB]
    assert [half_of(1, members) for members in (8, 32, 1024)] == [1 * MIB, 512 * KIB, 16 * KIB]


async def test_it_is_found_by_the_daemons_name_and_port() -> None:
    daemon = "d" * 200
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("0.0.0.0", 0)) as all_hosts:
        listeners, ports = listeners_beside(daemon, [one, all_hosts]), [s.getsockname()[1] for s in (one, all_hosts)]
        assert len(listeners) == 2
        try:
            for port in ports:
                stream = await connect_beside(daemon, ["192.0.2.1:1", f"192.0.2.2:{port}"])
                assert stream is not None
                assert is_own(stream.socket)
                await stream.aclose()
                assert await connect_beside("another", [f"192.0.2.1:{port}"]) is None
            assert listeners_beside(daemon, [one]) == []  # its name is taken: that daemon has lanes over TCP
        finally:
            for listener in listeners:
                listener.close()
        assert await connect_beside(daemon, [f"192.0.2.1:{ports[0]}"]) is None


def _squat(listener: socket.socket, ready: int) -> None:
    os.setuid(NOBODY)
    [squatting] = listeners_beside("d", [listener])
    os.write(ready, b"1")
    squatting.accept()[0].recv(1)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
async def test_whom_another_user_answers_dials_over_tcp() -> None:
    reads, writes = os.pipe()
    listener = socket.create_server(("127.0.0.1", 0))
    other = get_context("fork").Process(target=_squat, args=(listener, writes))
    other.start()
    try:
        assert os.read(reads, 1) == b"1"
        assert await connect_beside("d", [f"127.0.0.1:{listener.getsockname()[1]}"]) is None
    finally:
        other.join(10)
        listener.close()
        os.close(reads)
        os.close(writes)


async def both_ends() -> tuple[trio.socket.SocketType, trio.socket.SocketType]:
    one, other = trio.socket.socketpair()
    return one, other


async def test_memory_is_shared() -> None:
    one, other = await both_ends()
    here = await share(one, 16 * KIB)
    there = await take_share(other, wanted=True, who="x")
    assert here is not None
    assert there is not None
    assert os.fstat(there.fd).st_size == PIPE_HEAD + 32 * KIB
    with pytest.raises(PermissionError):
        os.ftruncate(there.fd, 0)
    before = len(os.listdir("/proc/self/fd"))
    for end in (here, there):
        end.watch()
        view = end.view(0, 0)
        assert view is not None
        assert (view.bytes_acked, view.backlog, view.unacked) == (0, 0, 0)
    assert len(os.listdir("/proc/self/fd")) == before  # one each, which Python's mmap keeps
    for end in (here, there):
        end.close()
        assert end.view(0, 0) is None
    assert await share(one, 0) is None
    assert await take_share(other, wanted=False, who="x") is None
    one.close()
    other.close()


@pytest.mark.parametrize("fds", [0, 1, 3])
async def test_what_is_not_as_agreed_is_refused_and_leaks_nothing(fds: int) -> None:
    one, other = await both_ends()
    made = [Memory.new(16 * KIB) for _ in range(fds)]
    packed = b"".join(memory.fd.to_bytes(4, "little") for memory in made)
    before = len(os.listdir("/proc/self/fd"))
    await one.sendmsg([b"\0"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, packed)] if fds else [])
    with pytest.raises(ProtocolError, match="memory is not as agreed"):
        await take_share(other, wanted=fds == 0, who="x")
    assert len(os.listdir("/proc/self/fd")) == before
    one.close()
    with pytest.raises(ProtocolError, match="0 bytes"):
        await take_share(other, wanted=True, who="x")
    other.close()
    for memory in made:
        memory.close()


def test_it_is_seen_which_bytes_a_neighbour_leaves_in_memory() -> None:
    """Where there is no more room, that is: what is less is in the memory as in a socket at the other end."""
    mesh = Mesh(2, lanes=1, pair=socket.socketpair, memory=16 * KIB, workers=1)
    [memory] = mesh.memories

    def sent() -> int:
        return statistics(mesh.engines[1], 100).bytes_sent

    def look() -> tuple[int, int]:
        view = memory.view(sent(), 0)
        assert view is not None
        return view.bytes_acked, view.backlog

    memory.watch()
    assert look() == (0, 0)
    for seq, (count, held_back) in enumerate([(1000, 0), (MIB, 16 * KIB)], 1):
        inputs = [np.full(count, rank + 1, np.int32) for rank in range(2)]
        results = [np.zeros(count, np.int32) for _ in range(2)]
        before = sent()
        mesh.post(1, seq, inputs[1], results[1], DType.int32, ReduceOp.sum)
        wait_until(lambda before=before, held_back=held_back: sent() > before and look()[1] == held_back)
        assert before <= look()[0] <= before + 64  # rank 0 has read a header, which waits
        mesh.post(0, seq, inputs[0], results[0], DType.int32, ReduceOp.sum)
        wait_until(lambda: look() == (sent(), 0))
        wait_until(lambda results=results: all((result == 3).all() for result in results))
    mesh.close()
