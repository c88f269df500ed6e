"""A client's session: what it does when the engine does not take what it is given."""

from __future__ import annotations

import socket
from types import SimpleNamespace
from typing import Any

import pytest

from tests.peer.test_member import data, epoch, post
from wancoll import resources
from wancoll.errors import ConfigError
from wancoll.failpoints import Failpoints
from wancoll.limits import DEFAULT
from wancoll.peer.core import commands as cmd
from wancoll.peer.session import Session
from wancoll.wire import messages as m


class Engine:
    """Takes everything but what a test makes it refuse."""

    def __init__(self) -> None:
        self.refuses: dict[str, Exception] = {}
        self.posted: list[int] = []

    def add_bell(self, _: int) -> None:
        if "bell" in self.refuses:
            raise self.refuses["bell"]

    def prepare(self, *_: Any, **__: Any) -> object:
        if "prepare" in self.refuses:
            raise self.refuses["prepare"]
        return object()

    def post(self, _: object, op_id: int, *__: Any, **___: Any) -> None:
        if "post" in self.refuses:
            raise self.refuses["post"]
        self.posted.append(op_id)


def session_with(engine: Engine, client: socket.socket) -> tuple[Session, list[m.FromPeer], list[int]]:
    """A session whose member is in an epoch, what it tells the master, and ids that the daemon waits for."""
    told: list[m.FromPeer] = []
    started: list[int] = []
    links = SimpleNamespace(member=lambda _: SimpleNamespace(numbers=lambda channel: {1: 100}), step=lambda event: None)
    host: Any = SimpleNamespace(
        config=SimpleNamespace(limits=DEFAULT),
        arena_bytes=1 << 20,
        engine=engine,
        links=links,
        control=SimpleNamespace(send=told.append),
        failpoints=Failpoints(""),
        started=lambda engine_id, session: started.append(engine_id),
    )
    stream: Any = SimpleNamespace(send=lambda data: None, end=lambda: None, socket=client)
    session = Session(host, stream, m.Attach(1, "g", "m1", 2, 1, 4711), 100)
    session.member.joined(1, 1)
    session.run(session.member.enter_epoch(epoch(1, 1, 2), 0.0))
    session.run(session.member.links_ready(1, [1, 2]))
    told.clear()
    return session, told, started


@pytest.mark.parametrize("where", ["prepare", "post"])
@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (ConfigError("op 100 cannot be posted", got="seq 1"), "op 100 cannot be posted"),
        (MemoryError("op 100 cannot be posted"), "op 100 cannot be posted"),
        (MemoryError(), "MemoryError"),
        (OverflowError("integer 65536 does not fit 'uint16_t'"), "does not fit"),
        (OSError(12, "Cannot allocate memory"), "Cannot allocate memory"),
    ],
    ids=lambda value: type(value).__name__,
)
async def test_what_the_engine_refuses_ends_the_operation_and_no_more(where: str, bad: Exception, says: str) -> None:
    engine = Engine()
    client, daemon = socket.socketpair()
    session, told, started = session_with(engine, client)
    engine.refuses[where] = bad
    call = post(1, data())
    session.run(session.member.post(call, session.member.call(call), 1.0))
    (given_up,) = told
    assert isinstance(given_up, m.GiveUp)
    assert given_up.seqs == [1]
    assert given_up.reason.startswith("m1: the engine refuses it: ")
    assert says in given_up.reason
    assert started == []
    engine.refuses.clear()
    call = post(2, data())
    session.run(session.member.post(call, session.member.call(call), 1.0))
    assert started == engine.posted == [101]
    void = m.Void(1, "OperationAborted", given_up.reason, {})
    commands = session.member.enter_epoch(epoch(2, 1, 2, voids=[void]), 2.0)
    ended = [c.message for c in commands if isinstance(c, cmd.ToClient) and isinstance(c.message, m.Failure)]
    assert [(one.id, one.error) for one in ended] == [(1, "OperationAborted")]
    client.close()
    daemon.close()


@pytest.mark.parametrize("out", [False, True])
async def test_a_bug_in_a_member_that_is_out_is_no_word_about_another_by_its_name(out: bool) -> None:
    client, daemon = socket.socketpair()
    session, told, _ = session_with(Engine(), client)
    if out:
        session.run(session.member.hear(m.Evicted("g", session.member.mid, "silent", 0), 1.0, 1, 1))
    told.clear()
    with session.alone("something"):
        raise RuntimeError("a bug")
    assert session.member.over
    assert [type(one) for one in told] == ([] if out else [m.Leave])
    client.close()
    daemon.close()


@pytest.mark.parametrize("bad", [OSError(28, "No space left on device"), MemoryError("bell 9 cannot be added")])
async def test_a_bell_that_the_engine_does_not_take_keeps_nothing(bad: Exception) -> None:
    """The door tells the client: there is no room for it."""
    engine = Engine()
    engine.refuses["bell"] = bad
    client, daemon = socket.socketpair()
    before = resources.of_process()["fds"]
    with pytest.raises(type(bad)):
        session_with(engine, client)
    assert resources.of_process()["fds"] == before
    client.close()
    daemon.close()
