"""What a daemon sees of a client's process."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.client.tools import until
from wancoll.peer.trainer import Trainer

CHILD = "import socket, sys; s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); s.recv(1)"


class Pair:
    """A child at the other end of a unix socket."""

    def __init__(self, path: str) -> None:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path)
            listener.listen()
            self.child = subprocess.Popen([sys.executable, "-c", CHILD, path])
            self.sock, _ = listener.accept()
        self.trainer = Trainer(self.sock)

    def becomes(self, state: str) -> None:
        until(lambda: self.trainer.look(1.0)[0] == state)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    pair = Pair(str(tmp_path / "sock"))
    yield pair
    pair.child.kill()
    pair.child.wait()
    pair.trainer.close()
    pair.sock.close()


def test_a_stop_is_seen_and_timed(pair: Pair) -> None:
    assert not pair.trainer.unseen
    assert pair.trainer.look(1.0) == ("", 0.0) or pair.trainer.state == ""
    os.kill(pair.child.pid, signal.SIGSTOP)
    pair.becomes("stopped")
    assert pair.trainer.look(4.5) == ("stopped", 3.5)
    os.kill(pair.child.pid, signal.SIGCONT)
    pair.becomes("")


def test_one_that_is_traced_stops_and_runs(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    for second in range(10):
        monkeypatch.setattr(pair.trainer, "_stat", lambda at=second: (b"t", b"%d 0" % at))
        assert pair.trainer.look(float(second)) == ("stopped", 0.0)


def test_a_zombie_is_dead(pair: Pair) -> None:
    pair.child.kill()
    pair.becomes("dead")
    assert pair.trainer.look(5.0) == ("dead", 4.0)
    pair.child.wait()
    assert pair.trainer.look(6.0)[0] == "dead"


def test_one_whose_first_thread_has_ended_lives(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """It shows as a zombie, and the others go on."""
    monkeypatch.setattr(pair.trainer, "_stat", lambda: (b"Z", b"0 0"))
    assert pair.trainer.look(1.0)[0] == ""


def test_whose_process_cannot_be_seen_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = socket.socketpair(socket.AF_UNIX)
    monkeypatch.setattr(os, "pidfd_open", lambda pid: (_ for _ in ()).throw(PermissionError("not allowed")))
    trainer = Trainer(one)
    assert "not allowed" in trainer.unseen
    assert trainer.look(1.0) == ("", 0.0)
    trainer.close()
    one.close()
    other.close()


def test_it_lets_go_of_what_it_holds(pair: Pair) -> None:
    held = len(os.listdir("/proc/self/fd"))
    trainer = Trainer(pair.sock)
    for second in range(10):
        trainer.look(float(second))
    assert len(os.listdir("/proc/self/fd")) == held + 2
    trainer.close()
    assert len(os.listdir("/proc/self/fd")) == held
