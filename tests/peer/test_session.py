"""A client's session: what it does when the engine does not take what it is given."""

from __future__ import annotations

import contextlib
import mmap
import queue
import re
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio
import trio.testing
from msgspec.structs import replace

from tests.peer.test_grace import SUM, zeros_for
from tests.peer.test_member import data, epoch, post
from wancoll import resources
from wancoll._native import ffi
from wancoll.collective import Descriptor, DType, Kind
from wancoll.errors import ConfigError, ProtocolError
from wancoll.failpoints import Failpoints
from wancoll.limits import BLOCK, DEFAULT
from wancoll.native.engine import Done
from wancoll.peer import arena
from wancoll.peer.arena import ZeroContribution
from wancoll.peer.core import commands as cmd
from wancoll.peer.core import links
from wancoll.peer.core.op import OpState
from wancoll.peer.session import Session
from wancoll.wire import messages as m
from wancoll.wire.framing import Decoder


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

    def cancel(self, op_id: int) -> None:
        assert op_id in self.posted

    def release(self, op_id: int) -> bool:
        assert op_id in self.posted
        return False


def session_with(engine: Engine, client: socket.socket) -> tuple[Session, list[m.FromPeer], list[int]]:
    """A session whose member is in an epoch, what it tells the master, and ids that the daemon waits for."""
    told: list[m.FromPeer] = []
    started: list[int] = []
    ends = SimpleNamespace(numbers=lambda channel: {1: 100}, stamp=lambda channel: 1 << 16)
    links = SimpleNamespace(member=lambda _: ends, ask=lambda owner, wish: None)
    host: Any = SimpleNamespace(
        config=SimpleNamespace(limits=DEFAULT),
        arena_bytes=1 << 20,
        engine=engine,
        links=links,
        control=SimpleNamespace(send=told.append),
        failpoints=Failpoints(""),
        started=lambda engine_id, session: started.append(engine_id),
        stop_unheard=lambda: None,
        now=trio.current_time,
        operations=None,
        recorder=None,
        touched=set(),
        lease_is_over=lambda: False,
        measuring=False,
        caller=lambda *_: SimpleNamespace(clear=lambda: None, next=lambda number: None),
    )
    stream: Any = SimpleNamespace(send=lambda data: None, end=lambda: None, socket=client)
    session = Session(host, stream, m.Attach(1, "g", "m1", 2, 1, 4711), 100)
    session.member.joined(1, 1)
    session.run(session.member.enter_epoch(epoch(1, 1, 2), 0.0))
    session.run(session.member.links_ready(1, [1, 2]))
    told.clear()
    return session, told, started


def made(session: Session, call: m.Post) -> None:
    """The client makes the call, at 1.0 s."""
    session.run(session.member.post(call, session.member.call(call), 1.0))


@pytest.fixture
def client() -> Iterator[socket.socket]:
    client, daemon = socket.socketpair()
    with client, daemon:
        yield client


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
async def test_what_the_engine_refuses_ends_the_operation_and_no_more(
    where: str, bad: Exception, says: str, client: socket.socket
) -> None:
    engine = Engine()
    session, told, started = session_with(engine, client)
    engine.refuses[where] = bad
    made(session, post(1, data()))
    (given_up,) = told
    assert isinstance(given_up, m.GiveUp)
    assert given_up.seqs == [1]
    assert given_up.reason.startswith("m1: the engine refuses it: ")
    assert says in given_up.reason
    assert started == []
    engine.refuses.clear()
    made(session, post(2, data()))
    assert started == engine.posted == [101]
    void = m.Void(1, "OperationAborted", given_up.reason, {})
    commands = session.member.enter_epoch(epoch(2, 1, 2, voids=[void]), 2.0)
    ended = [c.message for c in commands if isinstance(c, cmd.ToClient) and isinstance(c.message, m.Failure)]
    assert [(one.id, one.error) for one in ended] == [(1, "OperationAborted")]


@pytest.mark.parametrize("out", [False, True])
async def test_a_bug_in_a_member_that_is_out_is_no_word_about_another_by_its_name(
    out: bool, client: socket.socket
) -> None:
    session, told, _ = session_with(Engine(), client)
    if out:
        session.run(session.member.hear(m.Evicted("g", session.member.mid, "silent", 0), 1.0, 1, 1))
    told.clear()
    with session.alone("something"):
        raise RuntimeError("a bug")
    assert session.member.over
    assert [type(one) for one in told] == ([] if out else [m.Leave])


async def test_who_leaves_before_a_new_master_has_answered_its_report_says_so(client: socket.socket) -> None:
    """All else waits for the answer: that master would wait for the member."""
    session, told, _ = session_with(Engine(), client)
    session.run(session.member.reconnected(2, 99))
    call = post(1, replace(SUM, grace=1.0))
    made(session, call)
    session.run(session.member.leave("its script is done"))
    assert [type(one) for one in told] == [m.Report, m.Leave]


