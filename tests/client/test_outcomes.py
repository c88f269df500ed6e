"""Every error against every phase of a call: what may have happened. The table is that of docs/guide.md.

What the daemon says of a call is held by tests/peer/test_member.py, and judged in the simulation.
"""

from __future__ import annotations

import builtins
import gc
import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import wancoll
from tests.client.fake_daemon import ARENA, FakeDaemon
from tests.client.tools import in_thread, until
from wancoll import errors
from wancoll.client import connection as connection_module
from wancoll.client.communicator import Communicator
from wancoll.client.connection import Connection
from wancoll.client.cuda.staging import Staging
from wancoll.client.memory.placement import Placement
from wancoll.errors import BY_NAME, DeviceError, OutcomeUnknown, TimeoutError, WancollError
from wancoll.limits import Limits
from wancoll.wire import messages as m

ROOT = Path(__file__).parents[2]
SAFE, MAYBE, RUNS, DONE, NEVER = "has not happened", "may have happened", "goes on", "has happened", "-"
# Before it is sent, while it is open, when it is committed.
TABLE = {
    "WorldTooSmall": (NEVER, SAFE, NEVER),
    "CollectiveMismatch": (NEVER, SAFE, NEVER),
    "OperationAborted": (NEVER, SAFE, NEVER),
    "Evicted": (SAFE, SAFE, NEVER),
    "MasterUnreachable": (SAFE, SAFE, NEVER),
    "PeerDaemonLost": (SAFE, SAFE, NEVER),
    "AskedToLeave": (SAFE, SAFE, NEVER),
    "ProtocolError": (SAFE, SAFE, NEVER),
    "ConfigError": (SAFE, SAFE, NEVER),
    "ArenaFull": (SAFE, NEVER, NEVER),
    "DeviceError": (SAFE, NEVER, DONE),
    "TimeoutError": (SAFE, RUNS, DONE),
    "OutcomeUnknown": (NEVER, MAYBE, NEVER),
}


def cells(phase: int, *what: str) -> list[str]:
    return [name for name, row in TABLE.items() if row[phase] in what]


def test_the_table_is_that_of_the_page_and_has_every_error() -> None:
    text = (ROOT / "docs" / "guide.md").read_text().partition("## What may have happened")[2]
    rows = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in text.split("\n##")[0].splitlines()]
    found = {name: tuple(row[1:]) for row in rows if len(row) == 4 for name in row[0].split("`, `") if name in TABLE}
    assert found == TABLE
    known = {name for name, one in vars(errors).items() if isinstance(one, type) and issubclass(one, WancollError)}
    assert TABLE.keys() == known - {"WancollError"}
    assert {one for name in known - {"WancollError", "NotBuilt"} for one in getattr(errors, name).__bases__} == {
        WancollError,
        builtins.TimeoutError,
    }


def no_memory(held: Communicator, _: Any) -> Any:
    return np.zeros(ARENA + 1, np.uint8)


def device_fails(_: Communicator, patch: pytest.MonkeyPatch) -> Any:
    def prepare(self: Placement, deadline: float | None = None) -> None:
        raise DeviceError("the device failed")

    patch.setattr(Placement, "prepare", prepare)


def no_room(held: Communicator, patch: pytest.MonkeyPatch) -> Any:
    patch.setattr(connection_module, "_READ_WHILE_POSTING", 0)
    patch.setattr(connection_module, "DEFAULT", Limits(ops_in_flight=0))


BY_A_CAUSE: dict[str, Any] = {"ArenaFull": no_memory, "DeviceError": device_fails, "TimeoutError": no_room}


