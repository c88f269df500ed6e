"""Daemons of one machine know which of them have ended: by locks that end with their processes."""

from __future__ import annotations

import fcntl
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from tests.owned import as_if_owned
from wancoll.limits import WITHOUT_END
from wancoll.peer import process_lock

_LIVES = (
    "import sys; from wancoll.peer import process_lock; "
    "print(process_lock.begin(int(sys.argv[1]), 600.0)); sys.stdout.flush(); input()"
)


@pytest.fixture
def folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path / "wancoll" / "lives"


def test_who_is_killed_has_ended_and_who_lives_has_not(folder: pathlib.Path) -> None:
    command = [sys.executable, "-c", _LIVES, "71"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline().endswith(", [])\n")
        mine, ended = process_lock.begin(72, 600.0)
        assert mine is not None
        assert ended == process_lock.look(str(folder)) == []
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert process_lock.look(str(folder)) == [71]
    later, ended = process_lock.begin(73, 600.0)
    assert (later is not None, ended) == (True, [71])
    os.close(mine)
    assert sorted(process_lock.look(str(folder))) == [71, 72]


def test_other_machines_and_what_is_not_locked_yet_say_nothing_and_old_ones_go(
    folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_lock, "MOST", 2)
    mine = [process_lock.begin(number, 600.0)[0] for number in (1, 2, 3)]
    for at, name in enumerate(sorted(os.listdir(folder))):
        os.utime(folder / name, (at, at))
    for one in mine:
        assert one is not None
        os.close(one)
    here = min(os.listdir(folder))
    (folder / f"elsewhere{here}").write_text("7\n")
    (folder / f"{here[:-1]}9").touch()
    assert process_lock.look(str(folder)) == [3, 2]
    assert len(os.listdir(folder)) == 4


def test_an_end_for_which_no_name_waits_any_more_is_forgotten_and_one_without_a_limit_is_not(
    folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began = [process_lock.begin(number, grace)[0] for number, grace in ((1, 30.0), (2, 600.0), (3, WITHOUT_END))]
    later = time.time() + 60.0
    monkeypatch.setattr(process_lock, "time", SimpleNamespace(time=lambda: later))
    assert process_lock.look(str(folder)) == []  # they live
    assert len(os.listdir(folder)) == 3
    for one in began:
        assert one is not None
        os.close(one)
    (folder / f"{socket.gethostname()}-{4:016x}").write_text("7\n")  # by a daemon of an earlier version
    assert sorted(process_lock.look(str(folder))) == [2, 3, 4]
    assert len(os.listdir(folder)) == 3
    later += 600.0
    assert sorted(process_lock.look(str(folder))) == [3, 4]
    later += 1e8
    assert sorted(process_lock.look(str(folder))) == [3, 4]
    assert len(os.listdir(folder)) == 2


def test_what_is_no_daemons_file_says_nothing_and_takes_nothing_away(folder: pathlib.Path) -> None:
    mine, _ = process_lock.begin(5, 600.0)
    assert mine is not None
    os.close(mine)
    named = f"{socket.gethostname()}-"
    for odd in ("f" * 28, "+ff", "0", "0" * 16, "000000000000000A"):
        (folder / f"{named}{odd}").write_text("1\n")
    os.mkfifo(folder / f"{named}0000000000000001")
    (folder / f"{named}0000000000000002").symlink_to("nowhere")
    (folder / f"{named}0000000000000003").symlink_to(folder / f"{named}0000000000000005")
    (folder / f"{named}0000000000000004").mkdir()
    later, ended = process_lock.begin(6, 600.0)
    assert (later is not None, ended) == (True, [5])


def test_what_another_user_wrote_says_nothing(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine, _ = process_lock.begin(5, 600.0)
    assert mine is not None
    os.close(mine)
    for owner, ended in ((7, [5]), (8, [])):
        with monkeypatch.context() as patch:
            as_if_owned(patch, owner, user=7)
            assert process_lock.look(str(folder)) == ended


def test_who_looks_hides_nothing_from_others_and_no_own_lock_depends_on_it(
    folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, _ = process_lock.begin(5, 600.0)
    assert mine is not None
    os.close(mine)
    with open(folder / f"{socket.gethostname()}-{5:016x}") as beside:
        fcntl.flock(beside, fcntl.LOCK_SH)
        assert process_lock.look(str(folder)) == [5]

    def _fails(_: str) -> list[int]:
        raise OSError("gone")

    monkeypatch.setattr(process_lock, "look", _fails)
    lock, ended = process_lock.begin(6, 600.0)
    assert lock is not None
    assert ended == []
    assert not [name for name in os.listdir(folder) if name.startswith(".")]


def test_without_a_place_nobody_vouches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/proc/nowhere")
    assert process_lock.begin(1, 600.0) == (None, [])
