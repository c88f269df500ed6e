"""The communicator against a test double of the daemon: values, memory, threads, timeouts, Ctrl-C, every error."""

from __future__ import annotations

import array
import contextlib
import dataclasses
import fcntl
import gc
import importlib
import logging
import os
import pickle
import random
import re
import signal
import socket
import stat
import sys
import tempfile
import textwrap
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import wancoll
from tests.client.fake_daemon import ARENA, FakeDaemon, reduced
from tests.client.tools import BIG, address, in_thread, numpy_kind, refused, until
from tests.later import at_night, later
from wancoll import resources
from wancoll.client import connection as connection_module
from wancoll.client.communicator import Communicator
from wancoll.client.memory.arena import SWAP_BYTES
from wancoll.client.memory.placement import Placement
from wancoll.client.work import Work
from wancoll.collective import DType, ReduceOp
from wancoll.errors import (
    BY_NAME,
    CollectiveMismatch,
    ConfigError,
    DeviceError,
    Evicted,
    MasterUnreachable,
    OutcomeUnknown,
    PeerDaemonLost,
    ProtocolError,
    WorldTooSmall,
)
from wancoll.limits import PROTOCOL_VERSION
from wancoll.net import unix
from wancoll.wire import messages as m

connect_module: Any = importlib.import_module("wancoll.client.connect")  # by this name its package has the function

# ---- connect ----------------------------------------------------------------------------------------


def test_connect_tells_the_daemon_what_is_wanted(daemon: FakeDaemon) -> None:
    with wancoll.connect("gang", start_world=3, min_world=2, name="me", socket=daemon.path) as comm:
        assert daemon.attach == m.Attach(PROTOCOL_VERSION, "gang", "me", 3, 2, os.getpid())
        assert (comm.group, comm.name, comm.rank, comm.world_size, comm.epoch) == ("gang", "me", 0, 2, 1)
        assert comm.members == ("me", "other")
        where = f"rank 0 of 2, epoch 1; peer daemon 'fake' at {daemon.path}"
        assert repr(comm) == f"<Communicator 'me' of group 'gang': {where}>"
    daemon.wait_for(lambda: daemon.detached)


def test_start_world_defaults_to_min_world(daemon: FakeDaemon) -> None:
    wancoll.connect(min_world=2, socket=Path(daemon.path)).close()
    assert daemon.attach is not None
    assert (daemon.attach.start_world, daemon.attach.min_world, daemon.attach.group) == (2, 2, "default")