@pytest.mark.parametrize("name", cells(0, SAFE))
def test_before_it_is_sent(held: Communicator, manual: FakeDaemon, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    x = np.ones(3)
    cause = BY_A_CAUSE.get(name)
    if cause is not None:
        made = cause(held, monkeypatch)
        x = x if made is None else made
    else:  # the connection has ended, and the client knows
        manual.send(m.Failure(0, name, "the end"))
        until(lambda: (held._connection._step(None, 0), held._connection._over)[1] is not None)  # type: ignore[func-returns-value]
    with pytest.raises(WancollError) as caught:
        held.all_reduce(x, timeout=0.05)
    assert type(caught.value).__name__ == name
    assert getattr(caught.value, "work", None) is None
    assert not manual.seen
    assert (x[:3] == (0 if name == "ArenaFull" else 1)).all()


@pytest.mark.parametrize("name", ["Evicted", "PeerDaemonLost"])
@pytest.mark.parametrize("how", ["said", "hangs up", "both"])
def test_the_first_call_after_the_end_has_not_happened_either(
    held: Communicator, manual: FakeDaemon, name: str, how: str
) -> None:
    """The client finds out as it posts: the daemon has not taken it, or the socket does not."""
    if how != "hangs up":
        manual.send(m.Failure(0, name, "the end", taken=0))
    if how != "said":
        manual.hang_up()
    with pytest.raises(WancollError) as caught:
        held.all_reduce(np.ones(3), timeout=20)
    assert type(caught.value).__name__ == (name if how != "hangs up" else "PeerDaemonLost")


@pytest.mark.parametrize("name", cells(1, SAFE, MAYBE))
def test_the_daemon_says_so_of_an_open_call(held: Communicator, manual: FakeDaemon, name: str) -> None:
    x = np.ones(3)
    work = held.all_reduce(x, async_op=True)
    post = manual.next_post()
    manual.result_buffer(post)[:] = 0xEE
    manual.send(m.Failure(post.id, name, "what", cause="Evicted" if name == "OutcomeUnknown" else ""))
    with pytest.raises(BY_NAME[name]) as caught:
        work.wait(20)
    assert type(caught.value).__name__ == name
    assert type(caught.value.__cause__).__name__ == ("Evicted" if name == "OutcomeUnknown" else "NoneType")
    assert (x == 1).all()
    assert held._connection._over is None


@pytest.mark.parametrize("name", BY_NAME)
def test_the_connection_ends_while_it_is_open(held: Communicator, manual: FakeDaemon, name: str) -> None:
    """Whatever ends it: the others may have committed what the daemon had taken, and no more than that."""
    x, y = np.ones(3), np.ones(3)
    works = [held.all_reduce(each, async_op=True) for each in (x, y)]
    update = held.update_membership(async_op=True)
    manual.wait_for_posts(3)
    for post in manual.posts[:2]:
        manual.result_buffer(post)[:] = 0xEE
    manual.send(m.Failure(0, name, "the end", who="the daemon", taken=1))
    with pytest.raises(OutcomeUnknown, match=f"got {name}: the end") as caught:
        works[0].wait(20)
    assert type(caught.value.__cause__) is BY_NAME[name]
    for work in (works[1], update):
        with pytest.raises(BY_NAME[name], match="the daemon: the end"):
            work.wait(20)
    assert (x == 1).all()
    assert (y == 1).all()


@pytest.mark.parametrize("how", ["hangs up", "nonsense", "close", "a device"])
def test_the_connection_ends_without_a_word(
    held: Communicator, manual: FakeDaemon, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = np.ones(3)
    work = held.all_reduce(x, async_op=True)
    manual.next_post()
    causes = {
        "hangs up": "PeerDaemonLost",
        "nonsense": "ProtocolError",
        "close": "ConfigError",
        "a device": "DeviceError",
    }
    if how == "hangs up":
        manual.hang_up()
    elif how == "nonsense":
        manual.send(m.Ok())
    elif how == "close":
        held.close()
    else:

        def look(self: Placement) -> None:
            raise DeviceError("the device failed")

        monkeypatch.setattr(Placement, "look", look)
        until(work.done)
    with pytest.raises(OutcomeUnknown) as caught:
        work.wait(20)
    assert type(caught.value.__cause__).__name__ == causes[how]
    assert (x == 1).all()


def test_no_memory_of_a_call_that_was_open_at_the_end_is_used_again(held: Communicator, manual: FakeDaemon) -> None:
    """The daemon may still write there."""
    work = held.all_reduce(np.ones(1000), async_op=True)
    post, arena = manual.next_post(), held._connection.arena
    manual.hang_up()
    with pytest.raises(OutcomeUnknown):
        work.wait(20)
    del work
    gc.collect()
    leases = [arena.take(8000) for _ in range(3)]
    assert not {post.input_buffer, post.result_buffer} & {lease.block.offset for lease in leases}


@pytest.mark.parametrize("name", cells(2, DONE))
def test_when_it_is_committed(
    held: Communicator, manual: FakeDaemon, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A result for a device may not get there, or not in time."""
    work = held.all_reduce(np.ones(3), async_op=True)
    if name == "DeviceError":

        def commit(self: Placement, nbytes: int, attempt: int) -> None:
            raise DeviceError("the device failed")

        monkeypatch.setattr(Placement, "commit", commit)
        manual.answer(manual.next_post())
        with pytest.raises(DeviceError, match="is committed; this member's tensor has undefined contents"):
            work.wait(20)
        return
    manual.answer(manual.next_post())
    until(work.done)
    late = [TimeoutError("the result is committed, and still on its way to the device")]

    def order(self: Staging, to_device: Any, seconds: float | None) -> None:
        if late:
            raise late.pop()

    monkeypatch.setattr(Staging, "order", order)
    work._to_devices = [SimpleNamespace()]  # type: ignore[list-item]
    with pytest.raises(TimeoutError, match="is committed") as caught:
        work.wait(0.01)
    assert caught.value.work.wait(20).seq == 1


def test_run_comes_back_for_what_connecting_again_cures(monkeypatch: pytest.MonkeyPatch) -> None:
    """An OutcomeUnknown says of what: an operator's wish, or a program's mistake, ends it."""
    run_module: Any = importlib.import_module("wancoll.client.run")
    made: list[int] = []

    class Comm:
        name, rank, world_size = "me", 0, 1

        def __enter__(self) -> Any:
            made.append(1)
            return self

        def __exit__(self, *_: object) -> None:
            pass

    monkeypatch.setattr(run_module, "connect", lambda *_, **__: Comm())
    monkeypatch.setattr(run_module.time, "sleep", lambda _: None)
    for name in BY_NAME:
        made.clear()

        def train(_: Any, name: str = name) -> str:
            if len(made) < 3:
                raise OutcomeUnknown("open") from BY_NAME[name]("why")
            return "trained"

        if issubclass(BY_NAME[name], run_module.COMES_BACK):
            assert wancoll.run(train, "g") == "trained"
        else:
            with pytest.raises(OutcomeUnknown):
                wancoll.run(train, "g")
            assert len(made) == 1


def test_close_waits_for_who_sends(held: Communicator, manual: FakeDaemon) -> None:
    """Else it might write to what has the socket's number by then."""
    connection: Connection = held._connection
    with connection._posting:
        closing = in_thread(held.close)
        until(lambda: connection._over is not None)
        assert connection._channel.socket.fileno() >= 0
    closing()
    assert connection._channel.socket.fileno() == -1
