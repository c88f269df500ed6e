"""The key file, and what is sealed with it."""

from __future__ import annotations

import base64
import os
from pathlib import Path

import pytest

from tests.owned import as_if_owned
from wancoll.errors import ConfigError
from wancoll.trust.seal import Seal


def test_what_was_sealed_opens_with_the_same_file_alone(tmp_path: Path) -> None:
    seal = Seal.make(str(tmp_path / "a" / "key"))
    assert (tmp_path / "a" / "key").stat().st_mode & 0o777 == 0o600
    assert os.listdir(tmp_path / "a") == ["key"]
    sealed = seal.close("w/token/1", "a secret, ä")
    assert "secret" not in sealed
    assert sealed != seal.close("w/token/1", "a secret, ä")  # a nonce of its own each time
    assert Seal.read(seal.path).open("w/token/1", sealed) == "a secret, ä"
    other = Seal.make(str(tmp_path / "b"))
    with pytest.raises(ConfigError, match=rf"expected the key with id {seal.id}; got one with id {other.id}; copy the"):
        other.open("w/token/1", sealed)


def test_what_was_changed_or_moved_does_not_open(tmp_path: Path) -> None:
    seal = Seal.make(str(tmp_path / "key"))
    sealed = seal.close("w/token/1", "row")
    with pytest.raises(ConfigError, match="w/token/2 in etcd: was changed by somebody who has not the masters' key"):
        seal.open("w/token/2", sealed)
    head, data = sealed.rsplit(" ", 1)
    raw = base64.b64decode(data)
    for at in range(len(raw)):
        spoilt = base64.b64encode(raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :]).decode()
        with pytest.raises(ConfigError, match="was changed"):
            seal.open("w/token/1", f"{head} {spoilt}")
    for bad in ("", "row", sealed[:-4], sealed + "\n", f"{head} AAAA", "v2" + sealed[2:]):
        with pytest.raises(ConfigError, match="was changed"):
            seal.open("w/token/1", bad)


def test_a_key_file_is_written_over_no_other(tmp_path: Path) -> None:
    seal = Seal.make(str(tmp_path / "key"))
    with pytest.raises(FileExistsError):
        Seal.make(seal.path)
    assert Seal.read(seal.path).id == seal.id
    assert os.listdir(tmp_path) == ["key"]


def test_a_key_file_that_others_may_read_is_refused(tmp_path: Path) -> None:
    path = str(tmp_path / "key")
    Seal.make(path)
    os.chmod(path, 0o640)
    with pytest.raises(
        ConfigError, match=r"expected -rw------- \(mode 0600\) of .*; got -rw-r----- of user \d+; chmod 600"
    ):
        Seal.read(path)
    os.chmod(path, 0o400)
    Seal.read(path)


@pytest.mark.parametrize(("owner", "user", "good"), [(7, 7, True), (0, 7, True), (8, 7, False), (7, 0, False)])
def test_a_key_file_is_its_users_or_roots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: int, user: int, good: bool
) -> None:
    path = str(tmp_path / "key")
    Seal.make(path)
    with monkeypatch.context() as patch:
        as_if_owned(patch, owner, user)
        if good:
            Seal.read(path)
            return
        with pytest.raises(ConfigError, match=rf"of user {user} or root; got -rw------- of user {owner}; chmod"):
            Seal.read(path)


@pytest.mark.parametrize("content", [b"", b"wancoll-seal-1 abc\n", b"wancoll-seal-1 %s" % (b"0" * 65), bytes(200)])
def test_what_is_no_key_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "key"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="is no key file; expected one line, wancoll-seal-1 and 64 hex digits"):
        Seal.read(str(path))


def test_a_pipe_is_no_key_file_and_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "key", 0o600)
    with pytest.raises(ConfigError, match="is no key file"):
        Seal.read(str(tmp_path / "key"))
