"""The cluster to break itself: what it starts it ends, whatever happens, and it says what went wrong."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from wancoll.chaos import Cluster, in_threads
from wancoll.errors import CollectiveMismatch, ConfigError
from wancoll.limits import PROTOCOL_VERSION
from wancoll.testing import forwarding
from wancoll.wire import messages as m
from wancoll.wire.framing import encode


def alive(pid: int) -> bool:
    """Whether the process is there and not a zombie."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_gone(pids: list[int], timeout: float = 10.0) -> None:
    deadline = time.monotonic() + timeout
    while any(alive(pid) for pid in pids):
        assert time.monotonic() < deadline, [pid for pid in pids if alive(pid)]
        time.sleep(0.01)


@pytest.mark.parametrize(("voters", "collectors"), [("0", "master"), ("32", "members")])
def test_the_caller_chooses_who_collects_votes(monkeypatch: pytest.MonkeyPatch, voters: str, collectors: str) -> None:
    """A test run in a group whose master collects is one only if its clusters are told."""
    monkeypatch.setenv("WANCOLL_VOTERS", voters)
    with Cluster(1, fork=True) as cluster, cluster.connect(0, group="g", start_world=1):
        [group] = cluster.status().groups
        assert group.plan is not None
        assert group.plan.plan.collectors == collectors


def state(pid: int) -> str:
    with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as stat:
        return stat.read().rpartition(")")[2].split()[0]


def count_up(socket: str, upto: int) -> Iterator[int]:
    assert socket.endswith(".sock")
    yield from range(upto)
    return upto


def fail(socket: str) -> None:
    raise CollectiveMismatch("made up", who=socket, calls={"m0": "something"})


def sleep(socket: str) -> Iterator[str]:
    yield "asleep"
    time.sleep(600)


def test_starts_serves_and_leaves_nothing_behind() -> None:
    with Cluster(2) as cluster:
        pids = [cluster.master_pid, cluster.pid(0), cluster.pid(1)]
        folder = Path(cluster.socket(0)).parent
        assert cluster.peer_address(0) != cluster.peer_address(1)
        assert sorted(cluster.status().daemons) == ["peer-0", "peer-1"]
        assert cluster.add_peer(name="third") == 2
        assert cluster.peer_status(2)["name"] == "third"
        pids.append(cluster.pid(2))
        assert cluster.name(2) == "third"
        assert "connected to the master" in cluster.logs(0)
        cluster.pause(0)
        assert state(cluster.pid(0)) == "T"
        sleeper = cluster.client(1, sleep)
        assert sleeper.next() == "asleep"
        pids.append(sleeper.pid)
    wait_gone(pids)
    assert not folder.exists()
    cluster.close()


@pytest.mark.parametrize("fork", [False, pytest.param(True, marks=pytest.mark.check)])
def test_all_files_of_its_processes_are_their_users_alone(fork: bool) -> None:
    """Also the journal and the logs, whatever the umask says."""
    before = os.umask(0o002)
    try:
        with Cluster(1, secure=True, fork=fork) as cluster:
            with cluster.connect(0, group="g", start_world=1) as comm:
                comm.barrier()
            files = [Path(cluster.journal), *Path(cluster.journal).parent.rglob("*")]
            assert {
                f"{file.name} {file.lstat().st_mode & 0o777:o}" for file in files if file.lstat().st_mode & 0o077
            } == set()
            assert {"journal.sqlite", "journal.sqlite-wal", "journal.sqlite.lock", "master.log", "peer-0.sock"} <= {
                file.name for file in files
            }
    finally:
        os.umask(before)


def test_signals(monkeypatch: pytest.MonkeyPatch) -> None:
    with Cluster(2) as cluster:
        first = cluster.pid(0)
        cluster.pause(0)
        with monkeypatch.context() as soon:
            soon.setattr("wancoll.testing.cluster._ANSWER_TIMEOUT", 1.0)
            with pytest.raises(ConfigError, match=r"peer-0.*does not answer"):
                cluster.failpoint(0, "mid_op", "kill")
        cluster.resume(0)
        assert state(first) != "T"
        cluster.failpoint(0, "mid_op", "clear")
        with pytest.raises(ConfigError, match="unknown failpoint"):
            cluster.failpoint(0, "nowhere", "kill")
        cluster.kill(0)
        assert not cluster.running(0)
        with pytest.raises(ConfigError, match="SIGCONT"):
            cluster.resume(0)
        cluster.restart_peer(0)
        assert cluster.running(0)
        assert cluster.pid(0) != first
        cluster.terminate(1)
        assert cluster.wait(1) == 0
        address = cluster.master_address
        cluster.kill_master()
        with pytest.raises(ConfigError):
            cluster.pause_master()
        with pytest.raises(ConfigError, match="master"):
            cluster.status()
        with socket.socket() as other, pytest.raises(OSError, match="Address already in use"):
            other.bind(address)  # the kernel gives it to no connection, either
        cluster.start_master()
        assert cluster.master_address == address