def test_the_socket_comes_from_the_environment(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANCOLL_SOCKET", daemon.path)
    monkeypatch.setenv("WANCOLL_MASTER", "nowhere:1")  # the socket wins
    wancoll.connect(timeout=10).close()


def test_a_daemon_that_runs_wins_over_a_master_in_the_environment(
    path: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """WANCOLL_MASTER is the daemon's own variable, too: it must not start a second daemon beside it."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("WANCOLL_MASTER", "nowhere:1")
    monkeypatch.delenv("WANCOLL_SOCKET", raising=False)
    caplog.set_level(logging.INFO, "wancoll")
    (tmp_path / "wancoll").mkdir()
    path = str(tmp_path / "wancoll" / "peer.sock")
    with FakeDaemon(path), wancoll.connect("gang", timeout=10) as comm:
        assert path in repr(comm)
    assert f"group 'gang': through peer daemon 'fake' at {path}, by the default path" in caplog.text


_TOKEN = f"WC2{'0' * 64}::abab.{'s' * 43}@host:7400"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"group": ""}, ("group cannot be used", "connect(group=...)", "1 to 128 printable characters", "got ''")),
        ({"name": "x" * 129}, ("name cannot be used", "0 to 128")),
        ({"min_world": 0}, ("min_world cannot be used", "a whole number from 1 to 1024", "got 0")),
        ({"start_world": 1, "min_world": 2}, ("cannot start below min_world", "at least min_world, 2", "got 1")),
        ({"timeout": -1}, ("timeout cannot be used", "seconds, 0 or more", "got -1")),
        ({"master": "h:1"}, ("exclude each other", "socket= of a running daemon, or master=", "got both")),
        ({"lanes": 0}, ("lanes cannot be used", "a whole number from 1 to 256", "got 0")),
        ({"peer_options": "--lanes 3"}, ("peer_options cannot be used", "a list of strings", "got '--lanes 3'")),
        ({"socket": 5}, ("socket cannot be used", "the path of a daemon's unix socket", "got 5")),
        ({"master": 7400}, ("master cannot be used", '"host:port"', "got 7400")),
        ({"lanes": 3}, ("for a private daemon", "give them to `wancoll peer`")),
        ({"token": _TOKEN}, ("socket and token exclude each other", "or token= for a private one", "got both")),
        ({"token": ""}, ("token cannot be used", "connect(token=...)", "what `wancoll master`", "got str")),
    ],
)
def test_bad_arguments(options: dict[str, Any], words: tuple[str, ...], path: str) -> None:
    with refused(*words):
        wancoll.connect(**{"socket": path, **options})


def test_bad_master_address() -> None:
    for bad in ("nowhere:x", ":7400", "a,,b"):
        with pytest.raises(ConfigError, match=r"connect\(master=...\) cannot be read; expected host:port"):
            wancoll.connect(master=bad)


def test_a_bad_token_is_named_and_not_shown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    bad = _TOKEN.replace("WC2", "WC3")
    with refused("connect(token=...): is no token", "paste the whole line") as found:
        wancoll.connect(token=bad)
    assert "s" * 43 not in str(found.value)
    monkeypatch.setenv("WANCOLL_JOIN", bad)
    monkeypatch.delenv("WANCOLL_SOCKET", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))  # where no daemon runs
    with refused("WANCOLL_JOIN: is no token"):
        wancoll.connect()


def test_no_daemon(path: str) -> None:
    cure = ("start `wancoll master`", "WANCOLL_MASTER=127.0.0.1", "WANCOLL_JOIN=TOKEN", f"wancoll peer --socket {path}")
    words = ("no peer daemon answers", f"connect(socket='{path}')", "No such file", *cure)
    with refused(*words, error=PeerDaemonLost):
        wancoll.connect(socket=path)
    Path(path).touch()
    with pytest.raises(PeerDaemonLost, match="Connection refused"):
        wancoll.connect(socket=path)


def test_a_daemon_that_comes_later(path: str, caplog: pytest.LogCaptureFixture, monkeypatch: Any) -> None:
    """Within the timeout: its socket is not there, then left over from a dead one, then served."""
    monkeypatch.setattr(connect_module, "_SAY_SECONDS", 0.0)

    def connected() -> tuple[str, ...]:
        with wancoll.connect(socket=path, timeout=20) as comm:
            return comm.members

    join = in_thread(connected)
    until(lambda: f"no peer daemon answers at {path}" in caplog.text)
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(path)
    time.sleep(0.2)  # nothing shows that it was tried
    os.unlink(path)
    with FakeDaemon(path):
        assert join() == ("me", "other")
    assert caplog.text.count("no peer daemon answers") == 1


def test_a_daemon_that_does_not_come(path: str) -> None:
    began = time.monotonic()
    with refused("no peer daemon answers", "No such file", error=PeerDaemonLost) as told:
        wancoll.connect(socket=path, timeout=0.3)
    took = time.monotonic() - began
    assert 0.3 <= took < 10
    [said] = re.findall(r"answers, (\S+) s long", str(told.value))
    assert 0.3 <= float(said) < took + 0.1


def test_a_daemon_that_may_not_be_used(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting would not help."""

    def forbidden(*_: object) -> socket.socket:
        raise PermissionError("Permission denied")

    monkeypatch.setattr(connect_module, "connect_local", forbidden)
    with refused("Permission denied", error=ConfigError):
        wancoll.connect(socket=path, timeout=3600)


def test_path_too_long() -> None:
    with pytest.raises(ConfigError, match=r"too long for a unix socket.*at most 107 bytes.*got 121"):
        wancoll.connect(socket="/tmp/" + "x" * 116)


@pytest.mark.parametrize(
    ("answer", "error", "words"),
    [
        ([m.Failure(0, "Evicted", "refused", "me", "another name", "this", "pick one", {})], Evicted, "me: refused"),
        ([m.Ok()], ProtocolError, "sent a message out of place; expected Attached; got Ok"),
        (
            [m.Attached("fake", 4096)],
            ProtocolError,
            "sent no arena; expected four file descriptors",
        ),
        ([], PeerDaemonLost, "closed the connection during the handshake"),
    ],
)
def test_handshakes_that_fail(daemon: FakeDaemon, answer: list[Any], error: type[Exception], words: str) -> None:
    def on_attach(attach: m.Attach) -> list[Any]:
        if not answer:
            daemon.hang_up()
        return answer

    daemon.on_attach = on_attach
    with pytest.raises(error, match=words):
        wancoll.connect(socket=daemon.path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_another_users_socket_is_told_nothing(tmp_path: Path) -> None:
    path = str(tmp_path / "peer.sock")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        child = os.fork()
        if child == 0:
            try:
                os.setuid(65534)
                listener.listen()  # then the kernel notes whose it is
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        with pytest.raises(ConfigError, match="is another user's socket") as failed:
            wancoll.connect(socket=path, timeout=10)
        assert f"expected a daemon of user 0, or of root; got process {child} of user 65534" in str(failed.value)
        near, _ = listener.accept()
        with near:
            assert near.recv(4096) == b""


@pytest.mark.parametrize(("uid", "taken"), [(0, True), (7001, True), (7002, False), (65534, False)])
def test_a_client_takes_daemons_of_its_own_user_and_of_root(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch, uid: int, *, taken: bool
) -> None:
    monkeypatch.setattr(unix, "peer_credentials", lambda _: (1, uid, 0))
    monkeypatch.setattr(os, "geteuid", lambda: 7001)
    if taken:
        wancoll.connect(socket=daemon.path).close()
    else:
        with refused(f"expected a daemon of user 7001, or of root; got process 1 of user {uid}; run `wancoll peer`"):
            wancoll.connect(socket=daemon.path)
    assert (daemon.attach is not None) == taken


@pytest.mark.parametrize(
    ("seals", "fits"),
    [
        (0, False),
        (fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL, False),
        (fcntl.F_SEAL_SHRINK, True),
    ],
)
def test_an_arena_that_could_shrink_is_not_mapped(daemon: FakeDaemon, seals: int, *, fits: bool) -> None:
    """Who touches what is gone is ended by SIGBUS."""
    os.close(daemon.fd)
    daemon.fd = os.memfd_create("arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(daemon.fd, ARENA)
    fcntl.fcntl(daemon.fd, fcntl.F_ADD_SEALS, seals)
    if fits:
        wancoll.connect(socket=daemon.path).close()
    else:
        with refused("may become smaller", "expected a memfd sealed", f"got seals {seals:#x}", error=ProtocolError):
            wancoll.connect(socket=daemon.path)


def test_an_arena_that_is_no_memfd_is_not_mapped(daemon: FakeDaemon, tmp_path: Path) -> None:
    os.close(daemon.fd)
    daemon.fd = os.open(tmp_path / "arena", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
    os.ftruncate(daemon.fd, ARENA)
    with refused("may become smaller", "got seals 0x0", error=ProtocolError):
        wancoll.connect(socket=daemon.path)


def test_a_silent_daemon(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    quick = dataclasses.replace(connect_module.DEFAULT, local_handshake_timeout=0.05)
    monkeypatch.setattr(connect_module, "DEFAULT", quick)
    daemon.on_attach = lambda attach: []
    with pytest.raises(PeerDaemonLost, match=r"no peer daemon answers.*timed out"):
        wancoll.connect(socket=daemon.path)


def test_a_group_that_does_not_start(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connect_module, "_LEAST_HANDSHAKE", 20.0)
    daemon.epoch = lambda number, members: None  # type: ignore[method-assign, assignment]
    words = ("group 'gang': did not take this member in", f"peer daemon 'fake' at {daemon.path}", "wancoll status")
    with refused(*words, error=TimeoutError):
        wancoll.connect("gang", socket=daemon.path, timeout=0.05)
    daemon.wait_for(lambda: daemon.detached)  # nothing stays behind


def test_who_waits_for_the_group_is_told_for_whom(
    daemon: FakeDaemon, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once for each change, and by the error when its time is over."""
    monkeypatch.setattr(connection_module, "_SAY_SECONDS", 0.05)
    monkeypatch.setattr(connection_module, "_SAY_AGAIN_SECONDS", 0.0)
    daemon.epoch = lambda number, members: None  # type: ignore[method-assign, assignment]

    def connected() -> None:
        with refused("waits: 1 of 3 members are here (here: me)", "expected a place after ", error=TimeoutError):
            wancoll.connect("gang", socket=daemon.path, timeout=20)

    join = in_thread(connected)
    daemon.wait_for(lambda: daemon.attach is not None)
    until(lambda: "group 'gang': still waiting for a place: for a word of the master" in caplog.text)
    told = m.Slow(0, "1 of 3 members are here (here: me)")
    daemon.send(told)
    until(lambda: "still waiting for a place: 1 of 3 members are here (here: me)" in caplog.text)
    monkeypatch.setattr(connection_module, "seconds_left", lambda deadline: 0.0)
    daemon.send(told)
    assert join() is None
    assert caplog.text.count("1 of 3 members") == 1


def test_a_refusal_while_waiting_for_the_group(daemon: FakeDaemon) -> None:
    daemon.epoch = lambda number, members: daemon.send(  # type: ignore[method-assign, assignment]
        m.Failure(0, "MasterUnreachable", "no master", "peer", "", "", "", {})
    )
    with pytest.raises(MasterUnreachable, match="peer: no master"):
        wancoll.connect(socket=daemon.path, timeout=10)


# ---- all_reduce: values and receipts ----------------------------------------------------------------


def test_the_receipt(comm: Communicator) -> None:
    x = np.ones(5, np.float32)
    receipt = comm.all_reduce(x)
    assert receipt.out is x
    assert (receipt.op_id, receipt.epoch, receipt.seq, receipt.attempts) == ("default/1", 1, 1, 1)
    assert (receipt.contributors, receipt.world_size) == (("me", "other"), 2)
    assert (receipt.digest, receipt.algorithm, receipt.bytes_sent, receipt.seconds) == (
        "0000000000000abc",
        "ring",
        101,
        0.5,
    )
    assert (x == 2).all()


@pytest.mark.parametrize("dtype", DType)
@pytest.mark.parametrize("count", [0, 1, 1000, 3 * SWAP_BYTES + 5])
@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("in_place", [True, False])
def test_values(comm: Communicator, dtype: DType, count: int, inside: bool, in_place: bool) -> None:
    make = comm.empty if inside else np.empty
    kind = numpy_kind(dtype)
    x, out = make(count, kind), make(count, kind)
    x[:] = np.arange(count) % 50
    out[:] = 99
    before = x.copy()
    receipt = comm.all_reduce(x, None if in_place else out)
    target = x if in_place else out
    assert receipt.out is target
    assert target.dtype == kind
    assert (target == before + before).all()
    assert in_place or (x == before).all()


@pytest.mark.parametrize("op", ReduceOp.__members__)
def test_ops_travel(comm: Communicator, daemon: FakeDaemon, op: str) -> None:
    comm.all_reduce(np.ones(3, np.int32), op=op, on_failure="raise", algorithm="ring")
    post = daemon.seen[0]
    assert (post.call.kind, post.call.dtype, post.call.op, post.call.count) == (0, DType.int32, ReduceOp[op], 3)
    assert (post.call.codec, post.call.algorithm, post.call.on_failure, post.epoch) == (0, "ring", "raise", 1)


def test_other_kinds_of_tensors(comm: Communicator) -> None:
    x = array.array("d", [1, 2, 3])
    assert comm.all_reduce(x).out is x
    assert x.tolist() == [2, 4, 6]
    out = bytearray(3)
    comm.all_reduce(b"abc", out)  # read-only is fine as an input
    assert out == bytes(2 * c & 255 for c in b"abc")
    scalar = np.array(3.5)
    comm.all_reduce(scalar)
    assert scalar == 7
    matrix = np.arange(6.0).reshape(2, 3)
    comm.all_reduce(matrix[1])
    assert matrix.tolist() == [[0, 1, 2], [6, 8, 10]]


def test_torch_tensors(comm: Communicator) -> None:
    torch = pytest.importorskip("torch")
    for count in (7, BIG):
        for dtype in (torch.float32, torch.bfloat16):
            x = torch.arange(count, dtype=torch.float32).remainder(10).to(dtype)
            before = x.clone()
            assert comm.all_reduce(x).out is x
            assert torch.equal(x, before + before)
    shared = torch.from_numpy(comm.zeros(BIG))
    shared += 3
    comm.all_reduce(shared)
    assert (shared == 6).all()


def test_update_membership(comm: Communicator, daemon: FakeDaemon) -> None:
    daemon.manual = True

    def serve() -> None:
        daemon.wait_for_posts(1)
        daemon.epoch(7, ("other", "me", "new"))
        daemon.answer(daemon.posts[0])

    join = in_thread(serve)
    receipt = comm.update_membership(timeout=10)
    join()
    assert receipt.out is None
    assert (comm.epoch, comm.world_size, comm.members) == (7, 3, ("other", "me", "new"))
    assert daemon.seen[0].call.kind == 1


def test_partings_say_who_said_goodbye_and_who_is_lost(comm: Communicator, daemon: FakeDaemon) -> None:
    told = m.EpochInfo(2, 0, "me", ["me", "a", "b"]), m.EpochInfo(3, 0, "me", ["me"], "a left; lost b: killed", ["a"])
    daemon.send(*told)
    connection = comm._connection
    while connection.place.epoch < 3:
        connection.wait_any([], 0.1)
    assert [connection.partings[name] for name in "ab"] == [(told[1].reason, False), (told[1].reason, True)]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"op": "mean"},
            ("op is not available", "all_reduce(op=...)", "sum or avg or min or max or prod", "got 'mean'"),
        ),
        (
            {"codec": "int2"},
            ("codec is not available", "expected none or bf16 or fp16 or int8 or int4 or fp8", "got 'int2'"),
        ),
        ({"algorithm": "star"}, ("algorithm is not available", "expected auto or ring or direct", "got 'star'")),
        ({"timeout": 1, "async_op": True}, ("timeout says how long", ".wait(timeout=...)")),
        ({"out": np.zeros(3, np.int8)}, ("another dtype", "expected float32", "got int8")),
        ({"out": np.zeros(4, np.float32)}, ("another shape", "expected (3,)", "got (4,)")),
        ({"out": np.zeros((3, 2), np.float32)[:, 0]}, ("not C-contiguous", "all_reduce(out=...)")),
        ({"x": np.frombuffer(bytes(12), np.float32)}, ("read-only", "all_reduce(x)", "pass out=")),
        ({"x": np.zeros(3, bool)}, ("the dtype is unknown", "all_reduce(x)")),
    ],
)
def test_refused_before_anything_is_sent(
    comm: Communicator, daemon: FakeDaemon, options: dict[str, Any], words: tuple[str, ...]
) -> None:
    options = {"x": np.ones(3, np.float32), **options}
    with refused(*words):
        comm.all_reduce(**options)
    comm.all_reduce(np.ones(1))
    assert len(daemon.seen) == 1  # and the numbers have no gap


# ---- memory -----------------------------------------------------------------------------------------


def test_a_commit_in_place_copies_nothing(comm: Communicator, daemon: FakeDaemon) -> None:
    x = comm.empty(BIG)
    where = address(x)
    half = x[BIG // 2 :]
    offsets = []
    for i in range(4):
        x[:] = i + 1
        comm.all_reduce(x)
        post = daemon.seen[-1]
        offsets.append((post.input_buffer, post.result_buffer))
        assert (x == 2 * (i + 1)).all()
        assert (half == 2 * (i + 1)).all()  # views see it too
        assert address(x) == where
        # What x shows is the very page that the daemon built the result in.
        daemon.bytes[post.result_buffer : post.result_buffer + 4].view(np.float32)[0] = -1
        assert x[0] == -1
    assert offsets[1] == (offsets[0][1], offsets[0][0])  # the two blocks take turns, so both stay warm
    assert offsets[2:] == offsets[:2]


def test_out_is_swapped_and_the_input_stays(comm: Communicator, daemon: FakeDaemon) -> None:
    x, out = comm.empty(BIG), comm.empty(BIG)
    x[:], out[:] = 3, 4
    comm.all_reduce(x, out)
    post = daemon.seen[-1]
    assert (x == 3).all()
    assert (out == 6).all()
    daemon.bytes[post.result_buffer : post.result_buffer + 4].view(np.float32)[0] = -1
    assert out[0] == -1


def test_a_part_of_an_arena_array(comm: Communicator, daemon: FakeDaemon) -> None:
    whole = comm.zeros((4, BIG))
    for row, part in enumerate((whole[1], whole[2][5:-3], whole[0][: BIG - 1], whole[:2])):
        whole[:] = 1
        comm.all_reduce(part)
        assert (part == 2).all()
        assert whole.sum() == whole.size + part.size, row
        base = daemon.seen[0].input_buffer - BIG * 4
        assert daemon.seen[-1].input_buffer == base + address(part) - address(whole)  # read in place, not copied
    whole[:] = 1
    comm.all_reduce(whole)
    assert (whole == 2).all()


def test_arena_memory_is_twice_the_tensor(comm: Communicator, daemon: FakeDaemon) -> None:
    x = comm.empty(16 << 20)
    x[:] = 1
    for _ in range(3):
        comm.all_reduce(x)
    assert os.fstat(daemon.fd).st_blocks * 512 == 2 * x.nbytes


def test_empty_arrays(comm: Communicator) -> None:
    assert comm.empty(5).dtype == np.float32
    x = comm.empty((3, 4), "int16")
    assert (x.shape, x.dtype, x.flags.c_contiguous, x.flags.writeable) == ((3, 4), np.int16, True, True)
    assert comm.empty((2, 0)).size == 0
    assert comm.empty(()).shape == ()
    assert comm.empty(np.int64(3)).shape == (3,)
    assert comm.empty([2, 2]).shape == (2, 2)
    assert comm.empty(3, "bfloat16").dtype == ml_dtypes.bfloat16
    x[:] = 9
    place = address(x)
    del x
    gc.collect()
    again = comm.zeros((3, 4), np.int16)
    assert address(again) == place
    assert not again.any()
    with pytest.raises(ConfigError, match=r"empty\(shape\): a dimension is negative.*got \(-1,\)"):
        comm.empty(-1)
    with pytest.raises(ConfigError, match=r"empty\(dtype=...\): the dtype is unknown"):
        comm.empty(1, bool)
    with pytest.raises(wancoll.ArenaFull, match="the arena has no room"):
        comm.empty(ARENA)


@pytest.mark.parametrize("inside", [True, False])
def test_memory_of_a_pending_call_is_off_limits(held: Communicator, manual: FakeDaemon, inside: bool) -> None:
    x, y, z = ((held if inside else np).zeros(BIG, np.float32) for _ in range(3))
    first = held.all_reduce(x, y, async_op=True)
    words = (
        "the memory is in use by a call that is not finished",
        f"memory of call {first.id}, all_reduce({BIG} x float32, op=sum)",
        "wait() for that call first",
    )
    for bad in ((y, None), (y, z), (z, y), (y[:5], None)):
        with refused(*words):
            held.all_reduce(*bad, async_op=True)
    second = held.all_reduce(x, z, async_op=True)  # both only read x
    if inside:
        with refused(*words):
            held.all_reduce(x, async_op=True)  # would write what the first one reads
        manual.answer_all(2)
    else:
        third = held.all_reduce(x, async_op=True)  # what lies outside was copied
        manual.answer_all(3)
        third.wait(10)
    first.wait(10)
    second.wait(10)


def test_the_tensor_may_be_dropped_while_the_call_runs(held: Communicator, manual: FakeDaemon) -> None:
    x = held.empty(BIG)
    x[:] = 1
    block = address(x)
    work = held.all_reduce(x, async_op=True)
    del x
    gc.collect()
    other = held.empty(BIG)
    assert address(other) != block  # still the daemon's to read
    manual.answer(manual.next_post())
    assert (work.wait(10).out == 2).all()


def test_works_that_nobody_waits_for_still_bring_their_result(held: Communicator, manual: FakeDaemon) -> None:
    x, y = np.ones(5), np.ones(5)
    held.all_reduce(x, async_op=True)
    last = held.all_reduce(y, async_op=True)
    manual.answer_all(2)
    last.wait(10)
    assert (x == 2).all()
    assert held.pending == ()


# ---- asynchronous calls, timeouts, interruptions ----------------------------------------------------------


def test_answers_in_any_order(held: Communicator, manual: FakeDaemon) -> None:
    tensors = [np.full(10 + i, i, np.int64) for i in range(6)]
    works = [held.all_reduce(x, async_op=True) for x in tensors]
    assert [work.id for work in held.pending] == [1, 2, 3, 4, 5, 6]
    assert repr(works[0]) == "<Work 1 of group 'default': all_reduce(10 x int64, op=sum), pending>"
    assert not works[3].done()
    manual.wait_for_posts(6)
    posts = list(manual.posts)
    for i in (4, 2, 5, 0, 1, 3):
        manual.answer(posts[i])
        assert works[i].wait(10).seq == i + 1
        assert works[i].done()
        assert (tensors[i] == 2 * i).all()
    assert works[0].wait() == works[0].wait(0)  # again is fine
    assert repr(works[0]).endswith("committed>")


def test_a_timeout_loses_nothing(held: Communicator, manual: FakeDaemon) -> None:
    x = np.ones(1000)
    started = time.monotonic()
    call = "all_reduce(1000 x float64, op=sum) of group 'default', call 1 of member 'me'"
    with refused(call, "is still pending ", ".work.wait() goes on waiting", error=TimeoutError) as caught:
        held.all_reduce(x, timeout=0.1)
    took = time.monotonic() - started
    assert 0.1 <= took < 10
    [said] = re.findall(r"is still pending (\S+) s", str(caught.value))
    assert 0.1 <= float(said) <= 1.01 * took  # it is said with three digits
    assert type(caught.value) is wancoll.TimeoutError
    assert isinstance(caught.value, wancoll.WancollError)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    work: wancoll.Work = caught.value.work
    assert held.pending == (work,)
    assert (x == 1).all()
    with pytest.raises(TimeoutError):
        work.wait(0)
    manual.answer(manual.next_post())
    assert work.wait(10).out is x
    assert (x == 2).all()
    for bad in (-1, "1", float("nan")):
        with pytest.raises(ConfigError, match="timeout cannot be used"):
            work.wait(bad) if not work.finished else held.update_membership(bad)  # type: ignore[arg-type]


def test_ctrl_c_while_waiting(held: Communicator, manual: FakeDaemon) -> None:
    x = held.empty(BIG)
    for i in range(20):
        x[:] = i

        def interrupt() -> None:
            manual.wait_for_posts(1)
            os.kill(os.getpid(), signal.SIGINT)

        join = in_thread(interrupt)
        with pytest.raises(KeyboardInterrupt):
            held.all_reduce(x)
        join()
        (work,) = held.pending
        assert (x == i).all()
        manual.answer(manual.posts[0])
        assert work.wait(10).out is x
        assert (x == 2 * i).all()


def test_ctrl_c_that_does_not_interrupt_the_read(held: Communicator, manual: FakeDaemon) -> None:
    """As when it comes just before the call into the kernel: here another thread takes the signal."""
    x = np.ones(3)

    def interrupt() -> None:
        manual.wait_for_posts(1)
        time.sleep(0.2)  # the read is under way
        signal.raise_signal(signal.SIGINT)

    join = in_thread(interrupt)
    with pytest.raises(KeyboardInterrupt):
        held.all_reduce(x)
    join()
    (work,) = held.pending
    manual.answer(manual.next_post())
    assert (work.wait(10).out == 2).all()


@pytest.mark.timeout(60, method="thread")  # the other method needs the alarm itself
def test_ctrl_c_at_any_moment(daemon: FakeDaemon, comm: Communicator) -> None:
    """Alarms hit at random bytecodes; every call is then either pending or was never made, and values are right."""
    choose = random.Random(3)
    small, big = comm.zeros(10), comm.zeros(BIG)
    hits = 0

    def on_alarm(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, on_alarm)
    try:
        for i in range(600):
            x = small if i % 3 else big
            x[:] = i
            calls = len(daemon.seen)
            try:
                signal.setitimer(signal.ITIMER_REAL, choose.uniform(1e-6, 4e-4))
                comm.all_reduce(x)
                signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                hits += 1
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
            for work in comm.pending:
                work.wait(10)
            made = len(daemon.seen) - calls
            assert made in (0, 1)
            assert (x == i * (1 + made)).all()
    finally:
        signal.signal(signal.SIGALRM, before)
    assert hits > 20
    assert comm.all_reduce(np.ones(3)).seq == len(daemon.seen)


@contextlib.contextmanager
def interrupted_at(stop: int, traced: Callable[[CodeType], bool]) -> Iterator[list[int]]:
    """Ctrl-C comes at the line with this number of all that *traced* code runs; [0]: how many lines have run."""
    lines = [0]

    def trace(frame: Any, event: str, _: Any) -> Any:
        lines[0] += event == "line"
        if lines[0] == stop and event == "line":
            raise KeyboardInterrupt
        return trace

    sys.settrace(lambda frame, event, _: trace if traced(frame.f_code) else None)
    try:
        yield lines
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(None)


@pytest.mark.parametrize("fails", [False, True])
def test_ctrl_c_at_any_line_of_the_end_of_a_call(
    held: Communicator, manual: FakeDaemon, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """What has become of it stays what it was: above all a device's failure, when its result cannot come again."""
    commit = Placement.commit

    def failing(self: Placement, nbytes: int, attempt: int) -> None:
        if fails:
            raise DeviceError("the copy failed")
        commit(self, nbytes, attempt)

    monkeypatch.setattr(Placement, "commit", failing)
    ends = {Work.finish.__code__, Work._committed.__code__}
    for stop in range(1, 50):
        x = np.full(3, stop)
        work = held.all_reduce(x, async_op=True)
        post = manual.next_post()
        manual.result_buffer(post).view(np.int64)[:3] = 7
        answer = manual.result(post)
        manual.drop(post)
        with interrupted_at(stop, ends.__contains__) as lines:
            held._connection._handle(answer)
        held._connection._handle(answer)
        if fails:
            with pytest.raises(DeviceError, match="undefined contents"):
                work.wait(0)
        else:
            assert work.wait(0).out is x
            assert x.tolist() == [7] * 3
        if lines[0] < stop:
            break
    assert 5 < lines[0] < stop


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_ctrl_c_at_any_line_of_connect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is left open, and nothing is printed when what was half made goes."""
    printed: list[Any] = []

    def hook(told: Any) -> None:
        if not isinstance(told.exc_value, ResourceWarning):  # of the socket, which closes itself then
            printed.append(str(told.exc_value))

    monkeypatch.setattr(sys, "unraisablehook", hook)
    folder = os.path.dirname(connect_module.__file__)
    for stop in range(1, 500):
        before = resources.of_process()["fds"]
        with FakeDaemon(str(tmp_path / str(stop))) as daemon:
            attach = connect_module.attachment("g", "", 1, 1)
            connection = None
            with interrupted_at(stop, lambda code: code.co_filename.startswith(folder)) as lines:
                connection = connect_module._attach(daemon.path, attach, None, 10.0)
            if connection is not None:
                connection.close()
                del connection
            gc.collect()
        assert resources.of_process()["fds"] == before, f"at line {stop}"
        assert printed == [], f"at line {stop}"
        if lines[0] < stop:
            break
    assert 60 < lines[0] < stop


def test_many_calls_in_flight(path: str) -> None:
    with FakeDaemon(path) as daemon, wancoll.connect(socket=path) as comm:
        tensors = [np.full(3, i) for i in range(3000)]
        works = [comm.all_reduce(x, async_op=True) for x in tensors]
        for work in works:
            work.wait(20)
        assert all((x == 2 * i).all() for i, x in enumerate(tensors))
        assert len(daemon.seen) == 3000


def test_posting_takes_in_answers(held: Communicator, manual: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a daemon's answers pile up while the program only posts."""
    monkeypatch.setattr(connection_module, "_READ_WHILE_POSTING", 8)
    tensors = [np.ones(3) for _ in range(9)]
    for x in tensors[:8]:
        held.all_reduce(x, async_op=True)
    manual.answer_all(8)
    last = held.all_reduce(tensors[8], async_op=True)
    assert held.pending == (last,)
    assert all((x == 2).all() for x in tensors[:8])


def test_a_finished_work_lets_go_of_its_input(comm: Communicator) -> None:
    x, out = np.ones(10), np.ones(10)
    work = comm.all_reduce(x, out, async_op=True)
    gone = weakref.ref(x)
    del x
    assert gone() is not None
    work.wait(10)
    assert gone() is None
    assert work.wait().out is out


def test_no_more_calls_in_flight_than_the_limit(
    held: Communicator, manual: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = connection_module.DEFAULT
    monkeypatch.setattr(connection_module, "_READ_WHILE_POSTING", 2)
    monkeypatch.setattr(connection_module, "DEFAULT", type(limits)(ops_in_flight=4))
    works = [held.all_reduce(np.ones(1), async_op=True) for _ in range(4)]
    with pytest.raises(TimeoutError, match="was not posted in time: 4 calls are pending"):
        held.all_reduce(np.ones(1), timeout=0.05)
    join = in_thread(lambda: held.all_reduce(np.ones(1), timeout=10))
    manual.wait_for_posts(4)
    manual.answer(manual.posts[0])
    manual.answer_all(4)
    assert join().seq == 5
    for work in works:
        work.wait(10)


@pytest.fixture
def no_second_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that wait behind the one that reads must be woken, not look by themselves."""
    monkeypatch.setattr(connection_module, "_FOLLOW_SECONDS", 1000.0)


@pytest.mark.usefixtures("no_second_look")
def test_threads_wait_for_different_works(held: Communicator, manual: FakeDaemon) -> None:
    tensors = [np.full(100 + i, i) for i in range(8)]
    works = [held.all_reduce(x, async_op=True) for x in tensors]
    joins = [in_thread(lambda work=work: work.wait(20)) for work in works]  # type: ignore[misc]
    manual.wait_for_posts(8)
    posts = list(manual.posts)
    random.Random(1).shuffle(posts)
    for post in posts:
        manual.answer(post)
        assert joins[post.id - 1]().seq == post.id  # nobody else needs to be answered first
    assert all((x == 2 * i).all() for i, x in enumerate(tensors))


@pytest.mark.usefixtures("no_second_look")
def test_a_waiting_thread_takes_over_the_reading(held: Communicator, manual: FakeDaemon) -> None:
    first, second = (held.all_reduce(np.ones(3), async_op=True) for _ in range(2))
    manual.wait_for_posts(2)
    one, two = list(manual.posts)
    reader = in_thread(lambda: first.wait(20))
    deadline = time.monotonic() + 10
    while not held._connection._reading:
        assert time.monotonic() < deadline
    with pytest.raises(TimeoutError):
        second.wait(0.05)  # waits behind the reader, by its own clock
    follower = in_thread(lambda: second.wait(20))
    manual.answer(one)
    assert reader().seq == 1
    manual.answer(two)
    assert follower().seq == 2


# ---- failures ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BY_NAME)
@pytest.mark.parametrize("count", [10, BIG])
@pytest.mark.parametrize("inside", [True, False])
def test_a_failed_call_leaves_everything_as_it_was(
    held: Communicator, manual: FakeDaemon, name: str, count: int, inside: bool
) -> None:
    make = held.empty if inside else np.empty
    x, out = make(count, np.float32), make(count, np.float32)
    x[:], out[:] = 5, 6
    for target in (None, out):
        work = held.all_reduce(x, target, async_op=True)
        manual.fail(manual.next_post(), name, {"me": "all_reduce"})
        for _ in range(2):
            with pytest.raises(BY_NAME[name]) as caught:
                work.wait(10)
            assert str(caught.value).startswith("who: what; expected expected; got got; hint")
            assert type(caught.value) is BY_NAME[name]
            if isinstance(caught.value, CollectiveMismatch):
                assert caught.value.calls == {"me": "all_reduce"}
        assert work.done()
        assert repr(work).endswith("failed>")
        assert (x == 5).all()
        assert (out == 6).all()
    # The group is usable afterwards.
    manual.manual = False
    assert (held.all_reduce(np.ones(3)).out == 2).all()


def test_an_error_of_a_newer_daemon(held: Communicator, manual: FakeDaemon) -> None:
    work = held.all_reduce(np.ones(3), async_op=True)
    manual.fail(manual.next_post(), "SomethingNew")
    with pytest.raises(wancoll.WancollError, match="who: what"):
        work.wait(10)


def over(comm: Communicator, error: type[Exception], words: str) -> None:
    for call in (
        lambda: comm.all_reduce(np.ones(3)),
        lambda: comm.all_reduce(np.ones(3), async_op=True),
        comm.update_membership,
        lambda: comm.empty(3),
    ):
        with pytest.raises(error, match=words):
            call()
    assert comm.pending == ()


def test_the_end_of_a_membership_fails_all_that_is_pending(held: Communicator, manual: FakeDaemon) -> None:
    x, y, z = held.zeros(BIG), np.zeros(BIG), np.zeros(3)
    works = [held.all_reduce(t, async_op=True) for t in (x, y, z)]
    joins = [in_thread(lambda work=work: work.wait(20)) for work in works[:2]]  # type: ignore[misc]
    manual.wait_for_posts(3)
    for post in manual.posts:
        manual.result_buffer(post)[:] = 0xEE
    manual.send(m.Failure(0, "Evicted", "was silent", "me", "", "3.1 s", "connect again", {}))
    assert [type(join()) for join in joins] == [OutcomeUnknown, OutcomeUnknown]
    with pytest.raises(OutcomeUnknown, match=r"got Evicted: was silent; got 3.1 s; connect again") as caught:
        works[2].wait(10)
    assert isinstance(caught.value.__cause__, Evicted)
    assert not any(t.any() for t in (x, y, z))
    over(held, Evicted, "me: was silent")
    where = f"peer daemon 'fake' at {manual.path}"
    assert repr(held) == f"<Communicator 'me' of group 'default': over (Evicted); {where}>"


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"\xff\xff\xff\xff", "sent an oversized frame; expected at most 1048576 bytes; got 4294967295"),
        (b"\x00\x00\x00\x02\xc1\xc1", "sent a message that cannot be read"),
        (b"\x00\x00\x00\x04\x93\xa1x\x01\x02", "sent a message that cannot be read"),
        (b"\x00\x00\x00\x04\x91\xa2Ok", "out of place; expected Result, Failure, Slow or EpochInfo; got Ok"),
    ],
)
def test_nonsense_from_the_daemon(held: Communicator, manual: FakeDaemon, data: bytes, words: str) -> None:
    work = held.all_reduce(np.ones(3), async_op=True)
    assert manual.client is not None
    manual.client.sendall(data)
    with pytest.raises(OutcomeUnknown, match=words) as caught:
        work.wait(10)
    assert "peer daemon 'fake'" in caught.value.who
    assert isinstance(caught.value.__cause__, ProtocolError)
    over(held, ProtocolError, "sent a")


def test_one_byte_at_a_time(held: Communicator, manual: FakeDaemon) -> None:
    from wancoll.wire.framing import encode

    x = np.ones(3)
    join = in_thread(lambda: held.all_reduce(x, timeout=20))
    post = manual.next_post()
    manual.compute(post)
    manual.drop(post)
    assert manual.client is not None
    for byte in encode(m.EpochInfo(2, 0, "me", ["me"] * 1000)) + encode(manual.result(post)):
        manual.client.sendall(bytes([byte]))
    assert join().seq == 1
    assert held.world_size == 1000


def test_an_answer_for_nobody_is_ignored(comm: Communicator, daemon: FakeDaemon) -> None:
    daemon.send(m.Failure(99, "Evicted", "", "", "", "", "", {}))
    assert comm.all_reduce(np.ones(3)).seq == 1


# ---- the end ----------------------------------------------------------------------------------------


def test_close(held: Communicator, manual: FakeDaemon) -> None:
    x, y = held.empty(BIG), np.ones(3)
    x[:] = 4
    work = held.all_reduce(x, async_op=True)
    waiting = in_thread(held.all_reduce(y, async_op=True).wait)
    manual.wait_for_posts(2)
    held.close()
    held.close()
    manual.wait_for(lambda: manual.detached)
    with pytest.raises(OutcomeUnknown, match=r"'default': the call was open.*the communicator is closed; connect"):
        work.wait(10)
    assert "the communicator is closed" in str(waiting())
    over(held, ConfigError, "closed")
    assert (x == 4).all()  # readable for as long as it lives
    assert (y == 1).all()


def test_arrays_outlive_the_communicator(daemon: FakeDaemon) -> None:
    with wancoll.connect(socket=daemon.path) as comm:
        x = comm.empty(BIG)
        x[:] = 1
        comm.all_reduce(x)
    del comm
    gc.collect()
    assert (x == 2).all()
    x += 1
    assert (x == 3).all()


def test_at_exit_the_daemon_is_told(daemon: FakeDaemon, tmp_path: Path) -> None:
    script = tmp_path / "client.py"
    script.write_text(f"import wancoll\ncomm = wancoll.connect(socket={daemon.path!r})\nx = comm.empty(10)\n")
    child = os.spawnl(os.P_WAIT, sys.executable, sys.executable, "-W", "error", str(script))
    assert child == 0
    daemon.wait_for(lambda: daemon.detached)
    assert daemon.goodbye


def test_a_forked_child(comm: Communicator, daemon: FakeDaemon) -> None:
    x = comm.empty(BIG)
    x[:] = 1
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            text = ""
            try:
                comm.all_reduce(x)
            except ConfigError as bad:
                text = str(bad)
            comm.close()
            os.write(writing, text.encode() + (b" sum %d" % x.sum()))
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    assert "a communicator belongs to the process that connected" in text
    assert f"expected process {os.getpid()}; got its child {child}" in text
    assert f"sum {BIG}" in text
    comm.all_reduce(x)
    assert (x == 2).all()


def test_the_daemon_sees_the_parent_die_though_a_forked_child_lives(daemon: FakeDaemon, tmp_path: Path) -> None:
    script = tmp_path / "client.py"
    script.write_text(
        textwrap.dedent(f"""
            import os, signal, time, wancoll
            comm = wancoll.connect(socket={daemon.path!r})
            if os.fork() == 0:
                time.sleep(30)
            print(flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        """)
    )
    pid = os.spawnl(os.P_NOWAIT, sys.executable, sys.executable, str(script))
    daemon.wait_for(lambda: daemon.detached)
    os.waitpid(pid, 0)


# ---- the private daemon -----------------------------------------------------------------------------------

_PEER = """
import os, socket, sys
sys.path.insert(0, {tests!r})
arguments = sys.argv[1:]
assert arguments[:2] == ["peer", "--master"], arguments
path = arguments[arguments.index("--socket") + 1]
assert "--watch-stdin" in arguments
print("a line for the log", file=sys.stderr, flush=True)
open({notes!r} + ".join", "w").write(os.environ.get("WANCOLL_JOIN", ""))
open({notes!r} + ".names", "a").write(os.environ["WANCOLL_NAME"] + "\\n")
open({notes!r}, "w").write(repr((arguments, os.getpid())))
{body}
"""
_SERVES = """
from tests.client.fake_daemon import FakeDaemon
daemon = FakeDaemon(path)
print("wancoll peer started socket=" + path, flush=True)
sys.stdin.read()
os._exit(0)
"""


@pytest.fixture
def private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Let `python -m wancoll` be a script of the test's."""

    def prepare(body: str) -> Path:
        script, notes = tmp_path / "python", tmp_path / "notes"
        peer = tmp_path / "peer.py"
        peer.write_text(_PEER.format(tests=str(Path(__file__).parents[2]), notes=str(notes), body=body))
        script.write_text(
            f'#!/bin/sh\n[ "$1 $2" = "-m wancoll" ] || exit 9\nshift 2\nexec {sys.executable} {peer} "$@"\n'
        )
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setattr(sys, "executable", str(script))
        return notes

    return prepare


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.parametrize(
    ("options", "variables"),
    [
        ({"master": "host"}, {}),
        ({"token": _TOKEN}, {}),
        ({"master": "host", "token": _TOKEN.replace("host", "elsewhere")}, {"WANCOLL_JOIN": "another"}),
        ({"master": "host"}, {"WANCOLL_JOIN": _TOKEN.replace("host", "elsewhere")}),
        ({}, {"WANCOLL_MASTER": "host"}),
        ({}, {"WANCOLL_JOIN": _TOKEN}),
        ({}, {"WANCOLL_MASTER": "host", "WANCOLL_JOIN": _TOKEN.replace("host", "elsewhere")}),
    ],
)
def test_a_private_daemon(
    private: Any, monkeypatch: pytest.MonkeyPatch, options: dict[str, str], variables: dict[str, str], tmp_path: Path
) -> None:
    """Of the master that is named, with the token that is given; that is for its environment alone."""
    notes = private(_SERVES)
    monkeypatch.delenv("WANCOLL_SOCKET", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))  # where no daemon runs
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with wancoll.connect(lanes=3, peer_options=["--listen", "127.0.0.1:0"], timeout=30, **options) as comm:  # type: ignore[arg-type]
        assert "; private, of master host:7400>" in repr(comm)
        arguments, pid = eval(notes.read_text())
        assert arguments[2] == "host:7400"
        token = options.get("token") or variables.get("WANCOLL_JOIN", "")
        assert Path(f"{notes}.join").read_text() == token
        assert not token or token not in arguments
        assert arguments[-4:] == ["--lanes", "3", "--listen", "127.0.0.1:0"]
        assert (comm.all_reduce(np.ones(3), timeout=10).out == 2).all()
        path = arguments[arguments.index("--socket") + 1]
        assert Path(path).parent.stat().st_mode & 0o077 == 0
    assert gone(pid)
    assert not Path(path).parent.exists()


@pytest.mark.parametrize("given", [False, True])
def test_an_address_to_advertise_that_a_private_daemon_does_not_take_is_told(
    private: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, given: bool
) -> None:
    private(_SERVES)
    monkeypatch.setenv("WANCOLL_ADVERTISE", "203.0.113.7:7401")
    options = ["--advertise", "203.0.113.7"] if given else []
    with wancoll.connect(master="host:7400", peer_options=options, timeout=30):
        pass
    told = [one for one in caplog.messages if one.startswith("WANCOLL_ADVERTISE is for `wancoll peer`: ")]
    assert len(told) == (not given)


def test_a_private_daemon_has_a_name_that_tells_whose_it_is_and_the_same_again(
    private: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes = private(_SERVES)
    monkeypatch.setattr(sys, "argv", ["/home/me/my train.py"])
    for _ in range(2):
        with wancoll.connect(master="host:7400", timeout=30):
            pass
    with wancoll.connect(master="host:7400", timeout=30), wancoll.connect(master="host:7400", timeout=30):
        pass
    first, *others = Path(f"{notes}.names").read_text().split()
    host = re.escape(socket.gethostname()[:40])
    assert re.fullmatch(rf"{host}-my-train-{os.getpid()}-[0-9a-f]{{4}}", first)
    assert others == [first, first, f"{first}-2"]


@pytest.mark.parametrize(
    ("script", "word"),
    [
        ("", "python"),
        ("-c", "python"),
        ("/a/pkg/__main__.py", "pkg"),
        ("x" * 90 + ".py", "x" * 40),
        ("d\u00e9j\u00e0.py", "d-j"),
    ],
)
def test_any_script_gives_a_name(script: str, word: str) -> None:
    from wancoll.client.private import name_of

    assert f"-{word}-{os.getpid()}-" in name_of(script, 1)
    assert len(name_of(script, 12)) < 110


@pytest.mark.parametrize("folder", ["short", "with space", "long" * 25])
def test_a_private_daemon_in_any_folder_for_what_is_temporary(
    private: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, folder: str
) -> None:
    """Where $TMPDIR is too long for the path of a socket it is /tmp."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / folder))
    (tmp_path / folder).mkdir()
    notes = private(_SERVES)
    with wancoll.connect(master="host:7400", timeout=30) as comm:
        assert (comm.all_reduce(np.ones(3), timeout=10).out == 2).all()
        arguments, _ = eval(notes.read_text())
        path = Path(arguments[arguments.index("--socket") + 1])
        assert path.parent.parent == (Path("/tmp") if len(str(tmp_path / folder)) > 80 else tmp_path / folder)
    assert not path.parent.exists()


def test_no_folder_for_what_is_temporary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/proc/nowhere")
    with refused("no folder can be made for sockets and logs", "set TMPDIR to another folder"):
        wancoll.connect(master="host:7400")


def test_a_private_daemon_that_ends(private: Any) -> None:
    private("sys.exit('no master answers')")
    words = (
        "wancoll peer --master host:7400: the private peer daemon did not start",
        "expected a line that starts with 'wancoll peer started'",
        "it ended with status 1",
        "a line for the log\nno master answers",
    )
    with refused(*words, error=PeerDaemonLost):
        wancoll.connect(master="host:7400")


def test_a_private_daemon_that_refuses_its_options(private: Any) -> None:
    """No other try would do better: it must not look like a daemon that was lost."""
    private("print('no such option', file=sys.stderr); sys.exit(2)")
    with refused("did not start", "it ended with status 2", "no such option", error=ConfigError):
        wancoll.connect(master="host:7400", peer_options=["--no-such-option"])


def test_a_private_daemon_that_never_starts(private: Any) -> None:
    notes = private("print('hello', flush=True); sys.stdin.read()")
    with pytest.raises(PeerDaemonLost, match=r"it had not started after \d+(\.\d+)? s"):
        wancoll.connect(master="host:7400", timeout=1)
    assert not notes.exists() or gone(eval(notes.read_text())[1])


def test_a_private_daemon_that_does_not_want_to_end(private: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from wancoll.client import private as module

    monkeypatch.setattr(module, "_STOP_SECONDS", 0.2)
    ignore = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    notes = private(ignore + _SERVES.replace("os._exit(0)", "time.sleep(60)"))
    comm = wancoll.connect(master="host:7400", timeout=30)
    comm.close()
    assert gone(eval(notes.read_text())[1])


def test_a_private_daemon_that_is_killed(private: Any) -> None:
    notes = private(_SERVES)
    with wancoll.connect(master="host:7400", timeout=30) as comm:
        os.kill(eval(notes.read_text())[1], signal.SIGKILL)
        with refused("the end of the private daemon's log: a line for the log", error=PeerDaemonLost):
            comm.update_membership(timeout=10)


# ---- everything at once -----------------------------------------------------------------------------


@pytest.mark.parametrize("calls", [*later(400), *at_night(1000)])
def test_many_calls_against_a_model(held: Communicator, manual: FakeDaemon, calls: int) -> None:
    """Random tensors in and out of the arena, in flight together, answered in random order; some fail."""
    choose = random.Random(20)
    sizes = (0, 1, 3, 100, 1025, 40000, SWAP_BYTES // 2, 3 * SWAP_BYTES)
    dtypes = ["float32", "int64", "int8", "float16", "uint8"]
    pool: list[tuple[Any, Any]] = []  # (tensor, what it must hold)
    flying: dict[int, tuple[wancoll.Work, Any, Any, Any, Any]] = {}
    posted = 0

    def tensor(count: int, dtype: str) -> tuple[Any, Any]:
        made = held.empty(count, dtype) if choose.random() < 0.6 else np.empty(count, dtype)
        made[:] = choose.randrange(100)
        if count > 2 and choose.random() < 0.2:
            made = made[1:-1]
        return made, made.copy()

    def busy(x: Any) -> bool:
        return any(x is a or x is b for _, a, b, _, _ in flying.values())

    def land() -> None:
        manual.wait_for(lambda: len(manual.seen) == posted)
        post = choose.choice(manual.posts)
        work, x, out, x_model, out_model = flying[post.id]
        assert (x == x_model).all()
        assert (out == out_model).all()
        if choose.random() < 0.15:
            manual.fail(post)
            with pytest.raises(WorldTooSmall):
                work.wait(10)
        else:
            manual.answer(post)
            receipt = work.wait(10)
            assert receipt.seq == post.id
            raw = reduced(x_model.reshape(-1).view(np.uint8), DType(post.call.dtype), ReduceOp(post.call.op), 2)
            out_model[...] = raw.view(out_model.dtype)
        del flying[post.id]
        assert (out == out_model).all()
        assert (x == x_model).all()

    for _ in range(calls):
        if not pool or choose.random() < 0.2:
            pool.append(tensor(choose.choice(sizes), choose.choice(dtypes)))
        if len(pool) > 12:
            pool.pop(choose.randrange(len(pool)))
        free = [pair for pair in pool if not busy(pair[0])]
        if free:
            x, x_model = choose.choice(free)
            out, out_model = x, x_model
            same = [p for p in free if p[0].dtype == x.dtype and p[0].shape == x.shape]
            if choose.random() < 0.4:
                out, out_model = choose.choice(same)
            op = choose.choice(["sum", "max", "min"])
            work = held.all_reduce(x, None if out is x else out, op=op, async_op=True)
            posted += 1
            flying[work.id] = (work, x, out, x_model, out_model)
        while flying and (len(flying) > 6 or choose.random() < 0.4):
            land()
    while flying:
        land()
    assert posted > 0.9 * calls
    for x, model in pool:
        assert (x == model).all()
    arena = held._connection.arena
    pool.clear()
    del x, out, free, same, work
    gc.collect()
    arena.take(1)
    assert arena.leased_bytes == 4096
