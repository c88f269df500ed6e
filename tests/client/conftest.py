"""A daemon that is played, and a communicator that is connected to it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import wancoll
from tests.client.fake_daemon import FakeDaemon
from wancoll.client.communicator import Communicator


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "peer.sock")


@pytest.fixture
def world() -> tuple[tuple[str, ...], int]:
    """The members, and the client's rank."""
    return ("me", "other"), 0


@pytest.fixture
def daemon(path: str, world: tuple[tuple[str, ...], int]) -> Iterator[FakeDaemon]:
    with FakeDaemon(path, world[0], rank=world[1]) as daemon:
        yield daemon


@pytest.fixture
def comm(daemon: FakeDaemon) -> Iterator[Communicator]:
    with wancoll.connect(socket=daemon.path, timeout=10) as comm:
        yield comm


@pytest.fixture
def manual(path: str, world: tuple[tuple[str, ...], int]) -> Iterator[FakeDaemon]:
    with FakeDaemon(path, world[0], manual=True, rank=world[1]) as daemon:
        yield daemon


@pytest.fixture
def held(manual: FakeDaemon) -> Iterator[Communicator]:
    """A communicator whose calls are answered only when the test says so."""
    with wancoll.connect(socket=manual.path, timeout=10) as comm:
        yield comm