def test_a_child_that_cannot_start_tells_why() -> None:
    with pytest.raises(ConfigError, match=r"(?s)peer-0.*exit code 2.*--congestion-control") as caught:
        Cluster(1, peer_args=["--congestion-control=nonsense"])
    assert "nonsense" in str(caught.value)


@pytest.mark.check
def test_children_end_with_a_parent_that_is_killed() -> None:
    """Also the ones that stand still."""
    script = (
        "import sys, time\n"
        "from wancoll.chaos import Cluster\n"
        "cluster = Cluster(2)\n"
        "cluster.pause(1)\n"
        "print(cluster.socket(0), cluster.master_pid, cluster.pid(0), cluster.pid(1), flush=True)\n"
        "time.sleep(600)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, env=environment) as parent:
        assert parent.stdout is not None
        path, *numbers = parent.stdout.readline().decode().split()
        pids = [int(pid) for pid in numbers]
        assert len(pids) == 3
        assert all(alive(pid) for pid in pids)
        parent.send_signal(signal.SIGKILL)
    wait_gone(pids)
    shutil.rmtree(Path(path).parent)  # nobody was left to do it


@pytest.mark.check
def test_children_survive_the_thread_that_asked_for_them() -> None:
    with Cluster(1) as cluster:
        in_threads(lambda _: cluster.restart_peer(0), 1)
        in_threads(lambda _: cluster.add_peer(), 1)
        pids = [cluster.pid(0), cluster.pid(1)]
        cluster.status()
        assert all(alive(pid) for pid in pids)


def test_client_processes() -> None:
    with Cluster(1) as cluster:
        counting = cluster.client(0, count_up, 3)
        assert [counting.next(), counting.next()] == [0, 1]
        assert counting.result() == 3
        with pytest.raises(ConfigError, match="yielded nothing more"):
            counting.next()
        with pytest.raises(CollectiveMismatch, match="made up") as caught:
            cluster.client(0, fail).result()
        assert caught.value.calls == {"m0": "something"}
        sleeper = cluster.client(0, sleep)
        assert sleeper.next() == "asleep"
        sleeper.pause()
        assert state(sleeper.pid) == "T"
        sleeper.resume()
        with pytest.raises(ConfigError, match="not answered in time"):
            sleeper.next(0.1)
        sleeper.kill()
        assert not sleeper.running
        with pytest.raises(ConfigError, match="exit code -9"):
            sleeper.result()


def test_a_daemon_that_dies_while_it_is_dialled_ends_one_connection_of_its_proxy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is connected, and broken before the first frame is through."""

    async def broken(to: object, data: bytes) -> None:
        raise BrokenPipeError

    async def forward_one() -> None:
        ours, theirs = multiprocessing.Pipe()
        with ours, theirs, socket.create_server(("127.0.0.1", 0)) as daemon, trio.fail_after(20):
            target = daemon.getsockname()
            dialler = socket.create_connection(target)
            near = trio.SocketStream(trio.socket.from_stdlib_socket(daemon.accept()[0]))
            dialler.sendall(encode(m.LaneHello(PROTOCOL_VERSION, "g", b"k" * 16, 1, 2, 0, 0, 0, 1)))
            await forwarding.Proxy(theirs, [target]).accept(0, near)
            assert dialler.recv(1) == b""
            dialler.close()

    monkeypatch.setattr(forwarding, "_send", broken)
    trio.run(forward_one)  # as the process does: errors of a nursery come as groups


def test_a_proxy_forwards_nothing_of_a_lane_whose_dialler_has_gone() -> None:
    """Nobody knows any more which daemon dialled it, so the rules for that daemon's lanes would not hold for it."""

    async def accepted() -> bool:
        ours, theirs = multiprocessing.Pipe()
        with ours, theirs, socket.create_server(("127.0.0.1", 0)) as daemon, trio.fail_after(20):
            with socket.create_server(("127.0.0.1", 0)) as door:
                dialler = socket.create_connection(door.getsockname())
                near = trio.SocketStream(trio.socket.from_stdlib_socket(door.accept()[0]))
            dialler.sendall(encode(m.LaneHello(PROTOCOL_VERSION, "g", b"k" * 16, 1, 2, 0, 0, 0, 1)))
            dialler.close()
            await forwarding.Proxy(theirs, [daemon.getsockname()]).accept(0, near)
            daemon.setblocking(False)
            try:
                daemon.accept()[0].close()
            except BlockingIOError:
                return False
            return True

    assert not trio.run(accepted)


def test_in_threads() -> None:
    assert in_threads(lambda i: i * i, 4) == [0, 1, 4, 9]
    assert in_threads(lambda i: i * i, [3, 1]) == [9, 1]

    def odd_ones_fail(i: int) -> int:
        if i % 2:
            raise ValueError(f"call {i}")
        return i

    with pytest.raises(ValueError, match="call 1") as caught:
        in_threads(odd_ones_fail, 4)
    assert [note for note in caught.value.__notes__ if "call 3" in note]
    with pytest.raises(TimeoutError, match=r"1\]"):
        in_threads(lambda i: time.sleep(3.0 * i), 2, timeout=0.1)