@pytest.mark.parametrize(("input_buffer", "refused"), [(8, True), (12, False)])
async def test_a_table_of_what_is_final_has_a_word_for_each_block(
    input_buffer: int, refused: bool, client: socket.socket
) -> None:
    """The engine writes there: none of it may lie over what it reads."""
    session, _, _ = session_with(Engine(), client)
    table = 4 * BLOCK
    call = replace(post(1, data(count=3 * BLOCK // 4)), input_buffer=table + input_buffer, result_buffer=0, shown=table)
    with pytest.raises(ProtocolError, match="input and shown overlap") if refused else contextlib.nullcontext():
        session._check_regions(call, session.member.call(call))


async def test_the_engine_says_notes_over_the_links_of_now(client: socket.socket) -> None:
    """One that was dialled anew has another number, also within one epoch."""
    session, _, _ = session_with(Engine(), client)
    made(session, post(1, data()))
    [op] = session.member.collectives.open.values()
    op.hearers = (2,)
    for number in (100, 101):
        session.links.links = {(2, links.COLLECTIVES): SimpleNamespace(number=number)}  # type: ignore[dict-item]
        session._links_say(links.LinksUp(links.MemberLinks(mid=1), 1))
        found = session._who_hear(op)
        assert found is not None
        assert list(found._links) == [number]


@pytest.mark.parametrize("bad", [OSError(28, "No space left on device"), MemoryError("bell 9 cannot be added")])
async def test_a_bell_that_the_engine_does_not_take_keeps_nothing(bad: Exception, client: socket.socket) -> None:
    """The door tells the client: there is no room for it."""
    engine = Engine()
    engine.refuses["bell"] = bad
    before = resources.of_process()["fds"]
    with pytest.raises(type(bad)):
        session_with(engine, client)
    assert resources.of_process()["fds"] == before


async def test_results_are_handed_over_beside_the_event_loop_and_told_after(
    monkeypatch: pytest.MonkeyPatch, client: socket.socket
) -> None:
    """While they are copied the daemon serves all others; nothing of the client's is told or closed before the end."""
    nbytes, sent, goes_on = 20_000, [], threading.Event()
    decoder: Decoder[Any] = Decoder(m.FromDaemon, 1 << 20)
    session, _, _ = session_with(Engine(), client)
    copy = ZeroContribution._copy

    def once_the_loop_goes_on(*args: Any) -> None:
        assert goes_on.wait(10)
        copy(*args)

    monkeypatch.setattr(ZeroContribution, "_copy", once_the_loop_goes_on)
    monkeypatch.setattr(arena, "_PIECE", 4096)
    monkeypatch.setattr(session._stream, "send", lambda data: sent.extend(decoder.feed(data)))
    call = replace(SUM, count=nbytes // 4)
    session.run(session.member.hear(zeros_for(1, call=call), 1.0, 1, 1))
    [op] = session.member.collectives.open.values()
    result = bytes(i % 251 for i in range(nbytes))
    ffi.memmove(ffi.cast("char *", op.memory.result_buffer), result, nbytes)
    session.op_finished(Done(op.engine_id, 7, 0))
    session.run(session.member.hear(m.Commit("g", 1, 1, 1), 2.0, 1, 1))
    assert sent == []
    async with trio.open_nursery() as nursery:
        monkeypatch.setattr(session._daemon, "soon", nursery.start_soon, raising=False)
        late = replace(post(1, call), input_buffer=0, result_buffer=65536)
        made(session, late)
        session.tell(m.Slow(0, "later"))
        await trio.testing.wait_all_tasks_blocked(0.01)
        assert (sent, session.idle) == ([], False)
        goes_on.set()
        with trio.fail_after(10):
            await session.wait_idle()
        assert session.arena._map[65536 : 65536 + nbytes] == result
        assert session.arena._map[65536 + nbytes] == 0
        assert [type(each) for each in sent] == [m.Result, m.Slow]
        assert (sent[0].id, sent[0].counted) == (1, False)


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("writes", [True, False])
async def test_a_client_that_writes_between_two_looks_at_its_input_is_told_to_the_master(
    monkeypatch: pytest.MonkeyPatch, writes: bool, at_once: bool, client: socket.socket
) -> None:
    """They begin with the second attempt. While one is under way in a thread the memory stays mapped."""
    session, told, _ = session_with(Engine(), client)
    if not at_once:
        monkeypatch.setattr("wancoll.peer.session._LOOK_AT_ONCE", 0)
    call = replace(post(1, data(count=1000)), input_buffer=0, result_buffer=65536)
    async with trio.open_nursery() as nursery:
        monkeypatch.setattr(session._daemon, "soon", nursery.start_soon, raising=False)
        made(session, call)
        [op] = session.member.collectives.open.values()
        for number in 2, 3:
            if writes:
                session.arena._map[3999] = number
            session.op_cancelled(op.engine_id)
            session.run(session.member.enter_epoch(epoch(number, 1, 2), float(number)))
            session.run(session.member.links_ready(number, [1, 2]))
            assert not session.idle
            with trio.fail_after(10):
                while session._looks:  # noqa: ASYNC110
                    await trio.sleep(0.001)
            assert not any(isinstance(one, m.Written) for one in told) or number == 3
    assert [one for one in told if isinstance(one, m.Written)] == ([m.Written("g", 1, 3, str(op))] if writes else [])


@pytest.mark.parametrize("kind", [Kind.reduce_scatter, Kind.all_to_all])
async def test_blocks_of_members_that_are_lost_are_no_writing_to_the_input(kind: Kind, client: socket.socket) -> None:
    """Each epoch reads less of the input; looks at it compare all that any epoch may read."""
    session, told, _ = session_with(Engine(), client)
    session.run(session.member.enter_epoch(epoch(2, 1, 2, 3, 4), 1.0))
    session.run(session.member.links_ready(2, [1, 2, 3, 4]))
    call = replace(post(1, Descriptor(kind, DType.float32, count=100), epoch=2), input_buffer=0, result_buffer=65536)
    made(session, call)
    session.arena._map[:1600] = bytes(i % 251 for i in range(1600))
    [op] = session.member.collectives.open.values()
    for number, *mids in (3, 1, 2, 3), (4, 1, 2):
        session.op_cancelled(op.engine_id)
        session.run(session.member.enter_epoch(epoch(number, *mids), float(number)))
        session.run(session.member.links_ready(number, mids))
    assert (op.attempts, [one for one in told if isinstance(one, m.Written)]) == (3, [])


async def test_what_changes_after_the_end_is_the_clients_own_affair(
    monkeypatch: pytest.MonkeyPatch, client: socket.socket
) -> None:
    """A look in a thread may end when the client knows the outcome, and has its tensor back."""
    session, told, _ = session_with(Engine(), client)
    monkeypatch.setattr("wancoll.peer.session._LOOK_AT_ONCE", 0)
    call = replace(post(1, data(count=1000)), input_buffer=0, result_buffer=65536)
    async with trio.open_nursery() as nursery:
        monkeypatch.setattr(session._daemon, "soon", nursery.start_soon, raising=False)
        made(session, call)
        [op] = session.member.collectives.open.values()
        op.attempts, op.input_hash = 2, 1  # of an earlier look: other bytes
        session._start(op, beside=False)
        session.op_finished(Done(op.engine_id, 7, 0))
        session.run(session.member.hear(m.Commit("g", 1, 1, 1), 2.0, 1, 1))
        assert not session.idle
    assert not any(isinstance(one, m.Written) for one in told)
    assert session.idle


def test_zeros_that_are_only_read_take_no_memory() -> None:
    def taken() -> int:
        return sum(int(kib) for kib in re.findall(r"Rss(?:Anon|Shmem):\s+(\d+)", Path("/proc/self/status").read_text()))

    nbytes = 32 << 20
    zeros = ZeroContribution(nbytes, 4096)
    before, buffer = taken(), ffi.buffer(ffi.cast("char *", zeros.input_buffer), nbytes)
    assert {buffer[i] for i in range(0, nbytes, mmap.PAGESIZE)} == {b"\0"}
    assert taken() - before < 4 << 10


def test_what_a_daemon_took_part_in_is_given_back_beside_the_event_loop() -> None:
    class Map:
        def close(self) -> None:
            by.put(threading.get_ident())

    by: queue.Queue[int] = queue.Queue()
    zeros = ZeroContribution(1, 1)
    zeros._map = Map()  # type: ignore[assignment]
    del zeros
    assert by.get(timeout=10) != threading.get_ident()


async def test_what_waits_for_a_link_is_called_once_its_client_has_filled_it(client: socket.socket) -> None:
    """As in the engine: else the others count as late with a call that nobody has made (R11)."""
    session, _, _ = session_with(Engine(), client)
    session.run(session.member.enter_epoch(epoch(2, 1, 2), 1.0))
    call = replace(post(1, data(), epoch=2), filled=8192)
    session._post(call)
    [op] = session.member.collectives.open.values()
    assert (op.state, session.lacks_input(op), session.called) == (OpState.waiting, True, 0)
    session.arena._map[8192] = 1
    assert (session.lacks_input(op), session.called) == (False, 1)


async def test_a_grace_time_begins_when_the_input_is_there(client: socket.socket) -> None:
    """Whoever still fills its own has not waited for anybody yet (R11, R20)."""
    session, said, _ = session_with(Engine(), client)
    session._post(replace(post(1, SUM), filled=8192))
    session.look()
    assert said == []
    session.run(session.member.enter_epoch(epoch(2, 1, 2), 1.0))
    assert said == []
    session.arena._map[8192] = 1
    session.look()
    session.look()
    assert said == [m.CalledWithGrace("g", 1, 2, 1, SUM)]
    session.run(session.member.enter_epoch(epoch(3, 1, 2), 2.0))
    assert said[1:] == [m.CalledWithGrace("g", 1, 3, 1, SUM)]
